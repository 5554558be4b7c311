//! Converts the kernel's requests to calls of a [`FileSystem`], and its answers to replies.
//!
//! Every request is counted and timed. A panic in a request's handler becomes EIO for that request and never ends a thread:
//! fuser would lose the thread, or the whole mount. Read replies are sent straight from the slice that the file system
//! passes, without a copy in user space. Opens and reads may wait for storage. Another thread answers those that wait too
//! long, and further threads handle requests while all threads of fuser wait ([`super::requests`]).
//!
//! The tree never changes, so the kernel may cache names, attributes, listings and data without limit, including absent
//! names. Requests that would change something get EROFS; the mount is read-only, so they only come after a remount.
//! Every other request is answered here too, since fuser logs a warning for each that it answers by default.

use std::{
    ffi::OsStr,
    fs::File,
    io,
    ops::ControlFlow,
    os::unix::ffi::OsStrExt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::{
        Arc, Once,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use fuser::{
    AccessFlags, BackingId, BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, FopenFlags,
    Generation, INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use tracing::{error, info};

use super::{
    open_mode::{Mode, OpenModes, OpenRequest},
    reply_data,
    requests::{Lookout, Overflow, Readers, Requests, Ticket},
};
use crate::volume::{Access, Attr, FileSystem, FsError, Handle, Ino, NodeKind, Op, Opened, Permission};

/// How long the kernel may cache answers: ten years, which it can express on every architecture.
const FOREVER: Duration = Duration::from_hours(10 * 365 * 24);

/// Inode numbers are never reused, so there is one generation.
const GENERATION: Generation = Generation(0);

/// `st_blksize`: programs that buffer by it (Python does) then read in the largest single request.
const PREFERRED_READ_BYTES: u32 = 1 << 20;

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
const INIT_FLAGS: [InitFlags; 9] = [
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
];

/// Serves a [`FileSystem`] to the kernel.
pub(super) struct KernelAdapter {
    fs: Arc<dyn FileSystem>,
    serving: Arc<Serving>,
    lookout: Arc<Lookout>,
    /// Whether the kernel supports leaving out the opens of directories.
    opens_directories_itself: bool,
}

/// The state that opens and reads need, in any thread that handles them.
struct Serving {
    fs: Arc<dyn FileSystem>,
    opens: Arc<Opens>,
}

/// The modes of open files. Shared with opens that other threads answer.
struct Opens {
    modes: OpenModes<BackingId>,
    passthrough: Passthrough,
}

/// Whether the kernel may read backing files by itself.
struct Passthrough {
    /// Requested, offered by the kernel, and not refused so far.
    enabled: AtomicBool,
    granted: Once,
    refused: Once,
}

/// A reply that can say that the request failed.
trait Refuse {
    fn refuse(self, errno: i32);
}

macro_rules! refuse {
    ($($reply:ty),*) => {
        $(impl Refuse for $reply {
            fn refuse(self, errno: i32) {
                self.error(Errno::from_i32(errno));
            }
        })*
    };
}

refuse!(
    ReplyAttr,
    ReplyBmap,
    ReplyCreate,
    ReplyData,
    ReplyDirectory,
    ReplyDirectoryPlus,
    ReplyEmpty,
    ReplyEntry,
    ReplyIoctl,
    ReplyLock,
    ReplyLseek,
    ReplyOpen,
    ReplyPoll,
    ReplyStatfs,
    ReplyWrite,
    ReplyXattr
);

/// The place of a reply until it is sent.
enum ReplySlot<R> {
    /// Only the handler can send it.
    Own(Option<R>),
    /// Another thread sends it if the handler takes too long.
    Waiting(Ticket<R>),
}

impl<R> ReplySlot<R> {
    fn take(&mut self) -> Option<R> {
        match self {
            Self::Own(reply) => reply.take(),
            Self::Waiting(ticket) => ticket.take(),
        }
    }

    /// The reply, if only the handler can send it.
    fn as_mut(&mut self) -> Option<&mut R> {
        match self {
            Self::Own(reply) => reply.as_mut(),
            Self::Waiting(_) => None,
        }
    }

    /// Whether another thread has sent it.
    fn expired(&self) -> bool {
        match self {
            Self::Own(_) => false,
            Self::Waiting(ticket) => ticket.expired(),
        }
    }
}

/// An unanswered request. Its drop answers with EIO.
struct Pending<R: Refuse> {
    fs: Arc<dyn FileSystem>,
    op: Op,
    ino: INodeNo,
    start: Instant,
    slot: ReplySlot<R>,
    failed: bool,
    /// The overflow whose thread handles it, unless it is one of fuser's threads.
    aside: Option<Arc<Overflow>>,
}

impl<R: Refuse> Pending<R> {
    fn new(fs: &Arc<dyn FileSystem>, op: Op, ino: INodeNo, reply: R) -> Self {
        Self::with_slot(fs, op, ino, Instant::now(), ReplySlot::Own(Some(reply)))
    }

    /// A request that another thread answers if the handler takes too long.
    fn waiting(fs: &Arc<dyn FileSystem>, op: Op, node: INodeNo, requests: &Arc<Requests<R>>, reply: R) -> Self {
        let start = Instant::now();
        Self::with_slot(fs, op, node, start, ReplySlot::Waiting(requests.add(ino(node), start, reply)))
    }

    fn with_slot(fs: &Arc<dyn FileSystem>, op: Op, ino: INodeNo, start: Instant, slot: ReplySlot<R>) -> Self {
        fs.metrics().in_flight.fetch_add(1, Ordering::Relaxed);
        Self { fs: Arc::clone(fs), op, ino, start, slot, failed: false, aside: None }
    }

    /// Notes that a thread of the overflow handles it from now on.
    fn set_aside(&mut self, overflow: &Arc<Overflow>) {
        if let ReplySlot::Waiting(ticket) = &self.slot
            && ticket.set_aside()
        {
            self.aside = Some(Arc::clone(overflow));
        }
    }

    /// Runs `body`, which may answer: it takes the reply out of its slot to send it. An error of `body` is answered here, and a
    /// panic is answered with EIO.
    fn attempt<T>(&mut self, body: impl FnOnce(&mut ReplySlot<R>) -> Result<T, FsError>) -> Option<T> {
        let slot = &mut self.slot;
        let result = catch_unwind(AssertUnwindSafe(|| body(slot))).unwrap_or_else(|panic| {
            let (op, ino, cause) = (self.op.name(), self.ino.0, panic_text(panic.as_ref()));
            self.fs.metrics().note_panic(&format!("{op} of inode {ino}"), cause);
            error!(op, ino, "request handler panicked: {cause}");
            Err(FsError::Io)
        });
        result.inspect_err(|failure| self.refuse(failure.errno())).ok()
    }

    fn refuse(&mut self, errno: i32) {
        self.failed = true;
        if let Some(reply) = self.slot.take() {
            reply.refuse(errno);
        }
    }
}

impl<R: Refuse> Drop for Pending<R> {
    fn drop(&mut self) {
        if let Some(reply) = self.slot.take() {
            error!(op = self.op.name(), ino = self.ino.0, "request was left unanswered");
            self.failed = true;
            reply.refuse(libc::EIO);
        } else if self.slot.expired() {
            // The thread that answered it has counted it.
            if let Some(overflow) = &self.aside {
                overflow.find();
            }
            return;
        }
        let metrics = self.fs.metrics();
        metrics.in_flight.fetch_sub(1, Ordering::Relaxed);
        metrics.record(self.op, self.start.elapsed(), self.failed);
    }
}

impl Opens {
    /// Whether the kernel may read a file by itself, as no handle has it open through the page cache.
    fn may_pass(&self, ino: Ino) -> bool {
        self.passthrough.enabled.load(Ordering::Relaxed) && self.modes.may_pass(ino)
    }

    /// Answers an open, unless another thread did: then the kernel has no handle of it.
    fn answer(&self, fs: &dyn FileSystem, ino: Ino, opened: &Opened, reply: &mut ReplySlot<ReplyOpen>) {
        let Some(reply) = reply.take() else { return fs.release(ino, opened.handle) };
        let (mode, failure) = match &opened.access {
            Access::Direct => self.modes.open(ino, &OpenRequest::Direct),
            Access::Passthrough(file) if self.passthrough.enabled.load(Ordering::Relaxed) => {
                self.modes.open(ino, &OpenRequest::Passthrough(&|| reply.open_backing(file)))
            }
            Access::Cached | Access::Passthrough(_) | Access::Materialize => self.modes.open(ino, &OpenRequest::Cached),
        };
        if let Some(failure) = failure {
            self.passthrough.note_refusal(&failure);
        }
        let handle = FileHandle(opened.handle.0);
        // There is nothing to flush on close, so the kernel need not send flushes.
        let flags = FopenFlags::FOPEN_NOFLUSH;
        match mode {
            Mode::Cached => reply.opened(handle, flags | FopenFlags::FOPEN_KEEP_CACHE),
            Mode::Direct => reply.opened(handle, flags | FopenFlags::FOPEN_DIRECT_IO),
            Mode::Passthrough(backing) => {
                self.passthrough.granted.call_once(|| info!("kernel passthrough is on"));
                fs.metrics().passthrough_opens.fetch_add(1, Ordering::Relaxed);
                reply.opened_passthrough(handle, flags, &backing);
            }
        }
    }
}

impl KernelAdapter {
    /// Serves `fs` with `threads` threads and a spare one.
    ///
    /// # Errors
    /// The system cannot start the thread that supervises requests.
    pub(super) fn new(fs: Arc<dyn FileSystem>, passthrough: bool, threads: usize) -> io::Result<Self> {
        let passthrough =
            Passthrough { enabled: AtomicBool::new(passthrough), granted: Once::new(), refused: Once::new() };
        let opens = Arc::new(Opens { modes: OpenModes::default(), passthrough });
        let lookout = Arc::new(Lookout {
            fs: Arc::clone(&fs),
            reads: Arc::default(),
            opens: Arc::default(),
            readers: Arc::new(Readers::new(threads)),
            overflow: Arc::default(),
        });
        lookout.start()?;
        Ok(Self {
            serving: Arc::new(Serving { fs: Arc::clone(&fs), opens }),
            fs,
            lookout,
            opens_directories_itself: false,
        })
    }

    /// Handles one request: `body` takes the reply out of its slot to send it. If it does not, the request is answered here: with
    /// its error, or with EIO after a panic or a missing answer.
    fn handle<R: Refuse>(
        &self,
        op: Op,
        ino: INodeNo,
        reply: R,
        body: impl FnOnce(&mut ReplySlot<R>) -> Result<(), FsError>,
    ) {
        Pending::new(&self.fs, op, ino, reply).attempt(body);
        self.lookout.readers.rest();
    }

    /// Handles a request that may wait for storage: in this thread, or in one of the overflow if this is the last thread that
    /// reads requests.
    fn handle_waiting<R: Refuse + Send + 'static>(
        &self,
        mut pending: Pending<R>,
        body: impl FnOnce(&Serving, Pending<R>) + Send + 'static,
    ) {
        let Lookout { readers, overflow, .. } = &*self.lookout;
        if let Some(inside) = readers.enter() {
            body(&self.serving, pending);
            drop(inside);
        } else {
            let (serving, aside) = (Arc::clone(&self.serving), Arc::clone(overflow));
            overflow.submit(move || {
                pending.set_aside(&aside);
                body(&serving, pending);
            });
        }
        readers.rest();
    }

    fn read_only<R: Refuse>(&self, ino: INodeNo, reply: R) {
        self.handle(Op::Refused, ino, reply, |_| Err(FsError::ReadOnly));
    }

    fn attr(attr: &Attr) -> FileAttr {
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
            blksize: PREFERRED_READ_BYTES,
            flags: 0,
        }
    }

    /// Lists `dir` from `offset`, with `.` and `..` before the file system's own entries. `add` receives each entry
    /// with the offset of its successor and returns whether the buffer is full.
    fn list(
        &self,
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
        if offset <= DOT_DOT && add(self.fs.parent(dir)?, NodeKind::Directory, b"..", DOT_DOT + 1)? {
            return Ok(());
        }
        let mut next = offset.max(FIRST);
        let mut result = Ok(());
        self.fs.read_dir(dir, next - FIRST, &mut |entry| {
            next += 1;
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
}

impl Serving {
    fn open_file(&self, node: INodeNo, is_direct: bool, mut pending: Pending<ReplyOpen>) {
        let ino = ino(node);
        let open =
            |_: &mut ReplySlot<ReplyOpen>| if is_direct { self.fs.open_uncached(ino) } else { self.fs.open(ino) };
        let Some(mut opened) = pending.attempt(open) else { return };
        let (fs, opens) = (Arc::clone(&self.fs), Arc::clone(&self.opens));
        let materializes = matches!(opened.access, Access::Materialize) && opens.may_pass(ino);
        let handle = opened.handle;
        let mut answer = move |file: Option<Arc<File>>| {
            if let Some(file) = file {
                opened.access = Access::Passthrough(file);
            }
            pending.attempt(|reply| {
                opens.answer(fs.as_ref(), ino, &opened, reply);
                Ok(())
            });
        };
        if !materializes {
            answer(None);
        } else if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.fs.materialize(ino, handle, Box::new(answer))))
        {
            // The request was moved into `answer`, which answers it.
            self.fs.release(ino, handle);
            let cause = panic_text(panic.as_ref());
            self.fs.metrics().note_panic(&format!("open of inode {}", node.0), cause);
            error!(ino = node.0, "materializing a file panicked: {cause}");
        }
    }

    fn read_file(
        &self,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: usize,
        reply: &mut ReplySlot<ReplyData>,
    ) -> Result<(), FsError> {
        let mut verdict = Ok(());
        self.fs.read(ino, handle, offset, len, &mut |bytes| {
            verdict = self.check_length(ino, offset, len, bytes.len());
            if verdict.is_ok()
                && let Some(reply) = reply.take()
            {
                reply_data::send(reply, bytes);
            }
        })?;
        verdict
    }

    /// The kernel fills a short answer with zeros, or passes it on where it caches no pages. So an answer that ends before the
    /// file does must not be sent.
    fn check_length(&self, ino: Ino, offset: u64, asked: usize, answered: usize) -> Result<(), FsError> {
        if answered == asked {
            return Ok(());
        }
        if answered < asked {
            let end = offset.saturating_add(answered as u64);
            if end >= self.fs.attr(ino)?.size_bytes {
                return Ok(());
            }
        }
        error!(ino = ino.0, offset, "file system answered a read of {asked} bytes with {answered} bytes");
        Err(FsError::Io)
    }
}

impl Passthrough {
    /// Falls back silently, but logs the first reason. Without permission no later attempt can succeed.
    fn note_refusal(&self, failure: &io::Error) {
        if failure.raw_os_error() == Some(libc::EPERM) {
            self.enabled.store(false, Ordering::Relaxed);
        }
        self.refused.call_once(|| info!("kernel passthrough is not available, using the page cache: {failure}"));
    }
}

fn ino(ino: INodeNo) -> Ino {
    Ino(ino.0)
}

fn file_type(kind: NodeKind) -> FileType {
    match kind {
        NodeKind::Directory => FileType::Directory,
        NodeKind::File => FileType::RegularFile,
        NodeKind::Symlink => FileType::Symlink,
    }
}

/// The message of a panic.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}

/// Whether an open requests more than reading.
fn wants_to_write(flags: OpenFlags) -> bool {
    flags.acc_mode() != OpenAccMode::O_RDONLY || flags.0 & libc::O_TRUNC != 0
}

/// Answers a request for extended attributes: with their length if the caller's buffer is empty, else with the bytes.
fn answer_xattr(reply: &mut ReplySlot<ReplyXattr>, room: u32, bytes: &[u8]) {
    let Some(reply) = reply.take() else { return };
    match u32::try_from(bytes.len()) {
        Ok(len) if room == 0 => reply.size(len),
        Ok(len) if len <= room => reply.data(bytes),
        Ok(_) => reply.error(Errno::ERANGE),
        Err(_) => reply.error(Errno::E2BIG),
    }
}

impl fuser::Filesystem for KernelAdapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for flag in INIT_FLAGS {
            // The request fails as a whole if one flag is not offered, so they are added one by one.
            let _ = config.add_capabilities(flag);
        }
        let passthrough = &self.serving.opens.passthrough;
        let requested = passthrough.enabled.load(Ordering::Relaxed);
        let offered = requested
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
            && config.set_max_stack_depth(1).is_ok();
        if requested && !offered {
            passthrough.note_refusal(&io::Error::other("not offered by this kernel"));
        }
        passthrough.enabled.store(offered, Ordering::Relaxed);
        self.fs.started(offered);
        self.opens_directories_itself = config.add_capabilities(InitFlags::FUSE_NO_OPENDIR_SUPPORT).is_ok();
        // Only zero is refused.
        let _ = config.set_max_background(BACKGROUND_MAX);
        let _ = config.set_congestion_threshold(BACKGROUND_CONGESTED);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.handle(Op::Lookup, parent, reply, |reply| {
            // The kernel accepts names of up to 1024 bytes.
            if name.len() > NAME_BYTES_MAX {
                return Err(FsError::NameTooLong);
            }
            let found = self.fs.lookup(ino(parent), name.as_bytes());
            match &found {
                Ok(attr) => {
                    if let Some(reply) = reply.take() {
                        reply.entry(&FOREVER, &Self::attr(attr), GENERATION);
                    }
                }
                // Inode 0 means an absent name; unlike ENOENT, it lets the kernel cache that.
                Err(FsError::NotFound) => {
                    if let Some(reply) = reply.take() {
                        let absent = Attr {
                            ino: Ino(0),
                            kind: NodeKind::File,
                            size_bytes: 0,
                            links: 0,
                            modified: SystemTime::UNIX_EPOCH,
                            permission: Permission { uid: 0, gid: 0, mode: 0 },
                        };
                        reply.entry(&FOREVER, &Self::attr(&absent), GENERATION);
                    }
                }
                Err(_) => {}
            }
            found.map(drop)
        });
    }

    fn forget(&self, _request: &Request, _ino: INodeNo, _lookups: u64) {}

    fn getattr(&self, _request: &Request, node: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        self.handle(Op::GetAttr, node, reply, |reply| {
            let attr = Self::attr(&self.fs.attr(ino(node))?);
            if let Some(reply) = reply.take() {
                reply.attr(&FOREVER, &attr);
            }
            Ok(())
        });
    }

    fn readlink(&self, _request: &Request, node: INodeNo, reply: ReplyData) {
        self.handle(Op::ReadLink, node, reply, |reply| {
            let target = self.fs.read_link(ino(node))?;
            if let Some(reply) = reply.take() {
                reply.data(&target);
            }
            Ok(())
        });
    }

    fn open(&self, _request: &Request, node: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if wants_to_write(flags) {
            return self.read_only(node, reply);
        }
        let is_direct = flags.0 & libc::O_DIRECT != 0;
        let pending = Pending::waiting(&self.fs, Op::Open, node, &self.lookout.opens, reply);
        self.handle_waiting(pending, move |serving, pending| serving.open_file(node, is_direct, pending));
    }

    fn read(
        &self,
        _request: &Request,
        node: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let pending = Pending::waiting(&self.fs, Op::Read, node, &self.lookout.reads, reply);
        self.handle_waiting(pending, move |serving, mut pending| {
            pending.attempt(|reply| {
                let len = usize::try_from(size).map_err(|_| FsError::Invalid)?;
                serving.read_file(ino(node), Handle(handle.0), offset, len, reply)
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
        self.handle(Op::Release, node, reply, |reply| {
            self.serving.opens.modes.release(ino(node));
            self.fs.release(ino(node), Handle(handle.0));
            if let Some(reply) = reply.take() {
                reply.ok();
            }
            Ok(())
        });
    }

    fn opendir(&self, _request: &Request, node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.handle(Op::OpenDir, node, reply, |reply| {
            if self.opens_directories_itself {
                // After this answer the kernel sends no such request again, and caches listings as below. Small directories (each
                // expert of each layer is one) are then listed in two thirds of the time.
                if let Some(reply) = reply.take() {
                    reply.error(Errno::ENOSYS);
                }
                return Ok(());
            }
            match self.fs.attr(ino(node))?.kind {
                NodeKind::Directory => {}
                NodeKind::File | NodeKind::Symlink => return Err(FsError::NotDirectory),
            }
            if let Some(reply) = reply.take() {
                reply.opened(FileHandle(0), FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE);
            }
            Ok(())
        });
    }

    fn readdir(&self, _request: &Request, node: INodeNo, _handle: FileHandle, offset: u64, reply: ReplyDirectory) {
        self.handle(Op::ReadDir, node, reply, |slot| {
            let Some(reply) = slot.as_mut() else { return Ok(()) };
            self.list(ino(node), offset, |entry, kind, name, next| {
                Ok(reply.add(INodeNo(entry.0), next, file_type(kind), OsStr::from_bytes(name)))
            })?;
            if let Some(reply) = slot.take() {
                reply.ok();
            }
            Ok(())
        });
    }

    fn readdirplus(
        &self,
        _request: &Request,
        node: INodeNo,
        _handle: FileHandle,
        offset: u64,
        reply: ReplyDirectoryPlus,
    ) {
        self.handle(Op::ReadDirPlus, node, reply, |slot| {
            let Some(reply) = slot.as_mut() else { return Ok(()) };
            self.list(ino(node), offset, |entry, _, name, next| {
                let attr = Self::attr(&self.fs.attr(entry)?);
                Ok(reply.add(INodeNo(entry.0), next, OsStr::from_bytes(name), &FOREVER, &attr, GENERATION))
            })?;
            if let Some(reply) = slot.take() {
                reply.ok();
            }
            Ok(())
        });
    }

    fn statfs(&self, _request: &Request, node: INodeNo, reply: ReplyStatfs) {
        self.handle(Op::StatFs, node, reply, |reply| {
            let sizes = self.fs.stat_fs();
            let blocks = sizes.total_bytes.div_ceil(u64::from(STATFS_BLOCK_BYTES));
            if let Some(reply) = reply.take() {
                reply.statfs(blocks, 0, 0, sizes.nodes, 0, STATFS_BLOCK_BYTES, NAME_MAX, STATFS_BLOCK_BYTES);
            }
            Ok(())
        });
    }

    fn getxattr(&self, _request: &Request, node: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.handle(Op::GetXattr, node, reply, |reply| {
            answer_xattr(reply, size, &self.fs.xattr(ino(node), name.as_bytes())?);
            Ok(())
        });
    }

    fn listxattr(&self, _request: &Request, node: INodeNo, size: u32, reply: ReplyXattr) {
        self.handle(Op::ListXattr, node, reply, |reply| {
            let mut names = self.fs.xattr_names(ino(node))?;
            for name in &mut names {
                name.push(0);
            }
            answer_xattr(reply, size, &names.concat());
            Ok(())
        });
    }

    // The answers below do not depend on the file system.

    fn releasedir(&self, _: &Request, _: INodeNo, _: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        reply.ok();
    }

    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        // The kernel checks permissions by itself.
        reply.ok();
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        // The kernel does not ask again: it then treats files as having no holes.
        reply.error(Errno::ENOSYS);
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        // The kernel does not ask again: always readable.
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn bmap(&self, _: &Request, _: INodeNo, _: u32, _: u64, reply: ReplyBmap) {
        reply.error(Errno::EINVAL);
    }

    fn getlk(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        _: i32,
        _: u32,
        reply: ReplyLock,
    ) {
        // The kernel keeps locks itself and sends no request.
        reply.error(Errno::ENOSYS);
    }

    fn setlk(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: LockOwner,
        _: u64,
        _: u64,
        _: i32,
        _: u32,
        _: bool,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::ENOSYS);
    }

    // All requests that would change something.

    fn setattr(
        &self,
        _: &Request,
        node: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.read_only(node, reply);
    }

    fn mknod(&self, _: &Request, parent: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        self.read_only(parent, reply);
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        self.read_only(parent, reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        self.read_only(parent, reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        self.read_only(parent, reply);
    }

    fn symlink(&self, _: &Request, parent: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        self.read_only(parent, reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        _: &OsStr,
        _: INodeNo,
        _: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        self.read_only(parent, reply);
    }

    fn link(&self, _: &Request, node: INodeNo, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        self.read_only(node, reply);
    }

    fn write(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        _: u64,
        _: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.read_only(node, reply);
    }

    fn setxattr(&self, _: &Request, node: INodeNo, _: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        self.read_only(node, reply);
    }

    fn removexattr(&self, _: &Request, node: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        self.read_only(node, reply);
    }

    fn create(&self, _: &Request, parent: INodeNo, _: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        self.read_only(parent, reply);
    }

    fn fallocate(&self, _: &Request, node: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        self.read_only(node, reply);
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        target: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        self.read_only(target, reply);
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

    #[test]
    fn panic_messages_are_kept() {
        let text = |panic: fn()| panic_text(catch_unwind(panic).unwrap_err().as_ref()).to_owned();
        assert_eq!(text(|| panic!("plain")), "plain");
        assert_eq!(text(|| panic!("number {}", 7)), "number 7");
        assert_eq!(text(|| std::panic::panic_any(7)), "no message");
    }
}
