//! Layers of different widths in a layout whose program builds all layers alike.
//!
//! A pruned model may have layers that are narrower than the others. Layouts by tables show each layer as it is. A rule that
//! takes the width from `config.json` fails at each tensor of such layers; the message says one thing: which layers are of
//! which width, and which layouts show them.

use std::collections::{BTreeMap, BTreeSet};

use ckfs_checkpoint::Checkpoint;
use ckfs_tensor::Shape;

use super::super::{name_group::layers_text, naming, problem::Problem};

/// Tensors that are listed in the message.
const LISTED_MAX: usize = 6;

/// A tensor whose layers have several shapes.
struct Width {
    /// The usual shape, which most layers have, and its layers.
    usual: (Shape, BTreeSet<u64>),
    /// The other shapes.
    others: Vec<OtherShape>,
}

/// A shape, its layers, and the tensor of the first of them.
type OtherShape = (Shape, BTreeSet<u64>, String);

/// Layers, with their extent of an axis and the usual one.
type OtherWidth = (BTreeSet<u64>, u64, u64);

impl Width {
    fn differing(&self) -> BTreeSet<OtherWidth> {
        let of = |(other, layers, _): &OtherShape| {
            let pairs = other.extents().iter().zip(self.usual.0.extents()).filter(|(other, usual)| other != usual);
            pairs.map(|(other, usual)| (layers.clone(), *other, *usual)).collect::<Vec<_>>()
        };
        self.others.iter().flat_map(of).collect()
    }
}

impl std::fmt::Display for Width {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (usual, layers) = &self.usual;
        let (first, _, example) = &self.others[0];
        write!(f, "{example} has the shape {first}: ")?;
        let mut axes = Vec::new();
        for (axis, extent) in usual.extents().iter().enumerate() {
            let differing = self.others.iter().filter(|(other, ..)| other.extents()[axis] != *extent);
            let text =
                |(other, layers, _): &OtherShape| format!("{} in {}", other.extents()[axis], layers_text(layers));
            let differing: Vec<String> = differing.map(text).collect();
            if !differing.is_empty() {
                axes.push(format!(
                    "axis {axis} has {extent} elements in {}, {}",
                    layers_text(layers),
                    differing.join(", ")
                ));
            }
        }
        f.write_str(&axes.join(" and "))
    }
}

/// The shapes of a tensor in all layers: for each, the layers and their tensors.
type Shapes<'a> = BTreeMap<&'a [u64], BTreeMap<u64, &'a str>>;

/// The tensors of layers that have several shapes of one rank, by name.
fn find(checkpoint: &Checkpoint) -> Vec<Width> {
    let mut groups: BTreeMap<(String, String, Option<u64>), Shapes<'_>> = BTreeMap::new();
    for (_, info) in checkpoint.tensors() {
        let parsed = naming::parse(info.name);
        if let Some(layer) = parsed.layer {
            let shapes = groups.entry((parsed.prefix, parsed.rest, parsed.expert)).or_default();
            shapes.entry(info.shape).or_default().insert(layer, info.name);
        }
    }
    let width = |shapes: Shapes<'_>| {
        let (usual, of_usual) = shapes.iter().max_by_key(|(shape, layers)| (layers.len(), **shape))?;
        let mut others: Vec<_> = shapes.iter().filter(|(shape, _)| *shape != usual).collect();
        others.sort_by_key(|(_, layers)| layers.keys().next().copied());
        let set = |layers: &BTreeMap<u64, &str>| layers.keys().copied().collect();
        let shape = |extents: &[u64]| Shape::try_new(extents).ok();
        let first = |layers: &BTreeMap<u64, &str>| layers.values().next().map(|name| (*name).to_owned());
        let others = others.iter().filter_map(|(other, layers)| Some((shape(other)?, set(layers), first(layers)?)));
        let others: Vec<_> = others.collect();
        let alike = others.iter().all(|(other, ..)| other.rank() == usual.len());
        alike.then_some(Width { usual: (shape(usual)?, set(of_usual)), others })
    };
    let found: Vec<Width> = groups.into_values().filter_map(width).collect();
    // A width is one of several tensors. One tensor alone is a damaged one.
    let mut tensors: BTreeMap<OtherWidth, usize> = BTreeMap::new();
    for differing in found.iter().flat_map(Width::differing) {
        *tensors.entry(differing).or_default() += 1;
    }
    let kept = |mut width: Width| {
        let shared: BTreeSet<_> =
            width.differing().into_iter().filter(|of| tensors[of] > 1).map(|(layers, ..)| layers).collect();
        width.others.retain(|(_, layers, _)| shared.contains(layers));
        (!width.others.is_empty()).then_some(width)
    };
    found.into_iter().filter_map(kept).collect()
}

/// A name with `*` for its numbers, which may be folded.
fn starred(name: &str) -> String {
    let is_number = |word: &str| word.starts_with(|letter: char| letter == '{' || letter.is_ascii_digit());
    name.split('.').map(|word| if is_number(word) { "*" } else { word }).collect::<Vec<_>>().join(".")
}

/// The problems of a layout, with one in place of those that layers of other widths have.
pub(crate) fn explained(layout: &str, checkpoint: &Checkpoint, problems: Vec<Problem>) -> Vec<Problem> {
    let is_of_shape = |problem: &Problem| {
        matches!(problem, Problem::SourceShape { .. } | Problem::View { .. } | Problem::Layout { .. })
    };
    if !problems.iter().any(is_of_shape) {
        return problems;
    }
    let widths = find(checkpoint);
    // A model whose layers differ by design has them too: a problem is of a width only if it names that tensor or layer.
    let is_of = |problem: &Problem, width: &Width| {
        if let Problem::SourceShape { group, found, .. } = problem {
            let name = starred(&group.name);
            return width.others.iter().any(|(shape, _, example)| shape == found && starred(example) == name);
        }
        let text = problem.to_string();
        let in_layer = |layers: &BTreeSet<u64>| layers.iter().any(|layer| text.contains(&format!(".{layer}.")));
        width.others.iter().any(|(shape, layers, _)| text.contains(&shape.to_string()) && in_layer(layers))
    };
    let is_of_width = |problem: &Problem| is_of_shape(problem) && widths.iter().any(|width| is_of(problem, width));
    let (of_width, mut left): (Vec<_>, Vec<_>) = problems.into_iter().partition(is_of_width);
    if of_width.is_empty() {
        return left;
    }
    let listed: Vec<String> = widths.iter().take(LISTED_MAX).map(ToString::to_string).collect();
    let more = widths.len().saturating_sub(LISTED_MAX);
    let more = if more == 0 { String::new() } else { format!("; and {more} more tensors") };
    let file = widths.iter().find_map(|width| checkpoint.find(&width.others[0].2)).map(|id| checkpoint.file_of(id));
    let file = file.map_or_else(String::new, |file| format!("{}: ", checkpoint.source().path(file).display()));
    let reason = format!(
        "{file}the program that it is for builds all layers with the widths of config.json, but layers differ: {}{more}; --layout \
         canonical and --layout hf show each layer with its own width",
        listed.join("; ")
    );
    left.insert(0, Problem::File { file: format!("layout {layout}"), reason });
    left
}
