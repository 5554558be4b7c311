//! What becomes of a source tensor's values: passed through, cast or dequantized, by `--dtype` and the rules of the
//! configuration file.

use super::problem::Problem;
use crate::{
    checkpoint::{Checkpoint, Quantization},
    config::CastRule,
    tensor::{DType, Shape, SourceTensor, TensorId, View},
};

/// Decides and builds the values of source tensors.
#[derive(Debug)]
pub struct Values<'a> {
    checkpoint: &'a Checkpoint,
    dtype: Option<DType>,
    rules: &'a [CastRule],
}

impl<'a> Values<'a> {
    /// Values under a general dtype and rules, of which the first that matches wins over the general dtype.
    pub fn new(checkpoint: &'a Checkpoint, dtype: Option<DType>, rules: &'a [CastRule]) -> Self {
        Self { checkpoint, dtype, rules }
    }

    /// The checkpoint, as far as it is wanted.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// A row of the tensor table, as views refer to it.
    ///
    /// # Errors
    /// [`Problem::View`] if the tensor has too many axes, which the header's reader has excluded.
    pub fn tensor(&self, id: TensorId) -> Result<SourceTensor, Problem> {
        let info = self.checkpoint.tensor(id);
        let shape = Shape::try_new(info.shape)
            .map_err(|error| Problem::View { name: info.name.to_owned(), error: error.into() })?;
        Ok(SourceTensor { id, dtype: info.dtype, shape })
    }

    /// Whether names matter to the dtype.
    pub fn depend_on_names(&self) -> bool {
        !self.rules.is_empty()
    }

    /// The dtype that a tensor of these names is to have; `None` leaves it as it is.
    pub fn dtype_of(&self, names: &[&str]) -> Option<DType> {
        let rule = self.rules.iter().find(|rule| names.iter().any(|name| rule.pattern.matches(name)));
        rule.map_or(self.dtype, |rule| rule.dtype)
    }

    /// The scale tensor that belongs to a block-quantized weight.
    pub fn scale_of(&self, weight: TensorId) -> Option<(TensorId, (u64, u64))> {
        match &self.checkpoint.dialect().quantization {
            Quantization::BlockFp8(fp8) => fp8.scale_of(weight).map(|scale| (scale, fp8.block)),
            Quantization::None
            | Quantization::ScaledFp8(_)
            | Quantization::Mxfp4
            | Quantization::Int4Packed { .. }
            | Quantization::Nvfp4
            | Quantization::CompressedTensors { .. }
            | Quantization::Mlx { .. }
            | Quantization::Unknown { .. } => None,
        }
    }

    /// The tensor with its values as wanted: cast or dequantized to `dtype` if it is a float, else as it is.
    ///
    /// # Errors
    /// [`Problem::View`] naming the tensor.
    pub fn view(&self, id: TensorId, dtype: Option<DType>) -> Result<View, Problem> {
        let tensor = self.tensor(id)?;
        let Some(dtype) = dtype else { return Ok(View::source(tensor)) };
        let named = |error| Problem::View { name: self.checkpoint.tensor(id).name.to_owned(), error };
        match self.scale_of(id) {
            Some((scale, block)) => View::dequantize(tensor, self.tensor(scale)?, block, dtype).map_err(named),
            None if tensor.dtype.is_float() => View::source(tensor).cast(dtype).map_err(named),
            None => Ok(View::source(tensor)),
        }
    }

    /// Whether `--dtype` or a rule asks for conversion at all.
    pub fn converts(&self) -> bool {
        self.dtype.is_some() || self.rules.iter().any(|rule| rule.dtype.is_some())
    }

    /// The dtype asked for in general.
    pub fn general_dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Whether quantized weights are dequantized.
    pub fn undoes_quantization(&self) -> bool {
        match &self.checkpoint.dialect().quantization {
            Quantization::BlockFp8(fp8) => fp8.pairs.iter().any(|(weight, _)| {
                let name = self.checkpoint.tensor(*weight).name;
                self.dtype_of(&[name]).is_some()
            }),
            Quantization::None
            | Quantization::ScaledFp8(_)
            | Quantization::Mxfp4
            | Quantization::Int4Packed { .. }
            | Quantization::Nvfp4
            | Quantization::CompressedTensors { .. }
            | Quantization::Mlx { .. }
            | Quantization::Unknown { .. } => false,
        }
    }

    /// The problem, if conversion is asked for in a repository whose quantization cannot be undone yet: casting the
    /// stored numbers alone would give wrong values.
    pub fn unsupported(&self) -> Option<Problem> {
        if !self.converts() {
            return None;
        }
        let scheme = match &self.checkpoint.dialect().quantization {
            Quantization::None | Quantization::BlockFp8(_) => return None,
            Quantization::ScaledFp8(granularity) => format!("fp8 with scales per {granularity:?}").to_lowercase(),
            Quantization::Mxfp4 => "mxfp4".to_owned(),
            Quantization::Int4Packed { .. } => "int4 pack-quantized".to_owned(),
            Quantization::Nvfp4 => "nvfp4".to_owned(),
            Quantization::CompressedTensors { format } => format!("compressed-tensors {format}"),
            quantization @ Quantization::Mlx { .. } => quantization.to_string(),
            Quantization::Unknown { method } => method.clone(),
        };
        Some(Problem::Quantization { scheme })
    }
}
