//! The life of a mount: from mounting through serving to its orderly end.
//!
//! ```text
//! mount -> handshake -> threads -> self-check -> ready -> serving
//!   signal            unmounted, or busy: wait for the grace period, then detach
//!   detached          open files stay readable; ends with the last close, or is aborted after the drain period
//!   second signal     detached and aborted at once
//!   unmounted outside ends, and nothing is unmounted again
//! ```
//!
//! A mount that another process made (`/dev/fd/N`) is left to it: after a signal open files are served until the last is closed,
//! at most for the grace and the drain period.
//!
//! Other signals end nothing: see [`ckfs_host::signal`].
//!
//! Requests are handled on threads of fuser; the thread that called [`serve`] only waits for signals and the end. Signals
//! are taken from a descriptor, never in a signal handler, so they must be blocked in every thread: see
//! [`block_signals`].

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use ckfs_host::{
    Log, ask_within, limits,
    signal::{self, ENDING},
    systemd,
};
use ckfs_service::{Alive, AliveContent, identity, steps::StepPlace};
use ckfs_volume::{Ino, NodeScope, Upkeep};
use nix::sys::{
    signal::SigSet,
    signalfd::{SfdFlags, SignalFd},
};
use parking_lot::Mutex;
use tracing::{info, warn};

use super::{
    keeper,
    successor::{Kept, Offer, Succession, Taken},
    supervisor::{Attached, Exit, Running, Supervisor},
};
use crate::{
    adapter::KernelAdapter,
    connection::{self, Inheritance, Record, States},
    mounts::{MountError, MountOptions, UnmountOptions, adopt, check_host, is_passed, mount, set_read_ahead, unmount},
    open_mode::OpenModes,
};

/// Blocks the signals that [`serve`] waits for, in this thread and the threads that it starts. Ignores the signals that mean
/// nothing to a mount.
///
/// Must be called before the first thread is started. The kernel delivers a signal to any thread that does not block it, and
/// that would end the process.
///
/// # Errors
/// [`MountError::Refused`].
pub fn block_signals() -> Result<(), MountError> {
    signal::ignore_harmless();
    signal::block().map_err(MountError::system("block signals"))
}

/// Does `work` while one extra thread lets the blocked signals through, so that they end the process. For long work
/// before the mount is made. Threads that `work` starts still block the signals.
///
/// # Errors
/// [`MountError::Refused`] if that thread cannot be started; `work` is not done then.
pub fn interruptible<T>(work: impl FnOnce() -> T) -> Result<T, MountError> {
    thread::scope(|scope| {
        let (done, ended) = mpsc::channel::<()>();
        let waiting = thread::Builder::new().name("ckfs-signals".into()).spawn_scoped(scope, move || {
            let ending: SigSet = ENDING.into_iter().collect();
            if ending.thread_unblock().is_ok() {
                let _ = ended.recv();
            }
            // The scope waits for this closure, not for the thread: a signal that comes before its end must find none that takes it.
            let _ = ending.thread_block();
        });
        waiting.map_err(MountError::system("start a thread"))?;
        let result = work();
        // The scope waits for the thread: signals stay pending again after it.
        drop(done);
        Ok(result)
    })
}

/// Time that the mount has to answer the self-check.
const SELF_CHECK_LIMIT: Duration = Duration::from_secs(10);

/// Bytes of the buffer into which each thread of fuser reads requests.
const REQUEST_BUFFER_BYTES: usize = (16 << 20) + 4096;

/// Threads of a mount besides those that handle requests: the spare one, the session's, the one that watches requests, the one
/// that reports changes to the kernel, and one for the self-check or the search for processes that use the mount.
const OTHER_THREADS: usize = 5;

/// Memory that must be left when the mount is made: its first requests need some.
const SPARE_BYTES: usize = 64 << 20;

/// Descriptors kept for the end: unmounting opens files, and readers may have used up all others.
const SPARE_DESCRIPTORS: usize = 8;

/// Number of threads that handle requests: `wanted`, or fewer if the limits of this process allow no more. Decided before
/// the mount is made, since a thread that fails to start later would leave the mount half alive.
fn startable(wanted: usize) -> Result<usize, MountError> {
    let refused =
        |error: io::Error| MountError::Refused(format!("start the threads of the mount: {error}{}", limits::hint()));
    let mut spare: Vec<u8> = Vec::new();
    spare.try_reserve_exact(SPARE_BYTES).map_err(|_| refused(io::ErrorKind::OutOfMemory.into()))?;
    let found = limits::startable_threads(wanted + OTHER_THREADS, REQUEST_BUFFER_BYTES);
    drop(spare);
    let threads = found.threads.saturating_sub(OTHER_THREADS);
    match found.refusal {
        Some(refusal) if threads == 0 => Err(refused(refusal)),
        Some(refusal) => {
            warn!("{threads} of {wanted} threads handle requests: {refusal}{}", limits::hint());
            Ok(threads)
        }
        None => Ok(wanted),
    }
}

/// Mounts a checkpoint or a run on `mountpoint`, as its configuration says, and serves it until it is unmounted. See [`serve`].
/// `succession` tells whether a daemon has it now. With `keeper`, the file of this configuration, another process keeps the mount when
/// this one is killed.
///
/// # Errors
/// [`MountError`]; nothing is left mounted then.
pub fn serve_service(
    service: &dyn Alive,
    mountpoint: &Path,
    log: &Log,
    (succession, keeper): (Succession, Option<&Path>),
    on_ready: impl FnOnce(),
) -> Result<Exit, MountError> {
    let options = MountOptions::of(&service.config().mount, service.label());
    let lasting = match service.content() {
        AliveContent::Checkpoint(volume) if !is_passed(mountpoint) => {
            let (volume, keeper) = (Arc::clone(volume), keeper.map(Path::to_owned));
            Some(Lasting { digest: Arc::new(move || identity::of_kept(&volume)), succession, keeper })
        }
        AliveContent::Checkpoint(_) | AliveContent::Run(_) => {
            let path = mountpoint.display();
            if succession == Succession::Running {
                let why = "the steps of a run come and go, so no other process has the same";
                return Err(MountError::Refused(format!("{path}: {why}")));
            }
            if keeper.is_some() {
                let why = "--keeper: for a mount of one checkpoint on a directory; without --steps";
                return Err(MountError::Refused(format!("{path}: {why}")));
            }
            None
        }
    };
    serve_lasting(&service.file_system(), (mountpoint, &options), log, lasting.as_ref(), || {
        service.note_reached(StepPlace::Mount(mountpoint.to_owned()));
        on_ready();
    })
}

/// Mounts `fs` on `mountpoint` and serves it until it is unmounted. Calls `on_ready` once the mount answers. Signals that
/// concern the log act on `log`.
///
/// Blocks signals as [`block_signals`] does; they stay blocked afterwards.
///
/// # Errors
/// [`MountError`]; nothing is left mounted then.
#[expect(clippy::needless_pass_by_value, reason = "the file system of a mount is nobody else's business")]
pub fn serve(
    fs: Arc<dyn Upkeep>,
    mountpoint: &Path,
    options: &MountOptions,
    log: &Log,
    on_ready: impl FnOnce(),
) -> Result<Exit, MountError> {
    serve_lasting(&fs, (mountpoint, options), log, None, on_ready)
}

/// What makes a mount outlast a process.
struct Lasting {
    digest: Kept,
    succession: Succession,
    keeper: Option<PathBuf>,
}

/// A session that has begun.
struct Connected {
    mounted: Attached,
    running: Running,
    device: OwnedFd,
    /// What the next process gets; none where there can be none.
    record: Option<(Record, Inheritance)>,
}

impl Connected {
    /// Mounts, or goes on with the mount of another process.
    fn new(
        fs: &Arc<dyn Upkeep>,
        (mountpoint, options, threads): (&Path, &MountOptions, usize),
        before: Option<&Taken>,
        kept: Option<&Kept>,
    ) -> Result<Self, MountError> {
        let failed = MountError::session;
        let (device, mounted, known, record) = match (before, kept) {
            (Some(before), Some(kept)) => {
                let (known, mounted) = before.check(mountpoint, options, kept)?;
                let (device, record) = (before.device.try_clone().map_err(failed)?, before.record.try_clone());
                (device, Attached::Own(mounted), Some(known), Some(record.map_err(failed)?))
            }
            _ if is_passed(mountpoint) => {
                let (device, passed) = adopt(mountpoint)?;
                (device, Attached::Passed(passed), None, None)
            }
            (_, kept) => {
                let (device, mounted) = mount(mountpoint, options)?;
                let nodes = fs.nodes(Ino::ROOT, NodeScope::Itself).map_or(0, |nodes| nodes.stat_fs().nodes);
                let record =
                    kept.and_then(|_| Record::new(nodes).inspect_err(|error| info!("no record: {error}")).ok());
                (device, Attached::Own(mounted), None, record)
            }
        };
        Self::begin(fs, (options, threads), (device, mounted), before.zip(known.as_ref()), record)
    }

    /// Begins the session and its threads. A mount that is new is detached again if that fails.
    fn begin(
        fs: &Arc<dyn Upkeep>,
        (options, threads): (&MountOptions, usize),
        (device, mounted): (OwnedFd, Attached),
        before: Option<(&Taken, &Inheritance)>,
        record: Option<Record>,
    ) -> Result<Self, MountError> {
        let begin = || {
            let states = record.as_ref().map_or_else(|| Ok(States::Own(Mutex::default())), Record::states)?;
            let modes = OpenModes::new(states, device.try_clone()?);
            let adapter = KernelAdapter::new(Arc::clone(fs), options.passthrough, threads, modes)?;
            let mut config = fuser::Config::default();
            // One more than handles requests: the spare thread usually rests.
            config.n_threads = Some(threads + 1);
            let (passthrough, threads) = (adapter.passthrough(), (adapter.heartbeat(), adapter.dispatchers()));
            let known = before.map(|(_, known)| known);
            let (session, mut known) = connection::begin(adapter, &device, config, known)?;
            if let Some((before, _)) = before {
                known.generation += 1;
                known.owes_nothing = false;
                fs.succeed(known.generation << HANDLE_BITS);
                passthrough.begin(fs.as_ref());
                before.record.write(&known)?;
                before.start(known.resends())?;
            } else {
                passthrough.begin(fs.as_ref());
                if let Attached::Own(mounted) = &mounted {
                    known.device = mounted.entry.device.to_string();
                    known.unique_id = mounted.unique_id;
                    known.options = options.of_mount();
                }
            }
            io::Result::Ok((session, threads, known))
        };
        let begun = begin().map_err(MountError::session);
        match begun.and_then(|(session, threads, known)| Ok((Running::start(session, fs, threads)?, known))) {
            Ok((running, known)) => Ok(Self { mounted, running, device, record: record.map(|record| (record, known)) }),
            Err(error) => {
                // Without a connection nothing that detaching does can wait for an answer of this process.
                drop((device, record));
                if before.is_none() {
                    mounted.detach();
                }
                Err(error)
            }
        }
    }
}

/// Handles that one process gives: two to this power at most, which takes years.
const HANDLE_BITS: u32 = 40;

fn serve_lasting(
    fs: &Arc<dyn Upkeep>,
    (mountpoint, options): (&Path, &MountOptions),
    log: &Log,
    lasting: Option<&Lasting>,
    on_ready: impl FnOnce(),
) -> Result<Exit, MountError> {
    check_host()?;
    block_signals()?;
    let signals = SignalFd::with_flags(&signal::handled(), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .map_err(MountError::system("signalfd"))?;
    let spare = (0..SPARE_DESCRIPTORS).map(|_| File::open("/dev/null")).collect::<io::Result<Vec<_>>>();
    let spare = spare.map_err(|error| MountError::Refused(format!("open files: {error}{}", limits::hint())))?;
    let wanted = options.threads.unwrap_or_else(|| thread::available_parallelism().map_or(2, usize::from).clamp(2, 16));
    let threads = startable(wanted.max(1))?;
    let mut taken = lasting.map(|lasting| Taken::find(mountpoint, lasting.succession)).transpose()?.flatten();
    let connect = |before: Option<&Taken>| {
        Connected::new(fs, (mountpoint, options, threads), before, lasting.map(|lasting| &lasting.digest))
    };
    let connected = match (connect(taken.as_ref()), &taken) {
        (Err(error), Some(before)) if !before.is_left => {
            warn!("{error}; mounted anew, and files that were open are cut off");
            systemd::release();
            let detached = unmount(mountpoint, UnmountOptions { lazy: true, ..UnmountOptions::default() });
            detached.unwrap_or_else(|error| info!("{error}"));
            taken = None;
            connect(None)?
        }
        (connected, _) => connected?,
    };
    let Connected { mounted, running, device, record } = connected;
    let (grace, drain, since) = (options.grace, options.drain, Instant::now());
    let mut supervisor = Supervisor {
        mounted,
        running,
        signals,
        spare,
        grace,
        drain,
        fs: Arc::clone(fs),
        log: log.clone(),
        since,
        offer: None,
        record: None,
        is_held: false,
    };
    // A mount that another process made may be out of sight here.
    let answer = match &supervisor.mounted {
        Attached::Own(mounted) => answers(mounted.path()),
        Attached::Passed(_) => Ok(()),
    };
    let offered = answer.and_then(|()| supervisor.running.check()).and_then(|()| match (lasting, record) {
        (Some(lasting), Some(record)) => supervisor.offer(lasting, device, record, taken.is_none()),
        (_, _) => Ok((None, None)),
    });
    let (keeper, _lock) = match offered {
        Ok(offered) => offered,
        Err(error) => {
            if taken.is_none() {
                supervisor.mounted.detach();
                supervisor.abort();
            }
            return Err(error);
        }
    };
    if let (Some(kib), Some(device)) = (options.read_ahead_kib, supervisor.mounted.device()) {
        set_read_ahead(device, kib);
    }
    info!("mounted on {} with {threads} threads", supervisor.mounted.path().display());
    // Last of all: until then the other process goes on if this one dies.
    if let Some(taken) = taken {
        taken.finish();
    }
    on_ready();
    let exit = supervisor.run()?;
    if exit != Exit::Kept {
        keeper::release(keeper);
        if exit != Exit::Replaced && supervisor.is_held {
            systemd::release();
        }
    }
    info!("{}: {exit:?}", supervisor.mounted.path().display());
    Ok(exit)
}

impl Supervisor {
    /// Lets another process go on with the mount after this one. The stream to the keeper, if there is one, and the lock of the record,
    /// if this process `is_first` to serve it.
    fn offer(
        &mut self,
        lasting: &Lasting,
        device: OwnedFd,
        (record, mut known): (Record, Inheritance),
        is_first: bool,
    ) -> Result<(Option<UnixStream>, Option<File>), MountError> {
        let lock = is_first.then(|| record.lock()).transpose().map_err(MountError::session)?;
        let mut keeper = None;
        if let Some(file) = &lasting.keeper {
            known.kept = (lasting.digest)();
            let started = record.write(&known).and_then(|()| keeper::start(file, &device, &record));
            keeper = Some(started.map_err(|error| MountError::Refused(format!("--keeper: {error}")))?);
        }
        let kept = (Arc::clone(&lasting.digest), systemd::listens());
        self.is_held = keeper.is_some() || systemd::listens();
        self.record = record.try_clone().ok();
        self.offer = Offer::new(self.mounted.path(), device, record, known, kept)
            .inspect_err(|error| info!("`ckfs restart` cannot replace this process under readers: {error}"))
            .ok();
        Ok((keeper, lock))
    }
}

/// Asks the mount for its sizes and its root. In another thread, since the mount may never answer.
fn answers(mountpoint: &Path) -> Result<(), MountError> {
    let path = mountpoint.to_owned();
    let ask = move || {
        let statfs = nix::sys::statfs::statfs(&path).map_err(|errno| format!("statfs: {errno}"));
        let stat = statfs.and_then(|_| std::fs::metadata(&path).map_err(|error| format!("stat: {error}")));
        stat.and_then(|root| root.is_dir().then_some(()).ok_or("root is no directory".to_owned()))
    };
    let answer = ask_within(SELF_CHECK_LIMIT, "ckfs-check", ask).map_err(MountError::system("start a thread"))?;
    answer
        .unwrap_or_else(|| Err(format!("no answer within {} s", SELF_CHECK_LIMIT.as_secs())))
        .map_err(|message| MountError::Host(format!("mount on {} does not answer: {message}", mountpoint.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckfs_host::signal::{REOPEN, STATISTICS};

    #[test]
    fn signals_are_let_through_by_one_thread_only() {
        block_signals().unwrap();
        let blocked = || {
            let mask = SigSet::thread_get_mask().unwrap();
            ENDING.into_iter().chain([REOPEN, STATISTICS]).all(|signal| mask.contains(signal))
        };
        let found = interruptible(|| (blocked(), thread::spawn(blocked).join().unwrap())).unwrap();
        assert_eq!((found, blocked()), ((true, true), true));
    }
}
