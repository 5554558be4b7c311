//! Names of steps: which directories of a run are its steps.

use ckfs_format::orbax::read::UNFINISHED;

use crate::weight_name::is_number;

/// Beginnings and ends of names of directories that their writer renames when they are finished.
const UNFINISHED_STARTS: [&str; 4] = ["tmp-", "tmp_", ".tmp-", ".tmp_"];
const UNFINISHED_ENDS: [&str; 3] = [".tmp", "-tmp", "-unfinished"];

/// What such names say.
const AT_WORK: Option<&str> = Some("its name says that its writer is still at work, or was stopped");

/// What trainers write before the number.
const KNOWN: [&str; 13] = [
    "",
    "step-",
    "step_",
    "step",
    "checkpoint-",
    "checkpoint_",
    "iter_",
    "global_step_",
    "global_step",
    "ckpt-",
    OF_VERSION,
    OF_EPOCH,
    IN_TEXT,
];

/// For versions of weights, as slime and miles publish them.
pub(super) const OF_VERSION: &str = "weight_v";
/// For `epoch_0_step_9` of every epoch, as `NeMo` `AutoModel` writes them.
const OF_EPOCH: &str = "epoch_*_step_";
/// For names that tell more than the step: `model--val_loss=1.25-step=100-last` of `NeMo` 2, `epoch=0-step=100.ckpt` of Lightning.
pub(super) const IN_TEXT: &str = "step=";

/// Most digits of a number.
const DIGITS_MAX: usize = 18;

/// A name that ends with a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepName<'a> {
    pub(super) prefix: &'a str,
    pub(super) number: u64,
    /// Why the name says that its writer is still at work.
    pub(super) unfinished: Option<&'static str>,
}

/// The prefix and number of a finished step's name.
pub(crate) fn numbered(name: &str) -> Option<(&str, u64)> {
    if let Some((_, rest)) = name.rsplit_once(IN_TEXT) {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        return (digits <= DIGITS_MAX).then(|| Some((IN_TEXT, rest[..digits].parse().ok()?))).flatten();
    }
    let digits = name.bytes().rev().take_while(u8::is_ascii_digit).count();
    let (prefix, digits) = name.split_at(name.len() - digits);
    let epoch = prefix.strip_prefix("epoch_").and_then(|rest| rest.strip_suffix("_step_"));
    let prefix = if epoch.is_some_and(is_number) { OF_EPOCH } else { prefix };
    let is_prefix = prefix.ends_with(['-', '_']) || KNOWN.contains(&prefix);
    let fits = !digits.is_empty() && digits.len() <= DIGITS_MAX;
    (is_prefix && fits && !prefix.starts_with('.')).then(|| Some((prefix, digits.parse().ok()?))).flatten()
}

/// What the name of a directory says, if it may be a step.
pub(super) fn parse(name: &str) -> Option<StepName<'_>> {
    let by = |name, unfinished| numbered(name).map(|(prefix, number)| StepName { prefix, number, unfinished });
    if let Some((name, _)) = name.split_once(UNFINISHED) {
        return by(name, Some("its name has .orbax-checkpoint-tmp: the saver is still at work, or was stopped"));
    }
    if let Some(name) = UNFINISHED_STARTS.iter().find_map(|start| name.strip_prefix(start)) {
        return by(name, AT_WORK);
    }
    if let Some(name) = UNFINISHED_ENDS.iter().find_map(|end| name.strip_suffix(end)) {
        return by(name, AT_WORK);
    }
    by(name, None)
}

/// The prefix of a run's steps among these names: one that trainers use, else the most frequent. Copies of the best step
/// (`best-7` beside `checkpoint-7`) are no steps of their own.
pub(super) fn common_prefix<'a>(names: &[StepName<'a>]) -> Option<&'a str> {
    let count = |prefix: &str| names.iter().filter(|name| name.prefix == prefix).count();
    let rank = |prefix: &str| (KNOWN.contains(&prefix), count(prefix));
    let mut prefixes: Vec<&str> = names.iter().map(|name| name.prefix).collect();
    prefixes.sort_unstable();
    prefixes.dedup();
    prefixes.into_iter().rev().max_by_key(|prefix| rank(prefix))
}
