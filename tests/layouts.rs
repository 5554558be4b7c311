//! Layouts as data: MaxText's families against digests of what its own converter made, users' files, and every way of being
//! wrong with its message.
//!
//! `tests/fixtures/maxtext/FAMILY/hf` is a tiny repository; `scanned.jsonl` and `unscanned.jsonl` beside it say of each leaf of
//! the checkpoint that MaxText 0.2.5's `to_maxtext` wrote for it (bfloat16) its name, shape, dtype, the SHA-256 of its
//! elements, and its logical axes and partition spec on the mesh `fsdp=4,tensor=2`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    plan::{Layout, Mesh, Plan, PlanError, ViewOptions},
    read::EngineOptions,
    tensor::DType,
    volume::{FileSystem, ViewPlan, Volume, VolumeOptions},
};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/maxtext").join(family)
}

fn open(path: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(path.to_str().unwrap(), &OpenOptions::default()).unwrap())
}

/// What the converter made: facts about the whole, and one object per leaf.
fn expected(family: &str, scanned: bool) -> (Value, Vec<Value>) {
    let name = if scanned { "scanned.jsonl" } else { "unscanned.jsonl" };
    let text = std::fs::read_to_string(fixture(family).join(name)).unwrap();
    let mut lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    (lines.next().unwrap(), lines.collect())
}

fn options(scanned: bool, mesh: &str, facts: &Value) -> ViewOptions {
    let layout = Layout::find(if scanned { "maxtext" } else { "maxtext-unscanned" }).unwrap();
    let mut set = BTreeMap::new();
    if facts["vocab_size"] != facts["hf_vocab_size"] {
        set.insert("vocab_size".to_owned(), facts["vocab_size"].to_string());
    }
    ViewOptions { layout, mesh: Mesh::parse(mesh).unwrap(), set, ..ViewOptions::default() }
}

fn volume(checkpoint: &Arc<Checkpoint>, plan: Plan, tile_cache_bytes: usize) -> Volume {
    let views = vec![ViewPlan { name: String::new(), plan: Arc::new(plan) }];
    let engine = EngineOptions { tile_cache_bytes, workers: 1 };
    Volume::new(Arc::clone(checkpoint), views, VolumeOptions { engine, ..VolumeOptions::default() }).unwrap()
}

/// A file's bytes, read in requests of `step` bytes.
fn read(volume: &Volume, path: &str, step: usize) -> Vec<u8> {
    let attr = volume.resolve(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let opened = volume.open(attr.ino).unwrap();
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < attr.size_bytes {
        let before = bytes.len();
        volume
            .read(attr.ino, opened.handle, before as u64, step, &mut |part| bytes.extend_from_slice(part))
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(bytes.len() > before, "{path} ends at {before} of {}", attr.size_bytes);
    }
    volume.release(attr.ino, opened.handle);
    bytes
}

fn digest(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").unwrap();
        hex
    })
}

/// The elements of `region` of a whole tensor of this shape.
fn cut(whole: &[u8], shape: &[u64], ranges: &[std::ops::Range<u64>], width: u64) -> Vec<u8> {
    let mut offsets = vec![0u64];
    for (extent, range) in shape.iter().zip(ranges) {
        offsets = offsets.iter().flat_map(|at| range.clone().map(move |index| at * extent + index)).collect();
    }
    let byte = |at: u64| usize::try_from(at * width).unwrap();
    offsets.iter().flat_map(|at| whole[byte(*at)..byte(at + 1)].iter().copied()).collect()
}

fn check_family(family: &str, scanned: bool) {
    let (facts, leaves) = expected(family, scanned);
    let checkpoint = open(&fixture(family).join("hf"));
    // One key-value head does not split in two.
    let mesh = if family == "gemma4" { "fsdp=4" } else { "fsdp=4,tensor=2" };
    let options = options(scanned, mesh, &facts);
    let plan = Plan::build(&checkpoint, &options).unwrap_or_else(|error| panic!("{family}: {error}"));
    let names: Vec<&str> = plan.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut wanted: Vec<&str> = leaves.iter().map(|leaf| leaf["name"].as_str().unwrap()).collect();
    wanted.sort_unstable();
    assert_eq!(names, wanted, "{family}");
    // MaxText configures its model by what the checkpoint says of itself.
    assert_eq!(plan.is_scanned(), scanned, "{family}");
    let small = volume(&checkpoint, plan.clone(), 0);
    let large = volume(&checkpoint, plan.clone(), 64 << 20);
    for leaf in &leaves {
        let name = leaf["name"].as_str().unwrap();
        let tensor = plan.tensors.iter().find(|tensor| tensor.name == name).unwrap();
        let shape = tensor.view.shape();
        let rank = shape.rank();
        assert_eq!(serde_json::json!(shape.extents()), leaf["shape"], "{family} {name}");
        assert_eq!(tensor.view.dtype().code(), leaf["dtype"], "{family} {name}");
        // No annotation is no names; a name for no axis is null.
        let axes: Vec<Value> = tensor
            .logical
            .iter()
            .map(|name| if name.is_empty() { Value::Null } else { name.as_str().into() })
            .collect();
        let annotated = leaf["axes"].as_array().cloned().unwrap_or_default();
        assert_eq!(axes, annotated, "{family} {name}");
        if family != "gemma4" {
            let mut spec = leaf["spec"].as_array().cloned().unwrap_or_default();
            spec.resize(rank, Value::Null);
            assert_eq!(plan.spec(tensor).to_json(rank, &plan.mesh), Value::Array(spec), "{family} {name}");
        }
        let path = name.replace('.', "/");
        let whole = read(&large, &format!("full/{path}"), 1 << 20);
        assert_eq!(digest(&whole), leaf["sha256"], "{family} {name}: {}", tensor.view);
        assert_eq!(read(&small, &format!("full/{path}"), 1000), whole, "{family} {name} in small requests");
        let width = tensor.view.dtype().element_bytes().unwrap();
        for device in 0..plan.mesh.devices() {
            let ranges: Vec<_> = plan.region(tensor, device).ranges().collect();
            let shard = read(&large, &format!("dev{device}/{path}"), 4096);
            assert_eq!(shard, cut(&whole, shape.extents(), &ranges, width), "{family} dev{device} {name}");
        }
    }
}

macro_rules! families {
    ($($test:ident: $family:literal;)*) => {$(
        mod $test {
            #[test]
            fn scanned_equals_the_converter() {
                super::check_family($family, true);
            }

            #[test]
            fn unscanned_equals_the_converter() {
                super::check_family($family, false);
            }
        }
    )*};
}

families! {
    deepseek2: "deepseek2";
    deepseek3: "deepseek3";
    gemma2: "gemma2";
    gemma3: "gemma3";
    gemma4: "gemma4";
    gpt_oss: "gpt-oss";
    llama3_1: "llama3.1";
    mixtral: "mixtral";
    olmo3: "olmo3";
    qwen2_5: "qwen2.5";
    qwen3: "qwen3";
    qwen3_moe: "qwen3-moe";
    qwen3_next: "qwen3-next";
}
