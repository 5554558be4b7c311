//! What a complete model of a known family must have, and which of a repository's names no table knows.
//!
//! Families list what `config.json` makes certain, and no more: a name that is expected here is in every complete model. What
//! is missing is refused; a name that no table knows is only reported, since a generic layout serves any tensor.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value as Json;

use super::{
    Allow,
    expr::{EvalError, Expr, Names, Value},
    family::{Expectation, Family, Generic},
    naming,
    problem::Problem,
    select,
};
use crate::checkpoint::{Checkpoint, Experts, Quantization};

/// Names that differ in numbers only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameGroup {
    /// The name, with its numbers as in `model.layers.{0-31}.mlp`.
    pub name: String,
    /// How many there are.
    pub count: u64,
    /// The name, numbers as `*`, that is most like it on the other side: found for what is missing, known for what is not.
    pub nearest: Option<String>,
}

impl std::fmt::Display for NameGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)?;
        if self.count > 1 {
            write!(f, " ({} tensors)", self.count)?;
        }
        self.nearest.as_ref().map_or(Ok(()), |nearest| write!(f, "; the nearest name is {nearest}"))
    }
}

/// A name with all numbers between dots as `*`, and these numbers.
fn starred(name: &str) -> (String, Vec<u64>) {
    let mut numbers = Vec::new();
    let words = name.split('.').map(|word| match word.parse() {
        Ok(number) if word.bytes().all(|byte| byte.is_ascii_digit()) => {
            numbers.push(number);
            "*"
        }
        _ => word,
    });
    (words.collect::<Vec<_>>().join("."), numbers)
}

fn ranges(numbers: &BTreeSet<u64>) -> String {
    let numbers: Vec<u64> = numbers.iter().copied().collect();
    let words = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        only => only.iter().map(u64::to_string).collect(),
    });
    words.collect::<Vec<_>>().join(",")
}

/// Names folded over their numbers, each with the nearest of `others`.
fn fold<'a>(names: impl IntoIterator<Item = &'a str>, others: &BTreeSet<String>) -> Vec<NameGroup> {
    let mut groups: BTreeMap<String, (u64, Vec<BTreeSet<u64>>)> = BTreeMap::new();
    for name in names {
        let (stars, numbers) = starred(name);
        let (count, sets) = groups.entry(stars).or_insert_with(|| (0, vec![BTreeSet::new(); numbers.len()]));
        *count += 1;
        for (set, number) in sets.iter_mut().zip(numbers) {
            set.insert(number);
        }
    }
    let group = |(stars, (count, sets)): (String, (u64, Vec<BTreeSet<u64>>))| {
        let nearest = nearest(&stars, others);
        let mut sets = sets.iter();
        let words = stars.split('.').map(|word| match (word, sets.clone().next()) {
            ("*", Some(set)) => {
                sets.next();
                if set.len() == 1 { ranges(set) } else { format!("{{{}}}", ranges(set)) }
            }
            _ => word.to_owned(),
        });
        NameGroup { name: words.collect::<Vec<_>>().join("."), count, nearest }
    };
    groups.into_iter().map(group).collect()
}

/// Names compared for being near; more would take too long for a hint.
const COMPARED_MAX: usize = 2_000;

/// The most similar name, if it differs in less than a third of its characters.
fn nearest(name: &str, others: &BTreeSet<String>) -> Option<String> {
    let near = |other: &&String| other.as_str() != name;
    let distances = others.iter().filter(near).take(COMPARED_MAX).map(|other| (distance(name, other), other));
    let (distance, other) = distances.min()?;
    (distance * 3 < name.len()).then(|| other.clone())
}

/// Fewest insertions, deletions and replacements of bytes from one text to the other.
fn distance(left: &str, right: &str) -> usize {
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (at, l) in left.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = at + 1;
        for (column, r) in right.bytes().enumerate() {
            let replaced = diagonal + usize::from(l != r);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[right.len()]
}

/// `config.json` for conditions, and the number of the layer as `l`.
struct Condition<'a> {
    checkpoint: &'a Checkpoint,
    layer: Option<u64>,
}

impl Names for Condition<'_> {
    fn mesh(&self, _axis: &str) -> Option<u64> {
        // What a repository must have does not depend on the devices.
        None
    }

    fn name(&self, name: &str) -> Result<Value, EvalError> {
        let layer = self.layer.filter(|_| name == "l").and_then(|layer| i64::try_from(layer).ok());
        layer.map(Value::Int).ok_or_else(|| EvalError::Name(name.to_owned()))
    }

    fn config(&self, path: &[String]) -> Option<Value> {
        Value::of_json(member(self.checkpoint, path)?)
    }

    fn shape(&self, tensor: &str) -> Option<Vec<u64>> {
        self.checkpoint.find(tensor).map(|id| self.checkpoint.tensor(id).shape.to_vec())
    }

    fn count(&self, _: &str) -> u64 {
        0
    }
}

fn member<'a>(checkpoint: &'a Checkpoint, path: &[String]) -> Option<&'a Json> {
    let config = checkpoint.config()?;
    let text = checkpoint.dialect().text_config.as_deref().and_then(|name| config.get(name));
    let walk = |root: &'a Json| path.iter().try_fold(root, |value, member| value.get(member.as_str()));
    text.and_then(walk).or_else(|| walk(config))
}

/// Whether an expectation holds for a layer. One that cannot be told does not.
fn holds(expectation: &Expectation, checkpoint: &Checkpoint, layer: Option<u64>) -> bool {
    if let (Some(list), Some(layer)) = (&expectation.unless_listed, layer) {
        let listed = member(checkpoint, std::slice::from_ref(list)).and_then(Json::as_array);
        if listed.is_some_and(|list| list.iter().any(|entry| entry.as_u64() == Some(layer))) {
            return false;
        }
    }
    let Some(when) = &expectation.when else { return true };
    let value = Expr::parse(when).ok().and_then(|when| when.eval(&Condition { checkpoint, layer }).ok());
    value.and_then(|value| value.bool("when").ok()).unwrap_or(false)
}

/// Names that a complete model of this family has; empty where nothing is certain.
fn expected(checkpoint: &Checkpoint, family: &Family) -> BTreeSet<String> {
    let dialect = checkpoint.dialect();
    let mut names = BTreeSet::new();
    match &dialect.quantization {
        Quantization::None | Quantization::BlockFp8(_) => {}
        Quantization::ScaledFp8(_)
        | Quantization::Mxfp4
        | Quantization::Int4Packed { .. }
        | Quantization::Nvfp4
        | Quantization::CompressedTensors { .. }
        | Quantization::Unknown { .. } => return names,
    }
    let Some(prefix) = select::text_prefix(checkpoint, Some(family)) else { return names };
    let Some(declared) = dialect.declared_layers else { return names };
    let model_type = dialect.text_model_type.as_ref().or(dialect.model_type.as_ref());
    let applies = |expectation: &&Expectation| {
        expectation.model_types.is_empty() || model_type.is_some_and(|known| expectation.model_types.contains(known))
    };
    for expectation in family.expect.iter().filter(applies) {
        if holds(expectation, checkpoint, None) || expectation.top.is_empty() {
            names.extend(expectation.top.iter().map(|name| format!("{prefix}{name}")));
        }
        let experts = match &expectation.experts {
            None => 1,
            Some(_) if !matches!(dialect.experts, Experts::Single { .. }) => continue,
            Some(count) => member(checkpoint, std::slice::from_ref(count)).and_then(Json::as_u64).unwrap_or(0),
        };
        for layer in (0..declared).filter(|layer| holds(expectation, checkpoint, Some(*layer))) {
            for name in &expectation.layer {
                let name = format!("{prefix}layers.{layer}.{name}");
                if expectation.experts.is_some() {
                    names.extend((0..experts).map(|expert| name.replace('*', &expert.to_string())));
                } else {
                    names.insert(name);
                }
            }
        }
    }
    let causal = dialect.architectures.iter().any(|name| name.ends_with("ForCausalLM"));
    if !names.is_empty() && causal && dialect.tied_declared == Some(false) && !dialect.has_lm_head {
        names.insert("lm_head.weight".to_owned());
    }
    names
}

/// What is not as a family's tables say.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) missing: Vec<NameGroup>,
    pub(super) unexpected: Vec<NameGroup>,
}

/// Compares a repository with its family's tables. `wanted` says whether a name that is not there would be shown.
pub(super) fn compare(
    checkpoint: &Checkpoint,
    family: &Family,
    allow: &Allow,
    wanted: impl Fn(&str) -> bool,
    problems: &mut Vec<Problem>,
) -> Findings {
    let Ok(words) = Generic::load().map(|generic| generic.words) else { return Findings::default() };
    let Some(prefix) = select::text_prefix(checkpoint, Some(family)) else { return Findings::default() };
    let names = expected(checkpoint, family);
    let present: BTreeSet<u64> = checkpoint
        .tensors()
        .map(|(_, info)| naming::parse(info.name, &words))
        .filter(|parsed| parsed.prefix == prefix)
        .filter_map(|parsed| parsed.layer)
        .collect();
    // A layer of which nothing is there is reported as such.
    let in_missing_layer =
        |name: &str| naming::parse(name, &words).layer.is_some_and(|layer| !present.contains(&layer));
    let lost: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|name| checkpoint.find(name).is_none() && !in_missing_layer(name) && wanted(name))
        .collect();
    let mut known: BTreeSet<String> = names.iter().map(|name| starred(name).0).collect();
    let mut unknown: Vec<&str> = Vec::new();
    for (_, info) in checkpoint.tensors() {
        let parsed = naming::parse(info.name, &words);
        let of_text = if parsed.layer.is_some() { parsed.prefix == prefix } else { !select::is_tower(info.name) };
        if of_text && !family.knows(info.name, &parsed) {
            unknown.push(info.name);
        }
    }
    let found: BTreeSet<String> = unknown.iter().map(|name| starred(name).0).collect();
    // What some layers have and others have not was lost. What no layer has may be another kind of model: that is reported.
    let stems: BTreeSet<String> = checkpoint.tensors().map(|(_, info)| starred(info.name).0).collect();
    let (allowed, refused): (Vec<&str>, Vec<&str>) =
        lost.into_iter().partition(|name| allow.accepts(name) || !stems.contains(&starred(name).0));
    for group in fold(refused, &found) {
        problems.push(Problem::MissingTensor { name: group.to_string(), for_target: String::new() });
    }
    let missing = fold(allowed, &found);
    known.extend(family.stems().map(|stem| format!("{prefix}{stem}")));
    Findings { missing, unexpected: fold(unknown, &known) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fold_over_numbers() {
        let names = ["a.0.self_attn.q", "a.1.self_attn.q", "a.3.self_attn.q", "norm", "a.1.e.0.w", "a.1.e.1.w"];
        let others = ["a.*.self_attn.qq".to_owned(), "x".to_owned()].into();
        let texts: BTreeSet<String> = fold(names, &others).iter().map(ToString::to_string).collect();
        let expected = [
            "a.{0-1,3}.self_attn.q (3 tensors); the nearest name is a.*.self_attn.qq",
            "a.1.e.{0-1}.w (2 tensors)",
            "norm",
        ];
        assert_eq!(texts, expected.into_iter().map(str::to_owned).collect());
    }

    #[test]
    fn distances() {
        for (left, right, expected) in [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("q_proj", "k_proj", 1)]
        {
            assert_eq!((distance(left, right), distance(right, left)), (expected, expected));
        }
    }
}
