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
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use ckfs_host::{
    Log, ask_within, limits,
    signal::{self, ENDING},
};
use ckfs_service::{Alive, steps::StepPlace};
use ckfs_volume::Upkeep;
use fuser::SessionACL;
use nix::sys::{
    signal::SigSet,
    signalfd::{SfdFlags, SignalFd},
};
use tracing::{info, warn};

use super::supervisor::{Attached, Exit, Running, Supervisor};
use crate::{
    adapter::KernelAdapter,
    mounts::{MountError, MountOptions, adopt, check_host, is_passed, mount, set_read_ahead},
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
///
/// # Errors
/// [`MountError`]; nothing is left mounted then.
pub fn serve_service(
    service: &dyn Alive,
    mountpoint: &Path,
    log: &Log,
    on_ready: impl FnOnce(),
) -> Result<Exit, MountError> {
    let options = MountOptions::of(&service.config().mount, service.label());
    serve(service.file_system(), mountpoint, &options, log, || {
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
pub fn serve(
    fs: Arc<dyn Upkeep>,
    mountpoint: &Path,
    options: &MountOptions,
    log: &Log,
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
    let (fd, mounted) = if is_passed(mountpoint) {
        let (fd, passed) = adopt(mountpoint)?;
        (fd, Attached::Passed(passed))
    } else {
        let (fd, mounted) = mount(mountpoint, options)?;
        (fd, Attached::Own(mounted))
    };

    let mut config = fuser::Config::default();
    // One more than handles requests: the spare thread usually rests.
    config.n_threads = Some(threads + 1);
    // The kernel enforces the mount options; fuser need not check a second time.
    let acl = SessionACL::All;
    let begin = || {
        let adapter = KernelAdapter::new(Arc::clone(&fs), options.passthrough, threads)?;
        let (passthrough, heartbeat, device) = (adapter.passthrough(), adapter.heartbeat(), fd.try_clone()?);
        let session = fuser::Session::from_fd(adapter, fd, acl, config)?;
        passthrough.begin(fs.as_ref(), &device);
        Ok((session, heartbeat))
    };
    let started = begin()
        .map_err(MountError::session)
        .and_then(|(session, heartbeat)| Ok((Running::start(session, &fs)?, heartbeat)));
    let mut supervisor = match started {
        Ok((running, heartbeat)) => {
            let (grace, drain, since) = (options.grace, options.drain, Instant::now());
            Supervisor { mounted, running, signals, spare, grace, drain, fs, log: log.clone(), since, heartbeat }
        }
        Err(error) => {
            mounted.detach();
            return Err(error);
        }
    };
    // A mount that another process made may be out of sight here.
    let answer = match &supervisor.mounted {
        Attached::Own(mounted) => answers(mounted.path()),
        Attached::Passed(_) => Ok(()),
    };
    if let Err(error) = answer.and_then(|()| supervisor.running.check()) {
        supervisor.mounted.detach();
        supervisor.abort();
        return Err(error);
    }
    if let (Some(kib), Some(device)) = (options.read_ahead_kib, supervisor.mounted.device()) {
        set_read_ahead(device, kib);
    }
    info!("mounted on {} with {threads} threads", supervisor.mounted.path().display());
    on_ready();
    let exit = supervisor.run()?;
    info!("{}: {exit:?}", supervisor.mounted.path().display());
    Ok(exit)
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
