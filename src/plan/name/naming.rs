//! Reading structure from a tensor's name: prefix, layer, expert, and what remains.

use std::{borrow::Cow, fmt::Write as _, sync::LazyLock};

use serde::Deserialize;
use smallvec::SmallVec;

use super::super::library::embedded_table;

/// Words that mark the structure of a name.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Words {
    /// Words before a layer's number.
    layers: Vec<String>,
    /// Pairs of words that together stand before a layer's number.
    joined: Vec<String>,
    /// Words before an expert's number.
    experts: Vec<String>,
}

static WORDS: LazyLock<Words> = LazyLock::new(|| embedded_table(include_str!("words.toml")));

/// Whether experts, or an expert's number, follow a word.
pub(crate) fn is_of_experts(word: &str) -> bool {
    WORDS.experts.iter().any(|known| known == word)
}

/// A parsed name: `prefix . word . layer . rest`. The rest may hold an expert's number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parsed {
    /// The part before the layer word, with its final dot. Empty for a name without layer.
    pub prefix: String,
    /// Number of the layer.
    pub layer: Option<u64>,
    /// The rest, with `*` for the expert's number.
    pub rest: String,
    /// Number of the expert.
    pub expert: Option<u64>,
}

/// Last word of a tensor's name that is also a directory, because another name continues it with a dot.
pub const SELF_WORD: &str = "_self";

/// Greatest number of a layer or expert. A greater number is a word like any other.
const NUMBER_MAX: u64 = (1 << 32) - 1;

/// Words in the names of towers for images, video and sound.
pub(crate) const TOWERS: [&str; 23] = [
    "vision_tower",
    "vision_model",
    "visual",
    "vision_encoder",
    "vision",
    "audio_tower",
    "audio_model",
    "audio_encoder",
    "multi_modal_projector",
    "multimodal_projector",
    "mm_projector",
    "aligner",
    "image_start",
    "image_end",
    "image_newline",
    "embed_vision",
    "embed_audio",
    "vision_embed_tokens",
    "img_projector",
    "connector",
    "talker",
    "token2wav",
    "qformer",
];

/// Whether a name belongs to a tower for images, video or sound.
pub(crate) fn is_tower(name: &str) -> bool {
    name.split('.').take(3).any(|word| TOWERS.contains(&word))
}

/// Whether a word of a name is a number, as that of a layer.
pub(crate) fn has_number(name: &str) -> bool {
    name.split('.').any(|word| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The words of a name. They are short: a loop over the bytes is faster than a search.
#[expect(clippy::manual_pattern_char_comparison, reason = "a char is searched for")]
pub(crate) fn words_of(name: &str) -> impl Iterator<Item = &str> {
    name.split(|letter| letter == '.')
}

/// Applies `change` to each word of the name. A word for which it returns `None` is dropped.
pub(crate) fn map_words<'a>(name: &'a str, change: impl FnMut(&'a str) -> Option<&'a str>) -> String {
    let mut changed = String::with_capacity(name.len() + 8);
    for (index, word) in words_of(name).filter_map(change).enumerate() {
        if index > 0 {
            changed.push('.');
        }
        changed.push_str(word);
    }
    changed
}

/// A name with its layer numbers, and all other numbers between dots, as `*`.
pub(crate) fn group_name(name: &str) -> String {
    map_words(name, |word| Some(if word.bytes().all(|byte| byte.is_ascii_digit()) { "*" } else { word }))
}

/// Appends the rest of a name with the expert's number filled in. Without an expert it is unchanged.
pub(crate) fn push_with_expert(name: &mut String, rest: &str, expert: Option<u64>) {
    let Some(expert) = expert else { return name.push_str(rest) };
    for (index, word) in words_of(rest).enumerate() {
        if index > 0 {
            name.push('.');
        }
        if word == "*" {
            // Writing to a text cannot fail.
            _ = write!(name, "{expert}");
        } else {
            name.push_str(word);
        }
    }
}

/// The rest of a name without the place of the expert's number, for tensors stacked over experts.
pub(crate) fn without_expert(rest: &str, has_expert: bool) -> String {
    map_words(rest, |word| Some(word).filter(|word| !has_expert || *word != "*"))
}

/// A name below a prefix, either of which may be empty.
pub(crate) fn joined(prefix: &str, name: &str) -> String {
    if prefix.is_empty() || name.is_empty() { format!("{prefix}{name}") } else { format!("{prefix}.{name}") }
}

/// The number of a layer or an expert that a word is.
pub(crate) fn number(word: &str) -> Option<u64> {
    // With leading zeros, two names would become one.
    let canonical =
        !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit()) && (word == "0" || !word.starts_with('0'));
    canonical.then(|| word.parse().ok()).flatten().filter(|number| *number <= NUMBER_MAX)
}

/// The words of a name, and where each begins in it.
type NameWords<'a> = SmallVec<[(usize, &'a str); 16]>;

/// The place of a tensor in its layer.
struct InLayer<'a> {
    prefix: &'a str,
    layer: u64,
    /// The words of the name, and how many come before the rest.
    parts: NameWords<'a>,
    rest: usize,
}

impl<'a> InLayer<'a> {
    /// The first layer word that a number follows counts. Something has to follow the number.
    fn find(name: &'a str) -> Option<Self> {
        let mut start = 0;
        let parts: NameWords<'a> = words_of(name)
            .map(|word| {
                let at = start;
                start += word.len() + 1;
                (at, word)
            })
            .collect();
        let layer_at =
            |at: usize| WORDS.layers.iter().any(|word| word == parts[at].1).then(|| number(parts[at + 1].1)).flatten();
        let (at, layer) = (0..parts.len().saturating_sub(2)).find_map(|at| Some((at, layer_at(at)?)))?;
        let joined = |from: usize| name[parts[from].0..parts[at + 1].0].strip_suffix('.');
        let is_joined = at > 0 && joined(at - 1).is_some_and(|pair| WORDS.joined.iter().any(|known| known == pair));
        let prefix = &name[..parts[if is_joined { at - 1 } else { at }].0];
        Some(Self { prefix, layer, parts, rest: at + 2 })
    }

    /// The word that is the expert's number, by its place among all words, and the number.
    fn expert(&self) -> Option<(usize, u64)> {
        let rest = &self.parts[self.rest..];
        // A word that equals the placeholder for an expert leaves no placeholder to use.
        if rest.iter().any(|(_, word)| *word == "*") {
            return None;
        }
        let numbered = |at: usize| number(rest[at].1).map(|expert| (self.rest + at, expert));
        let end = rest.len().saturating_sub(1);
        let found = (1..end).find_map(|at| numbered(at).filter(|_| is_of_experts(rest[at - 1].1)));
        // ModelOpt writes the expert's number after the projection: `experts.gate_proj.3.weight`.
        found.or_else(|| (2..end).find_map(|at| numbered(at).filter(|_| is_of_experts(rest[at - 2].1))))
    }
}

/// The prefix and the number of the layer in a name, as [`parse`] finds them.
pub(crate) fn layer_of(name: &str) -> Option<(&str, u64)> {
    InLayer::find(name).map(|found| (found.prefix, found.layer))
}

/// The text of a name around the numbers of its layer and its expert: the same in all layers and experts. A name without layer is the
/// first of these; one without expert has two.
pub(crate) type Around<'a> = [&'a str; 3];

/// The text around the numbers of layer and expert, and these numbers, as [`parse`] finds them.
pub(crate) fn around(name: &str) -> (Around<'_>, Option<u64>, Option<u64>) {
    let Some(found) = InLayer::find(name) else { return ([name, "", ""], None, None) };
    let (start, digits) = found.parts[found.rest - 1];
    let (before, after) = (&name[..start], start + digits.len());
    match found.expert() {
        None => ([before, &name[after..], ""], Some(found.layer), None),
        Some((at, expert)) => {
            let (start, digits) = found.parts[at];
            ([before, &name[after..start], &name[start + digits.len()..]], Some(found.layer), Some(expert))
        }
    }
}

/// Parses a name. An expert is searched after the layer.
pub(crate) fn parse(name: &str) -> Parsed {
    let Some(found) = InLayer::find(name) else {
        return Parsed { prefix: String::new(), layer: None, rest: name.to_owned(), expert: None };
    };
    let whole = &name[found.parts[found.rest].0..];
    let (rest, expert) = match found.expert() {
        None => (whole.to_owned(), None),
        Some((at, expert)) => {
            let ((start, digits), (before, word)) = (found.parts[at], found.parts[at - 1]);
            let after = &name[start + digits.len()..];
            let is_last = !is_of_experts(word);
            let begin = &whole[..(if is_last { before } else { start }) - found.parts[found.rest].0];
            // Both orders have one rest.
            let rest = if is_last { format!("{begin}*.{word}{after}") } else { format!("{begin}*{after}") };
            (rest, Some(expert))
        }
    };
    Parsed { prefix: found.prefix.to_owned(), layer: Some(found.layer), rest, expert }
}

/// Stem and final word of a name: `self_attn.q_proj` and `weight`. The final word is empty if it is not a usual one.
pub(crate) fn split_suffix(rest: &str) -> (&str, &str) {
    match rest.rsplit_once('.') {
        Some((stem, last)) if last == "weight" || last == "bias" || last.starts_with("weight_") => (stem, last),
        _ => (rest, ""),
    }
}

/// One path component for a word of a name. A name may hold characters that a file name cannot.
pub fn component(word: &str) -> Cow<'_, str> {
    match word {
        "" => "%".into(),
        "." => "%2E".into(),
        ".." => "%2E%2E".into(),
        _ if !word.bytes().any(|byte| matches!(byte, b'%' | b'/' | 0)) => word.into(),
        _ => word.replace('%', "%25").replace('/', "%2F").replace('\0', "%00").into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_by_name_without_numbers() {
        assert_eq!(group_name("model.layers.12.mlp.experts.3.up"), "model.layers.*.mlp.experts.*.up");
        assert_eq!(group_name("h1.w2"), "h1.w2");
    }

    #[test]
    fn layers_and_experts_are_found() {
        let rows = [
            ("model.layers.12.self_attn.q_proj.weight", "model.", Some(12), "self_attn.q_proj.weight", None),
            ("transformer.h.0.attn.c_attn.weight", "transformer.", Some(0), "attn.c_attn.weight", None),
            ("encoder.layer.3.output.dense.bias", "", Some(3), "output.dense.bias", None),
            ("vit.encoder.layer.3.x.weight", "vit.", Some(3), "x.weight", None),
            ("visual.blocks.7.norm1.weight", "visual.", Some(7), "norm1.weight", None),
            // Kimi's tower, as transformers saves it, and those of CLIP and of speech models.
            ("vision_tower.encoder.blocks.7.mlp.fc0.weight", "vision_tower.encoder.", Some(7), "mlp.fc0.weight", None),
            ("vision_model.transformer.resblocks.7.ln_1.bias", "vision_model.transformer.", Some(7), "ln_1.bias", None),
            ("audio.encoders.7.norm1.weight", "audio.", Some(7), "norm1.weight", None),
            (
                "model.layers.1.mlp.experts.17.up_proj.weight",
                "model.",
                Some(1),
                "mlp.experts.*.up_proj.weight",
                Some(17),
            ),
            (
                "model.layers.1.mlp.experts.up_proj.17.weight",
                "model.",
                Some(1),
                "mlp.experts.*.up_proj.weight",
                Some(17),
            ),
            ("model.layers.1.mlp.experts.gate_up_proj", "model.", Some(1), "mlp.experts.gate_up_proj", None),
            ("model.layers.01.x", "", None, "model.layers.01.x", None),
            ("model.layers.1", "", None, "model.layers.1", None),
            ("lm_head.weight", "", None, "lm_head.weight", None),
            ("model.layers.18446744073709551615.x.y", "", None, "model.layers.18446744073709551615.x.y", None),
            ("h.0.experts.18446744073709551615.y", "", Some(0), "experts.18446744073709551615.y", None),
            ("h.0.experts.3.*.y", "", Some(0), "experts.3.*.y", None),
        ];
        for (name, prefix, layer, rest, expert) in rows {
            let expected = Parsed { prefix: prefix.into(), layer, rest: rest.into(), expert };
            assert_eq!(parse(name), expected, "{name}");
            let ([before, between, after], layer, expert) = around(name);
            let digits = |number: Option<u64>| number.map_or_else(String::new, |number| number.to_string());
            let whole = format!("{before}{}{between}{}{after}", digits(layer), digits(expert));
            assert_eq!((whole.as_str(), layer, expert), (name, expected.layer, expected.expert));
        }
    }

    #[test]
    fn only_an_experts_number_has_a_place() {
        let with_expert = |rest, expert| {
            let mut name = "h.0.".to_owned();
            push_with_expert(&mut name, rest, expert);
            name
        };
        assert_eq!(with_expert("experts.*.a*b", Some(3)), "h.0.experts.3.a*b");
        assert_eq!(with_expert("a*b", None), "h.0.a*b");
        assert_eq!(without_expert("experts.*.a*b", true), "experts.a*b");
        assert_eq!(without_expert("x.*.y", false), "x.*.y");
    }

    #[test]
    fn suffixes_are_split_off() {
        assert_eq!(split_suffix("a.b.weight"), ("a.b", "weight"));
        assert_eq!(split_suffix("a.weight_scale_inv"), ("a", "weight_scale_inv"));
        assert_eq!(split_suffix("a.sinks"), ("a.sinks", ""));
        assert_eq!(split_suffix("weight"), ("weight", ""));
    }

    #[test]
    fn components_are_safe_file_names() {
        assert_eq!(component("a/b"), "a%2Fb");
        assert_eq!(component(".."), "%2E%2E");
        assert_eq!(component("100%"), "100%25");
    }
}
