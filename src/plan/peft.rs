//! The names of a model that PEFT has wrapped for training: base and adapter in one checkpoint.
//!
//! | name | what it is |
//! | --- | --- |
//! | `M.base_layer.P` | the base's tensor `M.P` |
//! | `M.original_module.P` | the base's, in whose place the adapter has another |
//! | `M.modules_to_save.NAME.P` | that of the adapter `NAME` |
//! | `M.lora_A.NAME.weight`, `M.lora_embedding_A.NAME`, … | a matrix of the adapter `NAME` |
//! | `M.lora_A.weight`, … | the same of an adapter that was saved by itself |
//!
//! All of them may begin with `base_model.model.`. They are the names of no model: a layout that goes by the names of a repository
//! takes them merged, or refuses them.

use std::{collections::BTreeSet, path::Path};

use ckfs_checkpoint::{Checkpoint, json};
use ckfs_tensor::TensorId;
use serde_json::Value;

use super::{
    Layout, ViewOptions,
    lora::{DEFAULT, PREFIX},
    naming::words_of,
    problem::{PlanError, Problem},
};

/// A tensor of a wrapped model.
#[derive(Debug, PartialEq, Eq)]
enum Wrapped<'n> {
    /// The base's, under its own name.
    Base(String),
    /// The base's, in whose place the adapter has another.
    Replaced,
    /// The adapter's: the name of the adapter, which one that was saved by itself has not, and that of the tensor in a saved one.
    Adapter(Option<&'n str>, String),
}

/// What PEFT's words in a name say. `None` if there are none.
fn wrapped(name: &str) -> Option<Wrapped<'_>> {
    let own = name.strip_prefix(PREFIX).unwrap_or(name);
    let words: Vec<&str> = words_of(own).collect();
    // A module stands before each of them.
    let at = (1..words.len()).find(|at| {
        let is_followed = words.get(at + 1).is_some_and(|next| !next.bytes().all(|byte| byte.is_ascii_digit()));
        match words[*at] {
            "base_layer" | "original_module" => is_followed,
            "modules_to_save" => words.len() > at + 2,
            word => is_matrix(word),
        }
    })?;
    let joined = |words: &[&[&str]]| words.concat().join(".");
    let (before, after) = (&words[..at], &words[at + 1..]);
    Some(match words[at] {
        "base_layer" => {
            Wrapped::Base(words.iter().copied().filter(|word| *word != "base_layer").collect::<Vec<_>>().join("."))
        }
        "original_module" => Wrapped::Replaced,
        "modules_to_save" => Wrapped::Adapter(Some(after[0]), format!("{PREFIX}{}", joined(&[before, &after[1..]]))),
        word => match after {
            [] | ["weight" | "bias"] => Wrapped::Adapter(None, format!("{PREFIX}{own}")),
            [adapter, rest @ ..] => {
                // DoRA's vector has its own word for a weight in training only.
                let rest = if word == "lora_magnitude_vector" { &[] } else { rest };
                Wrapped::Adapter(Some(adapter), format!("{PREFIX}{}", joined(&[before, &[word], rest])))
            }
        },
    })
}

fn is_matrix(word: &str) -> bool {
    ["lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"].contains(&word)
}

/// Refuses the names of a wrapped model among the tensors that a layout sees, if the layout goes by the names of repositories.
pub(super) fn check_unmerged(original: &Checkpoint, part: &Checkpoint, options: &ViewOptions) -> Result<(), PlanError> {
    if matches!(options.layout, Layout::Stored | Layout::File(_)) || options.merge_lora.is_some() {
        return Ok(());
    }
    let mut found = part.tensors().filter_map(|(_, info)| Some((info.name, wrapped(info.name)?)));
    let Some((name, first)) = found.next() else { return Ok(()) };
    let has_code = part.config().is_some_and(|config| config.get("auto_map").is_some());
    if has_code && !original.tensors().any(|(_, info)| info.name.contains(PREFIX)) {
        // Phi-4-multimodal has adapters as a part of the model, under these names.
        return Ok(());
    }
    let is_alone =
        matches!(first, Wrapped::Adapter(None, _)) && !found.any(|(_, it)| !matches!(it, Wrapped::Adapter(None, _)));
    let reason = if !is_alone {
        "have the names of a model in PEFT's training: --merge-lora self merges the adapter into the base, --layout stored shows both \
         as they are stored"
    } else if part.config().is_some() {
        "are those of an adapter, which is not the model: mount the base that it was trained on, with --merge-lora and this directory, \
         or with --lora; --layout stored shows the adapter as it is stored"
    } else {
        return Ok(());
    };
    let count = part.tensors().filter(|(_, info)| wrapped(info.name).is_some()).count();
    let all = part.tensors().len();
    let reason = format!("{name}: {count} of {all} tensors {reason}");
    Err(Problem::File { file: "names".to_owned(), reason }.into())
}

/// A tensor of a base under the name that PEFT gives it in training, if there is one.
pub(super) fn base_layer(checkpoint: &Checkpoint) -> Option<&str> {
    let mut names = checkpoint.tensors().map(|(_, info)| info.name);
    names.find(|name| matches!(wrapped(name), Some(Wrapped::Base(_))))
}

/// Files of an adapter, which describe no merged model.
fn is_of_adapter(path: &str) -> bool {
    path.starts_with("lora_adapter/") || path.starts_with("adapter_")
}

/// The tensors of an adapter, under the names of a saved one, and its configuration.
pub(super) struct AdapterTensors {
    pub(super) tensors: Vec<(TensorId, String)>,
    pub(super) config: Value,
    /// Where the tensors are, and the configuration.
    pub(super) file: String,
    pub(super) config_file: String,
}

/// The base in a training checkpoint alone, under the names of its model, and the adapter beside it; `named` is the checkpoint under
/// the names that source renames give.
///
/// # Errors
/// The reason: there is none, there are several, or nothing says how it is merged.
pub(super) fn own_adapter(
    named: &Checkpoint,
    warnings: &mut Vec<String>,
) -> Result<(Checkpoint, AdapterTensors), String> {
    let of_adapters = named.tensors().filter_map(|(id, info)| match wrapped(info.name)? {
        Wrapped::Adapter(adapter, name) => Some((id, adapter, name)),
        Wrapped::Base(_) | Wrapped::Replaced => None,
    });
    let of_adapters: Vec<_> = of_adapters.collect();
    let adapters: BTreeSet<&str> = of_adapters.iter().filter_map(|(_, adapter, _)| *adapter).collect();
    let chosen = match adapters.first() {
        None => {
            let found = if of_adapters.is_empty() { "none" } else { "an adapter that was saved by itself" };
            return Err(format!(
                "expected tensors as M.lora_A.{DEFAULT}.weight beside those of the base, found {found}: a directory with \
                 adapter_config.json is merged into its base with --merge-lora ADAPTER_DIR"
            ));
        }
        Some(_) if adapters.contains(DEFAULT) => DEFAULT,
        Some(one) if adapters.len() == 1 => one,
        Some(_) => {
            return Err(format!(
                "expected one adapter, or one called {DEFAULT}, found {}: --exclude leaves out the tensors of the others",
                adapters.iter().copied().collect::<Vec<_>>().join(", ")
            ));
        }
    };
    let others: Vec<&str> = adapters.iter().copied().filter(|adapter| *adapter != chosen).collect();
    if !others.is_empty() {
        warnings.push(format!("merge-lora: {chosen} is merged, and the adapter {} is not", others.join(", ")));
    }
    let of_chosen = of_adapters.into_iter().filter(|(_, adapter, _)| *adapter == Some(chosen));
    let tensors = of_chosen.map(|(id, _, name)| (id, name)).collect();
    // A tensor that the adapter has whole is merged in the place of the base's.
    let own = |name: &str| match wrapped(name) {
        Some(Wrapped::Base(name)) => Some(name),
        Some(Wrapped::Replaced) => {
            let own = name.strip_prefix(PREFIX).unwrap_or(name);
            Some(own.replacen(".original_module.", ".", 1))
        }
        Some(Wrapped::Adapter(..)) => None,
        None => Some(name.strip_prefix(PREFIX).unwrap_or(name).to_owned()),
    };
    let base = named.without_adapter(&is_of_adapter, own).map_err(|reasons| reasons.join("; "))?;
    let (config, config_file) = config(named)?;
    Ok((base, AdapterTensors { tensors, config, file: named.label().to_owned(), config_file }))
}

/// The `adapter_config.json` of a training checkpoint: beside the weights, in verl's directory of the adapter, or beside the
/// configuration that completes the checkpoint.
fn config(checkpoint: &Checkpoint) -> Result<(Value, String), String> {
    const NAME: &str = "adapter_config.json";
    const BYTES_MAX: u64 = 64 << 20;
    let is_it = |path: &str| {
        let path = Path::new(path);
        let is_near =
            path.parent().is_none_or(|parent| parent.as_os_str().is_empty() || parent.ends_with("lora_adapter"));
        is_near && path.file_name().is_some_and(|name| name == NAME)
    };
    let found =
        checkpoint.files().iter().find_map(|file| Some((file.path.clone(), file.file.filter(|_| is_it(&file.path))?)));
    let (text, label) = if let Some((path, id)) = found {
        (checkpoint.source().read_whole(id, BYTES_MAX).map_err(|reason| format!("{path}: {reason}"))?, path)
    } else {
        let companion = checkpoint.companion();
        let beside = companion.and_then(|companion| companion.files.iter().find(|(path, _)| path == NAME));
        let (path, text) = beside.ok_or_else(|| {
            format!("expected {NAME}, which says lora_alpha, beside the weights, in lora_adapter/ or in --config-from, found none")
        })?;
        (text.to_vec(), path.clone())
    };
    let config = json::parse(&text).map_err(|error| format!("{label}: {error}"))?;
    Ok((config, label))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_peft_tell_base_and_adapter() {
        let base = |name: &str| Some(Wrapped::Base(name.to_owned()));
        let of = |adapter, name: &str| Some(Wrapped::Adapter(adapter, format!("{PREFIX}{name}")));
        let rows = [
            ("base_model.model.model.layers.0.q.base_layer.weight", base("model.layers.0.q.weight")),
            ("model.layers.0.q.base_layer.weight", base("model.layers.0.q.weight")),
            ("base_model.model.q.base_layer.weight.absmax", base("q.weight.absmax")),
            ("base_model.model.q.lora_A.default.weight", of(Some("default"), "q.lora_A.weight")),
            ("q.lora_B.train.bias", of(Some("train"), "q.lora_B.bias")),
            ("q.lora_A.weight", of(None, "q.lora_A.weight")),
            ("base_model.model.e.lora_embedding_A.default", of(Some("default"), "e.lora_embedding_A")),
            ("e.lora_embedding_A", of(None, "e.lora_embedding_A")),
            ("q.lora_magnitude_vector.default.weight", of(Some("default"), "q.lora_magnitude_vector")),
            ("lm_head.modules_to_save.default.weight", of(Some("default"), "lm_head.weight")),
            ("lm_head.original_module.weight", Some(Wrapped::Replaced)),
            ("base_model.model.model.norm.weight", None),
            // A module of a model of images.
            ("base_layer.0.weight", None),
            ("backbone.base_layer.0.weight", None),
            ("model.layers.0.attn.w_lora.lora.0.weight", None),
        ];
        for (name, expected) in rows {
            assert_eq!(wrapped(name), expected, "{name}");
        }
    }
}
