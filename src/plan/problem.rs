//! What can be wrong with a plan. All problems are reported together, before anything is mounted.

use std::{collections::BTreeSet, fmt};

use super::{
    hole::Hole,
    mesh::DEVICES_LISTED_MAX,
    name_group::{NameGroup, ranges},
};
use crate::{
    checkpoint::printable,
    tensor::{Shape, TilingError, ViewError},
};

/// One thing wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// An expression over tensors is malformed.
    #[error("{name}: {error}")]
    View {
        /// The tensor, by its name in the repository or in the mount.
        name: String,
        /// What is wrong.
        #[source]
        error: ViewError,
    },
    /// A view has no tiling.
    #[error("{name}: {error}")]
    Tiling {
        /// The tensor.
        name: String,
        /// What is wrong.
        #[source]
        error: TilingError,
    },
    /// Two tensors would have one name, or one would be a directory that holds the other.
    #[error("{first} and {second} would both be at {path}")]
    Collision {
        /// Path in the mount.
        path: String,
        /// One tensor.
        first: String,
        /// The other.
        second: String,
    },
    /// A name is too long for a file.
    #[error("{name}: the file name {component:?} has {} bytes, at most 255 are possible", component.len())]
    LongName {
        /// The tensor.
        name: String,
        /// The path component.
        component: String,
    },
    /// No scheme decodes how some weights are quantized.
    #[error(
        "{}: quantized as {method}, which ckfs does not decode; without --dequantize and --dtype the layouts \
         canonical and hf show codes and scales as they are stored", undecoded(example.as_deref(), *tensors)
    )]
    Quantization {
        /// What the configuration or the tensors call it.
        method: String,
        /// How many tensors are stored so; 0 where only the configuration says it.
        tensors: u64,
        /// One of them.
        example: Option<String>,
    },
    /// A part of a fused tensor has no whole number of rows.
    #[error("{name}: axis {axis} of {shape} does not split in shares of {shares:?}")]
    Split {
        /// The tensor.
        name: String,
        /// The axis.
        axis: usize,
        /// Its shape.
        shape: Shape,
        /// The shares.
        shares: Vec<u64>,
    },
    /// A member of `config.json` is needed and not there.
    #[error("{name}: config.json has no number {member:?}")]
    Config {
        /// The tensor or rule that needs it.
        name: String,
        /// The member.
        member: String,
    },
    /// Layers of which nothing is there.
    #[error("{}: expected {count} of {family}, numbered from 0", missing_layers(layers))]
    MissingLayers {
        /// The family of layers, as in `model.layers`.
        family: String,
        /// The layers.
        layers: BTreeSet<u64>,
        /// Number of layers expected.
        count: u64,
    },
    /// Tensors that the repository should have are not there.
    #[error("{rule}missing tensor {}{}{}", group.counted(), needed_by(for_target), group.hint())]
    MissingTensor {
        /// Their names in the repository.
        group: NameGroup,
        /// What they are needed for, if it is known.
        for_target: String,
        /// The rule that needs them, if one does.
        rule: RulePlace,
    },
    /// Some layers lack a tensor that their neighbours have, or have it in another shape.
    #[error("{hole}; config.json does not say why")]
    Hole {
        /// Tensor and layers.
        hole: Hole,
    },
    /// Tensors are not of the shape that a layout's rule says they have.
    #[error("{rule}{file}: {}: expected shape {expected}, found {found}", group.counted())]
    SourceShape {
        /// Their names in the repository.
        group: NameGroup,
        /// The file that holds the first of them.
        file: String,
        /// The rule.
        rule: RulePlace,
        /// What `config.json` makes of the rule's extents; `_` for one that it says nothing about.
        expected: String,
        /// The shape they have.
        found: Shape,
    },
    /// Tensors that no table of the family, or no rule of the layout, names.
    #[error("unexpected tensor {group}")]
    UnexpectedTensor {
        /// Their names in the repository.
        group: NameGroup,
    },
    /// A sharding rule does not fit.
    #[error("{name}: sharding rule {rule:?}: {reason}")]
    ShardRule {
        /// The tensor.
        name: String,
        /// The rule's pattern.
        rule: String,
        /// What is wrong.
        reason: String,
    },
    /// An uneven split, where only even ones are wanted.
    #[error("{name}: axis {axis} of {shape} does not split evenly in {parts} parts")]
    Uneven {
        /// The tensor.
        name: String,
        /// The axis.
        axis: usize,
        /// Its shape.
        shape: Shape,
        /// Number of parts.
        parts: u64,
    },
    /// A rule matches nothing.
    #[error("{rule}: the pattern {pattern:?} matches no tensor")]
    UnusedPattern {
        /// The kind of rule.
        rule: &'static str,
        /// The pattern.
        pattern: String,
    },
    /// A mesh axis that no rule knows, under a name nearly that of one.
    #[error("mesh axis {axis:?}: no rule splits by it; did you mean {near:?}?")]
    MeshAxis {
        /// The axis.
        axis: String,
        /// The name of one that is known.
        near: String,
    },
    /// A device that the mesh does not have.
    #[error("device {device}: the mesh has {devices} devices, numbered from 0")]
    Device {
        /// The device.
        device: u64,
        /// Number of devices.
        devices: u64,
    },
    /// More devices than a mount lists.
    #[error(
        "mesh {mesh}: {count} devices are to be listed, at most {DEVICES_LISTED_MAX} can be; list this host's own, for \
         example with --devices 8-15"
    )]
    Devices {
        /// The mesh.
        mesh: String,
        /// Number of devices.
        count: u64,
    },
    /// A rename makes a name that no file can have.
    #[error("{name}: rename {rule:?} makes a {what} of {bytes} bytes, at most {max} are possible")]
    Rename {
        /// The name before all renames.
        name: String,
        /// The rule's expression.
        rule: String,
        /// What is too long.
        what: &'static str,
        /// Its bytes, as far as they were counted.
        bytes: usize,
        /// Most bytes.
        max: usize,
    },
    /// A rule of a layout does not fit the repository.
    #[error("{file}:{line}: {}{reason}", for_leaf(target))]
    Layout {
        /// The layout file.
        file: String,
        /// Line of the rule, from 1.
        line: usize,
        /// The leaf, if the rule is about one.
        target: String,
        /// What is wrong.
        reason: String,
    },
    /// A layout or option file is malformed.
    #[error("{file}: {reason}")]
    File {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// The repository cannot be shown as `hf/` in this way.
    #[error("hf/{path}: {reason}")]
    Hf {
        /// The file.
        path: String,
        /// What is wrong.
        reason: String,
    },
}

/// Where a rule stands: a layout file and the line, or nowhere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RulePlace(pub Option<(String, usize)>);

impl fmt::Display for RulePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |(file, line)| write!(f, "{file}:{line}: "))
    }
}

impl Problem {
    /// Tensors missing for their own sake.
    pub(super) fn missing(group: NameGroup) -> Self {
        Self::MissingTensor { group, for_target: String::new(), rule: RulePlace::default() }
    }
}

fn missing_layers(layers: &BTreeSet<u64>) -> String {
    let (word, verb) = if layers.len() == 1 { ("layer", "is") } else { ("layers", "are") };
    format!("{word} {} {verb} missing", ranges(layers))
}

/// The tensors that no scheme decodes, for a message.
fn undecoded(example: Option<&str>, tensors: u64) -> String {
    match (example, tensors) {
        (Some(name), 1) => name.to_owned(),
        (Some(name), tensors) => format!("{name} and {} more", tensors - 1),
        (None, _) => "config.json".to_owned(),
    }
}

fn needed_by(target: &str) -> String {
    if target.is_empty() { String::new() } else { format!(", needed for {target}") }
}

fn for_leaf(target: &str) -> String {
    if target.is_empty() { String::new() } else { format!("{target}: ") }
}

/// Everything wrong with a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanError {
    /// The problems, at least one.
    pub problems: Vec<Problem>,
}

impl std::error::Error for PlanError {}

impl From<Problem> for PlanError {
    fn from(problem: Problem) -> Self {
        Self { problems: vec![problem] }
    }
}

impl PlanError {
    /// Whether names of tensors are among the problems: a repository's and those expected differ.
    pub fn concerns_names(&self) -> bool {
        let of_names = |problem: &Problem| {
            matches!(
                problem,
                Problem::MissingTensor { .. }
                    | Problem::UnexpectedTensor { .. }
                    | Problem::MissingLayers { .. }
                    | Problem::Hole { .. }
            )
        };
        self.problems.iter().any(of_names)
    }
}

impl fmt::Display for PlanError {
    /// The only problem, or a count and one problem a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 100;
        if let [only] = self.problems.as_slice() {
            return f.write_str(&printable(&only.to_string()));
        }
        write!(f, "{} problems:", self.problems.len())?;
        for problem in self.problems.iter().take(SHOWN) {
            write!(f, "\n  {}", printable(&problem.to_string()))?;
        }
        if self.problems.len() > SHOWN {
            write!(f, "\n  … and {} more", self.problems.len() - SHOWN)?;
        }
        Ok(())
    }
}
