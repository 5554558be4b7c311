//! The configuration file: settings as TOML, for one view or several. Reading and writing of its text; no I/O.
//!
//! ```toml
//! source = "/data/models/llama"        # a path (relative to this file), or org/name[@revision]
//! mountpoint = "/mnt/llama"
//! dtype = "bf16"                       # keys of a view; tables of views inherit them
//!
//! [[cast]]                             # the first rule that matches a name wins over `dtype`
//! match = "*norm*"
//! dtype = "keep"
//!
//! [[shard_rules]]                      # the first rule that matches wins over `shard`
//! match = "layers.scanned.wq"
//! spec = ["-", ["tensor", "fsdp"]]     # per axis: "-", a mesh axis, or several, the first outermost
//!
//! [[rename]]                           # regular expressions over the names shown, all in order; `$1` is a group
//! match = "^layers\\."
//! to = "decoder.layers."
//!
//! [view.train]                         # under MNT/train/
//! mesh = "fsdp=4,tensor=2"
//!
//! [view.rollout]
//! mesh = "tensor=4"
//! layout = "hf"
//!
//! [mount]
//! allow_other = true
//!
//! [serve]                              # how `ckfs serve` answers
//! listen = "127.0.0.1:8421"
//! ```
//!
//! Unknown keys and malformed values are errors that name file and line.

use std::path::{Path, PathBuf};

use toml::{Spanned, de::DeTable};

use super::{
    excerpt::excerpt,
    near::did_you_mean,
    table::{SETTINGS, Setting, SettingScope, Settings, ViewSettings, former},
    value::{Entries, Fault, Toml, deserialize, in_order},
    value_types::ShardChoice,
};

/// Why a configuration is unusable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file is not readable.
    #[error("{}: {reason}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        reason: String,
    },
    /// The text is malformed.
    #[error("{}:{line}: {reason}{excerpt}", file.display())]
    Text {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// The problem.
        reason: String,
        /// The line, with a mark below the problem. Begins with a line break, or is empty.
        excerpt: String,
    },
    /// The configuration cannot be written as TOML.
    #[error("the configuration cannot be written as TOML: {0}")]
    Unwritable(String),
}

/// The settings of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FileSettings {
    /// The settings outside the tables of views.
    pub top: Settings,
    /// The tables of views, by name.
    pub views: Vec<(String, Settings)>,
}

impl FileSettings {
    /// Reads a text; `file` is its name for messages.
    ///
    /// # Errors
    /// The first problem, with its line.
    pub fn parse(text: &str, file: &Path) -> Result<Self, ConfigError> {
        Self::read(text).map_err(|fault| fault.error(text, file))
    }

    fn read(text: &str) -> Result<Self, Fault> {
        let mut found = Self::default();
        for (key, value) in document(text)? {
            match key.get_ref().as_str() {
                "mount" => read_table(value, SettingScope::Mount, &mut found.top)?,
                "serve" => read_table(value, SettingScope::Serve, &mut found.top)?,
                "view" => {
                    for (name, value) in entries(value)? {
                        let (name, mut settings) = (view_name(name)?, Settings::default());
                        read_table(value, SettingScope::View, &mut settings)?;
                        found.views.push((name, settings));
                    }
                }
                _ => read_key(&key, value, &[SettingScope::Top, SettingScope::View], &mut found.top)?,
            }
        }
        found.views.sort_by(|(left, _), (right, _)| left.cmp(right));
        Ok(found)
    }
}

/// A file of sharding rules, as `--shard FILE` takes it: two of the settings, which are read into `view`.
///
/// # Errors
/// The first problem, with its line.
pub(super) fn parse_shard_rules(text: &str, file: &Path) -> Result<ViewSettings, ConfigError> {
    let read = || {
        let mut settings = Settings::default();
        let keys = ["shard", "shard_rules"].map(str::to_owned);
        for (key, value) in document(text)? {
            let at = value.span();
            let row = SETTINGS.iter().find(|row| keys.contains(key.get_ref()) && row.toml_key() == *key.get_ref());
            let row = row.ok_or_else(|| unknown(&key, &keys))?;
            (row.field.read)(&mut settings, value)?;
            if matches!(settings.view.shard, Some(ShardChoice::File(_))) {
                let reason = "shard: expected auto or none in a file of rules, found a file".to_owned();
                return Err(Fault { at, reason });
            }
        }
        Ok(settings.view)
    };
    read().map_err(|fault: Fault| fault.error(text, file))
}

impl Fault {
    fn error(self, text: &str, file: &Path) -> ConfigError {
        let before = text.get(..self.at.start.min(text.len())).unwrap_or_default();
        let line = 1 + before.matches('\n').count();
        let excerpt = excerpt(&file.display().to_string(), text, &self.at);
        ConfigError::Text { file: file.to_owned(), line, reason: self.reason.replace('\n', "; "), excerpt }
    }
}

fn document(text: &str) -> Result<Entries<'_>, Fault> {
    let table = DeTable::parse(text)
        .map_err(|error| Fault { at: error.span().unwrap_or(0..0), reason: error.message().to_owned() })?;
    Ok(in_order(table.into_inner()))
}

fn entries(value: Toml<'_>) -> Result<Entries<'_>, Fault> {
    if !value.get_ref().is_table() {
        // The message of serde names the type found.
        return deserialize::<toml::Table>(value).map(|_| Vec::new());
    }
    let toml::de::DeValue::Table(table) = value.into_inner() else { return Ok(Vec::new()) };
    Ok(in_order(table))
}

fn read_table(value: Toml<'_>, scope: SettingScope, settings: &mut Settings) -> Result<(), Fault> {
    entries(value)?.into_iter().try_for_each(|(key, value)| read_key(&key, value, &[scope], settings))
}

/// Reads one key, which belongs to one of `scopes`.
fn read_key(key: &Spanned<String>, value: Toml<'_>, scopes: &[SettingScope], of: &mut Settings) -> Result<(), Fault> {
    let known = || SETTINGS.iter().filter(|row| scopes.contains(&row.scope));
    let Some(row) = known().find(|row| row.toml_key() == *key.get_ref()) else {
        let elsewhere = SETTINGS.iter().find(|row| row.toml_key() == *key.get_ref());
        let place = elsewhere.and_then(|row| match row.scope {
            SettingScope::Mount => Some("under [mount]"),
            SettingScope::Serve => Some("under [serve]"),
            SettingScope::View => Some("before the first table, or under [view.NAME]"),
            SettingScope::Top => Some("before the first table"),
            SettingScope::None => None,
        });
        if let Some(place) = place {
            return Err(Fault { at: key.span(), reason: format!("`{}` belongs {place}", key.get_ref()) });
        }
        // The tables are beside the keys at the top.
        let tables = ["mount", "serve", "view"].into_iter().filter(|_| scopes.contains(&SettingScope::Top));
        let names = known().map(Setting::toml_key).chain(tables.map(str::to_owned));
        return Err(unknown(key, &names.collect::<Vec<_>>()));
    };
    (row.field.read)(of, value)
}

fn unknown(key: &Spanned<String>, names: &[String]) -> Fault {
    let found = key.get_ref();
    if let Some(now) = former(found) {
        return Fault { at: key.span(), reason: format!("unknown field `{found}`: {now}") };
    }
    let reason = did_you_mean("field", found, names.iter().map(String::as_str)).unwrap_or_else(|| {
        let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
        format!("unknown field `{found}`, expected one of {}", names.join(", "))
    });
    Fault { at: key.span(), reason }
}

fn view_name(name: Spanned<String>) -> Result<String, Fault> {
    let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let at = name.span();
    let name = name.into_inner();
    if name.is_empty() || name.starts_with('.') || name.len() > 255 || !name.chars().all(valid) {
        let reason = format!("view {name:?}: expected a name of letters, digits, _, - and ., not starting with .");
        return Err(Fault { at, reason });
    }
    Ok(name)
}
