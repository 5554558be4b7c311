//! From what the user wants averaged to sources and weights.

use std::time::{Duration, SystemTime};

use ckfs_checkpoint::{
    OpenOptions,
    runs::{FoundSteps, StepDirectory, StepState},
};
use ckfs_config::{Average, Config};

use super::error::OpenError;

/// How long the files of a step that nothing marks as finished must be silent.
const QUIET_UNMARKED: Duration = Duration::from_secs(10);

/// Has the average of a configuration name its sources, and its source be the last of them.
///
/// # Errors
/// The source is no run, or a step of it is not there or not finished.
pub(super) fn resolve(config: &mut Config, options: &OpenOptions) -> Result<(), OpenError> {
    let Some(average) = &config.mount.average else { return Ok(()) };
    let sources = match average {
        Average::Sources(_) => return Ok(()),
        Average::Last(count) => {
            let steps = finished(config, options)?;
            if steps.len() < usize::from(*count) {
                let found = steps.len();
                return Err(OpenError::Surroundings(format!(
                    "--average last={count}: expected {count} finished steps, found {found}"
                )));
            }
            last(*count, steps.into_iter())
        }
        Average::Steps(terms) => {
            let steps = finished(config, options)?;
            let term = |(number, weight): &(u64, f32)| {
                let missing = || {
                    let text = format!("--average: expected a finished step {number} in the run, found none");
                    OpenError::Surroundings(text)
                };
                let step = steps.iter().find(|(of_run, _)| of_run == number).ok_or_else(missing)?;
                Ok((step.1.clone(), *weight))
            };
            terms.iter().map(term).collect::<Result<_, OpenError>>()?
        }
    };
    config.source = sources.last().map(|(source, _)| source.clone());
    config.mount.average = Some(Average::Sources(sources));
    Ok(())
}

/// The numbers and sources of the finished steps of a run.
fn finished(config: &Config, options: &OpenOptions) -> Result<Vec<(u64, String)>, OpenError> {
    let source = config.source.clone().ok_or_else(OpenError::no_source)?;
    let failed = |error| OpenError::Checkpoint { source_name: source.clone(), error };
    let directory = StepDirectory::new(&source, options).map_err(failed)?;
    // What is written while they are measured is not silent.
    let begun = SystemTime::now();
    let (found, measures) = directory.list_some((&FoundSteps::default(), &|_| false), &|_| true).map_err(failed)?;
    let steps = found.steps.iter().zip(measures).filter(|(step, measure)| match step.state {
        StepState::Complete => true,
        StepState::Unmarked => {
            let changed = measure.as_ref().map(|measure| measure.changed);
            changed
                .and_then(|changed| begun.duration_since(changed).ok())
                .is_some_and(|silent| silent >= QUIET_UNMARKED)
        }
        StepState::Unfinished(_) => false,
    });
    Ok(steps.map(|(step, _)| (step.number, directory.source_of(step))).collect())
}

/// The average of the last of these steps, which are in order of number.
fn last(count: u16, steps: impl DoubleEndedIterator<Item = (u64, String)>) -> Vec<(String, f32)> {
    let mut sources: Vec<String> = steps.rev().take(usize::from(count)).map(|(_, source)| source).collect();
    sources.reverse();
    let weight = 1.0 / f32::from(u16::try_from(sources.len()).unwrap_or(count));
    sources.into_iter().map(|source| (source, weight)).collect()
}

/// The average that a run shows at a step, if it shows averages: of the last ones of these finished steps up to it, which are in order
/// of number.
///
/// # Errors
/// The average is not of the last steps.
pub fn of_moving(
    config: &Config,
    number: u64,
    steps: impl DoubleEndedIterator<Item = (u64, String)>,
) -> Result<Option<Average>, OpenError> {
    match &config.mount.average {
        None => Ok(None),
        Some(Average::Last(count)) => {
            Ok(Some(Average::Sources(last(*count, steps.filter(|(step, _)| *step <= number)))))
        }
        Some(Average::Steps(_) | Average::Sources(_)) => {
            let text = "--average with --steps: expected last=N, the average of the last N steps up to each";
            Err(OpenError::Surroundings(text.to_owned()))
        }
    }
}
