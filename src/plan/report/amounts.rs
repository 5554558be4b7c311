//! Amounts in words.

pub use ckfs_checkpoint::human_bytes;
use ckfs_tensor::Reads;

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
    fn parts_in_percent() {
        assert_eq!((percent(1, 8), percent(0, 0)), ("12.5 %".to_owned(), "0.0 %".to_owned()));
    }
}
