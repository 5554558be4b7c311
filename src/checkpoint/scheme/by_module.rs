//! Small floats. Rows of which the configuration says module by module whether a weight is stored so: NVFP4 and MX, of compressed-tensors and of
//! `ModelOpt`.
//!
//! `mx`: small floats with an exponent for 32 of a row, matrix by matrix: compressed-tensors `mxfp4-pack-quantized` (Kimi K3) and `mxfp8-quantized`
//! (`MiniMax` M3), `ModelOpt` MXFP8, and the 4-bit experts of DeepSeek V4.
//!
//! `W = code * 2^(e - 127)`; exponent 255 is NaN. Codes of 4 bits are two a byte, the low one first: `X.weight_packed` U8, in DeepSeek V4 `X.weight` I8.
//! Exponents are `X.weight_scale` U8, in DeepSeek V4 `X.scale` `F8_E8M0`, of shape `[out, in/32]`. Experts that are stacked in one tensor are in
//! `mxfp4`.
//!
//! `nvfp4`: 4-bit floats with an 8-bit float for 16 and one factor for a matrix.
//!
//! compressed-tensors divides first: `W = e2m1 * (f32(s) / g)` of `X.weight_packed`, `X.weight_scale`, `X.weight_global_scale`. `ModelOpt` multiplies the
//! scales first: `W = e2m1 * (f32(s) * s2)` of `X.weight`, `X.weight_scale`, `X.weight_scale_2`. In f32 another order gives other numbers for a fifth
//! of all elements. Codes are U8 `[out, in/2]`, the low one first; scales `F8_E4M3` `[out, in/16]`; factors F32 `[1]` or `[]`. Code 8 is -0.0
//! (`ModelOpt`'s own function gives +0.0).
//!
//! `mxfp4`: the experts of gpt-oss: 4-bit floats with an exponent for 32, all experts of a layer in one tensor.
//!
//! `X_blocks` U8 `[experts, out, in/32, 16]` has two codes a byte, the low one first, and `X_scales` U8 `[experts, out, in/32]` bare
//! exponents: `W = e2m1 * 2^(e - 127)`. The decoded `X` is `[experts, in, out]`, as transformers has it: `gate_up_proj` `[experts,
//! hidden, 2 * inter]`, `down_proj` `[experts, inter, hidden]`. Biases are not quantized.
//!
//! Exponent 255 is NaN, as the OCP's definition of the format says, and code 8 is -0.0. transformers computes infinity and 0
//! for exponent 255, which no published file has.

use ckfs_tensor::{DType, Operation};
use serde_json::json;

use super::{
    findings::SchemeFindings,
    listed::{Exceptions, config_of, excepted},
    quantization_config::{Factor, Library, ModuleQuantization, QuantizationConfig, Sharing},
    row::{
        CODES, CodeAxes, CodeForm, CodesSpec, Configured, ModuleConfig, PART, PartExtents, PartSpec, PartType, ROW,
        Rows, SchemeRow, ShownBy, ValueStep,
    },
    stored::Stored,
};

const EXPONENTS: PartSpec = PartSpec { suffixes: &[".weight_scale"], ..PART };

/// Floats with an exponent for 32.
pub(super) static MX_ROWS: [SchemeRow; 3] = [
    SchemeRow {
        label: "mxfp4, {count} weights",
        says: Some(&ModuleQuantization::Mxfp4),
        codes: CodesSpec { axes: CodeAxes::Matrices, group: Some(32), ..PACKED },
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
const SCALES: PartSpec = PartSpec { dtype: PartType::One(DType::F8E4M3), ..EXPONENTS };
const FACTOR: PartSpec = PartSpec { dtype: PartType::One(DType::F32), extents: PartExtents::Single, ..SCALES };

/// 4-bit floats with an 8-bit float for 16 and one factor.
pub(super) static NVFP4_ROWS: [SchemeRow; 2] = [
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

/// Reads the configuration, if it is of a library that says of each module how it is quantized: [`SchemeRow::says`] is compared with it.
#[allow(clippy::unnecessary_wraps, reason = "as the reader of each scheme")]
pub(super) fn read<'a>(rows: Rows, stored: &Stored<'a>, _: &mut SchemeFindings<'_>) -> Configured<'a> {
    let config = QuantizationConfig::read(stored);
    let library = config.library();
    let may = |row: &SchemeRow| row.is_of(library) && row.says.is_some_and(|says| config.may_say(says));
    let possible = (0..rows.len()).filter(|row| may(&rows[*row])).collect();
    let modules = ModuleConfig::new(rows, move |stored, number, stem| {
        let row = &rows[number];
        let told = config.of(stem);
        // A head that was quantized although the configuration takes it out is what its codes and scales say.
        let is_stored_so = || config.takes_out(stem) && row.is_complete(stored, stem);
        let group = row.codes.group.filter(|_| row.says == Some(&told) || is_stored_so());
        Ok(group.map(|group| (number, Sharing::Group(group))))
    });
    Some(ModuleConfig { rows: possible, details: vec![("group", json!(rows[0].codes.group))], ..modules })
}

/// Elements that share an exponent.
const GROUP: u64 = 32;

/// Stacks of experts with exponents.
pub(super) static STACK_ROWS: [SchemeRow; 1] = [SchemeRow {
    label: "mxfp4, {count} stacks of experts",
    codes: CodesSpec {
        suffix: "_blocks",
        decoded: "",
        dtypes: &[DType::U8],
        shown: ShownBy::Name,
        element: CodeForm::E2m1,
        axes: CodeAxes::Groups(GROUP / 2),
        shape: "[experts, out, in/32, 16]",
        transposed: &[0, 2, 1],
        ..CODES
    },
    parts: &[PartSpec { suffixes: &["_scales"], ..PART }],
    ..ROW
}];

pub(super) fn read_stacks<'a>(rows: Rows, stored: &Stored<'a>, found: &mut SchemeFindings<'_>) -> Configured<'a> {
    let exceptions = Exceptions::of(config_of(stored, "mxfp4")?, "modules_to_not_convert");
    for (_, scales) in stored.iter().filter(|(_, scales)| scales.dtype == DType::U8) {
        if let Some(name) = scales.name.strip_suffix("_scales")
            && stored.find(&format!("{name}_blocks")).is_none()
        {
            found.refuse(scales.name, format!("codes {name}_blocks beside it"), "no such tensor");
        }
    }
    let modules = ModuleConfig::new(rows, move |_, row, stem| {
        if exceptions.has(stem) { Err(excepted("mxfp4")) } else { Ok(Some((row, Sharing::Group(GROUP)))) }
    });
    Some(ModuleConfig { details: vec![("group", json!(GROUP))], ..modules })
}
