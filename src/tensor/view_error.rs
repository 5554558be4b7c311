//! Why operands do not form a view.

use super::{DType, Shape, ShapeError, TensorId, decode::OperandError};

/// Why operands do not form a view.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ViewError {
    /// An axis number is not below the rank.
    #[error("{op}: axis {axis}, but the shape {shape} has {} axes", shape.rank())]
    Axis {
        /// The operator.
        op: &'static str,
        /// The requested axis.
        axis: usize,
        /// The operand's shape.
        shape: Shape,
    },
    /// A range leaves the shape or the step is zero.
    #[error("slice: axis {axis} has extent {extent}, asked for {start}..{stop} in steps of {step}")]
    OutOfBounds {
        /// The axis.
        axis: usize,
        /// Its extent.
        extent: u64,
        /// First requested element.
        start: u64,
        /// End of the requested range.
        stop: u64,
        /// Distance of the requested elements.
        step: u64,
    },
    /// A range downwards leaves the shape.
    #[error(
        "slice: axis {axis} has extent {extent}, asked for elements from {start} down to before {stop} in steps of -{step}"
    )]
    Downwards {
        /// The axis.
        axis: usize,
        /// Its extent.
        extent: u64,
        /// First requested element.
        start: i64,
        /// The end of the requested elements, not one of them; -1 after element 0.
        stop: i64,
        /// Distance of the requested elements.
        step: u64,
    },
    /// An index leaves the axis.
    #[error("gather: axis {axis} has extent {extent}, asked for element {index}")]
    Index {
        /// The axis.
        axis: usize,
        /// Its extent.
        extent: u64,
        /// The index.
        index: u64,
    },
    /// A list of axes is not a permutation.
    #[error("transpose: {axes:?} is not a permutation of the axes of {shape}")]
    Permutation {
        /// The axes given.
        axes: Vec<usize>,
        /// The operand's shape.
        shape: Shape,
    },
    /// A reshape changes the number of elements.
    #[error("reshape: {from} has {} elements, {to} has {}", from.elements(), to.elements())]
    Reshape {
        /// The operand's shape.
        from: Shape,
        /// The requested shape.
        to: Shape,
    },
    /// Operands of a stack or concat do not match.
    #[error("{op}: operand {index} is {dtype} {shape}, operand 0 is {first_dtype} {first_shape}")]
    Mismatch {
        /// The operator.
        op: &'static str,
        /// Which operand differs.
        index: usize,
        /// Its dtype.
        dtype: DType,
        /// Its shape.
        shape: Shape,
        /// The first operand's dtype.
        first_dtype: DType,
        /// The first operand's shape.
        first_shape: Shape,
    },
    /// A stack or concat of nothing.
    #[error("{op}: no operands")]
    NoOperands {
        /// The operator.
        op: &'static str,
    },
    /// An element operator on a type that ckfs does not convert.
    #[error("{op}: {dtype} values are not converted, only floats of 8 bits or more are")]
    NotFloat {
        /// The operator.
        op: &'static str,
        /// The dtype.
        dtype: DType,
    },
    /// Arithmetic between two views of which one is decoded from codes.
    #[error(
        "{op}: operand {index} is decoded from codes (tensor #{}), only tensors stored element by element are combined",
        tensor.0
    )]
    Coded {
        /// The operator.
        op: &'static str,
        /// The operand.
        index: usize,
        /// The stored codes.
        tensor: TensorId,
    },
    /// Weights and scales of a dequantization do not match.
    #[error(
        "dequantize: weights {weights} in blocks of {block_rows} by {block_columns} need scales of shape {expected}, \
         found {found}"
    )]
    Scales {
        /// Shape of the quantized tensor.
        weights: Shape,
        /// Rows of a block.
        block_rows: u64,
        /// Columns of a block.
        block_columns: u64,
        /// Shape the scales must have.
        expected: String,
        /// Shape they have.
        found: Shape,
    },
    /// Two tensors that have no product of matrices.
    #[error("product: expected a matrix and one with a row for each of its columns, found {left} and {right}")]
    Matrices {
        /// Shape of the left factor.
        left: Shape,
        /// Shape of the right factor.
        right: Shape,
    },
    /// A stored tensor does not hold the elements that a quantized one needs.
    #[error("decode: tensor #{} does not fit a value of shape {shape}: {error}", tensor.0)]
    Operand {
        /// The stored tensor.
        tensor: TensorId,
        /// Shape of the decoded tensor.
        shape: Shape,
        /// The reason.
        error: OperandError,
    },
    /// The shape that would result is too large.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}
