//! Names that differ only in numbers, folded into one, and the nearest name of another set.

use std::collections::{BTreeMap, BTreeSet};

pub(crate) use ckfs_config::ranges;
use ckfs_config::{Pattern, folded};
use serde::Serialize;
use strsim::levenshtein;

use super::super::naming::map_words;

/// Names that differ only in numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NameGroup {
    /// The name, with its numbers as in `model.layers.{0-31}.mlp`.
    pub name: String,
    /// Number of names.
    pub count: u64,
    /// The most similar name on the other side, with numbers as `*`. For a missing name it is a found one; for an
    /// unknown name, a known one.
    pub nearest: Option<String>,
}

impl NameGroup {
    /// A single name.
    pub(crate) fn one(name: impl Into<String>) -> Self {
        Self { name: name.into(), count: 1, nearest: None }
    }

    /// The name, and the count if there are several.
    pub(crate) fn counted(&self) -> String {
        let several = if self.count > 1 { format!(" ({} tensors)", self.count) } else { String::new() };
        format!("{}{several}", self.name)
    }

    /// The hint at the nearest name, if there is one.
    pub(crate) fn hint(&self) -> String {
        self.nearest.as_ref().map_or_else(String::new, |nearest| format!("; the nearest name is {nearest}"))
    }
}

impl std::fmt::Display for NameGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.counted(), self.hint())
    }
}

/// A name with all numbers between dots as `*`, and these numbers.
fn starred(name: &str) -> (String, Vec<u64>) {
    let mut numbers = Vec::new();
    let stars = map_words(name, |word| {
        if !word.bytes().all(|byte| byte.is_ascii_digit()) {
            return Some(word);
        }
        let Ok(number) = word.parse() else { return Some(word) };
        numbers.push(number);
        Some("*")
    });
    (stars, numbers)
}

/// A name with all numbers between dots as `*`.
pub(crate) fn stars(name: &str) -> String {
    starred(name).0
}

/// Layers in words: `layer 3`, or `layers 0-3,7`.
pub(crate) fn layers_text(layers: &BTreeSet<u64>) -> String {
    format!("layer{} {}", if layers.len() == 1 { "" } else { "s" }, ranges(layers))
}

/// Names folded over their numbers. Each group gets the nearest name from the first set of `others` that has a near
/// one.
pub(crate) fn fold<'a>(names: impl IntoIterator<Item = &'a str>, others: &[&BTreeSet<String>]) -> Vec<NameGroup> {
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
        let nearest = others.iter().find_map(|others| nearest(&stars, others));
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

/// Most names that are compared for similarity. More comparisons would take too long for a hint.
const COMPARED_MAX: usize = 2_000;

/// The most similar name, if fewer than a third of the characters differ, counted from the first differing word.
fn nearest(name: &str, others: &BTreeSet<String>) -> Option<String> {
    let other = others.iter().filter(|other| other.as_str() != name).take(COMPARED_MAX);
    let (distance, other) = other.map(|other| (levenshtein(name, other), other)).min()?;
    let same: usize = name.split('.').zip(other.split('.')).take_while(|(l, r)| l == r).map(|(l, _)| l.len() + 1).sum();
    (distance * 3 < name.len().saturating_sub(same)).then(|| other.clone())
}

/// A pattern for the same after other words: `*.engram*` for `engram*`.
pub(crate) fn behind_words(pattern: &Pattern) -> Option<Pattern> {
    Pattern::parse(&format!("*.{}", pattern.text())).ok()
}

/// That the pattern of a rule matches none of these names, with a hint at the nearest. A pattern that ends in `*` is compared with the
/// beginnings of names.
pub(crate) fn matches_none<'a>(rule: &str, pattern: &Pattern, names: impl Iterator<Item = &'a str>) -> String {
    let is_separator = |c: char| matches!(c, '.' | '/');
    let text = stars(pattern.text());
    let beginning = text.ends_with('*').then(|| text.matches(is_separator).count());
    let shown = |name: &str| {
        let cut = beginning.and_then(|words| name.match_indices(is_separator).nth(words));
        cut.map_or_else(|| stars(name), |(end, _)| stars(&name[..end]))
    };
    let all: BTreeSet<&str> = names.collect();
    if let Some(inner) = behind_words(pattern).filter(|inner| all.iter().any(|name| inner.matches(name))) {
        let count = all.iter().filter(|name| inner.matches(name)).count();
        let (pattern, inner) = (pattern.text(), inner.text());
        return format!("{rule}: the pattern {pattern:?} matches no tensor: {inner:?} matches {count}");
    }
    let names: BTreeSet<String> = all.into_iter().map(shown).collect();
    // The same name with other numbers is the nearest.
    let nearest = names.get(&text).cloned().or_else(|| nearest(&text, &names));
    let nearest = nearest.map_or_else(String::new, |nearest| format!("; the nearest name is {nearest}"));
    let advice = pattern.advice().map_or_else(String::new, |advice| format!("; {advice}"));
    format!("{rule}: the pattern {:?} matches no tensor{nearest}{advice}", pattern.text())
}

/// Whether two words differ by case or dashes only, by one letter changed, missing or added, or by two neighbours exchanged.
/// Words of a few letters are near to too many others.
pub(crate) fn is_misspelt(word: &str, known: &str) -> bool {
    const LETTERS_MIN: usize = 4;
    let distance = || strsim::osa_distance(&folded(word), &folded(known));
    let long = word.len().min(known.len()) >= LETTERS_MIN;
    word != known && (folded(word) == folded(known) || long && distance() <= 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_without_a_match_have_a_near_name() {
        let names =
            ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"];
        let rows = [
            ("model.layers.*.self_attn.q_prj.weight", "model.layers.*.self_attn.q_proj.weight"),
            ("model.layers.7.self_attn.q_proj.weight", "model.layers.*.self_attn.q_proj.weight"),
            ("model.layer.*", "model.layers.*"),
            ("models.norm*", "model.norm"),
            ("visual.*", ""),
            ("*bias", ""),
        ];
        for (pattern, near) in rows {
            let text = matches_none("cast", &Pattern::parse(pattern).unwrap(), names.into_iter());
            let hint = text.strip_prefix(&format!("cast: the pattern {pattern:?} matches no tensor")).unwrap();
            assert_eq!(hint.strip_prefix("; the nearest name is ").unwrap_or_default(), near, "{pattern}");
        }
        let text = matches_none("exclude", &Pattern::parse("self_attn*").unwrap(), names.into_iter());
        assert_eq!(text, "exclude: the pattern \"self_attn*\" matches no tensor: \"*.self_attn*\" matches 1");
        // A path of the mount, where its name is wanted.
        let pattern = Pattern::parse("layers/scanned/wq").unwrap();
        let text = matches_none("shard", &pattern, ["layers.scanned.wq", "embed"].into_iter());
        assert!(text.ends_with(" matches no tensor; the nearest name is layers.scanned.wq"), "{text}");
    }

    #[test]
    fn names_fold_over_numbers() {
        let names =
            ["a.0.self_attn.query", "a.1.self_attn.query", "a.3.self_attn.query", "norm", "a.1.e.0.w", "a.1.e.1.w"];
        let others = ["a.*.self_attn.quary".to_owned(), "x".to_owned()].into();
        let texts: BTreeSet<String> =
            fold(names, &[&BTreeSet::new(), &others]).iter().map(ToString::to_string).collect();
        let expected = [
            "a.{0-1,3}.self_attn.query (3 tensors); the nearest name is a.*.self_attn.quary",
            "a.1.e.{0-1}.w (2 tensors)",
            "norm",
        ];
        assert_eq!(texts, expected.into_iter().map(str::to_owned).collect());
    }

    #[test]
    fn nearness_counts_differing_characters() {
        let known =
            ["m.layers.*.self_attn.q_proj.weight".to_owned(), "m.layers.*.mlp.up_proj.weight".to_owned()].into();
        for (name, near) in [
            ("m.layers.*.self_atn.q_proj.weight", true),
            ("m.layers.*.self_attn.query_proj.weight", true),
            ("m.layers.*.linear_attn.conv1d.weight", false),
            ("m.layers.*.self_attn.q_proj.weight", false),
            ("q", false),
        ] {
            assert_eq!(nearest(name, &known).is_some(), near, "{name}");
        }
    }

    #[test]
    fn misspelt_words() {
        for (word, known, expected) in [
            ("fdsp", "fsdp", true),
            ("fsdp2", "fsdp", true),
            ("FSDP", "fsdp", true),
            ("TP", "tp", true),
            ("dp-shard", "dp_shard", true),
            ("tenor", "tensor", true),
            ("experts", "expert", true),
            ("fsdp", "fsdp", false),
            ("pp", "tp", false),
            ("cp", "dp", false),
            ("stage", "data", false),
            ("replicate", "replica", false),
        ] {
            assert_eq!(is_misspelt(word, known), expected, "{word}");
        }
    }
}
