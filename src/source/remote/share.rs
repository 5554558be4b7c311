//! Places complete files of the Hub into the cache of its own client, so that other programs find them.
//!
//! A file is copied, compared with its digest on the way, and renamed into its place: others see all of it or nothing. It is no
//! link to the file of the disk cache, which loses its bytes when they are evicted.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use rustix::fs::statvfs;

use super::{
    super::digest::Digester,
    interface::Content,
    object::RemoteObject,
    shared::{SharedCache, replace},
};

/// Part of a file system that stays free: one 20th.
const FREE_DIVISOR: u64 = 20;

/// The digest of a file, by which its blob is named.
fn name_of(content: &Content) -> Option<&str> {
    match content {
        Content::Sha256(digest) | Content::GitBlob(digest) => Some(digest),
        Content::Version { .. } => None,
    }
}

/// Whether an object is to be placed, and was not yet.
pub(super) fn is_due(object: &RemoteObject) -> bool {
    object.service.objects.shared().is_some()
        && name_of(&object.file.content).is_some()
        && !object.digest.shared.load(Ordering::Acquire)
}

/// Places an object, if it is due and complete. A failure is logged, and is final.
pub(super) fn place(object: &RemoteObject) {
    let Some(shared) = object.service.objects.shared().filter(|_| is_due(object)) else { return };
    let Some(digest) = name_of(&object.file.content) else { return };
    let blob = shared.blob(digest);
    match if blob_is_there(&blob, object.file.size_bytes) { Ok(true) } else { copy(object, &blob) } {
        Ok(true) => object.digest.shared.store(true, Ordering::Release),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!("{}: not placed into {}: {error}", object.name.display(), blob.display());
            object.digest.shared.store(true, Ordering::Release);
        }
    }
}

fn blob_is_there(blob: &Path, size_bytes: u64) -> bool {
    fs::metadata(blob).is_ok_and(|found| found.is_file() && found.len() == size_bytes)
}

/// Copies an object to its blob. Returns false if a part of it is not present.
fn copy(object: &RemoteObject, blob: &Path) -> io::Result<bool> {
    let size_bytes = object.file.size_bytes;
    let malformed = || io::Error::new(io::ErrorKind::InvalidData, "its digest is malformed");
    let known = object.file.content.known_digest().ok_or_else(malformed)?;
    fs::create_dir_all(blob.parent().unwrap_or(blob))?;
    let found = statvfs(blob.parent().unwrap_or(blob))?;
    let (total, free) = (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize);
    if free < size_bytes.saturating_add(total / FREE_DIVISOR) {
        return Err(io::Error::new(io::ErrorKind::StorageFull, "a 20th of the file system stays free"));
    }
    let incomplete = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let copied = replace(blob, |new| {
        let mut file = File::create_new(new)?;
        let mut digest = Digester::new(&known, size_bytes);
        let whole = object.entry.for_each_part(|bytes| {
            digest.update(bytes);
            file.write_all(bytes)
        });
        if !whole? {
            return Err(incomplete());
        }
        file.sync_data()?;
        let (found, expected) = (digest.finish(), known.hex());
        if found == expected {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, format!("expected digest {expected}, found {found}")))
    });
    match copied {
        Ok(()) => Ok(true),
        // The rest comes later, or is brought again.
        Err(error) if matches!(error.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::WouldBlock) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes the snapshots all of whose files are placed, except those of `done`. Returns their directories.
pub(super) fn publish<'a>(objects: impl Iterator<Item = &'a RemoteObject>, done: &mut Vec<PathBuf>) -> Vec<PathBuf> {
    let mut snapshots: BTreeMap<PathBuf, (&SharedCache, Vec<&RemoteObject>)> = BTreeMap::new();
    for object in objects {
        let Some(shared) = object.service.objects.shared() else { continue };
        snapshots.entry(shared.snapshot()).or_insert_with(|| (shared, Vec::new())).1.push(object);
    }
    let mut made = Vec::new();
    for (dir, (shared, objects)) in snapshots {
        let is_placed = |object: &&RemoteObject| {
            let blob = name_of(&object.file.content).map(|digest| shared.blob(digest));
            blob.is_some_and(|blob| blob_is_there(&blob, object.file.size_bytes))
        };
        if done.contains(&dir) || objects.iter().any(|object| is_due(object)) || !objects.iter().all(is_placed) {
            continue;
        }
        let files =
            objects.iter().filter_map(|object| Some((object.file.path.as_str(), name_of(&object.file.content)?)));
        match shared.publish(files) {
            Ok(()) => made.push(dir.clone()),
            Err(error) => tracing::warn!("{}: not made: {error}", dir.display()),
        }
        done.push(dir);
    }
    made
}
