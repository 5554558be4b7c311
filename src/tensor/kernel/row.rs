//! Loops over rows of elements: any float to f32, f32 to any float, and f32 arithmetic in place.
//!
//! f32 values travel as little-endian bytes, so that a memory-mapped row of any alignment is as good as a scratch.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "these must be compiled into the loops of each instruction set")]

use super::super::float::{self, Format};
use super::{Level, Width};
use crate::tensor::DType;

/// A loop over one row: reads all of its first argument and fills all of its second, element by element.
pub(crate) type Row = fn(Level, &[u8], &mut [u8]);

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
                Width::Portable => portable($($argument),*),
                // SAFETY: `Level` is made by detection only, so this processor has AVX2. The body is safe code.
                #[cfg(target_arch = "x86_64")]
                Width::Avx2 => unsafe { avx2($($argument),*) },
                // SAFETY: as above, for the four AVX-512 features that `Level` asks for.
                #[cfg(target_arch = "x86_64")]
                Width::Avx512 => unsafe { avx512($($argument),*) },
            }
        }
    )*};
}

/// Fills `target` with `convert` of each element of `source`.
#[inline(always)]
fn map<const S: usize, const T: usize>(source: &[u8], target: &mut [u8], convert: impl Fn([u8; S]) -> [u8; T]) {
    let (source, target) = (source.as_chunks::<S>().0, target.as_chunks_mut::<T>().0);
    for (from, to) in source.iter().zip(target) {
        *to = convert(*from);
    }
}

#[inline(always)]
fn widen_bytes(format: Format, source: &[u8], target: &mut [u8]) {
    map(source, target, |[byte]: [u8; 1]| format.widen(u32::from(byte)).to_le_bytes());
}

#[inline(always)]
fn narrow_bytes(format: Format, source: &[u8], target: &mut [u8]) {
    map(source, target, |bytes: [u8; 4]| [format.narrow(u32::from_le_bytes(bytes)).to_le_bytes()[0]]);
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
    fn widen_f8e5m2(source: &[u8], target: &mut [u8]) {
        widen_bytes(float::F8E5M2, source, target);
    }
    fn widen_f8e4m3(source: &[u8], target: &mut [u8]) {
        widen_bytes(float::F8E4M3, source, target);
    }
    fn widen_f8e5m2_fnuz(source: &[u8], target: &mut [u8]) {
        widen_bytes(float::F8E5M2_FNUZ, source, target);
    }
    fn widen_f8e4m3_fnuz(source: &[u8], target: &mut [u8]) {
        widen_bytes(float::F8E4M3_FNUZ, source, target);
    }
    fn narrow_f64(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| float::widen_f32(u32::from_le_bytes(bytes)).to_le_bytes());
    }
    fn narrow_bf16(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| {
            let [low, high, _, _] = float::narrow_bf16(u32::from_le_bytes(bytes)).to_le_bytes();
            [low, high]
        });
    }
    fn narrow_f16(source: &[u8], target: &mut [u8]) {
        map(source, target, |bytes| {
            let [low, high, _, _] = float::F16.narrow(u32::from_le_bytes(bytes)).to_le_bytes();
            [low, high]
        });
    }
    fn narrow_f8e5m2(source: &[u8], target: &mut [u8]) {
        narrow_bytes(float::F8E5M2, source, target);
    }
    fn narrow_f8e4m3(source: &[u8], target: &mut [u8]) {
        narrow_bytes(float::F8E4M3, source, target);
    }
    fn narrow_f8e5m2_fnuz(source: &[u8], target: &mut [u8]) {
        narrow_bytes(float::F8E5M2_FNUZ, source, target);
    }
    fn narrow_f8e4m3_fnuz(source: &[u8], target: &mut [u8]) {
        narrow_bytes(float::F8E4M3_FNUZ, source, target);
    }

    /// Multiplies f32 values by the f32 `factor` (bits) in place.
    fn multiply(values: &mut [u8], factor: u32) {
        for value in values.as_chunks_mut::<4>().0 {
            *value = float::multiply(u32::from_le_bytes(*value), factor).to_le_bytes();
        }
    }
    /// As [`multiply`], flushing subnormals.
    fn multiply_flush(values: &mut [u8], factor: u32) {
        for value in values.as_chunks_mut::<4>().0 {
            *value = float::multiply_flush(u32::from_le_bytes(*value), factor).to_le_bytes();
        }
    }
    /// Adds the f32 `summand` (bits) to f32 values in place.
    fn add(values: &mut [u8], summand: u32) {
        for value in values.as_chunks_mut::<4>().0 {
            *value = float::add(u32::from_le_bytes(*value), summand).to_le_bytes();
        }
    }
}

/// Widening of the sources that arithmetic has loops of its own for.
#[inline(always)]
fn wide_bf16(bytes: [u8; 2]) -> u32 {
    u32::from(u16::from_le_bytes(bytes)) << 16
}

#[inline(always)]
fn thin_bf16(bits: u32) -> [u8; 2] {
    let [low, high, _, _] = float::narrow_bf16(bits).to_le_bytes();
    [low, high]
}

/// BF16 nearest to the f32 with these bits, if that is no NaN; of a NaN whose lower half is zero, a NaN.
#[inline(always)]
fn rounded_finite_bf16(bits: u32) -> u16 {
    let [_, _, low, high] = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)).to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// `f32` rounded to BF16, as `f32` again.
#[inline(always)]
fn rounded_bf16(bytes: [u8; 4]) -> u32 {
    float::narrow_bf16(u32::from_le_bytes(bytes)) << 16
}

/// Elements that are looked at together.
const TOGETHER: usize = 32;

/// Fills `target` with products by `factor` in BF16, flushing subnormals. What that takes is done only for groups with a product
/// that is not ordinary: neither a zero nor finite and far from subnormal. `widen` gives the lower half of a NaN zeros.
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
    // With such a factor the product of a subnormal is one too, or the zero that it is to become.
    let ordinary_factor = f32::from_bits(factor).is_normal() && f32::from_bits(factor).abs() <= 1.0;
    for (from, to) in groups.iter().zip(group_targets) {
        let mut products = [0; TOGETHER];
        for (bytes, product) in from.iter().zip(&mut products) {
            *product = rounded_finite_bf16((f32::from_bits(widen(*bytes)) * f32::from_bits(factor)).to_bits());
        }
        let mut odd = u16::from(!ordinary_factor);
        for (product, to) in products.iter().zip(to.iter_mut()) {
            let magnitude = product & 0x7fff;
            // Exponents from 2 to 254 are at least 2^-125 and finite. What was rounded to a zero is to be one.
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

/// The loop between equal types.
pub(crate) fn copy(_: Level, source: &[u8], target: &mut [u8]) {
    target.copy_from_slice(source);
}

/// The loop from `dtype` to f32, or `None` if it is not a float that converts.
pub(crate) fn widen(dtype: DType) -> Option<Row> {
    match dtype {
        DType::F64 => Some(widen_f64),
        DType::F32 => Some(copy),
        DType::BF16 => Some(widen_bf16),
        DType::F16 => Some(widen_f16),
        DType::F8E5M2 => Some(widen_f8e5m2),
        DType::F8E4M3 => Some(widen_f8e4m3),
        DType::F8E5M2Fnuz => Some(widen_f8e5m2_fnuz),
        DType::F8E4M3Fnuz => Some(widen_f8e4m3_fnuz),
        DType::Bool
        | DType::F4
        | DType::F6E2M3
        | DType::F6E3M2
        | DType::U8
        | DType::I8
        | DType::F8E8M0
        | DType::I16
        | DType::U16
        | DType::I32
        | DType::U32
        | DType::C64
        | DType::I64
        | DType::U64 => None,
    }
}

/// The loop from f32 to `dtype`, or `None` if it is not a float that converts.
pub(crate) fn narrow(dtype: DType) -> Option<Row> {
    match dtype {
        DType::F64 => Some(narrow_f64),
        DType::F32 => Some(copy),
        DType::BF16 => Some(narrow_bf16),
        DType::F16 => Some(narrow_f16),
        DType::F8E5M2 => Some(narrow_f8e5m2),
        DType::F8E4M3 => Some(narrow_f8e4m3),
        DType::F8E5M2Fnuz => Some(narrow_f8e5m2_fnuz),
        DType::F8E4M3Fnuz => Some(narrow_f8e4m3_fnuz),
        DType::Bool
        | DType::F4
        | DType::F6E2M3
        | DType::F6E3M2
        | DType::U8
        | DType::I8
        | DType::F8E8M0
        | DType::I16
        | DType::U16
        | DType::I32
        | DType::U32
        | DType::C64
        | DType::I64
        | DType::U64 => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            for (value, element) in wide.as_chunks::<4>().0.iter().zip(expected.chunks_exact_mut(bytes)) {
                float::narrow_one(dtype, u32::from_le_bytes(*value), element);
            }
            let mut back = vec![0; wide.len()];
            for (element, value) in expected.chunks_exact(bytes).zip(back.as_chunks_mut::<4>().0) {
                *value = float::widen_one(dtype, element).to_le_bytes();
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
        type Operation = (fn(Level, &mut [u8], u32), fn(u32, u32) -> u32);
        let operations: [Operation; 3] =
            [(multiply, float::multiply), (multiply_flush, float::multiply_flush), (add, float::add)];
        let values = strata();
        for operand in [0.088_388_346_f32, -3.0, 1e-38, 1e-45, f32::INFINITY, f32::NAN, 0.0] {
            for (row, one) in operations {
                for level in Level::available() {
                    let mut computed = values.clone();
                    row(level, &mut computed, operand.to_bits());
                    for (value, result) in values.as_chunks::<4>().0.iter().zip(computed.as_chunks::<4>().0) {
                        let bits = u32::from_le_bytes(*value);
                        let expected = one(bits, operand.to_bits());
                        assert_eq!(u32::from_le_bytes(*result), expected, "{bits:#x} with {operand} at {level:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn fused_loops_agree_with_single_elements() {
        // All of BF16 in order, so that ordinary groups are met; then every 7919th, so that mixed ones are, zeros among them.
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
