//! The values of tensors in the mount: unchanged, cast or decoded, by `--dtype`, `--dequantize` and the rules of the
//! configuration file.

use std::collections::{BTreeSet, HashSet};

use ckfs_checkpoint::{Checkpoint, Storage, TensorInfo, Unsupported};
use ckfs_config::CastRule;
use ckfs_tensor::{DType, TensorId, View};
use parking_lot::Mutex;

use super::{library::Model, problem::Problem};

/// The general request for values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ValueRequest {
    /// Dtype of all floats; `None` leaves them as they are.
    pub dtype: Option<DType>,
    /// Treatment of quantized tensors.
    pub quantized: Raw,
}

/// Whether quantized tensors are shown raw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Raw {
    /// As they are stored.
    #[default]
    Shown,
    /// Decoded, to this dtype or each to its own.
    Decoded(Option<DType>),
}

/// Decides on the values of tensors and builds their views.
pub struct Values<'a> {
    checkpoint: &'a Checkpoint,
    pub(super) request: ValueRequest,
    pub(super) rules: &'a [CastRule],
    /// The model, whose own code keeps some tensors in float32. `None` if the layout casts those too.
    keep_f32: Option<&'a Model>,
    /// Whether what is stored narrower becomes float32 where the model keeps it so: values are those of a loaded model.
    pub(super) as_loaded: bool,
    /// Stored tensors that others need that are shown raw.
    of_raw: HashSet<TensorId>,
    /// Decoded tensors for which a rule has since required the raw form.
    raw: Mutex<BTreeSet<TensorId>>,
    /// Tensors that stay as they are stored because of `keep_f32`, as far as they have been asked about.
    kept: Mutex<BTreeSet<TensorId>>,
}

impl<'a> Values<'a> {
    /// Values under a general request and rules. The first rule that matches has precedence over the request. If no rule matches
    /// and the request is for a float narrower than 32 bits, plain tensors that the model keeps in float32 stay as they are stored.
    pub fn new(
        checkpoint: &'a Checkpoint,
        request: ValueRequest,
        rules: &'a [CastRule],
        keep_f32: Option<&'a Model>,
    ) -> Self {
        let of_raw = if request.dtype.is_some() {
            checkpoint.raw().flat_map(|tensor| tensor.operands.iter().copied()).collect()
        } else {
            HashSet::new()
        };
        let (raw, kept) = (Mutex::default(), Mutex::default());
        Self { checkpoint, request, rules, keep_f32, as_loaded: false, of_raw, raw, kept }
    }

    /// The selected part of the checkpoint.
    pub fn checkpoint(&self) -> &'a Checkpoint {
        self.checkpoint
    }

    /// The requested dtype of a tensor with these names. `None` leaves it as it is. If this keeps a decoded tensor as
    /// it is stored, the tensor is noted for [`Values::raw`].
    pub fn dtype_of(&self, id: TensorId, names: &[&str]) -> Option<DType> {
        let rule = self.rules.iter().find(|rule| names.iter().any(|name| rule.pattern.matches(name)));
        let info = self.checkpoint.tensor(id);
        match (info.storage, rule) {
            (Storage::Plain { .. } | Storage::Mosaic(_), Some(rule)) => rule.dtype,
            (Storage::Plain { .. } | Storage::Mosaic(_), None) => {
                if self.widens(info.dtype, info.name) {
                    return Some(DType::F32);
                }
                let keeps = self.keeps(info.dtype, info.name);
                if keeps {
                    self.kept.lock().insert(id);
                }
                // Codes and scales of what is shown raw mean nothing in another type.
                self.request.dtype.filter(|_| !keeps && !self.of_raw.contains(&id))
            }
            (Storage::Quantized(quantized), rule) => {
                let dtype = rule.map_or_else(|| self.decoded_dtype(quantized.dtype), |rule| rule.dtype);
                if dtype.is_none() {
                    self.raw.lock().insert(id);
                }
                dtype
            }
            // Codes and scales mean nothing in another type.
            (Storage::Composed(composed), _) if composed.view.is_some() => None,
            // A rule may name the part, or the tensor that it is a part of.
            (Storage::Composed(composed), _) => {
                let of = self.checkpoint.tensor(composed.of).name;
                let names: Vec<&str> = names.iter().copied().chain([of]).collect();
                self.dtype_of(composed.of, &names)
            }
        }
    }

    fn widens(&self, dtype: DType, name: &str) -> bool {
        let Some(model) = self.keep_f32.filter(|_| self.as_loaded) else { return false };
        matches!(dtype, DType::F16 | DType::BF16) && model.keeps_f32(name, self.request.dtype.unwrap_or(dtype))
    }

    fn keeps(&self, dtype: DType, name: &str) -> bool {
        let Some((model, wanted)) = self.keep_f32.zip(self.request.dtype) else { return false };
        dtype.is_float() && dtype != wanted && model.keeps_f32(name, wanted)
    }

    /// The tensors that stay as they are stored because the model's own code keeps them in float32, as far as they have been
    /// asked about.
    pub fn kept(&self) -> BTreeSet<TensorId> {
        self.kept.lock().clone()
    }

    /// The dtype that a quantized tensor of this own dtype is decoded to by the general request, if it is.
    pub(crate) fn decoded_dtype(&self, own: DType) -> Option<DType> {
        match self.request.quantized {
            Raw::Shown => None,
            Raw::Decoded(dtype) => Some(dtype.unwrap_or(own)),
        }
    }

    /// The decoded tensors that rules require raw, among those queried so far.
    pub fn raw(&self) -> BTreeSet<TensorId> {
        self.raw.lock().clone()
    }

    /// The tensor with its requested values. A float is cast to `dtype`. A quantized tensor is decoded to `dtype`, or
    /// to its own. Any other tensor is unchanged.
    ///
    /// # Errors
    /// [`Problem::View`] naming the tensor.
    pub fn view(&self, id: TensorId, dtype: Option<DType>) -> Result<View, Problem> {
        let info = self.checkpoint.tensor(id);
        let named = |error| Problem::View { name: info.name.to_owned(), error };
        let cast = |view: View| match dtype.filter(|_| info.dtype.is_float()) {
            Some(dtype) => view.cast(dtype).map_err(named),
            None => Ok(view),
        };
        let shown = |view: View| match self.checkpoint.merges().and_then(|merges| merges.of(id)) {
            Some(merge) => merge.view(view, dtype.unwrap_or(info.dtype)).map_err(named),
            None => cast(view),
        };
        match info.storage {
            Storage::Quantized(quantized) => {
                quantized.view().and_then(|view| view.cast(dtype.unwrap_or(quantized.dtype))).map_err(named)
            }
            Storage::Plain { .. } | Storage::Mosaic(_) => shown(info.stored_view(id).map_err(named)?),
            Storage::Composed(composed) => {
                if let Some(view) = &composed.view {
                    return Ok(view.clone());
                }
                self.view(composed.of, dtype).and_then(|view| composed.part.of_view(view).map_err(named))
            }
        }
    }
}

/// Whether a request or a rule converts anything.
pub(crate) fn converts(request: ValueRequest, rules: &[CastRule]) -> bool {
    request != ValueRequest::default() || rules.iter().any(|rule| rule.dtype.is_some())
}

/// The problems of converting a view of which something is quantized in a way that is not decoded, one for each way: casting the
/// stored numbers alone would give wrong values. `part` are the tensors of the checkpoint that the view selects.
pub fn unsupported(checkpoint: &Checkpoint, part: &Checkpoint) -> Vec<Problem> {
    let found = &checkpoint.dialect().quantization.unsupported;
    if found.is_empty() {
        return Vec::new();
    }
    // A part may have other names than the whole, but never other places.
    let place = |info: &TensorInfo<'_>| match info.storage {
        Storage::Plain { file, span } => Some((file, span)),
        Storage::Quantized(_) | Storage::Mosaic(_) | Storage::Composed(_) => None,
    };
    let selected: HashSet<_> = part.tensors().filter_map(|(_, info)| place(&info)).collect();
    let is_selected = |id: &TensorId| place(&checkpoint.tensor(*id)).is_none_or(|place| selected.contains(&place));
    let problem = |unsupported: &Unsupported| {
        let codes: Vec<TensorId> = unsupported.codes.iter().copied().filter(is_selected).collect();
        (unsupported.codes.is_empty() || !codes.is_empty()).then(|| Problem::Quantization {
            method: unsupported.method.clone(),
            tensors: codes.len() as u64,
            example: codes.first().map(|id| checkpoint.tensor(*id).name.to_owned()),
        })
    };
    found.iter().filter_map(problem).collect()
}
