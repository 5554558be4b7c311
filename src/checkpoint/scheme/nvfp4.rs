//! 4-bit floats with an 8-bit float for 16 and one factor for a matrix: NVFP4, of compressed-tensors and of `ModelOpt`.
//!
//! compressed-tensors divides first: `W = e2m1 * (f32(s) / g)` of `X.weight_packed`, `X.weight_scale`, `X.weight_global_scale`. `ModelOpt` multiplies the
//! scales first: `W = e2m1 * (f32(s) * s2)` of `X.weight`, `X.weight_scale`, `X.weight_scale_2`. In f32 another order gives other numbers for a fifth
//! of all elements. Codes are U8 `[out, in/2]`, the low one first; scales `F8_E4M3` `[out, in/16]`; factors F32 `[1]` or `[]`. Code 8 is -0.0
//! (`ModelOpt`'s own function gives +0.0).

use ckfs_tensor::{DType, Field, Operation, Value};
use serde_json::json;

use super::{
    finds::{Finds, Scheme, Summary},
    parts::{Kinds, blocks, floats, module_of, needed, packed, scalar, slot},
    quantized::{Template, TemplateError},
    settings::{Factor, Settings, Told},
    stored::Stored,
};

/// The scheme.
#[derive(Debug)]
pub(super) struct Nvfp4;

/// Elements that share a scale.
const GROUP: u64 = 16;

/// Shape of the codes, kind of the factor, whether it has no axis.
type Kind = (Vec<u64>, Factor, bool);

impl Scheme for Nvfp4 {
    fn name(&self) -> &'static str {
        "nvfp4"
    }

    fn find(&self, stored: &Stored<'_>, found: &mut Finds<'_>) -> Option<Summary> {
        let settings = Settings::read(stored);
        if !settings.is_known() {
            return None;
        }
        let (word, of_matrix, factor) = if settings.is_compressed_tensors() {
            ("weight_packed", "weight_global_scale", Factor::Divides)
        } else {
            ("weight", "weight_scale_2", Factor::Multiplies)
        };
        if !settings.may_say(&Told::Nvfp4(factor)) {
            return None;
        }
        let mut kinds = Kinds::new();
        let mut count = 0u64;
        for (id, codes) in stored.iter() {
            let Some(module) = module_of(codes.name, word).filter(|_| !found.is_taken(id)) else { continue };
            let is_code = codes.dtype == DType::U8 || word != "weight";
            if !is_code && stored.find(&format!("{module}.{of_matrix}")).is_none() {
                continue;
            }
            if settings.of(module) != Told::Nvfp4(factor) {
                continue;
            }
            if factor == Factor::Multiplies && stored.find(&format!("{module}.pre_quant_scale")).is_some() {
                found.unsupported("ModelOpt NVFP4 with pre_quant_scale", Some(id));
                continue;
            }
            count += 1;
            let scale = needed(stored, found, (module, word), "weight_scale");
            let global = needed(stored, found, (module, word), of_matrix);
            let (Some(scale), Some(global)) = (scale, global) else { continue };
            let is_even = codes.shape.last().is_some_and(|bytes| bytes.is_multiple_of(GROUP / 2));
            if codes.shape.len() < 2 || !is_even {
                found.refuse(codes.name, "shape [out, in/2] with a multiple of 16 as in", format!("{:?}", codes.shape));
                continue;
            }
            let kind: Kind = (codes.shape.to_vec(), factor, stored.tensor(global).shape.is_empty());
            if let Some(template) = kinds.template(found, codes.name, kind, template) {
                found.tensor(&format!("{module}.weight"), template, &[id, scale, global], None);
            }
        }
        let order = match factor {
            Factor::Divides => "scales are divided by weight_global_scale",
            Factor::Multiplies => "scales are multiplied by weight_scale_2",
        };
        (count > 0).then(|| Summary {
            scheme: self.name(),
            text: format!("nvfp4, {count} weights, {order}"),
            details: vec![("weights", json!(count)), ("group", json!(GROUP))],
        })
    }
}

fn template((codes, factor, is_bare): &Kind) -> Result<Template, TemplateError> {
    let mut extents = codes.clone();
    let mut scales = codes.clone();
    if let (Some(columns), Some(groups)) = (extents.last_mut(), scales.last_mut()) {
        *columns = columns.saturating_mul(2);
        *groups = *columns / GROUP;
    }
    let codes = slot(0, DType::U8, codes)?;
    let scales = slot(1, DType::F8E4M3, &scales)?;
    let global = slot(2, DType::F32, if *is_bare { &[] } else { &[1] })?;
    let operation = match factor {
        Factor::Divides => Operation::Divide,
        Factor::Multiplies => Operation::Multiply,
    };
    let scale = Value::of(floats(scales, blocks(&extents, (1, GROUP)))).then(operation, scalar(global));
    let shape = slot(0, DType::F32, &extents)?.shape;
    Template::try_new(shape, Value::of(packed(codes, &extents, Field::e2m1())).then(Operation::Multiply, scale))
}
