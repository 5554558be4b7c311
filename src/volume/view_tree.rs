//! Which files a view has, and where they are in the tree.

use super::{
    tree::{BlockKind, FixedKind, Flavor, Names, OWN, Seedling},
    view_files::{Made, ORBAX_ITEM, ViewFiles},
};
use crate::{
    checkpoint::printable,
    image::distcp_name,
    plan::{HfContent, HfFile, Plan, Problem},
};

/// Name of the file that says why a format's directory is otherwise empty.
const UNAVAILABLE: &str = "UNAVAILABLE.txt";

/// Plants the directory of a format that cannot hold the view: it says why, and no loader takes it for a checkpoint.
fn plant_unavailable(directory: &mut Seedling, format: &str, reason: &str) {
    let reason = printable(reason);
    tracing::warn!("{format}/ is not available: {reason}");
    let text = format!("{format}/ is not available for this view: {reason}\n");
    if let Some(empty) = directory.directory(format) {
        empty.file(UNAVAILABLE, FixedKind::Text(text.into_bytes().into()));
    }
}

/// Plants the directories of one view.
pub(super) fn plant_view(directory: &mut Seedling, index: u32, files: &ViewFiles, problems: &mut Vec<Problem>) {
    let plan = &files.plan;
    let names = |device, flavor| (BlockKind::Names(Names { device, flavor }), files.tree(flavor).len());
    let (whole, len) = names(None, Flavor::Raw);
    directory.block("full", index, whole, len);
    for device in &plan.devices {
        let (shards, len) = names(Some(*device), Flavor::Raw);
        directory.block(&format!("dev{device}"), index, shards, len);
    }
    if let Some(npy) = directory.directory("npy") {
        for device in &plan.devices {
            let (shards, len) = names(Some(*device), Flavor::Npy);
            npy.block(&format!("dev{device}"), index, shards, len);
        }
    }
    let made = |made| FixedKind::Made { view: index, made };
    if let Some(bundles) = directory.directory("safetensors") {
        for device in &plan.devices {
            bundles.file(&format!("dev{device}.safetensors"), made(Made::Safetensors { device: *device }));
        }
        if files.has_safetensors_index() {
            bundles.file("model.safetensors.index.json", made(Made::SafetensorsIndex));
        }
    }
    plant_torch(directory, index, files);
    match files.arrays() {
        Ok(table) => {
            if let Some(step) = directory.directory("orbax").and_then(|orbax| orbax.directory("0")) {
                step.file("_CHECKPOINT_METADATA", made(Made::OrbaxStep));
                step.block(ORBAX_ITEM, index, BlockKind::Arrays, table.len());
            }
        }
        Err(reason) => plant_unavailable(directory, "orbax", reason),
    }
    if !plan.mesh.axes().is_empty()
        && let Some(mesh) = directory.directory("mesh")
    {
        for device in &plan.devices {
            let target = format!("../dev{device}").into_boxed_str();
            mesh.file(&plan.mesh.path(*device).join(","), FixedKind::Symlink(target));
        }
    }
    for (number, file) in plan.hf.iter().enumerate() {
        let (parents, name) = file.path.rsplit_once('/').unwrap_or(("", &file.path));
        let mut parents = std::iter::once("hf").chain(parents.split('/').filter(|parent| !parent.is_empty()));
        let parent = parents.try_fold(&mut *directory, |at, parent| at.directory(parent));
        if !parent.is_some_and(|parent| parent.file(name, made(Made::Hf(number)))) {
            let reason = "the name is taken by another file".to_owned();
            problems.push(Problem::Hf { path: file.path.clone(), reason });
        }
    }
    if plan.sharded_state {
        plant_sharded_state(directory, index, plan);
    }
    if let Some(own) = directory.directory(OWN) {
        own.file("manifest.json", made(Made::Manifest));
    }
}

/// Plants `sharded_state/`: the files of the ranks, and beside them what an engine reads from the same directory to know the
/// model and its tokenizer.
fn plant_sharded_state(directory: &mut Seedling, index: u32, plan: &Plan) {
    let Some(state) = directory.directory("sharded_state") else { return };
    for (rank, device) in plan.ranks() {
        let name = format!("model-rank-{rank}-part-0.safetensors");
        state.file(&name, FixedKind::Made { view: index, made: Made::ShardedState { device } });
    }
    for (number, file) in plan.hf.iter().enumerate().filter(|(_, file)| !file.path.contains('/') && !is_weights(file)) {
        state.file(&file.path, FixedKind::Made { view: index, made: Made::Hf(number) });
    }
}

/// Endings of files that hold weights or say where weights are.
const WEIGHT_ENDINGS: [&str; 8] = [".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"];

fn is_weights(file: &HfFile) -> bool {
    matches!(file.content, HfContent::Weights { .. }) || WEIGHT_ENDINGS.iter().any(|ending| file.path.ends_with(ending))
}

/// Plants `pt/` and `dcp/`. The latter is complete whatever devices are listed: any process may read any of it.
fn plant_torch(directory: &mut Seedling, index: u32, files: &ViewFiles) {
    if let Err(reason) = files.torch() {
        plant_unavailable(directory, "pt", reason);
        plant_unavailable(directory, "dcp", reason);
        return;
    }
    if let Err(reason) = files.dcp() {
        plant_unavailable(directory, "dcp", reason);
    }
    let made = |made| FixedKind::Made { view: index, made };
    if let Some(archives) = directory.directory("pt") {
        for device in &files.plan.devices {
            archives.file(&format!("dev{device}.pt"), made(Made::Pt { device: *device }));
        }
    }
    if files.dcp().is_ok()
        && let Some(dcp) = directory.directory("dcp")
    {
        for device in files.plan.first_holders() {
            dcp.file(&distcp_name(device), made(Made::Distcp { device }));
        }
        dcp.file(".metadata", made(Made::DcpMetadata));
        dcp.file("metadata.json", made(Made::MegatronMetadata));
        dcp.file("common.pt", made(Made::MegatronCommon));
    }
}
