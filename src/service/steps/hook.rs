//! The command that is run for each new step, one after the other.

use std::{
    collections::VecDeque,
    ffi::OsString,
    io::{self, BufRead, BufReader, Read},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime},
};

use ckfs_source::calendar::utc;
use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};

/// Results that are kept.
const RESULTS_MAX: usize = 32;
/// Most steps that wait for the command: more of them are passed over, oldest first.
const WAITING_MAX: usize = 10_000;
/// Longest line of the command's output in the log, in bytes.
const LINE_BYTES_MAX: u64 = 4096;
/// Time between two looks whether the command has ended, or the mount.
const LOOK: Duration = Duration::from_millis(50);

/// What a hook has done, and does.
#[derive(Clone, Debug, Default)]
pub(super) struct HookState {
    command: String,
    waiting: VecDeque<u64>,
    running: Option<(u64, SystemTime)>,
    results: VecDeque<Value>,
    succeeded: u64,
    failed: u64,
    has_ended: bool,
}

#[derive(Debug, Default)]
struct HookShared {
    state: Mutex<HookState>,
    changed: Condvar,
}

/// Where a command finds the steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepPlace {
    /// Below a mountpoint.
    Mount(PathBuf),
    /// Below an address of HTTP, without a slash at its end.
    Address(String),
}

impl StepPlace {
    /// The variable that tells the command of a step, and its value.
    fn variable(&self, step: u64) -> (&'static str, OsString) {
        match self {
            Self::Mount(mountpoint) => ("CKFS_STEP_PATH", mountpoint.join(step.to_string()).into()),
            Self::Address(address) => ("CKFS_STEP_URL", format!("{address}/{step}").into()),
        }
    }
}

/// The thread that runs the command, until this is dropped. A command that runs then is ended too: its files are gone.
#[derive(Debug)]
pub(super) struct Hook(Arc<HookShared>);

impl HookState {
    pub(super) fn to_json(&self) -> Value {
        json!({
            "command": self.command,
            "waiting": self.waiting.len(),
            "running": self.running.map(|(step, since)| json!({"step": step, "since": utc(since)})),
            "succeeded": self.succeeded,
            "failed": self.failed,
            "results": self.results,
        })
    }

    /// How many commands ended how.
    pub(super) fn counts(&self) -> [(&'static str, u64); 2] {
        [("succeeded", self.succeeded), ("failed", self.failed)]
    }
}

impl Hook {
    /// Starts the thread. Steps are below `place`.
    ///
    /// # Errors
    /// The system starts no thread.
    pub(super) fn start(command: &str, place: StepPlace) -> io::Result<Self> {
        let shared = Arc::<HookShared>::default();
        command.clone_into(&mut shared.state.lock().command);
        let (working, run) = (Arc::clone(&shared), command.to_owned());
        thread::Builder::new().name("ckfs-on-step".to_owned()).spawn(move || work(&working, &run, &place))?;
        Ok(Self(shared))
    }

    /// Has the command run for a step.
    pub(super) fn add(&self, step: u64) {
        let mut state = self.0.state.lock();
        if state.waiting.len() >= WAITING_MAX {
            state.waiting.pop_front();
        }
        state.waiting.push_back(step);
        drop(state);
        self.0.changed.notify_all();
    }

    pub(super) fn report(&self) -> HookState {
        self.0.state.lock().clone()
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.0.state.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

fn work(shared: &HookShared, command: &str, place: &StepPlace) {
    loop {
        let mut state = shared.state.lock();
        let step = loop {
            if state.has_ended {
                return;
            }
            if let Some(step) = state.waiting.pop_front() {
                break step;
            }
            shared.changed.wait(&mut state);
        };
        let (began, since) = (SystemTime::now(), Instant::now());
        state.running = Some((step, began));
        drop(state);
        let (code, error) = match run(shared, command, step, place) {
            Ok(code) => (Some(code), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let mut state = shared.state.lock();
        state.running = None;
        if code == Some(0) {
            state.succeeded += 1;
        } else {
            state.failed += 1;
            let why = error.clone().unwrap_or_else(|| format!("exit code {}", code.unwrap_or_default()));
            tracing::warn!("--on-step: step {step}: {why}");
        }
        if state.results.len() >= RESULTS_MAX {
            state.results.pop_front();
        }
        // The exit code of what a signal ended is that of a shell, 128 and more.
        state.results.push_back(json!({
            "step": step,
            "exit_code": code,
            "error": error,
            "began": utc(began),
            "seconds": since.elapsed().as_secs_f64(),
        }));
    }
}

/// Runs the command for one step, and waits for its end.
fn run(shared: &HookShared, command: &str, step: u64, place: &StepPlace) -> io::Result<i32> {
    tracing::info!("--on-step: step {step}: {command}");
    let (variable, value) = place.variable(step);
    let mut child = Command::new("/bin/sh")
        .args(["-c", command])
        .env("CKFS_STEP", step.to_string())
        .env(variable, value)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Signals for the daemon are none for it, and it can be ended with its children.
        .process_group(0)
        .spawn()?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    if let Some(out) = out {
        log_lines(step, out);
    }
    if let Some(err) = err {
        log_lines(step, err);
    }
    wait(shared, &mut child)
}

/// Writes what a command prints to the log, from a thread that ends with the command.
fn log_lines(step: u64, output: impl Read + Send + 'static) {
    let log = move || {
        let mut output = BufReader::new(output);
        loop {
            let mut line = Vec::new();
            match (&mut output).take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
                Ok(1..) => tracing::info!("step {step}: {}", String::from_utf8_lossy(&line).trim_end()),
                Ok(0) | Err(_) => return,
            }
        }
    };
    // Without a thread nobody reads, and the command gets SIGPIPE.
    if let Err(error) = ckfs_sync::spawn("ckfs-on-step-log", log) {
        tracing::warn!("--on-step: its output is not logged: {error}");
    }
}

fn wait(shared: &HookShared, child: &mut Child) -> io::Result<i32> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(-1));
        }
        let mut state = shared.state.lock();
        if state.has_ended {
            drop(state);
            if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process_group(group, Signal::TERM);
            }
            thread::sleep(LOOK);
            return Ok(child.try_wait()?.and_then(|status| status.code()).unwrap_or(-1));
        }
        shared.changed.wait_for(&mut state, LOOK);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn ended(hook: &Hook, count: usize) -> HookState {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let report = hook.report();
            if report.results.len() >= count {
                return report;
            }
            assert!(Instant::now() < until, "{report:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn commands_run_one_after_the_other_and_their_codes_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let command = format!(
            "echo begin $CKFS_STEP $CKFS_STEP_PATH >> {0}; sleep 0.1; echo end $CKFS_STEP >> {0}; exit $((CKFS_STEP - 4))",
            log.display()
        );
        let hook = Hook::start(&command, StepPlace::Mount(PathBuf::from("/mnt/run"))).unwrap();
        hook.add(4);
        hook.add(7);
        let report = ended(&hook, 2);
        let codes: Vec<_> = report.results.iter().map(|result| [&result["step"], &result["exit_code"]]).collect();
        assert_eq!(codes, [[4, 0], [7, 3]]);
        assert_eq!(report.counts(), [("succeeded", 1), ("failed", 1)]);
        let lines = fs::read_to_string(&log).unwrap();
        assert_eq!(lines, "begin 4 /mnt/run/4\nend 4\nbegin 7 /mnt/run/7\nend 7\n");
    }

    #[test]
    fn a_command_gets_a_path_or_an_address() {
        let found = [StepPlace::Mount("/mnt/run".into()), StepPlace::Address("http://[::1]:1/files".into())]
            .map(|place| place.variable(7));
        let expected = [("CKFS_STEP_PATH", "/mnt/run/7"), ("CKFS_STEP_URL", "http://[::1]:1/files/7")];
        assert_eq!(found, expected.map(|(name, value)| (name, value.into())));
    }

    #[test]
    fn a_command_ends_with_the_mount() {
        let directory = tempfile::tempdir().unwrap();
        let (pid, shared) = (directory.path().join("pid"), {
            let hook = Hook::start(
                &format!("echo $$ > {}; sleep 600", directory.path().join("pid").display()),
                StepPlace::Mount(PathBuf::from("/m")),
            );
            let hook = hook.unwrap();
            hook.add(1);
            let until = Instant::now() + Duration::from_secs(30);
            while fs::read_to_string(directory.path().join("pid")).unwrap_or_default().is_empty() {
                assert!(Instant::now() < until);
                thread::sleep(Duration::from_millis(10));
            }
            Arc::clone(&hook.0)
        });
        let until = Instant::now() + Duration::from_secs(30);
        while shared.state.lock().running.is_some() {
            assert!(Instant::now() < until);
            thread::sleep(Duration::from_millis(10));
        }
        let pid = fs::read_to_string(pid).unwrap();
        let state = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "{state}");
    }
}
