"""Quantized repositories: the mount shows the values that the schemes' own libraries decode, bit for bit.

Three steps, each against the one before: the numpy reference (`quantized_formats`) against the libraries; small repositories
of every scheme, whose values the reference knows; the mounts of them.
"""

import dataclasses
import json
import inspect
import shutil
import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import mounting
import quantized_formats as formats
import quantized_libraries as libraries
import quantized_oracles as oracles
import quantized_repos
import reference
import repos
from mounting import run
from quantized_repos import BUILDERS
from quantized_unknown import UNKNOWN, unknown
from reference import Mesh, Shown
from repos import Tensor

# DeepSeek's own names, which no transformers model of this size loads; layout canonical and tensor parallelism
# know these tensors under other names.
FOREIGN_NAMES = {"deepseek-v4", "deepseek-v4.1"}


@pytest.fixture(scope="module")
def made(base):
    """A quantized repository by its builder's name, with wild scales or calm ones; written once."""
    known = {}

    def get(name, kind="wild"):
        if (name, kind) not in known:
            known[name, kind] = BUILDERS[name](base / "quantized" / kind / name, kind)
        return known[name, kind]

    return get


@pytest.fixture(scope="module")
def plain(base):
    return libraries.plain(base / "quantized/plain")


@pytest.fixture(scope="module")
def saved(base, plain):
    """A repository that a library wrote."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = libraries.saved(name, plain, base / "quantized/saved" / name)
        return known[name]

    return get


def same_values(found: bytes, expected: np.ndarray, what: object) -> None:
    """Bytes with all NaNs equal: the processor determines which NaN an operation returns."""
    if expected.dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        assert len(found) == expected.nbytes, f"{what}: {len(found)} bytes, expected {expected.nbytes}"
        values = np.frombuffer(found, expected.dtype).reshape(expected.shape)
        mounting.same_bytes(formats.canonical_bits(values).tobytes(), formats.canonical_bits(expected), what)
    else:
        mounting.same_bytes(found, expected, what)


# --- the numpy reference against the libraries ---------------------------------------------------------------------------

RECORDED = json.loads(oracles.RECORD.read_text())
INSTALLED = {"compressed-tensors", "transformers", "bitsandbytes", "torchao", "mlx"}


def test_small_floats_are_those_of_ml_dtypes():
    every = np.arange(256, dtype=np.uint8)
    for table, kind in ((formats.E4M3, ml_dtypes.float8_e4m3fn), (formats.E8M0, ml_dtypes.float8_e8m0fnu)):
        assert np.array_equal(formats.canonical_bits(table), formats.canonical_bits(every.view(kind).astype(np.float32)))
    four = every[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(formats.E2M1.view(np.uint32), four.view(np.uint32))


def test_fields_of_every_width_against_arithmetic():
    """Fields and their order, by shifting one large integer."""
    data = formats.Noise("fields").bytes(3, 12)
    for bits in (1, 2, 4, 8):
        for row, found in zip(data, formats.fields(data, bits)):
            number = int.from_bytes(row.tobytes(), "little")
            assert found.tolist() == [number >> (bits * n) & (1 << bits) - 1 for n in range(96 // bits)]


@pytest.mark.parametrize("scheme", oracles.ORACLES)
def test_the_reference_equals_the_recorded_library_results(scheme):
    """At least four million elements a scheme, by digests that `quantized_oracles.py` wrote where the libraries ran."""
    rows = [(oracle, code) for oracle in oracles.ORACLES[scheme] for code in oracle.codes]
    assert len(RECORDED[scheme]) == len(rows)
    ours: dict[int, tuple] = {}
    for (oracle, code), row in zip(rows, RECORDED[scheme]):
        assert row["oracle"].startswith(oracle.package) and (row["type"], row["shape"]) == (code, list(oracle.size))
        assert np.prod(oracle.size) >= 4_000_000 and row["differing"] == 0
        if id(oracle) not in ours:
            parts = oracles.drawn(scheme, oracle)
            ours[id(oracle)] = oracles.inputs_digest(parts), oracles.decoded(scheme, oracle, parts)
        inputs, values = ours[id(oracle)]
        assert inputs == row["inputs"], "other inputs than the library had"
        assert oracles.digest(oracles.bits_of(formats.rounded(values, code), oracle)) == row["result"], (row["oracle"], code)


# By scheme: another order of operations, or another number of roundings, that a decoder could have by mistake.
WRONG_ORDERS = {
    "ct-nvfp4": lambda parts, out, inner: grouped(
        parts, "weight_scale", lambda s: s * (1 / formats.float32(parts["weight_global_scale"])), out, inner
    ),
    "modelopt-nvfp4": lambda parts, out, inner: (
        grouped(parts, "weight_scale", lambda s: s, out, inner) * formats.float32(parts["weight_scale_2"])
    ),
    "bnb-int8": lambda parts, out, inner: (
        parts["weight"].array() * (formats.float32(parts["SCB"]) * np.float32(7.874015718698502e-3))[:, None]
    ),
    "bnb-nf4-nested": lambda parts, out, inner: fused(parts, out, inner),
    "mlx-affine-4-f32": lambda parts, out, inner: fused_affine(parts, out, inner),
}


def grouped(parts, name, scale, out, inner):
    codes = next(parts[word] for word in ("weight_packed", "weight") if word in parts)
    return formats.E2M1[formats.fields(formats.raw(codes), 4)] * formats.spread(
        scale(formats.float32(parts[name])), (1, 16), (out, inner)
    )


def fused_affine(parts, out, inner):
    scale, bias = (
        formats.spread(formats.float32(parts[word]), (1, 32), (out, inner)).astype(np.float64) for word in ("scales", "biases")
    )
    return (formats.fields(formats.raw(parts["weight"]), 4) * scale + bias).astype(np.float32)


def fused(parts, out, inner):
    """Nested statistics with one rounding, as in a fused multiply-add."""
    table, codes = formats.float32(parts["weight.nested_quant_map"]), parts["weight.absmax"].array()
    outer = formats.spread(formats.float32(parts["weight.nested_absmax"]), (formats.NESTED_BLOCK,), codes.shape)
    (state,) = (json.loads(tensor.data) for name, tensor in parts.items() if ".quant_state." in name)
    absmax = (table[codes].astype(np.float64) * outer + np.float32(state["nested_offset"])).astype(np.float32)
    values = formats.QUANT_MAPS["nf4"][formats.high_first(formats.raw(parts["weight"]).reshape(-1))]
    return (values * formats.spread(absmax, (64,), values.shape)).reshape(out, inner)


@pytest.mark.parametrize("scheme", WRONG_ORDERS)
def test_the_small_repositories_would_show_another_order_of_operations(scheme):
    """As float32, in which every mount is compared; NVFP4, whose scales are chosen for it, as bf16 too."""
    noise = formats.Noise(f"order/{scheme}", "sound" if "nvfp4" in scheme else "calm")
    parts = formats.SCHEMES[scheme].draw(noise, 96, 96)
    with np.errstate(all="ignore"):
        wrong = WRONG_ORDERS[scheme](parts, 96, 96)
    right = formats.SCHEMES[scheme].decode(parts, 96, 96)
    assert np.count_nonzero(formats.canonical_bits(wrong) != formats.canonical_bits(right)) > 96
    if "nvfp4" in scheme:
        wrong, right = (formats.canonical_bits(formats.rounded(values, "BF16")) for values in (wrong, right))
        assert np.count_nonzero(wrong != right) > 0


def test_every_scheme_has_an_oracle_but_those_without_one_on_a_cpu():
    # A missing g_idx is i / group, by definition; torchao's plain int4 has kernels for GPUs only.
    assert {*formats.SCHEMES} - {*RECORDED} == {"gptq-4-v1-no-index", "torchao-int4"}
    assert {*RECORDED} == {*oracles.ORACLES}


@pytest.mark.parametrize(
    "scheme", [scheme for scheme, each in oracles.ORACLES.items() if {oracle.package for oracle in each} <= INSTALLED]
)
def test_the_installed_library_returns_the_same(scheme):
    """The libraries that are small enough to install, run again, in the type that the scheme is usually decoded to."""
    for oracle in oracles.ORACLES[scheme]:
        parts, code = oracles.drawn(scheme, oracle), oracle.codes[-1]
        theirs = oracles.bits_of(oracle.run(parts, *oracle.size, code), oracle)
        row = next(row for row in RECORDED[scheme] if row["oracle"].startswith(oracle.package) and row["type"] == code)
        assert oracles.digest(theirs) == row["result"]


def test_modules_of_mixed_groups_are_assigned_as_by_the_library(made):
    """An exact name before regular expressions, those before class names; `ignore` before all."""
    import torch
    from compressed_tensors.utils.match import match_targets

    config = made("ct-mixed").repo.config["quantization_config"]
    targets = {target: row["format"] for row in config["config_groups"].values() for target in row["targets"]}
    formats_of = {"ct-nvfp4": "nvfp4-pack-quantized", "ct-fp8-channel": "float-quantized", "pack-int4-group": "pack-quantized"}
    for module in quantized_repos.MODULES:
        found = match_targets(module, torch.nn.Linear(1, 1), [*targets])
        assert targets[found[0]] == formats_of[quantized_repos.MIXED_SCHEMES[module]], module


# Loaded by transformers alone, on the CPU. Not here: GPTQ and AWQ (their loaders need other packages), ModelOpt
# and MLX (no loader), FBGEMM (needs a GPU), fp8 with partial blocks (transformers finds the block by division),
# several schemes in one repository (transformers applies one of them to all).
OWN_LOADER = ["gpt-oss-mxfp4", "fp8-tensor"] + [
    name
    for name in BUILDERS
    if name.startswith(("pack-", "kimi", "ct-", "bnb-", "torchao-")) and name not in ("ct-mixed", "torchao-int4")
]


@pytest.mark.parametrize("name", OWN_LOADER)
def test_transformers_reads_the_repositories_as_the_reference_does(made, name):
    """This shows that the libraries themselves accept their configuration and tensors."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        CompressedTensorsConfig,
        FineGrainedFP8Config,
        Mxfp4Config,
    )

    source = made(name, "calm")
    more = {"gpt": lambda: Mxfp4Config(dequantize=True), "fp8": lambda: FineGrainedFP8Config(dequantize=True)}
    config = more.get(name[:3], lambda: CompressedTensorsConfig(run_compressed=False))
    given = {} if name.startswith(("bnb", "torchao")) else {"quantization_config": config()}
    model = AutoModelForCausalLM.from_pretrained(source.repo.path, dtype="auto", device_map="cpu", **given)
    if name.startswith("bnb"):
        model = model.dequantize()
    found = model.state_dict()
    for key, tensor in source.decoded().tensors.items():
        if ".experts." in key and key not in found:
            continue  # transformers stacks experts that are stored one by one; they are compared below
        value = found[key].dequantize() if "torchao" in type(found[key]).__module__ else found[key]
        assert torch.equal(value, oracles.torch_of(tensor)), key
    if name == "kimi-int4":
        at = "model.layers.1.mlp.experts"
        down = [oracles.torch_of(source.decoded().tensors[f"{at}.{e}.down_proj.weight"]) for e in range(3)]
        assert torch.equal(found[f"{at}.down_proj"], torch.stack(down))


@pytest.mark.parametrize("name", libraries.SAVED)
def test_repositories_of_libraries_resemble_their_original_weights(saved, plain, name):
    """The reference decodes them within the error of the scheme; codes in a wrong order would be noise (error 1.4)."""
    found = saved(name)
    quantized = len(quantized_repos.MODULES) - (0 if name.startswith(("bnb", "torchao")) else 1)
    assert len(found.values) == quantized
    assert libraries.resemblance(found, plain) < (0.01 if "int8" in name else 0.03 if "8" in name else 0.13)


# --- mounts --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Way:
    """Flags, the mesh, the layout, and the resulting types of quantized weights and of other floats (None: as stored)."""

    flags: tuple[str, ...]
    mesh: str
    layout: str
    weights: str | None
    rest: str | None


WAYS = {
    "f32": Way(("--dtype", "f32"), "fsdp=3", "canonical", "F32", "F32"),
    "bf16": Way(("--dtype", "bf16"), "tensor=2", "canonical", "BF16", "BF16"),
    "f16": Way(("--dtype", "f16"), "tensor=2,fsdp=3", "hf", "F16", "F16"),
    "dequantize": Way(("--dequantize",), "", "hf", None, None),
    "dequantize-f32": Way(("--dequantize=f32",), "fsdp=3,tensor=2", "canonical", "F32", None),
}


def shown(source: repos.Repo, layout: str) -> dict[str, Shown]:
    if layout == "canonical":
        return reference.canonical(source)
    names = reference.canonical_names(source)
    return {
        path: dataclasses.replace(one, tensor_axis=reference.tensor_axis(names[path].rest))
        for path, one in reference.hf(source).items()
    }


def check_mount(mounted: mounting.Mount, source: repos.Repo, mesh: Mesh, layout: str) -> None:
    """Every raw file of every device."""
    tensors = shown(source, layout)
    assert mounted.files("full") == set(tensors)
    for path, one in tensors.items():
        same_values((mounted / f"full/{path}").read_bytes(), one.array, path)
        for device in mesh.devices if mesh.axes else ():
            file = mounted / f"dev{device}/{path}"
            same_values(file.read_bytes(), reference.shard(one, mesh, device), file)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BUILDERS)
def test_decoded_tensors(made, own, name, way):
    chosen, source = WAYS[way], made(name)
    if name in FOREIGN_NAMES:
        chosen = dataclasses.replace(chosen, layout="hf", mesh="fsdp=3")
    mesh = ("--mesh", chosen.mesh) if chosen.mesh else ()
    mounted = own(source.repo.path, *chosen.flags, *mesh, "--layout", chosen.layout)
    check_mount(mounted, source.decoded(chosen.weights, chosen.rest), Mesh.parse(chosen.mesh), chosen.layout)


def test_parts_of_deepseek_v41_are_left_out(made):
    """Its draft, its tower with what joins it to the text, and its tables of n-grams."""
    source = made("deepseek-v4.1").repo
    parts = ("mtp.", "vision.", "aligner.", "image_", "layers.1.engram.")
    left = sum(name.startswith(parts) for name in source.tensors)
    planned = json.loads(run("plan", source.path, "--json", "--layout", "hf", "--no-mtp", "--text-only", "--exclude", "*.engram.*").out)
    names = {row["name"] for row in planned["views"][0]["tensors"]}
    assert names and not [name for name in names if name.startswith(parts)] and left > 40
    assert len(names) == len(source.tensors) - left
    planned = json.loads(run("plan", source.path, "--json", "--layout", "hf", "--part", "encoder").out)
    encoders = {name for name in source.tensors if name.startswith(("vision.", "aligner.", "image_"))}
    assert {row["name"] for row in planned["views"][0]["tensors"]} == encoders
    # A pattern that matches no whole name is one for the same behind other words.
    planned = run("plan", source.path, "--json", "--layout", "hf", "--exclude", "engram*")
    view = json.loads(planned.out)["views"][0]
    assert {row["name"] for row in view["tensors"]} == {name for name in source.tensors if ".engram." not in name}
    assert 'the pattern "engram*" matches no tensor, and is taken for "*.engram*"' in view["warnings"]
    assert any(text.startswith("hf/ is left out") for text in view["warnings"])


@pytest.mark.parametrize("name", libraries.SAVED)
def test_repositories_of_libraries_are_decoded(saved, own, name):
    source = saved(name)
    check_mount(
        own(source.repo.path, "--dtype", "f32", "--mesh", "fsdp=3"),
        source.decoded("F32", "F32"),
        Mesh.parse("fsdp=3"),
        "canonical",
    )


@pytest.mark.parametrize("name", BUILDERS)
def test_hf_is_a_plain_repository(made, own, name):
    """Configuration, index and sizes no longer mention quantization."""
    source, words = made(name), formats.DTYPE_WORDS
    code = source.code
    mounted = own(source.repo.path, "--dtype", {"BF16": "bf16", "F16": "f16", "F32": "f32"}[code])
    wanted = source.decoded(code, code).tensors
    config = json.loads((mounted / "hf/config.json").read_text())
    assert not {"quantization_config", "quantization"} & {*config}
    assert {config[key] for key in ("torch_dtype", "dtype") if key in config} == {words[code]}
    assert not (mounted / "hf/hf_quant_config.json").exists()
    index = json.loads((mounted / "hf/model.safetensors.index.json").read_text())
    assert {*index["weight_map"]} == {*wanted}
    assert index["metadata"]["total_size"] == sum(len(tensor.data) for tensor in wanted.values())
    held = {}
    for file in {*index["weight_map"].values()}:
        tensors, metadata, _ = repos.parse_safetensors(mounted / "hf" / file)
        assert metadata.get("format") == "pt" and "tensor_names" not in metadata
        assert {key for key, home in index["weight_map"].items() if home == file} == {*tensors}
        held |= tensors
    for key, tensor in wanted.items():
        assert (held[key].code, held[key].shape) == (tensor.code, tensor.shape), key
        same_values(held[key].data, tensor.array(), key)


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in FOREIGN_NAMES])
def test_transformers_computes_the_same_logits(made, own, tmp_path, name):
    import torch
    from transformers import AutoModelForCausalLM

    source = made(name, "calm")
    decoded = source.decoded(source.code, source.code)
    repos.write(tmp_path / "decoded", decoded.files, decoded.config)
    mounted = own(source.repo.path, "--dtype", {"BF16": "bf16", "F16": "f16", "F32": "f32"}[source.code])
    ours, theirs = (AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (mounted / "hf", tmp_path / "decoded"))
    ids = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        found, wanted = ours(ids).logits, theirs(ids).logits
    assert torch.isfinite(wanted).all() and torch.equal(found, wanted)


@pytest.mark.parametrize("name", BUILDERS)
def test_without_a_dtype_stored_tensors_show_as_they_are(made, own, name):
    source = made(name)
    mounted = own(source.repo.path, "--layout", "hf", "--mesh", "fsdp=2")
    wanted = reference.hf(source.repo)
    assert mounted.files("full") == {*wanted}
    for path, one in wanted.items():
        mounting.same_bytes((mounted / f"full/{path}").read_bytes(), one.array, path)
    for file in source.repo.files:
        assert (mounted / "hf" / file).read_bytes() == (source.repo.path / file).read_bytes()
    assert json.loads((mounted / "hf/config.json").read_text()) == source.repo.config


# --- refusals ------------------------------------------------------------------------------------------------------------

DECODE = ("--dequantize",)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_schemes_are_refused_and_shown_raw_without_a_dtype(tmp_path, own, name):
    config, parts, word = UNKNOWN[name]
    source = unknown(tmp_path / name, config, parts)
    refused = run("plan", source.path, *DECODE, expect=1)
    # Today the method is named; what of it is not decoded is named once its other forms are.
    said = [word, *([config["quant_method"]] if config["quant_method"] in ("gptq", "awq", "modelopt") else [])]
    assert any(one.lower() in refused.err.lower() for one in said), refused.err
    # Only what a view shows counts.
    run("plan", source.path, "--layout", "hf", "--dtype", "f32", "--exclude", "**.q_proj.**")
    other = run("plan", source.path, "--layout", "hf", "--dtype", "f32", "--exclude", "**.o_proj.**", expect=1)
    assert any(one.lower() in other.err.lower() for one in said), other.err
    mounted = own(source.path, "--layout", "hf")
    for path, one in reference.hf(source).items():
        mounting.same_bytes((mounted / f"full/{path}").read_bytes(), one.array, path)


def damaged(source: quantized_repos.Quantized, path: Path, chosen: str, change) -> Path:
    """A copy in which `change` replaces one tensor, or removes it by returning None."""
    files = {}
    for file, tensors in source.repo.files.items():
        changed = {name: change(tensor) if name == chosen else tensor for name, tensor in tensors.items()}
        files[file] = {name: tensor for name, tensor in changed.items() if tensor is not None}
    repos.write(path, files, source.repo.config)
    for file in source.repo.files:
        _, metadata, _ = repos.parse_safetensors(source.repo.path / file)
        (path / file).write_bytes(repos.safetensors_bytes(files[file], metadata))
    if (source.repo.path / "hf_quant_config.json").exists():
        shutil.copy(source.repo.path / "hf_quant_config.json", path)
    return path


def other_dtype(tensor: Tensor) -> Tensor:
    """The same shape, in a type that no companion may have."""
    return Tensor("I16", tensor.shape, bytes(2 * int(np.prod(tensor.shape, dtype=np.int64))))


def other_shape(tensor: Tensor) -> Tensor:
    """One element more on the last axis; a scalar becomes three elements."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + 1) if tensor.shape else (3,)
    return Tensor(tensor.code, shape, bytes(int(np.prod(shape, dtype=np.int64)) * repos.element_bits(tensor.code) // 8))


DAMAGES = {"missing": lambda tensor: None, "of another dtype": other_dtype, "of another shape": other_shape}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", BUILDERS)
def test_a_companion_that_does_not_fit_is_refused_by_name(made, tmp_path, name, damage):
    source = made(name)
    weight = [*source.values][2]
    assert source.companions[weight]
    for companion in source.companions[weight]:
        path = damaged(source, tmp_path / companion, companion, DAMAGES[damage])
        refused = run("plan", path, *DECODE, expect=1)
        assert weight.removesuffix(".weight") in refused.err, f"{companion} {damage}: {refused.err}"


# Two repositories with exchanged configurations: the configured scheme is not the stored one.
SWAPS = [
    ("pack-int4-group", "ct-nvfp4"), ("ct-mxfp4", "ct-nvfp4"), ("pack-int8-group", "pack-int4-group"), ("ct-fp8-channel", "ct-fp8-block"),
    ("gptq-4-v1", "awq-gemm"), ("gptq-8-v2", "gptq-4-v1"), ("modelopt-fp8", "modelopt-nvfp4"), ("bnb-int8", "bnb-nf4"),
    ("mlx-affine-8", "mlx-mxfp4"), ("mlx-mxfp4", "mlx-affine-4"), ("torchao-int8", "bnb-int8"), ("fp8-tensor", "fp8-block"),
]  # fmt: skip


@pytest.mark.parametrize("pair", SWAPS, ids=lambda pair: "-as-".join(pair))
def test_a_configuration_of_another_scheme_is_refused(made, tmp_path, pair):
    stored, configured = pair
    config = made(stored).repo.config | {"quantization_config": made(configured).repo.config["quantization_config"]}
    config |= {"quantization": config["quantization_config"]} if "quantization" in config and configured.startswith("mlx") else {}
    shutil.copytree(made(stored).repo.path, tmp_path / "swapped")
    (tmp_path / "swapped/hf_quant_config.json").unlink(missing_ok=True)
    (tmp_path / "swapped/config.json").write_text(json.dumps(config))
    refused = run("plan", tmp_path / "swapped", *DECODE, expect=1)
    assert "quantiz" in refused.err or "scheme" in refused.err or ".layers.0." in refused.err, refused.err


# --- bytes that a shard needs ---------------------------------------------------------------------------------------------

WIDE = quantized_repos.Sizes(1024, 2048, 8, 4, 128)
SHARDED = {
    "pack-int4-group": quantized_repos.one_group(quantized_repos.PACK, "int", 4, "group", group_size=32),
    "ct-nvfp4": quantized_repos.one_group(
        quantized_repos.NVFP4, "float", 4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"
    ),
    "ct-fp8-channel": quantized_repos.one_group("float-quantized", "float", 8, "channel", quantized_repos.TOKENS),
    "fp8-block": quantized_repos.fine_fp8([128, 128]),
    "awq-gemm": quantized_repos.AWQ,
    "gptq-4-v2-act": quantized_repos.gptq(4, 32, "gptq_v2", True),
    "bnb-nf4": quantized_repos.bnb(4),
}


@pytest.mark.parametrize("mesh, materialize", [("fsdp=4", "none"), ("tensor=4", "memory")])
@pytest.mark.parametrize("scheme", SHARDED)
def test_a_shard_fetches_its_codes_and_scales(base, own, scheme, mesh, materialize):
    """The four devices together use each stored byte once, and at most 2 % more, except for what all of them need: the scale
    of a whole row where they split the row, of a whole tensor, and with act-order, where a device's inputs are of any groups,
    all groups."""
    path = base / "sharded" / scheme
    code = "F16" if scheme.startswith(("awq", "gptq")) else "BF16"
    made = quantized_repos.llama(path, "calm", scheme, SHARDED[scheme], sizes=WIDE, code=code)
    mounted = own(path, "--mesh", mesh, "--layout", "hf", "--dequantize", "--materialize", materialize)
    stored = made.repo.tensors
    least = most = 0
    for decoded, companions in made.companions.items():
        codes = next(name for name, to in made.replaced.items() if to == decoded)
        sizes = {name: len(stored[name].data) for name in (codes, *companions)}
        is_shared = {name: np.prod(stored[name].shape) <= max(made.values[decoded].shape) or "act" in scheme for name in companions}
        least += sizes[codes]
        most += sum(sizes.values()) + 3 * sum(sizes[name] for name in companions if is_shared[name])
        for device in range(4):
            (mounted / f"dev{device}/{decoded}").read_bytes()
    assert least <= sum(mounted.stats()["bytes_fetched"].values()) <= 1.02 * most


def test_every_member_of_the_libraries_is_followed_or_stops_what_would_lose_it():
    import compressed_tensors.quantization
    import transformers.utils.quantization_config as theirs

    lists = tomllib.loads((mounting.ROOT / "src/checkpoint/scheme/members.toml").read_text())
    members = set(compressed_tensors.quantization.QuantizationConfig.model_fields)
    for name, kind in vars(theirs).items():
        if inspect.isclass(kind) and name.endswith("Config"):
            members |= set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs"}
    assert len(members) > 100
    assert members - {*lists["known"], *lists["not_followed"], *lists["assumed"]} == set()
