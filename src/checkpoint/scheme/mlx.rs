//! Integers and small floats as MLX packs them.
//!
//! `X.weight` U32 `[.., in * b / 32]` holds codes side by side, low bits first, and `X.scales` one number for each group of a row. Mode `affine`:
//! `W = (q * s) + b` with `X.biases`, of 2 to 6 and 8 bits, computed in f32 and rounded once. Its authors' kernels disagree: on
//! CPUs product and sum are rounded to bf16. `mxfp4` and `mxfp8`: the floats E2M1 and E4M3 with an exponent for 32; `nvfp4`: E2M1 with an E4M3 for 16.
//!
//! The configuration has `bits`, `group_size` and `mode` for all modules, and for some of them an object of their own, `true`, or
//! `false` for what is not quantized. What an object leaves out is as the library has it: `affine`, and the mode's own sizes.

use ckfs_tensor::{DType, Operation};
use serde_json::Value as Json;

use super::{
    findings::SchemeFindings,
    listed::{excepted, member, refuse_orphans, text},
    parts::is_wide_float,
    quantization_config::Sharing,
    row::{
        CODES, CodeAxes, CodeForm, CodesSpec, Configured, ModuleConfig, PART, PartSpec, PartType, ROW, Rows, SchemeRow,
        ShownBy, ValueStep, step,
    },
    stored::Stored,
};

/// How the codes' names end.
const CODES_WORD: &str = "weight";

/// A mode of the library: the sizes that it has by default, and where it has no others.
struct Mode {
    name: &'static str,
    bits: u64,
    group: u64,
    /// By number of bits, its rows.
    rows: &'static [(u64, usize)],
}

const MODES: [Mode; 4] = [
    Mode { name: "affine", bits: 4, group: 64, rows: &[(2, 0), (4, 1), (8, 2), (3, 6), (5, 7), (6, 8)] },
    Mode { name: "mxfp4", bits: 4, group: 32, rows: &[(4, 3)] },
    Mode { name: "mxfp8", bits: 8, group: 32, rows: &[(8, 4)] },
    Mode { name: "nvfp4", bits: 4, group: 16, rows: &[(4, 5)] },
];

/// The rows of the scheme.
pub(super) static ROWS: [SchemeRow; 9] = [
    affine("{count} weights of 2 bits, affine, {sharing}", "[.., in * 2 / 32]", 2),
    affine("{count} weights of 4 bits, affine, {sharing}", "[.., in * 4 / 32]", 4),
    affine("{count} weights of 8 bits, affine, {sharing}", "[.., in * 8 / 32]", 8),
    SchemeRow {
        label: "{count} weights of 4 bits, mxfp4, {sharing}",
        absent: Some((".biases", "biases of mode mxfp4")),
        ..FLOATS_OF_4_BITS
    },
    SchemeRow {
        label: "{count} weights of 8 bits, mxfp8, {sharing}",
        codes: CodesSpec { element: CodeForm::Float(DType::F8E4M3), shape: "[.., in * 8 / 32]", ..WORDS },
        absent: Some((".biases", "biases of mode mxfp8")),
        ..FLOATS_OF_4_BITS
    },
    SchemeRow {
        label: "{count} weights of 4 bits, nvfp4, {sharing}",
        parts: &[PartSpec { element: CodeForm::Float(DType::F8E4M3), ..EXPONENTS }],
        absent: Some((".biases", "biases of mode nvfp4")),
        ..FLOATS_OF_4_BITS
    },
    affine("{count} weights of 3 bits, affine, {sharing}", "[.., in * 3 / 32]", 3),
    affine("{count} weights of 5 bits, affine, {sharing}", "[.., in * 5 / 32]", 5),
    affine("{count} weights of 6 bits, affine, {sharing}", "[.., in * 6 / 32]", 6),
];

const fn affine(label: &'static str, shape: &'static str, bits: u32) -> SchemeRow {
    SchemeRow {
        label,
        codes: CodesSpec { element: CodeForm::Unsigned(bits), shape, ..WORDS },
        parts: &[FLOATS, PartSpec { suffixes: &[".biases"], dtype: PartType::Like(0), ..FLOATS }],
        value: MULTIPLIED_AND_ADDED,
        ..ROW
    }
}

const WORDS: CodesSpec = CodesSpec { dtypes: &[DType::U32], shown: ShownBy::TypeOr(0), axes: CodeAxes::Rows, ..CODES };
const FLOATS: PartSpec = PartSpec { suffixes: &[".scales"], dtype: PartType::Float(is_wide_float), ..PART };
const MULTIPLIED_AND_ADDED: &[ValueStep] = &[step(Operation::Multiply, 0), step(Operation::Add, 1)];
const EXPONENTS: PartSpec = PartSpec { suffixes: FLOATS.suffixes, ..PART };
const FLOATS_OF_4_BITS: SchemeRow = SchemeRow {
    codes: CodesSpec { element: CodeForm::E2m1, shape: "[.., in * 4 / 32]", ..WORDS },
    parts: &[EXPONENTS],
    ..ROW
};

/// The configuration of all modules, in which some have their own.
pub(super) fn read<'a>(rows: Rows, stored: &Stored<'a>, found: &mut SchemeFindings<'_>) -> Configured<'a> {
    let config = configured(stored)?;
    refuse_orphans(stored, found, &["scales", "biases"], CODES_WORD);
    for key in homeless(config, stored) {
        let what = format!("mlx, whose configuration has settings of its own for {key:?}, which is no module here");
        found.unsupported(&what, None);
    }
    let modules = ModuleConfig::new(rows, move |stored, _, stem| {
        let variant = variant(config, stem)?;
        if stored.companion(stem, "global_scale").is_some() {
            return Err(format!("mlx {} with global_scale", variant.mode));
        }
        Ok(Some((variant.row, Sharing::Group(variant.group))))
    });
    Some(ModuleConfig { words: ("mlx: ".to_owned(), "; "), ..modules })
}

/// The configuration, if it is MLX's: it names no method, and has bits and groups for all.
fn configured<'a>(stored: &Stored<'a>) -> Option<&'a Json> {
    let config = stored.config?;
    let is_own = config.get("quant_method").is_none_or(|method| method == "mlx");
    (is_own && config.get("bits").is_some() && config.get("group_size").is_some()).then_some(config)
}

/// Modules with settings other than the general ones that are not there: the codes that they speak of may be under another name,
/// and would be read by the general settings, of another number of columns.
fn homeless<'a>(config: &'a Json, stored: &Stored<'_>) -> Vec<&'a str> {
    let general = variant(config, "");
    let members = config.as_object().into_iter().flatten();
    let own = members.filter(|(_, value)| value.is_object()).map(|(key, _)| key.as_str());
    // Members that are no modules have objects without settings.
    let settings = ["bits", "group_size", "mode"];
    let own = own.filter(|key| settings.iter().any(|word| config[*key].get(word).is_some()));
    own.filter(|key| variant(config, key) != general && stored.companion(key, CODES_WORD).is_none()).collect()
}

/// How the weight of a module is quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Variant {
    mode: &'static str,
    group: u64,
    row: usize,
}

/// How the weight of this module is quantized, or the name of what is not decoded.
fn variant(config: &Json, module: &str) -> Result<Variant, String> {
    let own = match config.get(module) {
        None | Some(Json::Bool(true)) => config,
        Some(Json::Bool(false)) => return Err(excepted("mlx")),
        Some(own @ Json::Object(_)) => own,
        Some(other) => return Err(format!("mlx with {other} for a module")),
    };
    let name = match member(own, &["mode"]) {
        None => "affine",
        Some(_) => text(own, "mode").ok_or_else(|| "mlx of an unknown mode".to_owned())?,
    };
    let mode = MODES.iter().find(|mode| mode.name == name).ok_or_else(|| format!("mlx {name}"))?;
    let number = |key: &str, usual: u64| match member(own, &[key]) {
        None => Ok(usual),
        Some(value) => value.as_u64().ok_or_else(|| format!("mlx {name} with {key} {value}")),
    };
    let (bits, group) = (number("bits", mode.bits)?, number("group_size", mode.group)?);
    let row = mode.rows.iter().find(|(of, _)| *of == bits && group > 0);
    match row.filter(|_| name == "affine" || group == mode.group) {
        Some((_, row)) => Ok(Variant { mode: mode.name, group, row: *row }),
        None => Err(format!("mlx {name} of {bits} bits with a scale for {group}")),
    }
}
