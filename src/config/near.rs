//! The name that a mistyped one most resembles.

/// Shortest text that counts as the beginning of a name.
const BEGINNING_BYTES_MIN: usize = 3;

/// The name that begins with this text, or else the most similar one, if fewer than half of its characters differ.
pub(super) fn nearest<'a>(found: &str, names: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
    let begun = names.clone().find(|name| found.len() >= BEGINNING_BYTES_MIN && name.starts_with(found));
    let (distance, name) = names.map(|name| (strsim::damerau_levenshtein(found, name), name)).min()?;
    begun.or_else(|| (distance * 2 < name.len()).then_some(name))
}
