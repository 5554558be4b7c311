"""`--dtype` and dequantization, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

import mounting
import reference
import repos
from mounting import same_bytes
from reference import FLOATS, USER_DTYPES, Mesh

NAN_IS_FREE = {"F16"}  # numpy and torch keep different payloads; any NaN of the right sign is right


def _same_values(found: bytes, expected: np.ndarray, code: str, what: object) -> None:
    if code not in NAN_IS_FREE:
        same_bytes(found, expected, what)
        return
    got = np.frombuffer(found, expected.dtype).reshape(expected.shape)
    nan = np.isnan(expected.astype(np.float32))
    assert np.array_equal(np.isnan(got.astype(np.float32)), nan), what
    assert np.array_equal(np.signbit(got.astype(np.float32)), np.signbit(expected.astype(np.float32))), what
    same_bytes(got[~nan].tobytes(), expected[~nan], what)


@pytest.mark.parametrize("word", USER_DTYPES)
def test_edge_values_as_ml_dtypes(shared, repo, word):
    """All 8- and 16-bit patterns and 590 000 float32 ones: NaN, infinities, subnormals, ties, overflow."""
    mounted, code = shared("edge_values", "--dtype", word), USER_DTYPES[word]
    for path, shown in reference.canonical(repo("edge_values")).items():
        wanted = reference.cast(shown, code)
        assert mounting.xattr(mounted / f"full/{path}", "dtype") == wanted.code
        _same_values((mounted / f"full/{path}").read_bytes(), wanted.array, code, (path, word))


@pytest.mark.parametrize("word", USER_DTYPES)
@pytest.mark.parametrize("source", ["all_bf16", "all_f16", "many_f32"])
def test_edge_values_as_torch(shared, repo, source, word):
    torch = pytest.importorskip("torch")
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    tensor, code = repo("edge_values").tensors[source], USER_DTYPES[word]
    raw = torch.frombuffer(bytearray(tensor.data), dtype=kinds[tensor.code])
    wanted = raw.to(kinds[code])
    found = (shared("edge_values", "--dtype", word) / f"full/{source}").read_bytes()
    got = torch.frombuffer(bytearray(found), dtype=kinds[code])
    nan = torch.isnan(wanted)
    assert torch.equal(torch.isnan(got), nan)
    bits = {2: torch.int16, 4: torch.int32}[wanted.element_size()]
    assert torch.equal(got[~nan].view(bits), wanted[~nan].view(bits))


@pytest.mark.parametrize("word", ["bf16", "f16"])
def test_cast_shards(shared, repo, word):
    mesh = Mesh.parse("fsdp=2,tensor=2")
    mounted = shared("llama_f32", "--mesh", "fsdp=2,tensor=2", "--dtype", word)
    for path, shown in reference.canonical(repo("llama_f32")).items():
        wanted = reference.cast(shown, USER_DTYPES[word])
        for device in mesh.devices:
            same_bytes((mounted / f"dev{device}/{path}").read_bytes(), reference.shard(wanted, mesh, device), path)


def test_only_floats_are_cast(shared, repo):
    mounted = shared("every_dtype", "--dtype", "bf16")
    for path, shown in reference.canonical(repo("every_dtype")).items():
        wanted = reference.cast(shown, "BF16")
        assert mounting.xattr(mounted / f"full/{path}", "dtype") == ("BF16" if shown.code in FLOATS else shown.code)
        same_bytes((mounted / f"full/{path}").read_bytes(), wanted.array, path)


@pytest.mark.parametrize("name", ["block_fp8_f32", "block_fp8_bf16"])
@pytest.mark.parametrize("word,mesh", [("bf16", "fsdp=3"), ("bf16", "fsdp=2,tensor=2"), ("f32", "fsdp=7"), ("f16", "tensor=5")])
def test_block_fp8_is_dequantized(shared, repo, name, word, mesh):
    """Shards start inside blocks, and the last blocks are partial."""
    mounted, grid = shared(name, "--dtype", word, "--mesh", mesh), Mesh.parse(mesh)
    code = USER_DTYPES[word]
    source = reference.dequantized(reference.cast_repo(repo(name), code), code)
    mounting.check_full(mounted, reference.canonical(source))
    for device in grid.devices:
        mounting.check_device(mounted, reference.canonical(source), grid, device)


@pytest.mark.parametrize("name", ["block_fp8_f32", "block_fp8_bf16"])
def test_block_fp8_without_dtype_passes_through(shared, repo, name):
    mounting.check_full(shared(name), reference.canonical(repo(name)))


def test_fp8_goes_through_float32(tmp_path, own):
    """With float32 scales, rounding the product straight to bf16 differs in one of 130 000; there are enough values to detect it."""
    rows = columns = 2048
    rng = np.random.default_rng(7)
    quantized = rng.integers(0, 256, rows * columns, np.uint8)
    quantized[(quantized & 0x7F) == 0x7F] = 0x38
    scale = rng.uniform(1e-4, 1e-1, (16, 16)).astype(np.float32)
    tensors = {
        "model.layers.0.mlp.gate_proj.weight": repos.Tensor("F8_E4M3", (rows, columns), quantized.tobytes()),
        "model.layers.0.mlp.gate_proj.weight_scale_inv": repos.Tensor.of("F32", scale),
    }
    config = {"model_type": "unheard_of", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    repo = repos.write(tmp_path / "fp8", {"model.safetensors": tensors}, config)
    mounted = own(repo.path, "--dtype", "bf16")
    # Decoded tensors have the names of the unquantized model.
    shown = reference.canonical(reference.dequantized(repo, "BF16"))
    assert {*shown} > {"layers/0/mlp/gate_proj"}
    mounting.check_full(mounted, shown)


def test_the_reference_itself():
    """A few values that can be checked by hand."""
    ones = np.array([1.0, 1.00390625, 1.01171875, 3.4e38, np.inf, -0.0], np.float32)  # ties go to even
    got = reference.cast_array(ones, "BF16").astype(np.float32)
    assert got.tolist()[:3] == [1.0, 1.0, 1.015625] and np.isinf(got[3]) and np.isinf(got[4]) and np.signbit(got[5])
    assert ml_dtypes.bfloat16(1e-40) > 0  # subnormals stay
