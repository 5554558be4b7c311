//! Converts the kernel's requests to calls of a file system ([`ckfs_volume::FileSystem`]), and its answers to replies.
//!
//! Every request is counted and timed. A panic in a request's handler becomes EIO for that request and never ends a thread:
//! fuser would lose the thread, or the whole mount. Read replies are sent straight from the slice that the file system
//! passes, without a copy in user space. Opens and reads may wait for storage. Another thread answers those that wait too
//! long ([`ckfs_service::Watchdog`]), and further threads handle requests while all threads of fuser wait ([`super::requests`]).
//! All other requests get the nodes that are in memory ([`ckfs_volume::Nodes`]), by which they cannot wait. Where those are not there,
//! as a tree is planned at its first use, another thread brings them; such a request waits as opens and reads do.
//!
//! The tree never changes, so the kernel may cache names, attributes, listings and data without limit, including absent
//! names. Where it does ([`ckfs_volume::Nodes::is_fixed`]) the kernel keeps no names and attributes. Requests that would change something get EROFS; the mount is read-only, so they only come after a remount.
//! Every other request is answered here too, since fuser logs a warning for each that it answers by default.

mod serving;

use std::{
    ffi::OsStr,
    io,
    num::NonZeroU32,
    ops::ControlFlow,
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::{Duration, SystemTime},
};

use ckfs_service::{
    Client, Handlers, Heartbeat, Pending, Refuse, ReplySlot, Requests, WaitingThreads, Watchdog, read_whole,
};
use ckfs_volume::{Attr, FsError, Handle, Ino, NodeKind, NodeScope, Nodes, Replied, RequestKind, Upkeep};
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use self::serving::{Opens, Reply, Serving, ino};
use super::{open_mode::OpenModes, reply_data, requests::Dispatchers};

/// How long the kernel may cache answers: ten years, which it can express on every architecture.
const FOREVER: Duration = Duration::from_hours(10 * 365 * 24);

/// Inode numbers are never reused, so there is one generation.
const GENERATION: Generation = Generation(0);

/// Longest file name in bytes, as on nearly all file systems, and as `statfs` reports it.
const NAME_BYTES_MAX: usize = 255;
const NAME_MAX: u32 = 255;

/// Unit of `statfs`. Small, because some programs multiply by the wrong one of its two block sizes.
const STATFS_BLOCK_BYTES: u32 = 4096;

/// For the kernel, read-ahead and asynchronous direct reads are "background" requests. By default it has 12 of them at a time:
/// too few for several readers of 16 MiB each in requests of 1 MiB.
const BACKGROUND_MAX: u16 = 64;

/// Number of background requests at which the kernel delays read-ahead.
const BACKGROUND_CONGESTED: u16 = 48;

/// Kernel features that are requested beyond fuser's default, each only where the kernel offers it.
const INIT_FLAGS: [InitFlags; 10] = [
    InitFlags::FUSE_ASYNC_READ,
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_CACHE_SYMLINKS,
    // The kernel drops a file's page cache only when we request it: when a source of it has changed.
    InitFlags::FUSE_EXPLICIT_INVAL_DATA,
    // A client's O_DIRECT read is split into requests that run in parallel.
    InitFlags::FUSE_ASYNC_DIO,
    InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
    // No support for lookups of "." and ".." by number; only an NFS server would need them.
    InitFlags::FUSE_NO_EXPORT_SUPPORT,
    InitFlags::FUSE_MAX_PAGES,
    // A daemon that follows one that was killed has the unanswered requests sent again.
    InitFlags::FUSE_HAS_RESEND,
];

/// Serves a file system to the kernel.
pub(super) struct KernelAdapter {
    fs: Arc<dyn Upkeep>,
    serving: Arc<Serving>,
    requests: Arc<Requests>,
    threads: Arc<Threads>,
    watchdog: Arc<Watchdog>,
    /// Whether the kernel supports leaving out the opens of directories.
    opens_directories_itself: bool,
}

/// Threads that stand in for those that take requests, at most, not counting those whose requests were given up.
const OVERFLOW_MAX: usize = 64;

/// The threads that take requests, and those that stand in for them.
struct Threads {
    dispatchers: Arc<Dispatchers>,
    overflow: WaitingThreads,
    /// For requests into what is not planned yet. Apart, so that they never keep a thread from reads that wait for nothing.
    planning: WaitingThreads,
}

impl Handlers for Threads {
    fn tend(&self, is_waiting: &dyn Fn() -> bool) -> bool {
        self.dispatchers.look(is_waiting)
    }

    fn stand_ins(&self) -> Vec<&WaitingThreads> {
        vec![&self.overflow, &self.planning]
    }
}

impl KernelAdapter {
    /// Serves `fs` with `threads` threads and a spare one.
    ///
    /// # Errors
    /// The system cannot start the thread that watches requests.
    pub(super) fn new(fs: Arc<dyn Upkeep>, passthrough: bool, threads: usize, modes: OpenModes) -> io::Result<Self> {
        let requests = Arc::default();
        let dispatchers = Arc::new(Dispatchers::new(threads));
        let waiting = || WaitingThreads::new("ckfs-overflow", OVERFLOW_MAX);
        let threads = Arc::new(Threads { dispatchers, overflow: waiting(), planning: waiting() });
        let handlers: Arc<dyn Handlers> = Arc::<Threads>::clone(&threads);
        let watchdog = Watchdog::start(&fs, &requests, handlers)?;
        let serving = Arc::new(Serving::new(&fs, passthrough, modes));
        Ok(Self { fs, serving, requests, threads, watchdog, opens_directories_itself: false })
    }

    /// The signs of life that systemd expects, if it does.
    pub(super) fn heartbeat(&self) -> Option<Heartbeat> {
        Heartbeat::of(&self.watchdog)
    }

    /// The threads that take requests.
    pub(super) fn dispatchers(&self) -> Arc<Dispatchers> {
        Arc::clone(&self.threads.dispatchers)
    }

    /// What begins passthrough once the kernel has agreed to it.
    pub(super) fn passthrough(&self) -> Arc<Opens> {
        Arc::clone(&self.serving.opens)
    }

    /// Handles one request by the nodes that are in memory: `body` takes the reply out of its slot to send it. If it does not, the
    /// request is answered here: with its error, or with EIO after a panic or a missing answer. Where the nodes are not in memory
    /// another thread does this once they are.
    fn handle<R>(
        &self,
        op: RequestKind,
        (request, node): (&Request, INodeNo),
        reply: R,
        body: impl FnOnce(&dyn Nodes, &mut ReplySlot<Reply<R>>) -> Result<(), FsError> + Send + 'static,
    ) where
        Reply<R>: Refuse,
    {
        let looks_inside = matches!(op, RequestKind::Lookup | RequestKind::ReadDir | RequestKind::ReadDirPlus);
        let (node, scope) = (ino(node), if looks_inside { NodeScope::Inside } else { NodeScope::Itself });
        if let Some(nodes) = self.fs.nodes(node, scope) {
            Pending::new(&self.fs, op, node, Reply(reply)).attempt(|reply| body(&*nodes, reply));
        } else {
            let (fs, threads) = (Arc::clone(&self.fs), Arc::clone(&self.threads));
            let mut pending = Pending::waiting(&self.fs, op, node, &self.requests, client(request), Reply(reply));
            self.threads.planning.submit(move || {
                pending.note_elsewhere(threads);
                pending.attempt(|reply| {
                    let nodes = fs.reach(node, scope)?;
                    // From here on nothing waits, and a listing fills the reply itself.
                    reply.keep();
                    body(&*nodes, reply)
                });
            });
        }
        // A thread that is parked handles no request.
        self.threads.dispatchers.park();
    }

    /// Answers one request that concerns no nodes.
    fn answer<R>(
        &self,
        op: RequestKind,
        node: INodeNo,
        reply: R,
        body: impl FnOnce(&Serving, &mut ReplySlot<Reply<R>>) -> Result<(), FsError>,
    ) where
        Reply<R>: Refuse,
    {
        Pending::new(&self.fs, op, ino(node), Reply(reply)).attempt(|reply| body(&self.serving, reply));
        self.threads.dispatchers.park();
    }

    /// Handles a request that may wait for storage: in this thread, or in one of the overflow if this is the last thread that
    /// reads requests, and always where the node is not planned yet.
    fn handle_waiting<R: Refuse>(
        &self,
        node: INodeNo,
        mut pending: Pending<R>,
        body: impl FnOnce(&Serving, Pending<R>) + Send + 'static,
    ) {
        let Threads { dispatchers, overflow, planning } = &*self.threads;
        let is_planned = self.fs.nodes(ino(node), NodeScope::Inside).is_some();
        if let Some(inside) = is_planned.then(|| dispatchers.enter()).flatten() {
            body(&self.serving, pending);
            drop(inside);
        } else {
            let (serving, threads) = (Arc::clone(&self.serving), Arc::clone(&self.threads));
            let others = if is_planned { overflow } else { planning };
            others.submit(move || {
                pending.note_elsewhere(threads);
                body(&serving, pending);
            });
        }
        dispatchers.park();
    }

    fn read_only<R>(&self, ino: INodeNo, reply: R)
    where
        Reply<R>: Refuse,
    {
        self.answer(RequestKind::Refused, ino, reply, |_, _| Err(FsError::ReadOnly));
    }
}

/// How long the kernel may cache attributes of a node, or of the names in a directory.
fn keeps(nodes: &dyn Nodes, node: Ino) -> Duration {
    if nodes.is_fixed(node) { FOREVER } else { Duration::ZERO }
}

/// Lists `dir` from `offset`, with `.` and `..` before the file system's own entries. `add` receives each entry
/// with the offset of its successor and returns whether the buffer is full.
fn list(
    nodes: &dyn Nodes,
    dir: Ino,
    offset: u64,
    mut add: impl FnMut(Ino, NodeKind, &[u8], u64) -> Result<bool, FsError>,
) -> Result<(), FsError> {
    // Entry numbers of the two names that the file system does not list.
    const DOT: u64 = 0;
    const DOT_DOT: u64 = 1;
    const FIRST: u64 = 2;
    if offset == DOT && add(dir, NodeKind::Directory, b".", DOT + 1)? {
        return Ok(());
    }
    if offset <= DOT_DOT && add(nodes.parent(dir)?, NodeKind::Directory, b"..", DOT_DOT + 1)? {
        return Ok(());
    }
    let mut next = offset.max(FIRST);
    let mut result = Ok(());
    nodes.read_dir(dir, next - FIRST, &mut |entry| {
        next = entry.next.map_or(next + 1, |after| after + FIRST);
        match add(entry.ino, entry.kind, entry.name, next) {
            Ok(false) => ControlFlow::Continue(()),
            Ok(true) => ControlFlow::Break(()),
            Err(failure) => {
                result = Err(failure);
                ControlFlow::Break(())
            }
        }
    })?;
    result
}

fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: INodeNo(attr.ino.0),
        size: attr.size_bytes,
        blocks: attr.size_bytes.div_ceil(512),
        atime: attr.modified,
        mtime: attr.modified,
        ctime: attr.modified,
        crtime: attr.modified,
        kind: file_type(attr.kind),
        perm: attr.permission.mode,
        nlink: attr.links,
        uid: attr.permission.uid,
        gid: attr.permission.gid,
        rdev: 0,
        blksize: attr.buffer_bytes,
        flags: 0,
    }
}

fn file_type(kind: NodeKind) -> FileType {
    match kind {
        NodeKind::Directory => FileType::Directory,
        NodeKind::File => FileType::RegularFile,
        NodeKind::Symlink => FileType::Symlink,
    }
}

/// The thread that waits for the answer.
fn client(request: &Request) -> Client {
    NonZeroU32::new(request.pid())
}

/// Whether an open requests more than reading.
fn wants_to_write(flags: OpenFlags) -> bool {
    flags.acc_mode() != OpenAccMode::O_RDONLY || flags.0 & libc::O_TRUNC != 0
}

fn succeed(_: &KernelAdapter, _: INodeNo, reply: ReplyEmpty) {
    reply.ok();
}

/// Sends a reply, unless another thread did.
#[expect(clippy::unnecessary_wraps, reason = "it is the last step of a handler")]
fn answer<R: 'static>(slot: &mut ReplySlot<Reply<R>>, send: impl FnOnce(R)) -> Result<(), FsError> {
    if let Some(Reply(reply)) = slot.take() {
        send(reply);
    }
    Ok(())
}

/// Answers a request for extended attributes: with their length if the caller's buffer is empty, else with the bytes.
fn answer_xattr(reply: &mut ReplySlot<Reply<ReplyXattr>>, room: u32, bytes: &[u8]) -> Result<(), FsError> {
    answer(reply, |reply| match u32::try_from(bytes.len()) {
        Ok(len) if room == 0 => reply.size(len),
        Ok(len) if len <= room => reply.data(bytes),
        Ok(_) => reply.error(Errno::ERANGE),
        Err(_) => reply.error(Errno::E2BIG),
    })
}

/// Methods of fuser that are answered by the node and the reply alone, whatever their other arguments.
macro_rules! always {
    ($($name:ident($($argument:ty),*) $reply:ty: $answer:expr;)*) => {
        $(fn $name(&self, _: &Request, node: INodeNo, $(_: $argument,)* reply: $reply) {
            let answer: fn(&Self, INodeNo, $reply) = $answer;
            answer(self, node, reply);
        })*
    };
}

impl fuser::Filesystem for KernelAdapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for flag in INIT_FLAGS {
            // The request fails as a whole if one flag is not offered, so they are added one by one.
            let offered = config.add_capabilities(flag).is_ok();
            if flag == InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP {
                self.serving.opens.maps_direct.store(offered, Ordering::Relaxed);
            }
        }
        let opens = &self.serving.opens;
        let requested = opens.passthrough.load(Ordering::Relaxed);
        let offered = requested
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(1).is_ok();
        if requested && !offered {
            opens.note_refusal(&io::Error::other("not offered by this kernel"));
        }
        opens.passthrough.store(offered, Ordering::Relaxed);
        self.opens_directories_itself = config.add_capabilities(InitFlags::FUSE_NO_OPENDIR_SUPPORT).is_ok();
        // Only zero is refused.
        let _ = config.set_max_background(BACKGROUND_MAX);
        let _ = config.set_congestion_threshold(BACKGROUND_CONGESTED);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.as_bytes().to_owned();
        self.handle(RequestKind::Lookup, (request, parent), reply, move |nodes, reply| {
            // The kernel accepts names of up to 1024 bytes.
            if name.len() > NAME_BYTES_MAX {
                return Err(FsError::NameTooLong);
            }
            let kept = keeps(nodes, ino(parent));
            match nodes.lookup(ino(parent), &name) {
                Ok(attr) => {
                    let kept = kept.min(keeps(nodes, attr.ino));
                    answer(reply, |reply| reply.entry(&kept, &file_attr(&attr), GENERATION))
                }
                // Inode 0 means an absent name; unlike ENOENT, it lets the kernel cache that.
                Err(FsError::NotFound) => {
                    answer(reply, |reply| reply.entry(&kept, &file_attr(&Attr::absent(Ino(0))), GENERATION))?;
                    Err(FsError::NotFound)
                }
                Err(error) => Err(error),
            }
        });
    }

    fn forget(&self, _request: &Request, _ino: INodeNo, _lookups: u64) {}

    fn getattr(&self, request: &Request, node: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        self.handle(RequestKind::GetAttr, (request, node), reply, move |nodes, reply| {
            let attr = file_attr(&nodes.attr(ino(node))?);
            answer(reply, |reply| reply.attr(&keeps(nodes, ino(node)), &attr))
        });
    }

    fn readlink(&self, request: &Request, node: INodeNo, reply: ReplyData) {
        self.handle(RequestKind::ReadLink, (request, node), reply, move |nodes, reply| {
            let target = nodes.read_link(ino(node))?;
            answer(reply, |reply| reply.data(&target))
        });
    }

    fn open(&self, request: &Request, node: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if wants_to_write(flags) {
            return self.read_only(node, reply);
        }
        let is_direct = flags.0 & libc::O_DIRECT != 0;
        let pending =
            Pending::waiting(&self.fs, RequestKind::Open, ino(node), &self.requests, client(request), Reply(reply));
        self.handle_waiting(node, pending, move |serving, pending| serving.open_file(node, is_direct, pending));
    }

    fn read(
        &self,
        request: &Request,
        node: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let pending =
            Pending::waiting(&self.fs, RequestKind::Read, ino(node), &self.requests, client(request), Reply(reply));
        self.handle_waiting(node, pending, move |serving, mut pending| {
            pending.attempt(|reply| {
                let len = usize::try_from(size).map_err(|_| FsError::Invalid)?;
                let read = read_whole(serving.fs.as_ref(), ino(node), Handle(handle.0), offset, len, &mut |bytes| {
                    let _ = answer(reply, |reply| reply_data::send(reply, bytes));
                    Replied::new()
                });
                // After a reply there is no way to send this reader an error; the volume has noted the failure.
                read.map_err(|failure| failure.error)
            });
        });
    }

    fn release(
        &self,
        _request: &Request,
        node: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.answer(RequestKind::Release, node, reply, move |serving, reply| {
            // Before all else: what was not answered when a daemon is killed comes again, and would be counted twice. The kernel waits
            // for none of it.
            answer(reply, ReplyEmpty::ok)?;
            serving.opens.modes.release(ino(node));
            serving.fs.release(ino(node), Handle(handle.0));
            Ok(())
        });
    }

    fn opendir(&self, request: &Request, node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let opens_itself = self.opens_directories_itself;
        self.handle(RequestKind::OpenDir, (request, node), reply, move |nodes, reply| {
            if opens_itself && nodes.is_fixed(Ino::ROOT) {
                // After this answer the kernel sends no such request again, and caches listings as below. Small directories (each
                // expert of each layer is one) are then listed in two thirds of the time.
                return answer(reply, |reply| reply.error(Errno::ENOSYS));
            }
            match nodes.attr(ino(node))?.kind {
                NodeKind::Directory => {}
                NodeKind::File | NodeKind::Symlink => return Err(FsError::NotDirectory),
            }
            let kept = FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE;
            let flags = if nodes.is_fixed(ino(node)) { kept } else { FopenFlags::empty() };
            answer(reply, |reply| reply.opened(FileHandle(0), flags))
        });
    }

    fn readdir(&self, request: &Request, node: INodeNo, _handle: FileHandle, offset: u64, reply: ReplyDirectory) {
        self.handle(RequestKind::ReadDir, (request, node), reply, move |nodes, slot| {
            let Some(Reply(reply)) = slot.as_mut() else { return Ok(()) };
            list(nodes, ino(node), offset, |entry, kind, name, next| {
                Ok(reply.add(INodeNo(entry.0), next, file_type(kind), OsStr::from_bytes(name)))
            })?;
            answer(slot, ReplyDirectory::ok)
        });
    }

    fn readdirplus(
        &self,
        request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.handle(RequestKind::ReadDirPlus, (request, node), reply, move |nodes, slot| {
            let Some(Reply(reply)) = slot.as_mut() else { return Ok(()) };
            let kept = keeps(nodes, ino(node));
            list(nodes, ino(node), offset, |entry, _, name, next| {
                let attr = match nodes.attr(entry) {
                    Ok(attr) => file_attr(&attr),
                    // It went while it was listed.
                    Err(_) if kept.is_zero() => return Ok(false),
                    Err(error) => return Err(error),
                };
                let kept = kept.min(keeps(nodes, entry));
                Ok(reply.add(INodeNo(entry.0), next, OsStr::from_bytes(name), &kept, &attr, GENERATION))
            })?;
            answer(slot, ReplyDirectoryPlus::ok)
        });
    }

    fn statfs(&self, _request: &Request, node: INodeNo, reply: ReplyStatfs) {
        // Of any node the same.
        self.answer(RequestKind::StatFs, node, reply, move |serving, reply| {
            let sizes = serving.fs.nodes(Ino::ROOT, NodeScope::Itself).ok_or(FsError::Io)?.stat_fs();
            let blocks = sizes.total_bytes.div_ceil(u64::from(STATFS_BLOCK_BYTES));
            answer(reply, |reply| {
                reply.statfs(blocks, 0, 0, sizes.nodes, 0, STATFS_BLOCK_BYTES, NAME_MAX, STATFS_BLOCK_BYTES);
            })
        });
    }

    fn getxattr(&self, request: &Request, node: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let name = name.as_bytes().to_owned();
        self.handle(RequestKind::GetXattr, (request, node), reply, move |nodes, reply| {
            answer_xattr(reply, size, &nodes.xattr(ino(node), &name)?)
        });
    }

    fn listxattr(&self, request: &Request, node: INodeNo, size: u32, reply: ReplyXattr) {
        self.handle(RequestKind::ListXattr, (request, node), reply, move |nodes, reply| {
            let mut names = nodes.xattr_names(ino(node))?;
            for name in &mut names {
                name.push(0);
            }
            answer_xattr(reply, size, &names.concat())
        });
    }

    // The answers below do not depend on the file system.
    always! {
        releasedir(FileHandle, OpenFlags) ReplyEmpty: succeed;
        // The kernel checks permissions by itself.
        access(AccessFlags) ReplyEmpty: succeed;
        flush(FileHandle, LockOwner) ReplyEmpty: succeed;
        fsync(FileHandle, bool) ReplyEmpty: succeed;
        fsyncdir(FileHandle, bool) ReplyEmpty: succeed;
        // The kernel does not ask again: it then treats files as having no holes, and as always readable.
        lseek(FileHandle, i64, i32) ReplyLseek: |_, _, reply| reply.error(Errno::ENOSYS);
        poll(FileHandle, PollNotifier, PollEvents, PollFlags) ReplyPoll: |_, _, reply| reply.error(Errno::ENOSYS);
        ioctl(FileHandle, IoctlFlags, u32, &[u8], u32) ReplyIoctl: |_, _, reply| reply.error(Errno::ENOTTY);
        bmap(u32, u64) ReplyBmap: |_, _, reply| reply.error(Errno::EINVAL);
        // The kernel keeps locks itself and sends no request.
        getlk(FileHandle, LockOwner, u64, u64, i32, u32) ReplyLock: |_, _, reply| reply.error(Errno::ENOSYS);
        setlk(FileHandle, LockOwner, u64, u64, i32, u32, bool) ReplyEmpty: |_, _, reply| reply.error(Errno::ENOSYS);
        // All requests that would change something.
        setattr(
            Option<u32>, Option<u32>, Option<u32>, Option<u64>, Option<TimeOrNow>, Option<TimeOrNow>, Option<SystemTime>,
            Option<FileHandle>, Option<SystemTime>, Option<SystemTime>, Option<SystemTime>, Option<BsdFileFlags>
        ) ReplyAttr: Self::read_only;
        mknod(&OsStr, u32, u32, u32) ReplyEntry: Self::read_only;
        mkdir(&OsStr, u32, u32) ReplyEntry: Self::read_only;
        unlink(&OsStr) ReplyEmpty: Self::read_only;
        rmdir(&OsStr) ReplyEmpty: Self::read_only;
        symlink(&OsStr, &Path) ReplyEntry: Self::read_only;
        rename(&OsStr, INodeNo, &OsStr, RenameFlags) ReplyEmpty: Self::read_only;
        link(INodeNo, &OsStr) ReplyEntry: Self::read_only;
        write(FileHandle, u64, &[u8], WriteFlags, OpenFlags, Option<LockOwner>) ReplyWrite: Self::read_only;
        setxattr(&OsStr, &[u8], i32, u32) ReplyEmpty: Self::read_only;
        removexattr(&OsStr) ReplyEmpty: Self::read_only;
        create(&OsStr, u32, u32, i32) ReplyCreate: Self::read_only;
        fallocate(FileHandle, u64, u64, i32) ReplyEmpty: Self::read_only;
        copy_file_range(FileHandle, u64, INodeNo, FileHandle, u64, u64, CopyFileRangeFlags) ReplyWrite: Self::read_only;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_reading_opens() {
        for (flags, writes) in [
            (libc::O_RDONLY, false),
            (libc::O_RDONLY | libc::O_DIRECT | libc::O_CLOEXEC, false),
            (libc::O_RDONLY | libc::O_NOATIME, false),
            (libc::O_WRONLY, true),
            (libc::O_RDWR, true),
            (libc::O_RDONLY | libc::O_TRUNC, true),
            (libc::O_WRONLY | libc::O_APPEND, true),
        ] {
            assert_eq!(wants_to_write(OpenFlags(flags)), writes, "{flags:#o}");
        }
    }
}
