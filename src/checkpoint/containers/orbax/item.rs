//! Which directory holds the arrays.
//!
//! ```text
//! root/7/items/_METADATA     CheckpointManager: the latest finished step, and in it the item
//! 7/items/_METADATA          a step
//! items/_METADATA            an item, the directory that is given
//! ```

use ckfs_format::{
    ocdbt,
    orbax::read::{CHECKPOINT_METADATA, COMMIT_SUCCESS, CheckpointMetadata, METADATA, UNFINISHED},
};

use crate::{
    problem::Problem,
    tree::{FileTree, TreeEntry, below, directories, has},
    weight_name::is_number,
};

/// What a Hugging Face repository has.
const CONFIG: &str = "config.json";

/// Items in order of preference: of MaxText, of `CheckpointManager` without names, of the newer interface, and what others use.
const ITEMS: [&str; 6] = ["items", "default", "state", "pytree", "params", "model"];

/// The place of the arrays.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Item {
    /// Its directory; "" for the checkpoint's own.
    pub(super) directory: String,
    /// The step's number, if a directory of steps was given.
    pub(super) step: Option<u64>,
    /// Whether layers are stacked, as MaxText says in the metadata of the step or of the item.
    pub(super) scan_layers: Option<bool>,
    /// Steps that were passed over, each with the reason.
    pub(super) unfinished: Vec<String>,
    /// Why it is taken for unfinished, if it is read nevertheless.
    pub(super) is_unfinished: Option<&'static str>,
}

/// Whether a directory with these entries holds arrays of Orbax.
pub(crate) fn is_item(entries: &[TreeEntry]) -> bool {
    has(entries, METADATA) || has(entries, ocdbt::MANIFEST)
}

/// The number of a step's directory: `7`, or `checkpoint_7`.
fn step_number(name: &str) -> Option<u64> {
    let digits = name.rsplit_once('_').map_or(name, |(_, digits)| digits);
    is_number(digits).then(|| digits.parse().ok()).flatten()
}

/// Why a directory of this name is unfinished, whatever it holds.
fn unfinished_name(name: &str) -> Option<&'static str> {
    name.contains(UNFINISHED)
        .then_some("its name has .orbax-checkpoint-tmp: the saver is still at work, or was stopped")
}

/// The name of the tree's own directory.
fn own_name(tree: &dyn FileTree) -> String {
    tree.shown("").file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Whether a directory looks like part of an Orbax checkpoint: its own entries say so, or a directory in it does.
///
/// # Errors
/// Directories that cannot be listed.
pub(crate) fn is_orbax(tree: &dyn FileTree) -> Result<bool, Problem> {
    let entries = tree.list("")?;
    let is_unfinished = own_name(tree).contains(UNFINISHED);
    if is_unfinished || is_item(&entries) || has(&entries, CHECKPOINT_METADATA) {
        return Ok(true);
    }
    // A repository may have anything beside its weights.
    if entries.iter().any(|entry| entry.name.ends_with(".safetensors") || entry.name == CONFIG) {
        return Ok(false);
    }
    let is_process = |name: &str| name.starts_with("ocdbt.process_");
    if directories(&entries).any(|name| name.contains(UNFINISHED) || is_process(name)) {
        return Ok(true);
    }
    for name in directories(&entries).filter(|name| ITEMS.contains(name) || step_number(name).is_some()) {
        let inside = tree.list(name)?;
        if is_item(&inside) || has(&inside, CHECKPOINT_METADATA) {
            return Ok(true);
        }
        for item in directories(&inside).filter(|item| ITEMS.contains(item)) {
            if is_item(&tree.list(&below(name, item))?) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Finds the arrays of the tree. With `allow_unfinished`, those of an unfinished checkpoint too, where there is no finished one.
///
/// # Errors
/// None are there, or which is not clear, or they are unfinished.
pub(super) fn find(tree: &dyn FileTree, allow_unfinished: bool) -> Result<Item, Problem> {
    let reason = unfinished_name(&own_name(tree));
    if let Some(reason) = reason.filter(|_| !allow_unfinished) {
        return Err(Problem::Unfinished { directory: tree.shown(""), reason });
    }
    let entries = tree.list("")?;
    if is_item(&entries) || has(&entries, CHECKPOINT_METADATA) || !items_in(tree, "", &entries)?.is_empty() {
        let item = in_step(tree, "", allow_unfinished)?;
        return Ok(Item { is_unfinished: item.is_unfinished.or(reason), ..item });
    }
    in_steps(tree, &entries, allow_unfinished)
}

/// The item of the latest finished step; else, if that is allowed, of the latest unfinished one.
fn in_steps(tree: &dyn FileTree, entries: &[TreeEntry], allow_unfinished: bool) -> Result<Item, Problem> {
    let mut steps: Vec<(u64, &str)> =
        directories(entries).filter_map(|name| Some((step_number(name)?, name))).collect();
    steps.sort_unstable();
    let mut without_arrays = Vec::new();
    let mut unfinished: Vec<String> =
        directories(entries).filter_map(|name| Some(format!("{name} ({})", unfinished_name(name)?))).collect();
    let mut last = None;
    for (number, name) in steps.into_iter().rev() {
        match in_step(tree, name, false) {
            Ok(item) => return Ok(Item { step: Some(number), unfinished, ..item }),
            Err(Problem::Unfinished { reason, .. }) => {
                last.get_or_insert((number, name));
                unfinished.push(format!("{name} ({reason})"));
            }
            // A directory with a number for a name need not be a step.
            Err(Problem::NoArrays(_)) => without_arrays.push(format!("{name} (no arrays in it)")),
            Err(error) => return Err(error),
        }
    }
    if let Some((number, name)) = last.filter(|_| allow_unfinished) {
        let item = in_step(tree, name, true)?;
        return Ok(Item { step: Some(number), ..item });
    }
    let processes = directories(entries).filter(|name| name.starts_with("ocdbt.process_")).count();
    if processes > 0 {
        let reason = "the databases of its processes are not merged yet, manifest.ocdbt is missing";
        return Err(Problem::Unfinished { directory: tree.shown(""), reason });
    }
    unfinished.extend(without_arrays);
    let found = if unfinished.is_empty() { "no steps".to_owned() } else { unfinished.join(", ") };
    let what =
        format!("no finished step: {found}; --allow-unfinished reads the latest one, if all of its chunks are there");
    Err(Problem::of_file(tree.shown("").display(), what))
}

/// The directories of a step that hold arrays.
fn items_in(tree: &dyn FileTree, step: &str, entries: &[TreeEntry]) -> Result<Vec<String>, Problem> {
    let mut found = Vec::new();
    for name in directories(entries) {
        if unfinished_name(name).is_none() && step_number(name).is_none() && is_item(&tree.list(&below(step, name))?) {
            found.push(name.to_owned());
        }
    }
    Ok(found)
}

/// What a step or an item says about itself; `None` if it says nothing.
fn metadata(tree: &dyn FileTree, directory: &str) -> Result<Option<CheckpointMetadata>, Problem> {
    let Some(bytes) = tree.description(&below(directory, CHECKPOINT_METADATA))? else { return Ok(None) };
    match CheckpointMetadata::parse(&bytes) {
        Ok(found) => Ok(Some(found)),
        // The file is written at the start of a save, and again at its end.
        Err(_) if bytes.is_empty() => Ok(None),
        Err(error) => Err(Problem::of_file(tree.shown(directory).display(), error)),
    }
}

/// Why a step is unfinished, by its entries and by what it says about itself.
fn unfinished_step(
    tree: &dyn FileTree,
    entries: &[TreeEntry],
    of_step: Option<&CheckpointMetadata>,
) -> Option<&'static str> {
    if tree.needs_commit_file() && !has(entries, COMMIT_SUCCESS) {
        return Some("commit_success.txt is missing, which Orbax writes last on an object store");
    }
    of_step
        .is_some_and(|found| found.commit_nanoseconds.is_none())
        .then_some("_CHECKPOINT_METADATA has no commit_timestamp_nsecs: the saver is still at work, or was stopped")
}

/// The problem of a step or an item where Orbax would have arrays and this is found.
pub(super) fn no_arrays(tree: &dyn FileTree, directory: &str, found: &str) -> Problem {
    Problem::NoArrays(format!(
        "{}: an Orbax checkpoint without arrays: expected _METADATA or manifest.ocdbt in an item, found {found}",
        tree.shown(directory).display()
    ))
}

/// The item of a finished step, or the directory itself if it is an item.
fn in_step(tree: &dyn FileTree, step: &str, allow_unfinished: bool) -> Result<Item, Problem> {
    let entries = tree.list(step)?;
    let unfinished = |reason| Problem::Unfinished { directory: tree.shown(step), reason };
    let of_step = metadata(tree, step)?;
    let is_unfinished = unfinished_step(tree, &entries, of_step.as_ref());
    if let Some(reason) = is_unfinished.filter(|_| !allow_unfinished) {
        return Err(unfinished(reason));
    }
    if is_item(&entries) {
        let scan_layers = of_step.and_then(|found| found.scan_layers());
        return Ok(Item { directory: step.to_owned(), scan_layers, is_unfinished, ..Item::default() });
    }
    let found = items_in(tree, step, &entries)?;
    let preferred = ITEMS.iter().find(|name| found.iter().any(|item| item == *name));
    let name = match (preferred, found.as_slice()) {
        (Some(name), _) => (*name).to_owned(),
        (None, [only]) => only.clone(),
        (None, []) => {
            if directories(&entries).any(|name| name.contains(UNFINISHED)) {
                return Err(unfinished("an item's name has .orbax-checkpoint-tmp"));
            }
            let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
            let found = if names.is_empty() { "an empty directory".to_owned() } else { names.join(", ") };
            return Err(no_arrays(tree, step, &found));
        }
        (None, _) => {
            let what = format!(
                "several items with arrays: expected items, default, state, pytree, params or model, or only one, found {}; give the \
                 directory of one",
                found.join(", ")
            );
            return Err(Problem::of_file(tree.shown(step).display(), what));
        }
    };
    let directory = below(step, &name);
    let of_item = metadata(tree, &directory)?;
    let scan_layers = [of_step, of_item].into_iter().flatten().find_map(|found| found.scan_layers());
    Ok(Item { directory, scan_layers, is_unfinished, ..Item::default() })
}
