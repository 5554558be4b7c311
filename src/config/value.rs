//! Kinds of values, and how a field of the settings takes them: as a word of a flag or of `-o`, or as a value of TOML.
//!
//! A [`Value`] reads and writes one value. A [`Field`] is what holds it: `Option` for a setting that is given once, `Vec` and
//! a map for those that may be repeated. The type of the field is all that a row of the table has to name.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    ops::Range,
    path::{Path, PathBuf},
};

use serde::de::DeserializeOwned;
use toml::{
    Spanned,
    de::{DeValue, ValueDeserializer},
};

/// A value of TOML and where it stands.
pub type Toml<'a> = Spanned<DeValue<'a>>;

/// What is wrong in a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Bytes of the text.
    pub at: Range<usize>,
    /// What was expected and found.
    pub reason: String,
}

/// What a key of the file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
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
pub trait Value: Clone {
    /// What a key holds that has one such value, or one that `join` can enlarge.
    const ONE: Shape = Shape::Word;
    /// What a key holds that has several.
    const SEVERAL: Shape = Shape::List;

    /// Reads it from a word.
    ///
    /// # Errors
    /// What was expected and found.
    fn from_word(text: &str) -> Result<Self, String>;

    /// Writes it, so that reading gives it back.
    ///
    /// # Errors
    /// Why TOML does not have it.
    fn to_toml(&self) -> Result<toml::Value, String>;

    /// Reads it from what may be no text.
    ///
    /// # Errors
    /// As [`Value::from_word`].
    fn from_os(text: &OsStr) -> Result<Self, String> {
        Self::from_word(utf8(text)?)
    }

    /// Reads it from a file's value: by default a text that holds the word.
    ///
    /// # Errors
    /// What was expected and found, and where.
    fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
        let at = value.span();
        Self::from_word(&deserialize::<String>(value)?).map_err(|reason| Fault { at, reason })
    }

    /// Takes what a second flag of the same name says.
    fn join(&mut self, later: Self) {
        *self = later;
    }

    /// Lets a relative path begin at `base`.
    fn rebase(&mut self, base: &Path) {
        let _ = base;
    }
}

fn utf8(text: &OsStr) -> Result<&str, String> {
    text.to_str().ok_or_else(|| format!("expected UTF-8, found {}", text.display()))
}

/// Reads a value by serde, with the place of what is wrong.
///
/// # Errors
/// What serde expected and found.
pub fn deserialize<T: DeserializeOwned>(value: Toml<'_>) -> Result<T, Fault> {
    let at = value.span();
    T::deserialize(ValueDeserializer::from(value))
        .map_err(|error| Fault { at: error.span().unwrap_or(at), reason: error.message().to_owned() })
}

/// What holds a setting.
pub trait Field {
    /// What its key holds.
    const SHAPE: Shape;

    /// Takes a word of the command line.
    ///
    /// # Errors
    /// What was expected and found.
    fn add(&mut self, text: &OsStr) -> Result<(), String>;

    /// Takes a value of the file.
    ///
    /// # Errors
    /// What was expected and found, and where.
    fn read(&mut self, value: Toml<'_>) -> Result<(), Fault>;

    /// What stands in a file, if anything is said.
    ///
    /// # Errors
    /// Why TOML does not have it.
    fn write(&self) -> Result<Option<toml::Value>, String>;

    /// Takes from `base` what is not said here; where several may be said, those of `base` come after.
    fn over(&mut self, base: &Self);

    /// Lets relative paths begin at `base`.
    fn rebase(&mut self, base: &Path);
}

impl<T: Value> Field for Option<T> {
    const SHAPE: Shape = T::ONE;

    fn add(&mut self, text: &OsStr) -> Result<(), String> {
        let value = T::from_os(text)?;
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
        if let Some(value) = self {
            value.rebase(base);
        }
    }
}

impl<T: Value> Field for Vec<T> {
    const SHAPE: Shape = T::SEVERAL;

    fn add(&mut self, text: &OsStr) -> Result<(), String> {
        self.push(T::from_os(text)?);
        Ok(())
    }

    fn read(&mut self, value: Toml<'_>) -> Result<(), Fault> {
        if !value.get_ref().is_array() {
            // Serde says what is there instead.
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
        for value in self {
            value.rebase(base);
        }
    }
}

impl<T: Value + DeserializeOwned> Field for BTreeMap<String, T> {
    const SHAPE: Shape = Shape::Table;

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
        for value in self.values_mut() {
            value.rebase(base);
        }
    }
}

impl Value for bool {
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

impl Value for String {
    fn from_word(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        Ok(self.as_str().into())
    }
}

impl Value for PathBuf {
    fn from_word(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }

    fn from_os(text: &OsStr) -> Result<Self, String> {
        if text.is_empty() { Err("expected a path, found nothing".to_owned()) } else { Ok(text.into()) }
    }

    fn to_toml(&self) -> Result<toml::Value, String> {
        self.to_str().map(Into::into).ok_or_else(|| format!("{} is not UTF-8", self.display()))
    }

    fn rebase(&mut self, base: &Path) {
        *self = rebased(self, base);
    }
}

/// A path that begins at `base` unless it is absolute.
pub(super) fn rebased(path: &Path, base: &Path) -> PathBuf {
    let joined = base.join(path);
    std::path::absolute(&joined).unwrap_or(joined)
}

/// Whole numbers that are no number of bytes.
macro_rules! number {
    ($($kind:ty),*) => {$(
        impl Value for $kind {
            fn from_word(text: &str) -> Result<Self, String> {
                text.parse().map_err(|_| format!("expected a whole number up to {}, found {text:?}", Self::MAX))
            }

            fn to_toml(&self) -> Result<toml::Value, String> {
                integer(u64::from(*self))
            }

            fn from_toml(value: Toml<'_>) -> Result<Self, Fault> {
                deserialize(value)
            }
        }
    )*};
}

number!(u32, u64);

/// A number of TOML, whose largest is half of ours.
pub(super) fn integer(number: u64) -> Result<toml::Value, String> {
    i64::try_from(number).map(Into::into).map_err(|_| format!("{number} is more than {}", i64::MAX))
}

/// An array of TOML.
pub(super) fn array<T: Value>(values: &[T]) -> Result<toml::Value, String> {
    values.iter().map(T::to_toml).collect::<Result<_, _>>().map(toml::Value::Array)
}

/// A closed list of words.
pub trait Choice: Copy + PartialEq + 'static {
    /// What they say, for messages.
    const WHAT: &'static str;
    /// Each with its meaning.
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

impl<T: Choice> Value for T {
    fn from_word(text: &str) -> Result<Self, String> {
        let row = Self::WORDS.iter().find(|(word, _)| *word == text);
        row.map(|(_, choice)| *choice).ok_or_else(|| {
            let words: Vec<&str> = Self::WORDS.iter().map(|(word, _)| *word).collect();
            format!("{}: expected {}, found {text:?}", Self::WHAT, one_of(&words))
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
