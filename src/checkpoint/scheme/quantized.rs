//! Tensors that are stored quantized: each is a decoder over other stored tensors, its operands.
//!
//! A repository has up to 150 000 of them, of a few dozen kinds. What those of one kind have in common is a [`Template`], which
//! is made once: shape, decoder, order of axes. A tensor is then a template and the numbers of its operands, and its view
//! is made when somebody asks for it. [`Quantization`] says of them to readers by which schemes they are stored, and what no scheme
//! decodes.

use std::{fmt, sync::Arc};

use ckfs_tensor::{DType, Digit, Operand, PerAxis, Shape, SourceTensor, Step, TensorId, Term, Value, View, ViewError};
use serde_json::Value as Json;

/// What all tensors have in common that are stored alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    value_shape: Shape,
    value: Value,
    axes: Vec<usize>,
    shape: Shape,
    /// By operand: what must be stored.
    operands: Vec<SourceTensor>,
}

impl Template {
    /// Tensors whose element `n`, in the row-major order of `shape`, is `value` at `n`, in f32. In `value` the id of a tensor
    /// is the number of an operand: `TensorId(0)` are the codes, `TensorId(1)` and so on what decodes them, each with the
    /// dtype and the shape that must be stored.
    ///
    /// # Errors
    /// [`ViewError`] if an operand is too small for its index, or cannot be read as its field says.
    ///
    /// # Panics
    /// If an operand is of two shapes or types, or a number is left out: schemes name what they make.
    pub fn try_new(shape: Shape, value: Value) -> Result<Self, ViewError> {
        let mut found: Vec<Option<SourceTensor>> = Vec::new();
        value.for_each_operand(&mut |Operand { tensor, .. }| {
            // An operand's number is small: at most as many as there are places in the value.
            let at = tensor.id.0 as usize;
            if found.len() <= at {
                found.resize(at + 1, None);
            }
            let known = found[at].get_or_insert_with(|| tensor.clone());
            assert_eq!(known, tensor, "operand {at} is of two kinds");
        });
        let operands = found.into_iter().map(|operand| operand.expect("each number is that of an operand")).collect();
        let axes = (0..shape.rank()).collect();
        View::quantized(shape.clone(), value.clone())?;
        Ok(Self { value_shape: shape.clone(), value, axes, shape, operands })
    }

    /// The same with its axes in another order: axis `i` of the tensors is axis `axes[i]` of the value.
    ///
    /// # Errors
    /// [`ViewError`] unless `axes` names every axis once.
    pub fn transposed(mut self, axes: &[usize]) -> Result<Self, ViewError> {
        let rank = self.value_shape.rank();
        if axes.len() != rank || (0..rank).any(|axis| !axes.contains(&axis)) {
            return Err(ViewError::permutation(axes, &self.value_shape));
        }
        let extents: PerAxis = axes.iter().map(|axis| self.value_shape.extents()[*axis]).collect();
        self.shape = Shape::try_new(&extents)?;
        self.axes = axes.to_vec();
        Ok(self)
    }

    /// Shape of the tensors.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Rows and columns that share a scale, where codes are stored one by one, in the order of the tensor, with one scale for
    /// each block.
    pub fn block(&self) -> Option<(u64, u64)> {
        let [Step::Compute(_, Term::Value(scale))] = self.value.steps.as_slice() else { return None };
        let codes = Operand::elements(self.operands[0].clone());
        let is_plain = self.value.load == codes && scale.steps.is_empty() && self.value_shape == self.shape;
        let extents = self.shape.extents();
        let row = extents.len().checked_sub(2).filter(|_| is_plain && scale.load.tensor.shape.elements() > 1)?;
        let group = |axis: usize| {
            let divisor = Digit::axis(extents, axis, 1).divisor;
            let found = scale.load.index.digits().iter().find(|digit| digit.divisor == divisor);
            found.map_or(extents[axis], |digit| digit.group)
        };
        Some((group(row), group(row + 1)))
    }

    /// By number of operand: the dtype and the shape that must be stored.
    pub fn operands(&self) -> &[SourceTensor] {
        &self.operands
    }

    /// The tensor with these operands, in f32.
    ///
    /// # Errors
    /// [`ViewError`] if there are fewer operands than the template has: those that were checked have as many.
    pub fn view(&self, operands: &[TensorId]) -> Result<View, ViewError> {
        let value = self.value.map_operands(&mut |slot| {
            let tensor = SourceTensor { id: operands[slot.tensor.id.0 as usize], ..slot.tensor.clone() };
            Operand { tensor, ..slot.clone() }
        });
        View::quantized(self.value_shape.clone(), value)?.transpose(&self.axes)
    }
}

/// One tensor that is stored quantized.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// Its name when decoded.
    pub name: Box<str>,
    /// Its type when decoded, unless another is requested.
    pub dtype: DType,
    /// How it is decoded.
    pub template: Arc<Template>,
    /// The stored tensors that it is decoded from: first the codes, then what decodes them.
    pub operands: Box<[TensorId]>,
    /// The scheme, as `plan --json` calls it.
    pub scheme: &'static str,
}

impl Quantized {
    /// Shape when decoded.
    pub fn shape(&self) -> &Shape {
        self.template.shape()
    }

    /// The tensor in f32.
    ///
    /// # Errors
    /// None that a template's check has not excluded.
    pub fn view(&self) -> Result<View, ViewError> {
        self.template.view(&self.operands)
    }
}

/// The summary of a scheme that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// What `plan --json` calls it, such as `block_fp8`.
    pub scheme: &'static str,
    /// A few words for a reader, such as `fp8 in blocks of 128x128`.
    pub text: String,
    /// Members of its object in `plan --json`, beside its name and text.
    pub details: Vec<(&'static str, Json)>,
}

/// A recognized quantization scheme that ckfs does not decode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported {
    /// Its name, such as `ModelOpt NVFP4_AWQ`.
    pub method: String,
    /// The codes of the tensors that are stored so; none where the configuration names the method and no tensor shows it.
    pub codes: Vec<TensorId>,
}

/// What decoding makes of a repository.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The tensors that are stored quantized, in the order in which they were found.
    pub tensors: Vec<Quantized>,
    /// Stored tensors that belong to quantized modules and that no decoder reads, such as scales of activations: they go
    /// when their repository is decoded. Sorted.
    pub left_out: Vec<TensorId>,
    /// The schemes, in the order of the closed list.
    pub schemes: Vec<Summary>,
    /// What stays raw because no scheme decodes it: a request to decode is refused with these names.
    pub unsupported: Vec<Unsupported>,
    /// The method that the configuration names although no tensor is stored so: its weights were decoded since.
    pub stale: Option<String>,
}

/// How a repository's weights are quantized.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Quantization {
    /// The schemes that decode them, in the order of the closed list.
    pub schemes: Vec<Summary>,
    /// What stays as it is stored, because no scheme decodes it.
    pub unsupported: Vec<Unsupported>,
    /// Whether the configuration says that scales stored as floats are powers of two (`scale_fmt` `ue8m0`).
    pub has_powers_of_two: bool,
}

impl Quantization {
    /// What was found, under this `quantization_config`.
    pub(crate) fn of(found: &Found, config: Option<&Json>) -> Self {
        let has_powers_of_two = config.and_then(|config| config["scale_fmt"].as_str()) == Some("ue8m0");
        Self { schemes: found.schemes.clone(), unsupported: found.unsupported.clone(), has_powers_of_two }
    }

    /// Whether nothing is quantized, as far as configuration and tensors tell.
    pub const fn is_none(&self) -> bool {
        self.schemes.is_empty() && self.unsupported.is_empty()
    }

    /// What stands in the way of decoding, if something does.
    pub fn undecodable(&self) -> Option<&Unsupported> {
        self.unsupported.first()
    }

    /// Whether some tensors are stored by the scheme of this name.
    pub fn has(&self, scheme: &str) -> bool {
        self.schemes.iter().any(|summary| summary.scheme == scheme)
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("not quantized");
        }
        let schemes = self.schemes.iter().map(|summary| summary.text.clone());
        let texts: Vec<String> = schemes.chain(self.unsupported.iter().map(ToString::to_string)).collect();
        f.write_str(&texts.join("; "))
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codes.len() {
            0 => write!(f, "{}, not decoded", self.method),
            1 => write!(f, "{}, not decoded: 1 tensor", self.method),
            tensors => write!(f, "{}, not decoded: {tensors} tensors", self.method),
        }
    }
}
