//! Mutated databases, array descriptions and pickles of other writers: an error, or a result that the format allows.
//!
//! Checksums are corrected afterwards, so that the code after their check is tested too.

use std::collections::BTreeMap;

use ckfs::{
    format::{
        dcp::read::DcpState,
        ocdbt::{KeyRange, Manifest, OcdbtError, Version, VersionNode, Walk},
        orbax::read as orbax_state,
        pickle::read::{self as unpickle, Id, Limits, Unpickled},
        torch::{read::TorchArchive, state as torch_state},
        zarr::read::Array,
    },
    tensor::Shape,
};

use super::{Random, mutate, run};

fn bytes_of(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn place(number: u64) -> usize {
    usize::try_from(number).unwrap()
}

/// Corrects length and CRC-32C of a block.
fn seal(block: &mut [u8]) {
    if block.len() < 18 {
        return;
    }
    let len = block.len() as u64;
    block[4..12].copy_from_slice(&len.to_le_bytes());
    let end = block.len() - 4;
    let sum = crc32c::crc32c(&block[..end]);
    block[end..].copy_from_slice(&sum.to_le_bytes());
}

/// Breaks an uncompressed block after its header.
fn break_block(random: &mut Random, block: &mut Vec<u8>) {
    let mut body = block.split_off(block.len().min(14));
    mutate(random, &mut body);
    block.append(&mut body);
    if random.below(8) > 0 {
        seal(block);
    }
}

/// Reads all keys below the nodes that the files have, some of them broken.
fn walk(random: &mut Random, files: &BTreeMap<String, Vec<u8>>, version: &Version) -> Result<u64, OcdbtError> {
    let range = match random.below(3) {
        0 => KeyRange::all(),
        1 => KeyRange::prefix(b"layer/00"),
        _ => KeyRange::exact(b"layer/003/zarr.json"),
    };
    let mut walk = Walk::new(version, vec![range]);
    let mut found = 0;
    let mut last: Option<Vec<u8>> = None;
    loop {
        let nodes = walk.take_wanted();
        if nodes.is_empty() {
            return Ok(found);
        }
        assert!(found < 1000, "no file has so many keys");
        for node in nodes {
            let file = files.get(&*node.location.path);
            let bytes = file.and_then(|file| file.get(place(node.location.offset)..place(node.location.end())));
            let Some(bytes) = bytes else { return Ok(found) };
            let mut bytes = bytes.to_vec();
            if random.below(3) == 0 {
                break_block(random, &mut bytes);
            }
            walk.read(&node, &bytes, &mut |entry| {
                assert!(last.as_ref().is_none_or(|last| last.as_slice() < entry.key), "increasing keys");
                last = Some(entry.key.to_vec());
                found += 1;
            })?;
        }
    }
}

#[test]
fn ocdbt() {
    let text = include_str!("../fixtures/formats/ocdbt.json");
    let fixtures: BTreeMap<String, serde_json::Value> = serde_json::from_str(text).unwrap();
    let files: BTreeMap<String, BTreeMap<String, Vec<u8>>> = fixtures
        .into_iter()
        .map(|(name, database)| {
            let files = database["files"].as_object().unwrap().iter();
            (name, files.map(|(path, hex)| (path.clone(), bytes_of(hex.as_str().unwrap()))).collect())
        })
        .collect();
    let names: Vec<&String> = files.keys().collect();
    run("ocdbt", |random| {
        let files = &files[*random.pick(&names)];
        let mut manifest = files["manifest.ocdbt"].clone();
        if random.below(2) == 0 {
            break_block(random, &mut manifest);
        }
        let Ok(manifest) = Manifest::parse(&manifest) else { return false };
        for range in &manifest.older {
            let file = files.get(&*range.location.path);
            let bytes = file.and_then(|file| file.get(place(range.location.offset)..place(range.location.end())));
            let mut bytes = bytes.unwrap_or_default().to_vec();
            break_block(random, &mut bytes);
            drop(VersionNode::parse(&bytes, range));
        }
        manifest.latest().is_some_and(|version| walk(random, files, version).is_ok())
    });
}

/// The invariants of every accepted array.
fn check_array(random: &mut Random, array: &Array) {
    let extents = array.shape.extents();
    assert!(Shape::try_new(extents).is_ok() && extents.len() == array.chunk.len());
    let grid = array.grid();
    if grid.iter().all(|count| *count > 0) {
        let numbers: Vec<u64> = grid.iter().map(|count| random.next() % count).collect();
        assert_eq!(array.numbers(&array.key(&numbers)).unwrap().as_slice(), numbers);
    }
    if let Some(strides) = array.codecs.plain(array.dtype, &array.chunk) {
        let last: u64 = strides.iter().zip(&array.chunk).map(|(stride, extent)| stride * (extent - 1)).sum();
        assert_eq!(last + 1, array.chunk.iter().product::<u64>());
    }
    if array.chunk_bytes() <= 1 << 16 {
        let mut stored: Vec<u8> = (0..random.below(300)).map(|_| random.next().to_le_bytes()[0]).collect();
        if random.below(2) == 0 {
            stored.resize(place(array.chunk_bytes()), 1);
        }
        let mut target = vec![0; place(array.chunk_bytes())];
        drop(array.decode(&stored, &mut target));
    }
}

#[test]
fn zarr_metadata() {
    let text = include_str!("../fixtures/formats/zarr.json");
    let cases: Vec<serde_json::Value> = serde_json::from_str(text).unwrap();
    run("zarr_metadata", |random| {
        let case = random.pick(&cases);
        let mut metadata = case["metadata"].as_str().unwrap().as_bytes().to_vec();
        mutate(random, &mut metadata);
        let array = if case["zarr"] == 2 { Array::parse_v2(&metadata) } else { Array::parse_v3(&metadata) };
        match array {
            Ok(array) => {
                check_array(random, &array);
                true
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                false
            }
        }
    });
}

/// Visits all objects that a value refers to: every id is one of the pickle's own.
fn visit(pickle: &Unpickled, id: Id, left: &mut u32) {
    if *left == 0 {
        return;
    }
    *left -= 1;
    for element in pickle.sequence(id).unwrap_or_default() {
        visit(pickle, *element, left);
    }
    for (key, value) in pickle.items(id).unwrap_or_default() {
        visit(pickle, *key, left);
        visit(pickle, *value, left);
    }
    if let Some((_, args, object)) = pickle.call(id) {
        args.iter().chain(&object.state).for_each(|id| visit(pickle, *id, left));
    }
}

#[test]
fn pickles() {
    let text = include_str!("../fixtures/formats/torch.json");
    let fixtures: serde_json::Value = serde_json::from_str(text).unwrap();
    let metadata = bytes_of(fixtures["dcp"][".metadata"].as_str().unwrap());
    let archives: Vec<Vec<u8>> =
        ["archive 2", "archive 3", "archive 4"].map(|name| bytes_of(fixtures[name].as_str().unwrap())).to_vec();
    run("pickles", |random| {
        let mut bytes = if random.below(2) == 0 { metadata.clone() } else { random.pick(&archives).clone() };
        mutate(random, &mut bytes);
        let mut archive = TorchArchive::new(bytes.len() as u64);
        while !archive.wanted().is_empty() {
            let spans = archive.wanted().iter().map(|span| bytes[place(span.start)..place(span.end)].to_vec());
            let spans = spans.collect();
            if archive.supply(spans).is_err() {
                break;
            }
        }
        for saved in archive.into_tensors().unwrap_or_default() {
            assert!(saved.span().end <= bytes.len() as u64, "{saved:?}");
        }
        // The pickle of an archive is at its start, after a header.
        let start = bytes.windows(2).position(|pair| pair[0] == 0x80 && pair[1] <= 5).unwrap_or(0);
        if let Ok(pickle) = unpickle::read(&bytes[start..], Limits::default(), &|_, _| true) {
            visit(&pickle, pickle.root(), &mut 100);
            drop(torch_state::tensors(&pickle));
        }
        match DcpState::parse(&bytes) {
            Ok(state) => {
                let segments = state.tensors.iter().flat_map(|tensor| &tensor.chunks).map(|chunk| chunk.segment);
                let segments = segments.chain(state.objects.iter().map(|object| object.segment));
                assert!(segments.into_iter().all(|segment| (segment.file as usize) < state.files.len()));
                true
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                false
            }
        }
    });
}

#[test]
fn orbax_metadata() {
    let text = include_str!("../fixtures/formats/orbax.json");
    let fixture: serde_json::Value = serde_json::from_str(text).unwrap();
    let files: Vec<Vec<u8>> = fixture["checkpoints"]["ocdbt zarr3"]
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| !name.contains("/d/") && !name.contains("manifest"))
        .map(|(_, hex)| bytes_of(hex.as_str().unwrap()))
        .collect();
    run("orbax_metadata", |random| {
        let mut bytes = random.pick(&files).clone();
        mutate(random, &mut bytes);
        let tree = orbax_state::Tree::parse(&bytes);
        if let Ok(tree) = &tree {
            let stored = tree.leaves.iter().filter(|leaf| leaf.kind != orbax_state::LeafKind::Empty);
            let names: Vec<String> = stored.map(orbax_state::Leaf::name).collect();
            assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), names.len());
        }
        let others = [
            orbax_state::CheckpointMetadata::parse(&bytes).is_ok(),
            orbax_state::parse_sharding(&bytes).is_ok(),
            orbax_state::parse_array_metadatas(&bytes).is_ok(),
        ];
        tree.is_ok() || others.contains(&true)
    });
}
