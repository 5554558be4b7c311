//! What is averaged.

use super::value::{Fault, SettingValue, Toml, deserialize};

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
        let table = |(source, weight): &(String, f32)| {
            let number = weight.to_string().parse::<f64>().map_err(|error| error.to_string())?;
            let members = [("source".to_owned(), source.as_str().into()), ("weight".to_owned(), number.into())];
            Ok(toml::Value::Table(members.into_iter().collect()))
        };
        Ok(toml::Value::Array(terms.iter().map(table).collect::<Result<_, String>>()?))
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        let at = value.span();
        let wrong = |reason: String| Fault { at: at.clone(), reason };
        match deserialize(value)? {
            AverageForm::Word(word) => Self::from_word(&word).map_err(wrong),
            AverageForm::Sources(terms) => {
                let term = |term: SourceTerm| {
                    let found = weight(&term.weight.to_string());
                    let found =
                        found.ok_or_else(|| format!("average: expected a finite weight, found {}", term.weight))?;
                    Ok((term.source, found))
                };
                let terms: Vec<_> = terms.into_iter().map(term).collect::<Result<_, String>>().map_err(wrong)?;
                if terms.is_empty() {
                    Err(wrong("average: expected at least one source".to_owned()))
                } else {
                    Ok(Self::Sources(terms))
                }
            }
        }
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
    fn words_are_read_as_they_are_written() {
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
