//! Code that several test programs share: pseudo-random tensors, a naive executor of tilings, and random views.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of this")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "test data is small, and noise may be cut"
)]
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, missing_docs, reason = "tests panic")]

pub mod contract;
pub mod faulty;
pub mod objects;
pub mod repo;
pub mod sources;
pub mod views;

use std::{collections::HashMap, ops::Range};

use ckfs::{
    read::reference::{self, evaluate},
    tensor::{
        BitOrder, DType, Decode, Field, Gather, Load, Need, Operand, Operation, Origin, Piece, Program, Shape,
        SourceTensor, Step, Stores, TensorId, Term, Tiling, Value, View, Window, fill, gather, needs,
    },
};

/// Byte `at` of the pseudo-random tensor `tensor`. In every eighth word all exponent bits are set, and in every
/// eighth none is, so that NaNs, infinities and subnormals are common in all types.
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

/// Decodes with the scalar functions of the reference, which the kernels are checked against.
pub fn decode_by_reference(
    decode: &Decode,
    read: &dyn Fn(TensorId, Range<u64>) -> Vec<u8>,
    tensor: TensorId,
    unit: u64,
    target: &mut [u8],
) {
    let copies = |program: &Program| {
        program.steps.is_empty() && matches!(&program.load, Load::Element(dtype) if *dtype == program.target)
    };
    let program = match decode {
        Decode::Program(program) if !copies(program) => program,
        Decode::Program(_) | Decode::Copy => {
            let bytes = target.len() as u64;
            target.copy_from_slice(&read(tensor, unit * bytes..(unit + 1) * bytes));
            return;
        }
    };
    let loaded = match &program.load {
        Load::Element(dtype) => element(read, tensor, *dtype, unit),
        Load::Value(value) => value_by_reference(value, read, unit),
    };
    let value = after_steps(&program.steps, loaded, read, unit);
    let bits = reference::round(program.target, value).to_le_bytes();
    target.copy_from_slice(&bits[..target.len()]);
}

type Read<'a> = &'a dyn Fn(TensorId, Range<u64>) -> Vec<u8>;

fn element(read: Read<'_>, tensor: TensorId, dtype: DType, number: u64) -> u32 {
    let bytes = dtype.element_bytes().unwrap();
    let raw = read(tensor, number * bytes..(number + 1) * bytes);
    reference::widen(dtype, raw.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte)))
}

fn value_by_reference(value: &Value, read: Read<'_>, number: u64) -> u32 {
    let Some(right) = value.dot() else {
        return after_steps(&value.steps, operand_by_reference(&value.load, read, number, 0), read, number);
    };
    let product = |term| {
        let left = operand_by_reference(&value.load, read, number, term);
        reference::multiply(left, operand_by_reference(right, read, number, term), false)
    };
    let terms = value.load.index.terms().count;
    let sum = (1..terms).fold(product(0), |sum, term| reference::add(sum, product(term)));
    after_steps(&value.steps[1..], sum, read, number)
}

fn after_steps(steps: &[Step], loaded: u32, read: Read<'_>, number: u64) -> u32 {
    steps.iter().fold(loaded, |left, step| {
        let (operation, term) = match step {
            Step::Compute(operation, term) => (operation, term),
            Step::Round(dtype) => return reference::widen(*dtype, reference::round(*dtype, left)),
            Step::Exp => return reference::exp(left),
            Step::Dot(operand) => panic!("{operand:?} is no first step"),
        };
        let right = match term {
            Term::Constant(constant) => *constant,
            Term::Value(value) => value_by_reference(value, read, number),
        };
        match operation {
            Operation::Multiply => reference::multiply(left, right, false),
            Operation::MultiplyFlush => reference::multiply(left, right, true),
            Operation::Divide => reference::divide(left, right),
            Operation::Add => reference::add(left, right),
            Operation::Subtract => reference::subtract(left, right),
        }
    })
}

fn operand_by_reference(operand: &Operand, read: Read<'_>, number: u64, term: u64) -> u32 {
    let (id, index) = (operand.tensor.id, operand.index.at(number) + term * operand.index.terms().stride);
    let (bits, table) = match &operand.field {
        Field::Float(dtype) => return element(read, id, *dtype, index),
        Field::Integer(bits) => (bits, None),
        Field::Table(bits, table) => (bits, Some(table)),
    };
    let bit = |at: u64| {
        let byte = read(id, at / 8..at / 8 + 1)[0];
        let place = if bits.order == BitOrder::LowFirst { at % 8 } else { 7 - at % 8 };
        u32::from(byte >> place & 1)
    };
    let code = (0..bits.width).fold(0, |code, place| match bits.order {
        BitOrder::LowFirst => code | bit(index + u64::from(place)) << place,
        BitOrder::HighFirst => code << 1 | bit(index + u64::from(place)),
    });
    match table {
        Some(table) => table[code as usize],
        None if bits.signed && code >= 1 << (bits.width - 1) => (code as f32 - (1u32 << bits.width) as f32).to_bits(),
        None => (code as f32).to_bits(),
    }
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

/// Executes a tiling unit by unit. Panics if pieces overlap, leave a hole, or read outside the tensors of `view`.
pub fn execute(view: &View, tiling: &Tiling, decode: DecodeUnit) -> Vec<u8> {
    execute_from(view, tiling, decode, &source_bytes)
}

/// The same with tensors whose bytes `bytes` returns.
pub fn execute_from(view: &View, tiling: &Tiling, decode: DecodeUnit, bytes: Read<'_>) -> Vec<u8> {
    let mut lengths = HashMap::new();
    view.for_each_source(&mut |tensor| {
        lengths.insert(tensor.id, tensor.dtype.bytes_of(tensor.shape.elements()).unwrap());
    });
    let read = |tensor, span: Range<u64>| {
        assert!(span.end <= lengths[&tensor], "{span:?} of {tensor:?}, which has {} bytes", lengths[&tensor]);
        bytes(tensor, span)
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
                    decode(&tiling.decoders()[decoder as usize], &read, tensor, offset + from, unit);
                }
                Origin::Encoded { .. } => panic!("what encoders make has a test of its own"),
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

/// Executes `tiling` with the kernels, in stretches of `stretch_units` as tiles do.
pub fn gathered_bytes(view: &View, tiling: &Tiling, stretch_units: u64) -> Vec<u8> {
    let mut tensors = HashMap::new();
    view.for_each_source(&mut |tensor| {
        let len = tensor.dtype.bytes_of(tensor.shape.elements()).unwrap();
        tensors.entry(tensor.id).or_insert_with(|| source_bytes(tensor.id, 0..len));
    });
    gathered_from(tiling, stretch_units, &tensors)
}

/// The same with these tensors.
pub fn gathered_from(tiling: &Tiling, stretch_units: u64, tensors: &HashMap<TensorId, Vec<u8>>) -> Vec<u8> {
    let width = tiling.unit_bytes();
    let mut target = vec![0; tiling.len_bytes() as usize];
    let mut low = 0;
    while low < tiling.len_units() {
        let high = (low + stretch_units).min(tiling.len_units());
        let stretch = &mut target[(low * width) as usize..(high * width) as usize];
        tiling.cut(low, high, &mut |piece| match piece.origin {
            Origin::Tensor { tensor, offset, decoder } => {
                let decode = &tiling.decoders()[decoder as usize];
                let job = Gather {
                    decode,
                    target_bytes: width,
                    loops: &piece.loops,
                    source_offset: offset,
                    target_offset: piece.start - low,
                };
                // Only the windows of the sources that the piece may read, and in them only the needed bytes.
                if decode.value().is_some() {
                    let needs = needs(decode, width, &piece);
                    let bytes: Vec<Vec<u8>> = needs.iter().map(|need| needed(need, tensors)).collect();
                    let windows: Vec<Window<'_>> =
                        needs.iter().zip(&bytes).map(|(need, bytes)| Window { bytes, start: need.start() }).collect();
                    return gather(Stores::Cached, &job, &windows, stretch);
                }
                let bytes = decode.source_bytes(width).unwrap();
                let (start, end) = (offset * bytes, (offset + piece.source_bounding_units()) * bytes);
                let window = Window { bytes: &tensors[&tensor][start as usize..end as usize], start };
                gather(Stores::Cached, &job, &[window], stretch);
            }
            Origin::Encoded { .. } => panic!("what encoders make has a test of its own"),
            Origin::Fill { bytes } => fill(&bytes[..width as usize], &piece.loops, piece.start - low, stretch),
        });
        low = high;
    }
    target
}

/// The window of an operand, with noise in bytes that are not needed.
fn needed(need: &Need, tensors: &HashMap<TensorId, Vec<u8>>) -> Vec<u8> {
    let mut window = vec![0xa7; (need.end() - need.start()) as usize];
    for runs in &need.runs {
        runs.for_each_span(0, &mut |start, len| {
            let from = (start - need.start()) as usize..(start - need.start() + len) as usize;
            let bytes = &tensors[&need.tensor][start as usize..(start + len) as usize];
            window[from].copy_from_slice(bytes);
        });
    }
    window
}
