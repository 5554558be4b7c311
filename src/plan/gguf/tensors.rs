//! The tensors of a GGUF file, in the converter's order.

use std::collections::BTreeMap;

use ckfs_checkpoint::{Checkpoint, FileRole, GgufChange, GgufTarget, Quantized, Storage, TensorInfo};
use ckfs_config::GgufType;
use ckfs_format::gguf::WrittenTensor;
use ckfs_tensor::{
    Bits, DType, Digit, Element, EncodedMatrices, EncodedPart, Encoder, Field, IndexMap, Keep, Operand, Operation,
    Shape, TensorId, Value as Codes, View, ViewError,
};
use serde_json::{Map, Value};
use std::sync::Arc;

use super::{
    super::{naming::is_tower, problem::Problem, values::Values},
    hparams::Hparams,
};

/// Columns of a block.
const BLOCK: u64 = 32;
/// Ends of names that the converter leaves out.
const LEFT_OUT: [&str; 3] = [".attention.masked_bias", ".attention.bias", ".rotary_emb.inv_freq"];

/// What is in a file.
#[derive(Debug, Default)]
pub(super) struct TensorsInFile {
    pub(super) written: Vec<WrittenTensor>,
    pub(super) views: Vec<View>,
    /// Names of the repository.
    pub(super) left_out: Vec<String>,
    /// Number of the type of the file.
    pub(super) file_type: u32,
}

/// Number of a type of tensors in ggml, and that of a file of which most are of it.
const fn codes(of: GgufType) -> (u32, u32) {
    match of {
        GgufType::F32 => (0, 0),
        GgufType::F16 => (1, 1),
        GgufType::Q8_0 => (8, 7),
        GgufType::Bf16 => (30, 32),
    }
}

/// The same of MXFP4.
const MXFP4: (u32, u32) = (39, 38);

/// Whether a tensor's codes are kept.
fn is_kept(info: &TensorInfo<'_>) -> bool {
    info.quantized().is_some_and(|stack| stack.scheme == "mxfp4")
}

/// All tensors as the converter reads them: by files, and by names in each.
pub(super) fn ordered(checkpoint: &Checkpoint) -> Vec<(TensorId, TensorInfo<'_>)> {
    let weights = checkpoint.files().iter().filter(|file| file.role == FileRole::Weights);
    let paths: BTreeMap<_, &str> = weights.filter_map(|file| Some((file.file?, file.path.as_str()))).collect();
    let mut found: Vec<_> = checkpoint.tensors().collect();
    found.sort_by_key(|(id, info)| (paths.get(&checkpoint.file_of(*id)).copied(), info.name));
    found
}

/// The type that the first matrix in 16 bits has.
pub(super) fn own_type(ordered: &[(TensorId, TensorInfo<'_>)]) -> GgufType {
    let is_plain = |info: &TensorInfo<'_>| !matches!(info.storage, Storage::Quantized(_)) && info.shape.len() >= 2;
    let mut dtypes =
        ordered.iter().filter(|(_, info)| is_plain(info) && !is_tower(info.name)).map(|(_, info)| info.dtype);
    let first = dtypes.find(|dtype| matches!(*dtype, DType::BF16 | DType::F16));
    if first == Some(DType::BF16) { GgufType::Bf16 } else { GgufType::F16 }
}

impl TensorsInFile {
    /// The tensors of a model. `rows` are those of the embedding, if it may have more than are written, `words` those of the head that
    /// score a text, if it does.
    ///
    /// # Errors
    /// Every problem with a tensor's values or name.
    pub(super) fn of(
        ordered: &[(TensorId, TensorInfo<'_>)],
        values: &Values<'_>,
        hparams: &Hparams,
        (of, rows, words): (GgufType, Option<u64>, Option<[u64; 2]>),
    ) -> Result<Self, Vec<Problem>> {
        let (mut tensors, mut problems) = (Self { file_type: codes(of).1, ..Self::default() }, Vec::new());
        for (name, factors) in rotary_factors(hparams).map_err(|reason| vec![config_problem(reason)])? {
            let fill = |value: &f32| View::fill(Shape::try_new(&[1]).expect("one"), Element::f32(*value));
            let view = View::concat(0, &factors.iter().map(fill).collect::<Vec<_>>());
            let pushed = view.and_then(|view| tensors.push(name, &view, of));
            problems.extend(pushed.err().map(|error| Problem::View { name: name.to_owned(), error }));
        }
        let (kept, ordered): (Vec<_>, Vec<_>) = ordered.iter().partition(|(_, info)| is_kept(info));
        for (_, info) in &kept {
            let pushed = tensors.keep(values.checkpoint(), info, hparams);
            problems.extend(pushed.err().map(|error| Problem::View { name: info.name.to_owned(), error }));
        }
        if !kept.is_empty() && of != GgufType::Q8_0 {
            tensors.file_type = MXFP4.1;
        }
        let layers = hparams.count("num_hidden_layers").unwrap_or(u64::MAX);
        let mut experts: BTreeMap<String, StackedExperts> = BTreeMap::new();
        for (id, info) in &ordered {
            let name = info.name.replace("language_model.", "");
            let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
            let is_beyond = layer.is_some_and(|(number, _)| number.parse().is_ok_and(|number: u64| number >= layers));
            let is_head = hparams.family.tables.is_tied && name == "lm_head.weight";
            if is_beyond || is_head || is_tower(&name) || LEFT_OUT.iter().any(|end| name.ends_with(end)) {
                tensors.left_out.push(info.name.to_owned());
                continue;
            }
            let targets = hparams.family.targets(&name, &|key| hparams.count_of(key));
            if targets.is_empty() {
                let reason = "no GGUF tensor is made of it: expected the names of the model's releases".to_owned();
                problems.push(Problem::Tensor { name: info.name.to_owned(), reason });
            }
            let mut add = || -> Result<(), Problem> {
                let named = |error| Problem::View { name: info.name.to_owned(), error };
                let mut view = values.view(*id, values.dtype_of(*id, &[info.name]))?;
                if let Some(rows) = rows.filter(|rows| *rows < info.shape[0] && name == "model.embed_tokens.weight") {
                    view = view.slice(0, 0, rows, 1).map_err(named)?;
                }
                // The converter computes in F16 with what is stored so.
                if view.dtype() != DType::F16 {
                    view = view.cast(DType::F32).map_err(named)?;
                }
                let is_tied = hparams.get("tie_word_embeddings") == Some(Value::Bool(true));
                let head = if is_tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
                if let Some(words) = words.filter(|_| name == head) {
                    let rows = view.gather(0, &words).map_err(named)?;
                    tensors.push("cls.output.weight", &rows, of).map_err(named)?;
                    if !is_tied {
                        return Ok(());
                    }
                }
                for target in &targets {
                    let view = changed(&view, target, hparams).map_err(named)?;
                    let Some(expert) = target.expert else {
                        tensors.push(&target.name, &view, of).map_err(named)?;
                        continue;
                    };
                    let layer = layer.map_or_else(String::new, |(number, _)| number.to_owned());
                    let of_layer = experts.entry(layer).or_default();
                    of_layer.entry(target.name.clone()).or_default().insert(expert, view);
                    let counts = of_layer.values().map(|of_kind| of_kind.len() as u64).sum::<u64>();
                    if Some(counts) == hparams.count_of("expert_count").map(|count| count * 3) {
                        for (name, of_kind) in std::mem::take(of_layer) {
                            let stack = View::stack(0, &of_kind.into_values().collect::<Vec<_>>());
                            stack.and_then(|stack| tensors.push(&name, &stack, of)).map_err(named)?;
                        }
                    }
                }
                Ok(())
            };
            problems.extend(add().err());
        }
        for name in experts.values().flat_map(BTreeMap::keys) {
            let reason = "expected as many experts in it as config.json tells of".to_owned();
            problems.push(Problem::Tensor { name: name.clone(), reason });
        }
        if problems.is_empty() { Ok(tensors) } else { Err(problems) }
    }

    /// Adds what is made of a stack of experts whose codes are kept.
    fn keep(&mut self, checkpoint: &Checkpoint, info: &TensorInfo<'_>, hparams: &Hparams) -> Result<(), ViewError> {
        let Some(stack) = info.quantized() else { return Ok(()) };
        for target in hparams.family.targets(info.name, &|key| hparams.count_of(key)) {
            let all = mxfp4(checkpoint, stack)?;
            let rows = all.shape().extents()[1];
            let half = if let GgufChange::Alternating(first) = target.change { Some(first as u64) } else { None };
            let view = half.map_or(Ok(all.clone()), |first| all.slice(1, first, rows, 2))?;
            let [experts, rows, blocks, bytes] = view.shape().extents() else { continue };
            let (shape, bytes) = (vec![*experts, *rows, blocks * BLOCK], experts * rows * blocks * bytes);
            self.written.push(WrittenTensor { name: target.name, shape, code: MXFP4.0, bytes });
            self.views.push(view);
        }
        Ok(())
    }

    /// Adds a tensor in the type that the converter gives it.
    fn push(&mut self, name: &str, view: &View, of: GgufType) -> Result<(), ViewError> {
        let shape = view.shape().extents().to_vec();
        let columns = shape.last().copied().unwrap_or(0);
        let is_router = name.contains(".ffn_gate_inp.") || name.contains(".ffn_gate_inp_shexp.");
        let is_plain = shape.len() <= 1 || name.ends_with("_norm.weight") || is_router || !name.ends_with(".weight");
        let fits = of != GgufType::Q8_0 || columns.is_multiple_of(BLOCK);
        let of = if is_plain {
            GgufType::F32
        } else if fits {
            of
        } else {
            GgufType::F16
        };
        let view = match of {
            GgufType::F32 => view.cast(DType::F32)?,
            GgufType::F16 => view.cast(DType::F16)?,
            GgufType::Bf16 => view.cast(DType::BF16)?,
            GgufType::Q8_0 => {
                let encoding = EncodedMatrices::new(name.to_owned(), Encoder::Q8_0, view, &[])?;
                View::encoded(&Arc::new(encoding), EncodedPart::Codes)
            }
        };
        let bytes = view.bytes().unwrap_or(u64::MAX);
        self.written.push(WrittenTensor { name: name.to_owned(), shape, code: codes(of).0, bytes });
        self.views.push(view);
        Ok(())
    }
}

/// Blocks of MXFP4 as ggml has them, `[experts, rows, blocks, 17]`: the exponent, and in byte `n` codes `n` and `n + 16`.
fn mxfp4(checkpoint: &Checkpoint, stack: &Quantized) -> Result<View, ViewError> {
    let source = |at: usize| checkpoint.tensor(stack.operands[at]).source(stack.operands[at]);
    let (codes, scales) = (source(0)?, View::source(source(1)?));
    let shape = codes.shape.clone();
    // Two codes a byte are stored, the low one first.
    let bytes = [shape.extents().iter().product::<u64>() / (BLOCK / 2), BLOCK / 2];
    let half = |at: u64| {
        let places = [Digit::axis(&bytes, 0, 4 * BLOCK), Digit::axis(&bytes, 1, 4), Digit::constant(at * 2 * BLOCK)];
        let field = Field::Integer(Bits::unsigned(4));
        Codes::of(Operand { tensor: codes.clone(), field, index: IndexMap::new(&places) })
    };
    let codes = half(0).then(Operation::Add, half(1).then(Operation::Multiply, 16.0));
    View::concat(
        3,
        &[scales.reshape_to(&[scales.shape().extents(), &[1]].concat())?, View::packed(shape, DType::U8, codes)?],
    )
}

/// Tensors of experts of a layer, by the name of their stack and by number.
type StackedExperts = BTreeMap<String, BTreeMap<u64, View>>;

pub(super) fn config_problem(reason: String) -> Problem {
    Problem::File { file: "layout gguf".to_owned(), reason }
}

/// What is made of a tensor of the repository: the way back of each change.
fn changed(view: &View, target: &GgufTarget, hparams: &Hparams) -> Result<View, ViewError> {
    let shape = view.shape().clone();
    let extents = shape.extents();
    let view = match (&target.change, extents) {
        (GgufChange::Heads(heads), [rows, columns @ ..]) if *heads > 0 && rows.is_multiple_of(2 * heads) => {
            let halves = [&[*heads, 2, rows / heads / 2], columns].concat();
            view.reshape_to(&halves)?.swap_axes(1, 2)?.reshape(&shape)?
        }
        (GgufChange::Heads(_), _) => return Err(ViewError::axis("heads", 0, &shape)),
        (GgufChange::Transposed, [_, _, _]) => view.swap_axes(1, 2)?,
        (GgufChange::Alternating(number), [_, _, rows]) => view.swap_axes(1, 2)?.slice(1, *number as u64, *rows, 2)?,
        (GgufChange::Alternating(number), [_, rows]) => view.slice(1, *number as u64, *rows, 2)?,
        (GgufChange::KeysAndValues(number), [rows, rank]) => {
            let count = |member: &str| hparams.count(member).ok_or_else(|| ViewError::axis(member, 0, &shape));
            let (heads, of_keys) = (count("num_attention_heads")?, count("qk_nope_head_dim")?);
            let of_both = rows.checked_div(heads).unwrap_or(0);
            let both = view.reshape_to(&[heads, of_both, *rank])?;
            if *number == 0 {
                both.slice(1, 0, of_keys, 1)?.swap_axes(1, 2)?
            } else {
                both.slice(1, of_keys, of_both, 1)?
            }
        }
        _ => view.clone(),
    };
    if target.is_one_more { view.add(1.0, Keep::Operand) } else { Ok(view) }
}

/// The factors of the rotary embedding that a file has as tensors.
fn rotary_factors(hparams: &Hparams) -> Result<Vec<(&'static str, Vec<f32>)>, String> {
    let (rotary, _) = hparams.rotary();
    let kind = rotary.get("rope_type").and_then(Value::as_str).unwrap_or_default();
    if hparams.family.architecture() == "phi3" {
        return longrope_factors(&rotary, hparams);
    }
    let of_llama = kind == "llama3" && hparams.family.architecture() == "llama";
    if !of_llama {
        return Ok(Vec::new());
    }
    let number = |name: &str, default: f64| rotary.get(name).and_then(Value::as_f64).unwrap_or(default);
    let (base, factor) = (number("rope_theta", 10000.0), number("factor", 8.0));
    let (low, high) = (number("low_freq_factor", 1.0), number("high_freq_factor", 4.0));
    let length = number("original_max_position_embeddings", 8192.0);
    let columns = hparams.count("head_dim").ok_or("config.json: expected head_dim, of which rope_freqs is made")?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "torch computes in f32")]
    let of = |column: u64| {
        // torch divides a number by a tensor so.
        let over = |number: f64, value: f32| (1.0 / value) * number as f32;
        let wavelength = over(2.0 * std::f64::consts::PI, 1.0 / power(base, column as f32 / columns as f32));
        if wavelength < (length / high) as f32 {
            1.0
        } else if wavelength > (length / low) as f32 {
            factor as f32
        } else {
            let smooth = (over(length, wavelength) - low as f32) / (high - low) as f32;
            1.0 / ((1.0 - smooth) / factor as f32 + smooth)
        }
    };
    Ok(vec![("rope_freqs.weight", (0..columns).step_by(2).map(of).collect())])
}

/// A power, rounded once.
#[expect(clippy::cast_possible_truncation, reason = "torch's are of f32")]
fn power(base: f64, exponent: f32) -> f32 {
    f64::from(base as f32).powf(f64::from(exponent)) as f32
}

fn longrope_factors(rotary: &Map<String, Value>, hparams: &Hparams) -> Result<Vec<(&'static str, Vec<f32>)>, String> {
    let factors =
        |name: &str| -> Option<Vec<f32>> { rotary.get(name)?.as_array()?.iter().map(super::hparams::f32_of).collect() };
    let (Some(long), Some(short)) = (factors("long_factor"), factors("short_factor")) else {
        return Ok(Vec::new());
    };
    let half = hparams.rotated().unwrap_or(0) / 2;
    if long.len() as u64 != half || short.len() as u64 != half {
        let (long, short) = (long.len(), short.len());
        return Err(format!("config.json: expected {half} factors of the rotary embedding, found {long} and {short}"));
    }
    Ok(vec![("rope_factors_long.weight", long), ("rope_factors_short.weight", short)])
}
