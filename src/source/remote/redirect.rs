//! Where a reply may send a client, and what it may take along.

#[cfg(feature = "stores")]
use http::{
    HeaderMap, StatusCode,
    header::{
        ACCEPT, ACCEPT_ENCODING, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_UNMODIFIED_SINCE, RANGE, USER_AGENT,
    },
};
use url::Url;

use super::locality::is_loopback;

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
