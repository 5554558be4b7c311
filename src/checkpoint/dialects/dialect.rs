//! How a repository names, fuses and quantizes its tensors, read from `config.json` and from the names themselves.

use std::{
    collections::BTreeSet,
    fmt::{self, Write as _},
};

use ckfs_tensor::DType;
use hashbrown::HashMap;
use serde_json::Value;

use super::super::{
    amount::human_bytes,
    printable::printable,
    problem::Problems,
    scheme::Quantization,
    table::{TensorInfo, TensorTable},
    tied::{Tie, other_head},
    words::words,
};

/// How the weights of experts are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Experts {
    /// No experts.
    #[default]
    None,
    /// One tensor per expert.
    Single {
        /// Highest expert number plus one.
        count: u64,
    },
    /// One tensor for all experts, stacked on its first axis.
    Fused,
}

words! {
    /// How the projections to query, key and value are stored. Of several, the greatest is what the model is known by.
    #[derive(Default, PartialOrd, Ord)]
    pub enum Qkv {
        /// No tensor of a known name.
        #[default]
        Unknown = "not recognized",
        /// One tensor for all three.
        Fused = "fused",
        /// One tensor each.
        Separate = "separate",
        /// Latent attention: low-rank factors (DeepSeek).
        Latent = "latent",
    }
}

/// Tensors whose names differ only in a layer number: `{prefix}{word}.N.…`.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct LayerFamily {
    /// The prefix of the word: `model.`, `language_model.model.`, or nothing.
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

/// The habits of a repository. Descriptive: they decide only the treatment of quantized weights.
#[derive(Clone, Debug, PartialEq)]
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
    /// How experts are stored.
    pub experts: Experts,
    /// How query, key and value are stored.
    pub qkv: Qkv,
    /// `tie_word_embeddings` of `config.json`, if transformers honours it there.
    pub tied_declared: Option<bool>,
    /// Whether the output head is the embedding, by `config.json` or else by the model's type.
    pub tied: bool,
    /// Whether the repository has a tensor for the output head (`…lm_head.weight`, `head.weight`, `output.weight`,
    /// ...).
    pub has_lm_head: bool,
    /// The name of the output head, if the model's class calls it otherwise than `lm_head.weight`.
    pub other_head: Option<&'static str>,
    /// The quantization of weights.
    pub quantization: Quantization,
}

/// Words before a layer number.
const LAYER_WORDS: [&str; 8] = ["layers", "layer", "h", "blocks", "block", "decoder_layers", "resblocks", "encoders"];

/// Names of the member with the text model's configuration, if the model has more parts than that.
const TEXT_CONFIGS: [&str; 5] = ["text_config", "llm_config", "language_config", "thinker_config", "text_model"];

/// Names of the number of layers.
const LAYER_COUNTS: [&str; 4] = ["num_hidden_layers", "n_layer", "num_layers", "n_layers"];

/// Most layers that a configuration may have.
const LAYERS_MAX: u64 = 1 << 16;

/// Most families that are kept. A repository with more has names that are not layers.
const FAMILIES_MAX: usize = 256;

/// The nested configuration of the text model, and the name of its member.
pub(crate) fn text_config(config: Option<&Value>) -> Option<(&'static str, &Value)> {
    TEXT_CONFIGS.iter().find_map(|key| Some((*key, config?.get(key).filter(|text| text.is_object())?)))
}

/// A member of the configuration that is not null. The text model's own member has precedence over the whole model's.
pub(crate) fn lookup<'a>(config: Option<&'a Value>, key: &str) -> Option<&'a Value> {
    let told = |of: &'a Value| of.get(key).filter(|value| !value.is_null());
    text_config(config).and_then(|(_, text)| told(text)).or_else(|| told(config?))
}

/// The quantization settings in `config.json`.
pub(crate) fn quantization_config(config: Option<&Value>) -> Option<&Value> {
    let found = ["quantization_config", "compression_config"].iter().find_map(|key| lookup(config, key));
    // MLX's own member.
    found.or_else(|| lookup(config, "quantization").filter(|value| value.is_object()))
}

/// The dtype of the model's floats in `config.json`, or else bf16.
pub(crate) fn own_dtype(config: Option<&Value>) -> DType {
    let word = ["dtype", "torch_dtype"].iter().find_map(|key| lookup(config, key)?.as_str());
    let found = word.and_then(|word| DType::ALL.iter().copied().find(|dtype| dtype.name() == word));
    found.filter(|dtype| dtype.is_float()).unwrap_or(DType::BF16)
}

impl Dialect {
    pub(crate) fn of(
        table: &TensorTable,
        config: Option<&Value>,
        quantization: Quantization,
        problems: &mut Problems,
    ) -> Self {
        let text_config = text_config(config);
        let text = text_config.map(|(_, text)| text);
        let lookup = |key: &str| lookup(config, key);
        let string = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let architectures = config.and_then(|config| config["architectures"].as_array()).into_iter().flatten();
        let mut scan = NameScan { counts: vec![(0, 0); DType::ALL.len()], ..NameScan::default() };
        for (_, tensor) in table.iter() {
            scan.add(&tensor);
        }
        let declared = LAYER_COUNTS.iter().find_map(|key| Some((key, lookup(key)?.as_u64()?)));
        let declared_layers = declared.map(|(_, layers)| layers).filter(|layers| *layers <= LAYERS_MAX);
        if let (Some((key, found)), None) = (declared, declared_layers) {
            let message = format!("{key}: expected at most {LAYERS_MAX}, found {found}");
            problems.of_file("config.json", message);
        }
        let architectures: Vec<String> = architectures.filter_map(|name| name.as_str().map(str::to_owned)).collect();
        let tie = Tie::of(config, text, &architectures);
        let other_head = other_head(&architectures);
        let families = scan.families();
        let mtp_layers = families.first().zip(declared_layers).map_or_else(Vec::new, |((_, layers), declared)| {
            layers.iter().copied().filter(|layer| *layer >= declared).collect()
        });
        Self {
            model_type: string(config.and_then(|config| config.get("model_type"))),
            text_model_type: string(text.and_then(|text| text.get("model_type"))),
            text_config: text_config.map(|(key, _)| key.to_owned()),
            architectures,
            dtypes: scan.dtypes(),
            families: families.into_iter().map(|(family, _)| family).collect(),
            declared_layers,
            mtp_layers,
            mtp_named: scan.mtp_named,
            experts: scan.experts,
            qkv: scan.qkv,
            tied_declared: tie.declared,
            tied: tie.tied,
            has_lm_head: other_head.map_or(scan.has_lm_head, |head| table.find(head).is_some()),
            other_head,
            quantization,
        }
    }

    /// Number of tensors.
    pub fn tensors(&self) -> u64 {
        self.dtypes.iter().map(|row| row.1).sum()
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.dtypes.iter().map(|row| row.2).sum()
    }

    /// The prefix of the layers of the largest family, such as `model.`. Empty if there is no prefix or no layer.
    pub fn prefix(&self) -> &str {
        self.families.first().map_or("", |family| family.prefix.as_str())
    }

    /// Several lines of text, each `subject: description`.
    pub fn describe(&self) -> String {
        let mut lines = vec![format!("model: {}", self.model())];
        if let Some(member) = &self.text_config {
            lines.push(format!("text model: {} (in {member})", self.text_model_type.as_deref().unwrap_or("unnamed")));
        }
        for (dtype, tensors, bytes) in &self.dtypes {
            lines.push(format!("dtype {dtype}: {tensors} tensors, {}", human_bytes(*bytes)));
        }
        for family in &self.families {
            let LayerFamily { prefix, word, layers, last, tensors, bytes } = family;
            let bytes = human_bytes(*bytes);
            lines.push(format!("layers {prefix}{word}.0-{last}: {layers} layers, {tensors} tensors, {bytes}"));
        }
        if let Some(declared) = self.declared_layers {
            lines.push(format!("layers configured: {declared}"));
        }
        if !self.mtp_layers.is_empty() || self.mtp_named {
            let numbers: Vec<String> = self.mtp_layers.iter().map(u64::to_string).collect();
            let place =
                if numbers.is_empty() { "named mtp".to_owned() } else { format!("layers {}", numbers.join(", ")) };
            lines.push(format!("multi-token prediction: {place}"));
        }
        lines.push(format!("experts: {}", self.experts));
        lines.push(format!("query, key, value: {}", self.qkv));
        lines.push(format!("embeddings: {}", self.embeddings()));
        lines.push(format!("quantization: {}", self.quantization));
        let lines: Vec<_> = lines.iter().map(|line| printable(line)).collect();
        lines.join("\n")
    }

    fn model(&self) -> String {
        let names = [self.model_type.clone(), self.architectures.first().map(|name| format!("({name})"))];
        let names: Vec<String> = names.into_iter().flatten().collect();
        if names.is_empty() { "unnamed".to_owned() } else { names.join(" ") }
    }

    const fn embeddings(&self) -> &'static str {
        match (self.tied_declared, self.has_lm_head) {
            (None, false) if self.tied => "tied, as its model type is",
            (Some(true), true) => "declared tied, yet lm_head is there",
            (Some(true), false) => "tied",
            (Some(false) | None, true) => "lm_head of its own",
            (Some(false), false) => "declared untied, yet lm_head is missing",
            (None, false) => "no lm_head",
        }
    }
}

impl fmt::Display for Dialect {
    /// One line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = format!("{}, {} tensors, {}", self.model(), self.tensors(), human_bytes(self.bytes()));
        for (place, (dtype, ..)) in self.dtypes.iter().take(4).enumerate() {
            line.push_str(if place == 0 { " of " } else { "/" });
            line.push_str(dtype.code());
        }
        if let Some(LayerFamily { layers, prefix, word, .. }) = self.families.first() {
            write!(line, ", {layers} {prefix}{word}")?;
        }
        if self.experts != Experts::None {
            write!(line, ", experts {}", self.experts)?;
        }
        write!(line, ", {}", self.quantization)?;
        f.write_str(&printable(&line))
    }
}

impl fmt::Display for Experts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Single { count } => write!(f, "{count}, one tensor each"),
            Self::Fused => f.write_str("fused"),
        }
    }
}

/// Observations from one pass over the names.
#[derive(Debug, Default)]
struct NameScan {
    /// By element type, in the order of [`DType::ALL`].
    counts: Vec<(u64, u64)>,
    /// By prefix with word: the family and its layer numbers.
    families: HashMap<String, (LayerFamily, BTreeSet<u64>)>,
    experts: Experts,
    qkv: Qkv,
    has_lm_head: bool,
    mtp_named: bool,
}

/// Whether a tensor of an output head is its matrix. A tied head may have a bias of its own, or a scale of its outputs.
fn is_matrix_of_head(tensor: &TensorInfo<'_>) -> bool {
    let last = tensor.name.rsplit('.').next().unwrap_or_default();
    last != "bias" && (tensor.shape.len() > 1 || last.contains("weight"))
}

impl NameScan {
    fn add(&mut self, tensor: &TensorInfo<'_>) {
        let bytes = tensor.bytes();
        let (count, sum) = &mut self.counts[tensor.dtype as usize];
        (*count, *sum) = (*count + 1, *sum + bytes);
        if let Some((prefix, layer)) = layer_of(tensor.name) {
            self.add_layer(prefix, layer, bytes);
        }
        let mut parts = tensor.name.split('.').peekable();
        while let Some(part) = parts.next() {
            match part {
                "experts" => self.add_expert(parts.peek().copied()),
                "q_proj" | "k_proj" | "wq" | "wk" | "query" | "key" => self.qkv = self.qkv.max(Qkv::Separate),
                "qkv_proj" | "c_attn" | "query_key_value" | "Wqkv" | "qkv" | "in_proj_qkv" => {
                    self.qkv = self.qkv.max(Qkv::Fused);
                }
                "kv_a_proj_with_mqa" | "wkv_a" | "wkv" => self.qkv = Qkv::Latent,
                "lm_head" | "embed_out" => self.has_lm_head |= is_matrix_of_head(tensor),
                "mtp" => self.mtp_named = true,
                _ => {}
            }
        }
        self.has_lm_head |= matches!(tensor.name, "head.weight" | "output.weight");
    }

    fn add_layer(&mut self, prefix: &str, layer: u64, bytes: u64) {
        if self.families.len() >= FAMILIES_MAX && !self.families.contains_key(prefix) {
            return;
        }
        let (family, layers) = self.families.entry_ref(prefix).or_insert_with(|| {
            let (before, word) = prefix.split_at(prefix.rfind('.').map_or(0, |dot| dot + 1));
            let (prefix, word) = (before.to_owned(), word.to_owned());
            (LayerFamily { prefix, word, layers: 0, last: 0, tensors: 0, bytes: 0 }, BTreeSet::new())
        });
        family.tensors += 1;
        family.bytes += bytes;
        layers.insert(layer);
    }

    fn add_expert(&mut self, next: Option<&str>) {
        match (next.and_then(|next| next.parse::<u64>().ok()), self.experts) {
            (Some(number), Experts::Single { count }) if number < count => {}
            (Some(number), _) => self.experts = Experts::Single { count: number.saturating_add(1) },
            (None, Experts::None) => self.experts = Experts::Fused,
            (None, Experts::Single { .. } | Experts::Fused) => {}
        }
    }

    fn dtypes(&self) -> Vec<(DType, u64, u64)> {
        let rows = DType::ALL.iter().zip(&self.counts).filter(|(_, counts)| counts.0 > 0);
        let mut rows: Vec<_> = rows.map(|(dtype, counts)| (*dtype, counts.0, counts.1)).collect();
        rows.sort_by_key(|row| std::cmp::Reverse((row.2, row.1)));
        rows
    }

    fn families(&mut self) -> Vec<(LayerFamily, BTreeSet<u64>)> {
        let mut families: Vec<_> = self.families.drain().map(|(_, family)| family).collect();
        for (family, layers) in &mut families {
            family.layers = layers.len() as u64;
            family.last = layers.last().copied().unwrap_or(0);
        }
        families.sort_by(|(left, _), (right, _)| {
            right.bytes.cmp(&left.bytes).then_with(|| (&left.prefix, &left.word).cmp(&(&right.prefix, &right.word)))
        });
        families
    }
}

/// Splits `model.layers.17.mlp` at its first layer number: `model.layers` and 17.
fn layer_of(name: &str) -> Option<(&str, u64)> {
    let mut start = 0;
    let mut word = "";
    for part in name.split('.') {
        if part.as_bytes().first().is_some_and(u8::is_ascii_digit)
            && LAYER_WORDS.contains(&word)
            && let Ok(layer) = part.parse()
        {
            return Some((&name[..start - 1], layer));
        }
        start += part.len() + 1;
        word = part;
    }
    None
}
