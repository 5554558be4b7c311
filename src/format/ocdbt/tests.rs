//! Databases that tensorstore wrote, and what is done to them.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use ckfs_tensor::to_usize;

use super::{envelope::wrap, files::BlobLocation, node::NodeRef, *};
use crate::{FormatError, hexadecimal::bytes_of};

type Files = BTreeMap<String, Vec<u8>>;
type Content = BTreeMap<String, Vec<u8>>;

fn databases() -> BTreeMap<String, (Files, Content)> {
    #[derive(serde::Deserialize)]
    struct Database {
        files: BTreeMap<String, String>,
        content: BTreeMap<String, String>,
    }
    let text = include_str!("../../../tests/fixtures/formats/ocdbt.json");
    let databases: BTreeMap<String, Database> = serde_json::from_str(text).unwrap();
    let decoded = |map: BTreeMap<String, String>| map.into_iter().map(|(name, hex)| (name, bytes_of(&hex))).collect();
    databases.into_iter().map(|(name, database)| (name, (decoded(database.files), decoded(database.content)))).collect()
}

fn at(files: &Files, location: &BlobLocation) -> Result<Vec<u8>, String> {
    let file = files.get(&*location.path).ok_or_else(|| format!("no file {}", location.path))?;
    let span = file.get(to_usize(location.offset)..to_usize(location.end()));
    span.map(<[u8]>::to_vec).ok_or_else(|| format!("{location:?} in a file of {} bytes", file.len()))
}

fn manifest(files: &Files) -> Result<Manifest, String> {
    let manifest = Manifest::parse(files.get(MANIFEST).ok_or("no manifest")?).map_err(|error| error.to_string())?;
    if manifest.latest.is_some() {
        return Ok(manifest);
    }
    let generation = files.keys().filter_map(|name| numbered_generation(name)).max().ok_or("no numbered manifest")?;
    let bytes = &files[&numbered_name(generation)];
    manifest.parse_numbered(bytes, generation).map_err(|error| error.to_string())
}

/// What the wanted keys have, and the number of nodes that were read for it.
fn read(files: &Files, ranges: Vec<KeyRange>) -> Result<(Content, usize), String> {
    let version = manifest(files)?.latest.ok_or("no version")?;
    let mut content = Content::new();
    let mut nodes_read = 0;
    let mut walk = Walk::new(&version, ranges);
    loop {
        let nodes = walk.take_wanted();
        if nodes.is_empty() {
            return Ok((content, nodes_read));
        }
        nodes_read += nodes.len();
        for node in nodes {
            let mut values = Vec::new();
            let mut keep = |key: &[u8], value: NodeValue<'_>| {
                let value = match value {
                    NodeValue::Inline(bytes) => Ok(bytes.to_vec()),
                    NodeValue::At(location) => at(files, location),
                };
                values.push((String::from_utf8_lossy(key).into_owned(), value));
            };
            walk.read(&node, &at(files, &node.location)?, &mut keep).map_err(|error| error.to_string())?;
            for (key, value) in values {
                assert_eq!(content.insert(key, value?), None, "each key once");
            }
        }
    }
}

#[test]
fn databases_of_tensorstore_are_read_whole() {
    let databases = databases();
    assert_eq!(databases.len(), 6);
    for (name, (files, content)) in &databases {
        let (found, _) = read(files, vec![KeyRange::all()]).unwrap();
        assert_eq!(&found, content, "{name}");
    }
}

#[test]
fn only_nodes_of_wanted_keys_are_read() {
    let (files, content) = &databases()["deep"];
    let (_, all) = read(files, vec![KeyRange::all()]).unwrap();
    let height = manifest(files).unwrap().latest.unwrap().root.unwrap().height;
    assert!(height >= 2, "{height}");
    let prefix = "layer/007/";
    let (found, nodes) = read(files, vec![KeyRange::prefix(prefix.as_bytes())]).unwrap();
    let expected: Content = content.clone().into_iter().filter(|(key, _)| key.starts_with(prefix)).collect();
    assert_eq!((&found, found.len()), (&expected, 2));
    assert!(nodes <= 2 * (usize::from(height) + 1) && nodes < all, "{nodes} of {all} nodes");
    for (key, value) in content {
        let (found, nodes) = read(files, vec![KeyRange::exact(key.as_bytes())]).unwrap();
        assert_eq!(found, Content::from([(key.clone(), value.clone())]));
        assert_eq!(nodes, usize::from(height) + 1);
    }
    assert_eq!(read(files, vec![KeyRange::exact(b"layer/007/")]).unwrap().0.len(), 0);
    assert_eq!(read(files, Vec::new()).unwrap(), (Content::new(), 0));
}

#[test]
fn files_of_other_processes_are_found_by_their_base() {
    let (files, _) = &databases()["processes"];
    let root = manifest(files).unwrap().latest.unwrap().root.unwrap();
    assert!(root.location.path.starts_with("d/"), "{:?}", root.location);
    let mut walk = Walk::new(&manifest(files).unwrap().latest.unwrap(), vec![KeyRange::all()]);
    let mut paths = Vec::new();
    while let [node] = walk.take_wanted().as_slice() {
        let mut note = |_: &[u8], value: NodeValue<'_>| {
            if let NodeValue::At(location) = value {
                paths.push(location.path.to_string());
            }
        };
        walk.read(node, &at(files, &node.location).unwrap(), &mut note).unwrap();
    }
    assert_eq!(paths.iter().filter(|path| path.starts_with("ocdbt.process_0/d/")).count(), 3);
    assert_eq!(paths.iter().filter(|path| path.starts_with("ocdbt.process_1/d/")).count(), 3);
}

#[test]
fn a_numbered_manifest_must_be_the_one_that_is_named() {
    let (files, _) = &databases()["numbered"];
    let named = Manifest::parse(&files[MANIFEST]).unwrap();
    assert!(named.latest.is_none());
    let generation = files.keys().filter_map(|name| numbered_generation(name)).max().unwrap();
    let bytes = &files[&numbered_name(generation)];
    let error = named.parse_numbered(bytes, generation + 1).unwrap_err().to_string();
    assert_eq!(error, format!("ocdbt manifest: generation: expected {}, found {generation}", generation + 1));
    let mut other = named.clone();
    other.uuid[0] ^= 1;
    let error =
        |manifest: &Manifest, bytes, generation| manifest.parse_numbered(bytes, generation).unwrap_err().to_string();
    assert!(error(&other, bytes, generation).contains("database: expected"));
    assert!(error(&named, &files[MANIFEST], 1).contains("kind: expected versions"));
    for name in [
        "manifest.ocdbt",
        "manifest.0000000000000000",
        "manifest.000000000000000A",
        "manifest.0000000000000001x",
        "manifest.1",
    ] {
        assert_eq!(numbered_generation(name), None, "{name}");
    }
    assert_eq!(numbered_generation(&numbered_name(0xabc)), Some(0xabc));
}

/// Whatever is done to one byte, the answer is an error or, outside manifest and nodes, other bytes of a value.
#[test]
fn every_flipped_byte_of_manifest_and_nodes_is_noticed() {
    for name in ["deep", "processes", "versions", "numbered"] {
        let (files, content) = &databases()[name];
        let mut noticed = 0;
        for (path, whole) in files.iter().filter(|(_, bytes)| bytes.len() < 3000) {
            for place in 0..whole.len() {
                let mut files = files.clone();
                files.get_mut(path).unwrap()[place] ^= 1 << (place % 8);
                match catch_unwind(AssertUnwindSafe(|| read(&files, vec![KeyRange::all()]))) {
                    Ok(Err(_)) => noticed += 1,
                    Ok(Ok((found, _))) => {
                        assert_eq!(
                            found.keys().collect::<Vec<_>>(),
                            content.keys().collect::<Vec<_>>(),
                            "{path} {place}"
                        );
                    }
                    Err(panic) => {
                        eprintln!("{name} {path}: panics when byte {place} is flipped");
                        resume_unwind(panic);
                    }
                }
            }
        }
        assert!(noticed > 100, "{name}: {noticed}");
    }
}

#[test]
fn every_cut_is_noticed() {
    let (files, _) = &databases()["plain"];
    let manifest = Manifest::parse(&files[MANIFEST]).unwrap();
    for len in 0..files[MANIFEST].len() {
        assert!(Manifest::parse(&files[MANIFEST][..len]).is_err(), "manifest cut to {len}");
    }
    let version = &manifest.latest.unwrap();
    let root = version.root.as_ref().unwrap();
    let bytes = at(files, &root.location).unwrap();
    for len in 0..bytes.len() {
        let error = Walk::new(version, vec![KeyRange::all()]).read(root, &bytes[..len], &mut |_, _| {});
        assert!(error.unwrap_err().to_string().contains("bytes by its header"), "node cut to {len}");
    }
}

fn node_ref(bytes: &[u8], height: u8) -> NodeRef {
    let (path, base) = ("d/0".into(), "".into());
    NodeRef::root(BlobLocation { path, base, offset: 0, len_bytes: bytes.len() as u64 }, height)
}

fn read_node(body: &[u8], height: u8) -> Result<Vec<String>, FormatError> {
    let bytes = wrap(body, Block::Node, false);
    let root = node_ref(&bytes, height);
    let version = Version { generation: 1, root: Some(root.clone()) };
    let mut keys = Vec::new();
    let mut walk = Walk::new(&version, vec![KeyRange::all()]);
    walk.read(&root, &bytes, &mut |key, _| keys.push(String::from_utf8_lossy(key).into_owned()))?;
    Ok(keys)
}

/// A leaf with two inline values, byte by byte.
const LEAF: &[u8] = b"\x00\x00\x02\x01\x02\x01abc\x01\x01\x00\x00xy";

#[test]
fn bodies_with_right_checksums_and_wrong_content_are_refused() {
    assert_eq!(read_node(LEAF, 0).unwrap(), ["ab", "ac"]);
    let rows: [(&[u8], u8, &str); 12] = [
        (b"\x01", 0, "height: expected 0, found 1"),
        (b"\x00\x00\x00", 0, "number of entries: expected at least 1, found 0"),
        (b"\x00\x00\x81\x80\x40", 0, "number of entries: expected at most 1048576, found 1048577"),
        (b"\x00\x00\x09\x01", 0, "ends within its number of entries"),
        (b"\x00\x00\x02\x03\x02\x01abc\x01\x01\x00\x00xy", 0, "key prefix length: expected at most 2, found 3"),
        (b"\x00\x00\x02\x01\x02\x01aba\x01\x01\x00\x00xy", 0, "order of keys"),
        (
            b"\x00\x00\x02\x01\x02\x01abc\x01\x01\x00\x02xy",
            0,
            "value kind: expected 0 (inline) or 1 (elsewhere), found 2",
        ),
        (b"\x00\x00\x02\x01\x02\x01abc\x01\x01\x00\x01xy", 0, "file number: expected less than 0, found 120"),
        (b"\x00\x00\x02\x01\x02\x01abc\x01\x01\x00\x00xyz", 0, "expected to end, found 1 more bytes"),
        (b"\x00\x00\x02\x01\x02\x01abc\x01\x02\x00\x00xy", 0, "ends within its inline values"),
        (
            b"\x00\x01\x04\x00../x\x01\x01k\x01\x01\x00\x00",
            0,
            "expected a path of a file inside the database, found \"../x\"",
        ),
        (
            b"\x01\x01\x03\x00d/x\x01\x01\x02k\x00\x00\x01\x01\x01\x01",
            1,
            "subtree prefix length: expected at most 1, found 2",
        ),
    ];
    for (body, height, expected) in rows {
        let error = read_node(body, height).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}: expected {expected}");
    }
}

#[test]
fn damaged_bodies_with_right_checksums_never_panic() {
    let interior = b"\x01\x01\x03\x00d/x\x02\x00\x01\x01\x00\x00jk\x00\x00\x00\x01\x05\x05\x01\x01\x01\x01\x01\x01";
    assert_eq!(read_node(interior, 1).unwrap().len(), 0);
    for (whole, height) in [(LEAF, 0), (interior, 1)] {
        for place in 0..whole.len() {
            for byte in 0..=255 {
                let mut body = whole.to_vec();
                body[place] = byte;
                drop(read_node(&body, height));
            }
            assert!(read_node(&whole[..place], height).is_err(), "cut to {place}");
        }
    }
}

#[test]
fn small_nodes_of_long_keys_do_not_fill_memory() {
    // A million keys of 64 KiB, each one byte longer than nothing by itself.
    let rows: usize = 300_000;
    let varint = |number: usize| {
        let [low, middle, high] = [number & 0x7f | 0x80, number >> 7 & 0x7f | 0x80, number >> 14];
        [low, middle, high].map(|byte| u8::try_from(byte).unwrap())
    };
    let mut body = vec![0, 0];
    body.extend(varint(rows));
    (1..rows).for_each(|_| body.extend(varint(60_000)));
    body.extend(varint(60_000));
    body.extend(std::iter::repeat_n(1, rows - 1));
    body.extend(vec![b'a'; 60_000]);
    body.extend(vec![b'b'; rows - 1]);
    let error = read_node(&body, 0).unwrap_err();
    // Either limit ends it: equal keys are refused at the third.
    assert!(error.to_string().contains("order of keys: expected increasing"), "{error}");
    let mut body = vec![0, 0];
    body.extend(varint(rows));
    (1..rows).for_each(|row| body.extend(varint(50_000 + row.min(15_000))));
    body.extend(varint(50_001));
    body.extend(std::iter::repeat_n(1, rows - 1));
    body.extend(vec![b'a'; 50_001]);
    body.extend(vec![b'b'; rows - 1]);
    let error = read_node(&body, 0).unwrap_err();
    assert!(error.to_string().contains("bytes of keys: expected at most"), "{error}");
}
