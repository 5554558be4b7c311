//! How a repository's weights are quantized, for the reader: by known schemes, which decode them, or by what configuration and
//! tensors tell of others, which are shown as they are stored.
//!
//! `quantization_config` of `config.json` says what was meant, names and types of the tensors say what is there; both must
//! agree before anything is called quantized.

use std::{collections::HashSet, fmt};

use serde_json::Value;

use super::{
    scheme::{Found, Summary},
    table::{TensorInfo, TensorTable},
};
use crate::tensor::{DType, TensorId};

/// How a repository's weights are quantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// Not at all, as far as configuration and tensors tell.
    None,
    /// By schemes whose tensors can be decoded.
    Known {
        /// How each of them is told, at least one.
        schemes: Vec<Summary>,
        /// How other tensors are quantized.
        rest: Box<Self>,
    },
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

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("not quantized"),
            Self::Known { schemes, rest } => {
                let texts: Vec<&str> = schemes.iter().map(|summary| summary.text.as_str()).collect();
                f.write_str(&texts.join("; "))?;
                if **rest == Self::None { Ok(()) } else { write!(f, "; {rest}") }
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
    /// Bits, group size and mode outside any group, where MLX has them.
    own_bits: Option<u64>,
    own_group: Option<u64>,
    mode: Option<&'a str>,
}

impl Quantization {
    /// The quantization of a repository with these tensors, of which schemes have found these, and this
    /// `quantization_config`.
    pub(super) fn of(found: &Found, table: &TensorTable, config: Option<&Value>) -> Self {
        let configured = config.map(Configured::read).unwrap_or_default();
        let operands = found.tensors.iter().flat_map(|tensor| tensor.operands);
        let known: HashSet<TensorId> = operands.chain(&found.left_out).copied().collect();
        let evidence = Evidence::gather(table, &known);
        if found.schemes.is_empty() {
            return evidence.meets(&configured);
        }
        // The configuration speaks of what is known: of other tensors, only they themselves tell.
        Self::Known { schemes: found.schemes.clone(), rest: Box::new(evidence.alone(None)) }
    }

    /// What stands in the way of decoding, if something does.
    pub fn undecodable(&self) -> Option<&Self> {
        match self {
            Self::None => None,
            Self::Known { rest, .. } => rest.undecodable(),
            Self::ScaledFp8(_)
            | Self::Mxfp4
            | Self::Int4Packed { .. }
            | Self::Nvfp4
            | Self::CompressedTensors { .. }
            | Self::Mlx { .. }
            | Self::Unknown { .. } => Some(self),
        }
    }

    /// Whether there are codes as gpt-oss has them: with the axes of the matrix, and one more.
    pub fn is_mxfp4(&self) -> bool {
        if let Self::Known { schemes, .. } = self {
            return schemes.iter().any(|summary| summary.scheme == "mxfp4");
        }
        *self == Self::Mxfp4
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

    /// What tensors show that are not `known`.
    fn gather(table: &TensorTable, known: &HashSet<TensorId>) -> Self {
        let mut found = Self::default();
        for (_, tensor) in table.iter().filter(|(id, _)| !known.contains(id)) {
            let name = tensor.name;
            if is_fp8(tensor.dtype) && tensor.shape.len() >= 2 && !name.ends_with("_scale") {
                if let Some(scale) = scale_of(table, name).map(|scale| table.tensor(scale)) {
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
    fn read(config: &'a Value) -> Self {
        let groups = config.get("config_groups").and_then(Value::as_object);
        let weights = groups.and_then(|groups| groups.values().find_map(|group| group.get("weights")));
        let text = |value: Option<&'a Value>| value.and_then(Value::as_str);
        let of_weights = |key: &str| weights.and_then(|weights| weights.get(key));
        Self {
            method: text(config.get("quant_method")),
            format: text(config.get("format")),
            algorithm: text(config.get("quant_algo")),
            strategy: text(of_weights("strategy")),
            bits: of_weights("num_bits").and_then(Value::as_u64),
            group: of_weights("group_size").and_then(Value::as_u64),
            own_bits: config.get("bits").and_then(Value::as_u64),
            own_group: config.get("group_size").and_then(Value::as_u64),
            mode: text(config.get("mode")),
        }
    }
}

const fn is_fp8(dtype: DType) -> bool {
    matches!(dtype, DType::F8E4M3 | DType::F8E5M2 | DType::F8E4M3Fnuz | DType::F8E5M2Fnuz)
}

/// The scale that belongs to a weight by its name.
fn scale_of(table: &TensorTable, weight: &str) -> Option<TensorId> {
    let beside = ["_scale_inv", "_scale"].into_iter();
    let mut found = beside.filter_map(|suffix| table.find(&format!("{weight}{suffix}")));
    found.next().or_else(|| table.find(&format!("{}.scale", weight.strip_suffix(".weight")?)))
}
