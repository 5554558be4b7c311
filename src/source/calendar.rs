//! Times as dates, for people.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The last second of the year 9999.
const LAST: Duration = Duration::from_secs(253_402_300_799);

/// A time as RFC 3339 has it, in whole seconds UTC: `2026-11-23T09:50:00Z`. Times before 1970 and after 9999 are shown as the first and
/// the last second between.
pub fn utc(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time.clamp(UNIX_EPOCH, UNIX_EPOCH + LAST)).to_string()
}

/// Nanoseconds since 1970 as a date, to the last digit: `2026-11-23T09:50:00.000000001Z`. A time before that is left a number.
pub(super) fn utc_of_ns(ns: i128) -> String {
    const SECOND: i128 = 1_000_000_000;
    match u64::try_from(ns.div_euclid(SECOND)).map(Duration::from_secs) {
        Ok(since) if since <= LAST => {
            format!("{}.{:09}Z", utc(UNIX_EPOCH + since).trim_end_matches('Z'), ns.rem_euclid(SECOND))
        }
        Ok(_) | Err(_) => format!("{ns} ns"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        let rows = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400 + 86_399, "2000-02-29T23:59:59Z"),
            (1_700_000_000, "2023-11-14T22:13:20Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
            (1_735_689_600, "2025-01-01T00:00:00Z"),
            (253_402_300_799, "9999-12-31T23:59:59Z"),
            (253_402_300_800, "9999-12-31T23:59:59Z"),
        ];
        for (seconds, expected) in rows {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
        assert_eq!(utc_of_ns(1_795_629_998_796_096_365), "2026-11-25T18:06:38.796096365Z");
        assert_eq!(utc(UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00Z");
        assert_eq!(utc_of_ns(i128::from(u64::MAX) * 1_000_000_000), "18446744073709551615000000000 ns");
        assert_eq!((utc_of_ns(1), utc_of_ns(-1)), ("1970-01-01T00:00:00.000000001Z".to_owned(), "-1 ns".to_owned()));
    }
}
