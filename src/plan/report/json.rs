//! The report as JSON.

use std::collections::BTreeMap;

use ckfs_checkpoint::{Checkpoint, Experts, FileRole, Quantization, Summary};
use ckfs_source::page_size::page_bytes;
use ckfs_tensor::{DType, Reads};
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};
use smallvec::SmallVec;

use super::{
    super::{Amplification, Hole, Plan, PlannedTensor, quantize::Chosen},
    advice::{AdviceReason, advice, reasons},
    effects::{axis_effects, bytes_per_device, training_bytes_per_device},
};

fn holes_json(holes: &[Hole]) -> Value {
    let row = |hole: &Hole| {
        json!({
            "name": hole.group.name,
            "text": hole.to_string(),
            "count": hole.group.count,
            "layers_with": hole.present,
            "layers_without": hole.absent,
            "shape": hole.shapes.as_ref().map(|(usual, _)| usual.extents()),
            "other_shape": hole.shapes.as_ref().map(|(_, other)| other.extents()),
        })
    };
    holes.iter().map(row).collect()
}

fn amplification_json(checkpoint: &Checkpoint, plan: &Plan) -> Value {
    let found = Amplification::of(checkpoint, plan);
    let reasons = reasons(checkpoint, plan, found);
    let advice = advice(plan, found, &reasons);
    let Amplification { devices, union, tensors } = found;
    let reason = |reason: &AdviceReason| {
        json!({
            "name": reason.name,
            "axis": reason.axis,
            "mesh_axes": reason.mesh_axes,
            "run_bytes": reason.run_bytes,
            "stride_bytes": reason.stride_bytes,
            "needed_bytes": reason.reads.needed_bytes,
            "paged_bytes": reason.reads.paged_bytes,
            "text": reason.text(),
        })
    };
    let row = |reads: &Reads| json!({"needed_bytes": reads.needed_bytes, "paged_bytes": reads.paged_bytes});
    let named = |key: &str, name: Value, reads: &Reads| {
        let mut row = row(reads);
        row[key] = name;
        row
    };
    json!({
        "page_bytes": page_bytes(),
        "devices": plan.devices.iter().zip(devices).map(|(device, reads)| named("device", json!(device), reads)).collect::<Value>(),
        "union": row(union),
        "tensors": tensors.iter().map(|(name, reads)| named("name", json!(name), reads)).collect::<Value>(),
        "reasons": reasons.iter().map(reason).collect::<Value>(),
        "advice": advice,
    })
}

/// One view as JSON, without its tensors.
pub(super) fn view_json(checkpoint: &Checkpoint, name: &str, plan: &Plan) -> Value {
    let devices: Vec<Value> = plan
        .devices
        .iter()
        .zip(bytes_per_device(plan).into_iter().zip(training_bytes_per_device(plan)))
        .map(|(device, (bytes, training))| {
            let coordinates = plan.mesh.coordinates(*device);
            json!({"device": device, "coordinates": coordinates, "bytes": bytes, "training_bytes": training})
        })
        .collect();
    json!({
        "name": name,
        "layout": plan.layout.name(),
        "family": plan.family,
        "params": plan.params.iter().map(|(name, value)| (name.clone(), json!(value))).collect::<Map<_, _>>(),
        "dtype": plan.dtype.map(DType::code),
        "decoded": plan.decoded,
        "merged": plan.merged.as_ref().map(|merged| json!({"adapter": merged.adapter.display().to_string(), "tensors": merged.tensors})),
        "quantized": plan.quantized.as_ref().map(quantized_json),
        "kept_raw": plan.kept_raw,
        "kept_f32": plan.kept,
        "hf_kept_f32": plan.kept_hf,
        "whole": plan.whole.names,
        "dropped": plan.dropped,
        "unscanned": plan.unscanned,
        "mesh": {"axes": axis_effects(plan), "devices": plan.mesh.devices()},
        "devices": devices,
        "bytes": plan.bundle().map(PlannedTensor::bytes).sum::<u64>(),
        "amplification": amplification_json(checkpoint, plan),
        "missing": plan.missing,
        "unexpected": plan.unexpected,
        "holes": holes_json(&plan.holes),
        "left_out": plan.left_out,
        "warnings": plan.warnings,
    })
}

/// What is quantized on read, and what is not.
fn quantized_json(chosen: &Chosen) -> Value {
    let kinds = chosen.quantized.iter();
    let left = chosen.left.iter();
    json!({
        "scheme": chosen.scheme,
        "kinds": kinds.map(|(kind, count, groups)| json!({"kind": kind.word(), "tensors": count, "names": groups})).collect::<Vec<_>>(),
        "left": left.map(|(left, count, groups)| json!({"reason": left.to_string(), "tensors": count, "names": groups})).collect::<Vec<_>>(),
    })
}

/// A tensor of a view. There may be very many, so they are written without a tree of JSON values.
#[derive(Serialize)]
struct TensorRow<'a> {
    name: &'a str,
    path: String,
    dtype: &'static str,
    shape: &'a [u64],
    bytes: u64,
    spec: Value,
    bundled: bool,
    sources: SmallVec<[&'a str; 4]>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    logical: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    layers: Option<&'a [u64]>,
}

impl<'a> TensorRow<'a> {
    fn new(checkpoint: &'a Checkpoint, plan: &'a Plan, tensor: &'a PlannedTensor) -> Self {
        let view = &tensor.view;
        let mut last = None;
        let mut sources = SmallVec::new();
        view.for_each_source(&mut |source| {
            if last.replace(source.id) != Some(source.id) {
                sources.push(checkpoint.tensor(source.id).name);
            }
        });
        Self {
            name: &tensor.name,
            path: plan.path(tensor).join("/"),
            dtype: view.dtype().code(),
            shape: view.shape().extents(),
            bytes: tensor.bytes(),
            spec: plan.spec(tensor).to_json(view.shape().rank(), &plan.mesh),
            bundled: plan.is_bundled(tensor),
            sources,
            logical: &tensor.logical,
            layers: tensor.layers.as_deref(),
        }
    }
}

/// One view of a report. Its tensors are made while they are written, since there may be very many.
#[derive(Debug)]
pub struct ViewReport<'a> {
    /// Name of the view; empty for the only one.
    pub name: &'a str,
    /// The view.
    pub plan: &'a Plan,
    /// Members that follow the tensors.
    pub more: Map<String, Value>,
}

/// A whole report, to be written as JSON.
#[derive(Serialize)]
pub struct Report<'a> {
    #[serde(flatten)]
    source: Value,
    views: Vec<WrittenView<'a>>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Serialize)]
struct WrittenView<'a> {
    #[serde(flatten)]
    view: Value,
    tensors: TensorRows<'a>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

/// The tensors of a view, which are made while they are written.
struct TensorRows<'a>(&'a Checkpoint, &'a Plan);

impl Serialize for TensorRows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(checkpoint, plan) = self;
        serializer.collect_seq(plan.tensors.iter().map(|tensor| TensorRow::new(checkpoint, plan, tensor)))
    }
}

impl<'a> Report<'a> {
    /// A report of these views, with further members for all of them.
    pub fn new(checkpoint: &'a Checkpoint, views: Vec<ViewReport<'a>>, more: Map<String, Value>) -> Self {
        let written = |ViewReport { name, plan, more }: ViewReport<'a>| WrittenView {
            view: view_json(checkpoint, name, plan),
            tensors: TensorRows(checkpoint, plan),
            more,
        };
        Self { source: source_json(checkpoint), views: views.into_iter().map(written).collect(), more }
    }
}

fn experts_json(experts: Experts) -> Value {
    let (kept, count) = match experts {
        Experts::None => ("none", None),
        Experts::Single { count } => ("single", Some(count)),
        Experts::Fused => ("fused", None),
    };
    json!({"kept": kept, "count": count, "text": experts.to_string()})
}

/// A known scheme: its name and its parameters.
fn summary_json(summary: &Summary) -> Value {
    let mut row = json!({"scheme": summary.scheme});
    for (key, value) in &summary.details {
        row[*key] = value.clone();
    }
    row
}

fn quantization_json(quantization: &Quantization) -> Value {
    let schemes: Vec<Value> = quantization.schemes.iter().map(summary_json).collect();
    let mut row = match schemes.as_slice() {
        [] if quantization.is_none() => json!({"scheme": null}),
        [] => json!({"scheme": "unsupported"}),
        [only] => only.clone(),
        several => json!({"scheme": "several", "schemes": several}),
    };
    let unsupported = quantization.unsupported.iter();
    row["unsupported"] =
        unsupported.map(|found| json!({"method": found.method, "tensors": found.codes.len()})).collect();
    // Whether a dtype can be requested.
    row["converts"] = quantization.undecodable().is_none().into();
    row["text"] = quantization.to_string().into();
    row
}

/// The source, as JSON.
pub(super) fn source_json(checkpoint: &Checkpoint) -> Value {
    let dialect = checkpoint.dialect();
    let dtypes: BTreeMap<&str, Value> = dialect
        .dtypes
        .iter()
        .map(|(dtype, tensors, bytes)| (dtype.code(), json!({"tensors": tensors, "bytes": bytes})))
        .collect();
    let files: Vec<Value> = checkpoint
        .files()
        .iter()
        .map(|file| {
            let (role, reason) = match &file.role {
                FileRole::Weights => ("weights", None),
                FileRole::Other => ("other", None),
                FileRole::Ignored(reason) => ("ignored", Some(reason.to_string())),
            };
            json!({"path": file.path, "bytes": file.size_bytes, "role": role, "reason": reason})
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "source": checkpoint.label(),
        "root": checkpoint.root().display().to_string(),
        "revision": checkpoint.revision(),
        "container": checkpoint.container().to_string(),
        "no_tensors": checkpoint.opened.contents.left_out.iter().map(|left| json!({"name": left.name, "kind": left.kind})).collect::<Vec<_>>(),
        "proposed_rename": checkpoint.proposed_rename().map(|(rule, _)| rule),
        "dialect": {
            "text": dialect.to_string(),
            "model_type": dialect.model_type,
            "architectures": dialect.architectures,
            "dtypes": dtypes,
            "layers": dialect.families,
            "declared_layers": dialect.declared_layers,
            "mtp_layers": dialect.mtp_layers,
            "experts": experts_json(dialect.experts),
            "qkv": dialect.qkv.to_string(),
            "quantization": quantization_json(&dialect.quantization),
            "tensors": dialect.tensors(),
            "bytes": dialect.bytes(),
        },
        "files": files,
        "warnings": checkpoint.warnings(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ckfs_checkpoint::Unsupported;
    use ckfs_tensor::TensorId;

    #[test]
    fn dialects_are_told_in_members() {
        let rows = [
            (
                experts_json(Experts::Single { count: 4 }),
                json!({"kept": "single", "count": 4, "text": "4, one tensor each"}),
            ),
            (experts_json(Experts::None), json!({"kept": "none", "count": null, "text": "none"})),
            (
                quantization_json(&Quantization::default()),
                json!({"scheme": null, "unsupported": [], "converts": true, "text": "not quantized"}),
            ),
            (
                quantization_json(&Quantization {
                    schemes: Vec::new(),
                    unsupported: vec![Unsupported { method: "hqq".into(), codes: [0, 1, 2].map(TensorId).into() }],
                    has_powers_of_two: false,
                }),
                json!({"scheme": "unsupported", "unsupported": [{"method": "hqq", "tensors": 3}], "converts": false,
                       "text": "hqq, not decoded: 3 tensors"}),
            ),
        ];
        for (found, expected) in rows {
            assert_eq!(found, expected);
        }
    }
}
