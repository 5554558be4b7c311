//! Which layout of the program a checkpoint has, by a leaf that every checkpoint of that layout has.

use ckfs_checkpoint::Checkpoint;

use super::super::{embedded::Embedded, layout_file::StoredNames};

/// Words of names of a training state that is not the model's weights.
const STATE_WORDS: [&str; 20] = [
    "opt_state",
    "optimizer",
    "optim",
    "mu",
    "nu",
    "exp_avg",
    "exp_avg_sq",
    "fp32_param",
    "step",
    "iteration",
    "rng_state",
    // Of NNX modules: streams of random numbers, and the state of quantized training.
    "rngs",
    "rng",
    "aqt",
    "opt_param_scheduler",
    "lr_scheduler",
    "scheduler",
    "ema",
    // Of torchtitan.
    "ntokens_seen",
    "dataloader",
];

/// The collection that holds most leaves of MaxText. Some programs leave its name out.
const COLLECTION: &str = "params.";

/// The last word of each leaf in a tree of NNX, whose variables hold their arrays under this name.
const VALUE: &str = ".value";

/// Whether a name is of a training state rather than of the weights.
fn is_state(name: &str) -> bool {
    name.split('.').any(|word| STATE_WORDS.contains(&word)) || name.ends_with("_extra_state")
}

/// The layouts of which the checkpoint may be, and the names under which it stores their leaves. `None` if there is no
/// such layout: the names are those of a repository, or unknown.
pub(super) fn detect(checkpoint: &Checkpoint) -> Option<(Vec<Embedded>, StoredNames)> {
    let stored = |anchor: &'static String| stored_names(checkpoint, anchor).map(|names| (anchor, names));
    let (anchor, names) = Embedded::all().flat_map(|embedded| &embedded.0.traits.anchors).find_map(stored)?;
    Some((Embedded::all().filter(|embedded| embedded.traits.anchors.contains(anchor)).collect(), names))
}

/// The names of a checkpoint that stores the leaf `anchor`: of several, the shortest.
fn stored_names(checkpoint: &Checkpoint, anchor: &str) -> Option<StoredNames> {
    let short = anchor.strip_prefix(COLLECTION).map(|short| (short, COLLECTION));
    let names = [(anchor, "")].into_iter().chain(short);
    names.flat_map(|(leaf, dropped)| ["", VALUE].map(|suffix| (leaf, dropped, suffix))).find_map(
        |(leaf, dropped, suffix)| {
            let end = format!("{leaf}{suffix}");
            let prefixes = checkpoint.tensors().filter_map(|(_, info)| info.name.strip_suffix(end.as_str()));
            let prefix = prefixes
                .filter(|prefix| (prefix.is_empty() || prefix.ends_with('.')) && !is_state(prefix))
                .min_by_key(|prefix| prefix.len())?;
            Some(StoredNames { prefix: prefix.to_owned(), dropped: dropped.to_owned(), suffix: suffix.to_owned() })
        },
    )
}

/// Whether a stored name is one of a leaf, by its beginning and its end.
pub(super) fn is_weight(names: &StoredNames, stored: &str) -> bool {
    let rest = stored.strip_prefix(names.prefix.as_str());
    rest.and_then(|rest| rest.strip_suffix(names.suffix.as_str())).is_some_and(|rest| !is_state(rest))
}
