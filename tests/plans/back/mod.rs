//! The way back: checkpoints with MaxText's leaves as the repositories that they come from.
//!
//! Each family's fixture is laid out for MaxText, which another test compares with MaxText's own converter, saved as a
//! safetensors file, and shown with the layout hf. Names, shapes and bytes are those of the repository, except where the
//! converter multiplies or adds: there an oracle of a few lines says what `to_huggingface` computes in f32.
#![allow(clippy::unwrap_used, clippy::wildcard_enum_match_arm, reason = "a test fails by panicking")]

mod models;
mod random;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::common::repo;
use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    plan::{Embedded, Layout, Mesh, Plan, ViewOptions},
    read::EngineOptions,
    tensor::DType,
    volume::{FileSystem, ViewPlan, Volume, VolumeOptions},
};
use half::bf16;
use serde_json::{Value, json};
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
        let _ = volume
            .read(attr.ino, opened.handle, at, 1 << 20, &mut |part| {
                bytes.extend(part.to_vec().unwrap());
                ckfs::source::Replied::new()
            })
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
fn save(directory: &Path, family: &str, layout: &str, set: &[(&str, &str)]) -> PathBuf {
    let layout = repo::layout(layout);
    let set: BTreeMap<_, _> = set.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
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
    let file = save(directory.path(), family, if scanned { "maxtext" } else { "maxtext-unscanned" }, &[]);
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
            assert!(
                *bytes == oracle(family, name, &config, &old, wanted),
                "{family} scanned={scanned} {name} {wanted}"
            );
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

/// The repository of a fixture as it is.
fn repository(family: &str) -> (Arc<Checkpoint>, Tensors) {
    let checkpoint = open(&fixture(family).join("hf"), &OpenOptions::default());
    let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap();
    let tensors = tensors(&checkpoint, &plan);
    (checkpoint, tensors)
}

fn refusal(checkpoint: &Checkpoint, options: ViewOptions) -> String {
    Plan::build(checkpoint, &back(options)).expect_err("refused").to_string()
}

#[test]
fn megatrons_checkpoints_come_back_bit_for_bit() {
    for family in ["llama3.1", "qwen2.5", "qwen3", "qwen3-moe", "mixtral"] {
        let (_, stored) = repository(family);
        for (layout, padded) in [
            ("megatron", None),
            ("megatron-unscanned", None),
            ("megatron", Some(("vocab_size", "256"))),
            // Each expert by itself, gate and up apart.
            ("megatron-unscanned", Some(("gate_up", "apart"))),
        ] {
            let directory = TempDir::new().unwrap();
            let file = save(directory.path(), family, layout, padded.as_slice());
            let checkpoint = with_config(&file, family, false);
            let plan = Plan::build(&checkpoint, &back(ViewOptions::default()));
            let plan = plan.unwrap_or_else(|error| panic!("{family} {layout}: {error}"));
            assert!(tensors(&checkpoint, &plan) == stored, "{family} {layout} {padded:?}");
        }
    }
}

/// Blocks that tensor parallelism cuts as a whole are found in what is made too.
#[test]
fn what_comes_back_is_cut_as_the_repository_is() {
    for family in ["qwen3", "qwen3-moe"] {
        let specs = |checkpoint: &Checkpoint| -> BTreeMap<String, String> {
            let options = ViewOptions { mesh: Mesh::parse("tensor=2").unwrap(), ..ViewOptions::default() };
            let plan = Plan::build(checkpoint, &back(options)).unwrap_or_else(|error| panic!("{family}: {error}"));
            let text = |tensor: &ckfs::plan::PlannedTensor| {
                plan.spec(tensor).to_json(tensor.view.shape().rank(), &plan.mesh).to_string()
            };
            plan.tensors.iter().map(|tensor| (tensor.name.clone(), text(tensor))).collect()
        };
        let directory = TempDir::new().unwrap();
        let file = save(directory.path(), family, "megatron", &[]);
        let found = specs(&with_config(&file, family, false));
        let cut = |name: &str| found[name].as_str();
        assert_eq!(cut("model.layers.1.self_attn.q_proj.weight"), r#"["tensor",null]"#, "{family}");
        assert_eq!(cut("model.layers.1.self_attn.o_proj.weight"), r#"[null,"tensor"]"#, "{family}");
        assert_eq!(found, specs(&repository(family).0), "{family}");
    }
}

/// Megatron saves layers of two kinds one by one.
#[test]
fn megatrons_layers_with_and_without_experts_come_back() {
    let (checkpoint, mut tensors_of) = repository("qwen3-moe");
    let mut config = checkpoint.config().unwrap().clone();
    let [inner, hidden] = ["intermediate_size", "hidden_size"].map(|key| config[key].as_u64().unwrap());
    for only in [0, 1] {
        config["mlp_only_layers"] = serde_json::json!([only]);
        let mut wanted = std::mem::take(&mut tensors_of);
        wanted.retain(|name, _| !name.starts_with(&format!("model.layers.{only}.mlp.")));
        for (part, shape) in [("gate", [inner, hidden]), ("up", [inner, hidden]), ("down", [hidden, inner])] {
            let values: Vec<f32> =
                (0..inner * hidden).map(|number| (number % 251) as f32 + part.len() as f32).collect();
            let row = (shape.to_vec(), DType::BF16, bytes(&values, DType::BF16));
            wanted.insert(format!("model.layers.{only}.mlp.{part}_proj.weight"), row);
        }
        let directory = TempDir::new().unwrap();
        let hf = directory.path().join("hf");
        fs::create_dir(&hf).unwrap();
        fs::write(hf.join("config.json"), config.to_string()).unwrap();
        let rows = wanted.iter().map(|(name, (shape, dtype, _))| (name.as_str(), *dtype, shape.as_slice()));
        let mut text = ckfs::format::safetensors::write_header(rows, &[("format", "pt")], 8).unwrap().bytes;
        text.extend(wanted.values().flat_map(|(_, _, bytes)| bytes));
        fs::write(hf.join("model.safetensors"), text).unwrap();
        let repository = open(&hf, &OpenOptions::default());
        let options = ViewOptions { layout: repo::layout("megatron-unscanned"), ..ViewOptions::default() };
        let plan = Plan::build(&repository, &options).unwrap_or_else(|error| panic!("{error}"));
        let file = directory.path().join("leaves.safetensors");
        fs::write(&file, read(&volume(&repository, plan), "safetensors/dev0.safetensors")).unwrap();
        let config_from = Some(hf.display().to_string());
        let checkpoint = open(&file, &OpenOptions { config_from, ..OpenOptions::default() });
        let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap_or_else(|error| panic!("{error}"));
        assert!(tensors(&checkpoint, &plan) == wanted, "layer {only} has none");
        (_, tensors_of) = self::repository("qwen3-moe");
    }
}

/// Rows may lie, and numbers may mean, otherwise than names and shapes tell.
#[test]
fn what_megatron_says_of_its_weights_is_refused_where_it_is_not_assumed() {
    let directory = TempDir::new().unwrap();
    let checkpoint = open(&fixture("qwen3-moe").join("hf"), &OpenOptions::default());
    let options = ViewOptions { layout: repo::layout("megatron"), ..ViewOptions::default() };
    let saved = directory.path().join("saved");
    random::export(&volume(&checkpoint, Plan::build(&checkpoint, &options).unwrap()), "dcp", &saved);
    let said = |members: &str| {
        let text = format!(
            "dist:\n  rotary_interleaved: true\nmodel:\n  _target_: a.Provider\n{members}\nsignal:\n  use_mup: true\n"
        );
        fs::write(saved.join("run_config.yaml"), text).unwrap();
        with_config(&saved, "qwen3-moe", false)
    };
    let config = checkpoint.config().unwrap();
    let (heads, groups) = (&config["num_attention_heads"], &config["num_key_value_heads"]);
    let same = format!(
        "  rotary_interleaved: false\n  normalization: 'RMSNorm'\n  rotary_percent: 1\n  no_rope_freq: []\n  softmax_scale: null\n  \
         num_attention_heads: {heads}\n  num_query_groups: {groups}\n  window_size:\n  - 1\n  inner:\n    use_mup: true"
    );
    let (_, stored) = repository("qwen3-moe");
    let checkpoint = said(&same);
    let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap();
    assert!(tensors(&checkpoint, &plan) == stored);
    for (member, expected) in [
        ("rotary_interleaved: true", "rotary_interleaved=true, and the layout megatron assumes false"),
        ("moe_mlp_glu_interleave_size: 32", "moe_mlp_glu_interleave_size=32, and the layout megatron assumes none"),
        ("normalization: LayerNorm", "normalization=\"LayerNorm\", and the layout megatron assumes \"RMSNorm\""),
        ("no_rope_freq:\n  - 1", "no_rope_freq=\"several lines\", and the layout megatron assumes none"),
        ("rotary_percent: 0.5", "rotary_percent=0.5, and the layout megatron assumes 1.0"),
        ("num_query_groups: 1", "num_query_groups=1, and config.json says num_key_value_heads="),
    ] {
        let checkpoint = said(&format!("  {member}"));
        let error = refusal(&checkpoint, ViewOptions::default());
        assert!(error.contains(&format!("run_config.yaml: the arguments of the training say {expected}")), "{error}");
        // As it is stored it may be had.
        Plan::build(&checkpoint, &ViewOptions { layout: Layout::Stored, ..ViewOptions::default() }).unwrap();
    }
    // A member that is no number says nothing of a number, also where the text model's comes before that of the whole.
    said("  rotary_base: 77");
    let mut config = config.clone();
    config["rope_theta"] = json!(10000.0);
    config["text_config"] = json!({"rope_theta": {"full_attention": 10000.0}});
    fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
    let config_from = Some(directory.path().display().to_string());
    let checkpoint = open(&saved, &OpenOptions { config_from, ..OpenOptions::default() });
    let error = refusal(&checkpoint, ViewOptions::default());
    assert!(error.contains("rotary_base=77, and config.json says rope_theta=10000.0"), "{error}");
}

/// Rows of a matrix of `width` bytes a row.
fn rows(bytes: &[u8], width: usize, range: std::ops::Range<usize>) -> &[u8] {
    &bytes[range.start * width..range.end * width]
}

#[test]
fn megatron_fuses_by_groups_and_stacks_layers_first() {
    let (_, stored) = repository("qwen3-moe");
    let (heads, groups, size, hidden, layers, experts, width) = (6, 2, 8, 48, 3, 4, 2);
    let directory = TempDir::new().unwrap();
    let file = save(directory.path(), "qwen3-moe", "megatron", &[]);
    let saved = open(&file, &OpenOptions::default());
    let bytes_of = |name: &str| {
        let info = saved.tensor(saved.find(name).unwrap_or_else(|| panic!("{name}")));
        let mut bytes = vec![0; usize::try_from(info.span().len()).unwrap()];
        saved.source().read_into(info.file(), info.span().start(), &mut bytes).unwrap();
        (info.shape.to_vec(), bytes)
    };
    let original = |name: &str| &stored[name].2;
    let mut fused = Vec::new();
    let mut experts_fused = Vec::new();
    for layer in 0..layers {
        let part = |part: &str| original(&format!("model.layers.{layer}.self_attn.{part}_proj.weight"));
        let per_group = heads / groups * size;
        for group in 0..groups {
            fused.extend_from_slice(rows(part("q"), hidden * width, group * per_group..(group + 1) * per_group));
            for name in ["k", "v"] {
                fused.extend_from_slice(rows(part(name), hidden * width, group * size..(group + 1) * size));
            }
        }
        for expert in 0..experts {
            for name in ["gate", "up"] {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight");
                experts_fused.extend_from_slice(original(&name));
            }
        }
    }
    assert_eq!(bytes_of("decoder.layers.self_attention.linear_qkv.weight"), (vec![3, 80, 48], fused));
    assert_eq!(bytes_of("decoder.layers.mlp.experts.experts.linear_fc1.weight"), (vec![3, 4, 80, 48], experts_fused));
}

#[test]
fn the_prefixes_of_training_states_are_found_and_the_rest_is_left_out() {
    let (_, stored) = repository("qwen3");
    for prefix in ["params.", "train_state.model.", ""] {
        let directory = TempDir::new().unwrap();
        let file = save(directory.path(), "qwen3", "maxtext", &[]);
        let bytes = fs::read(&file).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let weights = tensors.iter().map(|(name, view)| (format!("{prefix}{name}"), view));
        let moments = tensors.iter().map(|(name, view)| (format!("opt_state.0.mu.{name}"), view));
        let renamed: Vec<_> = weights.chain(moments).collect();
        fs::write(&file, safetensors::serialize(renamed, None).unwrap()).unwrap();
        let checkpoint = with_config(&file, "qwen3", false);
        let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap_or_else(|error| panic!("{error}"));
        assert!(self::tensors(&checkpoint, &plan) == stored, "{prefix}");
        assert_eq!(plan.left_out.iter().map(|group| group.count).sum::<u64>(), tensors.len() as u64, "{prefix}");
    }
}

#[test]
fn a_padded_vocabulary_is_cut_and_a_cut_one_is_refused_or_filled() {
    let (_, stored) = repository("qwen2.5");
    for (size, is_complete) in [("256", true), ("100", false)] {
        let directory = TempDir::new().unwrap();
        let file = save(directory.path(), "qwen2.5", "maxtext", &[("vocab_size", size)]);
        let checkpoint = with_config(&file, "qwen2.5", false);
        if is_complete {
            let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap();
            assert!(tensors(&checkpoint, &plan) == stored);
            continue;
        }
        let error = refusal(&checkpoint, ViewOptions::default());
        assert_eq!(
            error,
            "2 problems:\n  \
             lm_head.weight: no leaf holds 100..160 of axis 0, whose extent is 160\n  \
             model.embed_tokens.weight: no leaf holds 100..160 of axis 0, whose extent is 160"
        );
        let checkpoint = with_config(&file, "qwen2.5", true);
        let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap();
        assert!(tensors(&checkpoint, &plan) == stored);
    }
}

#[test]
fn layers_stacked_on_another_axis_are_found_by_their_shapes() {
    let (_, stored) = repository("llama3.1");
    let directory = TempDir::new().unwrap();
    let file = save(directory.path(), "llama3.1", "maxtext", &[("param_scan_axis", "0")]);
    let checkpoint = with_config(&file, "llama3.1", false);
    let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap();
    assert!(plan.params.contains(&("param_scan_axis".to_owned(), "0".to_owned())));
    let found = tensors(&checkpoint, &plan);
    assert!(found.keys().eq(stored.keys()));
    assert!(found["model.layers.1.mlp.up_proj.weight"] == stored["model.layers.1.mlp.up_proj.weight"]);
}

#[test]
fn a_text_model_gets_its_vision_tower_back_from_the_repository_that_fills() {
    let (_, stored) = repository("gemma3");
    let directory = TempDir::new().unwrap();
    let file = save(directory.path(), "gemma3", "maxtext", &[]);
    let checkpoint = with_config(&file, "gemma3", true);
    let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap_or_else(|error| panic!("{error}"));
    let found = tensors(&checkpoint, &plan);
    assert_eq!(found.len(), stored.len());
    for (name, tensor) in stored.iter().filter(|(name, _)| name.contains("vision") || name.contains("projector")) {
        assert!(found[name] == *tensor, "{name}");
    }
    // Names are those of the repository that fills.
    assert!(found.keys().eq(stored.keys()));
    let config: Value = serde_json::from_slice(&read(&volume(&checkpoint, plan), "hf/config.json")).unwrap();
    assert_eq!(config["model_type"], "gemma3");
    let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap();
    assert!(!plan.warnings.iter().any(|warning| warning.contains("nothing is taken")), "{:?}", plan.warnings);
    // Without it the repository is that of the text model.
    let checkpoint = with_config(&file, "gemma3", false);
    let plan = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap();
    assert!(
        plan.warnings.iter().any(|warning| warning.contains("--fill-from SOURCE takes them")),
        "{:?}",
        plan.warnings
    );
    let config: Value = serde_json::from_slice(&read(&volume(&checkpoint, plan), "hf/config.json")).unwrap();
    assert_eq!(config["model_type"], "gemma3_text");
    assert_eq!(config["architectures"], serde_json::json!(["Gemma3ForCausalLM"]));
    assert_eq!(config["tie_word_embeddings"], true);
}

#[test]
fn a_repository_that_fills_nothing_is_warned_of() {
    let directory = TempDir::new().unwrap();
    let file = save(directory.path(), "llama3.1", "maxtext", &[]);
    let unused = |fill, options: ViewOptions| {
        let plan = Plan::build(&with_config(&file, "llama3.1", fill), &options).unwrap();
        plan.warnings.iter().any(|warning| warning.starts_with("nothing is taken from --fill-from"))
    };
    assert!(unused(true, back(ViewOptions::default())), "the checkpoint has all tensors");
    assert!(unused(true, ViewOptions { layout: Layout::Stored, ..ViewOptions::default() }));
    assert!(!unused(false, back(ViewOptions::default())));
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let directory = TempDir::new().unwrap();
    let file = save(directory.path(), "llama3.1", "maxtext", &[]);
    let alone = open(&file, &OpenOptions::default());
    assert_eq!(
        refusal(&alone, ViewOptions::default()),
        "config.json: expected one, since the names are those of the layout maxtext: give the model's directory or org/name by \
         --config-from"
    );
    let other = with_config(&file, "gemma3", false);
    assert_eq!(
        refusal(&other, ViewOptions::default()),
        "config.json: it is that of a model gemma3, for which the layout maxtext/gemma3 has 106 tensors, and the checkpoint has 2 \
         of them: expected the configuration of the model that was trained"
    );
    let set = |name: &str, value: &str| ViewOptions {
        set: [(name.to_owned(), value.to_owned())].into(),
        ..ViewOptions::default()
    };
    let llama = with_config(&file, "llama3.1", false);
    // A flag that contradicts the checkpoint.
    assert_eq!(
        refusal(&llama, set("scan", "false")),
        "--set scan=false: the tensors of the checkpoint are those of scan=true: leave the parameter out"
    );
    // A layout for repositories.
    for layout in ["maxtext", "vllm"] {
        let layout = Layout::Embedded(Embedded::find(layout).unwrap());
        let error = Plan::build(&llama, &ViewOptions { layout, ..ViewOptions::default() }).expect_err("refused");
        let error = error.to_string();
        assert!(
            error.contains("are those of the layout maxtext: without --layout it is shown as it is stored"),
            "{error}"
        );
    }
    let error = refusal(&llama, set("param_scan_axis", "0"));
    assert!(
        error.contains("params.decoder.layers.mlp.wi_0.kernel: expected shape [3, 48, 112] by config.json"),
        "{error}"
    );
    assert!(error.contains("found [48, 3, 112]"), "{error}");
    let error = refusal(&llama, set("nosuch", "1"));
    assert!(error.contains("there is no parameter \"nosuch\""), "{error}");
    // A leaf that is missing, and one that no rule knows.
    let bytes = fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let renamed: Vec<_> =
        tensors.iter().map(|(name, view)| (name.replace("decoder_norm.scale", "decoder_norm.bias"), view)).collect();
    fs::write(&file, safetensors::serialize(renamed, None).unwrap()).unwrap();
    let strange = with_config(&file, "llama3.1", false);
    let error = refusal(&strange, ViewOptions::default());
    assert!(
        error.contains("missing tensor params.decoder.decoder_norm.scale, needed for the layout maxtext/llama"),
        "{error}"
    );
    assert!(error.contains("unexpected tensor params.decoder.decoder_norm.bias"), "{error}");
}

#[test]
fn a_generated_repository_is_split_and_tells_its_dtype() {
    let directory = TempDir::new().unwrap();
    let file = save(directory.path(), "qwen3", "maxtext", &[]);
    let checkpoint = with_config(&file, "qwen3", false);
    let options = ViewOptions { dtype: Some(DType::F32), shard_bytes_max: Some(60_000), ..ViewOptions::default() };
    let plan = Plan::build(&checkpoint, &back(options)).unwrap();
    let volume = volume(&checkpoint, plan.clone());
    let json = |path: &str| serde_json::from_slice::<Value>(&read(&volume, path)).unwrap();
    assert_eq!(json("hf/config.json")["dtype"], "float32");
    let index = json("hf/model.safetensors.index.json");
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), plan.tensors.len());
    let total: u64 = plan.tensors.iter().map(ckfs::plan::PlannedTensor::bytes).sum();
    assert_eq!(index["metadata"]["total_size"], total);
    let files: std::collections::BTreeSet<&str> = map.values().map(|file| file.as_str().unwrap()).collect();
    assert!(files.len() > 2, "{files:?}");
    let mut seen = 0;
    for file in files {
        let bytes = read(&volume, &format!("hf/{file}"));
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert!(tensors.len() == 1 || tensors.iter().map(|(_, view)| view.data().len()).sum::<usize>() <= 60_000);
        for (name, view) in tensors.iter() {
            assert_eq!(map[name], file);
            assert_eq!(view.data(), read(&volume, &format!("full/{name}")), "{name}");
            seen += 1;
        }
    }
    assert_eq!(seen, plan.tensors.len());
}

/// A file of these leaves under other names, and with empty tensors of `more` names.
fn renamed(file: &Path, to: &Path, name: impl Fn(&str) -> String, more: &[&str]) {
    let bytes = fs::read(file).unwrap();
    let start = 8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().unwrap())).unwrap();
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
    let leaves = header.into_iter().filter(|(key, _)| key != "__metadata__");
    let mut leaves: serde_json::Map<String, Value> = leaves.map(|(key, value)| (name(&key), value)).collect();
    let end = bytes.len() - start;
    let empty = serde_json::json!({"dtype": "U32", "shape": [0], "data_offsets": [end, end]});
    leaves.extend(more.iter().map(|name| ((*name).to_owned(), empty.clone())));
    let header = serde_json::to_vec(&leaves).unwrap();
    let len = u64::try_from(header.len()).unwrap().to_le_bytes();
    fs::write(to, [&len[..], &header, &bytes[start..]].concat()).unwrap();
}

/// A tree of NNX has its arrays under the word `value`, no collection `params`, and perhaps a wrapper and state beside the weights.
#[test]
fn trees_of_nnx_are_the_same_checkpoint() {
    let directory = TempDir::new().unwrap();
    for layout in ["maxtext", "maxtext-unscanned"] {
        let file = save(directory.path(), "llama3.1", layout, &[]);
        let hf = |file: &Path| {
            let checkpoint = with_config(file, "llama3.1", false);
            let plan =
                Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap_or_else(|error| panic!("{error}"));
            (tensors(&checkpoint, &plan), plan.left_out.len())
        };
        let (expected, _) = hf(&file);
        let state = ["decoder.dropout.rngs.params.count.value", "decoder.aqt.scale.value"];
        for (prefix, more) in
            [("", &[][..]), ("", &state), ("base.", &[]), ("model.", &["optimizer.opt_state.mu.x.value"])]
        {
            let other = directory.path().join("nnx.safetensors");
            renamed(
                &file,
                &other,
                |leaf| format!("{prefix}{}.value", leaf.strip_prefix("params.").unwrap_or(leaf)),
                more,
            );
            let (found, left_out) = hf(&other);
            assert!(found == expected, "{layout} {prefix}: {:?}", found.keys());
            assert_eq!(left_out, more.len());
        }
        let other = directory.path().join("nnx.safetensors");
        renamed(&file, &other, |leaf| format!("params.{leaf}.value"), &[]);
        assert!(hf(&other).0 == expected, "{layout}: two collections");
        // Names of nobody: no repository has them.
        renamed(&file, &other, |leaf| format!("{}.array", leaf.strip_prefix("params.").unwrap_or(leaf)), &[]);
        let checkpoint = with_config(&other, "llama3.1", false);
        let error = Plan::build(&checkpoint, &back(ViewOptions::default())).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains("layers"), "{error}");
    }
}
