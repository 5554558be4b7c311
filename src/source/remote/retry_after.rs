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
        let time = |text| httpdate::parse_http_date(text).ok();
        let now = date.and_then(time).unwrap_or_else(SystemTime::now);
        time(text)?.duration_since(now).unwrap_or_default()
    };
    Some(wait.min(WAIT_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_told_in_seconds_or_by_the_clock_of_the_server() {
        let date = Some("Wed, 21 Oct 2026 07:28:00 GMT");
        assert_eq!(wait_of(" 7 ", date), Some(Duration::from_secs(7)));
        assert_eq!(wait_of("Wed, 21 Oct 2026 07:28:09 GMT", date), Some(Duration::from_secs(9)));
        assert_eq!(wait_of("Wed, 21 Oct 2026 07:27:00 GMT", date), Some(Duration::ZERO));
        assert_eq!(wait_of("Wed, 21 Oct 2099 07:28:00 GMT", date), Some(WAIT_MAX));
        assert_eq!(wait_of("99999999", None), Some(WAIT_MAX));
        for malformed in
            ["-1", "", "Wed, 21 Oct 2099 07:28:00", "Wed, 21 Oct 2099 07:28 GMT", "Wed, 41 Oct 2099 07:28:00 GMT"]
        {
            assert_eq!(wait_of(malformed, date), None, "{malformed}");
        }
        assert_eq!(wait_of("Sun, 06 Nov 1994 08:49:37 GMT", None), Some(Duration::ZERO));
    }
}
