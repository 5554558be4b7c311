//! The wait that a server asks for.

use std::time::Duration;

use reqwest::header::{DATE, HeaderMap, RETRY_AFTER};

use super::super::retry_after::{WAIT_MAX, wait_of};

/// The wait that an answer asks for, by `RateLimit: "resolvers";r=0;t=55` or by `Retry-After: 55`.
pub(super) fn asked(headers: &HeaderMap) -> Option<Duration> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let of_limit = text("ratelimit").and_then(seconds_of_rate_limit);
    let after = || wait_of(text(RETRY_AFTER.as_str())?, text(DATE.as_str()));
    of_limit.map(|seconds| Duration::from_secs(seconds).min(WAIT_MAX)).or_else(after)
}

/// The greatest `t=` of a list of limits that are used up, or of all if none says so.
fn seconds_of_rate_limit(text: &str) -> Option<u64> {
    let number = |item: &str, name: &str| {
        let parts = item.split(';').filter_map(|part| part.trim().split_once('='));
        parts.filter(|(key, _)| *key == name).find_map(|(_, value)| value.trim().parse::<u64>().ok())
    };
    let used_up =
        text.split(',').filter(|item| number(item, "r") == Some(0)).filter_map(|item| number(item, "t")).max();
    used_up.or_else(|| text.split(',').filter_map(|item| number(item, "t")).max())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_read_from_both_headers() {
        let of = |pairs: &[(&'static str, &'static str)]| {
            let headers = pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()));
            asked(&headers.collect()).map(|wait| wait.as_secs())
        };
        assert_eq!(of(&[("RateLimit", r#""resolvers";r=0;t=55"#)]), Some(55));
        assert_eq!(of(&[("RateLimit", r#""api";r=3;t=200, "resolvers";r=0;t=7"#)]), Some(7));
        assert_eq!(of(&[("RateLimit", r#""api" ; t=9"#), ("Retry-After", "3")]), Some(9));
        assert_eq!(of(&[("Retry-After", " 3 ")]), Some(3));
        let date = "Wed, 21 Oct 2026 07:28:00 GMT";
        assert_eq!(of(&[("Retry-After", "Wed, 21 Oct 2026 07:28:05 GMT"), ("Date", date)]), Some(5));
        for none in ["", "r=0", "t=x", "t=-1"] {
            assert_eq!(of(&[("RateLimit", none), ("Retry-After", none)]), None, "{none}");
        }
    }
}
