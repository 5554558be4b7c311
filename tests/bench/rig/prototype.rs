//! The floor of reads through FUSE: a file system of one file that replies straight from a map of a source, on two threads, and
//! does nothing else: no views, no checks, no counters.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    time::{Duration, UNIX_EPOCH},
};

use fuser::{
    BackgroundSession, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEntry, ReplyOpen, Request,
};
use memmap2::Mmap;

use super::Result;

const ROOT: INodeNo = INodeNo(1);
const FILE: INodeNo = INodeNo(2);
/// Nothing changes.
const TTL: Duration = Duration::from_hours(1);

struct OneFile {
    map: Mmap,
    bytes: u64,
    direct_io: bool,
}

impl OneFile {
    fn attr(&self, ino: INodeNo) -> FileAttr {
        let (kind, perm, size) =
            if ino == ROOT { (FileType::Directory, 0o555, 0) } else { (FileType::RegularFile, 0o444, self.bytes) };
        FileAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }
}

impl Filesystem for OneFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // As in every file system that cares for large reads: those of one call are sent at the same time.
        let _ = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
        let _ = config.set_max_background(64);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if parent == ROOT && name == "file" {
            reply.entry(&TTL, &self.attr(FILE), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attr(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let flags = if self.direct_io { FopenFlags::FOPEN_DIRECT_IO } else { FopenFlags::FOPEN_KEEP_CACHE };
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let end = (offset + u64::from(size)).min(self.bytes);
        let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        reply.data(self.map.get(place(offset)..place(end)).unwrap_or_default());
    }
}

/// A mounted prototype; unmounted when dropped.
pub(crate) struct Prototype {
    session: Option<BackgroundSession>,
    at: PathBuf,
}

impl Prototype {
    /// Shows the first `bytes` bytes of a file as `file` below `at`.
    pub(crate) fn new(source: &Path, bytes: u64, direct_io: bool, at: &Path) -> Result<Self> {
        fs::create_dir_all(at)?;
        let map = map(&File::open(source)?)?;
        assert!(bytes <= map.len() as u64, "a file of at least {bytes} bytes");
        let mut config = fuser::Config::default();
        config.n_threads = Some(2);
        let session = fuser::spawn_mount(OneFile { map, bytes, direct_io }, at, &config)?;
        Ok(Self { session: Some(session), at: at.to_owned() })
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.at.join("file")
    }
}

impl Drop for Prototype {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.session.take().map(BackgroundSession::umount_and_join) {
            eprintln!("{}: could not be unmounted: {error}", self.at.display());
        }
    }
}

#[expect(unsafe_code, reason = "a file of a bench, which nothing changes")]
fn map(file: &File) -> Result<Mmap> {
    // SAFETY: the bench wrote the file itself and changes it no more.
    Ok(unsafe { Mmap::map(file)? })
}
