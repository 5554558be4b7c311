//! Ranges of numbers, as `--layers` and `--devices` take them.

use std::ops::Range;

use super::value::{Fault, Numbers, SettingValue, Toml, read_as};

/// Reads one part of a list of numbers as a half-open range: `5`, `0..8`, `..8`, `24..` (to the greatest number), or `0-7`, which
/// has its last number too. `None` for anything else, and for a range without a number.
pub(crate) fn parse_range(part: &str) -> Option<Range<u64>> {
    let number = |word: &str| word.trim().parse::<u64>().ok();
    let after = |last: u64| last.checked_add(1);
    let range = if let Some((start, stop)) = part.split_once("..") {
        let start = if start.is_empty() { 0 } else { number(start)? };
        start..if stop.is_empty() { u64::MAX } else { number(stop)? }
    } else if let Some((first, last)) = part.split_once('-') {
        number(first)?..after(number(last)?)?
    } else {
        number(part)?..after(number(part)?)?
    };
    Some(range).filter(|range| !range.is_empty())
}

/// Ascending numbers as in `0-3,7`.
pub fn ranges<'a>(numbers: impl IntoIterator<Item = &'a u64>) -> String {
    let numbers: Vec<u64> = numbers.into_iter().copied().collect();
    let words = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        only => only.iter().map(u64::to_string).collect(),
    });
    words.collect::<Vec<_>>().join(",")
}

/// Numbers of layers, as half-open ranges: `0..8,24..32`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerRanges(Vec<Range<u64>>);

impl LayerRanges {
    /// Reads `0..8`, `0-7`, `..8`, `24..`, `5`, or several of these with commas.
    ///
    /// # Errors
    /// The expected form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let malformed = |part: &str| format!("layers: expected ranges such as 0..8, 0-7 or 0..4,28.., found {part:?}");
        let range = |part: &str| parse_range(part).ok_or_else(|| malformed(part));
        text.split(',').map(str::trim).map(range).collect::<Result<_, _>>().map(Self)
    }

    /// Whether the ranges contain a layer.
    pub fn contains(&self, layer: u64) -> bool {
        self.0.iter().any(|range| range.contains(&layer))
    }

    /// The first range, as typed, that names layers beyond the last one of `count`.
    pub fn beyond(&self, count: u64) -> Option<String> {
        let out = |range: &&Range<u64>| range.start >= count || (range.end != u64::MAX && range.end > count);
        self.0.iter().find(out).map(|range| Self(vec![range.clone()]).text())
    }

    /// In the form that [`LayerRanges::parse`] reads.
    pub fn text(&self) -> String {
        let word = |range: &Range<u64>| {
            let stop = if range.end == u64::MAX { String::new() } else { range.end.to_string() };
            format!("{}..{stop}", range.start)
        };
        self.0.iter().map(word).collect::<Vec<_>>().join(",")
    }
}

impl SettingValue for LayerRanges {
    fn from_word(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        read_as(value, |numbers: Numbers| Self::parse(&numbers.text()))
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.text().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_layers() {
        for (text, inside, outside) in [
            ("0..8", [0, 7], [8, 9]),
            ("..2,30..", [1, 99], [2, 29]),
            ("5", [5, 5], [4, 6]),
            ("1..3, 7", [2, 7], [3, 0]),
            ("0-3", [0, 3], [4, 5]),
            ("1-1,4..6", [1, 5], [0, 6]),
        ] {
            let ranges = LayerRanges::parse(text).unwrap();
            assert!(inside.iter().all(|layer| ranges.contains(*layer)), "{text}");
            assert!(!outside.iter().any(|layer| ranges.contains(*layer)), "{text}");
            assert_eq!(LayerRanges::parse(&ranges.text()), Ok(ranges));
        }
        for text in ["", "a", "3..3", "4..2", "3-1", "-3", "3-", "0-18446744073709551615", "0..8,"] {
            assert!(LayerRanges::parse(text).is_err(), "{text:?}");
        }
    }
}
