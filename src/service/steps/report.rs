//! What a run tells of itself: `steps.json`, `stats.json` and `metrics`.

use std::sync::atomic::Ordering;

use ckfs_host::memory;
use ckfs_source::{DecodedChunks, calendar::utc};
use ckfs_volume::{LATENCY_BOUNDS_US, MetricText, Volume, held_rows, memory_json, ops};
use serde_json::{Map, Value, json};

use super::{super::alive::OpenProblem, run::RunState, slot::StepContent};

/// Length of `stats.json`.
const STATS_BYTES: usize = 128 << 10;
/// Most problems that are listed.
const PROBLEMS_MAX: usize = 16;

/// Adds the counters of a volume to others.
pub(super) fn add_counters(sums: &mut Map<String, Value>, counters: Map<String, Value>) {
    for (name, value) in counters {
        add(sums.entry(name).or_insert(Value::Null), &value);
    }
}

/// Adds a number, or each member of an object.
fn add(sum: &mut Value, value: &Value) {
    if let Value::Object(members) = value {
        members.iter().for_each(|(name, value)| add(&mut sum[name], value));
    } else {
        *sum = sum.as_u64().unwrap_or(0).saturating_add(value.as_u64().unwrap_or(0)).into();
    }
}

impl RunState {
    /// `steps.json`.
    pub(super) fn steps_text(&self) -> Vec<u8> {
        let listed = self.slots.listed();
        let looked = self.looked.read().clone();
        let row = |step: &super::settle::ListedStep| {
            let slot = listed.iter().find(|slot| slot.step.is_same(step));
            let error = slot.and_then(|slot| slot.content()?.volume().err().map(str::to_owned));
            let mut row = step.to_json();
            row["path"] = slot.map(|slot| slot.step.number.to_string()).into();
            row["error"] = error.into();
            row["changed"] = step.measure.as_ref().map(|measure| utc(measure.changed)).into();
            row
        };
        let all = json!({
            "run": self.source,
            "shown": self.wanted.most().map_or_else(|| "all".to_owned(), |most| format!("latest={most}")),
            "latest": self.latest(),
            "steps": looked.iter().map(row).collect::<Vec<_>>(),
        });
        let mut text = serde_json::to_vec_pretty(&all).unwrap_or_default();
        text.push(b'\n');
        text
    }

    /// Sums over all volumes, those that are gone among them.
    fn sums(&self) -> Map<String, Value> {
        let own = [("panics", &self.metrics.panics), ("passthrough_opens", &self.metrics.passthrough_opens)];
        let own = own.map(|(name, counter)| (name.to_owned(), counter.load(Ordering::Relaxed).into()));
        let mut sums = self.retired.lock().clone();
        add_counters(&mut sums, Map::from_iter(own));
        for (_, volume) in self.volumes() {
            add_counters(&mut sums, volume.counters());
        }
        sums
    }

    /// The problems of the run and of its steps.
    fn problems(&self) -> (Vec<Value>, u64) {
        let own = self.metrics.health.json(&self.remount);
        let mut problems = own["problems"].as_array().cloned().unwrap_or_default();
        let mut left_out = own["problems_left_out"].as_u64().unwrap_or(0);
        let now = utc(std::time::SystemTime::now());
        let row = |kind: &str, file: &str, step: Option<u64>, cause: &str, remedy: &str| {
            json!({
                "kind": kind, "file": file, "step": step, "cause": cause, "count": 1, "first": now, "last": now,
                "remedy": remedy,
            })
        };
        let again = "check that the storage of the run answers: steps are looked for and planned again once it does";
        if let Some(error) = &*self.looking_failed.lock() {
            problems.push(row("steps not found", &self.source, None, error, again));
        }
        if let Some(stalled) = self.waits.stalled().first() {
            problems.push(row("source stalled", &self.source, None, &self.waits.describe(stalled), again));
        }
        for slot in self.slots.planned() {
            let (step, file) = (Some(slot.step.number), &slot.step.source);
            match slot.content() {
                Some(StepContent::Failed(failed)) => {
                    let remedy =
                        "other steps go on; it is planned again when its files change, or when it is mounted anew";
                    problems.push(row("step not planned", file, step, &failed.message, remedy));
                }
                // The next look, which is now, ends it if it was changed or deleted.
                Some(StepContent::Volume(volume))
                    if volume.is_poisoned() && self.rechecks.lock().contains(&slot.step.name) => {}
                Some(StepContent::Volume(volume)) => {
                    let statistics = volume.statistics();
                    left_out += statistics["problems_left_out"].as_u64().unwrap_or(0);
                    for mut problem in statistics["problems"].as_array().cloned().unwrap_or_default() {
                        problem["step"] = slot.step.number.into();
                        problems.push(problem);
                    }
                }
                None => problems.extend(slot.stall().map(|cause| row("source stalled", file, step, &cause, again))),
            }
        }
        (problems, left_out)
    }

    /// What is wrong now.
    pub fn open_problems(&self) -> Vec<OpenProblem> {
        let (problems, left_out) = self.problems();
        let open = problems.into_iter().filter(|problem| problem["ended"].is_null());
        let mut found: Vec<OpenProblem> = open.filter_map(|problem| serde_json::from_value(problem).ok()).collect();
        if left_out > 0 {
            let (kind, file) = ("others".to_owned(), self.source.clone());
            found.push(OpenProblem { kind, file, cause: format!("{left_out} more") });
        }
        found
    }

    /// The steps in numbers.
    fn steps_in_numbers(&self) -> Map<String, Value> {
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let slots = self.slots.planned();
        let failed =
            slots.iter().filter(|slot| slot.content().is_some_and(|content| content.volume().is_err())).count();
        let unfinished = self.looked.read();
        let unfinished = unfinished.iter().filter(|step| step.unfinished.is_some()).count();
        let counts = &self.counts;
        let all = json!({
            "shown": self.slots.listed().len(),
            "latest": self.latest(),
            "in_use": self.volumes().len(),
            "failed": failed,
            "unfinished": unfinished,
            "appeared": get(&counts.appeared),
            "deleted": get(&counts.deleted),
            "rewritten": get(&counts.rewritten),
            "plans": get(&counts.plans),
            "failed_plans": get(&counts.failed_plans),
            "dropped": get(&counts.dropped),
            "gone_requests": get(&counts.gone_requests),
            "looks": get(&counts.looks),
        });
        if let Value::Object(members) = all { members } else { Map::new() }
    }

    /// The memory of all steps together.
    fn memory(&self) -> Value {
        let chunks = |volume: &Volume| volume.engine().checkpoint().source().chunks().map(DecodedChunks::held_bytes);
        let chunks = self.volumes().iter().filter_map(|(_, volume)| chunks(volume)).sum();
        memory_json(&held_rows(self.rooms.held(), chunks), None, Some(&self.budget))
    }

    /// `stats.json`.
    pub(super) fn stats_text(&self) -> Vec<u8> {
        let (mut problems, mut left_out) = self.problems();
        let is_open = |problem: &Value| problem["ended"].is_null();
        let is_degraded = left_out > 0 || problems.iter().any(is_open);
        if problems.len() > PROBLEMS_MAX {
            left_out += (problems.len() - PROBLEMS_MAX) as u64;
            problems.truncate(PROBLEMS_MAX);
        }
        let mut all = Map::new();
        all.insert("version".to_owned(), env!("CARGO_PKG_VERSION").into());
        all.insert("pid".to_owned(), std::process::id().into());
        all.insert("health".to_owned(), if is_degraded { "degraded" } else { "healthy" }.into());
        all.insert("problems".to_owned(), problems.into());
        all.insert("problems_left_out".to_owned(), left_out.into());
        all.insert("steps".to_owned(), self.steps_in_numbers().into());
        if let Some(report) = self.hook_report() {
            all.insert("on_step".to_owned(), report.to_json());
        }
        all.extend(self.sums());
        let poisoned = self.volumes().iter().map(|(_, volume)| u64::from(volume.is_poisoned())).sum::<u64>();
        all.insert("poisoned_sources".to_owned(), poisoned.into());
        all.insert("in_flight".to_owned(), self.metrics.in_flight.load(Ordering::Relaxed).into());
        all.insert("threads".to_owned(), memory::threads().into());
        all.insert("memory".to_owned(), self.memory());
        all.insert("latency_bounds_us".to_owned(), json!(LATENCY_BOUNDS_US));
        all.insert("ops".to_owned(), ops(&self.metrics).into());
        let mut text = serde_json::to_vec_pretty(&all).unwrap_or_default();
        text.resize(text.len().max(STATS_BYTES - 1), b' ');
        text.push(b'\n');
        text
    }

    /// `metrics`, in the text format of `OpenMetrics`.
    pub fn metrics_text(&self) -> String {
        let mut text = MetricText::default();
        let (problems, left_out) = self.problems();
        let is_degraded = left_out > 0 || problems.iter().any(|problem| problem["ended"].is_null());
        text.family("ckfs_degraded", "gauge", "1 while something is wrong with the mount, else 0", None);
        text.sample("ckfs_degraded", &[], u64::from(is_degraded));
        text.family("ckfs_steps", "gauge", "Steps of the run, by state", None);
        let numbers = self.steps_in_numbers();
        let number = |name: &str| numbers.get(name).and_then(Value::as_u64).unwrap_or(0);
        for state in ["shown", "in_use", "failed", "unfinished"] {
            text.sample("ckfs_steps", &[("state", state)], number(state));
        }
        text.family("ckfs_latest_step", "gauge", "The number of the newest step that is shown", None);
        text.sample("ckfs_latest_step", &[], number("latest"));
        for (name, help) in [
            ("appeared", "Steps that were shown as new"),
            ("deleted", "Steps that were deleted while they were shown"),
            ("rewritten", "Steps that were written anew while they were shown"),
            ("plans", "Times that a step was planned"),
            ("failed_plans", "Times that a step could not be planned"),
            ("dropped", "Volumes of steps that were dropped because nobody used them"),
            ("gone_requests", "Requests for files of steps that are gone"),
        ] {
            text.family(&format!("ckfs_steps_{name}"), "counter", help, None);
            text.sample(&format!("ckfs_steps_{name}_total"), &[], number(name));
        }
        if let Some(report) = self.hook_report() {
            text.family("ckfs_on_step_runs", "counter", "Commands run for new steps, by result", None);
            for (result, count) in report.counts() {
                text.sample("ckfs_on_step_runs_total", &[("result", result)], count);
            }
        }
        for (name, value) in self.sums() {
            let family = format!("ckfs_{name}");
            if let Value::Object(members) = value {
                text.family(&family, "counter", "Bytes by path, all steps together", None);
                for (path, value) in members {
                    text.sample(&format!("{family}_total"), &[("path", &path)], value.as_u64().unwrap_or(0));
                }
            } else {
                text.family(&family, "counter", "The same as of one checkpoint, all steps together", None);
                text.sample(&format!("{family}_total"), &[], value.as_u64().unwrap_or(0));
            }
        }
        text.finish()
    }
}
