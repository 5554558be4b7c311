//! Amounts in words.

use ckfs_tensor::Reads;

/// Bytes in words: exact up to 1023, then three digits and a binary unit.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let (mut tenths, mut unit) = (u128::from(bytes) * 10 / 1024, 0);
    while tenths >= 10_240 && unit + 1 < UNITS.len() {
        (tenths, unit) = (tenths / 1024, unit + 1);
    }
    if tenths < 1000 {
        format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
    } else {
        format!("{} {}", tenths / 10, UNITS[unit])
    }
}

/// `part` of `whole` in percent.
pub fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "0.0 %".to_owned();
    }
    let tenths = u128::from(part) * 1000 / u128::from(whole);
    format!("{}.{} %", tenths / 10, tenths % 10)
}

/// The bytes in the touched pages over the bytes needed, in hundredths.
pub(super) fn hundredths(reads: Reads) -> u128 {
    if reads.needed_bytes == 0 { 100 } else { u128::from(reads.paged_bytes) * 100 / u128::from(reads.needed_bytes) }
}

/// The bytes needed, and the bytes in their pages.
pub fn reads_text(reads: Reads) -> String {
    let (needed, paged) = (human_bytes(reads.needed_bytes), human_bytes(reads.paged_bytes));
    format!("{needed} of the sources, {paged} in whole pages: {} times", factor(reads))
}

pub(super) fn factor(reads: Reads) -> String {
    let hundredths = hundredths(reads);
    format!("{}.{:02}", hundredths / 100, hundredths % 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_for_readers() {
        let rows = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (102_400, "100 KiB"),
            (1 << 20, "1.0 MiB"),
            (5 << 30, "5.0 GiB"),
            (u64::MAX, "16383 PiB"),
        ];
        for (bytes, expected) in rows {
            assert_eq!(human_bytes(bytes), expected);
        }
        assert_eq!((percent(1, 8), percent(0, 0)), ("12.5 %".to_owned(), "0.0 %".to_owned()));
    }
}
