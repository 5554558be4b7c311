//! The mode of each open inode: through the page cache, directly, or in the kernel on a backing file.
//!
//! The kernel fails an open with EIO if the inode is open on a backing file and the new open is not, or the reverse.
//! So the first open of an inode fixes its mode until its last handle is closed, whatever later opens request. This
//! is safe since the bytes are the same in each mode. One backing id serves all handles of an inode.

use std::{io, os::fd::OwnedFd};

use ckfs_volume::Ino;

use super::connection::{States, close_backing};

/// Mode of an open inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Through the page cache.
    Cached,
    /// ckfs answers each read.
    Direct,
    /// The kernel reads a backing file.
    Passthrough(Backing),
}

/// A file that the kernel reads by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Backing {
    /// The number under which it is registered.
    pub(super) id: u32,
    /// Whether it can be opened with `O_DIRECT`.
    pub(super) opens_direct: bool,
}

/// Handles of an inode: the low half of its state. The high half is the mode.
const HANDLES: u64 = 0xffff_ffff;

impl Mode {
    const fn bits(self) -> u64 {
        match self {
            Self::Cached => 0,
            Self::Direct => 1 << 32,
            Self::Passthrough(Backing { id, opens_direct }) => (2 + 2 * id as u64 + opens_direct as u64) << 32,
        }
    }

    fn of(state: u64) -> Self {
        match u32::try_from(state >> 32).unwrap_or(0) {
            0 => Self::Cached,
            1 => Self::Direct,
            more => Self::Passthrough(Backing { id: (more - 2) / 2, opens_direct: more % 2 == 1 }),
        }
    }
}

/// The modes of all inodes that are open, with this process and with the one before it.
#[derive(Debug)]
pub(super) struct OpenModes {
    states: States,
    /// The connection that backing files are registered with.
    pub(super) device: OwnedFd,
}

impl OpenModes {
    pub(super) const fn new(states: States, device: OwnedFd) -> Self {
        Self { states, device }
    }

    /// Adds a handle of `ino` and returns its mode: that of `first`, which registers a backing file, if it is the first one. Also
    /// returned: the error if that registration failed.
    pub(super) fn open(&self, ino: Ino, first: &dyn Fn() -> io::Result<Mode>) -> (Mode, Option<io::Error>) {
        loop {
            let found = self.states.load(ino);
            if found & HANDLES != 0 {
                if self.states.exchange(ino, found, found + 1) {
                    return (Mode::of(found), None);
                }
                continue;
            }
            let (mode, failure) = match first() {
                Ok(mode) => (mode, None),
                Err(error) => (Mode::Cached, Some(error)),
            };
            if self.states.exchange(ino, found, mode.bits() | 1) {
                return (mode, failure);
            }
            // Another open came first.
            self.unregister(mode);
        }
    }

    /// Whether an open of `ino` may be on a backing file now.
    pub(super) fn may_pass(&self, ino: Ino) -> bool {
        self.states.load(ino) & HANDLES == 0 || self.is_passed(ino)
    }

    /// Whether `ino` is open on a backing file.
    pub(super) fn is_passed(&self, ino: Ino) -> bool {
        let state = self.states.load(ino);
        state & HANDLES != 0 && matches!(Mode::of(state), Mode::Passthrough(_))
    }

    /// Removes a handle of `ino`; with the last one the registration of the backing file ends.
    pub(super) fn release(&self, ino: Ino) {
        loop {
            let found = self.states.load(ino);
            let next = match found & HANDLES {
                0 => return,
                1 => 0,
                _ => found - 1,
            };
            if self.states.exchange(ino, found, next) {
                if next == 0 {
                    self.unregister(Mode::of(found));
                }
                return;
            }
        }
    }

    fn unregister(&self, mode: Mode) {
        if let Mode::Passthrough(backing) = mode {
            close_backing(&self.device, backing.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, fs::File};

    use parking_lot::Mutex;

    use super::*;

    const A: Ino = Ino(3);
    const B: Ino = Ino(19);

    const fn backing(id: u32) -> Backing {
        Backing { id, opens_direct: id % 2 == 1 }
    }

    fn modes() -> OpenModes {
        OpenModes::new(States::Own(Mutex::default()), File::open("/dev/null").unwrap().into())
    }

    #[test]
    fn first_open_decides_until_the_last_release() {
        let modes = modes();
        assert!(modes.may_pass(A) && !modes.is_passed(A));
        assert_eq!(modes.open(A, &|| Ok(Mode::Cached)).0, Mode::Cached);
        assert!(!modes.may_pass(A) && modes.may_pass(B));
        let register = || -> io::Result<Backing> { panic!("must not be asked while open cached") };
        assert_eq!(modes.open(A, &|| register().map(Mode::Passthrough)).0, Mode::Cached);
        modes.release(A);
        modes.release(A);
        assert_eq!(modes.open(A, &|| Ok(Mode::Passthrough(backing(7)))).0, Mode::Passthrough(backing(7)));
        assert_eq!(modes.open(A, &|| Ok(Mode::Direct)).0, Mode::Passthrough(backing(7)));
        assert!(modes.may_pass(A) && modes.is_passed(A));
        assert_eq!(modes.open(B, &|| Ok(Mode::Direct)).0, Mode::Direct);
    }

    #[test]
    fn one_backing_serves_all_handles_until_the_last_is_closed() {
        let modes = modes();
        let registered = Cell::new(0);
        let register = || {
            registered.set(registered.get() + 1);
            Ok(backing(registered.get()))
        };
        for _ in 0..3 {
            assert_eq!(modes.open(A, &|| register().map(Mode::Passthrough)).0, Mode::Passthrough(backing(1)));
        }
        modes.release(A);
        modes.release(A);
        assert!(modes.is_passed(A));
        modes.release(A);
        assert!(!modes.is_passed(A));
        modes.release(A);
        assert_eq!(modes.open(A, &|| register().map(Mode::Passthrough)).0, Mode::Passthrough(backing(2)));
    }

    #[test]
    fn a_failed_registration_means_cached_for_all_handles() {
        let modes = modes();
        let (mode, failure) = modes.open(A, &|| Err(io::Error::from_raw_os_error(libc::EPERM)));
        assert_eq!(mode, Mode::Cached);
        assert_eq!(failure.unwrap().raw_os_error(), Some(libc::EPERM));
        assert_eq!(modes.open(A, &|| Ok(Mode::Passthrough(backing(1)))).0, Mode::Cached);
    }

    #[test]
    fn the_mode_of_a_process_before_this_one_holds() {
        let record = super::super::connection::Record::new(30).unwrap();
        let of = || OpenModes::new(record.states().unwrap(), File::open("/dev/null").unwrap().into());
        let (before, after) = (of(), of());
        before.open(A, &|| Ok(Mode::Passthrough(backing(4))));
        assert_eq!(after.open(A, &|| Ok(Mode::Cached)).0, Mode::Passthrough(backing(4)));
        before.release(A);
        assert!(before.is_passed(A));
        after.release(A);
        assert_eq!(before.open(A, &|| Ok(Mode::Cached)).0, Mode::Cached);
    }
}
