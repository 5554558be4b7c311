"""`--config`: the same words as the flags, and several views of one source."""

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


def test_a_mount_can_be_made_again_from_its_own_config(shared, own, repo, tmp_path):
    """`.ckfs/config.toml` says all that the flags said."""
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


@pytest.mark.parametrize(
    "text,line", [('mesh = "fsdp=2"\nmesch = "x"\n', 2), ("mesh = \n", 1), ('\n\n[view.a]\nmesh = "fsdp"\n', 4)]
)
def test_errors_name_file_and_line(repo, tmp_path, text, line):
    config = _written(tmp_path / "c.toml", text)
    done = run("plan", repo("llama").path, "--config", config, expect=None)
    assert done.code in (1, 2) and "c.toml" in done.err and f"{line}" in done.err
