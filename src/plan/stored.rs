//! The layout `stored`: the checkpoint's own tensors under their own names.
//!
//! It is the default for checkpoints of trainers, so that `orbax/` and `dcp/` of a mount are the same checkpoint, cut for another
//! mesh. Tensors with names of MaxText are split by MaxText's logical rules, all others along axis 0.

use ckfs_checkpoint::Checkpoint;

use super::{
    draft::{Draft, Roles},
    problem::Problem,
    values::Values,
};

/// The logical axes of MaxText's weights, by the end of the name. Those of a stack have the axis `layers` after the first.
const MAXTEXT: [(&str, &[&str]); 22] = [
    ("token_embedder.embedding", &["vocab", "embed_vocab"]),
    ("logits_dense.kernel", &["embed_vocab", "vocab"]),
    ("shared_expert_gate.kernel", &["embed", ""]),
    ("gate.kernel", &["embed_router", ""]),
    ("wi_0.kernel", &["embed", "mlp"]),
    ("wi_1.kernel", &["embed", "mlp"]),
    ("wo.kernel", &["mlp", "embed"]),
    ("MoeBlock_0.wi_0", &["exp", "embed_moe", "mlp_moe"]),
    ("MoeBlock_0.wi_1", &["exp", "embed_moe", "mlp_moe"]),
    ("MoeBlock_0.wo", &["exp", "mlp_moe", "embed_moe"]),
    ("query.kernel", &["embed_attn", "q_heads", "kv"]),
    ("key.kernel", &["embed_attn", "kv_heads", "kv_head_dim"]),
    ("value.kernel", &["embed_attn", "kv_heads", "kv_head_dim"]),
    ("out.kernel", &["heads", "kv", "embed_attn"]),
    ("query.bias", &["q_heads", "kv"]),
    ("key.bias", &["kv_heads", "kv_head_dim"]),
    ("value.bias", &["kv_heads", "kv_head_dim"]),
    ("wq_a.kernel", &["embed_attn", "q_lora_up_proj"]),
    ("wq_b.kernel", &["q_lora", "q_heads", "kv"]),
    ("wkv_a.kernel", &["embed_attn", "kv_lora_up_proj"]),
    ("wkv_b.kernel", &["kv_lora", "kv_heads", "kv_head_dim"]),
    ("norm.scale", &["norm"]),
];

/// Whether the names are those of a MaxText model.
pub(super) fn is_maxtext(checkpoint: &Checkpoint) -> bool {
    checkpoint.tensors().any(|(_, info)| {
        let is_decoder = info.name.contains("params.decoder.") || info.name.contains("params.token_embedder.");
        // A tree of NNX has no collection, and its arrays are under a word of their own.
        let is_nnx =
            info.name.ends_with(VALUE) && info.name.split('.').any(|word| matches!(word, "decoder" | "token_embedder"));
        (is_decoder || is_nnx) && MAXTEXT.iter().any(|(end, _)| ends_with(info.name, end))
    })
}

/// The last word of the leaves in a tree of NNX.
const VALUE: &str = ".value";

fn ends_with(name: &str, end: &str) -> bool {
    let name = name.strip_suffix(VALUE).unwrap_or(name);
    // `pre_self_attention_layer_norm.scale` and `wi_0.kernel` alike: the last but one word may begin with anything for norms.
    let before = name.strip_suffix(end);
    before.is_some_and(|before| {
        before.is_empty() || before.ends_with('.') || (end == "norm.scale" && before.ends_with('_'))
    })
}

/// The logical axes of a tensor of MaxText; `None` if the name is not known or has another rank.
fn logical(name: &str, rank: usize) -> Option<Vec<String>> {
    let (_, axes) = MAXTEXT.iter().find(|(end, _)| ends_with(name, end))?;
    let is_stacked = name.split('.').any(|word| word.ends_with("layers") || word == "scanned_blocks");
    let mut axes: Vec<String> = axes.iter().map(|axis| (*axis).to_owned()).collect();
    if is_stacked {
        axes.insert(1.min(axes.len()), "layers".to_owned());
    }
    (axes.len() == rank).then_some(axes)
}

/// A draft for each tensor.
///
/// # Errors
/// Every problem with a tensor's values.
pub(super) fn drafts(checkpoint: &Checkpoint, values: &Values<'_>) -> Result<Vec<Draft>, Vec<Problem>> {
    let is_maxtext = is_maxtext(checkpoint);
    let (mut drafts, mut problems) = (Vec::with_capacity(checkpoint.tensors().len()), Vec::new());
    for (id, info) in checkpoint.tensors() {
        let logical = if is_maxtext { logical(info.name, info.shape.len()) } else { None };
        let roles = Roles { by_position: logical.is_none(), logical: logical.unwrap_or_default(), ..Roles::default() };
        let view = values.view(id, values.dtype_of(id, &[info.name])).map_err(|problem| problems.push(problem));
        drafts.extend(view.map(|view| Draft::new(info.name.to_owned(), view, roles)));
    }
    if problems.is_empty() { Ok(drafts) } else { Err(problems) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_of_maxtext_are_known_by_the_end_of_the_name() {
        let rows = [
            ("params.params.decoder.layers.mlp.wi_0.kernel", 3, Some("embed layers mlp")),
            ("params.params.decoder.layers_3.mlp.wi_0.kernel", 2, Some("embed mlp")),
            ("params.params.decoder.layers_3.mlp.wi_0.kernel", 3, None),
            ("params.params.decoder.layers.self_attention.query.kernel", 4, Some("embed_attn layers q_heads kv")),
            ("params.params.decoder.layers.pre_self_attention_layer_norm.scale", 2, Some("norm layers")),
            ("params.params.decoder.decoder_norm.scale", 1, Some("norm")),
            ("params.params.decoder.moe_layers.X.MoeBlock_0.wo", 4, Some("exp layers mlp_moe embed_moe")),
            ("params.params.token_embedder.embedding", 2, Some("vocab embed_vocab")),
            ("params.params.decoder.layers.my_wi_0.kernel", 3, None),
            ("step", 0, None),
        ];
        for (name, rank, expected) in rows {
            assert_eq!(logical(name, rank).map(|axes| axes.join(" ")).as_deref(), expected, "{name}");
        }
    }
}
