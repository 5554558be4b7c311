//! What the headers of a reply ask for: the encoding of its bytes, a pause, another address.

use std::time::{Duration, SystemTime};

use http::{
    HeaderMap,
    header::{AsHeaderName, CONTENT_ENCODING, DATE, RETRY_AFTER},
};
#[cfg(feature = "stores")]
use http::{
    StatusCode,
    header::{
        ACCEPT, ACCEPT_ENCODING, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_UNMODIFIED_SINCE, RANGE, USER_AGENT,
    },
};
use url::Url;

use super::{
    error::{Failure, RemoteError},
    url_scheme::is_loopback,
};

/// The text of a header.
pub(super) fn text_of(headers: &HeaderMap, name: impl AsHeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// The service's name for the request, short and without characters that a terminal would obey.
pub(super) fn request_id(headers: &HeaderMap) -> Option<String> {
    // A proxy may add its own, by the general name.
    const NAMES: [&str; 5] =
        ["x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid", "x-request-id", "x-amz-cf-id"];
    let id = NAMES.iter().find_map(|name| text_of(headers, *name))?;
    Some(id.chars().filter(char::is_ascii_graphic).take(80).collect())
}

/// The error of a reply that is compressed although nothing requested that: its bytes would be taken for the object's. `aws-chunked`
/// is how an object was uploaded, not how it is sent.
pub(super) fn compressed(headers: &HeaderMap, host: &str, what: &str) -> Option<RemoteError> {
    let encodings = headers.get_all(CONTENT_ENCODING).iter().map(|value| value.to_str().unwrap_or("unknown"));
    let plain = |word: &&str| ["", "identity", "aws-chunked"].iter().any(|plain| word.eq_ignore_ascii_case(plain));
    let found = encodings.flat_map(|text| text.split(',')).map(str::trim).find(|word| !plain(word))?;
    let name: String = found.chars().filter(char::is_ascii_graphic).take(40).collect();
    let message = format!("the server sends it compressed (Content-Encoding: {name}), expected the object's own bytes");
    Some(RemoteError::new(Failure::Unsupported, host, what, message))
}

/// Longest wait that is obeyed; a longer one is a mistake of the server. The windows of the Hub's limits last five minutes.
const WAIT_MAX: Duration = Duration::from_mins(15);

/// The wait that a reply asks for. `date` is its own time, which is compared with the one that it asks to wait for: the clock of this
/// machine may be another one.
fn wait_of(retry_after: &str, date: Option<&str>) -> Option<Duration> {
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

/// The wait that an answer asks for by `Retry-After: 55`.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    wait_of(text_of(headers, RETRY_AFTER)?, text_of(headers, DATE))
}

/// The wait that an answer asks for, by `RateLimit: "resolvers";r=0;t=55` or by `Retry-After: 55`.
pub(super) fn asked(headers: &HeaderMap) -> Option<Duration> {
    let of_limit = text_of(headers, "ratelimit").and_then(seconds_of_rate_limit);
    of_limit.map(|seconds| Duration::from_secs(seconds).min(WAIT_MAX)).or_else(|| retry_after(headers))
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

/// Most redirects of one request.
pub(super) const REDIRECTS_MAX: usize = 10;

/// Whether a reply of this status names another address for the same request.
#[cfg(feature = "stores")]
pub(super) fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// Whether a reply from one address may send the client to another. What was encrypted stays so, and what stayed on this machine is
/// not sent over a network in the clear. Only a request that already was in the clear on a network may go on like that.
pub(super) fn may_follow(from: &Url, to: &Url) -> bool {
    let here = |url: &Url| url.host_str().is_some_and(is_loopback);
    match (from.scheme(), to.scheme()) {
        (_, "https") => true,
        ("http", "http") => from.origin() == to.origin() || here(to) || !here(from),
        _ => false,
    }
}

/// The message about a redirect that [`may_follow`] refuses. It holds no path: an address may be signed.
pub(super) fn refusal(from: &Url, to: &Url) -> String {
    let named = |url: &Url| {
        let port = url.port().map_or_else(String::new, |port| format!(":{port}"));
        format!("{}://{}{port}", url.scheme(), url.host_str().unwrap_or_default())
    };
    format!("{} redirects to {}, which is not encrypted: not followed", named(from), named(to))
}

/// The headers of a request that is sent to another host. Stores, metadata services and the Hub put credentials in headers of many
/// names, so that what goes along is listed, not what stays.
#[cfg(feature = "stores")]
pub(super) fn without_credentials(headers: &HeaderMap) -> HeaderMap {
    const KEPT: [http::HeaderName; 8] =
        [ACCEPT, ACCEPT_ENCODING, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_UNMODIFIED_SINCE, RANGE, USER_AGENT];
    headers.iter().filter(|(name, _)| KEPT.contains(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_replies_with_the_bytes_of_the_object_are_taken() {
        for (values, refused) in [
            (&[][..], None),
            (&["identity"], None),
            (&["aws-chunked"], None),
            (&["aws-chunked,"], None),
            (&["gzip"], Some("gzip")),
            (&["aws-chunked, GZIP"], Some("GZIP")),
            (&["identity", "br"], Some("br")),
        ] {
            let headers: HeaderMap = values.iter().map(|value| (CONTENT_ENCODING, value.parse().unwrap())).collect();
            let error = compressed(&headers, "h", "k").map(|error| error.to_string());
            assert_eq!(error.is_some(), refused.is_some(), "{values:?}");
            assert!(error.is_none_or(|error| error.contains(refused.unwrap())), "{values:?}");
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
        for malformed in
            ["-1", "", "Wed, 21 Oct 2099 07:28:00", "Wed, 21 Oct 2099 07:28 GMT", "Wed, 41 Oct 2099 07:28:00 GMT"]
        {
            assert_eq!(wait_of(malformed, date), None, "{malformed}");
        }
        assert_eq!(wait_of("Sun, 06 Nov 1994 08:49:37 GMT", None), Some(Duration::ZERO));
    }

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

    #[test]
    fn no_redirect_leads_to_the_clear() {
        for (from, to, expected) in [
            ("https://a/x", "https://b/y", true),
            ("http://127.0.0.1:1/x", "https://b/y", true),
            ("http://127.0.0.1:1/x", "http://127.0.0.1:2/y", true),
            ("http://localhost/x", "http://[::1]:2/y", true),
            ("http://a/x", "http://a/y", true),
            ("http://a/x", "http://b/y", true),
            ("https://a/x", "http://a/x", false),
            ("https://a/x", "http://127.0.0.1/x", false),
            ("http://127.0.0.1:1/x", "http://10.0.0.1/y", false),
            ("http://localhost/x", "http://localhost.example.com/y", false),
            ("http://localhost/x", "ftp://localhost/y", false),
            ("http://localhost/x", "file:///etc/passwd", false),
        ] {
            let url = |text: &str| Url::parse(text).unwrap();
            assert_eq!(may_follow(&url(from), &url(to)), expected, "{from} to {to}");
        }
    }

    #[cfg(feature = "stores")]
    #[test]
    fn only_what_names_no_user_goes_along() {
        let all = [
            "authorization",
            "cookie",
            "proxy-authorization",
            "x-amz-security-token",
            "x-amz-date",
            "x-amz-content-sha256",
            "x-ms-date",
            "x-ms-version",
            "x-goog-user-project",
            "metadata-flavor",
            "x-aws-ec2-metadata-token",
            "x-identity-header",
            "x-vault-token",
            "range",
            "if-match",
            "user-agent",
        ];
        let headers: HeaderMap =
            all.iter().map(|name| (http::HeaderName::from_static(name), "x".parse().unwrap())).collect();
        let kept = without_credentials(&headers);
        let mut kept: Vec<&str> = kept.keys().map(http::HeaderName::as_str).collect();
        kept.sort_unstable();
        assert_eq!(kept, ["if-match", "range", "user-agent"]);
    }
}
