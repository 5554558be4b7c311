"""Canonical names, stacks and dialects, family by family."""

import pytest

import mounting
import reference
import repos
from mounting import check_device, check_full
from reference import Mesh

FAMILIES = ["llama", "llama_tied", "qwen2", "qwen3_moe", "mixtral", "gemma3", "bert", "gpt_oss", "deepseek_v3"]


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_bytes(shared, repo, name):
    mounted, tensors = shared(name, "--mesh", "fsdp=2"), reference.canonical(repo(name))
    found = mounted.files("full")
    assert found == set(tensors), f"missing {sorted(set(tensors) - found)}, unexpected {sorted(found - set(tensors))}"
    check_full(mounted, tensors)
    for device in range(2):
        check_device(mounted, tensors, Mesh.parse("fsdp=2"), device)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_moe", "mixtral", "deepseek_v3", "bert"])
def test_tensor_parallel_by_role(shared, repo, name):
    mesh = "fsdp=2,tensor=2"
    mounted, tensors, grid = shared(name, "--mesh", mesh), reference.canonical(repo(name)), Mesh.parse(mesh)
    for device in grid.devices:
        check_device(mounted, tensors, grid, device)


def test_phi3_is_split(shared, repo):
    """Fused matrices are shown as their parts."""
    mounted, tensors = shared("phi3", "--mesh", "fsdp=2"), reference.canonical(reference.split_fused(repo("phi3")))
    fused = {"wq": "qkv", "wk": "qkv", "wv": "qkv", "w_gate": "gate_up", "w_up": "gate_up"}
    assert fused.keys() <= {path.rsplit("/", 1)[-1] for path in tensors}
    check_full(mounted, tensors)
    check_device(mounted, tensors, Mesh.parse("fsdp=2"), 1)


def test_a_few_names_by_hand(shared):
    """Names as users type them, written out, so that a mistake in the reference's tables is detected."""
    by_repo = {
        "llama": {"embed", "final_norm", "lm_head", "layers/scanned/wq", "layers/2/wo", "layers/scanned/attn_norm",
                  "layers/0/mlp_norm", "layers/scanned/w_gate", "layers/1/w_up", "layers/scanned/w_down"},
        "qwen2": {"layers/scanned/bq", "layers/0/bk", "layers/1/bv"},
        "qwen3_moe": {"layers/scanned/experts/w_gate", "layers/0/experts/3/w_down", "layers/scanned/router",
                      "layers/scanned/q_norm", "layers/1/k_norm"},
        "mixtral": {"layers/scanned/experts/w_up", "layers/1/experts/1/w_gate", "layers/0/router"},
        "gemma3": {"language_model/model/embed", "language_model/model/final_norm", "language_model/model/lm_head",
                   "language_model/model/layers/scanned/wq", "language_model/model/layers/0/attn_post_norm",
                   "vision_tower/vision_model/encoder/layers/scanned/self_attn/q_proj/weight"},
        "bert": {"embed", "layers/scanned/wq", "layers/scanned/bo", "pooler/dense/weight"},
        "deepseek_v3": {"layers/scanned/wq_a", "layers/scanned/wkv_b", "layers/scanned/experts/w_gate",
                        "layers/scanned/w_gate", "layers/2/router"},
    }  # fmt: skip
    for name, expected in by_repo.items():
        missing = expected - shared(name, "--mesh", "fsdp=2").files("full")
        assert not missing, f"{name}: {sorted(missing)}"


def test_shapes_by_hand(shared):
    def shape(name, path):
        return mounting.xattr(shared(name, "--mesh", "fsdp=2") / f"full/{path}", "shape")

    assert shape("llama", "layers/scanned/wk").replace(" ", "") == "[3,8,16]"
    assert shape("qwen3_moe", "layers/scanned/experts/w_gate").replace(" ", "") == "[2,4,6,16]"
    assert shape("gpt_oss", "layers/scanned/experts/w_gate_up").replace(" ", "") == "[2,2,16,48]"
    # dense only in layer 0, experts only in layers 1 and 2
    assert shape("deepseek_v3", "layers/scanned/w_gate").replace(" ", "") == "[1,24,16]"
    assert shape("deepseek_v3", "layers/scanned/experts/w_gate").replace(" ", "") == "[2,2,6,16]"


def test_the_largest_group_of_equal_layers_is_stacked(own, tmp_path):
    """Layer 1 has another shape and layer 3 another dtype; the others stack, and bundles hold the two unstacked."""
    draw = repos.Draw("differ")
    kinds = [("F32", 4), ("F32", 5), ("F32", 4), ("BF16", 4), ("F32", 4)]
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": draw(str(n), code, rows, 8) for n, (code, rows) in enumerate(kinds)}
    tensors |= {f"model.layers.{n}.norm.weight": draw(f"norm{n}", "F32", 8) for n in range(5)}
    repo = repos.write(tmp_path / "differ", {"model.safetensors": tensors}, {"model_type": "unheard_of"})
    mounted = own(repo.path)
    assert mounted.files("full") == {
        "layers/scanned/mlp/up_proj", "layers/scanned/norm", *(f"layers/{n}/mlp/up_proj" for n in range(5)),
        *(f"layers/{n}/norm" for n in range(5)),
    }  # fmt: skip
    check_full(mounted, reference.canonical(repo))
    rows = {row["name"]: row for row in mounted.manifest()["tensors"]}
    assert rows["layers.scanned.mlp.up_proj"]["layers"] == [0, 2, 4]
    bundle = repos.parse_safetensors(mounted / "safetensors/dev0.safetensors")[0]
    assert set(bundle) == {"layers.scanned.mlp.up_proj", "layers.scanned.norm", "layers.1.mlp.up_proj", "layers.3.mlp.up_proj"}


@pytest.mark.parametrize("name", ["two_files_without_index", "hub_cache"])
def test_ways_to_store_a_repo(shared, repo, name):
    check_full(shared(name), reference.canonical(repo(name)))


def test_a_single_file_is_a_source(own, repo):
    source = repo("llama_tied")
    mounted = own(source.path / "model.safetensors", "--layout", "hf")
    check_full(mounted, reference.hf(source))


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
@pytest.mark.parametrize("name", ["org/tiny", "org/tiny@main", "org/tiny@0123456789abcdef0123456789abcdef01234567"])
def test_a_name_in_the_hub_cache(own, fresh, monkeypatch, name, variable):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HOME", raising=False)
    if variable == "HF_HOME":
        repo = repos.hub_cache(fresh("uneven").path.parent / "home" / "hub")
        monkeypatch.setenv(variable, str(repo.path.parents[3]))
    else:
        repo = fresh("hub_cache")
        monkeypatch.setenv(variable, str(repo.path.parents[2]))
    check_full(own(name), reference.canonical(repo))


def test_a_bad_layout_file_is_named(repo):
    """`--layout FILE` refuses a file that is no layout, with its name."""
    source = repo("llama").path
    done = mounting.run("plan", source, "--layout", source / "config.json", expect=None)
    assert done.code in (1, 2) and "config.json" in done.err
