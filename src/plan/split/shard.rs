//! Sharding rules: from the meaning of axes, or from the user's rules, to specs.

use ckfs_config::{MeshAxis, ShardRule};

use super::super::{
    draft::{Draft, PartOf, Roles},
    logical::LogicalRules,
    mesh::Mesh,
    problem::Problem,
    spec::Spec,
};

/// How specs are chosen where no rule of the user's matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Sharding {
    /// By logical axes if the layout says so. Otherwise by the name of the mesh axis and the role of the tensor's axes.
    #[default]
    Auto,
    /// By logical axes: by the layout's rules, or by MaxText's if it has none.
    Logical,
    /// Nothing is split: every device holds everything.
    Replicate,
}

/// The effect of a mesh axis under [`Sharding::Auto`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AxisUse {
    /// Splits the expert axis.
    Expert,
    /// Splits by column or row, by the tensor's role.
    Tensor,
    /// Splits axis 0 of the unstacked tensor, inside the others.
    FullyShard,
    /// Splits nothing.
    Replicate,
    /// Splits nothing, because its name is not known.
    Unknown,
}

/// The effect of a mesh axis of this name under [`Sharding::Auto`].
pub(crate) fn axis_use(name: &str) -> AxisUse {
    KNOWN_AXES.iter().find(|(names, _)| names.contains(&name)).map_or(AxisUse::Unknown, |(_, axis_use)| *axis_use)
}

/// The axes of a mesh that have an effect, each with its number.
pub(crate) fn axes_of(mesh: &Mesh, wanted: AxisUse) -> impl Iterator<Item = (usize, &MeshAxis)> {
    mesh.axes().iter().enumerate().filter(move |(_, axis)| axis_use(&axis.name) == wanted)
}

/// Names of mesh axes, with the effect of each.
pub(crate) const KNOWN_AXES: [(&[&str], AxisUse); 4] = [
    (&["expert", "ep"], AxisUse::Expert),
    (&["tensor", "tp"], AxisUse::Tensor),
    (&["fsdp", "dp_shard"], AxisUse::FullyShard),
    (&["data", "replica", "dp_replicate", "dp", "diloco"], AxisUse::Replicate),
];

/// Names that other programs have for mesh axes, with the effect that they mean.
pub(crate) const FOREIGN_AXES: [(&[&str], AxisUse); 4] = [
    (&["experts", "expert_parallel", "expert_model_parallel", "moe", "moe_ep"], AxisUse::Expert),
    (&["model", "mp", "mdl", "model_parallel", "tensor_parallel", "tensor_model_parallel"], AxisUse::Tensor),
    (
        &[
            "fully_sharded",
            "fully_shard",
            "full_shard",
            "shard",
            "sharded",
            "zero",
            "zero3",
            "dp_shard_cp",
            "hsdp_shard",
        ],
        AxisUse::FullyShard,
    ),
    (
        &[
            "replicas",
            "replicate",
            "ddp",
            "batch",
            "data_parallel",
            "hsdp_replicate",
            "dp_rep",
            "world",
            "node",
            "nodes",
        ],
        AxisUse::Replicate,
    ),
];

/// A name without what MaxText's settings put around the names of axes: `ici_fsdp_parallelism` is the size of `fsdp`.
pub(crate) fn bare_axis(name: &str) -> &str {
    let inner = ["ici_", "dcn_"].iter().find_map(|start| name.strip_prefix(start)).unwrap_or(name);
    ["_parallelism", "_axis", "_size", "_dim"].iter().find_map(|end| inner.strip_suffix(end)).unwrap_or(inner)
}

/// Name of the mesh axis along which devices are stages of a pipeline, each with its own layers.
pub(crate) const STAGE_AXIS: &str = "pp";

fn auto(roles: &Roles, rank: usize, mesh: &Mesh) -> Spec {
    let mut spec = Spec::replicated();
    if roles.whole {
        return spec;
    }
    for wanted in [AxisUse::Expert, AxisUse::Tensor, AxisUse::FullyShard] {
        let axis = match wanted {
            AxisUse::Expert => roles.experts,
            AxisUse::Tensor => roles.tp,
            AxisUse::FullyShard => Some(roles.stacked),
            AxisUse::Replicate | AxisUse::Unknown => None,
        };
        let Some(axis) = axis.filter(|axis| *axis < rank) else { continue };
        axes_of(mesh, wanted).for_each(|(index, _)| spec.split(axis, index));
    }
    spec
}

/// Whether the user fully determines a draft's shards: by a rule that matches, or by a request to split nothing. Then
/// the tensor of a single expert is like any other, and not only on the devices that expert parallelism gives it to.
pub(crate) fn is_told(draft: &Draft, sharding: Sharding, rules: &[ShardRule]) -> bool {
    sharding == Sharding::Replicate || rules.iter().any(|rule| rule.pattern.matches(ruled_name(draft)))
}

/// The name that rules are about: that of the weight, for its codes and scales.
fn ruled_name(draft: &Draft) -> &str {
    draft.roles.part.as_ref().map_or(&draft.name, |part| &part.name)
}

/// The spec of a part of a quantized weight: that of the weight, if no cut falls inside a block. With `even` a weight with such a cut is
/// whole on every device.
///
/// # Errors
/// A cut is inside a block.
pub(crate) fn of_part(part: &PartOf, whole: &Spec, mesh: &Mesh, even: bool) -> Result<Spec, Problem> {
    let mut spec = Spec::replicated();
    for axis in 0..part.shape.rank() {
        let block = part.cuts[axis];
        if let Some(cut) = whole.cuts(axis, &part.shape, mesh).into_iter().find(|cut| !cut.is_multiple_of(block)) {
            if even {
                return Ok(Spec::replicated());
            }
            let reason = format!(
                "axis {axis} of {} is cut at {cut}, inside a block of {block} that shares a scale: expected cuts at multiples of {block}; \
                 take another mesh, leave the tensor whole by a rule of --shard or by --even, or leave it as it is by --quantize-ignore",
                part.shape
            );
            return Err(Problem::Tensor { name: part.name.clone(), reason });
        }
        if part.units[axis] > 0 {
            whole.mesh_axes(axis).for_each(|mesh_axis| spec.split(axis, mesh_axis));
        }
    }
    Ok(spec)
}

/// The spec of a draft, or of the weight that it is a part of.
///
/// # Errors
/// The rule that matches has more axes than the tensor, or uses a mesh axis twice.
pub(crate) fn spec(
    draft: &Draft,
    mesh: &Mesh,
    sharding: Sharding,
    logical: Option<&LogicalRules>,
    rules: &[ShardRule],
) -> Result<Spec, Problem> {
    let shape = draft.roles.part.as_ref().map_or_else(|| draft.view.shape(), |part| &part.shape);
    let rank = shape.rank();
    let Some(rule) = rules.iter().find(|rule| rule.pattern.matches(ruled_name(draft))) else {
        return Ok(match (logical, sharding) {
            (Some(logical), _) if !draft.roles.by_position => logical.spec(&draft.roles.logical, mesh),
            (_, Sharding::Auto | Sharding::Logical) => auto(&draft.roles, rank, mesh),
            (_, Sharding::Replicate) => Spec::replicated(),
        });
    };
    let problem = |reason: String| {
        let reason = format!("sharding rule {:?}: {reason}", rule.pattern.text());
        Problem::Tensor { name: draft.name.clone(), reason }
    };
    if rule.spec.len() > rank {
        return Err(problem(format!("{} axes for a tensor of shape {}", rule.spec.len(), shape)));
    }
    let mut spec = Spec::replicated();
    for (axis, names) in rule.spec.iter().enumerate() {
        for index in names.iter().filter_map(|name| mesh.find(name)) {
            if spec.uses(index) {
                return Err(problem(format!("mesh axis {:?} is used twice", mesh.axes()[index].name)));
            }
            spec.split(axis, index);
        }
    }
    Ok(spec)
}
