//! 4-bit integers of AWQ, as its kernel `gemm` reads them.
//!
//! `X.qweight` I32 `[in, out/8]`, `X.qzeros` I32 `[in/g, out/8]`, `X.scales` `[in/g, out]`: `W[o, i] = (q - z) * s`, stored the other way
//! round. Field `k` of a word, counted from its low bits, is column `[0, 2, 4, 6, 1, 3, 5, 7][k]` of the word's eight. The
//! product is rounded once, from f32; rounding it to the scale's f16 first gives another bf16 for 3 % of all elements.
//!
//! The kernels `gemv`, `marlin` and `exllama` have words in other orders. They stay raw.

use ckfs_tensor::{DType, Digit, IndexMap, Operand, Operation, Value};
use serde_json::{Value as Json, json};

use super::{
    Scheme,
    finds::{Finds, Summary},
    listed::{Exceptions, config_of, group_size, member, refuse_orphans},
    parts::{Kinds, floats, is_wide_float, module_of, needed, slot, unsigned},
    quantized::{Template, TemplateError},
    stored::Stored,
};

/// The scheme.
#[derive(Debug)]
pub(super) struct Awq;

/// How the codes' names end.
const CODES: &str = "qweight";
/// Codes of a word.
const FIELDS: u64 = 8;

/// All that distinguishes kinds of matrices.
#[derive(PartialEq, Eq, Hash)]
struct Kind {
    inner: u64,
    words: u64,
    group: u64,
    scale: DType,
}

impl Scheme for Awq {
    fn name(&self) -> &'static str {
        "awq"
    }

    fn find(&self, stored: &Stored<'_>, found: &mut Finds<'_>) -> Option<Summary> {
        let config = config_of(stored, "awq")?;
        refuse_orphans(stored, found, &["qzeros", "scales"], CODES);
        let configured = configured(config);
        let exceptions = Exceptions::of(config, "modules_to_not_convert");
        let mut kinds = Kinds::new();
        let mut count = 0u64;
        for (id, codes) in stored.iter() {
            let Some(module) = module_of(codes.name, CODES).filter(|_| !found.is_taken(id)) else { continue };
            let group = match &configured {
                Ok(_) if exceptions.has(module) => {
                    found.unsupported("awq, but its configuration leaves this tensor unquantized", Some(id));
                    continue;
                }
                Ok(group) => *group,
                Err(name) => {
                    found.unsupported(name, Some(id));
                    continue;
                }
            };
            count += 1;
            let zeros = needed(stored, found, (module, CODES), "qzeros");
            let scales = needed(stored, found, (module, CODES), "scales");
            let (Some(zeros), Some(scales)) = (zeros, scales) else { continue };
            let [inner, words] = *codes.shape else {
                found.refuse(codes.name, "shape [in, out/8]", format!("{:?}", codes.shape));
                continue;
            };
            let group = group.unwrap_or(inner).max(1);
            if !inner.is_multiple_of(group) {
                found.refuse(codes.name, format!("rows in groups of {group}"), format!("{inner} rows"));
                continue;
            }
            let scale = stored.tensor(scales);
            if !is_wide_float(scale.dtype) {
                let expected = format!("a float as the scale of {:?}", codes.name);
                found.refuse(scale.name, expected, scale.dtype.to_string());
                continue;
            }
            let kind = Kind { inner, words, group, scale: scale.dtype };
            if let Some(template) = kinds.template(found, codes.name, kind, template) {
                found.tensor(&format!("{module}.weight"), template, &[id, zeros, scales], None);
            }
        }
        let group = configured.ok().flatten();
        let groups = group.map_or_else(|| "a scale per column".to_owned(), |size| format!("a scale for {size}"));
        (count > 0).then(|| Summary {
            scheme: self.name(),
            text: format!("awq gemm: {count} weights of 4-bit integers, {groups}"),
            details: vec![("weights", json!(count)), ("group", json!(group))],
        })
    }
}

/// Rows that share a scale, `None` if all do, or the name of what is not decoded. What is not configured is as it is in
/// transformers: 4 bits, kernel `gemm`, zero points. Groups are never guessed.
fn configured(config: &Json) -> Result<Option<u64>, String> {
    let version = member(config, &["version", "format"]).map_or(Some("gemm"), Json::as_str).unwrap_or("unknown");
    if !version.eq_ignore_ascii_case("gemm") {
        return Err(format!("awq {}", version.to_lowercase()));
    }
    if let Some(bits) = member(config, &["bits", "w_bit"]).filter(|bits| **bits != 4) {
        return Err(format!("awq of {bits} bits"));
    }
    if member(config, &["zero_point"]).is_some_and(|zero| *zero != true) {
        return Err("awq without zero points".to_owned());
    }
    let size = member(config, &["group_size", "q_group_size"]).ok_or_else(|| "no group_size".to_owned());
    size.and_then(group_size).map_err(|what| format!("awq with {what}"))
}

fn template(kind: &Kind) -> Result<Template, TemplateError> {
    let (out, groups) = (kind.words.saturating_mul(FIELDS), kind.inner / kind.group);
    let extents = [kind.inner, out];
    let shape = slot(0, DType::F32, &extents)?.shape;
    let column = |stride| Digit::axis(&extents, 1, stride);
    // Even columns of a word come first, then the odd ones.
    let packed = |tensor, rows| Operand {
        tensor,
        field: unsigned(4),
        index: IndexMap::new(&[
            rows,
            column(32).grouped(FIELDS),
            column(16).turning(2),
            column(4).grouped(2).turning(4),
        ]),
    };
    let row = |stride| Digit::axis(&extents, 0, stride);
    let codes = packed(slot(0, DType::I32, &[kind.inner, kind.words])?, row(out * 4));
    let zeros = packed(slot(1, DType::I32, &[groups, kind.words])?, row(out * 4).grouped(kind.group));
    let scales = slot(2, kind.scale, &[groups, out])?;
    let scales = floats(scales, IndexMap::new(&[row(out).grouped(kind.group), column(1)]));
    let value = Value::of(codes).then(Operation::Subtract, zeros).then(Operation::Multiply, scales);
    Template::try_new(shape, value)?.transposed(&[1, 0])
}
