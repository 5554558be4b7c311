//! What happens to one element on its way from source bytes to target bytes.
//!
//! A decoder is either a plain copy or a *program*: the source value is widened to f32 (exactly, except from f64, which
//! is rounded once as torch does), the steps are applied in order in f32, and the result is rounded once to the target
//! type. Rounding is to nearest, ties to even, everywhere. Layout operators never enter here: they commute with decoding
//! and become the boxes of a tiling.

use super::DType;

/// Row of a checkpoint's tensor table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub u32);

/// How source elements become target elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Decode {
    /// Bytes are taken as they are.
    Copy,
    /// Values are converted.
    Program(Program),
}

/// A conversion of one element: widen to f32, apply the steps, round to the target.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Type of the elements read; a float type.
    pub source: DType,
    /// Type of the elements written; a float type.
    pub target: DType,
    /// Arithmetic between the two, in order. Empty for a plain cast.
    pub steps: Vec<Step>,
}

/// One arithmetic step on an f32 value.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Round to this float type and widen again.
    Round(DType),
    /// Multiply by a constant, in f32. With `flush`, subnormal operands and products become zero of the same sign, as
    /// XLA computes on CPUs.
    Multiply {
        /// The constant.
        factor: f32,
        /// Whether subnormals are flushed.
        flush: bool,
    },
    /// Add a constant, in f32.
    Add(f32),
    /// Multiply by the element of a second source tensor that belongs to this element's block.
    Scale(BlockScale),
}

/// Block scales of a two-dimensional quantized tensor: element `[i, j]` is multiplied, in f32, by
/// `scale[i / block_rows, j / block_columns]`.
///
/// The scale tensor has shape `[ceil(rows / block_rows), ceil(columns / block_columns)]`; the last block of either axis
/// may be partial. The formula is that of DeepSeek's `weight_dequant` (`inference/kernel.py` of its repositories); the
/// block comes from `quantization_config.weight_block_size`, never from dividing the shapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockScale {
    /// The scale tensor.
    pub tensor: TensorId,
    /// Its element type; a float type.
    pub dtype: DType,
    /// Row length of the quantized tensor, in elements: locates element `n` at `[n / columns, n % columns]`.
    pub columns: u64,
    /// Rows of one block.
    pub block_rows: u64,
    /// Columns of one block.
    pub block_columns: u64,
}

impl BlockScale {
    /// Row length of the scale tensor, in elements.
    pub const fn scale_columns(&self) -> u64 {
        self.columns.div_ceil(self.block_columns)
    }

    /// Element of the scale tensor that scales element `element` of the quantized tensor, both row-major.
    pub const fn scale_of(&self, element: u64) -> u64 {
        let (row, column) = (element / self.columns, element % self.columns);
        (row / self.block_rows) * self.scale_columns() + column / self.block_columns
    }
}

impl Program {
    /// The block scale among the steps, if the program dequantizes.
    pub fn block_scale(&self) -> Option<&BlockScale> {
        self.steps.iter().find_map(|step| match step {
            Step::Scale(scale) => Some(scale),
            Step::Round(_) | Step::Multiply { .. } | Step::Add(_) => None,
        })
    }
}
