//! Pins open files as one source.

use std::sync::Arc;

use super::{
    ComparedFiles, LocalFiles, Opened, Source, SourceError, SourceIo, WaitRegistry,
    remote::{Remote, RemoteFiles},
};

/// Pins open files; a file's id is its position in `files`. Copies of remote objects are read through what fetches them.
/// `compared` is where blobs are noted that have the digest of their name.
///
/// # Errors
/// The first file whose attributes cannot be read.
///
/// # Panics
/// If there are more than `u32::MAX` files.
pub fn pin_files(
    files: Vec<Opened>,
    io: SourceIo,
    fetches: Arc<WaitRegistry>,
    compared: Option<&Arc<ComparedFiles>>,
) -> Result<Arc<dyn Source>, SourceError> {
    let remote: Vec<Option<Remote>> = files.iter().map(|file| file.remote.clone()).collect();
    let local = LocalFiles::pin(files, io, fetches, compared)?;
    let counters = remote.iter().flatten().next().map(|first| Arc::clone(first.fetcher.cache().counters()));
    Ok(match counters {
        Some(counters) => Arc::new(RemoteFiles::new(local, remote, counters)),
        None => Arc::new(local),
    })
}
