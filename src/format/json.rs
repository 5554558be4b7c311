//! JSON whose values are counted before they are made: see [`ParseRoom`].

use std::{fmt, marker::PhantomData};

use ckfs_host::parse_room::ParseRoom;
use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};
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

/// The members of an object in its order. A name that is there twice is refused.
pub(crate) struct Pairs<T>(pub(crate) Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visit<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Visit<T> {
            type Value = Pairs<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<T>, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry::<String, T>()? {
                    pairs.push(pair);
                }
                match repeated(pairs.iter().map(|(name, _)| name)).first() {
                    Some(name) => Err(A::Error::custom(format_args!("{name:?} is there twice"))),
                    None => Ok(Pairs(pairs)),
                }
            }
        }
        deserializer.deserialize_map(Visit(PhantomData))
    }
}

/// The names that come more than once, each as often as it repeats.
pub(crate) fn repeated<N: Copy + Ord>(names: impl IntoIterator<Item = N>) -> Vec<N> {
    let mut names: Vec<N> = names.into_iter().collect();
    names.sort_unstable();
    names.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect()
}
