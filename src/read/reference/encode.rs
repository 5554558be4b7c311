//! Codes and scales by their formulas: one element at a time, from the block that it is in.
//!
//! Written from the definitions of the formats. Scales of blocks are kept, since neighbours have the same.

use std::{num::NonZeroUsize, sync::Arc};

use ckfs_tensor::{DType, EncodedMatrices, EncodedPart, Encoder, ExponentRule, MatrixFactor, View};
use lru::LruCache;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{
    arithmetic::{divide, multiply, round, subtract, widen},
    error::ReferenceError,
};

/// The values of elements of a view, as f32 bits.
type Values<'a> = dyn FnMut(&View, &[u64]) -> Result<u32, ReferenceError> + 'a;

/// Scales that are kept.
const SCALES_KEPT: NonZeroUsize = NonZeroUsize::new(1 << 16).unwrap();

/// A block of a matrix: the encoding, the place of the matrix, and the place of the block.
type Place = (u64, SmallVec<[u64; 4]>, u64, u64);

/// The scale of a block.
#[derive(Clone, Copy, Debug)]
struct BlockScale {
    /// Its stored bits.
    stored: u64,
    /// What elements are divided by.
    divisor: f32,
    /// What is subtracted from them before.
    bias: f32,
}

impl BlockScale {
    const fn plain(stored: u64, divisor: f32) -> Self {
        Self { stored, divisor, bias: 0.0 }
    }
}

/// Elements of a block from which on its scale is for all evaluators: for less, they would wait for each other more than they save.
const SHARED_BLOCK: u64 = 512;

/// A matrix of an encoding.
type Matrix = (u64, SmallVec<[u64; 4]>);

/// Scales that one evaluator after the other needs: the same weights are in several files of a mount, and a scale of a large block or
/// a factor takes as long as all the codes of it.
#[derive(Clone, Debug, Default)]
pub struct KnownScales(Arc<Mutex<Known>>);

#[derive(Debug)]
struct Known {
    scales: LruCache<Place, BlockScale>,
    factors: LruCache<Matrix, f32>,
}

impl Default for Known {
    fn default() -> Self {
        Self { scales: LruCache::new(SCALES_KEPT), factors: LruCache::new(SCALES_KEPT) }
    }
}

/// What is kept of blocks and matrices.
#[derive(Debug)]
pub(super) struct ScalesByDefinition {
    own: Known,
    shared: KnownScales,
}

/// Rows and columns of a block.
fn block(encoder: Encoder, (rows, columns): (u64, u64)) -> (u64, u64) {
    match encoder {
        Encoder::Fp8Block { .. } => (128, 128),
        Encoder::Fp8Channel | Encoder::Int8Channel => (1, columns),
        Encoder::Fp8Tensor => (rows, columns),
        Encoder::Mxfp8(_) | Encoder::Mxfp4 | Encoder::MlxMxfp4 | Encoder::Q8_0 => (1, 32),
        Encoder::Nvfp4(_) => (1, 16),
        Encoder::Int4 { group } | Encoder::Affine { group, .. } => (1, group),
    }
}

/// The bits of a code, and those of a stored element.
fn widths(encoder: Encoder) -> (u64, u64) {
    match encoder {
        Encoder::Fp8Block { .. } | Encoder::Fp8Channel | Encoder::Fp8Tensor | Encoder::Mxfp8(_) | Encoder::Q8_0 => {
            (8, 8)
        }
        Encoder::Mxfp4 | Encoder::Nvfp4(_) => (4, 8),
        Encoder::Int8Channel => (8, 32),
        Encoder::Int4 { .. } | Encoder::MlxMxfp4 => (4, 32),
        Encoder::Affine { bits, .. } => (u64::from(bits), 32),
    }
}

fn over(left: f32, right: f32) -> f32 {
    f32::from_bits(divide(left.to_bits(), right.to_bits()))
}

fn less(left: f32, right: f32) -> f32 {
    f32::from_bits(subtract(left.to_bits(), right.to_bits()))
}

fn times(left: f32, right: f32) -> f32 {
    f32::from_bits(multiply(left.to_bits(), right.to_bits(), false))
}

fn as_type(dtype: DType, value: f32) -> (u64, f32) {
    let bits = round(dtype, value.to_bits());
    (bits, f32::from_bits(widen(dtype, bits)))
}

fn if_zero(value: f32, other: f32) -> f32 {
    if value == 0.0 { other } else { value }
}

/// The least exponent whose power of two is not below a positive number.
fn exponent_above(value: f32) -> i32 {
    (-149..=128).find(|exponent| 2f64.powi(*exponent) >= f64::from(value)).unwrap_or(128)
}

/// The exponent of a positive number rounded to a power of two: up from 1.75 times one on, else down.
fn exponent_near(value: f32) -> i32 {
    let value = f64::from(value);
    let below = (-149..=127).rev().find(|exponent| 2f64.powi(*exponent) <= value).unwrap_or(-149);
    if value >= 1.75 * 2f64.powi(below) { below + 1 } else { below }
}

/// The exponent of a scale that is a power of two which E8M0 has.
fn power_of_two(scale: f32) -> Option<i32> {
    (-127..=127).find(|exponent| (2f64.powi(*exponent) - f64::from(scale)).abs() == 0.0)
}

/// The scale and the bias of MLX for a block with these bounds.
fn affine(dtype: DType, bits: u8, (least, greatest): (f32, f32)) -> BlockScale {
    let steps = f32::from(u8::MAX >> (8 - bits));
    let step = over(less(greatest, least), steps).max(1e-7);
    let (mut divisor, edge) = if least.abs() > greatest.abs() { (step, least) } else { (-step, greatest) };
    let from_zero = over(edge, divisor).round_ties_even();
    let mut bias = 0.0;
    if from_zero != 0.0 {
        (divisor, bias) = (over(edge, from_zero), edge);
    }
    BlockScale { stored: as_type(dtype, divisor).0, divisor, bias }
}

fn exponent_scale(exponent: i32) -> BlockScale {
    let stored = (exponent + 127).max(0);
    #[expect(clippy::cast_possible_truncation, reason = "a power of two that f32 has")]
    let divisor = 2f64.powi(stored - 127) as f32;
    BlockScale::plain(u64::from(stored.unsigned_abs()), divisor)
}

/// The number nearest to a value among those of a list, of which every other one is preferred in a tie, the first to begin with.
fn nearest(value: f64, list: &[f64]) -> u64 {
    let mut best = 0;
    for (at, candidate) in list.iter().enumerate() {
        let (distance, least) = ((candidate - value).abs(), (list[best] - value).abs());
        if distance < least || (distance.total_cmp(&least).is_eq() && at % 2 == 0) {
            best = at;
        }
    }
    best as u64
}

/// The code of an element divided by its scale.
fn code(encoder: Encoder, quotient: f32) -> u64 {
    let within = |low: f32, high: f32| quotient.max(low).min(high);
    let integer = |half: f64| {
        #[expect(clippy::cast_possible_truncation, reason = "as close as f32 can be to a small integer")]
        let value = f64::from(within(-half as f32, half as f32 - 1.0)) + half;
        let numbers: Vec<f64> =
            (0..256_u32).take_while(|number| f64::from(*number) < 2.0 * half).map(f64::from).collect();
        nearest(value, &numbers)
    };
    match encoder {
        Encoder::Fp8Block { .. } | Encoder::Fp8Channel | Encoder::Fp8Tensor | Encoder::Mxfp8(_) => {
            as_type(DType::F8E4M3, within(-448.0, 448.0)).0
        }
        Encoder::Mxfp4 | Encoder::Nvfp4(_) => {
            let magnitude = nearest(f64::from(quotient.abs()), &[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
            magnitude + if quotient < 0.0 { 8 } else { 0 }
        }
        Encoder::Int8Channel => integer(128.0),
        Encoder::Q8_0 => {
            // Halves go away from zero.
            let magnitude = (f64::from(quotient.abs()) + 0.5).floor();
            let code =
                (0..=128_u64).find(|code| magnitude <= f64::from(u8::try_from(*code).unwrap_or(128))).unwrap_or(0);
            if quotient < 0.0 { (256 - code) % 256 } else { code }
        }
        Encoder::Int4 { .. } => integer(8.0),
        Encoder::Affine { bits, .. } => {
            let numbers: Vec<f64> = (0..1_u32 << bits).map(f64::from).collect();
            nearest(f64::from(quotient), &numbers)
        }
        Encoder::MlxMxfp4 => {
            let distance = |number: &f64| (f64::from(quotient.abs()) - number).abs();
            let numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
            // The first of several that are as near.
            let found = (0..8).min_by(|left, right| distance(&numbers[*left]).total_cmp(&distance(&numbers[*right])));
            let code = found.unwrap_or(0) as u64;
            code + if code > 0 && quotient < 0.0 { 8 } else { 0 }
        }
    }
}

impl ScalesByDefinition {
    pub(super) fn new(shared: KnownScales) -> Self {
        Self { own: Known::default(), shared }
    }

    /// The bits of an element of what an encoder makes.
    pub(super) fn element(
        &mut self,
        of: &EncodedMatrices,
        part: EncodedPart,
        index: &[u64],
        values: &mut Values<'_>,
    ) -> Result<u64, ReferenceError> {
        let encoder = of.bands.encoder();
        let extents = of.input.shape().extents();
        let outer_axes = extents.len() - 2;
        let outer = SmallVec::from_slice(&index[..outer_axes]);
        let (rows, columns) = (extents[outer_axes], extents[outer_axes + 1]);
        let (block_rows, block_columns) = block(encoder, (rows, columns));
        match part {
            EncodedPart::Factor => Ok(u64::from(self.factor(of, &outer, values)?.to_bits())),
            EncodedPart::Scales => {
                Ok(self.block_scale(of, &outer, (index[outer_axes], index[outer_axes + 1]), values)?.stored)
            }
            EncodedPart::Biases => {
                let scale = self.block_scale(of, &outer, (index[outer_axes], index[outer_axes + 1]), values)?;
                Ok(round(of.input.dtype(), scale.bias.to_bits()))
            }
            EncodedPart::Codes if encoder == Encoder::Q8_0 => {
                let (row, byte) = (index[outer_axes], index[outer_axes + 1]);
                let (block, byte) = (byte / 34, byte % 34);
                let scale = self.block_scale(of, &outer, (row, block), values)?;
                let Some(element) = byte.checked_sub(2) else { return Ok(scale.stored >> (8 * byte) & 255) };
                let mut place = outer;
                place.extend([row, block * 32 + element]);
                // The divisor is what it is multiplied by.
                Ok(code(encoder, times(f32::from_bits(values(&of.input, &place)?), scale.divisor)))
            }
            EncodedPart::Codes => {
                let (bits, width) = widths(encoder);
                let (row, low) = (index[outer_axes], index[outer_axes + 1] * width);
                let mut packed = 0;
                for column in (low / bits..(low + width).div_ceil(bits)).take_while(|column| *column < columns) {
                    let scale = self.block_scale(of, &outer, (row / block_rows, column / block_columns), values)?;
                    let mut place = outer.clone();
                    place.extend([row, column]);
                    let value = less(f32::from_bits(values(&of.input, &place)?), scale.bias);
                    let code = code(encoder, over(value, scale.divisor));
                    // A code may begin in the element before.
                    packed |=
                        if bits * column < low { code >> (low - bits * column) } else { code << (bits * column - low) };
                }
                packed &= u64::MAX >> (64 - width);
                Ok(packed)
            }
        }
    }

    /// The least and the greatest of the elements in a box of a matrix.
    fn bounds(
        (name, view): (&str, &View),
        outer: &[u64],
        rows: std::ops::Range<u64>,
        columns: &std::ops::Range<u64>,
        values: &mut Values<'_>,
    ) -> Result<(f32, f32), ReferenceError> {
        let (mut least, mut greatest) = (f32::INFINITY, f32::NEG_INFINITY);
        for row in rows {
            for column in columns.clone() {
                let mut index: SmallVec<[u64; 8]> = SmallVec::from_slice(outer);
                index.extend([row, column]);
                let value = f32::from_bits(values(view, &index)?);
                if !value.is_finite() {
                    return Err(ReferenceError::new(format!("tensor {name}, element {index:?}: {value} has no code")));
                }
                (least, greatest) = (least.min(value), greatest.max(value));
            }
        }
        Ok((least, greatest))
    }

    /// The factor of a matrix, from all that share it.
    fn factor(
        &mut self,
        of: &EncodedMatrices,
        outer: &SmallVec<[u64; 4]>,
        values: &mut Values<'_>,
    ) -> Result<f32, ReferenceError> {
        let key = (of.id(), outer.clone());
        if let Some(factor) = self.own.factors.get(&key) {
            return Ok(*factor);
        }
        let shared = self.shared.0.lock().factors.get(&key).copied();
        let factor = match shared {
            Some(factor) => factor,
            None => Self::made_factor(of, outer, values)?,
        };
        self.shared.0.lock().factors.put(key.clone(), factor);
        self.own.factors.put(key, factor);
        Ok(factor)
    }

    fn made_factor(
        of: &EncodedMatrices,
        outer: &SmallVec<[u64; 4]>,
        values: &mut Values<'_>,
    ) -> Result<f32, ReferenceError> {
        let mut greatest = 0f32;
        for (name, view) in &of.together {
            let extents = view.shape().extents();
            let (rows, columns) = (extents[extents.len() - 2], extents[extents.len() - 1]);
            let (low, high) = Self::bounds((name, view), outer, 0..rows, &(0..columns), values)?;
            greatest = greatest.max(high).max(-low);
        }
        let Encoder::Nvfp4(rule) = of.bands.encoder() else {
            return Ok(if_zero(over(greatest, 448.0), f32::EPSILON));
        };
        Ok(match rule {
            MatrixFactor::Divides => {
                let factor = times(over(1.0, greatest.max(f32::MIN_POSITIVE)), 2688.0);
                if factor.is_finite() { factor } else { 1.0 }
            }
            MatrixFactor::Multiplies => if_zero(over(greatest, 2688.0), 1.0),
        })
    }

    /// The scale of a block.
    fn block_scale(
        &mut self,
        of: &EncodedMatrices,
        outer: &SmallVec<[u64; 4]>,
        (row, column): (u64, u64),
        values: &mut Values<'_>,
    ) -> Result<BlockScale, ReferenceError> {
        let key: Place = (of.id(), outer.clone(), row, column);
        if let Some(scale) = self.own.scales.get(&key) {
            return Ok(*scale);
        }
        let scale = self.found_scale(of, &key, values)?;
        self.own.scales.put(key, scale);
        Ok(scale)
    }

    /// The scale of a block that this evaluator has not kept.
    fn found_scale(
        &mut self,
        of: &EncodedMatrices,
        key: &Place,
        values: &mut Values<'_>,
    ) -> Result<BlockScale, ReferenceError> {
        let (_, outer, row, column) = key;
        let (row, column) = (*row, *column);
        let encoder = of.bands.encoder();
        let extents = of.input.shape().extents();
        let (rows, columns) = (extents[extents.len() - 2], extents[extents.len() - 1]);
        let (block_rows, block_columns) = block(encoder, (rows, columns));
        let range = |at: u64, size: u64, end: u64| at * size..((at + 1) * size).min(end);
        let (rows, columns) = (range(row, block_rows, rows), range(column, block_columns, columns));
        let is_shared = (rows.end - rows.start) * (columns.end - columns.start) >= SHARED_BLOCK;
        let shared = if is_shared { self.shared.0.lock().scales.get(key).copied() } else { None };
        if let Some(scale) = shared {
            return Ok(scale);
        }
        let given = match of.given.as_ref() {
            Some(view) => {
                let mut index: SmallVec<[u64; 8]> = SmallVec::from_slice(outer);
                index.extend([row, column]);
                power_of_two(f32::from_bits(values(view, &index)?))
            }
            None => None,
        };
        let scale = if encoder == Encoder::Fp8Tensor {
            let divisor = self.factor(of, outer, values)?;
            BlockScale::plain(u64::from(divisor.to_bits()), divisor)
        } else {
            let (least, greatest) = Self::bounds((&of.name, &of.input), outer, rows, &columns, values)?;
            let magnitude = greatest.max(-least);
            match (encoder, given) {
                (Encoder::Affine { bits, .. }, _) => affine(of.input.dtype(), bits, (least, greatest)),
                (_, Some(exponent)) => exponent_scale(exponent),
                (_, None) => self.scale_of(of, outer, magnitude, values)?,
            }
        };
        if is_shared {
            self.shared.0.lock().scales.put(key.clone(), scale);
        }
        Ok(scale)
    }

    fn scale_of(
        &mut self,
        of: &EncodedMatrices,
        outer: &SmallVec<[u64; 4]>,
        greatest: f32,
        values: &mut Values<'_>,
    ) -> Result<BlockScale, ReferenceError> {
        let plain = |divisor: f32| BlockScale::plain(u64::from(divisor.to_bits()), divisor);
        let exponent = |less: i32| {
            if greatest == 0.0 { exponent_scale(-127) } else { exponent_scale(exponent_near(greatest) - less) }
        };
        let bf16 = |half: f32| {
            let (stored, divisor) = as_type(DType::BF16, over(greatest, half));
            let (zero, epsilon) = as_type(DType::BF16, 0.007_812_5);
            if divisor == 0.0 { BlockScale::plain(zero, epsilon) } else { BlockScale::plain(stored, divisor) }
        };
        let quotient = over(greatest, 448.0);
        Ok(match of.bands.encoder() {
            Encoder::Fp8Block { power_of_two: true } if quotient > 0.0 => {
                plain(exponent_scale(exponent_above(quotient).max(-126)).divisor)
            }
            Encoder::Fp8Block { .. } => plain(if_zero(quotient, 1.0)),
            Encoder::Fp8Channel | Encoder::Fp8Tensor => plain(if_zero(quotient, f32::EPSILON)),
            Encoder::Mxfp8(ExponentRule::Nearest) => exponent(8),
            Encoder::Mxfp4 => exponent(2),
            Encoder::Mxfp8(ExponentRule::Up) if quotient > 0.0 => exponent_scale(exponent_above(quotient).max(-126)),
            Encoder::Mxfp8(ExponentRule::Up) => exponent_scale(-127),
            Encoder::Nvfp4(MatrixFactor::Divides) => {
                let factor = self.factor(of, outer, values)?;
                let (mut stored, mut scale) = as_type(DType::F8E4M3, times(factor, over(greatest, 6.0)).min(448.0));
                if scale == 0.0 {
                    (stored, scale) = as_type(DType::F8E4M3, 0.125);
                }
                BlockScale::plain(stored, over(scale, factor))
            }
            Encoder::Nvfp4(MatrixFactor::Multiplies) => {
                let factor = self.factor(of, outer, values)?;
                let scale = if_zero(over(greatest, times(6.0, factor)), 1.0);
                let (stored, scale) = as_type(DType::F8E4M3, scale.clamp(0.001_953_125, 448.0));
                BlockScale::plain(stored, times(scale, factor))
            }
            Encoder::Int8Channel => bf16(127.5),
            Encoder::Int4 { .. } => bf16(7.5),
            Encoder::Affine { .. } => plain(0.0),
            Encoder::Q8_0 => {
                // Of zeros either may be negative.
                let scale = over(greatest.abs(), 127.0);
                let inverse = if scale == 0.0 { 0.0 } else { over(1.0, scale) };
                BlockScale::plain(as_type(DType::F16, scale).0, if inverse.is_finite() { inverse } else { 0.0 })
            }
            Encoder::MlxMxfp4 => {
                let dtype = of.input.dtype();
                let quotient = as_type(dtype, over(greatest, 6.0)).1;
                exponent_scale(if quotient == 0.0 { 0 } else { exponent_above(quotient) })
            }
        })
    }
}
