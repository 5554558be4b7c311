//! Compares a complete object with the digest that its service names.
//!
//! Parts cannot be compared: a service names the digest of the whole. So the comparison follows when the last block is present, once
//! for an entry, on a thread of its own. On a mismatch all blocks are dropped, fetched once more and compared again.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
    thread,
};

use sha2::{Digest, Sha256};

use super::{
    cache::Entry, handle::Remote, interface::hexadecimal, object::RemoteObject, retry::Deadline, share,
    whole::for_each_part,
};

/// SHA-256 of a complete entry, in hexadecimal. `None` if a block is not present.
///
/// # Errors
/// The files cannot be read.
pub fn digest_of(entry: &Entry) -> io::Result<Option<String>> {
    let mut hasher = Sha256::new();
    let whole = for_each_part(entry, |bytes| {
        hasher.update(bytes);
        Ok(())
    })?;
    Ok(whole.then(|| hexadecimal(&hasher.finalize())))
}

/// Whether the bytes of an object are still to be compared with its digest.
fn is_open(object: &RemoteObject) -> bool {
    object.file.content.sha256().is_some()
        && !object.entry.meta().verified
        && !object.digest.right.load(Ordering::Acquire)
}

/// Both digests of an object that was wrong twice.
fn wrong_twice(object: &RemoteObject) -> Option<(String, String)> {
    Some((object.file.content.sha256()?.to_owned(), object.digest.found_twice()?))
}

/// Compares a complete object and places it, as far as that is due. Waits for it, also where the bytes are fetched once more.
/// Returns both digests if it was wrong twice.
pub(super) fn settle(remote: &Remote) -> Option<(String, String)> {
    let object = &remote.object;
    if is_open(object) && compare(object) == Comparison::Dropped {
        // Readers may have all they want in memory: without this nobody would learn whether the store has the right bytes.
        fetch_again(remote);
        compare(object);
    }
    if wrong_twice(object).is_none() && !is_open(object) {
        share::place(object);
    }
    wrong_twice(object)
}

/// Brings a dropped object once more.
fn fetch_again(remote: &Remote) {
    let object = &remote.object;
    let demand = (Arc::clone(object), std::iter::once(0..object.entry.block_count()).collect());
    if let Err(failure) = remote.fetcher.bring(&[demand], 0, Deadline::None) {
        tracing::warn!("{}: not fetched once more now: {failure}", object.name.display());
    }
}

/// Begins what [`settle`] does if it is due. Returns both digests if it was wrong twice.
pub(super) fn step(remote: &Remote) -> Option<(String, String)> {
    let (object, state) = (&remote.object, &remote.object.digest);
    if let Some(wrong) = wrong_twice(object) {
        return Some(wrong);
    }
    if !(is_open(object) || share::is_due(object)) || !object.entry.is_whole() {
        return None;
    }
    if !state.running.swap(true, Ordering::AcqRel) {
        let remote = remote.clone();
        let started = thread::Builder::new().name("ckfs-digest".into()).spawn(move || {
            settle(&remote);
            remote.object.digest.running.store(false, Ordering::Release);
        });
        if started.is_err() {
            state.running.store(false, Ordering::Release);
        }
    }
    None
}

/// What a comparison came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    /// The digest was wrong for the first time: the blocks are absent now.
    Dropped,
    /// Anything else: it was right, or wrong twice, or could not be compared.
    Done,
}

/// Compares a complete object.
fn compare(object: &RemoteObject) -> Comparison {
    let Some(expected) = object.file.content.sha256() else { return Comparison::Done };
    let found = match digest_of(&object.entry) {
        Ok(Some(found)) => found,
        Ok(None) => return Comparison::Done,
        // There is no room now. The next look begins anew.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Comparison::Done,
        Err(error) => {
            tracing::warn!("{}: its copy in the cache cannot be read: {error}", object.name.display());
            return Comparison::Done;
        }
    };
    let state = &object.digest;
    if found == expected {
        state.right.store(true, Ordering::Release);
        if let Err(error) = object.entry.note_digest() {
            tracing::debug!("cache {}: {error}", object.entry.name());
        }
        return Comparison::Done;
    }
    let name = object.name.display();
    if state.wrong.swap(true, Ordering::AcqRel) {
        tracing::error!("{name}: expected SHA-256 {expected}, found {found}, now that it was fetched once more");
        state.set_found_twice(found);
        return Comparison::Done;
    }
    tracing::error!(
        "{name}: expected SHA-256 {expected}, found {found}; the copy in the cache is dropped and fetched once more. What was \
         read from it may be wrong"
    );
    if let Err(error) = object.entry.drop_all() {
        tracing::error!("{name}: the copy in the cache cannot be dropped: {error}");
        state.set_found_twice(found);
        return Comparison::Done;
    }
    Comparison::Dropped
}
