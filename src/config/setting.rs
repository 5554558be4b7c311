//! One setting: its names, its help, the commands that take it, and its field.

use std::{ffi::OsStr, path::Path};

use super::{
    table::Settings,
    value::{Fault, KeyForm, Toml},
};

/// The subject of a setting: its heading in the help, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Group {
    /// Source and mountpoint.
    Place,
    /// The content of a view.
    View,
    /// Reading and making of bytes.
    Reading,
    /// Mounting and serving.
    Mount,
    /// Serving over the network.
    Serve,
    /// Logging.
    Logging,
}

impl Group {
    /// The groups of which all commands that open a checkpoint take the settings.
    pub const READERS: &[Self] = &[Self::View, Self::Reading];

    /// Its heading in the help of a command, and with the commands that take its settings.
    pub fn headings(self) -> [&'static str; 2] {
        match self {
            Self::Place => ["Arguments", "Arguments"],
            Self::View => ["View", "View (commands that take SOURCE)"],
            Self::Reading => ["Reading", "Reading (commands that take SOURCE)"],
            Self::Mount => ["Mount", "Mount (ckfs mount)"],
            Self::Serve => ["Serving", "Serving (ckfs serve)"],
            Self::Logging => ["Logging", "Logging (all commands)"],
        }
    }

    /// A setting with a flag and a key.
    pub(super) const fn row(self, name: &'static str, arity: Arity, field: FieldAccess) -> Setting {
        let scope = match self {
            Self::Place => SettingScope::Top,
            Self::View => SettingScope::View,
            Self::Reading | Self::Mount | Self::Logging => SettingScope::Mount,
            Self::Serve => SettingScope::Serve,
        };
        Setting {
            name,
            group: self,
            arity,
            field,
            help: "",
            more: "",
            default: None,
            key: None,
            is_flag: true,
            is_common: false,
            is_served: false,
            scope,
        }
    }
}

/// The place of a setting in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SettingScope {
    /// Above all tables.
    Top,
    /// Above all tables, for every view, or in the table of one.
    View,
    /// In the table `[mount]`.
    Mount,
    /// In the table `[serve]`.
    Serve,
    /// Nowhere.
    None,
}

/// The value of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arity {
    /// None: the flag stands for this word.
    Flag(&'static str),
    /// A value, with this placeholder.
    Required(&'static str),
    /// An optional value, with the first word as placeholder. Without a value the flag stands for the second word.
    Optional(&'static str, &'static str),
}

/// Access to the field of a setting.
#[derive(Clone, Copy, Debug)]
pub struct FieldAccess {
    /// The form of its key's value.
    pub form: KeyForm,
    /// Takes a word of the command line.
    pub add: fn(&mut Settings, &OsStr) -> Result<(), String>,
    /// Takes a value of a file.
    pub read: fn(&mut Settings, Toml<'_>) -> Result<(), Fault>,
    /// The value for a file.
    pub write: fn(&Settings) -> Result<Option<toml::Value>, String>,
    /// Takes from other settings the values that are empty here.
    pub over: fn(&mut Settings, &Settings),
    /// Lets relative paths begin at a directory.
    pub rebase: fn(&mut Settings, &Path),
}

/// One setting: a row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// The flag's name, with dashes. `-o` and files have underscores in their place.
    pub name: &'static str,
    /// Its heading.
    pub group: Group,
    /// Its value.
    pub arity: Arity,
    /// The field.
    pub field: FieldAccess,
    /// The help, in a sentence or two.
    pub help: &'static str,
    /// More help, as paragraphs.
    pub more: &'static str,
    /// The default, if it is always the same.
    pub default: Option<&'static str>,
    /// Its name in files, if it differs.
    pub(super) key: Option<&'static str>,
    /// Whether there is a flag, and an option of `-o`.
    pub is_flag: bool,
    /// Whether the short help shows it.
    pub is_common: bool,
    /// Whether `serve` takes it too, though it is one of `mount`.
    pub(super) is_served: bool,
    /// Its place in a file.
    pub scope: SettingScope,
}

impl Setting {
    /// Whether commands that take the settings of these groups take it as a flag.
    pub fn is_taken_with(&self, groups: &[Group]) -> bool {
        let also = self.is_served && groups.contains(&Group::Serve);
        self.is_flag && (groups.contains(&self.group) || also)
    }

    /// Whether mount(8) takes it as an option of `-o`.
    pub(crate) fn is_option(&self) -> bool {
        self.is_flag && self.group != Group::Serve
    }

    /// Its name among the options of `-o`.
    pub fn option(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Its key in a file.
    pub(crate) fn toml_key(&self) -> String {
        self.key.map_or_else(|| self.option(), str::to_owned)
    }

    /// Whether its flag may be repeated.
    pub fn repeats(&self) -> bool {
        self.field.form != KeyForm::Word
    }

    /// The flag as the help shows it, with its value.
    pub fn usage(&self) -> String {
        match self.arity {
            Arity::Flag(_) => format!("--{}", self.name),
            Arity::Required(value) => format!("--{} <{value}>", self.name),
            Arity::Optional(value, _) => format!("--{}[=<{value}>]", self.name),
        }
    }
}
