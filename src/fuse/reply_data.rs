//! Replies to reads: the only place where kernel-only buffers reach fuser.
#![allow(unsafe_code)]

use ckfs_volume::Served;
use fuser::ReplyData;

/// Answers a read.
pub(super) fn send(reply: ReplyData, bytes: Served<'_>) {
    match bytes {
        Served::Memory(bytes) => reply.data(bytes),
        // SAFETY: fuser, whose version Cargo.toml fixes, makes an `IoSlice` of the slice and calls `writev`; it reads nothing.
        Served::Kernel(bytes) => reply.data(unsafe { bytes.for_system_call() }),
    }
}
