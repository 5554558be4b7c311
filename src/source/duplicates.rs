//! Copies of one thing in several files of a source.

/// Which of several copies of a tensor counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duplicates {
    /// That of the file which the index names. What the index does not name is left out.
    Index,
    /// That of the last file, as engines do.
    Last,
    /// None: copies are refused.
    Refuse,
}
