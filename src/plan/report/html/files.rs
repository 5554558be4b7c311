//! The files of the sources, as a page numbers them.

use std::collections::HashMap;

use ckfs_checkpoint::Checkpoint;
use ckfs_source::FileId;

/// The files of the sources, as the page numbers them.
#[derive(Debug)]
pub(super) struct EmbeddedFiles {
    numbers: HashMap<FileId, usize>,
    /// The number of a file that is not the checkpoint's own.
    other: usize,
}

impl EmbeddedFiles {
    pub(super) fn new(checkpoint: &Checkpoint) -> Self {
        let files = checkpoint.files().iter().enumerate();
        let numbers = files.filter_map(|(number, file)| Some((file.file?, number))).collect();
        Self { numbers, other: checkpoint.files().len() }
    }

    /// The number of a file.
    pub(super) fn number(&self, file: FileId) -> usize {
        self.numbers.get(&file).copied().unwrap_or(self.other)
    }
}
