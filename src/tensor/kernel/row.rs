//! Loops over rows of elements: any float to f32, f32 to any float, and f32 arithmetic in place.
//!
//! f32 values are passed as little-endian bytes, so that a memory-mapped row of any alignment can be used directly.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "these must be compiled into the loops of each instruction set")]

use std::hint::black_box;

use super::super::float;
use super::Level;
use crate::{DType, Operation};

/// A loop over one row: reads all of its first argument and fills all of its second, element by element.
pub(crate) type Row = fn(Level, &[u8], &mut [u8]);

/// A loop of arithmetic between values in place and operands, of runs and of pairs.
type Runs = fn(Level, &mut [u8], &[u8], usize, usize);
type Pairs = fn(Level, &mut [u8], &[u8]);

/// Defines functions `fn(Level, arguments)` whose body is compiled for each level.
macro_rules! leveled {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        $(#[$meta])*
        pub(crate) fn $name(level: Level, $($argument: $type),*) {
            #[inline(always)]
            fn portable($($argument: $type),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($argument: $type),*) {
                portable($($argument),*);
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($argument: $type),*) {
                portable($($argument),*);
            }

            match level.0 {
                super::Width::Portable => portable($($argument),*),
                // SAFETY: `Level` is made by detection only, so this processor has AVX2. The body is safe code.
                #[cfg(target_arch = "x86_64")]
                super::Width::Avx2 => unsafe { avx2($($argument),*) },
                // SAFETY: as above, for the four AVX-512 features that `Level` asks for.
                #[cfg(target_arch = "x86_64")]
                super::Width::Avx512 => unsafe { avx512($($argument),*) },
            }
        }
    )*};
}

pub(super) use leveled;

/// Fills `target` with `convert` of each element of `source`.
#[inline(always)]
fn map<const S: usize, const T: usize>(source: &[u8], target: &mut [u8], convert: impl Fn([u8; S]) -> [u8; T]) {
    let (source, target) = (source.as_chunks::<S>().0, target.as_chunks_mut::<T>().0);
    for (from, to) in source.iter().zip(target) {
        *to = convert(*from);
    }
}

leveled! {
    fn widen_f64(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| float::narrow_f64(u64::from_le_bytes(bytes)).to_le_bytes());
    }
    fn widen_bf16(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| (u32::from(u16::from_le_bytes(bytes)) << 16).to_le_bytes());
    }
    fn widen_f16(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| float::F16.widen(u32::from(u16::from_le_bytes(bytes))).to_le_bytes());
    }
    fn narrow_f64(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| float::widen_f32(u32::from_le_bytes(bytes)).to_le_bytes());
    }
    fn narrow_bf16(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| thin_bf16(u32::from_le_bytes(bytes)));
    }
    fn narrow_f16(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| {
            let [low, high, _, _] = float::F16.narrow(u32::from_le_bytes(bytes)).to_le_bytes();
            [low, high]
        });
    }
}

/// The conversions of each type of one byte.
macro_rules! bytes {
    ($($widen:ident $narrow:ident $format:expr;)*) => {
        leveled! {$(
            fn $widen(source: &[u8], target: &mut [u8]) {
                map(source, target, |[byte]: [u8; 1]| $format.widen(u32::from(byte)).to_le_bytes());
            }
            fn $narrow(source: &[u8], target: &mut [u8]) {
                map(source, target, |bytes| [$format.narrow(u32::from_le_bytes(bytes)).to_le_bytes()[0]]);
            }
        )*}
    };
}

bytes! {
    widen_f8e5m2 narrow_f8e5m2 float::F8E5M2;
    widen_f8e4m3 narrow_f8e4m3 float::F8E4M3;
    widen_f8e5m2_fnuz narrow_f8e5m2_fnuz float::F8E5M2_FNUZ;
    widen_f8e4m3_fnuz narrow_f8e4m3_fnuz float::F8E4M3_FNUZ;
}

/// Applies an operation between runs of f32 values and one operand each: `head` values with the first, then `period` with each
/// of the others.
#[inline(always)]
fn each_run(values: &mut [u8], operands: &[u8], head: usize, period: usize, operation: impl Fn(u32, u32) -> u32) {
    let (values, operands) = (values.as_chunks_mut::<4>().0, operands.as_chunks::<4>().0);
    let Some((first, others)) = operands.split_first() else { return };
    let (head, rest) = values.split_at_mut(head.min(values.len()));
    let one = |run: &mut [[u8; 4]], operand: &[u8; 4]| {
        let operand = u32::from_le_bytes(*operand);
        for value in run {
            *value = operation(u32::from_le_bytes(*value), operand).to_le_bytes();
        }
    };
    one(head, first);
    // Loops of a known length for the usual groups.
    match period {
        16 => runs_of::<16>(rest, others, one),
        32 => runs_of::<32>(rest, others, one),
        64 => runs_of::<64>(rest, others, one),
        _ => rest.chunks_mut(period.max(1)).zip(others).for_each(|(run, operand)| one(run, operand)),
    }
}

#[inline(always)]
fn runs_of<const PERIOD: usize>(values: &mut [[u8; 4]], operands: &[[u8; 4]], one: impl Fn(&mut [[u8; 4]], &[u8; 4])) {
    let (runs, rest) = values.as_chunks_mut::<PERIOD>();
    for (run, operand) in runs.iter_mut().zip(operands) {
        // Otherwise compilers process one value of each of many runs at a time, which is slow.
        one(run, black_box(operand));
    }
    if let Some(operand) = operands.get(runs.len()) {
        one(rest, operand);
    }
}

/// An operation of finite numbers. It gives no NaN, so that no NaN has to be propagated.
#[inline(always)]
fn finite(operation: impl Fn(f32, f32) -> f32) -> impl Fn(u32, u32) -> u32 {
    move |left, right| operation(f32::from_bits(left), f32::from_bits(right)).to_bits()
}

/// Applies an operation between f32 values and as many operands.
#[inline(always)]
fn each_pair(values: &mut [u8], operands: &[u8], operation: impl Fn(u32, u32) -> u32) {
    for (value, operand) in values.as_chunks_mut::<4>().0.iter_mut().zip(operands.as_chunks::<4>().0) {
        *value = operation(u32::from_le_bytes(*value), u32::from_le_bytes(*operand)).to_le_bytes();
    }
}

/// For each operation, its loop over runs and its loop over pairs.
macro_rules! arithmetic {
    ($($runs:ident $pairs:ident $operation:expr;)*) => {
        leveled! {$(
            fn $runs(values: &mut [u8], operands: &[u8], head: usize, period: usize) {
                each_run(values, operands, head, period, $operation);
            }
            fn $pairs(values: &mut [u8], operands: &[u8]) {
                each_pair(values, operands, $operation);
            }
        )*}
    };
}

arithmetic! {
    multiply_runs multiply_pairs float::multiply;
    multiply_flush_runs multiply_flush_pairs float::multiply_flush;
    divide_runs divide_pairs float::divide;
    add_runs add_pairs float::add;
    subtract_runs subtract_pairs float::subtract;
    multiply_finite_runs multiply_finite_pairs finite(|a, b| a * b);
    add_finite_runs add_finite_pairs finite(|a, b| a + b);
    subtract_finite_runs subtract_finite_pairs finite(|a, b| a - b);
}

leveled! {
    /// Sets `found` to a value other than 0 if one of `values` is infinite or NaN.
    fn find_infinite(values: &[u8], found: &mut u32) {
        let mut any = 0;
        for value in values.as_chunks::<4>().0 {
            any |= u32::from(u32::from_le_bytes(*value) & float::F32_INFINITY == float::F32_INFINITY);
        }
        *found |= any;
    }
    /// Values of bare exponents.
    fn widen_f8e8m0(source: &[u8], target: &mut [u8]) {
        map(source, target, |[byte]: [u8; 1]| float::widen_e8m0(byte).to_le_bytes());
    }
    /// Values of unsigned bytes.
    fn widen_u8(source: &[u8], target: &mut [u8]) {
        map(source, target, |[byte]: [u8; 1]| f32::from(byte).to_le_bytes());
    }
    /// Whole numbers below 256. Beside 2^23, the last bit of an f32 counts ones.
    fn narrow_u8(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| [(f32::from_le_bytes(bytes) + 8_388_608.0).to_bits().to_le_bytes()[0]]);
    }
    /// Values of signed bytes.
    fn widen_i8(source: &[u8], target: &mut [u8]) {
        map(source, target, |[byte]: [u8; 1]| f32::from(byte.cast_signed()).to_le_bytes());
    }
}

/// Whether all values are finite.
pub(crate) fn are_finite(level: Level, values: &[[u8; 4]]) -> bool {
    let mut found = 0;
    find_infinite(level, values.as_flattened(), &mut found);
    found == 0
}

/// The loops of an operation. The first is between runs of values and one operand each, and the first run may be of another length;
/// the second is between values and as many operands. With `finite`, all of both are.
pub(crate) fn loops(operation: Operation, finite: bool) -> (Runs, Pairs) {
    match operation {
        Operation::Multiply if finite => (multiply_finite_runs, multiply_finite_pairs),
        Operation::Add if finite => (add_finite_runs, add_finite_pairs),
        Operation::Subtract if finite => (subtract_finite_runs, subtract_finite_pairs),
        Operation::Multiply => (multiply_runs, multiply_pairs),
        Operation::MultiplyFlush => (multiply_flush_runs, multiply_flush_pairs),
        Operation::Divide => (divide_runs, divide_pairs),
        Operation::Add => (add_runs, add_pairs),
        Operation::Subtract => (subtract_runs, subtract_pairs),
    }
}

/// The operation between two values.
pub(crate) fn one(operation: Operation) -> fn(u32, u32) -> u32 {
    match operation {
        Operation::Multiply => float::multiply,
        Operation::MultiplyFlush => float::multiply_flush,
        Operation::Divide => float::divide,
        Operation::Add => float::add,
        Operation::Subtract => float::subtract,
    }
}

/// Widening of the source types for which there are separate arithmetic loops.
#[inline(always)]
fn wide_bf16(bytes: [u8; 2]) -> u32 {
    u32::from(u16::from_le_bytes(bytes)) << 16
}

#[inline(always)]
fn thin_bf16(bits: u32) -> [u8; 2] {
    let [low, high, _, _] = float::narrow_bf16(bits).to_le_bytes();
    [low, high]
}

/// BF16 nearest to the f32 with these bits, if that is not a NaN. For a NaN whose lower half is zero, a NaN.
#[inline(always)]
pub(super) fn rounded_finite_bf16(bits: u32) -> u16 {
    let [_, _, low, high] = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)).to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// `f32` rounded to BF16, as `f32` again.
#[inline(always)]
fn rounded_bf16(bytes: [u8; 4]) -> u32 {
    float::narrow_bf16(u32::from_le_bytes(bytes)) << 16
}

/// Elements that are tested together.
const TOGETHER: usize = 32;

/// Fills `target` with products by `factor` in BF16, flushing subnormals. The exact computation runs only for groups with a product
/// that is not ordinary: neither zero, nor finite and far from subnormal. `widen` clears the lower half of a NaN.
#[inline(always)]
fn multiply_flush_to_bf16<const S: usize>(
    source: &[u8],
    target: &mut [u8],
    factor: u32,
    widen: impl Fn([u8; S]) -> u32,
) {
    let (source, target) = (source.as_chunks::<S>().0, target.as_chunks_mut::<2>().0);
    let ((groups, rest), (group_targets, rest_target)) =
        (source.as_chunks::<TOGETHER>(), target.as_chunks_mut::<TOGETHER>());
    let exact = |bytes: [u8; S]| thin_bf16(float::multiply_flush(widen(bytes), factor));
    // With such a factor the product of a subnormal is subnormal too, or the zero that it must become.
    let ordinary_factor = f32::from_bits(factor).is_normal() && f32::from_bits(factor).abs() <= 1.0;
    for (from, to) in groups.iter().zip(group_targets) {
        let mut products = [0; TOGETHER];
        for (bytes, product) in from.iter().zip(&mut products) {
            *product = rounded_finite_bf16((f32::from_bits(widen(*bytes)) * f32::from_bits(factor)).to_bits());
        }
        let mut odd = u16::from(!ordinary_factor);
        for (product, to) in products.iter().zip(to.iter_mut()) {
            let magnitude = product & 0x7fff;
            // Exponents from 2 to 254 are at least 2^-125 and finite. A product that was rounded to zero must be zero.
            odd |= u16::from(magnitude != 0) & u16::from(magnitude.wrapping_sub(2 << 7) >= 253 << 7);
            *to = product.to_le_bytes();
        }
        if odd != 0 {
            for (bytes, to) in from.iter().zip(to) {
                *to = exact(*bytes);
            }
        }
    }
    for (bytes, to) in rest.iter().zip(rest_target) {
        *to = exact(*bytes);
    }
}

/// A loop over one row that also takes the f32 (bits) of an operation.
pub(crate) type RowWith = fn(Level, &[u8], &mut [u8], u32);

leveled! {
    /// Products in BF16.
    fn multiply_bf16(source: &[u8], target: &mut [u8], factor: u32) {
        map(source, target, |bytes| thin_bf16(float::multiply(wide_bf16(bytes), factor)));
    }
    /// Products in BF16, flushing subnormals.
    fn multiply_flush_bf16(source: &[u8], target: &mut [u8], factor: u32) {
        multiply_flush_to_bf16(source, target, factor, wide_bf16);
    }
    /// Products in BF16 of f32 values that are first rounded to BF16.
    fn round_multiply_bf16(source: &[u8], target: &mut [u8], factor: u32) {
        map(source, target, |bytes| thin_bf16(float::multiply(rounded_bf16(bytes), factor)));
    }
    /// As [`round_multiply_bf16`], flushing subnormals.
    fn round_multiply_flush_bf16(source: &[u8], target: &mut [u8], factor: u32) {
        multiply_flush_to_bf16(source, target, factor, rounded_bf16);
    }
}

/// Copies `count` elements of `unit` bytes, each side with its own stride in bytes.
pub(crate) fn copy_elements(unit: usize, source: &[u8], from: usize, target: &mut [u8], to: usize, count: usize) {
    match unit {
        1 => copy_units::<1>(source, from, target, to, count),
        2 => copy_units::<2>(source, from, target, to, count),
        3 => copy_units::<3>(source, from, target, to, count),
        4 => copy_units::<4>(source, from, target, to, count),
        8 => copy_units::<8>(source, from, target, to, count),
        16 => copy_units::<16>(source, from, target, to, count),
        unit => {
            for index in 0..count {
                target[index * to..][..unit].copy_from_slice(&source[index * from..][..unit]);
            }
        }
    }
}

fn copy_units<const UNIT: usize>(source: &[u8], from: usize, target: &mut [u8], to: usize, count: usize) {
    if to == UNIT {
        for (index, element) in target.as_chunks_mut::<UNIT>().0[..count].iter_mut().enumerate() {
            element.copy_from_slice(&source[index * from..][..UNIT]);
        }
        return;
    }
    for index in 0..count {
        target[index * to..][..UNIT].copy_from_slice(&source[index * from..][..UNIT]);
    }
}

/// The loop between equal types.
pub(crate) fn copy(_: Level, source: &[u8], target: &mut [u8]) {
    target.copy_from_slice(source);
}

/// The loop from `dtype` to f32, or `None` if it is not a float that converts.
pub(crate) fn widen(dtype: DType) -> Option<Row> {
    conversions(dtype).map(|(widen, _)| widen)
}

/// The loop from f32 to `dtype`, or `None` if it is not a float that converts.
pub(crate) fn narrow(dtype: DType) -> Option<Row> {
    if dtype == DType::U8 { Some(narrow_u8) } else { conversions(dtype).map(|(_, narrow)| narrow) }
}

/// The loops from each float type to f32 and back.
const CONVERSIONS: [(DType, Row, Row); 8] = [
    (DType::F64, widen_f64, narrow_f64),
    (DType::F32, copy, copy),
    (DType::BF16, widen_bf16, narrow_bf16),
    (DType::F16, widen_f16, narrow_f16),
    (DType::F8E5M2, widen_f8e5m2, narrow_f8e5m2),
    (DType::F8E4M3, widen_f8e4m3, narrow_f8e4m3),
    (DType::F8E5M2Fnuz, widen_f8e5m2_fnuz, narrow_f8e5m2_fnuz),
    (DType::F8E4M3Fnuz, widen_f8e4m3_fnuz, narrow_f8e4m3_fnuz),
];

fn conversions(dtype: DType) -> Option<(Row, Row)> {
    CONVERSIONS.iter().find(|(of, ..)| *of == dtype).map(|(_, widen, narrow)| (*widen, *narrow))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_float_converts_and_nothing_else() {
        for dtype in DType::ALL {
            assert_eq!(conversions(*dtype).is_some(), dtype.is_float(), "{dtype}");
        }
    }

    /// Strata of f32: every exponent and sign with mantissas at and around rounding boundaries of all narrower types.
    fn strata() -> Vec<u8> {
        let mut bytes = Vec::new();
        for head in 0..1_u32 << 12 {
            for boundary in [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xf_ffff & 0x7_5555, 0x7_ffff] {
                bytes.extend_from_slice(&((head << 20) | boundary).to_le_bytes());
            }
        }
        bytes
    }

    #[test]
    fn levels_agree_with_single_elements() {
        let floats: Vec<DType> = DType::ALL.iter().copied().filter(|dtype| dtype.is_float()).collect();
        let wide = strata();
        for dtype in floats {
            let bytes = usize::try_from(dtype.element_bytes().unwrap()).unwrap();
            let count = wide.len() / 4;
            let mut expected = vec![0; count * bytes];
            for (value, element) in wide.chunks_exact(4).zip(expected.chunks_exact_mut(bytes)) {
                narrow(dtype).unwrap()(Level::PORTABLE, value, element);
            }
            let mut back = vec![0; wide.len()];
            for (element, value) in expected.chunks_exact(bytes).zip(back.chunks_exact_mut(4)) {
                widen(dtype).unwrap()(Level::PORTABLE, element, value);
            }
            for level in Level::available() {
                let mut narrowed = vec![0; expected.len()];
                narrow(dtype).unwrap()(level, &wide, &mut narrowed);
                assert!(narrowed == expected, "{dtype} narrowed at {level:?}");
                let mut widened = vec![0; wide.len()];
                widen(dtype).unwrap()(level, &narrowed, &mut widened);
                assert!(widened == back, "{dtype} widened at {level:?}");
            }
        }
    }

    #[test]
    fn arithmetic_agrees_at_every_level() {
        let values = strata();
        let operands = [0.088_388_346_f32, -3.0, 1e-38, 1e-45, f32::INFINITY, f32::NAN, 0.0].map(f32::to_bits);
        let all: Vec<u8> = operands.iter().flat_map(|operand| operand.to_le_bytes()).collect();
        let (head, period) = (5, 11);
        for operation in
            [Operation::Multiply, Operation::MultiplyFlush, Operation::Divide, Operation::Add, Operation::Subtract]
        {
            let check = |computed: &[u8], operand_of: &dyn Fn(usize) -> u32, level: Level| {
                let pairs = values.as_chunks::<4>().0.iter().zip(computed.as_chunks::<4>().0);
                for (at, (value, result)) in pairs.enumerate() {
                    let (left, right) = (u32::from_le_bytes(*value), operand_of(at));
                    let expected = one(operation)(left, right);
                    assert_eq!(
                        u32::from_le_bytes(*result),
                        expected,
                        "{left:#x} {operation:?} {right:#x} at {level:?}"
                    );
                }
            };
            for level in Level::available() {
                for operand in operands {
                    let (mut computed, count) = (values.clone(), values.len() / 4);
                    loops(operation, false).0(level, &mut computed, &operand.to_le_bytes(), count, count);
                    check(&computed, &|_| operand, level);
                }
                let mut computed = values[..4 * (head + 6 * period)].to_vec();
                loops(operation, false).0(level, &mut computed, &all, head, period);
                let run = |at: usize| if at < head { 0 } else { 1 + (at - head) / period };
                check(&computed, &|at| operands[run(at)], level);
                let mut computed = values.clone();
                let cycled: Vec<u8> = all.iter().copied().cycle().take(values.len()).collect();
                loops(operation, false).1(level, &mut computed, &cycled);
                check(&computed, &|at| operands[at % operands.len()], level);
            }
        }
    }

    /// For finite numbers the loops that propagate no NaN give the same results.
    #[test]
    fn finite_numbers_need_no_nan_propagation() {
        let numbers = |seed: u32| -> Vec<u8> {
            let bits = (0..3000_u32).map(|at| at.wrapping_mul(0x9e37_79b9).rotate_left(seed));
            bits.filter(|bits| f32::from_bits(*bits).is_finite()).take(2048).flat_map(u32::to_le_bytes).collect()
        };
        let (values, operands) = (numbers(3), numbers(17));
        assert!(are_finite(Level::PORTABLE, values.as_chunks().0));
        for operation in [Operation::Multiply, Operation::Add, Operation::Subtract] {
            for level in Level::available() {
                for (head, period) in [(5, 16), (32, 32), (1, 64), (7, 9)] {
                    let (mut exact, mut made) = (values.clone(), values.clone());
                    loops(operation, false).0(level, &mut exact, &operands, head, period);
                    loops(operation, true).0(level, &mut made, &operands, head, period);
                    assert!(exact == made, "{operation:?} in runs of {period} at {level:?}");
                }
                let (mut exact, mut made) = (values.clone(), values.clone());
                loops(operation, false).1(level, &mut exact, &operands);
                loops(operation, true).1(level, &mut made, &operands);
                assert!(exact == made, "{operation:?} at {level:?}");
            }
        }
        for odd in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, -f32::NAN] {
            let mut values = values.clone();
            values[4004..4008].copy_from_slice(&odd.to_le_bytes());
            for level in Level::available() {
                assert!(!are_finite(level, values.as_chunks().0), "{odd} at {level:?}");
            }
        }
    }

    #[test]
    fn fused_loops_agree_with_single_elements() {
        // All of BF16 in order, so that there are ordinary groups; then every 7919th, for mixed groups, some with zeros.
        let order = (0..=u16::MAX).chain((0..=u16::MAX).map(|index| index.wrapping_mul(7919)));
        let narrow: Vec<u8> = order.flat_map(|bits| if bits % 11 == 0 { 0 } else { bits }.to_le_bytes()).collect();
        let wide = strata();
        for operand in [0.088_388_346_f32, -3.0, 1e-38, -1e38, 1e-45, f32::INFINITY, f32::NAN, 0.0] {
            let factor = operand.to_bits();
            for (row, one) in [
                (multiply_bf16 as RowWith, float::multiply as fn(u32, u32) -> u32),
                (multiply_flush_bf16, float::multiply_flush),
            ] {
                let expected: Vec<[u8; 2]> =
                    narrow.as_chunks().0.iter().map(|bytes| thin_bf16(one(wide_bf16(*bytes), factor))).collect();
                for level in Level::available() {
                    let mut computed = vec![0; narrow.len()];
                    row(level, &narrow, &mut computed, factor);
                    assert!(computed == expected.as_flattened(), "{operand} at {level:?}");
                }
            }
            for (row, one) in [
                (round_multiply_bf16 as RowWith, float::multiply as fn(u32, u32) -> u32),
                (round_multiply_flush_bf16, float::multiply_flush),
            ] {
                let rounded = |bytes: &[u8; 4]| float::narrow_bf16(u32::from_le_bytes(*bytes)) << 16;
                let expected: Vec<[u8; 2]> =
                    wide.as_chunks().0.iter().map(|bytes| thin_bf16(one(rounded(bytes), factor))).collect();
                for level in Level::available() {
                    let mut computed = vec![0; wide.len() / 2];
                    row(level, &wide, &mut computed, factor);
                    assert!(computed == expected.as_flattened(), "{operand} at {level:?}");
                }
            }
        }
    }

    #[test]
    fn signs_are_kept() {
        assert_eq!(float::multiply_flush((-1e-40_f32).to_bits(), 1f32.to_bits()), (-0.0_f32).to_bits());
    }
}
