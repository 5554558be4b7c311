//! How a repository names, fuses and quantizes its tensors, read from `config.json` and from the names themselves.

use super::quantization::Quantization;
use crate::tensor::DType;

/// How the weights of experts are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// No experts.
    None,
    /// One tensor per expert.
    Single {
        /// Highest expert number plus one.
        count: u64,
    },
    /// One tensor for all experts, stacked on its first axis.
    Fused,
}

/// How the projections to query, key and value are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qkv {
    /// No tensor of a known name.
    Unknown,
    /// One tensor each.
    Separate,
    /// One tensor for all three.
    Fused,
    /// Latent attention: low-rank factors (DeepSeek).
    Latent,
}

/// Tensors whose names differ in a layer number only: `{prefix}{word}.N.…`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerFamily {
    /// What stands before the word: `model.`, `language_model.model.`, or nothing.
    pub prefix: String,
    /// The word: `layers`, `h`, `blocks`, ...
    pub word: String,
    /// Distinct layer numbers.
    pub layers: u64,
    /// Highest layer number.
    pub last: u64,
    /// Number of tensors.
    pub tensors: u64,
    /// Bytes of these tensors.
    pub bytes: u64,
}

/// What a repository is like. Descriptive: nothing is decided by it except what to do with quantized weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// `model_type` of `config.json`.
    pub model_type: Option<String>,
    /// `model_type` of the nested configuration of the text model.
    pub text_model_type: Option<String>,
    /// Name of the member that holds the nested configuration: `text_config`, `llm_config`, ...
    pub text_config: Option<String>,
    /// `architectures` of `config.json`.
    pub architectures: Vec<String>,
    /// Number of tensors and of their bytes by element type, most bytes first.
    pub dtypes: Vec<(DType, u64, u64)>,
    /// Families of layers, most bytes first.
    pub families: Vec<LayerFamily>,
    /// Layers of the main model as configured (`num_hidden_layers` or its like).
    pub declared_layers: Option<u64>,
    /// Numbers of layers beyond the configured ones in the first family: multi-token prediction.
    pub mtp_layers: Vec<u64>,
    /// Whether tensors outside the layers are named `mtp.…`.
    pub mtp_named: bool,
    /// How experts are kept.
    pub experts: Experts,
    /// How query, key and value are kept.
    pub qkv: Qkv,
    /// `tie_word_embeddings` of `config.json`.
    pub tied_declared: Option<bool>,
    /// Whether there is a tensor for the output head (`…lm_head.weight`, `head.weight`, `output.weight`, ...).
    pub has_lm_head: bool,
    /// How weights are quantized.
    pub quantization: Quantization,
}
