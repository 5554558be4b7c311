//! The report as text.

use std::{collections::BTreeMap, fmt::Write};

use ckfs_checkpoint::{Checkpoint, Container, FileRole, LeftOut, printable};

use super::{
    super::{
        Amplification, HfContent, Layout, NameGroup, Plan, PlannedTensor, name_group::ranges, numbered::Numbered,
        select,
    },
    advice::{advice, by_factor, exceeds, reasons},
    effects::{AxisEffect, axis_effects, bytes_per_device, factor, groups, human_bytes, percent, reads_text},
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
/// Devices on a line with their coordinates.
const COORDINATES_IN_LINE: usize = 4;

/// Writes a line of a report, under a key.
type Line<'a> = dyn FnMut(&str, &str) + 'a;

/// Writes a line of a report to a text.
fn write_line(text: &mut String, key: &str, value: &str) {
    if !value.is_empty() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{key:<10}  {}", printable(value));
    }
}

/// The first lines of a list, each under this key, and how many more there are.
fn list(line: &mut Line<'_>, key: &str, shown: usize, texts: impl ExactSizeIterator<Item = String>) {
    let more = texts.len().saturating_sub(shown);
    texts.take(shown).for_each(|text| line(key, &text));
    if more > 0 {
        line("", &format!("and {more} more"));
    }
}

/// Lines of which only the first has the key.
fn block(line: &mut Line<'_>, key: &str, texts: &[String]) {
    texts.iter().enumerate().for_each(|(index, text)| line(if index == 0 { key } else { "" }, text));
}

/// Number of tensors, with the word.
pub(super) fn tensors_text(count: u64) -> String {
    format!("{count} tensor{}", if count == 1 { "" } else { "s" })
}

/// Number of tensors with these names.
pub(super) fn count_of(groups: &[NameGroup]) -> u64 {
    groups.iter().map(|group| group.count).sum()
}

/// Whether layers are stacked, where not the layout's own rules decide it.
pub(super) fn layers_text(plan: &Plan) -> &'static str {
    match (&plan.layout, plan.unscanned) {
        (Layout::Gguf | Layout::Stored | Layout::Embedded(_) | Layout::File(_), _) => "",
        (Layout::Canonical | Layout::Hf, true) => ", layers unscanned",
        (Layout::Canonical | Layout::Hf, false) => ", layers scanned",
    }
}

/// What only some of the mesh's devices are listed for.
pub(super) fn listed_text(plan: &Plan) -> String {
    let listed = plan.devices.len() as u64;
    if listed == plan.mesh.devices() { String::new() } else { format!(", {listed} listed") }
}

/// Lines about the excess reads of devices, if there are any: one per group of devices that are alike, one for all
/// devices, and one for the worst tensors.
fn over_read_text(checkpoint: &Checkpoint, plan: &Plan) -> Vec<String> {
    let amplification = Amplification::of(checkpoint, plan);
    if !amplification.devices.iter().any(|reads| exceeds(*reads)) {
        return Vec::new();
    }
    let groups = by_factor(plan, amplification);
    let mut lines: Vec<String> = groups
        .values()
        .rev()
        .take(DEVICES_SHOWN)
        .map(|(reads, devices)| {
            let each = if devices.len() > 1 { " each" } else { "" };
            format!("dev{}:{each} {}", ranges(devices), reads_text(*reads))
        })
        .collect();
    if groups.len() > DEVICES_SHOWN {
        lines.push(format!("and {} more", groups.len() - DEVICES_SHOWN));
    }
    if plan.devices.len() > 1 {
        lines.push(format!("all listed devices together: {}", reads_text(amplification.union)));
    }
    let worst = amplification.tensors.iter().filter(|(_, reads)| exceeds(*reads)).take(TENSORS_SHOWN);
    let worst: Vec<String> = worst.map(|(name, reads)| format!("{name} {} times", factor(*reads))).collect();
    if !worst.is_empty() {
        lines.push(format!("most by {}", worst.join(", ")));
    }
    let reasons = reasons(checkpoint, plan, amplification);
    // Tensors of one kind have one cause.
    let mut causes: Numbered<String, Vec<&str>> = Numbered::default();
    for reason in &reasons {
        causes.entry(reason.text()).or_default().push(&reason.name);
    }
    lines.extend(causes.iter().map(|(cause, names)| format!("why: of {}, {cause}", names.join(", "))));
    lines.extend(advice(plan, amplification, &reasons).into_iter().map(|line| format!("advice: {line}")));
    lines
}

/// The devices with their coordinates, a few on a line: the first ones, and the last one.
fn coordinates_text(plan: &Plan) -> Vec<String> {
    let coordinates = |device: &u64| format!("dev{device} = {}", plan.mesh.path(*device).join(","));
    let mut lines: Vec<String> = plan
        .devices
        .chunks(COORDINATES_IN_LINE)
        .take(DEVICES_SHOWN / COORDINATES_IN_LINE)
        .map(|devices| devices.iter().map(coordinates).collect::<Vec<_>>().join("  "))
        .collect();
    if let Some(last) = plan.devices.last().filter(|_| plan.devices.len() > DEVICES_SHOWN) {
        lines.push(format!("and {} more, the last one {}", plan.devices.len() - DEVICES_SHOWN, coordinates(last)));
    }
    lines
}

/// The repository, as the first lines of a report.
fn source_text(checkpoint: &Checkpoint) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: &str| write_line(&mut text, key, value);
    line("source", checkpoint.label());
    line("files in", &checkpoint.root().display().to_string());
    line("average", &checkpoint.averaged().unwrap_or_default());
    line("revision", checkpoint.revision().unwrap_or_default());
    line("dialect", &checkpoint.dialect().to_string());
    for detail in checkpoint.dialect().describe().lines() {
        line("", detail);
    }
    container_text(checkpoint, &mut line);
    let ignored = checkpoint.files().iter().filter_map(|file| match &file.role {
        FileRole::Ignored(reason) => Some(format!("{}: {reason}", file.path)),
        FileRole::Weights | FileRole::Other => None,
    });
    let ignored: Vec<String> = ignored.collect();
    list(&mut line, "left out", FILES_SHOWN, ignored.into_iter());
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
    let splits = |index: usize| plan.bundle().any(|tensor| plan.distributes(tensor, index));
    let axes: Vec<String> = (0..plan.mesh.axes().len())
        .filter(|index| plan.mesh.axes()[*index].size > 1 && splits(*index))
        .map(|index| format!("{}={}", plan.mesh.axes()[index].name, plan.mesh.axes()[index].size))
        .collect();
    if axes.is_empty() {
        return "orbax/ and dcp/ hold each tensor in one chunk: a trainer that shards reads more than its own part; mount with its --mesh"
            .to_owned();
    }
    format!(
        "orbax/ and dcp/ are cut for {}: a trainer with that mesh, or with sizes that divide it, reads only its own chunks; others \
         read more",
        axes.join(",")
    )
}

/// What the container of the tensors is, where it is not safetensors: what it holds besides, and the prefix of the names.
fn container_text(checkpoint: &Checkpoint, line: &mut Line<'_>) {
    let boxes: usize = checkpoint.tensors().filter_map(|(_, info)| Some(info.mosaic()?.ids().len())).sum();
    if checkpoint.container() != Container::Safetensors {
        let stored = if boxes == 0 { String::new() } else { format!(", some of the tensors in {boxes} boxes") };
        line("container", &format!("{}{stored}", checkpoint.container()));
    }
    let left_out = &checkpoint.opened.contents.left_out;
    // Those of Orbax are tensors; the lines of each view list them.
    if !left_out.is_empty() && checkpoint.container() != Container::Orbax {
        line("no tensors", &format!("{} members of the checkpoint are not shown:", left_out.len()));
        list(line, "", NAMES_SHOWN, left_out.iter().map(|LeftOut { name, kind }| format!("{name}: {kind}")));
    }
    let objects = &checkpoint.opened.contents.tree.objects;
    if !objects.is_empty() {
        let (what, way) =
            if checkpoint.container() == Container::Orbax { ("files", "orbax") } else { ("members", "dcp") };
        line("no tensors", &format!("{} {what} pass through {way}/ as they are stored:", objects.len()));
        list(line, "", NAMES_SHOWN, objects.keys().cloned());
    }
    if let Some((rule, _)) = checkpoint.proposed_rename() {
        line("prefix", &format!("--source-rename '{rule}' would give the names of a repository of Hugging Face"));
    }
}

/// The names that the layout and flags leave out, by tower or layers, or else one by one.
fn left_out_text(plan: &Plan, line: &mut Line<'_>) {
    let mut roots: BTreeMap<String, u64> = BTreeMap::new();
    for group in &plan.left_out {
        *roots.entry(select::root(&group.name)).or_default() += group.count;
    }
    if plan.left_out.is_empty() {
        return;
    }
    line("left out", &format!("{} tensors of the repository:", count_of(&plan.left_out)));
    list(line, "", NAMES_SHOWN, roots.iter().map(|(root, count)| format!("{root} ({})", tensors_text(*count))));
}

/// The mesh, its devices with their coordinates, and what each axis splits.
fn mesh_text(plan: &Plan, line: &mut Line<'_>) {
    let total: u64 = plan.bundle().map(PlannedTensor::bytes).sum();
    let count = plan.bundle().count();
    let mesh = if plan.mesh.axes().is_empty() { "none".to_owned() } else { plan.mesh.to_string() };
    line("mesh", &format!("{mesh}: {} devices{}", plan.mesh.devices(), listed_text(plan)));
    if !plan.mesh.axes().is_empty() {
        block(line, "devices", &coordinates_text(plan));
    }
    for AxisEffect { name, size, tensors_split: tensors, bytes_split, rule } in axis_effects(plan) {
        let part = percent(bytes_split, total);
        line("", &format!("{name}={size} splits {tensors} of {count} tensors, {part} of the bytes ({rule})"));
    }
}

/// What each listed device holds of all `total_bytes`.
fn devices_text(plan: &Plan, total_bytes: u64, line: &mut Line<'_>) {
    let per_device = bytes_per_device(plan);
    let (least, most) = (per_device.iter().min().copied().unwrap_or(0), per_device.iter().max().copied().unwrap_or(0));
    if human_bytes(least) == human_bytes(most) {
        line("per device", &format!("{} ({})", human_bytes(most), percent(most, total_bytes)));
    } else {
        line("per device", &format!("{} to {}", human_bytes(least), human_bytes(most)));
        let held = plan.devices.iter().zip(per_device);
        let text = |(device, bytes)| format!("dev{device}: {} ({})", human_bytes(bytes), percent(bytes, total_bytes));
        list(line, "", DEVICES_SHOWN, held.map(text));
    }
}

/// The names that are missing or unexpected, and the differences between layers.
fn findings_text(plan: &Plan, line: &mut Line<'_>) {
    list(line, "missing", NAMES_SHOWN, plan.missing.iter().map(ToString::to_string));
    list(line, "unexpected", NAMES_SHOWN, plan.unexpected.iter().map(ToString::to_string));
    for hole in plan.holes.iter().take(NAMES_SHOWN) {
        line("layers", &hole.to_string());
    }
    if plan.holes.len() > NAMES_SHOWN {
        line("", &format!("and {} more differences between layers", plan.holes.len() - NAMES_SHOWN));
    }
}

/// The tensors as a table, a row for each group of names.
fn table_text(plan: &Plan, text: &mut String) {
    let groups = groups(plan);
    let heading = ["tensor", "count", "dtype", "shape", "spec"].map(str::to_owned);
    let table: Vec<_> = std::iter::once(heading)
        .chain(groups.iter().take(GROUPS_SHOWN).map(|group| {
            let view = &group.first().view;
            let spec = plan.spec(group.first()).to_json(view.shape().rank(), &plan.mesh).to_string();
            let spec = spec.replace("null", "-").replace('"', "");
            [
                printable(&group.name).into_owned(),
                group.members.len().to_string(),
                view.dtype().to_string(),
                view.shape().to_string(),
                spec,
            ]
        }))
        .collect();
    rows(text, &table);
    if groups.len() > GROUPS_SHOWN {
        let _ = writeln!(text, "  and {} more", groups.len() - GROUPS_SHOWN);
    }
}

/// One view, without the lines that are the same for all views of a source.
pub fn view_text(checkpoint: &Checkpoint, plan: &Plan) -> String {
    let mut text = String::new();
    let mut line = |key: &str, value: &str| write_line(&mut text, key, value);
    let total: u64 = plan.bundle().map(PlannedTensor::bytes).sum();
    let count = plan.bundle().count();
    let family = plan.family.as_deref().map_or_else(|| "family not known".to_owned(), |name| format!("family {name}"));
    line("layout", &format!("{}, {family}{}", plan.layout.name(), layers_text(plan)));
    if !plan.params.is_empty() {
        let params: Vec<String> = plan.params.iter().map(|(name, value)| format!("{name}={value}")).collect();
        line("", &format!("parameters {}", params.join(", ")));
    }
    line("dtype", &plan.dtype.map_or_else(|| "as stored".to_owned(), |dtype| format!("{dtype} for all floats")));
    kept_text(plan, &mut line);
    line("decoded", &decoded_text(plan));
    line("dropped", &named_text(&plan.dropped, "which no decoder reads"));
    line("merged", &plan.merged.as_ref().map(ToString::to_string).unwrap_or_default());
    quantized_text(plan, &mut line);
    mesh_text(plan, &mut line);
    line("whole", &whole_text(plan));
    line("tensors", &format!("{count}, {} unsharded; {} raw files per device", human_bytes(total), plan.tensors.len()));
    devices_text(plan, total, &mut line);
    block(&mut line, "over-read", &over_read_text(checkpoint, plan));
    line("chunks", &chunks_text(plan));
    let converted = plan.hf.iter().filter(|file| !matches!(file.content, HfContent::Original(_))).count();
    line("hf/", &format!("{} files, {converted} of them rewritten", plan.hf.len()));
    findings_text(plan, &mut line);
    left_out_text(plan, &mut line);
    for warning in &plan.warnings {
        line("warning", warning);
    }
    let _ = writeln!(text);
    table_text(plan, &mut text);
    text
}

/// The whole report: the source, then each view under its name.
pub fn text<'a>(checkpoint: &Checkpoint, views: impl IntoIterator<Item = (&'a str, &'a Plan)>) -> String {
    let mut text = source_text(checkpoint);
    for (name, plan) in views {
        text.push('\n');
        if !name.is_empty() {
            write_line(&mut text, "view", name);
        }
        text.push_str(&view_text(checkpoint, plan));
    }
    text
}

/// What a dtype for all floats spares, and where.
fn kept_text(plan: &Plan, line: &mut Line<'_>) {
    let why = "as stored, float32 in the model's own code";
    line("kept", &named_text(&plan.kept, why));
    if !plan.kept_hf.is_empty() && plan.kept_hf != plan.kept {
        line("kept", &format!("in hf/ {}", named_text(&plan.kept_hf, why)));
    }
}

/// What every device holds whole, and why.
fn whole_text(plan: &Plan) -> String {
    let why = if plan.whole.is_known {
        "on every device, buffers, which FSDP2 does not split"
    } else {
        "on every device, single numbers and usual names of buffers in a model that is not known (--shard splits them)"
    };
    named_text(&plan.whole.names, why)
}

/// How many tensors there are of these names, the remark about them, and the names.
fn named_text(groups: &[NameGroup], what: &str) -> String {
    let listed: Vec<&str> = groups.iter().take(NAMES_SHOWN).map(|group| group.name.as_str()).collect();
    if listed.is_empty() {
        return String::new();
    }
    let more = groups.len() - listed.len();
    let more = if more == 0 { String::new() } else { format!(" and {more} more groups") };
    format!("{} {what}: {}{more}", tensors_text(count_of(groups)), listed.join(", "))
}

/// What is quantized on read, by kind, and what is not, by reason.
fn quantized_text(plan: &Plan, line: &mut Line<'_>) {
    let Some(chosen) = &plan.quantized else { return };
    line("quantized", &chosen.scheme);
    for (kind, _, groups) in &chosen.quantized {
        line("", &named_text(groups, &format!("of {}", kind.word())));
    }
    for (left, _, groups) in &chosen.left {
        line("", &named_text(groups, &format!("as they are ({left})")));
    }
}

/// What is decoded, and how much of it there is.
fn decoded_text(plan: &Plan) -> String {
    let rows =
        plan.decoded.iter().map(|row| format!("{} {} tensors, {}", row.tensors, row.scheme, human_bytes(row.bytes)));
    let rows: Vec<String> = rows.collect();
    let kept = if plan.kept_raw == 0 || rows.is_empty() {
        String::new()
    } else {
        format!("; {} shown as stored", plan.kept_raw)
    };
    format!("{}{kept}", rows.join("; "))
}
