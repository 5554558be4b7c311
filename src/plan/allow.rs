//! What is accepted although it is not as expected: nothing, everything, or names by pattern.

use super::pattern::Pattern;

/// Names that are accepted.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Allow {
    /// None.
    #[default]
    Nothing,
    /// All.
    All,
    /// Those that match one of these.
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
