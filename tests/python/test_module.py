"""What the Python package does by the program under test: mounts, plans, commands."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request

import numpy as np
import pytest

import mounting
import package

package.import_ckfs()

import ckfs


@pytest.fixture(autouse=True)
def program(monkeypatch):
    monkeypatch.setenv("CKFS_BIN", str(mounting.find_ckfs()))


def test_a_mount_lives_as_long_as_its_block(repo, fuse):
    with ckfs.mount(repo("llama").path, mesh={"fsdp": 2}, layout="canonical") as path:
        assert mounting.mount_type(path) == "fuse.ckfs"
        assert sorted(name.name for name in path.glob("dev*")) == ["dev0", "dev1"]
        kept = np.memmap(path / "full/embed", dtype=np.uint8, mode="r")
        whole = bytes(kept)
    assert not path.exists()
    assert bytes(kept) == whole, "what is mapped stays readable"


def test_a_mount_ends_with_an_exception(repo, fuse, tmp_path):
    point = tmp_path / "mnt"
    point.mkdir()
    with pytest.raises(KeyError), ckfs.mount(repo("llama").path, point):
        assert mounting.mount_type(point) == "fuse.ckfs"
        raise KeyError
    assert mounting.mount_type(point) is None and point.exists()


def test_a_plan_is_that_of_the_program(repo):
    source = repo("llama").path
    found = ckfs.plan(source, mesh="fsdp=2", exclude=["*embed*", "*norm*"], unscanned=True, dtype=None, even=False)
    same = ["--mesh=fsdp=2", "--exclude=*embed*", "--exclude=*norm*", "--unscanned"]
    assert found == mounting.run("plan", source, "--json", *same).json()


def test_errors_are_exceptions(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(ckfs.Error, match=str(missing)) as failed:
        ckfs.plan(missing)
    assert failed.value.code == 1 and isinstance(failed.value, ckfs.PlanError)
    with pytest.raises(ckfs.UsageError, match="fsdp=0") as refused:
        ckfs.plan(missing, mesh="fsdp=0")
    assert refused.value.code == 2
    with pytest.raises(TypeError, match="did you mean `mesh`"):
        ckfs.plan(missing, mehs="fsdp=2")
    with pytest.raises(TypeError, match="config"):
        ckfs.mount(missing, cast=[{"match": "*", "dtype": "f32"}])
    with pytest.raises(ckfs.Error, match=str(missing)), ckfs.mount(missing):
        pytest.fail("nothing is mounted")


def test_all_problems_are_listed(repo):
    with pytest.raises(ckfs.PlanError) as failed:
        ckfs.plan(repo("uneven").path, mesh={"fsdp": 4}, even=True)
    assert len(failed.value.problems) > 3 and all("evenly" in problem for problem in failed.value.problems)


def test_warnings_of_a_mount_are_warnings(fresh, fuse):
    source = fresh("llama").path
    shutil.copy(next(iter(source.glob("*.safetensors"))), source / "left.safetensors")
    with pytest.warns(ckfs.PlanWarning, match="^left.safetensors: left out"), ckfs.mount(source):
        pass
    with pytest.warns(ckfs.PlanWarning, match="left.safetensors"):
        ckfs.plan(source)


def test_a_mount_is_an_object_with_an_end(repo, fuse, tmp_path):
    mount = ckfs.mount(repo("llama").path, tmp_path / "made/here", mkdir=True, mesh={"fsdp": 2})
    assert (mount / "dev1").is_dir() and os.fspath(mount) == str(tmp_path / "made/here")
    mount.unmount()
    mount.unmount()
    assert mounting.mount_type(mount.path) is None and "ended" in repr(mount)


ENDS = {
    "the program ends": "pass",
    "an exception": "raise LookupError",
    "the object is dropped": "del mount; print('dropped', flush=True); time.sleep(3600)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "os._exit": "os._exit(0)",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("own_point", [False, True])
def test_a_mount_ends_with_its_program(repo, fuse, tmp_path, end, own_point):
    point = tmp_path / "mnt"
    point.mkdir()
    code = f"""
        import os, signal, sys, time
        import ckfs
        mount = ckfs.mount(sys.argv[1], *sys.argv[2:])
        print(mount.path, flush=True)
        # A child that leaves does not end the mount of its parent.
        if (child := os.fork()) == 0:
            sys.exit()
        os.waitpid(child, 0)
        assert (mount / "dev0").is_dir()
        {ENDS[end]}
        """
    words = [repo("llama").path, *([point] if own_point else [])]
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        found = mounting.Path(process.stdout.readline().strip())
        assert found.is_absolute()
        mounting.wait_until(lambda: mounting.mount_type(found) is None, what=end)
        mounting.wait_until(lambda: found.exists() == own_point, what="the directory")
        process.send_signal(signal.SIGKILL)


def test_ctrl_c_of_a_terminal_reaches_the_program_first(repo, fuse):
    """The whole group of processes gets it; the mount is there until the program has ended."""
    code = """
        import os, sys, time
        import ckfs
        mount = ckfs.mount(sys.argv[1])
        try:
            print(mount.path, flush=True)
            time.sleep(3600)
        except KeyboardInterrupt:
            time.sleep(0.5)
            print(sorted(os.listdir(mount)), flush=True)
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(repo("llama").path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        point = mounting.Path(process.stdout.readline().strip())
        os.killpg(process.pid, signal.SIGINT)
        assert "dev0" in process.stdout.readline()
    mounting.wait_until(lambda: not point.exists(), what="the mount")


def test_a_command_has_a_mount_of_its_own(repo, fuse, capfd):
    shown = ["sh", "-c", 'ls "$CKFS_MOUNT"; exit 7']
    done = ckfs.run(repo("llama").path, shown, mesh={"fsdp": 2})
    out = capfd.readouterr()
    if done.returncode == 1 and "namespace" in out.err:
        pytest.skip("this machine lets no namespaces be made")
    assert done.returncode == 7 and "dev1" in out.out, out
    with pytest.raises(subprocess.CalledProcessError):
        ckfs.run(repo("llama").path, shown, check=True)


def test_a_server_is_an_object_with_an_end(repo):
    with ckfs.serve(repo("llama").path, mesh={"fsdp": 2}) as server:
        with urllib.request.urlopen(f"{server.files}dev1/embed", timeout=30) as answer:
            assert answer.read() == ckfs.open(repo("llama").path, mesh={"fsdp": 2})["embed"].shard(1).tobytes()
    assert "ended" in repr(server)
    with pytest.raises(OSError):
        urllib.request.urlopen(server.files, timeout=5)
    with pytest.raises(ckfs.PlanError, match="missing"):
        ckfs.serve(repo("llama").path / "missing")
    with pytest.raises(ckfs.UsageError, match="nowhere"):
        ckfs.serve(repo("llama").path, listen="nowhere")
    with pytest.raises(TypeError, match="mkdir"):
        ckfs.serve(repo("llama").path, mkdir=True)


def test_a_server_ends_with_its_program(repo):
    code = "import ckfs, os, signal, sys; print(ckfs.serve(sys.argv[1]).address, flush=True)"
    ends = ["s = ckfs.serve(sys.argv[1]); print(s.address, flush=True); os.kill(os.getpid(), signal.SIGKILL)", code.split("; ", 1)[1]]
    for end in ends:
        command = [sys.executable, "-c", f"import ckfs, os, signal, sys; {end}", str(repo("llama").path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
        port = int(done.stdout.strip().rpartition(":")[2])

        def is_closed() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) != 0

        mounting.wait_until(is_closed, what=end)
