//! Layers that lack a tensor of their neighbours, or have it in another shape.
//!
//! Layers of one model differ for good reasons: the first ones are dense, every sixth attends to everything, or kinds
//! of attention alternate. Such differences are runs at either end, or repeat, or follow a list in `config.json`, or
//! the layers have another tensor instead. Any other difference is a hole: a stack of the layers would be shorter than
//! the model.

use std::collections::{BTreeMap, BTreeSet};

use ckfs_checkpoint::Checkpoint;
use ckfs_tensor::{Shape, TensorId};
use hashbrown::HashMap;
use serde_json::Value;
use strsim::levenshtein;

use super::super::{
    family::Family,
    name_group::{fold, stars},
    parsed::{NameKind, ParsedNames},
    problem::Hole,
    select,
};

/// Tensors whose names differ only in the layer: layers and tensors, by layer.
type Members = Vec<(u64, TensorId)>;

/// Most distinct values in a list with one entry per layer, if the list marks kinds of layers. Kinds repeat, so that there are at most
/// half as many as layers.
const KINDS_MAX: usize = 8;

/// Last words of the names of quantized matrices.
const PACKED_WORDS: [&str; 3] = ["qweight", "weight_packed", "W_q"];

/// All holes, by name.
pub(crate) fn find(checkpoint: &Checkpoint, names: &ParsedNames<'_>, family: Option<&Family>) -> Vec<Hole> {
    let text = names.text_prefix(family);
    let predicting = select::predicting(checkpoint, names, family);
    let quantized = !checkpoint.dialect().quantization.is_none();
    // From this layer on, the names of a kind predict further tokens.
    let end = |kind: &NameKind<'_>| {
        let own = predicting.as_ref().filter(|(prefix, _)| *prefix == kind.parsed.prefix);
        own.map_or(u64::MAX, |(_, first)| *first)
    };
    let ends: Vec<u64> = names.kinds().iter().map(end).collect();
    // By kind and expert.
    let mut members: Vec<HashMap<Option<u64>, Members>> = vec![HashMap::new(); ends.len()];
    for ((id, _), name) in checkpoint.tensors().zip(names.names()) {
        let kind = name.kind as usize;
        if let Some(layer) = names.layer(name).filter(|layer| *layer < ends[kind]) {
            members[kind].entry(names.expert(name)).or_default().push((layer, id));
        }
    }
    let mut stems: HashMap<(&str, bool), HashMap<String, Members>> = HashMap::new();
    for (kind, members) in names.kinds().iter().zip(members) {
        let [before, between, after] = kind.around;
        let of_text = text.as_ref() == Some(&kind.parsed.prefix);
        for (expert, members) in members {
            let expert = expert.map_or_else(String::new, |expert| expert.to_string());
            // After the number of the layer is a dot.
            let rest = self::kind(&format!("{between}{expert}{after}")[1..], quantized);
            if let Some(rest) = rest {
                stems.entry((before, of_text)).or_default().entry(rest).or_default().extend(members);
            }
        }
    }
    let lists = LayerLists::of(checkpoint);
    let mut found: Vec<Hole> = stems
        .into_iter()
        .flat_map(|((stem, of_text), kinds)| {
            Stem { checkpoint, before: stem, of_text, lists: &lists }.holes(&kinds, !quantized)
        })
        .collect();
    found.sort_by(|a, b| a.group.name.cmp(&b.group.name));
    found
}

/// The name by which layers are compared. Under quantization some modules are packed and others are not. A module's
/// matrix then counts under any of its names, and the other tensors of the packed module do not count.
fn kind(rest: &str, quantized: bool) -> Option<String> {
    if !quantized {
        return Some(rest.to_owned());
    }
    let (module, last) = rest.rsplit_once('.').unwrap_or(("", rest));
    if PACKED_WORDS.contains(&last) {
        return Some(format!("{module}.weight"));
    }
    matches!(last, "weight" | "bias").then(|| rest.to_owned())
}

/// A tensor that has another shape in some layers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Misshapen {
    layers: Vec<u64>,
    /// Whether each layer has the usual shape.
    pattern: Vec<bool>,
    usual: Vec<u64>,
    /// The shape in the first layer that differs.
    other: Vec<u64>,
    /// Whether layers that differ have several shapes.
    has_several: bool,
    /// Whether few layers differ, so that it may be a mistake.
    is_hole: bool,
}

impl Misshapen {
    /// The extents that differ: the usual one and the other.
    fn widths(&self) -> BTreeSet<(u64, u64)> {
        let same_rank = self.usual.len() == self.other.len();
        let pairs = self.usual.iter().copied().zip(self.other.iter().copied());
        pairs.filter(|(usual, other)| same_rank && usual != other).collect()
    }

    /// Whether the same layers differ by the same extents.
    fn has_width_of(&self, other: &Self) -> bool {
        self.layers == other.layers && self.pattern == other.pattern && !self.widths().is_disjoint(&other.widths())
    }
}

struct Stem<'a> {
    checkpoint: &'a Checkpoint,
    /// The prefix of the layer's number.
    before: &'a str,
    of_text: bool,
    lists: &'a LayerLists,
}

impl Stem<'_> {
    fn holes(&self, kinds: &HashMap<String, Members>, compare_shapes: bool) -> Vec<Hole> {
        let mut all: Vec<u64> = kinds.values().flatten().map(|(layer, _)| *layer).collect();
        all.sort_unstable();
        all.dedup();
        // With fewer than 3 layers, none lies between two others.
        if all.len() < 3 {
            return Vec::new();
        }
        let mut patterns: BTreeMap<Vec<bool>, Vec<&str>> = BTreeMap::new();
        for (rest, members) in kinds {
            let mut pattern = vec![false; all.len()];
            for (layer, _) in members {
                pattern[all.binary_search(layer).expect("the layers are those of all members")] = true;
            }
            patterns.entry(pattern).or_default().push(rest);
        }
        let mut holes = Vec::new();
        for (pattern, rests) in &patterns {
            let differs = self.is_hole(&all, pattern);
            let rests = rests.iter().filter(|rest| differs && !replaced(&all, pattern, rest, &patterns));
            holes.extend(self.folded(rests.copied(), (&all, pattern), None));
        }
        let shaped: BTreeMap<&str, Misshapen> = kinds
            .iter()
            .filter(|_| compare_shapes)
            .filter_map(|(rest, members)| Some((rest.as_str(), self.misshapen(members)?)))
            .collect();
        let is_width = |rest: &str, found: &Misshapen| {
            !found.is_hole || shaped.iter().any(|(other, beside)| *other != rest && found.has_width_of(beside))
        };
        let mut alike: BTreeMap<(&Misshapen, bool), Vec<&str>> = BTreeMap::new();
        for (rest, found) in &shaped {
            alike.entry((found, is_width(rest, found))).or_default().push(rest);
        }
        for ((found, is_width), rests) in alike {
            holes.extend(self.folded(rests.into_iter(), (&found.layers, &found.pattern), Some((found, is_width))));
        }
        holes
    }

    /// Holes of several tensors alike. Tensors whose names differ only in a number are one hole. `differing` is what has another shape in
    /// some layers, and whether these differ in width.
    fn folded<'r>(
        &self,
        rests: impl Iterator<Item = &'r str>,
        (layers, pattern): (&[u64], &[bool]),
        differing: Option<(&Misshapen, bool)>,
    ) -> Vec<Hole> {
        let (present, absent) = (of(layers, pattern, true), of(layers, pattern, false));
        let mut alike: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for rest in rests {
            alike.entry(stars(rest)).or_default().push(rest);
        }
        let hole = |mut rests: Vec<&str>| {
            rests.sort_unstable();
            let mut group = fold(rests.iter().copied(), &[]).pop()?;
            group.name = format!("{}*.{}", self.before, group.name);
            let example = format!("{}{}.{}", self.before, absent.first()?, rests.first()?);
            let (present, absent) = (present.clone(), absent.clone());
            let shape = |extents: &[u64]| Shape::try_new(extents).ok();
            let shapes = differing.and_then(|(found, _)| Some((shape(&found.usual)?, shape(&found.other)?)));
            let is_width = differing.is_some_and(|(_, is_width)| is_width);
            let has_several = differing.is_some_and(|(found, _)| found.has_several);
            Some(Hole { group, present, absent, shapes, is_width, has_several, example, of_text: self.of_text })
        };
        alike.into_values().filter_map(hole).collect()
    }

    /// Whether some layers lack a tensor according to this pattern, and neither the pattern nor `config.json` explains
    /// it.
    fn is_hole(&self, layers: &[u64], pattern: &[bool]) -> bool {
        let Some(first) = pattern.iter().position(|present| *present) else { return false };
        let last = pattern.iter().rposition(|present| *present).unwrap_or(first);
        let inside = &pattern[first..=last];
        let absent = inside.iter().filter(|present| !**present).count();
        let present = inside.len() - absent;
        // A tensor that only a few layers have is an addition to these.
        absent > 0
            && absent * 2 <= present
            && !is_periodic(pattern)
            && !is_periodic(inside)
            && !self.lists.tell(layers, pattern)
    }

    /// A tensor with another shape in some layers, unless a pattern or `config.json` explains it.
    fn misshapen(&self, members: &Members) -> Option<Misshapen> {
        let shape = |id: TensorId| self.checkpoint.tensor(id).shape;
        let first = shape(members.first()?.1);
        if members.iter().all(|(_, id)| shape(*id) == first) {
            return None;
        }
        let mut members = members.clone();
        members.sort_unstable();
        let mut counts: BTreeMap<&[u64], usize> = BTreeMap::new();
        for (_, id) in &members {
            *counts.entry(shape(*id)).or_default() += 1;
        }
        let (usual, _) = counts.into_iter().max_by_key(|(_, count)| *count)?;
        let layers: Vec<u64> = members.iter().map(|(layer, _)| *layer).collect();
        let pattern: Vec<bool> = members.iter().map(|(_, id)| shape(*id) == usual).collect();
        let mut others = members.iter().map(|(_, id)| shape(*id)).filter(|shape| *shape != usual);
        let other = others.next()?.to_vec();
        let has_several = others.any(|shape| shape != other);
        let is_hole = layers.len() > 2 && self.is_hole(&layers, &pattern);
        let is_told = (is_periodic(&pattern) && !has_several) || self.lists.tell(&layers, &pattern) || !self.of_text;
        let found = Misshapen { layers, pattern, usual: usual.to_vec(), other, has_several, is_hole };
        (is_hole || !is_told).then_some(found)
    }
}

/// The layers for which the pattern says so.
fn of(layers: &[u64], pattern: &[bool], is: bool) -> BTreeSet<u64> {
    layers.iter().zip(pattern).filter(|(_, present)| **present == is).map(|(layer, _)| *layer).collect()
}

/// Whether a pattern repeats at least twice.
fn is_periodic(pattern: &[bool]) -> bool {
    (1..=pattern.len() / 2).any(|period| pattern.iter().zip(&pattern[period..]).all(|(a, b)| a == b))
}

/// Whether each layer that lacks a tensor has another one instead. Several layers must have the other one, and no layer
/// both. A name that is nearly the same is not another one.
fn replaced(all: &[u64], pattern: &[bool], rest: &str, patterns: &BTreeMap<Vec<bool>, Vec<&str>>) -> bool {
    const NEAR: usize = 2;
    let is_other = |other: &&str| levenshtein(rest, other) > NEAR;
    let instead: Vec<&Vec<bool>> = patterns
        .iter()
        .filter(|(other, rests)| {
            other.iter().filter(|present| **present).count() > 1
                && other.iter().zip(pattern).all(|(other, here)| !(*other && *here))
                && rests.iter().any(is_other)
        })
        .map(|(other, _)| other)
        .collect();
    (0..all.len()).filter(|at| !pattern[*at]).all(|at| instead.iter().any(|other| other[at]))
}

/// The entries of `config.json` about single layers.
#[derive(Debug, Default)]
struct LayerLists {
    /// One word for each layer.
    per_layer: Vec<Vec<String>>,
    /// Numbers of layers.
    numbers: Vec<BTreeSet<u64>>,
}

impl LayerLists {
    fn of(checkpoint: &Checkpoint) -> Self {
        let mut lists = Self::default();
        if let Some(config) = checkpoint.config() {
            let declared = checkpoint.dialect().declared_layers;
            let counts = declared.map(|declared| [declared, select::total_layers(checkpoint)]);
            lists.gather(config, counts.as_ref().map_or(&[], |counts| &counts[..]), 0);
        }
        lists
    }

    /// `counts` are the model's own layers, and those with the ones that predict further tokens: lists are as long as either.
    fn gather(&mut self, config: &Value, counts: &[u64], depth: usize) {
        const DEPTH_MAX: usize = 3;
        let is_per_layer = |entries: usize| counts.contains(&(entries as u64));
        for (key, value) in config.as_object().into_iter().flatten() {
            match value {
                Value::Array(entries) => {
                    if is_per_layer(entries.len()) {
                        self.per_layer.push(entries.iter().map(Value::to_string).collect());
                    }
                    self.numbers.extend(entries.iter().map(Value::as_u64).collect::<Option<BTreeSet<u64>>>());
                }
                // Other texts have as many letters by chance: "bfloat16".
                Value::String(letters) if key.contains("pattern") && is_per_layer(letters.chars().count()) => {
                    self.per_layer.push(letters.chars().map(String::from).collect());
                }
                Value::Object(_) if depth < DEPTH_MAX => self.gather(value, counts, depth + 1),
                Value::Object(_) | Value::String(_) | Value::Null | Value::Bool(_) | Value::Number(_) => {}
            }
        }
    }

    /// Whether a list separates the layers that have a tensor from those that do not.
    fn tell(&self, layers: &[u64], pattern: &[bool]) -> bool {
        let by_kind = |list: &Vec<String>| {
            let mut kinds: BTreeMap<&str, bool> = BTreeMap::new();
            let same = layers.iter().zip(pattern).all(|(layer, present)| {
                let word = usize::try_from(*layer).ok().and_then(|layer| list.get(layer));
                word.is_some_and(|word| *kinds.entry(word).or_insert(*present) == *present)
            });
            same && kinds.len() <= KINDS_MAX.min(layers.len() / 2).max(2)
        };
        // Some lists count layers from 1.
        let next: Vec<u64> = layers.iter().map(|layer| layer + 1).collect();
        let sets = [layers, &next].into_iter().flat_map(|of| [true, false].map(|is| self::of(of, pattern, is)));
        let sets: Vec<_> = sets.collect();
        self.per_layer.iter().any(by_kind) || self.numbers.iter().any(|numbers| sets.contains(numbers))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Vec<bool> {
        text.bytes().map(|byte| byte == b'x').collect()
    }

    #[test]
    fn patterns_that_repeat() {
        for (text, expected) in [
            ("x.x.", true),
            ("x.x.x", true),
            ("xxx.xxx.", true),
            ("xxx.xxx.xx", true),
            ("x.x", false),
            ("xx.xx", false),
            ("x.xx", false),
            ("xxx.xxxxxxxx", false),
        ] {
            assert_eq!(is_periodic(&pattern(text)), expected, "{text}");
        }
    }

    #[test]
    fn lists_of_the_configuration_tell_kinds_of_layers() {
        let config = serde_json::json!({
            "layer_types": ["s", "s", "f", "s", "s"], "inner": {"full_attn_layers": [2, 4]}, "pattern": "MMM*M",
        });
        let mut lists = LayerLists::default();
        lists.gather(&config, &[5, 5], 0);
        let layers = [0, 1, 2, 3, 4];
        for (text, expected) in
            [("xx.xx", true), ("x.x.x", true), (".x.x.", true), ("xxx.x", true), ("x.xxx", false), ("xx..x", false)]
        {
            assert_eq!(lists.tell(&layers, &pattern(text)), expected, "{text}");
        }
        // A list that goes on for two layers that predict further tokens.
        let config = serde_json::json!({"layer_types": ["f", "s", "s", "f", "s", "f", "f"]});
        let mut lists = LayerLists::default();
        lists.gather(&config, &[5, 7], 0);
        assert!(lists.tell(&layers, &pattern("x..x.")));
        assert!(!lists.tell(&layers, &pattern("x.xx.")));
        // Texts and lists that have one entry per layer by chance.
        let config =
            serde_json::json!({"torch_dtype": "bfloat16", "name": "ssssfsss", "ids": [9, 8, 7, 6, 5, 4, 3, 2]});
        let mut lists = LayerLists::default();
        lists.gather(&config, &[8], 0);
        assert!(!lists.tell(&[0, 1, 2, 3, 4, 5, 6, 7], &pattern("xxxx.xxx")));
    }
}
