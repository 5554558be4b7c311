//! The four stages together: fills a span of a view.
//!
//! Jobs over mapped files run as they are found, each over windows of the maps. All others are scheduled first. The calling
//! thread fetches their batches one after the other. While it waits for a batch, scoped threads make the bytes of the batch
//! before: a large target is cut into parts, one for each thread.

use ckfs_source::FileId;
use ckfs_sync::{Helpers, processors};
use ckfs_tensor::{Origin, Stores, TensorId, Tiling, WorkSlice, to_usize};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    Engine, ReadError,
    counters::Path,
    fetch,
    plan_jobs::{Job, plan_jobs},
    scatter::{scatter, scatter_batch},
    schedule::{Batch, BatchLimits, schedule},
};

/// Most bytes of a batch: large enough for any storage, and small enough that two batches and the bytes made from one leave room
/// for everything else.
const BATCH_BYTES_MAX: u64 = 16 << 20;
/// Most spans of a batch. Each needs about 100 bytes of memory besides its data.
const BATCH_SPANS_MAX: u64 = 16 << 10;
/// Least bytes of a target that several threads fill.
const PARALLEL_BYTES_MIN: usize = 8 << 20;

/// Threads that make bytes with their readers.
static SCATTERING: Helpers = Helpers::new("ckfs-scatter", || 2 * processors());

/// How bytes are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct FillMode {
    pub(super) path: Path,
    pub(super) stores: Stores,
    pub(super) slice: WorkSlice,
}

impl FillMode {
    pub(super) const fn cached(path: Path) -> Self {
        Self { path, stores: Stores::Cached, slice: WorkSlice::WHOLE }
    }
}

/// Source files touched while bytes were made.
pub(super) type TouchedFiles = SmallVec<[FileId; 2]>;

pub(super) fn touch(touched: &mut TouchedFiles, files: &[FileId]) {
    for file in files {
        if !touched.contains(file) {
            touched.push(*file);
        }
    }
}

impl Engine {
    /// Fills `target`, which holds units `first..last` of a tiling, with the units of the work slice. Returns their number.
    pub(super) fn fill_span(
        &self,
        tiling: &Tiling,
        first: u64,
        last: u64,
        target: &mut [u8],
        touched: &mut TouchedFiles,
        mode: FillMode,
    ) -> Result<u64, ReadError> {
        let (mut made, mut result) = (0, Ok(()));
        let mut unmapped: SmallVec<[Job<'_>; 2]> = SmallVec::new();
        plan_jobs(tiling, mode.slice, first, last, &mut |job| {
            if result.is_err() {
                return;
            }
            made += job.piece.units();
            match job.piece.origin {
                Origin::Fill { .. } => scatter(&job, &job.piece, &[], target, mode.stores),
                Origin::Encoded { leaf, .. } => {
                    result = self.fill_encoded(&tiling.encoded()[leaf as usize], &job, target, touched, mode);
                }
                Origin::Tensor { .. } => {
                    let wanted = job.wanted();
                    for wanted in &wanted {
                        touch(touched, &[self.checkpoint.tensor(wanted.tensor).file()]);
                        self.counters.fetch(mode.path, wanted.bytes());
                    }
                    match self.source().maps().filter(|_| fetch::are_mapped(&self.checkpoint, &wanted)) {
                        Some(maps) => {
                            result = fetch::through_maps(&self.checkpoint, maps, &wanted, &[], &mut |windows| {
                                scatter(&job, &job.piece, windows, target, mode.stores);
                            });
                        }
                        None => unmapped.push(job),
                    }
                }
            }
        });
        result?;
        if !unmapped.is_empty() {
            self.fill_in_batches(unmapped, tiling, target, mode)?;
        }
        Ok(made)
    }

    /// Runs jobs over files that are not mapped.
    fn fill_in_batches(
        &self,
        jobs: SmallVec<[Job<'_>; 2]>,
        tiling: &Tiling,
        target: &mut [u8],
        mode: FillMode,
    ) -> Result<(), ReadError> {
        // One batch is fetched while another is in use.
        let bytes = (self.options().thread_buffer_bytes as u64 / 2).clamp(1, BATCH_BYTES_MAX);
        let limits = BatchLimits { bytes, spans: BATCH_SPANS_MAX, gap_bytes: self.source().gap_bytes() };
        let place = |tensor: TensorId| {
            let info = self.checkpoint.tensor(tensor);
            (info.file(), info.span())
        };
        let batches = schedule(jobs, limits, &place)?;
        let threads = processors().min(self.rooms.workers.count + 1);
        // Several threads materialize a file already.
        let alone = threads == 1 || mode.stores == Stores::Streamed;
        if batches.len() == 1 || alone || target.len() < PARALLEL_BYTES_MIN {
            for batch in &batches {
                let memory = fetch::fetch(&self.checkpoint, &self.rooms.buffers, batch)?;
                scatter_batch(batch, &memory, 0, target, mode.stores);
            }
            return Ok(());
        }
        let part_units = part_units(tiling, target.len(), threads);
        let mut ready = None;
        for batch in batches.iter().map(Some).chain([None]) {
            let fetched = self.fetch_beside(batch, ready.take(), tiling, part_units, target, mode.stores)?;
            ready = batch.zip(fetched);
        }
        Ok(())
    }

    /// Fetches a batch while other threads make the bytes of the batch before, which is `ready`; then helps them.
    fn fetch_beside(
        &self,
        next: Option<&Batch<'_>>,
        ready: Option<(&Batch<'_>, super::buffer::Buffer)>,
        tiling: &Tiling,
        part_units: u64,
        target: &mut [u8],
        stores: Stores,
    ) -> Result<Option<super::buffer::Buffer>, ReadError> {
        let fetch_next = || next.map(|batch| fetch::fetch(&self.checkpoint, &self.rooms.buffers, batch)).transpose();
        let Some((batch, memory)) = ready else { return fetch_next() };
        let parts: Vec<(u64, &mut [u8])> = (0..)
            .step_by(to_usize(part_units))
            .zip(target.chunks_mut(to_usize(part_units * tiling.unit_bytes())))
            .collect();
        let count = parts.len();
        let parts = Mutex::new(parts);
        let make = || {
            while let Some((first, part)) = { parts.lock().pop() } {
                scatter_batch(batch, &memory, first, part, stores);
            }
        };
        let own = || {
            let fetched = fetch_next();
            make();
            fetched
        };
        SCATTERING.beside(count.max(2) - 1, make, own)
    }
}

/// Units of one part of a target that several threads fill: whole rows if the tiling transposes its source.
fn part_units(tiling: &Tiling, target_bytes: usize, threads: usize) -> u64 {
    let units = target_bytes as u64 / tiling.unit_bytes();
    let row = tiling.transposed_stride_units().unwrap_or(1);
    units.div_ceil(threads as u64).next_multiple_of(row.max(1))
}
