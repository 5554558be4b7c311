//! What the volume watches: which of its sources are in use, which files were opened, what changed and what stalls.
//!
//! A source that changes takes the files made of it along. The kernel may keep pages of those, read before the change or
//! while it went on, so whoever serves the volume is told ([`FileSystem::on_change`](super::FileSystem::on_change)) and
//! asks which files to drop ([`FileSystem::changed_files`](super::FileSystem::changed_files)). Only files that were opened
//! can have pages there.

use std::sync::atomic::Ordering;

use super::{file_system::Ino, health::ProblemKind, metrics::Op, served::Volume, watched::lock};
use crate::{read::counters::add, source::Stall};

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
