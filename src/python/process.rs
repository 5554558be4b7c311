//! Threads of this module do not exist in a child of `fork`: a call there would wait for them forever.

use std::{
    process,
    sync::atomic::{AtomicU32, Ordering},
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
