//! The configuration of a mount: precedence between sources of settings, settings of all forms together, and as a TOML file.

use std::path::{Path, PathBuf};

use serde::{Serialize, Serializer};

use super::{
    TimeLimit,
    file::{ConfigError, FileSettings},
    table::{MountSettings, SETTINGS, ServeSettings, Setting, SettingScope, Settings, ViewSettings},
};

impl Settings {
    /// Takes from `base` the settings that are empty here. In repeatable settings, the entries of `base` come after
    /// these.
    pub fn over(&mut self, base: &Self) {
        for row in SETTINGS.iter() {
            (row.field.over)(self, base);
        }
    }

    /// The defaults that the table gives.
    pub(super) fn by_default() -> Self {
        let mut settings = Self::default();
        for row in SETTINGS.iter() {
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
        for row in SETTINGS.iter() {
            (row.field.rebase)(self, base);
        }
    }
}

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
    /// The repository whose configuration and tokenizer the source takes over: as `source`.
    pub config_from: Option<String>,
    /// The repository that gives the tensors that the source lacks: as `source`.
    pub fill_from: Option<String>,
    /// The model that a run began with: as `source`.
    pub base: Option<String>,
    /// The mountpoint; absolute.
    pub mountpoint: Option<PathBuf>,
    /// The views, at least one. Only a single view may be without a name.
    pub views: Vec<ViewConfig>,
    /// How to mount.
    pub mount: MountSettings,
    /// How to serve over the network.
    pub serve: ServeSettings,
    /// Longest time until a daemon must be ready.
    pub start_limit: Option<TimeLimit>,
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
        let Settings { source, config_from, fill_from, base, mountpoint, mount, serve, start_limit, .. } = top;
        Self { source, config_from, fill_from, base, mountpoint, views, mount, serve, start_limit }
    }

    /// Applies other settings, which have precedence in every view.
    pub(crate) fn overlay(&mut self, said: Settings) {
        for view in &mut self.views {
            let mut settings = said.clone();
            settings.over(&Settings { view: std::mem::take(&mut view.settings), ..Settings::default() });
            view.settings = settings.view;
        }
        let mut top = said;
        top.over(&self.top());
        let Settings { source, config_from, fill_from, base, mountpoint, mount, serve, start_limit, .. } = top;
        let views = std::mem::take(&mut self.views);
        *self = Self { source, config_from, fill_from, base, mountpoint, views, mount, serve, start_limit };
    }

    /// The settings that hold for all views.
    pub(super) fn top(&self) -> Settings {
        let Self { source, config_from, fill_from, base, mountpoint, views: _, mount, serve, start_limit } =
            self.clone();
        Settings { mount, serve, source, mountpoint, config_from, fill_from, base, start_limit, ..Settings::default() }
    }

    /// The configuration as a text that reads back as the same, with every view in full. A mountpoint that is not UTF-8 is
    /// left out.
    ///
    /// # Errors
    /// [`ConfigError::Unwritable`] if a path is not UTF-8, or a number exceeds those of TOML.
    pub fn to_toml(&self) -> Result<String, ConfigError> {
        let mut top = self.top();
        top.mountpoint = top.mountpoint.filter(|path| path.to_str().is_some());
        let mut views = Vec::new();
        for view in &self.views {
            if view.name.is_empty() {
                top.view = view.settings.clone();
            } else {
                let settings = Settings { view: view.settings.clone(), ..Settings::default() };
                let rows = TomlRows::new(&settings, &[SettingScope::View])?;
                views.push((view.name.clone(), Member::Table(rows)));
            }
        }
        let mut document = TomlRows::new(&top, &[SettingScope::Top, SettingScope::View])?;
        document.push("view", TomlRows(views));
        document.push("mount", TomlRows::new(&top, &[SettingScope::Mount])?);
        document.push("serve", TomlRows::new(&top, &[SettingScope::Serve])?);
        toml::to_string(&document).map_err(|error| ConfigError::Unwritable(error.to_string()))
    }
}

/// A table of members in this order.
struct TomlRows(Vec<(String, Member)>);

#[derive(Serialize)]
#[serde(untagged)]
enum Member {
    Value(toml::Value),
    Table(TomlRows),
}

impl TomlRows {
    /// The settings of these scopes, in the order of their table.
    fn new(settings: &Settings, scopes: &[SettingScope]) -> Result<Self, ConfigError> {
        let mut rows = Vec::new();
        for row in SETTINGS.iter().filter(|row| scopes.contains(&row.scope)) {
            let written = (row.field.write)(settings)
                .map_err(|reason| ConfigError::Unwritable(format!("{}: {reason}", row.toml_key())))?;
            rows.extend(written.map(|value| (row.toml_key(), Member::Value(value))));
        }
        Ok(Self(rows))
    }

    /// Adds a table that is not empty.
    fn push(&mut self, name: &str, table: Self) {
        self.0.extend((!table.0.is_empty()).then(|| (name.to_owned(), Member::Table(table))));
    }
}

impl Serialize for TomlRows {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}
