//! Everything that is wrong with a header, by tensor.
//!
//! This runs only for headers that are not accepted at once: those that are refused, and those with members that the format
//! does not know.

use std::borrow::Cow;

use safetensors::{
    Dtype,
    tensor::{Metadata, TensorInfo},
};
use serde::Deserialize;
use smallvec::SmallVec;

use super::{
    super::json::repeated,
    RANK_MAX,
    error::HeaderErrors,
    members::{Members, dtype_of},
    tensor_bytes,
};

/// A tensor's description with any dtype, any number of axes and any further members.
#[derive(Deserialize)]
struct Loose<'a> {
    #[serde(borrow)]
    dtype: Code<'a>,
    shape: SmallVec<[u64; RANK_MAX]>,
    data_offsets: [u64; 2],
}

/// The crate takes all that serde takes for an enum, a map of one member included.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected the code of a dtype")]
enum Code<'a> {
    Known(Dtype),
    Unknown(#[serde(borrow)] Cow<'a, str>),
}

/// Lists what is wrong with a header of this text whose data is `data_bytes` long; its members if nothing is.
///
/// # Errors
/// All problems. Where the text is not JSON of the right form, that is the only one.
pub(super) fn examine(text: &str, data_bytes: u64) -> Result<Members<TensorInfo>, HeaderErrors> {
    let read = serde_json::from_str::<Members<Loose<'_>>>(text);
    let Members { tensors, .. } = read.map_err(HeaderErrors::json)?;
    let mut problems = HeaderErrors::default();
    for name in repeated(tensors.iter().map(|(name, _)| name)) {
        problems.push(HeaderErrors::duplicate(name));
    }
    for (name, tensor) in &tensors {
        check_tensor(name, tensor, &mut problems);
    }
    check_order(&tensors, data_bytes, &mut problems);
    problems.finish(())?;
    // Own code finds nothing wrong. What it skipped, the crate has not: only its verdict counts.
    serde_json::from_str::<Metadata>(text).map_err(HeaderErrors::json)?;
    serde_json::from_str(text).map_err(HeaderErrors::json)
}

/// The dtype, the rank and the size of one tensor.
fn check_tensor(name: &str, tensor: &Loose<'_>, problems: &mut HeaderErrors) {
    let rank = tensor.shape.len();
    if rank > RANK_MAX {
        problems.push(HeaderErrors::rank(name, rank));
    }
    let dtype = match &tensor.dtype {
        Code::Known(dtype) => dtype_of(*dtype).ok_or_else(|| dtype.to_string()),
        Code::Unknown(code) => Err(code.clone().into_owned()),
    };
    let dtype = match dtype {
        Ok(dtype) => dtype,
        Err(found) => return problems.push(HeaderErrors::dtype(name, &found)),
    };
    if rank > RANK_MAX {
        return;
    }
    let [start, end] = tensor.data_offsets;
    match tensor_bytes(dtype, &tensor.shape) {
        None => problems.push(HeaderErrors::size(name, dtype, &tensor.shape)),
        Some(expected) if end.checked_sub(start) != Some(expected) => {
            let (shape, found) = (&tensor.shape, format!("expected {expected} bytes, found offsets {start}..{end}"));
            problems.push(HeaderErrors::of(name, format_args!("{dtype} of shape {shape:?}: {found}")));
        }
        Some(_) => {}
    }
}

/// Whether tensors follow each other without hole or overlap, to the end of the file.
fn check_order(tensors: &[(String, Loose<'_>)], data_bytes: u64, problems: &mut HeaderErrors) {
    let mut spans: Vec<([u64; 2], &str)> =
        tensors.iter().map(|(name, tensor)| (tensor.data_offsets, name.as_str())).collect();
    // By both ends, so that tensors without elements stand before the tensor that starts at the same place.
    spans.sort_by_key(|span| span.0);
    let mut end = 0;
    for ([start, stop], name) in spans {
        if start != end {
            let problem = format_args!("expected its data to start at offset {end}, found {start}");
            problems.push(HeaderErrors::of(name, problem));
        }
        end = stop;
    }
    if end != data_bytes {
        problems.push(HeaderErrors::end(end, data_bytes));
    }
}
