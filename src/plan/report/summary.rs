//! The report in a dozen rows: what to know before a mount. [`super::text`] has all of it.

use ckfs_checkpoint::{Checkpoint, FileRole, first_names};

use super::{
    super::{Amplification, NameGroup, Plan, PlannedTensor, name_group::ranges, select},
    advice::{by_factor, exceeds},
    effects::{axis_effects, bytes_per_device, factor, human_bytes, percent},
    text::{count_of, layers_text, listed_text, tensors_text},
};

/// Names that a row lists.
const NAMES_SHOWN: usize = 3;

/// A row: what it is about, and what there is to say.
pub type SummaryRow = (&'static str, String);

/// The rows of a source and of its views, each under its name.
pub fn summary<'a>(checkpoint: &Checkpoint, views: impl IntoIterator<Item = (&'a str, &'a Plan)>) -> Vec<SummaryRow> {
    let mut rows = source_rows(checkpoint);
    for (name, plan) in views {
        if !name.is_empty() {
            rows.push(("view", name.to_owned()));
        }
        view_rows(checkpoint, plan, &mut rows);
    }
    rows.retain(|(_, text)| !text.is_empty());
    rows
}

fn source_rows(checkpoint: &Checkpoint) -> Vec<SummaryRow> {
    let mut rows = vec![("source", checkpoint.label().to_owned()), ("dialect", checkpoint.dialect().to_string())];
    rows.extend(checkpoint.averaged().map(|average| ("average", average)));
    let ignored = checkpoint.files().iter().filter(|file| matches!(file.role, FileRole::Ignored(_)));
    let names: Vec<&str> = ignored.map(|file| file.path.as_str()).collect();
    if !names.is_empty() {
        let files = if names.len() == 1 { "file" } else { "files" };
        rows.push(("left out", format!("{} {files}: {}", names.len(), first_names(&names, NAMES_SHOWN))));
    }
    rows
}

/// How many tensors have these names, and the first of them; empty if there are none.
fn named(before: &str, groups: &[NameGroup]) -> String {
    let names: Vec<&str> = groups.iter().map(|group| group.name.as_str()).collect();
    if names.is_empty() {
        return String::new();
    }
    format!("{before}{}: {}", tensors_text(count_of(groups)), first_names(&names, NAMES_SHOWN))
}

fn view_rows(checkpoint: &Checkpoint, plan: &Plan, rows: &mut Vec<SummaryRow>) {
    let total: u64 = plan.bundle().map(PlannedTensor::bytes).sum();
    let family = plan.family.as_deref().map_or_else(String::new, |name| format!(", family {name}"));
    let dtype = plan.dtype.map_or_else(|| "dtype as stored".to_owned(), |dtype| format!("{dtype} for all floats"));
    rows.push(("layout", format!("{}{family}{}; {dtype}", plan.layout.name(), layers_text(plan))));
    value_rows(plan, rows);
    rows.push(("mesh", mesh(plan, total)));
    rows.push(("whole", named("on every device, ", &plan.whole.names)));
    rows.push(("tensors", format!("{}, {} unsharded", plan.bundle().count(), human_bytes(total))));
    let held = bytes_per_device(plan);
    let (least, most) = (held.iter().min().copied().unwrap_or(0), held.iter().max().copied().unwrap_or(0));
    rows.push((
        "per device",
        // Those that differ by some bytes read as one number.
        if human_bytes(least) == human_bytes(most) {
            format!("{} ({})", human_bytes(most), percent(most, total))
        } else {
            format!("{} to {} ({})", human_bytes(least), human_bytes(most), percent(most, total))
        },
    ));
    rows.extend(over_read(checkpoint, plan).map(|text| ("over-read", text)));
    finding_rows(plan, rows);
}

/// What is decoded, quantized, kept or dropped.
fn value_rows(plan: &Plan, rows: &mut Vec<SummaryRow>) {
    rows.push(("kept", named("as stored, float32 in the model's own code, ", &plan.kept)));
    let decoded: Vec<String> =
        plan.decoded.iter().map(|row| format!("{} {} tensors", row.tensors, row.scheme)).collect();
    rows.push(("decoded", decoded.join(", ")));
    rows.push(("dropped", named("no decoder reads ", &plan.dropped)));
    rows.extend(plan.merged.as_ref().map(|merged| ("merged", merged.to_string())));
    if let Some(chosen) = &plan.quantized {
        let quantized: u64 = chosen.quantized.iter().map(|(_, _, groups)| count_of(groups)).sum();
        let left: u64 = chosen.left.iter().map(|(_, _, groups)| count_of(groups)).sum();
        rows.push(("quantized", format!("{}: {quantized} tensors; {left} as they are", chosen.scheme)));
    }
}

/// The mesh, and how much of the bytes each axis splits.
fn mesh(plan: &Plan, total: u64) -> String {
    if plan.mesh.axes().is_empty() {
        return "none: 1 device".to_owned();
    }
    let splits: Vec<String> = axis_effects(plan)
        .into_iter()
        .map(|axis| format!("{} splits {} of the bytes", axis.name, percent(axis.bytes_split, total)))
        .collect();
    format!("{}: {} devices{}; {}", plan.mesh, plan.mesh.devices(), listed_text(plan), splits.join(", "))
}

/// The devices with the most excess reads, and all listed ones together, if there are any.
fn over_read(checkpoint: &Checkpoint, plan: &Plan) -> Option<String> {
    let amplification = Amplification::of(checkpoint, plan);
    let groups = by_factor(plan, amplification);
    let (_, (worst, devices)) = groups.last_key_value().filter(|(_, (worst, _))| exceeds(*worst))?;
    let (_, (least, _)) = groups.first_key_value()?;
    let together = if plan.devices.len() > 1 {
        format!("; all listed devices together {} times", factor(amplification.union))
    } else {
        String::new()
    };
    let times = match (factor(*least), factor(*worst)) {
        (least, worst) if least == worst && devices.len() > 1 => format!("each device {worst} times in whole pages"),
        (least, worst) if least == worst => format!("dev{} {worst} times in whole pages", ranges(devices)),
        (least, worst) => {
            format!("{least} to {worst} times in whole pages, most dev{}", first_ranges(&ranges(devices)))
        }
    };
    Some(format!("{times}{together}"))
}

/// The first ranges of a list, and how many more there are.
fn first_ranges(ranges: &str) -> String {
    const SHOWN: usize = 6;
    let all: Vec<&str> = ranges.split(',').collect();
    let more = all.len().saturating_sub(SHOWN);
    let shown = all[..all.len() - more].join(",");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// Names that are missing, unexpected or left out, and differences between layers.
fn finding_rows(plan: &Plan, rows: &mut Vec<SummaryRow>) {
    rows.push(("missing", named("", &plan.missing)));
    rows.push(("unexpected", named("", &plan.unexpected)));
    if let [first, rest @ ..] = plan.holes.as_slice() {
        let more = if rest.is_empty() { String::new() } else { format!(", and {} more differences", rest.len()) };
        rows.push(("layers", format!("{first}{more}")));
    }
    if !plan.left_out.is_empty() {
        let mut roots: Vec<String> = plan.left_out.iter().map(|group| select::root(&group.name)).collect();
        roots.dedup();
        rows.push((
            "left out",
            format!("{} tensors of the repository: {}", count_of(&plan.left_out), first_names(&roots, NAMES_SHOWN)),
        ));
    }
}
