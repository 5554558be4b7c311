//! Codes as MLX makes them: runs between their least and greatest element, and E2M1 whose ties go to zero. Blocks as ggml makes them.
//!
//! All is f32, each step rounded once, in the order of MLX's loops for CPUs. What an exponent of E2M1 follows from is rounded to the type
//! of the weights, as it is there.

use super::super::float;
use super::{
    Level,
    encode::{HALF_LEAST_NORMAL, bounds, dense, lesser_e2m1, low_byte, q8_0, steps},
    row,
};
use crate::DType;

/// The least step between codes.
const LEAST_STEP: f32 = 1e-7;

/// The scale and the bias of a run with these bounds, of which codes go to `most`. The edge that is farther from zero has a code of
/// its own.
fn scale_and_bias([least, greatest]: [f32; 2], most: f32) -> [f32; 2] {
    let is_below = least.abs() > greatest.abs();
    let step = (greatest - least) / most;
    let step = if step < LEAST_STEP { LEAST_STEP } else { step };
    let (scale, edge) = if is_below { (step, least) } else { (-step, greatest) };
    let from_zero = (edge / scale).round_ties_even();
    if from_zero == 0.0 { [scale, 0.0] } else { [edge / from_zero, edge] }
}

/// The exponent of a run with these bounds: that of the least power of two that is not below the greatest magnitude over 6, rounded to
/// the type of the weights, or 0 for a run of zeros. Below the least exponent, where MLX's bytes wrap, it is the least one.
fn exponent([least, greatest]: [f32; 2], dtype: DType) -> u8 {
    const ONE: u32 = 127;
    // Of zeros either may be negative.
    let quotient = ((-least).max(greatest) / 6.0).abs().to_bits();
    let rounded = if dtype == DType::BF16 {
        float::narrow_bf16(quotient) << 16
    } else if dtype == DType::F16 {
        float::F16.widen(float::F16.narrow(quotient))
    } else {
        quotient
    };
    low_byte(match rounded {
        0 => ONE,
        bits if bits <= HALF_LEAST_NORMAL => 0,
        bits => (bits + 0x7f_ffff) >> 23,
    })
}

/// How the runs of rows are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowCoding {
    /// Unsigned integers of some bits, with a scale and a bias of the type of the weights.
    Affine(u8),
    /// E2M1 with an exponent.
    E2m1,
    /// Blocks of a scale and its codes.
    Q8_0,
}

/// The loops over rows of a type, with room for one row.
#[derive(Debug)]
pub(crate) struct RowEncoder {
    runs: RowCoding,
    run: usize,
    dtype: DType,
    level: Level,
    values: Vec<f32>,
    found: Vec<[f32; 2]>,
    codes: Vec<u8>,
}

impl RowEncoder {
    pub(crate) fn new(level: Level, dtype: DType, runs: RowCoding, (columns, run): (usize, usize)) -> Self {
        let (values, codes) = (vec![0.0; columns], vec![0; columns]);
        Self { runs, run, dtype, level, values, found: vec![[0.0; 2]; columns.div_ceil(run)], codes }
    }

    /// Encodes a row of finite numbers. False if a run has no scale: its elements are too far apart, or too large.
    pub(crate) fn encode(
        &mut self,
        row: &[u8],
        codes: Option<&mut [u8]>,
        scales: &mut [u8],
        biases: &mut [u8],
    ) -> bool {
        let widen = row::widen(self.dtype).expect("an input is of floats");
        let mut wide = vec![0; size_of_val(self.values.as_slice())];
        widen(self.level, row, &mut wide);
        for (value, bytes) in self.values.iter_mut().zip(wide.as_chunks::<4>().0) {
            *value = f32::from_le_bytes(*bytes);
        }
        let (bits, most) = match self.runs {
            RowCoding::Q8_0 => {
                if let Some(codes) = codes {
                    q8_0(self.level, &self.values, codes);
                }
                return true;
            }
            RowCoding::Affine(bits) => (bits, f32::from(u8::MAX >> (8 - bits))),
            RowCoding::E2m1 => (4, 0.0),
        };
        bounds(self.level, &self.values, self.run, &mut self.found);
        if self.runs == RowCoding::E2m1 {
            for (found, stored) in self.found.iter_mut().zip(scales) {
                *stored = exponent(*found, self.dtype);
                found[0] = f32::from_bits(if *stored == 0 { HALF_LEAST_NORMAL } else { u32::from(*stored) << 23 });
            }
        } else {
            self.found.iter_mut().for_each(|found| *found = scale_and_bias(*found, most));
            if self.found.iter().any(|[scale, _]| !scale.is_normal()) {
                return false;
            }
            let narrow = row::narrow(self.dtype).expect("an input is of floats");
            for (part, stored) in [scales, biases].into_iter().enumerate() {
                let wide: Vec<u8> = self.found.iter().flat_map(|found| found[part].to_le_bytes()).collect();
                narrow(self.level, &wide, stored);
            }
        }
        let Some(codes) = codes else { return true };
        let loops = if self.runs == RowCoding::E2m1 { lesser_e2m1 } else { steps };
        loops(self.level, &self.values, self.run, &self.found, most, &mut self.codes);
        dense(self.level, &self.codes, usize::from(bits), codes);
        true
    }
}
