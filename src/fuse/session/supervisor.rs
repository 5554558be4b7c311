//! The supervisor of a mount: waits for signals and for the end of the threads that handle requests, and ends the mount in order.

use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{Arc, atomic::Ordering},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ckfs_host::{
    Log, ask_within, deadline,
    signal::{LEAVE, REOPEN, STATISTICS},
    systemd::{self, NotifyState},
};
use ckfs_service::Heartbeat;
use ckfs_volume::{RequestKind, Upkeep};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{signal::Signal, signalfd::SignalFd},
};
use tracing::{Level, error, info, warn};

use super::{
    changes::Changes,
    successor::{ALONE, DONE, Offer},
};
use crate::{
    adapter::KernelAdapter,
    connection::{Inheritance, Record, has_ended},
    mounts::{Device, MountError, MountState, MountUser, Mounted, Passed, UnmountError, abort, describe, is_stale},
    requests::Dispatchers,
};

/// How the mount ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A signal arrived, and no process used the mount when it was removed.
    Unmounted,
    /// A signal arrived while files were open; they were served until the last was closed.
    Drained,
    /// Another process unmounted it.
    UnmountedOutside,
    /// Another process ended the connection: `umount -f`, or `abort` in `/sys/fs/fuse/connections`.
    AbortedOutside,
    /// Another process goes on with the mount; all requests that this one took are answered.
    Replaced,
    /// A signal arrived, and what keeps the connection gives it to the next process.
    Kept,
    /// A signal arrived while no file was open. The mount is left, without an answer, to the process that made it.
    Left,
    /// Open files were cut off: at a second signal, or at the end of the drain period.
    Aborted,
}

impl Exit {
    /// Whether the mount ended as was requested, and no read was cut off by this process.
    pub const fn is_clean(self) -> bool {
        !matches!(self, Self::Aborted)
    }
}

/// Log target of the statistics. Users search for it, so it does not follow the module's name.
const LOG_TARGET: &str = "ckfs::fuse::session";

/// Time between attempts to unmount.
const RETRY_PERIOD: Duration = Duration::from_millis(100);

/// How long to look for processes that keep the mount busy.
const USERS_LIMIT: Duration = Duration::from_secs(2);

/// Time between looks whether the connection to the kernel has ended while threads wait for storage.
const LOOK_PERIOD: Duration = Duration::from_millis(500);

/// Time between looks whether all requests are answered that were taken.
const LEAVE_PERIOD: Duration = Duration::from_millis(2);

/// Time that threads have to end after an abort, before the process ends without them.
const ABORT_LIMIT: Duration = Duration::from_secs(2);

/// What connects this process to a mount.
pub(super) enum Attached {
    /// This process made it, and removes it.
    Own(Mounted),
    /// Another process did, and will.
    Passed(Passed),
}

impl Attached {
    /// Where it is mounted, or the name of the descriptor.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Own(mounted) => mounted.path(),
            Self::Passed(passed) => &passed.path,
        }
    }

    pub(super) fn device(&self) -> Option<Device> {
        match self {
            Self::Own(mounted) => Some(mounted.entry.device),
            Self::Passed(passed) => passed.device,
        }
    }

    pub(super) fn detach(&self) {
        if let Self::Own(mounted) = self
            && let Err(error) = mounted.unmount(true)
        {
            error!("{error}");
        }
    }
}

/// The threads that handle requests.
pub(super) struct Running {
    thread: Option<JoinHandle<io::Result<()>>>,
    changes: Changes,
    /// Reports a hang-up when all threads have ended.
    ended: io::PipeReader,
    /// The connection to the kernel, to see its end.
    connection: OwnedFd,
    /// The signs of life that systemd expects.
    heartbeat: Option<Heartbeat>,
    dispatchers: Arc<Dispatchers>,
}

impl Running {
    pub(super) fn start(
        session: fuser::Session<KernelAdapter>,
        fs: &Arc<dyn Upkeep>,
        (heartbeat, dispatchers): (Option<Heartbeat>, Arc<Dispatchers>),
    ) -> Result<Self, MountError> {
        let failed = MountError::system::<io::Error>("start a thread");
        let connection = session.as_fd().try_clone_to_owned().map_err(&failed)?;
        let (ended, alive) = io::pipe().map_err(&failed)?;
        let changes = Changes::start(fs, session.notifier()).map_err(&failed)?;
        let ending = changes.clone();
        let thread = thread::Builder::new().name("ckfs-session".into()).spawn(move || {
            let result = session.run();
            // The notifier holds the session's descriptor.
            ending.end();
            drop(alive);
            result
        });
        Ok(Self { thread: Some(thread.map_err(failed)?), changes, ended, connection, heartbeat, dispatchers })
    }

    /// Fails if the threads are gone already, as when one of them did not start.
    pub(super) fn check(&mut self) -> Result<(), MountError> {
        if !self.have_ended(PollTimeout::ZERO) {
            return Ok(());
        }
        let ended = || io::Error::other("its threads ended");
        Err(MountError::session(self.result().err().unwrap_or_else(ended)))
    }

    /// Whether all threads have ended, or do so within `limit`.
    fn have_ended(&self, limit: PollTimeout) -> bool {
        let mut fds = [PollFd::new(self.ended.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, limit), Ok(1..))
    }

    /// What the threads ended with. Those that wait for storage end with the process.
    fn result(&mut self) -> io::Result<()> {
        if !self.have_ended(PollTimeout::ZERO) {
            return Ok(());
        }
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let result = thread.join().unwrap_or_else(|_| Err(io::Error::other("a session thread panicked")));
        match result {
            // An abort from outside, for kernels that name it.
            Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => Ok(()),
            result => result,
        }
    }
}

/// What the supervisor waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// The connection has ended, and the threads with it unless they wait for storage.
    Ended,
    /// A signal to end arrived.
    Signal(Signal),
    /// Another process goes on with the mount.
    Replaced,
    /// Time is up.
    Timeout,
}

/// Watches over a mount until its end.
pub(super) struct Supervisor {
    pub(super) mounted: Attached,
    pub(super) running: Running,
    pub(super) signals: SignalFd,
    /// Given up when the mount ends.
    pub(super) spare: Vec<File>,
    pub(super) grace: Duration,
    pub(super) drain: Duration,
    pub(super) fs: Arc<dyn Upkeep>,
    pub(super) log: Log,
    /// When it began to serve.
    pub(super) since: Instant,
    /// What another process may take over.
    pub(super) offer: Option<Offer>,
    /// What the next process learns of this one.
    pub(super) record: Option<Record>,
    /// Whether the connection outlives this process.
    pub(super) is_held: bool,
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.fs.on_change(None);
    }
}

impl Supervisor {
    /// Waits for the end of the mount, and brings it about after a signal.
    pub(super) fn run(&mut self) -> Result<Exit, MountError> {
        let event = self.wait(None)?;
        self.spare.clear();
        match event {
            Event::Ended => {
                self.end_offer();
                return self.ended_by_itself();
            }
            Event::Replaced => return self.give_up_requests(Exit::Replaced),
            Event::Signal(LEAVE) => {
                info!("{LEAVE}: leaving {} to the next process", self.mounted.path().display());
                self.end_offer();
                return self.give_up_requests(Exit::Kept);
            }
            Event::Signal(signal) => info!("{signal}: unmounting {}", self.mounted.path().display()),
            Event::Timeout => {}
        }
        self.end_offer();
        self.running.changes.end();
        systemd::notify(&[NotifyState::Stopping]);
        if matches!(self.mounted, Attached::Passed(_)) {
            return self.leave();
        }
        let Some(calm) = self.unmount_with_grace()? else { return Ok(self.cut_off()) };
        match self.wait(Some(deadline(self.drain)))? {
            Event::Ended => {
                self.log_result();
                Ok(if calm { Exit::Unmounted } else { Exit::Drained })
            }
            // Without readers the threads are about to end, and further signals change nothing. Nothing is aborted: the device's number
            // may be that of another mount by now.
            Event::Signal(_) if calm && self.ends_within(ABORT_LIMIT)? => {
                self.log_result();
                Ok(Exit::Unmounted)
            }
            Event::Signal(_) => Ok(self.cut_off()),
            Event::Replaced | Event::Timeout => {
                warn!("files are still open after {:?}; aborting", self.drain);
                Ok(self.cut_off())
            }
        }
    }

    /// From now on no other process can go on with the mount.
    fn end_offer(&mut self) {
        if let Some(offer) = self.offer.take() {
            offer.end();
        }
    }

    /// Takes no more requests and answers those that were taken, while another process takes the next ones, or will. A signal ends that
    /// too early; the kernel then sends again what is not answered.
    ///
    /// A thread that waits for a request ends its wait with one. So the mount is asked for its sizes until no thread waits.
    fn give_up_requests(&mut self, exit: Exit) -> Result<Exit, MountError> {
        self.running.changes.end();
        let (offer, path, mut asking) = (self.offer.take(), self.mounted.path().to_owned(), Some(Arc::new(())));
        let asks = asking.as_ref().map(Arc::downgrade);
        let ask = move || {
            while asks.as_ref().is_some_and(|asks| asks.strong_count() > 0) {
                let _ = nix::sys::statfs::statfs(&path);
            }
        };
        thread::Builder::new().name("ckfs-ask".into()).spawn(ask).map_err(MountError::system("start a thread"))?;
        let tell = |word| {
            if let Some(offer) = &offer {
                offer.tell(word);
            }
        };
        loop {
            if self.running.dispatchers.leave() {
                if asking.take().is_some() {
                    tell(ALONE);
                }
                if self.fs.metrics().in_flight.load(Ordering::Relaxed) == 0 {
                    if let (Exit::Kept, Some(record)) = (exit, &self.record) {
                        let told =
                            record.read().and_then(|known| record.write(&Inheritance { owes_nothing: true, ..known }));
                        told.unwrap_or_else(|error| {
                            warn!("the next process is not told that all is answered: {error}");
                        });
                    }
                    tell(DONE);
                    break;
                }
            }
            match self.wait(Some(Instant::now() + LEAVE_PERIOD))? {
                Event::Ended | Event::Signal(_) => break,
                Event::Replaced | Event::Timeout => {}
            }
        }
        Ok(exit)
    }

    /// Handles that readers have open.
    fn open_files(&self) -> u64 {
        let metrics = self.fs.metrics();
        let (opens, releases) = (metrics.op(RequestKind::Open), metrics.op(RequestKind::Release));
        let failed = opens.errors.load(Ordering::Relaxed);
        let closed = releases.count.load(Ordering::Relaxed);
        opens.count.load(Ordering::Relaxed).saturating_sub(failed).saturating_sub(closed)
    }

    /// Ends without unmounting, as another process made the mount: when no file is open, or when the periods are over.
    fn leave(&mut self) -> Result<Exit, MountError> {
        let until = deadline(self.grace.saturating_add(self.drain));
        let path = self.mounted.path().display().to_string();
        let (mut told, mut calm) = (false, 0);
        loop {
            let open = self.open_files();
            // An open is counted a moment after its reply, so that one look is not enough.
            calm = if open == 0 { calm + 1 } else { 0 };
            if calm > 1 {
                info!("{path}: the process that made the mount has to unmount it");
                return Ok(Exit::Left);
            }
            let now = Instant::now();
            if open > 0 && now >= until {
                warn!("{path}: {open} open files are cut off");
                return Ok(self.cut_off());
            }
            if open > 0 && !told {
                told = true;
                info!("{path}: {open} files are open; waiting at most {} s", (until - now).as_secs());
            }
            match self.wait(Some(now + RETRY_PERIOD))? {
                Event::Ended => {
                    self.log_result();
                    return Ok(Exit::Drained);
                }
                Event::Signal(_) => return Ok(self.cut_off()),
                Event::Replaced | Event::Timeout => {}
            }
        }
    }

    /// Unmounts, or detaches when the grace period ends. Whether the mount was free, or `None` at a second signal.
    fn unmount_with_grace(&mut self) -> Result<Option<bool>, MountError> {
        let until = deadline(self.grace);
        let mut told = false;
        loop {
            let Attached::Own(mounted) = &self.mounted else { return Ok(Some(true)) };
            match mounted.unmount(false) {
                Ok(MountState::Covered) => {
                    warn!("{}: covered by another mount, left in place", self.mounted.path().display());
                    return Ok(Some(false));
                }
                Ok(MountState::Attached | MountState::Gone) => return Ok(Some(!told)),
                Err(UnmountError::Busy { .. }) => {}
                Err(error) => {
                    error!("{error}");
                    self.mounted.detach();
                    return Ok(Some(false));
                }
            }
            if !told {
                told = true;
                let users = describe(&self.users());
                warn!("{} is busy, {users}; waiting {:?}", self.mounted.path().display(), self.grace);
                systemd::notify(&[NotifyState::Status(&format!("busy, {users}"))]);
            }
            let now = Instant::now();
            if now >= until {
                warn!("{}: detaching; open files stay readable", self.mounted.path().display());
                self.mounted.detach();
                return Ok(Some(false));
            }
            match self.wait(Some(until.min(now + RETRY_PERIOD)))? {
                Event::Ended => return Ok(Some(false)),
                Event::Signal(_) => return Ok(None),
                Event::Replaced | Event::Timeout => {}
            }
        }
    }

    /// The processes that use the mount. Searched for in another thread: reading another process's maps can wait for its page
    /// faults, and so for this mount.
    fn users(&self) -> Vec<MountUser> {
        let Attached::Own(mounted) = &self.mounted else { return Vec::new() };
        ask_within(USERS_LIMIT, "ckfs-users", mounted.users()).ok().flatten().unwrap_or_default()
    }

    /// The connection ended without a signal.
    fn ended_by_itself(&mut self) -> Result<Exit, MountError> {
        let result = self.running.result();
        let Attached::Own(mounted) = &self.mounted else {
            return result.map(|()| Exit::UnmountedOutside).map_err(MountError::session);
        };
        // After an abort from outside the mount is still there, but dead.
        // One that is alive is a successor's, whatever the numbers say.
        let dead = match mounted.state() {
            // After an error some threads may still answer, but the process ends.
            MountState::Attached => result.is_err() || is_stale(mounted.path()),
            MountState::Covered => true,
            MountState::Gone => false,
        };
        if dead {
            self.mounted.detach();
        }
        match result {
            Err(error) => Err(MountError::session(error)),
            Ok(()) if dead => {
                warn!("{}: aborted by another process; open files are cut off", mounted.path().display());
                Ok(Exit::AbortedOutside)
            }
            Ok(()) => Ok(Exit::UnmountedOutside),
        }
    }

    /// Detaches and aborts.
    fn cut_off(&mut self) -> Exit {
        self.mounted.detach();
        self.abort();
        Exit::Aborted
    }

    pub(super) fn abort(&mut self) {
        // Without the number of the device, the end of this process ends the connection.
        let Some(device) = self.mounted.device() else { return };
        abort(device);
        // Otherwise the threads end with the process.
        if matches!(self.ends_within(ABORT_LIMIT), Ok(true)) {
            self.log_result();
        }
    }

    /// Waits for the end of the threads, whatever signals come; whether they have ended.
    fn ends_within(&mut self, limit: Duration) -> Result<bool, MountError> {
        let until = deadline(limit);
        loop {
            match self.wait(Some(until))? {
                Event::Ended => return Ok(true),
                Event::Timeout => return Ok(false),
                Event::Signal(_) | Event::Replaced => {}
            }
        }
    }

    fn log_result(&mut self) {
        if let Err(error) = self.running.result() {
            warn!("session with the kernel: {error}");
        }
    }

    /// One line of statistics.
    fn statistics(&self) -> String {
        let metrics = self.fs.metrics();
        let count = |op: RequestKind| metrics.op(op).count.load(Ordering::Relaxed);
        let all = |which: &dyn Fn(RequestKind) -> u64| RequestKind::ALL.iter().map(|op| which(*op)).sum::<u64>();
        format!(
            "statistics of {}: up {} s, {} requests, {} opens, {} reads, {} errors, {} panics, {} in flight, {} opens passed to \
             the kernel",
            self.mounted.path().display(),
            self.since.elapsed().as_secs(),
            all(&count),
            count(RequestKind::Open),
            count(RequestKind::Read),
            all(&|op| metrics.op(op).errors.load(Ordering::Relaxed)),
            metrics.panics.load(Ordering::Relaxed),
            metrics.in_flight.load(Ordering::Relaxed),
            metrics.passthrough_opens.load(Ordering::Relaxed),
        )
    }

    /// Waits for a signal to end or the end of the threads, until `deadline`; does what other signals ask for.
    fn wait(&mut self, deadline: Option<Instant>) -> Result<Event, MountError> {
        let failed = MountError::system::<Errno>("wait for signals");
        loop {
            if let Some(heartbeat) = &mut self.running.heartbeat {
                heartbeat.beat();
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            // Rounded up, so that the last turn does not spin.
            let left = left.map_or(LOOK_PERIOD, |left| LOOK_PERIOD.min(left));
            let timeout = PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
            let mut fds = vec![
                PollFd::new(self.running.ended.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            ];
            fds.extend(self.offer.iter().map(|offer| PollFd::new(offer.taken.as_fd(), PollFlags::POLLIN)));
            match poll(&mut fds, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(failed(errno)),
            }
            if fds[0].any() == Some(true) {
                return Ok(Event::Ended);
            }
            if fds.get(2).is_some_and(|taken| taken.any() == Some(true)) {
                return Ok(Event::Replaced);
            }
            if let Some(info) = self.signals.read_signal().map_err(&failed)? {
                let signal = i32::try_from(info.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok());
                match signal {
                    Some(signal) if signal == REOPEN => {
                        self.log.reopen();
                        info!("{signal}: the log file is opened anew");
                    }
                    Some(signal) if signal == STATISTICS => {
                        self.log.write(Level::INFO, LOG_TARGET, self.statistics());
                    }
                    Some(signal) if signal == LEAVE && !self.is_held => {
                        info!("{signal}: ignored, as nothing keeps the mount for the next process");
                    }
                    signal => return Ok(Event::Signal(signal.unwrap_or(Signal::SIGTERM))),
                }
            }
            // Threads that wait for storage do not see that.
            if has_ended(&self.running.connection) {
                let limit = PollTimeout::try_from(ABORT_LIMIT).unwrap_or(PollTimeout::MAX);
                if !self.running.have_ended(limit) {
                    info!("the connection has ended; threads that wait for storage end with this process");
                }
                return Ok(Event::Ended);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Ok(Event::Timeout);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mounts::MountOptions;

    #[test]
    fn only_an_abort_is_unclean() {
        for (exit, clean) in [
            (Exit::Unmounted, true),
            (Exit::Drained, true),
            (Exit::UnmountedOutside, true),
            (Exit::AbortedOutside, true),
            (Exit::Replaced, true),
            (Exit::Kept, true),
            (Exit::Left, true),
            (Exit::Aborted, false),
        ] {
            assert_eq!(exit.is_clean(), clean);
        }
    }

    #[test]
    fn defaults_end_before_systemd_loses_patience() {
        let options = MountOptions::default();
        assert!(options.grace + options.drain + ABORT_LIMIT < Duration::from_secs(30));
    }
}
