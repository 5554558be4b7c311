//! The way back: checkpoints with MaxText's leaves as the repositories that they come from.
//!
//! Each family's fixture is laid out for MaxText, which another test compares with MaxText's own converter, saved as a
//! safetensors file, and shown with the layout hf. Names, shapes and bytes are those of the repository, except where the
//! converter multiplies or adds: there an oracle of a few lines says what `to_huggingface` computes in f32.
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test fails by panicking")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    plan::{Layout, Plan, ViewOptions},
    read::EngineOptions,
    tensor::DType,
    volume::{FileSystem, ViewPlan, Volume, VolumeOptions},
};
use half::bf16;
use serde_json::Value;
use tempfile::TempDir;

fn fixture(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/maxtext").join(family)
}

fn open(path: &Path, options: &OpenOptions) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(path.to_str().unwrap(), options).unwrap_or_else(|error| panic!("{error}")))
}

fn volume(checkpoint: &Arc<Checkpoint>, plan: Plan) -> Volume {
    let views = vec![ViewPlan { name: String::new(), plan: Arc::new(plan) }];
    let engine = EngineOptions { tile_cache_bytes: 64 << 20, workers: 1, ..EngineOptions::default() };
    Volume::new(Arc::clone(checkpoint), views, VolumeOptions { engine, ..VolumeOptions::default() }).unwrap()
}

fn read(volume: &Volume, path: &str) -> Vec<u8> {
    let attr = volume.resolve(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let opened = volume.open(attr.ino).unwrap();
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < attr.size_bytes {
        let at = bytes.len() as u64;
        volume
            .read(attr.ino, opened.handle, at, 1 << 20, &mut |part| bytes.extend(part.to_vec().unwrap()))
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(bytes.len() as u64 > at, "{path} ends at {at} of {}", attr.size_bytes);
    }
    volume.release(attr.ino, opened.handle);
    bytes
}

/// Tensors of a plan: name, shape, dtype and bytes.
type Tensors = BTreeMap<String, (Vec<u64>, DType, Vec<u8>)>;

fn tensors(checkpoint: &Arc<Checkpoint>, plan: &Plan) -> Tensors {
    let volume = volume(checkpoint, plan.clone());
    let of = |tensor: &ckfs::plan::PlannedTensor| {
        let path = format!("full/{}", plan.path(tensor).join("/"));
        let shape = tensor.view.shape().extents().to_vec();
        (tensor.name.clone(), (shape, tensor.view.dtype(), read(&volume, &path)))
    };
    plan.tensors.iter().map(of).collect()
}

/// A checkpoint of MaxText's leaves, made from a family's fixture, with the file of all leaves.
fn save(directory: &Path, family: &str, scanned: bool, set: &[(&str, &str)]) -> PathBuf {
    let layout = Layout::find(if scanned { "maxtext" } else { "maxtext-unscanned" }).unwrap();
    let set = set.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let checkpoint = open(&fixture(family).join("hf"), &OpenOptions::default());
    let options = ViewOptions { layout, set, ..ViewOptions::default() };
    let plan = Plan::build(&checkpoint, &options).unwrap_or_else(|error| panic!("{family}: {error}"));
    let bytes = read(&volume(&checkpoint, plan), "safetensors/dev0.safetensors");
    let file = directory.join("leaves.safetensors");
    fs::write(&file, bytes).unwrap();
    file
}

/// The checkpoint with the configuration of the family.
fn with_config(file: &Path, family: &str, fill: bool) -> Arc<Checkpoint> {
    let hf = fixture(family).join("hf").display().to_string();
    let fill_from = fill.then(|| hf.clone());
    open(file, &OpenOptions { config_from: Some(hf), fill_from, ..OpenOptions::default() })
}

fn back(options: ViewOptions) -> ViewOptions {
    ViewOptions { layout: Layout::Hf, ..options }
}

fn float(bytes: &[u8], dtype: DType) -> Vec<f32> {
    match dtype {
        DType::BF16 => bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        DType::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        other => panic!("{other}"),
    }
}

fn bytes(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype {
        DType::BF16 => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
        DType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        other => panic!("{other}"),
    }
}

/// What comes back of a tensor, by `to_huggingface`'s arithmetic on what `to_maxtext` saves of it in bf16. `config` is the
/// text model's.
fn oracle(family: &str, name: &str, config: &Value, original: &[u8], dtype: DType) -> Vec<u8> {
    let hidden = config["hidden_size"].as_f64().unwrap();
    let head = config["head_dim"].as_f64().unwrap_or_else(|| hidden / config["num_attention_heads"].as_f64().unwrap());
    let round = |value: f32| bf16::from_f32(value).to_f32();
    let flush = |value: f32| if value.is_subnormal() { 0.0_f32.copysign(value) } else { value };
    #[allow(clippy::cast_possible_truncation, reason = "constants are rounded to f32")]
    let rounded = |value: f64| value as f32;
    let values = float(original, DType::BF16);
    let scaled = |there: f32, back: f32| values.iter().map(|x| round(x * there) * back).collect::<Vec<f32>>();
    let is_query = name.ends_with("q_proj.weight") && ["gemma2", "mixtral"].contains(&family);
    let found = if name.ends_with("q_proj.weight") && family == "llama3.1" {
        let (there, back) = (rounded(1.0 / head.sqrt()), rounded(head.sqrt()));
        values.iter().map(|x| flush(round(flush(flush(*x) * there)) * back)).collect()
    } else if is_query {
        scaled(rounded(1.0 / head.sqrt()), rounded(head.sqrt()))
    } else if name.ends_with("embed_tokens.weight") && ["gemma2", "gemma4"].contains(&family) {
        scaled(rounded(hidden.sqrt()), 1.0 / rounded(hidden.sqrt()))
    } else if name.ends_with("embed_tokens.weight") && family == "gemma3" {
        let root = round(rounded(hidden.sqrt()));
        scaled(root, 1.0 / root)
    } else if name.contains("norm") && ["gemma2", "gemma3"].contains(&family) {
        values.iter().map(|x| (x + 1.0) - 1.0).collect()
    } else {
        values
    };
    bytes(&found, dtype)
}

fn config_of(family: &str) -> Value {
    let text = fs::read_to_string(fixture(family).join("hf/config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    config.get("text_config").cloned().unwrap_or(config)
}

/// The prefix of the fixture's names, and that of the repository made back.
fn prefixes(family: &str) -> (&'static str, &'static str) {
    match family {
        "gemma3" => ("language_model.model.", "model."),
        "gemma4" => ("model.language_model.", "model."),
        _ => ("", ""),
    }
}

fn check_family(family: &str, scanned: bool) {
    let directory = TempDir::new().unwrap();
    let file = save(directory.path(), family, scanned, &[]);
    let checkpoint = with_config(&file, family, false);
    let original = open(&fixture(family).join("hf"), &OpenOptions::default());
    let stored = tensors(&original, &Plan::build(&original, &back(ViewOptions::default())).unwrap());
    let config = config_of(family);
    for dtype in [None, Some(DType::F32)] {
        let options = back(ViewOptions { dtype, ..ViewOptions::default() });
        let plan = Plan::build(&checkpoint, &options).unwrap_or_else(|error| panic!("{family}: {error}"));
        let found = tensors(&checkpoint, &plan);
        let (old, new) = prefixes(family);
        let made = |name: &str| name.strip_prefix(old).map_or_else(|| name.to_owned(), |rest| format!("{new}{rest}"));
        let left_out = |name: &str| {
            let words = ["vision_tower", "multi_modal_projector", "embed_vision", "mtp"];
            words.iter().any(|word| name.contains(word)) || (family == "deepseek3" && name.contains("layers.5."))
        };
        let expected: BTreeMap<String, &str> =
            stored.keys().filter(|name| !left_out(name)).map(|name| (made(name), name.as_str())).collect();
        let names: Vec<&String> = found.keys().collect();
        assert_eq!(names, expected.keys().collect::<Vec<_>>(), "{family} {scanned}");
        for (name, (shape, own, bytes)) in &found {
            let (old_shape, old_dtype, old_bytes) = &stored[expected[name]];
            assert_eq!(shape, old_shape, "{family} {name}");
            // The converter saves everything in bf16.
            let wanted = dtype.unwrap_or(DType::BF16);
            assert_eq!(*own, wanted, "{family} {name}");
            let old: Vec<u8> = match old_dtype {
                DType::BF16 => old_bytes.clone(),
                _ => self::bytes(&float(old_bytes, *old_dtype), DType::BF16),
            };
            assert!(*bytes == oracle(family, name, &config, &old, wanted), "{family} scanned={scanned} {name} {wanted}");
        }
    }
}

macro_rules! families {
    ($($test:ident: $family:literal;)*) => {$(
        #[test]
        fn $test() {
            check_family($family, true);
            check_family($family, false);
        }
    )*};
}

families! {
    deepseek_2_comes_back: "deepseek2";
    deepseek_3_comes_back: "deepseek3";
    gemma_2_comes_back: "gemma2";
    gemma_3_comes_back: "gemma3";
    gemma_4_comes_back: "gemma4";
    gpt_oss_comes_back: "gpt-oss";
    llama_3_1_comes_back: "llama3.1";
    mixtral_comes_back: "mixtral";
    olmo_3_comes_back: "olmo3";
    qwen_2_5_comes_back: "qwen2.5";
    qwen_3_comes_back: "qwen3";
    qwen_3_moe_comes_back: "qwen3-moe";
    qwen_3_next_comes_back: "qwen3-next";
}
