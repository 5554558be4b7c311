"""A LoRA adapter merged on read: bit for bit the sum in numpy in the stated order, and PEFT's own merge to the last place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file

from mounting import run
from servers import Stub, bucket_of
from serving import Server

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def llama(tied: bool = False, **more: object) -> transformers.LlamaForCausalLM:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=130, tie_word_embeddings=tied, **more,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_embd=96, n_layer=2, n_head=4, vocab_size=130, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


ADAPTERS = {
    "list": dict(r=4, target_modules=["q_proj", "v_proj"]),
    "all-linear": dict(r=8, lora_alpha=20, target_modules="all-linear"),
    "one layer": dict(r=3, target_modules=["down_proj"], layers_to_transform=[1]),
    "rslora": dict(r=16, use_rslora=True, target_modules=["gate_proj", "up_proj"]),
    "patterns": dict(
        r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "o_proj"],
        rank_pattern={"k_proj": 2, r"layers\.1\.self_attn\.o_proj": 7}, alpha_pattern={"q_proj": 3, "o_proj": 1},
    ),
    "saved": dict(r=4, target_modules=["o_proj"], modules_to_save=["lm_head", "norm"]),
    "embedding": dict(r=4, target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "gaussian": dict(r=4, target_modules=["q_proj"], init_lora_weights="gaussian"),
}


def adapter(base: Path, to: Path, dtype: str = "f32", kind: str = "CAUSAL_LM", **options: object) -> Path:
    """An adapter with random matrices, saved by PEFT in some dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type=kind, **options))
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(to)
    if dtype != "f32":
        weights = {name: tensor.to(DTYPES[dtype]) for name, tensor in load_file(to / "adapter_model.safetensors").items()}
        save_file(weights, to / "adapter_model.safetensors", metadata={"format": "pt"})
    return to


def in_f32(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float32).numpy()


def merged_by_numpy(weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor, scale: float, turned: bool, to: torch.dtype):
    """W + scale * (B @ A): products added one after the other, each operation rounded to f32."""
    b, a = in_f32(b), in_f32(a)
    total = b[:, 0, None] * a[None, 0, :]
    for term in range(1, b.shape[1]):
        total = total + b[:, term, None] * a[None, term, :]
    total = total * np.float32(scale)
    assert total.dtype == np.float32
    return torch.from_numpy(in_f32(weight) + (total.T if turned else total)).to(to)


def reference(base: Path, adapter: Path, to: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """All tensors of the base with the adapter merged, from the two files alone."""
    weights = load_file(base / "model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    shown = {name: tensor.to(to or tensor.dtype) for name, tensor in weights.items()}
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        name = name.removeprefix("base_model.model.")
        if ".lora_" in name:
            module, matrix = name.split(".lora_")
            matrices.setdefault(module, {})[matrix.removesuffix(".weight")] = tensor
        else:
            stored = weights[name.replace(".base_layer", "")]
            shown[name.replace(".base_layer", "")] = tensor.to(to or stored.dtype)

    def of_pattern(patterns: dict, module: str, usual: float) -> float:
        import re

        found = [value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)]
        return found[0] if found else usual

    for module, parts in matrices.items():
        is_embedding = "embedding_A" in parts
        a, b = (parts["embedding_A"], parts["embedding_B"]) if is_embedding else (parts["A"], parts["B"])
        rank = of_pattern(config["rank_pattern"], module, config["r"])
        alpha = of_pattern(config["alpha_pattern"], module, config["lora_alpha"])
        assert a.shape[0] == rank
        scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
        weight = weights[f"{module}.weight"]
        turned = config["fan_in_fan_out"] != is_embedding
        shown[f"{module}.weight"] = merged_by_numpy(weight, b, a, scale, turned, to or weight.dtype)
    return shown


def merged_by_peft(base: Path, adapter: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def ordered(tensor: torch.Tensor) -> np.ndarray:
    """Integers in the order of the floats: neighbours differ by one."""
    wide = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    bits = tensor.contiguous().view(wide).numpy().astype(np.int64)
    return np.where(bits < 0, -(bits & (2 ** (8 * tensor.element_size() - 1) - 1)), bits)


def assert_bits(found: dict, expected: dict) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert np.array_equal(ordered(found[name]), ordered(tensor)), name


def exported(base: Path, adapter: Path, to: Path, *flags: object, only: str = "hf/*") -> Path:
    run("export", base, to, "--merge-lora", adapter, "--only", only, *flags)
    return to


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("dtype, of_adapter", [("bf16", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("f32", "f32")])
def test_merged_is_the_stated_sum_and_that_of_peft(kind, dtype, of_adapter, tmp_path):
    base, dtype = tmp_path / "base", DTYPES[dtype]
    llama().to(dtype).save_pretrained(base)
    made = adapter(base, tmp_path / "adapter", of_adapter, **ADAPTERS[kind])
    found = load_file(exported(base, made, tmp_path / "out") / "hf/model.safetensors")
    expected = reference(base, made)
    assert any(not torch.equal(expected[name], tensor) for name, tensor in load_file(base / "model.safetensors").items())
    assert_bits(found, expected)
    by_peft = merged_by_peft(base, made, dtype)
    assert set(by_peft) == set(found)
    differing = elements = most = 0
    for name, tensor in by_peft.items():
        assert tensor.dtype == dtype
        distance = np.abs(ordered(found[name]) - ordered(tensor))
        # PEFT holds the matrices of an embedding, and their product, in the dtype of the base: more are rounded otherwise.
        if not (kind == "embedding" and name == "model.embed_tokens.weight"):
            elements, differing = elements + distance.size, differing + np.count_nonzero(distance)
            most = max(most, distance.max())
        if dtype != torch.float32:
            # Where W and the product cancel, the sum has fewer bits than either: there, the error is one of the operands'.
            unit = torch.finfo(dtype).eps * in_f32(load_file(base / "model.safetensors")[name]).__abs__()
            apart = np.abs(in_f32(found[name]) - in_f32(tensor))
            assert np.all((distance <= 1) | (apart <= unit)), f"{name}: {distance.max()} units in the last place"
        else:
            assert np.allclose(in_f32(found[name]), in_f32(tensor), rtol=2e-6, atol=4e-7), name
    print(f"{kind}: {differing} of {elements} elements differ from PEFT's, by at most {most} in the last place")
    assert dtype == torch.float32 or differing <= elements / 200


def test_a_module_whose_weight_is_in_out(tmp_path):
    gpt2().save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "adapter", r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    found = load_file(exported(tmp_path / "base", made, tmp_path / "out", "--layout", "hf") / "hf/model.safetensors")
    # The repository has the names of the inner model.
    prefix = "transformer."
    weights = load_file(made / "adapter_model.safetensors")
    config = json.loads((made / "adapter_config.json").read_text())
    base = load_file(tmp_path / "base/model.safetensors")
    for name, tensor in base.items():
        module = f"base_model.model.{name if name.startswith(prefix) else prefix + name}".removesuffix(".weight")
        if f"{module}.lora_A.weight" in weights:
            b, a = weights[f"{module}.lora_B.weight"], weights[f"{module}.lora_A.weight"]
            tensor = merged_by_numpy(tensor, b, a, config["lora_alpha"] / config["r"], True, tensor.dtype)
        assert np.array_equal(ordered(found[name]), ordered(tensor)), name


@pytest.mark.parametrize("layout", ["canonical", "hf", "maxtext"])
def test_every_layout_has_the_merged_tensors(layout, tmp_path):
    """A layout of the base with the adapter is, file by file, that layout of a repository that was merged before."""
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "adapter", **ADAPTERS["all-linear"])
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_bytes((tmp_path / "base/config.json").read_bytes())
    save_file(reference(tmp_path / "base", made), whole / "model.safetensors", metadata={"format": "pt"})
    flags = ["--layout", layout, "--mesh", "fsdp=2,tensor=2", "--only", "full/**", "--only", "safetensors/*"]
    run("export", tmp_path / "base", tmp_path / "found", "--merge-lora", made, "--only", "dev*/**", *flags)
    run("export", whole, tmp_path / "expected", "--only", "dev*/**", *flags)
    files = [file.relative_to(tmp_path / "expected") for file in (tmp_path / "expected").rglob("*") if file.is_file()]
    assert len(files) > 20
    for file in files:
        assert (tmp_path / "found" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes(), file
    checked = run("verify", tmp_path / "base", "--merge-lora", made, "--layout", layout, "--mesh", "fsdp=2,tensor=2")
    assert "no difference" in checked.out


def test_a_wider_dtype_is_not_rounded_to_that_of_the_base_first(tmp_path):
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "adapter", **ADAPTERS["list"])
    found = load_file(exported(tmp_path / "base", made, tmp_path / "out", "--dtype", "f32") / "hf/model.safetensors")
    assert_bits(found, reference(tmp_path / "base", made, torch.float32))


def test_a_mount_has_the_merged_tensors_and_is_what_transformers_loads(own, tmp_path):
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "adapter", **ADAPTERS["saved"])
    mounted = own(tmp_path / "base", "--merge-lora", made)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(mounted / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert_bits(loaded.state_dict(), reference(tmp_path / "base", made))
    assert "no difference" in run("verify", mounted.point).out


def edited(path: Path, **members: object) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | members))


REFUSED = {
    "dora": (dict(use_dora=True), {}, "use_dora: expected none, found true"),
    "bias": (dict(bias="all"), {}, "bias: expected none"),
    "biases of the adapter": (dict(lora_bias=True), {}, "lora_bias: expected none, found true"),
    "kind": ({}, dict(peft_type="LOHA"), "peft_type: expected LORA"),
    "changed base": ({}, dict(init_lora_weights="pissa"), "init_lora_weights: expected true, false or one of"),
    "replicated layers": ({}, dict(layer_replication=[[0, 2]]), "layer_replication: expected none"),
    "something new": ({}, dict(use_new_thing=True), "use_new_thing: expected none, found true"),
    "parameters": ({}, dict(target_parameters=["x.y"]), "target_parameters is not supported"),
    "another rank": ({}, dict(r=5), "expected [5, 96] in BF16, F16 or F32 (rank 5"),
    "more modules": ({}, dict(target_modules=["q_proj", "k_proj"]), "missing tensor"),
    "other modules": ({}, dict(target_modules=["gate_proj"]), "expected a module that adapter_config.json targets"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_merged_is_refused(kind, tmp_path):
    options, members, message = REFUSED[kind]
    llama().save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "adapter", **(dict(r=4, target_modules=["q_proj"]) | options))
    edited(made / "adapter_config.json", **members)
    done = run("plan", tmp_path / "base", "--merge-lora", made, expect=1)
    assert message in done.err, done.err


def changed(made: Path, change) -> None:
    weights = load_file(made / "adapter_model.safetensors")
    change(weights)
    save_file(weights, made / "adapter_model.safetensors", metadata={"format": "pt"})


Q = "base_model.model.model.layers.1.self_attn.q_proj"

DAMAGED = {
    "nothing there": (lambda w: w.update({f"{Q}x.lora_A.weight": w.pop(f"{Q}.lora_A.weight")}), f"{Q}x.lora_A.weight"),
    "half a pair": (lambda w: w.pop(f"{Q}.lora_B.weight"), f"{Q}.lora_B.weight"),
    "other shape": (lambda w: w.update({f"{Q}.lora_B.weight": torch.zeros(95, 4)}), "expected [96, 4]"),
    "numbers": (lambda w: w.update({f"{Q}.lora_B.weight": torch.zeros(96, 4, dtype=torch.int32)}), "found I32"),
    "larger vocabulary": (
        lambda w: w.update({"base_model.model.lm_head.weight": torch.zeros(131, 96)}), "a vocabulary of another size",
    ),
    "convolution": (lambda w: w.update({f"{Q}.lora_A.weight": torch.zeros(4, 96, 1)}), "found F32 [4, 96, 1]"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_adapter_is_refused(kind, tmp_path):
    change, message = DAMAGED[kind]
    llama().save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "adapter", r=4, target_modules=["q_proj"])
    changed(made, change)
    done = run("plan", tmp_path / "base", "--merge-lora", made, expect=1)
    assert message in done.err, done.err


def test_tied_and_quantized_weights_are_refused(tmp_path):
    llama(tied=True).save_pretrained(tmp_path / "tied")
    made = adapter(tmp_path / "tied", tmp_path / "adapter", r=4, target_modules=["embed_tokens"])
    assert "tie_word_embeddings" in run("plan", tmp_path / "tied", "--merge-lora", made, expect=1).err
    llama().save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "other", r=4, target_modules=["q_proj"])
    weights = load_file(tmp_path / "base/model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    done = run("plan", tmp_path / "base", "--merge-lora", made, expect=1)
    assert f"{name}: expected a weight of the checkpoint in BF16, F16 or F32, found F8_E4M3" in done.err, done.err
    both = run("plan", tmp_path / "base", "--merge-lora", made, "--lora", made, "--layout", "hf", expect=1)
    assert "expected one of the two" in both.err


def test_the_plan_counts_the_merged_tensors(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "adapter", **ADAPTERS["all-linear"])
    for layers, count in (("0..3", 21), ("1", 7)):
        flags = [tmp_path / "base", "--merge-lora", made, "--layers", layers]
        for more in ([], ["-v"]):
            lines = [" ".join(line.split()) for line in run("plan", *flags, *more).out.splitlines()]
            assert f"merged {count} tensors with the adapter {made}" in lines, lines
        [view] = run("plan", *flags, "--json").json()["views"]
        assert view["merged"] == {"adapter": str(made), "tensors": count}
    [view] = run("plan", tmp_path / "base", "--json").json()["views"]
    assert view["merged"] is None


@pytest.mark.parametrize("form", ["dcp", "orbax"])
def test_a_trainers_checkpoint_with_the_names_of_the_model_is_a_base(form, tmp_path):
    base = tmp_path / "base"
    llama().to(torch.bfloat16).save_pretrained(base)
    made = adapter(base, tmp_path / "adapter", **ADAPTERS["saved"])
    saved = tmp_path / "saved" / form
    if form == "dcp":
        dcp.save(load_file(base / "model.safetensors"), checkpoint_id=saved, no_dist=True)
    else:
        # In four chunks for each matrix.
        run("export", base, saved.parent, "--layout", "hf", "--mesh", "fsdp=4", "--only", "orbax/**")
    exported(saved, made, tmp_path / "out", "--layout", "hf", "--config-from", base)
    assert_bits(load_file(tmp_path / "out/hf/model.safetensors"), reference(base, made))
    flags = ["--merge-lora", made, "--layout", "hf", "--config-from", base, "--mesh", "fsdp=2"]
    assert "no difference" in run("verify", saved, *flags).out


@pytest.mark.parametrize("kind", ["list", "patterns", "saved", "embedding"])
@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_base_and_adapter_of_one_training_are_merged(form, kind, tmp_path):
    base = tmp_path / "base"
    llama().to(torch.bfloat16).save_pretrained(base)
    made = adapter(base, tmp_path / "adapter", **ADAPTERS[kind])
    # The names that PEFT gives to a model in training, in DCP with a part of each factor on each of three ranks.
    mesh = ["--mesh", "fsdp=3"] if form == "dcp" else []
    run("export", base, tmp_path / "saved", "--layout", "hf", "--lora", made, *mesh, "--only", f"{form}/**")
    saved = tmp_path / "saved" / form
    if form == "safetensors":
        saved = next(saved.rglob("*.safetensors"))
    beside = tmp_path / "beside"
    beside.mkdir()
    for file in (base / "config.json", made / "adapter_config.json"):
        (beside / file.name).write_bytes(file.read_bytes())
    flags = ["--layout", "hf", "--config-from", beside]
    for refused in ([], ["--source-rename", "^base_model\\.model\\.=>"]):
        assert "--merge-lora self" in run("plan", saved, *flags, *refused, expect=1).err
    assert "adapter_config.json" in run("plan", saved, "--layout", "hf", "--config-from", base, "--merge-lora", "self", expect=1).err
    exported(saved, "self", tmp_path / "out", *flags)
    found = load_file(tmp_path / "out/hf/model.safetensors")
    assert_bits(found, reference(base, made))
    assert not (tmp_path / "out/hf/adapter_config.json").exists()
    assert "no difference" in run("verify", saved, *flags, "--merge-lora", "self", "--mesh", "fsdp=2").out


def test_one_adapter_of_several_is_merged_and_said(tmp_path):
    base = tmp_path / "base"
    llama().to(torch.bfloat16).save_pretrained(base)
    made = adapter(base, tmp_path / "adapter", **ADAPTERS["list"])
    run("export", base, tmp_path / "saved", "--layout", "hf", "--lora", made, "--only", "safetensors/**")
    state = load_file(next((tmp_path / "saved").rglob("*.safetensors")))
    second = {name.replace(".default.", ".reference."): tensor + 1 for name, tensor in state.items() if ".lora_" in name}
    for name, tensors, expect in (("two", state | second, 0), ("none", {k.replace("default", "a"): v for k, v in (state | second).items()}, 1)):
        saved = tmp_path / name
        saved.mkdir()
        save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
        for file in (base / "config.json", made / "adapter_config.json"):
            (saved / file.name).write_bytes(file.read_bytes())
        done = run("plan", saved, "--layout", "hf", "--merge-lora", "self", expect=expect)
        assert ("the adapter reference is not" if expect == 0 else "found a, reference") in done.err + done.out
    exported(tmp_path / "two", "self", tmp_path / "out", "--layout", "hf")
    assert_bits(load_file(tmp_path / "out/hf/model.safetensors"), reference(base, made))
    assert not (tmp_path / "out/hf/adapter_config.json").exists()


def test_a_checkpoint_with_other_names_is_refused_as_a_base(tmp_path):
    base = tmp_path / "base"
    llama().to(torch.bfloat16).save_pretrained(base)
    made = adapter(base, tmp_path / "adapter", **ADAPTERS["list"])
    for layout, form in (("maxtext", "orbax"), ("torchtitan", "dcp")):
        saved = tmp_path / "saved" / layout
        run("export", base, saved, "--layout", layout, "--only", f"{form}/**")
        flags = ["--layout", "hf", "--config-from", base]
        done = run("plan", saved / form, *flags, "--merge-lora", made, expect=1)
        assert f"has those of the layout {layout}" in done.err and "merge into that" in done.err, done.err
        # What the message advises.
        run("export", saved / form, tmp_path / layout, *flags, "--only", "hf/*")
        exported(tmp_path / layout / "hf", made, tmp_path / f"{layout}-out")
        found = load_file(tmp_path / f"{layout}-out/hf/model.safetensors")
        assert_bits(found, reference(tmp_path / layout / "hf", made))


@pytest.mark.parametrize("kind", ["hub", "s3"])
def test_an_adapter_and_its_base_may_be_remote(kind, clean, tmp_path):
    base = tmp_path / "base"
    llama().to(torch.bfloat16).save_pretrained(base)
    made = adapter(base, tmp_path / "adapter", **ADAPTERS["all-linear"])
    expected = reference(base, made)

    def check(of_base: object, of_adapter: object, out: str) -> None:
        exported(of_base, of_adapter, tmp_path / out)
        assert_bits(load_file(tmp_path / out / "hf/model.safetensors"), expected)

    if kind == "hub":
        stub = Stub("hub", f"org/adapter={made}", f"org/base={base}")
        try:
            clean.setenv("HF_ENDPOINT", stub.url)
            check(base, "hf://org/adapter", "one")
            check("org/base", made, "other")
            check("org/base", "hf://org/adapter", "both")
            done = run("plan", base, "--merge-lora", "hf://org/none", expect=1)
            assert "org/none" in done.err
            done = run("plan", base, "--merge-lora", "hf://org/base", expect=1)
            assert "adapter_config.json" in done.err
        finally:
            stub.close()
        return
    with bucket_of("s3", tmp_path / "server") as bucket:
        for name, value in bucket.environment.items():
            clean.setenv(name, value)
        bucket.upload(made)
        check(base, bucket.address, "one")
        done = run("plan", base, "--merge-lora", "s3://weights/none", expect=1)
        assert "s3://weights/none" in done.err, done.err


def test_a_server_has_the_merged_tensors(tmp_path):
    base = tmp_path / "base"
    llama().to(torch.bfloat16).save_pretrained(base)
    made = adapter(base, tmp_path / "adapter", **ADAPTERS["saved"])
    with Server(base, "--merge-lora", made, home=tmp_path) as server:
        (tmp_path / "found.safetensors").write_bytes(server.get("/files/hf/model.safetensors"))
    assert_bits(load_file(tmp_path / "found.safetensors"), reference(base, made))


def test_a_matrix_that_no_thread_can_hold_is_refused(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "adapter", r=4, target_modules=["q_proj"], layers_to_transform=[1])
    # Files with holes: nothing of these gigabytes is on the disk.
    for rank, is_refused in ((512 << 10, False), (1 << 20, True)):
        edited(made / "adapter_config.json", r=rank)
        sizes = [4 * rank * 96] * 2
        header = json.dumps({
            f"{Q}.lora_A.weight": {"dtype": "F32", "shape": [rank, 96], "data_offsets": [0, sizes[0]]},
            f"{Q}.lora_B.weight": {"dtype": "F32", "shape": [96, rank], "data_offsets": [sizes[0], sum(sizes)]},
        }).encode()  # fmt: skip
        with open(made / "adapter_model.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + sum(sizes))
        done = run("plan", tmp_path / "base", "--merge-lora", made, expect=int(is_refused))
        message = f"{Q}.lora_A.weight: expected at most 256 MiB, which each thread may hold in memory, found 384 MiB"
        assert (message in done.err) == is_refused, done.err


def test_quantized_on_read_is_that_of_the_merged_model(tmp_path):
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "base")
    made = adapter(tmp_path / "base", tmp_path / "adapter", **ADAPTERS["list"])
    whole = exported(tmp_path / "base", made, tmp_path / "whole", only="hf/*")
    exported(tmp_path / "base", made, tmp_path / "found", "--quantize", "fp8-channel")
    run("export", whole / "hf", tmp_path / "expected", "--quantize", "fp8-channel", "--only", "hf/*")
    found, expected = (load_file(tmp_path / side / "hf/model.safetensors") for side in ("found", "expected"))
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
