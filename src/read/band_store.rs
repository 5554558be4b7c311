//! What an engine keeps of encoders: lowered inputs, reductions, and scales of bands.

use std::{
    num::NonZeroUsize,
    sync::{Arc, OnceLock},
};

use ckfs_source::FileId;
use ckfs_sync::{Demand, Reservation, RoomPolicy, Shelf, SingleFlight, Situation, Verdict, Weight};
use ckfs_tensor::Tiling;
use lru::LruCache;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::ReadError;

/// Most lowered inputs that are kept.
const LOWERED_MAX: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// Most reductions that are kept.
const REDUCTIONS_MAX: usize = 1 << 16;

/// Most bytes of scales that are kept, and the part of the tile cache that this is at most.
pub(super) const SCALE_BYTES_MAX: usize = 64 << 20;
pub(super) const SCALE_PART: usize = 8;

/// The greatest magnitude of one matrix of an encoding, or of those that share a factor.
#[derive(Debug)]
pub(super) struct Reduced {
    pub(super) greatest: f32,
    pub(super) files: SmallVec<[FileId; 2]>,
}

impl Weight for Reduced {
    fn weight_bytes(&self) -> usize {
        1
    }
}

/// Keeps the last reductions.
#[derive(Debug)]
pub(super) struct LastReductions;

impl RoomPolicy<(u64, u64), Reduced> for LastReductions {
    type Ask = ();
    type Room = ();
    type Error = ReadError;

    fn room(
        &mut self,
        shelf: &mut Shelf<(u64, u64), Reduced>,
        _: &(u64, u64),
        (): &(),
        _: Demand,
        _: Situation,
    ) -> Verdict<(), Reduced> {
        Verdict::Make((), shelf.pop_until(REDUCTIONS_MAX))
    }
}

/// Scales of bands, the last ones.
#[derive(Debug)]
pub(super) struct KeptScales {
    pub(super) scales: LruCache<(u64, u64), Arc<BandScales>>,
    pub(super) bytes: usize,
}

/// The scales of a band, and the files of its weights.
#[derive(Debug)]
pub(super) struct BandScales {
    pub(super) bytes: Vec<u8>,
    pub(super) files: SmallVec<[FileId; 2]>,
}

/// What bands of an encoding are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum BandInput {
    /// The elements.
    Values,
    /// The scales with which they are stored, where these are kept.
    Scales,
}

/// What the engine keeps of encoders.
pub(super) struct Encoded {
    pub(super) lowered: Mutex<LruCache<(u64, BandInput), Arc<Tiling>>>,
    pub(super) reductions: SingleFlight<(u64, u64), Reduced, LastReductions>,
    pub(super) scales: Mutex<KeptScales>,
    /// Room for scales in the memory of tiles, once any were made.
    pub(super) room: OnceLock<Option<Reservation>>,
}

impl Default for Encoded {
    fn default() -> Self {
        Self {
            lowered: Mutex::new(LruCache::new(LOWERED_MAX)),
            reductions: SingleFlight::new(LastReductions, Arc::default()),
            scales: Mutex::new(KeptScales { scales: LruCache::unbounded(), bytes: 0 }),
            room: OnceLock::new(),
        }
    }
}
