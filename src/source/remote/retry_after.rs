//! The header `Retry-After`: seconds, or a time of the server's clock.

use std::time::{Duration, SystemTime};

/// Longest wait that is obeyed; a longer one is a mistake of the server. The windows of the Hub's limits last five minutes.
pub(super) const WAIT_MAX: Duration = Duration::from_mins(15);

/// The wait that a reply asks for. `date` is its own time, which is compared with the one that it asks to wait for: the clock of this
/// machine may be another one.
pub(super) fn wait_of(retry_after: &str, date: Option<&str>) -> Option<Duration> {
    let text = retry_after.trim();
    let wait = if let Ok(seconds) = text.parse() {
        Duration::from_secs(seconds)
    } else {
        let until = unix_time(text)?;
        let since_1970 = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok();
        let now = date.and_then(unix_time).map(Duration::from_secs).or_else(since_1970)?;
        Duration::from_secs(until).saturating_sub(now)
    };
    Some(wait.min(WAIT_MAX))
}

/// Seconds since 1970 of a time such as `Wed, 21 Oct 2026 07:28:00 GMT`, the only form that servers may write.
fn unix_time(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let words: Vec<&str> = text.split_once(", ")?.1.split(' ').collect();
    let [day, month, year, time, "GMT"] = words[..] else { return None };
    let month = MONTHS.iter().position(|name| *name == month)? as u64 + 1;
    let (day, year): (u64, u64) = (day.parse().ok()?, year.parse().ok()?);
    let clock: Vec<u64> = time.split(':').map(|part| part.parse().ok()).collect::<Option<_>>()?;
    let [hours, minutes, seconds] = clock[..] else { return None };
    if !(1..=31).contains(&day) || !(1970..=9999).contains(&year) || hours > 23 || minutes > 59 || seconds > 60 {
        return None;
    }
    // Years that begin with March end with the leap day.
    let (year, from_march) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days_before_year = year * 365 + year / 4 - year / 100 + year / 400;
    let days = days_before_year + (153 * from_march + 2) / 5 + day - 1;
    let days_until_1970 = 1969 * 365 + 1969 / 4 - 1969 / 100 + 1969 / 400 + 306;
    Some(days.checked_sub(days_until_1970)? * 86400 + hours * 3600 + minutes * 60 + seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_since_1970() {
        for (text, expected) in [
            ("Thu, 01 Jan 1970 00:00:00 GMT", Some(0)),
            ("Sun, 06 Nov 1994 08:49:37 GMT", Some(784_111_777)),
            ("Tue, 29 Feb 2000 23:59:59 GMT", Some(951_868_799)),
            ("Wed, 21 Oct 2026 07:28:00 GMT", Some(1_792_567_680)),
            ("Sunday, 06-Nov-94 08:49:37 GMT", None),
            ("Wed, 21 Oct 2026 07:28:00", None),
            ("Wed, 21 Oct 2026 07:28 GMT", None),
            ("", None),
        ] {
            assert_eq!(unix_time(text), expected, "{text}");
        }
    }

    #[test]
    fn a_wait_is_told_in_seconds_or_by_the_clock_of_the_server() {
        let date = Some("Wed, 21 Oct 2026 07:28:00 GMT");
        assert_eq!(wait_of(" 7 ", date), Some(Duration::from_secs(7)));
        assert_eq!(wait_of("Wed, 21 Oct 2026 07:28:09 GMT", date), Some(Duration::from_secs(9)));
        assert_eq!(wait_of("Wed, 21 Oct 2026 07:27:00 GMT", date), Some(Duration::ZERO));
        assert_eq!(wait_of("Wed, 21 Oct 2099 07:28:00 GMT", date), Some(WAIT_MAX));
        assert_eq!(wait_of("99999999", None), Some(WAIT_MAX));
        assert_eq!(wait_of("-1", None), None);
        assert_eq!(wait_of("Sun, 06 Nov 1994 08:49:37 GMT", None), Some(Duration::ZERO));
    }
}
