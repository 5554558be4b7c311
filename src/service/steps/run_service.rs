//! A run with the threads that keep it alive.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use ckfs_config::Config;
use ckfs_source::WaitRegistry;
use ckfs_volume::{Handle, Ino, Metrics, NoPassthrough, OnChange, RequestKind, Upkeep, Volume, WhenMaterialized};

use super::{
    super::{
        alive::{Alive, AliveContent},
        error::OpenError,
        upkeep::{self, PERIOD, Upkeeping},
    },
    follow,
    hook::{Hook, StepPlace},
    run::Run,
    run_tree::RunTree,
    slot::{Slot, split},
};

/// A run that is served, with the threads that keep it alive.
pub struct RunService {
    run: Arc<Run>,
    running: Option<Upkeeping>,
}

impl RunService {
    /// Opens the run that a configuration names: see [`Run::open`].
    ///
    /// # Errors
    /// As [`Run::open`].
    pub fn open(config: &mut Config, waits: &Arc<WaitRegistry>) -> Result<Self, OpenError> {
        Ok(Self { run: Run::open(config, waits)?, running: None })
    }
}

impl Alive for RunService {
    fn start(&mut self) -> io::Result<()> {
        follow::start(&self.run)?;
        self.running = Some(start_upkeep(&self.run)?);
        Ok(())
    }

    fn note_reached(&self, place: StepPlace) {
        let Some(command) = &self.run.config.mount.on_step else { return };
        match Hook::start(command, place) {
            Ok(hook) => *self.run.hook.lock() = Some(hook),
            Err(error) => tracing::error!("--on-step: no thread starts: {error}"),
        }
    }

    fn content(&self) -> AliveContent<'_> {
        AliveContent::Run(&self.run)
    }

    fn file_system(&self) -> Arc<dyn Upkeep> {
        Arc::new(RunTree(Arc::clone(&self.run)))
    }

    fn label(&self) -> &str {
        self.run.label()
    }

    fn config(&self) -> &Config {
        &self.run.config
    }
}

impl Drop for RunService {
    fn drop(&mut self) {
        self.run.has_ended.store(true, Ordering::Relaxed);
        self.run.ring();
        drop(self.run.hook.lock().take());
    }
}

/// Starts the repeated work: memory of closed files and of unused steps is released, sources in use are checked.
///
/// # Errors
/// The system starts no thread.
fn start_upkeep(run: &Arc<Run>) -> io::Result<Upkeeping> {
    let (tended, checked) = (Arc::downgrade(run), Arc::downgrade(run));
    let tend = move || {
        let Some(run) = tended.upgrade() else { return };
        for (_, volume) in run.volumes() {
            volume.trim();
        }
        run.rooms.trim();
        run.drop_idle(None);
    };
    let check = move || {
        let Some(run) = checked.upgrade() else { return };
        for (slot, volume) in run.volumes() {
            volume.check_sources();
            run.note_poisoned(&slot, &volume);
        }
        run.drop_parted();
    };
    upkeep::repeat(PERIOD, tend, check)
}

impl Run {
    /// Has a step looked at again of which a file was found changed.
    fn note_poisoned(&self, slot: &Slot, volume: &Volume) {
        if volume.is_poisoned() {
            self.recheck(&slot.step.name);
        }
    }

    fn volume_of(&self, ino: Ino) -> Option<(Arc<Volume>, Ino)> {
        let (index, inner) = split(ino.0);
        Some((self.slots.get(index)?.volume()?, Ino(inner)))
    }
}

impl Upkeep for RunTree {
    fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    fn stall_limit(&self) -> Duration {
        self.0.waits.limit()
    }

    fn note_stalls(&self) {
        let mut threads = Vec::new();
        for (_, volume) in self.0.volumes() {
            volume.note_stalls();
            threads.extend(volume.engine().slow_threads());
        }
        self.0.rooms.replace_waiting(&threads);
    }

    fn is_waiting(&self) -> bool {
        !self.0.opening.lock().is_empty() || self.0.volumes().iter().any(|(_, volume)| volume.is_waiting())
    }

    fn is_stalled(&self, ino: Ino) -> bool {
        match self.0.volume_of(ino) {
            Some((volume, inner)) => volume.is_stalled(inner),
            None => self.0.slots.get(split(ino.0).0).is_some_and(|slot| slot.is_stalled()),
        }
    }

    fn note_given_up(&self, op: RequestKind, ino: Ino) {
        if let Some((volume, inner)) = self.0.volume_of(ino) {
            volume.note_given_up(op, inner);
        }
    }

    fn on_change(&self, callback: Option<OnChange>) {
        let callback = callback.map(Arc::new);
        (*self.0.on_change.lock()).clone_from(&callback);
        for (_, volume) in self.0.volumes() {
            let told = callback.clone();
            volume.on_change(told.map(|told| Box::new(move || told()) as OnChange));
        }
    }

    fn changed_files(&self) -> Vec<Ino> {
        let mut changed = Vec::new();
        for (slot, volume) in self.0.volumes() {
            let found = catch_unwind(AssertUnwindSafe(|| volume.changed_files())).unwrap_or_default();
            if !found.is_empty() {
                self.0.note_poisoned(&slot, &volume);
            }
            changed.extend(found.into_iter().map(|inner| slot.outer(inner)));
        }
        changed
    }

    fn started(&self, passthrough: Result<(), NoPassthrough>) {
        *self.0.passthrough.lock() = Some(passthrough.is_ok());
        for (_, volume) in self.0.volumes() {
            self.0.begin(&volume);
        }
    }

    fn materialize(&self, ino: Ino, handle: Handle, then: WhenMaterialized) {
        match self.0.volume_of(ino) {
            Some((volume, inner)) => volume.materialize(inner, Handle(split(handle.0).1), then),
            None => then(None),
        }
    }
}
