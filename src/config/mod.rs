//! The user's settings in any form: flags, options of mount(8), a TOML file. Parsed, but not yet interpreted.
//!
//! One table, [`SETTINGS`], has a row for each setting: its name, its group, the value after its flag, its help, and
//! its field in [`Settings`]. All forms follow from the row:
//!
//! | form | made from the row by |
//! | --- | --- |
//! | flags, their help and errors | `cli::flags` |
//! | keys of files, their errors with file and line, `.ckfs/config.toml` | [`file`](FileSettings) |
//! | options of `-o` and of `mount.ckfs` | [`options`] |
//! | precedence: flags, then `-o`, then the file's table of a view, then its top | [`Settings::over`], [`Config::gather`] |
//! | relative paths, which begin where they were written | [`Settings::rebase`] |
//!
//! To add a setting, add a field to [`settings`](Settings) and a row to `table.rs`, then use the field. The type of the
//! field determines how a word or a TOML value is read and written ([`value`]). A new kind of value is one `impl` there
//! or in `words.rs`. A closed list of words is a [`value::Choice`].
//!
//! Parsing does no I/O: only `load.rs` reads the files that settings name. The layers above interpret layout files,
//! match a mesh with a checkpoint, and measure the memory.

mod allow;
mod file;
mod layers;
mod load;
pub mod mesh;
pub mod options;
pub mod pattern;
pub mod rename;
mod rules;
mod setting;
mod settings;
mod table;
#[cfg(test)]
mod tests;
mod time_limit;
pub mod value;
mod words;

use std::path::{Path, PathBuf};

pub use allow::Allow;
pub use file::{ConfigError, FileSettings};
pub use layers::LayerRanges;
pub use mesh::{DEVICES_LISTED_MAX, Mesh, MeshAxis, MeshError};
pub use pattern::{Pattern, PatternError};
pub use rename::Rename;
pub use rules::{CastRule, LogicalRule, ShardRule};
pub use setting::{Access, Group, Home, Setting, Takers, Takes};
pub use settings::{MountSettings, Settings, ViewSettings};
pub use table::{FORMER, KEYS, SETTINGS, former};
#[cfg(test)]
pub(crate) use tests::EVERY_VIEW_KEY;
pub use time_limit::TimeLimit;
pub use words::{
    ByteCount, Dequantize, Devices, DtypeChoice, LAYOUTS, LayoutChoice, Materialize, OwnerId, ParamValue,
    PermissionBits, ShardChoice, THREADS_MAX, ThreadCount, Tied,
};

/// One view of the configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ViewConfig {
    /// Name of its directory; empty for the only view, at the root of the mount.
    pub name: String,
    /// Its settings, with those of the top.
    pub settings: ViewSettings,
}

/// A configuration with everything inherited, and with the content of all files that it names.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The source: an absolute path, or `org/name[@revision]`.
    pub source: Option<String>,
    /// The mountpoint; absolute.
    pub mountpoint: Option<PathBuf>,
    /// The views, at least one. Only a single view may be without a name.
    pub views: Vec<ViewConfig>,
    /// How to mount.
    pub mount: MountSettings,
    /// Most seconds until a daemon must be ready.
    pub start_seconds: Option<u64>,
}

impl Default for Config {
    /// One view at the root, with default settings.
    fn default() -> Self {
        Self::of_file(FileSettings::default())
    }
}

impl Config {
    /// The configuration of a file: each view inherits the settings above it.
    pub fn of_file(file: FileSettings) -> Self {
        let FileSettings { mut top, views } = file;
        top.over(&Settings::by_default());
        let inherit = |(name, mut own): (String, Settings)| {
            own.over(&top);
            ViewConfig { name, settings: own.view }
        };
        let mut views: Vec<ViewConfig> = views.into_iter().map(inherit).collect();
        if views.is_empty() {
            views.push(ViewConfig { name: String::new(), settings: top.view });
        }
        let Settings { source, mountpoint, mount, start_seconds, .. } = top;
        Self { source, mountpoint, views, mount, start_seconds }
    }

    /// Applies other settings, which have precedence in every view.
    pub fn overlay(&mut self, said: Settings) {
        for view in &mut self.views {
            let mut settings = said.clone();
            settings.over(&Settings { view: std::mem::take(&mut view.settings), ..Settings::default() });
            view.settings = settings.view;
        }
        let mut top = said;
        top.over(&self.top());
        let Settings { source, mountpoint, mount, start_seconds, .. } = top;
        *self = Self { source, mountpoint, views: std::mem::take(&mut self.views), mount, start_seconds };
    }

    /// The settings that hold for all views.
    fn top(&self) -> Settings {
        let Self { source, mountpoint, views: _, mount, start_seconds } = self.clone();
        Settings { source, mountpoint, mount, start_seconds, ..Settings::default() }
    }

    /// The configuration as a text that reads back as the same. A mountpoint that is not UTF-8 is left out.
    ///
    /// # Errors
    /// [`ConfigError::Unwritable`] if a path is not UTF-8, or a number exceeds those of TOML.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        file::write(self)
    }
}

impl Settings {
    /// Takes from `base` the settings that are empty here. In repeatable settings, the entries of `base` come after
    /// these.
    pub fn over(&mut self, base: &Self) {
        for row in SETTINGS {
            (row.field.over)(self, base);
        }
    }

    /// The defaults that the table gives.
    fn by_default() -> Self {
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

/// Shortest text that counts as the beginning of a name.
const BEGINNING_BYTES_MIN: usize = 3;

/// The name that begins with this text, or else the most similar one, if fewer than half of its characters differ.
fn nearest<'a>(found: &str, names: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
    let begun = names.clone().find(|name| found.len() >= BEGINNING_BYTES_MIN && name.starts_with(found));
    let (distance, name) = names.map(|name| (strsim::damerau_levenshtein(found, name), name)).min()?;
    begun.or_else(|| (distance * 2 < name.len()).then_some(name))
}
