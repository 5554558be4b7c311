//! `ckfs run`: a mount for one command.
//!
//! Three processes. The starter, which the user called, waits for the command and forwards signals. The daemon is this program
//! with the same arguments; it serves a passed descriptor. The child enters namespaces, mounts, and becomes the command
//! ([`PrivateMount`]).

use std::{
    env,
    ffi::OsString,
    fs, io,
    os::{
        fd::AsFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use anyhow::Context;
use ckfs_config::{Config, OwnerId, TimeLimit, WaitTime, value};
use ckfs_fuse::{DEVICE_VARIABLE, MountOptions, PrivateMount, Succession, is_daemon, start_attached};
use ckfs_host::Log;
use clap::Args;
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd, siginfo},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::{Pid, getegid, geteuid, mkdtemp},
};

use super::{
    flags::{LogFlags, ServingFlags, SourceFlags, source_help},
    mount::{self, DaemonTie},
    open,
};

/// Runs a command with a mount that only it and its children see.
///
/// Needs no root: the mount is made in a user namespace and a mount namespace of the command's own. It needs /dev/fuse with
/// mode 0666, and a host that lets users make namespaces; `ckfs doctor` tells. Root needs no user namespace.
///
/// The command finds the path of the mount in the environment variable `CKFS_MOUNT`. It has the standard streams, the
/// working directory and the terminal of this program. Signals that a process sends to this program reach the command.
/// The mount ends with the command; processes that the command leaves behind lose it. If this program is killed, the
/// command is killed.
///
/// The exit code is that of the command, or 128 and the number of the signal that ended it. It is 127 if there is no such
/// command, 126 if it cannot be run, 1 if the mount failed.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  ckfs run /data/llama --mesh fsdp=8 -- python train.py
  ckfs run org/name --dtype bf16 -- sh -c 'ls $CKFS_MOUNT/dev0'
  srun ckfs run /data/llama --mesh fsdp=8 --devices 0-3 -- python train.py")]
pub(super) struct RunCommand {
    #[arg(help = source_help())]
    source: Option<String>,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
    #[command(flatten)]
    flags: SourceFlags,
    #[command(flatten)]
    serving: ServingFlags,
}

/// Time for readers that the command leaves behind, unless --drain says otherwise: closing files takes the kernel a moment.
const DRAIN: Duration = Duration::from_secs(1);

/// Time that the daemon has to end when it is asked to.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Longest time from the removal of a command's mount until the command's end is reported.
const LAST_MOMENTS: Duration = Duration::from_millis(500);

/// Time between checks of a process that is about to end.
const LOOK_PERIOD: Duration = Duration::from_millis(5);

/// Signals that are passed on to the command if a process sends them. The kernel sends those of a terminal to the command
/// itself.
const FORWARDED: [Signal; 12] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGVTALRM,
    Signal::SIGPROF,
    Signal::SIGIO,
    Signal::SIGPWR,
    Signal::SIGXCPU,
];

impl RunCommand {
    fn config(&self, log: &LogFlags) -> anyhow::Result<Config> {
        let config = open::config(&[&self.flags.settings, &self.serving.settings, &log.file.settings])?;
        let mut config = open::with_source(config, self.source.as_deref())?;
        // The mountpoint of a configuration is that of `ckfs mount`.
        config.mountpoint = None;
        Ok(config)
    }

    /// Runs the command. `args` are those of this process; it starts itself again with them as the daemon.
    pub(super) fn run(&self, log: &LogFlags, sink: &Log, args: &[OsString]) -> anyhow::Result<ExitCode> {
        let config = self.config(log);
        if let Some(number) = env::var_os(DEVICE_VARIABLE).filter(|_| is_daemon()) {
            let device = Path::new("/dev/fd").join(number);
            let config = config.and_then(|config| Ok((of_daemon(config)?, device)));
            return mount::serve_here(config, sink, DaemonTie::Attached, Succession::None).map(|()| ExitCode::SUCCESS);
        }
        let config = config?;
        let signals = Signals::block()?;
        let place = RunDirectory::make()?;
        let made = Signals::end_at_signal(&place)?;
        let name = config.source.clone().unwrap_or_default();
        let options = MountOptions::of(&config.mount, &name);
        let program = env::current_exe().context("path of this program")?;
        let (mut private, device) = PrivateMount::start(&program, &place.path, &options, &self.command)?;
        let limit = config.start_limit.map(TimeLimit::duration).unwrap_or_default();
        let started = start_attached(&program, args, &device, limit).inspect_err(|_| private.end())?;
        // The daemon's copy is the only one from now on: with it the connection ends.
        drop(device);
        made();
        let mut daemon = Daemon(Some(pid(started.pid)));
        // A child that is gone already shows by its exit code.
        let _ = private.go();
        let code = signals.wait_for(pid(private.child.id()), &mut daemon)?;
        drop(place);
        let periods = [config.mount.grace, config.mount.drain].map(|some| some.map(WaitTime::duration));
        daemon.end(periods[0].unwrap_or_default().saturating_add(periods[1].unwrap_or(DRAIN)));
        Ok(code)
    }
}

/// The daemon's configuration.
fn of_daemon(mut config: Config) -> anyhow::Result<Config> {
    // The starter has waited for readers before it asks the daemon to end.
    (config.mount.grace, config.mount.drain) = (Some(WaitTime::ZERO), Some(WaitTime::ZERO));
    if !geteuid().is_root() {
        // The user namespace has this user's number only: others would show as unknown, and the bits of their groups would
        // shut the user out. The daemon reads the sources as this user.
        let number = |id: u32| <OwnerId as value::SettingValue>::from_word(&id.to_string()).map_err(anyhow::Error::msg);
        config.mount.uid.get_or_insert(number(geteuid().as_raw())?);
        config.mount.gid.get_or_insert(number(getegid().as_raw())?);
    }
    Ok(config)
}

fn pid(id: u32) -> Pid {
    Pid::from_raw(i32::try_from(id).expect("process ids of Linux are below 2^22"))
}

/// A new directory to mount on. When it is dropped, it is removed, and the kernel removes the mount with it in every namespace.
/// A killed process leaves it; the lock then tells the next one that it is not in use.
struct RunDirectory {
    path: PathBuf,
    /// Held while the directory is in use, by this process only.
    _lock: Flock<fs::File>,
}

/// The beginning of the names of such directories.
const PLACE: &str = "ckfs-run-";

/// Most directories that are looked at for what killed processes have left.
const LEFT_MAX: usize = 100;

impl RunDirectory {
    fn make() -> anyhow::Result<Self> {
        let below = std::path::absolute(env::temp_dir()).context("directory for temporary files")?;
        Self::remove_left(&below);
        let failed = || format!("{}: make a mountpoint there (TMPDIR names another directory)", below.display());
        loop {
            let path = mkdtemp(&below.join(format!("{PLACE}XXXXXX"))).with_context(failed)?;
            // Before the lock is held, another process may take the directory for one that was left.
            match Self::lock(&path, FlockArg::LockExclusive) {
                Ok(lock) if path.exists() => return Ok(Self { path, _lock: lock }),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    let _ = fs::remove_dir(&path);
                    return Err(error).with_context(failed);
                }
            }
        }
    }

    fn lock(path: &Path, how: FlockArg) -> io::Result<Flock<fs::File>> {
        let directory =
            fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path)?;
        Flock::lock(directory, how).map_err(|(_, errno)| errno.into())
    }

    /// Removes the directories of this user's processes that were killed. Their mounts are gone already.
    fn remove_left(below: &Path) {
        let own = geteuid().as_raw();
        let entries = fs::read_dir(below).into_iter().flatten().flatten();
        let left = entries.filter(|entry| {
            let is_named = entry.file_name().to_str().is_some_and(|name| name.starts_with(PLACE));
            is_named && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == own)
        });
        for entry in left.take(LEFT_MAX) {
            if let Ok(_lock) = Self::lock(&entry.path(), FlockArg::LockExclusiveNonblock) {
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.path) {
            tracing::warn!("{}: {error}", self.path.display());
        }
    }
}

/// The signals that this process handles, blocked in all its threads.
struct Signals(SignalFd);

impl Signals {
    fn block() -> anyhow::Result<Self> {
        let set: SigSet = FORWARDED.into_iter().chain([Signal::SIGCHLD]).collect();
        set.thread_block().context("block signals")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        SignalFd::with_flags(&set, flags).map(Self).context("signalfd")
    }

    /// The next signal that waits.
    fn next(&self) -> Option<(Signal, siginfo)> {
        let info = self.0.read_signal().ok().flatten()?;
        let signal = i32::try_from(info.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok())?;
        Some((signal, info))
    }

    /// While the mount is made, which may take long, a signal ends this process. The other processes end with it. To be
    /// called when it is made: what is returned.
    fn end_at_signal(place: &RunDirectory) -> anyhow::Result<impl FnOnce() + use<>> {
        let (stopped, stop) = io::pipe().context("pipe")?;
        let (signals, path) = (Signals::block()?, place.path.clone());
        let thread = thread::Builder::new().name("ckfs-signals".into()).spawn(move || {
            loop {
                let mut fds = [
                    PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
                    PollFd::new(signals.0.as_fd(), PollFlags::POLLIN),
                ];
                let found = poll(&mut fds, PollTimeout::NONE);
                if found.is_ok() && fds[0].any() == Some(true) {
                    return;
                }
                match signals.next() {
                    Some((Signal::SIGCHLD, _)) | None => {}
                    Some((signal, _)) => {
                        let _ = fs::remove_dir(&path);
                        std::process::exit(128 + signal as i32);
                    }
                }
            }
        });
        let thread = thread.context("start a thread")?;
        Ok(move || {
            drop(stop);
            let _ = thread.join();
        })
    }

    /// Waits for the command and forwards signals to it. Its exit code.
    fn wait_for(&self, command: Pid, daemon: &mut Daemon) -> anyhow::Result<ExitCode> {
        loop {
            if let Some(code) = ended(command).context("wait for the command")? {
                return Ok(ExitCode::from(code));
            }
            if let Some(code) = daemon.check(command)? {
                return Ok(ExitCode::from(code));
            }
            let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno).context("wait for signals"),
            }
            while let Some((signal, info)) = self.next() {
                // A positive code is the kernel's: it has sent the signal of a terminal to the command too.
                if signal != Signal::SIGCHLD && info.ssi_code <= 0 {
                    let _ = kill(command, signal);
                }
            }
        }
    }
}

/// The exit code of a process if it has ended: its own, or 128 and the number of a signal.
fn ended(process: Pid) -> nix::Result<Option<u8>> {
    let code = match waitpid(process, Some(WaitPidFlag::WNOHANG))? {
        WaitStatus::Exited(_, code) => code & 0xff,
        WaitStatus::Signaled(_, signal, _) => 128 + signal as i32,
        WaitStatus::Stopped(..)
        | WaitStatus::PtraceEvent(..)
        | WaitStatus::PtraceSyscall(_)
        | WaitStatus::Continued(_)
        | WaitStatus::StillAlive => return Ok(None),
    };
    Ok(Some(u8::try_from(code).unwrap_or(u8::MAX)))
}

/// The process that serves the mount, until it has ended.
struct Daemon(Option<Pid>);

impl Daemon {
    /// Reports the daemon's end, if it has ended before the command. The command's exit code, if that has ended.
    fn check(&mut self, command: Pid) -> anyhow::Result<Option<u8>> {
        if self.has_ended() != Some(true) {
            return Ok(None);
        }
        self.0 = None;
        // The kernel removes the mount of a command that ends before it reports the command's end.
        let until = Instant::now() + LAST_MOMENTS;
        while Instant::now() < until {
            if let Some(code) = ended(command).context("wait for the command")? {
                return Ok(Some(code));
            }
            thread::sleep(LOOK_PERIOD);
        }
        ckfs_host::tell("ckfs: error: the daemon has ended: reads from the mount fail from now on\n");
        Ok(None)
    }

    fn has_ended(&self) -> Option<bool> {
        self.0.map(|process| !matches!(ended(process), Ok(None)))
    }

    /// Waits `patience` for the daemon's end, which follows that of the mount; then asks for it, then forces it.
    fn end(&mut self, patience: Duration) {
        for (signal, limit) in
            [(None, patience), (Some(Signal::SIGTERM), END_LIMIT), (Some(Signal::SIGKILL), END_LIMIT)]
        {
            let Some(process) = self.0 else { return };
            if let Some(signal) = signal {
                let _ = kill(process, signal);
            }
            let until = ckfs_host::deadline(limit);
            while self.has_ended() == Some(false) && Instant::now() < until {
                thread::sleep(LOOK_PERIOD);
            }
            if self.has_ended() == Some(true) {
                self.0 = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn codes_are_those_of_shells() {
        for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143), ("kill -KILL $$", 137)] {
            let child = Command::new("/bin/sh").args(["-c", script]).spawn().unwrap();
            let process = pid(child.id());
            // `ended` reaps it.
            std::mem::forget(child);
            let found = std::iter::repeat_with(|| ended(process).unwrap()).find_map(|code| {
                thread::sleep(LOOK_PERIOD);
                code
            });
            assert_eq!(found, Some(code), "{script}");
        }
    }

    #[test]
    fn the_daemon_does_not_wait_and_gives_files_to_the_user() {
        let config = of_daemon(Config::default()).unwrap();
        assert_eq!((config.mount.grace, config.mount.drain), (Some(WaitTime::ZERO), Some(WaitTime::ZERO)));
        assert_eq!(config.mount.uid.is_some(), !geteuid().is_root());
    }

    #[test]
    fn the_place_is_removed() {
        let place = RunDirectory::make().unwrap();
        let path = place.path.clone();
        assert!(path.is_absolute() && path.is_dir());
        drop(place);
        assert!(!path.exists());
    }

    #[test]
    fn what_a_killed_process_left_is_removed_and_what_is_in_use_is_not() {
        let below = tempfile::tempdir().unwrap();
        let [left, used, full, other] =
            ["ckfs-run-left", "ckfs-run-used", "ckfs-run-full", "other"].map(|name| below.path().join(name));
        for directory in [&left, &used, &full, &other] {
            fs::create_dir(directory).unwrap();
        }
        fs::write(full.join("file"), "").unwrap();
        let lock = RunDirectory::lock(&used, FlockArg::LockExclusive).unwrap();
        RunDirectory::remove_left(below.path());
        assert!(!left.exists() && used.exists() && full.exists() && other.exists());
        drop(lock);
        RunDirectory::remove_left(below.path());
        assert!(!used.exists());
    }
}
