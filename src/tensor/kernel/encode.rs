//! Loops of encoders: greatest magnitudes of runs, and codes of runs that share a scale.
//!
//! A run is a number of neighbours in a row; the last of a row may be shorter. Sources are BF16, F16 or F32. Quotients are f32,
//! rounded once; the code is the nearest one, ties to even.
#![allow(unsafe_code)]
#![allow(clippy::inline_always, reason = "these must be compiled into the loops of each instruction set")]

use super::super::float;
use super::{Level, row::leveled};
use crate::DType;

/// Most elements of a run whose codes are made together.
const PART: usize = 128;

/// Codes that fill whole bytes, whatever their width.
const PACKED: usize = 8;

/// Bits of the magnitude of an f32.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// Adding this to a number of at most 22 bits leaves the nearest integer, ties to even, in the low bits of the sum.
const INTEGER_ANCHOR: f32 = 12_582_912.0;

#[inline(always)]
fn wide_bf16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

#[inline(always)]
fn wide_f16(bytes: [u8; 2]) -> f32 {
    f32::from_bits(float::F16.widen(u32::from(u16::from_le_bytes(bytes))))
}

#[inline(always)]
fn wide_f32(bytes: [u8; 4]) -> f32 {
    f32::from_bits(u32::from_le_bytes(bytes))
}

#[inline(always)]
fn clamp(value: f32, low: f32, high: f32) -> f32 {
    let value = if value < low { low } else { value };
    if value > high { high } else { value }
}

#[inline(always)]
pub(super) fn low_byte(bits: u32) -> u8 {
    bits.to_le_bytes()[0]
}

/// The nearest E4M3, at most 448.
#[inline(always)]
fn e4m3(value: f32) -> u8 {
    let bits = clamp(value, -448.0, 448.0).to_bits();
    let magnitude = bits & MAGNITUDE;
    let even = (magnitude >> 20) & 1;
    let normal = ((magnitude + 0x7_ffff + even) >> 20).wrapping_sub(120 << 3);
    // Adding this power of two leaves the smallest subnormal as the last bit of the f32 sum, so the addition rounds.
    let anchor = 141 << 23;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(anchor)).to_bits().wrapping_sub(anchor);
    let code = if magnitude < 121 << 23 { subnormal } else { normal };
    low_byte(code | ((bits >> 24) & 0x80))
}

/// The nearest E2M1, at most 6. A zero has no sign, but what is rounded to zero has.
#[inline(always)]
fn e2m1(value: f32) -> u8 {
    let magnitude = value.to_bits() & MAGNITUDE;
    let above = |border: f32| u32::from(magnitude > border.to_bits());
    let from = |border: f32| u32::from(magnitude >= border.to_bits());
    let code = above(0.25) + from(0.75) + above(1.25) + from(1.75) + above(2.5) + from(3.5) + above(5.0);
    low_byte(code | (u32::from(value < 0.0) << 3))
}

/// The nearest integer of `-half..half`, plus `half`.
#[inline(always)]
fn integer(value: f32, half: f32) -> u8 {
    let sum = clamp(value, -half, half - 1.0) + (INTEGER_ANCHOR + half);
    low_byte(sum.to_bits())
}

/// The greatest magnitude of each run, if it is above that already there: f32 bits without the sign.
#[inline(always)]
fn maxima<const S: usize, T: Copy + Ord + Default>(
    source: &[u8],
    run: usize,
    found: &mut [u32],
    magnitude: impl Fn([u8; S]) -> T,
    wide: impl Fn(T) -> u32,
) {
    let elements = source.as_chunks::<S>().0;
    for (run, found) in elements.chunks(run.max(1)).zip(found) {
        let mut greatest = T::default();
        for element in run {
            greatest = greatest.max(magnitude(*element));
        }
        *found = (*found).max(wide(greatest));
    }
}

/// Calls `code` for each element with the scale of its run.
#[inline(always)]
fn each_code<const S: usize>(
    source: &[u8],
    run: usize,
    scales: &[f32],
    codes: &mut [u8],
    code: impl Fn([u8; S], f32) -> u8,
) {
    let run = run.max(1);
    let elements = source.as_chunks::<S>().0;
    for ((from, to), scale) in elements.chunks(run).zip(codes.chunks_mut(run)).zip(scales) {
        for (from, to) in from.iter().zip(to) {
            *to = code(*from, *scale);
        }
    }
}

/// The same with two codes in a byte, the first in the low bits.
#[inline(always)]
fn each_nibble<const S: usize>(
    source: &[u8],
    run: usize,
    scales: &[f32],
    codes: &mut [u8],
    code: impl Fn([u8; S], f32) -> u8,
) {
    let run = run.max(2);
    let elements = source.as_chunks::<S>().0;
    match run {
        16 => nibbles::<S, 16>(elements, scales, codes, code),
        32 => nibbles::<S, 32>(elements, scales, codes, code),
        _ => {
            for ((from, to), scale) in elements.chunks(run).zip(codes.chunks_mut(run / 2)).zip(scales) {
                for (from, to) in from.chunks(PART).zip(to.chunks_mut(PART / 2)) {
                    let mut single = [0_u8; PART];
                    for (from, to) in from.iter().zip(&mut single) {
                        *to = code(*from, *scale);
                    }
                    pack(&single, to);
                }
            }
        }
    }
}

#[inline(always)]
fn nibbles<const S: usize, const RUN: usize>(
    elements: &[[u8; S]],
    scales: &[f32],
    codes: &mut [u8],
    code: impl Fn([u8; S], f32) -> u8,
) {
    for ((from, to), scale) in elements.as_chunks::<RUN>().0.iter().zip(codes.chunks_mut(RUN / 2)).zip(scales) {
        let mut single = [0_u8; RUN];
        for (from, to) in from.iter().zip(&mut single) {
            *to = code(*from, *scale);
        }
        pack(&single, to);
    }
}

#[inline(always)]
fn pack(single: &[u8], to: &mut [u8]) {
    for ([low, high], to) in single.as_chunks::<2>().0.iter().zip(to) {
        *to = low | high << 4;
    }
}

/// The loops of each coding of an element: its code by its value and the scale of its run.
macro_rules! codings {
    ($($(#[$doc:meta])* $name:ident $each:ident $code:expr;)*) => {$(
        $(#[$doc])*
        pub(crate) const $name: Coding = {
            leveled! {
                fn from_bf16(source: &[u8], run: usize, scales: &[f32], codes: &mut [u8]) {
                    $each(source, run, scales, codes, |bytes, scale| $code(wide_bf16(bytes), scale));
                }
                fn from_f16(source: &[u8], run: usize, scales: &[f32], codes: &mut [u8]) {
                    $each(source, run, scales, codes, |bytes, scale| $code(wide_f16(bytes), scale));
                }
                fn from_f32(source: &[u8], run: usize, scales: &[f32], codes: &mut [u8]) {
                    $each(source, run, scales, codes, |bytes, scale| $code(wide_f32(bytes), scale));
                }
            }
            [from_bf16, from_f16, from_f32]
        };
    )*};
}

codings! {
    /// E4M3 of the quotient by the scale.
    E4M3 each_code |value: f32, scale: f32| e4m3(value / scale);
    /// E4M3 of the product with the scale.
    E4M3_TIMES each_code |value: f32, scale: f32| e4m3(value * scale);
    /// Two E2M1 in a byte, of quotients.
    E2M1 each_nibble |value: f32, scale: f32| e2m1(value / scale);
    /// Two E2M1 in a byte, of products.
    E2M1_TIMES each_nibble |value: f32, scale: f32| e2m1(value * scale);
    /// Integers of 8 bits, of quotients.
    INT8 each_code |value: f32, scale: f32| integer(value / scale, 128.0);
    /// Two integers of 4 bits in a byte, of quotients.
    INT4 each_nibble |value: f32, scale: f32| integer(value / scale, 8.0);
}

leveled! {
    fn maxima_bf16(source: &[u8], run: usize, found: &mut [u32]) {
        maxima(source, run, found, |bytes| u16::from_le_bytes(bytes) & 0x7fff, |bits| u32::from(bits) << 16);
    }
    fn maxima_f16(source: &[u8], run: usize, found: &mut [u32]) {
        maxima(source, run, found, |bytes| u16::from_le_bytes(bytes) & 0x7fff, |bits| float::F16.widen(u32::from(bits)));
    }
    fn maxima_f32(source: &[u8], run: usize, found: &mut [u32]) {
        maxima(source, run, found, |bytes| u32::from_le_bytes(bytes) & MAGNITUDE, |bits| bits);
    }
    /// F32 scales, the greatest magnitude over 448, or a constant where that is 0.
    fn scales_f32(found: &[u32], zero: f32, stored: &mut [u8], divisors: &mut [f32]) {
        for ((found, stored), divisor) in found.iter().zip(stored.as_chunks_mut::<4>().0).zip(divisors) {
            let scale = f32::from_bits(*found) / 448.0;
            *divisor = if scale == 0.0 { zero } else { scale };
            *stored = divisor.to_le_bytes();
        }
    }
    /// The same, rounded up to powers of two.
    fn scales_powers(found: &[u32], zero: f32, stored: &mut [u8], divisors: &mut [f32]) {
        for ((found, stored), divisor) in found.iter().zip(stored.as_chunks_mut::<4>().0).zip(divisors) {
            let scale = f32::from_bits(*found) / 448.0;
            let power = f32::from_bits((scale.to_bits() + 0x7f_ffff) & 0x7f80_0000);
            *divisor = if scale == 0.0 { zero } else { power };
            *stored = divisor.to_le_bytes();
        }
    }
    /// One scale for all, which is not stored here.
    fn scales_given(_found: &[u32], scale: f32, _stored: &mut [u8], divisors: &mut [f32]) {
        divisors.fill(scale);
    }
    /// Exponents: the greatest magnitude rounded to a power of two, less a constant; and the powers that codes are multiplied by.
    fn exponents_nearest(found: &[u32], less: f32, stored: &mut [u8], factors: &mut [f32]) {
        let less = (less + INTEGER_ANCHOR).to_bits() & 0xff;
        for ((found, stored), factor) in found.iter().zip(stored).zip(factors) {
            let exponent = ((*found + (1 << 21)) >> 23).saturating_sub(less);
            *stored = low_byte(exponent);
            *factor = f32::from_bits((254 - exponent) << 23);
        }
    }
    /// Exponents of the greatest magnitude over a constant, rounded up; and the powers that codes are multiplied by.
    fn exponents_up(found: &[u32], over: f32, stored: &mut [u8], factors: &mut [f32]) {
        for ((found, stored), factor) in found.iter().zip(stored).zip(factors) {
            let exponent = ((f32::from_bits(*found) / over).to_bits() + 0x7f_ffff) >> 23;
            *stored = low_byte(exponent);
            *factor = f32::from_bits((254 - exponent) << 23);
        }
    }
    /// Exponents of F32 scales that are powers of two from 2^-127 to 2^127, and what codes are multiplied by. Others are left as they
    /// are.
    fn exponents_given(given: &[u8], stored: &mut [u8], factors: &mut [f32]) {
        for ((given, stored), factor) in given.as_chunks::<4>().0.iter().zip(stored).zip(factors) {
            let bits = u32::from_le_bytes(*given);
            // 2^-127 is a subnormal F32, both as a scale and as a factor.
            let exponent = if bits == HALF_LEAST_NORMAL { 0 } else { bits >> 23 };
            let is_power = bits == HALF_LEAST_NORMAL || (bits << 9 == 0 && (1..=254).contains(&exponent));
            let inverse = if exponent == 254 { HALF_LEAST_NORMAL } else { (254 - exponent.min(254)) << 23 };
            *stored = if is_power { low_byte(exponent) } else { *stored };
            *factor = if is_power { f32::from_bits(inverse) } else { *factor };
        }
    }
    /// BF16 scales, the greatest magnitude over a constant, or 2^-7 where that is 0.
    fn scales_bf16(found: &[u32], over: f32, stored: &mut [u8], divisors: &mut [f32]) {
        for ((found, stored), divisor) in found.iter().zip(stored.as_chunks_mut::<2>().0).zip(divisors) {
            let [low, high, _, _] = float::narrow_bf16((f32::from_bits(*found) / over).to_bits()).to_le_bytes();
            let scale = wide_bf16([low, high]);
            *divisor = if scale == 0.0 { BF16_EPSILON } else { scale };
            let [_, _, low, high] = divisor.to_le_bytes();
            *stored = [low, high];
        }
    }
    /// E4M3 scales of 16 from their greatest magnitudes, and what codes are divided by: with `weight_global_scale`.
    fn scales_divided(found: &[u32], factor: f32, stored: &mut [u8], scales: &mut [f32]) {
        for ((found, stored), scale) in found.iter().zip(stored).zip(scales) {
            let code = e4m3(factor * (f32::from_bits(*found) / 6.0));
            *stored = if code == 0 { E4M3_EPSILON } else { code };
            *scale = f32::from_bits(float::F8E4M3.widen(u32::from(*stored))) / factor;
        }
    }
    /// The same with `weight_scale_2`.
    fn scales_multiplied(found: &[u32], factor: f32, stored: &mut [u8], scales: &mut [f32]) {
        let six = 6.0 * factor;
        for ((found, stored), scale) in found.iter().zip(stored).zip(scales) {
            let quotient = f32::from_bits(*found) / six;
            let quotient = if quotient == 0.0 { 1.0 } else { quotient };
            *stored = e4m3(if quotient < E4M3_LEAST { E4M3_LEAST } else { quotient });
            *scale = f32::from_bits(float::F8E4M3.widen(u32::from(*stored))) * factor;
        }
    }
}

leveled! {
    /// The least and the greatest of each run.
    fn bounds(values: &[f32], run: usize, found: &mut [[f32; 2]]) {
        for (values, found) in values.chunks(run).zip(found) {
            let (mut least, mut greatest) = (f32::INFINITY, f32::NEG_INFINITY);
            for value in values {
                least = if *value < least { *value } else { least };
                greatest = if *value > greatest { *value } else { greatest };
            }
            *found = [least, greatest];
        }
    }
    /// The nearest step of each element from the bias of its run, from 0 to `most`, ties to even.
    fn steps(values: &[f32], run: usize, found: &[[f32; 2]], most: f32, codes: &mut [u8]) {
        for ((values, codes), [scale, bias]) in values.chunks(run).zip(codes.chunks_mut(run)).zip(found) {
            for (value, code) in values.iter().zip(codes) {
                *code = low_byte((clamp((*value - *bias) / *scale, 0.0, most) + INTEGER_ANCHOR).to_bits());
            }
        }
    }
    /// The nearest E2M1 of each element over the scale of its run, the lesser one of two. A zero has no sign.
    fn lesser_e2m1(values: &[f32], run: usize, found: &[[f32; 2]], _most: f32, codes: &mut [u8]) {
        for ((values, codes), [scale, _]) in values.chunks(run).zip(codes.chunks_mut(run)).zip(found) {
            for (value, code) in values.iter().zip(codes) {
                let quotient = *value / *scale;
                let above = |border: f32| u8::from(quotient.abs() > border);
                let size = above(0.25) + above(0.75) + above(1.25) + above(1.75) + above(2.5) + above(3.5) + above(5.0);
                *code = size | (u8::from(size > 0 && quotient < 0.0) << 3);
            }
        }
    }
    /// Codes side by side, the low bits first.
    fn dense(codes: &[u8], bits: usize, packed: &mut [u8]) {
        for (codes, packed) in codes.as_chunks::<PACKED>().0.iter().zip(packed.chunks_exact_mut(bits)) {
            let word = codes.iter().rev().fold(0_u64, |word, code| (word << bits) | u64::from(*code));
            packed.copy_from_slice(&word.to_le_bytes()[..bits]);
        }
    }
}

/// Bits of 2^-127.
pub(super) const HALF_LEAST_NORMAL: u32 = 0x40_0000;

/// 2^-7, which compressed-tensors takes for a BF16 scale of 0.
const BF16_EPSILON: f32 = 0.007_812_5;

/// The least bits of a magnitude that is infinite once it is rounded to a power of two.
pub(crate) const NEAREST_BEYOND: u32 = 0x7f60_0000;

/// 2^-3, which compressed-tensors takes for an E4M3 scale of 0.
const E4M3_EPSILON: u8 = 0x20;

/// The least positive E4M3, below which `ModelOpt` lets no scale be.
const E4M3_LEAST: f32 = 0.001_953_125;

/// A loop that finds the greatest magnitudes of runs.
pub(crate) type Maxima = fn(Level, &[u8], usize, &mut [u32]);

/// A loop that makes scales: greatest magnitudes of runs, a constant, scales as they are stored, and as codes are made with them.
pub(crate) type Scaling = fn(Level, &[u32], f32, &mut [u8], &mut [f32]);

/// A loop that makes codes: source, elements of a run, scale of each run, codes.
pub(crate) type Codes = fn(Level, &[u8], usize, &[f32], &mut [u8]);

/// The loops that make codes of sources of each type, in the order of [`SOURCES`].
pub(crate) type Coding = [Codes; 3];

/// The integer nearest to a number of at most 2^22, with halves away from zero, as the low byte of its two's complement.
#[inline(always)]
fn half_away(value: f32) -> u8 {
    const WHOLE: f32 = 8_388_608.0;
    let magnitude = value.abs();
    let nearest = (magnitude + WHOLE) - WHOLE;
    let below = if nearest > magnitude { nearest - 1.0 } else { nearest };
    let rounded = if magnitude - below >= 0.5 { below + 1.0 } else { below };
    low_byte((rounded.copysign(value) + 1.5 * WHOLE).to_bits())
}

leveled! {
    /// Blocks of ggml of 32 elements: an F16 scale, which is a 127th of the greatest magnitude, and the nearest integers.
    fn q8_0(values: &[f32], codes: &mut [u8]) {
        for (values, block) in values.as_chunks::<32>().0.iter().zip(codes.as_chunks_mut::<34>().0) {
            let scale = values.iter().fold(0.0, |greatest: f32, value| greatest.max(value.abs())) / 127.0;
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            // An infinite inverse is that of a scale that is stored as zero: any code stands for zero.
            let inverse = if inverse.is_finite() { inverse } else { 0.0 };
            let [low, high, ..] = float::F16.narrow(scale.to_bits()).to_le_bytes();
            (block[0], block[1]) = (low, high);
            for (value, code) in values.iter().zip(&mut block[2..]) {
                *code = half_away(value * inverse);
            }
        }
    }
}

/// The types of sources, each with its loop for the greatest magnitudes.
const SOURCES: [(DType, Maxima); 3] = [(DType::BF16, maxima_bf16), (DType::F16, maxima_f16), (DType::F32, maxima_f32)];

/// The number of a type among those of sources, and its loop for the greatest magnitudes; `None` if it is none of them.
pub(crate) fn source(dtype: DType) -> Option<(usize, Maxima)> {
    let number = SOURCES.iter().position(|(of, _)| *of == dtype)?;
    Some((number, SOURCES[number].1))
}
