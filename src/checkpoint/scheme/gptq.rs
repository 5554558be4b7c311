//! Integers of 4 and 8 bits, as GPTQ packs them.
//!
//! `X.qweight` I32 `[in * b / 32, out]` is packed along the *input* axis, `X.qzeros` I32 `[groups, out * b / 32]` along the output axis, both
//! low bits first; `X.scales` is `[groups, out]`. `W[o, i] = (q - z) * s`, stored the other way round, of the group `g_idx[i]`,
//! or `i / g` where there is no `X.g_idx`. The last group may be partial. The product is rounded once, from f32.
//!
//! Version 1 of the format, which is that of `checkpoint_format: gptq` and of none, stores zero points one too small. The sum wraps
//! within its field: a stored 15 of 4 bits is zero point 0. `gptq_v2` stores them as they are.
//!
//! `g_idx` is data: it is read when the repository is opened, and becomes a table in the index of zero points and scales.
//! Fields of 3, 5, 6 and 7 bits are packed in ways of their own, and stay raw.

use std::{collections::BTreeSet, sync::Arc};

use ckfs_tensor::{DType, Digit, Field, IndexMap, Operand, Operation, TensorId, Value, ViewError};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde_json::{Value as Json, json};

use super::{
    findings::{SchemeFindings, Told},
    listed::{Exceptions, config_of, excepted, group_size, member, refuse_orphans},
    parts::{Kinds, floats, group_order, is_scale, module_of, needed, slot, unsigned},
    quantized::Template,
    stored::Stored,
};
use crate::{PythonRegex, problem::Problem};

/// How the codes' names end.
const CODES: &str = "qweight";

/// A matrix and its companions.
struct Matrix<'a> {
    module: &'a str,
    /// Codes, zero points and scales.
    operands: [TensorId; 3],
    index: Option<TensorId>,
    inner: u64,
    out: u64,
    way: ModuleSettings,
}

/// How a module is quantized.
#[derive(Clone, Copy)]
struct ModuleSettings {
    bits: u64,
    /// Rows of a group; `None` is all.
    group: Option<u64>,
    /// Whether `g_idx` may have any order, if the configuration says so.
    act_order: Option<bool>,
}

/// All that distinguishes kinds of matrices.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    inner: u64,
    out: u64,
    bits: u64,
    group: u64,
    scale: DType,
    is_v1: bool,
    /// Groups of rows, where they are not in order.
    order: Option<Arc<[u64]>>,
}

/// Finds the tensors of the scheme.
pub(super) fn find(stored: &Stored<'_>, found: &mut SchemeFindings<'_>) -> Told {
    let config = Config::read(config_of(stored, "gptq")?);
    refuse_orphans(stored, found, &["qzeros", "scales", "g_idx"], CODES);
    config.refuse_homeless(stored, found);
    let matrices = matrices(stored, &config, found);
    // Small reads from wherever the repository is: many at a time.
    let orders: Vec<_> = (0..matrices.len()).into_par_iter().map(|at| order(stored, &matrices[at])).collect();
    let mut kinds = Kinds::new();
    let mut act_order = 0u64;
    for (matrix, order) in matrices.iter().zip(orders) {
        let Some(order) = found.taken(order) else { continue };
        act_order += u64::from(order.is_some());
        let [codes, _, scale] = matrix.operands.map(|id| stored.tensor(id));
        if !is_scale(found, &scale, codes.name) {
            continue;
        }
        let (inner, out, bits, group) = (matrix.inner, matrix.out, matrix.way.bits, matrix.group());
        let kind = Kind { inner, out, bits, group, scale: scale.dtype, is_v1: config.is_v1, order };
        kinds.add(found, kind, template, (&format!("{}.weight", matrix.module), &matrix.operands, None));
    }
    let count = matrices.len();
    let bits: BTreeSet<u64> = matrices.iter().map(|matrix| matrix.way.bits).collect();
    let texts: Vec<String> = bits.iter().map(u64::to_string).collect();
    let version = if config.is_v1 { 1 } else { 2 };
    let bits_text = texts.join("- and ");
    let text =
        format!("gptq version {version}: {count} weights of {bits_text}-bit integers, {act_order} with act-order");
    let (count, version, act_order) = (json!(count), json!(version), json!(act_order));
    let details = vec![("weights", count), ("bits", json!(bits)), ("version", version), ("with_act_order", act_order)];
    (!matrices.is_empty()).then_some((text, details))
}

/// What the configuration says.
struct Config<'a> {
    json: &'a Json,
    exceptions: Exceptions<'a>,
    is_v1: bool,
    /// Expressions of modules that are quantized otherwise, in order; without members, not at all.
    dynamic: Vec<(&'a str, PythonRegex, Option<&'a Json>)>,
    /// What is not decoded, of all matrices.
    unknown: Option<String>,
}

impl<'a> Config<'a> {
    fn read(config: &'a Json) -> Self {
        let mut unknown = None;
        let formats: Vec<&Json> =
            ["checkpoint_format", "format"].iter().filter_map(|key| member(config, &[key])).collect();
        let format = formats.first().map_or("gptq", |format| format.as_str().unwrap_or("of an unknown format"));
        if !["gptq", "gptq_v2"].contains(&format) {
            unknown = Some(format!("gptq {format}"));
        } else if formats.iter().any(|other| **other != format) {
            unknown = Some(format!("gptq {format} that is of another format too"));
        } else if member(config, &["is_marlin_format"]).is_some_and(|is_marlin| *is_marlin == true) {
            unknown = Some("gptq marlin".to_owned());
        } else if let Some(dtype) = member(config, &["pack_dtype"]).filter(|dtype| **dtype != "int32") {
            unknown = Some(format!("gptq packed as {dtype}"));
        }
        let mut dynamic = Vec::new();
        for (key, more) in config.get("dynamic").and_then(Json::as_object).into_iter().flatten() {
            let (pattern, more) = match key.strip_prefix("-:") {
                Some(pattern) => (pattern, None),
                None => (key.strip_prefix("+:").unwrap_or(key), Some(more)),
            };
            // As `re.match` does: from the start, not to the end.
            match PythonRegex::matching(pattern) {
                Some(regex) => dynamic.push((key.as_str(), regex, more)),
                None => unknown = Some(format!("gptq with {key:?}, an expression that is not matched here")),
            }
        }
        let exceptions = Exceptions::of(config, "modules_to_not_convert");
        Self { json: config, exceptions, is_v1: format == "gptq", dynamic, unknown }
    }

    /// Refuses settings of `dynamic` that are not the general ones and match no module: the codes that they speak of may be under
    /// another name.
    fn refuse_homeless(&self, stored: &Stored<'_>, found: &mut SchemeFindings<'_>) {
        let differs = |more: &Json| {
            ["bits", "group_size", "desc_act"]
                .iter()
                .any(|key| member(more, &[key]).is_some_and(|told| Some(told) != member(self.json, &[key])))
        };
        let own = self.dynamic.iter().filter(|(.., more)| more.is_some_and(differs));
        for (key, regex, _) in own {
            let mut names = stored.iter().map(|(_, info)| info.name);
            let matches =
                |name: &str| name.rsplit_once('.').is_some_and(|(module, _)| regex.matches(module) == Some(true));
            if !names.any(matches) {
                let what = format!(
                    "gptq, whose configuration has settings of its own for {key:?}, which matches no module here"
                );
                found.unsupported(&what, None);
            }
        }
    }

    /// How the weight of this module is quantized, or the name of what is not decoded.
    fn of(&self, module: &str) -> Result<ModuleSettings, String> {
        if let Some(unknown) = &self.unknown {
            return Err(unknown.clone());
        }
        let more = self.dynamic.iter().find(|(_, regex, _)| regex.matches(module) == Some(true));
        let more = more.map(|(.., more)| *more);
        if more == Some(None) || self.exceptions.has(module) {
            return Err(excepted("gptq"));
        }
        let more = more.flatten();
        let told = |key: &str| more.and_then(|more| member(more, &[key])).or_else(|| member(self.json, &[key]));
        let bits = told("bits").ok_or("gptq without bits")?;
        let bits = bits.as_u64().filter(|bits| [4, 8].contains(bits)).ok_or_else(|| format!("gptq of {bits} bits"))?;
        let group = told("group_size").ok_or_else(|| "no group_size".to_owned()).and_then(group_size);
        let group = group.map_err(|what| format!("gptq with {what}"))?;
        Ok(ModuleSettings { bits, group, act_order: told("desc_act").and_then(Json::as_bool) })
    }
}

/// All matrices that are packed so, and whose companions are there.
fn matrices<'a>(stored: &Stored<'a>, config: &Config<'_>, found: &mut SchemeFindings<'_>) -> Vec<Matrix<'a>> {
    let mut matrices = Vec::new();
    for (codes, info) in stored.iter() {
        let Some(module) = module_of(info.name, CODES).filter(|_| !found.is_taken(codes)) else { continue };
        let way = match config.of(module) {
            Ok(way) => way,
            Err(name) => {
                found.unsupported(&name, Some(codes));
                continue;
            }
        };
        let zeros = needed(stored, found, (module, CODES), "qzeros");
        let scales = needed(stored, found, (module, CODES), "scales");
        let index = stored.companion(module, "g_idx");
        if let Some(index) = index {
            found.leave_out(index);
        } else if way.act_order == Some(true) {
            found.refuse(info.name, format!("{module}.g_idx, which desc_act needs"), "no such tensor");
        }
        let (Some(zeros), Some(scales)) = (zeros, scales) else { continue };
        let [rows, out] = *info.shape else {
            let expected = format!("shape [in * {} / 32, out]", way.bits);
            found.refuse(info.name, expected, format!("{:?}", info.shape));
            continue;
        };
        let fields = 32 / way.bits;
        if !out.is_multiple_of(fields) {
            let expected = format!("a multiple of {fields} columns, whose zero points fill words");
            found.refuse(info.name, expected, format!("{:?}", info.shape));
            continue;
        }
        let inner = rows.saturating_mul(fields);
        matrices.push(Matrix { module, operands: [codes, zeros, scales], index, inner, out, way });
    }
    matrices
}

impl Matrix<'_> {
    /// Rows of a group.
    fn group(&self) -> u64 {
        self.way.group.unwrap_or(self.inner).max(1)
    }
}

/// The group of each row, if they are not in order.
fn order(stored: &Stored<'_>, matrix: &Matrix<'_>) -> Result<Option<Arc<[u64]>>, Problem> {
    let Some(id) = matrix.index else { return Ok(None) };
    let group = matrix.group();
    let order = group_order(stored, id, (matrix.inner, group), matrix.operands[0])?;
    if order.is_some() && matrix.way.act_order == Some(false) {
        let expected = format!("groups of {group} in order, as desc_act false says");
        return Err(Problem::of_tensor(stored.tensor(id).name, expected, "another order"));
    }
    Ok(order)
}

fn template(kind: &Kind) -> Result<Template, ViewError> {
    let extents = [kind.inner, kind.out];
    let shape = slot(0, DType::F32, &extents)?.shape;
    let (fields, groups) = (32 / kind.bits, kind.inner.div_ceil(kind.group));
    let width = if kind.bits == 4 { 4 } else { 8 };
    let row = |stride| Digit::axis(&extents, 0, stride);
    let column = |stride| Digit::axis(&extents, 1, stride);
    let of_group = |stride| match &kind.order {
        Some(order) => row(stride).through(Arc::clone(order)),
        None => row(stride).grouped(kind.group),
    };
    let codes = Operand {
        tensor: slot(0, DType::I32, &[kind.inner / fields, kind.out])?,
        field: unsigned(width),
        index: IndexMap::new(&[row(kind.out * 32).grouped(fields), row(kind.bits).turning(fields), column(32)]),
    };
    let zeros = Operand {
        tensor: slot(1, DType::I32, &[groups, kind.out / fields])?,
        field: if kind.is_v1 { Field::one_more(width) } else { unsigned(width) },
        index: IndexMap::new(&[of_group(kind.out * kind.bits), column(kind.bits)]),
    };
    let scales = slot(2, kind.scale, &[groups, kind.out])?;
    let scales = floats(scales, IndexMap::new(&[of_group(kind.out), column(1)]));
    let value = Value::of(codes).then(Operation::Subtract, zeros).then(Operation::Multiply, scales);
    Template::try_new(shape, value)?.transposed(&[1, 0])
}
