//! What a view does not have, and why: said by the plan, and for what is empty by the mount's log and in the directories.

use std::fmt::Write;

use super::{arrays::ArrayTable, dcp_rows};
use crate::{
    checkpoint::printable,
    image,
    plan::{Kinds, Plan},
};

/// A directory that is not there, is empty, or has a part only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unavailable {
    /// The format, which is the directory's name.
    pub format: &'static str,
    /// Why.
    pub reason: String,
}

/// Why there are no files of torch, if there are none.
pub(super) fn torch(plan: &Plan) -> Result<(), String> {
    let foreign = plan.bundle().find(|tensor| !image::torch_holds(tensor.view.dtype()));
    foreign.map_or(Ok(()), |tensor| Err(format!("{}: torch has no type {}", tensor.name, tensor.view.dtype())))
}

/// Why `safetensors/` serves the listed devices only, if it does.
pub(super) fn safetensors(plan: &Plan) -> Result<(), String> {
    if plan.lists_whole() {
        return Ok(());
    }
    let (listed, all) = (plan.devices.len(), plan.mesh.devices());
    Err(format!(
        "only {listed} of {all} devices are listed, and they do not hold every tensor whole: the files have no \
         DCP_SHARDING_INFO, so that a reader of the whole directory refuses it and leaves no gaps"
    ))
}

/// All directories of a view that are not as they are elsewhere, given what the formats say.
pub(super) fn collect(
    plan: &Plan,
    safetensors: Option<String>,
    torch: Option<String>,
    dcp: Option<String>,
    orbax: Option<String>,
) -> Vec<Unavailable> {
    let rows =
        [("safetensors", safetensors), ("pt", torch), ("dcp", dcp), ("orbax", orbax), ("hf", plan.no_hf.clone())];
    rows.into_iter().filter_map(|(format, reason)| Some(Unavailable { format, reason: reason? })).collect()
}

/// All directories of a view that are not as they are elsewhere.
pub fn unavailable(plan: &Plan) -> Vec<Unavailable> {
    let torch = torch(plan);
    let dcp = torch.clone().and_then(|()| dcp_rows::fits(plan, &Kinds::new(plan)));
    collect(plan, safetensors(plan).err(), torch.err(), dcp.err(), ArrayTable::new(plan).err())
}

/// The same for a reader, a line each.
pub fn unavailable_text(view: &str, found: &[Unavailable]) -> String {
    let mut text = String::new();
    let parent = if view.is_empty() { String::new() } else { format!("{view}/") };
    for Unavailable { format, reason } in found {
        let what = if *format == "safetensors" { "partial" } else { "not there" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{what:<10}  {parent}{format}/: {}", printable(reason));
    }
    text
}
