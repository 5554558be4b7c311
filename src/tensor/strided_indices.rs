//! Chosen indexes of an axis, as runs of equal steps.

use std::fmt;

/// Indexes `first`, `first + step`, …, `count` of them, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StridedIndices {
    /// The first index.
    pub first: u64,
    /// From one index to the next; negative downwards.
    pub step: i64,
    /// Number of indexes, at least 1.
    pub count: u64,
}

impl StridedIndices {
    /// The last index.
    ///
    /// # Panics
    /// If the run goes below 0. Views exclude this.
    pub fn last(&self) -> u64 {
        let steps = i128::from(self.step) * i128::from(self.count - 1);
        u64::try_from(i128::from(self.first) + steps).expect("views have checked that a run stays in its axis")
    }

    /// The smallest index.
    ///
    /// # Panics
    /// As [`StridedIndices::last`].
    pub fn low(&self) -> u64 {
        self.first.min(self.last())
    }

    /// The runs of a list of indexes. Two indexes are a run only at the end of the list, so that `0, 5, 6, 7` is 0 and then a
    /// run of three.
    pub(crate) fn of_list(indexes: &[u64]) -> Vec<Self> {
        let step = |a: u64, b: u64| i64::try_from(i128::from(b) - i128::from(a)).ok();
        let mut runs = Vec::new();
        let mut rest = indexes;
        while let [first, others @ ..] = rest {
            let Some(by) = others.first().and_then(|second| step(*first, *second)) else {
                runs.push(Self { first: *first, step: 1, count: 1 });
                rest = others;
                continue;
            };
            let alike = rest.windows(2).take_while(|pair| step(pair[0], pair[1]) == Some(by)).count();
            let taken = if alike >= 2 || alike == others.len() { alike + 1 } else { 1 };
            runs.push(Self { first: *first, step: if taken > 1 { by } else { 1 }, count: taken as u64 });
            rest = &rest[taken..];
        }
        runs
    }
}

impl fmt::Display for StridedIndices {
    /// As a list has it: `7`, `0..4` (without 4), or `6..=0 by -2`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.count, self.step) {
            (1, _) => write!(f, "{}", self.first),
            (_, 1) => write!(f, "{}..{}", self.first, self.last() + 1),
            (count, 0) => write!(f, "{} {count} times", self.first),
            (_, step) => write!(f, "{}..={} by {step}", self.first, self.last()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_cut_into_runs() {
        let rows: &[(&[u64], &[&str])] = &[
            (&[], &[]),
            (&[3], &["3"]),
            (&[0, 1, 2, 3], &["0..4"]),
            (&[0, 5, 6, 7], &["0", "5..8"]),
            (&[3, 1], &["3..=1 by -2"]),
            (&[6, 4, 2, 0, 1, 2], &["6..=0 by -2", "1..3"]),
            (&[2, 2, 2, 9], &["2 3 times", "9"]),
            (&[0, 2, 1, 3], &["0", "2", "1..=3 by 2"]),
        ];
        for (indexes, expected) in rows {
            let runs = StridedIndices::of_list(indexes);
            let text: Vec<String> = runs.iter().map(ToString::to_string).collect();
            assert_eq!(&text, expected, "{indexes:?}");
            let back: Vec<u64> = runs
                .iter()
                .flat_map(|run| (0..run.count).map(move |n| StridedIndices { count: n + 1, ..*run }.last()))
                .collect();
            assert_eq!(&back, indexes);
        }
    }
}
