//! The names of files, and the parts of a weight file's: `model.fp16-00001-of-00002.safetensors` is file 1 of 2 of the variant fp16 of `model`.
//!
//! Programs write the number in several ways (`model-00001-of-00002`, `model_1_of_2`, `model.safetensors-00001-of-00002`), and
//! the variant before or after it (`model-00001-of-00002.fp16`, the older way of diffusers).

use std::{cmp::Ordering, path::Path};

/// How the names of indexes end.
pub(crate) const INDEX_SUFFIX: &str = ".safetensors.index.json";
/// How the names of indexes of files of `torch.save` end.
pub(crate) const TORCH_INDEX_SUFFIX: &str = ".bin.index.json";
/// How the names of weight files end.
const ENDINGS: [&str; 6] = [".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf"];

/// The name of a weight file in its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WeightName<'a> {
    /// What is before the number and the variant.
    pub(crate) stem: &'a str,
    /// The word that tells sets of the same weights apart: `fp16`, `non_ema`.
    pub(crate) variant: Option<&'a str>,
    /// The number of the file and the number of files, as written.
    pub(crate) number: Option<(&'a str, &'a str)>,
    /// How the name ends.
    pub(crate) ending: &'a str,
}

impl<'a> WeightName<'a> {
    /// The parts of a name; `None` if it is not that of a weight file.
    pub(crate) fn of(path: &'a str) -> Option<Self> {
        let ending = ENDINGS.iter().find(|ending| path.ends_with(**ending))?;
        let (name, ending) = path.split_at(path.len() - ending.len());
        let Some([before, number, total, after]) = numbered(name) else {
            let (stem, variant) = split_variant(name);
            return Some(Self { stem, variant, number: None, ending });
        };
        let after = after.trim_start_matches(SEPARATORS);
        let (stem, variant) = split_variant(before.trim_end_matches(SEPARATORS));
        let variant = if after.is_empty() { variant } else { Some(after) };
        Some(Self { stem, variant, number: Some((number, total)), ending })
    }
}

/// The variant that an index describes: `model.safetensors.index.fp16.json`, `model.safetensors.fp16.index.json` or
/// `model.fp16.safetensors.index.json`. `None` if the file is no index; `Some(None)` if the index is of no variant.
#[expect(clippy::option_option, reason = "an index of no variant is an index too")]
pub(crate) fn variant_of_index<'a>(path: &'a str, suffix: &str) -> Option<Option<&'a str>> {
    let of_files = suffix.strip_suffix(".index.json")?;
    let name = path.strip_suffix(".json")?;
    let (stem, rest) = name.split_once(&format!("{of_files}."))?;
    let own = split_variant(stem).1;
    if rest == "index" {
        return Some(own);
    }
    let word = rest.strip_prefix("index.").or_else(|| rest.strip_suffix(".index"))?;
    is_variant(word).then_some(Some(word))
}

/// Whether a file is an index of safetensors or of files of torch, of any variant.
pub(crate) fn is_any_index(path: &str) -> bool {
    [INDEX_SUFFIX, TORCH_INDEX_SUFFIX].iter().any(|suffix| variant_of_index(path, suffix).is_some())
}

const SEPARATORS: [char; 3] = ['-', '_', '.'];

/// What is before the last `N-of-M` of a name, both numbers, and what is after them, with any of the separators or none.
fn numbered(name: &str) -> Option<[&str; 4]> {
    let trimmed_of = |at: usize| {
        let (left, right) = (&name[..at], &name[at + 2..]);
        let left = left.strip_suffix(SEPARATORS).unwrap_or(left);
        let right = right.strip_prefix(SEPARATORS).unwrap_or(right);
        let before = left.trim_end_matches(|digit: char| digit.is_ascii_digit());
        let after = right.trim_start_matches(|digit: char| digit.is_ascii_digit());
        let (number, total) = (&left[before.len()..], &right[..right.len() - after.len()]);
        // A letter beside the number makes it a part of another word, `v1-of-2`, unless it has zeros as the total: `model00001-of-00002`.
        let is_padded = number.starts_with('0') && number.len() > 1 && number.len() == total.len();
        let stands_alone = is_padded || before.is_empty() || before.ends_with(SEPARATORS);
        let ends = after.is_empty() || after.starts_with(SEPARATORS);
        (!number.is_empty() && !total.is_empty() && stands_alone && ends).then_some([before, number, total, after])
    };
    name.rmatch_indices("of").find_map(|(at, _)| trimmed_of(at))
}

/// The stem and the variant of a name without its number.
fn split_variant(name: &str) -> (&str, Option<&str>) {
    match name.rsplit_once('.') {
        Some((stem, word)) if !stem.is_empty() && is_variant(word) => (stem, Some(word)),
        Some(_) | None => (name, None),
    }
}

/// Whether a word may name a variant. A number is one of several files, as in `consolidated.00`.
fn is_variant(word: &str) -> bool {
    let is_container = ["safetensors", "bin", "pt", "pth", "ckpt", "index"].contains(&word);
    !is_container
        && word.bytes().any(|byte| byte.is_ascii_alphabetic())
        && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

/// Whether a name ends with this one, as a whole or after a dot.
pub(crate) fn ends_with_name(name: &str, end: &str) -> bool {
    name.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Whether a word is digits, at least one.
pub(crate) fn is_number(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit())
}

/// A path with `*` for the number of the rank whose part of each tensor the file holds, as in `model-00001-TP-*.safetensors`. `None` if
/// its words say no rank.
pub(crate) fn of_any_rank(path: &str) -> Option<String> {
    // The files of Meta's releases are numbered by the rank alone.
    const RANKS: [&str; 3] = ["tp", "rank", "consolidated"];
    let words: Vec<&str> = path.split_inclusive(|letter: char| !letter.is_ascii_alphanumeric()).collect();
    let trimmed = |at: usize| words.get(at).map_or("", |word| word.trim_end_matches(|c: char| !c.is_alphanumeric()));
    let found = (0..words.len()).find_map(|at| {
        let lower = trimmed(at).to_ascii_lowercase();
        let rest = RANKS.iter().find_map(|rank| lower.strip_prefix(rank))?;
        let before: usize = words[..at].iter().map(|word| word.len()).sum();
        match rest {
            "" if is_number(trimmed(at + 1)) => Some((before + words[at].len(), trimmed(at + 1).len())),
            number if is_number(number) => Some((before + lower.len() - number.len(), number.len())),
            _ => None,
        }
    });
    let (start, length) = found?;
    Some(format!("{}*{}", &path[..start], &path[start + length..]))
}

pub(crate) fn is_safetensors(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "safetensors")
}

pub(crate) fn at_top(path: &str) -> bool {
    !path.contains('/')
}

/// Order of names in which numbers count as numbers: `layers-2` before `layers-10`.
pub fn natural(left: &str, right: &str) -> Ordering {
    let (mut a, mut b) = (left.as_bytes(), right.as_bytes());
    while let (Some(x), Some(y)) = (a.first(), b.first()) {
        let order = if x.is_ascii_digit() && y.is_ascii_digit() {
            let number = |bytes: &[u8]| bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
            let ((na, rest_a), (nb, rest_b)) = (a.split_at(number(a)), b.split_at(number(b)));
            (a, b) = (rest_a, rest_b);
            let significant = |digits: &'_ [u8]| digits.iter().take_while(|digit| **digit == b'0').count();
            let (na, nb) = (&na[significant(na)..], &nb[significant(nb)..]);
            na.len().cmp(&nb.len()).then(na.cmp(nb))
        } else {
            (a, b) = (&a[1..], &b[1..]);
            x.cmp(y)
        };
        if order != Ordering::Equal {
            return order;
        }
    }
    a.len().cmp(&b.len()).then_with(|| left.cmp(right))
}

#[cfg(test)]
mod tests {
    use super::{super::sets::incomplete_sets, *};

    #[test]
    fn files_of_ranks_by_their_names() {
        let cases = [
            ("pytorch_model-00001-TP-007.safetensors", Some("pytorch_model-00001-TP-*.safetensors")),
            ("a/model-tp3.safetensors", Some("a/model-tp*.safetensors")),
            ("consolidated.03.pth", Some("consolidated.*.pth")),
            ("mp_rank_00_model.pt", Some("mp_rank_*_model.pt")),
            ("rank12.safetensors", Some("rank*.safetensors")),
            ("pytorch_model-00000-TP-common.safetensors", None),
            ("model-00001-of-00002.safetensors", None),
            ("ranking-1.safetensors", None),
            ("http-1.safetensors", None),
        ];
        for (path, expected) in cases {
            assert_eq!(of_any_rank(path).as_deref(), expected, "{path}");
        }
    }

    #[test]
    fn names_of_weight_files_in_their_parts() {
        type Parts = (&'static str, Option<&'static str>, Option<(&'static str, &'static str)>);
        let cases: [(&str, Parts); 19] = [
            ("model00001-of-00003.safetensors", ("model", None, Some(("00001", "00003")))),
            ("model.safetensors", ("model", None, None)),
            ("model-00001-of-00003.safetensors", ("model", None, Some(("00001", "00003")))),
            ("a-b-1-of-2.safetensors", ("a-b", None, Some(("1", "2")))),
            ("model_00001-of-00002.safetensors", ("model", None, Some(("00001", "00002")))),
            ("model_1_of_2.safetensors", ("model", None, Some(("1", "2")))),
            ("model-1of2.bin", ("model", None, Some(("1", "2")))),
            ("model.safetensors-00001-of-00002.safetensors", ("model.safetensors", None, Some(("00001", "00002")))),
            ("model-00001-of-00002.fp16.safetensors", ("model", Some("fp16"), Some(("00001", "00002")))),
            ("model.fp16-00001-of-00002.safetensors", ("model", Some("fp16"), Some(("00001", "00002")))),
            ("pytorch_model.fp16-1-of-2.bin", ("pytorch_model", Some("fp16"), Some(("1", "2")))),
            ("diffusion_pytorch_model.non_ema.safetensors", ("diffusion_pytorch_model", Some("non_ema"), None)),
            ("consolidated.00.safetensors", ("consolidated.00", None, None)),
            ("model-x-of-3.safetensors", ("model-x-of-3", None, None)),
            ("model-v1-of-3.safetensors", ("model-v1-of-3", None, None)),
            ("1-of-2.safetensors", ("", None, Some(("1", "2")))),
            ("proof.safetensors", ("proof", None, None)),
            ("shard-00002-model-00001-of-00001.safetensors", ("shard-00002-model", None, Some(("00001", "00001")))),
            ("pytorch_model.bin", ("pytorch_model", None, None)),
        ];
        for (path, (stem, variant, number)) in cases {
            let found = WeightName::of(path).unwrap();
            assert_eq!((found.stem, found.variant, found.number), (stem, variant, number), "{path}");
        }
        assert_eq!(WeightName::of("tokenizer.json"), None);
    }

    #[test]
    fn indexes_of_variants() {
        for (path, expected) in [
            ("model.safetensors.index.json", Some(None)),
            ("model.safetensors.index.fp16.json", Some(Some("fp16"))),
            ("model.safetensors.fp16.index.json", Some(Some("fp16"))),
            ("model.fp16.safetensors.index.json", Some(Some("fp16"))),
            ("pytorch_model.bin.index.json", None),
            ("config.json", None),
        ] {
            assert_eq!(variant_of_index(path, INDEX_SUFFIX), expected, "{path}");
        }
        assert_eq!(variant_of_index("pytorch_model.bin.index.fp16.json", TORCH_INDEX_SUFFIX), Some(Some("fp16")));
    }

    #[test]
    fn sets_are_counted_in_every_spelling() {
        let missing = |paths: &[&str]| {
            let (found, _) = incomplete_sets(paths.iter().copied());
            found.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        };
        for complete in [
            &["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"][..],
            &["model_1_of_2.bin", "model_2_of_2.bin"],
            &["model-00001-of-00001.safetensors"],
            &["a-00000-of-00002.safetensors", "a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors"],
            &["shard-00001-model-00001-of-00001.safetensors", "shard-00002-model-00001-of-00001.safetensors"],
            &["m-1-of-2.fp16.bin", "m-2-of-2.fp16.bin"],
            &["a-00000-of-00002.safetensors", "a-00001-of-00002.safetensors"],
        ] {
            assert_eq!(missing(complete), "", "{complete:?}");
        }
        for half in [
            &["model-00001-of-00002.fp16.safetensors"][..],
            &["model.fp16-00002-of-00002.safetensors"],
            &["model_00001-of-00002.safetensors"],
            &["pytorch_model-00001-of-00002.bin"],
            &["model_2_of_2.pt"],
            &["a-00000-of-00003.safetensors", "a-00001-of-00003.safetensors"],
            &["a-00000-of-00001.safetensors"],
            // One file of each variant is no whole set.
            &["m-1-of-2.fp16.bin", "m-2-of-2.bf16.bin"],
            &["m-1-of-99999999999999999999.bin"],
        ] {
            assert_ne!(missing(half), "", "{half:?}");
        }
    }

    #[test]
    fn numbers_in_names_count_as_numbers() {
        let mut names =
            ["layers-10", "layers-9", "layers-010", "layers", "m-00002-of-00010", "m-00001-of-00010", "layers-9b"];
        names.sort_by(|left, right| natural(left, right));
        assert_eq!(
            names,
            ["layers", "layers-9", "layers-9b", "layers-010", "layers-10", "m-00001-of-00010", "m-00002-of-00010"]
        );
    }
}
