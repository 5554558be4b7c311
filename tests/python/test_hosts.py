"""What a host lacks is named for what it is, with a remedy that fits: sandboxes, chroots and user namespaces, each in
namespaces of its own."""

import os
import shutil
import subprocess

import pytest

from mounting import find_ckfs, run

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="takes parts of the host away, in a mount namespace")


def _inside(script: str, *words: object, env: dict | None = None, user: bool = False) -> subprocess.CompletedProcess:
    """A script of the shell in a mount namespace of its own; `$CKFS` is the program."""
    space = ["unshare", *(["--user", "--map-root-user"] if user else []), "--mount", "--propagation", "slave"]
    return subprocess.run(
        [*space, "sh", "-ec", script, "sh", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"CKFS": str(find_ckfs())} | (env or {}),
        timeout=60,
    )


@pytest.fixture
def root(tmp_path):
    """A script that makes a directory that a chroot can be made into, and enters it with `$@`."""
    there = tmp_path / "root"
    there.mkdir()
    lines = []
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            (there / name).symlink_to(os.readlink(f"/{name}"))
        elif os.path.isdir(f"/{name}"):
            lines.append(name)
    for name in [*lines, "usr", "proc", "dev", "tmp"]:
        (there / name).mkdir()
    binds = "".join(f"mount --rbind /{name} {there}/{name}; " for name in [*lines, "usr", "proc", "dev"])
    shutil.copy(find_ckfs(), there / "ckfs")
    return there, binds


@pytest.mark.parametrize("full", [False, True])
def test_doctor_without_a_place_for_its_trial(fuse, tmp_path, full):
    """A read-only root, as Kubernetes' readOnlyRootFilesystem makes, or a full disk: another place is taken, or nothing is said of the
    host."""
    (tmp_path / "tmp").mkdir()
    close = "head -c 1m /dev/zero > $1/fill 2>/dev/null || true" if full else "mount -o remount,ro $1"
    some = f"mount -t tmpfs -o size=64k none $1; {close}; "
    env = {"TMPDIR": str(tmp_path / "tmp")}
    elsewhere = _inside(some + '"$CKFS" doctor', tmp_path / "tmp", env=env)
    assert elsewhere.returncode == 0 and "ok    mount         tried with a small file" in elsewhere.stdout, elsewhere
    none = "for other in /dev/shm /var/tmp; do mount -t tmpfs -o ro none $other; done; "
    nowhere = _inside(some + none + '"$CKFS" doctor', tmp_path / "tmp", env=env)
    assert nowhere.returncode == 0, nowhere
    assert "warn  mount         not tried: " in nowhere.stdout and "set TMPDIR to a directory that takes files" in nowhere.stdout, nowhere


def test_without_proc(repo, tmp_path):
    """Root has its capabilities and the kernel its version, although no file says so."""
    said = _inside('umount -l /proc; "$CKFS" doctor')
    assert said.returncode == 1 and "this host cannot mount: /proc\n" in said.stderr, said
    assert "fail  /proc         not mounted here" in said.stdout and "mount -t proc proc /proc" in said.stdout
    assert "fuse3" not in said.stdout and "CAP_SYS_ADMIN, which" not in said.stdout and "needs Linux" not in said.stdout
    for flag in ("--foreground", "--mkdir"):
        said = _inside('umount -l /proc; "$CKFS" mount "$@"', repo("llama").path, tmp_path, flag)
        assert said.returncode == 1 and "/proc: not mounted here, and ckfs finds mounts by its files" in said.stderr, said
    assert _inside('umount -l /proc; "$CKFS" plan "$@"', repo("llama").path).returncode == 0


def test_without_dev_null(repo, tmp_path):
    bare = "mount -t tmpfs none /dev; mknod -m 666 /dev/fuse c 10 229; "
    said = _inside(bare + '"$CKFS" mount "$@"', repo("llama").path, tmp_path)
    assert said.returncode == 1 and "/dev/null: not found; mknod -m 666 /dev/null c 1 3" in said.stderr, said
    said = _inside(bare + '"$CKFS" doctor')
    assert "fail  /dev/null     not found" in said.stdout, said


@pytest.mark.parametrize("user", ["", "--userspec=65534:65534"])
def test_run_in_a_chroot(repo, fuse, root, user):
    """Its `/` is no mount point, so that mounts cannot be hidden there, and no user may make a namespace."""
    there, binds = root
    shutil.copytree(repo("llama").path, there / "model")
    (there / "tmp").chmod(0o1777)
    said = _inside(f"{binds} chroot {user} {there} /ckfs run /model -- true", env={"TMPDIR": "/tmp"})
    assert said.returncode == 1 and "in a chroot whose / is no mount point" in said.stderr, said
    assert "unprivileged_userns_clone" not in said.stderr


def test_an_owner_that_a_user_namespace_does_not_know(repo, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(repo("llama").path, source)
    for path in source.iterdir():
        os.chown(path, 12345, 12345)
        path.chmod(0o600)
    said = _inside('"$CKFS" plan "$@"', source, user=True)
    if "unshare" in said.stderr:
        pytest.skip(said.stderr)
    assert said.returncode == 1 and "this root is that of a user namespace, which does not know the owner" in said.stderr, said
    assert "server of these files" not in said.stderr


def test_run_without_a_place_for_its_mount(repo, tmp_path):
    said = run("run", repo("llama").path, "--", "true", env=os.environ | {"TMPDIR": "/proc/none"}, expect=1)
    assert "make a mountpoint there (TMPDIR names another directory)" in said.err


def test_pickles_that_fit_one_after_the_other(tmp_path):
    """Each takes more than half of the room for descriptions of a small machine, and threads read several at the same time."""
    torch = pytest.importorskip("torch")
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    count = 8
    for number in range(1, count + 1):
        state = {f"w{number}": torch.full((4,), number), "log": list(range(500_000))}
        torch.save(state, source / f"pytorch_model-{number:05}-of-{count:05}.bin")
    (tmp_path / "meminfo").write_text("MemTotal: 262144 kB\n")
    script = 'mount --bind "$1" /proc/meminfo; exec "$CKFS" cat "$2" full/w7 --layout stored'
    read = _inside(script, tmp_path / "meminfo", source, env={"RAYON_NUM_THREADS": str(count)})
    assert read.returncode == 0, read
