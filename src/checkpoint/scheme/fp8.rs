//! Matrices of 8-bit floats with scales.
//!
//! `scaled_fp8`: matrices with a scale for all, for each row, or for a block: compressed-tensors `float-quantized` and
//! `naive-quantized` (GLM, Llama 4), FBGEMM (Llama 3.1 405B), `ModelOpt` FP8, and the fp8 of transformers without a block.
//!
//! `W[i, j] = f32(q[i, j]) * f32(s)`, in f32. `ModelOpt` itself casts both to the target before it multiplies, which gives other
//! numbers for a quarter of all elements in bf16. The scale of `X.weight` is `X.weight_scale`, in transformers `X.weight_scale_inv`, and is a
//! factor in both. The configuration says what shares it; shapes are never divided to find out.
//!
//! Experts in one tensor `X` `[experts, in, out]` have no `.weight` in their name. Their scale is `X_scale_inv` in transformers, `X_weight_scale` in
//! `ModelOpt`. FBGEMM has `X_scale` with one number for each expert and output, stored as `[experts, 1, out]` or as `[experts, out, 1]`.
//!
//! `block_fp8`: matrices with a scale per block, as DeepSeek, Qwen and `MiniMax` publish them.
//!
//! `W[i, j] = f32(q[i, j]) * f32(s[i / rows, j / columns])`; the last block of either axis may be partial. The scale of `X.weight`
//! is `X.weight_scale_inv`, `X.weight_scale` or `X.scale`, and a stack of matrices has a stack of scales. The block comes from
//! the configuration only: dividing the shapes gives the wrong block where the last one is partial (576 rows on 5 scale rows
//! are blocks of 128, not 115). A scale of another shape than the blocks make is refused, one number for all of a matrix too.
//! DeepSeek V4.1's tables of n-grams (Engram), of which programs look up single rows, have the configured columns but rows alone.

use ckfs_tensor::DType;
use serde_json::{Value as Json, json};

use super::{
    findings::SchemeFindings,
    parts::{FP8, is_wide_float},
    quantization_config::{Library, ModuleQuantization, QuantizationConfig, Sharing, block},
    row::{
        CODES, CodesSpec, Configured, ModuleConfig, PART, PartExtents, PartSpec, PartType, ROW, Rows, SchemeRow,
        ShownBy,
    },
    stored::Stored,
};
use crate::{choose::CONFIG, problem::Problem};

const MATRIX: SchemeRow = SchemeRow {
    label: "{count} weights with {sharing}",
    codes: CodesSpec { dtypes: &FP8, types: "8-bit floats", shown: ShownBy::TypeOr(0), may_be_partial: true, ..CODES },
    ..ROW
};
/// Experts in one tensor.
const STACK: SchemeRow = SchemeRow {
    codes: CodesSpec { suffix: "", decoded: "", shown: ShownBy::TypeAnd(0), ..MATRIX.codes },
    left_out: &["_input_scale"],
    ..MATRIX
};
const SCALE: PartSpec = PartSpec {
    suffixes: &[".weight_scale"],
    dtype: PartType::Float(|dtype| is_wide_float(dtype) || matches!(dtype, DType::F8E8M0)),
    extents: PartExtents::Shared,
    ..PART
};

/// Matrices with a scale for all, for each row, or for a block that compressed-tensors configures.
pub(super) static SCALED_ROWS: [SchemeRow; 5] = [
    SchemeRow {
        libraries: &[Library::CompressedTensors, Library::Fbgemm, Library::ModelOpt],
        parts: &[SCALE],
        ..MATRIX
    },
    SchemeRow {
        libraries: &[Library::Transformers],
        parts: &[PartSpec { suffixes: &[".weight_scale_inv", ".weight_scale"], ..SCALE }],
        ..MATRIX
    },
    SchemeRow {
        libraries: &[Library::Transformers],
        parts: &[PartSpec { suffixes: &["_scale_inv", "_scale"], ..SCALE }],
        ..STACK
    },
    SchemeRow {
        libraries: &[Library::ModelOpt],
        parts: &[PartSpec { suffixes: &["_weight_scale"], ..SCALE }],
        ..STACK
    },
    SchemeRow {
        libraries: &[Library::Fbgemm],
        codes: CodesSpec { by_column: true, ..STACK.codes },
        parts: &[PartSpec { suffixes: &["_scale"], ..SCALE }],
        ..STACK
    },
];

pub(super) fn read_scaled<'a>(rows: Rows, stored: &Stored<'a>, _: &mut SchemeFindings<'_>) -> Configured<'a> {
    let config = QuantizationConfig::read(stored);
    // Blocks are another scheme, also those that are configured by mistake.
    if configured_block(stored, &config).is_some() {
        return None;
    }
    let library = config.library();
    let possible = (0..rows.len()).filter(|row| rows[*row].is_of(library)).collect();
    let modules = ModuleConfig::new(rows, move |stored, row, stem| {
        let ModuleQuantization::Fp8(sharing) = config.of(stem) else { return Ok(None) };
        let scale = rows[row].part(stored, stem, 0).map(|scale| stored.tensor(scale).shape);
        if library == Some(Library::Transformers)
            && scale.is_some_and(|scale| scale.iter().rev().take(2).product::<u64>() != 1)
        {
            return Err("fp8 with several scales a matrix, but config.json gives no weight_block_size".to_owned());
        }
        Ok(Some((row, sharing)))
    });
    Some(ModuleConfig { rows: possible, words: ("fp8, ".to_owned(), ", "), ..modules })
}

const IN_BLOCKS: SchemeRow = SchemeRow {
    label: "{count} weights with {scale} scales *{suffix}",
    codes: CodesSpec { shown: ShownBy::Type, ..MATRIX.codes },
    ..ROW
};
const SCALES: PartSpec = PartSpec {
    suffixes: &[".weight_scale_inv", ".weight_scale", ".scale"],
    // Bytes that are no floats are exponents by convention.
    dtype: PartType::Float(|dtype| dtype.is_float() || matches!(dtype, DType::F8E8M0 | DType::U8)),
    ..PART
};

/// Matrices with a scale per block.
pub(super) static BLOCK_ROWS: [SchemeRow; 2] = [
    SchemeRow { parts: &[SCALES], ..IN_BLOCKS },
    SchemeRow {
        codes: CodesSpec { suffix: "", decoded: "", ..IN_BLOCKS.codes },
        parts: &[PartSpec { suffixes: &["_scale_inv", "_scale"], ..SCALES }],
        ..IN_BLOCKS
    },
];

/// The block of all matrices as transformers configures it.
fn configured_block<'a>(stored: &Stored<'a>, config: &QuantizationConfig<'_>) -> Option<&'a Json> {
    let json = stored.config.filter(|_| config.library() == Some(Library::Transformers))?;
    json.get("weight_block_size").filter(|block| !block.is_null())
}

/// Ends of modules whose blocks are of one row.
const SINGLE_ROWS: [&str; 1] = [".engram.embed"];

pub(super) fn read_blocks<'a>(of: Rows, stored: &Stored<'a>, found: &mut SchemeFindings<'_>) -> Configured<'a> {
    let config = QuantizationConfig::read(stored);
    let configured = configured_block(stored, &config)?;
    let (rows, columns) = found.taken(block(configured).ok_or_else(|| {
        let what = format!("quantization_config.weight_block_size: expected two positive numbers, found {configured}");
        Problem::of_file(CONFIG, what)
    }))?;
    let modules = ModuleConfig::new(of, move |_, row, stem| {
        // Quantized or not: this library's configuration says no more.
        if config.of(stem) == ModuleQuantization::Plain {
            return Ok(None);
        }
        let rows = if SINGLE_ROWS.iter().any(|end| stem.ends_with(end)) { 1 } else { rows };
        Ok(Some((row, Sharing::Block(rows, columns))))
    });
    let words = (format!("fp8 in blocks of {rows}x{columns}, "), "; ");
    Some(ModuleConfig { words, details: vec![("block", json!([rows, columns]))], tells_scale: true, ..modules })
}
