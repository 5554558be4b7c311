//! Quantized tensors: each way of storing them against its formula, and shards of them against slices of the whole.
//!
//! The state protected here is the order of operations. Values are compared as f32, where another order shows in a fifth of
//! all elements; in bf16 it would show in a few of a million. Each formula is written here independently, from the
//! specification of its format, element by element and with the language's own arithmetic.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::wildcard_enum_match_arm,
    reason = "tests panic, and sizes are small"
)]

use std::{collections::HashMap, sync::Arc};

use crate::common::{self, execute_from, gathered_from, shape, tensor};
use ckfs::{
    read::reference::evaluate,
    tensor::{
        BitOrder, Bits, DType, Digit, Field, IndexMap, Operand, Operation, TensorId, Value, View, block_index, needs,
    },
};
use half::{bf16, f16};
use proptest::prelude::*;

type Tensors = HashMap<TensorId, Vec<u8>>;
/// An element of a quantized tensor, by number.
type Formula = Box<dyn Fn(&Tensors, usize) -> f32>;

/// A quantized tensor with its bytes and the formula of its elements.
struct Case {
    view: View,
    tensors: Tensors,
    formula: Formula,
}

fn noise(id: u32, length: usize) -> Vec<u8> {
    let mut state = u64::from(id).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Scales of all kinds: ordinary ones, zeros, subnormals, the largest and smallest powers of two, infinity, NaN.
fn scales(dtype: DType, count: usize) -> Vec<u8> {
    let odd = [0.0, -0.0, 1e-45, -1e-40, 2f32.powi(127), 2f32.powi(-126), -3.5, f32::INFINITY, f32::NAN];
    let noise = noise(77, 2 * count);
    let values = (0..count).map(|at| match at % 4 {
        3 => odd[(at / 4) % odd.len()],
        _ => (f32::from(noise[2 * at]) * 256.0 + f32::from(noise[2 * at + 1]) - 20_000.0) * 1.37e-4,
    });
    match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::BF16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
        _ => {
            (0..count).map(|at| if at % 5 == 4 { [0, 255, 254, 127, 128, 1][at / 5 % 6] } else { noise[at] }).collect()
        }
    }
}

fn f32_at(bytes: &[u8], at: usize) -> f32 {
    f32::from_le_bytes(bytes[4 * at..][..4].try_into().unwrap())
}

fn bf16_at(bytes: &[u8], at: usize) -> f32 {
    bf16::from_le_bytes(bytes[2 * at..][..2].try_into().unwrap()).to_f32()
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes(bytes[2 * at..][..2].try_into().unwrap()).to_f32()
}

/// Bits `[start, start + width)` of a little-endian stream.
fn bits_at(bytes: &[u8], start: usize, width: usize) -> u32 {
    (0..width).map(|at| u32::from(bytes[(start + at) / 8] >> ((start + at) % 8) & 1) << at).sum()
}

/// Field `index` of `width` bits in words of 32 bits that hold whole fields.
fn field_at(bytes: &[u8], word: usize, place: usize, width: usize) -> u32 {
    let word = u32::from_le_bytes(bytes[4 * word..][..4].try_into().unwrap());
    word >> (place * width) & ((1 << width) - 1)
}

/// The OCP float with a sign, two bits of exponent and one of mantissa.
fn e2m1(code: u32) -> f32 {
    let (exponent, mantissa) = (code >> 1 & 3, (code & 1) as f32);
    let magnitude =
        if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * 2f32.powi(exponent as i32 - 1) };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code < 128 { magnitude } else { -magnitude }
}

fn e8m0(code: u8) -> f32 {
    if code == 255 { f32::NAN } else { (2f64.powi(i32::from(code) - 127)) as f32 }
}

fn at(id: u32) -> TensorId {
    TensorId(id)
}

fn operand(id: u32, dtype: DType, extents: &[u64], field: Field, digits: &[Digit]) -> Operand {
    Operand { tensor: tensor(id, dtype, extents), field, index: IndexMap::new(digits) }
}

fn float(id: u32, dtype: DType, extents: &[u64], digits: &[Digit]) -> Operand {
    operand(id, dtype, extents, Field::Float(dtype), digits)
}

/// The same number for all elements.
fn scalar(id: u32, dtype: DType) -> Operand {
    float(id, dtype, &[1], &[])
}

/// Codes side by side in rows of `row_bits`.
fn rows(shape: &[u64], row_bits: u64, width: u64) -> [Digit; 2] {
    [Digit::axis(shape, 0, row_bits), Digit::axis(shape, 1, width)]
}

fn int(width: u32) -> Field {
    Field::Integer(Bits::unsigned(width))
}

fn same(left: f32, right: f32) -> bool {
    left.to_bits() == right.to_bits() || left.is_nan() && right.is_nan()
}

/// All functions that compute the bytes of a case agree with the formula, and with each other under layout operators.
#[track_caller]
fn check(name: &str, case: &Case) {
    let Case { view, tensors, formula } = case;
    let read = |id: TensorId, span: std::ops::Range<u64>| tensors[&id][span.start as usize..span.end as usize].to_vec();
    let of_reference = |view: &View| evaluate(view, 0..view.bytes().unwrap(), |id, span| Ok(read(id, span))).unwrap();
    let whole = of_reference(view);
    let elements = view.shape().elements() as usize;
    assert_eq!((view.dtype(), whole.len()), (DType::F32, 4 * elements), "{name}");
    for n in 0..elements {
        let (found, expected) = (f32_at(&whole, n), formula(tensors, n));
        assert!(same(found, expected), "{name}: element {n} is {found:e}, by the formula {expected:e}");
    }
    let mut views = vec![view.clone(), view.reverse_axes()];
    for dtype in [DType::BF16, DType::F16, DType::F8E4M3] {
        views.push(view.cast(dtype).unwrap());
        views.push(view.reverse_axes().cast(dtype).unwrap());
    }
    for (axis, extent) in view.shape().extents().iter().enumerate() {
        for (start, stop, step) in
            [(1, *extent, 1), (0, extent - 1, 2), (extent / 3, extent / 3 + extent.div_ceil(2), 1)]
        {
            let part = view.slice(axis, start.min(stop), stop.min(*extent), step).unwrap();
            views.push(part.cast(DType::BF16).unwrap());
            views.push(part.reverse_axes().cast(DType::BF16).unwrap());
        }
    }
    views.push(View::stack(0, &[view.clone(), view.clone()]).unwrap().pad(1, 1, 2).unwrap());
    views.push(view.multiply(0.5, true, ckfs::tensor::Keep::Operand).unwrap().cast(DType::BF16).unwrap());
    for view in views {
        let tiling = view.lower().unwrap();
        let expected = of_reference(&view);
        let one_by_one = execute_from(&view, &tiling, common::decode_by_reference, &read);
        assert!(one_by_one == expected, "{name}: {view} one by one");
        for stretch in [7, 100, 1 << 20] {
            let gathered = gathered_from(&tiling, stretch, tensors);
            let differs = gathered.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(differs, None, "{name}: {view} in stretches of {stretch}");
        }
    }
}

fn case(
    extents: &[u64],
    value: Value,
    data: impl IntoIterator<Item = Vec<u8>>,
    formula: impl Fn(&Tensors, usize) -> f32 + 'static,
) -> Case {
    let tensors = data.into_iter().enumerate().map(|(id, bytes)| (TensorId(id as u32), bytes)).collect();
    Case { view: View::quantized(shape(extents), value).unwrap(), tensors, formula: Box::new(formula) }
}

/// compressed-tensors `pack-quantized`, symmetric: dense fields in rows of whole words, groups or one scale a row.
#[test]
fn pack_quantized_symmetric() {
    for (out, inner, width, group) in
        [(5u64, 96u64, 4u64, 32u64), (3, 13, 4, 13), (4, 64, 8, 32), (3, 21, 3, 21), (2, 2080, 4, 32), (3, 40, 2, 8)]
    {
        let (extents, words) = ([out, inner], (inner * width).div_ceil(32));
        let codes = operand(0, DType::I32, &[out, words], int(width as u32), &rows(&extents, words * 32, width));
        let scale =
            Operand { index: block_index(out, inner, (1, group)), ..float(1, DType::BF16, &[out, inner / group], &[]) };
        let half = 2f32.powi(width as i32 - 1);
        let value = Value::of(codes).then(Operation::Subtract, half).then(Operation::Multiply, scale);
        let data = [noise(0, (out * words * 4) as usize), scales(DType::BF16, (out * inner / group) as usize)];
        let formula = move |data: &Tensors, n: usize| {
            let (o, i) = (n / inner as usize, n % inner as usize);
            let q = bits_at(&data[&at(0)], o * words as usize * 32 + i * width as usize, width as usize) as i32;
            let q = (q - (1 << (width - 1))) as f32;
            q * bf16_at(&data[&at(1)], o * (inner / group) as usize + i / group as usize)
        };
        check("pack-quantized", &case(&extents, value, data, formula));
    }
}

/// The same with zero points, which are packed along the output axis.
#[test]
fn pack_quantized_with_zero_points() {
    for (out, inner, group) in [(10u64, 64u64, 32u64), (16, 1056, 32)] {
        let (extents, groups, words) = ([out, inner], inner / group, inner / 8);
        let codes = operand(0, DType::I32, &[out, words], int(4), &rows(&extents, words * 32, 4));
        let scale = Operand { index: block_index(out, inner, (1, group)), ..float(1, DType::F16, &[out, groups], &[]) };
        let packed = [
            Digit::axis(&extents, 0, groups * 32).grouped(8),
            Digit::axis(&extents, 1, 32).grouped(group),
            Digit::axis(&extents, 0, 4).turning(8),
        ];
        let zero = operand(2, DType::I32, &[out.div_ceil(8), groups], int(4), &packed);
        let zero = Value::of(zero).then(Operation::Subtract, 8.0);
        let value = Value::of(codes).then(Operation::Subtract, 8.0);
        let value = value.then(Operation::Subtract, zero).then(Operation::Multiply, scale);
        let data = [
            noise(0, (out * words * 4) as usize),
            scales(DType::F16, (out * groups) as usize),
            noise(2, (out.div_ceil(8) * groups * 4) as usize),
        ];
        // Operands are visited in the order of the steps: zero points before scales.
        let formula = move |data: &Tensors, n: usize| {
            let (o, i) = (n / inner as usize, n % inner as usize);
            let (group, groups) = (i / group as usize, groups as usize);
            let q = field_at(&data[&at(0)], o * words as usize + i / 8, i % 8, 4) as f32 - 8.0;
            let z = field_at(&data[&at(2)], o / 8 * groups + group, o % 8, 4) as f32 - 8.0;
            (q - z) * f16_at(&data[&at(1)], o * groups + group)
        };
        check("pack-quantized, asymmetric", &case(&extents, value, data, formula));
    }
}

/// Fp8 with a scale per channel, per tensor, and per block with partial blocks (576 rows of DeepSeek's `kv_a_proj`).
#[test]
fn scaled_fp8() {
    let extents = [7u64, 37];
    let codes = || Operand::elements(tensor(0, DType::F8E4M3, &extents));
    let weights = || noise(0, 7 * 37);
    let channel = float(1, DType::BF16, &[7, 1], &[Digit::axis(&extents, 0, 1)]);
    let value = Value::of(codes()).then(Operation::Multiply, channel);
    check(
        "per channel",
        &case(&extents, value, [weights(), scales(DType::BF16, 7)], |data, n| {
            e4m3(data[&at(0)][n]) * bf16_at(&data[&at(1)], n / 37)
        }),
    );
    let value = Value::of(codes()).then(Operation::Multiply, scalar(1, DType::F32));
    check(
        "per tensor",
        &case(&extents, value, [weights(), 0.003_712_f32.to_le_bytes().to_vec()], |data, n| {
            e4m3(data[&at(0)][n]) * f32_at(&data[&at(1)], 0)
        }),
    );
    for block in [(4, 8), (128, 128), (1, 1), (3, 37)] {
        let (down, across) = (7u64.div_ceil(block.0), 37u64.div_ceil(block.1));
        let scale = Operand { index: block_index(7, 37, block), ..float(1, DType::F32, &[down, across], &[]) };
        let value = Value::of(codes()).then(Operation::Multiply, scale);
        let data = [weights(), scales(DType::F32, (down * across) as usize)];
        check(
            "per block",
            &case(&extents, value, data, move |data, n| {
                let block = (n as u64 / 37 / block.0) * across + n as u64 % 37 / block.1;
                e4m3(data[&at(0)][n]) * f32_at(&data[&at(1)], block as usize)
            }),
        );
    }
}

/// NVFP4 in both orders, and MLX's without a scale of the tensor.
#[test]
fn nvfp4() {
    for (out, inner) in [(3u64, 64u64), (2, 1072)] {
        let extents = [out, inner];
        let codes = || operand(0, DType::U8, &[out, inner / 2], Field::e2m1(), &rows(&extents, inner * 4, 4));
        let scale =
            || Operand { index: block_index(out, inner, (1, 16)), ..float(1, DType::F8E4M3, &[out, inner / 16], &[]) };
        let data = |global: f32| {
            let count = (out * inner) as usize;
            [noise(0, count / 2), scales(DType::F8E4M3, count / 16), global.to_le_bytes().to_vec()]
        };
        let code = move |data: &Tensors, n: usize| e2m1(bits_at(&data[&at(0)], 4 * n, 4));
        let first = Value::of(scale()).then(Operation::Divide, scalar(2, DType::F32));
        let value = Value::of(codes()).then(Operation::Multiply, first);
        check(
            "nvfp4-pack-quantized, dividing first",
            &case(&extents, value, data(1373.3), move |data, n| {
                code(data, n) * (e4m3(data[&at(1)][n / 16]) / f32_at(&data[&at(2)], 0))
            }),
        );
        let first = Value::of(scale()).then(Operation::Multiply, scalar(2, DType::F32));
        let value = Value::of(codes()).then(Operation::Multiply, first);
        check(
            "ModelOpt, multiplying the scales first",
            &case(&extents, value, data(0.000_728_1), move |data, n| {
                code(data, n) * (e4m3(data[&at(1)][n / 16]) * f32_at(&data[&at(2)], 0))
            }),
        );
        let value = Value::of(codes()).then(Operation::Multiply, scale());
        check(
            "MLX nvfp4",
            &case(&extents, value, data(0.0), move |data, n| code(data, n) * e4m3(data[&at(1)][n / 16])),
        );
    }
}

/// More rows and columns than one transposed block has.
#[test]
fn mxfp4_of_several_blocks() {
    let (out, inner) = (136u64, 1120u64);
    let extents = [out, inner];
    let codes = operand(0, DType::U8, &[out, inner / 2], Field::e2m1(), &rows(&extents, inner * 4, 4));
    let scale = Operand {
        index: block_index(out, inner, (1, 32)),
        ..operand(1, DType::U8, &[out, inner / 32], Field::Float(DType::F8E8M0), &[])
    };
    let value = Value::of(codes).then(Operation::Multiply, scale);
    let view = View::quantized(shape(&extents), value).unwrap().reverse_axes().cast(DType::BF16).unwrap();
    let data = [noise(0, (out * inner / 2) as usize), scales(DType::F8E8M0, (out * inner / 32) as usize)];
    let tensors: Tensors = data.into_iter().enumerate().map(|(id, bytes)| (TensorId(id as u32), bytes)).collect();
    let read = |id: TensorId, span: std::ops::Range<u64>| tensors[&id][span.start as usize..span.end as usize].to_vec();
    let expected = evaluate(&view, 0..view.bytes().unwrap(), |id, span| Ok(read(id, span))).unwrap();
    for stretch in [300, 1 << 20] {
        assert!(gathered_from(&view.lower().unwrap(), stretch, &tensors) == expected, "in stretches of {stretch}");
    }
}

/// Both nibble orders of a microscaling format, and gpt-oss's experts, whose blocks have an axis of their own.
#[test]
fn mxfp4_and_mxfp8() {
    let extents = [3u64, 96];
    let scale = |dtype| Operand {
        index: block_index(3, 96, (1, 32)),
        ..operand(1, dtype, &[3, 3], Field::Float(DType::F8E8M0), &[])
    };
    // Some programs store scales as U8; the bytes are those of the bare exponent.
    let codes = operand(0, DType::U8, &[3, 48], Field::e2m1(), &rows(&extents, 96 * 4, 4));
    let value = Value::of(codes).then(Operation::Multiply, scale(DType::U8));
    let data = [noise(0, 144), scales(DType::F8E8M0, 9)];
    check(
        "mxfp4-pack-quantized",
        &case(&extents, value, data, |data, n| e2m1(bits_at(&data[&at(0)], 4 * n, 4)) * e8m0(data[&at(1)][n / 32])),
    );
    let Field::Table(bits, table) = Field::e2m1() else { panic!("a table") };
    let swapped = Field::Table(Bits { order: BitOrder::HighFirst, ..bits }, table);
    let codes = operand(0, DType::I8, &[3, 48], swapped, &rows(&extents, 96 * 4, 4));
    let value = Value::of(codes).then(Operation::Multiply, scale(DType::F8E8M0));
    let data = [noise(0, 144), scales(DType::F8E8M0, 9)];
    check(
        "MXFP4 with the high nibble first",
        &case(&extents, value, data, |data, n| {
            let byte = u32::from(data[&at(0)][n / 2]);
            e2m1(if n % 2 == 0 { byte >> 4 } else { byte & 15 }) * e8m0(data[&at(1)][n / 32])
        }),
    );
    let codes = Operand::elements(tensor(0, DType::F8E4M3, &extents));
    let value = Value::of(codes).then(Operation::Multiply, scale(DType::U8));
    let data = [noise(0, 288), scales(DType::F8E8M0, 9)];
    check(
        "mxfp8-quantized",
        &case(&extents, value, data, |data, n| e4m3(data[&at(0)][n]) * e8m0(data[&at(1)][n / 32])),
    );
    let experts = [2u64, 3, 64];
    let codes = operand(0, DType::U8, &[2, 3, 2, 16], Field::e2m1(), &[Digit::axis(&[384], 0, 4)]);
    let blocks =
        operand(1, DType::U8, &[2, 3, 2], Field::Float(DType::F8E8M0), &[Digit::axis(&[384], 0, 1).grouped(32)]);
    let data = [noise(0, 192), scales(DType::F8E8M0, 12)];
    check(
        "gpt-oss",
        &case(&experts, Value::of(codes).then(Operation::Multiply, blocks), data, |data, n| {
            // ldexp(value, exponent - 127), as in the original code.
            let value = f64::from(e2m1(bits_at(&data[&at(0)], 4 * n, 4)));
            let code = data[&at(1)][n / 32];
            if code == 255 { f32::NAN } else { (value * 2f64.powi(i32::from(code) - 127)) as f32 }
        }),
    );
}

/// AWQ GEMM, stored `[in, out]` with columns interleaved within words.
#[test]
fn awq() {
    for (inner, out, group) in [(6u64, 16u64, 4u64), (33, 72, 32), (2, 1096, 2)] {
        let (extents, groups) = ([inner, out], inner.div_ceil(group));
        let column = |stride| Digit::axis(&extents, 1, stride);
        let packed =
            |rows: Digit| [rows, column(32).grouped(8), column(16).turning(2), column(4).grouped(2).turning(4)];
        let codes = operand(0, DType::I32, &[inner, out / 8], int(4), &packed(Digit::axis(&extents, 0, out * 4)));
        let by_group = Digit::axis(&extents, 0, out * 4).grouped(group);
        let zero = operand(1, DType::I32, &[groups, out / 8], int(4), &packed(by_group));
        let scale = float(2, DType::F16, &[groups, out], &[Digit::axis(&extents, 0, out).grouped(group), column(1)]);
        let value = Value::of(codes).then(Operation::Subtract, zero).then(Operation::Multiply, scale);
        let data = [
            noise(0, (inner * out / 2) as usize),
            noise(1, (groups * out / 2) as usize),
            scales(DType::F16, (groups * out) as usize),
        ];
        check(
            "AWQ",
            &case(&extents, value, data, move |data, n| {
                let (out, group) = (out as usize, group as usize);
                let (i, o) = (n / out, n % out);
                // Nibble k of a word is column 8c + [0, 2, 4, 6, 1, 3, 5, 7][k].
                let place = [0, 2, 4, 6, 1, 3, 5, 7].iter().position(|column| *column == o % 8).unwrap();
                let q = field_at(&data[&at(0)], i * (out / 8) + o / 8, place, 4) as f32;
                let z = field_at(&data[&at(1)], i / group * (out / 8) + o / 8, place, 4) as f32;
                (q - z) * f16_at(&data[&at(2)], i / group * out + o)
            }),
        );
    }
}

/// GPTQ, packed along the input axis: both versions of zero points, both widths, act-order, a partial last group.
#[test]
fn gptq() {
    for (inner, out, width, group, is_v1, act_order) in [
        (16u64, 8u64, 4u64, 8u64, true, false),
        (40, 32, 4, 16, false, true),
        (12, 20, 8, 8, true, true),
        (8, 1032, 4, 8, true, true),
    ] {
        let (extents, groups, per_word) = ([inner, out], inner.div_ceil(group), 32 / width);
        let index: Vec<u64> = (0..inner).map(|i| if act_order { (i * 7 + 3) % groups } else { i / group }).collect();
        let table: Arc<[u64]> = index.clone().into();
        let (row, column) = (|stride| Digit::axis(&extents, 0, stride), |stride| Digit::axis(&extents, 1, stride));
        let codes = operand(
            0,
            DType::I32,
            &[inner / per_word, out],
            int(width as u32),
            &[row(out * 32).grouped(per_word), row(width).turning(per_word), column(32)],
        );
        let zero_field = if is_v1 { Field::one_more(width as u32) } else { int(width as u32) };
        let zero_digits = [row(out * width).through(Arc::clone(&table)), column(width)];
        let zero = operand(1, DType::I32, &[groups, out * width / 32], zero_field, &zero_digits);
        let scale = float(2, DType::F16, &[groups, out], &[row(out).through(table), column(1)]);
        let value = Value::of(codes).then(Operation::Subtract, zero).then(Operation::Multiply, scale);
        let data = [
            noise(0, (inner / per_word * out * 4) as usize),
            noise(1, (groups * out * width / 8) as usize),
            scales(DType::F16, (groups * out) as usize),
        ];
        check(
            "GPTQ",
            &case(&extents, value, data, move |data, n| {
                let (out, width, per_word) = (out as usize, width as usize, per_word as usize);
                let (i, o) = (n / out, n % out);
                let group = index[i] as usize;
                let q = field_at(&data[&at(0)], i / per_word * out + o, i % per_word, width) as f32;
                let zeros = &data[&at(1)];
                let z = field_at(zeros, group * (out / per_word) + o / per_word, o % per_word, width);
                let z = if is_v1 { (z + 1) % (1 << width) } else { z };
                (q - z as f32) * f16_at(&data[&at(2)], group * out + o)
            }),
        );
    }
}

/// bitsandbytes NF4 with nested statistics over the flat tensor, whose last block is partial and whose last nibble is unused.
#[test]
fn bitsandbytes_4_bit() {
    for (out, inner, block) in [(3u64, 35u64, 16u64), (5, 1000, 64)] {
        let (extents, count) = ([out, inner], out * inner);
        let flat = |stride| Digit::axis(&[count], 0, stride);
        let map: Vec<f32> = (0..16_u16).map(|code| (f32::from(code) * 0.31).sin() * 1.1).collect();
        let inner_map: Vec<f32> = (0..256_u16).map(|code| (f32::from(code) - 100.0) * 0.013).collect();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
        let high_first = Bits { width: 4, signed: false, order: BitOrder::HighFirst };
        let codes = operand(0, DType::U8, &[count.div_ceil(2), 1], Field::Table(high_first, bits(&map)), &[flat(4)]);
        let blocks = count.div_ceil(block);
        let statistics = operand(
            1,
            DType::U8,
            &[blocks],
            Field::Table(Bits::unsigned(8), bits(&inner_map)),
            &[flat(8).grouped(block)],
        );
        let nested = float(2, DType::F32, &[blocks.div_ceil(4)], &[flat(1).grouped(4 * block)]);
        let offset = 0.0427;
        let largest = Value::of(statistics).then(Operation::Multiply, nested).then(Operation::Add, offset);
        let value = Value::of(codes).then(Operation::Multiply, largest);
        let data = [
            noise(0, count.div_ceil(2) as usize),
            noise(1, blocks as usize),
            scales(DType::F32, blocks.div_ceil(4) as usize),
        ];
        check(
            "NF4, nested",
            &case(&extents, value, data, move |data, n| {
                let byte = data[&at(0)][n / 2];
                let code = if n.is_multiple_of(2) { byte >> 4 } else { byte & 15 };
                let k = n / block as usize;
                let nested = inner_map[usize::from(data[&at(1)][k])] * f32_at(&data[&at(2)], k / 4);
                map[usize::from(code)] * (nested + offset)
            }),
        );
    }
}

#[test]
fn bitsandbytes_int8() {
    let extents = [4u64, 33];
    let signed = Field::Integer(Bits { signed: true, ..Bits::unsigned(8) });
    let codes = operand(0, DType::I8, &extents, signed, &rows(&extents, 33 * 8, 8));
    let scale = float(1, DType::F32, &[4], &[Digit::axis(&extents, 0, 1)]);
    let factor = 7.874_016e-3_f32;
    let value = Value::of(codes).then(Operation::Multiply, scale).then(Operation::Multiply, factor);
    check(
        "int8",
        &case(&extents, value, [noise(0, 132), scales(DType::F32, 4)], move |data, n| {
            f32::from(data[&at(0)][n].cast_signed()) * f32_at(&data[&at(1)], n / 33) * factor
        }),
    );
}

/// MLX affine: a product and a sum, each rounded.
#[test]
fn mlx_affine() {
    for (width, group, inner) in [(2u64, 32u64, 96u64), (4, 64, 1088), (8, 32, 64)] {
        let (out, extents) = (3u64, [3, inner]);
        let words = inner * width / 32;
        let codes = operand(0, DType::U32, &[out, words], int(width as u32), &rows(&extents, words * 32, width));
        let by_group = |id| Operand {
            index: block_index(out, inner, (1, group)),
            ..float(id, DType::F32, &[out, inner / group], &[])
        };
        let value = Value::of(codes).then(Operation::Multiply, by_group(1)).then(Operation::Add, by_group(2));
        let groups = (out * inner / group) as usize;
        let mut biases = scales(DType::F32, groups);
        biases.rotate_left(8);
        let data = [noise(0, (out * words * 4) as usize), scales(DType::F32, groups), biases];
        check(
            "MLX",
            &case(&extents, value, data, move |data, n| {
                let q = bits_at(&data[&at(0)], n * width as usize, width as usize) as f32;
                let product = q * f32_at(&data[&at(1)], n / group as usize);
                product + f32_at(&data[&at(2)], n / group as usize)
            }),
        );
    }
}

/// HQQ: a row of the first half and one of the second share bytes, the first in the high nibbles.
#[test]
fn hqq() {
    let (extents, half) = ([6u64, 40u64], 3);
    let high_first = Field::Integer(Bits { width: 4, signed: false, order: BitOrder::HighFirst });
    let codes = operand(
        0,
        DType::U8,
        &[half, 40],
        high_first,
        &[
            Digit::axis(&extents, 0, 4).grouped(half),
            Digit::axis(&extents, 0, 320).turning(half),
            Digit::axis(&extents, 1, 8),
        ],
    );
    let by_row = |id| float(id, DType::F16, &[6, 1], &[Digit::axis(&extents, 0, 1)]);
    let value = Value::of(codes).then(Operation::Subtract, by_row(1)).then(Operation::Multiply, by_row(2));
    let data = [noise(0, 120), scales(DType::F16, 6), scales(DType::F16, 6)];
    check(
        "HQQ",
        &case(&extents, value, data, |data, n| {
            let (r, c) = (n / 40, n % 40);
            let byte = data[&at(0)][r % 3 * 40 + c];
            let q = f32::from(if r < 3 { byte >> 4 } else { byte & 15 });
            (q - f16_at(&data[&at(1)], r)) * f16_at(&data[&at(2)], r)
        }),
    );
}

/// A shard needs its codes and scales, and almost no other bytes.
#[test]
fn shards_need_their_own_bytes() {
    let (out, inner) = (4096u64, 7168u64);
    let extents = [out, inner];
    let codes = operand(0, DType::U8, &[out, inner / 2], Field::e2m1(), &rows(&extents, inner * 4, 4));
    let scale = operand(1, DType::U8, &[out, inner / 32], Field::Float(DType::F8E8M0), &[]);
    let scale = Operand { index: block_index(out, inner, (1, 32)), ..scale };
    let by_rows = View::quantized(shape(&extents), Value::of(codes).then(Operation::Multiply, scale)).unwrap();
    // GPTQ: stored [in, out], and read as [out, in].
    let stored = [inner, out];
    let (row, column) = (|stride| Digit::axis(&stored, 0, stride), |stride| Digit::axis(&stored, 1, stride));
    let codes = [row(out * 32).grouped(8), row(4).turning(8), column(32)];
    let codes = operand(0, DType::I32, &[inner / 8, out], int(4), &codes);
    let zeros = [row(out * 4).grouped(128), column(4)];
    let zeros = operand(1, DType::I32, &[inner / 128, out / 8], Field::one_more(4), &zeros);
    let scale = float(2, DType::F16, &[inner / 128, out], &[row(out).grouped(128), column(1)]);
    let value = Value::of(codes).then(Operation::Subtract, zeros).then(Operation::Multiply, scale);
    let by_columns = View::quantized(shape(&stored), value).unwrap().reverse_axes();
    for (name, view) in [("rows", &by_rows), ("columns", &by_columns)] {
        let whole: u64 = needed_bytes(view);
        for parts in [1, 2, 8, 16] {
            for axis in [0, 1] {
                let length = extents[axis] / parts;
                let shard = view.slice(axis, length * (parts - 1), length * parts, 1).unwrap();
                let (found, share) = (needed_bytes(&shard), whole / parts);
                assert!(
                    found <= share + share / 50,
                    "{name}: {parts} parts of axis {axis} need {found} bytes, a share is {share}"
                );
            }
        }
    }
    assert_eq!(needed_bytes(&by_rows), out * inner / 2 + out * inner / 32);
    assert_eq!(needed_bytes(&by_columns), out * inner / 2 + inner / 128 * (out / 2 + 2 * out));
}

fn needed_bytes(view: &View) -> u64 {
    let tiling = view.lower().unwrap();
    let of = |piece: &ckfs::tensor::Piece| match piece.origin {
        ckfs::tensor::Origin::Tensor { decoder, .. } => {
            let needs = needs(&tiling.decoders()[decoder as usize], tiling.unit_bytes(), piece);
            needs.iter().map(ckfs::tensor::Need::bytes).sum()
        }
        ckfs::tensor::Origin::Fill { .. } | ckfs::tensor::Origin::Encoded { .. } => 0,
    };
    tiling.pieces().iter().map(of).sum()
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let extents = [4u64, 8];
    let of = |operand: Operand| View::quantized(shape(&extents), Value::of(operand));
    let error = |operand: Operand| of(operand).unwrap_err().to_string();
    let refused =
        |tensor: u32, reason: &str| format!("decode: tensor #{tensor} does not fit a value of shape [4, 8]: {reason}");
    let field = |width: u32, table: Option<usize>| {
        let read = "at most 16 bits are read, high first only of 1, 2, 4 or 8, tables have an entry for each code";
        refused(1, &format!("fields of {width} bits with a table of {table:?} entries: {read}"))
    };
    let digit = refused(1, "digit 0 of its index divides by zero, overflows or has a table that is too short");
    let short = operand(3, DType::U8, &[15], int(4), &rows(&extents, 32, 4));
    assert_eq!(error(short), refused(3, "reads 128 bits of a tensor U8 [15], which has 120"));
    let wide = operand(1, DType::U8, &[200], int(17), &rows(&extents, 200, 17));
    assert_eq!(error(wide), field(17, None));
    let table: Arc<[u32]> = vec![0; 15].into();
    let few = operand(1, DType::U8, &[16], Field::Table(Bits::unsigned(4), table), &rows(&extents, 32, 4));
    assert_eq!(error(few), field(4, Some(15)));
    let integers = operand(1, DType::I32, &[32], Field::Float(DType::I32), &rows(&extents, 8, 1));
    assert_eq!(error(integers), refused(1, "I32 values are not converted"));
    let groups: Arc<[u64]> = vec![0, 1, 1].into();
    let through = float(1, DType::F32, &[2], &[Digit::axis(&extents, 0, 1).through(groups)]);
    assert_eq!(error(through), digit);
    let zero = float(1, DType::F32, &[2], &[Digit::axis(&extents, 0, 1).grouped(0)]);
    assert_eq!(error(zero), digit);
    let apart = float(1, DType::F32, &[90], &[Digit::axis(&extents, 0, 1), Digit::axis(&[6, 5], 0, 1)]);
    assert!(error(apart).starts_with(&refused(1, "the axes of its index do not nest")));
    let rounds = Value { steps: vec![ckfs::tensor::Step::Round(DType::U8)], ..Value::of(scalar(1, DType::F32)) };
    assert!(View::quantized(shape(&extents), rounds).is_err());
    assert!(View::quantized(shape(&[0, 3]), Value::of(float(1, DType::F32, &[0], &[]))).is_ok(), "nothing is read");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.max(1)))]

    /// Random values over random operands in random views, through the kernels, with only the needed bytes in their windows.
    #[test]
    fn random_values_in_random_views(mut choices in common::views::choices(), stretch in 1u64..5000) {
        let view = choices.quantized_view();
        let tiling = view.lower().unwrap();
        let mut tensors = Tensors::new();
        view.for_each_source(&mut |tensor| {
            let len = tensor.dtype.bytes_of(tensor.shape.elements()).unwrap();
            tensors.entry(tensor.id).or_insert_with(|| common::source_bytes(tensor.id, 0..len));
        });
        let expected = common::reference_bytes(&view);
        let gathered = gathered_from(&tiling, stretch, &tensors);
        let differs = gathered.iter().zip(&expected).position(|(a, b)| a != b);
        prop_assert_eq!(differs, None, "{} {:?}", view, tiling);
    }
}
