//! What a step's directory holds, and whether its writer has finished it.

use std::collections::{HashMap, HashSet};

use ckfs_format::{
    dcp::read::METADATA as DCP_METADATA,
    ocdbt,
    orbax::read::{CHECKPOINT_METADATA, COMMIT_SUCCESS, CheckpointMetadata, Items, METADATA, UNFINISHED},
};
use ckfs_source::SourceError;

use super::{
    super::{
        container::is_torch,
        foreign,
        orbax::is_item,
        ranks::{MEGATRON_FILE, megatron_ranks},
        tree::{TreeEntry, below, directories, file_names, has},
    },
    found::{self, FoundStep, FoundSteps, StepKind, StepState, Trackers},
    names::{self, StepName},
    ranks,
    step_tree::StepTree,
};
/// Directories of a run in which trainers keep their steps.
const INSIDE: [&str; 3] = ["checkpoints", "checkpoint", "weights"];

/// What transformers writes last.
const TRAINER_STATE: &str = "trainer_state.json";
/// What prime-rl writes last.
const STABLE: &str = "STABLE";
/// What prime-rl calls the directories of its weights.
const STABLE_DIRECTORIES: [&str; 2] = ["weights", "broadcasts"];
/// The number of a step of Megatron follows this.
const MEGATRON_PREFIX: &str = "iter_";
/// What verl, `SkyRL` and `DeepSpeed` have before the number.
const GLOBAL_PREFIX: &str = "global_step";
const TRANSFORMERS_PREFIX: &str = "checkpoint-";
/// Directories of a step in which trainers keep a repository of its model: lerobot, and `NeMo` `AutoModel` both of shards and
/// as a whole.
const REPOSITORIES: [&str; 3] = ["pretrained_model", "model/consolidated", "model"];
/// A file with this at the end of its name is beside a step that `NeMo` 2 has not finished.
const UNFINISHED_BESIDE: &str = "-unfinished";

/// What all steps of a run have in common.
struct InCommon<'a> {
    tree: &'a dyn StepTree,
    trackers: Trackers,
    /// Whether its writer is prime-rl.
    is_stable: bool,
}

/// A step before it has its place in a run.
struct Judged {
    kind: StepKind,
    /// The directory of the checkpoint.
    path: String,
    state: StepState,
}

type Verdict = Result<Option<Judged>, SourceError>;

fn unfinished(reason: impl Into<String>) -> StepState {
    StepState::Unfinished(reason.into())
}

/// A name without the ending that Lightning gives directories too.
fn stem(name: &str) -> &str {
    name.strip_suffix(".ckpt").unwrap_or(name)
}

/// What an earlier listing found, and of which of its steps, by name, it is still true.
pub(super) type Before<'a> = (&'a FoundSteps, &'a dyn Fn(&str) -> bool);

/// The steps of a run: those in its directory, else those in a directory where trainers keep them.
pub(super) fn steps_of(tree: &dyn StepTree, before: Before<'_>) -> Result<FoundSteps, SourceError> {
    let own = steps_in(tree, "", before)?;
    if own.is_run() {
        return Ok(own);
    }
    let entries = tree.list("")?;
    for name in INSIDE.iter().filter(|name| directories(&entries).any(|inside| inside == **name)) {
        let inside = steps_in(tree, name, before)?;
        if inside.is_run() {
            return Ok(inside);
        }
    }
    Ok(own)
}

fn steps_in(tree: &dyn StepTree, directory: &str, (before, holds): Before<'_>) -> Result<FoundSteps, SourceError> {
    let entries = tree.list(directory)?;
    let named: Vec<(&str, StepName<'_>)> =
        directories(&entries).filter_map(|name| Some((name, names::parse(name)?))).collect();
    let all: Vec<StepName<'_>> = named.iter().map(|(_, name)| *name).collect();
    let prefix = names::common_prefix(&all);
    // NeMo saves the last step of a run a second time.
    let is_copy = |name: &str| {
        stem(name).strip_suffix("-last").is_some_and(|own| named.iter().any(|(other, _)| stem(other) == own))
    };
    let of_run: Vec<&(&str, StepName<'_>)> =
        named.iter().filter(|(name, parsed)| Some(parsed.prefix) == prefix && !is_copy(name)).collect();
    let trackers = Trackers::read(tree, directory)?;
    let goes_on = before.directory == directory && trackers.go_on_from(&before.trackers);
    let still = |step: &&FoundStep| goes_on && !matches!(step.state, StepState::Unfinished(_)) && holds(&step.name);
    let known: HashMap<&str, &FoundStep> =
        before.steps.iter().filter(still).map(|step| (step.name.as_str(), step)).collect();
    let mut common = InCommon { tree, trackers, is_stable: !known.is_empty() && before.is_stable };
    let place = if directory.is_empty() { tree.own_name() } else { directory.to_owned() };
    common.is_stable |= STABLE_DIRECTORIES.contains(&place.as_str());
    for name in of_run.iter().map(|(name, _)| below(directory, name)).filter(|name| !known.contains_key(name.as_str()))
    {
        common.is_stable = common.is_stable || tree.len_bytes(&below(&name, STABLE))?.is_some();
    }
    let at_work: HashSet<&str> = file_names(&entries).filter(|name| name.ends_with(UNFINISHED_BESIDE)).collect();
    let mut steps = Vec::new();
    for (own_name, parsed) in of_run {
        let name = below(directory, own_name);
        let Judged { kind, path, mut state } = match known.get(name.as_str()) {
            Some(FoundStep { kind, path, state, .. }) => {
                Judged { kind: *kind, path: path.clone(), state: state.clone() }
            }
            None => common.step(&name, *parsed)?,
        };
        let beside = format!("{}{UNFINISHED_BESIDE}", stem(own_name));
        if at_work.contains(beside.as_str()) {
            state = unfinished(format!("{beside} is beside it: its writer is still at work, or was stopped"));
        }
        let is_at_work = parsed.unfinished.is_some();
        steps.push((FoundStep { number: parsed.number, name, path, kind, state }, is_at_work));
    }
    let rank = |state: &StepState| match state {
        StepState::Complete => 0,
        StepState::Unmarked => 1,
        StepState::Unfinished(_) => 2,
    };
    steps.sort_by_cached_key(|(step, is_at_work)| (step.number, *is_at_work, rank(&step.state), step.name.clone()));
    // A directory beside one that is being written anew counts. Of two others none is better.
    steps.dedup_by(|(other, is_at_work), (step, _)| {
        let is_same = other.number == step.number;
        if is_same && !*is_at_work {
            let (one, two) = (&step.name, &other.name);
            step.state = unfinished(format!("{one} and {two} both have this number: rename or move one of them"));
        }
        is_same
    });
    let steps = steps.into_iter().map(|(step, _)| step).collect();
    let is_step = |entry: &TreeEntry| entry.is_directory && names::parse(&entry.name).is_some();
    let others: Vec<TreeEntry> = entries.iter().filter(|entry| !is_step(entry)).cloned().collect();
    let is_checkpoint = common.judge(directory, &others, StepName::default())?.is_some();
    let InCommon { trackers, is_stable, .. } = common;
    Ok(FoundSteps { directory: directory.to_owned(), steps, is_checkpoint, trackers, is_stable })
}

impl InCommon<'_> {
    fn step(&self, name: &str, parsed: StepName<'_>) -> Result<Judged, SourceError> {
        let entries = self.tree.list(name)?;
        let mut found = self.judge(name, &entries, parsed)?;
        if found.is_none() {
            found = self.inside(name, &entries)?;
        }
        let mut found = match found {
            Some(found) => found,
            None => Judged {
                // Nothing else has such names.
                kind: if parsed.prefix == MEGATRON_PREFIX { StepKind::Megatron } else { StepKind::Unknown },
                path: name.to_owned(),
                state: unfinished(self.unknown(name, &entries)?),
            },
        };
        if let Some(reason) = parsed.unfinished {
            if reason.contains(UNFINISHED) {
                found.kind = StepKind::Orbax;
            }
            found.state = unfinished(reason);
        }
        Ok(found)
    }

    /// Why a step is none whose directory holds nothing that is known.
    fn unknown(&self, path: &str, entries: &[TreeEntry]) -> Result<String, SourceError> {
        let mut places = Vec::new();
        let is_old = |entries: &[TreeEntry]| file_names(entries).any(foreign::is_msgpack_tree);
        if is_old(entries) {
            return Ok(foreign::OLD_ORBAX.to_owned());
        }
        for name in directories(entries) {
            let inside = self.tree.list(&below(path, name))?;
            if is_old(&inside) {
                return Ok(format!("{name}: {}", foreign::OLD_ORBAX));
            }
            if file_names(&inside).any(is_weights) {
                places.push(name);
            }
        }
        if places.is_empty() {
            return Ok("there is no checkpoint in it yet".to_owned());
        }
        let places = places.join(", ");
        Ok(format!(
            "of its directories with weights, {places}, none is known as that of the model: give one as the source"
        ))
    }

    /// What a directory holds; `None` if it is nothing that is known.
    fn judge(&self, path: &str, entries: &[TreeEntry], step: StepName<'_>) -> Verdict {
        if let Some(found) = self.orbax(path, entries)? {
            return Ok(Some(found));
        }
        let mut found = self.distributed(path, entries, step, 0)?;
        if found.is_none() {
            found = self.by_ranks(path, entries, step)?;
        }
        let mut found = found.or_else(|| self.repository(path, entries, step.prefix));
        // The trainer of transformers leaves any of these beside its own state.
        if let Some(found) = found.as_mut().filter(|_| step.prefix == TRANSFORMERS_PREFIX && !path.is_empty())
            && matches!(found.state, StepState::Complete | StepState::Unmarked)
        {
            let is_there = has(entries, TRAINER_STATE);
            let is_missing = || unfinished(format!("{TRAINER_STATE} is missing, which transformers writes last"));
            found.state = if is_there { StepState::Complete } else { is_missing() };
        }
        Ok(found)
    }

    fn orbax(&self, path: &str, entries: &[TreeEntry]) -> Verdict {
        let is_sign = |name: &str| [CHECKPOINT_METADATA, METADATA, COMMIT_SUCCESS, ocdbt::MANIFEST].contains(&name);
        let mut arrays = Vec::new();
        let mut at_work = None;
        for name in directories(entries) {
            if name.contains(UNFINISHED) {
                at_work.get_or_insert_with(|| format!("{name}: an item that the saver has not finished"));
            } else if !name.starts_with("ocdbt.process_") {
                let inside = self.tree.list(&below(path, name))?;
                if is_item(&inside) {
                    arrays.push((name, inside));
                }
            }
        }
        if at_work.is_none() && arrays.is_empty() && !entries.iter().any(|entry| is_sign(&entry.name)) {
            return Ok(None);
        }
        let itself = is_item(entries);
        let mut reason = at_work;
        if reason.is_none() {
            reason = self.unfinished_orbax(path, entries, itself)?;
        }
        let is_empty = arrays.is_empty() && !itself;
        let reason = reason.or_else(|| is_empty.then(|| "there are no arrays in it yet".to_owned())).or_else(|| {
            let of_item = |(name, inside): &(&str, Vec<TreeEntry>)| Some(format!("{name}: {}", lacks_of_item(inside)?));
            arrays.iter().find_map(of_item).or_else(|| lacks_of_item(entries).filter(|_| itself).map(str::to_owned))
        });
        let state = reason.map_or(StepState::Complete, StepState::Unfinished);
        Ok(Some(Judged { kind: StepKind::Orbax, path: path.to_owned(), state }))
    }

    /// Why a step of Orbax is unfinished by its own word.
    fn unfinished_orbax(
        &self,
        path: &str,
        entries: &[TreeEntry],
        is_item: bool,
    ) -> Result<Option<String>, SourceError> {
        if self.tree.needs_commit_file() {
            let missing = "commit_success.txt is missing, which Orbax writes last on an object store";
            return Ok((!has(entries, COMMIT_SUCCESS)).then(|| missing.to_owned()));
        }
        let Some(bytes) = self.tree.small(&below(path, CHECKPOINT_METADATA))? else {
            let missing = format!("{CHECKPOINT_METADATA} is missing");
            return Ok((!has(entries, COMMIT_SUCCESS)).then_some(missing));
        };
        let Ok(found) = CheckpointMetadata::parse(&bytes) else {
            return Ok(Some(format!("{CHECKPOINT_METADATA} is not written to its end")));
        };
        if found.commit_nanoseconds.is_none() {
            return Ok(Some(format!("{CHECKPOINT_METADATA} has no time of commit: the saver is still at work")));
        }
        match found.items {
            Items::Named(names) if !is_item => {
                let missing = names.iter().find(|name| !directories(entries).any(|found| found == name.as_str()));
                Ok(missing.map(|name| format!("the item {name} is missing")))
            }
            Items::Named(_) | Items::Itself | Items::Unknown => Ok(None),
        }
    }

    /// A directory of torch.distributed.checkpoint: this one, which is `depth` below the step, or one in it.
    fn distributed(&self, path: &str, entries: &[TreeEntry], step: StepName<'_>, depth: usize) -> Verdict {
        // OLMo-core has `model_and_optim`, NeMo 2 `weights`.
        const PLACES: [&[&str]; 3] =
            [&["trainer", "dist_ckpt", "model", "model_and_optim", "weights"], &["dist_ckpt", "model"], &[]];
        if has(entries, DCP_METADATA) || file_names(entries).any(|name| name.ends_with(".distcp")) {
            return Ok(Some(self.judged_distributed(path, entries, step)?));
        }
        let of_step = |name: &str| ranks::MODEL_DIRECTORIES.contains(&name) || name.starts_with("pytorch_model_fsdp_");
        for name in directories(entries).filter(|name| PLACES[depth].contains(name) || depth == 0 && of_step(name)) {
            let path = below(path, name);
            let found = self.distributed(&path, &self.tree.list(&path)?, step, depth + 1)?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    fn judged_distributed(&self, path: &str, entries: &[TreeEntry], step: StepName<'_>) -> Result<Judged, SourceError> {
        // What Megatron-Core writes besides.
        let is_nemo = step.prefix == names::IN_TEXT && path.ends_with("/weights");
        let is_megatron = step.prefix == MEGATRON_PREFIX || is_nemo || has(entries, "common.pt");
        let kind = if is_megatron { StepKind::Megatron } else { StepKind::TorchDcp };
        let state = if self.tree.len_bytes(&below(path, DCP_METADATA))?.is_none_or(|len| len == 0) {
            unfinished("`.metadata` is missing, which is written last")
        } else if !entries.iter().any(|entry| entry.name.ends_with(".distcp")) {
            unfinished("there is no *.distcp yet")
        } else if let Some(reason) = self.by_tracker(step) {
            unfinished(reason)
        } else if let Some(name) = ["common.pt", "metadata.json"].iter().find(|name| is_megatron && !has(entries, name))
        {
            unfinished(format!("{name} is missing, which Megatron-Core writes"))
        } else {
            StepState::Complete
        };
        Ok(Judged { kind, path: path.to_owned(), state })
    }

    /// What the tracker of the run says against a step, where its writer keeps one.
    fn by_tracker(&self, StepName { prefix, number, .. }: StepName<'_>) -> Option<String> {
        if prefix == MEGATRON_PREFIX {
            return self.trackers.unfinished(&[found::MEGATRON], number);
        }
        let of_rl = [found::MEGATRON, found::SKYRL];
        if prefix == "global_step_" || self.trackers.has(&of_rl) && !prefix.is_empty() {
            return self.trackers.unfinished(&of_rl, number);
        }
        None
    }

    /// Files that each rank writes for itself, here or in a directory.
    fn by_ranks(&self, path: &str, entries: &[TreeEntry], step: StepName<'_>) -> Verdict {
        let judged = |kind, path: &str, all: Result<(), String>, tracker: Option<String>| {
            let state = all.err().or(tracker).map_or(StepState::Complete, StepState::Unfinished);
            Ok(Some(Judged { kind, path: path.to_owned(), state }))
        };
        let tracker = || self.by_tracker(step);
        if let Some((kind, all)) = ranks::of_files(entries) {
            let is_own = step.prefix == GLOBAL_PREFIX;
            let of_deepspeed = || is_own.then(|| self.trackers.unfinished(&[found::DEEPSPEED], step.number)).flatten();
            return judged(kind, path, all, if kind == StepKind::DeepSpeed { of_deepspeed() } else { tracker() });
        }
        let (classic, numbers): (Vec<&str>, Vec<Vec<u64>>) =
            directories(entries).filter_map(|name| Some((name, megatron_ranks(name)?))).unzip();
        if !classic.is_empty() {
            let mut lacks = ranks::lacks_of_grid(&numbers);
            for name in classic {
                let file = below(&below(path, name), MEGATRON_FILE);
                if self.tree.len_bytes(&file)?.is_none_or(|len| len == 0) {
                    lacks.get_or_insert_with(|| format!("{name}/{MEGATRON_FILE} is missing"));
                }
            }
            return judged(StepKind::Megatron, path, lacks.map_or(Ok(()), Err), tracker());
        }
        let has_weights = file_names(entries).any(is_weights);
        let is_place =
            |name: &&str| ranks::MODEL_DIRECTORIES.contains(name) || name.starts_with(GLOBAL_PREFIX) && !has_weights;
        // `DeepSpeed` names the one that counts beside them. Read from there it has the configuration that is there too.
        let tag = if has(entries, found::DEEPSPEED) && !has_weights {
            self.tree.small(&below(path, found::DEEPSPEED))?.unwrap_or_default()
        } else {
            Vec::new()
        };
        let latest = directories(entries).find(|name| tag.trim_ascii() == name.as_bytes());
        let counts = |name: &&str| latest.map_or_else(|| is_place(name), |latest| latest == *name);
        for name in directories(entries).filter(counts) {
            let inside_path = below(path, name);
            if let Some((kind, all)) = ranks::of_files(&self.tree.list(&inside_path)?) {
                let is_beside = kind == StepKind::DeepSpeed && latest.is_some();
                return judged(kind, if is_beside { path } else { &inside_path }, all, tracker());
            }
        }
        Ok(None)
    }

    /// A repository in a directory of a step.
    fn inside(&self, path: &str, entries: &[TreeEntry]) -> Verdict {
        for place in REPOSITORIES {
            let above = place.split('/').next().unwrap_or(place);
            if directories(entries).any(|name| name == above) {
                let place = below(path, place);
                if let Some(found) = self.repository(&place, &self.tree.list(&place)?, "") {
                    return Ok(Some(found));
                }
            }
        }
        Ok(None)
    }

    /// Weights as in a repository.
    fn repository(&self, path: &str, entries: &[TreeEntry], prefix: &str) -> Option<Judged> {
        let is_trainer = prefix == TRANSFORMERS_PREFIX || has(entries, TRAINER_STATE);
        let is_version = prefix == names::OF_VERSION;
        let kind = match (is_trainer, is_version) {
            (true, _) => StepKind::Transformers,
            (false, true) => StepKind::Version,
            (false, false) => StepKind::Repository,
        };
        if prefix == MEGATRON_PREFIX || prefix.starts_with(GLOBAL_PREFIX) {
            return None;
        }
        // The index of a version says nothing yet without a file.
        let weights =
            file_names(entries).any(|name| is_weights(name) && !(is_version && name.ends_with(".index.json")));
        let has_config = has(entries, "config.json") || has(entries, "adapter_config.json");
        if !weights && !(is_trainer && (has_config || has(entries, TRAINER_STATE))) {
            return None;
        }
        let state = if !weights {
            unfinished("there are no weights yet")
        } else if is_trainer && !has(entries, TRAINER_STATE) {
            unfinished(format!("{TRAINER_STATE} is missing, which transformers writes last"))
        } else if is_trainer && !has_config {
            unfinished("config.json is missing, which transformers writes beside weights")
        } else if let Some(missing) = is_version.then(|| missing_file(entries)).flatten() {
            unfinished(missing)
        } else if is_trainer || has(entries, STABLE) || is_version && has_index(entries) {
            StepState::Complete
        } else if self.is_stable {
            unfinished("STABLE is missing, which prime-rl writes last")
        } else {
            StepState::Unmarked
        };
        Some(Judged { kind, path: path.to_owned(), state })
    }
}

/// What an item of Orbax lacks that has these entries.
fn lacks_of_item(entries: &[TreeEntry]) -> Option<&'static str> {
    let is_database = directories(entries).any(|name| name == "d" || name.starts_with("ocdbt."));
    let has_manifest = has(entries, ocdbt::MANIFEST);
    if !has(entries, METADATA) {
        return Some("_METADATA is missing");
    }
    match (is_database, has_manifest) {
        (true, true) => None,
        (true, false) => Some("the databases of its processes are not merged yet, manifest.ocdbt is missing"),
        (false, true) => Some("the directory of its arrays, d, is missing"),
        // Each array has a directory.
        (false, false) if directories(entries).any(|name| name != "array_metadatas") => None,
        (false, false) => Some("there are no arrays yet"),
    }
}

fn has_index(entries: &[TreeEntry]) -> bool {
    file_names(entries).any(|name| name.ends_with(".index.json"))
}

/// What is missing of files whose names tell how many there are, in words. Some count from 0.
fn missing_file(entries: &[TreeEntry]) -> Option<String> {
    let total = |name: &str| name.strip_suffix(".safetensors")?.rsplit_once("-of-")?.1.parse::<usize>().ok();
    let totals: Vec<usize> = file_names(entries).filter_map(total).collect();
    let (most, found) = (totals.iter().copied().max()?, totals.len());
    if found < most {
        return Some(format!("there are {most} files of weights by their names, {found} of them so far"));
    }
    (!has_index(entries)).then(|| "its index is missing, which is written last".to_owned())
}

/// Whether a file of this name holds weights, or lists the files that do. A trainer keeps more files of torch than that.
fn is_weights(name: &str) -> bool {
    const STATE: [&str; 6] = ["optimizer", "scheduler", "scaler", "rng_state", "training_args", "random_states"];
    let of_torch = is_torch(name) && !STATE.iter().any(|state| name.starts_with(state));
    name.ends_with(".safetensors") || name.ends_with(".index.json") || of_torch
}
