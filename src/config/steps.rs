//! Which steps of a run are shown, and what is averaged.

use std::num::NonZeroU32;

use super::{
    rules::table,
    value::{Fault, SettingValue, Toml, read_as},
};

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

/// The terms of an average.
#[derive(Clone, Debug, PartialEq)]
pub enum Average {
    /// The newest steps of a run, as many, each with the same weight.
    Last(u16),
    /// Steps of a run, by number, with their weights.
    Steps(Vec<(u64, f32)>),
    /// Sources with their weights.
    Sources(Vec<(String, f32)>),
}

/// One source in a file.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct SourceTerm {
    source: String,
    weight: f64,
}

#[derive(serde::Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text such as \"last=5\" or \"100=0.25,200=0.75\", or tables with source and weight"
)]
enum AverageForm {
    Word(String),
    Sources(Vec<SourceTerm>),
}

/// A weight by its decimal digits, so that a file and a command line give the same.
fn weight(text: &str) -> Option<f32> {
    text.trim().parse().ok().filter(|weight: &f32| weight.is_finite())
}

impl SettingValue for Average {
    fn from_word(text: &str) -> Result<Self, String> {
        let wrong = || format!("average: expected last=N or STEP=WEIGHT,..., found {text:?}");
        if let Some(count) = text.strip_prefix("last=") {
            return count.parse().ok().filter(|count| *count > 0).map(Self::Last).ok_or_else(wrong);
        }
        let term = |term: &str| {
            let (step, of_step) = term.split_once('=')?;
            Some((step.trim().parse().ok()?, weight(of_step)?))
        };
        text.split(',').map(term).collect::<Option<_>>().map(Self::Steps).ok_or_else(wrong)
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        let terms = match self {
            Self::Last(count) => return Ok(format!("last={count}").into()),
            Self::Steps(steps) => {
                let words: Vec<String> = steps.iter().map(|(step, weight)| format!("{step}={weight}")).collect();
                return Ok(words.join(",").into());
            }
            Self::Sources(sources) => sources,
        };
        let term = |(source, weight): &(String, f32)| {
            let number = weight.to_string().parse::<f64>().map_err(|error| error.to_string())?;
            Ok(table([("source", source.as_str().into()), ("weight", number.into())]))
        };
        Ok(toml::Value::Array(terms.iter().map(term).collect::<Result<_, String>>()?))
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        read_as(value, |form| match form {
            AverageForm::Word(word) => Self::from_word(&word),
            AverageForm::Sources(terms) if terms.is_empty() => Err("average: expected at least one source".to_owned()),
            AverageForm::Sources(terms) => {
                let term = |SourceTerm { source, weight: given }| match weight(&given.to_string()) {
                    Some(found) => Ok((source, found)),
                    None => Err(format!("average: expected a finite weight, found {given}")),
                };
                terms.into_iter().map(term).collect::<Result<_, _>>().map(Self::Sources)
            }
        })
    }
}

impl Average {
    /// The sources, if they are given as such.
    pub fn sources_mut(&mut self) -> impl Iterator<Item = &mut String> {
        let sources = if let Self::Sources(sources) = self { sources.as_mut_slice() } else { &mut [] };
        sources.iter_mut().map(|(source, _)| source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_steps_are_read_as_they_are_written() {
        for (word, most) in [("all", None), ("latest", Some(1)), ("latest=3", Some(3))] {
            let steps = Steps::from_word(word).unwrap();
            assert_eq!((steps.most(), steps.to_toml().unwrap()), (most, word.into()));
        }
        for word in ["", "3", "latest=0", "latest=x", "newest"] {
            assert!(Steps::from_word(word).unwrap_err().contains("expected all, latest or latest=N"), "{word}");
        }
    }

    #[test]
    fn words_of_averages_are_read_as_they_are_written() {
        for (word, average) in [
            ("last=5", Average::Last(5)),
            ("100=0.25,200=0.75", Average::Steps(vec![(100, 0.25), (200, 0.75)])),
            ("3=1.5,1=-0.5", Average::Steps(vec![(3, 1.5), (1, -0.5)])),
        ] {
            assert_eq!((Average::from_word(word), average.to_toml().unwrap()), (Ok(average), word.into()));
        }
        for word in ["", "last", "last=0", "last=x", "100", "100=", "100=inf", "100=0.5,", "x=1"] {
            assert!(Average::from_word(word).unwrap_err().contains("expected last=N or STEP=WEIGHT"), "{word}");
        }
    }
}
