//! The problems of a plan. All of them are reported together, before anything is mounted.

use std::{collections::BTreeSet, fmt};

use ckfs_checkpoint::{printable, printable_lines};
use ckfs_tensor::{Shape, ViewError};

use super::super::{
    name_group::{NameGroup, fold, layers_text, stars},
    numbered::Numbered,
};

/// One problem of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// An expression over tensors is malformed.
    #[error("{name}: {error}")]
    View {
        /// The tensor, by its name in the repository or in the mount.
        name: String,
        /// The reason.
        #[source]
        error: ViewError,
    },
    /// No scheme decodes the quantization of some weights.
    #[error(
        "{}: quantized as {method}, which ckfs does not decode; without --dequantize and --dtype the layouts \
         canonical and hf show codes and scales as they are stored", undecoded(example.as_deref(), *tensors)
    )]
    Quantization {
        /// Its name in the configuration or the tensors.
        method: String,
        /// Number of tensors stored in this way; 0 if only the configuration names it.
        tensors: u64,
        /// One of them.
        example: Option<String>,
    },
    /// Layers without any tensor.
    #[error("{}: expected {count} of {family}, numbered from 0", missing_layers(layers))]
    MissingLayers {
        /// The family of layers, as in `model.layers`.
        family: String,
        /// The layers.
        layers: BTreeSet<u64>,
        /// Number of layers expected.
        count: u64,
    },
    /// Tensors that the repository should have are missing.
    #[error("{rule}missing tensor {}{}{}", group.counted(), needed_by(for_target), group.hint())]
    MissingTensor {
        /// Their names in the repository.
        group: NameGroup,
        /// The target that needs them, if it is known.
        for_target: String,
        /// The place of the rule that needs them, `FILE:LINE: `, if one does.
        rule: String,
    },
    /// Some layers lack a tensor that their neighbours have, or have it in another shape.
    #[error("{0}; config.json does not say why")]
    Hole(Hole),
    /// Tensors whose shape differs from the shape in a layout's rule.
    #[error("{rule}{file}: {}: expected shape {expected}, found {found}", group.counted())]
    SourceShape {
        /// Their names in the repository.
        group: NameGroup,
        /// The file that holds the first of them.
        file: String,
        /// The place of the rule, likewise.
        rule: String,
        /// The rule's extents as computed from `config.json`. `_` stands for an extent that it does not determine.
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
    /// An uneven split, if only even ones are accepted.
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
    /// A tensor cannot be shown, named or split as the user or the layout requests.
    #[error("{name}: {reason}")]
    Tensor {
        /// Its name.
        name: String,
        /// The reason.
        reason: String,
    },
    /// A request that does not fit the mesh or the tensors, or a name that cannot be that of a file.
    #[error("{0}")]
    Request(String),
    /// A place in a layout file is malformed, or its rule does not fit the repository.
    #[error("{file}:{line}: {}{reason}", for_leaf(target))]
    Layout {
        /// The layout file.
        file: String,
        /// Line of the rule, from 1.
        line: usize,
        /// The leaf, if the rule makes one.
        target: String,
        /// The reason.
        reason: String,
        /// The line, with a mark below the problem. Begins with a line break, or is empty.
        excerpt: String,
    },
    /// A layout or option file is malformed.
    #[error("{file}: {reason}")]
    File {
        /// The file.
        file: String,
        /// The reason.
        reason: String,
    },
}

/// A tensor that some layers lack or have in another shape, without a reason in the pattern of layers or in
/// `config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hole {
    /// Its name, with `*` for the layer. Several experts are one group.
    pub group: NameGroup,
    /// Layers that have it.
    pub present: BTreeSet<u64>,
    /// Layers that lack it or have it in another shape.
    pub absent: BTreeSet<u64>,
    /// The usual shape and the shape in the first layer that differs, if the layers differ in shape.
    pub shapes: Option<(Shape, Shape)>,
    /// Whether the layers differ in width as a whole: other tensors of the same layers have the same other extent, or the widths follow
    /// no pattern. Such a model is pruned, and nothing is lost.
    pub is_width: bool,
    /// Whether the layers that differ have several shapes.
    pub has_several: bool,
    /// The first of the tensors that are missing or have another shape.
    pub example: String,
    /// Whether it belongs to the text model.
    pub of_text: bool,
}

impl fmt::Display for Hole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (present, absent) = (layers_text(&self.present), layers_text(&self.absent));
        let (one, several) = (self.absent.len() == 1, self.present.len() > 1);
        let have = if several { "have" } else { "has" };
        let has = if one { "has" } else { "have" };
        write!(f, "{}: ", self.group.counted())?;
        match &self.shapes {
            None => write!(f, "{present} {have} it, {absent} {} it", if one { "lacks" } else { "lack" }),
            Some((usual, other)) if self.has_several => {
                write!(f, "{present} {have} shape {usual}, {absent} {has} others, the first of them {other}")
            }
            Some((usual, other)) => write!(f, "{present} {have} shape {usual}, {absent} {has} {other}"),
        }
    }
}

impl Problem {
    /// Missing tensors that no rule needs, and the target that does, if it is known.
    pub(crate) fn missing(group: NameGroup, for_target: impl Into<String>) -> Self {
        Self::MissingTensor { group, for_target: for_target.into(), rule: String::new() }
    }

    /// Two tensors, which may have one name, that would be at one path of the mount, or one would be a directory that holds the other.
    pub fn collision(path: &str, first: &str, second: &str) -> Self {
        let pair = if first == second { format!("two tensors named {first}") } else { format!("{first} and {second}") };
        Self::Request(format!("{pair} would both be at {path}"))
    }

    /// The lines of a file that show the problem. Begins with a line break, or is empty.
    fn excerpt(&self) -> &str {
        if let Self::Layout { excerpt, .. } = self { excerpt } else { "" }
    }

    /// The tensor with whose name the message begins, where many tensors may have the same problem.
    fn tensor(&self) -> Option<&str> {
        if let Self::View { name, .. } | Self::Tensor { name, .. } | Self::Uneven { name, .. } = self {
            return Some(name);
        }
        None
    }
}

fn missing_layers(layers: &BTreeSet<u64>) -> String {
    format!("{} {} missing", layers_text(layers), if layers.len() == 1 { "is" } else { "are" })
}

/// The undecodable tensors, for a message.
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
    /// A problem of a file, or of a step, for each of these reasons.
    pub(crate) fn of(file: &str, reasons: Vec<String>) -> Self {
        let problem = |reason| Problem::File { file: file.to_owned(), reason };
        Self { problems: reasons.into_iter().map(problem).collect() }
    }

    /// Whether tensor names are among the problems: the names found differ from the names expected.
    pub fn concerns_names(&self) -> bool {
        let of_names = |problem: &Problem| {
            matches!(
                problem,
                Problem::MissingTensor { .. } | Problem::UnexpectedTensor { .. } | Problem::MissingLayers { .. }
            ) || matches!(problem, Problem::Hole(hole) if hole.shapes.is_none())
        };
        self.problems.iter().any(of_names)
    }

    /// A tensor of a trained head among those that are unexpected. A layout that leaves it out is of another model.
    pub fn trained_head(&self) -> Option<&str> {
        const HEADS: [&str; 7] = ["lm_head", "score", "classifier", "v_head", "value_head", "qa_outputs", "embed_out"];
        self.problems.iter().find_map(|problem| {
            let Problem::UnexpectedTensor { group } = problem else { return None };
            group.name.split('.').take(2).any(|word| HEADS.contains(&word)).then_some(group.name.as_str())
        })
    }

    /// A text for each problem.
    pub fn texts(&self) -> Vec<String> {
        let text =
            |problem: &Problem| format!("{}{}", printable(&problem.to_string()), printable_lines(problem.excerpt()));
        self.problems.iter().map(text).collect()
    }

    /// The first tensor that has another shape than that of the other layers.
    pub fn of_other_shape(&self) -> Option<&str> {
        self.problems.iter().find_map(|problem| {
            let Problem::Hole(hole) = problem else { return None };
            hole.shapes.is_some().then_some(hole.example.as_str())
        })
    }
}

impl fmt::Display for PlanError {
    /// The only problem, or a count and one problem per line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 100;
        if let [only] = self.problems.as_slice() {
            f.write_str(&printable(&only.to_string()))?;
            return f.write_str(&printable_lines(only.excerpt()));
        }
        write!(f, "{} problems:", self.problems.len())?;
        let lines = lines(&self.problems);
        for (line, _) in lines.iter().take(SHOWN) {
            write!(f, "\n  {line}")?;
        }
        match lines.iter().skip(SHOWN).map(|(_, count)| count).sum::<u64>() {
            0 => Ok(()),
            more => write!(f, "\n  … and {more} more"),
        }
    }
}

/// A text for each problem, in order of the first of each, and how many problems it tells. Tensors whose names differ only in
/// numbers, and which have the same problem, share a text.
fn lines(problems: &[Problem]) -> Vec<(String, u64)> {
    // What several tensors have, by what it is and their names with stars; any other problem by its number and as the reader sees it.
    let mut lines: Numbered<(Option<usize>, String, String), Vec<&str>> = Numbered::default();
    for (at, problem) in problems.iter().enumerate() {
        let text = problem.to_string();
        if let Some((name, what)) = problem.tensor().and_then(|name| Some((name, text.strip_prefix(name)?))) {
            lines.entry((None, what.to_owned(), stars(name))).or_default().push(name);
        } else {
            let excerpt = printable_lines(problem.excerpt()).replace('\n', "\n  ");
            lines.entry((Some(at), format!("{}{excerpt}", printable(&text)), String::new())).or_default();
        }
    }
    let texts = lines.into_iter().flat_map(|((at, what, _), names)| {
        let line = |group: NameGroup| (printable(&format!("{}{what}", group.counted())).into_owned(), group.count);
        let of_tensors: Vec<_> = fold(names, &[]).into_iter().map(line).collect();
        at.map(|_| (what, 1)).into_iter().chain(of_tensors)
    });
    texts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uneven(name: &str, extent: u64) -> Problem {
        Problem::Uneven { name: name.into(), axis: 0, shape: Shape::try_new(&[extent, 4]).unwrap(), parts: 3 }
    }

    #[test]
    fn tensors_of_all_layers_with_the_same_problem_share_a_line() {
        let layers = (0..40).flat_map(|layer| {
            let name = |part: &str| format!("layers.{layer}.{part}");
            // One layer has another shape.
            [uneven(&name("wq"), if layer == 7 { 5 } else { 16 }), uneven(&name("up"), 112)]
        });
        let mut problems: Vec<Problem> = layers.collect();
        problems.insert(0, uneven("embed", 160));
        assert_eq!(
            PlanError { problems }.to_string(),
            "81 problems:\n  \
             embed: axis 0 of [160, 4] does not split evenly in 3 parts\n  \
             layers.{0-6,8-39}.wq (39 tensors): axis 0 of [16, 4] does not split evenly in 3 parts\n  \
             layers.{0-39}.up (40 tensors): axis 0 of [112, 4] does not split evenly in 3 parts\n  \
             layers.7.wq: axis 0 of [5, 4] does not split evenly in 3 parts"
        );
    }

    #[test]
    fn what_is_not_shown_is_counted_by_problems() {
        let problems: Vec<Problem> = (0..150).map(|n| uneven(&format!("t{n}"), n + 1)).collect();
        let text = PlanError { problems }.to_string();
        assert!(text.starts_with("150 problems:\n  t0: axis 0") && text.ends_with("\n  … and 50 more"), "{text}");
    }
}
