//! The tile cache: transformed bytes, computed once and kept within a limit.
//!
//! The first thread that requests a tile computes it; other readers of the tile wait for that one computation. No thread holds a
//! lock while computing. A tile is claimed only when its computation begins, so that a reader computes a tile itself if it is
//! only queued for prefetch.
//!
//! Many readers at once, each in the middle of its own tile, may need more than the limit. Eviction of the least recently used
//! tile then drops the tile needed next, and every tile is computed again and again. Hence the planning of tiles and the prefetch
//! first check how much is in use. A reader that finds no room for a tile computes only the bytes that it requested.
//!
//! The limit holds for the memory of tiles from before their computation until the last reader drops them: each tile has its
//! [`TileRoom`] all that time.

use std::{
    collections::HashMap,
    num::NonZeroUsize,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use ckfs_source::FileId;
use lru::LruCache;
use smallvec::SmallVec;

use super::{
    ReadError,
    buffer::Buffer,
    counters::{Counters, add},
};

/// Time after its last use for which a tile counts as in use. Readers of a restore take turns, so that it may be a while.
const IN_USE: Duration = Duration::from_secs(5);

/// Tiles remembered as refused, and as fully consumed.
const REMEMBERED_MAX: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// Time between checks whether a computation is still worth waiting for.
const GIVE_UP_PERIOD: Duration = Duration::from_millis(250);

/// Time after its last use after which a tile is dropped although there is room.
const IDLE: Duration = Duration::from_mins(1);

/// Computations of other threads whose failure a reader does not take for its own. The next one is its own, or another reader's.
const TRIES_MAX: u32 = 2;

/// Identifies a tile: a file, a segment of it, and the tile's number in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TileKey {
    pub(super) file: u64,
    pub(super) segment: u32,
    pub(super) index: u64,
}

/// Memory of one tile, which counts against the limit until this is dropped.
#[derive(Debug)]
pub(super) struct TileRoom {
    held: Arc<AtomicUsize>,
    bytes: usize,
}

impl TileRoom {
    fn new(held: &Arc<AtomicUsize>, bytes: usize) -> Self {
        held.fetch_add(bytes, Ordering::Relaxed);
        Self { held: Arc::clone(held), bytes }
    }

    /// Sets the actual size in bytes.
    pub(super) fn resize(&mut self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
        self.held.fetch_sub(self.bytes, Ordering::Relaxed);
        self.bytes = bytes;
    }
}

impl Drop for TileRoom {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Why a tile is requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Demand {
    /// A reader needs part of it.
    Reader,
    /// A reader may need it next.
    Prefetch,
}

/// Computed bytes.
#[derive(Debug)]
pub(super) struct Tile {
    pub(super) bytes: Buffer,
    /// Its memory.
    pub(super) room: TileRoom,
    /// Source files that the bytes were made from.
    pub(super) files: SmallVec<[FileId; 2]>,
    /// Whether it was computed ahead and no reader has requested it yet.
    pub(super) ahead: AtomicBool,
    /// Bytes sent to readers so far.
    pub(super) served: AtomicU64,
}

type Outcome = Result<Arc<Tile>, ReadError>;

/// A computation that others wait for.
#[derive(Debug, Default)]
struct Flight {
    /// Whether no reader has asked for it when it began.
    ahead: bool,
    outcome: Mutex<Option<Outcome>>,
    done: Condvar,
}

#[derive(Debug)]
struct CacheState {
    tiles: LruCache<TileKey, (Arc<Tile>, Instant)>,
    flights: HashMap<TileKey, Arc<Flight>>,
    /// Tiles that were dropped because they were fully consumed, and when.
    consumed: LruCache<TileKey, Instant>,
    /// Tiles that were not computed for lack of room, and when a reader last requested them.
    refused: LruCache<TileKey, Instant>,
    /// Memory of the tiles in `tiles`.
    bytes: usize,
}

impl CacheState {
    fn bytes_in_use(&self) -> usize {
        let recent = self.tiles.iter().take_while(|(_, (_, used))| used.elapsed() < IN_USE);
        recent.map(|(_, (tile, _))| tile.room.bytes).sum()
    }

    /// Removes the least recently used tiles until the cache holds no more than `bytes`.
    fn drop_until(&mut self, bytes: usize) -> Vec<Arc<Tile>> {
        let mut dropped = Vec::new();
        while self.bytes > bytes {
            let Some((_, (old, _))) = self.tiles.pop_lru() else { break };
            self.bytes -= old.room.bytes;
            dropped.push(old);
        }
        dropped
    }
}

/// Tiles; the least recently used is dropped first.
#[derive(Debug)]
pub(super) struct TileCache {
    state: Mutex<CacheState>,
    bytes_max: usize,
    /// Memory of all tiles: those in the cache, those being computed, and those that readers still hold.
    held: Arc<AtomicUsize>,
    /// Memory of dropped files that programs still map. It belongs to no reservation.
    dropped: AtomicUsize,
    /// Bytes of `bytes_max` that are reserved for other uses now.
    reserved: Arc<AtomicUsize>,
}

/// Room of the cache reserved for another use than tiles, until this is dropped.
#[derive(Debug)]
pub struct Reservation {
    reserved: Arc<AtomicUsize>,
    bytes: usize,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Ends a flight even if the computation panics, so that no reader waits forever.
struct FlightGuard<'a> {
    cache: &'a TileCache,
    key: TileKey,
    flight: Arc<Flight>,
    outcome: Option<Outcome>,
}

impl Drop for FlightGuard<'_> {
    fn drop(&mut self) {
        let outcome = self.outcome.take().unwrap_or(Err(ReadError::Panicked));
        self.cache.lock().flights.remove(&self.key);
        *self.flight.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
        self.flight.done.notify_all();
    }
}

impl TileCache {
    /// A cache of at most `bytes_max` bytes.
    pub(super) fn new(bytes_max: usize) -> Self {
        // The limit is in bytes; the map's own limit must never bind.
        let remembered = || LruCache::new(REMEMBERED_MAX);
        let (tiles, consumed, refused) = (LruCache::unbounded(), remembered(), remembered());
        let state = CacheState { tiles, flights: HashMap::new(), consumed, refused, bytes: 0 };
        Self {
            state: Mutex::new(state),
            bytes_max,
            held: Arc::default(),
            dropped: AtomicUsize::new(0),
            reserved: Arc::default(),
        }
    }

    /// Bytes available for tiles.
    fn tile_bytes_max(&self) -> usize {
        self.bytes_max.saturating_sub(self.reserved_bytes() + self.dropped_bytes())
    }

    /// Memory of tiles outside the cache: those being computed, and those that only readers still hold.
    fn outside_bytes(&self, state: &CacheState) -> usize {
        self.held.load(Ordering::Relaxed).saturating_sub(state.bytes)
    }

    /// Memory of tiles that cannot be freed for others.
    fn tile_bytes_in_use(&self, state: &CacheState) -> usize {
        state.bytes_in_use() + self.outside_bytes(state)
    }

    /// Sets the memory, in bytes, of dropped files that programs still map.
    pub(super) fn set_dropped_bytes(&self, bytes: usize) {
        self.dropped.store(bytes, Ordering::Relaxed);
    }

    /// Memory, in bytes, of dropped files that programs still map.
    pub(super) fn dropped_bytes(&self) -> usize {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Most bytes that may be reserved at once: a quarter is always left for tiles.
    pub(super) fn reservable_bytes(&self) -> usize {
        self.bytes_max / 4 * 3
    }

    /// Takes room from tiles, but not from those in use.
    pub(super) fn reserve(&self, bytes: usize) -> Option<Reservation> {
        let mut state = self.lock();
        // Reservations are only made under the lock, so what is found here can only shrink.
        let taken = (self.reserved_bytes() + self.dropped_bytes()).checked_add(bytes)?;
        if taken > self.reservable_bytes() || self.tile_bytes_in_use(&state).checked_add(taken)? > self.bytes_max {
            return None;
        }
        self.reserved.fetch_add(bytes, Ordering::Relaxed);
        let others = (self.bytes_max - taken).saturating_sub(self.outside_bytes(&state));
        let dropped = state.drop_until(others);
        drop(state);
        drop(dropped);
        Some(Reservation { reserved: Arc::clone(&self.reserved), bytes })
    }

    fn lock(&self) -> MutexGuard<'_, CacheState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a tile is in the cache or being computed.
    pub(super) fn has(&self, key: &TileKey) -> bool {
        let state = self.lock();
        state.tiles.contains(key) || state.flights.contains_key(key)
    }

    /// Memory of all tiles, including those being computed.
    pub(super) fn bytes(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Bytes reserved now.
    pub(super) fn reserved_bytes(&self) -> usize {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Bytes not available for more tiles: the reserved ones, and those of tiles that were computed or requested lately and not
    /// fully consumed since.
    pub(super) fn bytes_in_use(&self) -> usize {
        self.tile_bytes_in_use(&self.lock()) + self.reserved_bytes() + self.dropped_bytes()
    }

    /// Whether a tile can be kept without dropping one that is in use.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.bytes_in_use() as u64 + bytes <= self.bytes_max as u64
    }

    /// Whether a tile that no reader waits for yet can be kept while half of the room stays free for others.
    pub(super) fn has_much_room(&self, bytes: u64) -> bool {
        self.has_room(bytes.saturating_add(self.tile_bytes_max() as u64 / 2))
    }

    /// The tile `key`, whose bytes take `bytes` of memory: from the cache, from a computation under way, or computed now by
    /// `compute`. Returns `None` if the tile is not there and other tiles in use leave no room for it.
    ///
    /// After a refusal the tile is refused to readers for as long as a tile counts as in use: part of it was served meanwhile. A
    /// prefetch is refused too if another thread computes the tile, or if the tile was fully consumed lately.
    ///
    /// A reader that waits for a computation calls `give_up` regularly; an error from it ends the wait.
    pub(super) fn get(
        &self,
        key: TileKey,
        demand: Demand,
        bytes: usize,
        counters: &Counters,
        give_up: &dyn Fn() -> Option<ReadError>,
        compute: impl FnOnce(TileRoom) -> Result<Tile, ReadError>,
    ) -> Option<Outcome> {
        let ahead = demand == Demand::Prefetch;
        let (mut tries, mut state) = (0, self.lock());
        let state = loop {
            if let Some((tile, used)) = state.tiles.get_mut(&key) {
                *used = Instant::now();
                if !ahead {
                    add(&counters.tile_hits, 1);
                    if tile.ahead.swap(false, Ordering::Relaxed) {
                        add(&counters.prefetch_hits, 1);
                    }
                }
                return Some(Ok(Arc::clone(tile)));
            }
            if let Some(flight) = state.flights.get(&key).map(Arc::clone) {
                drop(state);
                if ahead {
                    return None;
                }
                add(&counters.tile_waits, 1);
                match wait(&flight, give_up) {
                    // The time of a prefetch may have begun long before, and its panic was not this reader's: the reader tries once
                    // itself.
                    Waited::Failed(error) if tries < TRIES_MAX && (flight.ahead || is_panic(&error)) => {
                        tries += 1;
                        state = self.lock();
                        continue;
                    }
                    Waited::Made(tile) => return Some(Ok(tile)),
                    Waited::Failed(error) | Waited::GivenUp(error) => return Some(Err(error)),
                }
            }
            break state;
        };
        let (flight, room, dropped) = {
            let mut state = state;
            // A prefetch job may run late.
            if ahead && state.consumed.peek(&key).is_some_and(|then| then.elapsed() < IN_USE) {
                return None;
            }
            let fits = self.tile_bytes_in_use(&state).saturating_add(bytes) <= self.tile_bytes_max();
            let lately = state.refused.peek(&key).is_some_and(|refused| refused.elapsed() < IN_USE);
            if !fits || !ahead && lately {
                if !ahead {
                    state.refused.put(key, Instant::now());
                }
                return None;
            }
            state.refused.pop(&key);
            let room = TileRoom::new(&self.held, bytes);
            let others = self.tile_bytes_max().saturating_sub(self.outside_bytes(&state));
            let dropped = state.drop_until(others);
            let flight = Arc::new(Flight { ahead, ..Flight::default() });
            state.flights.insert(key, Arc::clone(&flight));
            (flight, room, dropped)
        };
        add(&counters.tile_evictions, dropped.len() as u64);
        // Their buffers are then free for this tile.
        drop(dropped);
        add(if ahead { &counters.prefetched } else { &counters.tile_misses }, 1);
        let mut guard = FlightGuard { cache: self, key, flight, outcome: None };
        let outcome = compute(room).map(Arc::new);
        if let Ok(tile) = &outcome {
            tile.ahead.store(ahead, Ordering::Relaxed);
            self.keep(key, tile, counters);
        }
        guard.outcome = Some(outcome.clone());
        drop(guard);
        Some(outcome)
    }

    fn keep(&self, key: TileKey, tile: &Arc<Tile>, counters: &Counters) {
        let mut state = self.lock();
        state.bytes += tile.room.bytes;
        if let Some((old, _)) = state.tiles.put(key, (Arc::clone(tile), Instant::now())) {
            state.bytes -= old.room.bytes;
        }
        let most = self.tile_bytes_max().saturating_sub(self.outside_bytes(&state));
        let dropped = state.drop_until(most);
        drop(state);
        add(&counters.tile_evictions, dropped.len() as u64);
    }

    /// Drops the tiles of a file.
    pub(super) fn forget_file(&self, file: u64) {
        let mut state = self.lock();
        let keys: Vec<TileKey> = state.tiles.iter().map(|(key, _)| *key).filter(|key| key.file == file).collect();
        for key in keys {
            if let Some((tile, _)) = state.tiles.pop(&key) {
                state.bytes -= tile.room.bytes;
            }
        }
    }

    /// Drops the tiles that no reader has requested for a long time: an idle file system holds little memory.
    pub(super) fn drop_idle(&self) {
        let mut state = self.lock();
        while state.tiles.peek_lru().is_some_and(|(_, (_, used))| used.elapsed() > IDLE) {
            let Some((_, (tile, _))) = state.tiles.pop_lru() else { break };
            state.bytes -= tile.room.bytes;
        }
    }

    /// Drops a fully consumed tile: no reader will need it again soon.
    pub(super) fn note_consumed(&self, key: &TileKey) {
        self.forget(key);
        self.lock().consumed.put(*key, Instant::now());
    }

    /// Drops a tile whose source has changed.
    pub(super) fn forget(&self, key: &TileKey) {
        let mut state = self.lock();
        if let Some((tile, _)) = state.tiles.pop(key) {
            state.bytes -= tile.room.bytes;
        }
    }
}

/// What became of a wait for a computation of another thread.
enum Waited {
    Made(Arc<Tile>),
    /// The computation failed.
    Failed(ReadError),
    /// The wait was given up.
    GivenUp(ReadError),
}

fn is_panic(error: &ReadError) -> bool {
    matches!(error, ReadError::Panicked)
}

fn wait(flight: &Flight, give_up: &dyn Fn() -> Option<ReadError>) -> Waited {
    let mut outcome = flight.outcome.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if let Some(outcome) = &*outcome {
            return outcome.clone().map_or_else(Waited::Failed, Waited::Made);
        }
        let (found, waited) = flight.done.wait_timeout(outcome, GIVE_UP_PERIOD).unwrap_or_else(PoisonError::into_inner);
        outcome = found;
        if waited.timed_out()
            && outcome.is_none()
            && let Some(error) = give_up()
        {
            return Waited::GivenUp(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::buffer::BufferPool, *};

    fn tile(pool: &BufferPool, room: TileRoom, len: usize) -> Tile {
        let (ahead, served) = (AtomicBool::new(false), AtomicU64::new(0));
        Tile { bytes: pool.take(len), room, files: SmallVec::new(), ahead, served }
    }

    /// Requests a tile, and makes it if there is room.
    fn request(cache: &TileCache, counters: &Counters, index: u64, len: usize, demand: Demand) -> Option<Arc<Tile>> {
        let pool = BufferPool::new(0);
        cache.get(key(index), demand, len, counters, &|| None, |room| Ok(tile(&pool, room, len))).map(Result::unwrap)
    }

    /// Sets the last use of a tile to long ago.
    fn age(cache: &TileCache, index: u64) {
        cache.lock().tiles.peek_mut(&key(index)).unwrap().1 -= IN_USE;
    }

    fn key(index: u64) -> TileKey {
        TileKey { file: 1, segment: 0, index }
    }

    #[test]
    fn the_limit_holds_and_the_least_used_goes_first() {
        let (cache, counters) = (TileCache::new(100), Counters::default());
        for index in [0, 1, 0] {
            request(&cache, &counters, index, 40, Demand::Reader).unwrap();
        }
        age(&cache, 1);
        request(&cache, &counters, 2, 40, Demand::Reader).unwrap();
        assert!(cache.has(&key(0)) && !cache.has(&key(1)) && cache.has(&key(2)));
        assert_eq!(counters.tile_hits.load(Ordering::Relaxed), 1);
        assert!(request(&cache, &counters, 9, 101, Demand::Reader).is_none(), "a tile beyond the limit is not made");
        cache.forget(&key(0));
        assert_eq!(cache.bytes(), 40);
        let ahead = |index| request(&cache, &counters, index, 40, Demand::Prefetch).is_some();
        assert!(ahead(0), "it may be wanted again");
        cache.note_consumed(&key(0));
        assert!(!ahead(0) && !cache.has(&key(0)), "computed ahead too late");
        cache.forget_file(2);
        assert!(cache.has(&key(2)));
        cache.forget_file(1);
        assert!(!cache.has(&key(2)) && cache.bytes() == 0 && cache.lock().bytes == 0);
    }

    #[test]
    fn tiles_in_use_take_room_until_they_are_forgotten() {
        let (cache, counters) = (TileCache::new(100), Counters::default());
        for index in 0..2 {
            request(&cache, &counters, index, 40, Demand::Reader).unwrap();
        }
        assert!(cache.bytes_in_use() == 80 && cache.has_room(20) && !cache.has_room(21));
        cache.forget(&key(0));
        assert!(cache.bytes_in_use() == 40 && cache.has_room(60));
        assert!(cache.has_much_room(10) && !cache.has_much_room(11));
        let made = |index, len| request(&cache, &counters, index, len, Demand::Reader).is_some();
        assert!(made(1, 1000), "it is there");
        assert!(!made(3, 61) && made(2, 60));
        cache.forget(&key(2));
        assert!(!made(3, 10), "part of it was served already");
        age(&cache, 1);
        *cache.lock().refused.get_mut(&key(3)).unwrap() -= IN_USE;
        assert!(made(3, 100) && !cache.has(&key(1)));
        age(&cache, 3);
        assert!(cache.bytes_in_use() == 0 && cache.has_room(100));
        cache.drop_idle();
        assert!(cache.has(&key(3)), "kept while it may still be wanted");
        cache.lock().tiles.get_mut(&key(3)).unwrap().1 -= IDLE;
        cache.drop_idle();
        assert!(!cache.has(&key(3)) && cache.bytes() == 0);
    }

    #[test]
    fn tiles_count_while_they_are_computed_and_while_a_reader_holds_them() {
        let (cache, pool, counters) = (TileCache::new(100), BufferPool::new(0), Counters::default());
        let compute = |room: TileRoom| {
            assert_eq!((cache.bytes(), cache.bytes_in_use()), (60, 60));
            assert!(request(&cache, &counters, 1, 41, Demand::Reader).is_none() && cache.reserve(41).is_none());
            drop(room);
            Err(ReadError::Panicked)
        };
        assert!(cache.get(key(0), Demand::Reader, 60, &counters, &|| None, compute).unwrap().is_err());
        assert_eq!(cache.bytes(), 0);
        let reader = request(&cache, &counters, 2, 60, Demand::Reader).unwrap();
        cache.note_consumed(&key(2));
        assert!(!cache.has(&key(2)) && cache.bytes() == 60 && cache.reserve(41).is_none());
        drop(reader);
        assert_eq!(cache.bytes(), 0);
        let larger = |mut room: TileRoom| {
            room.resize(70);
            Ok(tile(&pool, room, 60))
        };
        drop(cache.get(key(3), Demand::Reader, 60, &counters, &|| None, larger));
        assert_eq!((cache.bytes(), cache.lock().bytes), (70, 70), "as much memory as it takes");
    }

    #[test]
    fn room_is_reserved_only_where_no_tile_is_in_use() {
        let (cache, counters) = (TileCache::new(100), Counters::default());
        for index in 0..2 {
            request(&cache, &counters, index, 40, Demand::Reader).unwrap();
        }
        assert!(cache.reserve(21).is_none() && cache.reserve(usize::MAX).is_none());
        let few = cache.reserve(20).unwrap();
        assert!(cache.bytes_in_use() == 100 && cache.reserve(1).is_none() && !cache.has_room(1));
        age(&cache, 0);
        assert!(cache.reserve(41).is_none());
        let more = cache.reserve(40).unwrap();
        assert!(!cache.has(&key(0)) && cache.has(&key(1)) && cache.reserved_bytes() == 60);
        cache.note_consumed(&key(1));
        assert!(cache.reserve(16).is_none(), "a quarter is for tiles");
        assert!(cache.has_room(40) && !cache.has_room(41) && cache.has_much_room(20) && !cache.has_much_room(21));
        assert!(request(&cache, &counters, 9, 41, Demand::Reader).is_none(), "no room is left for it");
        drop((few, more));
        assert!(cache.reserved_bytes() == 0 && cache.has_room(100) && cache.reserve(75).is_some());
    }

    #[test]
    fn files_that_were_dropped_and_are_mapped_still_take_room() {
        let (cache, counters) = (TileCache::new(100), Counters::default());
        cache.set_dropped_bytes(60);
        assert!(cache.reserve(16).is_none() && cache.reserve(15).is_some());
        assert!(
            request(&cache, &counters, 0, 41, Demand::Reader).is_none()
                && request(&cache, &counters, 1, 40, Demand::Reader).is_some()
        );
        cache.set_dropped_bytes(0);
        assert!(cache.reserve(60).is_some());
    }

    #[test]
    fn one_computation_serves_all_waiting_readers() {
        let (cache, pool, counters) = (TileCache::new(1000), BufferPool::new(0), Counters::default());
        let computed = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let made = cache.get(key(0), Demand::Reader, 10, &counters, &|| None, |room| {
                        computed.fetch_add(1, Ordering::SeqCst);
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        Ok(tile(&pool, room, 10))
                    });
                    assert_eq!(made.unwrap().unwrap().bytes.len(), 10);
                });
            }
        });
        assert_eq!(computed.into_inner(), 1);
    }

    #[test]
    fn a_reader_does_not_inherit_the_failure_of_a_prefetch() {
        let (cache, pool, counters) = (TileCache::new(1000), BufferPool::new(0), Counters::default());
        let (begun, waits) = (std::sync::Barrier::new(2), || counters.tile_waits.load(Ordering::Relaxed));
        for panics in [false, true] {
            let before = waits();
            std::thread::scope(|scope| {
                let prefetch = scope.spawn(|| {
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        cache.get(key(0), Demand::Prefetch, 10, &counters, &|| None, |_| {
                            begun.wait();
                            while waits() == before {
                                std::thread::yield_now();
                            }
                            assert!(!panics, "injected");
                            Err(ReadError::Internal { what: "its time is over" })
                        })
                    }))
                });
                begun.wait();
                let made = cache.get(key(0), Demand::Reader, 10, &counters, &|| None, |room| Ok(tile(&pool, room, 10)));
                assert!(made.unwrap().is_ok(), "the reader tries once itself");
                assert_eq!(prefetch.join().unwrap().is_err(), panics);
            });
            cache.forget(&key(0));
        }
    }

    #[test]
    fn a_panicking_computation_wakes_waiting_readers() {
        let (cache, pool, counters) = (TileCache::new(1000), BufferPool::new(0), Counters::default());
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            cache.get(key(0), Demand::Reader, 10, &counters, &|| None, |_| panic!("injected"))
        }));
        assert!(panicked.is_err());
        assert_eq!(cache.bytes(), 0);
        assert!(
            cache
                .get(key(0), Demand::Reader, 10, &counters, &|| None, |room| Ok(tile(&pool, room, 10)))
                .unwrap()
                .is_ok()
        );
    }
}
