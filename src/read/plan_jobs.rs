//! Stage 1: from a span of a view to the source bytes that it needs. Pure.
//!
//! A span of a tiling is cut into parts of its pieces. Each part is a [`Job`]: a strided set of target elements from one tensor, from one
//! quantized tensor with several operands, or from an encoder, or one constant. [`Job::wanted`] returns which bytes of which tensors it
//! reads.

use ckfs_tensor::{Decode, Need, Origin, Piece, Tiling, WorkSlice, needs};
use smallvec::SmallVec;

/// A part of a view.
#[derive(Clone, Debug)]
pub(super) struct Job<'a> {
    /// Target and source places; `start` counts from the first unit of the span.
    pub(super) piece: Piece,
    pub(super) decode: &'a Decode,
    /// Bytes of one target unit.
    pub(super) unit_bytes: u64,
}

/// Emits the parts of units `first..last` of a tiling that are in a work slice, in no particular order.
pub(super) fn plan_jobs<'a>(
    tiling: &'a Tiling,
    slice: WorkSlice,
    first: u64,
    last: u64,
    emit: &mut dyn FnMut(Job<'a>),
) {
    tiling.cut_work_slice(slice, first, last, &mut |mut piece| {
        piece.start -= first;
        let decode = match piece.origin {
            Origin::Tensor { decoder, .. } | Origin::Encoded { decoder, .. } => &tiling.decoders()[decoder as usize],
            Origin::Fill { .. } => &Decode::Copy,
        };
        emit(Job { piece, decode, unit_bytes: tiling.unit_bytes() });
    });
}

impl Job<'_> {
    /// Bytes of one source unit; `None` for values of quantized tensors.
    pub(super) fn source_bytes(&self) -> Option<u64> {
        self.decode.source_bytes(self.unit_bytes)
    }

    /// What every part of this job needs, however small it is: the bytes from the first term of an element to the last, of all
    /// operands, and the number of terms. Both are 0 unless it sums products.
    pub(super) fn least(&self) -> (u64, u64) {
        let (mut bytes, mut count) = (0_u64, 0_u64);
        if let Some(value) = self.decode.value() {
            value.for_each_operand(&mut |operand| {
                let terms = operand.index.terms();
                let apart = (terms.count - 1).saturating_mul(terms.stride);
                bytes = bytes.saturating_add(apart.saturating_mul(operand.field.index_bits()) / 8);
                count = count.saturating_add(terms.count - 1);
            });
        }
        (bytes, count)
    }

    /// The needed bytes, one entry for each operand, in the order of the kernel's windows.
    pub(super) fn wanted(&self) -> SmallVec<[Need; 1]> {
        needs(self.decode, self.unit_bytes, &self.piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckfs_tensor::{DType, Shape, SourceTensor, TensorId, View};

    fn source(id: u32, extents: &[u64]) -> View {
        let shape = Shape::try_new(extents).unwrap();
        View::source(SourceTensor { id: TensorId(id), dtype: DType::BF16, shape })
    }

    #[test]
    fn a_span_of_stacked_transposes_needs_columns_of_each() {
        let of = |id| source(id, &[6, 4]).reverse_axes();
        let tiling = View::stack(1, &[of(0), of(1)]).unwrap().lower().unwrap();
        // Row 1 of [4, 2, 6]: column 1 of both.
        let mut found = Vec::new();
        plan_jobs(&tiling, WorkSlice::WHOLE, 12, 24, &mut |job| {
            let [wanted] = &job.wanted()[..] else { panic!("one tensor") };
            found.push((job.piece.start, wanted.tensor.0, wanted.start(), wanted.end(), wanted.bytes()));
        });
        found.sort_unstable();
        assert_eq!(found, [(0, 0, 2, 2 + 5 * 8 + 2, 12), (6, 1, 2, 2 + 5 * 8 + 2, 12)]);
    }

    #[test]
    fn constants_are_parts_of_their_own() {
        let padded = source(0, &[4]).pad(0, 1, 0).unwrap();
        let tiling = padded.lower().unwrap();
        let (mut constants, mut jobs) = (0, 0);
        plan_jobs(&tiling, WorkSlice::WHOLE, 0, tiling.len_units(), &mut |job| match job.piece.origin {
            Origin::Fill { bytes } => constants += job.piece.units() * u64::from(bytes == [0; 8]),
            Origin::Tensor { .. } => jobs += job.piece.units(),
            Origin::Encoded { .. } => panic!("nothing is encoded here"),
        });
        assert_eq!((constants, jobs), (1, 4));
    }
}
