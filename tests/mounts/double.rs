//! A file system for tests of the mount: a fixed tree in memory with some files that misbehave.

use std::{
    fs::File,
    ops::ControlFlow,
    sync::{Arc, atomic::Ordering},
    thread,
    time::{Duration, SystemTime},
};

use ckfs::volume::{
    Access, Attr, BUFFER_BYTES, DirEntry, FileSystem, FsError, Handle, Ino, Metrics, NodeKind, NodeScope, Nodes,
    NodesRef, OpenedFile, Permission, ReadFailure, Replied, RequestKind, Served, StatFs, Upkeep, WhenMaterialized,
};
use nix::unistd::{getegid, geteuid};

/// Length of the well-behaved files.
pub(crate) const DATA_BYTES: usize = 16 << 20;

/// Files in the directory `many`.
pub(crate) const MANY: u64 = 10_000;

/// Inode of the first file in `many`.
const MANY_FIRST: u64 = 1000;

/// Behaviour of a file when it is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Manner {
    /// Returns its bytes through the page cache.
    Good,
    /// Returns its bytes, never cached.
    Direct,
    /// Is the backing file.
    Passthrough,
    /// Takes 300 ms for each read.
    Slow,
    /// Fails.
    Failing,
    /// Panics.
    Panicking,
    /// Panics after the reply.
    PanickingLate,
    /// Returns half of the requested bytes.
    Short,
    /// Returns no bytes and reports success.
    Silent,
    /// Returns the counters.
    Stats,
    /// Is materialized by another thread: the backing file.
    Materialized,
    /// Cannot be materialized, and is read without.
    NotMaterialized,
    /// Panics when it should be materialized.
    MaterializePanics,
    /// Drops the open that waits until it is materialized.
    MaterializeForgets,
}

/// Name and manner of each file in the root, from inode 2 on.
const FILES: [(&str, Manner); 15] = [
    ("data", Manner::Good),
    ("direct", Manner::Direct),
    ("backed", Manner::Passthrough),
    ("slow", Manner::Slow),
    ("failing", Manner::Failing),
    ("panicking", Manner::Panicking),
    ("panicking-late", Manner::PanickingLate),
    ("short", Manner::Short),
    ("silent", Manner::Silent),
    ("stats", Manner::Stats),
    ("tail", Manner::Good),
    ("materialized", Manner::Materialized),
    ("not-materialized", Manner::NotMaterialized),
    ("materialize-panics", Manner::MaterializePanics),
    ("materialize-forgets", Manner::MaterializeForgets),
];

const LINK: Ino = Ino(50);
const MANY_DIRECTORY: Ino = Ino(51);

/// The byte at `offset` of every well-behaved file; neighbouring pages differ.
pub(crate) fn byte_at(offset: usize) -> u8 {
    (offset.wrapping_mul(0x9E37_79B1) >> 7).to_le_bytes()[0] ^ (offset >> 12).to_le_bytes()[0]
}

/// All bytes of a well-behaved file.
pub(crate) fn data() -> Vec<u8> {
    (0..DATA_BYTES).map(byte_at).collect()
}

pub(crate) struct Double {
    data: Vec<u8>,
    backing: Option<Arc<File>>,
    metrics: Metrics,
}

impl Double {
    pub(crate) fn new(backing: Option<File>) -> Self {
        Self { data: data(), backing: backing.map(Arc::new), metrics: Metrics::default() }
    }

    fn manner(ino: Ino) -> Option<Manner> {
        let index = usize::try_from(ino.0.checked_sub(2)?).unwrap();
        FILES.get(index).map(|(_, manner)| *manner)
    }

    fn stats(&self) -> Vec<u8> {
        let count = |op| self.metrics.op(op).count.load(Ordering::Relaxed);
        format!(
            "panics={}\npassthrough={}\nrefused={}\nread={}\nlookup={}\nreaddirplus={}\n",
            self.metrics.panics.load(Ordering::Relaxed),
            self.metrics.passthrough_opens.load(Ordering::Relaxed),
            count(RequestKind::Refused),
            count(RequestKind::Read),
            count(RequestKind::Lookup),
            count(RequestKind::ReadDirPlus),
        )
        .into_bytes()
    }
}

impl Nodes for Double {
    fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        assert!(name != b"panicking-lookup", "lookup panics");
        let name = std::str::from_utf8(name).map_err(|_| FsError::NotFound)?;
        if parent == MANY_DIRECTORY {
            let index: u64 = name.strip_prefix('f').and_then(|n| n.parse().ok()).ok_or(FsError::NotFound)?;
            return if index < MANY { Nodes::attr(self, Ino(MANY_FIRST + index)) } else { Err(FsError::NotFound) };
        }
        if parent != Ino::ROOT {
            return Err(FsError::NotDirectory);
        }
        match name {
            "link" => Nodes::attr(self, LINK),
            "many" => Nodes::attr(self, MANY_DIRECTORY),
            _ => {
                let index = FILES.iter().position(|(file, _)| *file == name).ok_or(FsError::NotFound)?;
                Nodes::attr(self, Ino(index as u64 + 2))
            }
        }
    }

    fn attr(&self, ino: Ino) -> Result<Attr, FsError> {
        let (kind, size_bytes, links) = match ino {
            Ino::ROOT => (NodeKind::Directory, 0, 3),
            LINK => (NodeKind::Symlink, 4, 1),
            MANY_DIRECTORY => (NodeKind::Directory, 0, 2),
            Ino(n) if (MANY_FIRST..MANY_FIRST + MANY).contains(&n) => (NodeKind::File, n, 1),
            _ => match Self::manner(ino).ok_or(FsError::NotFound)? {
                Manner::Stats => (NodeKind::File, 4096, 1),
                _ if ino.0 == 12 => (NodeKind::File, 5000, 1),
                _ => (NodeKind::File, DATA_BYTES as u64, 1),
            },
        };
        let modified = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let mode = if kind == NodeKind::Directory { 0o555 } else { 0o444 };
        let permission = Permission { uid: geteuid().as_raw(), gid: getegid().as_raw(), mode };
        Ok(Attr { ino, kind, size_bytes, links, modified, permission, buffer_bytes: BUFFER_BYTES })
    }

    fn read_dir(
        &self,
        dir: Ino,
        from: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), FsError> {
        let mut names: Vec<(String, Ino, NodeKind)> = Vec::new();
        match dir {
            Ino::ROOT => {
                let files = FILES.iter().enumerate();
                names.extend(files.map(|(i, (name, _))| ((*name).to_owned(), Ino(i as u64 + 2), NodeKind::File)));
                names.push(("link".into(), LINK, NodeKind::Symlink));
                names.push(("many".into(), MANY_DIRECTORY, NodeKind::Directory));
            }
            MANY_DIRECTORY => {
                names.extend((0..MANY).map(|i| (format!("f{i:05}"), Ino(MANY_FIRST + i), NodeKind::File)));
            }
            _ => return Err(FsError::NotDirectory),
        }
        for (name, ino, kind) in names.iter().skip(usize::try_from(from).unwrap()) {
            if each(DirEntry { name: name.as_bytes(), ino: *ino, kind: *kind, next: None }).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn parent(&self, _ino: Ino) -> Result<Ino, FsError> {
        Ok(Ino::ROOT)
    }

    fn read_link(&self, ino: Ino) -> Result<Vec<u8>, FsError> {
        if ino == LINK { Ok(b"data".to_vec()) } else { Err(FsError::Invalid) }
    }

    fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>, FsError> {
        if ino == Ino(2) && name == b"user.ckfs.dtype" { Ok(b"BF16".to_vec()) } else { Err(FsError::NoAttribute) }
    }

    fn xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>, FsError> {
        Ok(if ino == Ino(2) { vec![b"user.ckfs.dtype".to_vec(), b"user.ckfs.shape".to_vec()] } else { Vec::new() })
    }

    fn stat_fs(&self) -> StatFs {
        StatFs { total_bytes: 3 * DATA_BYTES as u64 + 1, nodes: MANY + 18 }
    }
}

impl FileSystem for Double {
    fn nodes(&self, _ino: Ino, _scope: NodeScope) -> Option<NodesRef<'_>> {
        Some(NodesRef::All(self))
    }

    fn open(&self, ino: Ino) -> Result<OpenedFile, FsError> {
        let access = match (Self::manner(ino), &self.backing) {
            (Some(Manner::Direct | Manner::Stats), _) => Access::Direct,
            (Some(Manner::Passthrough), Some(file)) => Access::Passthrough(Arc::clone(file)),
            (
                Some(
                    Manner::Materialized
                    | Manner::NotMaterialized
                    | Manner::MaterializePanics
                    | Manner::MaterializeForgets,
                ),
                _,
            ) => Access::Materialize,
            _ => Access::Cached,
        };
        Ok(OpenedFile { handle: Handle(ino.0), access })
    }

    fn read(
        &self,
        ino: Ino,
        _handle: Handle,
        offset: u64,
        len: usize,
        reply: &mut dyn FnMut(Served<'_>) -> Replied,
    ) -> Result<Replied, ReadFailure<FsError>> {
        let manner = Self::manner(ino).ok_or(FsError::NotFound)?;
        let mut stats;
        let size = usize::try_from(Nodes::attr(self, ino)?.size_bytes).unwrap();
        let bytes = if manner == Manner::Stats {
            stats = self.stats();
            stats.resize(size, b'\n');
            &stats[..]
        } else {
            &self.data[..size]
        };
        let start = usize::try_from(offset).unwrap().min(bytes.len());
        let bytes = &bytes[start..(start + len).min(bytes.len())];
        match manner {
            Manner::Good
            | Manner::Direct
            | Manner::Passthrough
            | Manner::Stats
            | Manner::Materialized
            | Manner::NotMaterialized
            | Manner::MaterializePanics
            | Manner::MaterializeForgets => Ok(reply(Served::Memory(bytes))),
            Manner::Slow => {
                thread::sleep(Duration::from_secs(3));
                Ok(reply(Served::Memory(bytes)))
            }
            Manner::Failing => Err(FsError::Io.into()),
            Manner::Panicking => panic!("read panics"),
            Manner::PanickingLate => {
                let _ = reply(Served::Memory(bytes));
                panic!("read panics after the reply");
            }
            Manner::Short => Ok(reply(Served::Memory(&bytes[..bytes.len() / 2]))),
            // As if the bytes had been passed on.
            Manner::Silent => Ok(Replied::new()),
        }
    }

    fn release(&self, _ino: Ino, _handle: Handle) {}
}

impl Upkeep for Double {
    fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    fn materialize(&self, ino: Ino, _handle: Handle, then: WhenMaterialized) {
        match Self::manner(ino) {
            Some(Manner::Materialized) => {
                let backing = self.backing.clone();
                thread::spawn(move || {
                    thread::sleep(Duration::from_millis(50));
                    then(backing);
                });
            }
            Some(Manner::MaterializePanics) => panic!("materialize panics"),
            Some(Manner::MaterializeForgets) => drop(then),
            _ => then(None),
        }
    }
}
