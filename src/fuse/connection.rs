#![allow(unsafe_code)]
//! The connection to the kernel as what outlives a process, and what its next process must know.
//!
//! A connection lives as long as one process has its descriptor of `/dev/fuse` open. Another process that gets the descriptor goes on with
//! it, if it knows the rest, the [`Record`]: memory that both share. It holds the first exchange with the kernel ([`Inheritance`]) and the
//! mode of each inode that is open ([`States`]), which the kernel does not tell. Inode numbers follow from the plan.
//!
//! fuser begins a session by answering the kernel's first request. That exchange is played over a pair of sockets here, with the
//! kernel's request, or the recorded one where the kernel got its answer long ago. Then the connection takes the place of the
//! socket. So fuser serves a connection that it did not begin, and its answer shows whether it would have begun it alike.

use std::{
    collections::HashMap,
    fs::{File, TryLockError},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::fs::FileExt,
    },
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use ckfs_volume::Ino;
use fuser::{FileHandle, FopenFlags, ReplyOpen, Session};
use memmap2::{MmapOptions, MmapRaw};
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, SealFlag, fcntl},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        memfd::{MFdFlags, memfd_create},
        socket::{AddressFamily, SockFlag, SockType, socketpair},
    },
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Largest first request or answer. The kernel wants a buffer of 8 KiB for its requests.
const EXCHANGE_BYTES: usize = 64 << 10;

/// Bytes of the header of a request, and of an answer.
const REQUEST_HEADER_BYTES: usize = 40;
const ANSWER_HEADER_BYTES: usize = 16;

/// What a daemon knows of its mount that the next one must know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Inheritance {
    /// Daemons before this one.
    pub(crate) generation: u64,
    /// Of these the last ones that were killed right after their start.
    pub(crate) short_lives: u32,
    /// The device of the mount.
    pub(crate) device: String,
    /// The number that no later mount gets.
    pub(crate) unique_id: Option<u64>,
    /// What it was mounted with.
    pub(crate) options: String,
    /// The digest of all that the kernel may keep of the tree; none until it is known.
    pub(crate) kept: Option<String>,
    /// Whether the last daemon has answered all that it took, and takes no more.
    pub(crate) owes_nothing: bool,
    /// The kernel's first request.
    pub(crate) asked: Vec<u8>,
    /// The answer.
    pub(crate) answered: Vec<u8>,
}

impl Inheritance {
    /// Whether the kernel can send unanswered requests again (`FUSE_HAS_RESEND`, since Linux 6.9).
    pub(crate) fn resends(&self) -> bool {
        // The second word of flags follows version, read-ahead and the first word; the flag is number 39 of both.
        const BYTE: usize = REQUEST_HEADER_BYTES + 16;
        self.asked.get(BYTE).is_some_and(|byte| byte & 1 << (39 - 32) != 0)
    }
}

/// Bytes of a record before the states: one line of JSON.
const HEAD_BYTES: u64 = 1 << 14;

/// Memory that goes from one daemon to the next.
#[derive(Debug)]
pub(crate) struct Record {
    memory: File,
}

impl Record {
    /// The record of a tree of so many nodes. Only the states of inodes that are opened take memory.
    pub(crate) fn new(nodes: u64) -> io::Result<Self> {
        let memory = memfd_create(c"ckfs-mount", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        let memory = File::from(memory);
        memory.set_len(HEAD_BYTES + (nodes + 1) * size_of::<u64>() as u64)?;
        // A map of it can then never fail.
        fcntl(&memory, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW))?;
        Ok(Self { memory })
    }

    /// The record of another process.
    pub(crate) fn of(memory: OwnedFd) -> io::Result<Self> {
        let seals = fcntl(&memory, FcntlArg::F_GET_SEALS).map(SealFlag::from_bits_truncate)?;
        if !seals.contains(SealFlag::F_SEAL_SHRINK) {
            return Err(io::Error::other("no record of a mount"));
        }
        Ok(Self { memory: memory.into() })
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { memory: self.memory.try_clone()? })
    }

    /// Locks it for this process until its end, so that one process alone goes on with the mount of a dead daemon.
    ///
    /// # Errors
    /// Another process has the lock, at least for a second.
    pub(crate) fn lock(&self) -> io::Result<File> {
        // What was passed on shares its locks with those who have it; what is opened anew does not.
        let anew = File::open(format!("/proc/self/fd/{}", self.memory.as_raw_fd()))?;
        let until = Instant::now() + Duration::from_secs(1);
        loop {
            match anew.try_lock() {
                Ok(()) => return Ok(anew),
                Err(TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(Duration::from_millis(10)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    pub(crate) fn read(&self) -> io::Result<Inheritance> {
        let mut head = vec![0; usize::try_from(HEAD_BYTES).unwrap_or(0)];
        self.memory.read_exact_at(&mut head, 0)?;
        let line = head.split(|byte| *byte == b'\n').next().unwrap_or_default();
        Ok(serde_json::from_slice(line)?)
    }

    pub(crate) fn write(&self, known: &Inheritance) -> io::Result<()> {
        let mut line = serde_json::to_vec(known)?;
        line.push(b'\n');
        if line.len() as u64 > HEAD_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.memory.write_all_at(&line, 0)
    }

    /// The states of inodes, which all processes with this record share.
    pub(crate) fn states(&self) -> io::Result<States> {
        let map = MmapOptions::new().map_raw(&self.memory)?;
        Ok(States::Shared(map))
    }
}

impl AsFd for Record {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// A number for each inode that is open, changed by comparing it.
#[derive(Debug)]
pub(crate) enum States {
    /// In memory that processes share, by inode number.
    Shared(MmapRaw),
    /// Where the mount ends with this process; zeros are left out.
    Own(Mutex<HashMap<Ino, u64>>),
}

impl States {
    fn cell(map: &MmapRaw, ino: Ino) -> Option<&AtomicU64> {
        let at = usize::try_from(HEAD_BYTES + ino.0.checked_mul(8)?).ok()?;
        let is_inside = at.checked_add(size_of::<u64>())? <= map.len();
        // SAFETY: the place is within the map, as was just compared, and the map cannot become shorter, as it is sealed. It is a multiple
        // of 8 bytes behind the start of a page, and this process and others use it as such a number only.
        is_inside.then(|| unsafe { AtomicU64::from_ptr(map.as_mut_ptr().add(at).cast()) })
    }

    /// The number of an inode; 0 if it has none.
    pub(crate) fn load(&self, ino: Ino) -> u64 {
        match self {
            Self::Shared(map) => Self::cell(map, ino).map_or(0, |cell| cell.load(Ordering::Acquire)),
            Self::Own(states) => states.lock().get(&ino).copied().unwrap_or(0),
        }
    }

    /// Replaces `found` by `next`; false if another did so before. Inodes beyond the record have no number.
    pub(crate) fn exchange(&self, ino: Ino, found: u64, next: u64) -> bool {
        match self {
            Self::Shared(map) => Self::cell(map, ino)
                .is_none_or(|cell| cell.compare_exchange(found, next, Ordering::AcqRel, Ordering::Acquire).is_ok()),
            Self::Own(states) => {
                let mut states = states.lock();
                let is_same = states.get(&ino).copied().unwrap_or(0) == found;
                match (is_same, next) {
                    (false, _) => {}
                    (true, 0) => drop(states.remove(&ino)),
                    (true, next) => drop(states.insert(ino, next)),
                }
                is_same
            }
        }
    }
}

/// Begins a session on `device`: with the kernel's first request, or as `before` began it. What was asked and answered is returned.
///
/// # Errors
/// The exchange failed, or this program would have answered otherwise than the one before it.
pub(crate) fn begin<F: fuser::Filesystem>(
    adapter: F,
    device: &OwnedFd,
    config: fuser::Config,
    before: Option<&Inheritance>,
) -> io::Result<(Session<F>, Inheritance)> {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
    let (mut ours, mut kernel) = (File::from(ours), File::from(device.try_clone()?));
    let mut known = before.cloned().unwrap_or_default();
    if before.is_none() {
        known.asked = read_some(&mut kernel)?;
    }
    ours.write_all(&known.asked)?;
    // The kernel enforces the mount options; fuser need not check a second time.
    let session = Session::from_fd(adapter, theirs, fuser::SessionACL::All, config)?;
    let answered = read_some(&mut ours)?;
    match before {
        None => kernel.write_all(&answered)?,
        Some(before) if before.answered.get(ANSWER_HEADER_BYTES..) == answered.get(ANSWER_HEADER_BYTES..) => {}
        Some(_) => {
            let why =
                "this version asks the kernel for other settings (flags, sizes of requests) than the mount began with";
            return Err(io::Error::other(why));
        }
    }
    known.answered = answered;
    // SAFETY: both descriptors are open, and stay owned by their values: only what stands behind the session's number is another file
    // now. No thread reads from it yet.
    let placed = unsafe { libc::dup3(device.as_raw_fd(), session.as_fd().as_raw_fd(), libc::O_CLOEXEC) };
    Errno::result(placed)?;
    Ok((session, known))
}

fn read_some(file: &mut File) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; EXCHANGE_BYTES];
    loop {
        match file.read(&mut bytes) {
            // A request that was interrupted before it was read.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::ENOENT | libc::EAGAIN)) => {}
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                bytes.truncate(read?);
                return Ok(bytes);
            }
        }
    }
}

/// Whether the kernel has ended a connection.
pub(crate) fn has_ended(device: &OwnedFd) -> bool {
    // A poll that waits would be woken by each request.
    let mut fds = [PollFd::new(device.as_fd(), PollFlags::empty())];
    matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
        && fds[0].revents().is_some_and(|events| events.contains(PollFlags::POLLERR))
}

/// Asks the kernel to send again what it has no answer to. Answers to what was sent before are lost from now on.
pub(crate) fn resend(device: impl AsFd) -> io::Result<()> {
    const RESEND: u32 = 7;
    #[expect(clippy::host_endian_bytes, reason = "the kernel's own order")]
    let message = [(ANSWER_HEADER_BYTES as u64 | u64::from(RESEND) << 32).to_ne_bytes(), 0_u64.to_ne_bytes()].concat();
    File::from(device.as_fd().try_clone_to_owned()?).write_all(&message)
}

/// From now on a program that this process starts has none of its descriptors but the standard streams: one of a file of the mount, as a
/// shell passes it on, would keep that mount busy. Kernels before Linux 5.11 cannot.
pub fn pass_on_nothing() {
    const FIRST: libc::c_uint = 3;
    // SAFETY: the call takes numbers only, and closes nothing in this process.
    unsafe { libc::syscall(libc::SYS_close_range, FIRST, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
}

/// Answers an open of a file that the kernel reads by itself.
pub(crate) fn reply_passthrough(reply: ReplyOpen, handle: FileHandle, flags: FopenFlags, id: u32) {
    // SAFETY: the id is registered with this connection until the last handle of its inode is closed, one of which this is. The value is
    // dissolved again and closes nothing.
    let backing = unsafe { reply.wrap_backing(id) };
    reply.opened_passthrough(handle, flags, &backing);
    backing.into_raw();
}

/// Ends the registration of a file that the kernel reads by itself. Those who have it open keep it.
pub(crate) fn close_backing(device: &OwnedFd, id: u32) {
    /// `_IOW(229, 2, uint32_t)`
    const BACKING_CLOSE: libc::c_ulong = 0x4004_e502;
    // SAFETY: the call reads one number of 32 bits, which outlives it.
    let closed = unsafe { libc::ioctl(device.as_raw_fd(), BACKING_CLOSE as _, &raw const id) };
    if let Err(errno) = Errno::result(closed) {
        tracing::debug!(id, "a file that the kernel reads by itself stays registered: {errno}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_shared_by_all_who_have_the_record() {
        let record = Record::new(8).unwrap();
        let (first, second) = (record.states().unwrap(), record.states().unwrap());
        let own = States::Own(Mutex::default());
        for (states, other) in [(&first, &second), (&own, &own)] {
            assert!(states.exchange(Ino(8), 0, 7) && !states.exchange(Ino(8), 0, 9));
            assert_eq!((other.load(Ino(8)), other.load(Ino(1)), other.load(Ino(u64::MAX))), (7, 0, 0));
            assert!(other.exchange(Ino(8), 7, 0));
            assert_eq!(states.load(Ino(8)), 0);
        }
        let known = Inheritance { kept: Some("é".repeat(100)), asked: vec![7; 104], ..Inheritance::default() };
        record.write(&known).unwrap();
        record.write(&Inheritance { kept: None, ..known.clone() }).unwrap();
        let again = Record::of(record.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert_eq!(again.read().unwrap(), Inheritance { kept: None, ..known.clone() });
        assert!(record.write(&Inheritance { options: "x".repeat(20_000), ..known }).is_err());
        assert!(Record::of(tempfile::tempfile().unwrap().into()).is_err());
    }

    #[test]
    fn the_kernel_says_whether_it_sends_again() {
        let asked = |flags: u8| {
            let mut asked = vec![0; 104];
            asked[56] = flags;
            Inheritance { asked, ..Inheritance::default() }.resends()
        };
        assert!(asked(0x80) && !asked(0x7f) && !Inheritance::default().resends());
    }
}
