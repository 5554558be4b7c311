//! Kinds of values, and how a field of the settings reads them: from a word of a flag or `-o`, or from TOML.
//!
//! A [`SettingValue`] reads and writes one value. A [`SettingField`] holds it: `Option` for a setting that is given once,
//! `Vec` and a map for repeatable settings. A row of the table names nothing but the field; its type determines the
//! rest.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    ffi::OsStr,
    ops::Range,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;
use toml::{
    Spanned,
    de::{DeTable, DeValue, ValueDeserializer},
};

use super::near::did_you_mean;

/// A value of TOML and its position.
pub type Toml<'a> = Spanned<DeValue<'a>>;

/// The entries of a table, each with its position.
pub(super) type Entries<'a> = Vec<(Spanned<String>, Toml<'a>)>;

/// The entries of a table in the order of the text.
pub(super) fn in_order(table: DeTable<'_>) -> Entries<'_> {
    let owned = |key: Spanned<Cow<'_, str>>| {
        let at = key.span();
        Spanned::new(at, key.into_inner().into_owned())
    };
    let mut entries: Entries<'_> = table.into_iter().map(|(key, value)| (owned(key), value)).collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    entries
}

/// A problem in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Bytes of the text.
    pub at: Range<usize>,
    /// The expected and the found value.
    pub reason: String,
}

/// The form of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    /// One value.
    Word,
    /// A boolean, a pattern, or several.
    Allow,
    /// A list of words.
    List,
    /// An array of tables.
    Rules,
    /// A table of names and values.
    Table,
}

/// A kind of value.
pub trait SettingValue: Clone {
    /// The form of the key for a single value, or for one that `join` can extend.
    const ONE: KeyForm = KeyForm::Word;
    /// The form of the key for several values.
    const SEVERAL: KeyForm = KeyForm::List;

    /// Reads it from a word. By default it is not made of one: only a file can hold it, or it is read by [`SettingValue::from_os`].
    ///
    /// # Errors
    /// The expected and the found value.
    fn from_word(text: &str) -> Result<Self, String> {
        let _ = text;
        Err("expected a table in a file".to_owned())
    }

    /// Writes the value in the form that reading accepts.
    ///
    /// # Errors
    /// The reason why TOML cannot hold it.
    fn to_toml(&self) -> Result<toml::Value, String>;

    /// Reads the value from a word that may not be UTF-8.
    ///
    /// # Errors
    /// As [`SettingValue::from_word`].
    fn from_os(text: &OsStr) -> Result<Self, String> {
        Self::from_word(utf8(text)?)
    }

    /// Reads the value from a file. By default it is a text that holds the word.
    ///
    /// # Errors
    /// The expected and the found value, and its position.
    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        read_as(value, |text: String| Self::from_os(OsStr::new(&text)))
    }

    /// Adds the value of a second flag of the same name.
    fn join(&mut self, later: Self) {
        *self = later;
    }

    /// The path that it is, if it is one: a relative one begins where it was written.
    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        None
    }
}

fn utf8(text: &OsStr) -> Result<&str, String> {
    text.to_str().ok_or_else(|| format!("expected UTF-8, found {}", text.display()))
}

/// The word of a flag or option. An empty one is a variable of a script that is not set.
fn word(text: &OsStr) -> Result<&OsStr, String> {
    if text.as_encoded_bytes().trim_ascii().is_empty() {
        return Err("expected a value, found nothing: is a variable of a script not set?".to_owned());
    }
    Ok(text)
}

/// A value that is a text, a number, or a list of these.
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "expected a text such as \"0-3,8\", a number, or a list of these")]
pub(super) enum Numbers {
    Number(u64),
    Text(String),
    List(Vec<Numbers>),
}

impl Numbers {
    /// The value as a text; commas join the parts of a list.
    pub(super) fn text(self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::Text(text) => text,
            Self::List(keys) => keys.into_iter().map(Self::text).collect::<Vec<_>>().join(","),
        }
    }
}

/// Reads a value by serde, with the position of a problem.
///
/// # Errors
/// The type that serde expected and found.
pub fn deserialize<T: DeserializeOwned>(value: Toml<'_>) -> Result<T, Fault> {
    let at = value.span();
    T::deserialize(ValueDeserializer::from(value))
        .map_err(|error| Fault { at: error.span().unwrap_or(at), reason: error.message().to_owned() })
}

/// Reads a value that serde gives as a `K`; a problem that `read` finds has the position of the value.
pub(super) fn read_as<K: DeserializeOwned, T>(
    value: Toml<'_>,
    read: impl FnOnce(K) -> Result<T, String>,
) -> Result<T, Fault> {
    let at = value.span();
    read(deserialize(value)?).map_err(|reason| Fault { at, reason })
}

/// Reads a number or a text as a word; `expected` are these, for messages.
pub(super) fn read_word<T: SettingValue>(value: Toml<'_>, expected: &str) -> Result<T, Fault> {
    let at = value.span();
    let number = deserialize::<u64>(value.clone()).map(|number| number.to_string());
    let word = number.or_else(|_| deserialize::<String>(value)).map_err(|_| format!("expected {expected}"));
    word.and_then(|word| T::from_word(&word)).map_err(|reason| Fault { at, reason })
}

/// The field of a setting.
pub trait SettingField {
    /// The form of its key's value.
    const FORM: KeyForm;

    /// Takes a word of the command line.
    ///
    /// # Errors
    /// The expected and the found value.
    fn add(&mut self, text: &OsStr) -> Result<(), String>;

    /// Takes a value of the file.
    ///
    /// # Errors
    /// The expected and the found value, and its position.
    fn read(&mut self, value: Toml<'_>) -> Result<(), Fault>;

    /// The value for a file; `None` if the field is empty.
    ///
    /// # Errors
    /// The reason why TOML cannot hold it.
    fn write(&self) -> Result<Option<toml::Value>, String>;

    /// Takes the values of `base` if this field is empty. In a repeatable setting, the entries of `base` come after
    /// these.
    fn over(&mut self, base: &Self);

    /// Lets relative paths begin at `base`.
    fn rebase(&mut self, base: &Path);
}

impl<T: SettingValue> SettingField for Option<T> {
    const FORM: KeyForm = T::ONE;

    fn add(&mut self, text: &OsStr) -> Result<(), String> {
        let value = T::from_os(word(text)?)?;
        match self {
            Some(earlier) => earlier.join(value),
            None => *self = Some(value),
        }
        Ok(())
    }

    fn read(&mut self, value: Toml<'_>) -> Result<(), Fault> {
        *self = Some(T::from_toml(value)?);
        Ok(())
    }

    fn write(&self) -> Result<Option<toml::Value>, String> {
        self.as_ref().map(T::to_toml).transpose()
    }

    fn over(&mut self, base: &Self) {
        if self.is_none() {
            self.clone_from(base);
        }
    }

    fn rebase(&mut self, base: &Path) {
        rebase(self, base);
    }
}

impl<T: SettingValue> SettingField for Vec<T> {
    const FORM: KeyForm = T::SEVERAL;

    fn add(&mut self, text: &OsStr) -> Result<(), String> {
        self.push(T::from_os(word(text)?)?);
        Ok(())
    }

    fn read(&mut self, value: Toml<'_>) -> Result<(), Fault> {
        if !value.get_ref().is_array() {
            // The message of serde names the type found.
            return deserialize::<Vec<toml::Value>>(value).map(drop);
        }
        let DeValue::Array(values) = value.into_inner() else { return Ok(()) };
        *self = values.into_iter().map(T::from_toml).collect::<Result<_, _>>()?;
        Ok(())
    }

    fn write(&self) -> Result<Option<toml::Value>, String> {
        if self.is_empty() { Ok(None) } else { array(self).map(Some) }
    }

    fn over(&mut self, base: &Self) {
        self.extend_from_slice(base);
    }

    fn rebase(&mut self, base: &Path) {
        rebase(self, base);
    }
}

impl<T: SettingValue + DeserializeOwned> SettingField for BTreeMap<String, T> {
    const FORM: KeyForm = KeyForm::Table;

    fn add(&mut self, text: &OsStr) -> Result<(), String> {
        let text = utf8(text)?;
        let (name, value) = text.split_once('=').ok_or_else(|| format!("expected name=value, found {text:?}"))?;
        self.insert(name.trim().to_owned(), T::from_word(value.trim())?);
        Ok(())
    }

    fn read(&mut self, value: Toml<'_>) -> Result<(), Fault> {
        *self = deserialize(value)?;
        Ok(())
    }

    fn write(&self) -> Result<Option<toml::Value>, String> {
        let rows = self.iter().map(|(name, value)| Ok((name.clone(), value.to_toml()?)));
        let table: toml::Table = rows.collect::<Result<_, String>>()?;
        Ok((!table.is_empty()).then_some(toml::Value::Table(table)))
    }

    fn over(&mut self, base: &Self) {
        for (name, value) in base {
            self.entry(name.clone()).or_insert_with(|| value.clone());
        }
    }

    fn rebase(&mut self, base: &Path) {
        rebase(self.values_mut(), base);
    }
}

impl SettingValue for bool {
    fn from_word(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("expected true or false, found {text:?}"))
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok((*self).into())
    }

    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        deserialize(value)
    }
}

impl SettingValue for String {
    fn from_word(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.as_str().into())
    }
}

impl SettingValue for PathBuf {
    fn from_os(text: &OsStr) -> Result<Self, String> {
        if text.is_empty() { Err("expected a path, found nothing".to_owned()) } else { Ok(text.into()) }
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        self.to_str().map(Into::into).ok_or_else(|| format!("{} is not UTF-8", self.display()))
    }

    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        Some(self)
    }
}

/// Lets the relative paths among these values begin at `base`.
fn rebase<'v, T: SettingValue + 'v>(values: impl IntoIterator<Item = &'v mut T>, base: &Path) {
    // An address is no path.
    let is_path = |path: &&mut PathBuf| !path.to_str().is_some_and(|text| text.contains("://"));
    for path in values.into_iter().filter_map(T::path_mut).filter(is_path) {
        let joined = base.join(&*path);
        *path = std::path::absolute(&joined).unwrap_or(joined);
    }
}

/// An integer of TOML has 63 bits without the sign; ours have 64.
pub(super) fn integer(number: u64) -> Result<toml::Value, String> {
    i64::try_from(number).map(Into::into).map_err(|_| format!("{number} is more than {}", i64::MAX))
}

/// An array of TOML.
pub(super) fn array<T: SettingValue>(values: &[T]) -> Result<toml::Value, String> {
    values.iter().map(T::to_toml).collect::<Result<_, _>>().map(toml::Value::Array)
}

/// A closed list of words.
pub trait Choice: Copy + PartialEq + 'static {
    /// The name of the list, for messages.
    const WHAT: &'static str;
    /// The words, each with its meaning.
    const WORDS: &'static [(&'static str, Self)];

    /// The word of this one.
    ///
    /// # Panics
    /// If the list lacks it, which tests exclude.
    fn word(self) -> &'static str {
        let row = Self::WORDS.iter().find(|(_, choice)| *choice == self);
        row.expect("the list has every choice").0
    }
}

impl<T: Choice> SettingValue for T {
    fn from_word(text: &str) -> Result<Self, String> {
        let row = Self::WORDS.iter().find(|(word, _)| *word == text);
        row.map(|(_, choice)| *choice).ok_or_else(|| {
            let words: Vec<&str> = Self::WORDS.iter().map(|(word, _)| *word).collect();
            let near = did_you_mean(Self::WHAT, text, words.iter().copied());
            near.unwrap_or_else(|| format!("{}: expected {}, found {text:?}", Self::WHAT, one_of(&words)))
        })
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.word().into())
    }
}

/// `a, b or c`.
pub(super) fn one_of(words: &[&str]) -> String {
    match words {
        [rest @ .., last] if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        words => words.join(""),
    }
}
