//! Files of ranks: what each rank of a training saved for itself, one file or a few for each.
//!
//! | kind | files | read by |
//! | --- | --- | --- |
//! | FSDP of verl, `SkyRL`, lmms-engine | `model_world_size_8_rank_0.pt` … | `fsdp.rs` |
//!
//! A tensor is put together by what the files say of it: placements and meshes. No two values are ever compared.

mod fsdp;

use super::super::{
    choose::{TORCH_INDEX_SUFFIX, at_top, is_safetensors},
    companion::{self, Companion},
    container::{Contents, DCP_METADATA, is_torch},
    file::{FileRole, IgnoreReason},
    folder::{Folder, PinnedFiles},
    problem::{CheckpointError, Problems},
    weight_name::variant_of_index,
};
pub(crate) use fsdp::{FsdpName, given_alone};

/// Where trainers put the configuration and the tokenizer, beside files of ranks.
const COMPANIONS: [&str; 1] = ["huggingface/"];

/// Directories of a step in which a trainer keeps the files of ranks.
const FSDP_DIRECTORIES: [&str; 2] = ["", "pytorch_model_fsdp_0/"];

/// What the files of ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Fsdp,
}

/// The files of ranks of a directory.
#[derive(Clone, Debug)]
pub(crate) struct RankFiles {
    kind: Kind,
    /// What stands before their names: nothing, or a directory with its slash.
    below: String,
}

/// The files of ranks in a folder; `None` if there are none, or other weights beside them.
pub(crate) fn find(folder: &Folder) -> Option<RankFiles> {
    if has_whole_weights(folder) {
        return None;
    }
    let has = |below: &str| paths(folder).any(|path| FsdpName::of(path, below).is_some());
    let fsdp = FSDP_DIRECTORIES.into_iter().find(|below| has(below));
    fsdp.map(|below| RankFiles { kind: Kind::Fsdp, below: below.to_owned() })
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
        }
    }
}
