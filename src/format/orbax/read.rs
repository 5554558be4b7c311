//! A reader of the JSON files of Orbax checkpoints.
//!
//! ```text
//! 7/_CHECKPOINT_METADATA       which items a step has, when it was finished, what the saver wanted to say
//! 7/commit_success.txt         there when it is finished
//! 7/items/_METADATA            the leaves of the tree, and how arrays are stored
//! 7/items/_sharding            on which mesh each array was; passes as it is with the whole state
//! 7/items/_strings.json        the texts among the leaves; likewise
//! 7/items/array_metadatas/process_0    shapes of chunks as written, and which arrays are keys of random numbers
//! 7/items/manifest.ocdbt       arrays, as one OCDBT database; or a directory for each array
//! ```
//!
//! The arrays of a leaf are under the keys on the way to it, joined by dots. Keys may have dots and slashes themselves, so
//! that only [`Tree`] says which leaf a name belongs to.
//!
//! Unknown members are passed over, as Orbax does: they come with each of its versions.

use std::{collections::HashMap, fmt::Display};

use ckfs_host::RelativePath;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::super::json::{self, JsonForm, Pairs};
use crate::FormatError;

/// Name of the file with the leaves.
pub const METADATA: &str = "_METADATA";

/// Name of the file about a step or an item.
pub const CHECKPOINT_METADATA: &str = "_CHECKPOINT_METADATA";

/// Name of the file that is written last. Where it is missing in an object store, the checkpoint is unfinished.
pub const COMMIT_SUCCESS: &str = "commit_success.txt";

/// Name of the file that says how arrays of jax were sharded.
pub const SHARDING: &str = "_sharding";

/// Name of the file with the texts among the leaves.
pub const STRINGS: &str = "_strings.json";

/// Directory of what each process says of its arrays, and the file of the first.
pub const ARRAY_METADATAS: &str = "array_metadatas";
/// See [`ARRAY_METADATAS`].
pub const PROCESS_METADATA: &str = "array_metadatas/process_0";

/// What a directory's name has that is not finished.
pub const UNFINISHED: &str = ".orbax-checkpoint-tmp";

/// Most keys on the way to a leaf.
const DEPTH_MAX: usize = 256;

/// That a member has a value that it cannot have.
fn wrong(file: &str, member: &str, expected: &str, found: impl Display) -> FormatError {
    FormatError(format!("{file}: {member}: expected {expected}, found {found}"))
}

fn parse<'a, T: Deserialize<'a>>(bytes: &'a [u8], file: &'static str) -> Result<T, FormatError> {
    json::parse(bytes, JsonForm::Rows).map_err(|error| FormatError(format!("{file}: {error}")))
}

/// One key on the way to a leaf.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TreeKey {
    /// A name in a dictionary.
    Name(String),
    /// A place in a list.
    Place(u64),
}

impl Display for TreeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Place(place) => write!(f, "{place}"),
        }
    }
}

/// What a leaf is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeafKind {
    /// A zarr array: of jax, of numpy, or a number.
    Array,
    /// Text, in a file `_strings.json`.
    Text,
    /// An empty container or nothing: not stored.
    Empty,
    /// Something else, by Orbax's name.
    Other(String),
}

/// A leaf of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// The keys on the way to it.
    pub keys: Vec<TreeKey>,
    /// What it is.
    pub kind: LeafKind,
    /// The same as Orbax calls it.
    pub value_type: String,
    /// Shape of the box that each process wrote at once, if the file states it.
    pub write_shape: Option<Vec<u64>>,
}

impl Leaf {
    /// The name under which it is stored: its keys joined by dots.
    pub fn name(&self) -> String {
        self.keys.iter().map(TreeKey::to_string).collect::<Vec<_>>().join(".")
    }

    fn shown(&self) -> String {
        format!("{:?}", self.keys.iter().map(TreeKey::to_string).collect::<Vec<_>>())
    }
}

/// What [`METADATA`] says.
#[derive(Clone, Debug, PartialEq)]
pub struct Tree {
    /// The leaves, in the order of the file. No two have one name.
    pub leaves: Vec<Leaf>,
    /// Whether the arrays are in an OCDBT database; `None` if the file does not state it.
    pub uses_ocdbt: Option<bool>,
    /// Whether the arrays are of zarr version 3, else 2.
    pub uses_zarr3: bool,
    /// Whether chunks are stored that hold the fill value alone. A chunk that is missing is then damage.
    pub stores_fill_values: bool,
    /// What the saver wanted to say.
    pub custom: Option<Value>,
}

#[derive(Deserialize)]
struct RawTree {
    tree_metadata: Pairs<RawLeaf>,
    use_ocdbt: Option<bool>,
    #[serde(default)]
    use_zarr3: bool,
    #[serde(default)]
    store_array_data_equal_to_fill_value: bool,
    custom_metadata: Option<Value>,
}

#[derive(Deserialize)]
struct RawLeaf {
    key_metadata: Vec<RawKey>,
    value_metadata: RawValue,
}

#[derive(Deserialize)]
struct RawKey {
    key: String,
    key_type: u64,
}

#[derive(Deserialize)]
struct RawValue {
    value_type: String,
    write_shape: Option<Vec<u64>>,
}

impl Tree {
    /// Reads a [`METADATA`].
    ///
    /// # Errors
    /// [`FormatError`], the first fault that is met.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let raw: RawTree = parse(bytes, METADATA)?;
        let leaves: Vec<Leaf> = raw.tree_metadata.0.into_iter().map(leaf).collect::<Result<_, _>>()?;
        let mut stored: HashMap<String, &Leaf> = HashMap::with_capacity(leaves.len());
        for leaf in leaves.iter().filter(|leaf| leaf.kind != LeafKind::Empty) {
            let name = leaf.name();
            if let Some(first) = stored.insert(name.clone(), leaf) {
                let (first, second) = (first.shown(), leaf.shown());
                return Err(FormatError(format!(
                    "{METADATA}: leaves {first} and {second} are both stored as {name:?}"
                )));
            }
        }
        Ok(Self {
            uses_ocdbt: raw.use_ocdbt,
            uses_zarr3: raw.use_zarr3,
            stores_fill_values: raw.store_array_data_equal_to_fill_value,
            custom: raw.custom_metadata,
            leaves,
        })
    }
}

fn leaf((shown, raw): (String, RawLeaf)) -> Result<Leaf, FormatError> {
    let wrong = |expected, found: String| wrong(METADATA, &shown, expected, found);
    if raw.key_metadata.is_empty() || raw.key_metadata.len() > DEPTH_MAX {
        return Err(wrong("1 to 256 keys", raw.key_metadata.len().to_string()));
    }
    let key = |RawKey { key, key_type }| match key_type {
        1 => key.parse().map(TreeKey::Place).map_err(|_| wrong("a number as the key of a list", format!("{key:?}"))),
        2 => Ok(TreeKey::Name(key)),
        _ => Err(wrong("key_type 1 (list) or 2 (dictionary)", key_type.to_string())),
    };
    let keys = raw.key_metadata.into_iter().map(key).collect::<Result<_, _>>()?;
    let kind = match raw.value_metadata.value_type.as_str() {
        "jax.Array" | "np.ndarray" | "scalar" => LeafKind::Array,
        "string" => LeafKind::Text,
        "None" | "Dict" | "List" | "Tuple" | "NamedTuple" => LeafKind::Empty,
        other => LeafKind::Other(other.to_owned()),
    };
    let RawValue { value_type, write_shape } = raw.value_metadata;
    Ok(Leaf { keys, kind, value_type, write_shape })
}

#[derive(Deserialize)]
struct RawArrays {
    array_metadatas: Vec<RawArray>,
}

#[derive(Deserialize)]
struct RawArray {
    array_metadata: Map<String, Value>,
}

/// What a file of [`ARRAY_METADATAS`] says of the arrays that are more than numbers, above all typed keys of random numbers: by name,
/// as it stands there.
///
/// # Errors
/// [`FormatError`], the first fault that is met.
pub fn random_keys(bytes: &[u8]) -> Result<Vec<(String, Value)>, FormatError> {
    let raw: RawArrays = parse(bytes, ARRAY_METADATAS)?;
    let described = raw.array_metadatas.into_iter().map(|array| array.array_metadata);
    let is_more = |array: &Map<String, Value>| array.get("ext_metadata").is_some_and(|more| !more.is_null());
    let named = |array: Map<String, Value>| match array.get("param_name").and_then(Value::as_str).map(str::to_owned) {
        Some(name) => Ok((name, Value::Object(array))),
        None => Err(wrong(ARRAY_METADATAS, "param_name", "a string", "none")),
    };
    described.filter(is_more).map(named).collect()
}

/// What a step or an item holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Items {
    /// Directories with these names.
    Named(Vec<String>),
    /// The directory itself is the item.
    Itself,
    /// The file does not state it.
    Unknown,
}

/// What [`CHECKPOINT_METADATA`] says.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckpointMetadata {
    /// Where the arrays are.
    pub items: Items,
    /// When the checkpoint was finished, in nanoseconds since 1970; `None` if it is not.
    pub commit_nanoseconds: Option<u64>,
    /// What the saver wanted to say.
    pub custom: Map<String, Value>,
}

#[derive(Deserialize)]
struct RawCheckpoint {
    item_handlers: Option<Value>,
    commit_timestamp_nsecs: Option<u64>,
    custom_metadata: Option<Map<String, Value>>,
}

impl CheckpointMetadata {
    /// Reads a [`CHECKPOINT_METADATA`].
    ///
    /// # Errors
    /// [`FormatError`], the first fault that is met.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        let raw: RawCheckpoint = parse(bytes, CHECKPOINT_METADATA)?;
        let items = match raw.item_handlers {
            None | Some(Value::Null) => Items::Unknown,
            Some(Value::String(_)) => Items::Itself,
            Some(Value::Object(handlers)) => {
                let names: Vec<String> = handlers.keys().cloned().collect();
                if let Some(found) = names.iter().find(|name| RelativePath::parse_name(name).is_err()) {
                    let found = format_args!("{found:?}");
                    return Err(wrong(CHECKPOINT_METADATA, "item_handlers", "names of directories", found));
                }
                Items::Named(names)
            }
            Some(found) => {
                return Err(wrong(CHECKPOINT_METADATA, "item_handlers", "a handler, or handlers by item", found));
            }
        };
        let custom = raw.custom_metadata.unwrap_or_default();
        Ok(Self { items, commit_nanoseconds: raw.commit_timestamp_nsecs, custom })
    }

    /// Whether layers are stacked, as MaxText tells it.
    pub fn scan_layers(&self) -> Option<bool> {
        self.custom.get("scan_layers").and_then(Value::as_bool)
    }
}

#[cfg(test)]
mod tests;
