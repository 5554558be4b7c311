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
        CODES, CodesSpec, Configured, FirstTensor, ModuleAnswer, ModuleConfig, PART, PartExtents, PartSpec, PartType,
        ROW, SchemeRow, ShownBy,
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

pub(super) fn read_scaled<'a>(
    _: &'static [SchemeRow],
    stored: &Stored<'a>,
    _: &mut SchemeFindings<'_>,
) -> Configured<'a> {
    let config = QuantizationConfig::read(stored);
    // Blocks are another scheme, also those that are configured by mistake.
    configured_block(stored, &config).is_none().then(|| Box::new(config) as Box<dyn ModuleConfig>)
}

impl ModuleConfig for QuantizationConfig<'_> {
    fn may(&self, row: usize) -> bool {
        SCALED_ROWS[row].is_of(self.library())
    }

    fn of(&self, stored: &Stored<'_>, row: usize, stem: &str) -> ModuleAnswer {
        let ModuleQuantization::Fp8(sharing) = self.of(stem) else { return Ok(None) };
        let scale = SCALED_ROWS[row].part(stored, stem, 0).map(|scale| stored.tensor(scale).shape);
        if self.library() == Some(Library::Transformers)
            && scale.is_some_and(|scale| scale.iter().rev().take(2).product::<u64>() != 1)
        {
            return Err("fp8 with several scales a matrix, but config.json gives no weight_block_size".to_owned());
        }
        Ok(Some((row, sharing)))
    }

    fn words(&self) -> (String, &'static str) {
        ("fp8, ".to_owned(), ", ")
    }
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

/// The block of all modules that are quantized.
struct Blocks<'a> {
    config: QuantizationConfig<'a>,
    rows: u64,
    columns: u64,
}

pub(super) fn read_blocks<'a>(
    _: &'static [SchemeRow],
    stored: &Stored<'a>,
    found: &mut SchemeFindings<'_>,
) -> Configured<'a> {
    let config = QuantizationConfig::read(stored);
    let configured = configured_block(stored, &config)?;
    let (rows, columns) = found.taken(block(configured).ok_or_else(|| {
        let what = format!("quantization_config.weight_block_size: expected two positive numbers, found {configured}");
        Problem::of_file(CONFIG, what)
    }))?;
    Some(Box::new(Blocks { config, rows, columns }))
}

impl ModuleConfig for Blocks<'_> {
    fn of(&self, _: &Stored<'_>, row: usize, stem: &str) -> ModuleAnswer {
        // Quantized or not: this library's configuration says no more.
        if self.config.of(stem) == ModuleQuantization::Plain {
            return Ok(None);
        }
        let rows = if SINGLE_ROWS.iter().any(|end| stem.ends_with(end)) { 1 } else { self.rows };
        Ok(Some((row, Sharing::Block(rows, self.columns))))
    }

    fn words(&self) -> (String, &'static str) {
        (format!("fp8 in blocks of {}x{}, ", self.rows, self.columns), "; ")
    }

    fn details(&self, first: &FirstTensor) -> Vec<(&'static str, Json)> {
        vec![
            ("block", json!([self.rows, self.columns])),
            ("scale_suffix", json!(first.suffix)),
            ("scale_dtype", json!(first.scale.code())),
        ]
    }
}
