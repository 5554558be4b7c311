//! Versions of weights that a run publishes as differences, against versions that are made here.

use std::{collections::BTreeMap, fs, path::Path};

use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    format::{
        delta::DeltaFormat,
        safetensors::{DATA_ALIGNMENT, write_header},
    },
    tensor::DType,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::views::Choices;

/// Names and bytes.
type Tensors = BTreeMap<String, Vec<u8>>;

fn write(path: &Path, dtype: DType, tensors: &Tensors, metadata: &[(&str, &str)]) {
    let width = if dtype == DType::U8 { 1 } else { 2 };
    let shapes: Vec<[u64; 1]> = tensors.values().map(|bytes| [bytes.len() as u64 / width]).collect();
    let rows = tensors.keys().zip(&shapes).map(|(name, shape)| (name.as_str(), dtype, &shape[..]));
    let header = write_header(rows, metadata, DATA_ALIGNMENT).unwrap();
    fs::write(path, [header.bytes, tensors.values().flatten().copied().collect()].concat()).unwrap();
}

/// A run: a base, and versions after it.
struct PublishedRun {
    dir: TempDir,
    tensors: Tensors,
}

impl PublishedRun {
    fn new(choices: &mut Choices) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = |len: u64| (0..len).map(|_| u8::try_from(choices.below(256)).unwrap()).collect();
        let tensors: Tensors =
            [("a", 64), ("b", 6), ("c", 4_000), ("d", 2)].map(|(name, len)| (name.to_owned(), bytes(len))).into();
        fs::create_dir(dir.path().join("base")).unwrap();
        fs::create_dir(dir.path().join("run")).unwrap();
        write(&dir.path().join("base/model.safetensors"), DType::BF16, &tensors, &[]);
        fs::write(dir.path().join("base/config.json"), "{}").unwrap();
        Self { dir, tensors }
    }

    fn place(&self, version: u64) -> std::path::PathBuf {
        self.dir.path().join(format!("run/weight_v{version:06}"))
    }

    /// Changes tensors, and publishes their differences.
    fn publish(&mut self, version: u64, formats: [&str; 3], choices: &mut Choices) {
        let [encoding, compression, checksum] = formats;
        let metadata = json!({"version": format!("{version:06}"), "base_version": format!("{:06}", version - 1),
            "delta_encoding": encoding, "compression_format": compression, "checksum_format": checksum});
        let format = DeltaFormat::parse(&metadata).unwrap();
        let (mut differences, mut digests) = (Tensors::new(), Vec::new());
        for (name, bytes) in &mut self.tensors {
            if choices.below(3) == 0 {
                continue;
            }
            let old = bytes.clone();
            for _ in 0..choices.below(5) {
                let at = choices.index(old.len());
                bytes[at] = bytes[at].wrapping_add(1);
            }
            let changed: Vec<usize> = (0..old.len()).filter(|at| old[*at] != bytes[*at]).collect();
            let difference: Vec<u8> = if encoding == "xor" {
                old.iter().zip(&*bytes).map(|(old, new)| old ^ new).collect()
            } else {
                let numbers = std::iter::once(changed.len()).chain(changed.iter().copied());
                let numbers = numbers.flat_map(|number| u32::try_from(number).unwrap().to_le_bytes());
                numbers.chain(changed.iter().map(|at| bytes[*at])).collect()
            };
            let stored = if compression == "zstd" { zstd::encode_all(&difference[..], 1).unwrap() } else { difference };
            differences.insert(name.clone(), stored);
            digests.push((name.clone(), format.digest(bytes)));
        }
        let digests: Vec<(&str, &str)> = digests.iter().map(|(name, digest)| (&**name, &**digest)).collect();
        fs::create_dir(self.place(version)).unwrap();
        let weight_map: Value = differences.keys().map(|name| (name.clone(), json!("m.safetensors"))).collect();
        write(&self.place(version).join("m.safetensors"), DType::U8, &differences, &digests);
        self.write_index(version, &json!({"metadata": metadata, "weight_map": weight_map}));
    }

    fn write_index(&self, version: u64, index: &Value) {
        fs::write(self.place(version).join("model.safetensors.index.json"), index.to_string()).unwrap();
    }

    fn index(&self, version: u64) -> Value {
        serde_json::from_slice(&fs::read(self.place(version).join("model.safetensors.index.json")).unwrap()).unwrap()
    }

    fn open(&self, version: u64) -> Result<Checkpoint, String> {
        let base = self.dir.path().join("base").to_str().map(str::to_owned);
        let options = OpenOptions { base, ..OpenOptions::default() };
        Checkpoint::open(self.place(version).to_str().unwrap(), &options).map_err(|error| error.to_string())
    }

    fn refused(&self, version: u64, expected: &str) {
        let error = self.open(version).err().unwrap_or_else(|| panic!("opened, expected {expected}"));
        assert!(error.contains(expected), "{error}");
    }
}

/// The bytes of all tensors; also by the slow decoder.
fn read(checkpoint: &Checkpoint) -> Result<Tensors, String> {
    let source = checkpoint.source();
    let mut found = Tensors::new();
    for (_, info) in checkpoint.tensors() {
        let mut bytes = vec![0; usize::try_from(info.span().len()).unwrap()];
        source.read_into(info.file(), info.span().start(), &mut bytes).map_err(|error| error.to_string())?;
        source.check(info.file()).unwrap();
        let mut again = vec![1; bytes.len()];
        let chunks = source.chunks().unwrap();
        chunks.decode_by_definition(info.file(), info.span().start(), &mut again).unwrap();
        assert_eq!(bytes, again, "{}", info.name);
        found.insert(info.name.to_owned(), bytes);
    }
    Ok(found)
}

const FORMATS: [[&str; 3]; 4] = [
    ["xor", "zstd", "xxh3-128"],
    ["overwrite", "zstd", "blake3"],
    ["xor", "none", "adler32"],
    ["overwrite", "none", "xxh3-128"],
];

#[test]
fn a_version_is_its_base_with_all_differences() {
    let mut choices = Choices::new((0..20_000u32).map(|n| n.wrapping_mul(2_654_435_761)).collect());
    let mut run = PublishedRun::new(&mut choices);
    let mut versions = Vec::new();
    for version in 1..=60 {
        run.publish(version, choices.of(&FORMATS), &mut choices);
        versions.push(run.tensors.clone());
    }
    for (version, expected) in (1..).zip(&versions).filter(|(version, _)| [1, 2, 17, 60].contains(version)) {
        let checkpoint = run.open(version).unwrap();
        assert!(read(&checkpoint).unwrap() == *expected, "version {version}");
        // Each changed tensor once, however long the chain.
        assert!(checkpoint.source().chunks().unwrap().decoded_count() <= 4);
    }
    // A whole version takes the place of the base and of everything before it.
    fs::remove_dir_all(run.place(30)).unwrap();
    fs::create_dir(run.place(30)).unwrap();
    write(&run.place(30).join("model.safetensors"), DType::BF16, &versions[29], &[]);
    fs::remove_dir_all(run.place(29)).unwrap();
    assert!(read(&run.open(31).unwrap()).unwrap() == versions[30]);
}

#[test]
fn what_makes_no_version_is_refused_by_name() {
    let mut choices = Choices::new((0..9_000u32).map(|n| n.wrapping_mul(2_654_435_761)).collect());
    let mut run = PublishedRun::new(&mut choices);
    for version in 1..=4 {
        run.publish(version, FORMATS[0], &mut choices);
    }
    let good = run.index(3);
    for (key, value, expected) in [
        (
            "base_version",
            json!("000001"),
            "weight_v000003: base_version: expected 000002, the version before it, found 000001",
        ),
        ("base_version", json!("000000"), "weight_v000003: base_version: expected 000002"),
        ("base_version", json!("x"), "base_version: expected a number of a version, found \"x\""),
        ("version", json!("000004"), "version: expected 000003, as its directory is called, found 000004"),
        ("delta_encoding", json!("add"), "delta_encoding: expected xor or overwrite, found \"add\""),
        ("compression_format", json!("lz4"), "compression_format: expected zstd or none, found \"lz4\""),
        ("checksum_format", json!("sha1"), "checksum_format: expected xxh3-128 or blake3 or adler32, found \"sha1\""),
        ("checksum_format", json!("blake3"), "expected a digest of its bytes in the file's metadata, found"),
    ] {
        let mut index = good.clone();
        index["metadata"][key] = value;
        run.write_index(3, &index);
        run.refused(4, expected);
    }
    let mut index = good.clone();
    let map = index["weight_map"].as_object_mut().unwrap();
    map.insert("more".to_owned(), json!("m.safetensors"));
    run.write_index(3, &index);
    run.refused(4, "that the index names there, found");
    index["weight_map"]["more"] = json!("n.safetensors");
    run.write_index(3, &index);
    run.refused(3, "names \"n.safetensors\", which is not there");
    run.write_index(3, &good);
    run.open(4).unwrap();
    let without = Checkpoint::open(run.place(4).to_str().unwrap(), &OpenOptions::default());
    assert!(without.err().unwrap().to_string().contains("--base MODEL gives the model that the run began with"));

    // A base that lacks a tensor, or is another model's.
    let base = run.dir.path().join("base/model.safetensors");
    let bytes = fs::read(&base).unwrap();
    let other = Tensors::from([("e".to_owned(), vec![0; 64])]);
    write(&base, DType::BF16, &other, &[]);
    run.refused(4, "a difference from a tensor that the base lacks");
    let mut changed = bytes.clone();
    let last = changed.len() - 40;
    changed[last] ^= 1;
    fs::write(&base, &changed).unwrap();
    let error = read(&run.open(4).unwrap()).unwrap_err();
    assert!(error.contains("make tensor c of version ") && error.contains("expected the digest"), "{error}");
    fs::write(&base, &bytes).unwrap();

    // A damaged difference names its own version, whatever is read.
    let file = run.place(2).join("m.safetensors");
    let published = fs::read(&file).unwrap();
    let mut changed = published.clone();
    let last = changed.len() - 1;
    changed[last] ^= 1;
    fs::write(&file, &changed).unwrap();
    let error = read(&run.open(4).unwrap()).unwrap_err();
    assert!(error.contains("of version 2 (bytes"), "{error}");
    fs::write(&file, &published).unwrap();
    read(&run.open(4).unwrap()).unwrap();

    fs::remove_dir_all(run.place(2)).unwrap();
    run.refused(4, "builds on version 000002, which is not in");
    fs::remove_dir_all(run.place(1)).unwrap();
    run.refused(4, "expected the index of --base to say that it is this version, found no version");
}
