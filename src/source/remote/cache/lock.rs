//! Locks between processes on ranges of a file. They end with the process, whatever instruction it dies at.
//!
//! They belong to the open file description, so that threads of one process do not exclude each other by them: that is done in
//! memory.

use std::{fs::File, io, ops::Range};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
};

/// Range of the lock of a whole entry: shared by its users, exclusive for its removal.
pub(super) const ENTRY: Range<u64> = 0..1;
/// First place of the locks of segments: shared by readers, exclusive for eviction.
const SEGMENTS: u64 = 1 << 32;
/// First place of the locks of blocks: exclusive for the process that fetches them.
const FETCHES: u64 = 1 << 40;

/// The range of the locks of a segment.
pub(super) const fn segment(segment: usize) -> Range<u64> {
    let start = SEGMENTS + segment as u64;
    start..start + 1
}

/// The range of the locks of blocks that are fetched.
pub(super) const fn fetch(blocks: &Range<u64>) -> Range<u64> {
    FETCHES + blocks.start..FETCHES + blocks.end
}

/// A kind of lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LockKind {
    Shared,
    Exclusive,
    None,
}

/// Takes, changes or drops a lock without waiting. Returns whether it was possible; a lock that this description has already stays
/// if it was not.
pub(super) fn try_lock(file: &File, kind: LockKind, range: &Range<u64>) -> io::Result<bool> {
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&request(kind, range)?)) {
            Ok(_) => return Ok(true),
            Err(Errno::EAGAIN | Errno::EACCES) => return Ok(false),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Takes a lock. The other kind is only ever held for the time of a system call or two.
pub(super) fn lock(file: &File, kind: LockKind, range: &Range<u64>) -> io::Result<()> {
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLKW(&request(kind, range)?)) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn request(kind: LockKind, range: &Range<u64>) -> io::Result<libc::flock> {
    let number = |number| i64::try_from(number).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput));
    let kind = match kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
        LockKind::None => libc::F_UNLCK,
    };
    Ok(libc::flock {
        l_type: libc::c_short::try_from(kind).expect("kinds of locks are small"),
        l_whence: libc::c_short::try_from(libc::SEEK_SET).expect("0"),
        l_start: number(range.start)?,
        l_len: number(range.end - range.start)?,
        l_pid: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_exclude_each_other_and_an_upgrade_that_fails_keeps_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let open = || File::options().create(true).truncate(false).read(true).write(true).open(&path).unwrap();
        let (a, b) = (open(), open());
        let range = segment(3);
        assert!(try_lock(&a, LockKind::Shared, &range).unwrap() && try_lock(&b, LockKind::Shared, &range).unwrap());
        assert!(!try_lock(&a, LockKind::Exclusive, &range).unwrap());
        assert!(!try_lock(&b, LockKind::Exclusive, &range).unwrap(), "a has kept its own");
        drop(b);
        assert!(try_lock(&a, LockKind::Exclusive, &range).unwrap());
        let c = open();
        assert!(!try_lock(&c, LockKind::Shared, &range).unwrap());
        assert!(try_lock(&c, LockKind::Exclusive, &fetch(&(0..9))).unwrap());
        assert!(try_lock(&a, LockKind::None, &range).unwrap());
        lock(&c, LockKind::Shared, &range).unwrap();
    }
}
