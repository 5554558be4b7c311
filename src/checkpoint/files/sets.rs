//! Numbered sets of weight files, and which of them lack some.

use std::collections::{BTreeMap, BTreeSet};

use super::{super::problem::Problem, weight_name::WeightName};

/// What else one file means that is number 0 of 1.
const ZERO_OF_ONE: &str = "; if it is all, an index (*.index.json) that names it says so";

/// The numbered sets among these files that lack some of their own files, and warnings of those that may.
pub(crate) fn incomplete_sets<'a>(paths: impl Iterator<Item = &'a str>) -> (Vec<Problem>, Vec<String>) {
    /// Stem, variant and ending, and what the names say of the number of files.
    type Set<'a> = (&'a str, Option<&'a str>, &'a str, u64);
    // A total beyond 64 bits exceeds every possible number of files.
    let parsed = |digits: &str| digits.parse().unwrap_or(u64::MAX);
    let mut sets: BTreeMap<Set<'a>, (&'a str, BTreeSet<u64>)> = BTreeMap::new();
    for path in paths {
        let Some(WeightName { stem, variant, number: Some((number, total)), ending }) = WeightName::of(path) else {
            continue;
        };
        let (_, numbers) = sets.entry((stem, variant, ending, parsed(total))).or_insert((path, BTreeSet::new()));
        numbers.insert(parsed(number));
    }
    let (mut problems, mut warnings) = (Vec::new(), Vec::new());
    for ((stem, variant, ending, total), (first, numbers)) in sets {
        // Some programs number from 0: to the total itself, as in gpt-oss, or to the number before it.
        let from = u64::from(!numbers.contains(&0));
        let expected = total.saturating_sub(from).saturating_add(1);
        let found = numbers.range(from..=total).count() as u64;
        if found >= expected {
            continue;
        }
        let missing: Vec<u64> = (from..=total).filter(|number| !numbers.contains(number)).take(3).collect();
        let set = format!("{stem}{}*{ending}", variant.map_or_else(String::new, |variant| format!(".{variant}")));
        let lacks_last = from == 0 && missing == [total];
        if lacks_last && total > 1 {
            warnings.push(format!("{set}: {found} files, numbered 0 to {}, are taken for all {total}", total - 1));
            continue;
        }
        let hint = if lacks_last { ZERO_OF_ONE } else { "" };
        let numbers: Vec<String> = missing.iter().map(|number| format!("number {number}")).collect();
        let more = match (expected - found).saturating_sub(missing.len() as u64) {
            0 => String::new(),
            rest => format!(" and {rest} more"),
        };
        let text = format!(
            "{set}: expected {expected} files by their names ({first}), found {found}; missing: {}{more}{hint}",
            numbers.join(", ")
        );
        problems.push(Problem::IncompleteSet { first: first.to_owned(), text });
    }
    (problems, warnings)
}
