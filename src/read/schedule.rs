//! Stage 2: from the needs of jobs to the spans to fetch, their order, and their places in memory. Pure.
//!
//! A job that needs more memory than the limit is cut in halves, between lines of its source, until each part fits. Source bytes
//! that a job skips are not fetched where that saves as many bytes as another request costs. The job's spans then lie one after the
//! other in memory, and its loops step through memory instead of through the tensor. Jobs are sorted by file and form *batches*,
//! each fetched in one call per file.
//!
//! The schedule does not fetch, and does not know whether a file is mapped. Windows of mapped files need no schedule: they cost
//! nothing.

use ckfs_source::{ByteSpan, FileId};
use ckfs_tensor::{Loop, Need, Origin, TensorId};
use smallvec::SmallVec;

use super::{ReadError, plan_jobs::Job};

/// Bounds of one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchLimits {
    /// Bytes of memory. A single element may take more, and the terms of a sum of products come on top.
    pub(super) bytes: u64,
    /// Spans to be fetched. Each costs some memory besides its data.
    pub(super) spans: u64,
    /// Bytes between two spans up to which they are fetched as one.
    pub(super) gap_bytes: u64,
}

/// The place of one operand's fetched bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchWindow {
    /// First byte in the memory of the batch.
    pub(super) at: u64,
    pub(super) len_bytes: u64,
    /// Number of the first byte, as the job counts its source.
    pub(super) start: u64,
}

/// A job, and a window for each of its operands.
#[derive(Clone, Debug)]
pub(super) struct BatchStep<'a> {
    pub(super) job: Job<'a>,
    pub(super) windows: SmallVec<[BatchWindow; 1]>,
}

/// Bytes to be fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fetch {
    pub(super) file: FileId,
    pub(super) span: ByteSpan,
    /// First byte in the memory of the batch.
    pub(super) at: u64,
    /// The tensor that contains the first of them.
    pub(super) tensor: TensorId,
}

/// Bytes that are fetched together, and the jobs that use them.
#[derive(Clone, Debug, Default)]
pub(super) struct Batch<'a> {
    pub(super) steps: Vec<BatchStep<'a>>,
    /// By place in memory: each begins where the one before ends, or later.
    pub(super) fetches: Vec<Fetch>,
    /// Memory for the fetched bytes.
    pub(super) len_bytes: u64,
}

/// The file of a tensor, and its span in that file.
pub(super) type Locate<'p> = &'p dyn Fn(TensorId) -> (FileId, ByteSpan);

/// The batches that run `jobs`.
///
/// # Errors
/// [`ReadError::Internal`] if a job reads outside its tensor.
pub(super) fn schedule<'a>(
    jobs: impl IntoIterator<Item = Job<'a>>,
    limits: BatchLimits,
    locate: Locate<'_>,
) -> Result<Vec<Batch<'a>>, ReadError> {
    let mut layouts = Vec::new();
    let mut waiting: Vec<Job<'a>> = Vec::new();
    for job in jobs {
        waiting.push(job);
        while let Some(job) = waiting.pop() {
            let found = lay_out(&job, limits, locate)?;
            // Halves of a sum of products need the same terms: what is left of them is within the limit.
            let (bytes, spans) = job.least();
            let is_too_much = found.len_bytes > limits.bytes.saturating_add(bytes)
                || found.spans > limits.spans.saturating_add(spans);
            if is_too_much && let Some((first, second)) = job.piece.halves() {
                waiting.push(Job { piece: second, ..job.clone() });
                waiting.push(Job { piece: first, ..job });
                continue;
            }
            layouts.push((job, found));
        }
    }
    layouts.sort_by_key(|(_, layout)| layout.first);
    let mut batches = Vec::new();
    let mut batch = Batch::default();
    for (job, found) in layouts {
        let full =
            batch.len_bytes + found.len_bytes > limits.bytes || batch.fetches.len() as u64 + found.spans > limits.spans;
        if full && !batch.steps.is_empty() {
            batches.push(std::mem::take(&mut batch));
        }
        batch.add(job, &found, limits, locate)?;
    }
    if !batch.steps.is_empty() {
        batches.push(batch);
    }
    Ok(batches)
}

/// The memory and the spans that a job takes.
struct JobLayout {
    wanted: SmallVec<[Need; 1]>,
    memory: Option<MemoryLayout>,
    len_bytes: u64,
    spans: u64,
    /// The first needed byte, for the order of jobs.
    first: (FileId, u64),
}

fn lay_out(job: &Job<'_>, limits: BatchLimits, locate: Locate<'_>) -> Result<JobLayout, ReadError> {
    let wanted = job.wanted();
    let memory = job.source_bytes().map(|unit| MemoryLayout::new(&job.piece.loops, limits.gap_bytes / unit));
    let (len_bytes, spans) = if let (Some(memory), Some(unit)) = (&memory, job.source_bytes()) {
        (memory.len_units * unit, memory.apart.iter().map(|(extent, _)| extent).product())
    } else {
        let spans: usize = wanted.iter().map(|wanted| wanted.spans(limits.gap_bytes).len()).sum();
        (wanted.iter().map(|wanted| wanted.end() - wanted.start()).sum(), spans as u64)
    };
    let Some(first) = wanted.first() else { return Err(ReadError::Internal { what: "a job needs nothing" }) };
    let (file, span) = locate(first.tensor);
    let first = (file, span.start() + first.start());
    Ok(JobLayout { wanted, memory, len_bytes, spans, first })
}

impl<'a> Batch<'a> {
    fn add(
        &mut self,
        mut job: Job<'a>,
        layout: &JobLayout,
        limits: BatchLimits,
        locate: Locate<'_>,
    ) -> Result<(), ReadError> {
        let mut windows = SmallVec::new();
        if let (Some(memory), Some(unit), [wanted]) = (&layout.memory, job.source_bytes(), &layout.wanted[..]) {
            let (at, first, block) = (self.len_bytes, wanted.start(), memory.block_units * unit);
            for (number, units) in (0..).zip(memory.blocks()) {
                self.fetch(wanted.tensor, first + units * unit, block, at + number * block, locate)?;
            }
            memory.step_through_memory(&mut job);
            windows.push(BatchWindow { at, len_bytes: layout.len_bytes, start: 0 });
            self.len_bytes += layout.len_bytes;
        } else {
            for wanted in &layout.wanted {
                let (at, first) = (self.len_bytes, wanted.start());
                let len_bytes = wanted.end() - first;
                for (start, end) in wanted.spans(limits.gap_bytes) {
                    self.fetch(wanted.tensor, start, end - start, at + start - first, locate)?;
                }
                windows.push(BatchWindow { at, len_bytes, start: first });
                self.len_bytes += len_bytes;
            }
        }
        self.steps.push(BatchStep { job, windows });
        Ok(())
    }

    /// Adds bytes of a tensor. They are fetched with the last ones if they continue these in the file and in memory.
    fn fetch(&mut self, tensor: TensorId, start: u64, len: u64, at: u64, locate: Locate<'_>) -> Result<(), ReadError> {
        let (file, whole) = locate(tensor);
        let Some(span) = ByteSpan::of_len(start, len).and_then(|part| whole.slice(part)) else {
            return Err(ReadError::Internal { what: "a piece leaves its tensor" });
        };
        if let Some(last) = self.fetches.last_mut()
            && last.file == file
            && last.span.end() == span.start()
            && last.at + last.span.len() == at
            && let Some(both) = ByteSpan::new(last.span.start(), span.end())
        {
            last.span = both;
        } else {
            self.fetches.push(Fetch { file, span, at, tensor });
        }
        Ok(())
    }
}

/// The layout of strided source units in memory, without the larger gaps between them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MemoryLayout {
    /// Loops over blocks that lie apart, by falling source stride: extent and stride in units.
    apart: SmallVec<[(u64, u64); 4]>,
    /// Their indices among the loops of the piece.
    indices: SmallVec<[usize; 4]>,
    /// Units of one block, gaps within it included.
    block_units: u64,
    /// Units of all blocks.
    len_units: u64,
}

impl MemoryLayout {
    fn new(loops: &[Loop], gap_units: u64) -> Self {
        let mut order: SmallVec<[usize; 4]> = (0..loops.len()).collect();
        order.sort_by_key(|index| loops[*index].source_stride);
        // From the innermost loop outwards: a block grows while its turns lie within the gap, and then repeats.
        let (mut bounding_units, mut block_units): (u64, u64) = (1, 1);
        let mut indices: SmallVec<[usize; 4]> = SmallVec::new();
        for index in order {
            let Loop { extent, source_stride, .. } = loops[index];
            let is_apart = source_stride >= bounding_units
                && (!indices.is_empty() || source_stride > block_units.saturating_add(gap_units));
            bounding_units += (extent - 1) * source_stride;
            if is_apart {
                indices.push(index);
            } else {
                // If blocks of different turns interleave, all are one block.
                indices.clear();
                block_units = bounding_units;
            }
        }
        indices.reverse();
        let apart: SmallVec<[(u64, u64); 4]> =
            indices.iter().map(|index| (loops[*index].extent, loops[*index].source_stride)).collect();
        let len_units = apart.iter().map(|(extent, _)| extent).product::<u64>() * block_units;
        Self { apart, indices, block_units, len_units }
    }

    /// The first unit of each block, relative to the first of all, in order.
    fn blocks(&self) -> impl Iterator<Item = u64> {
        (0..self.len_units / self.block_units).map(|mut number| {
            let place = |at: u64, (extent, stride): &(u64, u64)| {
                let turn = number % extent;
                number /= extent;
                at + turn * stride
            };
            self.apart.iter().rev().fold(0, place)
        })
    }

    /// Changes the loops of a job to loops over its blocks in memory.
    fn step_through_memory(&self, job: &mut Job<'_>) {
        let mut stride = self.block_units;
        for index in self.indices.iter().rev() {
            let l = &mut job.piece.loops[*index];
            l.source_stride = stride;
            stride *= l.extent;
        }
        if let Origin::Tensor { offset, .. } = &mut job.piece.origin {
            *offset = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{super::plan_jobs::plan_jobs, *};
    use ckfs_tensor::{DType, Decode, Piece, Shape, SourceTensor, View, WorkSlice};

    const FILE: FileId = FileId(3);
    const TENSOR_AT: u64 = 1000;

    fn at(tensor: TensorId) -> (FileId, ByteSpan) {
        let start = TENSOR_AT + u64::from(tensor.0) * (1 << 20);
        (FILE, ByteSpan::of_len(start, 1 << 20).unwrap())
    }

    fn job(tensor: u32, offset: u64, loops: &[(u64, u64, u64)]) -> Job<'static> {
        let one = |(extent, target_stride, source_stride): &(u64, u64, u64)| Loop {
            extent: *extent,
            target_stride: *target_stride,
            source_stride: *source_stride,
        };
        let origin = Origin::Tensor { tensor: TensorId(tensor), offset, decoder: 0 };
        let piece = Piece { start: 0, loops: loops.iter().map(one).collect(), origin };
        Job { piece, decode: &Decode::Copy, unit_bytes: 2 }
    }

    fn limits(bytes: u64, gap_bytes: u64) -> BatchLimits {
        BatchLimits { bytes, spans: 1 << 20, gap_bytes }
    }

    fn spans(batch: &Batch<'_>) -> Vec<(u64, u64)> {
        batch.fetches.iter().map(|fetch| (fetch.span.start() - TENSOR_AT, fetch.span.len())).collect()
    }

    #[test]
    fn columns_are_fetched_apart_beyond_the_gap_and_together_within_it() {
        // Eight rows of ten units, of which four are needed.
        let columns = job(0, 3, &[(8, 4, 10), (4, 1, 1)]);
        let apart = schedule([columns.clone()], limits(1 << 20, 11), &at).unwrap();
        assert_eq!(spans(&apart[0]), (0..8).map(|row| (6 + 20 * row, 8)).collect::<Vec<_>>());
        assert_eq!((apart.len(), apart[0].len_bytes, apart[0].steps[0].job.piece.loops[0].source_stride), (1, 64, 4));
        let together = schedule([columns], limits(1 << 20, 12), &at).unwrap();
        assert_eq!((spans(&together[0]), together[0].len_bytes), (vec![(6, 148)], 148));
    }

    #[test]
    fn large_jobs_are_cut_between_lines_and_neighbours_are_fetched_together() {
        let matrix = |tensor| job(tensor, 0, &[(1024, 1, 512), (512, 1024, 1)]);
        let batches = schedule([matrix(1), matrix(0)], limits(256 << 10, 1024), &at).unwrap();
        let expected: Vec<_> = (0..8).map(|part| vec![(part << 18, 1 << 18)]).collect();
        assert_eq!(batches.iter().map(spans).collect::<Vec<_>>(), expected, "in the order of the file");
        // Both ends of each row of ten: the end of a row and the start of the next are one request.
        let ends = job(0, 0, &[(4, 4, 10), (2, 2, 8), (2, 1, 1)]);
        let batches = schedule([ends], limits(1 << 20, 4), &at).unwrap();
        assert_eq!(spans(&batches[0]), [(0, 4), (16, 8), (36, 8), (56, 8), (76, 4)]);
        // Small tensors one after the other in the file are one request.
        let row = |start| job(0, start, &[(100, 1, 1)]);
        let batches = schedule([row(100), row(0), row(200)], limits(1 << 20, 0), &at).unwrap();
        assert_eq!((batches.len(), spans(&batches[0])), (1, vec![(0, 600)]));
        let few = BatchLimits { spans: 2, ..limits(1 << 20, 0) };
        let batches = schedule((0..5).map(|n| job(0, 50 * n, &[(10, 1, 1)])), few, &at).unwrap();
        assert_eq!(batches.iter().map(|batch| batch.fetches.len()).collect::<Vec<_>>(), [2, 2, 1]);
    }

    /// A matrix whose rows are longer than the limit, as the factor of a product, does not cut the product into single elements.
    #[test]
    fn a_product_is_cut_into_parts_that_share_the_terms_of_a_factor() {
        let matrix = |id, extents: &[u64]| {
            let shape = Shape::try_new(extents).unwrap();
            View::source(SourceTensor { id: TensorId(id), dtype: DType::BF16, shape })
        };
        let view = View::matrix_product(&matrix(0, &[64, 32]), &matrix(1, &[32, 4096])).unwrap();
        let tiling = view.lower().unwrap();
        let mut jobs = Vec::new();
        plan_jobs(&tiling, WorkSlice::WHOLE, 0, tiling.len_units(), &mut |job| jobs.push(job));
        let (limit, terms) = (64 << 10, 31 * 4096 * 2 + 31 * 2);
        assert_eq!(jobs[0].least(), (terms, 2 * 31));
        let batches = schedule(jobs, limits(limit, 0), &at).unwrap();
        let sizes: Vec<u64> = batches.iter().map(|batch| batch.len_bytes).collect();
        assert!(batches.len() <= 16, "{}: {sizes:?}", batches.len());
        let elements: u64 = batches.iter().flat_map(|batch| &batch.steps).map(|step| step.job.piece.units()).sum();
        assert_eq!(elements, 64 * 4096);
        assert!(sizes.iter().all(|bytes| *bytes <= limit + terms), "{sizes:?}");
    }

    #[test]
    fn a_job_that_leaves_its_tensor_is_refused() {
        let beyond = job(0, 1 << 19, &[(2, 1, 1)]);
        assert!(matches!(schedule([beyond], limits(1 << 20, 0), &at), Err(ReadError::Internal { .. })));
    }

    /// Source units of a piece by their target unit.
    fn units(piece: &Piece) -> Vec<(u64, u64)> {
        let Origin::Tensor { offset, .. } = piece.origin else { unreachable!() };
        let mut all = vec![(piece.start, offset)];
        for l in &piece.loops {
            let step = |(t, s): &(u64, u64), n: u64| (t + n * l.target_stride, s + n * l.source_stride);
            all = all.iter().flat_map(|at| (0..l.extent).map(move |n| step(at, n))).collect();
        }
        all
    }

    proptest! {
        /// For any loops and limits: each target unit finds its source unit in the memory of its batch. No batch is larger than
        /// allowed unless it is one unit. No byte is fetched that is further than the gap from a needed one, unless turns of
        /// loops interleave in the source.
        #[test]
        fn every_unit_is_where_its_loops_say(
            extents in prop::collection::vec((1..6u64, 0..40u64), 0..4),
            offset in 0..50u64,
            bytes in 2..400u64,
            gap_bytes in 0..60u64,
        ) {
            let mut target_stride = 1;
            let loops: Vec<(u64, u64, u64)> = extents
                .iter()
                .filter(|(extent, _)| *extent > 1)
                .map(|(extent, source_stride)| {
                    let l = (*extent, target_stride, *source_stride);
                    target_stride *= extent;
                    l
                })
                .rev()
                .collect();
            let whole = job(0, offset, &loops);
            let mut by_stride: Vec<(u64, u64)> = loops.iter().map(|(extent, _, stride)| (*stride, *extent)).collect();
            by_stride.sort_unstable();
            let mut bounding_units = 0;
            let nested = by_stride.iter().all(|(stride, extent)| {
                let nested = *stride > bounding_units;
                bounding_units += (extent - 1) * stride;
                nested
            });
            let mut expected = units(&whole.piece);
            let batches = schedule([whole], limits(bytes, gap_bytes), &at).unwrap();
            let mut found = Vec::new();
            for batch in &batches {
                prop_assert!(batch.len_bytes <= bytes || batch.steps.len() == 1 && batch.steps[0].job.piece.units() == 1);
                // The content of memory, in units of the tensor.
                let mut memory = std::collections::HashMap::new();
                for fetch in &batch.fetches {
                    for n in 0..fetch.span.len() {
                        prop_assert!(memory.insert(fetch.at + n, fetch.span.start() + n - TENSOR_AT).is_none());
                    }
                }
                let mut needed = Vec::new();
                for step in &batch.steps {
                    let window = step.windows[0];
                    for (target, unit) in units(&step.job.piece) {
                        let byte = window.at + unit * 2 - window.start;
                        prop_assert!(byte + 2 <= window.at + window.len_bytes);
                        let source = memory[&byte];
                        prop_assert_eq!(memory[&(byte + 1)], source + 1);
                        needed.push(source);
                        found.push((target, source / 2));
                    }
                }
                for byte in memory.values() {
                    let near = needed.iter().any(|start| byte.abs_diff(*start) <= gap_bytes + 2);
                    prop_assert!(near || !nested, "byte {} is fetched for nothing", byte);
                }
            }
            expected.sort_unstable();
            found.sort_unstable();
            prop_assert_eq!(found, expected);
        }
    }
}
