//! The configuration as a TOML file.

use serde::{Serialize, Serializer, ser::SerializeMap};

use super::{file::ConfigError, merged::Config, setting::SettingScope, settings::Settings, table::SETTINGS};

/// Keys and values, in the order of the table.
struct TomlRows(Vec<(String, toml::Value)>);

impl TomlRows {
    fn new(settings: &Settings, scopes: &[SettingScope]) -> Result<Self, ConfigError> {
        let mut rows = Vec::new();
        for row in SETTINGS.iter().filter(|row| scopes.contains(&row.scope)) {
            let written = (row.field.write)(settings)
                .map_err(|reason| ConfigError::Unwritable { reason: format!("{}: {reason}", row.toml_key()) })?;
            rows.extend(written.map(|value| (row.toml_key(), value)));
        }
        Ok(Self(rows))
    }
}

impl Serialize for TomlRows {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

struct Document {
    top: TomlRows,
    views: Vec<(String, TomlRows)>,
    mount: TomlRows,
    serve: TomlRows,
}

impl Serialize for Document {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Views<'a>(&'a [(String, TomlRows)]);
        impl Serialize for Views<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter().map(|(name, rows)| (name, rows)))
            }
        }
        let mut map = serializer.serialize_map(None)?;
        for (key, value) in &self.top.0 {
            map.serialize_entry(key, value)?;
        }
        if !self.views.is_empty() {
            map.serialize_entry("view", &Views(&self.views))?;
        }
        if !self.mount.0.is_empty() {
            map.serialize_entry("mount", &self.mount)?;
        }
        if !self.serve.0.is_empty() {
            map.serialize_entry("serve", &self.serve)?;
        }
        map.end()
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
                views.push((view.name.clone(), TomlRows::new(&settings, &[SettingScope::View])?));
            }
        }
        let document = Document {
            views,
            mount: TomlRows::new(&top, &[SettingScope::Mount])?,
            serve: TomlRows::new(&top, &[SettingScope::Serve])?,
            top: TomlRows::new(&top, &[SettingScope::Top, SettingScope::View])?,
        };
        toml::to_string(&document).map_err(|error| ConfigError::Unwritable { reason: error.to_string() })
    }
}
