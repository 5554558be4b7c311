//! Drawn models: configurations and tensors of repositories, as the model's own code names and shapes them.

use serde_json::{Value, json};

/// A source of choices that shrinks.
pub(crate) struct Draw(Vec<u32>, usize);

impl Draw {
    pub(crate) fn new(choices: Vec<u32>) -> Self {
        Self(choices, 0)
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.1 += 1;
        self.0[(self.1 - 1) % self.0.len()]
    }

    pub(crate) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.next() as usize % choices.len()]
    }
}

/// What a layout computes with a tensor, and what undoes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Arithmetic {
    /// Elements are moved, whatever their bits are.
    None,
    /// A product there and one back, each in f32 and then rounded to the dtype.
    Scale(f32, f32),
    /// One is added in f32, which is saved so.
    PlusOne,
}

/// A tensor of a model.
#[derive(Clone, Debug)]
pub(crate) struct Drawn {
    pub name: String,
    pub shape: Vec<u64>,
    pub arithmetic: Arithmetic,
}

/// A model's repository without its bytes.
#[derive(Debug)]
pub(crate) struct Model {
    pub config: Value,
    pub tensors: Vec<Drawn>,
    /// Rows of the embedding.
    pub vocab: u64,
}

/// Sizes from which the families' shapes are made.
struct Sizes {
    hidden: u64,
    heads: u64,
    groups: u64,
    size: u64,
    inner: u64,
    layers: u64,
    experts: u64,
    vocab: u64,
}

pub(crate) const FAMILIES: [&str; 12] = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "olmo3",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
];

/// Those that Megatron-Core's layouts know.
pub(crate) const MEGATRON: [&str; 6] = ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"];

/// Those that torchtitan's layout knows.
pub(crate) const TORCHTITAN: [&str; 4] = ["llama", "qwen3", "qwen3_moe", "deepseek_v3"];

#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "constants are rounded to f32")]
fn root(of: u64) -> (f64, f32) {
    let root = (of as f64).sqrt();
    (root, root as f32)
}

/// The query of families that divide it by the root of the head's size.
#[allow(clippy::cast_possible_truncation, reason = "constants are rounded to f32")]
fn scaled_query(size: u64) -> Arithmetic {
    let (exact, rounded) = root(size);
    Arithmetic::Scale((1.0 / exact) as f32, rounded)
}

fn scaled_embedding(family: &str, hidden: u64) -> Arithmetic {
    let rounded = root(hidden).1;
    match family {
        "gemma2" => Arithmetic::Scale(rounded, 1.0 / rounded),
        "gemma3_text" => {
            let rounded = half::bf16::from_f32(rounded).to_f32();
            Arithmetic::Scale(rounded, 1.0 / rounded)
        }
        _ => Arithmetic::None,
    }
}

impl Model {
    /// A model of this family.
    pub(crate) fn draw(family: &str, draw: &mut Draw) -> Self {
        // Half of the models are split evenly by most meshes.
        let is_even = draw.next().is_multiple_of(2);
        let mut even = |even: &[u64], others: &[u64]| draw.of(if is_even { even } else { others });
        let groups = even(&[2, 4], &[1, 2, 3]);
        let sizes = Sizes {
            hidden: even(&[16, 8, 24], &[20, 12, 36]),
            heads: groups * even(&[1, 2, 3], &[2, 1, 3]),
            groups,
            size: even(&[4, 8, 16], &[4, 2, 6, 16]),
            inner: even(&[24, 8], &[10, 6, 7]),
            experts: even(&[4, 2], &[3, 2, 4]),
            vocab: even(&[32, 24], &[32, 11]),
            layers: match family {
                "gemma2" | "gpt_oss" => draw.of(&[2, 4]),
                "gemma3_text" => draw.of(&[6, 7, 12]),
                "olmo3" => draw.of(&[4, 8]),
                "deepseek_v2" | "deepseek_v3" => draw.of(&[3, 2, 4]),
                _ => draw.of(&[2, 1, 3]),
            },
        };
        let is_tied = family.starts_with("gemma") || (!family.starts_with("deepseek") && draw.next().is_multiple_of(3));
        let mut model = Self { config: sizes.config(family, is_tied), tensors: Vec::new(), vocab: sizes.vocab };
        let norm = if family.starts_with("gemma") { Arithmetic::PlusOne } else { Arithmetic::None };
        let embedding = scaled_embedding(family, sizes.hidden);
        model.add("model.embed_tokens.weight", &[sizes.vocab, sizes.hidden], embedding);
        model.add("model.norm.weight", &[sizes.hidden], norm);
        if !is_tied {
            model.add("lm_head.weight", &[sizes.vocab, sizes.hidden], Arithmetic::None);
        }
        for layer in 0..sizes.layers {
            model.add_layer(family, layer, &sizes, norm);
        }
        model
    }

    fn add(&mut self, name: &str, shape: &[u64], arithmetic: Arithmetic) {
        self.tensors.push(Drawn { name: name.to_owned(), shape: shape.to_vec(), arithmetic });
    }

    fn add_plain(&mut self, layer: u64, tensors: &[(&str, &[u64])]) {
        for (name, shape) in tensors {
            self.add(&format!("model.layers.{layer}.{name}"), shape, Arithmetic::None);
        }
    }

    fn add_layer(&mut self, family: &str, layer: u64, sizes: &Sizes, norm: Arithmetic) {
        let Sizes { hidden, heads, groups, size, inner, experts, .. } = *sizes;
        let norms: &[&str] = match family {
            "gemma2" | "gemma3_text" => &[
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
            "olmo3" => &["post_attention_layernorm", "post_feedforward_layernorm"],
            _ => &["input_layernorm", "post_attention_layernorm"],
        };
        for name in norms {
            self.add(&format!("model.layers.{layer}.{name}.weight"), &[hidden], norm);
        }
        if family.starts_with("deepseek") {
            return self.add_deepseek(family, layer, sizes);
        }
        let is_scaled = ["llama", "mistral", "mixtral", "gemma2"].contains(&family);
        let query = if is_scaled { scaled_query(size) } else { Arithmetic::None };
        self.add(&format!("model.layers.{layer}.self_attn.q_proj.weight"), &[heads * size, hidden], query);
        self.add_plain(
            layer,
            &[
                ("self_attn.k_proj.weight", &[groups * size, hidden]),
                ("self_attn.v_proj.weight", &[groups * size, hidden]),
                ("self_attn.o_proj.weight", &[hidden, heads * size]),
            ],
        );
        if ["qwen2", "gpt_oss"].contains(&family) {
            self.add_plain(
                layer,
                &[
                    ("self_attn.q_proj.bias", &[heads * size]),
                    ("self_attn.k_proj.bias", &[groups * size]),
                    ("self_attn.v_proj.bias", &[groups * size]),
                ],
            );
        }
        let normed = match family {
            "qwen3" | "qwen3_moe" | "gemma3_text" => Some((size, size)),
            "olmo3" => Some((heads * size, groups * size)),
            _ => None,
        };
        if let Some((query, key)) = normed {
            self.add(&format!("model.layers.{layer}.self_attn.q_norm.weight"), &[query], norm);
            self.add(&format!("model.layers.{layer}.self_attn.k_norm.weight"), &[key], norm);
        }
        match family {
            "mixtral" => {
                self.add_plain(layer, &[("block_sparse_moe.gate.weight", &[experts, hidden])]);
                self.add_experts(layer, "block_sparse_moe", ["w1", "w3", "w2"], sizes);
            }
            "qwen3_moe" => {
                self.add_plain(layer, &[("mlp.gate.weight", &[experts, hidden])]);
                self.add_experts(layer, "mlp", ["gate_proj", "up_proj", "down_proj"], sizes);
            }
            "gpt_oss" => self.add_plain(
                layer,
                &[
                    ("self_attn.o_proj.bias", &[hidden]),
                    ("self_attn.sinks", &[heads]),
                    ("mlp.router.weight", &[experts, hidden]),
                    ("mlp.router.bias", &[experts]),
                    ("mlp.experts.gate_up_proj", &[experts, hidden, 2 * inner]),
                    ("mlp.experts.gate_up_proj_bias", &[experts, 2 * inner]),
                    ("mlp.experts.down_proj", &[experts, inner, hidden]),
                    ("mlp.experts.down_proj_bias", &[experts, hidden]),
                ],
            ),
            _ => self.add_mlp(layer, "mlp", hidden, inner),
        }
    }

    fn add_mlp(&mut self, layer: u64, place: &str, hidden: u64, inner: u64) {
        for (name, shape) in [("gate", [inner, hidden]), ("up", [inner, hidden]), ("down", [hidden, inner])] {
            self.add_plain(layer, &[(&format!("{place}.{name}_proj.weight"), &shape)]);
        }
    }

    fn add_experts(&mut self, layer: u64, place: &str, [gate, up, down]: [&str; 3], sizes: &Sizes) {
        let (up_shape, down_shape) = ([sizes.inner, sizes.hidden], [sizes.hidden, sizes.inner]);
        for expert in 0..sizes.experts {
            for (name, shape) in [(gate, up_shape), (up, up_shape), (down, down_shape)] {
                self.add_plain(layer, &[(&format!("{place}.experts.{expert}.{name}.weight"), &shape)]);
            }
        }
    }

    /// Latent attention; the first layer is dense, the others have experts.
    fn add_deepseek(&mut self, family: &str, layer: u64, sizes: &Sizes) {
        let Sizes { hidden, heads, size, inner, experts, .. } = *sizes;
        let Latent { query, key, nope, rope, value } = LATENT;
        self.add_plain(
            layer,
            &[
                ("self_attn.kv_a_proj_with_mqa.weight", &[key + rope, hidden]),
                ("self_attn.kv_a_layernorm.weight", &[key]),
                ("self_attn.kv_b_proj.weight", &[heads * (nope + value), key]),
                ("self_attn.o_proj.weight", &[hidden, heads * value]),
            ],
        );
        let is_third = family == "deepseek_v3";
        if is_third {
            self.add_plain(
                layer,
                &[
                    ("self_attn.q_a_proj.weight", &[query, hidden]),
                    ("self_attn.q_a_layernorm.weight", &[query]),
                    ("self_attn.q_b_proj.weight", &[heads * (nope + rope), query]),
                ],
            );
        } else {
            self.add_plain(layer, &[("self_attn.q_proj.weight", &[heads * (nope + rope), hidden])]);
        }
        if layer == 0 {
            return self.add_mlp(layer, "mlp", hidden, size + inner);
        }
        self.add_mlp(layer, "mlp.shared_experts", hidden, 2 * inner);
        self.add_plain(layer, &[("mlp.gate.weight", &[experts, hidden])]);
        if is_third {
            self.add_plain(layer, &[("mlp.gate.e_score_correction_bias", &[experts])]);
        }
        self.add_experts(layer, "mlp", ["gate_proj", "up_proj", "down_proj"], sizes);
    }
}

/// Sizes of latent attention, none of which is another's.
struct Latent {
    query: u64,
    key: u64,
    nope: u64,
    rope: u64,
    value: u64,
}

const LATENT: Latent = Latent { query: 14, key: 10, nope: 8, rope: 4, value: 6 };

impl Sizes {
    fn config(&self, family: &str, is_tied: bool) -> Value {
        let mut config = json!({
            "model_type": family, "hidden_size": self.hidden, "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups, "head_dim": self.size, "num_hidden_layers": self.layers,
            "vocab_size": self.vocab, "intermediate_size": self.inner, "tie_word_embeddings": is_tied,
        });
        let more = match family {
            "mixtral" | "gpt_oss" => json!({ "num_local_experts": self.experts }),
            "qwen3_moe" => json!({ "num_experts": self.experts, "moe_intermediate_size": self.inner }),
            "deepseek_v2" | "deepseek_v3" => {
                let is_third = family == "deepseek_v3";
                json!({
                    "intermediate_size": self.size + self.inner, "moe_intermediate_size": self.inner,
                    "n_routed_experts": self.experts, "n_shared_experts": 2, "first_k_dense_replace": 1,
                    "q_lora_rank": is_third.then_some(LATENT.query), "kv_lora_rank": LATENT.key,
                    "qk_nope_head_dim": LATENT.nope, "qk_rope_head_dim": LATENT.rope, "v_head_dim": LATENT.value,
                    "topk_method": if is_third { "noaux_tc" } else { "greedy" },
                    "num_key_value_heads": self.heads,
                })
            }
            _ => json!({}),
        };
        let (all, more) = (config.as_object_mut().unwrap(), more.as_object().unwrap());
        all.extend(more.iter().map(|(key, value)| (key.clone(), value.clone())));
        config
    }
}
