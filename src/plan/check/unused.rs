//! Settings without effect: mesh axes that split nothing, patterns that match nothing.

use std::collections::BTreeSet;

use super::super::{
    AxisUse, Draft, LogicalRules, Pattern, Problem, Sharding, ViewOptions, axis_use, name_group, shard,
};
use crate::checkpoint::Checkpoint;

/// Finds mesh axes that split nothing. A name near to that of another axis that splits is taken for a slip.
pub(in crate::plan) fn mesh_axes(
    options: &ViewOptions,
    rules: Option<&LogicalRules>,
    drafts: &[Draft],
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<String>,
) {
    let of_rules = options.shard_rules.iter().flat_map(|rule| rule.spec.iter().flatten());
    let mut known: BTreeSet<&str> = of_rules.map(String::as_str).collect();
    match rules {
        Some(rules) => known.extend(rules.mesh_axes()),
        None => known.extend(shard::KNOWN_AXES.iter().flat_map(|(names, _)| *names)),
    }
    for axis in options.mesh.axes() {
        let mut in_rules = options.shard_rules.iter().flat_map(|rule| rule.spec.iter().flatten());
        let unknown = match (options.sharding, rules) {
            (_, Some(rules)) => !rules.uses(&axis.name) && axis_use(&axis.name) != AxisUse::Replicate,
            (Sharding::Auto, None) => axis_use(&axis.name) == AxisUse::Unknown,
            (Sharding::Logical | Sharding::Replicate, None) => false,
        };
        let of_stages = axis.name == shard::STAGE_AXIS && drafts.iter().any(|draft| draft.roles.stage.is_some());
        if !unknown || of_stages || axis.size == 1 || in_rules.any(|name| *name == axis.name) {
            continue;
        }
        let near = known.iter().find(|known| name_group::is_misspelt(&axis.name, known));
        if let Some(near) = near.filter(|near| options.mesh.find(near).is_none()) {
            let (axis, near) = (axis.name.clone(), (*near).to_owned());
            problems.push(Problem::MeshAxis { axis, near });
        } else {
            warnings.push(format!("mesh axis {:?} splits nothing: every tensor is replicated along it", axis.name));
        }
    }
}

pub(in crate::plan) fn patterns(
    checkpoint: &Checkpoint,
    options: &ViewOptions,
    drafts: &[Draft],
    warnings: &mut Vec<String>,
) {
    let mut warn = |rule, pattern: &Pattern| {
        let stored = checkpoint.tensors().map(|(_, info)| info.name);
        let hint = name_group::near_pattern(pattern, drafts.iter().map(|draft| draft.name.as_str()).chain(stored));
        warnings.push(Problem::UnusedPattern { rule, pattern: pattern.text().to_owned(), hint }.to_string());
    };
    for rule in &options.shard_rules {
        if !drafts.iter().any(|draft| rule.pattern.matches(&draft.name)) {
            warn("shard", &rule.pattern);
        }
    }
    for rule in &options.casts {
        let hit = drafts.iter().any(|draft| rule.pattern.matches(&draft.name))
            || checkpoint.tensors().any(|(_, info)| rule.pattern.matches(info.name));
        if !hit {
            warn("cast", &rule.pattern);
        }
    }
    absent_axes("sharding", options.shard_rules.iter().flat_map(|rule| rule.spec.iter().flatten()), options, warnings);
}

/// Warns of mesh axes that rules name and the mesh does not have.
fn absent_axes<'a>(
    kind: &str,
    named: impl Iterator<Item = &'a String>,
    options: &ViewOptions,
    warnings: &mut Vec<String>,
) {
    // Without a mesh nothing is split in any case.
    let absent: BTreeSet<&String> = named.filter(|axis| options.mesh.find(axis).is_none()).collect();
    for axis in absent.into_iter().filter(|_| !options.mesh.axes().is_empty()) {
        warnings.push(format!("{kind} rules name the mesh axis {axis:?}, which the mesh does not have"));
    }
}

/// Warns of the user's rules for logical axes that have no effect.
pub(in crate::plan) fn logical_rules(options: &ViewOptions, apply: bool, drafts: &[Draft], warnings: &mut Vec<String>) {
    let rules = &options.logical_rules;
    if !apply {
        if !rules.is_empty() {
            warnings.push("the logical rules change nothing: shards do not come from logical axes here".to_owned());
        }
        return;
    }
    for rule in rules.iter().filter(|rule| !drafts.iter().any(|draft| draft.roles.logical.contains(&rule.logical))) {
        warnings.push(format!("logical rule: no tensor has an axis {:?}", rule.logical));
    }
    absent_axes("logical", rules.iter().flat_map(|rule| &rule.mesh), options, warnings);
}
