//! The calls that a file system answers, whoever asks, and their types.

use std::{
    borrow::Cow,
    fs::File,
    ops::{ControlFlow, Deref},
    sync::Arc,
    time::SystemTime,
};

use ckfs_source::{ReadFailure, Replied, Served, permission::Permission};

/// Index of a node in the tree; 1 is the root, as FUSE requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ino(pub u64);

impl Ino {
    /// The root directory.
    pub const ROOT: Self = Self(1);
}

/// Type of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link.
    Symlink,
}

/// Attributes of a node. Nothing here changes after mount, unless [`Nodes::is_fixed`] says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// The node.
    pub ino: Ino,
    /// Its type.
    pub kind: NodeKind,
    /// Exact size in bytes; for a symlink the length of its target, for a directory 0.
    pub size_bytes: u64,
    /// Links: 2 plus the number of subdirectories for a directory, else 1.
    pub links: u32,
    /// Modification time: the newest source's.
    pub modified: SystemTime,
    /// Owner, group and permission bits.
    pub permission: Permission,
    /// Buffer that programs should read with, in bytes: `st_blksize`.
    pub buffer_bytes: u32,
}

impl Attr {
    /// Those of what is not there: an empty file that nobody may read.
    pub const fn absent(ino: Ino) -> Self {
        Self {
            ino,
            kind: NodeKind::File,
            size_bytes: 0,
            links: 0,
            modified: SystemTime::UNIX_EPOCH,
            permission: Permission { uid: 0, gid: 0, mode: 0 },
            buffer_bytes: BUFFER_BYTES,
        }
    }
}

/// The usual buffer: programs that buffer by it (Python does) then read in the largest single request.
pub const BUFFER_BYTES: u32 = 1 << 20;

/// The buffer for files of which programs read small parts first, as on most file systems: of a larger one they would read the rest
/// twice.
pub(crate) const SMALL_BUFFER_BYTES: u32 = 4096;

/// One entry of a directory listing.
#[derive(Clone, Copy, Debug)]
pub struct DirEntry<'a> {
    /// File name, one path component.
    pub name: &'a [u8],
    /// The node.
    pub ino: Ino,
    /// Its type.
    pub kind: NodeKind,
    /// Number of the entry after it; `None` for the next number. A directory whose entries come and go leaves gaps.
    pub next: Option<u64>,
}

/// An open file; later reads name it by this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(pub u64);

/// How the kernel should treat an open file.
#[derive(Clone, Debug)]
pub enum Access {
    /// Through the page cache, which is kept from one open to the next: the bytes never change.
    Cached,
    /// The daemon gets every read; the kernel caches nothing.
    Direct,
    /// As `Direct` where the kernel maps such files, otherwise as `Cached`.
    Once,
    /// The file is byte-identical to this one. The kernel reads this one where it may; otherwise as `Cached`.
    Passthrough(Arc<File>),
    /// Where the kernel may read files directly, [`Upkeep::materialize`](super::Upkeep::materialize) may supply a file for it; otherwise as `Cached`.
    Materialize,
}

/// A file that has been opened.
#[derive(Clone, Debug)]
pub struct OpenedFile {
    /// Names the open file in later calls.
    pub handle: Handle,
    /// How the kernel should treat it.
    pub access: Access,
}

/// Why a call failed; [`FsError::errno`] is the caller's error number.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FsError {
    /// No node has that name or number.
    #[error("no such file or directory")]
    NotFound = libc::ENOENT,
    /// A directory was needed.
    #[error("not a directory")]
    NotDirectory = libc::ENOTDIR,
    /// A file was needed.
    #[error("is a directory")]
    IsDirectory = libc::EISDIR,
    /// The file system is read-only.
    #[error("read-only file system")]
    ReadOnly = libc::EROFS,
    /// The node has no such extended attribute.
    #[error("no such attribute")]
    NoAttribute = libc::ENODATA,
    /// The file system keeps no attributes of that kind. `ls -l` asks every file for a security label and an access list, at
    /// two requests each, until it receives this error once.
    #[error("operation not supported")]
    Unsupported = libc::EOPNOTSUPP,
    /// The call makes no sense for this node.
    #[error("invalid argument")]
    Invalid = libc::EINVAL,
    /// A path follows more symbolic links than the kernel does.
    #[error("too many symbolic links")]
    Loop = libc::ELOOP,
    /// A file name exceeds the file system's limit.
    #[error("file name too long")]
    NameTooLong = libc::ENAMETOOLONG,
    /// Bytes could not be read, or their source changed. Already logged.
    #[error("input/output error")]
    Io = libc::EIO,
}

impl FsError {
    /// The errno for the caller.
    pub const fn errno(self) -> i32 {
        self as i32
    }
}

/// Sizes for `statfs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatFs {
    /// Bytes of all source files.
    pub total_bytes: u64,
    /// Nodes in the tree.
    pub nodes: u64,
}

/// Nodes that are in memory, immutable but for what [`Nodes::is_fixed`] names: no call waits for storage. A thread that must not
/// wait gets these, and no way to the file system.
pub trait Nodes {
    /// The child of `parent` called `name`.
    ///
    /// # Errors
    /// [`FsError::NotFound`] or [`FsError::NotDirectory`].
    fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr, FsError>;

    /// Attributes of a node.
    ///
    /// # Errors
    /// [`FsError::NotFound`].
    fn attr(&self, ino: Ino) -> Result<Attr, FsError>;

    /// Lists a directory (without `.` and `..`), starting with entry number `from`, until `each` breaks. Entry numbers
    /// count from 0 in a fixed order.
    ///
    /// # Errors
    /// [`FsError::NotFound`] or [`FsError::NotDirectory`].
    fn read_dir(
        &self,
        dir: Ino,
        from: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), FsError>;

    /// The parent of a directory; the root's is the root.
    ///
    /// # Errors
    /// [`FsError::NotFound`].
    fn parent(&self, ino: Ino) -> Result<Ino, FsError>;

    /// Target of a symlink.
    ///
    /// # Errors
    /// [`FsError::NotFound`], or [`FsError::Invalid`] if the node is no symlink.
    fn read_link(&self, ino: Ino) -> Result<Vec<u8>, FsError>;

    /// Value of an extended attribute.
    ///
    /// # Errors
    /// [`FsError::NoAttribute`], or [`FsError::Unsupported`] outside the namespace `user.`.
    fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, FsError>;

    /// Names of a node's extended attributes.
    ///
    /// # Errors
    /// [`FsError::NotFound`].
    fn xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>, FsError>;

    /// Whether the attributes of a node, and of a directory also its names, never change. The kernel keeps nothing of others.
    fn is_fixed(&self, ino: Ino) -> bool {
        let _ = ino;
        true
    }

    /// Totals of the file system.
    fn stat_fs(&self) -> StatFs;
}

/// Nodes that a file system has in memory, for one request.
pub enum NodesRef<'a> {
    /// All of its nodes.
    All(&'a dyn Nodes),
    /// Those that the request concerns.
    Some(Box<dyn Nodes + 'a>),
}

impl<'a> Deref for NodesRef<'a> {
    type Target = dyn Nodes + 'a;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::All(nodes) => *nodes,
            Self::Some(nodes) => &**nodes,
        }
    }
}

/// What a request asks of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeScope {
    /// What its own directory knows of it: its attributes.
    Itself,
    /// What is in it.
    Inside,
}

/// A tree of files. Many threads call it at once. Its calls may wait for storage, but for [`FileSystem::nodes`] and those that say so.
pub trait FileSystem: Send + Sync + 'static {
    /// The nodes that answer what is asked of a node, if they are in memory. Never waits.
    fn nodes(&self, ino: Ino, scope: NodeScope) -> Option<NodesRef<'_>>;

    /// The same, brought into memory where they are not.
    ///
    /// # Errors
    /// [`FsError::Io`]: they cannot be.
    fn reach(&self, ino: Ino, scope: NodeScope) -> Result<NodesRef<'_>, FsError> {
        self.nodes(ino, scope).ok_or(FsError::Io)
    }

    /// As [`Nodes::lookup`].
    ///
    /// # Errors
    /// The same, and those of [`FileSystem::reach`].
    fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        self.reach(parent, NodeScope::Inside)?.lookup(parent, name)
    }

    /// As [`Nodes::attr`].
    ///
    /// # Errors
    /// The same, and those of [`FileSystem::reach`].
    fn attr(&self, ino: Ino) -> Result<Attr, FsError> {
        self.reach(ino, NodeScope::Itself)?.attr(ino)
    }

    /// As [`Nodes::read_dir`].
    ///
    /// # Errors
    /// The same, and those of [`FileSystem::reach`].
    fn read_dir(
        &self,
        dir: Ino,
        from: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), FsError> {
        self.reach(dir, NodeScope::Inside)?.read_dir(dir, from, each)
    }

    /// As [`Nodes::read_link`].
    ///
    /// # Errors
    /// The same, and those of [`FileSystem::reach`].
    fn read_link(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        self.reach(ino, NodeScope::Itself)?.read_link(ino)
    }

    /// As [`Nodes::is_fixed`]. Never waits.
    fn is_fixed(&self, ino: Ino) -> bool {
        self.nodes(ino, NodeScope::Itself).is_none_or(|nodes| nodes.is_fixed(ino))
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// [`FsError::IsDirectory`], or [`FsError::Io`] if a source of the file has changed.
    fn open(&self, ino: Ino) -> Result<OpenedFile, FsError>;

    /// As [`FileSystem::open`], for a program that bypasses the cache (`O_DIRECT`): nothing is materialized for it.
    ///
    /// # Errors
    /// As [`FileSystem::open`].
    fn open_uncached(&self, ino: Ino) -> Result<OpenedFile, FsError> {
        self.open(ino)
    }

    /// Length in bytes of an open file: where its content is generated for each reader, of what this one was read from.
    ///
    /// # Errors
    /// As [`FileSystem::attr`]; [`FsError::Invalid`] if it is not open.
    fn open_len_bytes(&self, ino: Ino, handle: Handle) -> Result<u64, FsError> {
        let _ = handle;
        Ok(self.attr(ino)?.size_bytes)
    }

    /// Reads `len` bytes at `offset`, fewer only at the end of the file, and passes them to `reply`, at most once.
    ///
    /// # Errors
    /// [`FsError::Io`] if bytes could not be read or a source has changed, and whether `reply` was called nevertheless.
    fn read(
        &self,
        ino: Ino,
        handle: Handle,
        offset: u64,
        len: usize,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<FsError>>;

    /// Fills `target` with the bytes at `offset`, all of them within the file. They are checked when it returns: for a reader that
    /// must not pass on bytes before that.
    ///
    /// # Errors
    /// As [`FileSystem::read`]; the content of the target is then unspecified.
    fn read_into(&self, ino: Ino, handle: Handle, offset: u64, target: &mut [u8]) -> Result<(), FsError> {
        copy_into(self, ino, handle, offset, target)
    }

    /// Closes a file. Never waits.
    fn release(&self, ino: Ino, handle: Handle);
}

/// [`FileSystem::read_into`] by a copy of what [`FileSystem::read`] passes.
pub(super) fn copy_into(
    fs: &(impl FileSystem + ?Sized),
    ino: Ino,
    handle: Handle,
    offset: u64,
    target: &mut [u8],
) -> Result<(), FsError> {
    let mut copied = false;
    let read = fs.read(ino, handle, offset, target.len(), &mut |bytes| {
        let found = match bytes {
            Served::Memory(bytes) => Cow::Borrowed(bytes),
            Served::Kernel(_) => Cow::Owned(bytes.to_vec().unwrap_or_default()),
        };
        if found.len() == target.len() {
            target.copy_from_slice(&found);
            copied = true;
        }
        Replied::new()
    });
    read.map(drop).map_err(|failure| failure.error)?;
    if copied { Ok(()) } else { Err(FsError::Io) }
}

/// Most symbolic links on the way to a node, as the kernel's limit.
const LINKS_MAX: usize = 40;

/// Follows a path from a directory, and links; above the directory is itself. `lookup` finds a name in the directory that has these
/// nodes above it, from the first one on. Returns the path without links, and the node.
///
/// # Errors
/// Those of `lookup`; [`FsError::Loop`].
pub fn follow<E: From<FsError>>(
    fs: &(impl FileSystem + ?Sized),
    from: Attr,
    path: &str,
    lookup: impl Fn(&[(String, Attr)], &Attr, &str) -> Result<Attr, E>,
) -> Result<(String, Attr), E> {
    let mut pending: Vec<String> = path.split('/').rev().map(str::to_owned).collect();
    let mut at: Vec<(String, Attr)> = Vec::new();
    let mut links = 0;
    while let Some(name) = pending.pop() {
        if name.is_empty() || name == "." {
            continue;
        }
        if name == ".." {
            at.pop();
            continue;
        }
        let attr = lookup(&at, at.last().map_or(&from, |(_, attr)| attr), &name)?;
        if attr.kind != NodeKind::Symlink {
            at.push((name, attr));
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(FsError::Loop.into());
        }
        let target = fs.read_link(attr.ino)?;
        pending.extend(String::from_utf8_lossy(&target).split('/').rev().map(str::to_owned));
    }
    let attr = at.last().map_or(from, |(_, attr)| *attr);
    let names: Vec<String> = at.into_iter().map(|(name, _)| name).collect();
    Ok((names.join("/"), attr))
}
