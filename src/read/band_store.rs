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

/// The scales of a band, and the files of its weights.
#[derive(Debug)]
pub(super) struct BandScales {
    pub(super) bytes: Vec<u8>,
    pub(super) files: SmallVec<[FileId; 2]>,
}

impl Weight for BandScales {
    fn weight_bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// What the engine keeps of encoders.
pub(super) struct Encoded {
    /// The inputs of encodings by id, and (`true`) the scales with which they are stored, where these are kept.
    pub(super) lowered: Mutex<LruCache<(u64, bool), Arc<Tiling>>>,
    pub(super) reductions: SingleFlight<(u64, u64), Reduced, LastReductions>,
    /// Scales of bands, the last ones.
    pub(super) scales: Mutex<Shelf<(u64, u64), BandScales>>,
    /// Room for scales in the memory of tiles, once any were made.
    pub(super) room: OnceLock<Option<Reservation>>,
}

impl Default for Encoded {
    fn default() -> Self {
        Self {
            lowered: Mutex::new(LruCache::new(LOWERED_MAX)),
            reductions: SingleFlight::new(LastReductions, Arc::default()),
            scales: Mutex::new(Shelf::default()),
            room: OnceLock::new(),
        }
    }
}
