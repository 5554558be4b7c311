//! The state of the sources and files that are in use; see [`super::watching`].

use std::{
    collections::{BTreeSet, HashMap},
    sync::atomic::AtomicU64,
};

use ckfs_source::{FileId, Stall};
use parking_lot::Mutex;

use super::{Ino, OnChange};

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Watched {
    /// Inodes that were opened: a bit set in words of 64 bits.
    pub(super) opened: Mutex<HashMap<u64, u64>>,
    /// Sources of files that were opened.
    pub(super) in_use: Mutex<BTreeSet<FileId>>,
    /// Sources that a thread is checking now; the check may take long.
    pub(super) checking: Mutex<BTreeSet<FileId>>,
    /// Stalls that were reported already.
    pub(super) stalls: Mutex<Vec<Stall>>,
    /// Poisoned sources that were reported already.
    pub(super) reported: AtomicU64,
    /// Called when a source has changed.
    pub(super) on_change: Mutex<Option<OnChange>>,
    /// Files that the kernel reads directly from the next open on, and whose pages it still keeps.
    pub(super) superseded: Mutex<BTreeSet<Ino>>,
}

impl Watched {
    /// Notes that a file was opened. Returns whether it was before.
    pub(super) fn note_opened(&self, ino: Ino) -> bool {
        let (mut opened, bit) = (self.opened.lock(), 1 << (ino.0 % 64));
        let word = opened.entry(ino.0 / 64).or_default();
        let before = *word & bit != 0;
        *word |= bit;
        before
    }

    /// Notes that sources are read from now on.
    pub(super) fn note_in_use(&self, files: &[FileId]) {
        self.in_use.lock().extend(files);
    }

    /// Notes that the kernel reads a file directly from the next open on. That open would wait while the kernel drops the pages it
    /// has read through ckfs, 0.1 s per GB, so they are dropped now.
    pub(super) fn note_superseded(&self, ino: Ino) {
        self.superseded.lock().insert(ino);
        self.report();
    }

    /// Tells the server that there are files to drop.
    pub(super) fn report(&self) {
        if let Some(callback) = &*self.on_change.lock() {
            callback();
        }
    }

    pub(super) fn opened(&self) -> Vec<Ino> {
        let opened = self.opened.lock();
        let bits = |(word, bits): (&u64, &u64)| {
            let (word, bits) = (*word, *bits);
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| Ino(word * 64 + bit))
        };
        opened.iter().flat_map(bits).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opened_files_are_remembered_once() {
        let watched = Watched::default();
        for (ino, before) in [(1, false), (64, false), (63, false), (1, true), (1 << 40, false)] {
            assert_eq!(watched.note_opened(Ino(ino)), before, "{ino}");
        }
        let mut opened: Vec<u64> = watched.opened().into_iter().map(|ino| ino.0).collect();
        opened.sort_unstable();
        assert_eq!(opened, [1, 63, 64, 1 << 40]);
    }
}
