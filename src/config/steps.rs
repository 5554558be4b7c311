//! Which steps of a run are shown.

use std::num::NonZeroU32;

use super::value::SettingValue;

/// The steps of a run to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Steps {
    /// All of them.
    All,
    /// The newest ones, as many.
    Latest(NonZeroU32),
}

/// The word before a number.
const LATEST: &str = "latest";

impl Steps {
    /// Most steps that are shown; `None` for all.
    pub fn most(self) -> Option<usize> {
        match self {
            Self::All => None,
            Self::Latest(count) => Some(usize::try_from(count.get()).unwrap_or(usize::MAX)),
        }
    }
}

impl SettingValue for Steps {
    fn from_word(text: &str) -> Result<Self, String> {
        let count = match text {
            "all" => return Ok(Self::All),
            LATEST => Some(NonZeroU32::MIN),
            _ => text.strip_prefix("latest=").and_then(|count| count.parse().ok()),
        };
        count.map(Self::Latest).ok_or_else(|| format!("steps: expected all, latest or latest=N, found {text:?}"))
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(match self {
            Self::All => "all".into(),
            Self::Latest(NonZeroU32::MIN) => LATEST.into(),
            Self::Latest(count) => format!("latest={count}").into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_are_written() {
        for (word, most) in [("all", None), ("latest", Some(1)), ("latest=3", Some(3))] {
            let steps = Steps::from_word(word).unwrap();
            assert_eq!((steps.most(), steps.to_toml().unwrap()), (most, word.into()));
        }
        for word in ["", "3", "latest=0", "latest=x", "newest"] {
            assert!(Steps::from_word(word).unwrap_err().contains("expected all, latest or latest=N"), "{word}");
        }
    }
}
