"""The commands other than mount, as users run them: their output and exit codes."""

import hashlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import mounting
import reference
import repos
from mounting import run, same_bytes
from reference import Mesh

COMMANDS = ["mount", "umount", "status", "restart", "plan", "explain", "cat", "export", "verify", "doctor", "demo"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command):
    assert command in run("--help").out
    assert "Usage: ckfs " + command in run(command, "--help").out


def test_version():
    assert run("--version").out.startswith("ckfs ")


@pytest.mark.parametrize(
    "args",
    [(), ("no-such-command",), ("mount",), ("mount", "/x"), ("cat", "/x"), ("plan", "/x", "--mesh", "fsdp"),
     ("plan", "/x", "--mesh", "fsdp=0"), ("plan", "/x", "--mesh", "a=2,a=2"), ("plan", "/x", "--dtype", "int3"),
     ("plan", "/x", "--no-such-flag")],
)  # fmt: skip
def test_wrong_usage_is_two(args):
    done = run(*args, expect=2)
    assert done.err and not done.out


def test_failures_exit_with_1_and_name_the_cause(tmp_path, repo):
    """On standard error, in lower case, with the name of the object."""
    missing = tmp_path / "missing"
    for args in (("plan", missing), ("cat", missing, "full/x"), ("mount", missing, tmp_path), ("verify", missing)):
        done = run(*args, expect=1)
        assert str(missing) in done.err and not done.out, args
    done = run("cat", repo("llama").path, "full/layers/scanned/nothing", expect=1)
    assert "layers/scanned/nothing" in done.err and not done.out
    (tmp_path / "empty").mkdir()
    assert "safetensors" in run("plan", tmp_path / "empty", expect=1).err


def test_even_refuses_uneven_splits(repo):
    """All tensors that do not divide are named, not only the first."""
    done = run("plan", repo("uneven").path, "--mesh", "fsdp=4", "--even", expect=1)
    for size in (13, 10, 6, 2):
        assert f"block{size}" in done.err and str(size) in done.err
    run("plan", repo("llama").path, "--mesh", "fsdp=4", "--even")


def test_plan(repo):
    said = run("plan", repo("llama").path, "--mesh", "fsdp=4").out
    assert "llama" in said and "BF16" in said.upper()
    assert "qwen3_moe" in run("plan", repo("qwen3_moe").path).out.replace("-", "_")


@pytest.mark.parametrize("name,mesh", [("llama", "fsdp=4"), ("uneven", "fsdp=4"), ("qwen3_moe", "fsdp=2,tensor=2")])
def test_plan_json(repo, name, mesh):
    plan = run("plan", repo(name).path, "--mesh", mesh, "--json").json()
    grid, tensors = Mesh.parse(mesh), reference.canonical(repo(name))
    (view,) = plan["views"]
    assert plan["dialect"]["model_type"] == repo(name).config["model_type"]
    assert view["family"] == {"llama": "llama", "uneven": None, "qwen3_moe": "qwen-moe"}[name]
    assert (view["layout"], view["dtype"], view["warnings"]) == ("canonical", None, [])
    assert view["mesh"]["devices"] == len(grid.devices)
    assert [(axis["name"], axis["size"]) for axis in view["mesh"]["axes"]] == list(grid.axes)
    bundled = [shown for shown in tensors.values() if shown.bundled]
    expected = [sum(reference.shard(shown, grid, d).nbytes for shown in bundled) for d in grid.devices]
    assert [device["bytes"] for device in view["devices"]] == expected
    assert {row["path"]: row["shape"] for row in view["tensors"]} == {k: list(v.shape) for k, v in tensors.items()}


@pytest.mark.parametrize(
    "name,fact,value",
    [("phi3", "qkv", "fused"), ("llama", "qkv", "separate"), ("qwen3_moe", "experts", "4, one tensor each"),
     ("gpt_oss", "experts", "fused"), ("llama", "experts", "none"), ("llama", "quantization", "not quantized"),
     ("block_fp8_f32", "quantization", "fp8 in blocks of 128x128, 16 weights with F32 scales *_scale_inv"),
     ("block_fp8_bf16", "quantization", "fp8 in blocks of 128x128, 16 weights with BF16 scales *_scale_inv")],
)  # fmt: skip
def test_plan_names_the_dialect(repo, name, fact, value):
    found = run("plan", repo(name).path, "--json").json()["dialect"][fact]
    assert (found if fact == "qkv" else found["text"]) == value


def test_plan_states_experts_and_quantization_in_members(repo):
    dialect = run("plan", repo("qwen3_moe").path, "--json").json()["dialect"]
    assert (dialect["experts"]["kept"], dialect["experts"]["count"], dialect["quantization"]["scheme"]) == ("single", 4, None)
    found = run("plan", repo("block_fp8_bf16").path, "--json").json()["dialect"]["quantization"]
    expected = {"scheme": "block_fp8", "block": [128, 128], "weights": 16, "scale_suffix": "_scale_inv", "scale_dtype": "BF16"}
    assert expected.items() <= found.items() and found["converts"]


def test_missing_layers_are_refused(tmp_path):
    """The config of a known family counts more layers than exist; a tensor that only one layer has is no error."""
    tensors = repos.llama_tensors("strict", layers=4)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(("model.layers.1.", "model.layers.3."))}
    tensors["model.layers.0.mlp.surprise.weight"] = repos.Draw("x")("surprise", "BF16", 4, 4)
    repo = repos.write(
        tmp_path / "strict", {"model.safetensors": tensors}, repos.base_config("llama", "LlamaForCausalLM", 4)
    )
    for args in (("plan", repo.path), ("cat", repo.path, "full/embed")):
        done = run(*args, expect=1)
        assert "layers 1,3 are missing: expected 4 of model.layers, numbered from 0" in done.err and not done.out
    view = run("plan", repo.path, "--json", "--allow-missing").json()["views"][0]
    assert len(view["warnings"]) == 1
    some = run("plan", repo.path, "--allow-missing=model.layers.3.*", expect=1)
    assert "error: layer 1 is missing: expected 4 of model.layers" in some.err
    rows = {row["name"]: row for row in view["tensors"]}
    assert rows["layers.scanned.wq"]["layers"] == [0, 2] and rows["layers.scanned.mlp.surprise"]["layers"] == [0]
    mounting.subprocess.run(
        [mounting.find_ckfs(), "cat", repo.path, "full/layers/2/wq", "--allow-missing"], stdout=mounting.subprocess.DEVNULL, timeout=60, check=True
    )


@pytest.mark.parametrize("path", ["full/layers/scanned/wq", "dev1/layers/0/w_down", "dev3/embed"])
def test_cat(repo, path, tmp_path):
    mesh, (where, _, name) = Mesh.parse("fsdp=4"), path.partition("/")
    target = tmp_path / "out"
    with open(target, "wb") as out:
        command = [str(mounting.find_ckfs()), "cat", str(repo("llama").path), path, "--mesh", "fsdp=4"]
        assert mounting.subprocess.run(command, stdout=out, timeout=60, check=True).returncode == 0
    shown = reference.canonical(repo("llama"))[name]
    expected = shown.array if where == "full" else reference.shard(shown, mesh, int(where[3:]))
    same_bytes(target.read_bytes(), expected, path)


def test_cat_of_other_files(repo, tmp_path):
    """Any file of the mount, not only tensors."""
    source = repo("llama").path
    assert run("cat", source, "hf/config.json").out == (source / "config.json").read_text()
    manifest = json.loads(run("cat", source, ".ckfs/manifest.json", "--mesh", "fsdp=2").out)
    assert manifest["mesh"] == {"fsdp": 2}


def test_cat_into_a_closed_pipe(repo):
    """`ckfs cat ... | head -c 1` ends quietly."""
    command = f"{mounting.find_ckfs()} cat {repo('edge_values').path} full/many_f32 | head -c 1"
    done = mounting.subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=True)
    assert len(done.stdout) == 1 and not done.stderr


def test_explain(repo):
    source = repo("llama")
    said = run("explain", source.path, "dev1/layers/scanned/wq", "--mesh", "fsdp=4", "--dtype", "f32").out
    for n in range(3):
        name = f"model.layers.{n}.self_attn.q_proj.weight"
        assert name in said and source.file_of(name).name in said
    assert "bf16" in said.lower() and "f32" in said.lower()


def test_export_equals_the_mount(shared, repo, tmp_path):
    """Every file of the mount; without a terminal there is no progress bar."""
    mounted = shared("llama", "--mesh", "fsdp=2,tensor=2")
    done = run("export", repo("llama").path, tmp_path / "out", "--mesh", "fsdp=2,tensor=2")
    assert "\r" not in done.err and "\x1b" not in done.err
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    tensors = {name for name in mounted.files("") if not name.startswith((".ckfs/", "mesh/"))}
    assert tensors <= found
    for name in tensors:
        assert (tmp_path / "out" / name).read_bytes() == (mounted / name).read_bytes(), name


def test_export_does_not_overwrite(repo, tmp_path):
    (tmp_path / "mine").write_text("precious")
    assert str(tmp_path) in run("export", repo("llama").path, tmp_path, expect=1).err
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "block_fp8_f32", "edge_values", "every_dtype"])
def test_verify_source(repo, name):
    run("verify", repo(name).path, "--mesh", "fsdp=3", "--dtype", "bf16")


@pytest.mark.parametrize(
    "name,options",
    [("llama", ("--mesh", "fsdp=2,tensor=2")), ("every_dtype", ("--mesh", "fsdp=3")), ("qwen3_moe", ("--mesh", "expert=2")),
     ("block_fp8_bf16", ("--dtype", "bf16", "--mesh", "fsdp=3")), ("gemma3", ("--dtype", "f32", "--layout", "hf"))],
)  # fmt: skip
def test_verify_mount(shared, name, options):
    assert "no difference" in run("verify", shared(name, *options).point, "--full").out


def test_verify_fails_on_a_damaged_mount(own, two_files):
    mounted = own(two_files.path, "--mesh", "fsdp=2")
    os.truncate(two_files.path / "model-00002-of-00002.safetensors", 1 << 20)
    done = run("verify", mounted.point, "--only", "full/*", expect=1)
    assert "model-00002-of-00002.safetensors" in done.err + done.out or "layers/" in done.err + done.out


def test_doctor():
    said = run("doctor", expect=None)
    assert said.code in (0, 1) and "/dev/fuse" in said.out


def test_a_mount_in_the_foreground_tells_a_terminal_that_it_answers(fuse, repo, tmp_path):
    point = tmp_path / "mnt"
    point.mkdir()
    terminal, end = pty.openpty()
    daemon = subprocess.Popen(
        [mounting.find_ckfs(), "mount", repo("llama").path, point, "--mesh", "fsdp=2", "--foreground"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=end,
    )  # fmt: skip
    os.close(end)
    said = b""
    try:
        while b"\n" not in said:
            said += os.read(terminal, 4096)
        assert re.fullmatch(rf"ckfs: mounted on {re.escape(str(point))}; 2 devices, .* each \(Ctrl-C unmounts\)", said.decode().strip())
        daemon.send_signal(signal.SIGINT)
        assert daemon.wait(mounting.TIMEOUT_SECONDS) == 0
    finally:
        daemon.kill()
        daemon.wait()
        mounting.detach(point)
        os.close(terminal)


def test_status(own, repo):
    mounted = own(repo("llama").path, "--mesh", "fsdp=4", "--dtype", "f32")
    # Other mounts of this host do not matter: one of them may be dead, which is exit code 1.
    rows = {row["mountpoint"]: row for row in run("status", "--json", expect=None).json()["mounts"]}
    row = rows[str(mounted.point)]
    assert (row["source"], row["health"]) == (str(repo("llama").path), "healthy")
    assert row["views"] == [{"name": "", "mesh": "fsdp=4", "layout": "canonical", "dtype": "F32"}]
    assert row["stats"]["panics"] == 0
    # One line for each mount.
    (line,) = [line for line in run("status", expect=None).out.splitlines() if line.startswith(f"{mounted.point} ")]
    assert re.match(r"\S+ +healthy +fsdp=4 canonical +[\d.]+ \w+ served  ", line) and line.endswith(f"  {repo('llama').path}"), line
    one = run("status", mounted.point, "--json").json()["mounts"]
    assert [entry["mountpoint"] for entry in one] == [str(mounted.point)]
    os.kill(mounting.daemon_pid(mounted.point), mounting.signal.SIGKILL)
    mounting.wait_until(lambda: mounting.error_of(os.listdir, mounted.point) is not None, what="a stale mount")
    assert run("status", mounted.point, "--json", expect=1).json()["mounts"][0]["health"] == "stale"
    run("umount", mounted.point)
    assert str(mounted.point) not in run("status", expect=None).out
    run("status", mounted.point, expect=1)


def test_restart_mounts_anew_what_nobody_uses(fuse, fresh, tmp_path):
    source, point = fresh("llama").path, tmp_path / "mnt"
    point.mkdir()
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert run("restart", tmp_path, expect=1, env=environment).err.endswith(f"{tmp_path}: no ckfs mount\n")

    def mended() -> None:
        """By the commands that restart proposes, in a shell."""
        commands = run("restart", point, expect=1, env=environment).err.split("comes back by: ")[1]
        program = environment | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run(["sh", "-ec", commands], cwd=tmp_path, env=program, check=True, timeout=mounting.TIMEOUT_SECONDS)
        assert run("status", point, "--json").json()["mounts"][0]["health"] == "healthy"

    (tmp_path / "ckfs").symlink_to(mounting.find_ckfs())
    try:
        run("mount", source, point, "--mesh", "fsdp=2", "--dtype", "f32", env=environment)
        first = run("status", point, "--json").json()["mounts"][0]
        embed = (point / "dev1/embed").read_bytes()
        # What shows something else is mounted anew, unless it is in use.
        os.utime(source / "config.json")
        with open(point / "dev1/embed", "rb"):
            refused = run("restart", point, expect=1, env=environment).err
            assert (str(os.getpid()) in refused or "in use" in refused) and "--lazy" not in refused and "--wait TIME" in refused, refused
            assert run("status", point, "--json", expect=None).json()["mounts"][0]["pid"] == first["pid"]
        said = run("restart", point, "--wait", "10", env=environment).err
        assert f"ckfs: mounted anew on {point}; " in said
        second = run("status", point, "--json").json()["mounts"][0]
        assert second["pid"] != first["pid"] and second["views"] == first["views"] and second["version"] == first["version"]
        assert (point / "dev1/embed").read_bytes() == embed
        assert "which is read-only: give another directory" in run("export", source, point, expect=1).err
        # What cannot be mounted any more leaves the mount as it is.
        config = source / "config.json"
        text = config.read_text()
        config.write_text("{")
        try:
            assert "the mount is left as it is" in run("restart", point, expect=1, env=environment).err
        finally:
            config.write_text(text)
        assert run("status", point, "--json", expect=None).json()["mounts"][0]["pid"] == second["pid"]
        os.kill(second["pid"], mounting.signal.SIGKILL)
        # The kernel may list the root by itself.
        mounting.wait_until(lambda: mounting.error_of(os.statvfs, point) is not None, what="a stale mount")
        mended()
        run("umount", point)
        mended()
        assert run("status", point, "--json").json()["mounts"][0]["views"] == second["views"]
    finally:
        mounting.detach(point)


def test_demo(fuse, tmp_path):
    """Mounts, shows, reads, verifies and cleans up by itself."""
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "temporary")}
    said = run("demo", env=environment, stdin=mounting.subprocess.DEVNULL).out
    assert "layers/scanned" in said and "dev0" in said and "ckfs mount" in said
    assert not mounting.mount_points(tmp_path)
    assert os.listdir(tmp_path / "temporary") == []


def test_demo_keep(fuse, tmp_path):
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    try:
        said = run("demo", "--keep", env=environment, stdin=mounting.subprocess.DEVNULL).out
        (point,) = mounting.mount_points(tmp_path)
        assert str(point) in said
        assert np.fromfile(point / "full/embed", np.uint8).size > 0
        run("umount", point)
    finally:
        for point in mounting.mount_points(tmp_path):
            mounting.detach(point)


def _broken(path, damage):
    """A llama repo of one file with its header replaced or its bytes cut."""
    repo = repos.llama(path, parts=1)
    file = path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    return repo


@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: raw[:5], lambda raw: b"\xff" * 8 + raw[8:],
     lambda raw: raw.replace(b'"BF16"', b'"XF16"', 1), lambda raw: raw.replace(b"[0,", b"[1,", 1),
     lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"],
    ids=["short", "long", "stub", "huge header", "unknown dtype", "gap", "lfs pointer"],
)  # fmt: skip
def test_bad_files_are_refused_by_name(tmp_path, damage):
    repo = _broken(tmp_path / "bad", damage)
    assert "model.safetensors" in run("plan", repo.path, expect=1).err


def test_all_errors_at_once(tmp_path):
    repo = repos.llama(tmp_path / "bad", parts=3)
    for file in list(repo.files)[:2]:
        (repo.path / file).write_bytes(b"short")
    err = run("plan", repo.path, expect=1).err
    assert all(file in err for file in list(repo.files)[:2])


def test_index_is_cross_checked(tmp_path):
    """Named in the index but not in the file, in the file but not in the index, and a file outside the repo."""
    repo = repos.llama(tmp_path / "index", parts=2)
    index = repo.path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    first = next(iter(said["weight_map"]))
    file = said["weight_map"].pop(first)
    said["weight_map"]["ghost"] = file
    index.write_text(json.dumps(said))
    err = run("plan", repo.path, expect=1).err
    assert first in err and "ghost" in err
    said["weight_map"] |= {first: "../outside.safetensors"}
    shutil.copy(repo.path / file, tmp_path / "outside.safetensors")
    index.write_text(json.dumps(said))
    assert "outside.safetensors" in run("plan", repo.path, expect=1).err


def test_documents_for_programs(repo, tmp_path):
    """`--json` gives one document, and the exit code of the command without it."""
    source = repo("llama").path
    sums = run("sums", source, "--mesh", "fsdp=2", "--only", "dev0", "--json").json()
    path = {row["path"]: row["sha256"] for row in sums["files"]}
    data = run("export", source, tmp_path / "out", "--mesh", "fsdp=2", "--only", "dev0", "--json").json()
    assert data["files"] == len(path) and data["directory"] == str(tmp_path / "out")
    for name, digest in path.items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest
    verified = run("verify", source, "--mesh", "fsdp=2", "--json").json()
    assert verified["differences"] == 0 and verified["files"] > 0


@pytest.mark.parametrize("closed, needs", [("model.safetensors", "read"), ("config.json", "read"), (".", "read")])
def test_a_closed_source_says_for_whom_and_what_opens_it(closed, needs, fresh, tmp_path):
    source = fresh("llama").path
    program = tmp_path / "ckfs"
    shutil.copy(mounting.find_ckfs(), program)
    target = next(source.glob("*.safetensors")) if closed.endswith("safetensors") else (source / closed).resolve()
    mode = target.stat().st_mode & 0o777
    words = [program, "plan", source]
    if os.geteuid() == 0:
        # pytest's own directories are its user's only.
        for directory in [tmp_path, *tmp_path.parents]:
            if directory.is_relative_to("/tmp") and directory != Path("/tmp") or "pytest" in directory.name:
                directory.chmod(0o755)
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words]
    target.chmod(0)
    try:
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"HOME": "/"})
    finally:
        target.chmod(mode)
    assert done.returncode == 1, done.stderr
    assert f"{target} has mode 0000, user {os.geteuid()}" in done.stderr, done.stderr
    assert f"cannot {needs} it: its owner permits it by `setfacl -m u:" in done.stderr, done.stderr
