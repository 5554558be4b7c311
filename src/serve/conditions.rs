//! The preconditions and the range of a request for a file: `If-Match`, `If-None-Match`, `If-Range`, `Range`; pure. A time counts where
//! there is no entity tag (`If-Unmodified-Since`, `If-Modified-Since`), and never for a range: two versions may be of one second.

use std::time::{SystemTime, UNIX_EPOCH};

use http::{
    HeaderMap, HeaderValue,
    header::{HeaderName, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, RANGE},
};

use super::tree::FileVersion;

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

/// Whether a file that has its version `since` a time is newer than the time of a header, both in whole seconds; `None` without a time.
fn is_newer(headers: &HeaderMap, name: &HeaderName, since: Option<SystemTime>) -> Option<bool> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    let asked = httpdate::parse_http_date(value.to_str().ok()?).ok()?;
    let seconds = |time: SystemTime| time.duration_since(UNIX_EPOCH).map_or(0, |past| past.as_secs());
    Some(seconds(since?) > seconds(asked))
}

/// Judges a request for a file of `size_bytes` with this version; `etag` is in quotes.
pub(super) fn judge(headers: &HeaderMap, version: &FileVersion, size_bytes: u64) -> FileVerdict {
    let FileVersion { etag, since } = version;
    let is_other = if headers.contains_key(IF_MATCH) {
        !matches(headers, &IF_MATCH, etag, false)
    } else {
        is_newer(headers, &IF_UNMODIFIED_SINCE, *since) == Some(true)
    };
    if is_other {
        return FileVerdict::OtherVersion;
    }
    let is_known = if headers.contains_key(IF_NONE_MATCH) {
        matches(headers, &IF_NONE_MATCH, etag, true)
    } else {
        is_newer(headers, &IF_MODIFIED_SINCE, *since) == Some(false)
    };
    if is_known {
        return FileVerdict::Known;
    }
    let is_same = headers.get(IF_RANGE).is_none_or(|value| value.as_bytes() == etag.as_bytes());
    let range = headers.get(RANGE).filter(|_| is_same).map(|value| value.to_str().unwrap_or_default());
    of_range(range, size_bytes)
}

/// The answer for the range of a header's value, of a file of `size_bytes`. All bytes, if there is none or one that this server may
/// pass over: another unit, several ranges, no proper form.
fn of_range(value: Option<&str>, size_bytes: u64) -> FileVerdict {
    match value.and_then(single) {
        // A number beyond all files is as good as the largest.
        Some((Some(first), last)) => {
            let end = last.map_or(size_bytes, |last| last.saturating_add(1).min(size_bytes));
            if last.is_some_and(|last| last < first) {
                FileVerdict::Whole
            } else if first < end {
                FileVerdict::Part(first, end)
            } else {
                FileVerdict::Outside
            }
        }
        Some((None, Some(length))) if length > 0 && size_bytes > 0 => {
            FileVerdict::Part(size_bytes - length.min(size_bytes), size_bytes)
        }
        Some((None, Some(_))) => FileVerdict::Outside,
        Some((None, None)) | None => FileVerdict::Whole,
    }
}

/// The numbers of `bytes=FIRST-LAST`, of which one may be missing; `None` for any other form.
fn single(value: &str) -> Option<(Option<u64>, Option<u64>)> {
    let (unit, set) = value.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (first, last) = set.trim().split_once('-')?;
    let numbers = [first.trim(), last.trim()];
    let are_digits = numbers.iter().all(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    are_digits.then(|| {
        let [first, last] = numbers.map(number);
        (first, last)
    })
}

/// Digits as a number, the largest if it is larger; `None` for no digits.
fn number(digits: &str) -> Option<u64> {
    (!digits.is_empty()).then(|| digits.parse().unwrap_or(u64::MAX))
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
    use std::time::Duration;

    use super::*;

    /// With half a second, which no header has.
    fn version(seconds: Option<u64>) -> FileVersion {
        let since = seconds.map(|seconds| UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 500));
        FileVersion { etag: "\"a\"".to_owned(), since }
    }

    #[test]
    fn a_time_counts_where_there_is_no_tag() {
        use FileVerdict::{Known, OtherVersion, Part, Whole};
        let (before, same, after) =
            ("Sun, 06 Nov 1994 08:49:36 GMT", "Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:38 GMT");
        let (since, until) = (IF_MODIFIED_SINCE, IF_UNMODIFIED_SINCE);
        for (rows, expected) in [
            (&[(&since, before)][..], Whole),
            (&[(&since, same)], Known),
            (&[(&since, after)], Known),
            (&[(&since, "1994")], Whole),
            (&[(&since, same), (&since, same)], Whole),
            (&[(&since, same), (&IF_NONE_MATCH, "\"b\"")], Whole),
            (&[(&since, before), (&IF_NONE_MATCH, "\"a\"")], Known),
            (&[(&since, same), (&RANGE, "bytes=1-2")], Known),
            (&[(&until, before)], OtherVersion),
            (&[(&until, same)], Whole),
            (&[(&until, "x")], Whole),
            (&[(&until, before), (&IF_MATCH, "\"a\"")], Whole),
            (&[(&until, same), (&since, same)], Known),
            (&[(&until, same), (&RANGE, "bytes=1-2")], Part(1, 3)),
        ] {
            let mut headers = HeaderMap::new();
            for (name, value) in rows {
                headers.append(*name, value.parse().unwrap());
            }
            assert_eq!(judge(&headers, &version(Some(784_111_777)), 10), expected, "{rows:?}");
            if !headers.contains_key(IF_MATCH) && !headers.contains_key(IF_NONE_MATCH) {
                headers.remove(RANGE);
                assert_eq!(judge(&headers, &version(None), 10), Whole, "{rows:?} without a time");
            }
        }
    }

    #[test]
    fn preconditions_come_before_the_range() {
        let version = version(Some(0));
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
            assert_eq!(judge(&headers, &version, 10), expected, "{rows:?}");
        }
        // Several headers of a name are one list.
        let mut headers = HeaderMap::new();
        headers.append(IF_MATCH, "\"b\"".parse().unwrap());
        headers.append(IF_MATCH, "\"a\"".parse().unwrap());
        assert_eq!(judge(&headers, &version, 10), FileVerdict::Whole);
    }

    #[test]
    fn a_range_is_cut_to_the_file() {
        for (value, expected) in [
            ("bytes=0-0", FileVerdict::Part(0, 1)),
            ("bytes=0-9", FileVerdict::Part(0, 10)),
            ("bytes=3-5", FileVerdict::Part(3, 6)),
            ("Bytes = 3 - 5", FileVerdict::Part(3, 6)),
            ("bytes=9-", FileVerdict::Part(9, 10)),
            ("bytes=5-99999999999999999999999", FileVerdict::Part(5, 10)),
            ("bytes=0-18446744073709551615", FileVerdict::Part(0, 10)),
            ("bytes=-3", FileVerdict::Part(7, 10)),
            ("bytes=-99999999999999999999999", FileVerdict::Part(0, 10)),
            ("bytes=10-", FileVerdict::Outside),
            ("bytes=10-12", FileVerdict::Outside),
            ("bytes=18446744073709551615-", FileVerdict::Outside),
            ("bytes=99999999999999999999999-99999999999999999999999", FileVerdict::Outside),
            ("bytes=-0", FileVerdict::Outside),
            // Not followed.
            ("bytes=5-3", FileVerdict::Whole),
            ("bytes=0-1,3-4", FileVerdict::Whole),
            ("bytes=-", FileVerdict::Whole),
            ("bytes=a-b", FileVerdict::Whole),
            ("bytes=+1-2", FileVerdict::Whole),
            ("bytes=--1", FileVerdict::Whole),
            ("bytes 0-1", FileVerdict::Whole),
            ("items=0-1", FileVerdict::Whole),
            ("", FileVerdict::Whole),
        ] {
            assert_eq!(of_range(Some(value), 10), expected, "{value}");
        }
        assert_eq!(of_range(None, 10), FileVerdict::Whole);
        for value in ["bytes=0-", "bytes=0-0", "bytes=-1"] {
            assert_eq!(of_range(Some(value), 0), FileVerdict::Outside, "{value}");
        }
    }
}
