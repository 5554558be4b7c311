//! The directory of a cache: where it is, and how an entry is found or made.
//!
//! ```text
//! <cache>/CACHEDIR.TAG          backup programs leave the directory out
//! <cache>/objects/ckfs-cache    the marker: without it nothing here is touched
//! <cache>/objects/<name>/data   the bytes, sparse          map   which of them are present          meta.json
//! ```

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::{
    super::{
        super::{digest::KnownDigest, unique::unique},
        counters::RemoteCounters,
        interface::RemoteFile,
    },
    block_map::BlockMap,
    entry::Entry,
    geometry::OBJECT_BYTES_MAX,
    lock::{self, LockKind},
    meta::{self, EntryMeta},
    own::{self, DATA, MAP},
    space::{CacheLimit, OpenEntries, Space},
};

/// Most bytes kept in memory where there is no disk: headers and small files.
const MEMORY_BYTES: u64 = 256 << 20;
/// Attempts to open an entry that other processes make or remove at the same time.
const TRIES_MAX: usize = 16;

/// The cache of this process: a directory that other processes use as well, or memory.
#[derive(Debug)]
pub struct Cache {
    /// The directory of entries; `None` in memory.
    disk: Option<Space>,
    /// Of the entries for which the disk has no place.
    memory: Space,
    /// Whether the warning about entries in memory was logged.
    told: AtomicBool,
    open: Arc<OpenEntries>,
    counters: Arc<RemoteCounters>,
}

impl Cache {
    /// Opens a cache in a directory, which is made if it is not there. At most `cap_bytes` of disk are used; `None` is half of the
    /// file system.
    ///
    /// # Errors
    /// The directory cannot be made or used, belongs to another user, or holds what is not the cache's.
    pub fn open(dir: &Path, cap_bytes: Option<u64>, counters: Arc<RemoteCounters>) -> io::Result<Arc<Self>> {
        let open = Arc::<OpenEntries>::default();
        let disk = Space::new(Some(own::claim(dir)?), cap_bytes, Arc::clone(&open));
        Ok(Self::new(Some(disk), open, counters))
    }

    /// The most bytes that a cache in a directory would hold which is not there yet.
    ///
    /// # Errors
    /// No directory above it can be examined.
    pub fn limit_bytes_at(dir: &Path) -> io::Result<u64> {
        let dir = std::path::absolute(dir)?;
        let above = dir.ancestors().find(|above| above.is_dir()).unwrap_or(&dir);
        Ok(Space::new(None, None, Arc::default()).limit_in(above, 0)?.limit_bytes)
    }

    /// A cache in memory, for headers and small files where there is no directory.
    pub fn in_memory(counters: Arc<RemoteCounters>) -> Arc<Self> {
        Self::new(None, Arc::default(), counters)
    }

    fn new(disk: Option<Space>, open: Arc<OpenEntries>, counters: Arc<RemoteCounters>) -> Arc<Self> {
        let memory = Space::new(None, Some(MEMORY_BYTES), Arc::clone(&open));
        Arc::new(Self { disk, memory, told: AtomicBool::new(false), open, counters })
    }

    /// What bounds the bytes of an entry.
    pub(in super::super) fn space_of(&self, entry: &Entry) -> &Space {
        self.disk.as_ref().filter(|_| entry.dir().is_some()).unwrap_or(&self.memory)
    }

    /// The directory of entries, unless the cache is in memory.
    pub fn objects(&self) -> Option<&Path> {
        self.disk.as_ref()?.dir.as_deref()
    }

    /// The counts of everything that uses this cache.
    pub fn counters(&self) -> &Arc<RemoteCounters> {
        &self.counters
    }

    /// What bounds it now.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn limit(&self) -> io::Result<CacheLimit> {
        self.disk.as_ref().unwrap_or(&self.memory).limit()
    }

    /// Removes an entry that no process uses. Returns the freed bytes of disk, or `None` if it is in use.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove_unused(&self, entry: &Path) -> io::Result<Option<u64>> {
        let Some(objects) = self.objects() else { return Ok(None) };
        Space::remove_unused(objects, entry)
    }

    /// The entry of an object that `origin` lists; it is made if it is not there. `object` names it for people. Within a process an
    /// object has one entry. Where the disk has no place for it, memory serves.
    ///
    /// # Errors
    /// The system has no files in memory either.
    pub fn entry(&self, file: &RemoteFile, origin: &str, object: &str) -> io::Result<Arc<Entry>> {
        if file.size_bytes > OBJECT_BYTES_MAX {
            let message = format!("its service says {} bytes, more than any object has", file.size_bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        let name = file.content.cache_name(file.size_bytes, origin);
        let of_name = |open: &[Weak<Entry>]| open.iter().filter_map(Weak::upgrade).find(|entry| entry.name == name);
        if let Some(entry) = of_name(&self.open.lock()) {
            return Ok(entry);
        }
        let (sha256, git_blob) = match file.content.known_digest() {
            Some(KnownDigest::Sha256(hex)) => (Some(hex), None),
            Some(KnownDigest::GitBlob(hex)) => (None, Some(hex)),
            None => (None, None),
        };
        let meta = EntryMeta {
            object: object.to_owned(),
            size_bytes: file.size_bytes,
            sha256,
            git_blob,
            verified: false,
            dropped: 0,
        };
        let on_disk = self.objects().and_then(|objects| {
            let entry = self.on_disk(objects, &name, &meta).inspect_err(|error| {
                if !self.told.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "the disk cache has no place for {object}: {error}; what has none is read without it"
                    );
                }
            });
            entry.ok()
        });
        let entry = on_disk.map_or_else(|| self.in_memory_entry(&name, meta), Ok)?;
        let mut open = self.open.lock();
        // Another thread may have opened it meanwhile.
        if let Some(entry) = of_name(&open) {
            return Ok(entry);
        }
        let entry = Arc::new(entry);
        open.retain(|entry| entry.strong_count() > 0);
        open.push(Arc::downgrade(&entry));
        Ok(entry)
    }

    /// An entry that is there, for the commands that look at the cache.
    ///
    /// # Errors
    /// It cannot be opened, is malformed, or was removed meanwhile.
    pub fn existing(&self, dir: &Path) -> io::Result<Arc<Entry>> {
        let name = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        self.open_entry(dir, name, &EntryMeta::read(dir)?).map(Arc::new)
    }

    fn in_memory_entry(&self, name: &str, meta: EntryMeta) -> io::Result<Entry> {
        let file = |part: &str| {
            let name = std::ffi::CString::new(format!("ckfs-{part}"))?;
            Ok::<File, io::Error>(File::from(memfd_create(name.as_c_str(), MFdFlags::MFD_CLOEXEC)?))
        };
        let data = file(DATA)?;
        data.set_len(meta.size_bytes)?;
        let map = BlockMap::create(file(MAP)?, meta.size_bytes)?;
        Ok(Entry::new(name, None, data, map, meta, Arc::clone(&self.counters)))
    }

    fn on_disk(&self, objects: &Path, name: &str, meta: &EntryMeta) -> io::Result<Entry> {
        let dir = objects.join(name);
        for _ in 0..TRIES_MAX {
            match self.open_entry(&dir, name, meta) {
                Ok(entry) => {
                    entry.touch();
                    return Ok(entry);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => Self::create(objects, &dir, meta)?,
                // From another version, or damaged.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    if self.remove_unused(&dir)?.is_none() {
                        return Err(io::Error::other(format!("{}: damaged and in use", dir.display())));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other(format!("{}: made and removed again and again by other processes", dir.display())))
    }

    /// Opens an entry: [`io::ErrorKind::NotFound`] if it is not there or is being removed, [`io::ErrorKind::InvalidData`] if it is
    /// malformed.
    fn open_entry(&self, dir: &Path, name: &str, meta: &EntryMeta) -> io::Result<Entry> {
        let open = |part: &str| own::open_part(&dir.join(part));
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let malformed = || {
            let message = "map and data do not fit each other: `ckfs cache prune` removes it";
            io::Error::new(io::ErrorKind::InvalidData, message)
        };
        if !own::is_own_directory(dir)? {
            return Err(io::Error::other(format!("{}: not a directory of this user", dir.display())));
        }
        let is_lost = |error: &io::Error| error.kind() == io::ErrorKind::NotFound && dir.exists();
        let file = open(MAP).map_err(|error| if is_lost(&error) { malformed() } else { error })?;
        if !lock::try_lock(&file, LockKind::Shared, &lock::ENTRY)? {
            // It is being removed.
            std::thread::yield_now();
            return Err(missing());
        }
        // It may have been removed between the two calls.
        let own = file.metadata()?;
        let is_same = |found: fs::Metadata| (found.dev(), found.ino()) == (own.dev(), own.ino());
        if !fs::metadata(dir.join(MAP)).is_ok_and(is_same) {
            return Err(missing());
        }
        let data = open(DATA).map_err(|_| malformed())?;
        let whole = data.metadata()?.len() == meta.size_bytes;
        let map = BlockMap::open(file, meta.size_bytes)?.filter(|_| whole).ok_or_else(malformed)?;
        let meta = match EntryMeta::read(dir) {
            Ok(found) if found.size_bytes == meta.size_bytes => found,
            Ok(_) | Err(_) => {
                // Damaged: without it the commands that look at the cache cannot open the entry. A failure here harms only them.
                let _ = meta.write(dir);
                meta.clone()
            }
        };
        let counters = Arc::clone(&self.counters);
        Ok(Entry::new(name, Some(dir.to_owned()), data, map, meta, counters))
    }

    /// Makes an entry under another name and gives it its own at the end. If another process was faster, its entry stays.
    fn create(objects: &Path, dir: &Path, meta: &EntryMeta) -> io::Result<()> {
        let temporary = objects.join(format!("new.{}", unique()));
        let made = (|| {
            DirBuilder::new().mode(0o700).create(&temporary)?;
            let new = |part: &str| {
                File::options().create_new(true).read(true).write(true).mode(0o600).open(temporary.join(part))
            };
            new(DATA)?.set_len(meta.size_bytes)?;
            BlockMap::create(new(MAP)?, meta.size_bytes)?;
            meta.write(&temporary)?;
            fs::rename(&temporary, dir)
        })();
        match made {
            Ok(()) => Ok(()),
            Err(error) => {
                let _ = fs::remove_dir_all(&temporary);
                if dir.exists() { Ok(()) } else { Err(error) }
            }
        }
    }

    /// Notes the use of all open entries, and gives up locks that were not used for a while. To be called every few seconds.
    pub fn trim(&self, idle_ms: u64) {
        for space in self.disk.iter().chain([&self.memory]) {
            space.open_entries().iter().for_each(|entry| entry.release_idle(idle_ms));
            space.keep_bound();
        }
    }

    /// Notes that all open entries are in use, for the order of eviction.
    pub fn touch(&self) {
        // Without the lock: each notes it on a disk.
        let open: Vec<_> = self.open.lock().iter().filter_map(Weak::upgrade).collect();
        for entry in open {
            entry.touch();
        }
    }

    /// The directories of entries.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> io::Result<Vec<PathBuf>> {
        let Some(objects) = self.objects() else { return Ok(Vec::new()) };
        let mut dirs = super::space::entry_dirs(objects)?;
        dirs.retain(|dir| dir.extension().is_none());
        dirs.sort();
        Ok(dirs)
    }
}

/// When an entry was last in use, and its bytes of disk.
pub fn usage(dir: &Path) -> (std::time::SystemTime, u64) {
    (meta::last_use(dir), super::space::disk_bytes(dir))
}
