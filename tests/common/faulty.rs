//! A file system whose storage misbehaves on purpose, served by the test process: a flat directory of files in memory. Each
//! file can fail, be slow, be cut short, give no answer until it is released, or appear changed.
//!
//! It represents a network file system, so `ckfs` reads it as one: with `pread` by default.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, KernelConfig,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyOpen, Request, Session,
    SessionACL,
};
use nix::mount::{MntFlags, umount2};

/// Behaviour of a file when it is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Manner {
    /// Returns its bytes.
    #[default]
    Good,
    /// Fails with EIO.
    Failing,
    /// Ends halfway through each read.
    Short,
    /// Takes this long for each read.
    Slow(Duration),
    /// Gives no answer to reads until its manner changes.
    Stalled,
    /// Gives no answer to requests for its attributes either.
    Dead,
}

/// The owner of cached pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// The kernel: it reads ahead, and fills an early end with zeros.
    Kernel,
    /// None: each read arrives here, and its answer goes to the reader unchanged. Such files cannot be mapped.
    Nobody,
}

struct Node {
    name: String,
    bytes: Arc<[u8]>,
    modified: SystemTime,
    manner: Manner,
    reads: Vec<(ReplyData, u64, u32)>,
    stats: Vec<ReplyAttr>,
    /// Number of reads that arrived.
    asked: u64,
}

type Nodes = Arc<Mutex<Vec<Node>>>;

/// Requests for the attributes of the root that wait; `None` while they are answered.
type RootStats = Arc<Mutex<Option<Vec<ReplyAttr>>>>;

struct Server {
    nodes: Nodes,
    root: RootStats,
    pages: Pages,
}

/// The file system, mounted until this is dropped.
pub struct Faulty {
    nodes: Nodes,
    root: RootStats,
    dir: tempfile::TempDir,
    session: Option<BackgroundSession>,
}

/// The kernel caches only pages.
const NEVER: Duration = Duration::ZERO;
const FIRST: u64 = 2;

fn lock(nodes: &Nodes) -> MutexGuard<'_, Vec<Node>> {
    nodes.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether mounting is possible; fails where all tests must run.
pub fn can_mount() -> bool {
    let can = File::options().read(true).write(true).open("/dev/fuse").is_ok() && nix::unistd::geteuid().is_root();
    assert!(can || std::env::var("CI").as_deref() != Ok("true"), "/dev/fuse and root are needed");
    can
}

impl Faulty {
    /// Serves the files of `from` in their present state.
    pub fn new(from: &Path, pages: Pages) -> Self {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            files.insert(entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap());
        }
        let node = |(name, bytes): (String, Vec<u8>)| Node {
            name,
            bytes: bytes.into(),
            modified: UNIX_EPOCH + Duration::from_secs(1_000_000),
            manner: Manner::Good,
            reads: Vec::new(),
            stats: Vec::new(),
            asked: 0,
        };
        let nodes: Nodes = Arc::new(Mutex::new(files.into_iter().map(node).collect()));
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.mount_options = vec![MountOption::RO, MountOption::FSName("faulty".into())];
        config.n_threads = Some(2);
        config.acl = SessionACL::All;
        let root = RootStats::default();
        let server = Server { nodes: Arc::clone(&nodes), root: Arc::clone(&root), pages };
        let session = Session::new(server, dir.path(), &config).unwrap();
        Self { nodes, root, dir, session: Some(session.spawn().unwrap()) }
    }

    /// Its mountpoint.
    pub fn path(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// Sets the behaviour of a file from now on. Waiting reads are answered if the new manner answers.
    pub fn set(&self, name: &str, manner: Manner) {
        let mut nodes = lock(&self.nodes);
        let (number, node) = find(&mut nodes, name);
        node.manner = manner;
        let (mut reads, mut stats) = (Vec::new(), Vec::new());
        if !matches!(manner, Manner::Stalled | Manner::Dead) {
            reads = std::mem::take(&mut node.reads);
        }
        if manner != Manner::Dead {
            stats = std::mem::take(&mut node.stats);
        }
        let (attr, bytes) = (attr(number, node), Arc::clone(&node.bytes));
        drop(nodes);
        for reply in stats {
            reply.attr(&NEVER, &attr);
        }
        for (reply, offset, size) in reads {
            answer(reply, &bytes, manner, offset, size);
        }
    }

    /// Whether requests for the attributes of the root get no answer from now on.
    pub fn set_root_dead(&self, dead: bool) {
        let waiting =
            std::mem::replace(&mut *self.root.lock().unwrap_or_else(PoisonError::into_inner), dead.then(Vec::new));
        for reply in waiting.into_iter().flatten() {
            reply.attr(&NEVER, &root_attr());
        }
    }

    /// Makes a file look as if it had been written to.
    pub fn touch(&self, name: &str) {
        find(&mut lock(&self.nodes), name).1.modified += Duration::from_secs(1);
    }

    /// Truncates a file.
    pub fn truncate(&self, name: &str, len: usize) {
        let mut nodes = lock(&self.nodes);
        let node = find(&mut nodes, name).1;
        node.bytes = node.bytes[..len].into();
    }

    /// Reads of a file that arrived so far, answered or not.
    pub fn asked(&self, name: &str) -> u64 {
        find(&mut lock(&self.nodes), name).1.asked
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        self.set_root_dead(false);
        let names: Vec<String> = lock(&self.nodes).iter().map(|node| node.name.clone()).collect();
        for name in names {
            self.set(&name, Manner::Failing);
        }
        let _ = umount2(self.dir.path(), MntFlags::MNT_DETACH);
        drop(self.session.take());
    }
}

fn find<'a>(nodes: &'a mut [Node], name: &str) -> (u64, &'a mut Node) {
    let (number, node) = (FIRST..).zip(nodes).find(|(_, node)| node.name == name).expect("a file of that name");
    (number, node)
}

fn by_number(nodes: &mut [Node], ino: INodeNo) -> Option<&mut Node> {
    nodes.get_mut(usize::try_from(ino.0.checked_sub(FIRST)?).ok()?)
}

fn attr(number: u64, node: &Node) -> FileAttr {
    FileAttr { size: node.bytes.len() as u64, ..plain_attr(number, FileType::RegularFile, node.modified) }
}

fn root_attr() -> FileAttr {
    plain_attr(1, FileType::Directory, UNIX_EPOCH)
}

fn plain_attr(number: u64, kind: FileType, modified: SystemTime) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size: 0,
        blocks: 0,
        atime: modified,
        mtime: modified,
        ctime: modified,
        crtime: modified,
        kind,
        perm: if kind == FileType::Directory { 0o755 } else { 0o644 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn answer(reply: ReplyData, bytes: &[u8], manner: Manner, offset: u64, size: u32) {
    let start = usize::try_from(offset).unwrap().min(bytes.len());
    let part = &bytes[start..bytes.len().min(start + size as usize)];
    match manner {
        Manner::Failing => reply.error(Errno::EIO),
        Manner::Short => reply.data(&part[..part.len() / 2]),
        Manner::Good | Manner::Slow(_) | Manner::Stalled | Manner::Dead => reply.data(part),
    }
}

impl fuser::Filesystem for Server {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // The kernel would delay requests for other files while that many wait for one file.
        let _ = config.set_max_background(u16::MAX);
        let _ = config.set_congestion_threshold(u16::MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let nodes = lock(&self.nodes);
        match (FIRST..).zip(&*nodes).find(|(_, node)| node.name.as_str() == name) {
            // A path is still found while the file gives no answer, so the attribute request for the file itself waits.
            Some((number, node)) => reply.entry(&NEVER, &attr(number, node), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        if ino.0 < FIRST {
            return match &mut *self.root.lock().unwrap_or_else(PoisonError::into_inner) {
                Some(waiting) => waiting.push(reply),
                None => reply.attr(&NEVER, &root_attr()),
            };
        }
        let mut nodes = lock(&self.nodes);
        match by_number(&mut nodes, ino) {
            Some(node) if node.manner == Manner::Dead => node.stats.push(reply),
            Some(node) => reply.attr(&NEVER, &attr(ino.0, node)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let flags = match self.pages {
            Pages::Kernel => FopenFlags::FOPEN_KEEP_CACHE,
            Pages::Nobody => FopenFlags::FOPEN_DIRECT_IO,
        };
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut nodes = lock(&self.nodes);
        let Some(node) = by_number(&mut nodes, ino) else { return reply.error(Errno::ENOENT) };
        node.asked += 1;
        let (bytes, manner) = (Arc::clone(&node.bytes), node.manner);
        match manner {
            Manner::Stalled | Manner::Dead => node.reads.push((reply, offset, size)),
            Manner::Slow(delay) => {
                thread::spawn(move || {
                    thread::sleep(delay);
                    answer(reply, &bytes, manner, offset, size);
                });
            }
            Manner::Good | Manner::Failing | Manner::Short => answer(reply, &bytes, manner, offset, size),
        }
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let nodes = lock(&self.nodes);
        for (number, node) in (0_u64..).zip(&*nodes).skip(usize::try_from(offset).unwrap()) {
            if reply.add(INodeNo(number + FIRST), number + 1, FileType::RegularFile, &node.name) {
                break;
            }
        }
        reply.ok();
    }
}
