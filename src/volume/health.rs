//! The problems of a mount: a short list without duplicates, each with cause, remedy, times and count.
//!
//! A mount is *degraded* while a problem is open, and healthy otherwise. A changed source, a failed read, a failed open and a
//! panic stay open until the mount ends: nothing shows that such a file can be read again. A problem that can
//! end, such as a source that does not answer, is closed by [`VolumeHealth::clear`]. It then stays in the list as history while
//! there is room, and no longer makes the mount degraded.
//!
//! The list is bounded. Problems that do not fit are counted; the count drops again when one of those that can end does.
//! Changed source files are all named even so, since the source itself remembers them.

use std::{collections::BTreeSet, path::Path, time::SystemTime};

use ckfs_source::{Poison, calendar::utc};
use parking_lot::Mutex;
use serde_json::{Value, json};

/// Most problems in the list.
const PROBLEMS_MAX: usize = 16;
/// Longest stored name or cause, in bytes; the middle of a longer one is left out.
const TEXT_BYTES_MAX: usize = 2048;

/// Type of a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProblemKind {
    /// A source file is no longer what was mounted.
    SourceChanged,
    /// A source file does not answer. Can end.
    SourceStalled,
    /// A read failed for another reason.
    FailedRead,
    /// An open failed for another reason.
    FailedOpen,
    /// A request's handler panicked.
    Panic,
}

impl ProblemKind {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SourceChanged => "source changed",
            Self::SourceStalled => "source stalled",
            Self::FailedRead => "failed read",
            Self::FailedOpen => "failed open",
            Self::Panic => "panic",
        }
    }

    /// The advised action, given the command that mounts anew.
    fn remedy(self, remount: &str) -> String {
        match self {
            Self::SourceChanged => format!("mount the files as they are now: {remount}"),
            Self::SourceStalled => {
                "check that the storage of the source answers (disk, network, server): reads go on by themselves once it does"
                    .to_owned()
            }
            Self::FailedRead | Self::FailedOpen => {
                format!("check the storage of the source and the daemon's log; then mount anew: {remount}")
            }
            Self::Panic => format!("an error in ckfs: please report it with the daemon's log; then mount anew: {remount}"),
        }
    }
}

/// One problem.
#[derive(Clone, Debug)]
pub struct HealthProblem {
    /// Its type.
    pub kind: ProblemKind,
    /// The file: a source file for a source's problem, else a file of the mount.
    pub file: String,
    /// The latest cause.
    pub cause: String,
    /// First occurrence.
    pub first: SystemTime,
    /// Latest occurrence.
    pub last: SystemTime,
    /// Number of occurrences.
    pub count: u64,
    /// When it ended, if it did.
    pub ended: Option<SystemTime>,
}

#[derive(Clone, Debug, Default)]
struct ProblemList {
    problems: Vec<HealthProblem>,
    /// Number of problems for which there was no room.
    left_out: u64,
    /// Of these, open ones that can end, by their files: at most one per source file.
    stalls_left_out: BTreeSet<String>,
    /// Time of the latest problem.
    last: Option<HealthProblem>,
}

/// The problems of a mount. Shared by all threads.
#[derive(Debug, Default)]
pub struct VolumeHealth {
    inner: Mutex<ProblemList>,
}

/// All problems at one moment.
#[derive(Debug)]
pub(super) struct HealthReport {
    list: ProblemList,
    /// Paths of all source files that changed.
    poisoned_files: Vec<String>,
}

impl VolumeHealth {
    /// Notes a problem with a file. The same type of problem with the same file is one problem with one more occurrence.
    pub fn note(&self, kind: ProblemKind, file: &str, cause: &str) {
        let (now, mut inner) = (SystemTime::now(), self.inner.lock());
        let (file, cause) = (bounded(file), bounded(cause));
        let known = inner.problems.iter().position(|problem| problem.kind == kind && problem.file == file);
        let problem = match known.and_then(|index| inner.problems.get_mut(index)) {
            Some(problem) => {
                (problem.cause, problem.last, problem.ended) = (cause, now, None);
                problem.count += 1;
                problem.clone()
            }
            None => HealthProblem { kind, file, cause, first: now, last: now, count: 1, ended: None },
        };
        inner.last = Some(problem.clone());
        if known.is_some() {
            return;
        }
        if inner.problems.len() == PROBLEMS_MAX {
            // Closed problems make room.
            let ended = inner.problems.iter().position(|problem| problem.ended.is_some());
            let Some(ended) = ended else {
                if kind != ProblemKind::SourceStalled || inner.stalls_left_out.insert(problem.file) {
                    inner.left_out += 1;
                }
                return;
            };
            inner.problems.remove(ended);
        }
        inner.problems.push(problem);
    }

    /// Closes a problem that has ended.
    pub fn clear(&self, kind: ProblemKind, file: &str) {
        let file = bounded(file);
        let mut inner = self.inner.lock();
        if kind == ProblemKind::SourceStalled && inner.stalls_left_out.remove(&file) {
            inner.left_out -= 1;
        }
        let open = inner.problems.iter_mut().find(|problem| problem.kind == kind && problem.file == file);
        if let Some(problem) = open {
            problem.ended.get_or_insert_with(SystemTime::now);
        }
    }

    /// Source files that do not answer now.
    pub(crate) fn stalled_sources(&self) -> u64 {
        let inner = self.inner.lock();
        let is_stalled =
            |problem: &&HealthProblem| problem.kind == ProblemKind::SourceStalled && problem.ended.is_none();
        (inner.problems.iter().filter(is_stalled).count() + inner.stalls_left_out.len()) as u64
    }

    /// The problems as members of `stats.json`, given the command that mounts anew.
    pub fn json(&self, remount: &str) -> Value {
        self.report(std::iter::empty()).to_json(remount)
    }

    /// All problems, including those of poisoned source files.
    pub(super) fn report<'a>(&self, poisoned: impl Iterator<Item = (&'a Path, Poison)>) -> HealthReport {
        let (mut list, mut poisoned_files) = (self.inner.lock().clone(), Vec::new());
        for (path, Poison { error, since }) in poisoned {
            poisoned_files.push(path.display().to_string());
            let file = bounded(&path.display().to_string());
            let mut known = list.problems.iter_mut();
            if let Some(known) = known.find(|known| known.kind == ProblemKind::SourceChanged && known.file == file) {
                known.first = since.min(known.first);
                continue;
            }
            let (kind, cause) = (ProblemKind::SourceChanged, bounded(&error.to_string()));
            let problem = HealthProblem { kind, file, cause, first: since, last: since, count: 1, ended: None };
            if list.last.as_ref().is_none_or(|last| last.last < since) {
                list.last = Some(problem.clone());
            }
            if list.problems.len() < PROBLEMS_MAX {
                list.problems.push(problem);
            } else {
                list.left_out += 1;
            }
        }
        HealthReport { list, poisoned_files }
    }
}

impl HealthReport {
    /// Whether a problem is open.
    pub(super) fn is_degraded(&self) -> bool {
        self.list.left_out > 0
            || !self.poisoned_files.is_empty()
            || self.list.problems.iter().any(|problem| problem.ended.is_none())
    }

    /// The problems that are open.
    pub(super) fn into_open_problems(mut self) -> Vec<HealthProblem> {
        self.list.problems.retain(|problem| problem.ended.is_none());
        self.list.problems
    }

    /// Moves the last problem from the list to the count of omitted ones; false if the list is empty.
    pub(super) fn leave_one_out(&mut self) -> bool {
        let left = self.list.problems.pop().is_some();
        self.list.left_out += u64::from(left);
        left
    }

    /// As members of `stats.json`, given the command that mounts anew.
    pub(super) fn to_json(&self, remount: &str) -> Value {
        let row = |problem: &HealthProblem| {
            json!({
                "kind": problem.kind.name(),
                "file": problem.file,
                "cause": problem.cause,
                "remedy": problem.kind.remedy(remount),
                "first": utc(problem.first),
                "last": utc(problem.last),
                "ended": problem.ended.map(utc),
                "count": problem.count,
            })
        };
        let last = self.list.last.as_ref().map(|problem| {
            json!({
                "time": utc(problem.last),
                "kind": problem.kind.name(),
                "file": problem.file,
                "cause": problem.cause,
            })
        });
        json!({
            "health": if self.is_degraded() { "degraded" } else { "healthy" },
            "problems": self.list.problems.iter().map(row).collect::<Vec<_>>(),
            "problems_left_out": self.list.left_out,
            "poisoned_files": self.poisoned_files,
            "last_error": last,
        })
    }
}

/// The text, without its middle if it is too long.
fn bounded(text: &str) -> String {
    if text.len() <= TEXT_BYTES_MAX {
        return text.to_owned();
    }
    let half = TEXT_BYTES_MAX / 2 - 4;
    let (head, tail) = (text.floor_char_boundary(half), text.ceil_char_boundary(text.len() - half));
    format!("{} ... {}", &text[..head], &text[tail..])
}

#[cfg(test)]
mod tests {
    use std::{
        path::PathBuf,
        sync::Arc,
        time::{Duration, UNIX_EPOCH},
    };

    use super::*;
    use ckfs_source::SourceError;

    fn json_of(health: &VolumeHealth, poisoned: &[(PathBuf, Poison)]) -> Value {
        let poisoned = poisoned.iter().map(|(path, poison)| (path.as_path(), poison.clone()));
        health.report(poisoned).to_json("ckfs mount s /m")
    }

    #[test]
    fn a_problem_is_one_however_often_it_is_met() {
        let health = VolumeHealth::default();
        assert_eq!(json_of(&health, &[])["health"], "healthy");
        health.note(ProblemKind::FailedRead, "dev0/wq", "first");
        health.note(ProblemKind::FailedRead, "dev0/wq", "second");
        health.note(ProblemKind::FailedOpen, "dev0/wq", "third");
        let found = json_of(&health, &[]);
        assert_eq!(found["health"], "degraded");
        let rows = found["problems"].as_array().unwrap();
        assert_eq!((rows.len(), &rows[0]["count"], &rows[0]["cause"]), (2, &json!(2), &json!("second")));
        assert!(rows[0]["remedy"].as_str().unwrap().contains("ckfs mount s /m"));
        assert_eq!(found["last_error"]["cause"], "third");
    }

    #[test]
    fn closed_problems_are_history() {
        let health = VolumeHealth::default();
        health.note(ProblemKind::SourceStalled, "/s/a", "no answer in 60 s");
        assert_eq!(health.stalled_sources(), 1);
        health.clear(ProblemKind::SourceStalled, "/s/other");
        assert_eq!(json_of(&health, &[])["health"], "degraded");
        health.clear(ProblemKind::SourceStalled, "/s/a");
        let found = json_of(&health, &[]);
        assert_eq!((&found["health"], found["problems"][0]["ended"].is_string()), (&json!("healthy"), true));
        assert_eq!(health.stalled_sources(), 0);
        health.note(ProblemKind::SourceStalled, "/s/a", "again");
        let found = json_of(&health, &[]);
        assert_eq!((&found["health"], &found["problems"][0]["count"]), (&json!("degraded"), &json!(2)));
    }

    #[test]
    fn the_list_is_bounded_and_all_changed_sources_are_named() {
        let health = VolumeHealth::default();
        health.note(ProblemKind::SourceStalled, "/s/ended", "x");
        health.clear(ProblemKind::SourceStalled, "/s/ended");
        for number in 0..PROBLEMS_MAX + 3 {
            health.note(ProblemKind::FailedRead, &format!("dev0/{number}"), &"x".repeat(100_000));
        }
        let since = UNIX_EPOCH + Duration::from_secs(1);
        let poison = |number: usize| {
            let file: Arc<Path> = Arc::from(PathBuf::from(format!("/s/{number}")));
            let error = SourceError::Lost { file: file.clone(), flaw: "changed".to_owned() };
            (file.to_path_buf(), Poison { error, since })
        };
        let poisoned: Vec<_> = (0..40).map(poison).collect();
        let mut found = health.report(poisoned.iter().map(|(path, poison)| (path.as_path(), poison.clone())));
        let json = found.to_json("");
        assert_eq!(json["problems"].as_array().map(Vec::len), Some(PROBLEMS_MAX));
        assert_eq!(json["problems_left_out"], 3 + 40);
        assert_eq!(json["poisoned_files"].as_array().map(Vec::len), Some(40));
        assert!(json.to_string().len() < 64 << 10);
        while found.leave_one_out() {}
        assert!(found.is_degraded() && found.to_json("")["problems"] == json!([]));
        let alone = json_of(&VolumeHealth::default(), &poisoned[..1]);
        assert_eq!(
            (&alone["problems"][0]["first"], &alone["health"]),
            (&json!("1970-01-01T00:00:01Z"), &json!("degraded"))
        );
        assert_eq!(alone["last_error"]["file"], "/s/0");
    }

    #[test]
    fn stalls_that_found_no_room_end_too() {
        let (health, names) = (VolumeHealth::default(), (0..PROBLEMS_MAX + 4).map(|number| format!("/s/{number}")));
        let names: Vec<String> = names.collect();
        for name in names.iter().chain(&names) {
            health.note(ProblemKind::SourceStalled, name, "no answer");
        }
        assert_eq!((health.stalled_sources(), &json_of(&health, &[])["problems_left_out"]), (20, &json!(4)));
        for name in &names {
            health.clear(ProblemKind::SourceStalled, name);
        }
        let found = json_of(&health, &[]);
        assert_eq!(
            (health.stalled_sources(), &found["health"], &found["problems_left_out"]),
            (0, &json!("healthy"), &json!(0))
        );
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(bounded(&"é".repeat(2000)).len(), 2 * (TEXT_BYTES_MAX / 2 - 4) + 5);
    }
}
