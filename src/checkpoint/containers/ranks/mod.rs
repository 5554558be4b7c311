//! Files of ranks: what each rank of a training saved for itself, one file or a few for each.
//!
//! | kind | files | read by |
//! | --- | --- | --- |
//! | FSDP of verl, SkyRL, lmms-engine | `model_world_size_8_rank_0.pt` … | `fsdp.rs` |
//! | DeepSpeed ZeRO 1 to 3 | `zero_pp_rank_0_mp_rank_00_optim_states.pt` …, `mp_rank_00_model_states.pt` | `zero.rs` |
//! | universal, of DeepSpeed | `zero/<name>/fp32.pt`, `mp_rank_00_model_states.pt` | `zero.rs` |
//! | classic ones of Megatron | `mp_rank_00_001/model_optim_rng.pt` … | `megatron.rs` |
//!
//! A tensor is put together by what the files say of it: placements and meshes. No two values are ever compared.

mod fsdp;
mod megatron;
mod zero;

use super::super::{
    choose::{TORCH_INDEX_SUFFIX, at_top, is_safetensors},
    companion::{self, Companion},
    container::{Contents, DCP_METADATA, is_torch},
    file::{FileRole, IgnoreReason},
    folder::{Folder, PinnedFiles},
    problem::{CheckpointError, Problems},
    weight_name::variant_of_index,
};
use fsdp::FsdpName;
pub(crate) use fsdp::world_of;
use zero::ZeroFile;

/// Where trainers put the configuration and the tokenizer, beside files of ranks.
const COMPANIONS: [&str; 1] = ["huggingface/"];

/// Directories of a step in which a trainer keeps the files of ranks.
const FSDP_DIRECTORIES: [&str; 2] = ["", "pytorch_model_fsdp_0/"];

/// What the files of ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Fsdp,
    Zero,
    Megatron,
}

/// The files of ranks of a directory.
#[derive(Clone, Debug)]
pub(crate) struct RankFiles {
    kind: Kind,
    /// What stands before their names: nothing, or a directory with its slash.
    below: String,
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
    let found = |kind, below: &str| Ok(Some(RankFiles { kind, below: below.to_owned() }));
    let has = |folder: &Folder, below: &str| paths(folder).any(|path| FsdpName::of(path, below).is_some());
    if let Some(below) = FSDP_DIRECTORIES.into_iter().find(|below| has(folder, below)) {
        return found(Kind::Fsdp, below);
    }
    if is_zero(folder, "") {
        return found(Kind::Zero, "");
    }
    if is_megatron(folder, "") {
        return found(Kind::Megatron, "");
    }
    if let Some(Ok(step)) = folder.read(TRACKER)? {
        let step = String::from_utf8_lossy(&step).trim().to_owned();
        let below = step.parse().map_or_else(|_| format!("{step}/"), |step: u64| format!("iter_{step:07}/"));
        if is_megatron(folder, &below) {
            return found(Kind::Megatron, &below);
        }
    }
    for name in LATEST {
        let Some(tag) = folder.read(name)? else { continue };
        let Some(tag) = tag.ok().and_then(|tag| String::from_utf8(tag).ok()) else { continue };
        let below = format!("{}/", tag.trim());
        if is_zero(folder, &below) {
            return found(Kind::Zero, &below);
        }
    }
    Ok(None)
}

fn is_megatron(folder: &Folder, below: &str) -> bool {
    paths(folder).any(|path| megatron::is_file(path, below))
}

fn is_zero(folder: &Folder, below: &str) -> bool {
    paths(folder).any(|path| ZeroFile::parameter(path, below).is_some() || ZeroFile::of(path, below).is_some())
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
    /// Configuration and tokenizer that the trainer has put beside them.
    pub(crate) fn companion(
        &self,
        folder: &mut Folder,
    ) -> Result<Option<(Companion, serde_json::Value)>, CheckpointError> {
        for directory in COMPANIONS {
            let found = companion::of_folder(folder, &format!("{}{directory}", self.below))?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Gives the files of ranks, and what else the trainer saved, their roles.
    pub(crate) fn choose(&self, folder: &mut Folder) {
        let below = self.below.clone();
        match self.kind {
            Kind::Fsdp => folder.choose(|path| FsdpName::of(path, &below).is_some()),
            Kind::Megatron => folder.choose(|path| megatron::is_file(path, &below)),
            Kind::Zero => {
                // Of a universal checkpoint each parameter is a file.
                let is_universal = paths(folder).any(|path| ZeroFile::parameter(path, &below).is_some());
                folder.choose(|path| {
                    ZeroFile::parameter(path, &below).is_some()
                        || match ZeroFile::of(path, &below) {
                            Some(ZeroFile::Model(..)) => true,
                            Some(ZeroFile::Optimizer(..)) => !is_universal,
                            Some(ZeroFile::Other) | None => false,
                        }
                });
            }
        }
        let is_state = |path: &str| [".pt", ".pth", ".bin", ".ckpt", ".distcp"].iter().any(|end| path.ends_with(end));
        for file in folder.files.iter_mut().filter(|file| file.role == FileRole::Other && is_state(&file.path)) {
            file.role = FileRole::Ignored(IgnoreReason::TrainingState);
        }
    }

    /// Reads them.
    pub(crate) fn read(&self, files: &PinnedFiles<'_>, problems: &mut Problems) -> Contents {
        match self.kind {
            Kind::Fsdp => fsdp::read(files, &self.below, problems),
            Kind::Megatron => megatron::read(files, &self.below, problems),
            Kind::Zero => zero::read(files, &self.below, problems),
        }
    }
}
