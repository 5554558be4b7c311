//! The schemes by which weights are quantized: a closed list, `SCHEMES`.
//!
//! A scheme looks at the stored tensors and at the configuration (`Stored`) and tells what the repository's tensors are when
//! decoded (`SchemeFindings`). Nothing above this module knows a scheme: the plan sees tensors with a name, a shape and a dtype, whose
//! values are made by the one decoder of `tensor`. What no scheme claims stays as it is stored.
//!
//! # To add a scheme
//! Most schemes are data: a `row::SchemeRow` says the ends of names, types and shapes of codes and of what decodes them, the expression of
//! the value, and the decoded name; `row` says how to add one. In `by_module` are rows of which the configuration says module by module
//! whether a weight is stored so, and those of stacked experts; `awq`, `mlx` and `fp8` also read a configuration of their own.
//!
//! Code is for what a row cannot say: `gptq` and `pack_quantized` read tensors (`g_idx`, `weight_shape`), `bitsandbytes` and `torchao` texts
//! that describe a tensor. Write `src/checkpoint/scheme/<name>.rs` and add one line to `SCHEMES`. The file holds:
//!
//! 1. **A function `find`**, which is called once, when the repository is opened. Its word in `plan --json` is in `SCHEMES`.
//! 2. **Detection.** What the configuration says decides (`Stored::config`, `Stored::modelopt`, `Stored::metadata`); return `None`
//!    where it names another method. Then configuration and tensors must agree. Each tensor that does not is reported to
//!    `SchemeFindings::refuse` with tensor, expected, found: all of them, not the first; opening then fails. Never divide shapes to find a
//!    group, never take a dtype for proof. Modules are distinguished by the codes' names (`X.weight_packed`, `X.qweight`,
//!    `X_blocks`): go through `Stored::iter`, and find companions by name with `Stored::find`, which knows all files. Skip codes
//!    that `SchemeFindings::is_taken` reports, where a repository has several schemes.
//! 3. **Templates.** What all tensors have in common that are stored alike is a [`Template`]: the shape of the value, a
//!    [`Value`](ckfs_tensor::Value) whose tensors are *numbered operands* (`TensorId(0)` the codes, `TensorId(1)`, ... their scales,
//!    zero points, tables), each with the dtype and the shape that must be stored, and perhaps an order of axes
//!    ([`Template::transposed`]: gpt-oss and AWQ and GPTQ store what transformers has the other way round). An operand is read as
//!    a [`Field`](ckfs_tensor::Field) (float, integer of b bits, table) at an [`IndexMap`](ckfs_tensor::IndexMap) of the value's element
//!    number. Rows that end in unused codes need no trimming: the shape is the true one, the index strides over whole words.
//!    `parts::Kinds` makes a template once for each kind of tensor, by what distinguishes the kind. Only
//!    what is read with `Stored::read` needs one for each tensor: `g_idx` becomes a table of an index, bitsandbytes' nested
//!    statistics a table of codes and a constant.
//! 4. **Tensors.** `Kinds::add` takes the decoded name (`X.weight` of `X.weight_packed`; `gate_up_proj` of `gate_up_proj_blocks`), and the
//!    operands by number. It checks that what is stored has the template's dtypes and shapes and reports by name
//!    what has not, so `find` need not compare shapes that a template says. The decoded dtype is the model's own unless the
//!    scheme knows better (bitsandbytes).
//! 5. **Companions that no decoder reads** (`input_scale`, `k_scale`, `weight_shape`, `g_idx`): `SchemeFindings::leave_out`. They are shown with the
//!    raw tensors, and go when the repository is decoded.
//! 6. **What is stored so and cannot be decoded** (a variant that is not in the list, bits that are packed otherwise):
//!    `SchemeFindings::unsupported` with the name of the variant. The raw tensors are shown as they are; decoding is refused with that name.
//! 7. **The text of a [`Summary`]** of what was found, and its details, for the reader of `plan`.
//!
//! Configuration that gives modules to groups (`config_groups` with `targets` and `ignore`, `ModelOpt`'s `quantized_layers`) is read by
//! `quantization_config`: a scheme asks it what it says of a module. `parts` holds what schemes share. `unrecognized`, the last of the list, names
//! codes that no scheme has taken.
//!
//! Its tests, `tests/quantized/schemes/<name>.rs`: a repository in a temporary directory, `Checkpoint::open`, and the view of each
//! tensor of [`Checkpoint::quantized`](super::Checkpoint::quantized) against a formula written apart, as f32, where the order of
//! operations shows; and each mismatch refused by name. `scheme/mlx.rs` with `tests/quantized/inference/mlx.rs` is the model to
//! follow; `tests/quantized/schemes` has those of the libraries that models are trained from.
//!
//! What a scheme deliberately does not do: read weights, choose a dtype, rename for a layout. Schemes that scale a tensor by
//! something that is no affine index of it, and files tiled for one kind of accelerator, are not in the list.

mod awq;
mod bitsandbytes;
mod by_module;
mod comfy;
mod findings;
mod fp8;
mod gptq;
mod listed;
pub(crate) mod members;
mod mlx;
mod pack_quantized;
mod parts;
mod quantization_config;
mod quantized;
mod row;
mod stored;
mod torchao;
mod unrecognized;

pub use quantized::{Found, Quantization, Quantized, Summary, Template, Unsupported};

use self::findings::{SchemeFindings, Told};
pub(super) use self::{comfy::MARK as FILE_MARK, stored::Stored};
use super::problem::Problems;

/// How the tensors of a scheme are found, and what is said of them.
type Find = fn(&Stored<'_>, &mut SchemeFindings<'_>) -> Told;

/// The closed list, with the names that `plan --json` has. Where two schemes could claim one tensor, the first does.
static SCHEMES: [(&str, Find); 13] = [
    ("mxfp4", |stored, found| row::find(&by_module::STACK_ROWS, by_module::read_stacks, stored, found)),
    ("pack_quantized", pack_quantized::find),
    ("nvfp4", |stored, found| row::find(&by_module::NVFP4_ROWS, by_module::read, stored, found)),
    ("mx", |stored, found| row::find(&by_module::MX_ROWS, by_module::read, stored, found)),
    ("scaled_fp8", |stored, found| row::find(&fp8::SCALED_ROWS, fp8::read_scaled, stored, found)),
    ("block_fp8", |stored, found| row::find(&fp8::BLOCK_ROWS, fp8::read_blocks, stored, found)),
    ("awq", |stored, found| row::find(&awq::ROWS, awq::read, stored, found)),
    ("gptq", gptq::find),
    ("bitsandbytes", bitsandbytes::find),
    ("mlx", |stored, found| row::find(&mlx::ROWS, mlx::read, stored, found)),
    ("torchao", torchao::find),
    ("comfy_fp8", |stored, found| row::find(&comfy::ROWS, comfy::read, stored, found)),
    // The last: it names what no other has taken.
    ("rest", unrecognized::find),
];

/// Finds everything that is stored quantized by a known scheme.
pub(super) fn find(stored: &Stored<'_>, problems: &mut Problems) -> Found {
    let mut found = SchemeFindings::new(stored, problems);
    for (scheme, find) in &SCHEMES {
        found.scheme = scheme;
        let told = find(stored, &mut found);
        found.found.schemes.extend(told.map(|(text, details)| Summary { scheme, text, details }));
    }
    if found.has_tensors() {
        parts::leave_out_activations(stored, &mut found);
        if let Some(entry) = listed::broken(stored) {
            let method = format!("modules that {entry:?} leaves out, an expression that cannot be used here");
            found.unsupported(&method, None);
        }
    }
    if let Some(method) = members::not_followed(stored).filter(|_| found.has_tensors() || found.is_empty()) {
        found.unsupported(&method, None);
    }
    found.found.stale = stale(stored).filter(|_| found.is_empty());
    found.finish()
}

/// What the configuration calls its method, if it speaks of weights. Caches are quantized over plain weights.
fn stale(stored: &Stored<'_>) -> Option<String> {
    let files = [stored.config, stored.modelopt];
    let of_caches = |of: &serde_json::Value| {
        let members = [Some(of), of.get("quantization")].into_iter().flatten();
        let mut told = members.flat_map(|of| ["kv_cache_scheme", "kv_cache_quant_algo"].map(|key| of.get(key)));
        told.any(|value| value.is_some_and(|value| !value.is_null()))
    };
    if files.iter().flatten().any(|of| of_caches(of)) { None } else { unrecognized::method(stored) }
}
