//! The source bytes of a piece.

use smallvec::{SmallVec, smallvec};

use super::{
    ByteRuns, Origin, Piece, TensorId, Tiling,
    span::{byte_runs, operand_runs},
};

/// The runs of a piece.
type PieceRuns = SmallVec<[(TensorId, ByteRuns); 1]>;

/// The runs of what an encoder makes: those of all pieces that it is made from.
fn of_encoded(tiling: &Tiling, piece: &Piece, of: &dyn Fn(&Tiling, &Piece) -> PieceRuns) -> PieceRuns {
    let mut found = PieceRuns::new();
    // A view without a tiling was refused when the plan was made.
    let _ = tiling.for_each_stored_piece(piece, &mut |tiling, piece| found.extend(of(tiling, piece)));
    found
}

impl ByteRuns {
    /// As [`ByteRuns::of`], but of all operands of a decoder whose tensors are wanted.
    pub fn of_some(
        tiling: &Tiling,
        piece: &Piece,
        is_wanted: &dyn Fn(TensorId) -> bool,
    ) -> SmallVec<[(TensorId, Self); 1]> {
        if let Origin::Encoded { .. } = piece.origin {
            return of_encoded(tiling, piece, &|tiling, piece| Self::of_some(tiling, piece, is_wanted));
        }
        let Origin::Tensor { offset, decoder, .. } = piece.origin else { return SmallVec::new() };
        let Some(value) = tiling.decoders()[decoder as usize].value() else { return Self::of(tiling, piece) };
        let mut found = SmallVec::new();
        value.for_each_operand(&mut |operand| {
            let id = operand.tensor.id;
            if is_wanted(id) {
                found.extend(operand_runs(operand, offset, &piece.loops).into_iter().map(|runs| (id, runs)));
            }
        });
        found
    }

    /// The runs that a piece reads, with their tensor. None if it is filled with a constant. Of a quantized tensor only the codes,
    /// which may be several sets of runs.
    ///
    /// # Panics
    /// Never: what decodes no value reads elements of whole bytes.
    pub fn of(tiling: &Tiling, piece: &Piece) -> SmallVec<[(TensorId, Self); 1]> {
        if let Origin::Encoded { .. } = piece.origin {
            return of_encoded(tiling, piece, &Self::of);
        }
        let Origin::Tensor { tensor, offset, decoder } = piece.origin else { return SmallVec::new() };
        let decode = &tiling.decoders()[decoder as usize];
        if let Some(value) = decode.value() {
            return operand_runs(&value.load, offset, &piece.loops).into_iter().map(|runs| (tensor, runs)).collect();
        }
        let unit = decode.source_bytes(tiling.unit_bytes()).expect("what decodes no value reads elements");
        let bits = 8 * unit;
        let loops = piece.loops.iter().map(|l| (l.extent, l.source_stride * bits));
        smallvec![(tensor, byte_runs(offset * bits, loops, bits))]
    }
}
