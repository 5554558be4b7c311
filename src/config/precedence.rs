//! Which settings have precedence, and what holds where none is given.

use std::path::Path;

use super::{settings::Settings, table::SETTINGS};

impl Settings {
    /// Takes from `base` the settings that are empty here. In repeatable settings, the entries of `base` come after
    /// these.
    pub fn over(&mut self, base: &Self) {
        for row in SETTINGS {
            (row.field.over)(self, base);
        }
    }

    /// The defaults that the table gives.
    pub(super) fn by_default() -> Self {
        let mut settings = Self::default();
        for row in SETTINGS {
            let taken = row.default.map_or(Ok(()), |word| (row.field.add)(&mut settings, word.as_ref()));
            taken.expect("defaults in the table are well-formed, which a test shows");
        }
        settings
    }

    /// Lets relative paths begin at `base`.
    pub fn rebase(&mut self, base: &Path) {
        for row in SETTINGS {
            (row.field.rebase)(self, base);
        }
    }
}
