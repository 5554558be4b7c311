//! Matrices of 8-bit floats with a scale per block, as DeepSeek, Qwen and `MiniMax` publish them.
//!
//! `W[i, j] = f32(q[i, j]) * f32(s[i / rows, j / columns])`; the last block of either axis may be partial. The scale of `X.weight`
//! is `X.weight_scale_inv`, `X.weight_scale` or `X.scale`, and a stack of matrices has a stack of scales. The block comes from
//! the configuration only: dividing the shapes gives the wrong block where the last one is partial (576 rows on 5 scale rows
//! are blocks of 128, not 115). A scale of another shape than the blocks make is refused, one number for all of a matrix too.

use ckfs_tensor::DType;
use serde_json::{Value as Json, json};

use super::{
    findings::SchemeFindings,
    parts::FP8,
    quantization_config::{Library, ModuleQuantization, QuantizationConfig, Sharing, block},
    row::{
        CODES, CodeForm, CodesCandidate, CodesSpec, FirstTensor, ModuleAnswer, ModuleConfig, PartExtents, PartSpec,
        PartType, ROW, RowScheme, SchemeRow,
    },
    stored::Stored,
};
use crate::{choose::CONFIG, problem::Problem};

/// The scheme.
pub(super) static BLOCK_FP8: RowScheme = RowScheme { name: "block_fp8", rows: &ROWS, read };

const MATRIX: SchemeRow = SchemeRow {
    label: "{count} weights with {scale} scales *{suffix}",
    codes: CodesSpec { dtypes: &FP8, types: "8-bit floats", may_be_partial: true, ..CODES },
    ..ROW
};
const SCALES: PartSpec = PartSpec {
    suffixes: &[".weight_scale_inv", ".weight_scale", ".scale"],
    // Bytes that are no floats are exponents by convention.
    dtype: PartType::Float(|dtype| dtype.is_float() || matches!(dtype, DType::F8E8M0 | DType::U8)),
    element: CodeForm::Own,
    extents: PartExtents::Grid,
};

static ROWS: [SchemeRow; 2] = [
    SchemeRow { parts: &[SCALES], ..MATRIX },
    SchemeRow {
        codes: CodesSpec { suffix: "", decoded: "", ..MATRIX.codes },
        parts: &[PartSpec { suffixes: &["_scale_inv", "_scale"], ..SCALES }],
        ..MATRIX
    },
];

/// The block of all modules that are quantized.
struct Blocks<'a> {
    config: QuantizationConfig<'a>,
    rows: u64,
    columns: u64,
}

fn read<'a>(
    _: &'static [SchemeRow],
    stored: &Stored<'a>,
    found: &mut SchemeFindings<'_>,
) -> Option<Box<dyn ModuleConfig + 'a>> {
    let config = QuantizationConfig::read(stored);
    let json = stored.config().filter(|_| config.library() == Some(Library::Transformers))?;
    let configured = json.get("weight_block_size").filter(|block| !block.is_null())?;
    let Some((rows, columns)) = block(configured) else {
        let what = format!("quantization_config.weight_block_size: expected two positive numbers, found {configured}");
        found.problem(Problem::of_file(CONFIG, what));
        return None;
    };
    Some(Box::new(Blocks { config, rows, columns }))
}

impl ModuleConfig for Blocks<'_> {
    fn of(&self, _: &Stored<'_>, at: &CodesCandidate<'_>) -> ModuleAnswer {
        // Quantized or not: this library's configuration says no more.
        if self.config.of(at.stem) == ModuleQuantization::Plain {
            return ModuleAnswer::Nothing;
        }
        ModuleAnswer::Stored(at.row, Sharing::Block(self.rows, self.columns))
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
