//! Integers and small floats as MLX packs them.
//!
//! `X.weight` U32 `[.., in * b / 32]` holds codes side by side, low bits first, and `X.scales` one number for each group of a row. Mode `affine`:
//! `W = (q * s) + b` with `X.biases`, of 2, 4 and 8 bits, computed in f32 and rounded once. Its authors' kernels disagree: on
//! CPUs product and sum are rounded to bf16. `mxfp4` and `mxfp8`: the floats E2M1 and E4M3 with an exponent for 32; `nvfp4`: E2M1 with an E4M3 for 16.
//!
//! The configuration has `bits`, `group_size` and `mode` for all modules, and for some of them an object of their own, `true`, or
//! `false` for what is not quantized. What an object leaves out is as the library has it: `affine`, and the mode's own sizes.

use ckfs_tensor::{DType, Digit, Field, IndexMap, Operand, Operation, Value};
use serde_json::{Value as Json, json};

use super::{
    Scheme,
    finds::{Finds, Summary},
    listed::{member, refuse_orphans, text},
    parts::{Kinds, blocks, companion, floats, is_wide_float, module_of, needed, packed, slot, unsigned},
    quantized::{Template, TemplateError},
    stored::Stored,
};

/// The scheme.
#[derive(Debug)]
pub(super) struct Mlx;

/// How the codes' names end.
const CODES: &str = "weight";

/// How elements are coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Mode {
    /// Integers of this number of bits, with scales and biases of this type.
    Affine(u64, DType),
    Mxfp4,
    Mxfp8,
    Nvfp4,
}

/// What the configuration says of a module.
#[derive(Clone, Debug, PartialEq)]
struct Way {
    mode: String,
    bits: u64,
    group: u64,
}

/// All that distinguishes kinds of tensors.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    /// Of the stored words.
    words: Vec<u64>,
    mode: Mode,
    group: u64,
}

impl Scheme for Mlx {
    fn name(&self) -> &'static str {
        "mlx"
    }

    fn find(&self, stored: &Stored<'_>, found: &mut Finds<'_>) -> Option<Summary> {
        let config = configured(stored)?;
        let mut kinds = Kinds::new();
        let mut ways: Vec<(Way, u64)> = Vec::new();
        refuse_orphans(stored, found, &["scales", "biases"], CODES);
        for key in homeless(config, stored) {
            let what = format!("mlx, whose configuration has settings of its own for {key:?}, which is no module here");
            found.unsupported(&what, None);
        }
        for (id, codes) in stored.iter() {
            let Some(module) = module_of(codes.name, CODES).filter(|_| !found.is_taken(id)) else { continue };
            if codes.dtype != DType::U32 && companion(stored, module, "scales").is_none() {
                continue;
            }
            let way = match way(config, module) {
                Ok(way) => way,
                Err(name) => {
                    found.unsupported(&name, Some(id));
                    continue;
                }
            };
            if companion(stored, module, "global_scale").is_some() {
                found.unsupported(&format!("mlx {} with global_scale", way.mode), Some(id));
                continue;
            }
            match ways.iter_mut().find(|(other, _)| *other == way) {
                Some((_, count)) => *count += 1,
                None => ways.push((way.clone(), 1)),
            }
            let Some(scales) = needed(stored, found, (module, CODES), "scales") else { continue };
            let scale = stored.tensor(scales);
            let mode = match way.mode.as_str() {
                "mxfp4" => Mode::Mxfp4,
                "mxfp8" => Mode::Mxfp8,
                "nvfp4" => Mode::Nvfp4,
                _ if is_wide_float(scale.dtype) => Mode::Affine(way.bits, scale.dtype),
                _ => {
                    let expected = format!("a float as the scale of {:?}", codes.name);
                    found.refuse(scale.name, expected, scale.dtype.to_string());
                    continue;
                }
            };
            let mut operands = vec![id, scales];
            if matches!(mode, Mode::Affine(..)) {
                let Some(biases) = needed(stored, found, (module, CODES), "biases") else { continue };
                operands.push(biases);
            } else if let Some(biases) = companion(stored, module, "biases") {
                found.refuse(stored.tensor(biases).name, format!("no biases of mode {}", way.mode), "this tensor");
                continue;
            }
            let columns = codes.shape.last().map_or(0, |words| words.saturating_mul(32 / way.bits));
            if codes.shape.len() < 2 || !columns.is_multiple_of(way.group) {
                let expected = format!("shape [.., in * {} / 32] with groups of {}", way.bits, way.group);
                found.refuse(codes.name, expected, format!("{:?}", codes.shape));
                continue;
            }
            let kind = Kind { words: codes.shape.to_vec(), mode, group: way.group };
            if let Some(template) = kinds.template(found, codes.name, kind, template) {
                found.tensor(codes.name, template, &operands, None);
            }
        }
        let count: u64 = ways.iter().map(|(_, count)| count).sum();
        let texts: Vec<String> = ways
            .iter()
            .map(|(way, count)| {
                format!("{count} weights of {} bits, {}, a scale for {}", way.bits, way.mode, way.group)
            })
            .collect();
        (count > 0).then(|| Summary {
            scheme: self.name(),
            text: format!("mlx: {}", texts.join("; ")),
            details: vec![("weights", json!(count))],
        })
    }
}

/// The configuration, if it is MLX's: it names no method, and has bits and groups for all.
fn configured<'a>(stored: &Stored<'a>) -> Option<&'a Json> {
    let config = stored.config()?;
    let is_own = config.get("quant_method").is_none_or(|method| method == "mlx");
    (is_own && config.get("bits").is_some() && config.get("group_size").is_some()).then_some(config)
}

/// Modules with settings other than the general ones that are not there: the codes that they speak of may be under another name,
/// and would be read by the general settings, of another number of columns.
fn homeless<'a>(config: &'a Json, stored: &Stored<'_>) -> Vec<&'a str> {
    let general = way(config, "");
    let members = config.as_object().into_iter().flatten();
    let own = members.filter(|(_, value)| value.is_object()).map(|(key, _)| key.as_str());
    // Members that are no modules have objects without settings.
    let settings = ["bits", "group_size", "mode"];
    let own = own.filter(|key| settings.iter().any(|word| config[*key].get(word).is_some()));
    own.filter(|key| way(config, key) != general && companion(stored, key, CODES).is_none()).collect()
}

/// How the weight of this module is quantized, or the name of what is not decoded.
fn way(config: &Json, module: &str) -> Result<Way, String> {
    let told = match config.get(module) {
        None | Some(Json::Bool(true)) => config,
        Some(Json::Bool(false)) => {
            return Err("mlx, but its configuration leaves this tensor unquantized".to_owned());
        }
        Some(own @ Json::Object(_)) => own,
        Some(other) => return Err(format!("mlx with {other} for a module")),
    };
    let mode = match member(told, &["mode"]) {
        None => "affine",
        Some(_) => text(told, "mode").ok_or_else(|| "mlx of an unknown mode".to_owned())?,
    };
    let (bits, group) = match mode {
        "affine" => (4, 64),
        "mxfp4" => (4, 32),
        "mxfp8" => (8, 32),
        "nvfp4" => (4, 16),
        other => return Err(format!("mlx {other}")),
    };
    let number = |key: &str, own: u64| match member(told, &[key]) {
        None => Ok(own),
        Some(value) => value.as_u64().ok_or_else(|| format!("mlx {mode} with {key} {value}")),
    };
    let way = Way { mode: mode.to_owned(), bits: number("bits", bits)?, group: number("group_size", group)? };
    let is_known = if mode == "affine" {
        matches!(way.bits, 2 | 4 | 8) && way.group > 0
    } else {
        (way.bits, way.group) == (bits, group)
    };
    if is_known { Ok(way) } else { Err(format!("mlx {mode} of {} bits with a scale for {}", way.bits, way.group)) }
}

fn template(kind: &Kind) -> Result<Template, TemplateError> {
    let width = match kind.mode {
        Mode::Affine(bits, _) => bits,
        Mode::Mxfp4 | Mode::Nvfp4 => 4,
        Mode::Mxfp8 => 8,
    };
    let (mut extents, mut grid) = (kind.words.clone(), kind.words.clone());
    if let (Some(columns), Some(groups)) = (extents.last_mut(), grid.last_mut()) {
        *columns = columns.saturating_mul(32 / width);
        *groups = *columns / kind.group;
    }
    let shape = slot(0, DType::F32, &extents)?.shape;
    let codes = slot(0, DType::U32, &kind.words)?;
    let index = || blocks(&extents, (1, kind.group));
    let value = match kind.mode {
        Mode::Affine(bits, dtype) => {
            let scale = floats(slot(1, dtype, &grid)?, index());
            let bias = floats(slot(2, dtype, &grid)?, index());
            let field = unsigned(u32::try_from(bits).expect("at most 8, as checked"));
            let product = Value::of(packed(codes, &extents, field)).then(Operation::Multiply, scale);
            product.then(Operation::Add, bias)
        }
        Mode::Mxfp4 | Mode::Mxfp8 | Mode::Nvfp4 => {
            let codes = if kind.mode == Mode::Mxfp8 {
                // Bytes side by side in all of the tensor.
                let index = IndexMap::new(&[Digit::axis(&[shape.elements()], 0, 1)]);
                Operand { tensor: codes, field: Field::Float(DType::F8E4M3), index }
            } else {
                packed(codes, &extents, Field::e2m1())
            };
            let scale = if kind.mode == Mode::Nvfp4 { DType::F8E4M3 } else { DType::F8E8M0 };
            let scale = Operand { tensor: slot(1, DType::U8, &grid)?, field: Field::Float(scale), index: index() };
            Value::of(codes).then(Operation::Multiply, scale)
        }
    };
    Template::try_new(shape, value)
}
