//! Accepted deviations: none, all, or names by pattern.

use serde::Deserialize;

use super::{
    pattern::Pattern,
    value::{Fault, KeyForm, SettingValue, Toml, array, deserialize},
};

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

impl SettingValue for Pattern {
    fn from_word(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|error| error.to_string())
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.text().into())
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
