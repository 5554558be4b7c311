//! Facts about a checkpoint before planning: its family, the listed devices, missing layers.

use std::collections::BTreeSet;

use super::super::{
    family::{self, Family},
    options::ViewOptions,
    problem::{PlanError, Problem},
};
use crate::{checkpoint::Checkpoint, config::DEVICES_LISTED_MAX};

pub(in crate::plan) fn family_problem(error: &family::FamilyError) -> PlanError {
    Problem::File { file: error.family.clone(), reason: error.reason.clone() }.into()
}

pub(in crate::plan) fn family(checkpoint: &Checkpoint) -> Result<Option<Family>, PlanError> {
    let dialect = checkpoint.dialect();
    for model_type in [&dialect.model_type, &dialect.text_model_type].into_iter().flatten() {
        if let Some(family) = Family::of_model_type(model_type).map_err(|error| family_problem(&error))? {
            return Ok(Some(family));
        }
    }
    Ok(None)
}

pub(in crate::plan) fn devices(options: &ViewOptions, problems: &mut Vec<Problem>) -> Vec<u64> {
    let devices = options.mesh.devices();
    let count = options.devices.as_ref().map_or(devices, |listed| listed.len() as u64);
    if count > DEVICES_LISTED_MAX {
        problems.push(Problem::Devices { mesh: options.mesh.to_string(), count });
        return Vec::new();
    }
    let Some(listed) = &options.devices else { return (0..devices).collect() };
    let mut listed = listed.clone();
    listed.sort_unstable();
    listed.dedup();
    problems.extend(
        listed.iter().filter(|device| **device >= devices).map(|device| Problem::Device { device: *device, devices }),
    );
    listed
}

/// Most missing layers of one family that are listed.
pub(in crate::plan) const MISSING_MAX: usize = 1000;

/// Finds missing layers. If the configuration of a known model counts its layers, a missing one is a problem. Any other
/// gap (in a part of a repository, or an adapter) is only a warning.
pub(in crate::plan) fn missing_layers(
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
