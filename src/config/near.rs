//! The name that a mistyped one most resembles.

/// Shortest text that counts as the beginning of a name.
const BEGINNING_BYTES_MIN: usize = 3;

/// The name as it is compared: letters of either case, and dashes and underscores, are the same.
pub fn folded(name: &str) -> String {
    name.to_ascii_lowercase().replace('-', "_")
}

/// The name that equals this text but for case and dashes, that begins with it, or else the most similar one, if fewer than
/// half of its characters differ.
pub fn nearest<'a>(found: &str, names: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
    let wanted = folded(found);
    if let Some(same) = names.clone().find(|name| *name == found) {
        return Some(same);
    }
    let begun = names.clone().find(|name| found.len() >= BEGINNING_BYTES_MIN && folded(name).starts_with(&wanted));
    let (distance, name) = names.map(|name| (strsim::damerau_levenshtein(&wanted, &folded(name)), name)).min()?;
    if distance == 0 { Some(name) } else { begun.or_else(|| (distance * 2 < name.chars().count()).then_some(name)) }
}

/// What other programs call a thing, by the word for it here: kind of name, their words, ours. A word ends where the text has a
/// digit, a dash or a dot.
const MEANT: [(&str, &[&str], &str); 6] = [
    ("layout", &["huggingface", "llama", "qwen", "mistral", "mixtral", "gemma", "deepseek", "safetensors"], "hf"),
    ("layout", &["jax", "flax"], "maxtext"),
    ("layout", &["mcore"], "megatron"),
    ("scheme", &["w4a16"], "int4"),
    ("scheme", &["w8a8", "w8a16"], "int8-channel"),
    ("scheme", &["fp4"], "nvfp4"),
];

/// That there is no `what` of this name, with the one that other programs call so, or else the nearest one, if one is near.
pub fn did_you_mean<'a>(what: &str, found: &str, names: impl Iterator<Item = &'a str> + Clone) -> Option<String> {
    let wanted = folded(found);
    let begins = |word: &&str| {
        wanted.strip_prefix(*word).is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphabetic()))
    };
    let foreign = MEANT.iter().find(|(kind, words, _)| *kind == what && words.iter().any(begins));
    let meant = foreign.and_then(|(_, _, here)| names.clone().find(|name| name == here));
    meant.or_else(|| nearest(found, names)).map(|near| format!("unknown {what} `{found}`; did you mean `{near}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_name_is_proposed_and_a_far_one_is_not() {
        let layouts = ["canonical", "hf", "maxtext", "maxtext-unscanned", "megatron", "vllm"];
        let axes = ["fsdp", "tensor", "expert", "dp"];
        let files = ["embed", "final_norm", "layers", "lm_head"];
        let rows: &[(&[&str], &str, Option<&str>)] = &[
            (&layouts, "maxtxt", Some("maxtext")),
            (&layouts, "MaxText", Some("maxtext")),
            (&layouts, "maxtext_unscanned", Some("maxtext-unscanned")),
            (&layouts, "mega", Some("megatron")),
            (&layouts, "vlm", Some("vllm")),
            (&layouts, "x", None),
            (&layouts, "safetensors", None),
            (&axes, "fdsp", Some("fsdp")),
            (&axes, "tensors", Some("tensor")),
            (&axes, "tp", None),
            (&files, "embd", Some("embed")),
            (&files, "lm-head", Some("lm_head")),
            (&files, "norm", None),
            (&files, "", None),
            (&[], "x", None),
        ];
        for (names, found, expected) in rows {
            assert_eq!(nearest(found, names.iter().copied()), *expected, "{found}");
        }
        let text = did_you_mean("layout", "maxtxt", layouts.into_iter());
        assert_eq!(text.as_deref(), Some("unknown layout `maxtxt`; did you mean `maxtext`?"));
        for (found, meant) in
            [("huggingface", Some("hf")), ("Llama-3.1", Some("hf")), ("llamas", None), ("jax", Some("maxtext"))]
        {
            let text = did_you_mean("layout", found, layouts.into_iter());
            assert_eq!(
                text.is_some_and(|text| text.ends_with(&format!("`{}`?", meant.unwrap_or("-")))),
                meant.is_some(),
                "{found}"
            );
        }
    }
}
