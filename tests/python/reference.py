"""The expected contents of the mount, computed slowly and independently in numpy.

Shares nothing with the Rust code except the contract: names, stacking, the numbering of devices and the arithmetic of
shards. Tables are flat lists of patterns; every array is materialized in memory.
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
ENDS = [(r"embed_tokens\.weight", "embed"), (r"norm\.weight", "final_norm"), (r"lm_head\.weight", "lm_head")]
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
# Where the names of the text model start, in these families and in the others. A prefix stays, except `model.`.
TEXT = {"bert": [""]}
TEXT_BY_DEFAULT = ["", "model.", "language_model.", "language_model.model.", "model.language_model."]
OUTSIDE = {"bert": [(r"embeddings\.word_embeddings\.weight", "embed")]}
# `encoder.layer` counts as one word.
LAYER = re.compile(r"(?P<prefix>(?:.+?\.)??)(?:encoder\.layer|layers|h|blocks|layer)\.(?P<n>\d+)\.(?P<rest>.+)")


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
    text = TEXT.get(family, TEXT_BY_DEFAULT) if family in IN_LAYER else []
    names: dict[str, Name] = {}
    for hf in repo.tensors:
        match = LAYER.fullmatch(hf)
        if match is None:
            known = None
            for prefix in text:
                if hf.startswith(prefix) and (word := _renamed(hf.removeprefix(prefix), OUTSIDE.get(family, ENDS))):
                    known = prefix.removeprefix("model.").replace(".", "/") + word
            names[hf] = Name(None, None, known or _plain(hf.removeprefix("model.")))
            continue
        prefix, layer, rest = match["prefix"], int(match["n"]), match["rest"]
        known = _renamed(rest, IN_LAYER[family]) if prefix in text else None
        names[hf] = Name(prefix.removeprefix("model.").replace(".", "/"), layer, known or _plain(rest))
    return _unclashed(names)


def _unclashed(names: dict[str, Name]) -> dict[str, Name]:
    """If dropping `weight` makes one path a file and a directory (`fc1` and `fc1/bias`), `weight` stays."""
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
    tensor_axis: int | None = None
    expert_axis: int | None = None
    expert: tuple[int, int] | None = None
    rule: list[list[str]] | None = None
    layers: tuple[int, ...] = ()
    scanned: bool = False
    alias: bool = False
    bundled: bool = True

    @property
    def name(self) -> str:
        return self.path.replace("/", ".")


# The axis, counted before stacking, that tensor parallelism splits: rows or columns of [out, in].
ROWS = {"wq", "wk", "wv", "bq", "bk", "bv", "w_gate", "w_up", "b_up", "embed", "lm_head", "wq_b", "wkv_b", "sinks"}
COLUMNS = {"wo", "w_down"}
# Stored `[experts, in, out]`.
GPT_OSS_AXES = {"experts/w_gate_up": 2, "experts/b_gate_up": 1, "experts/w_down": 1, "experts/b_down": None}
# Words of names that no family's table knows, such as those of vision towers.
OUTSIDE_FAMILIES = [(r"(?:.+/)?[qkv]_proj(?:/weight|/bias)?", 0), (r"(?:.+/)?o_proj(?:/weight)?", 1)]
OUTSIDE_FAMILIES += [(r"(?:.+/)?(?:gate|up)_proj(?:/weight|/bias)?", 0), (r"(?:.+/)?down_proj(?:/weight)?", 1)]


def tensor_axis(rest: str) -> int | None:
    """By the canonical name within its layer."""
    if rest in GPT_OSS_AXES:
        return GPT_OSS_AXES[rest]
    word = rest.rsplit("/", 1)[-1]
    if word in ROWS or word in COLUMNS:
        return int(word in COLUMNS)
    return next((axis for pattern, axis in OUTSIDE_FAMILIES if re.fullmatch(pattern, rest)), None)


def _shown(path: str, tensor: Tensor, source: str, **more: object) -> Shown:
    return Shown(path, tensor.code, tensor.array(), tensor.shape, [source], **more)  # type: ignore[arg-type]


def _stack(parts: list[Shown], path: str, **more: object) -> Shown:
    sources = list(itertools.chain.from_iterable(part.sources for part in parts))
    shape = (len(parts), *parts[0].shape)
    return dataclasses.replace(
        parts[0], path=path, array=np.stack([part.array for part in parts]), shape=shape, sources=sources,
        lead=parts[0].lead + 1, **more,
    )  # fmt: skip


def _regular(members: dict[int, Shown]) -> bool:
    """Whether the members of a layer stack: one, or experts 0, 1, ... of one kind."""
    return len({(one.code, one.shape) for one in members.values()}) == 1 and sorted(members) in ([-1], [*range(len(members))])


def _alike(layers: dict[int, dict[int, Shown]]) -> list[int]:
    """Numbers of the layers that are stacked: the largest group with members of the same number, dtype and shape."""
    kinds: dict[tuple, list[int]] = collections.defaultdict(list)
    for n in sorted(layers):
        if _regular(layers[n]):
            first = next(iter(layers[n].values()))
            kinds[len(layers[n]), first.code, first.shape].append(n)
    return max(kinds.values(), key=len, default=[])


def canonical(repo: Repo, names: dict[str, Name] | None = None) -> dict[str, Shown]:
    """Every tensor of layout `canonical` by path, scanned, unscanned and tied."""
    names = names or canonical_names(repo)
    stored_experts = repo.config.get("model_type") == "gpt_oss"
    shown: dict[str, Shown] = {}
    stacks: dict[tuple[str, str], dict[int, dict[int, Shown]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for hf, tensor in repo.tensors.items():
        name = names[hf]
        assert name.path not in shown, f"{hf} and another tensor are both called {name.path}"
        one = _shown(name.path, tensor, hf, tensor_axis=tensor_axis(name.rest))
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
        count = 1 + max(max(members) for members in layers.values())
        for number, one in (item for members in layers.values() for item in members.items() if count):
            one.expert = (number, count)
        ids = _alike(layers)
        if not ids:
            continue
        path, more = f"{stack}layers/scanned/{rest}", {"layers": tuple(ids), "scanned": True, "expert": None}
        members = [[layers[n][e] for e in sorted(layers[n])] for n in ids]
        if count:
            whole = _stack([_stack(experts, "") for experts in members], path, expert_axis=1, **more)
        else:
            whole = _stack([one for (one,) in members], path, **more)
            if whole.expert_axis is not None:
                whole.expert_axis += 1
        for one in itertools.chain.from_iterable(members):
            one.bundled = False
        shown[path] = whole
    text = repo.config.get("text_config", repo.config)
    if text.get("tie_word_embeddings") and not any(path.endswith("lm_head") for path in shown):
        embed = next(path for path in shown if path.endswith("embed"))
        head = embed.removesuffix("embed") + "lm_head"
        shown[head] = dataclasses.replace(shown[embed], path=head, alias=True, bundled=False)
    return shown


def hf(repo: Repo) -> dict[str, Shown]:
    """Every tensor of layout `hf`: its own name is the file name."""
    return {name: _shown(name, tensor, name) for name, tensor in repo.tensors.items()}


def split_fused(repo: Repo) -> Repo:
    """A phi3 repo whose `qkv_proj` and `gate_up_proj` are replaced by their parts, in the order of rows."""
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


def cast_repo(repo: Repo, code: str) -> Repo:
    """The repo with its plain floats stored as `code`; quantized matrices and scales stay."""
    tensors = repo.tensors

    def one(name: str, tensor: Tensor) -> Tensor:
        if tensor.code not in FLOATS or name.endswith("_scale_inv") or f"{name}_scale_inv" in tensors:
            return tensor
        return Tensor.of(code, cast_array(tensor.array(), code))

    files = {file: {name: one(name, tensor) for name, tensor in members.items()} for file, members in repo.files.items()}
    return Repo(repo.path, files, repo.config)


def dequantized(repo: Repo, code: str) -> Repo:
    """The repo with its block-quantized matrices stored as `code`, without scales."""
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


# Ends of the names of buffers, which every device has whole.
BUFFERS = ("e_score_correction_bias", "ffn.gate.bias", "ffn.gate.bias_vl", "inv_freq", "position_ids")


def split_by(shown: Shown, mesh: Mesh) -> list[list[str]]:
    """Per axis of the tensor, the mesh axes that split it, outermost first: expert, then tensor, then fsdp."""
    out: list[list[str]] = [[] for _ in shown.shape]
    if shown.rule is not None:
        return shown.rule + out[len(shown.rule) :]
    if all(name.endswith(BUFFERS) for name in shown.sources):
        return out
    tensor = None if shown.tensor_axis is None else shown.tensor_axis + shown.lead
    for kind, axis in (("expert", shown.expert_axis), ("tensor", tensor), ("fsdp", shown.lead)):
        if axis is not None and axis < len(shown.shape):
            out[axis] += [name for name, _ in mesh.axes if KIND[name] == kind]
    return out


def spec(shown: Shown, mesh: Mesh) -> list[None | str | list[str]]:
    """The same as in JSON: null, one name, or a list of names."""
    return [None if not names else names[0] if len(names) == 1 else names for names in split_by(shown, mesh)]


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Part `index` of `parts` of a range, cut as by torch.chunk: parts of rounded-up size, then the rest, then empty ones."""
    step = -(-(stop - start) // parts)
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


def region(shown: Shown, mesh: Mesh, device: int) -> tuple[tuple[int, int], ...]:
    """The box of the tensor that a device holds. An expert of another device is an empty range of axis 0."""
    sizes, at = dict(mesh.axes), mesh.coordinates(device)
    out = []
    for extent, names in zip(shown.shape, split_by(shown, mesh)):
        bounds = (0, extent)
        for name in names:
            bounds = chunk(*bounds, sizes[name], at[name])
        out.append(bounds)
    if shown.expert is not None:
        number, count = shown.expert
        held = (0, count)
        for name in (name for name, _ in mesh.axes if KIND[name] == "expert"):
            held = chunk(*held, sizes[name], at[name])
        if not held[0] <= number < held[1]:
            out[0] = (out[0][0], out[0][0])
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
