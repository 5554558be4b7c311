//! Views: expressions over a checkpoint's tensors.
//!
//! A view is an immutable tree. Each constructor checks its operands and fixes the shape and the dtype of the result, so
//! a view that exists is well-formed; building one touches no data. [`View::lower`] turns it into a
//! [`Tiling`](super::Tiling).
//!
//! Layout operators (slice, gather, transpose, reshape, stack, concat, pad) move elements; element operators (cast, multiply, add,
//! exp) change their values, two of them with the element of another view at the same place. A leaf is a constant, a stored
//! tensor, or a tensor whose elements are decoded from stored codes, scales and the like ([`View::quantized`]). The two kinds of
//! operators commute, which makes the normal form possible.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    DType, Element, Mosaic, Region, Shape, SourceTensor, TensorId,
    decode::{Field, Operand, Operation, Value, block_index},
    encode::{Bands, EncodedPart, Encoder},
    shape::{PerAxis, ViewError},
    strided_indices::StridedIndices,
};

/// An expression over tensors, with a shape and a dtype.
#[derive(Clone, Debug)]
pub struct View {
    node: Arc<ViewNode>,
}

#[derive(Debug)]
struct ViewNode {
    shape: Shape,
    dtype: DType,
    op: Op,
}

/// A leaf of an expression that reads a source.
enum ViewLeaf<'a> {
    /// Stored in one span.
    Tensor(&'a SourceTensor),
    /// Stored as boxes.
    Mosaic(&'a Mosaic),
}

/// The operator at the root of a view, with its operands.
#[derive(Clone, Debug)]
pub enum Op {
    /// A tensor of the checkpoint, stored element by element.
    Source(SourceTensor),
    /// A tensor of the checkpoint, stored as boxes.
    Mosaic(Mosaic),
    /// A constant everywhere.
    Fill(Element),
    /// Elements `start, start + step, …` below `stop` along one axis.
    Slice {
        /// Operand.
        of: View,
        /// Axis cut.
        axis: usize,
        /// First element.
        start: u64,
        /// End.
        stop: u64,
        /// Distance.
        step: u64,
    },
    /// Elements of one axis, chosen by their indexes.
    Gather {
        /// Operand.
        of: View,
        /// The axis.
        axis: usize,
        /// The indexes, in order.
        runs: Arc<[StridedIndices]>,
    },
    /// Axes reordered: axis `i` of the result is axis `axes[i]` of the operand.
    Transpose {
        /// Operand.
        of: View,
        /// The permutation.
        axes: Vec<usize>,
    },
    /// The same elements in row-major order under another shape.
    Reshape {
        /// Operand.
        of: View,
    },
    /// Operands of one shape side by side along a new axis.
    Stack {
        /// Operands.
        of: Vec<View>,
        /// The new axis, as numbered in the result.
        axis: usize,
    },
    /// Operands end to end along an axis.
    Concat {
        /// Operands.
        of: Vec<View>,
        /// The axis.
        axis: usize,
    },
    /// Zeros before and after along one axis.
    Pad {
        /// Operand.
        of: View,
        /// The axis.
        axis: usize,
        /// Elements of zeros before.
        before: u64,
        /// Elements of zeros after.
        after: u64,
    },
    /// Values rounded to another float type.
    Cast {
        /// Operand.
        of: View,
    },
    /// Values times a constant: the product in f32, then rounded to the result's type.
    Multiply {
        /// Operand.
        of: View,
        /// The constant.
        factor: f32,
        /// Whether subnormal operands and products become zero of the same sign.
        flush: bool,
    },
    /// Values plus a constant: the sum in f32, then rounded to the result's type.
    Add {
        /// Operand.
        of: View,
        /// The constant.
        addend: f32,
    },
    /// `e` to the power of each value: the nearest f32, then rounded to the result's type.
    Exp {
        /// Operand.
        of: View,
    },
    /// Values of two views added: the sum in f32, then rounded to the result's type.
    Sum {
        /// Operands, of one shape and dtype.
        of: [View; 2],
    },
    /// Values of two views multiplied: the product in f32, then rounded to the result's type.
    Product {
        /// Operands, of one shape and dtype.
        of: [View; 2],
        /// Whether subnormal operands and products become zero of the same sign.
        flush: bool,
    },
    /// A tensor that is computed from stored elements: each of its elements, in f32, or each byte of its integers.
    Quantized(Arc<Value>),
    /// Codes, scales or factors of matrices.
    Encoded {
        /// The matrices.
        of: Arc<EncodedMatrices>,
        /// What is shown of them.
        part: EncodedPart,
    },
}

impl Op {
    /// The views that it moves or changes elements of; what is stored, constant or made by an encoder has none.
    pub fn operands(&self) -> &[View] {
        match self {
            Self::Source(_) | Self::Mosaic(_) | Self::Fill(_) | Self::Quantized(_) | Self::Encoded { .. } => &[],
            Self::Slice { of, .. }
            | Self::Gather { of, .. }
            | Self::Transpose { of, .. }
            | Self::Reshape { of }
            | Self::Pad { of, .. }
            | Self::Cast { of }
            | Self::Multiply { of, .. }
            | Self::Add { of, .. }
            | Self::Exp { of } => std::slice::from_ref(of),
            Self::Sum { of } | Self::Product { of, .. } => of,
            Self::Stack { of, .. } | Self::Concat { of, .. } => of,
        }
    }
}

/// A number that no other encoding of this process has. It is not shown, since it says nothing of the encoding: digests of plans are made
/// of what is.
#[derive(Clone, Copy)]
struct EncodingId(u64);

impl fmt::Debug for EncodingId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("_")
    }
}

/// Matrices that are quantized: a view, and how its blocks are encoded.
#[derive(Debug)]
pub struct EncodedMatrices {
    id: EncodingId,
    /// The name for messages.
    pub name: String,
    /// How the matrices are encoded.
    pub bands: Bands,
    /// The matrices, as BF16, F16 or F32.
    pub input: View,
    /// The views whose greatest magnitude gives the factor, with their names.
    pub together: Vec<(String, View)>,
    /// The scales with which the matrices are stored, as F32, one for each block, if their exponents are kept.
    pub given: Option<View>,
}

impl EncodedMatrices {
    /// The matrices on the last two axes of `input`, which users know as `name`. `together` are the views that have one factor with
    /// it, itself among them; each has the same axes before those of its matrices.
    ///
    /// # Errors
    /// It is not of floats, or has no two axes.
    pub fn new(name: String, encoder: Encoder, input: &View, together: &[(String, View)]) -> Result<Self, ViewError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let loadable = |view: &View| {
            let is_loadable = matches!(view.dtype(), DType::BF16 | DType::F16 | DType::F32);
            if is_loadable { Ok(view.clone()) } else { view.cast(DType::F32) }
        };
        let input = loadable(input)?;
        let bands = Bands::new(encoder, input.dtype(), input.shape());
        let bands = bands.ok_or_else(|| ViewError::axis("encode", 1, input.shape()))?;
        let loaded = |(name, view): &(String, View)| Ok((name.clone(), loadable(view)?));
        let together = together.iter().map(loaded).collect::<Result<_, ViewError>>()?;
        let id = EncodingId(NEXT.fetch_add(1, Ordering::Relaxed));
        Ok(Self { id, name, bands, input, together, given: None })
    }

    /// These matrices, with the exponents of the scales that they are stored with, so that their codes are those that are stored. The
    /// same matrices where that cannot be: unless the encoder keeps scales, and the input is codes of its type times a scale that the
    /// elements of each of its blocks share.
    ///
    /// # Errors
    /// Never, as the input has the same operands.
    pub fn keeping_scales(self) -> Result<Self, ViewError> {
        let (codes, (_, run)) = (self.bands.dtype(EncodedPart::Codes), self.bands.encoder().block(1));
        let Op::Quantized(value) = self.input.op() else { return Ok(self) };
        let scale = value.scale_of(codes).filter(|scale| scale.is_shared_by(run));
        let (Some(scale), true) = (scale, self.bands.encoder().keeps_scales()) else { return Ok(self) };
        let shape = self.input.shape();
        let (last, columns) = (shape.rank() - 1, self.bands.matrix().1);
        let given = View::quantized(shape.clone(), scale.clone())?.slice(last, 0, columns, run)?;
        Ok(Self { given: Some(given), ..self })
    }

    /// A number that no other encoding of this process has.
    pub const fn id(&self) -> u64 {
        self.id.0
    }
}

/// Type of the result of arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The operand's type: the f32 result is rounded to it.
    Operand,
    /// f32, unrounded.
    F32,
}

impl View {
    fn new(shape: Shape, dtype: DType, op: Op) -> Self {
        Self { node: Arc::new(ViewNode { shape, dtype, op }) }
    }

    /// A tensor of the checkpoint, unchanged.
    pub fn source(tensor: SourceTensor) -> Self {
        Self::new(tensor.shape.clone(), tensor.dtype, Op::Source(tensor))
    }

    /// A tensor of the checkpoint that is stored as boxes, unchanged.
    pub fn mosaic(mosaic: Mosaic) -> Self {
        Self::new(mosaic.shape().clone(), mosaic.dtype(), Op::Mosaic(mosaic))
    }

    /// A tensor of `shape` that is stored quantized: element `n` of its row-major order is `value` at `n`, in f32.
    ///
    /// # Errors
    /// [`ViewError`] if a stored tensor is too small for its index, or cannot be read as its field says.
    pub fn quantized(shape: Shape, value: impl Into<Arc<Value>>) -> Result<Self, ViewError> {
        Self::computed(shape, DType::F32, value.into())
    }

    /// Integers that stored codes are packed into: byte `n` of the little-endian elements, in row-major order, is `value` at `n`, which
    /// must be a whole number below 256.
    ///
    /// # Errors
    /// [`ViewError`] as of [`View::quantized`], or if `dtype` is none of integers.
    pub fn packed(shape: Shape, dtype: DType, value: impl Into<Arc<Value>>) -> Result<Self, ViewError> {
        if dtype.is_float() || dtype.element_bytes().is_none() {
            return Err(ViewError(format!("pack: expected integers of whole bytes, found {dtype}")));
        }
        Self::computed(shape, dtype, value.into())
    }

    fn computed(shape: Shape, dtype: DType, value: Arc<Value>) -> Result<Self, ViewError> {
        if !shape.is_empty() {
            value.check().map_err(|(TensorId(tensor), error)| {
                ViewError(format!("decode: tensor #{tensor} does not fit a value of shape {shape}: {error}"))
            })?;
        }
        Ok(Self::new(shape, dtype, Op::Quantized(value)))
    }

    /// What an encoder makes of matrices.
    pub fn encoded(of: &Arc<EncodedMatrices>, part: EncodedPart) -> Self {
        let (shape, dtype) = (of.bands.shape(part), of.bands.dtype(part));
        Self::new(shape, dtype, Op::Encoded { of: Arc::clone(of), part })
    }

    /// `shape` filled with one value.
    pub fn fill(shape: Shape, element: Element) -> Self {
        Self::new(shape, element.dtype(), Op::Fill(element))
    }

    /// Shape of the view.
    pub fn shape(&self) -> &Shape {
        &self.node.shape
    }

    /// Element type of the view.
    pub fn dtype(&self) -> DType {
        self.node.dtype
    }

    /// The operator at the root.
    pub fn op(&self) -> &Op {
        &self.node.op
    }

    /// Bytes of the view's elements in row-major order, or `None` if they do not fill whole bytes (possible only for
    /// types narrower than a byte).
    pub fn bytes(&self) -> Option<u64> {
        self.dtype().bytes_of(self.shape().elements())
    }

    fn check_axis(&self, op: &'static str, axis: usize) -> Result<u64, ViewError> {
        let extents = self.shape().extents();
        extents.get(axis).copied().ok_or_else(|| ViewError::axis(op, axis, self.shape()))
    }

    fn with_extent(&self, axis: usize, extent: u64) -> Result<Shape, ViewError> {
        let mut extents = PerAxis::from_slice(self.shape().extents());
        extents[axis] = extent;
        Shape::try_new(&extents)
    }

    /// Elements `start, start + step, …` below `stop` of `axis`; all of the other axes.
    ///
    /// The axis shrinks to `ceil((stop - start) / step)`. Returns the view itself if that is all of it.
    ///
    /// # Errors
    /// There is no such axis, the range leaves it or runs backwards, or the step is 0.
    pub fn slice(&self, axis: usize, start: u64, stop: u64, step: u64) -> Result<Self, ViewError> {
        let extent = self.check_axis("slice", axis)?;
        if start > stop || stop > extent || step == 0 {
            let asked = format!("asked for {start}..{stop} in steps of {step}");
            return Err(ViewError(format!("slice: axis {axis} has extent {extent}, {asked}")));
        }
        if (start, stop, step) == (0, extent, 1) {
            return Ok(self.clone());
        }
        let shape = self.with_extent(axis, (stop - start).div_ceil(step))?;
        Ok(Self::new(shape, self.dtype(), Op::Slice { of: self.clone(), axis, start, stop, step }))
    }

    /// Elements `start, start - step, …` above `stop` of `axis`; all of the other axes. As in Python's `range(start, stop, -step)`,
    /// `stop` is -1 if the last element is element 0.
    ///
    /// The axis shrinks to `ceil((start - stop) / step)`.
    ///
    /// # Errors
    /// There is no such axis, the range leaves it or runs upwards, or the step is 0.
    pub fn slice_down(&self, axis: usize, start: i64, stop: i64, step: u64) -> Result<Self, ViewError> {
        let extent = self.check_axis("slice", axis)?;
        let refused = || {
            let asked = format!("asked for elements from {start} down to before {stop} in steps of -{step}");
            ViewError(format!("slice: axis {axis} has extent {extent}, {asked}"))
        };
        let first = u64::try_from(start).ok().filter(|first| *first < extent);
        if start < stop
            || stop < -1
            || step == 0
            || (first.is_none() && start > stop)
            || i128::from(start) >= i128::from(extent)
        {
            return Err(refused());
        }
        let count = start.abs_diff(stop).div_ceil(step);
        let Some(first) = first.filter(|_| count > 1) else {
            // Without elements it may be before the first, at -1.
            let first = start.max(0).cast_unsigned();
            return self.slice(axis, first, first + count, 1);
        };
        let step = i64::try_from(step).map(|step| -step).map_err(|_| refused())?;
        self.gather_runs(axis, vec![StridedIndices { first, step, count }])
    }

    /// The elements of `axis` at these indexes, in this order; all of the other axes. An index may occur several times.
    ///
    /// # Errors
    /// There is no such axis, or an index leaves it.
    pub fn gather(&self, axis: usize, indexes: &[u64]) -> Result<Self, ViewError> {
        let extent = self.check_axis("gather", axis)?;
        if let Some(index) = indexes.iter().find(|index| **index >= extent) {
            let text = format!("gather: axis {axis} has extent {extent}, asked for element {index}");
            return Err(ViewError(text));
        }
        match StridedIndices::of_list(indexes)[..] {
            [] => self.slice(axis, 0, 0, 1),
            [run] if run.count == 1 => self.slice(axis, run.first, run.first + 1, 1),
            [run] if run.step > 0 => self.slice(axis, run.first, run.last() + 1, run.step.unsigned_abs()),
            ref runs => self.gather_runs(axis, runs.to_vec()),
        }
    }

    fn gather_runs(&self, axis: usize, runs: Vec<StridedIndices>) -> Result<Self, ViewError> {
        let count = runs.iter().map(|run| run.count).sum();
        let shape = self.with_extent(axis, count)?;
        Ok(Self::new(shape, self.dtype(), Op::Gather { of: self.clone(), axis, runs: runs.into() }))
    }

    /// The part of this view inside `region`, whose shape becomes the result's.
    ///
    /// # Errors
    /// `region` leaves the shape, or has another rank.
    pub fn region(&self, region: &Region) -> Result<Self, ViewError> {
        if region.shape().rank() != self.shape().rank() {
            return Err(ViewError::axis("region", region.shape().rank(), self.shape()));
        }
        region
            .ranges()
            .enumerate()
            .try_fold(self.clone(), |view, (axis, range)| view.slice(axis, range.start, range.end, 1))
    }

    /// Axes reordered: axis `i` of the result is axis `axes[i]` of this view.
    ///
    /// # Errors
    /// [`ViewError`] unless `axes` names every axis once.
    pub fn transpose(&self, axes: &[usize]) -> Result<Self, ViewError> {
        let rank = self.shape().rank();
        if axes.len() != rank || (0..rank).any(|axis| !axes.contains(&axis)) {
            return Err(ViewError::permutation(axes, self.shape()));
        }
        if axes.iter().copied().eq(0..rank) {
            return Ok(self.clone());
        }
        let extents: PerAxis = axes.iter().map(|axis| self.shape().extents()[*axis]).collect();
        let op = Op::Transpose { of: self.clone(), axes: axes.to_vec() };
        Ok(Self::new(Shape::try_new(&extents)?, self.dtype(), op))
    }

    /// All axes in reverse order, numpy's `x.T`.
    ///
    /// # Panics
    /// Never: each axis is named once.
    #[must_use]
    pub fn reverse_axes(&self) -> Self {
        let axes: Vec<usize> = (0..self.shape().rank()).rev().collect();
        self.transpose(&axes).expect("each axis is named once")
    }

    /// Two axes exchanged.
    ///
    /// # Errors
    /// There is no such axis.
    pub fn swap_axes(&self, one: usize, other: usize) -> Result<Self, ViewError> {
        self.check_axis("swap", one.max(other))?;
        let mut axes: Vec<usize> = (0..self.shape().rank()).collect();
        axes.swap(one, other);
        self.transpose(&axes)
    }

    /// The same elements in row-major order under another shape.
    ///
    /// # Errors
    /// [`ViewError`] if the number of elements differs.
    pub fn reshape(&self, shape: &Shape) -> Result<Self, ViewError> {
        if shape.elements() != self.shape().elements() {
            let (from, has, wants) = (self.shape(), self.shape().elements(), shape.elements());
            return Err(ViewError(format!("reshape: {from} has {has} elements, {shape} has {wants}")));
        }
        if shape == self.shape() {
            return Ok(self.clone());
        }
        Ok(Self::new(shape.clone(), self.dtype(), Op::Reshape { of: self.clone() }))
    }

    /// As [`View::reshape`], to these extents.
    ///
    /// # Errors
    /// As [`View::reshape`], or there is no shape of these extents.
    pub fn reshape_to(&self, extents: &[u64]) -> Result<Self, ViewError> {
        self.reshape(&Shape::try_new(extents)?)
    }

    fn check_same<'a>(
        op: &'static str,
        of: &'a [Self],
        same: impl Fn(usize, u64, u64) -> bool,
    ) -> Result<&'a Self, ViewError> {
        let first = of.first().ok_or_else(|| ViewError(format!("{op}: no operands")))?;
        for (index, view) in of.iter().enumerate() {
            let (a, b) = (view.shape().extents(), first.shape().extents());
            let matches = view.dtype() == first.dtype()
                && a.len() == b.len()
                && a.iter().zip(b).enumerate().all(|(axis, (a, b))| same(axis, *a, *b));
            if !matches {
                let shown = |view: &Self| format!("{} {}", view.dtype(), view.shape());
                let (found, expected) = (shown(view), shown(first));
                return Err(ViewError(format!("{op}: operand {index} is {found}, operand 0 is {expected}")));
            }
        }
        Ok(first)
    }

    /// Views of one shape and dtype side by side along a new axis, numbered `axis` in the result.
    ///
    /// # Errors
    /// There are no operands, one differs from the first, or `axis` is beyond their rank.
    pub fn stack(axis: usize, of: &[Self]) -> Result<Self, ViewError> {
        let first = Self::check_same("stack", of, |_, a, b| a == b)?;
        if axis > first.shape().rank() {
            return Err(ViewError::axis("stack", axis, first.shape()));
        }
        let mut extents = PerAxis::from_slice(first.shape().extents());
        extents.insert(axis, of.len() as u64);
        Ok(Self::new(Shape::try_new(&extents)?, first.dtype(), Op::Stack { of: of.to_vec(), axis }))
    }

    /// Views end to end along `axis`; their other axes and their dtypes are equal.
    ///
    /// # Errors
    /// There are no operands, one differs from the first, or there is no such axis.
    pub fn concat(axis: usize, of: &[Self]) -> Result<Self, ViewError> {
        let first = Self::check_same("concat", of, |at, a, b| at == axis || a == b)?;
        first.check_axis("concat", axis)?;
        if let [only] = of {
            return Ok(only.clone());
        }
        let extent = of
            .iter()
            .try_fold(0u64, |sum, view| sum.checked_add(view.shape().extents()[axis]))
            .ok_or_else(|| ViewError::overflow(first.shape().extents()))?;
        Ok(Self::new(first.with_extent(axis, extent)?, first.dtype(), Op::Concat { of: of.to_vec(), axis }))
    }

    /// Zeros before and after along `axis`.
    ///
    /// # Errors
    /// There is no such axis, or the result is too large.
    pub fn pad(&self, axis: usize, before: u64, after: u64) -> Result<Self, ViewError> {
        let extent = self.check_axis("pad", axis)?;
        if before == 0 && after == 0 {
            return Ok(self.clone());
        }
        let padded = extent.checked_add(before).and_then(|sum| sum.checked_add(after));
        let padded = padded.ok_or_else(|| ViewError::overflow(self.shape().extents()))?;
        let op = Op::Pad { of: self.clone(), axis, before, after };
        Ok(Self::new(self.with_extent(axis, padded)?, self.dtype(), op))
    }

    fn check_float(op: &'static str, dtype: DType) -> Result<(), ViewError> {
        let refused =
            || ViewError(format!("{op}: {dtype} values are not converted, only floats of 8 bits or more are"));
        if dtype.is_float() { Ok(()) } else { Err(refused()) }
    }

    /// Values rounded to `dtype`, to nearest with ties to even. The same dtype leaves every bit unchanged.
    ///
    /// # Errors
    /// [`ViewError`] unless both types are floats of 8 bits or more.
    pub fn cast(&self, dtype: DType) -> Result<Self, ViewError> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        Self::check_float("cast", self.dtype())?;
        Self::check_float("cast", dtype)?;
        Ok(Self::new(self.shape().clone(), dtype, Op::Cast { of: self.clone() }))
    }

    /// Values times `factor`, the product in f32. With `flush`, subnormal operands and products become zero of the same
    /// sign.
    ///
    /// # Errors
    /// The values are no floats of 8 bits or more.
    pub fn multiply(&self, factor: f32, flush: bool, keep: Keep) -> Result<Self, ViewError> {
        Self::check_float("multiply", self.dtype())?;
        let dtype = if keep == Keep::F32 { DType::F32 } else { self.dtype() };
        Ok(Self::new(self.shape().clone(), dtype, Op::Multiply { of: self.clone(), factor, flush }))
    }

    /// Values plus `addend`, the sum in f32.
    ///
    /// # Errors
    /// The values are no floats of 8 bits or more.
    pub fn add(&self, addend: f32, keep: Keep) -> Result<Self, ViewError> {
        Self::check_float("add", self.dtype())?;
        let dtype = if keep == Keep::F32 { DType::F32 } else { self.dtype() };
        Ok(Self::new(self.shape().clone(), dtype, Op::Add { of: self.clone(), addend }))
    }

    /// `e` to the power of each value, correctly rounded in f32, then rounded to this view's type.
    ///
    /// # Errors
    /// The values are no floats of 8 bits or more.
    pub fn exp(&self) -> Result<Self, ViewError> {
        Self::check_float("exp", self.dtype())?;
        Ok(Self::new(self.shape().clone(), self.dtype(), Op::Exp { of: self.clone() }))
    }

    /// The values of two views added, each sum in f32.
    ///
    /// # Errors
    /// [`ViewError`] unless both are floats of one shape and dtype that are stored element by element.
    pub fn add_view(&self, other: &Self, keep: Keep) -> Result<Self, ViewError> {
        let dtype = self.check_pair("add", other, keep)?;
        Ok(Self::new(self.shape().clone(), dtype, Op::Sum { of: [self.clone(), other.clone()] }))
    }

    /// The values of two views multiplied, each product in f32. With `flush`, subnormal operands and products become zero of the
    /// same sign.
    ///
    /// # Errors
    /// As [`View::add_view`].
    pub fn multiply_view(&self, other: &Self, flush: bool, keep: Keep) -> Result<Self, ViewError> {
        let dtype = self.check_pair("multiply", other, keep)?;
        Ok(Self::new(self.shape().clone(), dtype, Op::Product { of: [self.clone(), other.clone()], flush }))
    }

    /// The dtype of arithmetic between two views.
    fn check_pair(&self, op: &'static str, other: &Self, keep: Keep) -> Result<DType, ViewError> {
        Self::check_float(op, self.dtype())?;
        Self::check_float(op, other.dtype())?;
        Self::check_same(op, &[self.clone(), other.clone()], |_, a, b| a == b)?;
        for (index, operand) in [self, other].into_iter().enumerate() {
            if let Some(TensorId(tensor)) = operand.coded() {
                let only = "only tensors stored element by element are combined";
                let text = format!("{op}: operand {index} is decoded from codes (tensor #{tensor}), {only}");
                return Err(ViewError(text));
            }
        }
        Ok(if keep == Keep::F32 { DType::F32 } else { self.dtype() })
    }

    /// The codes of the first quantized tensor in this expression.
    fn coded(&self) -> Option<TensorId> {
        if let Op::Quantized(value) = self.op() {
            // Floats at places that their positions give are as good as tensors that are stored element by element.
            let mut is_plain = true;
            value.for_each_operand(&mut |operand| {
                is_plain &= matches!(operand.field, Field::Float(_)) && operand.index.is_affine();
            });
            return (!is_plain).then_some(value.load.tensor.id);
        }
        if let Op::Encoded { of, .. } = self.op() {
            let mut first = None;
            of.input.for_each_stored(&mut |id| first = first.or(Some(id)));
            return Some(first.unwrap_or(TensorId(0)));
        }
        self.op().operands().iter().find_map(Self::coded)
    }

    /// A quantized matrix times its block scales (see [`block_index`]), the product in f32, rounded once to `dtype`.
    ///
    /// # Errors
    /// [`ViewError`] unless `weights` is a matrix, `scales` has one element per block, and all are floats.
    pub fn dequantize(
        weights: SourceTensor,
        scales: SourceTensor,
        block: (u64, u64),
        dtype: DType,
    ) -> Result<Self, ViewError> {
        Self::check_float("dequantize", weights.dtype)?;
        Self::check_float("dequantize", dtype)?;
        if scales.dtype != DType::F8E8M0 {
            Self::check_float("dequantize", scales.dtype)?;
        }
        let (block_rows, block_columns) = block;
        let grid = match weights.shape.extents() {
            [rows, columns] if block_rows > 0 && block_columns > 0 => {
                Some([rows.div_ceil(block_rows), columns.div_ceil(block_columns)])
            }
            _ => None,
        };
        if grid.is_none_or(|grid| grid != scales.shape.extents()) {
            let blocks = format!("weights {} in blocks of {block_rows} by {block_columns}", weights.shape);
            let (expected, found) = (grid.map_or("of a matrix".to_owned(), |grid| format!("{grid:?}")), scales.shape);
            return Err(ViewError(format!("dequantize: {blocks} need scales of shape {expected}, found {found}")));
        }
        let shape = weights.shape.clone();
        let index = block_index(shape.extents()[0], shape.extents()[1], block);
        let scale = Operand { field: Field::Float(scales.dtype), tensor: scales, index };
        let codes = Operand::elements(weights);
        Self::quantized(shape, Value::of(codes).then(Operation::Multiply, scale))?.cast(dtype)
    }

    /// Calls `visit` for each tensor of the checkpoint that this view reads, in order, with repeats. A tensor that is stored
    /// as boxes counts as one; see [`View::for_each_stored`].
    pub fn for_each_source(&self, visit: &mut dyn FnMut(&SourceTensor)) {
        self.for_each_leaf(&mut |leaf| match leaf {
            ViewLeaf::Tensor(tensor) => visit(tensor),
            ViewLeaf::Mosaic(mosaic) => {
                visit(&SourceTensor { id: mosaic.id(), dtype: mosaic.dtype(), shape: mosaic.shape().clone() });
            }
        });
    }

    /// Calls `visit` for all stored elements that this view reads, in order, with repeats: a tensor that has a span of
    /// its own, or each box of one that is stored as boxes.
    pub fn for_each_stored(&self, visit: &mut dyn FnMut(TensorId)) {
        self.for_each_leaf(&mut |leaf| match leaf {
            ViewLeaf::Tensor(tensor) => visit(tensor.id),
            ViewLeaf::Mosaic(mosaic) => mosaic.boxes().for_each(|part| visit(part.tensor)),
        });
    }

    /// The tensors of [`View::for_each_source`].
    pub fn source_ids(&self) -> Vec<TensorId> {
        let mut ids = Vec::new();
        self.for_each_source(&mut |source| ids.push(source.id));
        ids
    }

    /// The elements of [`View::for_each_stored`].
    pub fn stored_ids(&self) -> Vec<TensorId> {
        let mut ids = Vec::new();
        self.for_each_stored(&mut |id| ids.push(id));
        ids
    }

    /// Calls `visit` for the leaves of this expression that read a source, in order, with repeats.
    fn for_each_leaf(&self, visit: &mut dyn FnMut(ViewLeaf<'_>)) {
        if let Op::Source(tensor) = self.op() {
            visit(ViewLeaf::Tensor(tensor));
        } else if let Op::Mosaic(mosaic) = self.op() {
            visit(ViewLeaf::Mosaic(mosaic));
        } else if let Op::Quantized(value) = self.op() {
            value.for_each_operand(&mut |operand| visit(ViewLeaf::Tensor(&operand.tensor)));
        } else if let Op::Encoded { of, .. } = self.op() {
            of.input.for_each_leaf(visit);
            if of.bands.encoder().has_factor() {
                of.together.iter().for_each(|(_, view)| view.for_each_leaf(visit));
            }
        }
        self.op().operands().iter().for_each(|view| view.for_each_leaf(visit));
    }

    /// Calls `visit` for all matrices that are encoded in this expression, in order, with repeats.
    pub fn for_each_encoded(&self, visit: &mut dyn FnMut(&Arc<EncodedMatrices>)) {
        if let Op::Encoded { of, .. } = self.op() {
            visit(of);
        }
        self.op().operands().iter().for_each(|view| view.for_each_encoded(visit));
    }

    /// The tensor that this view is, if it is one unchanged and stored in one span.
    pub fn as_source(&self) -> Option<&SourceTensor> {
        if let Op::Source(tensor) = self.op() { Some(tensor) } else { None }
    }
}
