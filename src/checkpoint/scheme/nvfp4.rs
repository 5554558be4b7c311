//! 4-bit floats with an 8-bit float for 16 and one factor for a matrix: NVFP4, of compressed-tensors and of `ModelOpt`.
//!
//! compressed-tensors divides first: `W = e2m1 * (f32(s) / g)` of `X.weight_packed`, `X.weight_scale`, `X.weight_global_scale`. `ModelOpt` multiplies the
//! scales first: `W = e2m1 * (f32(s) * s2)` of `X.weight`, `X.weight_scale`, `X.weight_scale_2`. In f32 another order gives other numbers for a fifth
//! of all elements. Codes are U8 `[out, in/2]`, the low one first; scales `F8_E4M3` `[out, in/16]`; factors F32 `[1]` or `[]`. Code 8 is -0.0
//! (`ModelOpt`'s own function gives +0.0).

use ckfs_tensor::{DType, Operation};

use super::{
    by_module,
    quantization_config::{Factor, ModuleQuantization},
    row::{
        CODES, CodeAxes, CodeForm, CodesSpec, PartExtents, PartSpec, PartType, ROW, RowScheme, SchemeRow, ShownBy,
        ValueStep,
    },
};

/// The scheme.
pub(super) static NVFP4: RowScheme = RowScheme { name: "nvfp4", rows: &ROWS, read: by_module::read };

const PACKED: CodesSpec = CodesSpec {
    suffix: ".weight_packed",
    dtypes: &[DType::U8],
    shown: ShownBy::Name,
    element: CodeForm::E2m1,
    axes: CodeAxes::Rows,
    shape: "[out, in/2]",
    group: Some(16),
    ..CODES
};
const SCALES: PartSpec = PartSpec {
    suffixes: &[".weight_scale"],
    dtype: PartType::One(DType::F8E4M3),
    element: CodeForm::Own,
    extents: PartExtents::Grid,
};
const FACTOR: PartSpec = PartSpec { dtype: PartType::One(DType::F32), extents: PartExtents::Single, ..SCALES };

static ROWS: [SchemeRow; 2] = [
    SchemeRow {
        label: "nvfp4, {count} weights, scales are divided by weight_global_scale",
        says: Some(&ModuleQuantization::Nvfp4(Factor::Divides)),
        codes: PACKED,
        parts: &[SCALES, PartSpec { suffixes: &[".weight_global_scale"], ..FACTOR }],
        value: &[ValueStep { operation: Operation::Multiply, part: 0, first: &[(Operation::Divide, 1)] }],
        ..ROW
    },
    SchemeRow {
        label: "nvfp4, {count} weights, scales are multiplied by weight_scale_2",
        says: Some(&ModuleQuantization::Nvfp4(Factor::Multiplies)),
        codes: CodesSpec { suffix: ".weight", shown: ShownBy::TypeOr(1), ..PACKED },
        parts: &[SCALES, PartSpec { suffixes: &[".weight_scale_2"], ..FACTOR }],
        value: &[ValueStep { operation: Operation::Multiply, part: 0, first: &[(Operation::Multiply, 1)] }],
        unless: Some((".pre_quant_scale", "ModelOpt NVFP4 with pre_quant_scale")),
        ..ROW
    },
];
