//! Which dtype and which decoding are requested: by the user, and by the layout.

use std::collections::BTreeSet;

use ckfs_checkpoint::Checkpoint;
use ckfs_config::{Dequantize, Requantize, value::Choice};
use ckfs_tensor::{DType, TensorId};

use super::super::{
    Layout, LayoutFile, PlanError, ViewOptions,
    quantize::kept,
    values::{Raw, ValueRequest},
};

/// The dtype and dequantization that the user requests.
pub(super) const fn asked(options: &ViewOptions) -> ValueRequest {
    let quantized = match (options.dequantize, options.dtype) {
        // What is quantized anew is decoded first.
        (None, None) if options.quantize.is_some() => Raw::Decoded(None),
        (Some(Dequantize::To(dtype)), _) | (Some(Dequantize::Own) | None, Some(dtype)) => Raw::Decoded(Some(dtype)),
        (Some(Dequantize::Own), None) => Raw::Decoded(None),
        (None, None) => Raw::Shown,
    };
    ValueRequest { dtype: options.dtype, quantized }
}

/// As [`asked`], where the layout may request more: the layouts in the program need floats.
pub(super) fn layout_request(options: &ViewOptions) -> ValueRequest {
    let asked = asked(options);
    match &options.layout {
        Layout::Embedded(_) if asked.quantized == Raw::Shown => ValueRequest { quantized: Raw::Decoded(None), ..asked },
        Layout::Gguf => ValueRequest { dtype: None, quantized: Raw::Decoded(Some(DType::F32)) },
        Layout::Canonical | Layout::Hf | Layout::Stored | Layout::Embedded(_) => asked,
        Layout::File(file) => with_dtype_of(asked, file, options),
    }
}

/// Adds the request of a layout's file, where the user has none.
pub(super) fn with_dtype_of(request: ValueRequest, file: &LayoutFile, options: &ViewOptions) -> ValueRequest {
    let Some(dtype) = file.dtype().filter(|_| !options.keep_dtype && options.dtype.is_none()) else { return request };
    let quantized = match options.dequantize {
        Some(Dequantize::To(_)) => request.quantized,
        Some(Dequantize::Own) | None => Raw::Decoded(Some(dtype)),
    };
    ValueRequest { dtype: Some(dtype), quantized }
}

/// Whether some quantized tensor may be decoded.
pub(super) fn decodes(options: &ViewOptions, request: ValueRequest) -> bool {
    request.quantized != Raw::Shown || options.casts.iter().any(|rule| rule.dtype.is_some())
}

/// The checkpoint with its quantized tensors decoded, except those of `raw`, or with their codes in the form that the user asks for.
/// `None` if nothing changes.
pub(super) fn decoded(
    original: &Checkpoint,
    options: &ViewOptions,
    decodes: bool,
    raw: &BTreeSet<TensorId>,
) -> Result<Option<Checkpoint>, PlanError> {
    if let Some(form) = options.requantize {
        alone(original, options, form)?;
        return kept(original, form).map(Some);
    }
    if !decodes || original.quantized().tensors.is_empty() {
        return Ok(None);
    }
    let decoded = original.decoded(&|id| raw.contains(&id));
    decoded.map(Some).map_err(|reasons| PlanError::of("decoded tensors", reasons))
}

/// Refuses what changes the values of codes that are to be kept, or has no place for them.
fn alone(original: &Checkpoint, options: &ViewOptions, form: Requantize) -> Result<(), PlanError> {
    let others = [
        ("--quantize", options.quantize.is_some()),
        ("--dtype", options.dtype.is_some()),
        ("--dequantize", options.dequantize.is_some()),
        ("a cast", options.casts.iter().any(|rule| rule.dtype.is_some())),
        ("--lora", options.lora.is_some()),
        ("--merge-lora", options.merge_lora.is_some()),
        ("--config-from", original.companion().is_some()),
        ("this layout", matches!(options.layout, Layout::Embedded(_) | Layout::File(_))),
    ];
    let Some((other, _)) = others.iter().find(|(_, is_asked)| *is_asked) else { return Ok(()) };
    let reason = format!(
        "{other} goes with floats, and codes stay codes: expected the layout canonical, hf or stored, and none of both"
    );
    Err(PlanError::of(&format!("requantize {}", form.word()), vec![reason]))
}
