//! Planning a step when it is first looked at, or is new and the newest, and dropping the volume of one that nobody uses.

use std::{
    cmp::Reverse,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use ckfs_config::Config;
use ckfs_source::WaitRegistry;
use ckfs_volume::{FsError, NoPassthrough, OnChange, Upkeep, Volume, VolumeOptions};

use super::{
    super::{average, error::OpenError, open, requests::panic_text, wait_watch::wait_registry},
    failed::FailedStep,
    report::add_counters,
    run::Run,
    settle,
    slot::{Slot, SlotState, StepContent},
};

/// Most steps that are planned at a time, those aside that wait for storage.
const OPENING_MAX: usize = 4;
/// Most of these. Once the storage of all does not answer, requests that need yet another plan fail.
const QUIET_MAX: usize = 16;
/// Time between two looks of a request that waits for a plan.
const LOOK: Duration = Duration::from_millis(100);
/// Volumes that nobody uses are kept while they have at most this many tensors together.
const IDLE_WEIGHT_MAX: u64 = 200_000;
/// Most such volumes.
const IDLE_MAX: usize = 32;
/// A volume is unused after this time without a request and without open files.
const IDLE: Duration = Duration::from_mins(2);

/// A planned step.
struct PlannedStep {
    volume: Volume,
    weight: u64,
    chunk_bytes: u64,
}

impl Run {
    /// What a step shows; it is planned now if it is not.
    ///
    /// # Errors
    /// [`FsError::Io`]: it has ended, its storage does not answer, or its files are others than before.
    pub(super) fn content(self: &Arc<Self>, slot: &Arc<Slot>) -> Result<StepContent, FsError> {
        slot.note_used();
        let mut state = slot.state.lock();
        loop {
            match &*state {
                SlotState::Ready(content) => return Ok(content.clone()),
                SlotState::Ended => return Err(self.gone()),
                SlotState::Absent => self.begin_plan(slot, &mut state)?,
                SlotState::Opening => {}
            }
            slot.changed.wait_for(&mut state, LOOK);
            if matches!(&*state, SlotState::Opening) && slot.is_stalled() {
                tracing::warn!("step {}: its storage does not answer", slot.step.number);
                return Err(FsError::Io);
            }
        }
    }

    /// Starts a thread that plans a step, unless as many as may be are planned now. `state` is the step's own.
    fn begin_plan(self: &Arc<Self>, slot: &Arc<Slot>, state: &mut SlotState) -> Result<(), FsError> {
        let mut opening = self.opening.lock();
        let quiet = opening.iter().filter(|slot| slot.is_quiet()).count().min(QUIET_MAX);
        if opening.len() - quiet >= OPENING_MAX {
            if opening.iter().any(|slot| !slot.is_stalled()) {
                return Ok(());
            }
            let count = opening.len();
            tracing::warn!("step {}: not planned: the storage of {count} steps does not answer", slot.step.number);
            return Err(FsError::Io);
        }
        opening.push(Arc::clone(slot));
        *state = SlotState::Opening;
        let (run, of) = (Arc::clone(self), Arc::clone(slot));
        let work = move || run.plan(&of, |config, waits| run.open_volume(config, waits));
        ckfs_sync::spawn("ckfs-step-open", work).map_err(|error| {
            tracing::error!("step {}: no thread plans it: {error}", slot.step.number);
            opening.retain(|other| other.index != slot.index);
            *state = SlotState::Absent;
            FsError::Io
        })
    }

    /// Plans the newest step if it came since this was last called, so that its first reader finds it planned.
    pub(super) fn plan_ahead(self: &Arc<Self>) {
        let Some(slot) = self.slots.newest() else { return };
        if self.planned_ahead.fetch_max(slot.index, Ordering::Relaxed) < slot.index {
            let mut state = slot.state.lock();
            if matches!(&*state, SlotState::Absent) {
                // Without a thread its first reader plans it.
                let _ = self.begin_plan(&slot, &mut state);
            }
        }
    }

    /// Plans a step, in its own thread.
    fn plan(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        open: impl FnOnce(Config, &Arc<WaitRegistry>) -> Result<PlannedStep, OpenError>,
    ) {
        let waits = wait_registry(&self.config.mount);
        *slot.waits.lock() = Some(Arc::clone(&waits));
        self.slots.note_planned(slot);
        self.counts.plans.fetch_add(1, Ordering::Relaxed);
        let opened = || self.config_of(slot).and_then(|config| open(config, &waits));
        let opened = catch_unwind(AssertUnwindSafe(|| match opened() {
            Ok(planned) => self.ready(slot, planned),
            Err(error) => self.failed(slot, error.to_string(), &waits),
        }));
        if let Err(panic) = opened {
            let cause = panic_text(panic.as_ref()).to_owned();
            self.metrics.note_panic(&format!("planning step {}", slot.step.number), &cause);
            self.show_failure(slot, format!("the planning panicked: {cause}"));
        }
        *slot.waits.lock() = None;
        self.opening.lock().retain(|other| other.index != slot.index);
        self.share_out();
        self.drop_idle(Some(slot.index));
    }

    fn ready(self: &Arc<Self>, slot: &Arc<Slot>, planned: PlannedStep) {
        let PlannedStep { volume, weight, chunk_bytes } = planned;
        let fingerprint = volume.fingerprint();
        let volume = Arc::new(volume);
        let content = StepContent::Volume(Arc::clone(&volume));
        self.begin(&volume);
        slot.weight.store(weight, Ordering::Relaxed);
        slot.chunk_bytes.store(chunk_bytes, Ordering::Relaxed);
        if *slot.fingerprint.get_or_init(|| fingerprint) == fingerprint {
            if slot.set(SlotState::Ready(content)).is_some() {
                // It has ended meanwhile.
                self.part_with(volume);
            }
            return;
        }
        // The kernel knows other files under these numbers.
        tracing::info!("step {}: its files are others than before", slot.step.number);
        self.counts.rewritten.fetch_add(1, Ordering::Relaxed);
        if let Some(new) = self.slots.replace(slot, Some(content)) {
            let _ = new.fingerprint.set(fingerprint);
            new.weight.store(weight, Ordering::Relaxed);
            new.chunk_bytes.store(chunk_bytes, Ordering::Relaxed);
        }
    }

    fn failed(&self, slot: &Arc<Slot>, message: String, waits: &Arc<WaitRegistry>) {
        let place = &slot.step.name;
        let directory = settle::step_directory(&self.config, waits).ok();
        let measured = directory.and_then(|(directory, _)| directory.measure(place));
        let is_same = match (&measured, &slot.step.measure) {
            (Some(now), Some(before)) => now.contains(before),
            (_, before) => before.is_none() && measured.is_some(),
        };
        if !is_same {
            // It is being deleted or written: the next look says which.
            tracing::debug!("step {}: it changes while it is planned: {message}", slot.step.number);
            self.recheck(place);
            drop(slot.set(SlotState::Absent));
            // Those that wait for it need not wait for the look.
            drop(self.slots.replace(slot, None));
            return;
        }
        self.show_failure(slot, message);
    }

    /// Shows why a step cannot be planned.
    fn show_failure(&self, slot: &Arc<Slot>, message: String) {
        self.counts.failed_plans.fetch_add(1, Ordering::Relaxed);
        tracing::error!("step {}: {message}", slot.step.number);
        let modified = slot.plain_attr().modified;
        let failed = FailedStep::new(message, slot.permission, modified);
        let content = StepContent::Failed(Arc::new(failed));
        if slot.fingerprint.get().is_some() {
            // The kernel knows files under these numbers.
            self.slots.replace(slot, Some(content));
        } else {
            drop(slot.set(SlotState::Ready(content)));
        }
    }

    /// Has a step measured at the next look, which is now.
    pub(super) fn recheck(&self, name: &str) {
        let mut rechecks = self.rechecks.lock();
        // One of two may be at work.
        if rechecks.iter().filter(|waiting| *waiting == name).count() < 2 {
            rechecks.push(name.to_owned());
        }
        drop(rechecks);
        self.ring();
    }

    /// The configuration of a step alone. That of an average stays what it was first: steps of it may be deleted.
    fn config_of(&self, slot: &Slot) -> Result<Config, OpenError> {
        let mut config = self.config.clone();
        let looked = self.looked.read().clone();
        let finished =
            looked.into_iter().filter(|step| step.unfinished.is_none()).map(|step| (step.number, step.source));
        let average = average::of_moving(&config, slot.step.number, finished)?;
        config.mount.average.clone_from(slot.average.get_or_init(|| average));
        config.source = Some(slot.step.source.clone());
        config.mountpoint = None;
        (config.mount.steps, config.mount.steps_poll, config.mount.on_step) = (None, None, None);
        Ok(config)
    }

    fn open_volume(&self, mut config: Config, waits: &Arc<WaitRegistry>) -> Result<PlannedStep, OpenError> {
        let checkpoint = open::open_checkpoint(&mut config, waits)?;
        let plans = open::plan_views(&checkpoint, &config)?;
        let mut budget = self.budget.clone();
        let chunk_bytes = open::admit_chunks(&checkpoint, &plans, &mut budget)?;
        open::bound_source(&checkpoint, &budget, OPENING_MAX as u64, chunk_bytes);
        let weight = checkpoint.tensors().count() + plans.iter().map(|view| view.plan.tensors.len()).sum::<usize>();
        let options = open::volume_options(&config, budget, Some(self.rooms.clone()))?;
        // The command that mounts anew is that of the run.
        let options = VolumeOptions { remount: self.remount.clone(), ..options };
        let mut volume = Volume::new(Arc::clone(&checkpoint), plans, options)?;
        if let Err(error) = open::enable_materialization(&mut volume)? {
            tracing::debug!("no file is materialized: no file system in memory: {error}");
        }
        Ok(PlannedStep { volume, weight: weight as u64, chunk_bytes })
    }

    /// Passes to a new volume what the server of the run received.
    pub(super) fn begin(&self, volume: &Arc<Volume>) {
        let passthrough = *self.passthrough.lock();
        match passthrough {
            Some(true) => volume.started(Ok(())),
            Some(false) => volume.started(Err(NoPassthrough::Off)),
            None => {}
        }
        let told = self.on_change.lock().clone();
        volume.on_change(told.map(|told| Box::new(move || told()) as OnChange));
    }

    /// Divides what belongs to sources among the volumes that there are now.
    pub(super) fn share_out(&self) {
        let volumes = self.volumes();
        let parts = volumes.len().max(1) as u64;
        for (slot, volume) in volumes {
            let chunk_bytes = slot.chunk_bytes.load(Ordering::Relaxed);
            open::bound_source(volume.engine().checkpoint(), &self.budget, parts, chunk_bytes);
        }
    }

    /// Drops the volumes that nobody uses, but for a few. The newest step stays planned. `kept` is the slot of a volume that was
    /// just planned.
    pub(super) fn drop_idle(&self, kept: Option<u64>) {
        let newest = self.slots.newest().map(|slot| slot.index);
        let mut idle: Vec<(Duration, Arc<Slot>)> = Vec::new();
        for slot in self.slots.left() {
            if matches!(&*slot.state.lock(), SlotState::Absent) {
                self.slots.forget(&slot);
            }
        }
        for (slot, volume) in self.volumes() {
            if !volume.has_open_files() && ![kept, newest].contains(&Some(slot.index)) {
                idle.push((slot.idle(), slot));
            }
        }
        // Those used last come first.
        idle.sort_by_key(|(idle, slot)| (*idle, Reverse(slot.index)));
        let (mut weight, mut dropped) = (0_u64, false);
        for (place, (time, slot)) in idle.iter().enumerate() {
            weight = weight.saturating_add(slot.weight.load(Ordering::Relaxed));
            if *time > IDLE || weight > IDLE_WEIGHT_MAX || place >= IDLE_MAX {
                let Some(volume) = slot.take_unused() else { continue };
                self.part_with(volume);
                self.counts.dropped.fetch_add(1, Ordering::Relaxed);
                dropped = true;
            }
        }
        if dropped {
            self.share_out();
        }
    }

    /// Keeps the numbers of a volume of which no slot knows any more, and has it dropped by a thread that may wait: its files are
    /// closed then, and their storage may not answer.
    pub(super) fn part_with(&self, volume: Arc<Volume>) {
        volume.on_change(None);
        add_counters(&mut self.retired.lock(), volume.counters());
        self.parted.lock().push(volume);
        self.drop_parted();
    }

    /// Drops the volumes of steps that have gone and that no request uses any more.
    pub(super) fn drop_parted(&self) {
        let mut parted = self.parted.lock();
        let (unused, used): (Vec<_>, Vec<_>) = parted.drain(..).partition(|volume| Arc::strong_count(volume) == 1);
        *parted = used;
        drop(parted);
        if !unused.is_empty()
            && let Err(error) = ckfs_sync::spawn("ckfs-step-close", move || drop(unused))
        {
            tracing::debug!("a step is closed without a thread of its own: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ckfs_config::Steps;

    use super::*;

    #[test]
    fn a_step_whose_planning_panics_is_shown_with_that() {
        let directory = tempfile::tempdir().unwrap();
        let step = directory.path().join("checkpoint-1");
        fs::create_dir(&step).unwrap();
        let header = br#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
        fs::write(step.join("model.safetensors"), weights).unwrap();
        for name in ["config.json", "trainer_state.json"] {
            fs::write(step.join(name), "{}").unwrap();
        }
        let mut config = Config { source: Some(directory.path().display().to_string()), ..Config::default() };
        config.mount.steps = Some(Steps::All);
        let waits = wait_registry(&config.mount);
        let run = Run::open(&mut config, &waits).unwrap();
        let slot = run.slots.newest().unwrap();
        *slot.state.lock() = SlotState::Opening;
        run.opening.lock().push(Arc::clone(&slot));
        run.plan(&slot, |_, _| panic!("on purpose"));
        let Some(StepContent::Failed(failed)) = slot.content() else { panic!("the step is shown") };
        assert_eq!(failed.message, "the planning panicked: on purpose");
        assert!(run.opening.lock().is_empty() && matches!(run.content(&slot), Ok(StepContent::Failed(_))));
    }
}
