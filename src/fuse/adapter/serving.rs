//! Opens and reads of files, in any thread that handles them; the replies of fuser, as the service answers them.

use std::{
    fs::File,
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Once,
        atomic::{AtomicBool, Ordering},
    },
};

use ckfs_service::{Pending, Refuse, ReplySlot, panic_text};
use ckfs_volume::{Access, FsError, Ino, NoPassthrough, OpenedFile, Upkeep};
use fuser::{
    BackingId, Errno, FileHandle, FopenFlags, INodeNo, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
};
use tracing::{error, info};

use super::super::{
    connection::{close_backing, reply_passthrough},
    open_mode::{Backing, Mode, OpenModes},
};

pub(super) fn ino(ino: INodeNo) -> Ino {
    Ino(ino.0)
}

/// A reply of fuser.
#[derive(Debug)]
pub(super) struct Reply<R>(pub(super) R);

macro_rules! refuse {
    ($($reply:ty),*) => {
        $(impl Refuse for Reply<$reply> {
            fn refuse(self: Box<Self>, errno: i32) {
                self.0.error(Errno::from_i32(errno));
            }
        })*
    };
}

refuse!(
    ReplyAttr,
    ReplyCreate,
    ReplyData,
    ReplyDirectory,
    ReplyDirectoryPlus,
    ReplyEmpty,
    ReplyEntry,
    ReplyOpen,
    ReplyStatfs,
    ReplyWrite,
    ReplyXattr
);

/// The state that opens and reads need, in any thread that handles them.
pub(super) struct Serving {
    pub(super) fs: Arc<dyn Upkeep>,
    pub(super) opens: Arc<Opens>,
}

/// The modes of open files. Shared with opens that other threads answer.
pub(crate) struct Opens {
    pub(super) modes: OpenModes,
    /// Whether the mount wants the kernel to read backing files by itself.
    passthrough_wanted: bool,
    /// Wanted, offered by the kernel, and not refused so far.
    pub(super) passthrough: AtomicBool,
    granted: Once,
    refused: Once,
    /// Whether programs can map files that bypass the page cache (since Linux 6.6).
    pub(super) maps_direct: AtomicBool,
}

impl Serving {
    /// Serves the files of `fs`. `passthrough` tells whether the kernel is asked to read backing files by itself.
    pub(super) fn new(fs: &Arc<dyn Upkeep>, passthrough: bool, modes: OpenModes) -> Self {
        let opens = Opens {
            modes,
            passthrough_wanted: passthrough,
            passthrough: AtomicBool::new(passthrough),
            granted: Once::new(),
            refused: Once::new(),
            maps_direct: AtomicBool::new(false),
        };
        Self { fs: Arc::clone(fs), opens: Arc::new(opens) }
    }

    pub(super) fn open_file(&self, node: INodeNo, is_direct: bool, mut pending: Pending<Reply<ReplyOpen>>) {
        let ino = ino(node);
        let open = |_: &mut ReplySlot<Reply<ReplyOpen>>| {
            if is_direct { self.fs.open_uncached(ino) } else { self.fs.open(ino) }
        };
        let Some(mut opened) = pending.attempt(open) else { return };
        let (fs, opens) = (Arc::clone(&self.fs), Arc::clone(&self.opens));
        // A file that the kernel reads already needs no other, not even one of a daemon before this one.
        let materializes =
            matches!(opened.access, Access::Materialize) && opens.may_pass(ino) && !opens.modes.is_passed(ino);
        let handle = opened.handle;
        let mut answer = move |file: Option<Arc<File>>| {
            if let Some(file) = file {
                opened.access = Access::Passthrough(file);
            }
            pending.attempt(|reply| opens.answer(fs.as_ref(), ino, &opened, is_direct, reply));
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
}

impl Opens {
    /// Whether the kernel may read a file by itself, as no handle has it open through the page cache.
    fn may_pass(&self, ino: Ino) -> bool {
        self.passthrough.load(Ordering::Relaxed) && self.modes.may_pass(ino)
    }

    /// Begins after the handshake with the kernel and before any request: tries a file of the
    /// kind that the file system makes on a disk, and tells it whether the kernel reads such.
    pub(crate) fn begin(&self, fs: &dyn Upkeep) {
        let result = if self.passthrough.load(Ordering::Relaxed) {
            let tried = fs.trial().map_or(Ok(()), |file| {
                self.register(&file).map(|backing| close_backing(&self.modes.device, backing.id))
            });
            tried.map_err(|error| {
                self.note_refusal(&error);
                NoPassthrough::Refused(error)
            })
        } else {
            Err(if self.passthrough_wanted { NoPassthrough::NotOffered } else { NoPassthrough::Off })
        };
        fs.started(result);
    }

    fn register(&self, file: &File) -> io::Result<Backing> {
        let id = BackingId::create_raw(&self.modes.device, file)?;
        Ok(Backing { id, opens_direct: opens_direct(file) })
    }

    /// Answers an open, unless another thread did: then the kernel has no handle of it.
    ///
    /// With `is_direct` the kernel opens a backing file with `O_DIRECT` as well, and fails with EIO where that file's system
    /// has none (squashfs, ramfs). The daemon answers the reads then.
    ///
    /// # Errors
    /// [`FsError::Invalid`], which such a file system answers itself, if the kernel reads the file already and cannot do both.
    fn answer(
        &self,
        fs: &dyn Upkeep,
        ino: Ino,
        opened: &OpenedFile,
        is_direct: bool,
        slot: &mut ReplySlot<Reply<ReplyOpen>>,
    ) -> Result<(), FsError> {
        let Some(Reply(reply)) = slot.take() else {
            fs.release(ino, opened.handle);
            return Ok(());
        };
        let may_pass = |file: &File| !is_direct || opens_direct(file);
        let first = || match &opened.access {
            Access::Direct => Ok(Mode::Direct),
            Access::Once if self.maps_direct.load(Ordering::Relaxed) => Ok(Mode::Direct),
            Access::Passthrough(file) if self.passthrough.load(Ordering::Relaxed) && may_pass(file) => {
                self.register(file).map(Mode::Passthrough)
            }
            Access::Cached | Access::Once | Access::Passthrough(_) | Access::Materialize => Ok(Mode::Cached),
        };
        let (mode, failure) = self.modes.open(ino, &first);
        if let Some(failure) = failure {
            self.note_refusal(&failure);
        }
        if let Mode::Passthrough(Backing { opens_direct: false, .. }) = mode
            && is_direct
        {
            self.modes.release(ino);
            fs.release(ino, opened.handle);
            slot.put_back(Reply(reply));
            return Err(FsError::Invalid);
        }
        let handle = FileHandle(opened.handle.0);
        // There is nothing to flush on close, so the kernel need not send flushes.
        let flags = FopenFlags::FOPEN_NOFLUSH;
        match mode {
            Mode::Cached => reply.opened(handle, flags | FopenFlags::FOPEN_KEEP_CACHE),
            Mode::Direct => reply.opened(handle, flags | FopenFlags::FOPEN_DIRECT_IO),
            Mode::Passthrough(backing) => {
                self.granted.call_once(|| info!("kernel passthrough is on"));
                fs.metrics().passthrough_opens.fetch_add(1, Ordering::Relaxed);
                reply_passthrough(reply, handle, flags, backing.id);
            }
        }
        Ok(())
    }

    /// Notes that the kernel does not read a file by itself: falls back silently, but logs the first reason. Without permission no
    /// later attempt can succeed.
    pub(super) fn note_refusal(&self, failure: &io::Error) {
        if failure.raw_os_error() == Some(libc::EPERM) {
            self.passthrough.store(false, Ordering::Relaxed);
        }
        self.refused.call_once(|| info!("kernel passthrough is not available, using the page cache: {failure}"));
    }
}

/// Whether a file can be opened with `O_DIRECT`. Opened anew, since the flags of an open file are shared with its readers.
fn opens_direct(file: &File) -> bool {
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).custom_flags(libc::O_DIRECT).open(again).is_ok()
}
