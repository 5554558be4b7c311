//! A time in text form: `5s`, `500ms`, `2min`, or `90` for seconds. Every time that a user may give is read here, so that none is
//! too long for the clock.

use std::{fmt, ops::RangeInclusive, str::FromStr, time::Duration};

use super::value::{Fault, SettingValue, Toml, read_word};

/// Longest limit: a year. A longer one is a typing error.
const LONGEST: Duration = Duration::from_hours(365 * 24);

/// Longest age in days: a century. Ages are compared, not added to a clock.
const OLDEST: Duration = Duration::from_hours(100 * 365 * 24);

/// Units and their milliseconds.
const UNITS: [(&str, u64); 6] =
    [("ms", 1), ("s", 1_000), ("m", 60_000), ("min", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// A time of at least `LEAST_MS` milliseconds and at most a year.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BoundedTime<const LEAST_MS: u64>(Duration);

/// A time limit above zero.
pub type TimeLimit = BoundedTime<1>;

/// A time that may be zero: how long to go on with something that need not go on.
pub type WaitTime = BoundedTime<0>;

impl<const LEAST_MS: u64> BoundedTime<LEAST_MS> {
    const RANGE: RangeInclusive<Duration> = Duration::from_millis(LEAST_MS)..=LONGEST;

    /// The duration.
    pub const fn duration(self) -> Duration {
        self.0
    }
}

impl WaitTime {
    /// No time.
    pub const ZERO: Self = Self(Duration::ZERO);
}

/// An age: a number of days, or a time with its unit.
///
/// # Errors
/// The expected and the found value.
pub fn parse_age(text: &str) -> Result<Duration, String> {
    parse(text, "d", "an age such as 30 (days) or 12h", &(Duration::ZERO..=OLDEST))
}

/// Reads a time; a number alone has `unit`.
///
/// # Errors
/// The range, if the time is outside it; the `form` if the text has another one.
fn parse(text: &str, unit: &str, form: &str, range: &RangeInclusive<Duration>) -> Result<Duration, String> {
    let expected = |what: &str| format!("expected {what}, found {text:?}");
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
    let named = Some(lower[digits..].trim()).filter(|named| !named.is_empty()).unwrap_or(unit);
    let (_, unit_ms) = UNITS.iter().find(|(name, _)| *name == named).ok_or_else(|| expected(form))?;
    if digits == 0 {
        return Err(expected(form));
    }
    // More digits than fit are a time that is too long.
    let time = Duration::from_millis(lower[..digits].parse().unwrap_or(u64::MAX).saturating_mul(*unit_ms));
    if range.contains(&time) {
        return Ok(time);
    }
    let least = if range.start().is_zero() { "0".to_owned() } else { format!("{}ms", range.start().as_millis()) };
    Err(expected(&format!("a time from {least} to {}h", range.end().as_secs() / 3_600)))
}

impl<const LEAST_MS: u64> FromStr for BoundedTime<LEAST_MS> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text, "s", "a time such as 5s, 500ms, 2min or 90 (seconds)", &Self::RANGE).map(Self)
    }
}

impl<const LEAST_MS: u64> fmt::Display for BoundedTime<LEAST_MS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            ms if ms.is_multiple_of(1_000) => write!(f, "{}s", ms / 1_000),
            ms => write!(f, "{ms}ms"),
        }
    }
}

impl<const LEAST_MS: u64> SettingValue for BoundedTime<LEAST_MS> {
    fn from_word(text: &str) -> Result<Self, String> {
        text.parse()
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.to_string().into())
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        read_word(value, "a number of seconds, or a time such as \"5s\", \"500ms\" or \"2min\"")
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
            ("2min", 120_000, "120s"),
            ("365d", 31_536_000_000, "31536000s"),
            ("90", 90_000, "90s"),
            (" 1 h ", 3_600_000, "3600s"),
            ("1500MS", 1_500, "1500ms"),
        ] {
            let limit: TimeLimit = text.parse().unwrap();
            assert_eq!((limit.duration(), limit.to_string().as_str()), (Duration::from_millis(ms), written));
            assert_eq!(written.parse(), Ok(limit));
        }
        for wrong in
            ["", "s", "0", "0ms", "-1s", "1.5s", "5 parsecs", "9999h", "99999999999999999999", "18446744073709551615m"]
        {
            let error = wrong.parse::<TimeLimit>().unwrap_err();
            assert!(error.starts_with("expected a time") && error.contains(wrong), "{error}");
        }
    }

    #[test]
    fn a_wait_may_be_zero_and_no_time_is_too_long_for_the_clock() {
        assert_eq!("0".parse(), Ok(WaitTime::ZERO));
        for long in ["9223372036854775808", "18446744073709551615", "99999999999999999999", "31536001", "366d"] {
            let error = long.parse::<WaitTime>().unwrap_err();
            assert_eq!(error, format!("expected a time from 0 to 8760h, found {long:?}"));
        }
        let longest: WaitTime = "8760h".parse().unwrap();
        assert!(std::time::Instant::now().checked_add(longest.duration()).is_some());
    }

    #[test]
    fn an_age_is_days_or_has_its_unit() {
        for (text, hours) in [("0", 0), ("30", 720), ("12h", 12), ("400d", 9_600)] {
            assert_eq!(parse_age(text), Ok(Duration::from_hours(hours)));
        }
        for (wrong, expected) in
            [("99999999999999999999", "a time from 0 to 876000h"), ("x", "an age such as 30 (days)")]
        {
            let error = parse_age(wrong).unwrap_err();
            assert!(error.starts_with(&format!("expected {expected}")) && error.contains(wrong), "{error}");
        }
    }
}
