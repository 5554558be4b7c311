//! The mode of each open inode: through the page cache, directly, or in the kernel on a backing file.
//!
//! The kernel fails an open with EIO if the inode is open on a backing file and the new open is not, or the reverse.
//! So the first open of an inode fixes its mode until its last handle is closed, whatever later opens request. This
//! is safe since the bytes are the same in each mode. One backing id serves all handles of an inode.

use std::{collections::HashMap, io, sync::Arc};

use ckfs_volume::Ino;
use parking_lot::{Mutex, MutexGuard};

/// Mode of an open inode. `B` is the registration of a backing file.
#[derive(Debug)]
pub(super) enum Mode<B> {
    /// Through the page cache.
    Cached,
    /// ckfs answers each read.
    Direct,
    /// The kernel reads the backing file.
    Passthrough(Arc<B>),
}

impl<B> Clone for Mode<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Cached => Self::Cached,
            Self::Direct => Self::Direct,
            Self::Passthrough(backing) => Self::Passthrough(Arc::clone(backing)),
        }
    }
}

#[derive(Debug)]
struct OpenInode<B> {
    handles: u64,
    mode: Mode<B>,
}

/// The mode that an open requests.
pub(super) enum OpenRequest<'a, B> {
    /// Page cache.
    Cached,
    /// No page cache.
    Direct,
    /// The kernel on a backing file, registered by this call.
    Passthrough(&'a dyn Fn() -> io::Result<B>),
}

/// Inodes are distributed over this many locks, so that parallel opens seldom share one.
const LOCKS: usize = 16;

/// The modes of all inodes that are open.
#[derive(Debug)]
pub(super) struct OpenModes<B> {
    shards: [Mutex<HashMap<Ino, OpenInode<B>>>; LOCKS],
}

impl<B> Default for OpenModes<B> {
    fn default() -> Self {
        Self { shards: std::array::from_fn(|_| Mutex::new(HashMap::new())) }
    }
}

impl<B> OpenModes<B> {
    /// Adds a handle of `ino` and returns its mode. Also returned: the error if the registration of a requested backing file
    /// failed.
    pub(super) fn open(&self, ino: Ino, request: &OpenRequest<'_, B>) -> (Mode<B>, Option<io::Error>) {
        let mut shard = self.lock_of(ino);
        if let Some(entry) = shard.get_mut(&ino) {
            entry.handles += 1;
            return (entry.mode.clone(), None);
        }
        let (mode, failure) = match request {
            OpenRequest::Cached => (Mode::Cached, None),
            OpenRequest::Direct => (Mode::Direct, None),
            OpenRequest::Passthrough(register) => match register() {
                Ok(backing) => (Mode::Passthrough(Arc::new(backing)), None),
                Err(error) => (Mode::Cached, Some(error)),
            },
        };
        shard.insert(ino, OpenInode { handles: 1, mode: mode.clone() });
        (mode, failure)
    }

    /// Whether an open of `ino` may be on a backing file now.
    pub(super) fn may_pass(&self, ino: Ino) -> bool {
        self.lock_of(ino).get(&ino).is_none_or(|entry| matches!(entry.mode, Mode::Passthrough(_)))
    }

    /// Removes a handle of `ino`; the last one drops the backing file.
    pub(super) fn release(&self, ino: Ino) {
        let mut shard = self.lock_of(ino);
        let Some(entry) = shard.get_mut(&ino) else { return };
        entry.handles -= 1;
        if entry.handles == 0 {
            shard.remove(&ino);
        }
    }

    fn lock_of(&self, ino: Ino) -> MutexGuard<'_, HashMap<Ino, OpenInode<B>>> {
        let index = usize::try_from(ino.0 % LOCKS as u64).expect("less than the number of locks");
        self.shards[index].lock()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    const A: Ino = Ino(3);
    const SAME_LOCK: Ino = Ino(3 + LOCKS as u64);

    #[test]
    fn first_open_decides_until_the_last_release() {
        let modes = OpenModes::<u32>::default();
        assert!(modes.may_pass(A));
        assert!(matches!(modes.open(A, &OpenRequest::Cached).0, Mode::Cached));
        assert!(!modes.may_pass(A) && modes.may_pass(SAME_LOCK));
        let register = || -> io::Result<u32> { panic!("must not be asked while open cached") };
        assert!(matches!(modes.open(A, &OpenRequest::Passthrough(&register)).0, Mode::Cached));
        modes.release(A);
        modes.release(A);
        assert!(matches!(modes.open(A, &OpenRequest::Passthrough(&|| Ok(7))).0, Mode::Passthrough(_)));
        assert!(matches!(modes.open(A, &OpenRequest::Direct).0, Mode::Passthrough(_)));
        assert!(modes.may_pass(A));
        assert!(matches!(modes.open(SAME_LOCK, &OpenRequest::Direct).0, Mode::Direct));
    }

    #[test]
    fn one_backing_serves_all_handles_and_is_dropped_with_the_last() {
        let modes = OpenModes::default();
        let registered = Cell::new(0);
        let backing = Arc::new(());
        let register = || {
            registered.set(registered.get() + 1);
            Ok(Arc::clone(&backing))
        };
        for _ in 0..3 {
            modes.open(A, &OpenRequest::Passthrough(&register));
        }
        assert_eq!((registered.get(), Arc::strong_count(&backing)), (1, 2));
        modes.release(A);
        modes.release(A);
        assert_eq!(Arc::strong_count(&backing), 2);
        modes.release(A);
        assert_eq!(Arc::strong_count(&backing), 1);
        modes.release(A);
    }

    #[test]
    fn a_failed_registration_means_cached_for_all_handles() {
        let modes = OpenModes::<u32>::default();
        let (mode, failure) =
            modes.open(A, &OpenRequest::Passthrough(&|| Err(io::Error::from_raw_os_error(libc::EPERM))));
        assert!(matches!(mode, Mode::Cached));
        assert_eq!(failure.unwrap().raw_os_error(), Some(libc::EPERM));
        assert!(matches!(modes.open(A, &OpenRequest::Passthrough(&|| Ok(1))).0, Mode::Cached));
    }
}
