//! Where log lines are written.

use std::{
    env, fs,
    io::{self, IsTerminal},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, OpenOptionsExt},
        },
    },
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    libc,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::stat::fstat,
    unistd::{dup2_stderr, write},
};
use tracing::Level;

use super::system_log::SystemLog;

/// A log file of the default place grows to this size; then it is renamed to `.1`, in place of the one before it.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Longest name of a default log file, in bytes, without its ending and its mark.
const NAME_BYTES_MAX: usize = 160;

/// What a pipe takes at once if it takes anything.
const CHUNK_BYTES: usize = 4096;

/// How often a write that waits for room asks whether it should go on waiting.
const PATIENCE_MS: u16 = 100;

/// Where lines go.
#[derive(Debug)]
pub enum LogTarget {
    /// Standard error.
    Stderr {
        /// Whether it is a terminal, which shows colours.
        colored: bool,
        /// What a line has.
        form: LineForm,
    },
    /// A file that is appended to.
    File(LogFile),
    /// The system's log.
    System(SystemLog),
    /// Nowhere, for this reason.
    Nowhere(String),
}

/// What a line on standard error has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineForm {
    /// Time, level, module and text.
    Log,
    /// Errors and warnings are words of a command to its user, as in `ckfs: warning: text`.
    Message,
}

/// A log file.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: fs::File,
    /// Size at which it is renamed; a file that the user named grows.
    bytes_max: Option<u64>,
    /// Whether standard error goes to it as well.
    holds_stderr: bool,
}

/// Whether standard error is a terminal that shows colours. `NO_COLOR` and `TERM=dumb` turn them off.
pub fn stderr_is_colored() -> bool {
    let is_set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = env::var_os("TERM").is_some_and(|name| name == "dumb");
    io::stderr().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}

/// Whether standard error goes to the journal, as that of a service does: systemd names the stream in `JOURNAL_STREAM`.
pub fn stderr_is_journal() -> bool {
    let Some(stream) = env::var_os("JOURNAL_STREAM") else { return false };
    fstat(io::stderr()).is_ok_and(|found| stream.to_str() == Some(&format!("{}:{}", found.st_dev, found.st_ino)))
}

/// Where ckfs keeps what its user may want to look at later: `$XDG_STATE_HOME/ckfs`. `None` if neither that nor `HOME` is set.
pub fn state_directory() -> Option<PathBuf> {
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")));
    Some(state?.join("ckfs"))
}

/// Where the configuration of the last mount of this user on `mountpoint` is kept: a file of [`last_mounts_directory`].
pub fn last_mount_file(mountpoint: &Path) -> Option<PathBuf> {
    Some(last_mounts_directory()?.join(file_name(mountpoint, "toml")))
}

/// The socket by which the daemon of a mount of this user hands it over to the next one.
pub fn hand_over_file(mountpoint: &Path) -> Option<PathBuf> {
    // Short, as names of sockets are.
    Some(state_directory()?.join("daemon").join(format!("{:016x}", mark(mountpoint.as_os_str().as_bytes()))))
}

/// Where configurations of this user's mounts are kept after their end.
pub fn last_mounts_directory() -> Option<PathBuf> {
    Some(state_directory()?.join("last"))
}

impl LogTarget {
    /// Standard error, as the log of a program that goes on: with times, and with colours on a terminal that shows them. Where
    /// standard error goes to the journal, the journal itself, which keeps levels and fields.
    pub fn stderr() -> Self {
        Self::of_stderr(LineForm::Log)
    }

    /// Standard error, as the messages of a command to its user. Otherwise as [`Self::stderr`].
    pub fn messages() -> Self {
        Self::of_stderr(LineForm::Message)
    }

    fn of_stderr(form: LineForm) -> Self {
        let journal = stderr_is_journal().then(SystemLog::journal).flatten();
        journal.map_or_else(|| Self::Stderr { colored: stderr_is_colored(), form }, Self::System)
    }

    /// The file at `path`, created if need be.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn file(path: &Path) -> io::Result<Self> {
        Ok(Self::File(LogFile::open(path, None)?))
    }

    /// Where a daemon that serves `mountpoint` logs if the user does not say: the system's log, else a file of its own below
    /// `$XDG_STATE_HOME/ckfs`, else nowhere.
    pub fn of_daemon(mountpoint: &Path) -> Self {
        if let Some(log) = SystemLog::find() {
            return Self::System(log);
        }
        let Some(directory) = state_directory() else {
            return Self::Nowhere("there is no system log, and neither XDG_STATE_HOME nor HOME is set".to_owned());
        };
        let path = directory.join(file_name(mountpoint, "log"));
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory);
        match made.and_then(|()| LogFile::open(&path, Some(FILE_BYTES_MAX))) {
            Ok(file) => Self::File(file),
            Err(error) => Self::Nowhere(format!("{}: {error}", path.display())),
        }
    }

    /// For people, after "its log goes": to what, or nowhere and why.
    pub fn description(&self) -> String {
        match self {
            Self::Stderr { .. } => "to standard error".to_owned(),
            Self::File(log) => format!("to {}", log.path.display()),
            Self::System(log) => format!("to {}", log.description()),
            Self::Nowhere(reason) => format!("nowhere: {reason}; --log-file FILE keeps it"),
        }
    }

    /// Lets standard error go to the same file, for what the runtime writes when it aborts; `false` where there is none.
    ///
    /// # Errors
    /// The system refuses.
    pub fn take_stderr(&mut self) -> nix::Result<bool> {
        let Self::File(log) = self else { return Ok(false) };
        dup2_stderr(&log.file)?;
        log.holds_stderr = true;
        Ok(true)
    }

    /// Removes a log file of the default place that nothing was written to, so that they do not pile up.
    pub(super) fn remove_if_empty(&self) {
        if let Self::File(log) = self
            && log.bytes_max.is_some()
            && log.file.metadata().is_ok_and(|found| found.len() == 0)
            // A daemon that ends slowly must not take the file of its successor on the same mountpoint away.
            && log.file.try_lock().is_ok()
        {
            let _ = fs::remove_file(&log.path);
        }
    }

    /// Opens a file anew by its path, as after it was renamed.
    ///
    /// # Errors
    /// It cannot be opened; the old one is kept.
    pub(super) fn reopen(&mut self) -> io::Result<()> {
        if let Self::File(log) = self { log.reopen() } else { Ok(()) }
    }

    /// Writes one line. Where a pipe or terminal has no room, waits for it while `go_on` says so.
    pub(super) fn write(&mut self, level: Level, time: &str, text: &str, go_on: &dyn Fn() -> bool) -> Result<(), Lost> {
        match self {
            Self::Stderr { colored, form } => {
                let line = match (*form == LineForm::Message).then(|| message(level, text, *colored)).flatten() {
                    Some(message) => message,
                    None if *colored => color(level, time, text),
                    None => format!("{time} {text}\n"),
                };
                write_all(io::stderr().as_fd(), line.as_bytes(), go_on)
            }
            Self::File(log) => log.write(format!("{time} {text}\n").as_bytes(), go_on),
            Self::System(log) => {
                let text = text.trim_start().split_once(' ').map_or(text, |(_, text)| text);
                log.write(level, text).map_err(|error| Lost { error, in_part: false })
            }
            Self::Nowhere(_) => Ok(()),
        }
    }
}

/// A line that was not written.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) error: io::Error,
    /// Some of its bytes were.
    pub(super) in_part: bool,
}

impl LogFile {
    fn open(path: &Path, bytes_max: Option<u64>) -> io::Result<Self> {
        let mut options = fs::File::options();
        options.append(true).create(true).custom_flags(libc::O_NOCTTY);
        if bytes_max.is_some() {
            options.mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NOCTTY);
        }
        let file = options.open(path).map_err(|error| {
            let parent = path.parent().filter(|parent| error.kind() == io::ErrorKind::NotFound && !parent.exists());
            parent.map_or(error, |parent| {
                io::Error::new(io::ErrorKind::NotFound, format!("no such directory: {}", parent.display()))
            })
        })?;
        if bytes_max.is_some() {
            // Says that it is in use; some file systems have no locks.
            let _ = file.try_lock_shared();
        }
        Ok(Self { path: path.to_owned(), file, bytes_max, holds_stderr: false })
    }

    fn reopen(&mut self) -> io::Result<()> {
        let anew = Self::open(&self.path, self.bytes_max)?;
        self.file = anew.file;
        if self.holds_stderr {
            dup2_stderr(&self.file)?;
        }
        Ok(())
    }

    fn write(&mut self, line: &[u8], go_on: &dyn Fn() -> bool) -> Result<(), Lost> {
        if let Some(most) = self.bytes_max
            && self.file.metadata().is_ok_and(|found| found.len() + line.len() as u64 > most)
        {
            let mut old = self.path.clone().into_os_string();
            old.push(".1");
            fs::rename(&self.path, old).and_then(|()| self.reopen()).map_err(|error| Lost { error, in_part: false })?;
        }
        write_all(self.file.as_fd(), line, go_on)
    }
}

/// Writes all of `line`, in parts that a pipe takes without blocking.
fn write_all(fd: BorrowedFd<'_>, line: &[u8], go_on: &dyn Fn() -> bool) -> Result<(), Lost> {
    let mut rest = line;
    while !rest.is_empty() {
        let lost = |error: io::Error| Lost { error, in_part: rest.len() < line.len() };
        let mut fds = [PollFd::new(fd, PollFlags::POLLOUT)];
        let patience = if go_on() { PollTimeout::from(PATIENCE_MS) } else { PollTimeout::ZERO };
        match poll(&mut fds, patience) {
            Ok(0) | Err(Errno::EINTR) if go_on() => continue,
            Ok(0) => return Err(lost(io::ErrorKind::TimedOut.into())),
            // What is wrong with the descriptor the write tells.
            Ok(_) | Err(_) => {}
        }
        match write(fd, &rest[..rest.len().min(CHUNK_BYTES)]) {
            Ok(0) => return Err(lost(io::ErrorKind::WriteZero.into())),
            Ok(written) => rest = &rest[written..],
            Err(Errno::EINTR | Errno::EAGAIN) if go_on() => {}
            Err(errno) => return Err(lost(errno.into())),
        }
    }
    Ok(())
}

/// An error or a warning as the message of a command, without level and module; `None` for lines of other levels.
fn message(level: Level, text: &str, colored: bool) -> Option<String> {
    let (word, code) = match level {
        Level::ERROR => ("error", 31),
        Level::WARN => ("warning", 33),
        _ => return None,
    };
    let text = text.trim_start().split_once(": ").map_or(text, |(_, text)| text);
    Some(if colored {
        format!("ckfs: \x1b[1;{code}m{word}:\x1b[0m {text}\n")
    } else {
        format!("ckfs: {word}: {text}\n")
    })
}

/// A line for a terminal: the time faint, the level in its colour.
fn color(level: Level, time: &str, text: &str) -> String {
    let code = match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        _ => 35,
    };
    let (head, rest) = text.split_at_checked(5).unwrap_or((text, ""));
    format!("\x1b[2m{time}\x1b[0m \x1b[{code}m{head}\x1b[0m{rest}\n")
}

/// Name of a file about a mount: its path with dashes, and a mark where that is ambiguous.
fn file_name(mountpoint: &Path, ending: &str) -> String {
    let path = mountpoint.as_os_str().as_bytes();
    let path = path.strip_prefix(b"/").unwrap_or(path);
    let mut name = String::new();
    let mut is_exact = path.len() <= NAME_BYTES_MAX && !path.is_empty();
    for &byte in path.iter().take(NAME_BYTES_MAX) {
        let plain =
            byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'@' | b'+') || (byte == b'.' && !name.is_empty());
        is_exact &= plain || byte == b'/';
        name.push(if plain { char::from(byte) } else { '-' });
    }
    if is_exact {
        return format!("{name}.{ending}");
    }
    format!("{name}-{:016x}.{ending}", mark(path))
}

/// FNV-1a: the same in every version of this program.
fn mark(path: &[u8]) -> u64 {
    path.iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountpoints_have_files_of_their_own() {
        assert_eq!(file_name(Path::new("/mnt/llama"), "log"), "mnt-llama.log");
        let names: std::collections::BTreeSet<_> =
            ["/mnt/llama", "/mnt-llama", "/mnt/ll\u{e4}ma", "/mnt/l\nama", "/", "/.a", "/..", "/mnt_llama"]
                .map(|path| file_name(Path::new(path), "log"))
                .into();
        assert_eq!(names.len(), 8, "{names:?}");
        assert!(names.iter().all(|name| name.is_ascii() && !name.starts_with('.') && !name.contains(['/', '\n'])));
        assert!(file_name(Path::new(&format!("/{}", "x".repeat(4000))), "log").len() < 200);
    }

    #[test]
    fn a_default_file_is_renamed_when_it_is_large() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = LogFile::open(&path, Some(100)).unwrap();
        for n in 0..10 {
            log.write(format!("{n:039}\n").as_bytes(), &|| true).unwrap();
        }
        let (now, before) =
            (fs::read_to_string(&path).unwrap(), fs::read_to_string(directory.path().join("log.1")).unwrap());
        assert_eq!((now.len(), before.len()), (80, 80));
        assert!(now.ends_with("9\n") && before.ends_with("7\n"));
    }

    #[test]
    fn an_empty_default_file_is_removed_unless_it_is_in_use() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let open = || LogTarget::File(LogFile::open(&path, Some(100)).unwrap());
        let (first, second) = (open(), open());
        first.remove_if_empty();
        assert!(path.exists());
        drop(second);
        first.remove_if_empty();
        assert!(!path.exists());
        let mut written = open();
        written.write(Level::INFO, "now", "text", &|| true).unwrap();
        written.remove_if_empty();
        assert_eq!(fs::read_to_string(&path).unwrap(), "now text\n");
    }

    #[test]
    fn errors_and_warnings_of_a_command_are_messages() {
        let warning = " WARN ckfs::service: a.safetensors: left out";
        assert_eq!(message(Level::WARN, warning, false).unwrap(), "ckfs: warning: a.safetensors: left out\n");
        assert_eq!(message(Level::ERROR, "ERROR ckfs::read: x", false).unwrap(), "ckfs: error: x\n");
        assert!(message(Level::WARN, warning, true).unwrap().contains("33mwarning:"));
        assert_eq!(message(Level::INFO, " INFO ckfs::read: x", false), None);
    }

    #[test]
    fn a_pipe_that_nobody_reads_is_given_up() {
        let (_reader, writer) = io::pipe().unwrap();
        let filled = (0..1000).find(|_| write_all(writer.as_fd(), &[b'x'; 1000], &|| false).is_err());
        assert!(filled.is_some(), "a megabyte in a pipe");
    }
}
