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
    row::{CODES, Codes, Element, Extents, Part, PartType, ROW, Regular, Row, Shown},
};

/// The scheme.
pub(super) static MX: Regular = Regular { name: "mx", rows: &ROWS, read: by_module::read };

const EXPONENTS: Part = Part {
    suffixes: &[".weight_scale"],
    dtype: PartType::One(DType::U8),
    element: Element::Own,
    extents: Extents::Grid,
};

static ROWS: [Row; 3] = [
    Row {
        label: "mxfp4, {count} weights",
        says: Some(&ModuleQuantization::Mxfp4),
        codes: Codes {
            suffix: ".weight_packed",
            dtypes: &[DType::U8],
            shown: Shown::Name,
            element: Element::E2m1,
            shape: "[out, in/2]",
            group: Some(32),
            ..CODES
        },
        parts: &[EXPONENTS],
        ..ROW
    },
    Row {
        label: "mxfp8, {count} weights",
        says: Some(&ModuleQuantization::Mxfp8),
        codes: Codes { dtypes: &[DType::F8E4M3], shown: Shown::TypeOr(0), group: Some(32), ..CODES },
        parts: &[EXPONENTS],
        ..ROW
    },
    Row {
        label: "4-bit experts of DeepSeek V4, {count} weights",
        libraries: &[Library::Transformers],
        says: Some(&ModuleQuantization::Fp8(Sharing::Tensor)),
        codes: Codes { dtypes: &[DType::I8], element: Element::E2m1, shape: "[out, in/2]", group: Some(32), ..CODES },
        parts: &[Part { suffixes: &[".scale"], dtype: PartType::One(DType::F8E8M0), ..EXPONENTS }],
        ..ROW
    },
];
