//! JSON whose values are counted before they are made: see [`ParseRoom`].

use ckfs_host::parse_room::ParseRoom;
use serde::{Deserialize, de::Error as _};
use serde_json::{Error, Value};

pub use ckfs_host::parse_room::JsonForm;

/// What a text says.
///
/// # Errors
/// The first violation of JSON's syntax or of the type; too many values.
pub fn parse<'a, T: Deserialize<'a>>(text: &'a [u8], form: JsonForm) -> Result<T, Error> {
    let _held = ParseRoom::of_process().hold_json(text, form).map_err(Error::custom)?;
    serde_json::from_slice(text)
}

/// All values of a text, which are soon dropped.
///
/// # Errors
/// The first violation of JSON's syntax; too many values.
pub fn tree(text: &[u8]) -> Result<Value, Error> {
    parse(text, JsonForm::Tree)
}
