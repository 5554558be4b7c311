//! Small floats with an exponent for 32 of a row, matrix by matrix: compressed-tensors `mxfp4-pack-quantized` (Kimi K3) and `mxfp8-quantized`
//! (`MiniMax` M3), `ModelOpt` MXFP8, and the 4-bit experts of DeepSeek V4.
//!
//! `W = code * 2^(e - 127)`; exponent 255 is NaN. Codes of 4 bits are two a byte, the low one first: `X.weight_packed` U8, in DeepSeek V4 `X.weight` I8.
//! Exponents are `X.weight_scale` U8, in DeepSeek V4 `X.scale` `F8_E8M0`, of shape `[out, in/32]`. Experts that are stacked in one tensor are in
//! `mxfp4`.

use ckfs_tensor::DType;

use super::{
    by_module,
    quantization_config::{Library, ModuleQuantization, Sharing},
    row::{CODES, CodeForm, CodesSpec, PartExtents, PartSpec, PartType, ROW, RowScheme, SchemeRow, ShownBy},
};

/// The scheme.
pub(super) static MX: RowScheme = RowScheme { name: "mx", rows: &ROWS, read: by_module::read };

const EXPONENTS: PartSpec = PartSpec {
    suffixes: &[".weight_scale"],
    dtype: PartType::One(DType::U8),
    element: CodeForm::Own,
    extents: PartExtents::Grid,
};

static ROWS: [SchemeRow; 3] = [
    SchemeRow {
        label: "mxfp4, {count} weights",
        says: Some(&ModuleQuantization::Mxfp4),
        codes: CodesSpec {
            suffix: ".weight_packed",
            dtypes: &[DType::U8],
            shown: ShownBy::Name,
            element: CodeForm::E2m1,
            shape: "[out, in/2]",
            group: Some(32),
            ..CODES
        },
        parts: &[EXPONENTS],
        ..ROW
    },
    SchemeRow {
        label: "mxfp8, {count} weights",
        says: Some(&ModuleQuantization::Mxfp8),
        codes: CodesSpec { dtypes: &[DType::F8E4M3], shown: ShownBy::TypeOr(0), group: Some(32), ..CODES },
        parts: &[EXPONENTS],
        ..ROW
    },
    SchemeRow {
        label: "4-bit experts of DeepSeek V4, {count} weights",
        libraries: &[Library::Transformers],
        says: Some(&ModuleQuantization::Fp8(Sharing::Tensor)),
        codes: CodesSpec {
            dtypes: &[DType::I8],
            element: CodeForm::E2m1,
            shape: "[out, in/2]",
            group: Some(32),
            ..CODES
        },
        parts: &[PartSpec { suffixes: &[".scale"], dtype: PartType::One(DType::F8E8M0), ..EXPONENTS }],
        ..ROW
    },
];
