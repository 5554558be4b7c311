//! A reader of the JSON files of Orbax checkpoints.
//!
//! ```text
//! 7/_CHECKPOINT_METADATA       which items a step has, when it was finished, what the saver wanted to say
//! 7/commit_success.txt         there when it is finished
//! 7/items/_METADATA            the leaves of the tree, and how arrays are stored
//! 7/items/_sharding            on which mesh each array was
//! 7/items/array_metadatas/process_0    shapes of chunks as written
//! 7/items/manifest.ocdbt       arrays, as one OCDBT database; or a directory for each array
//! ```
//!
//! The arrays of a leaf are under the keys on the way to it, joined by dots. Keys may have dots and slashes themselves, so
//! that only [`Tree`] says which leaf a name belongs to.
//!
//! Unknown members are passed over, as Orbax does: they come with each of its versions.

use std::collections::HashMap;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Map, Value};

/// Name of the file with the leaves.
pub const METADATA: &str = "_METADATA";

/// Name of the file about a step or an item.
pub const CHECKPOINT_METADATA: &str = "_CHECKPOINT_METADATA";

/// Name of the file that is written last. Where it is missing in an object store, the checkpoint is unfinished.
pub const COMMIT_SUCCESS: &str = "commit_success.txt";

/// Name of the file with meshes.
pub const SHARDING: &str = "_sharding";

/// Name of the directory with the shapes of chunks, a file `process_<n>` for each process.
pub const ARRAY_METADATAS: &str = "array_metadatas";

/// Name of the file with leaves that are text.
pub const STRINGS: &str = "_strings.json";

/// What a directory's name has that is not finished.
pub const UNFINISHED: &str = ".orbax-checkpoint-tmp";

/// Most keys on the way to a leaf.
const DEPTH_MAX: usize = 256;

/// Why a file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OrbaxError {
    /// Not the JSON that it must be.
    #[error("{file}: {message}")]
    Json {
        /// Which file.
        file: &'static str,
        /// What the parser says, with line and column.
        message: String,
    },
    /// A member has a value that it cannot have.
    #[error("{file}: {member}: expected {expected}, found {found}")]
    Value {
        /// Which file.
        file: &'static str,
        /// The member.
        member: String,
        /// What it may be.
        expected: &'static str,
        /// What it is.
        found: String,
    },
    /// Two leaves are stored under one name.
    #[error("_METADATA: leaves {first} and {second} are both stored as {name:?}")]
    Ambiguous {
        /// The name.
        name: String,
        /// The keys of one leaf.
        first: String,
        /// The keys of the other.
        second: String,
    },
}

fn json<'a, T: Deserialize<'a>>(bytes: &'a [u8], file: &'static str) -> Result<T, OrbaxError> {
    serde_json::from_slice(bytes).map_err(|error| OrbaxError::Json { file, message: error.to_string() })
}

/// A map in the order of the file, in which each key may be once only.
struct Ordered<T>(Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Items<T>(std::marker::PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
            type Value = Ordered<T>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut items = Vec::new();
                let mut names = std::collections::HashSet::new();
                while let Some((name, item)) = map.next_entry::<String, T>()? {
                    if !names.insert(name.clone()) {
                        return Err(serde::de::Error::custom(format!("{name:?} is there twice")));
                    }
                    items.push((name, item));
                }
                Ok(Ordered(items))
            }
        }
        deserializer.deserialize_map(Items(std::marker::PhantomData))
    }
}

/// One key on the way to a leaf.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TreeKey {
    /// A name in a dictionary.
    Name(String),
    /// A place in a list.
    Place(u64),
}

impl std::fmt::Display for TreeKey {
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
    /// Text, in [`STRINGS`].
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
    /// Shape of the box that each process wrote at once, if it is told.
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
    /// Whether the arrays are in an OCDBT database; `None` if it is not told.
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
    tree_metadata: Ordered<RawLeaf>,
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
    /// [`OrbaxError`], the first fault that is met.
    pub fn parse(bytes: &[u8]) -> Result<Self, OrbaxError> {
        let raw: RawTree = json(bytes, METADATA)?;
        let leaves: Vec<Leaf> = raw.tree_metadata.0.into_iter().map(leaf).collect::<Result<_, _>>()?;
        let mut stored: HashMap<String, &Leaf> = HashMap::with_capacity(leaves.len());
        for leaf in leaves.iter().filter(|leaf| leaf.kind != LeafKind::Empty) {
            let name = leaf.name();
            if let Some(first) = stored.insert(name.clone(), leaf) {
                return Err(OrbaxError::Ambiguous { name, first: first.shown(), second: leaf.shown() });
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

fn leaf((shown, raw): (String, RawLeaf)) -> Result<Leaf, OrbaxError> {
    let wrong = |expected, found: String| OrbaxError::Value { file: METADATA, member: shown.clone(), expected, found };
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
    Ok(Leaf { keys, kind, write_shape: raw.value_metadata.write_shape })
}

/// What a step or an item holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Items {
    /// Directories with these names.
    Named(Vec<String>),
    /// The directory itself is the item.
    Itself,
    /// It is not told.
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
    /// [`OrbaxError`], the first fault that is met.
    pub fn parse(bytes: &[u8]) -> Result<Self, OrbaxError> {
        let raw: RawCheckpoint = json(bytes, CHECKPOINT_METADATA)?;
        let items = match raw.item_handlers {
            None | Some(Value::Null) => Items::Unknown,
            Some(Value::String(_)) => Items::Itself,
            Some(Value::Object(handlers)) => {
                let names: Vec<String> = handlers.keys().cloned().collect();
                let is_name =
                    |name: &String| !name.contains(['/', '\\', '\0']) && !matches!(name.as_str(), "" | "." | "..");
                if let Some(found) = names.iter().find(|name| !is_name(name)) {
                    let (member, expected) = ("item_handlers".to_owned(), "names of directories");
                    let found = format!("{found:?}");
                    return Err(OrbaxError::Value { file: CHECKPOINT_METADATA, member, expected, found });
                }
                Items::Named(names)
            }
            Some(found) => {
                let (member, expected) = ("item_handlers".to_owned(), "a handler, or handlers by item");
                let found = found.to_string();
                return Err(OrbaxError::Value { file: CHECKPOINT_METADATA, member, expected, found });
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

/// How an array lay on devices when it was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SavedSharding {
    /// On a mesh.
    Mesh {
        /// The axes of the mesh with their sizes, in order.
        axes: Vec<(String, u64)>,
        /// For each axis of the array, the mesh axes that split it. May have fewer than the array has axes.
        spec: Vec<Vec<String>>,
    },
    /// On one device.
    Single,
    /// In another way, by Orbax's name.
    Other(String),
}

#[derive(Deserialize)]
struct RawSharding {
    sharding_type: String,
    #[serde(default)]
    shape: Vec<u64>,
    #[serde(default)]
    axis_names: Vec<String>,
    #[serde(default)]
    partition_spec: Vec<RawSplit>,
    #[serde(default, rename = "device_mesh")]
    _device_mesh: IgnoredAny,
}

/// The mesh axes of one axis: none, one, or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum RawSplit {
    None(()),
    One(String),
    Several(Vec<String>),
}

/// Reads a [`SHARDING`]: how each array lay on devices, by the name under which it is stored, in the order of the file.
///
/// # Errors
/// [`OrbaxError`], the first fault that is met.
pub fn parse_sharding(bytes: &[u8]) -> Result<Vec<(String, SavedSharding)>, OrbaxError> {
    let raw: Ordered<String> = json(bytes, SHARDING)?;
    let sharding = |(encoded, text): (String, String)| {
        let wrong = |expected, found: String| {
            let member = encoded.clone();
            OrbaxError::Value { file: SHARDING, member, expected, found }
        };
        let name = base64(&encoded).and_then(|bytes| String::from_utf8(bytes).ok());
        let name = name.ok_or_else(|| wrong("a name in base64", format!("{encoded:?}")))?;
        let raw: RawSharding = json(text.as_bytes(), SHARDING)?;
        let sharding = match raw.sharding_type.as_str() {
            "NamedSharding" => {
                if raw.axis_names.len() != raw.shape.len() {
                    let found = format!("{} and {}", raw.axis_names.len(), raw.shape.len());
                    return Err(wrong("as many axis_names as extents of the mesh", found));
                }
                let split = |split: RawSplit| match split {
                    RawSplit::None(()) => Vec::new(),
                    RawSplit::One(axis) => vec![axis],
                    RawSplit::Several(axes) => axes,
                };
                let spec: Vec<Vec<String>> = raw.partition_spec.into_iter().map(split).collect();
                if let Some(found) = spec.iter().flatten().find(|axis| !raw.axis_names.contains(axis)) {
                    return Err(wrong("axes of the mesh in partition_spec", format!("{found:?}")));
                }
                SavedSharding::Mesh { axes: raw.axis_names.into_iter().zip(raw.shape).collect(), spec }
            }
            "SingleDeviceSharding" => SavedSharding::Single,
            _ => SavedSharding::Other(raw.sharding_type),
        };
        Ok((name, sharding))
    };
    raw.0.into_iter().map(sharding).collect()
}

/// Bytes that base64 with padding stands for.
fn base64(text: &str) -> Option<Vec<u8>> {
    let (groups, rest) = text.as_bytes().as_chunks::<4>();
    if !rest.is_empty() {
        return None;
    }
    let mut bytes = Vec::with_capacity(groups.len() * 3);
    for (at, group) in groups.iter().enumerate() {
        let padding = group.iter().rev().take_while(|digit| **digit == b'=').count();
        if padding > 2 || (padding > 0 && at + 1 < groups.len()) {
            return None;
        }
        let number = group[..4 - padding].iter().try_fold(0_u32, |number, digit| {
            let value = match digit {
                b'A'..=b'Z' => digit - b'A',
                b'a'..=b'z' => digit - b'a' + 26,
                b'0'..=b'9' => digit - b'0' + 52,
                b'+' | b'-' => 62,
                b'/' | b'_' => 63,
                _ => return None,
            };
            Some(number << 6 | u32::from(value))
        })?;
        let [third, second, first, _] = (number << (6 * padding)).to_le_bytes();
        bytes.extend(&[first, second, third][..3 - padding]);
    }
    Some(bytes)
}

/// The shapes in which an array was written.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ArrayMetadata {
    /// The name under which the array is stored.
    #[serde(rename = "param_name")]
    pub name: String,
    /// Shape of the box that the process wrote at once.
    pub write_shape: Vec<u64>,
    /// Shape of the chunks in that box.
    pub chunk_shape: Vec<u64>,
    /// What makes it more than an array, such as a random key.
    #[serde(rename = "ext_metadata")]
    pub extension: Option<Map<String, Value>>,
}

/// Reads a file of [`ARRAY_METADATAS`].
///
/// # Errors
/// [`OrbaxError::Json`].
pub fn parse_array_metadatas(bytes: &[u8]) -> Result<Vec<ArrayMetadata>, OrbaxError> {
    #[derive(Deserialize)]
    struct Entry {
        array_metadata: ArrayMetadata,
    }
    #[derive(Deserialize)]
    struct File {
        array_metadatas: Vec<Entry>,
    }
    let file: File = json(bytes, ARRAY_METADATAS)?;
    Ok(file.array_metadatas.into_iter().map(|entry| entry.array_metadata).collect())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::format::hexadecimal::bytes_of;

    type Files = BTreeMap<String, Vec<u8>>;

    fn checkpoints() -> (BTreeMap<String, Files>, Files) {
        #[derive(Deserialize)]
        struct Fixture {
            checkpoints: BTreeMap<String, BTreeMap<String, String>>,
            content: BTreeMap<String, String>,
        }
        let text = include_str!("../../tests/fixtures/formats/orbax.json");
        let fixture: Fixture = serde_json::from_str(text).unwrap();
        let decoded =
            |map: BTreeMap<String, String>| map.into_iter().map(|(name, hex)| (name, bytes_of(&hex))).collect();
        let checkpoints = fixture.checkpoints.into_iter().map(|(name, files)| (name, decoded(files))).collect();
        (checkpoints, decoded(fixture.content))
    }

    #[test]
    fn checkpoints_of_orbax_are_described() {
        for (name, files) in checkpoints().0 {
            let step = CheckpointMetadata::parse(&files[&format!("3/{CHECKPOINT_METADATA}")]).unwrap();
            assert_eq!(
                (step.items.clone(), step.scan_layers()),
                (Items::Named(vec!["default".to_owned()]), Some(true))
            );
            assert!(step.commit_nanoseconds.is_some() && files.contains_key(&format!("3/{COMMIT_SUCCESS}")));
            let tree = Tree::parse(&files[&format!("3/default/{METADATA}")]).unwrap();
            assert_eq!(tree.uses_ocdbt, Some(name != "files"), "{name}");
            assert_eq!((tree.uses_zarr3, tree.stores_fill_values), (name == "ocdbt zarr3", true), "{name}");
            let rows: Vec<_> = tree.leaves.iter().map(|leaf| (leaf.name(), leaf.kind.clone())).collect();
            let expected = [
                ("empty", LeafKind::Empty),
                ("label", LeafKind::Text),
                ("none", LeafKind::Empty),
                ("params.list.0", LeafKind::Array),
                ("params.list.1", LeafKind::Array),
                ("params.norm.scale", LeafKind::Array),
                ("params.wq", LeafKind::Array),
                ("step", LeafKind::Array),
            ];
            assert_eq!(rows, expected.map(|(name, kind)| (name.to_owned(), kind)));
            let norm = [TreeKey::Name("params".to_owned()), TreeKey::Name("norm.scale".to_owned())];
            assert_eq!(tree.leaves[5].keys, norm);
            assert_eq!(tree.leaves[3].keys[2], TreeKey::Place(0));
            assert_eq!(tree.leaves[6].write_shape, Some(vec![2, 4]));
            let shardings = parse_sharding(&files[&format!("3/default/{SHARDING}")]).unwrap();
            let (_, wq) = shardings.iter().find(|(name, _)| name == "params.wq").unwrap();
            let axes = [("fsdp", 2), ("tensor", 2)].map(|(name, size)| (name.to_owned(), size)).to_vec();
            let spec = vec![vec!["fsdp".to_owned()], vec!["tensor".to_owned()]];
            assert_eq!(wq, &SavedSharding::Mesh { axes, spec });
            assert!(shardings.contains(&("params.norm.scale".to_owned(), SavedSharding::Single)));
            let arrays = parse_array_metadatas(&files[&format!("3/default/{ARRAY_METADATAS}/process_0")]).unwrap();
            assert_eq!(arrays.iter().find(|array| array.name == "params.wq").unwrap().chunk_shape, [2, 4]);
        }
    }

    /// From the files of a checkpoint to the bytes of its arrays, by all readers together.
    #[test]
    fn arrays_of_orbax_are_read_bit_for_bit() {
        use crate::{
            format::{ocdbt, zarr_read},
            tensor::to_usize,
        };
        let (checkpoints, content) = checkpoints();
        for (kind, files) in checkpoints {
            let root = "3/default/";
            let files: Files = files
                .into_iter()
                .filter_map(|(name, file)| Some((name.strip_prefix(root)?.to_owned(), file)))
                .collect();
            let tree = Tree::parse(&files[METADATA]).unwrap();
            let mut entries: Files = files.clone();
            if tree.uses_ocdbt == Some(true) {
                let at = |location: &ocdbt::Location| {
                    files[&*location.path][to_usize(location.offset)..to_usize(location.end())].to_vec()
                };
                let manifest = ocdbt::Manifest::parse(&files[ocdbt::MANIFEST]).unwrap();
                let mut walk = ocdbt::Walk::new(manifest.latest().unwrap(), vec![ocdbt::KeyRange::all()]);
                loop {
                    let nodes = walk.take_wanted();
                    if nodes.is_empty() {
                        break;
                    }
                    for node in nodes {
                        let mut keep = |entry: ocdbt::Entry<'_>| {
                            let value = match entry.value {
                                ocdbt::Value::Inline(bytes) => bytes.to_vec(),
                                ocdbt::Value::At(location) => at(location),
                            };
                            entries.insert(String::from_utf8(entry.key.to_vec()).unwrap(), value);
                        };
                        walk.read(&node, &at(&node.location), &mut keep).unwrap();
                    }
                }
            }
            for (name, expected) in &content {
                let array = if tree.uses_zarr3 {
                    zarr_read::Array::parse_v3(&entries[&format!("{name}/{}", zarr_read::ZARR_JSON)])
                } else {
                    zarr_read::Array::parse_v2(&entries[&format!("{name}/{}", zarr_read::ZARRAY)])
                };
                let array = array.unwrap();
                let mut whole = vec![0; expected.len()];
                let element = array.fill.len();
                let grid = array.grid();
                let columns = array.shape.extents().get(1).copied().unwrap_or(1);
                for row in 0..grid[0] {
                    for column in 0..grid.get(1).copied().unwrap_or(1) {
                        let numbers = &[row, column][..grid.len()];
                        let stored = &entries[&format!("{name}/{}", array.key(numbers))];
                        let mut chunk = vec![0; to_usize(array.chunk_bytes())];
                        array.decode(stored, &mut chunk).unwrap();
                        let (rows, width) = (array.chunk[0], array.chunk.get(1).copied().unwrap_or(1));
                        for line in 0..rows {
                            let at = to_usize((row * rows + line) * columns + column * width) * element;
                            let len = to_usize(width) * element;
                            whole[at..at + len].copy_from_slice(&chunk[to_usize(line) * len..][..len]);
                        }
                    }
                }
                assert_eq!(&whole, expected, "{kind} {name}");
            }
        }
    }

    fn tree(leaves: &Value) -> Result<Tree, OrbaxError> {
        Tree::parse(json!({"tree_metadata": leaves}).to_string().as_bytes())
    }

    fn raw_leaf(keys: &[&str], kind: &str) -> Value {
        let keys: Vec<_> = keys.iter().map(|key| json!({"key": key, "key_type": 2})).collect();
        json!({"key_metadata": keys, "value_metadata": {"value_type": kind, "skip_deserialize": false}})
    }

    #[test]
    fn trees_are_refused_by_what_is_wrong() {
        let plain = tree(&json!({"a": raw_leaf(&["a"], "new.Type")})).unwrap();
        assert_eq!((plain.uses_ocdbt, plain.uses_zarr3, plain.stores_fill_values), (None, false, false));
        assert_eq!(plain.leaves[0].kind, LeafKind::Other("new.Type".to_owned()));
        let error = |leaves: &Value| tree(leaves).unwrap_err().to_string();
        let twice = json!({"x": raw_leaf(&["a.b", "c"], "scalar"), "y": raw_leaf(&["a", "b.c"], "scalar")});
        let expected = "_METADATA: leaves [\"a.b\", \"c\"] and [\"a\", \"b.c\"] are both stored as \"a.b.c\"";
        assert_eq!(error(&twice), expected);
        // An empty place beside what was saved there later is stored once.
        assert!(tree(&json!({"x": raw_leaf(&["a"], "Dict"), "y": raw_leaf(&["a"], "scalar")})).is_ok());
        assert!(error(&json!({"x": raw_leaf(&[], "scalar")})).contains("1 to 256 keys"));
        let mut other = raw_leaf(&["a"], "scalar");
        other["key_metadata"][0]["key_type"] = json!(3);
        assert!(error(&json!({"x": other})).contains("key_type 1 (list) or 2 (dictionary), found 3"));
        other["key_metadata"][0]["key_type"] = json!(1);
        assert!(error(&json!({"x": other})).contains("a number as the key of a list"));
        let text = r#"{"tree_metadata": {"a": {}, "a": {}}}"#;
        assert!(matches!(Tree::parse(text.as_bytes()), Err(OrbaxError::Json { .. })));
        let leaf = raw_leaf(&["a"], "scalar").to_string();
        let text = format!("{{\"tree_metadata\": {{\"a\": {leaf}, \"a\": {leaf}}}}}");
        assert!(Tree::parse(text.as_bytes()).unwrap_err().to_string().contains("\"a\" is there twice"));
    }

    #[test]
    fn items_are_named_or_the_directory_itself() {
        let items = |handlers: Value| {
            CheckpointMetadata::parse(json!({"item_handlers": handlers}).to_string().as_bytes())
                .map(|found| found.items)
        };
        assert_eq!(items(json!("Handler")), Ok(Items::Itself));
        assert_eq!(items(json!(null)), Ok(Items::Unknown));
        assert_eq!(items(json!({"a": "H", "b": "H"})), Ok(Items::Named(vec!["a".to_owned(), "b".to_owned()])));
        for handlers in [json!({"..": "H"}), json!({"a/b": "H"}), json!({"": "H"}), json!(3)] {
            assert!(items(handlers.clone()).is_err(), "{handlers}");
        }
        let unfinished = CheckpointMetadata::parse(b"{\"commit_timestamp_nsecs\": null}").unwrap();
        assert_eq!((unfinished.commit_nanoseconds, unfinished.scan_layers()), (None, None));
    }

    #[test]
    fn base64_has_one_length_and_one_alphabet() {
        let rows: [(&str, &[u8]); 5] =
            [("", b""), ("YQ==", b"a"), ("YWI=", b"ab"), ("YWJj", b"abc"), ("-_8=", &[0xfb, 0xff])];
        for (text, bytes) in rows {
            assert_eq!(base64(text).as_deref(), Some(bytes), "{text}");
        }
        for text in ["Y", "YQ", "YQ=", "Y===", "====", "YQ==YQ==", "Y!==", "YQ=a"] {
            assert_eq!(base64(text), None, "{text}");
        }
    }

    #[test]
    fn specs_name_axes_of_their_mesh() {
        let parse = |sharding: Value| {
            let file = json!({"YQ==": sharding.to_string()}).to_string();
            parse_sharding(file.as_bytes()).map(|mut all| all.remove(0).1)
        };
        let mesh = |spec: Value| json!({"sharding_type": "NamedSharding", "shape": [2, 4], "axis_names": ["x", "y"], "partition_spec": spec});
        let spec = |spec: Value| {
            let SavedSharding::Mesh { spec, .. } = parse(mesh(spec)).unwrap() else { panic!("a mesh") };
            spec
        };
        assert_eq!(spec(json!([null, ["x", "y"]])), [vec![], vec!["x".to_owned(), "y".to_owned()]]);
        assert_eq!(spec(json!([])), Vec::<Vec<String>>::new());
        assert!(parse(mesh(json!(["z"]))).unwrap_err().to_string().contains("axes of the mesh"));
        assert_eq!(parse(json!({"sharding_type": "New"})), Ok(SavedSharding::Other("New".to_owned())));
    }

    #[test]
    fn damaged_files_never_panic() {
        let (checkpoints, _) = checkpoints();
        for (name, whole) in &checkpoints["ocdbt zarr3"] {
            for at in (0..whole.len()).step_by(3) {
                let mut bytes = whole.clone();
                bytes[at] = b'9';
                for bytes in [&bytes, &whole[..at]] {
                    drop((
                        Tree::parse(bytes),
                        CheckpointMetadata::parse(bytes),
                        parse_sharding(bytes),
                        parse_array_metadatas(bytes),
                    ));
                }
            }
            assert!(!name.is_empty());
        }
    }
}
