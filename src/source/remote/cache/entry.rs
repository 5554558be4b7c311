//! One object in the cache: a sparse file of its bytes, and the map of the blocks that are present.
//!
//! Nobody may take a hole for data. A reader takes a guard of every segment that it touches, and only then asks which blocks are
//! present. While a guard exists no thread of this process evicts the segment, and no other process does, since this one holds
//! the segment's lock. Eviction takes that lock alone, marks the blocks as absent, and only then punches the hole.
//!
//! Two processes that use the same segments would keep each other from eviction forever. So the one that needs room gives up its
//! lock of some old segments and leaves them alone for a moment: for its readers they are as good as evicted. The other process
//! finds them free when it needs room itself.
//!
//! A block counts as verified after this process has written it or has compared its checksum. The mark goes when the lock does.

use std::{
    fs::File,
    io,
    ops::Range,
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use parking_lot::{Mutex, RwLockReadGuard};
use rustix::{
    fs::{FallocateFlags, SeekFrom, fallocate, seek},
    io::Errno,
};
use smallvec::SmallVec;

use super::{
    super::{super::ByteSpan, counters::RemoteCounters},
    block_map::BlockMap,
    geometry::{
        BLOCK_BYTES, HOLE_BYTES, SEGMENT_BLOCKS, SEGMENT_BYTES, block_count, blocks_of_segment, place, segments_of,
        span_of, steps,
    },
    lock::{self, LockKind},
    meta::{self, EntryMeta},
    segment::{CachedSegment, SegmentMap},
};

/// Words of the map that are read or written at a time.
const MAP_STEP_BLOCKS: u64 = 1 << 17;
/// Bytes read at a time to compare checksums.
const VERIFIED_BYTES: u64 = 1 << 20;
/// Blocks that are read at a time where all bytes are wanted.
const STEP_BLOCKS: u64 = 64;
/// A segment that was given up is left alone for this time: twice the pause after which a process tries again to find room.
const GIVEN_UP_MS: u64 = 500;

/// Guards of segments, each with its place: their blocks stay.
pub type Guards<'a> = SmallVec<[(usize, RwLockReadGuard<'a, ()>); 2]>;

/// The result of an attempt to evict a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Eviction {
    /// It was evicted, which freed this many bytes of disk.
    Freed(u64),
    /// Another process uses it. This process has stopped using it. The number is how many bytes of it this process had verified.
    GivenUp(u64),
    /// It is in use.
    Stays,
}

/// An object in the cache, open in this process.
#[derive(Debug)]
pub struct Entry {
    /// Its name in the cache.
    pub name: String,
    /// `None` of an entry in memory.
    dir: Option<PathBuf>,
    /// The sparse file.
    pub data: File,
    map: BlockMap,
    /// Length of the object.
    pub size_bytes: u64,
    segments: SegmentMap,
    verified_blocks: AtomicU64,
    /// The kernel reads the file directly: its blocks stay while this process lives.
    kept: AtomicBool,
    meta: Mutex<EntryMeta>,
    /// Whether `meta` may be older than the file: blocks were given up, and other processes may have brought others.
    meta_is_old: AtomicBool,
    /// The number of drops that this process knows of; see [`EntryMeta::dropped`].
    drops_known: AtomicU64,
    counters: Arc<RemoteCounters>,
    /// The kind of the last failure of its files, which was told.
    failure: Mutex<Option<(io::ErrorKind, Option<i32>)>>,
}

/// Milliseconds since shortly before the first call in this process: never 0, which means no use.
fn now_ms() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_millis()).map_or(u64::MAX, |ms| ms + 1)
}

/// Adds blocks to ranges in order, of which they are the next.
fn add_absent(absent: &mut Vec<Range<u64>>, blocks: Range<u64>) {
    match absent.last_mut() {
        _ if blocks.is_empty() => {}
        Some(last) if last.end == blocks.start => last.end = blocks.end,
        Some(_) | None => absent.push(blocks),
    }
}

impl Entry {
    /// An entry whose files are open; this process holds its shared lock.
    pub(super) fn new(
        name: &str,
        dir: Option<PathBuf>,
        data: File,
        map: BlockMap,
        meta: EntryMeta,
        counters: Arc<RemoteCounters>,
    ) -> Self {
        let size_bytes = meta.size_bytes;
        let drops_known = AtomicU64::new(meta.dropped);
        let segments = SegmentMap::new(segments_of(&(0..block_count(size_bytes))).len());
        Self {
            name: name.to_owned(),
            dir,
            data,
            map,
            size_bytes,
            segments,
            verified_blocks: AtomicU64::new(0),
            kept: AtomicBool::new(false),
            meta: Mutex::new(meta),
            meta_is_old: AtomicBool::new(false),
            drops_known,
            counters,
            failure: Mutex::new(None),
        }
    }

    /// Tells that its files fail, so that its object is read without them: once for each kind of failure that follows another.
    pub(in super::super) fn note_failure(&self, error: &io::Error) {
        let kind = (error.kind(), error.raw_os_error());
        if self.failure.lock().replace(kind) != Some(kind) {
            tracing::warn!("cache {}: {error}; read without the cache", self.name);
        }
    }

    /// Its directory, unless it is in memory.
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// Number of its blocks.
    pub fn block_count(&self) -> u64 {
        block_count(self.size_bytes)
    }

    /// What it says about itself.
    pub fn meta(&self) -> EntryMeta {
        self.meta.lock().clone()
    }

    fn blocks(&self) -> Range<u64> {
        0..block_count(self.size_bytes)
    }

    /// Keeps the segments of these blocks from eviction while the guards exist.
    ///
    /// # Errors
    /// The file system refuses a lock. [`io::ErrorKind::WouldBlock`]: a segment is left to other processes for a moment, since
    /// there is no room for all.
    pub fn guard(&self, blocks: &Range<u64>) -> io::Result<Guards<'_>> {
        let mut guards = Guards::new();
        self.guard_more(blocks, &mut guards)?;
        Ok(guards)
    }

    /// As [`Self::guard`], for several ranges: adds those that `guards` lacks.
    pub(in super::super) fn guard_more<'a>(&'a self, blocks: &Range<u64>, guards: &mut Guards<'a>) -> io::Result<()> {
        let now = now_ms();
        for place in segments_of(blocks) {
            if guards.iter().any(|(taken, _)| *taken == place) {
                continue;
            }
            let segment = self.segments.at(place);
            let hold = || {
                if segment.is_given_up(now) {
                    return Err(io::Error::from(io::ErrorKind::WouldBlock));
                }
                lock::lock(self.map.file(), LockKind::Shared, &lock::segment(place))
            };
            guards.push((place, segment.guard(hold)?));
            segment.touch(now);
        }
        Ok(())
    }

    /// The segments of blocks, each with the part of them in that segment, counted within it.
    fn parts_of(blocks: &Range<u64>) -> impl Iterator<Item = (usize, Range<u64>)> {
        let blocks = blocks.clone();
        segments_of(&blocks).map(move |place| {
            let first = place as u64 * SEGMENT_BLOCKS;
            let start = blocks.start.max(first) - first;
            let end = blocks.end.min(first + SEGMENT_BLOCKS) - first;
            (place, start..end)
        })
    }

    /// Whether this process has verified all of these blocks. Counts only under their guard.
    pub(crate) fn is_verified(&self, blocks: &Range<u64>) -> bool {
        Self::parts_of(blocks)
            .all(|(place, part)| self.segments.used(place).is_some_and(|segment| segment.verified.has_all(part)))
    }

    /// Whether this process has verified the whole object.
    pub fn is_whole(&self) -> bool {
        self.verified_blocks.load(Ordering::Acquire) == block_count(self.size_bytes)
    }

    fn set_verified(&self, blocks: &Range<u64>, ahead: bool) {
        let mut new = 0;
        for (place, part) in Self::parts_of(blocks) {
            let segment = self.segments.at(place);
            if ahead {
                segment.ahead.set(part.clone());
            }
            new += segment.verified.set(part);
        }
        self.verified_blocks.fetch_add(new, Ordering::AcqRel);
    }

    /// The sum of what `change` finds in the segments of blocks that were ever used, each with its part.
    fn sum_of(&self, blocks: &Range<u64>, change: impl Fn(&CachedSegment, Range<u64>) -> u64) -> u64 {
        Self::parts_of(blocks).filter_map(|(place, part)| Some(change(self.segments.used(place)?, part))).sum()
    }

    /// Counts blocks that a reader finds verified and that were fetched ahead of readers.
    pub fn note_read(&self, blocks: &Range<u64>) {
        let fetched_ahead = self.sum_of(blocks, |segment, part| segment.ahead.clear(part));
        if fetched_ahead > 0 {
            RemoteCounters::add(&self.counters.prefetch_hit_bytes, fetched_ahead * BLOCK_BYTES);
        }
    }

    /// Compares the checksums of the present blocks among these, and returns the others, in order. The caller holds their guard.
    ///
    /// # Errors
    /// The map or the file cannot be read.
    pub fn missing(&self, blocks: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let (mut missing, mut buffer) = (Vec::new(), Vec::new());
        for part in steps(blocks.clone(), VERIFIED_BYTES / BLOCK_BYTES) {
            if self.is_verified(&part) {
                continue;
            }
            let words = self.map.read(&part)?;
            if words.iter().any(Option::is_some) {
                let span = span_of(&part, self.size_bytes);
                buffer.resize(place(span.len()), 0);
                self.data.read_exact_at(&mut buffer, span.start())?;
            }
            for (block, word) in part.clone().zip(words) {
                let own = block..block + 1;
                if self.is_verified(&own) {
                    continue;
                }
                let Some(expected) = word else {
                    add_absent(&mut missing, own);
                    continue;
                };
                let bytes = &buffer[place((block - part.start) * BLOCK_BYTES)..];
                let bytes = &bytes[..place(span_of(&own, self.size_bytes).len())];
                if crc32c::crc32c(bytes) == expected {
                    self.set_verified(&own, false);
                    RemoteCounters::add(&self.counters.hit_bytes, bytes.len() as u64);
                } else {
                    // A crash of the system may leave such a block, or damage of the disk.
                    RemoteCounters::add(&self.counters.bad_blocks, 1);
                    tracing::warn!("cache {}: block {block} has a wrong checksum and is fetched again", self.name);
                    self.map.clear(&own)?;
                    add_absent(&mut missing, own);
                }
            }
        }
        Ok(missing)
    }

    /// The blocks that no process has written, in order. Their bytes are not read. Cheap, for decisions about what to fetch.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn absent(&self, blocks: &Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let mut absent: Vec<Range<u64>> = Vec::new();
        if self.is_verified(blocks) {
            return Ok(absent);
        }
        let mut start = blocks.start;
        while start < blocks.end {
            // What was never written is not read: a service may claim any length.
            let written = self.map.written(start)?.unwrap_or(blocks.end..blocks.end);
            let (first, end) = (written.start.min(blocks.end), written.end.min(blocks.end));
            add_absent(&mut absent, start..first);
            for part in steps(first..end, MAP_STEP_BLOCKS) {
                for (block, word) in part.clone().zip(self.map.read(&part)?) {
                    if word.is_none() {
                        add_absent(&mut absent, block..block + 1);
                    }
                }
            }
            start = end.max(first);
        }
        Ok(absent)
    }

    /// As [`Self::absent`], for ranges in order without overlaps. Where nothing was ever written, the map is not read: a plan asks
    /// about very many ranges of objects of which almost nothing is here.
    ///
    /// # Errors
    /// The map cannot be read.
    pub(crate) fn absent_of(&self, ranges: &[Range<u64>]) -> io::Result<Vec<Range<u64>>> {
        let mut absent = Vec::new();
        // The first blocks from the last place on that may be present.
        let mut written = Some(0..0);
        for blocks in ranges {
            while let Some(known) = &written
                && known.end <= blocks.start
            {
                written = self.map.written(blocks.start)?;
            }
            match &written {
                Some(known) if known.start < blocks.end => absent.extend(self.absent(blocks)?),
                Some(_) | None => absent.push(blocks.clone()),
            }
        }
        Ok(absent)
    }

    /// Bytes of the present blocks of a span, counted by whole blocks but not beyond the end of the object.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn present_bytes(&self) -> io::Result<u64> {
        let absent = self.absent(&self.blocks())?;
        let absent: u64 = absent.iter().map(|blocks| span_of(blocks, self.size_bytes).len()).sum();
        Ok(self.size_bytes - absent)
    }

    /// Passes all bytes on, in order, with their checksums compared. Returns false at a block that is not present.
    ///
    /// # Errors
    /// The files cannot be read, or `work` fails.
    pub(in super::super) fn for_each_part(&self, mut work: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<bool> {
        let mut buffer = vec![0; place(STEP_BLOCKS * BLOCK_BYTES)];
        for blocks in steps(self.blocks(), STEP_BLOCKS) {
            let _guards = self.guard(&blocks)?;
            if !self.missing(&blocks)?.is_empty() {
                return Ok(false);
            }
            let span = self.span_of(&blocks);
            let bytes = &mut buffer[..place(span.len())];
            self.data.read_exact_at(bytes, span.start())?;
            work(bytes)?;
        }
        Ok(true)
    }

    /// Writes blocks from `first` on and marks them as present. `bytes` are whole blocks, except for the last of the object.
    /// `ahead` tells that no reader has requested them yet.
    ///
    /// # Errors
    /// The disk is full or fails. The blocks are then absent, or present with these bytes.
    ///
    /// # Panics
    /// If `bytes` are not whole blocks.
    pub fn store(&self, first: u64, bytes: &[u8], ahead: bool) -> io::Result<()> {
        let blocks = first..first + (bytes.len() as u64).div_ceil(BLOCK_BYTES);
        assert_eq!(span_of(&blocks, self.size_bytes).len(), bytes.len() as u64, "whole blocks are stored");
        let _guards = self.guard(&blocks)?;
        // Before the bytes: no process may take an entry with these for one that was compared.
        self.note_unverified()?;
        self.data.write_all_at(bytes, first * BLOCK_BYTES)?;
        let checksums: Vec<u32> = bytes.chunks(place(BLOCK_BYTES)).map(crc32c::crc32c).collect();
        self.map.mark(first, &checksums)?;
        self.set_verified(&blocks, ahead);
        Ok(())
    }

    /// Takes or drops the right of this process to fetch blocks. Returns whether it has it.
    ///
    /// # Errors
    /// The file system refuses locks.
    pub fn claim(&self, blocks: &Range<u64>, claimed: bool) -> io::Result<bool> {
        let kind = if claimed { LockKind::Exclusive } else { LockKind::None };
        lock::try_lock(self.map.file(), kind, &lock::fetch(blocks))
    }

    /// Keeps all blocks while this process lives. To be called before the kernel gets the file.
    ///
    /// # Errors
    /// The file system refuses locks.
    pub fn keep(&self) -> io::Result<bool> {
        self.kept.store(true, Ordering::SeqCst);
        let whole = self.guard(&self.blocks()).map(|_guards| self.is_verified(&self.blocks()));
        if !matches!(whole, Ok(true)) {
            self.kept.store(false, Ordering::SeqCst);
        }
        whole
    }

    /// Segments that have bytes on disk, whichever process has brought them, each with the time of the last use by this process: 0
    /// without any.
    ///
    /// # Errors
    /// The file cannot be searched.
    pub(super) fn stored_segments(&self) -> io::Result<Vec<(u64, usize)>> {
        let mut found = Vec::new();
        let mut start = 0;
        // One call for each segment: some 10 ms for a TB. The file's position is used by nothing else.
        while start < self.size_bytes && !self.kept.load(Ordering::SeqCst) {
            let data = match seek(&self.data, SeekFrom::Data(start)) {
                Ok(data) => data,
                Err(Errno::NXIO) => break,
                Err(errno) => return Err(errno.into()),
            };
            let segment = data / SEGMENT_BYTES;
            let used_ms = self.segments.used(place(segment)).map_or(0, CachedSegment::used_ms);
            found.push((used_ms, place(segment)));
            start = (segment + 1) * SEGMENT_BYTES;
        }
        Ok(found)
    }

    /// Whether this process holds the lock of a segment.
    pub(super) fn is_held(&self, place: usize) -> bool {
        self.segments.used(place).is_some_and(CachedSegment::is_held)
    }

    /// Segments whose locks this process holds, each with the time of its last use.
    fn held_segments(&self) -> impl Iterator<Item = (u64, usize)> + '_ {
        let kept = self.kept.load(Ordering::SeqCst);
        let held = |(place, segment): (usize, &CachedSegment)| segment.is_held().then(|| (segment.used_ms(), place));
        self.segments.all_used().filter_map(held).filter(move |_| !kept)
    }

    /// Removes the blocks of a segment, unless a reader is using them. `may_give_up`: if another process holds its lock, this one
    /// leaves the segment alone for a moment.
    pub(super) fn evict(&self, place: usize, may_give_up: bool) -> io::Result<Eviction> {
        let segment = self.segments.at(place);
        let Some(_alone) = segment.alone() else { return Ok(Eviction::Stays) };
        let range = lock::segment(place);
        // After `alone`: a thread that keeps the entry looks at its blocks after it said so.
        if self.kept.load(Ordering::SeqCst) {
            return Ok(Eviction::Stays);
        }
        let emptied = if lock::try_lock(self.map.file(), LockKind::Exclusive, &range)? {
            Some(self.empty(&blocks_of_segment(place, block_count(self.size_bytes))))
        } else if may_give_up && segment.is_held() {
            segment.give_up(now_ms() + GIVEN_UP_MS);
            None
        } else {
            return Ok(Eviction::Stays);
        };
        let forgotten = self.forget(segment);
        lock::try_lock(self.map.file(), LockKind::None, &range)?;
        let Some(freed) = emptied else { return Ok(Eviction::GivenUp(forgotten * BLOCK_BYTES)) };
        let freed = freed?;
        RemoteCounters::add(&self.counters.evicted_bytes, freed);
        Ok(Eviction::Freed(freed))
    }

    /// Forgets what this process knows of a segment that it has alone, and the number of its verified blocks.
    fn forget(&self, segment: &CachedSegment) -> u64 {
        let forgotten = segment.forget();
        self.verified_blocks.fetch_sub(forgotten, Ordering::AcqRel);
        self.meta_is_old.store(true, Ordering::Release);
        forgotten
    }

    /// Marks blocks as absent and then punches a hole. Other users are excluded.
    fn empty(&self, blocks: &Range<u64>) -> io::Result<u64> {
        let disk_bytes = || Ok::<u64, io::Error>(self.data.metadata()?.blocks() * 512);
        let before = disk_bytes()?;
        self.map.clear(blocks)?;
        let span = span_of(blocks, self.size_bytes);
        // To the end of the last page, since a hole takes whole ones. A segment begins with one.
        let len = span.len().next_multiple_of(HOLE_BYTES);
        fallocate(&self.data, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, span.start(), len)?;
        Ok(before.saturating_sub(disk_bytes()?))
    }

    /// Gives up the locks of segments that were not used for `idle_ms`, so that other processes may evict them.
    pub(crate) fn release_idle(&self, idle_ms: u64) {
        let now = now_ms();
        for (used, place) in self.held_segments().collect::<Vec<_>>() {
            if now.saturating_sub(used) < idle_ms {
                continue;
            }
            let segment = self.segments.at(place);
            let Some(_alone) = segment.alone() else { continue };
            if self.kept.load(Ordering::SeqCst) {
                continue;
            }
            self.forget(segment);
            // A lock that stays only delays an eviction.
            let _ = lock::try_lock(self.map.file(), LockKind::None, &lock::segment(place));
        }
    }

    /// Marks all blocks as absent, without a hole: they do not have the digest, and are to be fetched again. A reader that has
    /// verified them earlier may still see them. Every process that has the entry open learns of it: [`Self::was_dropped`].
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn drop_all(&self) -> io::Result<()> {
        let (all, mut start) = (self.blocks(), 0);
        while let Some(written) = self.map.written(start)?.filter(|written| written.start < all.end) {
            let end = written.end.min(all.end);
            for part in steps(written.start..end, MAP_STEP_BLOCKS) {
                self.map.clear(&part)?;
            }
            start = end;
        }
        let old = self.sum_of(&all, |segment, part| segment.verified.clear(part));
        self.verified_blocks.fetch_sub(old, Ordering::AcqRel);
        let mut meta = self.meta.lock();
        self.read_meta(&mut meta);
        (meta.verified, meta.dropped) = (false, meta.dropped + 1);
        self.dir.as_deref().map_or(Ok(()), |dir| meta.write(dir))
    }

    /// Reads again what the entry says about itself. A damaged file says nothing new.
    fn read_meta(&self, meta: &mut EntryMeta) {
        self.meta_is_old.store(false, Ordering::Release);
        let found = self.dir.as_deref().and_then(|dir| EntryMeta::read(dir).ok());
        if let Some(found) = found.filter(|found| found.size_bytes == self.size_bytes) {
            (meta.verified, meta.dropped) = (found.verified, found.dropped.max(meta.dropped));
        }
    }

    /// Whether all blocks were compared with the digest, and none was brought since.
    pub(crate) fn is_compared(&self) -> bool {
        let mut meta = self.meta.lock();
        if self.meta_is_old.load(Ordering::Acquire) {
            self.read_meta(&mut meta);
        }
        meta.verified
    }

    /// Whether any process has dropped all blocks since this one opened the entry, or since `Self::note_drops`: what was read
    /// before that may be wrong.
    pub fn was_dropped(&self) -> bool {
        let mut meta = self.meta.lock();
        self.read_meta(&mut meta);
        meta.dropped > self.drops_known.load(Ordering::Acquire)
    }

    /// Takes note of the drops so far: nothing that was read before them is used.
    pub(crate) fn note_drops(&self) {
        let dropped = self.meta.lock().dropped;
        self.drops_known.fetch_max(dropped, Ordering::AcqRel);
    }

    /// Notes that blocks are brought that were not compared.
    fn note_unverified(&self) -> io::Result<()> {
        let mut meta = self.meta.lock();
        if !meta.verified && !self.meta_is_old.load(Ordering::Acquire) {
            return Ok(());
        }
        self.read_meta(&mut meta);
        if !std::mem::take(&mut meta.verified) {
            return Ok(());
        }
        self.dir.as_deref().map_or(Ok(()), |dir| meta.write(dir))
    }

    /// Notes that the complete entry has the digest that its service names, unless its blocks have been dropped meanwhile: whether
    /// they have not. All of them are to be guarded from before the comparison: one that was evicted and brought again is not the one that was compared.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn note_digest(&self) -> io::Result<bool> {
        let mut meta = self.meta.lock();
        self.read_meta(&mut meta);
        if meta.dropped > self.drops_known.load(Ordering::Acquire) {
            return Ok(false);
        }
        meta.verified = true;
        self.dir.as_deref().map_or(Ok(()), |dir| meta.write(dir))?;
        Ok(true)
    }

    /// Notes its use, for the order of eviction.
    pub fn touch(&self) {
        if let Some(dir) = &self.dir {
            let _ = meta::touch(dir);
        }
    }

    /// The span of blocks.
    pub fn span_of(&self, blocks: &Range<u64>) -> ByteSpan {
        span_of(blocks, self.size_bytes)
    }
}
