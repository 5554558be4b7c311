//! Compares a complete object with the digest that its service names.
//!
//! Parts cannot be compared: a service names the digest of the whole. So the comparison follows when the last block has come, once
//! for an entry, on a thread of its own. On a mismatch all blocks are dropped and fetched once more.

use std::{
    io,
    os::unix::fs::FileExt,
    sync::{Arc, atomic::Ordering},
    thread,
};

use sha2::{Digest, Sha256};

use super::{
    cache::{
        BLOCK_BYTES, Entry,
        geometry::{block_count, place},
    },
    interface::hexadecimal,
    object::RemoteObject,
};

/// Blocks that are read at a time.
const STEP_BLOCKS: u64 = 64;

/// SHA-256 of a complete entry, in hexadecimal. `None` if a block is not present.
///
/// # Errors
/// The files cannot be read.
pub fn digest_of(entry: &Entry) -> io::Result<Option<String>> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; place(STEP_BLOCKS * BLOCK_BYTES)];
    let count = block_count(entry.size_bytes());
    for start in (0..count).step_by(place(STEP_BLOCKS)) {
        let blocks = start..(start + STEP_BLOCKS).min(count);
        let _guards = entry.guard(&blocks)?;
        if !entry.missing(&blocks)?.is_empty() {
            return Ok(None);
        }
        let span = entry.span_of(&blocks);
        let bytes = &mut buffer[..place(span.len())];
        entry.data().read_exact_at(bytes, span.start())?;
        hasher.update(bytes);
    }
    Ok(Some(hexadecimal(&hasher.finalize())))
}

/// Begins the comparison of an object if it is due. Returns both digests if it was wrong twice.
pub(super) fn step(object: &Arc<RemoteObject>) -> Option<(String, String)> {
    let meta = object.entry.meta();
    let expected = object.file.content.sha256()?;
    let state = &object.digest;
    if let Some(found) = state.found_twice() {
        return Some((expected.to_owned(), found));
    }
    if meta.verified || state.right.load(Ordering::Acquire) || !object.entry.is_whole() {
        return None;
    }
    if !state.running.swap(true, Ordering::AcqRel) {
        let object = Arc::clone(object);
        let started = thread::Builder::new().name("ckfs-digest".into()).spawn(move || {
            compare(&object);
            object.digest.running.store(false, Ordering::Release);
        });
        if started.is_err() {
            state.running.store(false, Ordering::Release);
        }
    }
    None
}

/// Compares a complete object.
fn compare(object: &RemoteObject) {
    let Some(expected) = object.file.content.sha256() else { return };
    let found = match digest_of(&object.entry) {
        Ok(Some(found)) => found,
        Ok(None) => return,
        // There is no room now. The next look begins anew.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
        Err(error) => {
            tracing::warn!("{}: its copy in the cache cannot be read: {error}", object.name.display());
            return;
        }
    };
    let state = &object.digest;
    if found == expected {
        state.right.store(true, Ordering::Release);
        if let Err(error) = object.entry.note_digest() {
            tracing::debug!("cache {}: {error}", object.entry.name());
        }
        return;
    }
    let name = object.name.display();
    if state.wrong.swap(true, Ordering::AcqRel) {
        state.set_found_twice(found);
        return;
    }
    tracing::error!(
        "{name}: expected SHA-256 {expected}, found {found}; the copy in the cache is dropped and fetched once more. What was \
         read from it may be wrong"
    );
    if let Err(error) = object.entry.drop_all() {
        tracing::error!("{name}: the copy in the cache cannot be dropped: {error}");
        state.set_found_twice(found);
    }
}
