//! Precedence between sources of settings, and defaults.

use std::path::Path;

use super::{setting::Setting, settings::Settings, table::SETTINGS};

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

    /// The settings that have a value here.
    pub fn given(&self) -> impl Iterator<Item = &'static Setting> {
        // A value that has no form in a file is a value.
        SETTINGS.iter().filter(|row| !matches!((row.field.write)(self), Ok(None)))
    }

    /// Lets relative paths begin at `base`.
    pub(crate) fn rebase(&mut self, base: &Path) {
        for row in SETTINGS {
            (row.field.rebase)(self, base);
        }
    }
}
