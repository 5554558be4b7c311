//! Block fp8: the decoded tensors of a repository, against the formula of its publishers, and the refused repositories.
//!
//! The state protected here is which scale belongs to which element: the last blocks are partial, scales are in another file
//! than their weights, and values are compared as f32, where the order of operations shows.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests panic, and sizes are small")]

use std::path::Path;

use crate::common::repo::{Row, llama_config, llama_rows, row, write_repo};
use ckfs::{
    checkpoint::{Checkpoint, OpenOptions},
    plan::{CastRule, Dequantize, HfContent, LayerRanges, Layout, Pattern, Plan, ViewOptions},
    read::reference::evaluate,
    tensor::{DType, View},
};
use serde_json::{Value, json};

fn config() -> Value {
    json!({"model_type": "deepseek_v3", "dtype": "float16",
           "quantization_config": {"quant_method": "fp8", "weight_block_size": [3, 4]}})
}

fn open(dir: &Path) -> Result<Checkpoint, String> {
    Checkpoint::open(dir.to_str().unwrap(), &OpenOptions::default()).map_err(|error| error.to_string())
}

fn opened(files: &[&[Row]], config: &Value) -> Result<Checkpoint, String> {
    let dir = tempfile::tempdir().unwrap();
    write_repo(dir.path(), files, config);
    open(dir.path())
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

/// All bytes of a stored tensor.
fn stored(checkpoint: &Checkpoint, name: &str) -> Vec<u8> {
    let info = checkpoint.tensor(checkpoint.find(name).unwrap());
    let mut bytes = vec![0; info.span().len() as usize];
    checkpoint.source().read_into(info.file(), info.span().start(), &mut bytes).unwrap();
    bytes
}

fn values(checkpoint: &Checkpoint, view: &View) -> Vec<f32> {
    let read = |id, span: std::ops::Range<u64>| {
        Ok(stored(checkpoint, checkpoint.tensor(id).name)[span.start as usize..span.end as usize].to_vec())
    };
    f32s(&evaluate(view, 0..view.bytes().unwrap(), read).unwrap())
}

fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code < 128 { magnitude } else { -magnitude }
}

#[test]
fn blocks_and_stacks_are_decoded_by_the_formula() {
    let weights = [
        row("a.weight", DType::F8E4M3, &[7, 9]),
        row("b.weight", DType::F8E4M3, &[7, 9]),
        row("c.weight", DType::F8E4M3, &[5, 4]),
        row("d", DType::F8E4M3, &[2, 4, 5]),
        row("norm.weight", DType::BF16, &[9]),
    ];
    let scales = [
        row("a.weight_scale_inv", DType::F32, &[3, 3]),
        row("b.weight_scale_inv", DType::F32, &[3, 3]),
        row("c.weight_scale_inv", DType::F32, &[2, 1]),
        row("d_scale_inv", DType::F32, &[2, 2, 2]),
    ];
    let dir = tempfile::tempdir().unwrap();
    write_repo(dir.path(), &[&weights, &scales], &config());
    let checkpoint = open(dir.path()).unwrap();
    let found = checkpoint.quantized();
    let names: Vec<&str> = found.tensors.iter().map(|tensor| &*tensor.name).collect();
    assert_eq!(names, ["a.weight", "b.weight", "c.weight", "d"]);
    assert_eq!(found.schemes[0].text, "fp8 in blocks of 3x4, 4 weights with F32 scales *_scale_inv");
    for (tensor, scale) in found.tensors.iter().zip(scales.iter()) {
        assert_eq!((tensor.dtype, tensor.scheme), (DType::F16, "block_fp8"));
        let (codes, factors) = (stored(&checkpoint, &tensor.name), f32s(&stored(&checkpoint, &scale.0)));
        let extents = tensor.shape().extents();
        let (rows, columns) = (extents[extents.len() - 2] as usize, extents[extents.len() - 1] as usize);
        let decoded = values(&checkpoint, &tensor.view().unwrap());
        assert_eq!(decoded.len(), codes.len());
        for (n, value) in decoded.iter().enumerate() {
            let (matrix, i, j) = (n / (rows * columns), n / columns % rows, n % columns);
            let (high, wide) = (rows.div_ceil(3), columns.div_ceil(4));
            let at = (matrix * high + i / 3) * wide + j / 4;
            let expected = e4m3(codes[n]) * factors[at];
            let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
            assert!(same, "{} {n}: {value:e}, by the formula {expected:e}", tensor.name);
        }
    }
}

#[test]
fn all_disagreements_are_refused_by_name() {
    let rows = [
        row("a.weight", DType::F8E4M3, &[7, 9]),
        row("a.weight_scale_inv", DType::F32, &[3, 3]),
        row("b.weight", DType::F8E4M3, &[7, 9]),
        row("c.weight", DType::F8E4M3, &[7, 9]),
        row("c.weight_scale_inv", DType::F32, &[3, 2]),
        row("d.weight", DType::F8E4M3, &[7, 9]),
        row("d.weight_scale_inv", DType::I32, &[3, 3]),
        row("e.weight", DType::F8E4M3, &[7, 9]),
        row("e.weight_scale_inv", DType::F32, &[]),
    ];
    let error = opened(&[&rows], &config()).err().unwrap();
    for expected in [
        "tensor \"b.weight\": expected b.weight_scale_inv to decode it, found no such tensor",
        "tensor \"c.weight_scale_inv\": expected shape [3, 3], a scale for 3x4 of \"c.weight\" [7, 9], found [3, 2]",
        "tensor \"e.weight_scale_inv\": expected shape [3, 3], a scale for 3x4 of \"e.weight\" [7, 9], found []",
        "tensor \"d.weight_scale_inv\": expected a float as the scale of \"d.weight\", found I32",
    ] {
        assert!(error.contains(expected), "{error}");
    }
    // Without a configured block nothing is decoded.
    let plain = json!({"quantization_config": {"quant_method": "fp8"}});
    assert!(opened(&[&rows[..2]], &plain).unwrap().quantized().tensors.is_empty());
}

/// A small llama in blocks of 3 by 4, in two files.
fn llama() -> (tempfile::TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = llama_rows(3, DType::BF16);
    for at in 0..rows.len() {
        let (name, _, extents) = rows[at].clone();
        if name.contains("proj") {
            rows[at].1 = DType::F8E4M3;
            let grid = [extents[0].div_ceil(3), extents[1].div_ceil(4)];
            rows.push(row(&format!("{name}_scale_inv"), DType::F32, &grid));
        }
    }
    let mut config = llama_config(3);
    config["torch_dtype"] = json!("bfloat16");
    config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [3, 4]});
    let (a, b) = rows.split_at(rows.len() / 2);
    write_repo(dir.path(), &[a, b], &config);
    let checkpoint = open(dir.path()).unwrap();
    (dir, checkpoint)
}

/// Names and dtypes of a plan's tensors.
fn shown(plan: &Plan) -> Vec<(String, DType)> {
    plan.tensors.iter().map(|tensor| (tensor.name.clone(), tensor.view.dtype())).collect()
}

fn dtype_of(plan: &Plan, name: &str) -> Option<DType> {
    shown(plan).into_iter().find(|(shown, _)| shown == name).map(|(_, dtype)| dtype)
}

#[test]
fn decoding_leaves_other_tensors_unchanged_and_removes_scales() {
    let (_dir, checkpoint) = llama();
    let plan = |options: ViewOptions| Plan::build(&checkpoint, &options).unwrap();
    let raw = plan(ViewOptions::default());
    assert_eq!(dtype_of(&raw, "layers.scanned.wq"), Some(DType::F8E4M3));
    assert_eq!(dtype_of(&raw, "layers.scanned.wq_scale_inv"), Some(DType::F32));
    assert!(raw.decoded.is_empty());
    for (dequantize, expected) in [(Dequantize::Own, DType::BF16), (Dequantize::To(DType::F32), DType::F32)] {
        for layout in [Layout::Canonical, Layout::Hf] {
            let wq = if layout == Layout::Hf { "model.layers.0.self_attn.q_proj.weight" } else { "layers.scanned.wq" };
            let decoded = plan(ViewOptions { dequantize: Some(dequantize), layout, ..ViewOptions::default() });
            assert_eq!(dtype_of(&decoded, wq), Some(expected));
            let others = shown(&decoded).into_iter().filter(|(name, _)| name.contains("norm"));
            assert!(others.clone().count() > 0 && others.into_iter().all(|(_, dtype)| dtype == DType::BF16));
            assert!(shown(&decoded).iter().all(|(name, _)| !name.contains("scale")), "{:?}", shown(&decoded));
            assert_eq!((decoded.decoded[0].scheme, decoded.decoded[0].tensors, decoded.kept_raw), ("block_fp8", 21, 0));
            let text = |path: &str| decoded.hf.iter().find(|file| file.path == path).map(|file| file.content.clone());
            let Some(HfContent::Text(config)) = text("config.json") else { panic!("config.json is not rewritten") };
            let config: Value = serde_json::from_slice(&config).unwrap();
            assert_eq!((config.get("quantization_config"), &config["torch_dtype"]), (None, &json!(expected.name())));
            let Some(HfContent::Text(index)) = text("model.safetensors.index.json") else { panic!("no index") };
            assert!(!String::from_utf8(index).unwrap().contains("scale"));
        }
    }
}

#[test]
fn a_rule_keeps_a_weight_and_its_scale_as_stored() {
    let (_dir, checkpoint) = llama();
    for pattern in ["layers.scanned.wq", "*q_proj.weight"] {
        let keep = CastRule { pattern: Pattern::parse(pattern).unwrap(), dtype: None };
        let options = ViewOptions { dtype: Some(DType::BF16), casts: vec![keep], ..ViewOptions::default() };
        let plan = Plan::build(&checkpoint, &options).unwrap();
        assert_eq!(dtype_of(&plan, "layers.scanned.wq"), Some(DType::F8E4M3), "{pattern}");
        assert_eq!(dtype_of(&plan, "layers.scanned.wq_scale_inv"), Some(DType::F32), "{pattern}");
        assert_eq!(dtype_of(&plan, "layers.scanned.wk"), Some(DType::BF16), "{pattern}");
        assert_eq!(dtype_of(&plan, "layers.scanned.wk_scale_inv"), None, "{pattern}");
        assert_eq!((plan.decoded[0].tensors, plan.kept_raw), (18, 3), "{pattern}");
    }
}

/// Scales stay with their weights by their role, not by their names.
#[test]
fn selecting_layers_keeps_the_scales_of_raw_weights() {
    let (_dir, checkpoint) = llama();
    let mut options = ViewOptions { layout: Layout::Hf, ..ViewOptions::default() };
    options.subset.layers = Some(LayerRanges::parse("1..3").unwrap());
    options.subset.renumber = true;
    options.subset.exclude = vec![Pattern::parse("*q_proj.weight_scale_inv").unwrap()];
    options.subset.exclude.push(Pattern::parse("*k_proj.weight").unwrap());
    let names: Vec<String> = shown(&Plan::build(&checkpoint, &options).unwrap()).into_iter().map(|row| row.0).collect();
    let has = |name: &str| names.iter().any(|shown| shown == name);
    for layer in [0, 1] {
        assert!(has(&format!("model.layers.{layer}.self_attn.q_proj.weight")));
        assert!(has(&format!("model.layers.{layer}.self_attn.q_proj.weight_scale_inv")));
        assert!(!has(&format!("model.layers.{layer}.self_attn.k_proj.weight_scale_inv")));
    }
    assert!(!names.iter().any(|name| name.contains("layers.2.")));
}
