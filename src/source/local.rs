//! Local files: opened once, pinned, mapped where that is safe.
//!
//! A file is identified by device, inode, size, modification and status change time, all read from the open file, so that
//! `fstat` tells in 0.2 us whether it is still the same. The status change time makes this strict: also a new hard link
//! or changed permissions poison the file, because the kernel offers no other trace of an edit whose author set the
//! modification time back. Two edits are not seen: one within the same clock tick (some milliseconds, on kernels before
//! 6.13) as the file's pinning, and one through a writable mapping of a page that was dirty already.
//!
//! Each file has up to two mappings, made when first needed: one to lend to the kernel and one, guarded, to read from
//! (see [`super::guard`] for why they must differ). Mapped pages count as resident memory of this process although they
//! belong to the page cache; [`Window`] keeps that count small. Network file systems are read with `pread`, since their
//! mapped pages fail too easily.
#![allow(unsafe_code)]

use std::{
    fs::File,
    io,
    os::{
        fd::AsRawFd,
        unix::fs::{FileExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use memmap2::MmapRaw;
use nix::{
    fcntl::{PosixFadviseAdvice, posix_fadvise},
    sys::{
        resource::{Resource, getrlimit, setrlimit},
        stat::{FileStat, fstat, stat},
        statfs::fstatfs,
    },
    unistd::{SysconfVar, geteuid, sysconf},
};
use smallvec::SmallVec;

use super::{
    Aspect, ByteSpan, FileId, Found, Opened, Poison, Source, SourceError,
    beneath::Again,
    guard::{self, GuardedMap},
    permission::Gates,
    stall::{Fetches, Stall, Target, Waiting},
};

/// How local files are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SourceIo {
    /// Mapped, except on network file systems.
    #[default]
    Auto,
    /// Mapped.
    Mmap,
    /// With `pread`.
    Pread,
}

/// Bytes that are read in one call: each call that comes back is a sign that storage answers, if slowly.
const READ_BYTES_MAX: usize = 8 << 20;

/// The kernel takes no advice on more than its read-ahead at a time, which is seldom less than this.
const ADVISED_BYTES: usize = 128 << 10;
/// Whether the page cache has them is told by the first of so many bytes, and so many of those: pages come and go in runs, and to
/// look at each takes longer than some readers wait for all that is made of it.
const SAMPLED_BYTES: usize = 2 << 20;
const SAMPLE_BYTES: u64 = 128 << 10;

/// Number of the system call `cachestat`, the same on all architectures.
const CACHESTAT: libc::c_long = 451;

/// Whether the page cache has all of `start..end`; not, where the kernel (before 6.5) or the file system cannot tell. To try to
/// read without waiting would tell as well, but starts a read-ahead of its own.
fn is_cached(file: &File, start: u64, end: u64) -> bool {
    let range = [start, end - start];
    // Pages that are cached, then four other numbers of pages.
    let mut found = [0u64; 5];
    // SAFETY: the kernel reads two numbers and writes five.
    let told = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0) };
    let page_bytes = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|bytes| u64::try_from(bytes).ok());
    let page_bytes = page_bytes.unwrap_or(4096);
    told == 0 && found[0] >= end.div_ceil(page_bytes) - start / page_bytes
}

/// Starts reading `start..end` into the page cache. Advice may be refused; nothing depends on it.
fn need(file: &File, start: u64, end: u64) {
    for start in (start..end).step_by(ADVISED_BYTES) {
        let len = (ADVISED_BYTES as u64).min(end - start);
        let (Ok(start), Ok(len)) = (i64::try_from(start), i64::try_from(len)) else { return };
        let _ = posix_fadvise(file, start, len, PosixFadviseAdvice::POSIX_FADV_WILLNEED);
    }
}

/// File systems, by the magic number of `statfs`, on which a mapped page may fail for reasons other than truncation, or
/// whose files change without the kernel knowing.
const REMOTE_MAGIC: [i64; 12] = [
    0x6969,      // NFS
    0x6573_5546, // FUSE
    0x0BD0_0BD0, // Lustre
    0x517B,      // SMB
    0xFF53_4D42, // CIFS
    0xFE53_4D42, // SMB2
    0x0102_1997, // 9p
    0x00C3_6400, // Ceph
    0x4750_4653, // GPFS
    0x5346_414F, // AFS
    0x1983_0326, // BeeGFS
    0x6163_6673, // ACFS
];

/// Local files as a source.
#[derive(Debug)]
pub struct LocalFiles {
    files: Vec<Pinned>,
    window: Window,
    poisoned: AtomicU64,
    fetches: Arc<Fetches>,
    stalls: Mutex<Vec<(FileId, Stall)>>,
}

#[derive(Debug)]
struct Pinned {
    path: Arc<Path>,
    file: Arc<File>,
    identity: Identity,
    gates: Gates,
    again: Again,
    mapped: bool,
    /// `None` inside where mapping failed; the file is read with `pread` then.
    to_lend: OnceLock<Option<MmapRaw>>,
    to_read: OnceLock<Option<GuardedMap>>,
    /// Whether pages were touched since they were last dropped.
    touched: AtomicBool,
    poison: OnceLock<Poison>,
    /// Whether its storage does not answer.
    stalled: AtomicBool,
    /// Whether the kernel says of its mapped pages whether they are in memory; of others' files it does not.
    tells_resident: bool,
}

/// What makes a file the one that was pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size_bytes: u64,
    modified_ns: i128,
    status_changed_ns: i128,
}

impl Identity {
    fn of(stat: &FileStat) -> Self {
        let ns = |seconds: i64, ns: i64| i128::from(seconds) * 1_000_000_000 + i128::from(ns);
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size_bytes: u64::try_from(stat.st_size).expect("the kernel gives no negative size"),
            modified_ns: ns(stat.st_mtime, stat.st_mtime_nsec),
            status_changed_ns: ns(stat.st_ctime, stat.st_ctime_nsec),
        }
    }

    /// The first aspect in which `found` differs, with both values; the telling ones first.
    fn difference(&self, found: &Self) -> Option<(Aspect, i128, i128)> {
        [
            (Aspect::Device, i128::from(self.device), i128::from(found.device)),
            (Aspect::Inode, i128::from(self.inode), i128::from(found.inode)),
            (Aspect::Size, i128::from(self.size_bytes), i128::from(found.size_bytes)),
            (Aspect::Modified, self.modified_ns, found.modified_ns),
            (Aspect::StatusChanged, self.status_changed_ns, found.status_changed_ns),
        ]
        .into_iter()
        .find(|(_, expected, found)| expected != found)
    }

    fn modified(&self) -> SystemTime {
        let magnitude = u64::try_from(self.modified_ns.unsigned_abs()).unwrap_or(u64::MAX);
        let distance = Duration::from_nanos(magnitude);
        if self.modified_ns >= 0 { SystemTime::UNIX_EPOCH + distance } else { SystemTime::UNIX_EPOCH - distance }
    }
}

/// Bounds the mapped pages that stay resident.
///
/// Bytes touched through mappings are added up. When a window's worth has come together, and the process really holds more
/// mapped pages than a window, all touched mappings let go of theirs; those in use come back by a minor fault. So the
/// process holds at most two windows and what is being read. A small working set that is read again and again stays.
///
/// Transposed tiles visit a few bytes of very many pages, and the next tile visits the same pages: mapping them anew each
/// time costs several times the transposing itself. Hence the window is wider while such tiles are made.
#[derive(Debug)]
pub struct Window {
    narrow_bytes: AtomicU64,
    wide_bytes: AtomicU64,
    touched_bytes: AtomicU64,
    drops: AtomicU64,
    /// What [`Window::returning`] sets and [`Window::settle`] counts down: above 0 the window is wide.
    returning: AtomicU8,
}

impl Window {
    /// Usual size of the window, where nobody sets another.
    pub const BYTES: u64 = 160 << 20;

    /// Size of the window while pages are visited again and again, as a share of the machine's memory. Its pages are the page
    /// cache's, so that what this costs are page tables, a 512th of it.
    const WIDE_SHARE: u64 = 4;

    /// A page fault in a file maps the cached pages around it too, aligned: `fault_around_bytes`, by default this many.
    const FAULT_AROUND_BYTES: u64 = 64 << 10;

    /// The part of a wide window that may be mapped before anything is read: the rest is for what is not thought of.
    const AHEAD_SHARE: u64 = 2;

    /// A window of `narrow_bytes`, and `wide_bytes` while pages are visited again and again.
    pub fn new(narrow_bytes: u64, wide_bytes: u64) -> Self {
        Self {
            narrow_bytes: AtomicU64::new(narrow_bytes),
            wide_bytes: AtomicU64::new(wide_bytes.max(narrow_bytes)),
            touched_bytes: AtomicU64::new(0),
            drops: AtomicU64::new(0),
            returning: AtomicU8::new(0),
        }
    }

    fn size_bytes(&self) -> u64 {
        let wide = self.returning.load(Ordering::Relaxed) > 0;
        if wide { &self.wide_bytes } else { &self.narrow_bytes }.load(Ordering::Relaxed)
    }

    /// Whether so many bytes more may be mapped before they are read.
    fn has_room_ahead(&self, bytes: u64) -> bool {
        let most = self.wide_bytes.load(Ordering::Relaxed) / Self::AHEAD_SHARE;
        resident_shared_bytes().is_some_and(|resident| resident.saturating_add(bytes) <= most)
    }

    fn touch(&self, files: &[Pinned], file: &Pinned, span: ByteSpan) {
        let start = span.start() / Self::FAULT_AROUND_BYTES * Self::FAULT_AROUND_BYTES;
        let bytes = (span.end() - start).next_multiple_of(Self::FAULT_AROUND_BYTES);
        file.note_touched();
        let before = self.touched_bytes.fetch_add(bytes, Ordering::Relaxed);
        if before + bytes < self.size_bytes() {
            return;
        }
        // One thread takes the sum; the others see a small one and go on.
        let sum = self.touched_bytes.swap(0, Ordering::Relaxed);
        if sum >= self.size_bytes() {
            self.shrink(files);
        }
    }

    fn returning(&self) {
        // A store by every tile of every thread would move the cache line about.
        if self.returning.load(Ordering::Relaxed) < 2 {
            self.returning.store(2, Ordering::Relaxed);
        }
    }

    /// Makes the window narrow again once nobody has come back between two calls.
    fn settle(&self, files: &[Pinned]) {
        let left = self.returning.load(Ordering::Relaxed);
        if left > 0 {
            self.returning.store(left - 1, Ordering::Relaxed);
            if left == 1 {
                self.shrink(files);
            }
        }
    }

    /// Lets go of all touched mappings' pages, if there are more than a window of them.
    fn shrink(&self, files: &[Pinned]) {
        if resident_shared_bytes().is_none_or(|resident| resident > self.size_bytes()) {
            self.drops.fetch_add(1, Ordering::Relaxed);
            for file in files.iter().filter(|file| file.touched.swap(false, Ordering::Relaxed)) {
                file.drop_resident();
            }
        }
    }
}

/// Mapped file pages of this process that are resident, from `/proc/self/statm` (third number, in pages).
fn resident_shared_bytes() -> Option<u64> {
    static STATM: OnceLock<Option<File>> = OnceLock::new();
    let file = STATM.get_or_init(|| File::open("/proc/self/statm").ok()).as_ref()?;
    let mut buffer = [0; 128];
    let len = file.read_at(&mut buffer, 0).ok()?;
    let text = std::str::from_utf8(&buffer[..len]).ok()?;
    text.split_ascii_whitespace().nth(2)?.parse::<u64>().ok()?.checked_mul(guard::page_bytes() as u64)
}

impl LocalFiles {
    /// Opens and pins files, wherever their paths lead; their ids are their places in `paths`.
    ///
    /// # Errors
    /// The first file that cannot be opened or is not a regular file.
    ///
    /// # Panics
    /// If there are more than `u32::MAX` paths.
    pub fn open(paths: &[PathBuf], io: SourceIo) -> Result<Self, SourceError> {
        Self::open_with_window(paths, io, Self::default_window())
    }

    /// As [`LocalFiles::open`], with another bound on resident mapped memory.
    ///
    /// # Errors
    /// As [`LocalFiles::open`].
    ///
    /// # Panics
    /// As [`LocalFiles::open`].
    pub fn open_with_window(paths: &[PathBuf], io: SourceIo, window: Window) -> Result<Self, SourceError> {
        check_open_file_limit(paths.len())?;
        let open = |path: &PathBuf| {
            let failed = |error| SourceError::Io {
                file: Arc::from(path.as_path()),
                action: "open".into(),
                error: Arc::new(error),
            };
            Found::named(path).map_err(failed)?.open(None)
        };
        let files = paths.iter().map(open).collect::<Result<_, _>>()?;
        Self::pin_with_window(files, io, window, Arc::default())
    }

    /// Pins files that are open; their ids are their places in `files`. `fetches` notes what is waited for from now on.
    ///
    /// # Errors
    /// The first file whose attributes cannot be had.
    ///
    /// # Panics
    /// If there are more than `u32::MAX` files.
    pub fn pin(files: Vec<Opened>, io: SourceIo, fetches: Arc<Fetches>) -> Result<Self, SourceError> {
        Self::pin_with_window(files, io, Self::default_window(), fetches)
    }

    fn pin_with_window(
        files: Vec<Opened>,
        io: SourceIo,
        window: Window,
        fetches: Arc<Fetches>,
    ) -> Result<Self, SourceError> {
        assert!(u32::try_from(files.len()).is_ok(), "{} files", files.len());
        let pin = |file: Opened| {
            let _pinning = fetches.begin_path(&file.path, "stat");
            Pinned::new(file, io)
        };
        let files: Vec<Pinned> = files.into_iter().map(pin).collect::<Result<_, _>>()?;
        fetches.name_files(files.iter().map(|file| file.path.clone()));
        Ok(Self { files, window, poisoned: AtomicU64::new(0), fetches, stalls: Mutex::default() })
    }

    fn default_window() -> Window {
        let wide_bytes = physical_memory_bytes().unwrap_or(0) / Window::WIDE_SHARE;
        Window::new(Window::BYTES, wide_bytes)
    }

    /// Whether a file is read through a mapping rather than with `pread`.
    pub fn is_mapped(&self, file: FileId) -> bool {
        self.pinned(file).mapped
    }

    /// How often resident mapped pages were let go.
    pub fn window_drops(&self) -> u64 {
        self.window.drops.load(Ordering::Relaxed)
    }

    fn pinned(&self, file: FileId) -> &Pinned {
        &self.files[file.index()]
    }

    /// Marks the file as lost for good. The first error counts and is logged; it is what everyone gets.
    fn poison(&self, pinned: &Pinned, error: SourceError) -> SourceError {
        let mut first = false;
        let kept = pinned.poison.get_or_init(|| {
            first = true;
            Poison { error, since: SystemTime::now() }
        });
        if first {
            self.poisoned.fetch_add(1, Ordering::Relaxed);
            tracing::error!("{}; every read that needs this file fails from now on", kept.error);
        }
        kept.error.clone()
    }

    /// The poison of a file that misbehaved: what `fstat` has to say about it, or else `otherwise`.
    fn blame(&self, pinned: &Pinned, otherwise: SourceError) -> SourceError {
        match pinned.changed() {
            Ok(Some(changed)) => self.poison(pinned, changed),
            Ok(None) | Err(_) => self.poison(pinned, otherwise),
        }
    }

    /// Whether the file is still what was pinned, while the wait for the answer is noted.
    fn compare_open(&self, pinned: &Pinned) -> Result<(), SourceError> {
        self.compare(pinned, fstat(&pinned.file))
    }

    /// The file, unless it is poisoned or stalls.
    fn usable(&self, file: FileId) -> Result<&Pinned, SourceError> {
        let pinned = self.pinned(file);
        pinned.healthy()?;
        if pinned.stalled.load(Ordering::Relaxed) { Err(self.stalled(file)) } else { Ok(pinned) }
    }

    fn stalled(&self, file: FileId) -> SourceError {
        let stalls = self.stalls.lock().unwrap_or_else(PoisonError::into_inner);
        let what = stalls.iter().find(|(id, _)| *id == file).map(|(_, stall)| stall.what.clone());
        SourceError::Stalled {
            file: self.pinned(file).path.clone(),
            what: what.unwrap_or_else(|| "read".to_owned()),
            limit: self.fetches.limit(),
        }
    }

    fn compare(&self, pinned: &Pinned, found: nix::Result<FileStat>) -> Result<(), SourceError> {
        match pinned.difference(found)? {
            None => Ok(()),
            Some(changed) => Err(self.poison(pinned, changed)),
        }
    }

    /// Mapped bytes of a span that are in memory: who hands them to the kernel does not wait for storage, but in the rare case
    /// that they leave memory at once.
    fn lend_noted(&self, file: FileId, span: ByteSpan) -> Option<&[u8]> {
        let pinned = self.usable(file).ok()?;
        pinned.bounded(span).ok()?;
        if span.is_empty() {
            return Some(&[]);
        }
        let map = pinned.to_lend()?;
        let start = usize::try_from(span.start()).ok()?;
        self.window.touch(&self.files, pinned, span);
        let len = super::memory_len(span);
        if !(pinned.tells_resident && is_resident(map, start, start + len)) {
            fill(map, start, start + len).ok()?;
        }
        // SAFETY: the span lies in the mapping, which is as long as the pinned file and lives as long as `self`. The trait's
        // contract is that the slice is only passed to system calls, so that neither a missing page nor a change by
        // another process is ever met by a load of this process.
        Some(unsafe { std::slice::from_raw_parts(map.as_ptr().add(start), len) })
    }
}

impl Pinned {
    fn new(opened: Opened, io: SourceIo) -> Result<Self, SourceError> {
        let Opened { path, file, gates, again } = opened;
        let failed = |error| SourceError::Io { file: path.clone(), action: "stat".into(), error: Arc::new(error) };
        let identity = Identity::of(&fstat(&file).map_err(|errno| failed(errno.into()))?);
        let mapped = match io {
            SourceIo::Mmap => true,
            SourceIo::Pread => false,
            SourceIo::Auto => fstatfs(&file).is_ok_and(|fs| !REMOTE_MAGIC.contains(&fs.filesystem_type().0)),
        };
        let user = geteuid();
        let tells_resident = user.is_root() || file.metadata().is_ok_and(|found| found.uid() == user.as_raw());
        Ok(Self {
            path,
            file: Arc::new(file),
            identity,
            gates,
            again,
            stalled: AtomicBool::new(false),
            tells_resident,
            mapped,
            to_lend: OnceLock::new(),
            to_read: OnceLock::new(),
            touched: AtomicBool::new(false),
            poison: OnceLock::new(),
        })
    }

    fn difference(&self, found: nix::Result<FileStat>) -> Result<Option<SourceError>, SourceError> {
        let stat = found.map_err(|errno| self.io("stat", errno.into()))?;
        let difference = self.identity.difference(&Identity::of(&stat));
        Ok(difference.map(|(aspect, expected, found)| SourceError::Changed {
            file: self.path.clone(),
            aspect,
            expected,
            found,
        }))
    }

    fn changed(&self) -> Result<Option<SourceError>, SourceError> {
        self.difference(fstat(&self.file))
    }

    fn io(&self, action: impl Into<String>, error: io::Error) -> SourceError {
        SourceError::Io { file: self.path.clone(), action: action.into(), error: Arc::new(error) }
    }

    fn healthy(&self) -> Result<(), SourceError> {
        self.poison.get().map_or(Ok(()), |poison| Err(poison.error.clone()))
    }

    /// The span, if it is inside the file.
    fn bounded(&self, span: ByteSpan) -> Result<ByteSpan, SourceError> {
        if span.end() <= self.identity.size_bytes {
            Ok(span)
        } else {
            Err(SourceError::OutOfBounds { file: self.path.clone(), span, len_bytes: self.identity.size_bytes })
        }
    }

    /// Length to map, or `None` if there is nothing to map.
    fn map_len(&self) -> Option<usize> {
        usize::try_from(self.identity.size_bytes).ok().filter(|len| self.mapped && *len > 0)
    }

    fn to_lend(&self) -> Option<&MmapRaw> {
        let map = self.to_lend.get_or_init(|| {
            let made = memmap2::MmapOptions::new().len(self.map_len()?).map_raw_read_only(&*self.file);
            made.inspect_err(|error| self.not_mapped(error)).ok()
        });
        map.as_ref()
    }

    fn to_read(&self) -> Option<&GuardedMap> {
        let map = self.to_read.get_or_init(|| {
            GuardedMap::new(&self.file, self.map_len()?).inspect_err(|error| self.not_mapped(error)).ok()
        });
        map.as_ref()
    }

    fn not_mapped(&self, error: &io::Error) {
        tracing::warn!("{}: cannot be mapped, will be read instead: {error}", self.path.display());
    }

    fn note_touched(&self) {
        // A store by every reader would move the cache line about.
        if !self.touched.load(Ordering::Relaxed) {
            self.touched.store(true, Ordering::Relaxed);
        }
    }

    fn drop_resident(&self) {
        if let Some(map) = self.to_lend.get().and_then(Option::as_ref) {
            guard::drop_resident(map.as_ptr(), map.len());
        }
        if let Some(map) = self.to_read.get().and_then(Option::as_ref) {
            map.drop_resident();
        }
    }
}

impl Source for LocalFiles {
    fn file_count(&self) -> usize {
        self.files.len()
    }

    fn len_bytes(&self, file: FileId) -> u64 {
        self.pinned(file).identity.size_bytes
    }

    fn path(&self, file: FileId) -> &Path {
        &self.pinned(file).path
    }

    fn modified(&self, file: FileId) -> SystemTime {
        self.pinned(file).identity.modified()
    }

    fn gates(&self, file: FileId) -> Gates {
        self.pinned(file).gates.clone()
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        let pinned = self.usable(file)?;
        let _checking = self.fetches.begin(Target::Check(file));
        self.compare_open(pinned)
    }

    fn check_path(&self, file: FileId) -> Result<(), SourceError> {
        let pinned = self.usable(file)?;
        let _checking = self.fetches.begin(Target::Check(file));
        self.compare_open(pinned)?;
        let found = match &pinned.again {
            Again::Named => stat(&*pinned.path),
            // Not by the path as a whole: a link that was put there since may lead anywhere, also into our own mount.
            Again::Beneath(root, below) => root.find_again(below),
        };
        self.compare(pinned, found)
    }

    fn read_into(&self, file: FileId, start: u64, target: &mut [u8]) -> Result<(), SourceError> {
        let pinned = self.usable(file)?;
        let span = ByteSpan::of_len(start, target.len() as u64).unwrap_or(ByteSpan { start, end: u64::MAX });
        let mut at = pinned.bounded(span)?.start();
        let fetching = self.fetches.begin(Target::Bytes(file, span));
        let mut rest = target;
        while !rest.is_empty() {
            let len = rest.len().min(READ_BYTES_MAX);
            match pinned.file.read_at(&mut rest[..len], at) {
                Ok(0) => {
                    let found = at - start;
                    return Err(self.blame(pinned, SourceError::Short { file: pinned.path.clone(), span, found }));
                }
                Ok(got) => {
                    rest = &mut rest[got..];
                    at += got as u64;
                    if !rest.is_empty() {
                        fetching.advance();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(pinned.io(format!("read bytes {span}"), error)),
            }
        }
        Ok(())
    }

    fn lend(&self, file: FileId, span: ByteSpan) -> Option<&[u8]> {
        let _fetching = self.fetches.begin(Target::Bytes(file, span));
        self.lend_noted(file, span)
    }

    fn lend_to(&self, file: FileId, span: ByteSpan, reply: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>> {
        let pinned = match self.usable(file) {
            Ok(pinned) => pinned,
            Err(error) => return Some(Err(error)),
        };
        if !pinned.mapped {
            return None;
        }
        let fetching = self.fetches.begin(Target::Bytes(file, span));
        if let Err(error) = self.compare_open(pinned) {
            return Some(Err(error));
        }
        let bytes = self.lend_noted(file, span)?;
        // How long others take for them says nothing about this file.
        drop(fetching);
        reply(bytes);
        let _checking = self.fetches.begin(Target::Check(file));
        Some(self.compare_open(pinned))
    }

    fn with_map(&self, file: FileId, span: ByteSpan, work: &mut dyn FnMut(&[u8])) -> Option<Result<(), SourceError>> {
        let pinned = self.pinned(file);
        if !pinned.mapped {
            return None;
        }
        if let Err(error) = self.usable(file).and_then(|pinned| pinned.bounded(span)) {
            return Some(Err(error));
        }
        if span.is_empty() {
            work(&[]);
            return Some(Ok(()));
        }
        let _fetching = self.fetches.begin(Target::Bytes(file, span));
        let map = pinned.to_read()?;
        let start = usize::try_from(span.start()).ok()?;
        self.window.touch(&self.files, pinned, span);
        let done = map.with(start, start + super::memory_len(span), work);
        Some(done.map_err(|_| self.blame(pinned, SourceError::Fault { file: pinned.path.clone(), span })))
    }

    fn will_need(&self, file: FileId, span: ByteSpan) {
        let Ok(pinned) = self.usable(file) else { return };
        let _fetching = self.fetches.begin(Target::Bytes(file, span));
        let file = &pinned.file;
        let end = span.start() + span.len();
        for start in (span.start()..end).step_by(SAMPLED_BYTES) {
            let end = end.min(start + SAMPLED_BYTES as u64);
            if !is_cached(file, start, end.min(start + SAMPLE_BYTES)) {
                need(file, start, end);
            }
        }
    }

    fn will_return(&self) {
        self.window.returning();
    }

    fn map_ahead(&self, file: FileId, span: ByteSpan) -> bool {
        let pinned = self.pinned(file);
        let Ok(span) = self.usable(file).and_then(|pinned| pinned.bounded(span)) else { return true };
        let _fetching = self.fetches.begin(Target::Bytes(file, span));
        let Some(map) = pinned.to_read().filter(|_| pinned.mapped) else { return true };
        if !self.window.has_room_ahead(span.len()) {
            return false;
        }
        self.window.returning();
        pinned.note_touched();
        let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        let mut start = span.start();
        while start < span.end() {
            let end = (start + 1).next_multiple_of(SAMPLED_BYTES as u64).min(span.end());
            // What is not cached would be read, which may be in vain and in the way of others. A failure says that the system
            // cannot do it, or that a page is gone, which who reads it will be told.
            if is_cached(&pinned.file, start, end) && map.populate(place(start), place(end)).is_err() {
                return false;
            }
            start = end;
        }
        true
    }

    fn settle(&self) {
        self.window.settle(&self.files);
    }

    fn backing(&self, file: FileId) -> Option<Arc<File>> {
        self.usable(file).ok().map(|pinned| pinned.file.clone())
    }

    fn poisoned(&self) -> u64 {
        self.poisoned.load(Ordering::Relaxed)
    }

    fn poison(&self, file: FileId) -> Option<Poison> {
        self.pinned(file).poison.get().cloned()
    }

    fn bound_mapped(&self, usual_bytes: u64, again_bytes: u64) {
        self.window.narrow_bytes.store(usual_bytes, Ordering::Relaxed);
        self.window.wide_bytes.store(again_bytes.max(usual_bytes), Ordering::Relaxed);
    }

    fn stall_limit(&self) -> Duration {
        self.fetches.limit()
    }

    fn note_stalls(&self) -> Vec<Waiting> {
        let mut found: Vec<(FileId, Stall)> = Vec::new();
        let waiting = self.fetches.waiting(Duration::ZERO);
        for Waiting { target, since, quiet, .. } in &waiting {
            if *quiet < self.fetches.limit() {
                continue;
            }
            let Some(id) = target.file().filter(|id| found.iter().all(|(known, _)| known != id)) else { continue };
            let file = self.pinned(id).path.clone();
            found.push((id, Stall { file, what: target.to_string(), since: *since }));
        }
        let mut known = self.stalls.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, stall) in &found {
            if !self.pinned(*id).stalled.swap(true, Ordering::Relaxed) {
                let (file, seconds) = (stall.file.display(), stall.since.elapsed().as_secs_f32());
                tracing::error!(
                    "{file}: stalled: {} got no answer for {seconds:.1} s; reads fail until it comes",
                    stall.what
                );
            }
        }
        for (id, stall) in known.iter().filter(|(id, _)| found.iter().all(|(still, _)| still != id)) {
            self.pinned(*id).stalled.store(false, Ordering::Relaxed);
            let seconds = stall.since.elapsed().as_secs_f32();
            tracing::warn!("{}: answers again after {seconds:.1} s", stall.file.display());
        }
        *known = found;
        waiting
    }

    fn stalls(&self) -> Vec<Stall> {
        let stalls = self.stalls.lock().unwrap_or_else(PoisonError::into_inner);
        stalls.iter().map(|(_, stall)| stall.clone()).collect()
    }

    fn is_stalled(&self, file: FileId) -> bool {
        self.pinned(file).stalled.load(Ordering::Relaxed)
    }

    fn waiting(&self, least: Duration) -> Vec<Waiting> {
        self.fetches.waiting(least)
    }
}

/// Whether all mapped pages of `start..end` are in memory and filled, by what the kernel says of them.
fn is_resident(map: &MmapRaw, start: usize, end: usize) -> bool {
    let page_bytes = guard::page_bytes();
    let first = start / page_bytes * page_bytes;
    let mut pages: SmallVec<[u8; 260]> = SmallVec::from_elem(0, (end - first).div_ceil(page_bytes));
    // SAFETY: the pages lie in the mapping, which begins at a page, and the kernel writes one byte for each of them.
    let told = unsafe { libc::mincore(map.as_ptr().add(first).cast_mut().cast(), end - first, pages.as_mut_ptr()) };
    told == 0 && pages.iter().all(|page| page & 1 == 1)
}

/// Reads mapped pages into memory where they are not. Where the kernel cannot (before Linux 5.14), the first access does.
///
/// # Errors
/// A page is gone, or storage failed.
fn fill(map: &MmapRaw, start: usize, end: usize) -> io::Result<()> {
    let first = start / guard::page_bytes() * guard::page_bytes();
    // SAFETY: the pages lie in the mapping, which begins at a page. The kernel reads them as a load would, but returns an error
    // where that would be a signal.
    let done =
        unsafe { libc::madvise(map.as_ptr().add(first).cast_mut().cast(), end - first, libc::MADV_POPULATE_READ) };
    let error = io::Error::last_os_error();
    if done == 0 || error.raw_os_error() == Some(libc::EINVAL) { Ok(()) } else { Err(error) }
}

/// Memory of the machine.
fn physical_memory_bytes() -> Option<u64> {
    let (pages, page_bytes) = (sysconf(SysconfVar::_PHYS_PAGES).ok()??, sysconf(SysconfVar::PAGE_SIZE).ok()??);
    u64::try_from(pages).ok()?.checked_mul(u64::try_from(page_bytes).ok()?)
}

/// Descriptors that a mount needs besides those of its source files, with some to spare.
const OTHER_DESCRIPTORS: u64 = 48;

/// Every source file stays open, and a repository may have hundreds: lifts the soft limit to the hard one. What the limit is then.
pub(super) fn raise_open_file_limit() -> Option<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    if soft >= hard {
        return Some(soft);
    }
    match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => Some(hard),
        Err(errno) => {
            tracing::debug!("cannot raise the limit of open files from {soft} to {hard}: {errno}");
            Some(soft)
        }
    }
}

/// Refuses more source files than may be open at once. To be called before they are opened.
///
/// # Errors
/// [`SourceError::FileLimit`].
pub fn check_open_file_limit(files: usize) -> Result<(), SourceError> {
    let Some(limit) = raise_open_file_limit() else { return Ok(()) };
    let needed = files as u64 + OTHER_DESCRIPTORS;
    if limit < needed { Err(SourceError::FileLimit { files, needed, limit }) } else { Ok(()) }
}
