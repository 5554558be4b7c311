//! The frame in which files of ranks become a table: all are read, and what they say of each tensor is put together.

use std::{collections::BTreeMap, fmt::Display};

use ckfs_format::{
    pickle::read::Id,
    torch::read::{Allowed, OpenedArchive, SavedTensor},
};
use ckfs_source::FileId;
use ckfs_tensor::DType;

use super::{
    super::super::{
        archive::{self, ArchiveSpan},
        container::LeftOut,
        folder::PinnedFiles,
        mosaic::{MosaicBuilder, StoredBox},
        problem::{Problem, Problems},
        table::TensorTable,
    },
    names::RankFile,
};

/// Ranks that a message names.
pub(super) const NAMED: usize = 8;

/// The files of all ranks, which are read together.
pub(super) struct RankJob<'a> {
    pub(super) files: &'a PinnedFiles<'a>,
    pub(super) below: &'a str,
    pub(super) found: Vec<(FileId, RankFile<'a>)>,
}

/// A tensor of one file.
pub(super) type Saved = (FileId, SavedTensor);

/// A tensor as its parts make it: type, shape and boxes.
pub(super) type Assembled = (DType, Vec<u64>, Vec<StoredBox>);

impl<'a> RankJob<'a> {
    pub(super) fn path(&self, file: FileId) -> &'a str {
        self.files.path(file)
    }

    /// What is wrong with a file.
    pub(super) fn fault(&self, file: FileId, what: impl Display) -> Problem {
        Problem::of_file(self.path(file), what)
    }

    /// That something holds, or what is wrong with a file.
    pub(super) fn ensure(&self, holds: bool, file: FileId, what: impl Display) -> Result<(), Problem> {
        ensure(holds, what).map_err(|what| self.fault(file, what))
    }

    /// What `interpret` makes of each file, in order, or the problems of all that cannot be read.
    pub(super) fn states<T: Send>(
        &self,
        allowed: Allowed,
        interpret: &(dyn Fn(FileId, &RankFile<'_>, &OpenedArchive) -> Result<T, String> + Sync),
    ) -> Result<Vec<T>, Vec<Problem>> {
        let source = self.files.source;
        let items: Vec<ArchiveSpan> = self.found.iter().map(|(file, _)| ArchiveSpan::whole(source, *file)).collect();
        let interpret = |number: usize, opened: &OpenedArchive| {
            let (file, name) = &self.found[number];
            interpret(*file, name, opened)
        };
        let (mut states, mut problems) = (Vec::with_capacity(items.len()), Vec::new());
        for (item, state) in items.iter().zip(archive::read_opened(source, &items, allowed, &interpret)) {
            match state {
                Ok(state) => states.push(state),
                Err(message) => problems.push(self.fault(item.file, message)),
            }
        }
        if problems.is_empty() { Ok(states) } else { Err(problems) }
    }

    /// The table of these tensors. The file of each is named if it cannot be put together.
    pub(super) fn table(
        &self,
        tensors: impl Iterator<Item = (impl AsRef<str>, FileId, Result<Assembled, String>)>,
        problems: &mut Problems,
    ) -> TensorTable {
        let mut builder = MosaicBuilder::new(self.files.source, problems);
        for (name, file, assembled) in tensors {
            let name = name.as_ref();
            match assembled {
                Ok((dtype, shape, boxes)) => builder.add(name, dtype, &shape, boxes, None),
                Err(what) => builder.problems().push(self.fault(file, format_args!("tensor {name:?}: {what}"))),
            }
        }
        builder.finish()
    }
}

/// That something holds, or what is wrong.
pub(super) fn ensure(holds: bool, what: impl Display) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_string()) }
}

/// A tensor of a file, which messages call `what`.
pub(super) fn tensor_of(opened: &OpenedArchive, id: Id, name: &str, what: impl Display) -> Result<SavedTensor, String> {
    let found = opened.tensor(id, name).map_err(|error| error.to_string())?;
    found.ok_or_else(|| format!("{what}: expected a tensor"))
}

/// What is no tensor, each name once.
pub(super) fn left_out(others: impl IntoIterator<Item = (String, String)>) -> Vec<LeftOut> {
    let others: BTreeMap<String, String> = others.into_iter().collect();
    others.into_iter().map(|(name, kind)| LeftOut { name, kind }).collect()
}

/// The first of `count` ranks of which nothing is there, as messages name them.
pub(super) fn missing(count: u64, is_there: impl Fn(&u64) -> bool) -> Vec<String> {
    (0..count).filter(|rank| !is_there(rank)).take(NAMED).map(|rank| rank.to_string()).collect()
}

/// The message about ranks of which no files are there.
pub(super) fn lacking(expected: u64, found: usize, missing: &str) -> String {
    format!(
        "expected the files of {expected} ranks, found {found}; missing: {missing}: the save did not finish, or not all files were copied"
    )
}
