//! The bound on the bytes of a cache, and eviction.

use std::{
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};

use parking_lot::{Mutex, MutexGuard};
use rustix::fs::statvfs;

use super::{
    super::super::unique::unique,
    entry::{Entry, Eviction},
    lock::{self, LockKind},
    meta,
    own::{self, DATA, MAP},
};

/// Without a bound by the user, the part of a file system that the cache may take: one half.
const DEFAULT_DIVISOR: u64 = 2;
/// Part of a file system that stays free then: one 20th.
const FREE_DIVISOR: u64 = 20;
/// A bound by the user leaves a 100th free, and never more than this many bytes: other programs still have to work.
const FREE_DIVISOR_BOUNDED: u64 = 100;
const FREE_BYTES_BOUNDED: u64 = 1 << 30;
/// Bytes that eviction frees beyond the need, at most: one walk then serves many writes.
const SURPLUS_BYTES: u64 = 256 << 20;
/// The disk is measured again after this time, or after so much was written.
const MEASURE_PERIOD: Duration = Duration::from_secs(5);
const MEASURE_BYTES: u64 = 64 << 20;
/// Until then a process writes at most this part of the room, but at least some bytes. So each process but one may exceed the bound
/// by an eighth of it, at least 1 MiB and at most 64 MiB.
const ROOM_DIVISOR: u64 = 8;
const ROOM_BYTES_MIN: u64 = 1 << 20;
/// After an eviction that did not free enough, none is tried for this time.
const PAUSE: Duration = Duration::from_millis(250);
/// Age from which an unfinished entry of another process is taken for abandoned.
const ABANDONED: Duration = Duration::from_hours(1);

/// What bounds a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimit {
    /// Bytes in use.
    pub used_bytes: u64,
    /// The most that may be in use.
    pub limit_bytes: u64,
    /// The file system, if it bounds the cache more than the setting does.
    pub disk: Option<DiskSpace>,
}

/// Space of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSpace {
    /// Its size in bytes.
    pub total_bytes: u64,
    /// Bytes that are free.
    pub free_bytes: u64,
    /// Bytes that the cache leaves free.
    pub kept_free_bytes: u64,
}

/// The bound on a cache. Each process keeps to it; all measure the same directory.
#[derive(Debug)]
pub(in super::super) struct Space {
    /// The directory of entries; `None` of files in memory of this process.
    pub(super) dir: Option<PathBuf>,
    cap_bytes: Option<u64>,
    state: Mutex<State>,
    /// Held while the directory is measured and bytes are evicted, which takes as long as its file system does. Readers need
    /// only the state.
    turn: Mutex<()>,
    /// Bytes that are being written: a measurement may not see them yet.
    pending_bytes: AtomicU64,
    open: Arc<OpenEntries>,
}

/// The entries that this process has open, in this space and others.
pub(super) type OpenEntries = Mutex<Vec<Weak<Entry>>>;

#[derive(Debug, Default)]
struct State {
    measured: Option<Instant>,
    /// Bytes that may be written until the next measurement.
    room_bytes: u64,
    full_since: Option<Instant>,
    /// Whether something was written since the bound was last looked at.
    written: bool,
}

impl State {
    /// Whether a reservation failed lately.
    fn is_full(&self) -> bool {
        self.full_since.is_some_and(|since| since.elapsed() < PAUSE)
    }

    /// Whether the last measurement still counts.
    fn is_fresh(&self) -> bool {
        self.measured.is_some_and(|measured| measured.elapsed() < MEASURE_PERIOD)
    }
}

/// Room in a cache, while bytes are written to it.
#[derive(Debug)]
pub struct Room<'a> {
    space: &'a Space,
    bytes: u64,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.space.pending_bytes.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

impl Space {
    pub(super) fn new(dir: Option<PathBuf>, cap_bytes: Option<u64>, open: Arc<OpenEntries>) -> Self {
        let (state, turn, pending_bytes) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        Self { dir, cap_bytes, state, turn, pending_bytes, open }
    }

    /// Those of this space.
    pub(super) fn open_entries(&self) -> Vec<Arc<Entry>> {
        let open = self.open.lock();
        let own = |entry: &Arc<Entry>| entry.dir().is_some() == self.dir.is_some();
        open.iter().filter_map(Weak::upgrade).filter(own).collect()
    }

    /// Room for `bytes` more, if they may be written; to be held while they are. Evicts what was not used for longest if that is needed. While another
    /// thread measures or evicts, the room that is left from the last measurement serves; only without any this waits for it.
    pub(in super::super) fn reserve(&self, bytes: u64) -> Option<Room<'_>> {
        let state = self.state.lock();
        if state.is_full() {
            return None;
        }
        let has_room = state.room_bytes >= bytes;
        if has_room && state.is_fresh() {
            return Some(self.taken(state, bytes));
        }
        let turn = self.turn.try_lock();
        if turn.is_none() && has_room {
            return Some(self.taken(state, bytes));
        }
        drop(state);
        let _turn = turn.unwrap_or_else(|| self.turn.lock());
        self.measured_room(bytes)
    }

    /// Takes from the room.
    fn taken(&self, mut state: MutexGuard<'_, State>, bytes: u64) -> Room<'_> {
        state.room_bytes -= bytes;
        state.written = true;
        self.room(bytes)
    }

    /// Room for `bytes` more after a measurement. The caller has the turn.
    fn measured_room(&self, bytes: u64) -> Option<Room<'_>> {
        // Another thread may have measured before this one had its turn.
        let state = self.state.lock();
        if state.is_full() {
            return None;
        }
        if state.is_fresh() && state.room_bytes >= bytes {
            return Some(self.taken(state, bytes));
        }
        // A measurement may not see what is being written, nor what others take room for meanwhile.
        let (pending, before) = (self.pending_bytes.load(Ordering::Acquire), state.room_bytes);
        let begun = Instant::now();
        drop(state);
        let measure = || self.limit().map(|now| (now.used_bytes.saturating_add(pending), now.limit_bytes));
        let (mut used, mut limit) = measure().ok()?;
        if used.saturating_add(bytes) > limit {
            self.evict(used + bytes - limit, SURPLUS_BYTES.min(limit / 8));
            (used, limit) = measure().ok()?;
        }
        let mut state = self.state.lock();
        let taken = before.saturating_sub(state.room_bytes);
        let left = limit.saturating_sub(used).saturating_sub(taken);
        state.measured = Some(Instant::now());
        // Other processes write too: each takes a part of what is left.
        state.room_bytes = (left / ROOM_DIVISOR).clamp(ROOM_BYTES_MIN.max(bytes), MEASURE_BYTES.max(bytes)).min(left);
        if left < bytes {
            state.full_since = Some(Instant::now());
            return None;
        }
        // A write that failed meanwhile knows more.
        if state.full_since.is_some_and(|since| since >= begun) {
            (state.measured, state.room_bytes) = (None, 0);
            return None;
        }
        state.full_since = None;
        Some(self.taken(state, bytes))
    }

    fn room(&self, bytes: u64) -> Room<'_> {
        self.pending_bytes.fetch_add(bytes, Ordering::AcqRel);
        Room { space: self, bytes }
    }

    /// Evicts what exceeds the bound, since several processes wrote at the same time. To be called every few seconds.
    pub(super) fn keep_bound(&self) {
        let _turn = self.turn.lock();
        if !std::mem::take(&mut self.state.lock().written) {
            return;
        }
        if let Ok(CacheLimit { used_bytes, limit_bytes, .. }) = self.limit()
            && used_bytes > limit_bytes
        {
            self.evict(used_bytes - limit_bytes, 0);
            // Until the others have looked too.
            self.state.lock().written = true;
        }
    }

    /// Notes that a write failed since the disk is full: nothing is written for a moment.
    pub(in super::super) fn note_full(&self) {
        let mut state = self.state.lock();
        (state.measured, state.room_bytes) = (None, 0);
        state.full_since = Some(Instant::now());
    }

    /// Whether a reservation failed lately.
    pub(in super::super) fn is_full(&self) -> bool {
        self.state.lock().is_full()
    }

    /// What bounds the cache now.
    pub(super) fn limit(&self) -> io::Result<CacheLimit> {
        if let Some(dir) = &self.dir {
            return self.limit_in(dir, entry_dirs(dir)?.iter().map(|dir| disk_bytes(dir)).sum());
        }
        let used_bytes = self.open_entries().iter().map(|entry| allocated(entry.data.metadata())).sum();
        Ok(CacheLimit { used_bytes, limit_bytes: self.cap_bytes.unwrap_or(0), disk: None })
    }

    /// What bounds a cache in `dir` that uses this many bytes.
    pub(super) fn limit_in(&self, dir: &Path, used_bytes: u64) -> io::Result<CacheLimit> {
        let found = statvfs(dir)?;
        let (total_bytes, free_bytes) = (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize);
        let (bound_bytes, kept_free_bytes) = match self.cap_bytes {
            None => (total_bytes / DEFAULT_DIVISOR, total_bytes / FREE_DIVISOR),
            Some(bytes) => (bytes, (total_bytes / FREE_DIVISOR_BOUNDED).min(FREE_BYTES_BOUNDED)),
        };
        let limit_bytes = bound_bytes.min((used_bytes + free_bytes).saturating_sub(kept_free_bytes));
        let disk = (limit_bytes < bound_bytes).then_some(DiskSpace { total_bytes, free_bytes, kept_free_bytes });
        Ok(CacheLimit { used_bytes, limit_bytes, disk })
    }

    /// Frees about `needed` and `surplus` bytes: first entries that no process uses, then segments of the open ones, each by least
    /// recent use. Of the segments that other processes use as well, as many as are needed are given up, to be evicted by the
    /// process that needs room next.
    fn evict(&self, needed: u64, surplus: u64) {
        let wanted = needed.saturating_add(surplus);
        let mut freed = 0;
        if let Some(dir) = &self.dir {
            let mut unused = entry_dirs(dir).unwrap_or_default();
            unused.sort_by_cached_key(|dir| meta::last_use(dir));
            for entry in unused {
                if freed >= wanted {
                    return;
                }
                freed += Self::remove_unused(dir, &entry).ok().flatten().unwrap_or(0);
            }
        }
        let entries = self.open_entries();
        let mut segments: Vec<(u64, usize, usize)> = Vec::new();
        for (place, entry) in entries.iter().enumerate() {
            match entry.stored_segments() {
                Ok(stored) => segments.extend(stored.into_iter().map(|(used, segment)| (used, place, segment))),
                Err(error) => tracing::debug!("cache {}: its segments are not known: {error}", entry.name),
            }
        }
        segments.sort_unstable();
        // The newest is being filled.
        segments.pop_if(|(_, entry, segment)| entries[*entry].is_held(*segment));
        let mut given_up = 0;
        for (_, entry, segment) in segments {
            if freed >= wanted {
                return;
            }
            match entries[entry].evict(segment, freed + given_up < needed) {
                Ok(Eviction::Freed(bytes)) => freed += bytes,
                Ok(Eviction::GivenUp(bytes)) => given_up += bytes,
                Ok(Eviction::Stays) => {}
                Err(error) => tracing::debug!("cache {}: segment {segment} stays: {error}", entries[entry].name),
            }
        }
    }

    /// Removes an entry, unless a process uses it. Returns the bytes of disk that this frees.
    pub(super) fn remove_unused(dir: &Path, entry: &Path) -> io::Result<Option<u64>> {
        let is_named = entry.file_name().and_then(|name| name.to_str()).is_some_and(own::is_own_name);
        if !is_named || !own::is_own_directory(entry)? || !own::holds_own_parts(entry)? {
            return Ok(None);
        }
        let is_temporary = entry.extension().is_some();
        if is_temporary {
            let age = SystemTime::now().duration_since(fs::metadata(entry)?.modified()?).unwrap_or_default();
            if age < ABANDONED {
                return Ok(None);
            }
        }
        match own::open_part(&entry.join(MAP)) {
            // The lock goes when the file is closed, after the removal.
            Ok(map) if lock::try_lock(&map, LockKind::Exclusive, &lock::ENTRY)? => Self::remove(dir, entry).map(Some),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::remove(dir, entry).map(Some),
            Err(error) => Err(error),
        }
    }

    fn remove(dir: &Path, entry: &Path) -> io::Result<u64> {
        let freed = disk_bytes(entry);
        // Renamed first, so that no process finds a half of it. The name of an abandoned one has an extension too.
        let trash = dir.join(format!("removed.{}", unique()));
        fs::rename(entry, &trash)?;
        for part in fs::read_dir(&trash)? {
            fs::remove_file(part?.path())?;
        }
        fs::remove_dir(&trash)?;
        Ok(freed)
    }
}

/// The directories of entries, also unfinished ones.
pub(super) fn entry_dirs(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let is_own = entry.file_name().to_str().is_some_and(own::is_own_name);
        if is_own && own::is_own_directory(&entry.path()).unwrap_or(false) {
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Bytes of disk of an entry.
pub(super) fn disk_bytes(entry: &Path) -> u64 {
    [DATA, MAP].iter().map(|name| allocated(fs::metadata(entry.join(name)))).sum()
}

fn allocated(found: io::Result<fs::Metadata>) -> u64 {
    found.map_or(0, |found| found.blocks() * 512)
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, thread};

    use super::*;

    #[test]
    fn readers_take_what_room_is_left_while_another_measures() {
        let space = Arc::new(Space::new(None, Some(64 << 20), Arc::default()));
        drop(space.reserve(1).unwrap());
        // The period is over. A list that is locked makes the next measurement wait.
        space.state.lock().measured = Some(Instant::now().checked_sub(2 * MEASURE_PERIOD).unwrap());
        let open = space.open.lock();
        let (tell, told) = mpsc::channel();
        let asking = |space: &Arc<Space>, bytes: u64| {
            let (space, tell) = (Arc::clone(space), tell.clone());
            thread::spawn(move || {
                let found = space.reserve(bytes).is_some();
                let _ = tell.send((found, space.is_full()));
            })
        };
        let mut measuring = asking(&space, 1);
        while space.turn.try_lock().is_some() {
            // This look may have taken the turn.
            if told.recv_timeout(Duration::from_millis(1)).is_ok() {
                measuring = asking(&space, 1);
            }
        }
        let room = space.state.lock().room_bytes;
        let reading = asking(&space, room - 10);
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok((true, false)), "held up by the measurement");
        drop(open);
        assert_eq!(told.recv_timeout(Duration::from_secs(20)), Ok((true, false)));
        measuring.join().unwrap();
        reading.join().unwrap();
        // Nothing was written: what is measured is the whole, without what was taken meanwhile.
        let left = (64 << 20) - (room - 10);
        assert_eq!(space.state.lock().room_bytes, left / ROOM_DIVISOR - 1);
    }

    #[test]
    fn a_full_disk_that_is_met_during_a_measurement_counts() {
        let space = Arc::new(Space::new(None, Some(64 << 20), Arc::default()));
        let open = space.open.lock();
        let (asked, measuring) = (Arc::clone(&space), space.turn.lock());
        let asking = thread::spawn(move || asked.reserve(1).is_some());
        drop(measuring);
        while space.turn.try_lock().is_some() {
            thread::sleep(Duration::from_millis(1));
        }
        // It has read the state and measures.
        thread::sleep(Duration::from_millis(20));
        space.note_full();
        drop(open);
        assert!(!asking.join().unwrap());
        assert!(space.is_full() && space.reserve(1).is_none());
    }
}
