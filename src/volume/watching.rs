//! The volume watches which sources are in use, which files were opened, which sources changed and which stall.
//!
//! A changed source makes the files derived from it invalid. The kernel may keep pages of them, read before or during the
//! change. So the volume calls its server ([`Upkeep::on_change`]), and the server then
//! asks which files to drop ([`Upkeep::changed_files`]). Only files that were opened
//! can have pages in the kernel.

use std::{
    fs::File,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::Ordering,
    time::Duration,
};

use ckfs_read::counters::add;
use ckfs_source::Stall;

use super::{
    file_system::{Handle, Ino},
    health::ProblemKind,
    metrics::{Metrics, RequestKind},
    upkeep::{NoPassthrough, OnChange, Upkeep, WhenMaterialized},
    volume::{Open, Volume},
};

impl Volume {
    /// Checks whether the sources of opened files are unchanged, so that a change is logged, counted and reported even if no
    /// read goes through ckfs. The caller repeats it every few seconds. It may wait for storage that does not answer;
    /// concurrent calls then skip the sources that this one waits for.
    pub fn check_sources(&self) {
        let files = self.watched.in_use.lock().clone();
        for file in files {
            if self.watched.checking.lock().insert(file) {
                // The source logs and counts the change. A panic must not keep the other files from being checked.
                let check = || drop(self.engine.check_original(file));
                if catch_unwind(AssertUnwindSafe(check)).is_err() {
                    let path = self.engine.checkpoint().source().path(file);
                    tracing::error!("{}: its check panicked", path.display());
                    self.metrics.note_panic(&format!("check of {}", path.display()), "see the log");
                }
                self.watched.checking.lock().remove(&file);
            }
        }
        self.report_changes();
    }

    /// Reports sources that were found poisoned since the last call.
    pub(super) fn report_changes(&self) {
        let found = self.engine.checkpoint().source().health().poisoned();
        if self.watched.reported.fetch_max(found, Ordering::Relaxed) < found {
            self.watched.report();
        }
    }

    /// Whether a file is made of a source that was found poisoned.
    pub fn needs_poisoned(&self, ino: Ino) -> bool {
        let source = self.engine.checkpoint().source();
        self.sources_of(ino).iter().any(|file| source.health().is_poisoned(*file))
    }

    /// Reports stalls that began or ended since the last call.
    fn report_stalls(&self) {
        let found = self.engine.checkpoint().source().health().stalls();
        let mut known = self.watched.stalls.lock();
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
}

impl Upkeep for Volume {
    fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    fn stall_limit(&self) -> Duration {
        self.engine.checkpoint().source().health().fetches.limit()
    }

    fn note_stalls(&self) {
        self.engine.note_stalls();
        self.report_stalls();
        self.report_changes();
    }

    fn is_waiting(&self) -> bool {
        self.engine.is_waiting()
    }

    fn is_stalled(&self, ino: Ino) -> bool {
        let source = self.engine.checkpoint().source();
        !source.health().stalls().is_empty()
            && self.sources_of(ino).iter().any(|file| source.health().is_stalled(*file))
    }

    fn note_given_up(&self, op: RequestKind, _ino: Ino) {
        let counters = self.engine.counters();
        add(if op == RequestKind::Open { &counters.failed_opens } else { &counters.failed_reads }, 1);
        add(&counters.stalled_reads, 1);
    }

    fn on_change(&self, callback: Option<OnChange>) {
        *self.watched.on_change.lock() = callback;
    }

    fn changed_files(&self) -> Vec<Ino> {
        let mut files: Vec<Ino> = self.watched.opened().into_iter().filter(|ino| self.needs_poisoned(*ino)).collect();
        files.extend(std::mem::take(&mut *self.watched.superseded.lock()));
        files
    }

    fn trial(&self) -> Option<File> {
        self.materializer.as_ref()?.trial()
    }

    fn started(&self, passthrough: Result<(), NoPassthrough>) {
        match (&self.materializer, passthrough) {
            (Some(materializer), Ok(())) => materializer.is_on.store(true, Ordering::Relaxed),
            // Files that the kernel would not read are not made. Those in memory are a default; a directory was requested.
            (Some(_), Err(reason)) => {
                if let Some(directory) = self.policy.directory() {
                    tracing::warn!("--materialize {}: nothing is written there: {reason}", directory.display());
                }
            }
            (None, _) => {}
        }
    }

    fn succeed(&self, first_handle: u64) {
        self.first_handle.store(first_handle, Ordering::Relaxed);
        self.next_handle.store(first_handle, Ordering::Relaxed);
        for ino in Ino::ROOT.0..=self.tree.len() {
            self.watched.note_opened(Ino(ino));
        }
    }

    fn materialize(&self, ino: Ino, handle: Handle, then: WhenMaterialized) {
        match (&self.materializer, self.opened(ino, handle)) {
            (Some(materializer), Some(Open::Image(file, Some(entry)))) => materializer.materialize(&entry, &file, then),
            (_, _) => then(None),
        }
    }
}
