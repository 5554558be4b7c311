//! What several test programs share: made-up tensors, a naive executor of tilings, and random views.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of this")]
#![allow(clippy::cast_possible_truncation, reason = "test data is small, and noise may be cut")]
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, missing_docs, reason = "tests panic")]

pub mod faulty;
pub mod repo;
pub mod views;

use std::{collections::HashMap, ops::Range};

use ckfs::{
    read::reference::{self, evaluate},
    tensor::{
        DType, Decode, Decoder, Gather, Origin, Piece, Program, Shape, SourceTensor, Step, TensorId, Tiling, View,
        fill, gather,
    },
};

/// Byte `at` of the made-up tensor `tensor`: noise in which every eighth word has all its exponent bits set and every
/// eighth has none, so that NaNs, infinities and subnormals are common in all types.
pub fn source_byte(tensor: TensorId, at: u64) -> u8 {
    let word = at / 8;
    let mut state = (u64::from(tensor.0) << 40 ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^= state >> 31;
    let pattern = match state >> 61 {
        0 => state & 0x807f_807f_8007_0003 | 0x7f80_7c00_7f80_7c78,
        1 => state & 0x8000_0001_8003_8183,
        _ => state,
    };
    pattern.to_le_bytes()[(at % 8) as usize]
}

pub fn source_bytes(tensor: TensorId, span: Range<u64>) -> Vec<u8> {
    span.map(|at| source_byte(tensor, at)).collect()
}

pub fn shape(extents: &[u64]) -> Shape {
    Shape::try_new(extents).unwrap()
}

pub fn tensor(id: u32, dtype: DType, extents: &[u64]) -> SourceTensor {
    SourceTensor { id: TensorId(id), dtype, shape: shape(extents) }
}

pub fn source(id: u32, dtype: DType, extents: &[u64]) -> View {
    View::source(tensor(id, dtype, extents))
}

/// All bytes of a view, by the reference evaluator.
pub fn reference_bytes(view: &View) -> Vec<u8> {
    let len = view.bytes().expect("whole bytes");
    evaluate(view, 0..len, |tensor, span| Ok(source_bytes(tensor, span))).unwrap()
}

/// How one unit is decoded: the decoder, the source tensor, the unit, and where the result goes.
pub type DecodeUnit = fn(&Decode, &dyn Fn(TensorId, Range<u64>) -> Vec<u8>, TensorId, u64, &mut [u8]);

/// Decodes with the scalar functions of the reference.
pub fn decode_by_reference(
    decode: &Decode,
    read: &dyn Fn(TensorId, Range<u64>) -> Vec<u8>,
    tensor: TensorId,
    unit: u64,
    target: &mut [u8],
) {
    let Decode::Program(program) = decode else {
        let bytes = target.len() as u64;
        target.copy_from_slice(&read(tensor, unit * bytes..(unit + 1) * bytes));
        return;
    };
    let element = |tensor, dtype: DType, number: u64| {
        let bytes = dtype.element_bytes().unwrap();
        let raw = read(tensor, number * bytes..(number + 1) * bytes);
        reference::widen(dtype, raw.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte)))
    };
    let value = program.steps.iter().fold(element(tensor, program.source, unit), |value, step| match step {
        Step::Round(dtype) => reference::widen(*dtype, reference::round(*dtype, value)),
        Step::Multiply { factor, flush } => reference::multiply(value, factor.to_bits(), *flush),
        Step::Add(addend) => reference::add(value, addend.to_bits()),
        Step::Scale(block) => {
            reference::multiply(value, element(block.tensor, block.dtype, block.scale_of(unit)), false)
        }
    });
    let bits = reference::round(program.target, value).to_le_bytes();
    target.copy_from_slice(&bits[..target.len()]);
}

/// Decodes with the scalar conversion that the kernels are checked against.
pub fn decode_by_conversion(
    decode: &Decode,
    read: &dyn Fn(TensorId, Range<u64>) -> Vec<u8>,
    tensor: TensorId,
    unit: u64,
    target: &mut [u8],
) {
    let Decode::Program(program) = decode else {
        return decode_by_reference(decode, read, tensor, unit, target);
    };
    let Program { source, .. } = program;
    let bytes = source.element_bytes().unwrap();
    let scale = program.block_scale().map_or(Vec::new(), |block| {
        let bytes = block.dtype.element_bytes().unwrap();
        read(block.tensor, 0..(block.scale_of(unit) + 1) * bytes)
    });
    let raw = read(tensor, unit * bytes..(unit + 1) * bytes);
    ckfs::tensor::convert::convert_scalar(program, &scale, &raw, unit, target);
}

/// Calls `visit` with the target unit and the source unit (relative to the origin's offset) of each unit of a piece.
pub fn for_each_unit(piece: &Piece, visit: &mut dyn FnMut(u64, u64)) {
    let mut counters = vec![0; piece.loops.len()];
    loop {
        let steps = || counters.iter().zip(&piece.loops);
        let target = piece.start + steps().map(|(n, l)| n * l.target_stride).sum::<u64>();
        visit(target, steps().map(|(n, l)| n * l.source_stride).sum());
        let mut at = counters.len();
        loop {
            if at == 0 {
                return;
            }
            at -= 1;
            counters[at] += 1;
            if counters[at] < piece.loops[at].extent {
                break;
            }
            counters[at] = 0;
        }
    }
}

/// Carries out a tiling unit by unit. Panics if pieces overlap, leave a hole, or read outside the tensors of `view`.
pub fn execute(view: &View, tiling: &Tiling, decode: DecodeUnit) -> Vec<u8> {
    let mut lengths = HashMap::new();
    view.for_each_source(&mut |tensor| {
        lengths.insert(tensor.id, tensor.dtype.bytes_of(tensor.shape.elements()).unwrap());
    });
    let read = |tensor, span: Range<u64>| {
        assert!(span.end <= lengths[&tensor], "{span:?} of {tensor:?}, which has {} bytes", lengths[&tensor]);
        source_bytes(tensor, span)
    };
    let width = tiling.unit_bytes() as usize;
    let mut target = vec![0; tiling.len_bytes() as usize];
    let mut done = vec![false; tiling.len_units() as usize];
    for piece in tiling.pieces() {
        for_each_unit(piece, &mut |at, from| {
            let at = at as usize;
            assert!(!std::mem::replace(&mut done[at], true), "unit {at} of {view} twice");
            let unit = &mut target[at * width..(at + 1) * width];
            match piece.origin {
                Origin::Tensor { tensor, offset, decoder } => {
                    decode(&tiling.decoders()[decoder as usize].decode, &read, tensor, offset + from, unit);
                }
                Origin::Fill { bytes } => unit.copy_from_slice(&bytes[..width]),
            }
        });
    }
    assert!(done.iter().all(|done| *done), "a hole in {view}");
    target
}

/// All bytes of a view through its tiling.
pub fn tiled_bytes(view: &View) -> Vec<u8> {
    execute(view, &view.lower().unwrap(), decode_by_reference)
}

/// Carries out `tiling` with the kernels, in stretches of `stretch_units` as tiles do.
pub fn gathered_bytes(view: &View, tiling: &Tiling, stretch_units: u64) -> Vec<u8> {
    let mut tensors = HashMap::new();
    view.for_each_source(&mut |tensor| {
        let len = tensor.dtype.bytes_of(tensor.shape.elements()).unwrap();
        tensors.entry(tensor.id).or_insert_with(|| source_bytes(tensor.id, 0..len));
    });
    let width = tiling.unit_bytes();
    let mut target = vec![0; tiling.len_bytes() as usize];
    let mut low = 0;
    while low < tiling.len_units() {
        let high = (low + stretch_units).min(tiling.len_units());
        let stretch = &mut target[(low * width) as usize..(high * width) as usize];
        tiling.cut(low, high, &mut |piece| match piece.origin {
            Origin::Tensor { tensor, offset, decoder } => {
                let Decoder { decode, source_bytes } = &tiling.decoders()[decoder as usize];
                let scale = match decode {
                    Decode::Copy => None,
                    Decode::Program(program) => program.block_scale(),
                };
                // Of the source, only the window that the piece may read.
                let window =
                    (offset * source_bytes) as usize..((offset + piece.source_hull_units()) * source_bytes) as usize;
                let job = Gather {
                    decode,
                    source_bytes: *source_bytes,
                    target_bytes: width,
                    loops: &piece.loops,
                    source_offset: offset,
                    target_offset: piece.start - low,
                };
                let scale = scale.map_or([].as_slice(), |scale| &tensors[&scale.tensor]);
                gather(&job, &tensors[&tensor][window], offset, scale, stretch);
            }
            Origin::Fill { bytes } => fill(&bytes[..width as usize], &piece.loops, piece.start - low, stretch),
        });
        low = high;
    }
    target
}
