//! The report of a plan: as text for `ckfs plan` and `.ckfs/plan.txt`, and as JSON.

use std::{
    collections::{BTreeMap, HashMap},
    fmt::Write,
};

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::{Map, Value, json};

use super::{
    AxisUse, HfContent, Hole, Layout, NameGroup, Plan, PlannedTensor, Spec, amplification::Amplification, axis_use,
    naming::group_name, select,
};
use crate::{
    checkpoint::{Checkpoint, Container, Experts, FileRole, LeftOut, Quantization, Summary, printable},
    tensor::{DType, PAGE_BYTES, Reads, Shape},
};

/// Devices that the text lists; JSON lists all.
const DEVICES_SHOWN: usize = 16;
/// Groups of tensors that the text lists.
const GROUPS_SHOWN: usize = 400;
/// Groups of unexpected names that the text lists.
const NAMES_SHOWN: usize = 40;
/// Ignored files that the text lists.
const FILES_SHOWN: usize = 40;
/// Tensors with the most over-read that the text lists.
const TENSORS_SHOWN: usize = 5;
/// Over-read up to this factor gets no line: it comes from pages at the ends of long runs.
const OVER_READ_HUNDREDTHS: u128 = 102;

/// Bytes in words: exact up to 1023, then three digits and a binary unit.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut tenths, mut unit) = (u128::from(bytes) * 10 / 1024, 0);
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        (tenths, unit) = (tenths / 1024, unit + 1);
    }
    if tenths < 1000 {
        format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    } else {
        format!("{} {}", tenths / 10, UNITS[unit])
    }
}

/// `part` of `whole` in percent.
fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "0.0 %".to_owned();
    }
    let tenths = u128::from(part) * 1000 / u128::from(whole);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// The bytes in the touched pages over the bytes needed, in hundredths.
fn hundredths(reads: Reads) -> u128 {
    if reads.needed_bytes == 0 { 100 } else { u128::from(reads.paged_bytes) * 100 / u128::from(reads.needed_bytes) }
}

/// The bytes needed, and the bytes in their pages.
pub fn reads_text(reads: Reads) -> String {
    let (needed, paged) = (human_bytes(reads.needed_bytes), human_bytes(reads.paged_bytes));
    format!("{needed} of the sources, {paged} in whole pages: {} times", factor(reads))
}

fn factor(reads: Reads) -> String {
    let hundredths = hundredths(reads);
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

/// Numbers of devices, with runs as `0-7`.
fn device_ranges(devices: &[u64]) -> String {
    let runs = devices.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        [] | [_] => run.iter().map(u64::to_string).collect(),
    });
    runs.collect::<Vec<_>>().join(",")
}

/// Lines about the excess reads of devices, if there are any: one per group of devices that are alike, one for all
/// devices, and one for the worst tensors.
fn over_read_text(checkpoint: &Checkpoint, plan: &Plan) -> Vec<String> {
    let amplification = Amplification::of(checkpoint, plan);
    let exceeds = |reads: &Reads| hundredths(*reads) > OVER_READ_HUNDREDTHS;
    if !amplification.devices.iter().any(exceeds) {
        return Vec::new();
    }
    let mut groups: BTreeMap<u128, (Reads, Vec<u64>)> = BTreeMap::new();
    for (device, reads) in plan.devices.iter().zip(&amplification.devices) {
        let group = groups.entry(hundredths(*reads)).or_insert_with(|| (*reads, Vec::new()));
        group.1.push(*device);
    }
    let mut lines: Vec<String> = groups
        .values()
        .rev()
        .take(DEVICES_SHOWN)
        .map(|(reads, devices)| {
            let each = if devices.len() > 1 { " each" } else { "" };
            format!("dev{}:{each} {}", device_ranges(devices), reads_text(*reads))
        })
        .collect();
    if groups.len() > DEVICES_SHOWN {
        lines.push(format!("and {} more", groups.len() - DEVICES_SHOWN));
    }
    if plan.devices.len() > 1 {
        lines.push(format!("all listed devices together: {}", reads_text(amplification.union)));
    }
    let worst = amplification.tensors.iter().filter(|(_, reads)| exceeds(reads)).take(TENSORS_SHOWN);
    let worst: Vec<String> = worst.map(|(name, reads)| format!("{name} {} times", factor(*reads))).collect();
    if !worst.is_empty() {
        lines.push(format!("most by {}", worst.join(", ")));
    }
    lines
}

/// Tensors of bundles whose names differ only in numbers.
struct Group<'a> {
    name: String,
    first: &'a PlannedTensor,
    count: u64,
    bytes: u64,
}

fn groups(plan: &Plan) -> Vec<Group<'_>> {
    let mut places: HashMap<(String, DType, &Shape, &Spec), usize> = HashMap::new();
    let mut groups: Vec<Group<'_>> = Vec::new();
    for tensor in plan.bundle() {
        let name = group_name(&tensor.name);
        let key = (name.clone(), tensor.view.dtype(), tensor.view.shape(), plan.spec(tensor));
        let place = *places.entry(key).or_insert_with(|| {
            groups.push(Group { name, first: tensor, count: 0, bytes: 0 });
            groups.len() - 1
        });
        groups[place].count += 1;
        groups[place].bytes += tensor.bytes();
    }
    groups
}

/// Bytes of bundled tensors that each listed device holds.
///
/// # Panics
/// Never: a part has no more bytes than its tensor, whose size was checked.
pub fn bytes_per_device(plan: &Plan) -> Vec<u64> {
    // Most tensors share all of these with many others.
    type Kind<'a> = (&'a Spec, &'a Shape, DType, Option<(u64, u64)>);
    let mut kinds: HashMap<Kind<'_>, (&PlannedTensor, u64)> = HashMap::new();
    for tensor in plan.bundle() {
        let key = (plan.spec(tensor), tensor.view.shape(), tensor.view.dtype(), tensor.expert);
        kinds.entry(key).or_insert((tensor, 0)).1 += 1;
    }
    let shard = |tensor: &PlannedTensor, device| {
        let elements = plan.region(tensor, device).shape().elements();
        u64::try_from(u128::from(elements) * u128::from(tensor.view.dtype().bits()) / 8)
            .expect("a part has no more bytes than the tensor, whose size was checked")
    };
    let of_device = |device: &u64| kinds.values().map(|(tensor, count)| shard(tensor, *device) * count).sum();
    plan.devices.iter().map(of_device).collect()
}

/// The effect of one mesh axis.
struct AxisEffect {
    name: String,
    size: u64,
    tensors: u64,
    bytes: u64,
}

fn axis_effects(plan: &Plan) -> Vec<AxisEffect> {
    let axes = plan.mesh.axes().iter().enumerate();
    axes.map(|(index, axis)| {
        let expert_axis = axis_use(&axis.name) == AxisUse::Expert;
        let split: Vec<&PlannedTensor> = plan
            .bundle()
            .filter(|tensor| plan.spec(tensor).uses(index) || (expert_axis && tensor.expert.is_some()))
            .collect();
        AxisEffect {
            name: axis.name.clone(),
            size: axis.size,
            tensors: split.len() as u64,
            bytes: split.iter().map(|tensor| tensor.bytes()).sum(),
        }
    })
    .collect()
}

const fn rule_of_axis(sharding_use: AxisUse) -> &'static str {
    match sharding_use {
        AxisUse::Expert => "by expert",
        AxisUse::Tensor => "by row or column, as the tensor's role says",
        AxisUse::FullyShard => "axis 0 of the unstacked tensor, inside the others",
        AxisUse::Replicate => "replicas",
        AxisUse::Unknown => "no rule for this name",
    }
}

/// The repository, as the first lines of a report.
pub fn source_text(checkpoint: &Checkpoint) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{key:<10}  {}", printable(value));
    };
    line("source", checkpoint.label());
    line("files in", &checkpoint.root().display().to_string());
    if let Some(revision) = checkpoint.revision() {
        line("revision", revision);
    }
    line("dialect", &checkpoint.dialect().to_string());
    for detail in checkpoint.dialect().describe().lines() {
        line("", detail);
    }
    container_text(checkpoint, &mut line);
    let ignored: Vec<_> = checkpoint
        .files()
        .iter()
        .filter_map(|file| match &file.role {
            FileRole::Ignored(reason) => Some((&file.path, reason)),
            FileRole::Weights | FileRole::Other => None,
        })
        .collect();
    for (path, reason) in ignored.iter().take(FILES_SHOWN) {
        line("left out", &format!("{path}: {reason}"));
    }
    if ignored.len() > FILES_SHOWN {
        line("", &format!("and {} more", ignored.len() - FILES_SHOWN));
    }
    for warning in checkpoint.warnings() {
        line("warning", warning);
    }
    text
}

/// Widest padded column. A longer text pushes the others aside.
const COLUMN_MAX: usize = 200;

fn rows(text: &mut String, table: &[[String; 5]]) {
    let width = |column: usize| table.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).min(COLUMN_MAX);
    let widths: [usize; 4] = std::array::from_fn(width);
    for [a, b, c, d, e] in table {
        let [wa, wb, wc, wd] = widths;
        let row = format!("  {a:<wa$}  {b:>wb$}  {c:<wc$}  {d:<wd$}  {e}");
        let _ = writeln!(text, "{}", row.trim_end());
    }
}

/// The trainers that read only their own chunks in formats with chunks.
fn chunks_text(plan: &Plan) -> String {
    let splits = |index: usize| {
        let axis = &plan.mesh.axes()[index];
        let by_expert = axis_use(&axis.name) == AxisUse::Expert;
        plan.bundle().any(|tensor| plan.spec(tensor).uses(index) || (by_expert && tensor.expert.is_some()))
    };
    let axes: Vec<String> = (0..plan.mesh.axes().len())
        .filter(|index| plan.mesh.axes()[*index].size > 1 && splits(*index))
        .map(|index| format!("{}={}", plan.mesh.axes()[index].name, plan.mesh.axes()[index].size))
        .collect();
    if axes.is_empty() {
        return "orbax/ and dcp/ hold each tensor in one chunk: a trainer that shards reads more than its own part; mount with its --mesh"
            .to_owned();
    }
    format!(
        "of orbax/ and dcp/: a trainer with mesh {} or coarser (sizes that divide these) reads only its own chunks, others more",
        axes.join(",")
    )
}

/// What the container of the tensors is, where it is not safetensors: what it holds besides, and the prefix of the names.
fn container_text(checkpoint: &Checkpoint, line: &mut dyn FnMut(&str, &str)) {
    let boxes: usize = checkpoint.tensors().filter_map(|(_, info)| Some(info.mosaic()?.boxes())).sum();
    if checkpoint.container() != Container::Safetensors {
        let stored = if boxes == 0 { String::new() } else { format!(", some of the tensors in {boxes} boxes") };
        line("container", &format!("{}{stored}", checkpoint.container()));
    }
    let left_out = checkpoint.left_out();
    // Those of Orbax are tensors; the lines of each view list them.
    if !left_out.is_empty() && checkpoint.container() != Container::Orbax {
        line("no tensors", &format!("{} members of the checkpoint are not shown:", left_out.len()));
        for LeftOut { name, kind } in left_out.iter().take(NAMES_SHOWN) {
            line("", &format!("{name}: {kind}"));
        }
        if left_out.len() > NAMES_SHOWN {
            line("", &format!("and {} more", left_out.len() - NAMES_SHOWN));
        }
    }
    if let Some(rule) = checkpoint.proposed_rename() {
        line("prefix", &format!("--source-rename '{rule}' would give the names of a repository of Hugging Face"));
    }
}

/// The names that the layout and flags leave out, by tower or layers, or else one by one.
fn left_out_text(plan: &Plan, line: &mut dyn FnMut(&str, &str)) {
    let mut roots: BTreeMap<String, u64> = BTreeMap::new();
    for group in &plan.left_out {
        *roots.entry(select::root(&group.name)).or_default() += group.count;
    }
    let total: u64 = roots.values().sum();
    if total == 0 {
        return;
    }
    line("left out", &format!("{total} tensors of the repository:"));
    for (root, count) in roots.iter().take(NAMES_SHOWN) {
        line("", &format!("{root} ({count} tensor{})", if *count == 1 { "" } else { "s" }));
    }
    if roots.len() > NAMES_SHOWN {
        line("", &format!("and {} more", roots.len() - NAMES_SHOWN));
    }
}

/// One view, without the lines that are the same for all views of a source.
pub fn view_text(checkpoint: &Checkpoint, plan: &Plan) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{key:<10}  {}", printable(value));
    };
    let total: u64 = plan.bundle().map(PlannedTensor::bytes).sum();
    let count = plan.bundle().count();
    let family = plan.family.as_deref().map_or_else(|| "family not known".to_owned(), |name| format!("family {name}"));
    // The layout's own rules, if it has any, decide whether layers are stacked.
    let layers = match (&plan.layout, plan.unscanned) {
        (Layout::Stored | Layout::Embedded(_) | Layout::File(_), _) => "",
        (Layout::Canonical | Layout::Hf, true) => ", layers unscanned",
        (Layout::Canonical | Layout::Hf, false) => ", layers scanned",
    };
    line("layout", &format!("{}, {family}{layers}", plan.layout.name()));
    if !plan.params.is_empty() {
        let params: Vec<String> = plan.params.iter().map(|(name, value)| format!("{name}={value}")).collect();
        line("", &format!("parameters {}", params.join(", ")));
    }
    line("dtype", &plan.dtype.map_or_else(|| "as stored".to_owned(), |dtype| format!("{dtype} for all floats")));
    kept_text(plan, &mut line);
    if !plan.decoded.is_empty() {
        line("decoded", &decoded_text(plan));
    }
    if !plan.dropped.is_empty() {
        line("dropped", &named_text(&plan.dropped, "which no decoder reads"));
    }
    let mesh = if plan.mesh.axes().is_empty() { "none".to_owned() } else { plan.mesh.to_string() };
    let listed = plan.devices.len() as u64;
    let some = if listed == plan.mesh.devices() { String::new() } else { format!(", {listed} listed") };
    line("mesh", &format!("{mesh}: {} devices{some}", plan.mesh.devices()));
    for axis in axis_effects(plan) {
        let AxisEffect { name, size, tensors, bytes } = axis;
        let logical = "by the rules for logical axes";
        let rule = if plan.logical_rules.is_some() { logical } else { rule_of_axis(axis_use(&name)) };
        let part = percent(bytes, total);
        line("", &format!("{name}={size} splits {tensors} of {count} tensors, {part} of the bytes ({rule})"));
    }
    line("tensors", &format!("{count}, {} unsharded; {} raw files per device", human_bytes(total), plan.tensors.len()));
    let per_device = bytes_per_device(plan);
    let (least, most) = (per_device.iter().min().copied().unwrap_or(0), per_device.iter().max().copied().unwrap_or(0));
    if least == most {
        line("per device", &format!("{} ({})", human_bytes(most), percent(most, total)));
    } else {
        line("per device", &format!("{} to {}", human_bytes(least), human_bytes(most)));
        for (device, bytes) in plan.devices.iter().zip(&per_device).take(DEVICES_SHOWN) {
            line("", &format!("dev{device}: {} ({})", human_bytes(*bytes), percent(*bytes, total)));
        }
        if plan.devices.len() > DEVICES_SHOWN {
            line("", &format!("and {} more", plan.devices.len() - DEVICES_SHOWN));
        }
    }
    for (index, over_read) in over_read_text(checkpoint, plan).iter().enumerate() {
        line(if index == 0 { "over-read" } else { "" }, over_read);
    }
    line("chunks", &chunks_text(plan));
    let converted = plan.hf.iter().filter(|file| !matches!(file.content, HfContent::Original(_))).count();
    line("hf/", &format!("{} files, {converted} of them rewritten", plan.hf.len()));
    for group in plan.missing.iter().take(NAMES_SHOWN) {
        line("missing", &group.to_string());
    }
    for group in plan.unexpected.iter().take(NAMES_SHOWN) {
        line("unexpected", &group.to_string());
    }
    if plan.unexpected.len() > NAMES_SHOWN {
        line("", &format!("and {} more", plan.unexpected.len() - NAMES_SHOWN));
    }
    for hole in plan.holes.iter().take(NAMES_SHOWN) {
        line("layers", &hole.to_string());
    }
    if plan.holes.len() > NAMES_SHOWN {
        line("", &format!("and {} more differences between layers", plan.holes.len() - NAMES_SHOWN));
    }
    left_out_text(plan, &mut line);
    for warning in &plan.warnings {
        line("warning", warning);
    }
    let _ = writeln!(text);
    let groups = groups(plan);
    let heading = ["tensor", "count", "dtype", "shape", "spec"].map(str::to_owned);
    let table: Vec<_> = std::iter::once(heading)
        .chain(groups.iter().take(GROUPS_SHOWN).map(|group| {
            let view = &group.first.view;
            let spec = plan.spec(group.first).to_json(view.shape().rank(), &plan.mesh).to_string();
            let spec = spec.replace("null", "-").replace('"', "");
            [
                printable(&group.name).into_owned(),
                group.count.to_string(),
                view.dtype().to_string(),
                view.shape().to_string(),
                spec,
            ]
        }))
        .collect();
    rows(&mut text, &table);
    if groups.len() > GROUPS_SHOWN {
        let _ = writeln!(text, "  and {} more", groups.len() - GROUPS_SHOWN);
    }
    text
}

/// The whole report: the source, then each view under its name.
pub fn text<'a>(checkpoint: &Checkpoint, views: impl IntoIterator<Item = (&'a str, &'a Plan)>) -> String {
    let mut text = source_text(checkpoint);
    for (name, plan) in views {
        text.push('\n');
        if !name.is_empty() {
            let _ = writeln!(text, "{:<10}  {}", "view", printable(name));
        }
        text.push_str(&view_text(checkpoint, plan));
    }
    text
}

fn names(groups: &[NameGroup]) -> Vec<Value> {
    let row = |group: &NameGroup| json!({"name": group.name, "count": group.count, "nearest": group.nearest});
    groups.iter().map(row).collect()
}

fn holes_json(holes: &[Hole]) -> Value {
    let row = |hole: &Hole| {
        json!({
            "name": hole.group.name,
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
    let Amplification { devices, union, tensors } = Amplification::of(checkpoint, plan);
    let row = |reads: &Reads| json!({"needed_bytes": reads.needed_bytes, "paged_bytes": reads.paged_bytes});
    let named = |key: &str, name: Value, reads: &Reads| {
        let mut row = row(reads);
        row[key] = name;
        row
    };
    json!({
        "page_bytes": PAGE_BYTES,
        "devices": plan.devices.iter().zip(&devices).map(|(device, reads)| named("device", json!(device), reads)).collect::<Value>(),
        "union": row(&union),
        "tensors": tensors.iter().map(|(name, reads)| named("name", json!(name), reads)).collect::<Value>(),
    })
}

/// One view as JSON, without its tensors.
fn view_json(checkpoint: &Checkpoint, name: &str, plan: &Plan) -> Value {
    let axes: Vec<Value> = axis_effects(plan)
        .into_iter()
        .map(|axis| json!({"name": axis.name, "size": axis.size, "tensors_split": axis.tensors, "bytes_split": axis.bytes}))
        .collect();
    let devices: Vec<Value> = plan
        .devices
        .iter()
        .zip(bytes_per_device(plan))
        .map(|(device, bytes)| json!({"device": device, "coordinates": plan.mesh.coordinates(*device), "bytes": bytes}))
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
        "kept_raw": plan.kept_raw,
        "kept_f32": names(&plan.kept),
        "hf_kept_f32": names(&plan.kept_hf),
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

/// A tensor of a view as JSON.
fn tensor_json(checkpoint: &Checkpoint, plan: &Plan, tensor: &PlannedTensor) -> Value {
    let view = &tensor.view;
    let mut sources = Vec::new();
    view.for_each_source(&mut |source| sources.push(source.id));
    sources.dedup();
    let names: Vec<&str> = sources.iter().map(|id| checkpoint.tensor(*id).name).collect();
    let mut row = json!({
        "name": tensor.name,
        "path": plan.path(tensor).join("/"),
        "dtype": view.dtype().code(),
        "shape": view.shape().extents(),
        "bytes": view.bytes(),
        "spec": plan.spec(tensor).to_json(view.shape().rank(), &plan.mesh),
        "bundled": plan.is_bundled(tensor),
        "sources": names,
    });
    if !tensor.logical.is_empty() {
        row["logical"] = json!(tensor.logical);
    }
    if let Some(layers) = &tensor.layers {
        row["layers"] = json!(&layers[..]);
    }
    row
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
#[derive(Debug)]
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
        let rows = || plan.tensors.iter().map(|tensor| tensor_json(checkpoint, plan, tensor));
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

/// What a dtype for all floats spares, and where.
fn kept_text(plan: &Plan, line: &mut dyn FnMut(&str, &str)) {
    let why = "as stored, float32 in the model's own code";
    if !plan.kept.is_empty() {
        line("kept", &named_text(&plan.kept, why));
    }
    if !plan.kept_hf.is_empty() && plan.kept_hf != plan.kept {
        line("kept", &format!("in hf/ {}", named_text(&plan.kept_hf, why)));
    }
}

/// How many tensors there are of these names, what is said of them, and the names.
fn named_text(groups: &[NameGroup], what: &str) -> String {
    let count: u64 = groups.iter().map(|group| group.count).sum();
    let listed: Vec<&str> = groups.iter().take(NAMES_SHOWN).map(|group| group.name.as_str()).collect();
    let more = groups.len() - listed.len();
    let more = if more == 0 { String::new() } else { format!(" and {more} more groups") };
    let tensors = if count == 1 { "tensor" } else { "tensors" };
    format!("{count} {tensors} {what}: {}{more}", listed.join(", "))
}

/// What is decoded, and how much of it there is.
fn decoded_text(plan: &Plan) -> String {
    let rows =
        plan.decoded.iter().map(|row| format!("{} {} tensors, {}", row.tensors, row.scheme, human_bytes(row.bytes)));
    let rows: Vec<String> = rows.collect();
    let kept = if plan.kept_raw == 0 { String::new() } else { format!("; {} shown as stored", plan.kept_raw) };
    format!("{}{kept}", rows.join("; "))
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
    row["unsupported"] = unsupported.map(|found| json!({"method": found.method, "tensors": found.tensors})).collect();
    // Whether a dtype can be requested.
    row["converts"] = quantization.undecodable().is_none().into();
    row["text"] = quantization.to_string().into();
    row
}

/// The source, as JSON.
fn source_json(checkpoint: &Checkpoint) -> Value {
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
        "proposed_rename": checkpoint.proposed_rename(),
        "dialect": {
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
    use crate::checkpoint::Unsupported;

    #[test]
    fn bytes_for_readers() {
        let rows = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (102_400, "100 KiB"),
            (1 << 20, "1.0 MiB"),
            (5 << 30, "5.0 GiB"),
            (u64::MAX, "16383 PiB"),
        ];
        for (bytes, expected) in rows {
            assert_eq!(human_bytes(bytes), expected);
        }
        assert_eq!((percent(1, 8), percent(0, 0)), ("12.5 %".to_owned(), "0.0 %".to_owned()));
    }

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
                    unsupported: vec![Unsupported { method: "hqq".into(), tensors: 3, example: None }],
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
