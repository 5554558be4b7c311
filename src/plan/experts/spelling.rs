//! The names of experts' matrices, in the spellings that programs have for them.

use super::super::naming::{number, words_of};

/// A matrix of an expert, or two of them in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Projection {
    Gate,
    Up,
    Down,
    /// Gate, then up, along the outputs.
    GateUp,
}

impl Projection {
    /// Its place among the words of a model: gate, up, down.
    pub(super) fn place(self) -> Option<usize> {
        [Self::Gate, Self::Up, Self::Down].iter().position(|one| *one == self)
    }
}

/// The name of a matrix of experts: `{before}experts.{…}{after}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ExpertName<'a> {
    /// The part before the word for experts, with its last dot.
    pub(super) before: &'a str,
    /// The number of the expert. None: one tensor for all of them.
    pub(super) expert: Option<u64>,
    pub(super) projection: Projection,
    /// The word for it.
    pub(super) word: &'a str,
    /// The rest, with its first dot: empty, `.weight`, `.weight_scale`, …
    pub(super) after: &'a str,
    /// Whether the expert's number comes after the projection, as NVIDIA's quantizer writes it.
    pub(super) number_last: bool,
}

/// Words before experts: those of transformers, and of MLX.
const WORDS: [&str; 2] = ["experts", "switch_mlp"];

/// The words for the projections.
const PROJECTIONS: [(&str, Projection); 8] = [
    ("gate_proj", Projection::Gate),
    ("w1", Projection::Gate),
    ("up_proj", Projection::Up),
    ("w3", Projection::Up),
    ("down_proj", Projection::Down),
    ("w2", Projection::Down),
    ("gate_up_proj", Projection::GateUp),
    ("w13", Projection::GateUp),
];

/// What ends the name of a matrix that has no word of its own for it.
const WEIGHT: &str = "_weight";

fn projection(word: &str) -> Option<Projection> {
    PROJECTIONS.iter().find(|(known, _)| *known == word).map(|(_, projection)| *projection)
}

impl<'a> ExpertName<'a> {
    /// The name, if it is one of experts' matrices.
    pub(super) fn parse(name: &'a str) -> Option<Self> {
        let mut at = 0;
        for word in words_of(name) {
            let end = at + word.len();
            if WORDS.contains(&word) {
                let (before, rest) = (&name[..at], name.get(end + 1..)?);
                return Self::after_word(before, rest);
            }
            at = end + 1;
        }
        None
    }

    fn after_word(before: &'a str, rest: &'a str) -> Option<Self> {
        let split = |text: &'a str| match text.find('.') {
            Some(dot) => (&text[..dot], &text[dot..]),
            None => (text, ""),
        };
        let (first, after_first) = split(rest);
        let (second, after_second) = split(after_first.strip_prefix('.').unwrap_or(""));
        let (expert, word, after, number_last) = match (number(first), number(second)) {
            (Some(expert), _) => (Some(expert), second, after_second, false),
            (None, Some(expert)) if projection(first).is_some() => (Some(expert), first, after_second, true),
            _ if projection(first).is_some() => (None, first, after_first, false),
            // vLLM's modules: `w13_weight`.
            _ => (None, first.strip_suffix(WEIGHT).filter(|_| after_first.is_empty())?, "", false),
        };
        Some(Self { before, expert, projection: projection(word)?, word, after, number_last })
    }

    /// Whether this is the matrix itself and not its bias, scale or shape.
    pub(super) fn is_matrix(&self) -> bool {
        matches!(self.after, "" | ".weight")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_spellings_are_read() {
        let rows = [
            ("model.layers.0.mlp.experts.3.gate_proj.weight", Some((Some(3), Projection::Gate, ".weight", false))),
            ("l.0.block_sparse_moe.experts.11.w3.weight", Some((Some(11), Projection::Up, ".weight", false))),
            ("l.0.mlp.experts.gate_proj.0.weight_scale", Some((Some(0), Projection::Gate, ".weight_scale", true))),
            ("l.0.mlp.experts.gate_up_proj", Some((None, Projection::GateUp, "", false))),
            ("l.0.mlp.experts.gate_up_proj.weight", Some((None, Projection::GateUp, ".weight", false))),
            ("l.0.mlp.switch_mlp.down_proj.weight", Some((None, Projection::Down, ".weight", false))),
            ("l.0.mlp.experts.w13_weight", Some((None, Projection::GateUp, "", false))),
            ("l.0.mlp.experts.w2_weight", Some((None, Projection::Down, "", false))),
            ("l.0.mlp.experts.0.gate_up_proj.weight", Some((Some(0), Projection::GateUp, ".weight", false))),
            ("l.0.mlp.experts.gate_up_proj_bias", None),
            ("l.0.mlp.experts.e_score_correction_bias", None),
            ("l.0.mlp.shared_experts.gate_proj.weight", None),
            ("l.0.mlp.experts.01.gate_proj.weight", None),
            ("l.0.mlp.experts", None),
            ("l.0.mlp.experts.", None),
        ];
        for (name, expected) in rows {
            let found = ExpertName::parse(name);
            let found = found.map(|found| (found.expert, found.projection, found.after, found.number_last));
            assert_eq!(found, expected, "{name}");
        }
    }
}
