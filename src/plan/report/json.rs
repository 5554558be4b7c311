//! The report as JSON.

use std::collections::BTreeMap;

use ckfs_checkpoint::{Checkpoint, Experts, FileRole, Quantization, Summary};
use ckfs_source::page_size::page_bytes;
use ckfs_tensor::{DType, Reads};
use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::{Map, Value, json};
use smallvec::SmallVec;

use super::{
    super::{Hole, NameGroup, Plan, PlannedTensor, amplification::Amplification, quantize::Chosen},
    advice::{AdviceReason, advice, reasons},
    effects::{axis_effects, bytes_per_device, training_bytes_per_device},
    text::rule_of_axis,
};

fn names(groups: &[NameGroup]) -> Vec<Value> {
    let row = |group: &NameGroup| json!({"name": group.name, "count": group.count, "nearest": group.nearest});
    groups.iter().map(row).collect()
}

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
    let axes: Vec<Value> = axis_effects(plan)
        .into_iter()
        .map(|axis| {
            json!({
                "name": axis.name, "size": axis.size, "tensors_split": axis.tensors, "bytes_split": axis.bytes,
                "rule": rule_of_axis(plan, &axis.name),
            })
        })
        .collect();
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
        "decoded": plan.decoded.iter().map(|row| {
            json!({"scheme": row.scheme, "tensors": row.tensors, "bytes": row.bytes})
        }).collect::<Vec<_>>(),
        "merged": plan.merged.as_ref().map(|merged| json!({"adapter": merged.adapter.display().to_string(), "tensors": merged.tensors})),
        "quantized": plan.quantized.as_ref().map(quantized_json),
        "kept_raw": plan.kept_raw,
        "kept_f32": names(&plan.kept),
        "hf_kept_f32": names(&plan.kept_hf),
        "whole": names(&plan.whole.names),
        "dropped": names(&plan.dropped),
        "unscanned": plan.unscanned,
        "mesh": {"axes": axes, "devices": plan.mesh.devices()},
        "devices": devices,
        "bytes": plan.bundle().map(PlannedTensor::bytes).sum::<u64>(),
        "amplification": amplification_json(checkpoint, plan),
        "missing": names(&plan.missing),
        "unexpected": names(&plan.unexpected),
        "holes": holes_json(&plan.holes),
        "left_out": names(&plan.left_out),
        "warnings": plan.warnings,
    })
}

/// What is quantized on read, and what is not.
fn quantized_json(chosen: &Chosen) -> Value {
    let kinds = chosen.quantized.iter();
    let left = chosen.left.iter();
    json!({
        "scheme": chosen.scheme,
        "kinds": kinds.map(|(kind, count, groups)| json!({"kind": kind.word(), "tensors": count, "names": names(groups)})).collect::<Vec<_>>(),
        "left": left.map(|(left, count, groups)| json!({"reason": left.to_string(), "tensors": count, "names": names(groups)})).collect::<Vec<_>>(),
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
pub struct Report<'a> {
    checkpoint: &'a Checkpoint,
    views: Vec<ViewReport<'a>>,
    more: serde_json::Map<String, Value>,
}

impl<'a> Report<'a> {
    /// A report of these views, with further members for all of them.
    pub fn new(checkpoint: &'a Checkpoint, views: Vec<ViewReport<'a>>, more: serde_json::Map<String, Value>) -> Self {
        Self { checkpoint, views, more }
    }
}

/// A part of a report that is generated while it is written.
struct Written<F>(F);

impl<V: Serialize, I: Iterator<Item = V>, F: Fn() -> I> Serialize for Written<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

/// A view and its checkpoint.
struct OfCheckpoint<'a>(&'a Checkpoint, &'a ViewReport<'a>);

impl Serialize for OfCheckpoint<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(checkpoint, ViewReport { name, plan, more }) = self;
        let mut map = serializer.serialize_map(None)?;
        for (key, value) in view_json(checkpoint, name, plan).as_object().into_iter().flatten() {
            map.serialize_entry(key, value)?;
        }
        let rows = || plan.tensors.iter().map(|tensor| TensorRow::new(checkpoint, plan, tensor));
        map.serialize_entry("tensors", &Written(rows))?;
        for (key, value) in more {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl Serialize for Report<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (key, value) in source_json(self.checkpoint).as_object().into_iter().flatten() {
            map.serialize_entry(key, value)?;
        }
        let views = || self.views.iter().map(|view| OfCheckpoint(self.checkpoint, view));
        map.serialize_entry("views", &Written(views))?;
        for (key, value) in &self.more {
            map.serialize_entry(key, value)?;
        }
        map.end()
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
    let families: Vec<Value> = dialect
        .families
        .iter()
        .map(|family| {
            json!({
                "prefix": family.prefix, "word": family.word, "layers": family.layers, "last": family.last,
                "tensors": family.tensors, "bytes": family.bytes,
            })
        })
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
        "no_tensors": checkpoint.left_out().iter().map(|left| json!({"name": left.name, "kind": left.kind})).collect::<Vec<_>>(),
        "proposed_rename": checkpoint.proposed_rename().map(|(rule, _)| rule),
        "dialect": {
            "text": dialect.to_string(),
            "model_type": dialect.model_type,
            "architectures": dialect.architectures,
            "dtypes": dtypes,
            "layers": families,
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
