//! What training programs put before the names of a model's tensors: `module.`, `_orig_mod.`, `app.`, `model.`.
//!
//! Most of these words stand in no name of a repository of Hugging Face. `model.` does, so that it is taken for a wrapper only
//! where what follows begins like the name of a whole model (`model.model.layers.0.…`, `model.lm_head.weight`).

/// Words that wrap a model and are no part of its names.
const WRAPPERS: [&str; 14] = [
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "app",
    "state",
    "state_dict",
    "model_state_dict",
    "policy",
    "actor",
    "network",
    "net",
    "module_dict",
    "_forward_module",
];

/// PEFT's wrapper of a model that is trained with an adapter.
const PEFT: &str = "base_model.model.";

/// Wrappers that no model's own names have, whatever the model is.
const CERTAIN: [&str; 5] =
    ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"];

/// Wrappers that stand within names as well: those of single layers.
const INNER: [&str; 3] = ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// The word that may be either.
const MODEL: &str = "model";

/// Words with which the names of a whole model begin, and which follow `model.` in no repository. Others do both:
/// `language_model`, `encoder`, `decoder`, `transformer`.
const ROOTS: [&str; 4] = ["model", "lm_head", "gpt_neox", "bert"];

/// The prefix that all these names have and the names of repositories have not, with its last dot. `None` if there is none.
pub(crate) fn common_prefix(names: &[&str]) -> Option<String> {
    let mut start = 0;
    while let Some(word) = shared_word(names, start) {
        if is_in_peft(names, start) {
            start += PEFT.len();
            continue;
        }
        let rest = start + word.len() + 1;
        let wraps_model = word == MODEL
            && names.iter().any(|name| {
                let first = name[rest..].split('.').next().unwrap_or_default();
                ROOTS.contains(&first) || WRAPPERS.contains(&first)
            });
        if !WRAPPERS.contains(&word) && !wraps_model {
            break;
        }
        start = rest;
    }
    (start > 0).then(|| names[0][..start].to_owned())
}

/// Whether all names go on with PEFT's wrapper here. It is a part of the names of an adapter that was saved by itself.
fn is_in_peft(names: &[&str], start: usize) -> bool {
    const SAVED: [&str; 4] = [".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B"];
    let is_inside = |name: &&str| name[start..].strip_prefix(PEFT).is_some_and(|rest| !rest.is_empty());
    names.iter().all(is_inside) && !names.iter().any(|name| SAVED.iter().any(|end| name.ends_with(end)))
}

/// The word at this byte of all names, if it is the same in all and more follows it.
fn shared_word<'a>(names: &[&'a str], start: usize) -> Option<&'a str> {
    let first = names.first()?.get(start..)?;
    let (word, _) = first.split_once('.')?;
    let with_dot = &first[..=word.len()];
    names.iter().all(|name| name.get(start..).is_some_and(|rest| rest.starts_with(with_dot))).then_some(word)
}

/// A rename that takes the prefix and the wrappers within names away, as `--source-rename` takes it: `REGEX=>TO`. Also whether it
/// is certain that these words are wrappers: others are words of some models, too.
pub fn proposed_rename(names: &[&str]) -> Option<(String, bool)> {
    let prefix = common_prefix(names);
    let outer = prefix.as_deref().unwrap_or_default().replace(PEFT, "module.");
    let mut outer = outer.split_terminator('.').filter(|word| *word != MODEL).peekable();
    let is_certain = (prefix.is_none() || outer.peek().is_some()) && outer.all(|word| CERTAIN.contains(&word));
    let is_inner = |name: &&str| name.split('.').any(|word| INNER.contains(&word));
    let rest = prefix.as_deref().map_or(0, str::len);
    let inner = names.iter().any(|name| is_inner(&&name[rest..]));
    let escaped = prefix.map(|prefix| format!("^{}", regex::escape(&prefix)));
    let inner = inner.then(|| format!(r"\b({})\.", INNER.join("|")));
    let parts: Vec<String> = escaped.into_iter().chain(inner).collect();
    (!parts.is_empty()).then(|| (format!("{}=>", parts.join("|")), is_certain))
}

/// First words of the names of optimizer state, as trainers save it beside the model.
const OPTIMIZERS: [&str; 8] = [
    "optimizer",
    "optimizers",
    "optim",
    "optimizer_state",
    "optimizer_state_dict",
    "optimizer_states",
    "optimizers_state_dict",
    "opt_state",
];

/// Whether a tensor is of the optimizer's state, possibly within a state that holds the model too (`app.optimizer.…`, or
/// `chained_0.optimizer.…` of Megatron-Core).
pub(crate) fn is_optimizer_state(name: &str) -> bool {
    name.split('.').take(2).any(|word| OPTIMIZERS.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrappers_are_found_and_names_of_repositories_are_left_alone() {
        let cases: [(&[&str], Option<&str>); 18] = [
            (&["model.layers.0.mlp.weight", "model.norm.weight"], None),
            (&["model.layers.0.mlp.weight", "lm_head.weight"], None),
            (&["model.model.layers.0.mlp.weight", "model.lm_head.weight"], Some("model.")),
            (&["model.model.layers.0.mlp.weight", "model.model.norm.weight"], Some("model.")),
            (&["module.model.layers.0.mlp.weight", "module.lm_head.weight"], Some("module.")),
            (&["app.model._orig_mod.model.norm.weight"], Some("app.model._orig_mod.")),
            (&["model._orig_mod.layers.0.w", "model._orig_mod.norm"], Some("model._orig_mod.")),
            (&["module.a", "modules.a"], None),
            // Repositories whose names all begin with `model.`, since the head is tied.
            (&["model.language_model.norm.weight", "model.visual.merger.norm.weight"], None),
            (&["model.encoder.layers.0.w", "model.decoder.layers.0.w"], None),
            (&["model.transformer.wte.weight", "model.transformer.ln_f.weight"], None),
            (&["model.transformer.wte.weight", "model.lm_head.weight"], Some("model.")),
            (&["base_model.model.model.norm.weight", "base_model.model.lm_head.weight"], Some("base_model.model.")),
            (&["module.base_model.model.layers.0.q.lora_A.default.weight"], Some("module.base_model.model.")),
            // An adapter that was saved by itself has the prefix in its names.
            (&["base_model.model.lm_head.weight", "base_model.model.q.lora_A.weight"], None),
            (&["base_model.model"], None),
            (&["module"], None),
            (&[], None),
        ];
        for (names, expected) in cases {
            assert_eq!(common_prefix(names).as_deref(), expected, "{names:?}");
        }
    }

    #[test]
    fn the_proposed_rename_takes_away_what_wraps() {
        let names = ["model.model.layers.0._fsdp_wrapped_module.w", "model.lm_head.weight"];
        let (rule, is_certain) = proposed_rename(&names).unwrap();
        assert!(!is_certain, "a model may have its layers under the word model");
        let (pattern, to) = rule.split_once("=>").unwrap();
        let pattern = regex::Regex::new(pattern).unwrap();
        let renamed = names.map(|name| pattern.replace_all(name, to).into_owned());
        assert_eq!(renamed, ["model.layers.0.w", "lm_head.weight"]);
        assert_eq!(proposed_rename(&["model.layers.0.w"]), None);
        for (name, expected) in [
            ("base_model.model.model.norm.w", true),
            ("model._orig_mod.layers.0.w", true),
            ("model.layers.0._orig_mod.w", true),
            ("net.blocks.0.w", false),
            ("net._orig_mod.blocks.0.w", false),
        ] {
            assert_eq!(proposed_rename(&[name]).map(|(_, is_certain)| is_certain), Some(expected), "{name}");
        }
    }
}
