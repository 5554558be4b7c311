//! Commands do not wait forever for storage without an answer.
//!
//! A thread that waits for such storage cannot be interrupted. So another thread watches the waits and ends the
//! process. A mount that answers watches its requests by itself and needs this thread only until then.

use std::{
    io,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use super::output::error_text;
use crate::{
    config::Config,
    host::{self, limits},
    source::Fetches,
};

/// Checks per time limit, and the longest time between two checks.
const LOOKS: u32 = 8;
const PERIOD_MAX: Duration = Duration::from_secs(1);

/// Watches fetches until it is dropped.
#[derive(Debug)]
pub(super) struct Patience {
    _stop: mpsc::Sender<()>,
}

/// The record of a command's fetches, with the time limit of its configuration.
pub(super) fn fetches(config: &Config) -> Arc<Fetches> {
    Arc::new(Fetches::new(config.mount.source_timeout.map_or(Fetches::LIMIT, |limit| limit.duration())))
}

/// Calls `give_up` with a message when a fetch stalls, from another thread.
///
/// # Errors
/// The system starts no thread.
pub(super) fn watch(fetches: &Arc<Fetches>, give_up: impl FnOnce(&str) + Send + 'static) -> io::Result<Patience> {
    let (stop, stopped) = mpsc::channel::<()>();
    let fetches = Arc::clone(fetches);
    let period = (fetches.limit() / LOOKS).min(PERIOD_MAX);
    let started = thread::Builder::new().name("ckfs-patience".into()).spawn(move || {
        while stopped.recv_timeout(period) == Err(mpsc::RecvTimeoutError::Timeout) {
            if let Some(stalled) = fetches.stalled().first() {
                return give_up(&fetches.describe(stalled));
            }
        }
    });
    started.map_err(|error| io::Error::new(error.kind(), format!("{error}{}", limits::hint())))?;
    Ok(Patience { _stop: stop })
}

/// Ends this process with an error when a fetch stalls.
///
/// # Errors
/// As [`watch`].
pub(super) fn end_on_stall(fetches: &Arc<Fetches>) -> io::Result<()> {
    let patience = watch(fetches, |message| {
        host::tell(&format!("{}\n", error_text(message)));
        std::process::exit(1);
    })?;
    // The thread runs to the end of the process.
    std::mem::forget(patience);
    Ok(())
}
