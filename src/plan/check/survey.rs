//! Facts about a checkpoint before planning: the listed devices, missing layers.

use std::collections::BTreeSet;

use ckfs_checkpoint::{Checkpoint, first_names};
use ckfs_config::DEVICES_LISTED_MAX;

use super::super::{family::Family, name_group::ranges, naming, options::ViewOptions, problem::Problem};

pub(crate) fn devices(options: &ViewOptions, problems: &mut Vec<Problem>) -> Vec<u64> {
    let devices = options.mesh.devices();
    let count = options.devices.as_ref().map_or(devices, |listed| listed.len() as u64);
    if count > DEVICES_LISTED_MAX {
        problems.push(Problem::Request(format!(
            "mesh {}: {count} devices are to be listed, at most {DEVICES_LISTED_MAX} can be; list this host's own, for example with \
             --devices 8-15",
            options.mesh
        )));
        return Vec::new();
    }
    let Some(listed) = &options.devices else { return (0..devices).collect() };
    let mut listed = listed.clone();
    listed.sort_unstable();
    listed.dedup();
    if listed.iter().any(|device| *device >= devices) {
        let there_are = if options.mesh.axes().is_empty() {
            "there is no --mesh, so there is one device, 0".to_owned()
        } else {
            format!("mesh {} has {devices} devices, 0 to {}", options.mesh, devices - 1)
        };
        let listed = ranges(&listed);
        problems.push(Problem::Request(format!("--devices {listed}: {there_are}")));
    }
    listed
}

/// Most missing layers of one family that are listed.
pub(crate) const MISSING_MAX: usize = 1000;

/// Refuses a repository whose configuration counts layers and of whose tensors none has the number of one: the names are of another
/// program, or the layers are not there.
pub(crate) fn no_layers(checkpoint: &Checkpoint, options: &ViewOptions, problems: &mut Vec<Problem>) {
    let Some(declared) = checkpoint.dialect().declared_layers.filter(|layers| *layers > 0) else { return };
    let mut names = checkpoint.tensors().map(|(_, info)| info.name);
    if names.any(naming::has_number) || options.allow_missing.accepts("layers.0.") {
        return;
    }
    problems.push(unlike(checkpoint, &format!("promises {declared} layers, and no tensor has the name of one")));
}

/// The problem of a repository whose tensors have not the names of the model in its configuration. `lacks` says what is not there.
pub(crate) fn unlike(checkpoint: &Checkpoint, lacks: &str) -> Problem {
    const SHOWN: usize = 3;
    let names: Vec<&str> = checkpoint.tensors().map(|(_, info)| info.name).collect();
    let found = first_names(&names, SHOWN);
    let of = checkpoint.companion().map_or_else(String::new, |companion| format!(" of {}", companion.label));
    let reason = format!(
        "{lacks}: found {found}. The file{of} is that of another model, or the names are those of another program: \
         --source-rename 'REGEX=>TO' mends names, --layout stored shows the tensors as they are, --allow-missing accepts a part of \
         a model"
    );
    Problem::File { file: "config.json".to_owned(), reason }
}

/// Finds missing layers. If the configuration of a known model counts its layers, a missing one is a problem. Any other
/// gap (in a part of a repository, or an adapter) is only a warning.
pub(crate) fn missing_layers(
    checkpoint: &Checkpoint,
    known: Option<&Family>,
    options: &ViewOptions,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<String>,
) {
    let dialect = checkpoint.dialect();
    for family in &dialect.families {
        let is_text = known.is_some_and(|known| known.prefixes.contains(&family.prefix));
        let declared = if is_text { dialect.declared_layers.unwrap_or(0) } else { 0 };
        let count = family.last.saturating_add(1).max(declared);
        if family.layers == count {
            continue;
        }
        let name = format!("{}{}", family.prefix, family.word);
        let stem = format!("{name}.");
        let number = |rest: &str| rest.split('.').next().and_then(|number| number.parse::<u64>().ok());
        let present: BTreeSet<u64> =
            checkpoint.tensors().filter_map(|(_, info)| number(info.name.strip_prefix(&stem)?)).collect();
        let wanted =
            |layer: &u64| options.subset.layers.as_ref().is_none_or(|layers| !is_text || layers.contains(*layer));
        let absent = (0..count).filter(|layer| !present.contains(layer)).take(MISSING_MAX).filter(wanted);
        let accepted = |layer: &u64| *layer >= declared || options.allow_missing.accepts(&format!("{stem}{layer}."));
        let (allowed, refused): (BTreeSet<u64>, BTreeSet<u64>) = absent.partition(accepted);
        let problem = |layers| Problem::MissingLayers { family: name.clone(), layers, count };
        warnings.extend(Some(allowed).filter(|layers| !layers.is_empty()).map(|layers| problem(layers).to_string()));
        problems.extend(Some(refused).filter(|layers| !layers.is_empty()).map(problem));
    }
}
