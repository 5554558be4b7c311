//! Checkpoints that Orbax wrote, and damaged files.

use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::{hexadecimal::bytes_of, orbax::write::array_metadatas};

type Files = BTreeMap<String, Vec<u8>>;

fn checkpoints() -> (BTreeMap<String, Files>, Files) {
    #[derive(Deserialize)]
    struct Fixture {
        checkpoints: BTreeMap<String, BTreeMap<String, String>>,
        content: BTreeMap<String, String>,
    }
    let text = include_str!("../../../../tests/fixtures/formats/orbax.json");
    let fixture: Fixture = serde_json::from_str(text).unwrap();
    let decoded = |map: BTreeMap<String, String>| map.into_iter().map(|(name, hex)| (name, bytes_of(&hex))).collect();
    let checkpoints = fixture.checkpoints.into_iter().map(|(name, files)| (name, decoded(files))).collect();
    (checkpoints, decoded(fixture.content))
}

#[test]
fn checkpoints_of_orbax_are_described() {
    for (name, files) in checkpoints().0 {
        let step = CheckpointMetadata::parse(&files[&format!("3/{CHECKPOINT_METADATA}")]).unwrap();
        assert_eq!((step.items.clone(), step.scan_layers()), (Items::Named(vec!["default".to_owned()]), Some(true)));
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
    }
}

/// From the files of a checkpoint to the bytes of its arrays, by all readers together.
#[test]
fn arrays_of_orbax_are_read_bit_for_bit() {
    use crate::{ocdbt, zarr::read as zarr_read};
    use ckfs_tensor::to_usize;
    let (checkpoints, content) = checkpoints();
    for (kind, files) in checkpoints {
        let root = "3/default/";
        let files: Files =
            files.into_iter().filter_map(|(name, file)| Some((name.strip_prefix(root)?.to_owned(), file))).collect();
        let tree = Tree::parse(&files[METADATA]).unwrap();
        let mut entries: Files = files.clone();
        if tree.uses_ocdbt == Some(true) {
            let at = |location: &ocdbt::BlobLocation| {
                files[&*location.path][to_usize(location.offset)..to_usize(location.end())].to_vec()
            };
            let manifest = ocdbt::Manifest::parse(&files[ocdbt::MANIFEST]).unwrap();
            let mut walk = ocdbt::Walk::new(&manifest.latest.unwrap(), vec![ocdbt::KeyRange::all()]);
            loop {
                let nodes = walk.take_wanted();
                if nodes.is_empty() {
                    break;
                }
                for node in nodes {
                    let mut keep = |key: &[u8], value: ocdbt::NodeValue<'_>| {
                        let value = match value {
                            ocdbt::NodeValue::Inline(bytes) => bytes.to_vec(),
                            ocdbt::NodeValue::At(location) => at(location),
                        };
                        entries.insert(String::from_utf8(key.to_vec()).unwrap(), value);
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

fn tree(leaves: &Value) -> Result<Tree, FormatError> {
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
    let error = Tree::parse(text.as_bytes()).unwrap_err().to_string();
    assert!(error.starts_with("_METADATA: ") && error.contains("line 1"), "{error}");
    let leaf = raw_leaf(&["a"], "scalar").to_string();
    let text = format!("{{\"tree_metadata\": {{\"a\": {leaf}, \"a\": {leaf}}}}}");
    assert!(Tree::parse(text.as_bytes()).unwrap_err().to_string().contains("\"a\" is there twice"));
}

#[test]
fn typed_keys_of_random_numbers_pass_as_they_are_described() {
    let key = json!({"param_name": "rng", "write_shape": [2], "chunk_shape": [2], "ext_metadata": {"random_key_impl": "rbg"}});
    let plain = json!({"param_name": "w", "write_shape": [2, 4], "chunk_shape": [2, 4], "ext_metadata": null});
    let file = |arrays: &[&Value]| array_metadatas(arrays.iter().copied()).into_bytes();
    let found = random_keys(&file(&[&plain, &key])).unwrap();
    assert_eq!(found, [("rng".to_owned(), key.clone())]);
    assert_eq!(random_keys(&file(&[&found[0].1])).unwrap(), found, "what is written is read");
    let nameless = json!({"ext_metadata": {"random_key_impl": "rbg"}});
    let error = random_keys(&file(&[&nameless])).unwrap_err().to_string();
    assert_eq!(error, "array_metadatas: param_name: expected a string, found none");
    assert!(random_keys(b"{}").is_err() && random_keys(b"").is_err());
}

#[test]
fn items_are_named_or_the_directory_itself() {
    let items = |handlers: Value| {
        CheckpointMetadata::parse(json!({"item_handlers": handlers}).to_string().as_bytes()).map(|found| found.items)
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
fn damaged_files_never_panic() {
    let (checkpoints, _) = checkpoints();
    for (name, whole) in &checkpoints["ocdbt zarr3"] {
        for at in (0..whole.len()).step_by(3) {
            let mut bytes = whole.clone();
            bytes[at] = b'9';
            for bytes in [&bytes, &whole[..at]] {
                drop((Tree::parse(bytes), CheckpointMetadata::parse(bytes)));
            }
        }
        assert!(!name.is_empty());
    }
}
