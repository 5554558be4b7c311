//! Databases of other writers with mutated blocks: an error, or keys in order.
//!
//! Checksums are corrected afterwards, so that the code after their check is tested too.

use std::collections::BTreeMap;

use ckfs::format::{
    FormatError,
    ocdbt::{KeyRange, Manifest, Version, Walk},
};

use super::{
    Random, mutate, run,
    targets::{ocdbt_files, seal},
};

fn place(number: u64) -> usize {
    usize::try_from(number).unwrap()
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
fn walk(random: &mut Random, files: &BTreeMap<String, Vec<u8>>, version: &Version) -> Result<u64, FormatError> {
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
            walk.read(&node, &bytes, &mut |key, _| {
                assert!(last.as_ref().is_none_or(|last| last.as_slice() < key), "increasing keys");
                last = Some(key.to_vec());
                found += 1;
            })?;
        }
    }
}

#[test]
fn ocdbt() {
    let databases = ocdbt_files().into_iter();
    let files: BTreeMap<String, BTreeMap<String, Vec<u8>>> =
        databases.map(|(name, files)| (name, files.into_iter().collect())).collect();
    let names: Vec<&String> = files.keys().collect();
    run("ocdbt", |random| {
        let files = &files[*random.pick(&names)];
        let mut manifest = files["manifest.ocdbt"].clone();
        if random.below(2) == 0 {
            break_block(random, &mut manifest);
        }
        let Ok(manifest) = Manifest::parse(&manifest) else { return false };
        manifest.latest.is_some_and(|version| walk(random, files, &version).is_ok())
    });
}
