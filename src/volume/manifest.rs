//! `.ckfs/manifest.json`: what the mount shows, for programs.
//!
//! Written as a stream, so that its length can be known without holding it: with many devices it is large.

use std::io::{self, Write};

use serde_json::json;

use crate::{
    checkpoint::Checkpoint,
    plan::{Plan, PlannedTensor},
    tensor::Region,
};

/// The region of a device: where it begins and its extents.
fn region_json(device: u64, region: &Region) -> serde_json::Value {
    json!({"device": device, "offset": region.origin(), "shape": region.shape().extents()})
}

/// Names in the repository of the tensors that a view reads, each once, in order.
pub(super) fn source_names<'a>(checkpoint: &'a Checkpoint, tensor: &PlannedTensor) -> Vec<&'a str> {
    let mut ids = Vec::new();
    tensor.view.for_each_source(&mut |source| ids.push(source.id));
    let mut seen = std::collections::HashSet::new();
    ids.into_iter().filter(|id| seen.insert(*id)).map(|id| checkpoint.tensor(id).name).collect()
}

/// Writes the manifest of a plan.
///
/// # Errors
/// What `out` fails with.
pub(super) fn write(checkpoint: &Checkpoint, plan: &Plan, out: &mut dyn Write) -> io::Result<()> {
    let mesh: serde_json::Map<_, _> =
        plan.mesh.axes().iter().map(|axis| (axis.name.clone(), axis.size.into())).collect();
    let devices: Vec<_> = plan
        .devices
        .iter()
        .map(|device| {
            let names = plan.mesh.axes().iter().map(|axis| axis.name.clone());
            let at: serde_json::Map<_, _> =
                names.zip(plan.mesh.coordinates(*device).into_iter().map(serde_json::Value::from)).collect();
            json!({"device": device, "coordinates": at})
        })
        .collect();
    let head = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "source": checkpoint.label(),
        "layout": plan.layout.name(),
        "family": plan.family,
        "dtype": plan.dtype.map(crate::tensor::DType::code),
        "mesh": mesh,
        "devices": devices,
    });
    let head = head.to_string();
    out.write_all(head.strip_suffix('}').unwrap_or(&head).as_bytes())?;
    out.write_all(b",\n\"tensors\": [")?;
    let bundled: std::collections::HashSet<&str> = plan.bundle().map(|tensor| tensor.name.as_str()).collect();
    for (index, tensor) in plan.tensors.iter().enumerate() {
        out.write_all(if index == 0 { b"\n" } else { b",\n" })?;
        let shape = tensor.view.shape();
        let regions: Vec<_> =
            plan.devices.iter().map(|device| region_json(*device, &plan.region(tensor, *device))).collect();
        let mut row = json!({
            "name": tensor.name,
            "path": plan.path(tensor).join("/"),
            "dtype": tensor.view.dtype().code(),
            "shape": shape.extents(),
            "spec": plan.spec(tensor).to_json(shape.rank(), &plan.mesh),
            "bundled": bundled.contains(tensor.name.as_str()),
            "sources": source_names(checkpoint, tensor),
            "regions": regions,
        });
        if let Some(layers) = &tensor.layers {
            row["layers"] = json!(&layers[..]);
        }
        serde_json::to_writer(&mut *out, &row)?;
    }
    out.write_all(b"\n]}\n")
}
