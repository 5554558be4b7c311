//! Matrices of 8-bit floats with a scale for all, for each row, or for a block: compressed-tensors `float-quantized` and
//! `naive-quantized` (GLM, Llama 4), FBGEMM (Llama 3.1 405B), `ModelOpt` FP8, and the fp8 of transformers without a block.
//!
//! `W[i, j] = f32(q[i, j]) * f32(s)`, in f32. `ModelOpt` itself casts both to the target before it multiplies, which gives other
//! numbers for a quarter of all elements in bf16. The scale of `X.weight` is `X.weight_scale`, in transformers `X.weight_scale_inv`, and is a
//! factor in both. The configuration says what shares it; shapes are never divided to find out.
//!
//! Experts in one tensor `X` `[experts, in, out]` have no `.weight` in their name. Their scale is `X_scale_inv` in transformers, `X_weight_scale` in
//! `ModelOpt`. FBGEMM has `X_scale` with one number for each expert and output, stored as `[experts, 1, out]` or as `[experts, out, 1]`.

use ckfs_tensor::DType;

use super::{
    findings::SchemeFindings,
    parts::{FP8, is_wide_float},
    quantization_config::{Library, ModuleQuantization, QuantizationConfig},
    row::{
        CODES, CodeForm, CodesCandidate, CodesSpec, ModuleAnswer, ModuleConfig, PartExtents, PartSpec, PartType, ROW,
        RowScheme, SchemeRow, ShownBy,
    },
    stored::Stored,
};

/// The scheme.
pub(super) static SCALED_FP8: RowScheme = RowScheme { name: "scaled_fp8", rows: &ROWS, read };

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
    element: CodeForm::Own,
    extents: PartExtents::Shared,
};

static ROWS: [SchemeRow; 5] = [
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

fn read<'a>(
    _: &'static [SchemeRow],
    stored: &Stored<'a>,
    _: &mut SchemeFindings<'_>,
) -> Option<Box<dyn ModuleConfig + 'a>> {
    let config = QuantizationConfig::read(stored);
    // Whether a block is configured, if only by mistake: blocks are another scheme.
    let block = stored.config().and_then(|config| config.get("weight_block_size")).filter(|block| !block.is_null());
    (config.library() != Some(Library::Transformers) || block.is_none())
        .then(|| Box::new(config) as Box<dyn ModuleConfig>)
}

impl ModuleConfig for QuantizationConfig<'_> {
    fn may(&self, row: usize) -> bool {
        ROWS[row].is_of(self.library())
    }

    fn of(&self, stored: &Stored<'_>, at: &CodesCandidate<'_>) -> ModuleAnswer {
        let ModuleQuantization::Fp8(sharing) = self.of(at.stem) else { return ModuleAnswer::Nothing };
        let scale = ROWS[at.row].part(stored, at.stem, 0).map(|scale| stored.tensor(scale).shape);
        if self.library() == Some(Library::Transformers)
            && scale.is_some_and(|scale| scale.iter().rev().take(2).product::<u64>() != 1)
        {
            let method = "fp8 with several scales a matrix, but config.json gives no weight_block_size";
            return ModuleAnswer::Unsupported(method.to_owned());
        }
        ModuleAnswer::Stored(at.row, sharing)
    }

    fn words(&self) -> (String, &'static str) {
        ("fp8, ".to_owned(), ", ")
    }
}
