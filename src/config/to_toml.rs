//! The configuration as a TOML file.

use serde::{Serialize, Serializer};

use super::{file::ConfigError, merged::Config, setting::SettingScope, settings::Settings, table::SETTINGS};

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
                .map_err(|reason| ConfigError::Unwritable { reason: format!("{}: {reason}", row.toml_key()) })?;
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

impl Config {
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
        toml::to_string(&document).map_err(|error| ConfigError::Unwritable { reason: error.to_string() })
    }
}
