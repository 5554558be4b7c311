//! Which quantization a repository uses, and which scale belongs to which weight.

use crate::tensor::{DType, TensorId};

/// How a repository's weights are quantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// Not at all, as far as configuration and tensors tell.
    None,
    /// 8-bit floats with a scale per block (DeepSeek, Qwen, MiniMax).
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
