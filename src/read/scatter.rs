//! Stage 4: from fetched windows to the bytes of a view: gather, decode, convert. Pure.

use ckfs_tensor::{Gather, Origin, Piece, Stores, Window, fill, gather, to_usize};
use smallvec::SmallVec;

use super::{plan_jobs::Job, schedule::Batch};

/// Runs a job for a piece of it, over one window for each of its operands. A constant has none.
pub(super) fn scatter(job: &Job<'_>, piece: &Piece, windows: &[Window<'_>], target: &mut [u8], stores: Stores) {
    let offset = match piece.origin {
        Origin::Tensor { offset, .. } | Origin::Encoded { offset, .. } => offset,
        Origin::Fill { bytes } => return fill(&bytes[..to_usize(job.unit_bytes)], &piece.loops, piece.start, target),
    };
    let strided = Gather {
        decode: job.decode,
        target_bytes: job.unit_bytes,
        loops: &piece.loops,
        source_offset: offset,
        target_offset: piece.start,
    };
    gather(stores, &strided, windows, target);
}

/// Runs the jobs of a batch, whose bytes are in `memory`, as far as they fill `part`: units from `first` on.
pub(super) fn scatter_batch(batch: &Batch<'_>, memory: &[u8], first: u64, part: &mut [u8], stores: Stores) {
    for step in &batch.steps {
        let windows: SmallVec<[Window<'_>; 4]> = step
            .windows
            .iter()
            .map(|window| {
                let at = to_usize(window.at);
                Window { bytes: &memory[at..at + to_usize(window.len_bytes)], start: window.start }
            })
            .collect();
        let last = first + part.len() as u64 / step.job.unit_bytes;
        if first == 0 && step.job.piece.last() < last {
            scatter(&step.job, &step.job.piece, &windows, part, stores);
            continue;
        }
        step.job.piece.cut(first, last, &mut |mut piece| {
            piece.start -= first;
            scatter(&step.job, &piece, &windows, part, stores);
        });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{
        super::{
            plan_jobs::plan_jobs,
            schedule::{BatchLimits, schedule},
        },
        *,
    };
    use ckfs_source::{ByteSpan, FileId};
    use ckfs_tensor::{DType, Shape, SourceTensor, TensorId, View, WorkSlice};

    /// Byte `at` of a tensor.
    fn byte(tensor: TensorId, at: u64) -> u8 {
        ((at.wrapping_mul(2_654_435_761) >> 7) ^ (u64::from(tensor.0) * 91)).to_le_bytes()[0]
    }

    fn place(tensor: TensorId) -> (FileId, ByteSpan) {
        (FileId(tensor.0), ByteSpan::new(0, 1 << 20).unwrap())
    }

    proptest! {
        /// A stack of transposed slices gives the same bytes in one window and in small batches, as a whole and in parts.
        #[test]
        fn small_batches_and_parts_give_the_same_bytes(
            rows in 2..40u64,
            columns in 2..40u64,
            low in 0..2u64,
            bytes in 8..4096u64,
            gap_bytes in 0..64u64,
            parts in 1..5usize,
        ) {
            let of = |id| {
                let shape = Shape::try_new(&[rows, columns]).unwrap();
                let source = View::source(SourceTensor { id: TensorId(id), dtype: DType::BF16, shape });
                source.slice(1, low, columns, 1).unwrap().reverse_axes()
            };
            let view = View::stack(1, &[of(0), of(1)]).unwrap();
            let tiling = view.lower().unwrap();
            let len = to_usize(tiling.len_bytes());
            let mut jobs = Vec::new();
            plan_jobs(&tiling, WorkSlice::WHOLE, 0, tiling.len_units(), &mut |job| jobs.push(job));
            let mut expected = vec![0; len];
            for job in &jobs {
                let tensor = job.wanted()[0].tensor;
                let whole: Vec<u8> = (0..rows * columns * 2).map(|at| byte(tensor, at)).collect();
                scatter(job, &job.piece, &[Window::whole(&whole)], &mut expected, Stores::Cached);
            }
            // And the same bytes as by definition.
            let element = |at: usize| u16::from_le_bytes([expected[2 * at], expected[2 * at + 1]]);
            let source = |tensor: u32, at: u64| u16::from_le_bytes([byte(TensorId(tensor), 2 * at), byte(TensorId(tensor), 2 * at + 1)]);
            for (column, (layer, row)) in (low..columns).flat_map(|c| (0..2).flat_map(move |l| (0..rows).map(move |r| (c, (l, r))))) {
                let at = to_usize(((column - low) * 2 + u64::from(layer)) * rows + row);
                prop_assert_eq!(element(at), source(layer, row * columns + column));
            }
            let limits = BatchLimits { bytes, spans: 16, gap_bytes };
            let mut found = vec![0; len];
            let part_units = tiling.len_units().div_ceil(parts as u64);
            for batch in schedule(jobs, limits, &place).unwrap() {
                let mut memory = vec![0xa7; to_usize(batch.len_bytes)];
                for fetch in &batch.fetches {
                    for n in 0..fetch.span.len() {
                        memory[to_usize(fetch.at + n)] = byte(TensorId(fetch.file.0), fetch.span.start() + n);
                    }
                }
                let chunks = found.chunks_mut(to_usize(part_units * 2)).enumerate();
                chunks.for_each(|(n, part)| scatter_batch(&batch, &memory, n as u64 * part_units, part, Stores::Cached));
            }
            prop_assert_eq!(found, expected);
        }
    }
}
