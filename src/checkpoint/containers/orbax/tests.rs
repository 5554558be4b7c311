//! Checkpoints that Orbax and tensorstore wrote, whole and damaged, against what was saved.

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

use ckfs_source::{ByteSpan, ContentName, FetchPart, FileId, Health, Pin, SourceError, permission::AccessRules};
use ckfs_tensor::to_usize;
use serde_json::Value as Json;

use super::*;
use crate::tree::TreeEntry;

/// Files in memory, as a tree and as a source.
#[derive(Clone, Debug, Default)]
struct MemoryTree {
    files: BTreeMap<String, Vec<u8>>,
    name: &'static str,
    needs_commit_file: bool,
}

impl FileTree for MemoryTree {
    fn shown(&self, path: &str) -> Arc<Path> {
        Arc::from(Path::new("/").join(self.name).join(path).as_path())
    }

    fn list(&self, directory: &str) -> Result<Vec<TreeEntry>, SourceError> {
        let prefix = if directory.is_empty() { String::new() } else { format!("{directory}/") };
        let below = self.files.keys().filter_map(|path| path.strip_prefix(&prefix));
        let mut found: BTreeMap<&str, bool> = BTreeMap::new();
        for path in below {
            match path.split_once('/') {
                Some((name, _)) => found.insert(name, true),
                None => found.insert(path, false),
            };
        }
        let entry = |(name, is_directory): (&str, bool)| TreeEntry { name: name.to_owned(), is_directory };
        Ok(found.into_iter().map(entry).collect())
    }

    fn len_bytes(&self, path: &str) -> Result<Option<u64>, SourceError> {
        Ok(self.files.get(path).map(|bytes| bytes.len() as u64))
    }

    fn read(&self, path: &str, start: u64, target: &mut [u8]) -> Result<(), SourceError> {
        let found = self.files.get(path).and_then(|bytes| bytes.get(to_usize(start)..)?.get(..target.len()));
        let failed = || SourceError::Io {
            file: self.shown(path),
            action: format!("read {} bytes from {start}", target.len()),
            error: Arc::new(std::io::ErrorKind::UnexpectedEof.into()),
        };
        let found = found.ok_or_else(failed)?;
        target.copy_from_slice(found);
        Ok(())
    }

    fn description(&self, path: &str) -> Result<Option<Vec<u8>>, SourceError> {
        Ok(self.files.get(path).cloned())
    }

    fn needs_commit_file(&self) -> bool {
        self.needs_commit_file
    }
}

struct MemorySource {
    files: Vec<(Pin, Vec<u8>)>,
    health: Health,
}

impl Source for MemorySource {
    fn file_count(&self) -> usize {
        self.files.len()
    }

    fn pin(&self, file: FileId) -> &Pin {
        &self.files[file.index()].0
    }

    fn check(&self, file: FileId) -> Result<(), SourceError> {
        self.health.usable(file)
    }

    fn fetch(&self, file: FileId, parts: &mut [FetchPart<'_>]) -> Result<(), SourceError> {
        for FetchPart { start, target } in parts {
            target.copy_from_slice(&self.files[file.index()].1[to_usize(*start)..][..target.len()]);
        }
        Ok(())
    }

    fn health(&self) -> &Health {
        &self.health
    }
}

impl MemoryTree {
    fn source(&self, paths: &[String]) -> Arc<dyn Source> {
        let file = |path: &String| {
            let bytes = self.files[path].clone();
            let (path, len_bytes, modified) = (self.shown(path), bytes.len() as u64, UNIX_EPOCH);
            let content = ContentName::Anywhere(path.display().to_string());
            (Pin { path, len_bytes, modified, content, gates: AccessRules::open(0, 0) }, bytes)
        };
        let files: Vec<_> = paths.iter().map(file).collect();
        let health = Health::new(files.iter().map(|(pin, _)| pin.path.clone()), Arc::default());
        Arc::new(MemorySource { files, health })
    }

    /// The same files, as many directories higher.
    fn at(&self, directory: &str) -> Self {
        let prefix = format!("{directory}/");
        let inside = |(path, bytes): (&String, &Vec<u8>)| Some((path.strip_prefix(&prefix)?.to_owned(), bytes.clone()));
        Self { files: self.files.iter().filter_map(inside).collect(), ..self.clone() }
    }
}

/// The bytes of a tensor, put together element by element; `None` where they cannot be read.
fn assemble(tensor: &OrbaxTensor, found_paths: usize, source: &dyn Source) -> Result<Vec<u8>, SourceError> {
    let unit = to_usize(tensor.dtype.element_bytes().unwrap());
    let shape = tensor.shape.extents();
    let fill = tensor.fill.clone().unwrap_or_else(|| vec![0xee; unit]);
    let mut whole = fill.repeat(to_usize(shape.iter().product()));
    for part in tensor.boxes.iter().map(|part| part.stored(found_paths)) {
        let count: u64 = part.extents.iter().product();
        for number in 0..count {
            let at = ckfs_tensor::unravel(number, &part.extents);
            let steps = at.iter().zip(&part.strides).map(|(at, stride)| at * stride).sum::<u64>();
            let target = part.origin.iter().zip(&at).zip(shape).fold(0, |place, ((o, at), n)| place * n + o + at);
            let place = to_usize(target) * unit;
            source.read_into(part.file, part.start + steps * unit as u64, &mut whole[place..place + unit])?;
        }
    }
    Ok(whole)
}

fn contents(tree: &MemoryTree, whole_state: bool) -> Result<BTreeMap<String, Vec<u8>>, String> {
    let shown = |problems: Vec<Problem>| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    let mut found = read(tree, whole_state, false).map_err(shown)?;
    let source = found.source(tree.source(&found.paths));
    let assembled =
        found.tensors.iter().map(|tensor| Ok((tensor.name.clone(), assemble(tensor, found.paths.len(), &*source)?)));
    assembled.collect::<Result<_, SourceError>>().map_err(|error| error.to_string())
}

fn hex(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks(2);
    pairs.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn fixture(name: &str) -> Json {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/formats").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn tree_of(files: &Json) -> MemoryTree {
    let file = |(path, bytes): (&String, &Json)| (path.clone(), hex(bytes.as_str().unwrap()));
    MemoryTree { files: files.as_object().unwrap().iter().map(file).collect(), name: "root", ..MemoryTree::default() }
}

/// The checkpoints that Orbax wrote, each with its name.
fn checkpoints() -> Vec<(String, MemoryTree)> {
    let all = fixture("orbax.json");
    let all = all["checkpoints"].as_object().unwrap();
    all.iter().map(|(name, files)| (name.clone(), tree_of(files))).collect()
}

fn expected() -> BTreeMap<String, Vec<u8>> {
    let content = fixture("orbax.json")["content"].clone();
    content.as_object().unwrap().iter().map(|(name, bytes)| (name.clone(), hex(bytes.as_str().unwrap()))).collect()
}

#[test]
fn checkpoints_of_orbax_are_what_was_saved() {
    for (name, tree) in checkpoints() {
        for at in ["", "3", "3/default"] {
            let tree = if at.is_empty() { tree.clone() } else { tree.at(at) };
            assert!(is_orbax(&tree).unwrap(), "{name} {at}");
            assert_eq!(contents(&tree, false).unwrap(), expected(), "{name} {at}");
            let state = contents(&tree, true).unwrap();
            assert_eq!(state.keys().filter(|key| !key.starts_with("params.")).collect::<Vec<_>>(), ["step"]);
            let found = read(&tree, false, false).unwrap();
            let left_out: Vec<_> = found.rest.left_out.iter().map(|out| out.name.as_str()).collect();
            assert_eq!(left_out, ["label", "step"], "{name} {at}");
            assert_eq!(found.rest.scan_layers, if at == "3/default" { None } else { Some(true) }, "{name} {at}");
        }
    }
}

/// An array that tensorstore wrote, as a checkpoint of one directory.
fn array_tree(row: &Json) -> MemoryTree {
    let mut files = BTreeMap::new();
    let name = if row["zarr"] == 3 { "x/zarr.json" } else { "x/.zarray" };
    files.insert(name.to_owned(), row["metadata"].as_str().unwrap().as_bytes().to_vec());
    for (key, bytes) in row["chunks"].as_object().unwrap() {
        files.insert(format!("x/{key}"), hex(bytes.as_str().unwrap()));
    }
    MemoryTree { files, name: "root", needs_commit_file: false }
}

#[test]
fn arrays_of_every_codec_are_covered_by_boxes() {
    let mut read_rows = 0;
    for row in fixture("zarr.json").as_array().unwrap() {
        let mut tree = array_tree(row);
        // An item of this name, whose tree is not described.
        tree.files.insert("_METADATA".to_owned(), br#"{"tree_metadata": {"('x',)": {"key_metadata": [{"key": "x", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}}, "use_zarr3": true}"#.to_vec());
        match contents(&tree, false) {
            Ok(found) => {
                assert_eq!(found["x"], hex(row["content"].as_str().unwrap()), "{}", row["name"]);
                read_rows += 1;
            }
            Err(error) => assert!(error.contains("not supported"), "{}: {error}", row["name"]),
        }
    }
    assert!(read_rows > 45, "{read_rows}");
}

#[test]
fn databases_of_several_processes_are_one() {
    let all = fixture("ocdbt.json");
    let tree = tree_of(&all["processes"]["files"]);
    let names = ["params.w".to_owned()];
    let values = store::values_in_database(&tree, "", &names, &[true]).unwrap();
    let content = all["processes"]["content"].as_object().unwrap();
    let expected: BTreeMap<_, _> = content
        .iter()
        .map(|(key, bytes)| (key.strip_prefix("params.w/").unwrap(), hex(bytes.as_str().unwrap())))
        .collect();
    let found: BTreeMap<_, _> =
        values[0].iter().map(|value| (value.key.as_str(), value.read(&tree).unwrap())).collect();
    assert_eq!(found, expected);
    for name in ["plain", "deep", "versions", "numbered"] {
        let tree = tree_of(&all[name]["files"]);
        let names: Vec<String> = (0..16).map(|number| format!("layer/{number:03}")).collect();
        let values = store::values_in_database(&tree, "", &names, &[true; 16]).unwrap();
        let content = all[name]["content"].as_object().unwrap();
        let count = content.keys().filter(|key| key.starts_with("layer/")).count();
        assert_eq!(values.iter().map(Vec::len).sum::<usize>(), count, "{name}");
    }
}

fn refused(tree: &MemoryTree) -> String {
    let shown = |problems: Vec<Problem>| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    read(tree, false, false).map(|_| ()).map_err(shown).unwrap_err()
}

#[test]
fn unfinished_steps_are_never_read() {
    for (_, tree) in checkpoints() {
        let step = tree.at("3");
        let mut later = tree.clone();
        for (path, bytes) in &step.files {
            later.files.insert(format!("4.orbax-checkpoint-tmp/{path}"), bytes.clone());
            later.files.insert(format!("12/{path}"), bytes.clone());
        }
        let uncommitted =
            br#"{"item_handlers": {"default": "x"}, "init_timestamp_nsecs": 1, "commit_timestamp_nsecs": null}"#;
        later.files.insert("12/_CHECKPOINT_METADATA".to_owned(), uncommitted.to_vec());
        let found = read(&later, false, false).unwrap();
        assert_eq!(found.item, "3/default");
        assert!(found.rest.warnings.iter().any(|warning| warning.contains("step 12")), "{:?}", found.rest.warnings);
        let committed =
            br#"{"item_handlers": {"default": "x"}, "init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}"#;
        later.files.insert("12/_CHECKPOINT_METADATA".to_owned(), committed.to_vec());
        assert_eq!(read(&later, false, false).unwrap().item, "12/default");

        let mut alone = later.clone();
        alone.files.retain(|path, _| path.starts_with("4.orbax"));
        assert!(is_orbax(&alone).unwrap());
        let message = refused(&alone);
        assert!(message.contains("no finished step: 4.orbax-checkpoint-tmp"), "{message}");
        let renamed = MemoryTree { name: "4.orbax-checkpoint-tmp", ..step.clone() };
        let message = refused(&renamed);
        assert!(message.contains("unfinished"), "{message}");
        assert_eq!(read(&renamed, false, true).unwrap().item, "default");
        // On an object store the last file decides.
        let mut stored = MemoryTree { needs_commit_file: true, ..tree.clone() };
        stored.files.retain(|path, _| !path.ends_with("commit_success.txt"));
        let message = refused(&stored);
        assert!(message.contains("commit_success.txt") && message.contains("--allow-unfinished"), "{message}");
        // A copy that lost the file is read on request, and only if it is whole.
        let found = read(&stored, false, true).unwrap();
        assert_eq!(found.item, "3/default");
        assert!(
            found.rest.warnings.iter().any(|warning| warning.contains("step 3: unfinished")),
            "{:?}",
            found.rest.warnings
        );
        let mut lost = stored.clone();
        let chunk = |path: &&String| path.contains("params.wq/1.") || path.contains("/d/");
        let chunk = lost.files.keys().find(chunk).unwrap().clone();
        lost.files.remove(&chunk);
        assert!(read(&lost, false, true).is_err(), "{chunk} is lost");
        let mut finished_first = stored.clone();
        for (path, bytes) in &step.files {
            finished_first.files.insert(format!("2/{path}"), bytes.clone());
        }
        finished_first.files.insert("2/commit_success.txt".to_owned(), Vec::new());
        assert_eq!(read(&finished_first, false, true).unwrap().item, "2/default");
        stored.files.insert("3/commit_success.txt".to_owned(), Vec::new());
        assert_eq!(contents(&stored, false).unwrap(), expected());
    }
    assert!(!is_orbax(&MemoryTree::default()).unwrap());
}

#[test]
fn lost_and_surplus_chunks_are_named() {
    let (_, tree) = checkpoints().into_iter().find(|(name, _)| name == "files").unwrap();
    let chunk = tree.files.keys().find(|path| path.contains("params.wq/1.")).unwrap().clone();
    let mut lost = tree.clone();
    lost.files.remove(&chunk);
    let message = refused(&lost);
    let key = chunk.rsplit('/').next().unwrap();
    assert!(message.contains("array params.wq: 1 of 4 chunks are missing") && message.contains(key), "{message}");
    // A writer that leaves out chunks of the fill value has not lost it.
    let metadata = "3/default/_METADATA";
    let text = String::from_utf8(lost.files[metadata].clone()).unwrap();
    let text = text
        .replace("\"store_array_data_equal_to_fill_value\": true", "\"store_array_data_equal_to_fill_value\": false");
    lost.files.insert(metadata.to_owned(), text.into_bytes());
    let filled = &contents(&lost, false).unwrap()["params.wq"];
    assert_eq!(filled.len(), expected()["params.wq"].len());
    assert!(filled.chunks(2).filter(|element| element == &[0, 0]).count() >= 8);

    let mut surplus = tree.clone();
    surplus.files.insert(chunk.replace("/1.", "/7."), tree.files[&chunk].clone());
    let second = chunk.rsplit_once("params.wq").unwrap().0.to_owned() + "params.norm.scale/5";
    surplus.files.insert(second, Vec::new());
    let message = refused(&surplus);
    assert!(message.contains("array params.wq") && message.contains("array params.norm.scale"), "{message}");

    let mut none = tree.clone();
    none.files.retain(|path, _| !path.contains("params.list.0/"));
    assert!(refused(&none).contains("array params.list.0: in _METADATA, but its description (.zarray) is missing"));
}

/// What a damaged checkpoint gives: an error that names something, or the bytes of some tensors.
fn survives(tree: &MemoryTree) {
    match is_orbax(tree) {
        Ok(true) => {}
        Ok(false) | Err(_) => return,
    }
    match contents(tree, false) {
        Err(error) => assert!(!error.is_empty()),
        Ok(found) => assert!(found.values().all(|bytes| bytes.len() < 1 << 20)),
    }
}

#[test]
fn no_flipped_or_missing_byte_does_more_than_fail() {
    for (_, tree) in checkpoints() {
        let paths: Vec<String> = tree.files.keys().cloned().collect();
        for path in paths {
            let bytes = tree.files[&path].clone();
            let mut damaged = tree.clone();
            for at in 0..bytes.len() {
                let bit = 1 << (at % 8);
                let mut other = bytes.clone();
                other[at] ^= bit;
                damaged.files.insert(path.clone(), other);
                survives(&damaged);
            }
            for len in (0..bytes.len()).step_by(7) {
                damaged.files.insert(path.clone(), bytes[..len].to_vec());
                survives(&damaged);
            }
        }
    }
}

#[test]
fn every_flipped_bit_of_manifest_and_nodes_is_noticed() {
    let (_, tree) = checkpoints().into_iter().find(|(name, _)| name == "ocdbt zarr3").unwrap();
    let manifest = "3/default/manifest.ocdbt";
    let bytes = tree.files[manifest].clone();
    for at in 0..bytes.len() {
        let mut damaged = tree.clone();
        damaged.files.get_mut(manifest).unwrap()[at] ^= 1 << (at % 8);
        let message = refused(&damaged);
        assert!(message.contains("manifest.ocdbt"), "{at}: {message}");
    }
}

#[test]
fn damaged_chunks_are_named_and_others_are_read() {
    let all = fixture("zarr.json");
    let row = all.as_array().unwrap().iter().find(|row| row["name"] == "3 crc32c").unwrap();
    let mut tree = array_tree(row);
    tree.files.insert("manifest".to_owned(), Vec::new());
    tree.files.insert("_METADATA".to_owned(), br#"{"tree_metadata": {"('x',)": {"key_metadata": [{"key": "x", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}}, "use_zarr3": true}"#.to_vec());
    let chunk = tree.files.keys().find(|path| path.ends_with("c/1/0")).unwrap().clone();
    tree.files.get_mut(&chunk).unwrap()[3] ^= 1;
    let mut found = read(&tree, false, false).unwrap();
    let source = found.source(tree.source(&found.paths));
    let error = assemble(&found.tensors[0], found.paths.len(), &*source).unwrap_err().to_string();
    assert!(error.contains("array x, chunk c/1/0 (bytes 0..") && error.contains("CRC-32C"), "{error}");
    // The file itself is as it was pinned.
    assert!((0..4).all(|file| source.check(FileId(file)).is_ok()) && source.health().poisoned() == 0);
    let parts = found.tensors[0].boxes.iter().map(|part| part.stored(found.paths.len()));
    let good = parts.filter(|part| source.read_into(part.file, part.start, &mut [0]).is_ok());
    assert_eq!((good.count(), found.tensors[0].boxes.len()), (3, 4));
}

#[test]
fn decoded_files_follow_the_files_that_they_are_stored_in() {
    let all = fixture("zarr.json");
    let row = all.as_array().unwrap().iter().find(|row| row["name"] == "3 zstd").unwrap();
    let mut tree = array_tree(row);
    tree.files.insert("_METADATA".to_owned(), br#"{"tree_metadata": {"('x',)": {"key_metadata": [{"key": "x", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}}, "use_zarr3": true}"#.to_vec());
    let mut found = read(&tree, false, false).unwrap();
    let own = found.paths.len();
    let source = found.source(tree.source(&found.paths));
    assert_eq!(source.file_count(), 2 * own);
    for number in 0..u32::try_from(own).unwrap() {
        let (stored, decoded) = (FileId(number), FileId(number + u32::try_from(own).unwrap()));
        assert_eq!(source.path(stored), source.path(decoded));
        let coded = source.coded(decoded, 0).unwrap();
        assert_eq!((coded.codec.as_str(), source.coded(stored, 0)), ("bytes, zstd", None));
        assert!(coded.chunk.starts_with("c/") && coded.stored.is_some());
        // A whole chunk is 2 x 3 elements of 2 bytes.
        assert_eq!(source.len_bytes(decoded), 12);
        let mut two = [0; 13];
        assert!(matches!(source.read_into(decoded, 0, &mut two), Err(SourceError::Refused { .. })));
        assert!(matches!(source.read_into(decoded, u64::MAX, &mut two), Err(SourceError::Refused { .. })));
        source.read_into(decoded, 12, &mut []).unwrap();
        source.read_into(decoded, 3, &mut two[..9]).unwrap();
    }
    assert_eq!(source.chunks().unwrap().decoded_count(), own as u64);
    // One file is lost: its decoded file too, and no other.
    let error = SourceError::Lost { file: source.pin(FileId(1)).path.clone(), flaw: "lost".to_owned() };
    source.health().condemn(FileId(1), error);
    let decoded = FileId(u32::try_from(own).unwrap() + 1);
    assert!(source.check(decoded).is_err() && source.health().is_poisoned(decoded));
    assert!(source.read_into(decoded, 0, &mut [0]).is_err());
    assert!(source.check(FileId(decoded.0 + 1)).is_ok() && !source.health().is_poisoned(FileId(decoded.0 + 1)));
    assert!(source.health().fetches.limit() > Duration::ZERO);
}

#[test]
fn chunks_that_will_be_read_are_decoded_before_and_once() {
    let all = fixture("zarr.json");
    let row = all.as_array().unwrap().iter().find(|row| row["name"] == "3 zstd").unwrap();
    let mut tree = array_tree(row);
    tree.files.insert("_METADATA".to_owned(), br#"{"tree_metadata": {"('x',)": {"key_metadata": [{"key": "x", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}}, "use_zarr3": true}"#.to_vec());
    let mut found = read(&tree, false, false).unwrap();
    let own = found.paths.len();
    let source = found.source(tree.source(&found.paths));
    let maps = source.maps().unwrap();
    let decoded = || (own..source.file_count()).map(FileId::at);
    for file in decoded() {
        maps.will_need(file, ByteSpan::new(3, 7).unwrap());
        maps.will_need(file, ByteSpan::new(0, 1 << 40).unwrap());
    }
    // No reader comes: other threads decode.
    let until = std::time::Instant::now() + Duration::from_secs(30);
    while source.chunks().unwrap().decoded_count() < own as u64 && std::time::Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(source.chunks().unwrap().decoded_count(), own as u64);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for file in decoded() {
                    source.maps().unwrap().will_need(file, ByteSpan::new(0, 12).unwrap());
                    let mut bytes = [0; 12];
                    source.read_into(file, 0, &mut bytes).unwrap();
                }
            });
        }
    });
    assert_eq!(source.chunks().unwrap().decoded_count(), own as u64);
    // A file that is lost is not decoded, and its reader is told.
    let error = SourceError::Lost { file: source.pin(FileId(0)).path.clone(), flaw: "lost".to_owned() };
    source.health().condemn(FileId(0), error);
    maps.will_need(FileId::at(own), ByteSpan::new(0, 12).unwrap());
    assert!(source.read_into(FileId::at(own), 0, &mut [0]).is_err());
}

/// What a changed checkpoint gives is right, or an error that names the array or the file.
fn right_or_named(tree: &MemoryTree, names: &[&str], what: &str) {
    match contents(tree, false) {
        Ok(found) => assert_eq!(found, expected(), "{what}"),
        Err(error) => assert!(names.iter().all(|name| error.contains(name)), "{what}: {error}"),
    }
}

#[test]
fn changed_descriptions_are_errors_that_name_the_array() {
    let (_, tree) = checkpoints().into_iter().find(|(name, _)| name == "files").unwrap();
    let path = "3/default/params.wq/.zarray";
    let text = String::from_utf8(tree.files[path].clone()).unwrap();
    let changes = [
        ("\"bfloat16\"", &["\"<f4\"", "\"<f8\"", "\"|O\"", "\"nonsense\"", "7", "[[\"a\",\"<f4\"]]"][..]),
        (
            "{\"id\":\"zstd\",\"level\":1}",
            &["null", "{\"id\":\"blosc\"}", "{\"id\":\"lz4\"}", "{\"id\":\"gzip\"}", "{}"],
        ),
        ("\"filters\":null", &["\"filters\":[{\"id\":\"delta\"}]", "\"filters\":7"]),
        (
            "\"chunks\":[2,4]",
            &["\"chunks\":[2,3]", "\"chunks\":[0,4]", "\"chunks\":[4,4]", "\"chunks\":[2,4,1]", "\"chunks\":[9e99,4]"],
        ),
        (
            "\"shape\":[4,8]",
            &["\"shape\":[4,9]", "\"shape\":[4]", "\"shape\":[-1,8]", "\"shape\":[4,99999999999999999999]"],
        ),
        ("\"zarr_format\":2", &["\"zarr_format\":3", "\"zarr_format\":\"2\""]),
        ("\"dimension_separator\":\".\"", &["\"dimension_separator\":\"/\"", "\"dimension_separator\":\"x\""]),
        ("\"order\":\"C\"", &["\"order\":\"K\""]),
    ];
    for (from, all) in changes {
        for to in all {
            let mut changed = tree.clone();
            let replaced = text.replace(from, to);
            assert_ne!(replaced, text, "{from}");
            changed.files.insert(path.to_owned(), replaced.into_bytes());
            let error = contents(&changed, false).expect_err(to);
            assert!(error.contains("params.wq"), "{to}: {error}");
        }
    }
    for len in 0..text.len() {
        let mut changed = tree.clone();
        changed.files.insert(path.to_owned(), text.as_bytes()[..len].to_vec());
        let error = contents(&changed, false).expect_err("cut");
        assert!(error.contains("params.wq") && error.contains(".zarray"), "{len}: {error}");
    }
}

#[test]
fn changed_chunks_are_right_or_errors_that_name_file_and_array() {
    for (name, tree) in checkpoints().into_iter().filter(|(name, _)| name == "files") {
        for (path, bytes) in
            tree.files.iter().filter(|(path, _)| path.contains("/params.") && !path.ends_with(".zarray"))
        {
            let array = path.split('/').nth(2).unwrap();
            let with = |bytes: Vec<u8>, what: &str| {
                let mut changed = tree.clone();
                changed.files.insert(path.clone(), bytes);
                right_or_named(&changed, &[array, path], &format!("{name} {path} {what}"));
            };
            for len in 0..bytes.len() {
                with(bytes[..len].to_vec(), "cut");
            }
            with([bytes.as_slice(), &[0]].concat(), "longer");
            with([bytes.as_slice(), bytes.as_slice()].concat(), "doubled");
            with(vec![0; bytes.len()], "zeros");
            for (other, theirs) in
                tree.files.iter().filter(|(other, _)| !other.contains(array) && other.contains("/params."))
            {
                with(theirs.clone(), &format!("as {other}"));
            }
        }
    }
    // Lost, renamed or surplus files of a database and its descriptions.
    for (name, tree) in checkpoints() {
        for path in tree.files.keys().filter(|path| path.contains("/d/") || path.ends_with(".zarray")) {
            let mut changed = tree.clone();
            let bytes = changed.files.remove(path).unwrap();
            right_or_named(&changed, &[], &format!("{name} {path} lost"));
            for len in [0, bytes.len() / 2, bytes.len() - 1] {
                changed.files.insert(path.clone(), bytes[..len].to_vec());
                let file = path.rsplit('/').next().unwrap();
                right_or_named(&changed, &[file], &format!("{name} {path} cut to {len}"));
            }
        }
    }
}
