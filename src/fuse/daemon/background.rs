//! Starting in the background, and telling the starter and systemd how it went.
//!
//! The starter runs the program again. It gives the child the writing end of a pipe as standard input: the one descriptor that
//! a child gets without other children inheriting it. The environment variable [`STARTER_VARIABLE`] tells the child that it was
//! started this way. A new program, unlike a fork, needs no care about threads.
//!
//! The child reports through [`Readiness`] exactly once: ready, or failed with its reason. The starter returns only then.
//! Until it is ready, the child keeps the starter's standard error, session and process group, since an automount daemon knows
//! its mount helpers by the group. If the starter dies, the child is asked to end. When it is ready, the child cuts all
//! ties: new session, working directory `/`, standard streams to `/dev/null` or the log file. A child that ends
//! before it is ready may leave a dead mount behind, which the starter removes.

use std::{
    env,
    ffi::OsString,
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use ckfs_host::{
    Log, LogTarget, limits,
    log::FLUSH_LIMIT,
    systemd::{self, NotifyState},
};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, FdFlag, OFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        prctl::set_pdeathsig,
        signal::{Signal, kill},
        stat::{SFlag, fstat},
    },
    unistd::{Pid, dup2_stderr, dup2_stdin, dup2_stdout, getppid, setsid},
};
use tracing::debug;

use crate::mounts::{UnmountOptions, unmount};

/// Environment variable with the process id of the starter. It means nothing to a process that is not the starter's child.
const STARTER_VARIABLE: &str = "CKFS_STARTER_PID";

/// First word of the child's report when it is ready; the target of the log and, after a tab, what it serves follow. Any other
/// report is the reason of a failure.
const READY: &str = "ready ";

/// Most bytes that are read of a reason.
const REASON_BYTES_MAX: u64 = 64 << 10;

/// Time that a child has to clean up after it was not ready in time.
const CLEANUP_LIMIT: Duration = Duration::from_secs(5);

/// Why the daemon is not running.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The child ended without a report: its exit status, and limits that may be the reason, as words that end a message.
    #[error("the daemon ended before it was ready: {0}{1}")]
    Died(ExitStatus, String),
    /// The child did not report within this time, so the starter ended it.
    #[error("the daemon was not ready within {0:?}")]
    TimedOut(Duration),
    /// The log file cannot be opened.
    #[error("log file {path}: {error}", path = .0.display(), error = .1)]
    LogFile(PathBuf, io::Error),
    /// The program cannot be run, the child reported a failure, or a system call failed.
    #[error("{0}")]
    Failed(String),
}

fn system<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> DaemonError {
    move |error| DaemonError::Failed(format!("{what}: {}", error.into()))
}

/// The starter has ended, so that nobody knows of this process.
fn abandoned() -> DaemonError {
    DaemonError::Failed("the command that started this daemon has ended".to_owned())
}

/// A daemon that is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Started {
    /// Its process id.
    pub pid: u32,
    /// Target of its log, in words for people: `to` a place, or `nowhere` and the reason.
    pub log: String,
    /// What it serves, in words for people.
    pub served: String,
}

/// Runs `program` in the background and waits until it is ready.
///
/// # Errors
/// [`DaemonError`]. The child has ended then; a reason that it gave is the message. A dead ckfs mount that it left
/// on `mountpoint` is removed.
pub fn start_background(
    program: &Path,
    args: &[OsString],
    mountpoint: &Path,
    timeout: Duration,
) -> Result<Started, DaemonError> {
    start_child(program, args, None, timeout).inspect_err(|_| {
        // Only a stale ckfs mount is removed.
        let options = UnmountOptions { lazy: true, stale_only: true, ..UnmountOptions::default() };
        if let Err(error) = unmount(mountpoint, options) {
            debug!("nothing to clean up: {error}");
        }
    })
}

/// Environment variable with the number of the descriptor of `/dev/fuse` that a daemon of [`start_attached`] serves.
pub const DEVICE_VARIABLE: &str = "CKFS_RUN_DEVICE";

/// Runs `program` with a descriptor of `/dev/fuse`, and waits until it is ready. Unlike a daemon in the background it keeps standard
/// error, and is asked to end when the calling thread ends.
///
/// # Errors
/// [`DaemonError`]. The child has ended then.
pub fn start_attached(
    program: &Path,
    args: &[OsString],
    device: &OwnedFd,
    timeout: Duration,
) -> Result<Started, DaemonError> {
    let inherit = |flags| fcntl(device, FcntlArg::F_SETFD(flags)).map_err(system("pass a descriptor"));
    inherit(FdFlag::empty())?;
    let number = OsString::from(device.as_raw_fd().to_string());
    let started = start_child(program, args, Some((DEVICE_VARIABLE, number)), timeout);
    inherit(FdFlag::FD_CLOEXEC)?;
    started
}

/// As [`start_background`], and leaves the mountpoint alone.
pub(crate) fn start_child(
    program: &Path,
    args: &[OsString],
    env: Option<(&str, OsString)>,
    timeout: Duration,
) -> Result<Started, DaemonError> {
    let spawn = |error: io::Error| DaemonError::Failed(format!("{}: {error}", program.display()));
    let (reader, writer) = io::pipe().map_err(spawn)?;
    let child = Command::new(program)
        .args(args)
        .envs(env)
        .env(STARTER_VARIABLE, std::process::id().to_string())
        .stdin(writer)
        .stdout(Stdio::null())
        .spawn();
    let mut child = child.map_err(spawn)?;
    let Some(report) = read_report(reader, timeout).map_err(spawn)? else {
        end(&mut child);
        return Err(DaemonError::TimedOut(timeout));
    };
    let report = String::from_utf8_lossy(&report).into_owned();
    if is_ready(&report) {
        let report = &report[READY.len()..];
        let (log, served) = report.split_once('\t').unwrap_or((report, ""));
        return Ok(Started { pid: child.id(), log: log.trim().to_owned(), served: served.trim().to_owned() });
    }
    let status = reap(&mut child).map_err(spawn)?;
    let reason = report.trim().to_owned();
    Err(if reason.is_empty() { DaemonError::Died(status, limits::hint()) } else { DaemonError::Failed(reason) })
}

fn is_ready(report: &str) -> bool {
    report.starts_with(READY) && report.ends_with('\n')
}

/// Reads until the child has reported or has ended; `None` after `timeout`.
fn read_report(mut reader: io::PipeReader, timeout: Duration) -> io::Result<Option<Vec<u8>>> {
    let deadline = ckfs_host::deadline(timeout);
    let mut report = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout) {
            Ok(0) => return Ok(None),
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(errno.into()),
        }
        let mut chunk = [0; 4096];
        let len = reader.read(&mut chunk)?;
        report.extend_from_slice(&chunk[..len]);
        let is_ready = is_ready(&String::from_utf8_lossy(&report));
        if len == 0 || is_ready || report.len() as u64 > REASON_BYTES_MAX {
            return Ok(Some(report));
        }
    }
}

/// Ends a child that is not ready: by asking, so that it unmounts, then by force.
fn end(child: &mut Child) {
    if let Ok(pid) = i32::try_from(child.id()) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
    let _ = reap(child);
}

/// Waits for a child that is about to end, and ends it by force if it does not.
fn reap(child: &mut Child) -> io::Result<ExitStatus> {
    let until = Instant::now() + CLEANUP_LIMIT;
    while Instant::now() < until {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        thread::sleep(Duration::from_millis(10));
    }
    child.kill()?;
    child.wait()
}

/// The daemon's side: reports to the starter, if there is one, and to systemd, if it listens.
#[derive(Debug)]
pub struct Readiness {
    starter: Option<File>,
    log: Log,
    /// The log file that the user named, until it is in use.
    file: Option<LogTarget>,
    /// Whether the user named one.
    has_file: bool,
    mountpoint: PathBuf,
    /// Whether this process ends with its starter, and logs to its standard error.
    attached: bool,
}

impl Readiness {
    /// Finds out whether a starter or systemd waits for a report. Must be called once only.
    ///
    /// With a `log_file`, `log` and standard error are written there: at once in the foreground, when ready in the background.
    /// The file is created, or appended to. Without one, a daemon in the background logs to [`LogTarget::of_daemon`] when it is
    /// ready, and another to [`LogTarget::stderr`]: from then on standard error is a log, whose lines have times, and no longer
    /// words of a command to its user.
    ///
    /// # Errors
    /// [`DaemonError::LogFile`], or [`DaemonError::Failed`], also if the starter has ended.
    pub fn new(log: &Log, log_file: Option<&Path>, mountpoint: &Path) -> Result<Self, DaemonError> {
        let starter = starter_pipe()?;
        let mut readiness = Self {
            starter,
            log: log.clone(),
            file: None,
            has_file: log_file.is_some(),
            mountpoint: mountpoint.to_owned(),
            attached: false,
        };
        let opened =
            log_file.map(|path| LogTarget::file(path).map_err(|error| DaemonError::LogFile(path.to_owned(), error)));
        match opened.transpose() {
            Ok(file) => readiness.file = file,
            Err(error) => {
                readiness.failed(&error.to_string());
                return Err(error);
            }
        }
        if readiness.starter.is_some() {
            set_pdeathsig(Signal::SIGTERM).map_err(system("prctl"))?;
            // A starter that ended before that call causes no signal.
            if starter_id() != Some(getppid()) {
                return Err(abandoned());
            }
        } else if let Some(mut file) = readiness.file.take() {
            file.take_stderr().map_err(system("redirect to the log file"))?;
            readiness.log.switch(file);
        }
        Ok(readiness)
    }

    /// As a daemon of [`start_attached`].
    #[must_use]
    pub fn attached(mut self) -> Self {
        self.attached = true;
        self
    }

    /// Whether a starter waits, so that this process goes on in the background.
    pub const fn in_background(&self) -> bool {
        self.starter.is_some()
    }

    /// Reports that the mount answers, and what it serves, in words of one line; in the background cuts the ties to the starter.
    ///
    /// # Errors
    /// [`DaemonError::Failed`]; the starter then sees this process end without a report.
    pub fn ready(&mut self, status: &str, served: &str) -> Result<(), DaemonError> {
        if let Some(mut starter) = self.starter.take() {
            // Lines so far are for the starter's user.
            self.log.flush(FLUSH_LIMIT);
            let place = if self.attached { self.loosen_ties() } else { self.cut_ties() }?.replace(['\n', '\t'], " ");
            if let Err(error) = starter.write_all(format!("{READY}{place}\t{served}\n").as_bytes()) {
                debug!("the starter is gone: {error}");
                // A daemon that is attached gets the signal of its starter's death. From others that signal was taken before
                // this report, and their command has not succeeded: no mount may stay.
                if !self.attached {
                    let _ = kill(Pid::this(), Signal::SIGTERM);
                }
            }
        } else if !self.has_file {
            self.log.switch(LogTarget::stderr());
        }
        systemd::notify(&[NotifyState::Ready, NotifyState::Status(status)]);
        Ok(())
    }

    /// A copy for another thread, which may only report a failure with it. Must be dropped before the mount is ready.
    ///
    /// # Errors
    /// [`DaemonError::Failed`].
    pub fn try_clone(&self) -> Result<Self, DaemonError> {
        let starter = self.starter.as_ref().map(File::try_clone).transpose();
        let starter = starter.map_err(system("copy a descriptor"))?;
        Ok(Self {
            starter,
            log: self.log.clone(),
            file: None,
            has_file: self.has_file,
            mountpoint: self.mountpoint.clone(),
            attached: self.attached,
        })
    }

    /// Reports why the mount could not be made. In the foreground the caller prints the reason.
    pub fn failed(&mut self, reason: &str) {
        if let Some(mut starter) = self.starter.take() {
            let _ = starter.write_all(if reason.is_empty() { b"unknown error" } else { reason.as_bytes() });
        }
        systemd::notify(&[NotifyState::Status(reason)]);
    }

    /// Tells systemd what the mount is doing.
    pub fn status(&self, status: &str) {
        systemd::notify(&[NotifyState::Status(status)]);
    }

    /// Tells systemd that the start waits for something, for at most `left`, in words. The unit's time limit is extended by that.
    pub fn waits(&self, status: &str, left: Duration) {
        /// Other work of the start comes after the wait.
        const MORE: Duration = Duration::from_secs(30);
        let time = u32::try_from((left + MORE).as_micros()).unwrap_or(u32::MAX);
        systemd::notify(&[NotifyState::Status(status), NotifyState::ExtendTimeoutUsec(time)]);
    }

    /// Leaves the terminal's signals to the starter, but its standard error and its end stay this process's own.
    fn loosen_ties(&mut self) -> Result<String, DaemonError> {
        setsid().map_err(system("setsid"))?;
        if let Some(mut file) = self.file.take() {
            file.take_stderr().map_err(system("redirect to the log file"))?;
            self.log.switch(file);
        } else {
            self.log.switch(LogTarget::stderr());
        }
        Ok("to standard error".to_owned())
    }

    /// Cuts the ties to the starter. Returns the target of the log from now on, in words.
    fn cut_ties(&mut self) -> Result<String, DaemonError> {
        // The starter ends as soon as it has the report; this process must outlive it.
        set_pdeathsig(None).map_err(system("prctl"))?;
        match setsid() {
            // EPERM: this process already leads a group, so the starter is in another.
            Ok(_) | Err(Errno::EPERM) => {}
            Err(errno) => return Err(system("setsid")(errno)),
        }
        nix::unistd::chdir("/").map_err(system("chdir"))?;
        let null = File::options().read(true).write(true).open("/dev/null");
        let null = null.map_err(system("/dev/null"))?;
        let redirect = system("redirect standard streams");
        dup2_stdin(&null).map_err(&redirect)?;
        dup2_stdout(&null).map_err(&redirect)?;
        let mut target = self.file.take().unwrap_or_else(|| LogTarget::of_daemon(&self.mountpoint));
        if !target.take_stderr().map_err(&redirect)? {
            dup2_stderr(&null).map_err(&redirect)?;
        }
        let place = target.description();
        self.log.switch(target);
        Ok(place)
    }
}

/// The process that started this one as a daemon, or one that did so for an ancestor of it.
fn starter_id() -> Option<Pid> {
    env::var(STARTER_VARIABLE).ok()?.parse().ok().map(Pid::from_raw)
}

/// Whether standard input is the end of a pipe that can be written, as [`start_background`] gives it and hardly anything else.
fn has_report_pipe() -> nix::Result<bool> {
    let stdin = io::stdin();
    let kind = SFlag::from_bits_truncate(fstat(&stdin)?.st_mode) & SFlag::S_IFMT;
    let mode = OFlag::from_bits_truncate(fcntl(&stdin, FcntlArg::F_GETFL)?) & OFlag::O_ACCMODE;
    Ok(kind == SFlag::S_IFIFO && mode == OFlag::O_WRONLY)
}

/// Whether this process was started by [`start_background`] or [`start_attached`], also if the starter has ended since.
#[must_use]
pub fn is_daemon() -> bool {
    starter_id().is_some_and(|starter| starter == getppid() || has_report_pipe().unwrap_or(false))
}

/// Takes the pipe to the starter from standard input, if this process was started by [`start_background`].
fn starter_pipe() -> Result<Option<File>, DaemonError> {
    let failed = system("pipe to the starter");
    let Some(starter) = starter_id() else { return Ok(None) };
    if !has_report_pipe().map_err(&failed)? {
        return Ok(None);
    }
    if starter != getppid() {
        return Err(abandoned());
    }
    let pipe = io::stdin().as_fd().try_clone_to_owned().map_err(|_| failed(Errno::EMFILE))?;
    // So that the pipe closes with the one descriptor that is left.
    let null = File::open("/dev/null").map_err(|_| failed(Errno::ENOENT))?;
    dup2_stdin(null).map_err(&failed)?;
    Ok(Some(pipe.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str, timeout: Duration) -> Result<Started, DaemonError> {
        start_background(Path::new("/bin/sh"), &["-c".into(), script.into()], Path::new("/no/mountpoint"), timeout)
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_ready_child_is_left_alone() {
        let script = "echo ready in a file >&0; exec sleep 30 <&-";
        let started = start(script, LONG).unwrap();
        assert_eq!(started.log, "in a file");
        let pid = i32::try_from(started.pid).unwrap();
        assert!(kill(Pid::from_raw(pid), None).is_ok());
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        nix::sys::wait::waitpid(Pid::from_raw(pid), None).unwrap();
    }

    #[test]
    fn a_failed_start_gives_the_childs_reason() {
        let script = "echo 'mountpoint /x: no such directory' >&0; exit 1";
        let error = start(script, LONG).unwrap_err();
        assert!(matches!(error, DaemonError::Failed(_)));
        assert_eq!(error.to_string(), "mountpoint /x: no such directory");
    }

    #[test]
    fn a_silent_end_is_told_with_its_status() {
        let error = start("exit 3", LONG).unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with("the daemon ended before it was ready: exit status: 3"), "{text}");
        assert!(matches!(start("kill -9 $$", LONG), Err(DaemonError::Died { .. })));
    }

    #[test]
    fn a_child_that_takes_too_long_is_ended() {
        let begin = Instant::now();
        let error = start("exec sleep 600", Duration::from_millis(200)).unwrap_err();
        assert!(matches!(error, DaemonError::TimedOut { .. }));
        assert!(begin.elapsed() < Duration::from_mins(5));
    }

    #[test]
    fn a_program_that_is_missing_is_named() {
        let error = start_background(Path::new("/no/such/program"), &[], Path::new("/no"), LONG).unwrap_err();
        assert!(error.to_string().starts_with("/no/such/program: "), "{error}");
    }
}
