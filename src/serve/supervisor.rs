//! The supervisor of a server: waits for signals and ends the server in order.
//!
//! ```text
//! TERM INT QUIT   no new connections; answers that have begun go on for the drain period; a second signal cuts them off
//! HUP             opens the log file anew
//! USR1            writes one line of statistics to the log
//! ```

use std::{
    io,
    os::fd::AsFd,
    time::{Duration, Instant},
};

use ckfs_host::{
    Log, deadline, signal,
    systemd::{self, NotifyState},
};
use ckfs_volume::{RequestKind, Upkeep};
use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::Signal,
        signalfd::{SfdFlags, SignalFd},
    },
};
use tokio::sync::watch;
use tracing::{Level, info};

use super::connections::Connections;

/// Log target of the statistics. Users search for it, so it does not follow the module's name.
const LOG_TARGET: &str = "ckfs::serve";

/// Time between looks whether all answers have ended.
const LOOK_PERIOD: Duration = Duration::from_millis(20);

/// The signals that end a server or act on its log, which must be blocked in every thread.
pub(super) fn signals() -> io::Result<SignalFd> {
    signal::block()?;
    Ok(SignalFd::with_flags(&signal::handled(), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)
}

/// Waits for a signal, and ends the server: drops `serving`, and waits for answers that have begun. Whether every one was sent: a second
/// signal cuts them off, and so does the end of the drain period.
pub(super) fn run(
    signals: &SignalFd,
    serving: watch::Sender<()>,
    connections: &Connections,
    fs: &dyn Upkeep,
    drain: Duration,
    log: &Log,
) -> io::Result<bool> {
    let signal = loop {
        if let Some(signal) = ending(signals, None, fs, log)? {
            break signal;
        }
    };
    info!("{signal}: ending; {} connections are open", connections.len());
    systemd::notify(&[NotifyState::Stopping]);
    drop(serving);
    let until = deadline(drain);
    while connections.len() > 0 {
        let is_over = Instant::now() >= until;
        if is_over || ending(signals, Some(LOOK_PERIOD), fs, log)?.is_some() {
            info!("{} connections are cut off", connections.len());
            return Ok(false);
        }
    }
    Ok(true)
}

/// Waits for a signal to end, at most for `limit`; does what other signals ask for.
fn ending(signals: &SignalFd, limit: Option<Duration>, fs: &dyn Upkeep, log: &Log) -> io::Result<Option<Signal>> {
    let timeout = limit.map_or(PollTimeout::NONE, |limit| PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX));
    match poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], timeout) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let Some(info) = signals.read_signal()? else { return Ok(None) };
    let signal = i32::try_from(info.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok());
    match signal {
        Some(signal) if signal == signal::REOPEN => {
            log.reopen();
            info!("{signal}: the log file is opened anew");
            Ok(None)
        }
        Some(signal) if signal == signal::STATISTICS => {
            log.write(Level::INFO, LOG_TARGET, statistics(fs));
            Ok(None)
        }
        // A server hands nothing over.
        Some(signal) if signal == signal::LEAVE => Ok(None),
        signal => Ok(Some(signal.unwrap_or(Signal::SIGTERM))),
    }
}

/// One line of statistics.
fn statistics(fs: &dyn Upkeep) -> String {
    let metrics = fs.metrics();
    let count = |op: RequestKind| metrics.op(op).count.load(std::sync::atomic::Ordering::Relaxed);
    let errors = |op: RequestKind| metrics.op(op).errors.load(std::sync::atomic::Ordering::Relaxed);
    format!(
        "statistics: {} opens, {} reads, {} errors",
        count(RequestKind::Open),
        count(RequestKind::Read),
        errors(RequestKind::Open) + errors(RequestKind::Read),
    )
}
