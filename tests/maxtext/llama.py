"""A generated Llama repository whose sizes MaxText's own converter accepts, and the target of its restore.

`to_maxtext` reads the number of layers and the head size from its table of models, here those of Llama 3.1 8B (32 layers,
heads of 128). The other sizes are MaxText's own settings, so they may be smaller without any change to MaxText.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np

LAYERS, HEAD = 32, 128
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model in the family of Llama 3.1 8B."""

    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int

    def layer(self) -> dict[str, tuple[int, int]]:
        """Matrices of a layer, in Hugging Face's shapes."""
        return {
            "self_attn.q_proj": (self.heads * HEAD, self.hidden),
            "self_attn.k_proj": (self.kv_heads * HEAD, self.hidden),
            "self_attn.v_proj": (self.kv_heads * HEAD, self.hidden),
            "self_attn.o_proj": (self.hidden, self.heads * HEAD),
            "mlp.gate_proj": (self.mlp, self.hidden),
            "mlp.up_proj": (self.mlp, self.hidden),
            "mlp.down_proj": (self.hidden, self.mlp),
        }

    def leaves(self) -> dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]:
        """Shape and partition spec of each leaf that MaxText restores, for mesh axes `fsdp` and `tensor`."""
        d, h, k, f, v, n = self.hidden, self.heads, self.kv_heads, self.mlp, self.vocab, LAYERS
        layer = {
            "self_attention.query.kernel": ((d, n, h, HEAD), ("fsdp", None, "tensor", None)),
            "self_attention.key.kernel": ((d, n, k, HEAD), ("fsdp", None, "tensor", None)),
            "self_attention.value.kernel": ((d, n, k, HEAD), ("fsdp", None, "tensor", None)),
            "self_attention.out.kernel": ((h, n, HEAD, d), ("tensor", None, None, "fsdp")),
            "mlp.wi_0.kernel": ((d, n, f), ("fsdp", None, "tensor")),
            "mlp.wi_1.kernel": ((d, n, f), ("fsdp", None, "tensor")),
            "mlp.wo.kernel": ((f, n, d), ("tensor", None, "fsdp")),
            "pre_self_attention_layer_norm.scale": ((d, n), ("tensor", None)),
            "post_self_attention_layer_norm.scale": ((d, n), ("tensor", None)),
        }
        return {f"decoder.layers.{name}": leaf for name, leaf in layer.items()} | {
            "decoder.decoder_norm.scale": ((d,), ("tensor",)),
            "decoder.logits_dense.kernel": ((d, v), ("fsdp", "tensor")),
            "token_embedder.embedding": ((v, d), ("tensor", "fsdp")),
        }

    def settings(self) -> list[str]:
        """The same sizes as MaxText's settings."""
        return [
            "override_model_config=true",
            f"base_emb_dim={self.hidden}",
            f"base_num_query_heads={self.heads}",
            f"base_num_kv_heads={self.kv_heads}",
            f"base_mlp_dim={self.mlp}",
            f"vocab_size={self.vocab}",
        ]


SIZES = {
    "0.3": Size(512, 4, 2, 1792, 32000),
    "0.6": Size(768, 6, 2, 2688, 32000),
    "2": Size(1536, 12, 4, 5376, 32000),
    "4": Size(2048, 16, 8, 7168, 32000),
}


def write(path: Path, size: Size) -> int:
    """Writes the repository, in files of four layers each, and returns the bytes of its tensors."""
    path.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": size.hidden, "num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads,
        "head_dim": HEAD, "intermediate_size": size.mlp, "vocab_size": size.vocab, "num_hidden_layers": LAYERS,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    groups: list[dict[str, tuple[int, ...]]] = []
    for layer in range(LAYERS):
        if layer % 4 == 0:
            groups.append({})
        at = f"model.layers.{layer}"
        groups[-1] |= {f"{at}.{name}.weight": shape for name, shape in size.layer().items()}
        groups[-1] |= {f"{at}.{name}.weight": (size.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    ends = {"model.embed_tokens.weight": (size.vocab, size.hidden), "lm_head.weight": (size.vocab, size.hidden)}
    groups.append(ends | {"model.norm.weight": (size.hidden,)})
    draw, names, total = np.random.Generator(np.random.SFC64(7)), {}, 0
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        header, end = {}, 0
        for name, shape in group.items():
            begin, end = end, end + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
            names[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for shape in group.values():
                # Any sign and mantissa, magnitudes from 2^-7 to 2^-3: all normal numbers.
                bits = np.frombuffer(draw.bytes(2 * int(np.prod(shape))), np.uint16)
                out.write((bits & 0x81FF | 0x3C00).tobytes())
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return total
