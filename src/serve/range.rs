//! One range of bytes, as a request asks for it.

/// What a `Range` header asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AskedRange {
    /// Everything: there is no range, or one that this server may pass over (another unit, several ranges, no proper form).
    All,
    /// The bytes from the first to before the second number; at least one.
    Part(u64, u64),
    /// Bytes that the file does not have.
    Outside,
}

impl AskedRange {
    /// The range of a header's value, of a file of `size_bytes`.
    pub(super) fn parse(value: Option<&str>, size_bytes: u64) -> Self {
        let Some((first, last)) = value.and_then(single) else { return Self::All };
        match (first, last) {
            // A number beyond all files is as good as the largest.
            (Some(first), last) => {
                let end = last.map_or(size_bytes, |last| last.saturating_add(1).min(size_bytes));
                if last.is_some_and(|last| last < first) {
                    Self::All
                } else if first < end {
                    Self::Part(first, end)
                } else {
                    Self::Outside
                }
            }
            (None, Some(length)) if length > 0 && size_bytes > 0 => {
                Self::Part(size_bytes - length.min(size_bytes), size_bytes)
            }
            (None, Some(_)) => Self::Outside,
            (None, None) => Self::All,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_to_the_file() {
        for (value, expected) in [
            ("bytes=0-0", AskedRange::Part(0, 1)),
            ("bytes=0-9", AskedRange::Part(0, 10)),
            ("bytes=3-5", AskedRange::Part(3, 6)),
            ("Bytes = 3 - 5", AskedRange::Part(3, 6)),
            ("bytes=9-", AskedRange::Part(9, 10)),
            ("bytes=5-99999999999999999999999", AskedRange::Part(5, 10)),
            ("bytes=0-18446744073709551615", AskedRange::Part(0, 10)),
            ("bytes=-3", AskedRange::Part(7, 10)),
            ("bytes=-99999999999999999999999", AskedRange::Part(0, 10)),
            ("bytes=10-", AskedRange::Outside),
            ("bytes=10-12", AskedRange::Outside),
            ("bytes=18446744073709551615-", AskedRange::Outside),
            ("bytes=99999999999999999999999-99999999999999999999999", AskedRange::Outside),
            ("bytes=-0", AskedRange::Outside),
            // Not followed.
            ("bytes=5-3", AskedRange::All),
            ("bytes=0-1,3-4", AskedRange::All),
            ("bytes=-", AskedRange::All),
            ("bytes=a-b", AskedRange::All),
            ("bytes=+1-2", AskedRange::All),
            ("bytes=--1", AskedRange::All),
            ("bytes 0-1", AskedRange::All),
            ("items=0-1", AskedRange::All),
            ("", AskedRange::All),
        ] {
            assert_eq!(AskedRange::parse(Some(value), 10), expected, "{value}");
        }
        assert_eq!(AskedRange::parse(None, 10), AskedRange::All);
        for value in ["bytes=0-", "bytes=0-0", "bytes=-1"] {
            assert_eq!(AskedRange::parse(Some(value), 0), AskedRange::Outside, "{value}");
        }
    }
}
