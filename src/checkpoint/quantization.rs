//! Which quantization a repository uses, and which scale belongs to which weight.
//!
//! `quantization_config` of `config.json` says what was meant, names and types of the tensors say what is there; both must
//! agree before anything is called quantized. The block of block scales comes from the configuration only: dividing the
//! shapes gives the wrong block where the last one is partial (576 rows on 5 scale rows are blocks of 128, not 115).

use std::fmt;

use serde_json::Value;

use super::{
    problem::{Problem, Problems},
    table::{TensorInfo, TensorTable},
};
use crate::tensor::{DType, TensorId};

/// How a repository's weights are quantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// Not at all, as far as configuration and tensors tell.
    None,
    /// 8-bit floats with a scale per block (DeepSeek, Qwen, `MiniMax`).
    BlockFp8(BlockFp8),
    /// 8-bit floats with one scale per tensor or per channel.
    ScaledFp8(Granularity),
    /// 4-bit floats with an 8-bit exponent per 32 (gpt-oss).
    Mxfp4,
    /// 4-bit integers packed into 32-bit words.
    Int4Packed {
        /// Elements of a row that share a scale, where the configuration says it.
        group: Option<u64>,
    },
    /// 4-bit floats with an 8-bit float scale per 16 and a scale per tensor.
    Nvfp4,
    /// Another format of the compressed-tensors library.
    CompressedTensors {
        /// Its name there, such as `int-quantized`.
        format: String,
    },
    /// Integers or small floats packed into 32-bit words beside `scales` and `biases`, as MLX writes them.
    Mlx {
        /// Bits of an element, where the configuration says it.
        bits: Option<u64>,
        /// Elements of a row that share a scale, where the configuration says it.
        group: Option<u64>,
        /// How elements are coded, such as `affine` or `mxfp4`.
        mode: String,
    },
    /// Something else.
    Unknown {
        /// What is known of it.
        method: String,
    },
}

/// What shares one scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granularity {
    /// All elements of a tensor.
    Tensor,
    /// All elements of one output channel: a row of `[out, in]`.
    Channel,
}

/// Block-quantized 8-bit floats: which tensor scales which.
///
/// `W[i, j] = f32(q[i, j]) * f32(s[i / rows, j / columns])`; the last block of either axis may be partial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockFp8 {
    /// Rows and columns of one block, as configured.
    pub block: (u64, u64),
    /// How a scale is named: what replaces the end of the weight's name, `_scale_inv` or `.scale`.
    pub suffix: &'static str,
    /// Element type of the scales, that of the first pair where they differ.
    pub scale_dtype: Option<DType>,
    /// Weights and their scales, sorted by weight. Every pair's shapes have been checked against the block.
    pub pairs: Vec<(TensorId, TensorId)>,
    /// All scales of `pairs`, sorted.
    pub scales: Vec<TensorId>,
    /// 8-bit float matrices without a scale of blocks: unscaled, or with one scalar for all.
    pub unpaired: Vec<TensorId>,
}

impl BlockFp8 {
    /// The scale of a quantized weight.
    pub fn scale_of(&self, weight: TensorId) -> Option<TensorId> {
        let row = self.pairs.binary_search_by_key(&weight, |pair| pair.0).ok()?;
        Some(self.pairs[row].1)
    }

    /// Whether a tensor is the scale of a paired weight.
    pub fn is_scale(&self, tensor: TensorId) -> bool {
        self.scales.binary_search(&tensor).is_ok()
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("not quantized"),
            Self::BlockFp8(block) => {
                let (rows, columns) = block.block;
                write!(f, "fp8 in blocks of {rows}x{columns}, {} weights with", block.pairs.len())?;
                if let Some(dtype) = block.scale_dtype {
                    write!(f, " {dtype}")?;
                }
                write!(f, " scales *{}", block.suffix)
            }
            Self::ScaledFp8(Granularity::Tensor) => f.write_str("fp8 with a scale per tensor"),
            Self::ScaledFp8(Granularity::Channel) => f.write_str("fp8 with a scale per channel"),
            Self::Mxfp4 => f.write_str("mxfp4"),
            Self::Int4Packed { group: Some(group) } => write!(f, "int4 packed, groups of {group}"),
            Self::Int4Packed { group: None } => f.write_str("int4 packed"),
            Self::Nvfp4 => f.write_str("nvfp4"),
            Self::CompressedTensors { format } => write!(f, "compressed-tensors {format}"),
            Self::Mlx { bits, group, mode } => {
                let number = |number: &Option<u64>| number.map_or_else(|| "?".to_owned(), |number| number.to_string());
                write!(f, "mlx {mode} of {} bits, groups of {}", number(bits), number(group))
            }
            Self::Unknown { method } => write!(f, "quantized by a method not known here: {method}"),
        }
    }
}

/// What the tensors themselves show.
#[derive(Debug, Default)]
#[allow(clippy::struct_excessive_bools, reason = "independent observations, not states")]
struct Evidence {
    /// An 8-bit float matrix has a scale of several elements, but not one per row.
    block_scales: bool,
    /// ... has a scale of one element.
    tensor_scales: bool,
    /// ... has a scale of one element per row.
    channel_scales: bool,
    mxfp4_blocks: bool,
    packed_words: bool,
    packed_bytes: bool,
    global_scales: bool,
    /// A `.weight` of 32-bit words has `.scales` beside it.
    mlx_words: bool,
}

/// What `quantization_config` says.
#[derive(Debug, Default)]
struct Configured<'a> {
    method: Option<&'a str>,
    format: Option<&'a str>,
    algorithm: Option<&'a str>,
    strategy: Option<&'a str>,
    bits: Option<u64>,
    group: Option<u64>,
    block: Option<(u64, u64)>,
    /// Bits, group size and mode outside any group, where MLX has them.
    own_bits: Option<u64>,
    own_group: Option<u64>,
    mode: Option<&'a str>,
}

impl Quantization {
    /// The quantization of a repository with these tensors and this `quantization_config`.
    pub(super) fn detect(table: &TensorTable, config: Option<&Value>) -> Self {
        // What is wrong has been found when the repository was opened.
        let problems = &mut Problems::default();
        let configured = config.map(|config| Configured::read(config, problems)).unwrap_or_default();
        if let Some(block) = configured.block {
            let found = pair_blocks(table, block, problems);
            if !found.pairs.is_empty() {
                return Self::BlockFp8(found);
            }
        }
        let evidence = Evidence::gather(table);
        evidence.meets(&configured)
    }
}

impl Evidence {
    fn meets(&self, configured: &Configured<'_>) -> Quantization {
        let unknown = |method: &str| Quantization::Unknown { method: method.to_owned() };
        if self.mlx_words && configured.method.is_none_or(|method| method == "mlx") {
            let (bits, group) = (configured.own_bits, configured.own_group);
            let mode = configured.mode.unwrap_or("affine").to_owned();
            return Quantization::Mlx { bits, group, mode };
        }
        match (configured.method, configured.format) {
            (Some("compressed-tensors"), Some("pack-quantized")) if self.packed_words && configured.bits == Some(4) => {
                Quantization::Int4Packed { group: configured.group }
            }
            (Some("compressed-tensors"), Some("nvfp4-pack-quantized")) if self.packed_bytes => Quantization::Nvfp4,
            (Some("compressed-tensors"), Some("float-quantized" | "naive-quantized")) if self.has_fp8_scales() => {
                match configured.strategy {
                    Some("channel") => Quantization::ScaledFp8(Granularity::Channel),
                    Some("tensor") => Quantization::ScaledFp8(Granularity::Tensor),
                    Some(_) | None => Quantization::CompressedTensors { format: "float-quantized".into() },
                }
            }
            (Some("compressed-tensors"), format) => {
                Quantization::CompressedTensors { format: format.unwrap_or("without a format").to_owned() }
            }
            (Some("modelopt"), _) if configured.algorithm == Some("NVFP4") => Quantization::Nvfp4,
            (Some("mxfp4"), _) if !self.mxfp4_blocks => Quantization::None,
            (Some("fp8" | "fbgemm_fp8" | "modelopt" | "mxfp4") | None, _) => self.alone(configured.method),
            (Some(method), _) => unknown(method),
        }
    }

    const fn has_fp8_scales(&self) -> bool {
        self.block_scales || self.tensor_scales || self.channel_scales
    }

    /// Without help from the configuration.
    fn alone(&self, method: Option<&str>) -> Quantization {
        if self.mxfp4_blocks {
            Quantization::Mxfp4
        } else if self.packed_words {
            Quantization::Int4Packed { group: None }
        } else if self.packed_bytes && self.global_scales {
            Quantization::Nvfp4
        } else if self.block_scales {
            Quantization::Unknown { method: "fp8 with block scales, but config.json gives no weight_block_size".into() }
        } else if self.channel_scales {
            Quantization::ScaledFp8(Granularity::Channel)
        } else if self.tensor_scales {
            Quantization::ScaledFp8(Granularity::Tensor)
        } else {
            match method {
                Some(method) if method != "fp8" => Quantization::Unknown { method: method.to_owned() },
                Some(_) | None => Quantization::None,
            }
        }
    }

    fn gather(table: &TensorTable) -> Self {
        let mut found = Self::default();
        for (_, tensor) in table.iter() {
            let name = tensor.name;
            if is_fp8(tensor.dtype) && tensor.shape.len() >= 2 && !name.ends_with("_scale") {
                if let Some(scale) = scale_of(table, name).map(|(scale, _)| table.tensor(scale)) {
                    found.add_scale(&tensor, &scale);
                }
            } else if name.ends_with("_blocks") && tensor.dtype == DType::U8 {
                found.mxfp4_blocks = true;
            } else if name.ends_with("weight_packed") {
                found.packed_words |= tensor.dtype == DType::I32;
                found.packed_bytes |= tensor.dtype == DType::U8;
            } else if name.ends_with("weight_global_scale") || name.ends_with("weight_scale_2") {
                found.global_scales = true;
            } else if tensor.dtype == DType::U32
                && let Some(module) = name.strip_suffix(".weight")
            {
                found.mlx_words |= table.find(&format!("{module}.scales")).is_some();
            }
        }
        found
    }

    fn add_scale(&mut self, weight: &TensorInfo<'_>, scale: &TensorInfo<'_>) {
        let elements: u64 = scale.shape.iter().product();
        let rows: u64 = weight.shape[..weight.shape.len() - 1].iter().product();
        if elements <= 1 {
            self.tensor_scales = true;
        } else if elements == rows {
            self.channel_scales = true;
        } else {
            self.block_scales = true;
        }
    }
}

impl<'a> Configured<'a> {
    fn read(config: &'a Value, problems: &mut Problems) -> Self {
        let groups = config.get("config_groups").and_then(Value::as_object);
        let weights = groups.and_then(|groups| groups.values().find_map(|group| group.get("weights")));
        let text = |value: Option<&'a Value>| value.and_then(Value::as_str);
        let of_weights = |key: &str| weights.and_then(|weights| weights.get(key));
        let block = config.get("weight_block_size").or(of_weights("block_structure")).filter(|block| !block.is_null());
        let parsed = block.and_then(parse_block);
        if let (Some(found), None) = (block, parsed) {
            problems.push(Problem::BlockSize { found: found.to_string() });
        }
        Self {
            method: text(config.get("quant_method")),
            format: text(config.get("format")),
            algorithm: text(config.get("quant_algo")),
            strategy: text(of_weights("strategy")),
            bits: of_weights("num_bits").and_then(Value::as_u64),
            group: of_weights("group_size").and_then(Value::as_u64),
            block: parsed,
            own_bits: config.get("bits").and_then(Value::as_u64),
            own_group: config.get("group_size").and_then(Value::as_u64),
            mode: text(config.get("mode")),
        }
    }
}

/// `[128, 128]` or `"128x128"`.
fn parse_block(value: &Value) -> Option<(u64, u64)> {
    let pair = match value {
        Value::Array(sizes) => match sizes.as_slice() {
            [rows, columns] => (rows.as_u64()?, columns.as_u64()?),
            _ => return None,
        },
        Value::String(text) => {
            let (rows, columns) = text.split_once('x')?;
            (rows.parse().ok()?, columns.parse().ok()?)
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => return None,
    };
    (pair.0 > 0 && pair.1 > 0).then_some(pair)
}

const fn is_fp8(dtype: DType) -> bool {
    matches!(dtype, DType::F8E4M3 | DType::F8E5M2 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz)
}

/// Types that scales come in; bytes without a float type are exponents by convention.
const fn may_scale(dtype: DType) -> bool {
    dtype.is_float() || matches!(dtype, DType::F8E8M0 | DType::U8)
}

/// The scale that belongs to a weight by its name, and how it is named.
fn scale_of(table: &TensorTable, weight: &str) -> Option<(TensorId, &'static str)> {
    let mut name = String::with_capacity(weight.len() + 10);
    for suffix in ["_scale_inv", "_scale"] {
        name.clear();
        name.push_str(weight);
        name.push_str(suffix);
        if let Some(id) = table.find(&name) {
            return Some((id, suffix));
        }
    }
    let stem = weight.strip_suffix(".weight")?;
    name.clear();
    name.push_str(stem);
    name.push_str(".scale");
    table.find(&name).map(|id| (id, ".scale"))
}

/// Pairs 8-bit float matrices with their block scales. The scale of a stack `[.., rows, columns]` is a stack likewise.
fn pair_blocks(table: &TensorTable, block: (u64, u64), problems: &mut Problems) -> BlockFp8 {
    let mut found = BlockFp8 {
        block,
        suffix: "_scale_inv",
        scale_dtype: None,
        pairs: Vec::new(),
        scales: Vec::new(),
        unpaired: Vec::new(),
    };
    for (id, weight) in table.iter().filter(|(_, tensor)| is_fp8(tensor.dtype)) {
        let [stack @ .., rows, columns] = weight.shape else { continue };
        let Some((scale_id, suffix)) = scale_of(table, weight.name) else {
            found.unpaired.push(id);
            continue;
        };
        let scale = table.tensor(scale_id);
        let mut expected = stack.to_vec();
        expected.extend([rows.div_ceil(block.0), columns.div_ceil(block.1)]);
        if scale.shape != expected {
            if scale.shape.iter().product::<u64>() == 1 {
                found.unpaired.push(id);
                continue;
            }
            problems.push(Problem::ScaleShape {
                weight: weight.name.to_owned(),
                weight_shape: weight.shape.to_vec(),
                scale: scale.name.to_owned(),
                block,
                expected,
                found: scale.shape.to_vec(),
            });
        }
        if !may_scale(scale.dtype) {
            let (weight, scale_name) = (weight.name.to_owned(), scale.name.to_owned());
            problems.push(Problem::ScaleType { weight, scale: scale_name, found: scale.dtype });
        }
        if found.pairs.is_empty() {
            (found.suffix, found.scale_dtype) = (suffix, Some(scale.dtype));
        }
        found.pairs.push((id, scale_id));
        found.scales.push(scale_id);
    }
    found.scales.sort_unstable();
    found
}
