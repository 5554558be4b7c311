//! Files of ranks: what each rank of a training saved for itself, one file or a few for each.
//!
//! | kind | files | read by |
//! | --- | --- | --- |
//! | FSDP of verl, SkyRL, lmms-engine | `model_world_size_8_rank_0.pt` … | `fsdp.rs` |
//! | DeepSpeed ZeRO 1 to 3 | `zero_pp_rank_0_mp_rank_00_optim_states.pt` …, `mp_rank_00_model_states.pt` | `zero.rs` |
//! | universal, of DeepSpeed | `zero/<name>/fp32.pt`, `mp_rank_00_model_states.pt` | `zero.rs` |
//! | classic ones of Megatron | `mp_rank_00_001/model_optim_rng.pt` … | `megatron.rs` |
//!
//! `universal.rs` says what a universal checkpoint of ZeRO would be. `names.rs` knows the names. A tensor is put together by what the files say of it: placements and meshes. No two values are ever compared.

mod fsdp;
mod job;
mod megatron;
mod names;
mod universal;
mod zero;

pub(crate) use fsdp::world_of;
use job::RankJob;
pub(crate) use names::{MEGATRON_FILE, RankFile, RankKind, megatron_ranks, parts_of};

use super::super::{
    choose::{TORCH_INDEX_SUFFIX, at_top, is_safetensors},
    container::{Container, Contents, DCP_METADATA, is_torch},
    file::{FileRole, IgnoreReason},
    folder::{Folder, PinnedFiles},
    problem::{CheckpointError, Problems},
    weight_name::variant_of_index,
};

/// Where trainers put the configuration and the tokenizer, beside files of ranks.
pub(crate) const COMPANION: &str = "huggingface/";

/// The files of ranks of a directory.
#[derive(Clone, Debug)]
pub(crate) struct RankFiles {
    kind: RankKind,
    /// What stands before their names: nothing, or a directory with its slash.
    pub(crate) below: String,
}

/// Files that say which directory is the newest step.
const LATEST: [&str; 2] = ["latest", "latest_universal"];

/// The file in which Megatron notes its newest step.
const TRACKER: &str = "latest_checkpointed_iteration.txt";

/// The files of ranks in a folder; `None` if there are none, or other weights beside them.
///
/// # Errors
/// A file that says where they are cannot be read, or says a directory without them.
pub(crate) fn find(folder: &mut Folder) -> Result<Option<RankFiles>, CheckpointError> {
    if has_whole_weights(folder) {
        return Ok(None);
    }
    let find = |folder: &Folder, kind, below: &str| {
        let found = RankFiles { kind, below: below.to_owned() };
        paths(folder).any(|path| found.file(path).is_some()).then_some(found)
    };
    // In some trainers' steps a directory has those of FSDP.
    let here = [
        (RankKind::Fsdp, ""),
        (RankKind::Fsdp, "pytorch_model_fsdp_0/"),
        (RankKind::Zero, ""),
        (RankKind::Megatron, ""),
    ];
    if let Some(found) = here.into_iter().find_map(|(kind, below)| find(folder, kind, below)) {
        return Ok(Some(found));
    }
    if let Some(Ok(step)) = folder.read(TRACKER)? {
        let step = String::from_utf8_lossy(&step).trim().to_owned();
        let below = step.parse().map_or_else(|_| format!("{step}/"), |step: u64| format!("iter_{step:07}/"));
        if let Some(found) = find(folder, RankKind::Megatron, &below) {
            return Ok(Some(found));
        }
    }
    for name in LATEST {
        let Some(tag) = folder.read(name)? else { continue };
        let Some(tag) = tag.ok().and_then(|tag| String::from_utf8(tag).ok()) else { continue };
        if let Some(found) = find(folder, RankKind::Zero, &format!("{}/", tag.trim())) {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn paths(folder: &Folder) -> impl Iterator<Item = &str> {
    folder.files.iter().filter(|file| file.role == FileRole::Other).map(|file| file.path.as_str())
}

/// Whether the directory has weights of another kind, which are whole.
fn has_whole_weights(folder: &Folder) -> bool {
    let is_whole = |path: &str| {
        is_safetensors(path)
            || path == DCP_METADATA
            || (path.starts_with("pytorch_model") && is_torch(path))
            || variant_of_index(path, TORCH_INDEX_SUFFIX).is_some()
    };
    paths(folder).any(|path| at_top(path) && is_whole(path))
}

impl RankFiles {
    /// What a path is, if it is of such a file.
    fn file<'p>(&self, path: &'p str) -> Option<RankFile<'p>> {
        RankFile::of(self.kind, path.strip_prefix(self.below.as_str())?)
    }

    /// Gives the files of ranks, and what else the trainer saved, their roles.
    pub(crate) fn choose(&self, folder: &mut Folder) {
        // Of a universal checkpoint each parameter is a file.
        let is_universal = paths(folder).any(|path| matches!(self.file(path), Some(RankFile::Parameter(_))));
        folder.choose(|path| match self.file(path) {
            Some(RankFile::Optimizer(..)) => !is_universal,
            Some(RankFile::OtherState) | None => false,
            Some(_) => true,
        });
        let is_state = |path: &str| [".pt", ".pth", ".bin", ".ckpt", ".distcp"].iter().any(|end| path.ends_with(end));
        folder.give_role(&FileRole::Ignored(IgnoreReason::TrainingState), is_state);
    }

    /// Reads them. With `training_state`, what the optimizer of DeepSpeed keeps too.
    pub(crate) fn read(&self, files: &PinnedFiles<'_>, training_state: bool, problems: &mut Problems) -> Contents {
        let mut contents = Contents { are_ranks: true, container: Container::Ranks, ..Contents::default() };
        let found = files.ids().filter_map(|id| Some((id, self.file(files.path(id))?))).collect();
        let job = RankJob { files, below: &self.below, found };
        let read = match self.kind {
            RankKind::Fsdp => fsdp::read(&job, &mut contents, problems),
            RankKind::Megatron => megatron::read(&job, &mut contents, problems),
            RankKind::Zero => zero::read(&job, training_state, &mut contents, problems).map(|zero| {
                if training_state {
                    universal::add(&zero, &mut contents, problems);
                }
            }),
        };
        read.unwrap_or_else(|found| problems.extend(found));
        contents
    }
}
