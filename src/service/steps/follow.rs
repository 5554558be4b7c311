//! The thread that looks for new and deleted steps.
//!
//! On a local file system it sleeps until the kernel tells of a change. Elsewhere, and as a precaution, it looks from time to time.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    io::{self, Read},
    os::fd::AsFd,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{Arc, Weak, atomic::Ordering},
    thread,
    time::{Duration, Instant, SystemTime},
};

use ckfs_config::TimeLimit;
use ckfs_host::thread_cpu_time;
use ckfs_source::{DirectoryWatch, Woken};

use super::{
    run::Run,
    settle::{ListedStep, Look, OPENING, OfSteps, Settling, watched},
    slot::Slot,
    slots::same,
};

/// Time between two looks where nothing tells of changes.
const POLL: Duration = Duration::from_mins(1);
/// Time after a change before a look, so that many changes are one look.
const PAUSE: Duration = Duration::from_millis(60);
/// Time until a directory that is newly watched is looked at again.
const AGAIN: Duration = Duration::from_millis(100);
/// The looks take at most one part in this of a processor.
const PART_MAX: u32 = 10;
/// The same of looks where nothing tells of a change, and of those into all finished steps.
const PART_QUIET: u32 = 1000;

/// Starts the thread.
///
/// # Errors
/// The system starts no thread.
pub(super) fn start(run: &Arc<Run>) -> io::Result<()> {
    let (heard, bell) = io::pipe()?;
    *run.bell.lock() = Some(bell);
    let watch = DirectoryWatch::new()?;
    let settling = run.settling.lock().take().ok_or_else(|| io::Error::other("its steps are followed already"))?;
    let followed = Arc::downgrade(run);
    thread::Builder::new().name("ckfs-steps".to_owned()).spawn(move || follow(&followed, settling, watch, heard))?;
    Ok(())
}

fn follow(run: &Weak<Run>, mut settling: Settling, mut watch: DirectoryWatch, mut bell: io::PipeReader) {
    // What may have changed since the last look; `None` for anything.
    let (mut changed, mut known) = (Some(BTreeSet::new()), OfSteps::new());
    let mut looks_into_all_at = Instant::now();
    loop {
        let Some(alive) = run.upgrade().filter(|run| !run.has_ended.load(Ordering::Relaxed)) else { return };
        let (begun, cpu_before) = (Instant::now(), thread_cpu_time());
        // Of a run in an object store one listing tells all.
        let of_steps = alive.directory.local().zip(changed.as_ref()).map(|(run, changed)| names_of(run, changed));
        let measures = |name: &str| of_steps.as_ref().is_none_or(|names| names.contains(Path::new(name)));
        let looked = catch_unwind(AssertUnwindSafe(|| alive.look(&mut settling, &measures)));
        let took = begun.elapsed();
        let own = POLL.max(thread_cpu_time().saturating_sub(cpu_before).saturating_mul(PART_QUIET));
        let poll = alive.config.mount.steps_poll.map_or(own, TimeLimit::duration);
        let next = match looked {
            Ok(Ok(look)) => {
                alive.note_looking(None);
                alive.plan_ahead();
                let watching = alive.waits.begin_path(Path::new(&alive.source), "watch");
                let (directories, has_new) = watched(&alive.directory, &look, (&mut known, &measures), &watching);
                watch.set(&directories);
                drop(watching);
                // What happened in a new directory before it was watched nobody tells of.
                let again = if has_new { Some(look.again.map_or(AGAIN, |again| again.min(AGAIN))) } else { look.again };
                again.map_or(poll, |again| again.min(poll))
            }
            Ok(Err(error)) => {
                alive.note_looking(Some(error));
                poll.min(Duration::from_secs(5))
            }
            // The panic has its line in the log.
            Err(_) => poll,
        };
        if of_steps.is_none() {
            looks_into_all_at = Instant::now() + poll.max(own);
        }
        drop(alive);
        let pause = PAUSE.max(took.saturating_mul(PART_MAX));
        let polls_at = Instant::now() + next;
        let mut measures_all = false;
        match watch.wait(next, bell.as_fd()) {
            Ok(Woken::Changed) => {
                thread::sleep(pause.min(Duration::from_secs(2)));
                // What came meanwhile.
                let _ = watch.wait(Duration::ZERO, bell.as_fd());
            }
            Ok(Woken::Timeout) => {
                let now = Instant::now();
                measures_all = next >= poll && now >= polls_at && now >= looks_into_all_at;
            }
            Ok(Woken::Stopped) => {
                let mut rung = [0; 64];
                // The other end is gone with the run.
                if !matches!(bell.read(&mut rung), Ok(1..)) {
                    return;
                }
            }
            Err(error) => {
                tracing::error!("cannot wait for new steps: {error}");
                thread::sleep(Duration::from_secs(5));
            }
        }
        changed = watch.take_changed().filter(|_| !measures_all);
    }
}

/// The changed paths relative to the run, and the directories above them: the names of the steps that changed are among them.
fn names_of<'a>(run: &Path, changed: &'a BTreeSet<PathBuf>) -> HashSet<&'a Path> {
    let relative = changed.iter().filter_map(|path| path.strip_prefix(run).ok());
    relative.flat_map(Path::ancestors).collect()
}

impl Run {
    /// Looks at the directory, and shows what is there.
    fn look(&self, settling: &mut Settling, measures: &dyn Fn(&str) -> bool) -> Result<Look, String> {
        self.counts.looks.fetch_add(1, Ordering::Relaxed);
        let rechecks = self.rechecks.lock().clone();
        for name in &rechecks {
            settling.recheck(name);
        }
        let look = settling.look(measures, OPENING).map_err(|error| error.to_string())?;
        // What was found wrong and is there as it was before has another slot.
        for name in &rechecks {
            let listed = self.slots.listed();
            let Some(slot) = listed.iter().find(|slot| slot.step.name == *name) else { continue };
            let is_same = look.steps.iter().any(|step| step.unfinished.is_none() && step.is_same(&slot.step));
            if let Some(volume) = slot.volume().filter(|volume| is_same && volume.is_poisoned()) {
                drop(self.slots.replace(slot, None));
                self.part_with(volume);
                self.counts.rewritten.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.take(&look);
        // Those that came meanwhile are for the next look.
        self.rechecks.lock().drain(..rechecks.len());
        Ok(look)
    }

    /// Shows the finished steps of a look.
    pub(super) fn take(&self, look: &Look) {
        // Before the steps are shown: the average of one is planned by it.
        self.looked.write().clone_from(&look.steps);
        let finished: Vec<&ListedStep> = look.steps.iter().filter(|step| step.unfinished.is_none()).collect();
        let most = self.wanted.most().unwrap_or(finished.len()).min(finished.len());
        let slots = self.slots.by_number();
        let known = |step: &ListedStep| same(&slots, step).map(|slot| slot.permission);
        let permission = |step| known(step).unwrap_or_else(|| self.permission_of_step(step));
        let shown = finished[finished.len() - most..].iter().map(|step| ((*step).clone(), permission(step)));
        let by_number: HashMap<u64, &ListedStep> = finished.iter().map(|step| (step.number, *step)).collect();
        let are_there = |step: &ListedStep| by_number.get(&step.number).is_some_and(|other| other.is_same(step));
        let changes = self.slots.show(&shown.collect::<Vec<_>>(), &are_there);
        self.count_ended(&changes.ended, look);
        for volume in changes.volumes {
            self.part_with(volume);
        }
        for slot in &changes.new {
            self.counts.appeared.fetch_add(1, Ordering::Relaxed);
            tracing::info!("step {} is there: {}, {}", slot.step.number, slot.step.name, slot.step.kind);
            if let Some(hook) = &*self.hook.lock() {
                hook.add(slot.step.number);
            }
        }
        if !changes.ended.is_empty() || !changes.new.is_empty() {
            *self.modified.write() = SystemTime::now();
            self.share_out();
        }
    }

    /// Counts the steps that were shown and are no more: at once, or when a later look says what becomes of them. A directory
    /// that loses its files one by one is there for a while.
    fn count_ended(&self, ended: &[Arc<Slot>], look: &Look) {
        let mut changing = self.changing.lock();
        changing.extend(ended.iter().map(|slot| (slot.step.number, slot.step.name.clone())));
        changing.retain(|number, name| {
            let found = look.steps.binary_search_by_key(number, |step| step.number).ok().map(|at| &look.steps[at]);
            let (count, what) = match found {
                Some(step) if step.unfinished.is_some() => return true,
                Some(_) => (&self.counts.rewritten, "is written anew"),
                None => (&self.counts.deleted, "was deleted"),
            };
            count.fetch_add(1, Ordering::Relaxed);
            tracing::info!("step {number} {what}: {name}");
            false
        });
    }

    /// Notes whether the directory can be listed.
    fn note_looking(&self, error: Option<String>) {
        let mut failed = self.looking_failed.lock();
        if let Some(error) = error.as_ref().filter(|error| failed.as_ref() != Some(error)) {
            tracing::error!("{}: cannot look for steps: {error}", self.source);
        }
        *failed = error;
    }
}
