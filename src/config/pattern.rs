//! Patterns over names: `*` stands for any text, `?` for one character, `{0-3}` for any of these numbers. A pattern between slashes is a regular
//! expression. And names that are accepted: none, all, or those that match.

use std::fmt;

use regex::Regex;
use serde::Deserialize;

use super::value::{Fault, KeyForm, SettingValue, Toml, array, deserialize};

/// A pattern that a whole name must match.
#[derive(Clone)]
pub struct Pattern {
    text: String,
    regex: Regex,
}

/// Why a text is not a pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PatternError(String);

/// The forms of patterns, for messages.
const FORMS: &str =
    "in patterns * is any text, ? one character, {0-3} any of these numbers, and /.../ a regular expression";

impl Pattern {
    /// The forms that exist, if the text has signs that other programs know and this one takes as they are.
    pub fn advice(&self) -> Option<&'static str> {
        let is_foreign = self.text.contains(['[', '{']) && !self.text.starts_with('/');
        is_foreign.then_some(FORMS)
    }

    /// Reads a pattern. `/…/` is a regular expression that must match somewhere in the name. Any other pattern must
    /// match the whole name; `*` stands for any text, `?` for one character and `{0-3}` for any of these numbers.
    ///
    /// # Errors
    /// [`PatternError`] if the regular expression is malformed.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        let inner = text.strip_prefix('/').and_then(|rest| rest.strip_suffix('/')).filter(|inner| !inner.is_empty());
        let source = inner.map_or_else(
            || {
                let escaped = numbers(&regex::escape(text).replace(r"\*", ".*").replace(r"\?", "."));
                format!("^(?s:{escaped})$")
            },
            str::to_owned,
        );
        let regex = Regex::new(&source).map_err(|error| PatternError(format!("pattern {text:?}: {error}")))?;
        Ok(Self { text: text.to_owned(), regex })
    }

    /// Whether a name matches.
    pub fn matches(&self, name: &str) -> bool {
        self.regex.is_match(name)
    }

    /// The pattern as written.
    pub fn text(&self) -> &str {
        &self.text
    }
}

/// Most numbers that a range in a pattern may have.
const NUMBERS_MAX: u64 = 4096;

/// An escaped pattern with each `{a-b}` replaced by the numbers from `a` to `b`.
fn numbers(escaped: &str) -> String {
    let mut parts = escaped.split(r"\{");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let range = part.split_once(r"\}").and_then(|(range, rest)| {
            let (first, last) = range.split_once(r"\-")?;
            let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
            (first <= last && last - first < NUMBERS_MAX).then_some((first..=last, rest))
        });
        if let Some((range, rest)) = range {
            let all: Vec<String> = range.map(|number| number.to_string()).collect();
            text.extend(["(?:", &all.join("|"), ")", rest]);
        } else {
            text.extend([r"\{", part]);
        }
    }
    text
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl<'de> Deserialize<'de> for Pattern {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).map_err(serde::de::Error::custom)
    }
}

impl SettingValue for Pattern {
    fn from_word(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|error| error.to_string())
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.text().into())
    }
}

/// Names that are accepted.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Allow {
    /// None.
    #[default]
    Nothing,
    /// All.
    All,
    /// Names that match one of these.
    Matching(Vec<Pattern>),
}

impl Allow {
    /// Whether a name is accepted.
    pub fn accepts(&self, name: &str) -> bool {
        match self {
            Self::Nothing => false,
            Self::All => true,
            Self::Matching(patterns) => patterns.iter().any(|pattern| pattern.matches(name)),
        }
    }
}

impl From<bool> for Allow {
    fn from(all: bool) -> Self {
        if all { Self::All } else { Self::Nothing }
    }
}

impl SettingValue for Allow {
    const ONE: KeyForm = KeyForm::Allow;

    /// A pattern; `*` is everything.
    fn from_word(text: &str) -> Result<Self, String> {
        if text == "*" { Ok(Self::All) } else { Ok(Self::Matching(vec![Pattern::from_word(text)?])) }
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected true, false, a pattern or a list of patterns")]
        enum Keys {
            All(bool),
            One(Pattern),
            Several(Vec<Pattern>),
        }
        Ok(match deserialize(value)? {
            Keys::All(all) => all.into(),
            Keys::One(pattern) => Self::Matching(vec![pattern]),
            Keys::Several(patterns) => Self::Matching(patterns),
        })
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        match self {
            Self::Nothing => Ok(false.into()),
            Self::All => Ok(true.into()),
            Self::Matching(patterns) => array(patterns),
        }
    }

    fn join(&mut self, later: Self) {
        match (self, later) {
            (Self::All, _) => {}
            (Self::Matching(patterns), Self::Matching(more)) => patterns.extend(more),
            (earlier, later) => *earlier = later,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_names_unless_regular_expressions() {
        let matches = |pattern: &str, name: &str| Pattern::parse(pattern).unwrap().matches(name);
        assert!(matches("layers.*.wq", "layers.scanned.wq"));
        assert!(!matches("layers.*.wq", "layers.scanned.wq.bias"));
        assert!(!matches("layers.0.wq", "layersx0.wq"), "a dot is a dot");
        assert!(matches("*norm?", "final_norm1"));
        assert!(matches("layers.{0-1}.wq", "layers.1.wq") && !matches("layers.{0-1}.wq", "layers.10.wq"));
        assert!(matches("layers.{9-11}.*", "layers.10.wq") && !matches("layers.{9-11}.*", "layers.1.wq"));
        assert!(matches("a{b-c}", "a{b-c}") && matches("{3-1}", "{3-1}"), "only ranges of numbers");
        assert!(matches("/norm$/", "model.norm"));
        assert!(Pattern::parse("/(/").is_err());
        let has_advice = |pattern: &str| Pattern::parse(pattern).unwrap().advice().is_some();
        assert!(has_advice("a[0-1]") && has_advice("{a,b}") && !has_advice("*a?") && !has_advice("/[0-1]/"));
    }
}
