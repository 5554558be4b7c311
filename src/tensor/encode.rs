//! Encoders: codes and scales of a matrix, the mirror of decoding.
//!
//! Blocks of elements share a scale, which follows from their greatest magnitude alone. So codes and scales of a *band*, whole blocks
//! of some rows, are made together from the rows of the band. Two encoders also need the greatest magnitude of all of a matrix, or of
//! several that engines fuse: a reduction that is found once, before any band.
//!
//! All arithmetic is f32, each step rounded once. A block with nothing but zeros has codes of zeros and a scale that is finite and
//! not zero. A NaN or an infinity has no code: [`Bands::encode`] names the element.

use std::fmt;

use super::{
    DType, Shape,
    kernel::{
        Level,
        affine::{RowCoding, RowEncoder},
        encode, row,
    },
    shape::{PerAxis, to_usize},
};

/// How the exponent of an MX scale follows from the greatest magnitude of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExponentRule {
    /// As compressed-tensors does: the magnitude is rounded to a power of two, up from 1.75 times one on.
    Nearest,
    /// As sglang and `FlashInfer` do: the least power of two with which no code is above the greatest.
    Up,
}

/// How the factor of all of an NVFP4 matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixFactor {
    /// Scales are divided by it, as in compressed-tensors.
    Divides,
    /// Scales are multiplied by it, as in `ModelOpt`.
    Multiplies,
}

/// How a matrix is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoder {
    /// E4M3 in blocks of 128 x 128, with an F32 scale.
    Fp8Block {
        /// Whether scales are powers of two.
        power_of_two: bool,
    },
    /// E4M3 with an F32 scale for each row.
    Fp8Channel,
    /// E4M3 with an F32 scale for the matrix.
    Fp8Tensor,
    /// E4M3 with an exponent for 32 neighbours in a row.
    Mxfp8(ExponentRule),
    /// E2M1 with an exponent for 32 neighbours in a row.
    Mxfp4,
    /// E2M1 with an E4M3 scale for 16 neighbours in a row, and one factor.
    Nvfp4(MatrixFactor),
    /// Integers of 8 bits with a BF16 scale for each row.
    Int8Channel,
    /// Integers of 4 bits with a BF16 scale for a number of neighbours in a row.
    Int4 {
        /// That number.
        group: u64,
    },
    /// Integers from the least to the greatest of some neighbours in a row, with a scale and a bias for them of the type of the
    /// weights, as MLX makes them.
    Affine {
        /// Bits of an integer: 2 to 6, or 8.
        bits: u8,
        /// Those neighbours, a multiple of 32.
        group: u64,
    },
    /// E2M1 with an exponent for 32 neighbours in a row, as MLX makes them.
    MlxMxfp4,
    /// Blocks of ggml: an F16 scale, then 32 integers of 8 bits.
    Q8_0,
}

/// A part of what an encoder makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EncodedPart {
    /// The codes.
    Codes,
    /// A scale for each block.
    Scales,
    /// What is added to the elements of each block.
    Biases,
    /// What follows from the greatest magnitude of all elements: the one scale of a matrix, or the factor of its scales.
    Factor,
}

impl EncodedPart {
    /// The word for it.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Codes => "codes",
            Self::Scales => "scales",
            Self::Biases => "biases",
            Self::Factor => "factor",
        }
    }
}

impl fmt::Display for Encoder {
    /// What it makes of a matrix.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fp8Block { power_of_two: false } => f.write_str("E4M3 in blocks of 128x128"),
            Self::Fp8Block { power_of_two: true } => f.write_str("E4M3 in blocks of 128x128 with powers of two"),
            Self::Fp8Channel => f.write_str("E4M3 with a scale per row"),
            Self::Fp8Tensor => f.write_str("E4M3 with one scale"),
            Self::Mxfp8(ExponentRule::Nearest) => f.write_str("MXFP8, exponents rounded to nearest"),
            Self::Mxfp8(ExponentRule::Up) => f.write_str("MXFP8, exponents rounded up"),
            Self::Mxfp4 => f.write_str("MXFP4"),
            Self::Nvfp4(MatrixFactor::Divides) => f.write_str("NVFP4, scales divided by a factor"),
            Self::Nvfp4(MatrixFactor::Multiplies) => f.write_str("NVFP4, scales multiplied by a factor"),
            Self::Int8Channel => f.write_str("INT8 with a scale per row"),
            Self::Int4 { group } => write!(f, "INT4 with a scale for {group}"),
            Self::Affine { bits, group } => write!(f, "integers of {bits} bits with a scale and a bias for {group}"),
            Self::MlxMxfp4 => f.write_str("MXFP4, as MLX rounds it"),
            Self::Q8_0 => f.write_str("Q8_0 of ggml"),
        }
    }
}

/// The block of encoders with a scale for each row, or for a matrix.
const WHOLE_ROW: (u64, u64) = (1, u64::MAX);

/// Elements of a band, if a row does not have more.
const BAND_ELEMENTS: u64 = 1 << 20;

/// What an encoder stores of a matrix, and how it makes that.
struct Storage {
    /// Rows and columns that share a scale.
    block: (u64, u64),
    /// The least number of codes that fills stored elements, and the number of these.
    packed: (u64, u64),
    /// The type of stored elements of codes.
    codes: DType,
    /// The type of scales; where there are biases both are of the type of the input.
    scales: DType,
    scaling: encode::Scaling,
    /// The constant of the loop that makes scales; the factor if there is none.
    constant: Option<f32>,
    coding: encode::Coding,
    /// How the codes of rows are made, where they are not made by `coding`.
    rows: Option<RowCoding>,
}

impl Encoder {
    /// What it stores, and how it makes that.
    fn storage(self) -> Storage {
        use DType::{BF16, F8E4M3, F32, I32, U8, U32};
        use Encoder::{
            Affine, Fp8Block, Fp8Channel, Fp8Tensor, Int4, Int8Channel, MlxMxfp4, Mxfp4, Mxfp8, Nvfp4, Q8_0,
        };
        use ExponentRule::{Nearest, Up};
        use MatrixFactor::{Divides, Multiplies};
        use encode::{
            E2M1, E2M1_TIMES, E4M3, E4M3_TIMES, INT4, INT8, exponents_nearest, exponents_up, scales_bf16,
            scales_divided, scales_f32, scales_given, scales_multiplied, scales_powers,
        };
        let made = |block, packed, codes, scales, scaling: encode::Scaling, constant, coding| {
            let rows = None;
            Storage { block, packed, codes, scales, scaling, constant, coding, rows }
        };
        // The loops find only the greatest magnitudes of these.
        let by_rows = |block, packed, codes, rows| Storage {
            rows: Some(rows),
            ..made(block, packed, codes, U8, scales_given, Some(0.0), E4M3)
        };
        match self {
            Fp8Block { power_of_two: false } => made((128, 128), (1, 1), F8E4M3, F32, scales_f32, Some(1.0), E4M3),
            Fp8Block { power_of_two: true } => made((128, 128), (1, 1), F8E4M3, F32, scales_powers, Some(1.0), E4M3),
            Fp8Channel => made(WHOLE_ROW, (1, 1), F8E4M3, F32, scales_f32, Some(f32::EPSILON), E4M3),
            Fp8Tensor => made(WHOLE_ROW, (1, 1), F8E4M3, F32, scales_given, None, E4M3),
            Mxfp8(Nearest) => made((1, 32), (1, 1), F8E4M3, U8, exponents_nearest, Some(8.0), E4M3_TIMES),
            Mxfp8(Up) => made((1, 32), (1, 1), F8E4M3, U8, exponents_up, Some(448.0), E4M3_TIMES),
            Mxfp4 => made((1, 32), (2, 1), U8, U8, exponents_nearest, Some(2.0), E2M1_TIMES),
            Nvfp4(Divides) => made((1, 16), (2, 1), U8, F8E4M3, scales_divided, None, E2M1),
            Nvfp4(Multiplies) => made((1, 16), (2, 1), U8, F8E4M3, scales_multiplied, None, E2M1),
            Int8Channel => made(WHOLE_ROW, (4, 1), I32, BF16, scales_bf16, Some(127.5), INT8),
            Int4 { group } => made((1, group), (8, 1), I32, BF16, scales_bf16, Some(7.5), INT4),
            Affine { bits, group } => {
                let packed = if 32 % bits == 0 { (32 / u64::from(bits), 1) } else { (32, u64::from(bits)) };
                by_rows((1, group), packed, U32, RowCoding::Affine(bits))
            }
            MlxMxfp4 => by_rows((1, 32), (8, 1), U32, RowCoding::E2m1),
            Q8_0 => by_rows((1, 32), (32, 34), U8, RowCoding::Q8_0),
        }
    }

    /// Rows and columns that share a scale, in a matrix of these columns.
    pub fn block(self, columns: u64) -> (u64, u64) {
        let block = self.storage().block;
        if block == WHOLE_ROW { (1, columns.max(1)) } else { block }
    }

    /// The least number of codes that fills stored elements, and the number of these.
    pub fn packed(self) -> (u64, u64) {
        self.storage().packed
    }

    /// Whether blocks have biases.
    pub const fn has_biases(self) -> bool {
        matches!(self, Self::Affine { .. })
    }

    /// Whether there is a factor, which needs the greatest magnitude of all elements.
    pub const fn has_factor(self) -> bool {
        matches!(self, Self::Fp8Tensor | Self::Nvfp4(_))
    }

    /// Whether blocks have scales.
    pub const fn has_scales(self) -> bool {
        !matches!(self, Self::Fp8Tensor | Self::Q8_0)
    }

    /// Whether the scales with which a matrix was quantized before may stay: exponents of codes of the same type.
    pub(super) const fn keeps_scales(self) -> bool {
        matches!(self, Self::Mxfp8(_))
    }

    /// The number that columns must be a multiple of.
    pub fn columns_multiple(self) -> u64 {
        // The last block of E4M3 may be narrower, and a row or a matrix is a block of any width.
        if matches!(self, Self::Fp8Block { .. }) { 1 } else { self.block(1).1 }
    }

    /// The factor of a matrix whose greatest magnitude this is.
    pub fn factor(self, greatest: f32) -> f32 {
        let Self::Nvfp4(rule) = self else { return or(greatest / 448.0, f32::EPSILON) };
        match rule {
            MatrixFactor::Divides => {
                // torch divides a number by a tensor so.
                let factor = (1.0 / greatest.max(f32::MIN_POSITIVE)) * (448.0 * 6.0);
                if factor.is_finite() { factor } else { 1.0 }
            }
            MatrixFactor::Multiplies => or(greatest / (6.0 * 448.0), 1.0),
        }
    }
}

/// `scale`, or `other` if it is zero.
fn or(scale: f32, other: f32) -> f32 {
    if scale == 0.0 { other } else { scale }
}

/// How matrices are cut into bands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Bands {
    encoder: Encoder,
    /// Type of the elements that are encoded.
    dtype: DType,
    /// The axes before those of a matrix.
    outer: PerAxis,
    rows: u64,
    columns: u64,
    band_rows: u64,
}

/// Whole blocks of some rows of one matrix, and the stored elements of a part that are made of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Band {
    /// Its number.
    pub number: u64,
    /// The first of its elements, in the row-major order of the part.
    pub first: u64,
    /// Number of its elements.
    pub count: u64,
}

/// An element that has no code.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Uncodable {
    /// Its number in the row-major order of what was encoded.
    pub element: u64,
    /// Its value. If it is finite, its block has no scale.
    pub value: f32,
}

impl Bands {
    /// Those of the matrices on the last two axes of this shape. `None` if there are no two axes, or if elements of this type are not
    /// encoded.
    pub fn new(encoder: Encoder, dtype: DType, shape: &Shape) -> Option<Self> {
        let [outer @ .., rows, columns] = shape.extents() else { return None };
        encode::source(dtype)?;
        let (rows, columns) = (*rows, *columns);
        let (block_rows, _) = encoder.block(columns);
        let whole = (BAND_ELEMENTS / columns.max(1)).max(1);
        let band_rows = (whole / block_rows).max(1) * block_rows;
        Some(Self { encoder, dtype, outer: PerAxis::from_slice(outer), rows, columns, band_rows })
    }

    /// How the matrices are quantized.
    pub const fn encoder(&self) -> Encoder {
        self.encoder
    }

    /// The type of the stored elements of a part.
    pub fn dtype(&self, part: EncodedPart) -> DType {
        let Storage { codes, scales, .. } = self.encoder.storage();
        match part {
            EncodedPart::Codes => codes,
            EncodedPart::Scales | EncodedPart::Biases if self.encoder.has_biases() => self.dtype,
            EncodedPart::Scales => scales,
            EncodedPart::Biases | EncodedPart::Factor => DType::F32,
        }
    }

    /// Number of matrices.
    pub fn matrices(&self) -> u64 {
        self.outer.iter().product()
    }

    /// Rows and columns of a matrix.
    pub const fn matrix(&self) -> (u64, u64) {
        (self.rows, self.columns)
    }

    /// Rows and columns of the stored elements of a part of one matrix.
    fn grid(&self, part: EncodedPart) -> (u64, u64) {
        let (block_rows, block_columns) = self.encoder.block(self.columns);
        match part {
            EncodedPart::Codes => {
                let (codes, elements) = self.encoder.packed();
                (self.rows, self.columns.div_ceil(codes) * elements)
            }
            EncodedPart::Scales | EncodedPart::Biases => {
                (self.rows.div_ceil(block_rows), self.columns.div_ceil(block_columns))
            }
            EncodedPart::Factor => (1, 1),
        }
    }

    /// The shape of a part: the axes before the matrices', and those of the part. The factor has one axis of extent 1.
    ///
    /// # Panics
    /// Never: a part has no more elements than the matrices.
    pub fn shape(&self, part: EncodedPart) -> Shape {
        let mut shape = self.outer.clone();
        match (part, self.grid(part)) {
            (EncodedPart::Factor, _) => shape.push(1),
            (_, (rows, columns)) => shape.extend([rows, columns]),
        }
        Shape::try_new(&shape).expect("a part has no more elements than the matrices")
    }

    /// Bands of one matrix.
    pub const fn per_matrix(&self) -> u64 {
        self.rows.div_ceil(self.band_rows)
    }

    /// The band of which element `at` of a part is made. That of the factor is a whole matrix.
    pub fn band_of(&self, part: EncodedPart, at: u64) -> Band {
        let (rows, columns) = self.grid(part);
        let matrix = at / (rows * columns);
        if part == EncodedPart::Factor {
            return Band { number: matrix, first: matrix, count: 1 };
        }
        let block_rows = self.encoder.block(self.columns).0;
        let band_rows = if part == EncodedPart::Codes { self.band_rows } else { self.band_rows / block_rows };
        let band = at % (rows * columns) / columns / band_rows;
        let first_row = band * band_rows;
        Band {
            number: matrix * self.per_matrix() + band,
            first: (matrix * rows + first_row) * columns,
            count: band_rows.min(rows - first_row) * columns,
        }
    }

    /// Elements of the input of a band: the first, and their number.
    pub fn input_of(&self, band: u64) -> (u64, u64) {
        let (matrix, band) = (band / self.per_matrix(), band % self.per_matrix());
        let first_row = band * self.band_rows;
        ((matrix * self.rows + first_row) * self.columns, self.band_rows.min(self.rows - first_row) * self.columns)
    }

    /// The matrix of a band.
    pub const fn matrix_of(&self, band: u64) -> u64 {
        band / self.per_matrix()
    }

    /// Bytes of a part of a band whose input has `elements`.
    pub fn bytes_of(&self, part: EncodedPart, elements: u64) -> usize {
        let rows = elements.checked_div(self.columns).unwrap_or(0);
        let (block_rows, _) = self.encoder.block(self.columns);
        let rows = if part == EncodedPart::Codes { rows } else { rows.div_ceil(block_rows) };
        let width = self.dtype(part).unit().bytes;
        match part {
            EncodedPart::Codes | EncodedPart::Scales | EncodedPart::Biases => {
                to_usize(rows * self.grid(part).1 * width)
            }
            EncodedPart::Factor => to_usize(width),
        }
    }

    /// Bytes of the scales of a band whose input has `elements`, and of the biases after them.
    pub fn shared_bytes_of(&self, elements: u64) -> usize {
        let parts = 1 + usize::from(self.encoder.has_biases());
        parts * self.bytes_of(EncodedPart::Scales, elements)
    }

    /// Encodes whole rows of a band, `input`, to `codes` and `scales`. Without `codes` only scales are made; biases, if the
    /// encoder has them, follow all the scales. `factor` is that of the
    /// matrix, if the encoder has one. `given` are the scales, as F32, with which the matrix was quantized before, one for each of
    /// `scales`: where such a scale is a power of two that an MX exponent expresses, that exponent is taken, and codes are those of
    /// before. Where it is none, the exponent follows from the greatest magnitude as ever. Only MXFP8 may be given scales.
    ///
    /// # Errors
    /// [`Uncodable`], with the first such element of the input. The content of the targets is then unspecified.
    ///
    /// # Panics
    /// If the lengths are not those of [`Bands::bytes_of`] and [`Bands::shared_bytes_of`], or the factor is missing.
    pub fn encode(
        &self,
        input: &[u8],
        factor: Option<f32>,
        given: Option<&[u8]>,
        codes: Option<&mut [u8]>,
        scales: &mut [u8],
    ) -> Result<(), Uncodable> {
        self.encode_at(Level::detected(), input, (factor, given), codes, scales)
    }

    fn encode_at(
        &self,
        level: Level,
        input: &[u8],
        (factor, mut given): (Option<f32>, Option<&[u8]>),
        mut codes: Option<&mut [u8]>,
        mut scales: &mut [u8],
    ) -> Result<(), Uncodable> {
        const ROWS: &str = "the targets have the lengths of a band";
        let (block_rows, run) = self.encoder.block(self.columns);
        let (block_rows, run, columns) = (to_usize(block_rows), to_usize(run), to_usize(self.columns));
        let dtype = self.dtype;
        let (of_type, maxima) = encode::source(dtype).expect("bands are of a type that has loops");
        let Storage { scaling, constant, coding, rows, .. } = self.encoder.storage();
        let constant = constant.or(factor).expect("an encoder that has a factor is given it");
        let row_bytes = columns * to_usize(dtype.unit().bytes);
        let code_bytes = self.bytes_of(EncodedPart::Codes, self.columns);
        let scale_bytes = if self.encoder.has_scales() { self.bytes_of(EncodedPart::Scales, self.columns) } else { 0 };
        // Codes of a byte that do not fill the last word.
        let used_bytes = if self.encoder == Encoder::Int8Channel { columns } else { code_bytes };
        if row_bytes == 0 {
            return Ok(());
        }
        let mut by_rows = rows.map(|coding| RowEncoder::new(level, dtype, coding, (columns, run)));
        let mut biases: &mut [u8] = &mut [];
        if self.encoder.has_biases() {
            (scales, biases) = scales.split_at_mut(scales.len() / 2);
        }
        let mut greatest = vec![0; columns.div_ceil(run)];
        let mut divisors = vec![0.0; greatest.len()];
        // A given exponent is not rounded up.
        let beyond = if given.is_some() { f32::INFINITY.to_bits() } else { self.beyond() };
        for (block, rows) in input.chunks(block_rows * row_bytes).enumerate() {
            greatest.fill(0);
            rows.chunks_exact(row_bytes).for_each(|row| maxima(level, row, run, &mut greatest));
            if greatest.iter().any(|bits| *bits >= beyond) {
                return Err(first_beyond(dtype, rows, beyond, block * block_rows * columns));
            }
            let stored = scales.split_off_mut(..scale_bytes).expect(ROWS);
            if let Some(by_rows) = &mut by_rows {
                let codes = codes.as_mut().map(|codes| codes.split_off_mut(..code_bytes).expect(ROWS));
                let bias_bytes = if self.encoder.has_biases() { scale_bytes } else { 0 };
                let biases = biases.split_off_mut(..bias_bytes).expect(ROWS);
                if !by_rows.encode(rows, codes, stored, biases) {
                    let most = greatest.iter().copied().max().unwrap_or(0);
                    return Err(first_beyond(dtype, rows, most, block * columns));
                }
                continue;
            }
            scaling(level, &greatest, constant, stored, &mut divisors);
            if let Some(given) = &mut given {
                let given = given.split_off(..greatest.len() * to_usize(DType::F32.unit().bytes)).expect(ROWS);
                encode::exponents_given(level, given, stored, &mut divisors);
            }
            let Some(codes) = &mut codes else { continue };
            for row in rows.chunks_exact(row_bytes) {
                let (target, unused) = codes.split_off_mut(..code_bytes).expect(ROWS).split_at_mut(used_bytes);
                unused.fill(0);
                coding[of_type](level, row, run, &divisors, target);
            }
        }
        Ok(())
    }

    /// The least bits of a magnitude for which there is no scale.
    const fn beyond(&self) -> u32 {
        // Rounded to a power of two it is infinite.
        let rounds = matches!(self.encoder, Encoder::Mxfp8(ExponentRule::Nearest) | Encoder::Mxfp4);
        if rounds { encode::NEAREST_BEYOND } else { f32::INFINITY.to_bits() }
    }
}

/// The greatest magnitude of elements of an input.
///
/// # Errors
/// [`Uncodable`], with the first element that is a NaN or infinite.
///
/// # Panics
/// If elements of this type are not encoded.
pub fn greatest_magnitude(dtype: DType, input: &[u8]) -> Result<f32, Uncodable> {
    let Some((_, maxima)) = encode::source(dtype) else { panic!("{dtype} is no type of an input") };
    let mut found = [0];
    maxima(Level::detected(), input, usize::MAX, &mut found);
    if found[0] >= f32::INFINITY.to_bits() {
        return Err(first_beyond(dtype, input, f32::INFINITY.to_bits(), 0));
    }
    Ok(f32::from_bits(found[0]))
}

/// The first element whose magnitude has at least these bits.
fn first_beyond(dtype: DType, input: &[u8], bits: u32, first: usize) -> Uncodable {
    let width = to_usize(dtype.unit().bytes);
    let widen = row::widen(dtype).expect("an input is of floats");
    let values = input.chunks_exact(width).map(|bytes| {
        let mut value = [0; 4];
        widen(Level::PORTABLE, bytes, &mut value);
        f32::from_le_bytes(value)
    });
    let found = values.enumerate().find(|(_, value)| value.abs().to_bits() >= bits);
    let (at, value) = found.expect("a greatest magnitude is that of an element");
    Uncodable { element: (first + at) as u64, value }
}
