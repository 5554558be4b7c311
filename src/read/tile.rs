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
//! [`Reservation`] all that time.

use std::{
    num::NonZeroUsize,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ckfs_source::FileId;
use ckfs_sync::{
    Account, Demand, Event, Request, Reservation, RoomPolicy, Shelf, SingleFlight, Situation, Verdict, Weight,
};
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

/// Time after its last use after which a tile is dropped although there is room.
const IDLE: Duration = Duration::from_mins(1);

/// Identifies a tile: a file, a segment of it, and the tile's number in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct TileKey {
    pub(super) file: u64,
    pub(super) segment: u32,
    pub(super) index: u64,
}

/// Computed bytes.
pub(super) struct Tile {
    pub(super) bytes: Buffer,
    /// Its memory, which counts against the limit.
    pub(super) room: Reservation,
    /// Source files that the bytes were made from.
    pub(super) files: SmallVec<[FileId; 2]>,
    /// Whether it was computed ahead and no reader has requested it yet.
    pub(super) ahead: AtomicBool,
    /// Bytes sent to readers so far.
    pub(super) served: AtomicU64,
}

impl Tile {
    /// Notes that so many bytes were sent. Returns whether readers have all of them now.
    pub(super) fn serve(&self, bytes: u64) -> bool {
        self.served.fetch_add(bytes, Ordering::Relaxed) + bytes >= self.bytes.len() as u64
    }
}

impl Weight for Tile {
    fn weight_bytes(&self) -> usize {
        self.room.bytes()
    }
}

/// What counts against the limit. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct TileMemory {
    bytes_max: usize,
    /// All tiles: those in the cache, those being computed, and those that readers still hold.
    held: Account,
    /// Dropped files that programs still map, as each engine measures its own.
    pub(super) dropped: Account,
    /// What is reserved for other uses now.
    pub(super) reserved: Account,
}

impl TileMemory {
    fn other_bytes(&self) -> usize {
        self.reserved.bytes() + self.dropped.bytes()
    }

    /// Bytes available for tiles.
    fn tile_bytes_max(&self) -> usize {
        self.bytes_max.saturating_sub(self.other_bytes())
    }

    /// Memory of tiles outside the cache: those being computed, and those that only readers still hold.
    fn outside_bytes(&self, tiles: &Shelf<TileKey, Tile>) -> usize {
        self.held.bytes().saturating_sub(tiles.bytes())
    }

    /// Memory of tiles that cannot be freed for others.
    fn tile_bytes_in_use(&self, tiles: &Shelf<TileKey, Tile>) -> usize {
        tiles.bytes_used_within(IN_USE) + self.outside_bytes(tiles)
    }

    /// Removes the least recently used tiles until all of them are no more than `bytes`.
    fn drop_until(&self, bytes: usize, tiles: &mut Shelf<TileKey, Tile>) -> Vec<Arc<Tile>> {
        tiles.pop_until(bytes.saturating_sub(self.outside_bytes(tiles)))
    }
}

/// Refuses a tile for which others in use leave no room.
///
/// After a refusal the tile is refused to readers for as long as a tile counts as in use: part of it was served meanwhile. A
/// prefetch is refused too if the tile was fully consumed lately.
struct TileRooms {
    memory: TileMemory,
    /// Tiles that were dropped because they were fully consumed, and when.
    consumed: LruCache<TileKey, Instant>,
    /// Tiles that were not computed for lack of room, and when a reader last requested them.
    refused: LruCache<TileKey, Instant>,
}

fn is_lately(noted: &LruCache<TileKey, Instant>, key: &TileKey) -> bool {
    noted.peek(key).is_some_and(|then| then.elapsed() < IN_USE)
}

impl RoomPolicy<TileKey, Tile> for TileRooms {
    /// Bytes of memory.
    type Ask = usize;
    type Room = Reservation;
    type Error = ReadError;

    fn room(
        &mut self,
        tiles: &mut Shelf<TileKey, Tile>,
        key: &TileKey,
        bytes: &usize,
        demand: Demand,
        _: Situation,
    ) -> Verdict<Reservation, Tile> {
        let is_reader = demand == Demand::Reader;
        // A prefetch job may run late.
        if !is_reader && is_lately(&self.consumed, key) {
            return Verdict::Refuse;
        }
        let fits = self.memory.tile_bytes_in_use(tiles).saturating_add(*bytes) <= self.memory.tile_bytes_max();
        if !fits || (is_reader && is_lately(&self.refused, key)) {
            if is_reader {
                self.refused.put(*key, Instant::now());
            }
            return Verdict::Refuse;
        }
        self.refused.pop(key);
        let room = self.memory.held.reserve(*bytes);
        let dropped = self.memory.drop_until(self.memory.tile_bytes_max(), tiles);
        Verdict::Make(room, dropped)
    }

    fn kept(&mut self, tiles: &mut Shelf<TileKey, Tile>) -> Vec<Arc<Tile>> {
        self.memory.drop_until(self.memory.tile_bytes_max(), tiles)
    }
}

/// Tiles; the least recently used is dropped first.
pub(super) struct TileCache {
    tiles: SingleFlight<TileKey, Tile, TileRooms>,
    pub(super) memory: TileMemory,
}

impl TileCache {
    /// A cache of at most `bytes_max` bytes.
    pub(super) fn new(bytes_max: usize) -> Self {
        let (held, dropped, reserved) = (Account::default(), Account::default(), Account::default());
        let memory = TileMemory { bytes_max, held, dropped, reserved };
        let noted = || LruCache::new(REMEMBERED_MAX);
        let rooms = TileRooms { memory: memory.clone(), consumed: noted(), refused: noted() };
        Self { tiles: SingleFlight::new(rooms, Arc::default()), memory }
    }

    /// Most bytes that may be reserved at once: a quarter is always left for tiles.
    pub(super) fn reservable_bytes(&self) -> usize {
        self.memory.bytes_max / 4 * 3
    }

    /// Takes room from tiles, but not from those in use.
    pub(super) fn reserve(&self, bytes: usize) -> Option<Reservation> {
        let memory = &self.memory;
        let (reservation, _dropped) = self.tiles.with(|inside| {
            // Reservations are only made under the lock, so what is found here can only shrink.
            let taken = memory.other_bytes().checked_add(bytes)?;
            let in_use = memory.tile_bytes_in_use(&inside.shelf);
            if taken > self.reservable_bytes() || in_use.checked_add(taken)? > memory.bytes_max {
                return None;
            }
            let reservation = memory.reserved.reserve(bytes);
            Some((reservation, memory.drop_until(memory.bytes_max - taken, &mut inside.shelf)))
        })?;
        Some(reservation)
    }

    /// Whether a tile is in the cache or being computed.
    pub(super) fn has(&self, key: &TileKey) -> bool {
        self.tiles.with(|inside| inside.has(key))
    }

    /// Memory of all tiles, including those being computed.
    pub(super) fn bytes(&self) -> usize {
        self.memory.held.bytes()
    }

    /// Bytes not available for more tiles: the reserved ones, and those of tiles that were computed or requested lately and not
    /// fully consumed since.
    pub(super) fn bytes_in_use(&self) -> usize {
        self.tiles.with(|inside| self.memory.tile_bytes_in_use(&inside.shelf)) + self.memory.other_bytes()
    }

    /// Whether a tile can be kept without dropping one that is in use.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        self.bytes_in_use() as u64 + bytes <= self.memory.bytes_max as u64
    }

    /// Whether a tile that no reader waits for yet can be kept while half of the room stays free for others.
    pub(super) fn has_much_room(&self, bytes: u64) -> bool {
        self.has_room(bytes.saturating_add(self.memory.tile_bytes_max() as u64 / 2))
    }

    /// The tile `key`, whose bytes take `bytes` of memory: from the cache, from a computation under way, or computed now by
    /// `compute`. Returns `None` if the tile is not there and other tiles in use leave no room for it, or if it is a prefetch and
    /// another thread computes it.
    ///
    /// A reader that waits for a computation calls `give_up` regularly; an error from it ends the wait.
    pub(super) fn get(
        &self,
        key: TileKey,
        demand: Demand,
        bytes: usize,
        counters: &Counters,
        give_up: &dyn Fn() -> Option<ReadError>,
        compute: impl FnOnce(Reservation) -> Result<Tile, ReadError>,
    ) -> Option<Result<Arc<Tile>, ReadError>> {
        let ahead = demand == Demand::Prefetch;
        let event = |event: Event<'_, Tile>| match event {
            Event::Found(_) if ahead => {}
            Event::Found(tile) => {
                add(&counters.tile_hits, 1);
                if tile.ahead.swap(false, Ordering::Relaxed) {
                    add(&counters.prefetch_hits, 1);
                }
            }
            Event::Waits => add(&counters.tile_waits, 1),
            Event::Makes => add(if ahead { &counters.prefetched } else { &counters.tile_misses }, 1),
            Event::Dropped(count) => add(&counters.tile_evictions, count as u64),
        };
        let request = Request { demand, give_up, event: &event };
        self.tiles
            .get(key, &bytes, &request, |room| compute(room).inspect(|tile| tile.ahead.store(ahead, Ordering::Relaxed)))
    }

    /// Drops the tiles of a file.
    pub(super) fn forget_file(&self, file: u64) {
        drop(self.tiles.with(|inside| inside.shelf.remove_where(|key| key.file == file)));
    }

    /// Drops the tiles that no reader has requested for a long time: an idle file system holds little memory.
    pub(super) fn drop_idle(&self) {
        drop(self.tiles.with(|inside| inside.shelf.pop_unused_for(IDLE)));
    }

    /// Drops a fully consumed tile: no reader will need it again soon.
    pub(super) fn note_consumed(&self, key: &TileKey) {
        drop(self.tiles.with(|inside| {
            inside.policy.consumed.put(*key, Instant::now());
            inside.shelf.remove(key)
        }));
    }

    /// Drops a tile whose source has changed, or that readers have read.
    pub(super) fn forget(&self, key: &TileKey) {
        drop(self.tiles.with(|inside| inside.shelf.remove(key)));
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::buffer::{BufferPool, buffer_pool},
        *,
    };

    fn tile(pool: &BufferPool, room: Reservation, len: usize) -> Tile {
        let (ahead, served) = (AtomicBool::new(false), AtomicU64::new(0));
        Tile { bytes: pool.take(len), room, files: SmallVec::new(), ahead, served }
    }

    /// Requests a tile, and makes it if there is room.
    fn request(cache: &TileCache, counters: &Counters, index: u64, len: usize, demand: Demand) -> Option<Arc<Tile>> {
        let pool = buffer_pool(0);
        cache.get(key(index), demand, len, counters, &|| None, |room| Ok(tile(&pool, room, len))).map(Result::unwrap)
    }

    /// Sets the last use of a tile to long ago.
    fn age(cache: &TileCache, index: u64) {
        cache.tiles.with(|inside| inside.shelf.age(&key(index), IN_USE));
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
        assert!(!cache.has(&key(2)) && cache.bytes() == 0 && cache.tiles.with(|inside| inside.shelf.bytes()) == 0);
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
        cache.tiles.with(|inside| *inside.policy.refused.get_mut(&key(3)).unwrap() -= IN_USE);
        assert!(made(3, 100) && !cache.has(&key(1)));
        age(&cache, 3);
        assert!(cache.bytes_in_use() == 0 && cache.has_room(100));
        cache.drop_idle();
        assert!(cache.has(&key(3)), "kept while it may still be wanted");
        cache.tiles.with(|inside| inside.shelf.age(&key(3), IDLE));
        cache.drop_idle();
        assert!(!cache.has(&key(3)) && cache.bytes() == 0);
    }

    #[test]
    fn tiles_count_while_they_are_computed_and_while_a_reader_holds_them() {
        let (cache, pool, counters) = (TileCache::new(100), buffer_pool(0), Counters::default());
        let compute = |room: Reservation| {
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
        let larger = |mut room: Reservation| {
            room.resize(70);
            Ok(tile(&pool, room, 60))
        };
        drop(cache.get(key(3), Demand::Reader, 60, &counters, &|| None, larger));
        assert_eq!(
            (cache.bytes(), cache.tiles.with(|inside| inside.shelf.bytes())),
            (70, 70),
            "as much memory as it takes"
        );
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
        assert!(!cache.has(&key(0)) && cache.has(&key(1)) && cache.memory.reserved.bytes() == 60);
        cache.note_consumed(&key(1));
        assert!(cache.reserve(16).is_none(), "a quarter is for tiles");
        assert!(cache.has_room(40) && !cache.has_room(41) && cache.has_much_room(20) && !cache.has_much_room(21));
        assert!(request(&cache, &counters, 9, 41, Demand::Reader).is_none(), "no room is left for it");
        drop((few, more));
        assert!(cache.memory.reserved.bytes() == 0 && cache.has_room(100) && cache.reserve(75).is_some());
    }

    #[test]
    fn files_that_were_dropped_and_are_mapped_still_take_room() {
        let (cache, counters) = (TileCache::new(100), Counters::default());
        let mut dropped = cache.memory.dropped.reserve(0);
        dropped.resize(60);
        assert!(cache.reserve(16).is_none() && cache.reserve(15).is_some());
        assert!(
            request(&cache, &counters, 0, 41, Demand::Reader).is_none()
                && request(&cache, &counters, 1, 40, Demand::Reader).is_some()
        );
        drop(dropped);
        assert!(cache.reserve(60).is_some(), "the engine that counted them is gone");
    }

    #[test]
    fn one_computation_serves_all_waiting_readers() {
        let (cache, pool, counters) = (TileCache::new(1000), buffer_pool(0), Counters::default());
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
        let (cache, pool, counters) = (TileCache::new(1000), buffer_pool(0), Counters::default());
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
        let (cache, pool, counters) = (TileCache::new(1000), buffer_pool(0), Counters::default());
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
