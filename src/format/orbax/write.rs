//! The metadata files of Orbax checkpoints.
//!
//! `_METADATA` lists the leaves of the tree and how they are stored; `_CHECKPOINT_METADATA` says which handler wrote a
//! directory and holds the saver's own notes. Arrays are said to be numpy's, since such leaves can be restored
//! both with and without a target: as sharded arrays where the target says so, as numpy arrays otherwise.

use serde_json::{Value, json};

use super::read::TreeKey;

/// The handler of trees of arrays.
const HANDLER: &str = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler";

/// A string as Python shows it.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut shown = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => shown.push_str("\\\\"),
            _ if c == quote => shown.extend(['\\', c]),
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            _ => shown.push(c),
        }
    }
    shown.push(quote);
    shown
}

/// What stands before the leaves in `_METADATA`; a comma stands between two leaves.
pub const TREE_BEGIN: &str = "{\"tree_metadata\":{";

/// What stands after the leaves in `_METADATA`.
pub const TREE_END: &str = "},\"use_ocdbt\":false,\"use_zarr3\":false,\"store_array_data_equal_to_fill_value\":true,\
                            \"custom_metadata\":null}";

/// An array of numpy, as Orbax calls it.
pub const ARRAY: &str = "np.ndarray";

/// An array of jax, as Orbax calls it: restored without a target as `_sharding` says.
pub const JAX_ARRAY: &str = "jax.Array";

/// A text, which is in a file of its own, as Orbax calls it.
pub const TEXT: &str = "string";

/// What a process says of its arrays.
pub fn array_metadatas<'a>(arrays: impl Iterator<Item = &'a Value>) -> String {
    json!({"array_metadatas": arrays.map(|array| json!({"array_metadata": array})).collect::<Vec<_>>()}).to_string()
}

/// A single number of Python, as Orbax calls it.
pub const SCALAR: &str = "scalar";

/// A leaf of `_METADATA` with these keys. It is an [`ARRAY`], a [`JAX_ARRAY`] or a [`SCALAR`], all stored as arrays of zarr version 2,
/// or a [`TEXT`], or an empty container or nothing, which is not stored.
pub fn tree_leaf(keys: &[TreeKey], value_type: &str) -> String {
    let shown: Vec<String> = keys.iter().map(|key| quoted(&key.to_string())).collect();
    let comma = if shown.len() == 1 { "," } else { "" };
    let path = json!(format!("({}{comma})", shown.join(", ")));
    let keys: Value = keys.iter().map(key_metadata).collect();
    let is_stored = matches!(value_type, ARRAY | JAX_ARRAY | SCALAR | TEXT);
    let leaf =
        json!({"key_metadata": keys, "value_metadata": {"value_type": value_type, "skip_deserialize": !is_stored}});
    format!("{path}:{leaf}")
}

/// A key: 1 stands for a place in a list, 2 for the key of a dictionary.
fn key_metadata(key: &TreeKey) -> Value {
    let key_type = match key {
        TreeKey::Place(_) => 1,
        TreeKey::Name(_) => 2,
    };
    json!({"key": key.to_string(), "key_type": key_type})
}

/// Where a `_CHECKPOINT_METADATA` lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetadataPlace {
    /// In the directory of a step, which has one item.
    Step {
        /// Name of the item.
        item: &'static str,
    },
    /// In the directory of the item itself.
    Item,
}

/// A `_CHECKPOINT_METADATA` of a checkpoint made at `nanoseconds` since the epoch. `scan_layers` says whether layers are
/// stacked, as MaxText records it and asks for it.
pub fn checkpoint_metadata(place: MetadataPlace, scan_layers: bool, nanoseconds: u64) -> String {
    let handlers = match place {
        MetadataPlace::Step { item } => json!({item: HANDLER}),
        MetadataPlace::Item => json!(HANDLER),
    };
    json!({
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": nanoseconds,
        "commit_timestamp_nsecs": nanoseconds,
        "custom_metadata": {"scan_layers": scan_layers},
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_shown_as_python_shows_them() {
        for (text, shown) in [("a", "'a'"), ("it's", "\"it's\""), ("'\"", "'\\'\"'"), ("a\\b", "'a\\\\b'")] {
            assert_eq!(quoted(text), shown);
        }
    }

    #[test]
    fn metadata_is_json_with_the_keys() {
        let name = |key: &str| TreeKey::Name(key.to_owned());
        let leaves = [vec![name("a"), name("b")], vec![name("c")], vec![name("d.e"), TreeKey::Place(3)]];
        let leaves = leaves.map(|keys| tree_leaf(&keys, ARRAY)).join(",");
        let empty = tree_leaf(&[name("e")], "None");
        let text = [TREE_BEGIN, &leaves, ",", &empty, TREE_END].concat();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let tree = value["tree_metadata"].as_object().unwrap();
        assert_eq!(tree.keys().collect::<Vec<_>>(), ["('a', 'b')", "('c',)", "('d.e', '3')", "('e',)"]);
        assert_eq!(tree["('c',)"]["value_metadata"], json!({"value_type": "np.ndarray", "skip_deserialize": false}));
        assert_eq!(tree["('e',)"]["value_metadata"], json!({"value_type": "None", "skip_deserialize": true}));
        assert_eq!(tree["('d.e', '3')"]["key_metadata"][1], json!({"key": "3", "key_type": 1}));
        assert_eq!(tree["('a', 'b')"]["key_metadata"][1], json!({"key": "b", "key_type": 2}));
        assert_eq!(value["use_zarr3"], false);
        let step: serde_json::Value =
            serde_json::from_str(&checkpoint_metadata(MetadataPlace::Step { item: "items" }, true, 5)).unwrap();
        assert_eq!(step["item_handlers"]["items"], HANDLER);
        assert_eq!(step["custom_metadata"]["scan_layers"], true);
    }
}
