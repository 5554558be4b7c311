//! The experts of gpt-oss: 4-bit floats with an exponent for 32, all experts of a layer in one tensor.
//!
//! `X_blocks` U8 `[experts, out, in/32, 16]` has two codes a byte, the low one first, and `X_scales` U8 `[experts, out, in/32]` bare
//! exponents: `W = e2m1 * 2^(e - 127)`. The decoded `X` is `[experts, in, out]`, as transformers has it: `gate_up_proj` `[experts,
//! hidden, 2 * inter]`, `down_proj` `[experts, inter, hidden]`. Biases are not quantized.
//!
//! Exponent 255 is NaN, as the OCP's definition of the format says, and code 8 is -0.0. transformers computes infinity and 0
//! for exponent 255, which no published file has.

use ckfs_tensor::{DType, Field, Operation, Value};
use serde_json::json;

use super::{
    finds::{Finds, Scheme, Summary},
    listed::{Exceptions, config_of},
    parts::{Kinds, blocks, floats, packed, slot},
    quantized::{Template, TemplateError},
    stored::Stored,
};

/// The scheme.
#[derive(Debug)]
pub(super) struct Mxfp4;

/// Elements that share an exponent.
const GROUP: u64 = 32;

impl Scheme for Mxfp4 {
    fn name(&self) -> &'static str {
        "mxfp4"
    }

    fn find(&self, stored: &Stored<'_>, found: &mut Finds<'_>) -> Option<Summary> {
        let config = config_of(stored, "mxfp4")?;
        let exceptions = Exceptions::of(config, "modules_to_not_convert");
        let mut kinds = Kinds::new();
        let mut count = 0u64;
        for (id, codes) in stored.iter() {
            let Some(name) = codes.name.strip_suffix("_blocks") else {
                // Scales alone: their codes are missing.
                if let Some(name) = codes.name.strip_suffix("_scales")
                    && codes.dtype == DType::U8
                    && stored.find(&format!("{name}_blocks")).is_none()
                {
                    found.refuse(codes.name, format!("codes {name}_blocks beside it"), "no such tensor");
                }
                continue;
            };
            if exceptions.has(name) {
                found.unsupported("mxfp4, but its configuration leaves this tensor unquantized", Some(id));
                continue;
            }
            count += 1;
            let [experts, out, groups, 16] = *codes.shape else {
                found.refuse(codes.name, "shape [experts, out, in/32, 16]", format!("{:?}", codes.shape));
                continue;
            };
            let scales = format!("{name}_scales");
            let Some(scales) = stored.find(&scales) else {
                found.refuse(codes.name, format!("its exponents {scales}"), "no such tensor");
                continue;
            };
            let template = kinds.template(found, codes.name, [experts, out, groups], template);
            if let Some(template) = template {
                found.tensor(name, template, &[id, scales], None);
            }
        }
        (count > 0).then(|| Summary {
            scheme: self.name(),
            text: format!("mxfp4, {count} stacks of experts"),
            details: vec![("weights", json!(count)), ("group", json!(GROUP))],
        })
    }
}

fn template([experts, out, groups]: &[u64; 3]) -> Result<Template, TemplateError> {
    let inner = groups.saturating_mul(GROUP);
    let extents = [*experts, *out, inner];
    let codes = slot(0, DType::U8, &[*experts, *out, *groups, GROUP / 2])?;
    let scales = slot(1, DType::U8, &[*experts, *out, *groups])?;
    let shape = slot(0, DType::F32, &extents)?.shape;
    let value = Value::of(packed(codes, &extents, Field::e2m1()));
    let value = value.then(Operation::Multiply, floats(scales, blocks(&extents, (1, GROUP))));
    Template::try_new(shape, value)?.transposed(&[0, 2, 1])
}
