//! The steps of a run, for the commands that go through them.

use std::{fmt::Write as _, iter, path::Path};

use anyhow::anyhow;
use ckfs_checkpoint::{printable, runs::StepKind};
use ckfs_config::{Config, Steps};
use ckfs_plan::report::human_bytes;
use ckfs_service::{
    average::of_moving,
    steps::{ListedStep, Run, finished_steps, listed_steps},
    wait_registry,
};
use serde_json::Value;

use super::{open, paragraph::counted};

/// How a run is shown, for the end of a table.
const HINT: &str = "--steps all|latest|latest=N shows finished steps: ";

/// What a run shows when it begins to be served.
pub(super) fn shown(run: &Run) -> String {
    let steps = counted(run.steps().len(), "step");
    match run.latest() {
        Some(latest) => format!("{steps}, the newest {latest}"),
        None => format!("{steps} so far"),
    }
}

/// The steps of the run that a configuration's source is, without waiting for any; `None` if it is no directory of steps. Services
/// are not asked, see [`of_service`].
///
/// # Errors
/// The directory cannot be listed.
pub(super) fn of_directory(config: &Config) -> anyhow::Result<Option<Vec<ListedStep>>> {
    let Some(source) = config.source.as_deref().filter(|source| !source.contains("://")) else { return Ok(None) };
    let waits = open::ending_waits(config)?;
    let path = Path::new(source);
    if !open::within(&config.mount, path, "look", || path.is_dir()) {
        return Ok(None);
    }
    let found = listed_steps(config, &waits).map_err(open::explained)?;
    Ok(Some(found).filter(|steps| steps.iter().any(|step| step.kind != StepKind::Unknown)))
}

/// The steps of the run at an address, which holds no checkpoint; none if it holds no run either.
pub(super) fn of_service(config: &Config) -> Vec<ListedStep> {
    if !config.source.as_deref().is_some_and(|source| source.contains("://")) {
        return Vec::new();
    }
    // Whatever fails here has failed before: the caller has that error.
    let found = listed_steps(config, &wait_registry(&config.mount)).unwrap_or_default();
    if found.iter().any(|step| step.kind != StepKind::Unknown) { found } else { Vec::new() }
}

/// The finished steps that `--steps` selects, by number, each with the configuration of its checkpoint.
///
/// # Errors
/// There is no run, or no step of it is finished: why, of the newest ones.
pub(super) fn selected(config: &Config, wanted: Steps) -> anyhow::Result<Vec<(ListedStep, Config)>> {
    let waits = open::ending_waits(config)?;
    let all = finished_steps(config, &waits).map_err(open::explained)?;
    let (finished, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|step| step.unfinished.is_none());
    for step in &others {
        let reason = step.unfinished.as_deref().unwrap_or_default();
        tracing::warn!("step {} is passed over: {}", step.number, printable(reason));
    }
    if finished.is_empty() {
        let run = config.source.as_deref().unwrap_or_default();
        return Err(anyhow!("{run}: no step is finished\n{}", table(&others).trim_end()));
    }
    let first = finished.len() - wanted.most().unwrap_or(finished.len()).min(finished.len());
    let all: Vec<(u64, String)> = finished.iter().map(|step| (step.number, step.source.clone())).collect();
    let alone = |step: ListedStep| {
        let mut config = Config { source: Some(step.source.clone()), ..config.clone() };
        config.mount.average = of_moving(&config, step.number, all.iter().cloned()).map_err(open::explained)?;
        (config.mount.steps, config.mount.steps_poll, config.mount.on_step) = (None, None, None);
        Ok((step, config))
    };
    finished.into_iter().skip(first).map(alone).collect()
}

fn state(step: &ListedStep) -> String {
    let reason = step.unfinished.as_ref().map(|reason| format!("not finished: {}", printable(reason)));
    reason.unwrap_or_else(|| "complete".to_owned())
}

/// The steps as lines: number, kind, size, and whether each is finished.
pub(super) fn table(steps: &[ListedStep]) -> String {
    let size =
        |step: &ListedStep| step.measure.as_ref().map_or_else(|| "-".to_owned(), |found| human_bytes(found.bytes));
    let row = |step: &ListedStep| [step.number.to_string(), step.kind.to_string(), size(step), state(step)];
    let header = ["step", "kind", "size", "state"].map(str::to_owned);
    let rows: Vec<[String; 4]> = iter::once(header).chain(steps.iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [number, kind, bytes] = [0, 1, 2].map(width);
    let mut text = String::new();
    for [step, of_kind, size, state] in &rows {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {step:>number$}  {of_kind:<kind$}  {size:>bytes$}  {state}");
    }
    text
}

/// The table of a run with the flag that shows it.
pub(super) fn run_text(source: &str, steps: &[ListedStep]) -> String {
    let complete = steps.iter().filter(|step| step.unfinished.is_none()).count();
    let (all, source) = (counted(steps.len(), "step"), printable(source));
    format!(
        "{source}: a run of {all}, {complete} complete\n{}{HINT}ckfs mount {source} MNT --steps all\n",
        table(steps)
    )
}

/// The same as JSON.
pub(super) fn to_json(steps: &[ListedStep]) -> Value {
    steps.iter().map(ListedStep::to_json).collect()
}
