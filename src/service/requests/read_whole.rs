//! Reads whose answer is as long as it must be.

use ckfs_source::{ReadFailure, Replied, Served};
use ckfs_volume::{FileSystem, FsError, Handle, Ino};
use tracing::error;

/// As [`FileSystem::read`], but an answer that ends before the file does is an error and is not passed on: the kernel would fill it
/// with zeros, or pass it on where it caches no pages; a client of the network would take it for the end.
///
/// # Errors
/// As [`FileSystem::read`]; and [`FsError::Io`] for such an answer.
pub fn read_whole(
    fs: &(impl FileSystem + ?Sized),
    ino: Ino,
    handle: Handle,
    offset: u64,
    len: usize,
    reply: &mut dyn FnMut(Served<'_>) -> Replied,
) -> Result<Replied, ReadFailure<FsError>> {
    let mut verdict = Ok(());
    let replied = fs.read(ino, handle, offset, len, &mut |bytes| {
        verdict = check_length(fs, (ino, handle), offset, len, bytes.len());
        if verdict.is_ok() { reply(bytes) } else { Replied::new() }
    })?;
    verdict?;
    Ok(replied)
}

fn check_length(
    fs: &(impl FileSystem + ?Sized),
    (ino, handle): (Ino, Handle),
    offset: u64,
    asked: usize,
    answered: usize,
) -> Result<(), FsError> {
    if answered == asked {
        return Ok(());
    }
    if answered < asked {
        let end = offset.saturating_add(answered as u64);
        if end >= fs.open_len_bytes(ino, handle)? {
            return Ok(());
        }
    }
    error!(ino = ino.0, offset, "file system answered a read of {asked} bytes with {answered} bytes");
    Err(FsError::Io)
}
