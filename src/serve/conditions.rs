//! The preconditions of a request for a file: `If-Match`, `If-None-Match`, `If-Range`; pure.
//!
//! Times are no conditions here: a server that starts with other settings serves other bytes of sources that are as old as before.

use http::{
    HeaderMap, HeaderValue,
    header::{HeaderName, IF_MATCH, IF_NONE_MATCH, IF_RANGE, RANGE},
};

use super::range::AskedRange;

/// What a request is to be answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileVerdict {
    /// All bytes.
    Whole,
    /// A part: from the first to before the second number.
    Part(u64, u64),
    /// The client has it: 304.
    Known,
    /// The client wants another version: 412.
    OtherVersion,
    /// No such bytes: 416.
    Outside,
}

/// Judges a request for a file of `size_bytes` with the entity tag `etag`, in quotes.
pub(super) fn judge(headers: &HeaderMap, etag: &str, size_bytes: u64) -> FileVerdict {
    if headers.contains_key(IF_MATCH) && !matches(headers, &IF_MATCH, etag, false) {
        return FileVerdict::OtherVersion;
    }
    if matches(headers, &IF_NONE_MATCH, etag, true) {
        return FileVerdict::Known;
    }
    let is_same = headers.get(IF_RANGE).is_none_or(|value| value.as_bytes() == etag.as_bytes());
    let range = headers.get(RANGE).filter(|_| is_same).map(|value| value.to_str().unwrap_or_default());
    match AskedRange::parse(range, size_bytes) {
        AskedRange::All => FileVerdict::Whole,
        AskedRange::Part(start, end) => FileVerdict::Part(start, end),
        AskedRange::Outside => FileVerdict::Outside,
    }
}

/// Whether a list of entity tags has `etag`, or is `*`. A weak tag counts with `weak` only.
fn matches(headers: &HeaderMap, name: &HeaderName, etag: &str, weak: bool) -> bool {
    let of_value = |value: &HeaderValue| {
        let text = value.to_str().unwrap_or_default();
        let tags = text.split(',').map(str::trim);
        let strong = |tag: &str| tag.strip_prefix("W/").filter(|_| weak).unwrap_or(tag) == etag;
        tags.into_iter().any(|tag| tag == "*" || strong(tag))
    };
    headers.get_all(name).iter().any(of_value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn preconditions_come_before_the_range() {
        let tag = "\"a\"";
        for (rows, expected) in [
            (&[][..], FileVerdict::Whole),
            (&[(IF_MATCH, "\"a\"")], FileVerdict::Whole),
            (&[(IF_MATCH, "*")], FileVerdict::Whole),
            (&[(IF_MATCH, "\"b\", \"a\"")], FileVerdict::Whole),
            (&[(IF_MATCH, "\"b\"")], FileVerdict::OtherVersion),
            (&[(IF_MATCH, "W/\"a\"")], FileVerdict::OtherVersion),
            (&[(IF_MATCH, "a")], FileVerdict::OtherVersion),
            (&[(IF_NONE_MATCH, "\"a\"")], FileVerdict::Known),
            (&[(IF_NONE_MATCH, "W/\"a\"")], FileVerdict::Known),
            (&[(IF_NONE_MATCH, "*")], FileVerdict::Known),
            (&[(IF_NONE_MATCH, "\"b\"")], FileVerdict::Whole),
            (&[(RANGE, "bytes=1-2")], FileVerdict::Part(1, 3)),
            (&[(RANGE, "bytes=1-2"), (IF_MATCH, "\"b\"")], FileVerdict::OtherVersion),
            (&[(RANGE, "bytes=1-2"), (IF_NONE_MATCH, "\"a\"")], FileVerdict::Known),
            (&[(RANGE, "bytes=1-2"), (IF_RANGE, "\"a\"")], FileVerdict::Part(1, 3)),
            (&[(RANGE, "bytes=1-2"), (IF_RANGE, "\"b\"")], FileVerdict::Whole),
            (&[(RANGE, "bytes=1-2"), (IF_RANGE, "W/\"a\"")], FileVerdict::Whole),
            (&[(RANGE, "bytes=1-2"), (IF_RANGE, "Thu, 01 Jan 1970 00:00:00 GMT")], FileVerdict::Whole),
            (&[(RANGE, "bytes=99-"), (IF_RANGE, "\"b\"")], FileVerdict::Whole),
            (&[(RANGE, "bytes=99-")], FileVerdict::Outside),
            (&[(IF_MATCH, "\"a\""), (IF_NONE_MATCH, "\"a\"")], FileVerdict::Known),
        ] {
            let headers = rows.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
            assert_eq!(judge(&headers, tag, 10), expected, "{rows:?}");
        }
        // Several headers of a name are one list.
        let mut headers = HeaderMap::new();
        headers.append(IF_MATCH, "\"b\"".parse().unwrap());
        headers.append(IF_MATCH, "\"a\"".parse().unwrap());
        assert_eq!(judge(&headers, tag, 10), FileVerdict::Whole);
    }
}
