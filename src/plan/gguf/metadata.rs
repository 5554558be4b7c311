//! The names of a model, as llama.cpp's converter makes them of its directory's name.

use std::sync::LazyLock;

use ckfs_format::gguf::{GgufPairs, GgufValue, WrittenTensor};
use regex::Regex;
use serde::Deserialize;
use serde_json::Value;

use super::{
    super::library::embedded_table,
    card::{self, regex},
    hparams::f32_of,
};

/// The name of the parameter that leaves out the keys of the model card.
pub(super) const CARD: &str = "card";

/// Keys with the members of which they are made (`metadata.toml`).
#[derive(Debug, Deserialize)]
struct Keys {
    sampling: Vec<Vec<String>>,
    card: Vec<Vec<String>>,
    origins: Vec<Vec<String>>,
    lists: Vec<Vec<String>>,
}

static KEYS: LazyLock<Keys> = LazyLock::new(|| embedded_table(include_str!("metadata.toml")));

/// What a part of a model's name tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Basename,
    Size,
    Finetune,
    Version,
    Type,
}

/// The parts of a model's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct NameParts {
    full: String,
    organization: Option<String>,
    basename: Option<String>,
    finetune: Option<String>,
    version: Option<String>,
    size: Option<String>,
}

static VERSION: LazyLock<Regex> = LazyLock::new(|| regex(r"^(?i:(v|iter)?\d+([.]\d+)*)$"));
static TYPE: LazyLock<Regex> = LazyLock::new(|| regex(r"^(?i:i?q\d(_\w)*|b?fp?(16|32))$"));
static SIZE: LazyLock<Regex> =
    LazyLock::new(|| regex(r"^(?i:(([A]|\d+[x])?\d+([._]\d+)?[KMBT][\d]?|small|mini|medium|large|x?xl))$"));
static FINETUNE: LazyLock<Regex> = LazyLock::new(|| regex(r"^(?i:chat|instruct|vision|lora)$"));
static OF_HUB: LazyLock<Regex> = LazyLock::new(|| regex(r"^https?://huggingface.co/([^/]+/[^/]+)$"));
static NOT_TITLED: LazyLock<Regex> = LazyLock::new(|| regex(r"^(v\d+(?:\.\d+)*|\d.*)$"));

/// A part that looks like a size in the converter's spelling, and whether it is one of a model of so many parameters.
fn size_of(part: &str, parameters: u64) -> (String, bool) {
    let mut part = part.replace('_', ".");
    let is_digit = |c: char| c.is_ascii_digit();
    if let Some(last) = part.chars().last().filter(|last| is_digit(*last)) {
        // 7b1 is 7.1b.
        let unit = part.chars().rev().nth(1).unwrap_or_default();
        part = format!("{}.{last}{unit}", &part[..part.len() - 2]);
    }
    let unit = part.chars().last().unwrap_or_default();
    let number = &part[..part.len() - 1];
    if number.ends_with(is_digit) && "kmbt".contains(unit) {
        part = format!("{number}{}", unit.to_ascii_uppercase());
    }
    let unit = part.chars().last().unwrap_or_default();
    let power = " KMBT".find(unit).map_or(-1, |at| i32::try_from(at).unwrap_or(0));
    let label = part[..part.len() - 1].parse::<f64>().map(|number| number * 1000f64.powi(power));
    #[expect(clippy::cast_precision_loss, reason = "as in Python")]
    let is_far = |label: f64| (label - parameters as f64).abs() > (7 * parameters / 8) as f64;
    if label.is_ok_and(|label| parameters != 0 && is_far(label)) {
        // Probably a length of contexts.
        return (format!("{}{}", &part[..part.len() - 1], unit.to_ascii_lowercase()), false);
    }
    (part, true)
}

impl NameParts {
    fn of(id: &str, parameters: u64) -> Self {
        if id.contains(' ') {
            return Self { full: id.to_owned(), ..Self::default() };
        }
        let (organization, full) = id.split_once('/').map_or((None, id), |(before, after)| (Some(before), after));
        let mut parts: Vec<(String, Vec<Kind>)> =
            full.split('-').filter(|part| !part.is_empty()).map(|part| (part.to_owned(), Vec::new())).collect();
        for (at, (part, kinds)) in parts.iter_mut().enumerate() {
            if VERSION.is_match(part) {
                kinds.push(Kind::Version);
            } else if TYPE.is_match(part) {
                kinds.push(Kind::Type);
                *part = part.to_uppercase();
            } else if at > 0 && SIZE.is_match(part) {
                let (spelled, is_size) = size_of(part, parameters);
                kinds.push(if is_size { Kind::Size } else { Kind::Finetune });
                *part = spelled;
            } else if at > 0 && FINETUNE.is_match(part) {
                kinds.push(Kind::Finetune);
            }
        }
        let has_number = |part: &str| part.contains(|c: char| c.is_ascii_digit());
        if parts.iter().any(|(part, kinds)| kinds.contains(&Kind::Size) && has_number(part)) {
            let words = parts.iter_mut().filter(|(part, _)| part.chars().all(char::is_alphabetic));
            words.for_each(|(_, kinds)| kinds.retain(|kind| *kind != Kind::Size));
        }
        let mut is_start = true;
        for (part, kinds) in &mut parts {
            let is_word = kinds.is_empty() && part.starts_with(char::is_alphabetic);
            if is_start && (is_word || kinds.contains(&Kind::Version)) {
                kinds.push(Kind::Basename);
            } else {
                is_start = false;
                if kinds.is_empty() {
                    kinds.push(Kind::Finetune);
                }
            }
        }
        for (_, kinds) in parts.iter_mut().rev() {
            if !(kinds.contains(&Kind::Basename) && kinds.len() > 1) {
                break;
            }
            kinds.retain(|kind| *kind != Kind::Basename);
        }
        let joined = |kind: Kind| -> Option<String> {
            let mut found: Vec<&str> = Vec::new();
            for (part, kinds) in &parts {
                let is_of = kinds.contains(&kind) && !(kind == Kind::Version && kinds.contains(&Kind::Basename));
                if is_of && !(kind == Kind::Size && found.contains(&part.as_str())) {
                    found.push(part);
                }
            }
            (!found.is_empty()).then(|| found.join("-"))
        };
        let (finetune, version, size) = (joined(Kind::Finetune), joined(Kind::Version), joined(Kind::Size));
        let is_clear = finetune.is_some() || version.is_some() || size.is_some();
        Self {
            full: full.to_owned(),
            organization: organization.filter(|name| !name.starts_with('.')).map(str::to_owned),
            basename: joined(Kind::Basename).filter(|_| is_clear),
            finetune,
            version,
            size,
        }
    }
}

/// Words with capitals, as in a title.
fn title(id: &str) -> String {
    let titled = |word: &str| {
        let has_case = word.chars().any(char::is_alphabetic);
        if !has_case || word != word.to_lowercase() || NOT_TITLED.is_match(word) {
            return word.to_owned();
        }
        let mut before = false;
        let letters = word.chars().map(|letter| {
            let upper = !std::mem::replace(&mut before, letter.is_alphabetic());
            if upper { letter.to_uppercase().to_string() } else { letter.to_string() }
        });
        letters.collect()
    };
    id.trim().replace('-', " ").split_whitespace().map(titled).collect::<Vec<String>>().join(" ")
}

/// A number of parameters with two digits, or all of those before the point, and its unit.
fn rounded(parameters: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "as in Python")]
    let count = parameters as f64;
    let (scaled, unit) = match count {
        _ if count > 1e12 => (count * 1e-12, "T"),
        _ if count > 1e9 => (count * 1e-9, "B"),
        _ if count > 1e6 => (count * 1e-6, "M"),
        _ => (count * 1e-3, "K"),
    };
    let whole = format!("{:.0}", scaled.round_ties_even());
    let digits = 2usize.saturating_sub(whole.trim_start_matches('0').len());
    format!("{scaled:.digits$}{unit}")
}

/// Parameters in all, and the label of their number.
fn size_label(tensors: &[WrittenTensor]) -> (u64, String) {
    let (mut all, mut shared, mut of_expert, mut experts, mut count) = (0, 0, 0, 0, 0);
    for WrittenTensor { name, shape, .. } in tensors {
        let size: u64 = shape.iter().product();
        all += size;
        let axis = shape.len().checked_sub(if name.contains(".bias") { 2 } else { 3 });
        match axis.filter(|_| name.contains("_exps.") && shape.len() >= 3) {
            Some(axis) => {
                of_expert += size / shape[axis].max(1);
                experts += shape[axis];
                count += 1;
            }
            None => shared += size,
        }
    }
    match experts.checked_div(count).filter(|experts| *experts > 0) {
        Some(experts) => (all, format!("{experts}x{}", rounded(shared + of_expert))),
        None => (all, rounded(all)),
    }
}

/// What is told of a model. `id` is the name of its directory or its repository, `card` its `README.md`, if that gives keys.
pub(super) struct Told<'a> {
    pub(super) id: &'a str,
    pub(super) is_remote: bool,
    pub(super) config: &'a Value,
    pub(super) generation: Value,
    pub(super) card: Option<String>,
}

/// Sets the keys about the model as a whole.
///
/// # Errors
/// A member is not as it must be.
pub(super) fn set(pairs: &mut GgufPairs, told: &Told<'_>, tensors: &[WrittenTensor]) -> Result<(), String> {
    let mut set = |key: &str, text: String| pairs.set(format!("general.{key}"), GgufValue::Text(text));
    set("type", "model".to_owned());
    for row in &KEYS.sampling {
        let [key, kind, members @ ..] = row.as_slice() else { continue };
        let value = members.iter().find_map(|name| told.generation.get(name)).filter(|value| !value.is_null());
        let Some(value) = value else { continue };
        let whole = || value.as_i64().and_then(|value| i32::try_from(value).ok());
        let number = if kind == "float" { f32_of(value).map(GgufValue::F32) } else { whole().map(GgufValue::I32) };
        let wrong = || format!("generation_config.json: {key}: expected a number, found {value}");
        pairs.set(format!("general.sampling.{key}"), number.ok_or_else(wrong)?);
    }
    let (parameters, label) = size_label(tensors);
    let is_used = |name: &str| {
        [&KEYS.card, &KEYS.origins, &KEYS.lists]
            .into_iter()
            .flatten()
            .any(|row| row[1..].iter().any(|member| member == name))
    };
    let card = told.card.as_deref().map(|card| card::front_matter(card, &is_used)).transpose();
    let card = card
        .map_err(|reason| format!("README.md: {reason}; --set {CARD}=none writes no keys of the model card"))?
        .unwrap_or_default();
    let by_path = told.config["_name_or_path"].as_str().filter(|path| path.matches('/').count() <= 1);
    // The directory of a repository of the Hub has the name of its commit, which tells nothing.
    let by_directory = (!told.is_remote).then_some(told.id);
    let names: Vec<NameParts> =
        by_path.into_iter().chain(by_directory).map(|id| NameParts::of(id, parameters)).collect();
    let first = |part: fn(&NameParts) -> Option<&String>| names.iter().find_map(part).cloned();
    for row in &KEYS.card {
        let value = row[1..].iter().filter_map(|name| card.get(name)).find(|value| !value.is_null());
        let text = match (row[0].as_str(), value) {
            ("name", _) if told.is_remote => Some(told.id.to_owned()),
            ("license", Some(all @ Value::Array(_))) => Some(texts(all).join(",")),
            (key, Some(value)) => {
                let wrong = || {
                    format!(
                        "README.md: {key}: expected a text, found {value}; --set {CARD}=none writes no keys of the model card"
                    )
                };
                Some(value.as_str().ok_or_else(wrong)?.to_owned())
            }
            ("name", None) => names.first().map(|parts| title(&parts.full)),
            ("version", None) => first(|parts| parts.version.as_ref()),
            ("organization", None) => first(|parts| parts.organization.as_ref()).map(|name| title(&name)),
            ("finetune", None) => first(|parts| parts.finetune.as_ref()),
            ("basename", None) => first(|parts| parts.basename.as_ref()),
            ("size_label", None) => {
                first(|parts| parts.size.as_ref()).or_else(|| (parameters > 0).then(|| label.clone()))
            }
            _ => None,
        };
        pairs.set(format!("general.{}", row[0]), GgufValue::Text(text.unwrap_or_default()));
    }
    for row in &KEYS.origins {
        let Some(value) = row[1..].iter().find_map(|name| card.get(name)) else { continue };
        let ids = texts(value);
        pairs.set(format!("general.{}.count", row[0]), GgufValue::U32(u32::try_from(ids.len()).unwrap_or(u32::MAX)));
        for (number, id) in ids.into_iter().enumerate() {
            let is_url = ["http://", "https://", "ssh://"].iter().any(|scheme| id.starts_with(scheme));
            let of_hub = if is_url {
                OF_HUB.captures(id).and_then(|parts| parts.get(1)).map(|id| id.as_str())
            } else {
                Some(id)
            };
            let parts = of_hub.map(|id| NameParts::of(id, parameters)).unwrap_or_default();
            let by_name = parts.organization.as_ref().map(|of| format!("https://huggingface.co/{of}/{}", parts.full));
            for (key, text) in [
                ("name", title(&parts.full)),
                ("version", parts.version.unwrap_or_default()),
                ("organization", title(&parts.organization.unwrap_or_default())),
                ("repo_url", if is_url { id.to_owned() } else { by_name.unwrap_or_default() }),
            ] {
                pairs.set(format!("general.{}.{number}.{key}", row[0]), GgufValue::Text(text));
            }
        }
    }
    for row in &KEYS.lists {
        let values = row[1..].iter().filter_map(|name| card.get(name));
        let all = values.flat_map(texts).map(str::to_owned).collect();
        pairs.set(format!("general.{}", row[0]), GgufValue::Texts(all));
    }
    Ok(())
}

/// The texts of a list, or the one.
fn texts(value: &Value) -> Vec<&str> {
    let all = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    all.iter().filter_map(Value::as_str).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        // As gguf.Metadata.get_model_id_components has them: basename, finetune, version, size.
        for (id, parameters, expected) in [
            ("Llama-3.2-1B-Instruct", 1_235_814_400, ["Llama-3.2", "Instruct", "", "1B"]),
            ("org/Mistral-7B-v0.1", 7_241_732_096, ["Mistral", "", "v0.1", "7B"]),
            ("Phi-3-mini-4k-instruct", 3_821_079_552, ["Phi-3", "4k-instruct", "", "mini"]),
            ("bloom-7b1", 7_100_000_000, ["bloom", "", "", "7.1B"]),
            ("model", 1000, ["", "", "", ""]),
        ] {
            let found = NameParts::of(id, parameters);
            let found = [found.basename, found.finetune, found.version, found.size].map(Option::unwrap_or_default);
            assert_eq!(found, expected, "{id}");
        }
        assert_eq!(title("Llama-3.2-1B-instruct_v2 x1y"), "Llama 3.2 1B Instruct_V2 X1Y");
        let labels = [999, 45_000, 1_235_814_400, 150_000].map(rounded);
        assert_eq!(labels, ["1.0K", "45K", "1.2B", "150K"]);
    }
}
