//! Settings without effect: mesh axes that split nothing, patterns that match nothing.

use std::collections::BTreeSet;

use ckfs_checkpoint::Checkpoint;

use super::super::{
    AxisUse, Draft, LogicalRules, Pattern, Problem, Sharding, ViewOptions, axis_use, name_group, quantize, shard,
};

/// Finds mesh axes that split nothing and are not meant to. Proposes the name that is probably meant.
pub(crate) fn mesh_axes(
    options: &ViewOptions,
    rules: Option<&LogicalRules>,
    drafts: &[Draft],
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<String>,
) {
    let is_auto = options.sharding == Sharding::Auto;
    for axis in options.mesh.axes().iter().filter(|axis| axis.size > 1) {
        let mut in_rules = options.shard_rules.iter().flat_map(|rule| rule.spec.iter().flatten());
        let of_stages = axis.name == shard::STAGE_AXIS && drafts.iter().any(|draft| draft.roles.stage.is_some());
        let is_used = of_stages || in_rules.any(|name| *name == axis.name);
        let splits = match rules {
            Some(rules) => is_used || rules.uses(&axis.name),
            None => is_used || (is_auto && splits(axis_use(&axis.name), drafts)),
        };
        let may_replicate = axis_use(&axis.name) == AxisUse::Replicate || (rules.is_none() && !is_auto);
        if options.replicate.contains(&axis.name) {
            if splits {
                let reason =
                    format!("mesh axis {:?} splits tensors: rename it, or give own rules by --shard", axis.name);
                problems.push(Problem::File { file: "replicate".to_owned(), reason });
            }
            continue;
        }
        if splits || may_replicate {
            continue;
        }
        let reason = match (rules, axis_use(&axis.name)) {
            (None, AxisUse::Expert) if is_part(options) => {
                warnings.push(format!("mesh axis {:?} splits nothing: no expert is among the tensors", axis.name));
                continue;
            }
            (None, AxisUse::Expert) => {
                "it splits nothing, as the model has no experts that the layout knows".to_owned()
            }
            (None, AxisUse::Tensor) => {
                warnings
                    .push(format!("mesh axis {:?} splits nothing: every device along it holds the same", axis.name));
                continue;
            }
            _ => {
                let meant = meant(&axis.name, options, rules);
                let of_roles =
                    shard::KNOWN_AXES.iter().filter(|(_, axis_use)| is_auto && self::splits(*axis_use, drafts));
                let axes: BTreeSet<&str> = match rules {
                    Some(rules) => rules.mesh_axes().collect(),
                    None => of_roles.filter_map(|(names, _)| names.first().copied()).collect(),
                };
                let axes: Vec<&str> = axes.into_iter().filter(|name| options.mesh.find(name).is_none()).collect();
                let other = || {
                    (!axes.is_empty())
                        .then(|| format!("; the layout splits by {}, as in {}={}", axes.join(", "), axes[0], axis.size))
                };
                let meant = meant.map(|meant| format!("; did you mean {meant:?}?")).or_else(other).unwrap_or_default();
                format!("no rule splits by it{meant}")
            }
        };
        let name = &axis.name;
        problems.push(Problem::Request(format!(
            "mesh axis {name:?}: {reason} (--replicate {name} if every device along it is to hold the same)"
        )));
    }
    for axis in options.replicate.iter().filter(|axis| options.mesh.find(axis).is_none()) {
        warnings.push(format!("replicate: the mesh has no axis {axis:?}"));
    }
}

/// Whether only a part of the tensors was requested.
fn is_part(options: &ViewOptions) -> bool {
    let subset = &options.subset;
    !subset.include.is_empty() || !subset.exclude.is_empty() || subset.layers.is_some()
}

/// Whether a mesh axis of this effect splits any tensor.
fn splits(axis_use: AxisUse, drafts: &[Draft]) -> bool {
    match axis_use {
        AxisUse::Expert => drafts.iter().any(|draft| draft.roles.experts.is_some() || draft.roles.expert.is_some()),
        AxisUse::Tensor => drafts.iter().any(|draft| draft.roles.tp.is_some()),
        AxisUse::FullyShard => true,
        AxisUse::Replicate | AxisUse::Unknown => false,
    }
}

/// The name of a mesh axis that is probably meant by an unknown one: a known one that is nearly the same, or one of the effect
/// that the name has in another program. Not one that the mesh has already.
fn meant(name: &str, options: &ViewOptions, rules: Option<&LogicalRules>) -> Option<String> {
    let of_rules = options.shard_rules.iter().flat_map(|rule| rule.spec.iter().flatten());
    let mut known: BTreeSet<&str> = of_rules.map(String::as_str).collect();
    match rules {
        Some(rules) => known.extend(rules.mesh_axes().chain(["data"])),
        None => known.extend(shard::KNOWN_AXES.iter().flat_map(|(names, _)| *names)),
    }
    let is_free = |known: &&str| options.mesh.find(known).is_none();
    let bare = shard::bare_axis(name);
    let foreign = |name: &str| {
        let lower = name.to_ascii_lowercase();
        let rows = shard::FOREIGN_AXES.iter().chain(&shard::KNOWN_AXES);
        rows.clone().find(|(names, _)| names.contains(&lower.as_str())).map(|(_, axis_use)| *axis_use)
    };
    let same =
        known.iter().copied().filter(is_free).find(|known| *known == bare || *known == bare.to_ascii_lowercase());
    let near = || known.iter().copied().filter(is_free).find(|known| name_group::is_misspelt(name, known));
    let same_effect = || {
        let wanted = foreign(bare).or_else(|| foreign(name))?;
        let row = shard::KNOWN_AXES.iter().find(|(_, axis_use)| *axis_use == wanted)?;
        row.0.iter().copied().filter(is_free).find(|name| known.contains(name))
    };
    same.or_else(near).or_else(same_effect).map(str::to_owned)
}

pub(crate) fn patterns(checkpoint: &Checkpoint, options: &ViewOptions, drafts: &[Draft], warnings: &mut Vec<String>) {
    let mut warn = |rule: &str, pattern: &Pattern| {
        let stored = checkpoint.tensors().map(|(_, info)| info.name);
        let names = drafts.iter().map(|draft| draft.name.as_str()).chain(stored);
        warnings.push(name_group::matches_none(rule, pattern, names));
    };
    for rule in &options.shard_rules {
        if !drafts.iter().any(|draft| rule.pattern.matches(&draft.name)) {
            warn("shard", &rule.pattern);
        }
    }
    let is_hit = |pattern: &Pattern, of: fn(&str) -> &str| {
        let matches = |name: &str| pattern.matches(name) || pattern.matches(of(name));
        drafts.iter().any(|draft| matches(&draft.name)) || checkpoint.tensors().any(|(_, info)| matches(info.name))
    };
    for rule in options.casts.iter().filter(|rule| !is_hit(&rule.pattern, |name| name)) {
        warn("cast", &rule.pattern);
    }
    for (flag, patterns) in [("ignore", &options.quantize_ignore), ("only", &options.quantize_only)] {
        for pattern in patterns.iter().filter(|pattern| !is_hit(pattern, quantize::module)) {
            warn(&format!("quantize_{flag}"), pattern);
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
pub(crate) fn logical_rules(options: &ViewOptions, apply: bool, drafts: &[Draft], warnings: &mut Vec<String>) {
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
