//! Layouts as data: MaxText's families against digests of its own converter's output, users' files, and every error with
//! its message.
//!
//! `tests/fixtures/maxtext/FAMILY/hf` is a tiny repository. `scanned.jsonl` and `unscanned.jsonl` beside it describe each leaf of
//! the checkpoint that MaxText 0.2.5's `to_maxtext` wrote for it (bfloat16): its name, shape, dtype, the SHA-256 of its
//! elements, and its logical axes and partition spec on the mesh `fsdp=4,tensor=2`.
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test fails by panicking")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::common::repo;
use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    config::{LayoutChoice, value},
    format::safetensors::{DATA_ALIGNMENT, write_header},
    plan::{Layout, LayoutFile, LogicalRule, Mesh, Pattern, Plan, PlanError, ShardRule, Sharding, ViewOptions},
    read::EngineOptions,
    tensor::{DType, Shape, SourceTensor, View},
    volume::{FileSystem, ViewPlan, Volume, VolumeOptions, unavailable},
};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/maxtext").join(family)
}

fn open(path: &Path) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(path.to_str().unwrap(), &OpenOptions::default()).unwrap())
}

/// The converter's output: facts about the whole, and one object per leaf.
fn expected(family: &str, scanned: bool) -> (Value, Vec<Value>) {
    let name = if scanned { "scanned.jsonl" } else { "unscanned.jsonl" };
    let text = std::fs::read_to_string(fixture(family).join(name)).unwrap();
    let mut lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    (lines.next().unwrap(), lines.collect())
}

fn options(scanned: bool, mesh: &str, facts: &Value) -> ViewOptions {
    let layout = repo::layout(if scanned { "maxtext" } else { "maxtext-unscanned" });
    let mut set = BTreeMap::new();
    if facts["vocab_size"] != facts["hf_vocab_size"] {
        set.insert("vocab_size".to_owned(), facts["vocab_size"].to_string());
    }
    ViewOptions { layout, mesh: Mesh::parse(mesh).unwrap(), set, ..ViewOptions::default() }
}

fn volume(checkpoint: &Arc<Checkpoint>, plan: Plan, tile_cache_bytes: usize) -> Volume {
    let views = vec![ViewPlan { name: String::new(), plan: Arc::new(plan) }];
    let engine = EngineOptions { tile_cache_bytes, workers: 1, ..EngineOptions::default() };
    Volume::new(Arc::clone(checkpoint), views, VolumeOptions { engine, ..VolumeOptions::default() }).unwrap()
}

/// A file's bytes, read in requests of `step` bytes.
fn read(volume: &Volume, path: &str, step: usize) -> Vec<u8> {
    let attr = volume.resolve(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let opened = volume.open(attr.ino).unwrap();
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < attr.size_bytes {
        let before = bytes.len();
        let _ = volume
            .read(attr.ino, opened.handle, before as u64, step, &mut |part| {
                bytes.extend(part.to_vec().unwrap());
                ckfs::source::Replied::new()
            })
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
    // One key-value head does not split in two parts.
    let mesh = if family == "gemma4" { "fsdp=4" } else { "fsdp=4,tensor=2" };
    let options = options(scanned, mesh, &facts);
    let plan = Plan::build(&checkpoint, &options).unwrap_or_else(|error| panic!("{family}: {error}"));
    let names: Vec<&str> = plan.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut wanted: Vec<&str> = leaves.iter().map(|leaf| leaf["name"].as_str().unwrap()).collect();
    wanted.sort_unstable();
    assert_eq!(names, wanted, "{family}");
    // MaxText configures its model by the checkpoint's own metadata.
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
        // A missing annotation means no names; null is the name of no axis.
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

/// Specs that a mesh refuses because of their sizes still follow the rules.
#[test]
fn specs_follow_the_rules_for_any_sizes() {
    for scanned in [true, false] {
        let (facts, leaves) = expected("gemma4", scanned);
        let checkpoint = open(&fixture("gemma4").join("hf"));
        let plan = Plan::build(&checkpoint, &options(scanned, "fsdp=4", &facts)).unwrap();
        let mesh = Mesh::parse("fsdp=4,tensor=2").unwrap();
        for (leaf, tensor) in leaves.iter().map(|leaf| (leaf, find(&plan, leaf["name"].as_str().unwrap()))) {
            let spec = plan.logical_rules.as_ref().unwrap().spec(&tensor.logical, &mesh);
            assert_eq!(spec.to_json(tensor.view.shape().rank(), &mesh), leaf["spec"], "{}", tensor.name);
        }
        let error = Plan::build(&checkpoint, &options(scanned, "fsdp=4,tensor=2", &facts)).unwrap_err();
        let leaf = if scanned { "params.decoder.scanned_blocks.global_layer" } else { "params.decoder.layers_5" };
        let shape = if scanned { "axis 2 of [48, 2, 1, 16]" } else { "axis 1 of [48, 1, 16]" };
        let expected = format!("{leaf}.self_attention.key.kernel: {shape} does not split evenly in 2 parts");
        assert!(error.to_string().contains(&expected), "{error}");
    }
}

fn find<'a>(plan: &'a Plan, name: &str) -> &'a ckfs::plan::PlannedTensor {
    plan.tensors.iter().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no {name}"))
}

// Generated repositories: other sizes, dtypes and edge values, compared with formulas of the rules' meaning.

/// A repository in a temporary directory, and its tensors as f32.
struct Repo {
    directory: tempfile::TempDir,
    tensors: BTreeMap<String, (Vec<u64>, Vec<f32>)>,
}

/// Bits of a float, from a generator that prefers the edges: subnormals, the smallest normal values, infinities, NaN.
fn edgy(state: &mut u64) -> f32 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    let bits = u32::try_from(*state >> 32).unwrap();
    match bits % 8 {
        0 => f32::from_bits(bits & 0x80ff_ffff),
        1 => f32::from_bits((bits & 0x8000_ffff) | 0x7f80_0000),
        2 => f32::from_bits(bits & 0x81ff_ffff),
        _ => f32::from_bits((bits & 0x80ff_ffff) | 0x3f00_0000),
    }
}

impl Repo {
    fn new(config: &Value, shapes: &[(String, Vec<u64>)], dtype: DType) -> Self {
        use std::io::Write as _;
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        let list = shapes.iter().map(|(name, shape)| (name.as_str(), dtype, shape.as_slice()));
        let header = write_header(list, &[("format", "pt")], DATA_ALIGNMENT).unwrap();
        let mut file = std::fs::File::create(directory.path().join("model.safetensors")).unwrap();
        file.write_all(&header.bytes).unwrap();
        let mut tensors = BTreeMap::new();
        let mut state = 1;
        for (name, shape) in shapes {
            let elements = usize::try_from(shape.iter().product::<u64>()).unwrap();
            let mut values = Vec::with_capacity(elements);
            for _ in 0..elements {
                let value = edgy(&mut state);
                let value = match dtype {
                    DType::F32 => {
                        file.write_all(&value.to_le_bytes()).unwrap();
                        value
                    }
                    DType::F16 => {
                        let value = half::f16::from_f32(value);
                        file.write_all(&value.to_le_bytes()).unwrap();
                        value.to_f32()
                    }
                    DType::BF16 => {
                        let value = half::bf16::from_f32(value);
                        file.write_all(&value.to_le_bytes()).unwrap();
                        value.to_f32()
                    }
                    other => panic!("{other}"),
                };
                values.push(value);
            }
            tensors.insert(name.clone(), (shape.clone(), values));
        }
        Self { directory, tensors }
    }

    /// An element, by its index on each axis.
    fn at(&self, name: &str, index: &[u64]) -> f32 {
        let (shape, values) = self.tensors.get(name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(shape.len(), index.len());
        let flat = shape.iter().zip(index).fold(0, |flat, (extent, index)| flat * extent + index);
        values[usize::try_from(flat).unwrap()]
    }

    fn checkpoint(&self) -> Arc<Checkpoint> {
        open(self.directory.path())
    }
}

/// The type in which a cast mount stores values.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Saved {
    F32,
    Bf16,
}

impl Saved {
    fn round(self, value: f32) -> f32 {
        match self {
            Self::F32 => value,
            Self::Bf16 => half::bf16::from_f32(value).to_f32(),
        }
    }

    fn options(self, scanned: bool, set: &[(&str, &str)]) -> ViewOptions {
        let layout = repo::layout(if scanned { "maxtext" } else { "maxtext-unscanned" });
        let set = set.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let dtype = (self == Self::F32).then_some(DType::F32);
        ViewOptions { layout, dtype, set, ..ViewOptions::default() }
    }
}

/// All elements of a leaf as f32, with its shape. All NaNs are equal.
fn leaf(volume: &Volume, plan: &Plan, name: &str) -> (Vec<u64>, Vec<f32>) {
    let tensor = find(plan, name);
    let bytes = read(volume, &format!("full/{}", plan.path(tensor).join("/")), 1 << 20);
    let values = match tensor.view.dtype() {
        DType::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        DType::BF16 => {
            bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect()
        }
        other => panic!("{name} is {other}"),
    };
    (tensor.view.shape().extents().to_vec(), values)
}

/// Compares a leaf with a formula over its indices.
fn compare(volume: &Volume, plan: &Plan, name: &str, shape: &[u64], formula: &dyn Fn(&[u64]) -> f32) {
    let (found_shape, found) = leaf(volume, plan, name);
    assert_eq!(found_shape, shape, "{name}");
    let mut index = vec![0u64; shape.len()];
    for found in found {
        let expected = formula(&index);
        let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
        assert!(same, "{name} at {index:?}: expected {expected:e}, found {found:e}");
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
}

/// Subnormals as zero of the same sign.
fn flush(value: f32) -> f32 {
    if value.is_subnormal() { 0f32.copysign(value) } else { value }
}

fn llama(
    heads: u64,
    kv_heads: u64,
    d: u64,
    hidden: u64,
    ffn: u64,
    vocab: u64,
    layers: u64,
) -> (Value, Vec<(String, Vec<u64>)>) {
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": d, "num_hidden_layers": layers, "vocab_size": vocab, "intermediate_size": ffn,
        "tie_word_embeddings": false,
    });
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![vocab, hidden]),
        ("lm_head.weight".to_owned(), vec![vocab, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for layer in 0..layers {
        let names = [
            ("self_attn.q_proj", vec![heads * d, hidden]),
            ("self_attn.k_proj", vec![kv_heads * d, hidden]),
            ("self_attn.v_proj", vec![kv_heads * d, hidden]),
            ("self_attn.o_proj", vec![hidden, heads * d]),
            ("mlp.gate_proj", vec![ffn, hidden]),
            ("mlp.up_proj", vec![ffn, hidden]),
            ("mlp.down_proj", vec![hidden, ffn]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ];
        shapes.extend(names.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    (config, shapes)
}

#[test]
fn llama_of_any_size_and_dtype() {
    let rows = [
        // heads, key-value heads, head size, hidden, ffn, vocabulary, layers, padded vocabulary
        (5, 5, 6, 22, 9, 37, 4, 41),
        (6, 2, 8, 48, 33, 101, 3, 97),
        (4, 1, 2, 7, 5, 11, 1, 11),
    ];
    for (heads, kv_heads, d, hidden, ffn, vocab, layers, padded) in rows {
        let (config, shapes) = llama(heads, kv_heads, d, hidden, ffn, vocab, layers);
        for (source, saved) in [
            (DType::BF16, Saved::Bf16),
            (DType::F32, Saved::Bf16),
            (DType::F16, Saved::Bf16),
            (DType::F32, Saved::F32),
            (DType::F16, Saved::F32),
        ] {
            let repo = Repo::new(&config, &shapes, source);
            let checkpoint = repo.checkpoint();
            let set = padded.to_string();
            let plan = Plan::build(&checkpoint, &saved.options(true, &[("vocab_size", &set)])).unwrap();
            let volume = volume(&checkpoint, plan.clone(), 64 << 20);
            let w = |layer: u64, name: &str, index: &[u64]| {
                saved.round(repo.at(&format!("model.layers.{layer}.{name}.weight"), index))
            };
            #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "what numpy does")]
            let scale = (1.0 / (d as f64).sqrt()) as f32;
            // Interleaved position 2i + p of a head is row i + p d/2 of it.
            let row = |head: u64, at: u64| head * d + at / 2 + (at % 2) * (d / 2);
            let compare = |name: &str, shape: &[u64], formula: &dyn Fn(&[u64]) -> f32| {
                compare(&volume, &plan, &format!("params.{name}"), shape, formula);
            };
            let layer = "decoder.layers.self_attention";
            compare(&format!("{layer}.query.kernel"), &[hidden, layers, heads, d], &|at| {
                let value = w(at[1], "self_attn.q_proj", &[row(at[2], at[3]), at[0]]);
                saved.round(flush(flush(value) * scale))
            });
            compare(&format!("{layer}.key.kernel"), &[hidden, layers, kv_heads, d], &|at| {
                w(at[1], "self_attn.k_proj", &[row(at[2], at[3]), at[0]])
            });
            compare(&format!("{layer}.value.kernel"), &[hidden, layers, kv_heads, d], &|at| {
                w(at[1], "self_attn.v_proj", &[at[2] * d + at[3], at[0]])
            });
            compare(&format!("{layer}.out.kernel"), &[heads, layers, d, hidden], &|at| {
                w(at[1], "self_attn.o_proj", &[at[3], at[0] * d + at[2]])
            });
            compare("decoder.layers.mlp.wo.kernel", &[ffn, layers, hidden], &|at| {
                w(at[1], "mlp.down_proj", &[at[2], at[0]])
            });
            compare("decoder.layers.pre_self_attention_layer_norm.scale", &[hidden, layers], &|at| {
                w(at[1], "input_layernorm", &[at[0]])
            });
            let row = |name: &'static str| {
                let repo = &repo;
                move |row: u64, column: u64| {
                    if row < vocab { saved.round(repo.at(name, &[row, column])) } else { 0.0 }
                }
            };
            let (embedding, head) = (row("model.embed_tokens.weight"), row("lm_head.weight"));
            compare("token_embedder.embedding", &[padded, hidden], &|at| embedding(at[0], at[1]));
            compare("decoder.logits_dense.kernel", &[hidden, padded], &|at| head(at[1], at[0]));
        }
    }
}

fn gemma3(layers: u64) -> (Value, Vec<(String, Vec<u64>)>) {
    // As published: the configuration leaves out members with usual values.
    let config = serde_json::json!({
        "model_type": "gemma3",
        "text_config": { "model_type": "gemma3_text", "hidden_size": 20, "num_hidden_layers": layers },
    });
    let mut shapes = vec![
        ("language_model.model.embed_tokens.weight".to_owned(), vec![13, 20]),
        ("language_model.model.norm.weight".to_owned(), vec![20]),
        ("vision_tower.vision_model.post_layernorm.weight".to_owned(), vec![3]),
    ];
    for layer in 0..layers {
        let names = [
            ("self_attn.q_proj", vec![18, 20]),
            ("self_attn.k_proj", vec![6, 20]),
            ("self_attn.v_proj", vec![6, 20]),
            ("self_attn.o_proj", vec![20, 18]),
            ("self_attn.q_norm", vec![6]),
            ("self_attn.k_norm", vec![6]),
            ("mlp.gate_proj", vec![4, 20]),
            ("mlp.up_proj", vec![4, 20]),
            ("mlp.down_proj", vec![20, 4]),
            ("input_layernorm", vec![20]),
            ("post_attention_layernorm", vec![20]),
            ("pre_feedforward_layernorm", vec![20]),
            ("post_feedforward_layernorm", vec![20]),
        ];
        shapes.extend(names.map(|(name, shape)| (format!("language_model.model.layers.{layer}.{name}.weight"), shape)));
    }
    (config, shapes)
}

#[test]
fn gemma3_with_any_number_of_layers() {
    for layers in [5, 6, 7, 14] {
        let (config, shapes) = gemma3(layers);
        for (source, saved) in [(DType::F32, Saved::Bf16), (DType::BF16, Saved::Bf16), (DType::F16, Saved::F32)] {
            let repo = Repo::new(&config, &shapes, source);
            let checkpoint = repo.checkpoint();
            let plan = Plan::build(&checkpoint, &saved.options(true, &[("vocab_size", "10")])).unwrap();
            let volume = volume(&checkpoint, plan.clone(), 64 << 20);
            let w = |layer: u64, name: &str, index: &[u64]| {
                saved.round(repo.at(&format!("language_model.model.layers.{layer}.{name}.weight"), index))
            };
            let blocks = layers / 6;
            if blocks > 0 {
                for b in 0..6 {
                    let name = format!("params.decoder.layers.layers_{b}");
                    compare(&volume, &plan, &format!("{name}.pre_ffw_norm.scale"), &[20, blocks], &|at| {
                        w(6 * at[1] + b, "pre_feedforward_layernorm", &[at[0]]) + 1.0
                    });
                    compare(
                        &volume,
                        &plan,
                        &format!("{name}.self_attention.query.kernel"),
                        &[20, blocks, 3, 6],
                        &|at| w(6 * at[1] + b, "self_attn.q_proj", &[at[2] * 6 + at[3], at[0]]),
                    );
                }
            }
            for r in 0..layers % 6 {
                let name = format!("params.decoder.layers_remainder.layers_{r}.self_attention.key_norm.scale");
                compare(&volume, &plan, &name, &[6], &|at| w(6 * blocks + r, "self_attn.k_norm", at) + 1.0);
            }
            let norm = find(&plan, "params.decoder.decoder_norm.scale");
            assert_eq!(norm.view.dtype(), DType::F32);
            // The root of 20, rounded to bf16 first.
            let root = half::bf16::from_f32(20f32.sqrt()).to_f32();
            compare(&volume, &plan, "params.token_embedder.embedding", &[10, 20], &|at| {
                let value = saved.round(repo.at("language_model.model.embed_tokens.weight", at));
                saved.round(value * root)
            });
            assert_eq!(plan.tensors.len() as u64, 2 + 13 * (6 * blocks.min(1) + layers % 6));
        }
    }
}

/// Layers that are left over after blocks of six have sliding attention. The converter names them one by one; MaxText's own
/// model stacks them. Either comes back.
#[test]
fn gemma4_with_any_number_of_layers() {
    for layers in [4, 6, 8] {
        let config = serde_json::json!({
            "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "hidden_size": 8, "num_attention_heads": 2,
            "num_hidden_layers": layers, "intermediate_size": 5, "vocab_size": 9,
        });
        let mut shapes: Shapes =
            vec![("model.embed_tokens.weight".to_owned(), vec![9, 8]), ("model.norm.weight".to_owned(), vec![8])];
        for layer in 0..layers {
            let d = if layer % 6 == 5 { 4 } else { 2 };
            let rows: &[(&str, &[u64])] = &[
                ("self_attn.q_proj.weight", &[2 * d, 8]),
                ("self_attn.k_proj.weight", &[d, 8]),
                ("self_attn.v_proj.weight", &[d, 8]),
                ("self_attn.o_proj.weight", &[8, 2 * d]),
                ("self_attn.q_norm.weight", &[d]),
                ("self_attn.k_norm.weight", &[d]),
                ("input_layernorm.weight", &[8]),
                ("post_attention_layernorm.weight", &[8]),
                ("pre_feedforward_layernorm.weight", &[8]),
                ("post_feedforward_layernorm.weight", &[8]),
                ("layer_scalar", &[1]),
                ("mlp.gate_proj.weight", &[5, 8]),
                ("mlp.up_proj.weight", &[5, 8]),
                ("mlp.down_proj.weight", &[8, 5]),
            ];
            per_layer(&mut shapes, "model", layer, rows);
        }
        let repo = Repo::new(&config, &shapes, DType::BF16);
        let checkpoint = repo.checkpoint();
        for stacked in ["false", "true"] {
            let options = Saved::Bf16.options(true, &[("stacked_remainder", stacked)]);
            let plan = Plan::build(&checkpoint, &options).unwrap();
            let laid_out = volume(&checkpoint, plan.clone(), 1 << 20);
            let (blocks, left) = (layers / 6, layers % 6);
            let query = |layer: u64, row: u64, column: u64| {
                repo.at(&format!("model.layers.{layer}.self_attn.q_proj.weight"), &[row, column])
            };
            let name = |place: &str| format!("params.decoder.{place}.self_attention.query.kernel");
            let is_stacked = stacked == "true";
            if is_stacked && left > 0 {
                compare(&laid_out, &plan, &name("layers_remainder.local_layers"), &[8, left, 2, 2], &|at| {
                    query(6 * blocks + at[1], at[2] * 2 + at[3], at[0])
                });
            }
            for r in (0..left).filter(|_| !is_stacked) {
                compare(&laid_out, &plan, &name(&format!("layers_remainder.layers_{r}")), &[8, 2, 2], &|at| {
                    query(6 * blocks + r, at[1] * 2 + at[2], at[0])
                });
            }
            let groups = 2 * blocks.min(1) + if is_stacked { left.min(1) } else { left };
            assert_eq!(plan.tensors.len() as u64, 2 + 14 * groups, "{layers} {stacked}");

            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("leaves.safetensors");
            std::fs::write(&file, read(&laid_out, "safetensors/dev0.safetensors", 1 << 20)).unwrap();
            let config_from = Some(repo.directory.path().display().to_string());
            let options = OpenOptions { config_from, ..OpenOptions::default() };
            let trained = Arc::new(Checkpoint::open(file.to_str().unwrap(), &options).unwrap());
            let back = ViewOptions { layout: Layout::Hf, ..ViewOptions::default() };
            let plan = Plan::build(&trained, &back).unwrap_or_else(|error| panic!("{layers} {stacked}: {error}"));
            assert_eq!(plan.tensors.len(), shapes.len(), "{layers} {stacked}");
            let came_back = volume(&trained, plan.clone(), 1 << 20);
            // The embedding is multiplied, which the fixture's test compares.
            for (name, shape) in shapes.iter().filter(|(name, _)| !name.contains("embed")) {
                compare(&came_back, &plan, name, shape, &|at| repo.at(name, at));
            }
        }
    }
}

/// The axes that layers are stacked on, by the scan axis.
#[test]
fn impossible_sizes_are_refused() {
    let checkpoint = open(&fixture("llama3.1").join("hf"));
    let set = BTreeMap::from([("vocab_size".to_owned(), (1_u64 << 52).to_string())]);
    let layout = repo::layout("maxtext");
    let options = ViewOptions { layout, set, dtype: Some(DType::F64), ..ViewOptions::default() };
    let error = Plan::build(&checkpoint, &options).unwrap_err().to_string();
    assert!(error.contains("all tensors together have more than 2305843009213693952 bytes"), "{error}");
}

#[test]
fn layers_are_stacked_on_the_scan_axis() {
    let rows = [
        ("mixtral", "params.decoder.layers.self_attention.query.kernel", [[3, 48, 6, 8], [48, 3, 6, 8], [48, 6, 3, 8]]),
        // The axes of experts and layers come first for any scan axis.
        ("mixtral", "params.decoder.layers.MoeBlock_0.wi_0", [[4, 3, 48, 56], [4, 3, 48, 56], [4, 3, 48, 56]]),
    ];
    for (family, name, shapes) in rows {
        for (axis, shape) in shapes.iter().enumerate() {
            let mut options = options(true, "", &Value::Null);
            options.set.insert("param_scan_axis".to_owned(), axis.to_string());
            let plan = Plan::build(&open(&fixture(family).join("hf")), &options).unwrap();
            assert_eq!(find(&plan, name).view.shape().extents(), shape, "{name}");
        }
    }
    // A norm has too few axes for a scan axis of 2: its layers come first.
    let mut options = options(true, "", &Value::Null);
    options.set.insert("param_scan_axis".to_owned(), "2".to_owned());
    let plan = Plan::build(&open(&fixture("mixtral").join("hf")), &options).unwrap();
    let norm = find(&plan, "params.decoder.layers.pre_self_attention_layer_norm.scale");
    assert_eq!((norm.view.shape().extents(), norm.logical.join(" ")), (&[3, 48][..], "layers norm".to_owned()));
}

/// The old names hold, for each position of the pattern, the values that the nested ones hold on the axis of its positions.
#[test]
fn qwen3_next_before_its_pattern_was_nested() {
    let checkpoint = open(&fixture("qwen3-next").join("hf"));
    let mut old = options(true, "", &Value::Null);
    old.set.insert("to_maxtext".to_owned(), "0.2.4".to_owned());
    let plan = Plan::build(&checkpoint, &old).unwrap();
    assert!(plan.warnings.iter().any(|warning| warning.contains("has not been compared")), "{:?}", plan.warnings);
    assert!(plan.params.contains(&("to_maxtext".to_owned(), "0.2.4".to_owned())), "{:?}", plan.params);
    let nested = Plan::build(&checkpoint, &options(true, "", &Value::Null)).unwrap();
    let (old, new) = (volume(&checkpoint, plan.clone(), 1 << 20), volume(&checkpoint, nested.clone(), 1 << 20));
    for suffix in ["attention.in_proj_qkvz.kernel", "mlp.routed_experts.wo", "input_layernorm.scale"] {
        let (shape, whole) = leaf(&new, &nested, &format!("params.decoder.layers.local_layers.{suffix}"));
        let at = 2;
        for b in 0..3 {
            let (old_shape, stack) = leaf(&old, &plan, &format!("params.decoder.layers.layer_{b}.{suffix}"));
            let mut expected = shape.clone();
            assert_eq!(expected.remove(at), 3);
            assert_eq!(old_shape, expected);
            let inner = usize::try_from(shape[at + 1..].iter().product::<u64>()).unwrap();
            let picked: Vec<u32> =
                whole.chunks(inner).skip(b).step_by(3).flatten().map(|value| value.to_bits()).collect();
            assert_eq!(picked, stack.iter().map(|value| value.to_bits()).collect::<Vec<_>>(), "{suffix} {b}");
        }
    }
}

/// fp8 weights are multiplied by their scales before the rules see them, and the scales are not unexpected tensors.
#[test]
fn fp8_weights_are_dequantized() {
    use std::io::Write as _;
    let (mut config, shapes) = llama(2, 1, 4, 8, 5, 6, 1);
    config["quantization_config"] = serde_json::json!({"quant_method": "fp8", "weight_block_size": [3, 4]});
    let mut tensors: Vec<(String, DType, Vec<u64>)> = Vec::new();
    for (name, shape) in &shapes {
        if name.contains("proj") {
            tensors.push((name.clone(), DType::F8E4M3, shape.clone()));
            let scale = vec![shape[0].div_ceil(3), shape[1].div_ceil(4)];
            tensors.push((format!("{name}_scale_inv"), DType::F32, scale));
        } else {
            tensors.push((name.clone(), DType::BF16, shape.clone()));
        }
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let list = tensors.iter().map(|(name, dtype, shape)| (name.as_str(), *dtype, shape.as_slice()));
    let header = write_header(list, &[("format", "pt")], DATA_ALIGNMENT).unwrap();
    let mut file = std::fs::File::create(directory.path().join("model.safetensors")).unwrap();
    file.write_all(&header.bytes).unwrap();
    for (_, dtype, shape) in &tensors {
        for at in 0..shape.iter().product::<u64>() {
            let byte = u8::try_from(at % 120).unwrap();
            match dtype {
                DType::F8E4M3 => file.write_all(&[byte]).unwrap(),
                DType::F32 => file.write_all(&(0.3 + f32::from(byte)).to_le_bytes()).unwrap(),
                _ => file.write_all(&half::bf16::from_f32(f32::from(byte)).to_le_bytes()).unwrap(),
            }
        }
    }
    let checkpoint = open(directory.path());
    let plan = Plan::build(&checkpoint, &Saved::Bf16.options(false, &[])).unwrap();
    let volume = volume(&checkpoint, plan.clone(), 1 << 20);
    let fp8 = |byte: u64| {
        let (exponent, fraction) = (i32::try_from(byte >> 3).unwrap(), f32::from(u8::try_from(byte & 7).unwrap()));
        if exponent == 0 { fraction / 512.0 } else { (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7) }
    };
    compare(&volume, &plan, "params.decoder.layers_0.mlp.wo.kernel", &[5, 8], &|at| {
        // down_proj is [8, 5] in blocks of 3 by 4: 3 by 2 scales.
        let (row, column) = (at[1], at[0]);
        let scale = 0.3 + f32::from(u8::try_from(row / 3 * 2 + column / 4).unwrap());
        Saved::Bf16.round(fp8((row * 5 + column) % 120) * scale)
    });
}

// Layout files of users, and how they are refused.

fn with_layout(text: &str) -> Result<ViewOptions, PlanError> {
    let layout = Layout::File(Arc::new(LayoutFile::parse("my.toml", text)?));
    Ok(ViewOptions { layout, ..ViewOptions::default() })
}

fn refused(family: &str, text: &str) -> String {
    let checkpoint = open(&fixture(family).join("hf"));
    match with_layout(text).and_then(|options| Plan::build(&checkpoint, &options)) {
        Ok(plan) => panic!("not refused: {:?}", plan.tensors.len()),
        Err(error) => error.to_string(),
    }
}

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/layouts").join(name)
}

#[test]
fn the_example_of_other_names_works() {
    let layout = repo::layout(example("meta-llama.toml").to_str().unwrap());
    let checkpoint = open(&fixture("llama3.1").join("hf"));
    let mesh = Mesh::parse("tensor=2").unwrap();
    let plan = Plan::build(&checkpoint, &ViewOptions { layout, mesh, ..ViewOptions::default() }).unwrap();
    let volume = volume(&checkpoint, plan.clone(), 1 << 20);
    let wq = read(&volume, "full/layers.1.attention.wq.weight", 4096);
    let source = View::source(source(&checkpoint, "model.layers.1.self_attn.q_proj.weight"));
    let raw = bytes_of(&checkpoint, &source);
    // Row 2i + p of a head of 8 is row i + 4p.
    for row in 0..48usize {
        let from = row / 8 * 8 + row % 8 / 2 + row % 2 * 4;
        assert_eq!(wq[row * 96..][..96], raw[from * 96..][..96], "row {row}");
    }
    // Half of the rows of the query, half of the columns of the output.
    assert_eq!(read(&volume, "dev1/layers.1.attention.wq.weight", 4096), wq[24 * 96..]);
    assert_eq!(plan.region(find(&plan, "layers.0.attention.wo.weight"), 0).shape().extents(), [48, 24]);
    assert_eq!(plan.region(find(&plan, "layers.0.ffn_norm.weight"), 0).shape().extents(), [48]);
    assert_eq!(plan.tensors.len(), 3 + 9 * 3);
}

fn source(checkpoint: &Checkpoint, name: &str) -> SourceTensor {
    let id = checkpoint.find(name).unwrap();
    let info = checkpoint.tensor(id);
    SourceTensor { id, dtype: info.dtype, shape: Shape::try_new(info.shape).unwrap() }
}

fn bytes_of(checkpoint: &Checkpoint, view: &View) -> Vec<u8> {
    let info = checkpoint.tensor(view.as_source().unwrap().id);
    let mut bytes = vec![0; usize::try_from(info.span().len()).unwrap()];
    checkpoint.source().read_into(info.file(), info.span().start(), &mut bytes).unwrap();
    bytes
}

#[test]
fn the_example_of_fused_and_stacked_tensors_works() {
    let layout = repo::layout(example("fused-stacked.toml").to_str().unwrap());
    let checkpoint = open(&fixture("llama3.1").join("hf"));
    let mesh = Mesh::parse("replica=2,model=2").unwrap();
    let set = BTreeMap::from([("vocab_multiple".to_owned(), "64".to_owned())]);
    let options = ViewOptions { layout, mesh, set, ..ViewOptions::default() };
    let plan = Plan::build(&checkpoint, &options).unwrap();
    let shapes: Vec<(String, String, String)> = plan
        .tensors
        .iter()
        .map(|tensor| {
            let shape = tensor.view.shape();
            (tensor.name.clone(), shape.to_string(), plan.spec(tensor).to_json(shape.rank(), &plan.mesh).to_string())
        })
        .collect();
    let rows = [
        ("embedding", "[192, 48]", r#"["model",null]"#),
        ("final_norm", "[48]", "[null]"),
        ("head", "[48, 192]", r#"[null,"model"]"#),
        ("layers.down", "[3, 48, 112]", r#"[null,null,"model"]"#),
        ("layers.gate_up", "[3, 2, 112, 48]", r#"[null,null,"model",null]"#),
        ("layers.norms", "[3, 2, 48]", "[null,null,null]"),
        ("layers.out", "[3, 6, 8, 48]", r#"[null,"model",null,null]"#),
        ("layers.qkv", "[3, 2, 40, 48]", r#"[null,"model",null,null]"#),
    ];
    assert_eq!(shapes, rows.map(|(a, b, c)| (a.to_owned(), b.to_owned(), c.to_owned())));
    assert_eq!(plan.params, [("vocab_multiple".to_owned(), "64".to_owned())]);
    let volume = volume(&checkpoint, plan, 1 << 20);
    let qkv = read(&volume, "full/layers/qkv", 1000);
    for (part, rows, from) in [("q", 24, 0), ("k", 8, 24), ("v", 8, 32)] {
        let source = View::source(source(&checkpoint, &format!("model.layers.2.self_attn.{part}_proj.weight")));
        let raw = bytes_of(&checkpoint, &source);
        // The second key head of layer 2.
        let at = (2 * 2 + 1) * 40 * 96 + from * 96;
        assert_eq!(qkv[at..][..rows * 96], raw[rows * 96..], "{part}");
    }
}

/// Experts merged into an axis, an axis downwards, chosen rows, and arithmetic of two tensors, on values of the fixture.
#[test]
fn views_after_a_stack_and_between_tensors() {
    let text = "name = 'x'\n[[ignore]]\nnames = '*'\n[[leaf]]\nto = 'merged'\ntp = 0
from = 'model.layers.1.mlp.experts.{e}.up_proj.weight'\nstack = [{ var = 'e' }]
after_stack = 'reshape(x, -1, extent(x, -1))'\n[[leaf]]\nto = 'backwards'
from = 'model.layers.{l}.input_layernorm.weight'\nstack = [{ var = 'l' }]
after_stack = 'slice(x, 0, extent(x, 0) - 1, -1, -1)'\n[[leaf]]\nto = 'chosen'
from = 'model.embed_tokens.weight'\nview = 'gather(x, 0, [5, 3], 3)'\n[[leaf]]\nto = 'sum'
from = { a = 'model.layers.0.input_layernorm.weight', b = 'model.norm.weight' }\nview = 'add(a, exp(b))'\n";
    let checkpoint = open(&fixture("qwen3-moe").join("hf"));
    let mut options = with_layout(text).unwrap();
    options.mesh = Mesh::parse("fsdp=2").unwrap();
    let plan = Plan::build(&checkpoint, &options).unwrap();
    let raw = |name: &str| bytes_of(&checkpoint, &View::source(source(&checkpoint, name)));
    let count =
        |stars: &str| (0..1000).take_while(|n| checkpoint.find(&stars.replace('*', &n.to_string())).is_some()).count();
    let experts = count("model.layers.1.mlp.experts.*.up_proj.weight");
    let layers = count("model.layers.*.input_layernorm.weight");
    let merged = find(&plan, "merged");
    let each = source(&checkpoint, "model.layers.1.mlp.experts.0.up_proj.weight").shape;
    assert_eq!(merged.view.shape().extents(), [experts as u64 * each.extents()[0], each.extents()[1]]);
    // The axes are those of the result: its first one is split.
    assert_eq!(plan.spec(merged).to_json(2, &plan.mesh).to_string(), r#"["fsdp",null]"#);
    let row = 2 * usize::try_from(source(&checkpoint, "model.embed_tokens.weight").shape.extents()[1]).unwrap();
    let volume = volume(&checkpoint, plan, 1 << 20);
    let expected: Vec<u8> =
        (0..experts).flat_map(|e| raw(&format!("model.layers.1.mlp.experts.{e}.up_proj.weight"))).collect();
    assert_eq!(read(&volume, "full/merged", 999), expected);
    let expected: Vec<u8> =
        (0..layers).rev().flat_map(|l| raw(&format!("model.layers.{l}.input_layernorm.weight"))).collect();
    assert_eq!(read(&volume, "full/backwards", 7), expected);
    let embed = raw("model.embed_tokens.weight");
    let expected: Vec<u8> = [5, 3, 3].iter().flat_map(|at| embed[at * row..(at + 1) * row].to_vec()).collect();
    assert_eq!(read(&volume, "full/chosen", 64), expected);
    let values = |name: &str| -> Vec<half::bf16> {
        raw(name).chunks_exact(2).map(|two| half::bf16::from_le_bytes([two[0], two[1]])).collect()
    };
    let sums = values("model.layers.0.input_layernorm.weight").into_iter().zip(values("model.norm.weight"));
    #[allow(clippy::cast_possible_truncation, reason = "the rounding is wanted")]
    let exp = |x: half::bf16| half::bf16::from_f32(x.to_f64().exp() as f32).to_f32();
    let expected: Vec<u8> = sums.flat_map(|(a, b)| half::bf16::from_f32(a.to_f32() + exp(b)).to_le_bytes()).collect();
    assert_eq!(read(&volume, "full/sum", 10), expected);
}

#[test]
fn malformed_files_are_refused_with_their_lines() {
    let rows = [
        ("name = 1", "my.toml:1: invalid type: integer `1`, expected a string"),
        ("name = 'x'\n[[leaf]]\nto = 'a'\nform = 'b'", "my.toml:4: unknown field `form`"),
        ("name = 'x'\n\n[[leaf]]\nfrom = 'b'", "my.toml:3: missing field `to`"),
        ("name = 'x'\n[vars]\na = '1 +'", "my.toml:3: \"1 +\": at \"the end\": expected a value"),
        ("name = 'x'\n[vars]\na = 'b'", "my.toml:3: nothing is called \"b\""),
        ("name = 'x'\n[vars]\na = '1'\n[params]\na = '2'", "my.toml:3: \"a\" is a parameter and a variable"),
        ("name = 'x'\n[[leaf]]\nto = 'a{'\nfrom = 'b'", "my.toml:3: \"a{\": at \"the end\": expected a value"),
        ("name = 'x'\n[[leaf]]\nto = 'a{l}'\nfrom = 'b'", "my.toml:3: nothing is called \"l\""),
        ("name = 'x'\n[[leaf]]\nto = 'a'\nfrom = 'b'\nview = 'y'", "my.toml:5: nothing is called \"y\""),
        ("name = 'x'\n[[leaf]]\nto = 'a'", "my.toml:3: without a single source there must be a view"),
        ("name = 'x'\n[[leaf]]\nto = 'a'\nfrom = 3", "my.toml:4: expected the name of a tensor, or a table of names"),
        ("name = 'x'\n[[place]]\ngroup = 'g'", "my.toml:3: there is no group \"g\""),
        ("name = 'x'\ndtype = 'i32'", "my.toml:2: dtype: expected keep or a float type such as bf16, found \"i32\""),
        ("name = 'x'\nrules = 'mine'", "my.toml:2: rules: expected \"maxtext\", found \"mine\""),
        (
            "name = 'x'\n[[leaf]]\nto = 'a'\nfrom = 'b{l}'\nstack = [{ var = 'l', over = '3' }]",
            "my.toml:5: \"3\": at \"the end\": expected a range start..stop",
        ),
        ("name = 'x'\n[[ignore]]\nnames = '{", "my.toml:3: "),
    ];
    for (text, expected) in rows {
        let error = LayoutFile::parse("my.toml", text).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{text}\n{error}");
    }
    // All of them at once.
    let text = "name = 'x'\n[vars]\na = '('\nb = ')'\n[[leaf]]\nto = 'a'\nfrom = 'b'\nview = 'nosuch(x)'";
    let error = LayoutFile::parse("my.toml", text).unwrap_err();
    assert_eq!(error.problems.len(), 3, "{error}");
    let error = <LayoutChoice as value::SettingValue>::from_word("nosuch").unwrap_err();
    assert_eq!(
        error,
        "layout \"nosuch\": expected canonical, gguf, hf, maxtext, maxtext-unscanned, megatron, megatron-unscanned, sglang, \
         stored, torchtitan, transformers, vllm or a file *.toml"
    );
    let error = <LayoutChoice as value::SettingValue>::from_word("/nowhere/x.toml")
        .unwrap()
        .read_file()
        .unwrap_err()
        .to_string();
    assert!(error.starts_with("/nowhere/x.toml: "), "{error}");
}

/// All tensors of the Llama fixture, unchanged.
const REST: &str = "
[[ignore]]
names = '*'
";

#[test]
fn rules_that_do_not_fit_are_refused_naming_leaf_and_line() {
    let leaf = |rest: &str| format!("name = 'x'{REST}[[leaf]]\nto = 'a'\nfrom = 'model.norm.weight'\n{rest}");
    let rows = [
        (leaf("view = 'reshape(x, 5, 5)'"), "my.toml:7: a: reshape: [48] has 48 elements, [5, 5] has 25"),
        (
            leaf("view = 'add(x, reshape(x, 6, 8))'"),
            "my.toml:7: a: add: operand 1 is BF16 [6, 8], operand 0 is BF16 [48]",
        ),
        (leaf("after_stack = 'reshape(x, 5)'"), "my.toml:7: a: reshape: [48] has 48 elements, [5] has 5"),
        (leaf("view = 'config.nothing'"), "my.toml:7: a: config.json has no member \"nothing\""),
        (leaf("view = '3'"), "my.toml:7: a: view: expected a view, found 3"),
        (leaf("when = '3'"), "my.toml:7: when: expected true or false, found 3"),
        (leaf("each = { b = '0..config.nothing' }"), "my.toml:7: config.json has no member \"nothing\""),
        (
            format!(
                "name = 'x'{REST}[[leaf]]\nto = 'a'\nfrom = 'nothing.{{l}}'\nstack = [{{ var = 'l', over = '0..2' }}]"
            ),
            "my.toml:6: missing tensor nothing.{0-1} (2 tensors), needed for a",
        ),
        (
            format!(
                "name = 'x'{REST}[[leaf]]\nto = 'a'\nfrom = 'model.layers.{{l + 1}}.mlp.up_proj.weight'\nstack = [{{ var = 'l' }}]"
            ),
            "my.toml:7: a: the numbers of \"l\" cannot be derived from names: give a range by over",
        ),
        (
            format!(
                "name = 'x'{REST}[[leaf]]\nto = 'a'\nfrom = \"model.layers.0.self_attn.{{if l == 0 then 'q' else 'k'}}_proj.weight\"\nstack = [{{ var = 'l', over = '0..2' }}]"
            ),
            "my.toml:7: a: stack: operand 1 is BF16 [16, 48], operand 0 is BF16 [48, 48]",
        ),
        (
            format!(
                "name = 'x'{REST}[[leaf]]\nto = 'a'\nfrom = 'model.layers.{{l}}.mlp.up_proj.weight'\nstack = [{{ var = 'l', axis = 3 }}]"
            ),
            "my.toml:7: a: axis: no such number",
        ),
        (
            "name = 'x'\n[[leaf]]\nto = 'a'\nfrom = 'model.norm.weight'\n[[ignore]]\nnames = 'model.*'".to_owned(),
            "unexpected tensor lm_head.weight",
        ),
        (
            format!("name = 'x'{REST}[vars]\na = 'b'\nb = 'a'"),
            "2 problems:\n  my.toml:5: a: b: \"a\" is defined by itself",
        ),
        (
            format!(
                "name = 'x'{REST}[[leaf]]\nto = 'a'\nfrom = 'model.norm.weight'\n[[leaf]]\nto = 'a'\nfrom = 'model.norm.weight'"
            ),
            "two tensors named a would both be at a",
        ),
    ];
    for (text, expected) in rows {
        let error = refused("llama3.1", &text);
        assert!(error.starts_with(expected), "{text}\n{error}");
    }
}

#[test]
fn messages_of_rules_mark_the_word_that_fails() {
    let leaf = |rest: &str| format!("name = 'x'{REST}[[leaf]]\nto = 'a'\nfrom = 'model.norm.weight'\n{rest}");
    let rows = [
        (
            leaf("view = \"cast(x, 'bf61')\""),
            "a: there is no dtype \"bf61\"; did you mean `bf16`?\n --> my.toml:7:18\n  |\n7 | view = \"cast(x, 'bf61')\"\n  |                  ^^^^",
        ),
        (
            leaf("view = 'slice(x, 0, 0, mesh.tensro)'"),
            "a: the mesh has no axis \"tensro\"; did you mean `tensor`?\n --> my.toml:7:29\n",
        ),
        (
            format!(
                "name = 'x'{REST}[vars]\na = 'config.nothing * 2'\n[[leaf]]\nto = 'a'\nfrom = 'model.norm.weight'\nwhen = 'a > 1'"
            ),
            "a: config.json has no member \"nothing\"\n --> my.toml:9:9\n  |\n9 | when = 'a > 1'\n  |         ^",
        ),
        (
            leaf("view = 'slice(x, 0, 0, config.hiden_size)'"),
            "a: config.json has no member \"hiden_size\"; did you mean `hidden_size`?\n --> my.toml:7:31\n",
        ),
    ];
    let checkpoint = open(&fixture("llama3.1").join("hf"));
    for (text, expected) in rows {
        let options = ViewOptions { mesh: Mesh::parse("tensor=2").unwrap(), ..with_layout(&text).unwrap() };
        let error = Plan::build(&checkpoint, &options).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}\n{error}\nexpected {expected}");
    }
}

/// As in transformers, where a member is `null` in `text_config` the text model has none; one of the whole model counts only where
/// `text_config` lacks the name.
#[test]
fn a_null_of_the_text_model_is_not_the_value_of_the_whole_one() {
    for (nested, expected) in [(Some(Value::from(2)), 2), (Some(Value::Null), 5), (None, 3)] {
        let (mut config, shapes) = gemma3(1);
        config["pad"] = 3.into();
        if let Some(nested) = nested {
            config["text_config"]["pad"] = nested;
        }
        let repo = Repo::new(&config, &shapes, DType::F32);
        let text = format!(
            "name = 'x'{REST}[[leaf]]\nto = 'a'\nfrom = 'language_model.model.norm.weight'\nview = 'slice(x, 0, 0, config.pad ?? 5)'"
        );
        let plan = Plan::build(&open(repo.directory.path()), &with_layout(&text).unwrap()).unwrap();
        assert_eq!(find(&plan, "a").view.shape().extents(), [expected], "{config}");
    }
}

#[test]
fn missing_and_unexpected_tensors_can_be_allowed() {
    let checkpoint = open(&fixture("llama3.1").join("hf"));
    let text = "name = 'x'\n[[leaf]]\nto = 'a'\nfrom = 'nothing'\n[[leaf]]\nto = 'b'\nfrom = 'model.norm.weight'";
    let mut options = with_layout(text).unwrap();
    let error = Plan::build(&checkpoint, &options).unwrap_err();
    let error = error.to_string();
    for part in
        ["12 problems:", "missing tensor nothing, needed for a", "unexpected tensor model.layers.{0-2}.mlp.up_proj"]
    {
        assert!(error.contains(part), "{error}");
    }
    (options.allow_missing, options.allow_unmapped) = (true.into(), true.into());
    let plan = Plan::build(&checkpoint, &options).unwrap();
    assert_eq!(plan.tensors.len(), 1);
    assert!(plan.warnings.contains(&"a is left out: missing tensor nothing".to_owned()), "{:?}", plan.warnings);
    assert!(plan.warnings.contains(&"unexpected tensor lm_head.weight: left out".to_owned()));
}

#[test]
fn numbers_come_from_the_repository_without_a_range() {
    let checkpoint = open(&fixture("qwen3-moe").join("hf"));
    let text = format!(
        "name = 'x'{REST}[group]\nlayer = [\n{{ to = 'up', from = 'mlp.experts.{{e}}.up_proj.weight', stack = [{{ var = 'e', axis = 1, name = 'exp' }}], axes = 'mlp embed' }},\n]\n[[place]]\ngroup = 'layer'\nto = 'layers'\nfrom = 'model.layers.{{l}}'\nstack = [{{ var = 'l', name = 'layers', axis = 0 }}]"
    );
    let plan = Plan::build(&checkpoint, &with_layout(&text).unwrap()).unwrap();
    let up = find(&plan, "layers.up");
    assert_eq!(up.view.shape().extents(), [3, 4, 40, 48]);
    assert_eq!(up.logical, ["layers", "exp", "mlp", "embed"]);
}

/// Fixture, layout, the prefix of a layer, and the names in it with their shapes, `-` where the shape is not compared.
const MODULES: [[&str; 4]; 6] = [
    [
        "llama3.1",
        "torchtitan",
        "layers.2.",
        "attention.qkv_linear.wq.weight [48, 48]\n\
         attention.qkv_linear.wk.weight [16, 48]\n\
         attention.qkv_linear.wv.weight [16, 48]\n\
         attention.wo.weight [48, 48]\n\
         feed_forward.w1.weight [112, 48]\n\
         feed_forward.w2.weight [48, 112]\n\
         feed_forward.w3.weight [112, 48]\n\
         attention_norm.weight [48]\n\
         ffn_norm.weight [48]",
    ],
    [
        "qwen3-moe",
        "torchtitan",
        "layers.2.",
        "attention.qkv_linear.wq.weight [48, 48]\n\
         attention.qkv_linear.wk.weight [16, 48]\n\
         attention.qkv_linear.wv.weight [16, 48]\n\
         attention.wo.weight [48, 48]\n\
         attention.q_norm.weight [8]\n\
         attention.k_norm.weight [8]\n\
         attention_norm.weight [48]\n\
         ffn_norm.weight [48]\n\
         moe.router.gate.weight [4, 48]\n\
         moe.routed_experts.inner_experts.w1_EFD [4, 40, 48]\n\
         moe.routed_experts.inner_experts.w2_EDF [4, 48, 40]\n\
         moe.routed_experts.inner_experts.w3_EFD [4, 40, 48]",
    ],
    [
        "deepseek3",
        "torchtitan",
        "layers.4.",
        "attention.wq_a.weight [28, 48]\n\
         attention.q_norm.weight [28]\n\
         attention.wq_b.weight -\n\
         attention.wkv_a.weight -\n\
         attention.kv_norm.weight -\n\
         attention.wkv_b.weight -\n\
         attention.wo.weight -\n\
         attention_norm.weight [48]\n\
         ffn_norm.weight [48]\n\
         moe.router.gate.weight [4, 48]\n\
         moe.expert_bias_E [4]\n\
         moe.routed_experts.inner_experts.w1_EFD [4, 40, 48]\n\
         moe.routed_experts.inner_experts.w2_EDF [4, 48, 40]\n\
         moe.routed_experts.inner_experts.w3_EFD [4, 40, 48]\n\
         moe.shared_experts.w1.weight [40, 48]\n\
         moe.shared_experts.w2.weight [48, 40]\n\
         moe.shared_experts.w3.weight [40, 48]",
    ],
    [
        "mixtral",
        "transformers",
        "model.layers.2.",
        "self_attn.q_proj.weight [48, 48]\n\
         self_attn.k_proj.weight [16, 48]\n\
         self_attn.v_proj.weight [16, 48]\n\
         self_attn.o_proj.weight [48, 48]\n\
         mlp.gate.weight [4, 48]\n\
         mlp.experts.gate_up_proj [4, 112, 48]\n\
         mlp.experts.down_proj [4, 48, 56]\n\
         input_layernorm.weight [48]\n\
         post_attention_layernorm.weight [48]",
    ],
    [
        "qwen3-moe",
        "transformers",
        "model.layers.2.",
        "self_attn.q_proj.weight [48, 48]\n\
         self_attn.k_proj.weight [16, 48]\n\
         self_attn.v_proj.weight [16, 48]\n\
         self_attn.o_proj.weight [48, 48]\n\
         self_attn.q_norm.weight [8]\n\
         self_attn.k_norm.weight [8]\n\
         mlp.gate.weight [4, 48]\n\
         mlp.experts.gate_up_proj [4, 80, 48]\n\
         mlp.experts.down_proj [4, 48, 40]\n\
         input_layernorm.weight [48]\n\
         post_attention_layernorm.weight [48]",
    ],
    [
        "deepseek3",
        "transformers",
        "model.layers.4.",
        "self_attn.q_a_proj.weight [28, 48]\n\
         self_attn.q_a_layernorm.weight [28]\n\
         self_attn.q_b_proj.weight -\n\
         self_attn.kv_a_proj_with_mqa.weight -\n\
         self_attn.kv_a_layernorm.weight -\n\
         self_attn.kv_b_proj.weight -\n\
         self_attn.o_proj.weight -\n\
         mlp.experts.gate_up_proj [4, 80, 48]\n\
         mlp.experts.down_proj [4, 48, 40]\n\
         mlp.gate.weight [4, 48]\n\
         mlp.gate.e_score_correction_bias [4]\n\
         mlp.shared_experts.gate_proj.weight [40, 48]\n\
         mlp.shared_experts.up_proj.weight [40, 48]\n\
         mlp.shared_experts.down_proj.weight [48, 40]\n\
         input_layernorm.weight [48]\n\
         post_attention_layernorm.weight [48]",
    ],
];

/// Names and shapes of the tensors of one layer and of the ends, and the bytes of some, against tables copied from the state of tiny
/// models in torchtitan 0.3.0 and transformers 5.23.0.
#[test]
fn names_of_torchtitan_and_transformers() {
    for [family, layout, prefix, rows] in MODULES {
        let rows: BTreeMap<&str, &str> = rows.lines().filter_map(|row| row.split_once(' ')).collect();
        let checkpoint = open(&fixture(family).join("hf"));
        let mesh = Mesh::parse("fsdp=2").unwrap();
        let options = ViewOptions { layout: repo::layout(layout), mesh, ..ViewOptions::default() };
        let plan = Plan::build(&checkpoint, &options).unwrap_or_else(|error| panic!("{family}: {error}"));
        let found: BTreeMap<String, String> = (plan.tensors.iter())
            .filter_map(|tensor| Some((tensor.name.strip_prefix(prefix)?.to_owned(), tensor.view.shape().to_string())))
            .collect();
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        let expected: Vec<&str> = rows.keys().copied().collect();
        assert_eq!(names, expected, "{family} {layout}");
        for (name, shape) in rows.iter().filter(|(_, shape)| **shape != "-") {
            assert_eq!(found[*name], *shape, "{family} {layout} {name}");
        }
        let ends: Vec<&str> =
            plan.tensors.iter().map(|tensor| &*tensor.name).filter(|name| !name.contains("layers.")).collect();
        let of_torchtitan = ["lm_head.weight", "norm.weight", "tok_embeddings.weight"];
        let of_transformers = ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"];
        assert_eq!(ends, if layout == "torchtitan" { of_torchtitan } else { of_transformers }, "{family}");
        for tensor in &plan.tensors {
            let rank = tensor.view.shape().rank();
            let spec = plan.spec(tensor).to_json(rank, &plan.mesh);
            let is_buffer = ["e_score_correction_bias", "expert_bias_E"].iter().any(|end| tensor.name.ends_with(end));
            let expected = if is_buffer { Value::Null } else { "fsdp".into() };
            assert_eq!(spec[0], expected, "{family} {layout} {}: FSDP2 cuts axis 0 of parameters", tensor.name);
        }
        assert!(!unverified(&plan), "{family}");
        if (family, layout) == ("mixtral", "transformers") {
            let raw = |name: &str| bytes_of(&checkpoint, &View::source(source(&checkpoint, name)));
            let expert = |e: usize, w: &str| raw(&format!("model.layers.2.block_sparse_moe.experts.{e}.{w}.weight"));
            let fused: Vec<u8> = (0..4).flat_map(|e| [expert(e, "w1"), expert(e, "w3")].concat()).collect();
            let volume = volume(&checkpoint, plan, 1 << 20);
            assert_eq!(read(&volume, "full/model.layers.2.mlp.experts.gate_up_proj", 1 << 20), fused);
        }
    }
}

#[test]
fn the_family_can_be_chosen() {
    let checkpoint = open(&fixture("qwen3").join("hf"));
    let mut options = options(true, "", &Value::Null);
    let plan = Plan::build(&checkpoint, &options).unwrap();
    assert_eq!(plan.family.as_deref(), Some("maxtext/qwen"));
    assert_eq!(plan.dtype, Some(DType::BF16));
    options.set.insert("family".to_owned(), "llama".to_owned());
    let error = Plan::build(&checkpoint, &options).unwrap_err().to_string();
    assert!(error.contains("unexpected tensor model.layers.{0-2}.self_attn.q_norm.weight (3 tensors)"), "{error}");
    options.set.insert("family".to_owned(), "nosuch".to_owned());
    let error = Plan::build(&checkpoint, &options).unwrap_err().to_string();
    assert!(error.starts_with("layout maxtext: no family \"nosuch\"; known: maxtext/deepseek, "), "{error}");
    options.set.insert("family".to_owned(), "lama".to_owned());
    let error = Plan::build(&checkpoint, &options).unwrap_err().to_string();
    assert_eq!(error, "layout maxtext: unknown family `lama`; did you mean `llama`?");
    options.set.remove("family");
    options.set.insert("vocab_sise".to_owned(), "7".to_owned());
    let error = Plan::build(&checkpoint, &options).unwrap_err().to_string();
    assert_eq!(error, "maxtext/qwen.toml: unknown parameter `vocab_sise`; did you mean `vocab_size`?");
    let error = Plan::build(&checkpoint, &ViewOptions { set: options.set, ..ViewOptions::default() }).unwrap_err();
    assert_eq!(error.to_string(), "set: the layout canonical has no parameters");
}

/// The published vocabularies that MaxText pads or cuts.
#[test]
fn vocabularies_of_published_models() {
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(fixture("gemma2").join("hf/config.json")).unwrap()).unwrap();
    config["vocab_size"] = 256_000.into();
    let directory = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("gemma2").join("hf")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), directory.path().join(entry.file_name())).unwrap();
    }
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let plan = Plan::build(&open(directory.path()), &options(true, "", &Value::Null)).unwrap();
    assert_eq!(find(&plan, "params.token_embedder.embedding").view.shape().extents(), [256_128, 48]);
    assert!(plan.params.contains(&("vocab_size".to_owned(), "256128".to_owned())));
}

/// A repository of these shapes that holds only zeros.
fn hollow(config: &Value, shapes: &BTreeMap<String, (DType, Vec<u64>)>) -> (tempfile::TempDir, Arc<Checkpoint>) {
    use std::io::Write as _;
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let list = shapes.iter().map(|(name, (dtype, shape))| (name.as_str(), *dtype, shape.as_slice()));
    let header = write_header(list, &[("format", "pt")], DATA_ALIGNMENT).unwrap();
    let mut file = std::fs::File::create(directory.path().join("model.safetensors")).unwrap();
    file.write_all(&header.bytes).unwrap();
    let bytes_of = |(dtype, shape): &(DType, Vec<u64>)| dtype.bytes_of(shape.iter().product()).unwrap();
    file.set_len(header.bytes.len() as u64 + shapes.values().map(bytes_of).sum::<u64>()).unwrap();
    let checkpoint = open(directory.path());
    (directory, checkpoint)
}

fn config_of(family: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(family).join("hf/config.json")).unwrap()).unwrap()
}

fn shapes_of(family: &str) -> BTreeMap<String, (DType, Vec<u64>)> {
    let checkpoint = open(&fixture(family).join("hf"));
    checkpoint.tensors().map(|(_, info)| (info.name.to_owned(), (info.dtype, info.shape.to_vec()))).collect()
}

const FAMILIES: [&str; 13] = [
    "llama3.1",
    "qwen2.5",
    "qwen3",
    "qwen3-moe",
    "gemma2",
    "gemma3",
    "gemma4",
    "mixtral",
    "deepseek2",
    "deepseek3",
    "gpt-oss",
    "qwen3-next",
    "olmo3",
];

/// config.json determines the shapes: no tensor that a checkpoint needs may have another.
#[test]
fn tensors_of_other_shapes_than_the_configuration_requires_are_refused() {
    for (family, scanned) in FAMILIES.into_iter().flat_map(|family| [(family, true), (family, false)]) {
        let (config, shapes) = (config_of(family), shapes_of(family));
        let options = options(scanned, "", &Value::Null);
        let (_directory, checkpoint) = hollow(&config, &shapes);
        let plan = Plan::build(&checkpoint, &options).unwrap_or_else(|error| panic!("{family}: {error}"));
        assert!(!plan.warnings.iter().any(|warning| warning.contains("vocab_size")), "{family}: {:?}", plan.warnings);
        let mut used = std::collections::BTreeSet::new();
        for tensor in &plan.tensors {
            tensor.view.for_each_source(&mut |source| {
                used.insert(checkpoint.tensor(source.id).name.to_owned());
            });
        }
        assert!(used.len() > 20, "{family}");
        // These layers are of every type.
        let numbers = |name: &str| name.split('.').filter_map(|word| word.parse::<u64>().ok()).collect::<Vec<_>>();
        // One expert of each layer: a rule takes all of them.
        used.retain(|name| match numbers(name)[..] {
            [] => true,
            [layer] => [0, 2, 5].contains(&layer),
            [layer, expert, ..] => [0, 2, 5].contains(&layer) && expert == 2,
        });
        // Wider, with its axes the other way round, and with one axis more.
        for name in &used {
            let (dtype, shape) = &shapes[name];
            let mut others: Vec<Vec<u64>> = (0..shape.len())
                .map(|axis| shape.iter().enumerate().map(|(at, extent)| extent + u64::from(at == axis)).collect())
                .collect();
            others.push(shape.iter().rev().copied().collect());
            if scanned {
                others.push([&[1][..], shape].concat());
            }
            for other in others.into_iter().filter(|other| other != shape) {
                let mut shapes = shapes.clone();
                shapes.insert(name.clone(), (*dtype, other.clone()));
                let (_directory, checkpoint) = hollow(&config, &shapes);
                let found = Plan::build(&checkpoint, &options);
                let what = format!("{family}, scanned {scanned}: {name} of {other:?}");
                match found {
                    // Rows of the embedding are cut or padded, with a warning.
                    Ok(plan) if name.contains("embed_tokens") && other[1..] == shape[1..] => {
                        let said =
                            format!("{name} has {} rows, but config.json's vocab_size is {}", other[0], shape[0]);
                        let said = said.replace("language_model.model.", "model.language_model.");
                        assert!(
                            plan.warnings.iter().any(|warning| warning.contains(&said)),
                            "{what}: {:?}",
                            plan.warnings
                        );
                    }
                    Ok(_) => panic!("{what}: accepted"),
                    Err(error) => {
                        let error = error.to_string();
                        let reported = error.contains("expected shape [") && error.contains("model.safetensors: ");
                        assert!(reported || error.contains("reshape"), "{what}: {error}");
                        // The head has as many rows as the embedding.
                        let of_head = format!("lm_head.weight: expected shape [{}, ", other[0]);
                        let found = error.contains(&format!("found [{}", other[0])) || error.contains(&of_head);
                        assert!(!reported || found, "{what}: {error}");
                    }
                }
            }
        }
    }
}

#[test]
fn shapes_are_reported_once_for_all_layers() {
    let (config, mut shapes) = (config_of("llama3.1"), shapes_of("llama3.1"));
    for (name, (_, shape)) in &mut shapes {
        if name.ends_with("o_proj.weight") {
            shape.reverse();
            shape[0] += 1;
        }
    }
    shapes.insert("lm_head.weight".to_owned(), (DType::BF16, vec![150, 48]));
    let (directory, checkpoint) = hollow(&config, &shapes);
    for scanned in [true, false] {
        let error = Plan::build(&checkpoint, &options(scanned, "", &Value::Null)).unwrap_err();
        let file = directory.path().join("model.safetensors").canonicalize().unwrap();
        let lines: Vec<String> = error.problems.iter().map(ToString::to_string).collect();
        assert_eq!(lines.len(), 2, "{error}");
        for (line, reported) in lines.iter().zip([
            format!("{}: lm_head.weight: expected shape [160, 48], found [150, 48]", file.display()),
            format!(
                "{}: model.layers.{{0-2}}.self_attn.o_proj.weight (3 tensors): expected shape [48, 48], found [49, 48]",
                file.display()
            ),
        ]) {
            assert!(line.starts_with("maxtext/llama.toml:") && line.ends_with(&reported), "{line}\n{reported}");
        }
    }
    // Sizes that the configuration leaves out are not compared.
    let mut config = config_of("qwen3");
    config.as_object_mut().unwrap().remove("intermediate_size");
    let mut shapes = shapes_of("qwen3");
    for (name, (_, shape)) in &mut shapes {
        match name.rsplit('.').nth(1) {
            Some("gate_proj" | "up_proj") => shape[0] += 3,
            Some("down_proj") => shape[1] += 3,
            _ => {}
        }
    }
    let (_directory, checkpoint) = hollow(&config, &shapes);
    Plan::build(&checkpoint, &options(true, "", &Value::Null)).unwrap();
}

/// A pruned model has narrower layers. Programs that build all layers alike cannot load it: one message says which and what can.
#[test]
fn layers_of_other_widths_are_refused_with_one_message_that_names_them() {
    let widths = [112, 80, 112];
    let (config, mut shapes) = (config_of("llama3.1"), shapes_of("llama3.1"));
    for (layer, width) in widths.into_iter().enumerate() {
        for (word, shape) in [("gate_proj", [width, 48]), ("up_proj", [width, 48]), ("down_proj", [48, width])] {
            shapes.insert(format!("model.layers.{layer}.mlp.{word}.weight"), (DType::BF16, shape.to_vec()));
        }
    }
    let (_directory, checkpoint) = hollow(&config, &shapes);
    for layout in ["maxtext", "maxtext-unscanned", "megatron", "megatron-unscanned", "vllm"] {
        let options = ViewOptions { layout: repo::layout(layout), ..ViewOptions::default() };
        let error = Plan::build(&checkpoint, &options).unwrap_err();
        assert_eq!(error.problems.len(), 1, "{layout}: {error}");
        let error = error.to_string();
        for said in [
            "model.safetensors: ",
            "model.layers.1.mlp.gate_proj.weight has the shape [80, 48]: axis 0 has 112 elements in layers 0,2, 80 in layer 1",
            "model.layers.1.mlp.down_proj.weight has the shape [48, 80]: axis 1 has 112 elements in layers 0,2, 80 in layer 1",
            "--layout canonical and --layout hf show each layer with its own width",
        ] {
            assert!(error.contains(said), "{layout}: {error}");
        }
    }
    for layout in ["canonical", "hf"] {
        let options = ViewOptions { layout: repo::layout(layout), ..ViewOptions::default() };
        Plan::build(&checkpoint, &options).unwrap_or_else(|error| panic!("{layout}: {error}"));
    }
}

/// Tensors that every model of a type has are required, even where others of the family lack them.
#[test]
fn biases_and_norms_that_a_model_must_have_are_required() {
    for (family, ends) in [
        ("qwen2.5", &["q_proj.bias", "k_proj.bias", "v_proj.bias"][..]),
        ("qwen3", &["q_norm.weight", "k_norm.weight"]),
        ("qwen3-moe", &["q_norm.weight"]),
        ("deepseek3", &["mlp.gate.e_score_correction_bias"]),
    ] {
        let (config, all) = (config_of(family), shapes_of(family));
        let lost = |name: &str| ends.iter().any(|end| name.ends_with(end));
        let gone: Vec<&String> = all.keys().filter(|name| lost(name)).collect();
        assert!(gone.len() > 1, "{family}");
        let last = (*gone.last().unwrap()).clone();
        for scanned in [true, false] {
            for of_all in [true, false] {
                let keep = |name: &str| if of_all { !lost(name) } else { name != last };
                let kept = all.iter().filter(|(name, _)| keep(name)).map(|(name, shape)| (name.clone(), shape.clone()));
                let (_directory, checkpoint) = hollow(&config, &kept.collect());
                let error = Plan::build(&checkpoint, &options(scanned, "", &Value::Null)).unwrap_err().to_string();
                let reported = error.contains("missing tensor") && ends.iter().any(|end| error.contains(end));
                assert!(reported, "{family}, scanned {scanned}: {error}");
            }
        }
    }
}

/// The user's rules fully determine the tensors that they match: for a single expert, too, every element is on some device.
#[test]
fn rules_for_single_experts_lose_nothing() {
    let (config, shapes) = (config_of("mixtral"), shapes_of("mixtral"));
    let (_directory, checkpoint) = hollow(&config, &shapes);
    let name = "model.layers.0.block_sparse_moe.experts.0.w1.weight";
    let plan = |mesh: &str, sharding, spec: &[&str]| {
        let rule = |spec: &[&str]| ShardRule {
            pattern: Pattern::parse("*experts.*.w1.weight").unwrap(),
            spec: spec.iter().map(|axis| axis.split_whitespace().map(str::to_owned).collect()).collect(),
        };
        let shard_rules = if spec.is_empty() { Vec::new() } else { vec![rule(spec)] };
        let mesh = Mesh::parse(mesh).unwrap();
        let options = ViewOptions { layout: Layout::Hf, mesh, sharding, shard_rules, ..ViewOptions::default() };
        Plan::build(&checkpoint, &options).unwrap()
    };
    for (mesh, sharding, spec, expected) in [
        ("expert=2", Sharding::Auto, &[][..], &["[56, 48]", "[0, 48]"][..]),
        ("expert=2", Sharding::Auto, &["", "expert"], &["[56, 24]", "[56, 24]"]),
        ("fsdp=2,expert=2", Sharding::Auto, &["fsdp"], &["[28, 48]"; 4]),
        ("expert=2", Sharding::Replicate, &[], &["[56, 48]"; 2]),
    ] {
        let plan = plan(mesh, sharding, spec);
        let tensor = find(&plan, name);
        let shards: Vec<String> =
            (0..plan.mesh.devices()).map(|device| plan.region(tensor, device).shape().to_string()).collect();
        assert_eq!(shards, expected, "{mesh} {spec:?}");
        let holders = (0..plan.holder_count(tensor)).map(|number| plan.holder(tensor, number));
        let own = holders.filter_map(|device| plan.own_region(tensor, device));
        let held: u64 = own.map(|region| region.shape().elements()).sum();
        assert_eq!(held, 56 * 48, "{mesh} {spec:?}");
    }
}

#[test]
fn impossible_logical_rules_are_reported() {
    let (config, shapes) = (config_of("llama3.1"), shapes_of("llama3.1"));
    let (_directory, checkpoint) = hollow(&config, &shapes);
    let rule = |logical: &str, mesh: &[&str]| LogicalRule {
        logical: logical.to_owned(),
        mesh: mesh.iter().map(|axis| (*axis).to_owned()).collect(),
    };
    let build = |layout: &str, sharding, rules| {
        let mesh = Mesh::parse("fsdp=2,tensor=2").unwrap();
        let layout = repo::layout(layout);
        let options = ViewOptions { layout, mesh, sharding, logical_rules: rules, ..ViewOptions::default() };
        Plan::build(&checkpoint, &options)
    };
    let error = build("maxtext", Sharding::Auto, vec![rule("embed", &["fsdp", "fsdp"])]).unwrap_err().to_string();
    assert_eq!(error, "logical rules: the rule for \"embed\" names the mesh axis \"fsdp\" twice");
    let plan = build("maxtext", Sharding::Auto, vec![rule("embbed", &["fsdp"]), rule("embed", &["tensr"])]).unwrap();
    assert!(
        plan.warnings.contains(&"logical rule: no tensor has an axis \"embbed\"".to_owned()),
        "{:?}",
        plan.warnings
    );
    let absent = "logical rules name the mesh axis \"tensr\", which the mesh does not have".to_owned();
    assert!(plan.warnings.contains(&absent), "{:?}", plan.warnings);
    for (layout, sharding) in [("canonical", Sharding::Auto), ("maxtext", Sharding::Replicate)] {
        let plan = build(layout, sharding, vec![rule("embed", &["fsdp"])]).unwrap();
        let idle = |warning: &String| warning.starts_with("the logical rules change nothing");
        assert!(plan.warnings.iter().any(idle), "{layout}: {:?}", plan.warnings);
    }
    assert_eq!(build("maxtext", Sharding::Auto, vec![rule("embed", &["fsdp"])]).unwrap().warnings, [""; 0]);
}

#[test]
fn every_axis_that_does_not_split_evenly_is_named() {
    let options = options(true, "context=3,tensor=4", &Value::Null);
    let error = Plan::build(&open(&fixture("deepseek2").join("hf")), &options).unwrap_err().to_string();
    for reported in [
        "axis 0 of [20, 3, 6, 28] does not split evenly in 3 parts",
        "axis 2 of [20, 3, 6, 28] does not split evenly in 4 parts",
    ] {
        let line = format!("params.decoder.moe_layers.self_attention.wkv_b.kernel: {reported}");
        assert!(error.contains(&line), "{line}\n{error}");
    }
}

/// TensorStore, Orbax's storage library, treats a backslash in a name as a slash.
#[test]
fn names_that_orbax_cannot_find_again_are_reported() {
    let shapes = [("back\\slash.x".to_owned(), (DType::F32, vec![3])), ("y".to_owned(), (DType::F32, vec![3]))];
    let (_directory, checkpoint) = hollow(&serde_json::json!({}), &shapes.into());
    let plan = Plan::build(&checkpoint, &ViewOptions::default()).unwrap();
    let found = unavailable(&plan);
    let [only] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(only.format, "orbax");
    assert!(
        only.reason.contains("back\\slash.x: ") && only.reason.ends_with("a name with a backslash"),
        "{}",
        only.reason
    );
    // Files of Orbax itself.
    for name in ["_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt"] {
        let shapes = [(name.to_owned(), (DType::F32, vec![3])), ("y".to_owned(), (DType::F32, vec![3]))];
        let (_directory, checkpoint) = hollow(&serde_json::json!({}), &shapes.into());
        let options = ViewOptions { layout: Layout::Hf, ..ViewOptions::default() };
        let found = unavailable(&Plan::build(&checkpoint, &options).unwrap());
        let reason = found.iter().find(|unavailable| unavailable.format == "orbax").map(|found| found.reason.as_str());
        assert_eq!(reason.unwrap(), format!("{name}: the format has a file of its own of this name"));
    }
    // Orbax writes a directory of this name, and looks for none.
    let shapes = [("d".to_owned(), (DType::F32, vec![3]))];
    let (_directory, checkpoint) = hollow(&serde_json::json!({}), &shapes.into());
    assert!(unavailable(&Plan::build(&checkpoint, &ViewOptions::default()).unwrap()).is_empty());
}

/// MaxText's layouts cast floats unless the user keeps them.
#[test]
fn floats_are_kept_on_request() {
    let (config, mut shapes) = (config_of("llama3.1"), shapes_of("llama3.1"));
    for (dtype, _) in shapes.values_mut() {
        *dtype = DType::F32;
    }
    let (_directory, checkpoint) = hollow(&config, &shapes);
    for (keep_dtype, expected) in [(false, DType::BF16), (true, DType::F32)] {
        let options = ViewOptions { keep_dtype, ..options(true, "", &Value::Null) };
        let plan = Plan::build(&checkpoint, &options).unwrap();
        assert_eq!(plan.dtype, (!keep_dtype).then_some(expected));
        assert!(plan.tensors.iter().all(|tensor| tensor.view.dtype() == expected));
    }
}

// Families known only from the converter's source code, and relatives of the others: names, shapes, and the formulas that differ.

type Shapes = Vec<(String, Vec<u64>)>;

fn per_layer(shapes: &mut Shapes, prefix: &str, layer: u64, rows: &[(&str, &[u64])]) {
    shapes.extend(rows.iter().map(|(name, shape)| (format!("{prefix}.layers.{layer}.{name}"), shape.to_vec())));
}

/// Plans a generated repository and returns its leaves by name, without `params.decoder.`, with shapes.
fn leaves_of(plan: &Plan) -> BTreeMap<&str, String> {
    plan.tensors
        .iter()
        .map(|tensor| {
            let name = tensor.name.strip_prefix("params.decoder.").unwrap_or(&tensor.name);
            (name, tensor.view.shape().to_string())
        })
        .collect()
}

fn unverified(plan: &Plan) -> bool {
    plan.warnings.iter().any(|warning| warning.contains("has not been compared"))
}

#[test]
fn qwen3_5_regroups_projections_by_key_head() {
    let mut config = serde_json::json!({
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text", "hidden_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
            "num_hidden_layers": 4, "vocab_size": 9, "num_experts": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 3,
            "linear_num_value_heads": 4, "linear_value_head_dim": 2,
        },
    });
    config["tie_word_embeddings"] = false.into();
    let prefix = "model.language_model";
    let mut shapes: Shapes = vec![
        (format!("{prefix}.embed_tokens.weight"), vec![9, 6]),
        (format!("{prefix}.norm.weight"), vec![6]),
        ("lm_head.weight".to_owned(), vec![9, 6]),
        ("model.visual.patch_embed.proj.weight".to_owned(), vec![3]),
        ("mtp.fc.weight".to_owned(), vec![3]),
    ];
    for layer in 0..4 {
        if layer < 3 {
            let rows: &[(&str, &[u64])] = &[
                ("linear_attn.in_proj_qkv.weight", &[20, 6]),
                ("linear_attn.in_proj_z.weight", &[8, 6]),
                ("linear_attn.in_proj_b.weight", &[4, 6]),
                ("linear_attn.in_proj_a.weight", &[4, 6]),
                ("linear_attn.conv1d.weight", &[20, 1, 4]),
                ("linear_attn.A_log", &[4]),
                ("linear_attn.dt_bias", &[4]),
                ("linear_attn.norm.weight", &[2]),
                ("linear_attn.out_proj.weight", &[6, 8]),
            ];
            per_layer(&mut shapes, prefix, layer, rows);
        } else {
            let rows: &[(&str, &[u64])] = &[
                ("self_attn.q_proj.weight", &[16, 6]),
                ("self_attn.k_proj.weight", &[4, 6]),
                ("self_attn.v_proj.weight", &[4, 6]),
                ("self_attn.o_proj.weight", &[6, 8]),
                ("self_attn.q_norm.weight", &[4]),
                ("self_attn.k_norm.weight", &[4]),
            ];
            per_layer(&mut shapes, prefix, layer, rows);
        }
        let rows: &[(&str, &[u64])] = &[
            ("input_layernorm.weight", &[6]),
            ("post_attention_layernorm.weight", &[6]),
            ("mlp.gate.weight", &[2, 6]),
            ("mlp.shared_expert.gate_proj.weight", &[5, 6]),
            ("mlp.shared_expert.up_proj.weight", &[5, 6]),
            ("mlp.shared_expert.down_proj.weight", &[6, 5]),
            ("mlp.shared_expert_gate.weight", &[1, 6]),
            ("mlp.experts.gate_up_proj", &[2, 10, 6]),
            ("mlp.experts.down_proj", &[2, 6, 5]),
        ];
        per_layer(&mut shapes, prefix, layer, rows);
    }
    let repo = Repo::new(&config, &shapes, DType::BF16);
    let checkpoint = repo.checkpoint();
    let plan = Plan::build(&checkpoint, &Saved::Bf16.options(true, &[])).unwrap();
    assert!(unverified(&plan));
    let volume = volume(&checkpoint, plan.clone(), 1 << 20);
    let w = |layer: u64, name: &str, index: &[u64]| repo.at(&format!("{prefix}.layers.{layer}.{name}"), index);
    compare(&volume, &plan, "params.decoder.layers.layer_1.attention.in_proj_qkvz.kernel", &[6, 1, 28], &|at| {
        let (head, row) = (at[2] / 14, at[2] % 14);
        let row = match row {
            0..3 => head * 3 + row,
            3..6 => 6 + head * 3 + row - 3,
            6..10 => 12 + head * 4 + row - 6,
            _ => return w(1, "linear_attn.in_proj_z.weight", &[head * 4 + row - 10, at[0]]),
        };
        w(1, "linear_attn.in_proj_qkv.weight", &[row, at[0]])
    });
    compare(&volume, &plan, "params.decoder.layers.layer_2.attention.in_proj_ba.kernel", &[6, 1, 8], &|at| {
        let (head, row) = (at[2] / 4, at[2] % 4);
        let name = if row < 2 { "linear_attn.in_proj_b.weight" } else { "linear_attn.in_proj_a.weight" };
        w(2, name, &[head * 2 + row % 2, at[0]])
    });
    compare(&volume, &plan, "params.decoder.layers.layer_3.mlp.routed_experts.wi_1", &[2, 1, 6, 5], &|at| {
        w(3, "mlp.experts.gate_up_proj", &[at[0], 5 + at[3], at[2]])
    });
    let leaves = leaves_of(&plan);
    for (name, shape) in [
        ("layers.layer_0.attention.conv1d.kernel", "[4, 1, 1, 20]"),
        ("layers.layer_3.attention.attention.query.kernel", "[6, 1, 2, 8]"),
        ("layers.layer_3.attention.attention.out.kernel", "[8, 1, 6]"),
        ("layers.layer_0.mlp.routed_experts.wo", "[2, 1, 5, 6]"),
        ("logits_dense.kernel", "[6, 9]"),
    ] {
        assert_eq!(leaves[name], shape, "{name}");
    }
    let unscanned = Plan::build(&checkpoint, &Saved::Bf16.options(false, &[])).unwrap();
    assert_eq!(leaves_of(&unscanned)["layers_3.attention.attention.key.kernel"], "[6, 1, 4]");
    assert_eq!(leaves_of(&unscanned)["layers_0.mlp.routed_experts.wi_0"], "[2, 6, 5]");
}

#[test]
fn deepseek_with_an_indexer_and_kimi() {
    for (model_type, indexer) in [("deepseek_v32", true), ("deepseek_v3", false), ("kimi_k2", false)] {
        let config = serde_json::json!({
            "model_type": model_type, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "q_lora_rank": 5,
            "first_k_dense_replace": 1, "n_routed_experts": 2, "vocab_size": 9, "index_n_heads": 3, "tie_word_embeddings": false,
            "num_nextn_predict_layers": 1,
        });
        let mut shapes: Shapes = vec![
            ("model.embed_tokens.weight".to_owned(), vec![9, 8]),
            ("model.norm.weight".to_owned(), vec![8]),
            ("lm_head.weight".to_owned(), vec![9, 8]),
            ("model.layers.3.eh_proj.weight".to_owned(), vec![8, 16]),
        ];
        for layer in 0..3 {
            let rows: &[(&str, &[u64])] = &[
                ("input_layernorm.weight", &[8]),
                ("post_attention_layernorm.weight", &[8]),
                ("self_attn.q_a_proj.weight", &[5, 8]),
                ("self_attn.q_a_layernorm.weight", &[5]),
                ("self_attn.q_b_proj.weight", &[12, 5]),
                ("self_attn.kv_a_proj_with_mqa.weight", &[6, 8]),
                ("self_attn.kv_a_layernorm.weight", &[4]),
                ("self_attn.kv_b_proj.weight", &[14, 4]),
                ("self_attn.o_proj.weight", &[8, 6]),
            ];
            per_layer(&mut shapes, "model", layer, rows);
            if indexer {
                let rows: &[(&str, &[u64])] = &[
                    ("self_attn.indexer.wk.weight", &[4, 8]),
                    ("self_attn.indexer.wq_b.weight", &[12, 5]),
                    ("self_attn.indexer.weights_proj.weight", &[3, 8]),
                    ("self_attn.indexer.k_norm.weight", &[4]),
                    ("self_attn.indexer.k_norm.bias", &[4]),
                ];
                per_layer(&mut shapes, "model", layer, rows);
            }
            let projections = |name: &str| {
                ["gate", "up", "down"].map(|part| {
                    let shape = if part == "down" { vec![8, 3] } else { vec![3, 8] };
                    (format!("model.layers.{layer}.mlp.{name}{part}_proj.weight"), shape)
                })
            };
            if layer == 0 {
                shapes.extend(projections(""));
            } else {
                let rows: &[(&str, &[u64])] =
                    &[("mlp.gate.weight", &[2, 8]), ("mlp.gate.e_score_correction_bias", &[2])];
                per_layer(&mut shapes, "model", layer, rows);
                for name in ["shared_experts.", "experts.0.", "experts.1."] {
                    shapes.extend(projections(name));
                }
            }
        }
        let repo = Repo::new(&config, &shapes, DType::BF16);
        let plan = Plan::build(&repo.checkpoint(), &Saved::Bf16.options(true, &[])).unwrap();
        assert_eq!(unverified(&plan), indexer, "{model_type}");
        let leaves = leaves_of(&plan);
        let mut rows = vec![
            ("moe_layers.self_attention.wq_b.kernel", "[5, 2, 2, 6]"),
            ("dense_layers.self_attention.wkv_b.kernel", "[4, 1, 2, 7]"),
            ("moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.wi_0", "[2, 2, 8, 3]"),
            ("MoEBiasVar.decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias", "[2, 2]"),
        ];
        if indexer {
            rows.push(("moe_layers.self_attention.indexer.wq_b.kernel", "[5, 2, 3, 4]"));
            rows.push(("dense_layers.self_attention.indexer.k_norm.bias", "[4, 1]"));
            rows.push(("dense_layers.self_attention.indexer.weights_proj.kernel", "[8, 1, 3]"));
        }
        for (name, shape) in rows {
            assert_eq!(leaves[name], shape, "{model_type} {name}");
        }
    }
}

#[test]
fn gemma4_with_a_mixture_of_experts() {
    let config = serde_json::json!({
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 6, "vocab_size": 9,
            "attention_k_eq_v": true, "num_experts": 2,
        },
    });
    let prefix = "model.language_model";
    let mut shapes: Shapes =
        vec![(format!("{prefix}.embed_tokens.weight"), vec![9, 8]), (format!("{prefix}.norm.weight"), vec![8])];
    for layer in 0..6 {
        let d = if layer == 5 { 4 } else { 2 };
        let rows: &[(&str, &[u64])] = &[
            ("self_attn.q_proj.weight", &[2 * d, 8]),
            ("self_attn.k_proj.weight", &[d, 8]),
            ("self_attn.o_proj.weight", &[8, 2 * d]),
            ("self_attn.q_norm.weight", &[d]),
            ("self_attn.k_norm.weight", &[d]),
            ("input_layernorm.weight", &[8]),
            ("post_attention_layernorm.weight", &[8]),
            ("pre_feedforward_layernorm.weight", &[8]),
            ("post_feedforward_layernorm.weight", &[8]),
            ("pre_feedforward_layernorm_2.weight", &[8]),
            ("post_feedforward_layernorm_1.weight", &[8]),
            ("post_feedforward_layernorm_2.weight", &[8]),
            ("layer_scalar", &[1]),
            ("router.scale", &[8]),
            ("router.proj.weight", &[2, 8]),
            ("router.per_expert_scale", &[2]),
            ("experts.gate_up_proj", &[2, 6, 8]),
            ("experts.down_proj", &[2, 8, 3]),
            ("mlp.gate_proj.weight", &[5, 8]),
            ("mlp.up_proj.weight", &[5, 8]),
            ("mlp.down_proj.weight", &[8, 5]),
        ];
        per_layer(&mut shapes, prefix, layer, rows);
        if layer < 5 {
            per_layer(&mut shapes, prefix, layer, &[("self_attn.v_proj.weight", &[d, 8])]);
        }
    }
    let repo = Repo::new(&config, &shapes, DType::BF16);
    let checkpoint = repo.checkpoint();
    let plan = Plan::build(&checkpoint, &Saved::Bf16.options(true, &[])).unwrap();
    assert!(unverified(&plan));
    let volume = volume(&checkpoint, plan.clone(), 1 << 20);
    let name = "params.decoder.scanned_blocks.local_layers.mlp.moe_block.MoeBlock_0.wi_1";
    compare(&volume, &plan, name, &[2, 1, 5, 8, 3], &|at| {
        repo.at(&format!("{prefix}.layers.{}.experts.gate_up_proj", at[2]), &[at[0], 3 + at[4], at[3]])
    });
    let leaves = leaves_of(&plan);
    for (name, shape) in [
        ("scanned_blocks.global_layer.mlp.moe_block.MoeBlock_0.gate.kernel", "[8, 1, 2]"),
        ("scanned_blocks.global_layer.mlp.moe_block.MoeBlock_0.per_expert_scale", "[2, 1]"),
        ("scanned_blocks.global_layer.mlp.moe_block.shared_experts.wo.kernel", "[5, 1, 8]"),
        ("scanned_blocks.global_layer.self_attention.query.kernel", "[8, 1, 2, 4]"),
        ("scanned_blocks.local_layers.self_attention.value.kernel", "[8, 1, 5, 1, 2]"),
    ] {
        assert_eq!(leaves[name], shape, "{name}");
    }
    assert!(!leaves.contains_key("scanned_blocks.global_layer.self_attention.value.kernel"));
}

#[test]
fn qwen3_vl_keeps_the_text_model_and_splits_its_experts() {
    let config = serde_json::json!({
        "model_type": "qwen3_vl_moe",
        "text_config": {
            "model_type": "qwen3_vl_moe_text", "hidden_size": 8, "num_attention_heads": 2, "head_dim": 4, "num_hidden_layers": 2,
            "vocab_size": 9, "num_experts": 2,
        },
        "tie_word_embeddings": false,
    });
    let prefix = "model.language_model";
    let mut shapes: Shapes = vec![
        (format!("{prefix}.embed_tokens.weight"), vec![9, 8]),
        (format!("{prefix}.norm.weight"), vec![8]),
        ("lm_head.weight".to_owned(), vec![9, 8]),
        ("model.visual.patch_embed.proj.weight".to_owned(), vec![3, 2, 2, 2, 2]),
    ];
    for layer in 0..2 {
        let rows: &[(&str, &[u64])] = &[
            ("self_attn.q_proj.weight", &[8, 8]),
            ("self_attn.k_proj.weight", &[4, 8]),
            ("self_attn.v_proj.weight", &[4, 8]),
            ("self_attn.o_proj.weight", &[8, 8]),
            ("self_attn.q_norm.weight", &[4]),
            ("self_attn.k_norm.weight", &[4]),
            ("input_layernorm.weight", &[8]),
            ("post_attention_layernorm.weight", &[8]),
            ("mlp.gate.weight", &[2, 8]),
            ("mlp.experts.gate_up_proj", &[2, 8, 6]),
            ("mlp.experts.down_proj", &[2, 3, 8]),
        ];
        per_layer(&mut shapes, prefix, layer, rows);
    }
    let repo = Repo::new(&config, &shapes, DType::BF16);
    let checkpoint = repo.checkpoint();
    let plan = Plan::build(&checkpoint, &Saved::Bf16.options(true, &[])).unwrap();
    assert!(unverified(&plan));
    let volume = volume(&checkpoint, plan.clone(), 1 << 20);
    compare(&volume, &plan, "params.decoder.layers.moe_block.wi_1", &[2, 2, 8, 3], &|at| {
        repo.at(&format!("{prefix}.layers.{}.mlp.experts.gate_up_proj", at[1]), &[at[0], at[2], 3 + at[3]])
    });
    compare(&volume, &plan, "params.decoder.layers.moe_block.wo", &[2, 2, 3, 8], &|at| {
        repo.at(&format!("{prefix}.layers.{}.mlp.experts.down_proj", at[1]), &[at[0], at[2], at[3]])
    });
}

#[test]
fn gemma3_with_its_vision_tower() {
    let checkpoint = open(&fixture("gemma3").join("hf"));
    let mut options = options(true, "", &Value::Null);
    options.set.insert("multimodal".to_owned(), "true".to_owned());
    let plan = Plan::build(&checkpoint, &options).unwrap();
    assert!(unverified(&plan));
    let leaves = leaves_of(&plan);
    let encoder = "params.vision_encoder.Gemma3VisionEncoderLayer_0";
    for (name, shape) in [
        ("embedding.kernel", "[14, 14, 3, 32]"),
        ("pos_embedding", "[1, 4, 32]"),
        ("Transformer.encoderblock_1.MultiHeadDotProductAttention_0.query.kernel", "[32, 4, 8]"),
        ("Transformer.encoderblock_1.MultiHeadDotProductAttention_0.out.kernel", "[4, 8, 32]"),
        ("Transformer.encoderblock_0.MlpBlockViT_0.Dense_0.kernel", "[32, 56]"),
    ] {
        assert_eq!(leaves[format!("{encoder}.{name}").as_str()], shape, "{name}");
    }
    assert_eq!(leaves["params.vision_encoder.VisionEmbedder_0.mm_input_projection.w"], "[32, 48]");
}

/// Mistral is Mixtral without experts, and a multimodal model's text parts have other prefixes.
#[test]
fn relatives_are_converted_alike() {
    let (mut config, shapes) = llama(4, 2, 6, 10, 7, 11, 2);
    config["model_type"] = "mistral".into();
    let repo = Repo::new(&config, &shapes, DType::BF16);
    let checkpoint = repo.checkpoint();
    let plan = Plan::build(&checkpoint, &Saved::Bf16.options(true, &[])).unwrap();
    let mistral = volume(&checkpoint, plan.clone(), 1 << 20);
    #[allow(clippy::cast_possible_truncation, reason = "what numpy does")]
    let scale = (1.0 / 6f64.sqrt()) as f32;
    let query = "params.decoder.layers.self_attention.query.kernel";
    compare(&mistral, &plan, query, &[10, 2, 4, 6], &|at| {
        let name = format!("model.layers.{}.self_attn.q_proj.weight", at[1]);
        Saved::Bf16.round(repo.at(&name, &[at[2] * 6 + at[3], at[0]]) * scale)
    });
    assert_eq!(leaves_of(&plan)["layers.mlp.wi_0.kernel"], "[10, 2, 7]");
    // The same under the prefix of a model with vision, tied, with the frequencies that old converters left in.
    let text = config.clone();
    let config = serde_json::json!({"model_type": "mistral3", "text_config": text, "tie_word_embeddings": true});
    let mut config = config;
    config["text_config"]["tie_word_embeddings"] = true.into();
    let mut renamed: Shapes = shapes
        .iter()
        .filter(|(name, _)| name != "lm_head.weight")
        .map(|(name, shape)| (name.replacen("model.", "language_model.model.", 1), shape.clone()))
        .collect();
    renamed.push(("language_model.model.layers.0.self_attn.rotary_emb.inv_freq".to_owned(), vec![3]));
    let other = Repo::new(&config, &renamed, DType::BF16);
    let plan = Plan::build(&other.checkpoint(), &Saved::Bf16.options(true, &[])).unwrap();
    assert!(!leaves_of(&plan).contains_key("logits_dense.kernel"));
    assert_eq!(plan.tensors.len(), 2 + 9);
}

/// Query and key of models whose rotary embedding is stored in halves.
#[test]
fn llama_with_rotary_embedding_in_halves() {
    let (config, shapes) = llama(2, 1, 4, 6, 5, 7, 1);
    let repo = Repo::new(&config, &shapes, DType::BF16);
    let checkpoint = repo.checkpoint();
    let plan = Plan::build(&checkpoint, &Saved::Bf16.options(false, &[("rope", "halves")])).unwrap();
    let volume = volume(&checkpoint, plan.clone(), 1 << 20);
    compare(&volume, &plan, "params.decoder.layers_0.self_attention.key.kernel", &[6, 1, 4], &|at| {
        repo.at("model.layers.0.self_attn.k_proj.weight", &[at[2], at[0]])
    });
    let error = Plan::build(&checkpoint, &Saved::Bf16.options(false, &[("rope", "half")])).unwrap_err().to_string();
    assert_eq!(error, "layout maxtext/llama: rope: expected interleaved or halves");
}
