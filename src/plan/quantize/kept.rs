//! Codes in another library's form, as they are: permuted and packed again, never made anew.
//!
//! [`ROWS`] says, for each way in which weights are stored and each form, which tensors of that form are made of which operands. All
//! decode to the same numbers, with one exception: the factor of NVFP4 is the reciprocal in the other form, rounded to f32.

use std::collections::{BTreeMap, HashSet};

use ckfs_checkpoint::{Checkpoint, Composed, ExpertPart, Quantized, TensorInfo};
use ckfs_config::{Requantize, value::Choice};
use ckfs_tensor::{
    DType, Digit, Field, IndexMap, Op, Operand, Operation, Shape, SourceTensor, Step, TensorId, Term, Value, View,
    ViewError, to_usize,
};
use rayon::prelude::*;
use serde_json::{Value as Json, json};

use super::{
    super::problem::PlanError,
    config::{ModuleForm, activations, compressed_tensors, fp8, modelopt_in_config, numbers},
    encode::of_numbers,
};

/// How a tensor of the new form is made of the operands of the old one.
#[derive(Clone, Copy, Debug)]
enum Make {
    /// The operand of this number as it is.
    Same(usize),
    /// One divided by it, with so many axes of one element.
    Reciprocal(usize, usize),
    /// Its axes exchanged.
    Turned(usize),
    /// Codes packed along the inputs.
    Codes,
    /// Zero points packed along the outputs.
    Zeros,
    /// The shape of the weight.
    Shape,
    /// The group of each input, where groups are not in order.
    Order,
}

/// A way in which weights are stored, and its tensors in another form.
struct Row {
    scheme: &'static str,
    /// The end of the name of the codes.
    codes: &'static str,
    to: Requantize,
    /// The end of each tensor's name, in the place of `codes`.
    parts: &'static [(&'static str, Make)],
}

const PACKED: [(&str, Make); 5] = [
    (".weight_packed", Make::Codes),
    (".weight_scale", Make::Turned(2)),
    (".weight_shape", Make::Shape),
    (".weight_zero_point", Make::Zeros),
    (".weight_g_idx", Make::Order),
];

const ROWS: [Row; 6] = [
    Row { scheme: "awq", codes: ".qweight", to: Requantize::CompressedTensors, parts: &PACKED },
    Row { scheme: "gptq", codes: ".qweight", to: Requantize::CompressedTensors, parts: &PACKED },
    Row {
        scheme: "nvfp4",
        codes: ".weight",
        to: Requantize::CompressedTensors,
        parts: &[
            (".weight_packed", Make::Same(0)),
            (".weight_scale", Make::Same(1)),
            (".weight_global_scale", Make::Reciprocal(2, 1)),
        ],
    },
    Row {
        scheme: "nvfp4",
        codes: ".weight_packed",
        to: Requantize::ModelOpt,
        parts: &[
            (".weight", Make::Same(0)),
            (".weight_scale", Make::Same(1)),
            (".weight_scale_2", Make::Reciprocal(2, 0)),
        ],
    },
    Row {
        scheme: "block_fp8",
        codes: ".weight",
        to: Requantize::CompressedTensors,
        parts: &[(".weight", Make::Same(0)), (".weight_scale", Make::Same(1))],
    },
    Row {
        scheme: "scaled_fp8",
        codes: ".weight",
        to: Requantize::Fp8,
        parts: &[(".weight", Make::Same(0)), (".weight_scale_inv", Make::Same(1))],
    },
];

/// The stacks of gpt-oss, by the ends of their names: the linear layers of each expert, whose rows take turns.
const STACKS: [(&str, &[&str]); 2] = [("gate_up_proj", &["gate_proj", "up_proj"]), ("down_proj", &["down_proj"])];

/// What the configuration says of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stored {
    Integers { bits: u64, group: Option<u64>, is_symmetric: bool, has_order: bool },
    Nvfp4 { has_activations: bool },
    Fp8Block([u64; 2]),
    Mxfp4,
}

/// The new form of a checkpoint's codes, so far.
struct Keeping<'a> {
    checkpoint: &'a Checkpoint,
    to: Requantize,
    config: Json,
    /// Whether all zero points of GPTQ are those of symmetric integers, which have none.
    is_symmetric: bool,
    modules: BTreeMap<Stored, Vec<String>>,
    /// The tensors of the new form.
    made: Vec<Composed>,
    /// Linear layers of experts by the stack that they become rows of, its name and number in [`STACKS`]: expert, turn, and number
    /// of the weight.
    stacks: BTreeMap<(String, usize), BTreeMap<(u64, usize), usize>>,
}

/// The checkpoint with all its codes in another form, and a `config.json` that says so.
///
/// # Errors
/// Weights whose codes the form has no place for.
pub(crate) fn kept(checkpoint: &Checkpoint, to: Requantize) -> Result<Checkpoint, PlanError> {
    let refused = |reasons: Vec<String>| PlanError::of(&format!("requantize {}", to.word()), reasons);
    let found = checkpoint.quantized();
    if let Some(unsupported) = found.unsupported.first() {
        return Err(refused(vec![format!("{unsupported}: expected codes that ckfs decodes")]));
    }
    if found.tensors.is_empty() {
        let reason = "no tensor of the source is quantized: --quantize makes codes";
        return Err(refused(vec![reason.to_owned()]));
    }
    let config = checkpoint.config().map(|config| config["quantization_config"].clone()).unwrap_or_default();
    let (modules, made, stacks) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
    let mut keeping = Keeping { checkpoint, to, config, is_symmetric: false, modules, made, stacks };
    keeping.is_symmetric = keeping.has_middle_zeros().map_err(|reason| refused(vec![reason]))?;
    let (mut operands, mut reasons) = (Vec::with_capacity(found.tensors.len()), Vec::new());
    for (number, tensor) in found.tensors.iter().enumerate() {
        let first = keeping.made.len();
        let made = match (to, tensor.scheme) {
            (Requantize::Mxfp4, _) => keeping.row_of_stack(number, tensor),
            (Requantize::CompressedTensors, "mxfp4") => keeping.experts(tensor),
            _ => keeping.weight(tensor),
        };
        reasons.extend(made.err().map(|reason| format!("{}: {reason}", tensor.name)));
        let is_operand = |at: &usize| keeping.made[*at].name.rsplit('.').next() != Some("bias");
        operands.push((first..keeping.made.len()).filter(is_operand).collect());
    }
    for ((name, stack), rows) in std::mem::take(&mut keeping.stacks) {
        let first = keeping.made.len();
        reasons.extend(keeping.stack(&name, STACKS[stack].1, &rows).err().map(|reason| format!("{name}: {reason}")));
        for number in rows.values() {
            operands[*number] = vec![first, first + 1];
        }
    }
    let mut has_cache = false;
    for id in &found.left_out {
        let info = checkpoint.tensor(*id);
        match keeping.beside(*id, &info) {
            Ok(made) => {
                has_cache |= info.name.ends_with("k_scale");
                keeping.made.extend(made);
            }
            Err(reason) => reasons.push(format!("{}: {reason}", info.name)),
        }
    }
    if !reasons.is_empty() {
        let more = reasons.len().saturating_sub(REASONS_SHOWN);
        reasons.truncate(REASONS_SHOWN);
        reasons.extend((more > 0).then(|| format!("and {more} more tensors")));
        reasons.push("--dtype decodes weights, and --quantize makes codes of another scheme".to_owned());
        return Err(refused(reasons));
    }
    let text = format!("codes as stored in the form {}", to.word());
    let config = keeping.config_json(has_cache);
    checkpoint.recoded(keeping.made, &operands, config, text).map_err(refused)
}

/// Most tensors that a refusal names.
const REASONS_SHOWN: usize = 4;

impl Keeping<'_> {
    /// Makes the tensors of a weight in the new form, the codes first.
    fn weight(&mut self, weight: &Quantized) -> Result<(), String> {
        let codes = self.checkpoint.tensor(weight.operands[0]).name;
        let is_row = |row: &&Row| row.scheme == weight.scheme && row.to == self.to && codes.ends_with(row.codes);
        let row = ROWS.iter().find(is_row).filter(|_| weight.shape().rank() == 2);
        let row = row.ok_or_else(|| {
            let (scheme, to) = (weight.scheme, self.to.word());
            format!("{scheme} {codes} {}, which {to} has no form for", weight.shape())
        })?;
        let module = codes.strip_suffix(row.codes).expect("the row was found by it");
        let stored = self.stored(weight, module)?;
        for (end, make) in row.parts {
            let view = self.part(*make, weight, stored, module)?;
            self.made.extend(view.map(|view| Composed::view(format!("{module}{end}"), weight.operands[0], view)));
        }
        self.modules.entry(stored).or_default().push(module.to_owned());
        Ok(())
    }

    /// What the new configuration says of a weight.
    fn stored(&self, weight: &Quantized, module: &str) -> Result<Stored, String> {
        let refused = |what: String| Err(format!("expected {what}"));
        match weight.scheme {
            "nvfp4" => {
                let beside = |word: &str| self.checkpoint.find(&format!("{module}.{word}")).is_some();
                Ok(Stored::Nvfp4 { has_activations: beside("input_scale") || beside("input_global_scale") })
            }
            "block_fp8" | "scaled_fp8" => {
                let scale = self.checkpoint.tensor(weight.operands[1]);
                if !scale.dtype.is_float() || scale.dtype.bits() < 16 {
                    return refused(format!("scales that are wide floats, found {}", scale.dtype));
                }
                let own = self.config.get("weight_block_size");
                let groups = self.config["config_groups"].as_object().into_iter().flatten();
                let block = |group: &'_ Json| group["weights"]["block_structure"].clone();
                let mut blocks: Vec<Json> =
                    own.cloned().into_iter().chain(groups.map(|(_, group)| block(group))).collect();
                blocks.dedup();
                match blocks.as_slice() {
                    [Json::Array(block)] if block.len() == 2 => {
                        let number = |at: usize| block[at].as_u64().unwrap_or(0);
                        Ok(Stored::Fp8Block([number(0), number(1)]))
                    }
                    _ => refused("one block of rows and columns for all weights".to_owned()),
                }
            }
            _ => {
                let view = weight.view()?;
                let (codes, _, scales) = integers(&view).ok_or("expected integers with zero points and scales")?;
                let (bits, extents) = (codes.field.bits(), weight.shape().extents());
                let (out, inner) = (extents[0], extents[1]);
                let groups = self.checkpoint.tensor(weight.operands[2]).shape[0];
                // The digit of the inputs is the first.
                let digit = &scales.index.digits()[0];
                let has_order = digit.table.is_some();
                let group = if has_order { inner / groups.max(1) } else { digit.group };
                if !inner.is_multiple_of(group.max(1)) || !inner.is_multiple_of(32 / bits) {
                    return refused(format!(
                        "inputs that are a multiple of {} and of {group}, found {inner}",
                        32 / bits
                    ));
                }
                if out == 0 || inner == 0 {
                    return refused("a weight with elements".to_owned());
                }
                let is_channel = self.config["group_size"].as_i64() == Some(-1);
                let group = (!is_channel).then_some(group);
                let is_symmetric = weight.scheme == "gptq" && self.is_symmetric;
                Ok(Stored::Integers { bits, group, is_symmetric, has_order })
            }
        }
    }

    fn view(&self, id: TensorId) -> Result<View, ViewError> {
        self.checkpoint.tensor(id).stored_view(id)
    }

    /// A tensor of the new form; `None` if a weight that is stored so has none.
    fn part(&self, make: Make, weight: &Quantized, stored: Stored, module: &str) -> Result<Option<View>, ViewError> {
        let view = |number: usize| self.view(weight.operands[number]);
        let (is_symmetric, has_order) = match stored {
            Stored::Integers { is_symmetric, has_order, .. } => (is_symmetric, has_order),
            Stored::Nvfp4 { .. } | Stored::Fp8Block(_) | Stored::Mxfp4 => (true, false),
        };
        Ok(Some(match make {
            Make::Same(number) => view(number)?,
            Make::Reciprocal(number, rank) => {
                let id = weight.operands[number];
                reciprocal(self.checkpoint.tensor(id).source(id)?, rank)?
            }
            Make::Turned(number) => view(number)?.reverse_axes(),
            Make::Codes => packed(weight, false)?,
            Make::Zeros if is_symmetric => return Ok(None),
            Make::Zeros => packed(weight, true)?,
            Make::Shape => of_numbers(weight.shape().extents(), &Shape::try_new(&[1])?)?,
            Make::Order => {
                let order = self.checkpoint.find(&format!("{module}.g_idx")).filter(|_| has_order);
                return order.map(|id| self.view(id)).transpose();
            }
        }))
    }

    /// What takes the place of a tensor that no decoder reads.
    fn beside(&self, id: TensorId, info: &TensorInfo<'_>) -> Result<Option<Composed>, String> {
        let view = info.source(id);
        let is_nvfp4 = || self.modules.keys().any(|stored| matches!(stored, Stored::Nvfp4 { .. }));
        let (module, word) = info.name.rsplit_once('.').unwrap_or(("", info.name));
        let (word, view) = match (word, self.to) {
            ("g_idx" | "weight_shape", _) => return Ok(None),
            ("input_scale", Requantize::CompressedTensors) if is_nvfp4() => {
                ("input_global_scale", view.and_then(|source| reciprocal(source, 1)))
            }
            ("input_global_scale", Requantize::ModelOpt) => {
                ("input_scale", view.and_then(|source| reciprocal(source, 0)))
            }
            // As the library converts them.
            ("k_scale" | "v_scale", Requantize::CompressedTensors) => {
                (word, view.and_then(|source| View::source(source).cast(DType::BF16)))
            }
            ("k_scale" | "v_scale", Requantize::ModelOpt) => (word, view.map(View::source)),
            _ => return Err("a scale of activations, for which the form has no place".to_owned()),
        };
        Ok(Some(Composed::view(format!("{module}.{word}"), id, view?)))
    }

    /// Makes the linear layers of a stack of experts, and their biases.
    fn experts(&mut self, stack: &Quantized) -> Result<(), String> {
        let known = STACKS.iter().find_map(|(end, words)| Some((stack.name.strip_suffix(end)?, words)));
        let (before, words) = known.ok_or("expected the experts of gpt-oss, gate_up_proj and down_proj")?;
        let bias = self.checkpoint.find(&format!("{}_bias", stack.name));
        let operands = [(".weight_packed", Some(stack.operands[0])), (".weight_scale", Some(stack.operands[1]))];
        let experts = self.checkpoint.tensor(stack.operands[0]).shape[0];
        let turns = words.len() as u64;
        for expert in 0..experts {
            for (first, word) in (0..).zip(*words) {
                let module = format!("{before}{expert}.{word}");
                for (end, id) in operands.into_iter().chain([(".bias", bias)]) {
                    let Some(id) = id else { continue };
                    // Of a bias without rows the view says what it lacks.
                    let rows = self.checkpoint.tensor(id).shape.get(1).copied().unwrap_or(first);
                    let range = Some((0, first, rows, turns));
                    let rows = ExpertPart { expert: Some(expert), range, turned: false }.of_view(self.view(id)?)?;
                    let [count, columns @ ..] = rows.shape().extents() else { continue };
                    let columns = (!columns.is_empty()).then(|| columns.iter().product());
                    let view = rows.reshape_to(&[*count].into_iter().chain(columns).collect::<Vec<_>>())?;
                    self.made.push(Composed::view(format!("{module}{end}"), id, view));
                }
                self.modules.entry(Stored::Mxfp4).or_default().push(module);
            }
        }
        Ok(())
    }

    /// Takes note of a linear layer of an expert, whose rows take turns in a stack.
    fn row_of_stack(&mut self, number: usize, weight: &Quantized) -> Result<(), String> {
        let [codes, scales] = [0, 1].map(|at| self.checkpoint.tensor(weight.operands[at]));
        let module = codes.name.strip_suffix(".weight_packed").filter(|_| scales.dtype == DType::U8);
        let place = module.and_then(|module| {
            let (before, word) = module.rsplit_once('.')?;
            let (before, expert) = before.rsplit_once('.').filter(|(before, _)| before.ends_with(".experts"))?;
            let turn = |(_, words): &(_, &[&str])| words.iter().position(|own| *own == word);
            let (stack, turn) = STACKS.iter().enumerate().find_map(|(stack, row)| Some((stack, turn(row)?)))?;
            Some((format!("{before}.{}", STACKS[stack].0), stack, (expert.parse().ok()?, turn)))
        });
        let is_gpt_oss = self.checkpoint.dialect().model_type.as_deref() == Some("gpt_oss");
        let Some((name, stack, place)) = place.filter(|_| is_gpt_oss && weight.scheme == "mx") else {
            return Err(format!(
                "{} {}, and only experts of gpt_oss in MXFP4 have that form",
                weight.scheme, codes.name
            ));
        };
        self.stacks.entry((name, stack)).or_default().insert(place, number);
        Ok(())
    }

    /// Makes a stack of experts, and its biases, of their linear layers.
    fn stack(&mut self, name: &str, words: &[&str], rows: &BTreeMap<(u64, usize), usize>) -> Result<(), String> {
        let found = self.checkpoint.quantized();
        let experts = self.checkpoint.config().and_then(|config| config["num_local_experts"].as_u64()).unwrap_or(0);
        let mut places = (0..experts).flat_map(|expert| (0..words.len()).map(move |turn| (expert, turn)));
        if let Some((expert, turn)) = places.find(|place| !rows.contains_key(place)) {
            return Err(format!("expert {expert} has no {} in MXFP4", words[turn]));
        }
        if rows.len() as u64 != experts * words.len() as u64 {
            return Err(format!("expected the {experts} experts of num_local_experts, found more"));
        }
        let operand = |number: usize, at: usize| {
            let weight = &found.tensors[number];
            let codes = self.checkpoint.tensor(weight.operands[0]).name;
            let bias = format!("{}.bias", codes.trim_end_matches(".weight_packed"));
            let missing = || format!("{bias} is not there, and all experts of gpt_oss have one");
            weight.operands.get(at).copied().or_else(|| self.checkpoint.find(&bias)).ok_or_else(missing)
        };
        let mut made = Vec::new();
        for (at, end) in ["_blocks", "_scales", "_bias"].into_iter().enumerate() {
            let ids = rows.values().map(|number| operand(*number, at)).collect::<Result<Vec<_>, _>>()?;
            let stacked = || -> Result<View, ViewError> {
                let of = ids.iter().map(|id| self.view(*id)).collect::<Result<Vec<_>, _>>()?;
                let turns = of.chunks(words.len()).map(|of_expert| View::stack(1, of_expert));
                let all = View::stack(0, &turns.collect::<Result<Vec<_>, _>>()?)?;
                let [experts, rows, turns, columns @ ..] = all.shape().extents() else { return Ok(all) };
                let columns = match (end, columns) {
                    ("_blocks", [bytes]) => vec![bytes / 16, 16],
                    _ => columns.to_vec(),
                };
                all.reshape_to(&[vec![*experts, rows * turns], columns].concat())
            };
            let view = stacked()?;
            made.push(Composed::view(format!("{name}{end}"), ids[0], view));
        }
        self.made.extend(made);
        Ok(())
    }

    /// Whether all zero points of GPTQ are in the middle, as those of symmetric integers, for which kernels have another way. They are
    /// read, as the configuration alone does not bind who wrote them.
    fn has_middle_zeros(&self) -> Result<bool, String> {
        let found = self.checkpoint.quantized();
        let all: Vec<&Quantized> = found.tensors.iter().filter(|tensor| tensor.scheme == "gptq").collect();
        let is_middle = |weight: &&Quantized| -> Result<bool, String> {
            let view = weight.view()?;
            let Some((_, zeros, _)) = integers(&view) else { return Ok(false) };
            let bits = zeros.field.bits();
            let middle = 1_u64 << (bits - 1);
            let code = match &zeros.field {
                // Stored one too small.
                Field::Table(..) => middle - 1,
                Field::Integer(_) | Field::Float(_) => middle,
            };
            let byte = (0..8 / bits).fold(0, |byte, at| byte | code << (at * bits)).to_le_bytes()[0];
            let info = self.checkpoint.tensor(weight.operands[1]);
            let mut bytes = vec![0; to_usize(info.bytes())];
            let read = self.checkpoint.source().read_into(info.file(), info.span().start(), &mut bytes);
            read.map_err(|error| format!("{}: {error}", info.name))?;
            Ok(bytes.iter().all(|found| *found == byte))
        };
        let other = all.par_iter().map(is_middle).find_any(|middle| !matches!(middle, Ok(true)));
        other.unwrap_or(Ok(!all.is_empty()))
    }

    /// `config.json` with the new form.
    fn config_json(&self, has_cache: bool) -> Json {
        let operands: HashSet<TensorId> =
            self.checkpoint.quantized().tensors.iter().flat_map(|tensor| &tensor.operands).copied().collect();
        let left = self
            .checkpoint
            .tensors()
            .filter(|(id, info)| info.shape.len() == 2 && info.dtype.is_float() && !operands.contains(id));
        let mut left: Vec<String> =
            left.filter_map(|(_, info)| Some(info.name.strip_suffix(".weight")?.to_owned())).collect();
        if !left.iter().any(|name| name.ends_with("lm_head")) {
            left.push("lm_head".to_owned());
        }
        let has_activations = self.modules.keys().all(|stored| *stored == Stored::Nvfp4 { has_activations: true });
        let quantization = match self.to {
            Requantize::ModelOpt => {
                let mut config = modelopt_in_config(&left);
                if has_activations {
                    config["quant_algo"] = json!("NVFP4");
                }
                if has_cache {
                    config["kv_cache_quant_algo"] = json!("FP8");
                }
                config
            }
            Requantize::Fp8 => {
                let block = self.modules.keys().find_map(|stored| match stored {
                    Stored::Fp8Block(block) => Some(*block),
                    Stored::Integers { .. } | Stored::Nvfp4 { .. } | Stored::Mxfp4 => None,
                });
                fp8("fp8", block.unwrap_or_default(), false, &left)
            }
            Requantize::Mxfp4 => json!({"quant_method": "mxfp4", "modules_to_not_convert": left}),
            Requantize::CompressedTensors => {
                let mut config = compressed_tensors(&self.groups(), &left);
                if has_cache {
                    config["kv_cache_scheme"] = numbers("float", 8, "tensor", None, None);
                }
                config
            }
        };
        let mut config = self.checkpoint.config().cloned().unwrap_or_default();
        config = super::super::hf::with_dtype(config, None, None, true);
        config["quantization_config"] = quantization;
        config
    }

    /// The groups of compressed-tensors: the largest has all linear layers that no other names.
    fn groups(&self) -> Vec<(ModuleForm, Vec<String>)> {
        let largest = self.modules.iter().max_by_key(|(_, modules)| modules.len()).map(|(stored, _)| *stored);
        let targets = |stored: &Stored, modules: &[String]| {
            if largest == Some(*stored) { vec!["Linear".to_owned()] } else { modules.to_vec() }
        };
        self.modules.iter().map(|(stored, modules)| (stored.numbers(), targets(stored, modules))).collect()
    }
}

impl Stored {
    /// The format, what is said of the weights, and of activations.
    fn numbers(self) -> ModuleForm {
        const E4M3: Option<&str> = Some("torch.float8_e4m3fn");
        match self {
            Self::Integers { bits, group, is_symmetric, has_order } => {
                let strategy = if group.is_some() { "group" } else { "channel" };
                let mut weights = numbers("int", bits, strategy, group, None);
                weights["symmetric"] = json!(is_symmetric);
                weights["zp_dtype"] = json!((!is_symmetric).then_some("torch.int8"));
                weights["actorder"] = json!(has_order.then_some("group"));
                ("pack-quantized", weights, Json::Null)
            }
            Self::Nvfp4 { has_activations } => {
                let mut inputs = Json::Null;
                if has_activations {
                    inputs = activations(4, "tensor_group", Some(16));
                    inputs["dynamic"] = json!("local");
                    inputs["observer"] = json!("static_minmax");
                    (inputs["scale_dtype"], inputs["zp_dtype"]) = (json!(E4M3), json!(E4M3));
                }
                ("nvfp4-pack-quantized", numbers("float", 4, "tensor_group", Some(16), E4M3), inputs)
            }
            Self::Fp8Block(block) => {
                let mut weights = numbers("float", 8, "block", None, None);
                weights["block_structure"] = json!(block);
                ("float-quantized", weights, activations(8, "group", Some(block[1])))
            }
            Self::Mxfp4 => {
                ("mxfp4-pack-quantized", numbers("float", 4, "group", Some(32), Some("torch.uint8")), Json::Null)
            }
        }
    }
}

/// One divided by the one element of a tensor, in f32.
fn reciprocal(of: SourceTensor, rank: usize) -> Result<View, ViewError> {
    let operand = Operand::elements(of);
    // A number divided by itself is one.
    let value = Value::of(operand.clone()).then(Operation::Divide, operand.clone()).then(Operation::Divide, operand);
    View::quantized(Shape::try_new(&vec![1; rank])?, value)
}

/// The operands of `(codes - zeros) * scales`.
fn integers(view: &View) -> Option<(&Operand, &Operand, &Operand)> {
    if let Op::Transpose { of, .. } = view.op() {
        return integers(of);
    }
    let Op::Quantized(value) = view.op() else { return None };
    match value.steps.as_slice() {
        [
            Step::Compute(Operation::Subtract, Term::Value(zeros)),
            Step::Compute(Operation::Multiply, Term::Value(scales)),
        ] => Some((&value.load, &zeros.load, &scales.load)),
        _ => None,
    }
}

/// Integers of a weight in words of 32 bits: its codes `[out, in * bits / 32]`, or its zero points `[out * bits / 32, groups]`.
fn packed(weight: &Quantized, is_zeros: bool) -> Result<View, ViewError> {
    let view = weight.view()?;
    let (codes, zeros, scales) = integers(&view).expect("weights of other values were refused");
    let operand = if is_zeros { zeros } else { codes };
    let (bits, extents, groups) = (operand.field.bits(), weight.shape().extents(), scales.tensor.shape.extents()[0]);
    let (out, inner, of_byte) = (extents[0], extents[1], 8 / bits);
    let of_word = 4 * of_byte;
    let source = SourceTensor { id: weight.operands[usize::from(is_zeros)], ..operand.tensor.clone() };
    // Bytes of the new form, by their axes: rows and bytes of codes, or rows of words, groups and bytes of zero points.
    let bytes = if is_zeros { vec![out / of_word, groups, 4] } else { vec![out, inner / of_byte] };
    let shape = if is_zeros { [out / of_word, groups] } else { [out, inner / of_word] };
    let along = |axis: usize, stride: u64| Digit::axis(&bytes, axis, stride);
    // The place of the first integer of a byte, in bits, and how far the others are.
    let (digits, step) = match (weight.scheme, is_zeros) {
        // Of eight neighbours the even ones come first.
        ("awq", false) => (
            vec![
                along(0, 32).grouped(8),
                along(0, 16).turning(2),
                along(0, 4).grouped(2).turning(4),
                along(1, of_byte * out * 4),
            ],
            out * 4,
        ),
        ("awq", true) => (vec![along(0, 32), along(1, out * 4), along(2, 4)], 16),
        (_, false) => (vec![along(1, out * 32).grouped(4), along(1, 8).turning(4), along(0, 32)], bits),
        (_, true) => (vec![along(0, 32), along(1, out * bits), along(2, 8)], bits),
    };
    let field = |at: u64| {
        let index = IndexMap::new(&digits.iter().cloned().chain([Digit::constant(at * step)]).collect::<Vec<_>>());
        Value::of(Operand { tensor: source.clone(), field: operand.field.clone(), index })
    };
    let mut value = field(0);
    let mut place = 1.0;
    for at in 1..of_byte {
        for _ in 0..bits {
            place *= 2.0;
        }
        value = value.then(Operation::Add, field(at).then(Operation::Multiply, place));
    }
    View::packed(Shape::try_new(&shape)?, DType::I32, value)
}
