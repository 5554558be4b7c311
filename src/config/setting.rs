//! One setting: its names, its help, the commands that take it, and the field that holds what was typed.

use std::{ffi::OsStr, path::Path};

use super::{
    settings::Settings,
    value::{Fault, Shape, Toml},
};

/// What a setting is about: its heading in the help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// What to mount, and where.
    Place,
    /// What is to be seen.
    View,
    /// How bytes are read and made.
    Reading,
    /// How to mount and serve.
    Mount,
    /// What is logged.
    Logging,
}

impl Group {
    /// Its heading in the help.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Place => "Arguments",
            Self::View => "View",
            Self::Reading => "Reading",
            Self::Mount => "Mount",
            Self::Logging => "Logging",
        }
    }

    /// The commands that take its settings as flags.
    pub fn takers(self) -> Takers {
        match self {
            Self::View | Self::Reading => Takers::Readers,
            Self::Place | Self::Mount => Takers::Mount,
            Self::Logging => Takers::All,
        }
    }
}

/// The commands that take a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takers {
    /// All that open a checkpoint.
    Readers,
    /// `mount`.
    Mount,
    /// All.
    All,
}

/// Where a setting stands in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// Above all tables.
    Top,
    /// Above all tables, for every view, or in the table of one.
    View,
    /// In the table `[mount]`.
    Mount,
    /// Nowhere.
    None,
}

/// What follows a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// Nothing: the flag stands for this word.
    Nothing(&'static str),
    /// A value, shown as this.
    Value(&'static str),
    /// A value, shown as the first; without one the flag stands for the second.
    Perhaps(&'static str, &'static str),
}

/// How the field of a setting is reached.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// What its key holds.
    pub shape: Shape,
    /// Takes a word of the command line.
    pub add: fn(&mut Settings, &OsStr) -> Result<(), String>,
    /// Takes a value of a file.
    pub read: fn(&mut Settings, Toml<'_>) -> Result<(), Fault>,
    /// What stands in a file.
    pub write: fn(&Settings) -> Result<Option<toml::Value>, String>,
    /// Takes from other settings what these do not say.
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
    /// What follows the flag.
    pub takes: Takes,
    /// The field.
    pub field: Access,
    /// What it does, in a sentence or two.
    pub help: &'static str,
    /// More about it, as paragraphs.
    pub more: &'static str,
    /// The value if none is given, where that is always the same.
    pub default: Option<&'static str>,
    /// Its name in files where that is another.
    key: Option<&'static str>,
    /// Whether there is a flag, and an option of `-o`.
    pub is_flag: bool,
    /// Where it stands in a file.
    pub home: Home,
}

impl Setting {
    /// A setting with a flag and a key.
    pub(super) const fn new(group: Group, name: &'static str, takes: Takes, field: Access, help: &'static str) -> Self {
        let home = match group {
            Group::Place => Home::Top,
            Group::View => Home::View,
            Group::Reading | Group::Mount | Group::Logging => Home::Mount,
        };
        Self { name, group, takes, field, help, more: "", default: None, key: None, is_flag: true, home }
    }

    /// With more help.
    pub(super) const fn more(mut self, more: &'static str) -> Self {
        self.more = more;
        self
    }

    /// With another name in files.
    pub(super) const fn key(mut self, key: &'static str) -> Self {
        self.key = Some(key);
        self
    }

    /// With a value that is told in the help.
    pub(super) const fn default(mut self, default: &'static str) -> Self {
        self.default = Some(default);
        self
    }

    /// Without a key.
    pub(super) const fn flag_only(mut self) -> Self {
        self.home = Home::None;
        self
    }

    /// Without a flag.
    pub(super) const fn file_only(mut self) -> Self {
        self.is_flag = false;
        self
    }

    /// Its name among the options of `-o`.
    pub fn option(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Its key in a file.
    pub fn toml_key(&self) -> String {
        self.key.map_or_else(|| self.option(), str::to_owned)
    }

    /// Whether its flag may be repeated.
    pub fn repeats(&self) -> bool {
        self.field.shape != Shape::Word
    }

    /// The flag as it is shown with what follows it.
    pub fn usage(&self) -> String {
        match self.takes {
            Takes::Nothing(_) => format!("--{}", self.name),
            Takes::Value(value) => format!("--{} <{value}>", self.name),
            Takes::Perhaps(value, _) => format!("--{}[=<{value}>]", self.name),
        }
    }
}
