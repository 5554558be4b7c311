"""What the mount must show, computed slowly and from scratch in numpy.

Shares nothing with the Rust code but the contract: names, stacking, the numbering of devices and the arithmetic of
shards. Tables are flat lists of patterns; every array is built whole in memory.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re

import numpy as np

from repos import BLOCK, NUMPY, PACKED_BITS, Repo, Tensor

FLOATS = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F16", "BF16", "F32", "F64")
USER_DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}

# --- names -----------------------------------------------------------------------------------------------------------

ATTENTION = [(rf"self_attn\.{w}_proj\.weight", f"w{w}") for w in "qkvo"]
ATTENTION += [(rf"self_attn\.{w}_proj\.bias", f"b{w}") for w in "qkvo"]
ATTENTION += [(r"self_attn\.([qk])_norm\.weight", r"\1_norm"), (r"self_attn\.sinks", "sinks")]
GATED = [(r"mlp\.(gate|up|down)_proj\.weight", r"w_\1")]
TWO_NORMS = [(r"input_layernorm\.weight", "attn_norm"), (r"post_attention_layernorm\.weight", "mlp_norm")]
FOUR_NORMS = [
    (r"input_layernorm\.weight", "attn_norm"),
    (r"post_attention_layernorm\.weight", "attn_post_norm"),
    (r"pre_feedforward_layernorm\.weight", "mlp_norm"),
    (r"post_feedforward_layernorm\.weight", "mlp_post_norm"),
]
DENSE = ATTENTION + GATED + TWO_NORMS
ENDS = [
    (r"(?:language_model\.)?(?:model\.)?embed_tokens\.weight", "embed"),
    (r"(?:language_model\.)?(?:model\.)?norm\.weight", "final_norm"),
    (r"(?:language_model\.)?lm_head\.weight", "lm_head"),
]
EXPERTS = [(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", r"experts/\1/w_\2"), (r"mlp\.gate\.weight", "router")]
MIXTRAL_WORDS = {"w1": "w_gate", "w2": "w_down", "w3": "w_up"}
MIXTRAL = [(rf"block_sparse_moe\.experts\.(\d+)\.{a}\.weight", rf"experts/\1/{b}") for a, b in MIXTRAL_WORDS.items()]
MIXTRAL += [(r"block_sparse_moe\.gate\.weight", "router")]
GPT_OSS = [
    (r"mlp\.router\.weight", "router"), (r"mlp\.router\.bias", "router_bias"),
    (r"mlp\.experts\.gate_up_proj", "experts/w_gate_up"), (r"mlp\.experts\.gate_up_proj_bias", "experts/b_gate_up"),
    (r"mlp\.experts\.down_proj", "experts/w_down"), (r"mlp\.experts\.down_proj_bias", "experts/b_down"),
]  # fmt: skip
MLA_WORDS = {"q_a_proj": "wq_a", "q_b_proj": "wq_b", "kv_a_proj_with_mqa": "wkv_a", "kv_b_proj": "wkv_b"}
MLA_WORDS |= {"o_proj": "wo", "q_proj": "wq"}
DEEPSEEK = [(rf"self_attn\.{a}\.weight", b) for a, b in MLA_WORDS.items()]
DEEPSEEK += [(rf"self_attn\.{a}\.weight_scale_inv", f"{b}_scale_inv") for a, b in MLA_WORDS.items()]
DEEPSEEK += [
    (r"self_attn\.(q|kv)_a_layernorm\.weight", r"\1_a_norm"), (r"mlp\.gate\.e_score_correction_bias", "router_bias"),
    (r"mlp\.shared_experts\.(gate|up|down)_proj\.weight", r"shared_experts/w_\1"),
    (r"mlp\.(gate|up|down)_proj\.weight_scale_inv", r"w_\1_scale_inv"),
]  # fmt: skip
BERT_WORDS = {
    r"attention\.self\.query": ("wq", "bq"), r"attention\.self\.key": ("wk", "bk"), r"attention\.self\.value": ("wv", "bv"),
    r"attention\.output\.dense": ("wo", "bo"), r"attention\.output\.LayerNorm": ("attn_norm", "attn_norm_bias"),
    r"intermediate\.dense": ("w_up", "b_up"), r"output\.dense": ("w_down", "b_down"),
    r"output\.LayerNorm": ("mlp_norm", "mlp_norm_bias"),
}  # fmt: skip
BERT = [(rf"{a}\.{w}", b) for a, pair in BERT_WORDS.items() for w, b in zip(("weight", "bias"), pair)]
FUSED = [(r"self_attn\.qkv_proj\.weight", "wqkv"), (r"mlp\.gate_up_proj\.weight", "w_gate_up")]

IN_LAYER = {
    "llama": DENSE, "qwen2": DENSE, "qwen3_moe": DENSE + EXPERTS, "mixtral": DENSE + MIXTRAL, "phi3": DENSE + FUSED,
    "gemma3": ATTENTION + GATED + FOUR_NORMS, "deepseek_v3": DEEPSEEK + GATED + TWO_NORMS + EXPERTS,
    "gpt_oss": DENSE + GPT_OSS, "bert": BERT,
}  # fmt: skip
# Prefixes of the main stack of layers, which is the one called plainly `layers`.
MAIN_STACK = {"bert": ["encoder"], "gemma3": ["language_model.model", "model.language_model"]}
OUTSIDE = {"bert": [(r"embeddings\.word_embeddings\.weight", "embed")]}
LAYER = re.compile(r"(?:(?P<prefix>.+)\.)?(?:layers|h|blocks|layer)\.(?P<n>\d+)\.(?P<rest>.+)")


def _renamed(name: str, rules: list[tuple[str, str]]) -> str | None:
    for pattern, to in rules:
        if match := re.fullmatch(pattern, name):
            return match.expand(to)
    return None


@dataclasses.dataclass(frozen=True)
class Name:
    """A canonical path in two parts: `stack` is the prefix of a layer family or None, `layer` the number in it."""

    stack: str | None
    layer: int | None
    rest: str

    @property
    def path(self) -> str:
        return self.rest if self.layer is None else f"{self.stack}layers/{self.layer}/{self.rest}"


def _plain(words: str) -> str:
    return words.removesuffix(".weight").replace(".", "/")


def canonical_names(repo: Repo) -> dict[str, Name]:
    """Canonical name of each tensor of the repo."""
    family = repo.config.get("model_type", "")
    names: dict[str, Name] = {}
    for hf in repo.tensors:
        match = LAYER.fullmatch(hf)
        if match is None:
            known = _renamed(hf, OUTSIDE.get(family, ENDS)) if family in IN_LAYER else None
            names[hf] = Name(None, None, known or _plain(hf.removeprefix("model.")))
            continue
        prefix, layer, rest = match["prefix"] or "", int(match["n"]), match["rest"]
        known = None
        if family in IN_LAYER and prefix in MAIN_STACK.get(family, ["model"]):
            known, prefix = _renamed(rest, IN_LAYER[family]), ""
        prefix = "" if prefix == "model" else prefix.removeprefix("model.")
        names[hf] = Name(prefix.replace(".", "/") + "/" if prefix else "", layer, known or _plain(rest))
    return _unclashed(names)


def _unclashed(names: dict[str, Name]) -> dict[str, Name]:
    """Where dropping `weight` made one path a file and a directory (`fc1` and `fc1/bias`), `weight` stays."""
    template = {hf: (name.stack, re.sub(r"\b\d+\b", "N", name.rest)) for hf, name in names.items()}
    directories = {(stack, rest.rsplit("/", n)[0]) for stack, rest in template.values() for n in range(1, rest.count("/") + 1)}
    return {
        hf: dataclasses.replace(name, rest=f"{name.rest}/weight") if template[hf] in directories else name
        for hf, name in names.items()
    }


# --- tensors of the mount --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Shown:
    """One tensor of the mount, whole. `lead` counts the axes that stacking put in front."""

    path: str
    code: str
    array: np.ndarray
    shape: tuple[int, ...]
    sources: list[str]
    lead: int = 0
    expert_axis: int | None = None
    layers: tuple[int, ...] = ()
    scanned: bool = False
    alias: bool = False
    bundled: bool = True

    @property
    def name(self) -> str:
        return self.path.replace("/", ".")

    @property
    def role(self) -> str:
        word = self.path.rsplit("/", 1)[-1]
        if word in COLUMN:
            return "column"
        return "row" if word in ROW else "replicated"


COLUMN = {"wq", "wk", "wv", "bq", "bk", "bv", "w_gate", "w_up", "embed", "lm_head", "wq_b", "wkv_b", "b_up"}
ROW = {"wo", "w_down"}


def _shown(path: str, tensor: Tensor, source: str, **more: object) -> Shown:
    return Shown(path, tensor.code, tensor.array(), tensor.shape, [source], **more)  # type: ignore[arg-type]


def _stack(parts: list[Shown], path: str, **more: object) -> Shown:
    sources = list(itertools.chain.from_iterable(part.sources for part in parts))
    shape = (len(parts), *parts[0].shape)
    return dataclasses.replace(
        parts[0], path=path, array=np.stack([part.array for part in parts]), shape=shape, sources=sources,
        lead=parts[0].lead + 1, **more,
    )  # fmt: skip


def _alike(parts: list[Shown]) -> bool:
    return len({(part.code, part.shape) for part in parts}) == 1


def canonical(repo: Repo) -> dict[str, Shown]:
    """Every tensor of layout `canonical` by path, scanned, unscanned and tied."""
    names = canonical_names(repo)
    stored_experts = repo.config.get("model_type") == "gpt_oss"
    shown: dict[str, Shown] = {}
    stacks: dict[tuple[str, str], dict[int, dict[int, Shown]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for hf, tensor in repo.tensors.items():
        name = names[hf]
        assert name.path not in shown, f"{hf} and another tensor are both called {name.path}"
        one = _shown(name.path, tensor, hf)
        if stored_experts and name.rest.startswith("experts/"):
            one.expert_axis = 0
        shown[name.path] = one
        if name.layer is None:
            continue
        assert name.stack is not None
        expert = re.fullmatch(r"(.*\bexperts)/(\d+)/(.+)", name.rest)
        if expert:
            stacks[name.stack, f"{expert[1]}/{expert[3]}"][name.layer][int(expert[2])] = one
        else:
            stacks[name.stack, name.rest][name.layer][-1] = one
    for (stack, rest), layers in stacks.items():
        ordered = sorted(layers)
        experts = {tuple(sorted(layers[n])) for n in ordered}
        members = [layers[n][e] for n in ordered for e in sorted(layers[n])]
        if len(experts) > 1 or not _alike(members):
            continue
        path, ids = f"{stack}layers/scanned/{rest}", tuple(ordered)
        for member in members:
            member.bundled = False
        if experts == {(-1,)}:
            whole = _stack(members, path, layers=ids, scanned=True, bundled=True)
            if members[0].expert_axis is not None:
                whole.expert_axis = 1
        else:
            per_layer = [_stack([layers[n][e] for e in sorted(layers[n])], "") for n in ordered]
            whole = _stack(per_layer, path, layers=ids, scanned=True, bundled=True, expert_axis=1)
        shown[path] = whole
    text = repo.config.get("text_config", repo.config)
    if text.get("tie_word_embeddings") and "embed" in shown and "lm_head" not in shown:
        shown["lm_head"] = dataclasses.replace(shown["embed"], path="lm_head", alias=True, bundled=False)
    return shown


def hf(repo: Repo) -> dict[str, Shown]:
    """Every tensor of layout `hf`: its own name is the file name."""
    return {name: _shown(name, tensor, name) for name, tensor in repo.tensors.items()}


def split_fused(repo: Repo) -> Repo:
    """A phi3 repo as if `qkv_proj` and `gate_up_proj` had been stored as their parts, in that order of rows."""
    config = repo.config
    width, narrow = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    inter = config["intermediate_size"]
    parts = {
        "self_attn.qkv_proj": {"self_attn.q_proj": width, "self_attn.k_proj": narrow, "self_attn.v_proj": narrow},
        "mlp.gate_up_proj": {"mlp.gate_proj": inter, "mlp.up_proj": inter},
    }
    files = {}
    for file, members in repo.files.items():
        out = {}
        for name, tensor in members.items():
            fused = next((key for key in parts if f".{key}." in name), None)
            if fused is None:
                out[name] = tensor
                continue
            row = 0
            for word, rows in parts[fused].items():
                out[name.replace(fused, word)] = Tensor.of(tensor.code, tensor.array()[row : row + rows])
                row += rows
        files[file] = out
    return Repo(repo.path, files, config)


# --- casts -----------------------------------------------------------------------------------------------------------


def cast_array(array: np.ndarray, code: str) -> np.ndarray:
    """`array` as `code`: float32 in the middle, one rounding to nearest, ties to even."""
    with np.errstate(all="ignore"):
        return array.astype(np.float32).astype(NUMPY[code])


def cast(shown: Shown, code: str | None) -> Shown:
    """`--dtype`: floats only; packed types, bare exponents, integers and complex numbers pass through."""
    if code is None or shown.code not in FLOATS or shown.code == code:
        return shown
    return dataclasses.replace(shown, array=cast_array(shown.array, code), code=code)


def dequantized(repo: Repo, code: str) -> Repo:
    """The repo as if its block-quantized matrices had been stored as `code`, without scales."""
    files = {}
    tensors = repo.tensors
    for file, members in repo.files.items():
        out = {}
        for name, tensor in members.items():
            if name.endswith("_scale_inv"):
                continue
            scale = tensors.get(f"{name}_scale_inv")
            if scale is not None:
                rows, columns = tensor.shape
                with np.errstate(all="ignore"):
                    grid = scale.array().astype(np.float32)
                    spread = np.repeat(np.repeat(grid, BLOCK, 0)[:rows], BLOCK, 1)[:, :columns]
                    tensor = Tensor.of(code, tensor.array().astype(np.float32) * spread)
            out[name] = tensor
        files[file] = out
    return Repo(repo.path, files, repo.config)


# --- mesh and shards -------------------------------------------------------------------------------------------------

KIND = {
    "tensor": "tensor", "tp": "tensor", "expert": "expert", "ep": "expert", "fsdp": "fsdp", "dp_shard": "fsdp",
    "data": "replicate", "replica": "replicate", "dp_replicate": "replicate",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Named axes with sizes; devices count row-major, last axis fastest."""

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def parse(text: str) -> Mesh:
        return Mesh(tuple((name, int(size)) for name, size in (word.split("=") for word in text.split(",") if word)))

    @property
    def devices(self) -> range:
        return range(int(np.prod([size for _, size in self.axes], dtype=np.int64)))

    def coordinates(self, device: int) -> dict[str, int]:
        grid = np.unravel_index(device, [size for _, size in self.axes]) if self.axes else ()
        return {name: int(i) for (name, _), i in zip(self.axes, grid)}

    def link(self, device: int) -> str:
        return ",".join(f"{name}={i}" for name, i in self.coordinates(device).items())


def spec(shown: Shown, mesh: Mesh) -> list[list[str]]:
    """Per axis of the tensor, the mesh axes that split it, outermost first: tensor, then expert, then fsdp."""
    rank = len(shown.shape)
    out: list[list[str]] = [[] for _ in range(rank)]
    inner = shown.lead
    for kind in ("tensor", "expert", "fsdp"):
        axis = None
        if kind == "tensor" and shown.role != "replicated" and shown.expert_axis != inner:
            axis = inner + (shown.role == "row")
        elif kind == "expert":
            axis = shown.expert_axis
        elif kind == "fsdp":
            axis = inner
        if axis is not None and axis < rank:
            out[axis] += [name for name, _ in mesh.axes if KIND[name] == kind]
    return out


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of `parts` of a range, as torch.chunk cuts it: ceil-sized parts, then a rest, then nothing."""
    step = -(-(stop - start) // parts)
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


def region(shown: Shown, mesh: Mesh, device: int) -> tuple[tuple[int, int], ...]:
    """The box of the tensor that a device holds."""
    sizes, at = dict(mesh.axes), mesh.coordinates(device)
    out = []
    for extent, names in zip(shown.shape, spec(shown, mesh)):
        bounds = (0, extent)
        for name in names:
            bounds = chunk(*bounds, sizes[name], at[name])
        out.append(bounds)
    return tuple(out)


def shard(shown: Shown, mesh: Mesh, device: int) -> np.ndarray:
    """The values of that box."""
    box = region(shown, mesh, device)
    if shown.code in PACKED_BITS:  # the array's last axis counts bytes
        assert box[-1] == (0, shown.shape[-1]), "these tests do not cut inside a byte"
        box = (*box[:-1], (0, shown.array.shape[-1]))
    return shown.array[tuple(slice(start, stop) for start, stop in box)]


def shard_shape(shown: Shown, mesh: Mesh, device: int) -> list[int]:
    return [stop - start for start, stop in region(shown, mesh, device)]


def shard_offset(shown: Shown, mesh: Mesh, device: int) -> list[int]:
    return [start for start, _ in region(shown, mesh, device)]
