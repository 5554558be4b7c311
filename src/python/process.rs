//! Threads of this module: what may wait for storage is left to one. They do not exist in a child of `fork`: a call there would wait for
//! them forever.

use std::{
    process,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use pyo3::prelude::*;

use super::failure::ExceptionKind;

/// The process that has the threads; 0 before the first checkpoint is opened.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Notes that this process starts threads.
///
/// # Errors
/// Another process did, of which this one is a child.
pub(super) fn claim(py: Python<'_>) -> PyResult<()> {
    let own = process::id();
    match OWNER.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
        Err(owner) if owner != own => Err(refusal(py, owner)),
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Refuses a call in a child of `fork`.
///
/// # Errors
/// This process is not the one that opened the checkpoint.
pub(super) fn check(py: Python<'_>) -> PyResult<()> {
    let owner = OWNER.load(Ordering::Relaxed);
    if owner == 0 || owner == process::id() { Ok(()) } else { Err(refusal(py, owner)) }
}

/// Whether this process has the threads.
pub(super) fn is_owner() -> bool {
    OWNER.load(Ordering::Relaxed) == process::id()
}

fn refusal(py: Python<'_>, owner: u32) -> PyErr {
    let own = process::id();
    let text = format!(
        "process {own} was forked from process {owner}, in which ckfs has opened a checkpoint; its threads are not in the child: \
         open checkpoints after the fork only, or start the child by \"spawn\" or \"forkserver\" (multiprocessing.get_context)"
    );
    ExceptionKind::Fork.with(py, &text)
}

/// Time between two looks at signals.
const LOOK: Duration = Duration::from_millis(50);

/// What `work` makes, or what it or others send before; `None` if it panicked. A thread that waits for storage cannot be interrupted: it is
/// left to wait if the user interrupts this one.
///
/// # Errors
/// The system starts no thread; what a signal's handler raises.
pub(super) fn apart<T: Send + 'static>(
    py: Python<'_>,
    name: &str,
    work: impl FnOnce(&mpsc::Sender<T>) -> T + Send + 'static,
) -> PyResult<Option<T>> {
    let (tell, told) = mpsc::channel();
    let started = thread::Builder::new().name(name.to_owned()).spawn(move || drop(tell.send(work(&tell))));
    started.map_err(|error| ExceptionKind::General.with(py, &format!("start a thread: {error}")))?;
    let told = Mutex::new(told);
    loop {
        let made = py.detach(|| told.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK));
        py.check_signals()?;
        match made {
            Ok(made) => return Ok(Some(made)),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}
