//! What the volume watches: which of its sources are in use, which files were opened, what changed and what stalls.
//!
//! A source that changes takes the files made of it along. The kernel may keep pages of those, read before the change or
//! while it went on, so whoever serves the volume is told ([`FileSystem::on_change`](super::FileSystem::on_change)) and
//! asks which files to drop ([`FileSystem::changed_files`](super::FileSystem::changed_files)). Only files that were opened
//! can have pages there.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{Ino, OnChange, Op, ProblemKind, Volume};
use crate::{
    read::counters::add,
    source::{FileId, Stall},
};

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Watched {
    /// Inodes that were opened: bits of words of 64.
    opened: Mutex<HashMap<u64, u64>>,
    /// Sources of files that were opened.
    in_use: Mutex<BTreeSet<FileId>>,
    /// Sources that somebody looks at now, who may wait for long.
    looked_at: Mutex<BTreeSet<FileId>>,
    /// Stalls that were reported.
    stalls: Mutex<Vec<Stall>>,
    /// Poisoned sources that were told of.
    told: AtomicU64,
    on_change: Mutex<Option<OnChange>>,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watched").field("in_use", &self.in_use).field("told", &self.told).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watched {
    /// Notes that a file was opened.
    pub(super) fn note_opened(&self, ino: Ino) {
        *lock(&self.opened).entry(ino.0 / 64).or_default() |= 1 << (ino.0 % 64);
    }

    /// Notes that sources are read from now on.
    pub(super) fn note_in_use(&self, files: &[FileId]) {
        lock(&self.in_use).extend(files);
    }

    /// Sets the function that is called when a source has changed; `None` for no call.
    pub(super) fn set_on_change(&self, told: Option<OnChange>) {
        *lock(&self.on_change) = told;
    }

    fn opened(&self) -> Vec<Ino> {
        let opened = lock(&self.opened);
        let bits = |(word, bits): (&u64, &u64)| {
            let (word, bits) = (*word, *bits);
            (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| Ino(word * 64 + bit))
        };
        opened.iter().flat_map(bits).collect()
    }
}

impl Volume {
    /// The sources that give no answer now, and since when.
    pub fn stalled(&self) -> Vec<Stall> {
        self.engine.checkpoint().source().health().stalls()
    }

    /// Looks whether the sources of files that were opened are what they were, so that a change to one is logged, counted
    /// and told although no read passes here. To be called every few seconds; may wait for storage that gives no answer,
    /// and other calls then pass over what this one waits for.
    pub fn look_at_sources(&self) {
        let files = lock(&self.watched.in_use).clone();
        for file in files {
            if lock(&self.watched.looked_at).insert(file) {
                // The source logs and counts what changed.
                drop(self.engine.check_original(file));
                lock(&self.watched.looked_at).remove(&file);
            }
        }
        self.tell_changes();
    }

    /// Tells of sources found poisoned since this was last called.
    pub(super) fn tell_changes(&self) {
        let found = self.engine.checkpoint().source().health().poisoned();
        if self.watched.told.fetch_max(found, Ordering::Relaxed) < found {
            self.tell_again();
        }
    }

    /// Tells of a change that was seen after bytes went out.
    pub(super) fn tell_again(&self) {
        if let Some(told) = &*lock(&self.watched.on_change) {
            told();
        }
    }

    /// Files that were opened and are made of a poisoned source.
    pub(super) fn files_of_poisoned(&self) -> Vec<Ino> {
        let source = self.engine.checkpoint().source();
        let lost = |ino: &Ino| self.sources_of(*ino).iter().any(|file| source.health().is_poisoned(*file));
        self.watched.opened().into_iter().filter(lost).collect()
    }

    /// Whether a source of a file gives no answer.
    pub(super) fn waits_for_stalled(&self, ino: Ino) -> bool {
        let source = self.engine.checkpoint().source();
        !source.health().stalls().is_empty()
            && self.sources_of(ino).iter().any(|file| source.health().is_stalled(*file))
    }

    /// Reports stalls that began or ended since this was last called.
    pub(super) fn report_stalls(&self) {
        let found = self.stalled();
        let mut known = lock(&self.watched.stalls);
        let is_among = |stalls: &[Stall], stall: &Stall| stalls.iter().any(|other| other.file == stall.file);
        for stall in found.iter().filter(|stall| !is_among(&known, stall)) {
            let cause = format!("{} got no answer for {:.1} s", stall.what, stall.since.elapsed().as_secs_f32());
            self.health().note(ProblemKind::SourceStalled, &stall.file.display().to_string(), &cause);
        }
        for stall in known.iter().filter(|stall| !is_among(&found, stall)) {
            self.health().clear(ProblemKind::SourceStalled, &stall.file.display().to_string());
        }
        *known = found;
    }

    /// Counts an open or a read that was given up.
    pub(super) fn count_given_up(&self, op: Op) {
        let counters = self.engine.counters();
        add(if op == Op::Open { &counters.failed_opens } else { &counters.failed_reads }, 1);
        add(&counters.stalled_reads, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opened_files_are_remembered_once() {
        let watched = Watched::default();
        for ino in [1, 64, 63, 1, 1 << 40] {
            watched.note_opened(Ino(ino));
        }
        let mut opened: Vec<u64> = watched.opened().into_iter().map(|ino| ino.0).collect();
        opened.sort_unstable();
        assert_eq!(opened, [1, 63, 64, 1 << 40]);
    }
}
