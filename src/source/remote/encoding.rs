//! Rejects replies with a `Content-Encoding`.

use http::{HeaderMap, header::CONTENT_ENCODING};

use super::error::{Failure, RemoteError};

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
}
