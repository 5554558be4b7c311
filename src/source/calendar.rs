//! Times as dates, for people.

use std::time::{SystemTime, UNIX_EPOCH};

/// A time as RFC 3339 has it, in whole seconds UTC: `2026-11-23T09:50:00Z`.
pub fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01; an era is 400 years, a year begins in March, so that a leap day is a year's last.
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year + u64::from(month >= 10), if month < 10 { month + 3 } else { month - 9 });
    let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Nanoseconds since 1970 as a date, to the last digit: `2026-11-23T09:50:00.000000001Z`. A time before that is left a number.
pub(super) fn utc_of_ns(ns: i128) -> String {
    const SECOND: i128 = 1_000_000_000;
    match u64::try_from(ns.div_euclid(SECOND)) {
        Ok(seconds) => {
            let date = utc(UNIX_EPOCH + std::time::Duration::from_secs(seconds));
            format!("{}.{:09}Z", date.trim_end_matches('Z'), ns.rem_euclid(SECOND))
        }
        Err(_) => format!("{ns} ns"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_dates() {
        let rows = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400 + 86_399, "2000-02-29T23:59:59Z"),
            (1_700_000_000, "2023-11-14T22:13:20Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (1_735_689_600, "2025-01-01T00:00:00Z"),
        ];
        for (seconds, expected) in rows {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
        assert_eq!(utc_of_ns(1_795_629_998_796_096_365), "2026-11-25T18:06:38.796096365Z");
        assert_eq!((utc_of_ns(1), utc_of_ns(-1)), ("1970-01-01T00:00:00.000000001Z".to_owned(), "-1 ns".to_owned()));
    }
}
