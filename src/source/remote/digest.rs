//! Compares a complete object with the digest that its service names.
//!
//! Parts cannot be compared: a service names the digest of the whole. So the comparison follows when the last block is present, once
//! for an entry. Bytes with another digest are dropped from the cache. What was made of them is wrong too, wherever it is, so that
//! the file is poisoned if a reader had any of them. If none had, the object is fetched once more.

use std::{
    io,
    sync::{Arc, atomic::Ordering},
};

use ckfs_sync::Helpers;

use super::{
    super::{
        SourceError,
        digest::{Compared, Digester, KnownDigest},
    },
    cache::Entry,
    handle::Remote,
    object::{DigestState, RemoteObject},
    retry::Deadline,
    share,
};

/// Comparisons that run beside readers. Each takes one processor.
static BESIDE_READERS: Helpers = Helpers::new("ckfs-digest", || 2);

/// What a service is told to have sent.
const ADVICE: &str = "these are not the bytes that the service lists; the copy in the disk cache was dropped, and is fetched again \
                      by the next mount or command";
/// The digest in messages where another process has dropped the bytes.
const DROPPED: &str = "other bytes, which another process has dropped";

/// Digest of a complete entry, in hexadecimal. `None` if a block is not present.
///
/// # Errors
/// The files cannot be read.
pub fn digest_of(entry: &Entry, known: &KnownDigest) -> io::Result<Option<String>> {
    let mut digester = Digester::new(known, entry.size_bytes);
    let whole = entry.for_each_part(|bytes| {
        digester.update(bytes);
        Ok(())
    })?;
    Ok(whole.then(|| digester.finish()))
}

/// Has an object compared as soon as all of it is here and readers had bytes of it.
pub(super) fn compare_when_whole(remote: &Remote) {
    // The object holds this, and jobs of the fetcher hold the object.
    let (object, fetcher) = (Arc::downgrade(&remote.object), Arc::downgrade(&remote.fetcher));
    let _ = remote.object.digest.on_whole.set(Box::new(move || {
        if let (Some(object), Some(fetcher)) = (object.upgrade(), fetcher.upgrade()) {
            begin(&Remote { object, fetcher });
        }
    }));
}

/// Whether the bytes of an object are still to be compared with its digest.
pub(super) fn is_open(object: &RemoteObject) -> bool {
    object.digest.wrong.get().is_none() && object.file.content.known_digest().is_some() && !object.entry.is_compared()
}

/// Compares an object if all of it is here, and waits for the result. Bytes that no reader had are fetched once more if they are
/// wrong.
///
/// # Errors
/// Its digest is wrong, and readers had bytes of it, or it was fetched again in vain.
pub(super) fn settle(remote: &Remote) -> Result<Compared, SourceError> {
    let compared = if let Some(compared) = compare(&remote.object, false)? {
        compared
    } else {
        fetch_again(remote);
        // What is wrong for the second time is an error.
        let absent = Compared::Partial { absent_bytes: remote.object.file.size_bytes };
        compare(&remote.object, true)?.unwrap_or(absent)
    };
    if matches!(compared, Compared::Right) {
        share::place(&remote.object);
    }
    Ok(compared)
}

/// Brings a dropped object once more.
fn fetch_again(remote: &Remote) {
    let object = &remote.object;
    let demand = (Arc::clone(object), std::iter::once(0..object.entry.block_count()).collect());
    if let Err(failure) = remote.fetcher.fetch(&[demand], 0, Deadline::None) {
        tracing::warn!("{}: not fetched once more now: {failure}", object.name.display());
    }
}

/// Whether an object is complete, and something of [`settle`] is left to do.
pub(super) fn is_due(object: &RemoteObject) -> bool {
    (is_open(object) || share::is_due(object)) && object.entry.is_whole()
}

/// Begins what [`settle`] does on its own thread, unless there are enough of them: then a later call does.
pub(super) fn begin(remote: &Remote) {
    let state = &remote.object.digest;
    if !is_due(&remote.object) || state.beside.swap(true, Ordering::AcqRel) {
        return;
    }
    let comparing = remote.clone();
    let work = move || {
        let _ended = Beside(&comparing.object.digest);
        // A mismatch was reported where it was found.
        let _ = settle(&comparing);
    };
    if !BESIDE_READERS.spawn(work) {
        state.beside.store(false, Ordering::Release);
    }
}

/// A comparison beside readers, until it is dropped.
struct Beside<'a>(&'a DigestState);

impl Drop for Beside<'_> {
    fn drop(&mut self) {
        self.0.beside.store(false, Ordering::Release);
    }
}

/// Looks whether another process has found the bytes wrong that readers of this one had.
pub(super) fn look(object: &RemoteObject) {
    if object.digest.is_served() && object.digest.wrong.get().is_none() && object.entry.was_dropped() {
        dropped_elsewhere(object);
    }
}

/// The error of an object whose bytes another process has dropped after readers of this one had some.
fn dropped_elsewhere(object: &RemoteObject) -> Option<SourceError> {
    Some(lost(object, &object.file.content.known_digest()?, DROPPED))
}

/// Keeps the first error of an object that has another digest, and tells of it.
fn lost(object: &RemoteObject, expected: &KnownDigest, found: &str) -> SourceError {
    let error = || SourceError::corrupt(Arc::clone(&object.name), expected, found, ADVICE);
    let kept = object.digest.wrong.get_or_init(error).clone();
    if let Some((health, file)) = object.digest.health.get() {
        health.condemn(*file, kept.clone());
    }
    kept
}

/// Compares an object, if all of it is here. `None` if the digest was wrong, and no reader had any byte: the blocks are absent now.
fn compare(object: &RemoteObject, is_second: bool) -> Result<Option<Compared>, SourceError> {
    let (state, entry) = (&object.digest, &object.entry);
    let Some(expected) = object.file.content.known_digest() else { return Ok(Some(Compared::Unknown)) };
    let _comparing = state.comparing.lock();
    if let Some(error) = state.wrong.get() {
        return Err(error.clone());
    }
    if entry.was_dropped() {
        if state.is_served()
            && let Some(error) = dropped_elsewhere(object)
        {
            return Err(error);
        }
        entry.note_drops();
    }
    if entry.is_compared() {
        return Ok(Some(Compared::Right));
    }
    // First without a guard: those of an object that is not here would be many.
    let here = partial(entry);
    if !matches!(here, Compared::Partial { absent_bytes: 0 }) {
        return Ok(Some(here));
    }
    // Kept until the result is noted: a block that comes again has not been compared.
    let kept = entry.guard(&(0..entry.block_count()));
    let (_kept, found) = match kept.and_then(|kept| Ok((kept, digest_of(entry, &expected)?))) {
        Ok((kept, Some(found))) => (kept, found),
        Ok((_, None)) => return Ok(Some(partial(entry))),
        Err(error) => {
            // Without room now, the next look begins anew.
            if error.kind() != io::ErrorKind::WouldBlock {
                tracing::warn!("{}: its copy in the cache cannot be read: {error}", object.name.display());
            }
            return Ok(Some(partial(entry)));
        }
    };
    if found == expected.hex() {
        let compared = match entry.note_digest() {
            Ok(true) => Compared::Right,
            // Another process has found other bytes meanwhile.
            Ok(false) => partial(entry),
            Err(error) => {
                tracing::debug!("cache {}: {error}", entry.name);
                Compared::Right
            }
        };
        return Ok(Some(compared));
    }
    let (name, kind) = (object.name.display(), expected.kind());
    let is_lost = is_second || state.is_served();
    let then = if is_lost { "" } else { " and fetched once more" };
    tracing::error!(
        "{name}: expected {kind} {}, found {found}; the copy in the cache is dropped{then}",
        expected.hex()
    );
    object.service.objects.distrust(&object.file);
    let dropped = entry.drop_all().inspect_err(|error| {
        tracing::error!("{name}: the copy in the cache cannot be dropped: {error}");
    });
    if is_lost || dropped.is_err() {
        return Err(lost(object, &expected, &found));
    }
    entry.note_drops();
    Ok(None)
}

/// What is known of an entry that cannot be compared.
fn partial(entry: &Entry) -> Compared {
    let present = entry.present_bytes().unwrap_or(0);
    Compared::Partial { absent_bytes: entry.size_bytes.saturating_sub(present) }
}
