//! A time limit in text form: `5s`, `500ms`, `2m`, or `90` for seconds.

use std::{fmt, str::FromStr, time::Duration};

use serde::Deserialize;

use super::value::{Fault, SettingValue, Toml, deserialize};

/// Longest limit: a year. A longer one is a typing error.
const LONGEST: Duration = Duration::from_hours(365 * 24);

/// A time limit above zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimeLimit(pub Duration);

impl FromStr for TimeLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = |what: &str| format!("expected {what}, found {text:?}");
        let malformed = || expected("a time such as 5s, 500ms, 2m or 90 (seconds)");
        let lower = text.trim().to_ascii_lowercase();
        let digits = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
        let unit_ms = match lower[digits..].trim() {
            "ms" => 1,
            "" | "s" => 1_000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            _ => return Err(malformed()),
        };
        let number: u64 = lower[..digits].parse().map_err(|_| malformed())?;
        let limit = Duration::from_millis(number.saturating_mul(unit_ms));
        if limit.is_zero() || limit > LONGEST {
            return Err(expected("a time from 1ms to 8760h"));
        }
        Ok(Self(limit))
    }
}

impl fmt::Display for TimeLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            ms if ms.is_multiple_of(1_000) => write!(f, "{}s", ms / 1_000),
            ms => write!(f, "{ms}ms"),
        }
    }
}

impl SettingValue for TimeLimit {
    fn from_word(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.to_string().into())
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected a number of seconds, or a time such as \"5s\", \"500ms\" or \"2m\"")]
        enum Either {
            Seconds(u64),
            Text(String),
        }
        let at = value.span();
        let text = match deserialize(value)? {
            Either::Seconds(seconds) => seconds.to_string(),
            Either::Text(text) => text,
        };
        text.parse().map_err(|reason| Fault { at, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_are_written() {
        for (text, ms, written) in [
            ("5s", 5_000, "5s"),
            ("500ms", 500, "500ms"),
            ("2m", 120_000, "120s"),
            ("90", 90_000, "90s"),
            (" 1 h ", 3_600_000, "3600s"),
            ("1500MS", 1_500, "1500ms"),
        ] {
            let limit: TimeLimit = text.parse().unwrap();
            assert_eq!((limit.0, limit.to_string().as_str()), (Duration::from_millis(ms), written));
            assert_eq!(written.parse(), Ok(limit));
        }
        for wrong in
            ["", "s", "0", "0ms", "-1s", "1.5s", "5 parsecs", "9999h", "99999999999999999999", "18446744073709551615m"]
        {
            let error = wrong.parse::<TimeLimit>().unwrap_err();
            assert!(error.starts_with("expected a time") && error.contains(wrong), "{error}");
        }
    }
}
