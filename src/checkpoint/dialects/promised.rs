//! The shapes that `config.json` promises of tensors whose names are the same in most models: vocabulary, hidden size and heads.
//!
//! Files of ranks add up to a tensor only if all are there. Torch's own do not say how many there were, so that a tensor without
//! its last part is a shorter one. Only the configuration tells. A difference in any other repository is a warning: it may be
//! pruned, padded, or of another model.
//!
//! Codes that are packed into words have as many columns as the settings of their module say bits. Those of another module, or a
//! number of bits that is wrong, give twice or half the columns, and scales fit where the group is wrong by the same factor.
//! Here too only the sizes of the model tell.

use std::collections::{BTreeMap, BTreeSet};

use ckfs_tensor::DType;
use serde_json::Value;

use super::super::{
    dialect::{lookup, text_config},
    problem::{Problem, Problems},
    scheme::{Quantized, Unsupported},
    table::{Storage, TensorInfo, TensorTable},
};

/// What may be before the names of a text model.
const PREFIXES: [&str; 6] =
    ["", "model.", "language_model.", "model.language_model.", "language_model.model.", "transformer."];

/// Embeddings and output heads.
const EMBEDDINGS: [&str; 6] = [
    "embed_tokens.weight",
    "lm_head.weight",
    "tok_embeddings.weight",
    "output.weight",
    "wte.weight",
    "word_embeddings.weight",
];

/// Weights with an element for each hidden unit.
const NORMS: [&str; 4] =
    ["norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight", "attention_norm.weight"];

/// The sizes in a configuration.
#[derive(Debug)]
struct Sizes {
    vocabulary: Option<u64>,
    hidden: Option<u64>,
    query: Option<u64>,
    key: Option<u64>,
}

impl Sizes {
    fn of(config: &Value) -> Self {
        let number = |keys: &[&str]| keys.iter().find_map(|key| lookup(Some(config), key)?.as_u64());
        let hidden = number(&["hidden_size", "n_embd", "d_model"]);
        let heads = number(&["num_attention_heads", "n_head"]).filter(|heads| *heads > 0);
        let width = number(&["head_dim"]).or_else(|| Some(hidden? / heads?));
        let rows = |heads: Option<u64>| heads?.checked_mul(width?);
        let (query, key) = (rows(heads), rows(number(&["num_key_value_heads"]).or(heads)));
        Self { vocabulary: number(&["vocab_size"]), hidden, query, key }
    }

    /// The promised extent of the first axis of a tensor, and the words for it.
    fn promised(&self, name: &str) -> Option<(u64, &'static str)> {
        own(name).find_map(|(rest, is_in_layer)| match rest {
            "self_attn.q_proj.weight" => Some((self.query?, "the heads")),
            "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => Some((self.key?, "the key-value heads")),
            rest if NORMS.contains(&rest) => Some((self.hidden?, "the hidden size")),
            rest if !is_in_layer && EMBEDDINGS.contains(&rest) => Some((self.vocabulary?, "vocab_size")),
            _ => None,
        })
    }
}

/// A tensor's name without the prefix of a text model and the number of its layer, and whether it had one.
fn own(name: &str) -> impl Iterator<Item = (&str, bool)> {
    PREFIXES.iter().filter_map(|prefix| name.strip_prefix(prefix)).map(|own| {
        let in_layer = own.strip_prefix("layers.").and_then(|rest| rest.split_once('.')).map(|(_, rest)| rest);
        (in_layer.unwrap_or(own), in_layer.is_some())
    })
}

/// Modules of a layer that have attention or an MLP, and words within them that name experts.
const BLOCKS: [&str; 4] = ["self_attn", "mlp", "block_sparse_moe", "feed_forward"];
const OF_EXPERTS: [&str; 4] = ["experts", "switch_mlp", "shared_expert", "shared_experts"];

/// Numbers of bits that codes are packed with somewhere.
const BITS: [u64; 7] = [1, 2, 3, 4, 5, 6, 8];

/// All sizes that inputs and outputs of matrices may have.
#[derive(Debug, Default)]
struct Widths {
    hidden: Vec<u64>,
    inner: Vec<u64>,
    heads: Vec<u64>,
}

impl Widths {
    fn of(config: &Value) -> Self {
        // A head that predicts for another model reads what two or more of its layers hold.
        let is_draft = lookup(Some(config), "draft_vocab_size").is_some()
            || config.get("architectures").is_some_and(|classes| classes.to_string().contains("Eagle"));
        let sizes = Sizes::of(config);
        let Some(hidden) = sizes.hidden.filter(|_| !is_draft) else { return Self::default() };
        let (mut inner, mut counts, mut widths, mut shared) = (Vec::new(), Vec::new(), Vec::new(), vec![1]);
        let text = text_config(Some(config)).map_or(config, |(_, text)| text);
        let number = |key: &str| lookup(Some(config), key).and_then(Value::as_u64);
        each_number(text, 0, &mut |key, number| {
            if key.contains("intermediate") || key.contains("ffn") {
                inner.push(number);
            } else if key.contains("head_dim") {
                widths.push(number);
            } else if key.contains("heads") && !key.contains("key_value") && !key.contains("kv") {
                counts.push(number);
            } else if key.contains("shared_expert") && number < 64 {
                shared.push(number);
            }
        });
        // Gemma's layers that share keys and values may have MLPs of double width.
        shared.extend(lookup(Some(config), "use_double_wide_mlp").is_some_and(|is| *is == true).then_some(2));
        let inner =
            inner.iter().flat_map(|inner| shared.iter().map(move |times| inner.saturating_mul(*times))).collect();
        widths.extend(number("num_attention_heads").and_then(|heads| hidden.checked_div(heads)));
        let heads =
            counts.iter().flat_map(|count| widths.iter().map(move |width| count.saturating_mul(*width))).collect();
        Self { hidden: vec![hidden], inner, heads }
    }

    /// What the last two axes of a matrix may be, outputs first, with words for it.
    fn of_matrix(&self, name: &str) -> [Option<(&[u64], &'static str)>; 2] {
        let hidden = Some((&self.hidden[..], "the hidden size"));
        let inner = Some((&self.inner[..], "the inner sizes of its MLPs"));
        let heads = Some((&self.heads[..], "the sizes of its heads"));
        let mut found = own(name).filter_map(|(rest, is_in_layer)| {
            let module = rest.strip_suffix(".weight")?;
            if !is_in_layer {
                return EMBEDDINGS.contains(&rest).then_some([None, hidden]);
            }
            let mut words = module.split('.');
            let block = words.next().filter(|block| BLOCKS.contains(block))?;
            let last = words.next_back()?;
            let is_known = |word: &str| OF_EXPERTS.contains(&word) || word.bytes().all(|byte| byte.is_ascii_digit());
            let is_plain = words.clone().next().is_none();
            if block == "self_attn" && is_plain {
                return match last {
                    "q_proj" | "k_proj" | "v_proj" | "qkv_proj" => Some([None, hidden]),
                    "o_proj" => Some([hidden, heads]),
                    _ => None,
                };
            }
            match last {
                "gate_proj" | "up_proj" if words.all(is_known) => Some([inner, hidden]),
                "down_proj" if words.all(is_known) => Some([hidden, inner]),
                "gate_up_proj" if is_plain => Some([None, hidden]),
                _ => None,
            }
        });
        found.next().unwrap_or([None, None])
    }
}

/// Calls `each` for all numbers of a configuration and of its members, with their keys. Lists have that of the list.
fn each_number(config: &Value, depth: usize, each: &mut impl FnMut(&str, u64)) {
    const DEPTH_MAX: usize = 4;
    for (key, value) in config.as_object().into_iter().flatten() {
        let all = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        all.iter().filter_map(Value::as_u64).for_each(|number| each(key, number));
        all.iter().filter(|_| depth < DEPTH_MAX).for_each(|inner| each_number(inner, depth + 1, each));
    }
}

/// Finds matrices that are decoded with the bits of others: their sizes are not the model's, and would be with another number of bits.
/// They are of no use, and a request to decode is refused with their name.
pub(crate) fn misread(decoded: &[Quantized], config: &Value) -> Option<Unsupported> {
    let widths = Widths::of(config);
    let odd = |name: &str, extents: &[u64], own: u64| {
        let axes = extents.get(extents.len().checked_sub(2)?..)?;
        widths.of_matrix(name).into_iter().zip(axes).zip(["rows", "columns"]).find_map(|((promised, found), axis)| {
            let (promised, what) = promised.filter(|(promised, _)| !promised.contains(found))?;
            let is_of = |other: u64, bits: u64| own != bits && found.checked_mul(own) == other.checked_mul(bits);
            let other = promised.iter().find(|other| BITS.iter().any(|bits| is_of(**other, *bits)))?;
            Some(format!("{found} {axis} instead of {other} ({what} in config.json)"))
        })
    };
    // Other codes are one each, or a fixed number in a byte.
    let is_word = |dtype: DType| matches!(dtype, DType::I32 | DType::U32);
    let mut found = decoded.iter().filter_map(|found| {
        let codes = found.template.operands().first().filter(|codes| is_word(codes.dtype))?;
        let bits =
            codes.dtype.bytes_of(codes.shape.elements())?.checked_mul(8)?.checked_div(found.shape().elements())?;
        Some((found, odd(&found.name, found.shape().extents(), bits)?))
    });
    let (first, what) = found.next()?;
    let others = found.count();
    let more = if others == 0 { String::new() } else { format!(", and {others} more") };
    let method = format!(
        "{}, whose settings give {:?} {what}{more}: the bits or the group of another module, or a config.json of another model",
        first.scheme, first.name
    );
    Some(Unsupported { method, codes: Vec::new() })
}

/// Finds the parts of one of several ranks of tensor parallelism under the configuration of the whole model: the inputs of all matrices
/// that end attention and MLP are the same part of what it promises, and their outputs are whole. Ranks are not told by one kind alone,
/// which may be pruned.
fn part_of_ranks(table: &TensorTable, config: &Value) -> Option<Problem> {
    const ENDS: [(&str, bool); 7] = [
        ("o_proj", true),
        ("out_proj", true),
        ("wo", true),
        ("down_proj", false),
        ("w2", false),
        ("fc2", false),
        ("dense_4h_to_h", false),
    ];
    let Widths { hidden, inner, heads } = Widths::of(config);
    // The first matrix of each size.
    let mut sizes: BTreeMap<(bool, u64), TensorInfo<'_>> = BTreeMap::new();
    for (_, info) in table.iter().filter(|(_, info)| info.dtype.is_float() && info.dtype.bits() >= 8) {
        let module = info.name.strip_suffix(".weight").unwrap_or(info.name);
        let last = module.rsplit('.').next().unwrap_or(module);
        let Some((_, is_attention)) = ENDS.iter().find(|(end, _)| *end == last) else { continue };
        let [.., rows, columns] = info.shape[..] else { continue };
        let found = match (hidden.contains(&rows), hidden.contains(&columns)) {
            (true, _) => columns,
            (false, true) => rows,
            // Of a tower, or of no rank.
            (false, false) => continue,
        };
        sizes.entry((*is_attention, found)).or_insert(info);
    }
    // How many times as much each may be.
    let times = |is_attention: bool, found: u64| -> BTreeSet<u64> {
        let promised = if is_attention { &heads } else { &inner };
        promised.iter().filter_map(|all| all.checked_div(found).filter(|times| times * found == *all)).collect()
    };
    let all = sizes.keys().map(|(is_attention, found)| times(*is_attention, *found));
    let ranks = all.reduce(|one, other| one.intersection(&other).copied().collect())?;
    let count = ranks.first().copied().filter(|count| *count > 1)?;
    let cut = |kind: bool| sizes.iter().find(|((of, found), _)| *of == kind && !times(kind, *found).contains(&1));
    let (Some(((_, found), info)), Some(_)) = (cut(true), cut(false)) else { return None };
    let fault = format!(
        "expected {} columns by config.json, found {found}, and all matrices that end attention or an MLP have 1/{count} of theirs: these \
         are the parts of one of {count} ranks of tensor parallelism; give the checkpoint of all ranks, or the model that they loaded",
        found * count
    );
    Some(Problem::of_shape(info.name, info.dtype, info.shape, fault))
}

/// Compares tensors with the configuration. Too short ones are refused if `are_ranks`, where the files are those of ranks. Returns a
/// warning otherwise, also of too long ones if the configuration is `of_another` repository: a vocabulary may have grown since.
pub(crate) fn compare(
    table: &TensorTable,
    config: &Value,
    (are_ranks, of_another): (bool, bool),
    problems: &mut Problems,
) -> Option<String> {
    const FIRST: usize = 4;
    let sizes = Sizes::of(config);
    let differs = |info: &TensorInfo<'_>, may_be_long: bool| {
        let (promised, what) = sizes.promised(info.name)?;
        let found = *info.shape.first()?;
        (found < promised || found > promised && !may_be_long).then_some((promised, what, found))
    };
    let is_embedding = |name: &str| EMBEDDINGS.iter().any(|end| name.ends_with(end));
    let is_part = |info: &TensorInfo<'_>| matches!(info.storage, Storage::Mosaic(_));
    if are_ranks && table.iter().any(|(_, info)| is_part(&info)) {
        let found = table.iter().filter_map(|(_, info)| Some((info, differs(&info, true)?)));
        for (info, (promised, what, rows)) in found.take(FIRST) {
            let fault = format!(
                "expected {promised} rows by {what} in config.json, found {rows}: files of ranks are missing, or the configuration is that \
                 of another model"
            );
            problems.push(Problem::of_shape(info.name, info.dtype, info.shape, fault));
        }
        return None;
    }
    if let Some(problem) = part_of_ranks(table, config) {
        problems.push(problem);
        return None;
    }
    // Heads and hidden units of layers differ in pruned models, and their stacks say so.
    let mut embeddings =
        table.iter().map(|(_, info)| info).filter(|info| is_embedding(info.name) && info.quantized().is_none());
    let (info, (promised, what, rows)) = embeddings.find_map(|info| Some((info, differs(&info, !of_another)?)))?;
    Some(format!("{}: {rows} rows, and config.json promises {promised} ({what})", info.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_have_the_sizes_of_the_text_model() {
        let config = serde_json::json!({
            "hidden_size": 999, "vision_config": {"intermediate_size": 7, "head_dim": 3},
            "text_config": {
                "hidden_size": 64, "intermediate_size": [96, 128], "moe_intermediate_size": 24, "n_shared_experts": 2,
                "num_attention_heads": 4, "head_dim": 32, "v_head_dim": 8, "linear_attn_config": {"num_heads": 5, "head_dim": 16},
            },
        });
        let widths = Widths::of(&config);
        let rows: [(&str, [&[u64]; 2]); 9] = [
            ("model.layers.0.self_attn.q_proj.weight", [&[], &[64]]),
            ("model.layers.0.self_attn.o_proj.weight", [&[64], &[128, 32, 64, 80]]),
            ("model.layers.0.mlp.down_proj.weight", [&[64], &[96, 128, 24, 192, 48]]),
            ("language_model.model.layers.7.mlp.switch_mlp.up_proj.weight", [&[24, 96], &[64]]),
            ("model.layers.7.mlp.experts.11.gate_proj.weight", [&[24], &[64]]),
            ("lm_head.weight", [&[], &[64]]),
            ("vision_tower.layers.0.mlp.up_proj.weight", [&[], &[]]),
            ("model.layers.0.shared_transformer.self_attn.q_proj.weight", [&[], &[]]),
            ("model.layers.0.mlp.down_proj.bias", [&[], &[]]),
        ];
        for (name, expected) in rows {
            for (found, expected) in widths.of_matrix(name).into_iter().zip(expected) {
                let found = found.map_or(&[][..], |(sizes, _)| sizes);
                assert!(expected.iter().all(|size| found.contains(size)), "{name}: {found:?}, expected {expected:?}");
                assert_eq!(found.is_empty(), expected.is_empty(), "{name}: {found:?}");
                assert!(!found.contains(&7) && !found.contains(&999), "{name}: {found:?}");
            }
        }
        let draft = serde_json::json!({"hidden_size": 64, "draft_vocab_size": 9});
        assert!(Widths::of(&draft).hidden.is_empty());
    }

    #[test]
    fn sizes_are_those_of_the_text_model() {
        let config = serde_json::json!({
            "vocab_size": 3,
            "text_config": {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
        });
        let sizes = Sizes::of(&config);
        for (name, expected) in [
            ("model.embed_tokens.weight", Some(64)),
            ("model.language_model.embed_tokens.weight", Some(64)),
            ("lm_head.weight", Some(64)),
            ("model.layers.3.self_attn.q_proj.weight", Some(32)),
            ("model.layers.3.self_attn.v_proj.weight", Some(16)),
            ("model.norm.weight", Some(32)),
            ("vision_tower.layers.0.self_attn.q_proj.weight", None),
            ("model.layers.3.mlp.output.weight", None),
        ] {
            assert_eq!(sizes.promised(name).map(|(rows, _)| rows), expected, "{name}");
        }
    }
}
