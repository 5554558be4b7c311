//! Which steps of a run are finished: their marks say so, their files are silent, and fresh ones can be opened.
//!
//! A mark alone is not enough where a directory has its final name from the start: files may come in any order when a run is
//! copied, and some are written after the mark. So a step whose files changed lately is shown only after a moment of silence,
//! and once its checkpoint opens. One that does not open, and does not change any more, is damaged: it is shown, with its
//! error.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime},
};

use ckfs_checkpoint::{
    Checkpoint, CheckpointError, OpenOptions,
    runs::{FoundStep, FoundSteps, Measure, StepDirectory, StepKind, StepState},
};
use ckfs_config::Config;
use ckfs_source::{WaitGuard, WaitRegistry, is_on_network};
use serde_json::{Value, json};

use super::super::{error::OpenError, open};

/// How long the files of a marked step must be silent.
const QUIET: Duration = Duration::from_millis(600);
/// The same of a version of weights, most of which have digests.
const QUIET_VERSION: Duration = Duration::from_millis(200);
/// The same of a step that nothing marks as finished.
const QUIET_UNMARKED: Duration = Duration::from_secs(10);
/// A step whose files changed within this time is opened before it is shown.
const FRESH: Duration = Duration::from_mins(2);
/// A step that cannot be opened is shown after this time without a change.
const DAMAGED: Duration = Duration::from_secs(5);
/// Time between two attempts to open a step.
const RETRY: Duration = Duration::from_millis(500);
/// Time for opening fresh steps in one look of a run that is followed. Those that are left come in the next look, so that a run that
/// was just copied does not keep its newest step back until all others are open.
pub(super) const OPENING: Duration = Duration::from_millis(500);
/// The same at the start of a mount or a server.
pub(super) const OPENING_AT_START: Duration = Duration::from_secs(10);

/// A step of a run as commands and mounts see it.
#[derive(Clone, Debug)]
pub struct ListedStep {
    /// Its number.
    pub number: u64,
    /// Its directory, relative to the run.
    pub name: String,
    /// What it holds.
    pub kind: StepKind,
    /// The source of its checkpoint.
    pub source: String,
    /// What its files come to, if they were measured.
    pub measure: Option<Measure>,
    /// Why it is not finished; `None` if it is.
    pub unfinished: Option<String>,
}

impl ListedStep {
    fn new(step: &FoundStep, directory: &StepDirectory, measure: Option<Measure>, unfinished: Option<String>) -> Self {
        let FoundStep { number, name, kind, .. } = step;
        Self {
            number: *number,
            name: name.clone(),
            kind: *kind,
            source: directory.source_of(step),
            measure,
            unfinished,
        }
    }

    /// What is told of it.
    pub fn to_json(&self) -> Value {
        json!({
            "step": self.number,
            "name": self.name,
            "source": self.source,
            "kind": self.kind.to_string(),
            "bytes": self.measure.as_ref().map(|measure| measure.bytes),
            "complete": self.unfinished.is_none(),
            "unfinished": self.unfinished,
        })
    }

    /// Whether two are of one directory in one state.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let stamp = |step: &Self| step.measure.as_ref().map(|measure| measure.stamp);
        self.number == other.number && self.name == other.name && stamp(self) == stamp(other)
    }

    #[cfg(test)]
    pub(super) fn for_tests(number: u64, stamp: u64) -> Self {
        Self {
            number,
            name: number.to_string(),
            kind: StepKind::Orbax,
            source: format!("/run/{number}"),
            measure: Some(Measure::of_state(stamp)),
            unfinished: None,
        }
    }
}

/// What is known of a step that was found earlier.
#[derive(Debug)]
struct Seen {
    measure: Option<Measure>,
    /// Since when that has this stamp.
    since: Instant,
    /// Found finished in this state.
    is_finished: bool,
    /// The last attempt to open it, and why it failed.
    attempt: Option<(Instant, String)>,
}

impl Seen {
    fn new(since: Instant, measure: Option<Measure>) -> Self {
        Self { measure, since, is_finished: false, attempt: None }
    }
}

/// The steps of a run over several looks.
pub(super) struct Settling {
    directory: StepDirectory,
    options: OpenOptions,
    /// Whether the clock of the storage is that of this machine.
    has_own_clock: bool,
    seen: HashMap<String, Seen>,
    /// The last look.
    found: FoundSteps,
}

/// The result of a look.
#[derive(Debug)]
pub(super) struct Look {
    /// All steps, by number.
    pub(super) steps: Vec<ListedStep>,
    pub(super) found: FoundSteps,
    /// When to look again without a notification.
    pub(super) again: Option<Duration>,
}

/// The directory of the run that a configuration names, with how its steps are opened.
///
/// # Errors
/// There is none.
pub(crate) fn step_directory(
    config: &Config,
    waits: &Arc<WaitRegistry>,
) -> Result<(StepDirectory, OpenOptions), OpenError> {
    let source = config.source.clone().ok_or_else(OpenError::no_source)?;
    let options = open::open_options(config, waits);
    match StepDirectory::new(&source, &options) {
        Ok(directory) => Ok((directory, options)),
        Err(error) => Err(OpenError::Checkpoint { source_name: source, error }),
    }
}

impl Settling {
    pub(super) fn new(directory: StepDirectory, options: OpenOptions) -> Self {
        let has_own_clock = directory.local().is_some_and(|path| !is_on_network(path));
        Self { directory, options, has_own_clock, seen: HashMap::new(), found: FoundSteps::default() }
    }

    /// Goes on with other options.
    pub(super) fn go_on(&mut self, directory: StepDirectory, options: OpenOptions) {
        (self.directory, self.options, self.found) = (directory, options, FoundSteps::default());
    }

    /// Forgets what was found of a step, so that the next look measures it.
    pub(super) fn recheck(&mut self, name: &str) {
        self.seen.remove(name);
    }

    /// Looks at all steps. Of those that were found finished earlier, `measures` tells which may have changed, by name. Fresh steps are
    /// opened for the time `opening`, the newest first.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub(super) fn look(&mut self, measures: &dyn Fn(&str) -> bool, opening: Duration) -> Result<Look, CheckpointError> {
        let seen = &self.seen;
        let holds = |name: &str| seen.get(name).is_some_and(|seen| seen.is_finished) && !measures(name);
        let wants = |step: &FoundStep| !matches!(step.state, StepState::Unfinished(_)) && !holds(&step.name);
        let begun = (Instant::now(), SystemTime::now());
        let (found, measures) = self.directory.list_some((&self.found, &holds), &wants)?;
        let names: HashSet<&str> = found.steps.iter().map(|step| step.name.as_str()).collect();
        self.seen.retain(|name, _| names.contains(name.as_str()));
        let mut again: Option<Duration> = None;
        let mut steps = Vec::with_capacity(found.steps.len());
        let mut left = opening;
        for (step, measured) in found.steps.iter().zip(measures).rev() {
            let unfinished = self.judge(step, measured, begun, &mut left, wants_again(&mut again)).err();
            let measure = self.seen.get(&step.name).and_then(|seen| seen.measure.clone());
            steps.push(ListedStep::new(step, &self.directory, measure, unfinished));
        }
        steps.reverse();
        self.found.clone_from(&found);
        Ok(Look { steps, found, again })
    }

    /// Whether a step is finished, or why not. It was measured after `begun`. To open it takes from the time `left`. `again` learns
    /// when to look again.
    fn judge(
        &mut self,
        step: &FoundStep,
        measured: Option<Measure>,
        begun: (Instant, SystemTime),
        left: &mut Duration,
        mut again: impl FnMut(Duration),
    ) -> Result<(), String> {
        let quiet = match &step.state {
            StepState::Unfinished(reason) => {
                self.seen.remove(&step.name);
                return Err(reason.clone());
            }
            StepState::Complete if step.kind == StepKind::Version => QUIET_VERSION,
            StepState::Complete => QUIET,
            StepState::Unmarked => QUIET_UNMARKED,
        };
        let now = Instant::now();
        let Some(measure) = measured else {
            // Not measured since it is finished, or it went while it was measured.
            return match self.seen.get(&step.name) {
                Some(seen) if seen.is_finished => Ok(()),
                _ => {
                    again(RETRY);
                    Err("its files cannot be listed, or go away".to_owned())
                }
            };
        };
        let seen = self.seen.entry(step.name.clone()).or_insert_with(|| Seen::new(now, None));
        // Files that others add to a finished step are no part of it.
        if seen.is_finished && seen.measure.as_ref().is_some_and(|earlier| measure.contains(earlier)) {
            return Ok(());
        }
        if seen.measure.as_ref().map(|earlier| earlier.stamp) != Some(measure.stamp) {
            *seen = Seen::new(now, Some(measure.clone()));
        }
        let silent = silent(seen.since, &measure, begun, self.has_own_clock);
        if silent < quiet {
            again(quiet.saturating_sub(silent));
            return Err("its files have just changed".to_owned());
        }
        if silent >= FRESH {
            seen.is_finished = true;
            return Ok(());
        }
        if let Some((last, error)) = seen.attempt.as_ref().filter(|(last, _)| last.elapsed() < RETRY) {
            again(RETRY.saturating_sub(last.elapsed()));
            return Err(error.clone());
        }
        if left.is_zero() {
            again(Duration::ZERO);
            return Err("it is not opened yet: newer ones come first".to_owned());
        }
        let opening = Instant::now();
        let opened = Checkpoint::open(&self.directory.source_of(step), &self.options);
        *left = left.saturating_sub(opening.elapsed());
        let error = match opened {
            Ok(_) => {
                seen.is_finished = true;
                return Ok(());
            }
            Err(error) => format!("it cannot be opened yet: {error}"),
        };
        if silent >= DAMAGED.max(quiet) {
            // It is shown, and its error with it.
            seen.is_finished = true;
            return Ok(());
        }
        seen.attempt = Some((now, error.clone()));
        again(RETRY);
        Err(error)
    }
}

/// How long the files had not changed, at least, when the look that measured them began: as this process has seen since a moment, and
/// as the times of files tell. To measure many steps, and to open others, takes a time in which they may have changed.
fn silent(since: Instant, measure: &Measure, begun: (Instant, SystemTime), has_own_clock: bool) -> Duration {
    let by_clock = begun.1.duration_since(measure.changed).unwrap_or_default();
    // Another clock may be wrong by seconds, and object stores tell whole ones.
    let trusted = if has_own_clock { by_clock } else { by_clock.saturating_sub(Duration::from_secs(5)) };
    begun.0.saturating_duration_since(since).max(trusted)
}

/// A function that keeps the least of the times it is given.
fn wants_again(least: &mut Option<Duration>) -> impl FnMut(Duration) {
    |time| *least = Some(least.map_or(time, |least| least.min(time)))
}

/// Longest time that a command waits for steps whose files have just changed.
const SETTLE_LIMIT: Duration = Duration::from_secs(3);

impl Settling {
    /// Looks until no step is about to be finished, for some seconds at most, beside the time `opening` for opening fresh steps.
    pub(super) fn settle(&mut self, opening: Duration) -> Result<Look, CheckpointError> {
        let until = Instant::now() + SETTLE_LIMIT;
        loop {
            let look = self.look(&|_| false, opening)?;
            let left = until.saturating_duration_since(Instant::now());
            match look.again.filter(|again| *again <= left) {
                Some(again) => thread::sleep(again.max(Duration::from_millis(10))),
                None => return Ok(look),
            }
        }
    }
}

/// The steps of the run that a configuration names, all of them or those that it wants: finished ones, and others with the
/// reason why they are not.
///
/// # Errors
/// The directory cannot be listed, or it holds no step.
pub fn finished_steps(config: &Config, waits: &Arc<WaitRegistry>) -> Result<Vec<ListedStep>, OpenError> {
    let (directory, options) = step_directory(config, waits)?;
    let source = config.source.clone().unwrap_or_default();
    let failed = |error| OpenError::Checkpoint { source_name: source.clone(), error };
    let look = Settling::new(directory, options).settle(Duration::MAX).map_err(failed)?;
    refuse_checkpoint(&source, &look.found)?;
    if look.steps.is_empty() {
        return Err(failed(CheckpointError::NoSteps { run: source.clone(), found: "no step yet".to_owned() }));
    }
    Ok(look.steps)
}

/// The steps of a directory as they are now, each measured, without waiting for any: by their marks alone. None of a directory
/// that holds none.
///
/// # Errors
/// The directory cannot be listed.
pub fn listed_steps(config: &Config, waits: &Arc<WaitRegistry>) -> Result<Vec<ListedStep>, OpenError> {
    let (directory, _) = step_directory(config, waits)?;
    let source = config.source.clone().unwrap_or_default();
    let failed = |error| OpenError::Checkpoint { source_name: source, error };
    let (found, measures) = directory.list_some((&FoundSteps::default(), &|_| false), &|_| true).map_err(failed)?;
    let listed = |(step, measure): (&FoundStep, Option<Measure>)| {
        let unfinished = match &step.state {
            StepState::Complete | StepState::Unmarked => None,
            StepState::Unfinished(reason) => Some(reason.clone()),
        };
        ListedStep::new(step, &directory, measure, unfinished)
    };
    Ok(found.steps.iter().zip(measures).map(listed).collect())
}

/// Refuses a directory that is a checkpoint and no run.
pub(super) fn refuse_checkpoint(source: &str, found: &FoundSteps) -> Result<(), OpenError> {
    if found.is_checkpoint && !found.is_run() {
        let found = "a checkpoint: leave --steps out, or give the directory above".to_owned();
        let error = CheckpointError::NoSteps { run: source.to_owned(), found };
        return Err(OpenError::Checkpoint { source_name: source.to_owned(), error });
    }
    Ok(())
}

/// The directories of steps that are watched, by name of the step.
pub(super) type OfSteps = HashMap<String, Vec<PathBuf>>;

/// The directories to watch for changes of a local run, what matters most first: its own, that of its steps, those of the steps, and
/// what is in them, deeper in those that are not finished. `known` are those of the look before, which stay as they are for finished
/// steps that did not change; also whether one is new since. `looking` is the wait for all of them.
pub(super) fn watched(
    directory: &StepDirectory,
    look: &Look,
    (known, changed): (&mut OfSteps, &dyn Fn(&str) -> bool),
    looking: &WaitGuard<'_>,
) -> (Vec<PathBuf>, bool) {
    let Some(run) = directory.local() else { return (Vec::new(), false) };
    let (mut of_steps, mut has_new) = (OfSteps::with_capacity(look.steps.len()), false);
    let (mut first, mut rest) = (vec![run.to_owned(), run.join(&look.found.directory)], Vec::new());
    for step in look.steps.iter().rev() {
        let is_finished = step.unfinished.is_none();
        let before = known.remove(&step.name);
        let inside = match before {
            Some(before) if is_finished && !changed(&step.name) => before,
            before => {
                let inside = directories_of(run, step);
                has_new |= before.is_none_or(|before| inside.iter().any(|place| !before.contains(place)));
                inside
            }
        };
        if is_finished { &mut rest } else { &mut first }.extend(inside.iter().cloned());
        of_steps.insert(step.name.clone(), inside);
        looking.advance();
    }
    *known = of_steps;
    first.extend(rest);
    (first, has_new)
}

/// The directories of a step that are watched.
fn directories_of(run: &Path, step: &ListedStep) -> Vec<PathBuf> {
    let place = run.join(&step.name);
    let mut found = vec![place.clone()];
    let checkpoint = Path::new(&step.source);
    found.extend(checkpoint.starts_with(&place).then(|| checkpoint.to_owned()));
    let depth = if step.unfinished.is_some() { DEPTH_WATCHED } else { DEPTH_FINISHED };
    add_inside(&place, depth, &mut found);
    found
}

/// Depth to which the directories of an unfinished step are watched.
const DEPTH_WATCHED: usize = 4;
/// The same of a finished step: items of Orbax, and the models beside others of reinforcement learning.
const DEPTH_FINISHED: usize = 1;

fn add_inside(place: &Path, depth: usize, watched: &mut Vec<PathBuf>) {
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            watched.push(entry.path());
            add_inside(&entry.path(), depth - 1, watched);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_ends_where_the_look_begins() {
        let seconds = Duration::from_secs;
        let begun = (Instant::now(), SystemTime::now());
        let since = |before: u64| begun.0.checked_sub(seconds(before)).unwrap();
        let changed = |time: SystemTime| {
            let mut measure = Measure::of_state(1);
            measure.changed = time;
            measure
        };
        for (seen, written, own, other) in [(1, 0, 1, 1), (0, 7, 7, 2), (9, 7, 9, 9), (0, 3, 3, 0)] {
            let measure = changed(begun.1.checked_sub(seconds(written)).unwrap());
            let found = [true, false].map(|has_own_clock| silent(since(seen), &measure, begun, has_own_clock));
            assert_eq!(found, [seconds(own), seconds(other)]);
        }
        // It changed, or was seen first, after the look began.
        thread::sleep(Duration::from_millis(5));
        assert_eq!(silent(Instant::now(), &changed(SystemTime::now()), begun, true), Duration::ZERO);
    }

    #[test]
    fn fresh_steps_are_opened_one_look_after_the_other_the_newest_first() {
        let run = tempfile::tempdir().unwrap();
        let header = br#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
        for number in [10, 20, 30] {
            let step = run.path().join(format!("checkpoint-{number}"));
            fs::create_dir(&step).unwrap();
            fs::write(step.join("model.safetensors"), &weights).unwrap();
            for name in ["config.json", "trainer_state.json"] {
                fs::write(step.join(name), "{}").unwrap();
            }
        }
        thread::sleep(QUIET);
        let options = OpenOptions::default();
        let directory = StepDirectory::new(&run.path().display().to_string(), &options).unwrap();
        let mut settling = Settling::new(directory, options);
        for expected in [&[30][..], &[20, 30], &[10, 20, 30]] {
            let look = settling.look(&|_| true, Duration::from_nanos(1)).unwrap();
            let finished = look.steps.iter().filter(|step| step.unfinished.is_none()).map(|step| step.number);
            assert_eq!(finished.collect::<Vec<_>>(), expected);
            assert_eq!(look.again, (expected.len() < 3).then_some(Duration::ZERO));
        }
    }
}
