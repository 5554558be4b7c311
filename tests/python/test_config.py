"""`--config`: the same words as the flags, and several views of one source."""

import dataclasses

import pytest

import reference
from mounting import Mount, check_device, check_full, run
from reference import Mesh


def _written(path, text):
    path.write_text(text)
    return path


def test_config_instead_of_flags(own, repo, tmp_path):
    config = _written(tmp_path / "c.toml", 'mesh = "fsdp=2,tensor=2"\ndtype = "f32"\n')
    mounted = own(repo("llama").path, "--config", config)
    tensors = {path: reference.cast(shown, "F32") for path, shown in reference.canonical(repo("llama")).items()}
    for device in range(4):
        check_device(mounted, tensors, Mesh.parse("fsdp=2,tensor=2"), device)


def test_a_mount_can_be_repeated_from_its_own_config(shared, own, repo, tmp_path):
    """`.ckfs/config.toml` contains all settings of the flags."""
    first = shared("llama", "--mesh", "fsdp=2,tensor=2", "--dtype", "f32", "--layout", "hf")
    config = _written(tmp_path / "again.toml", (first / ".ckfs/config.toml").read_text())
    again = own(repo("llama").path, "--config", config)
    assert again.manifest() == first.manifest()


def test_several_views_of_one_source(own, repo, tmp_path):
    text = '[view.train]\nmesh = "fsdp=4"\n\n[view.rollout]\nmesh = "tensor=2"\nlayout = "hf"\ndtype = "f32"\n'
    mounted = own(repo("llama").path, "--config", _written(tmp_path / "c.toml", text))
    assert {"train", "rollout"} <= {entry.name for entry in mounted.point.iterdir()}
    train = Mount(mounted / "train", mounted.source)
    for device in range(4):
        check_device(train, reference.canonical(repo("llama")), Mesh.parse("fsdp=4"), device)
    rollout = Mount(mounted / "rollout", mounted.source)
    check_full(rollout, {k: reference.cast(v, "F32") for k, v in reference.hf(repo("llama")).items()})


RULES = """
mesh = "fsdp=2,tensor=2"
dtype = "f32"

[[cast]]
match = "*norm*"
dtype = "keep"

[[cast]]
match = "layers.*.wq"
dtype = "f16"

[[shard_rules]]
match = "layers.scanned.w_down"
spec = ["-", ["fsdp", "tensor"], "-"]

[[shard_rules]]
match = "embed"
spec = ["tensor", "fsdp"]

[view.a]

[view.b]
shard = "none"

[[view.b.shard_rules]]
match = "layers.*.w*"
spec = ["fsdp"]
"""


def test_rules_by_pattern(own, repo, tmp_path):
    """Own shard rules and dtypes; views inherit them, after their own."""
    source, mesh = repo("llama"), Mesh.parse("fsdp=2,tensor=2")
    mounted = own(source.path, "--config", _written(tmp_path / "c.toml", RULES))
    assert {entry.name for entry in mounted.point.iterdir()} == {"a", "b", ".ckfs"}

    def values(shown):
        if "norm" in shown.name:
            return shown
        return reference.cast(shown, "F16" if shown.name.endswith(".wq") else "F32")

    tensors = {path: values(shown) for path, shown in reference.canonical(source).items()}
    rules = {"layers/scanned/w_down": [[], ["fsdp", "tensor"]], "embed": [["tensor"], ["fsdp"]]}
    of_a = {path: dataclasses.replace(shown, rule=rules.get(path)) for path, shown in tensors.items()}
    of_b = {
        path: dataclasses.replace(shown, rule=[["fsdp"]] if path.startswith("layers/") and "/w" in path else rules.get(path, []))
        for path, shown in tensors.items()
    }
    for name, expected in (("a", of_a), ("b", of_b)):
        view = Mount(mounted / name, mounted.source)
        rows = {row["path"]: row for row in view.manifest()["tensors"]}
        for path, shown in expected.items():
            assert (rows[path]["dtype"], rows[path]["spec"]) == (shown.code, reference.spec(shown, mesh)), (name, path)
        for device in mesh.devices:
            check_device(view, expected, mesh, device)
    run("verify", mounted.point)


@pytest.mark.parametrize(
    "text,line", [('mesh = "fsdp=2"\nmesch = "x"\n', 2), ("mesh = \n", 1), ('\n\n[view.a]\nmesh = "fsdp"\n', 4)]
)
def test_errors_name_file_and_line(repo, tmp_path, text, line):
    config = _written(tmp_path / "c.toml", text)
    done = run("plan", repo("llama").path, "--config", config, expect=None)
    assert done.code in (1, 2) and f"c.toml:{line}: " in done.err and f"--> {config}:{line}:" in done.err
