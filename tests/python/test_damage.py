"""Sources that change under a live mount: an error or the right bytes, never anything else, and the daemon lives."""

import errno
import mmap
import os
import signal
import subprocess
import threading
import time

import pytest

import mounting
import reference
from mounting import error_of, read, wait_until
from repos import LAYERS_OF_TWO_FILES as LAYERS


def _truncate(file):
    os.truncate(file, file.stat().st_size // 2)


def _truncate_to_nothing(file):
    os.truncate(file, 0)


def _rewrite_in_place(file):
    with open(file, "rb+") as handle:
        handle.seek(-4096, os.SEEK_END)
        handle.write(b"\xa5" * 4096)
    later = time.time() + 5
    os.utime(file, (later, later))


def _replace(file):
    data = bytearray(file.read_bytes())
    data[-4096:] = b"\xa5" * 4096
    new = file.with_suffix(".new")
    new.write_bytes(data)
    new.rename(file)


def _delete(file):
    file.unlink()


DAMAGES = [_truncate, _truncate_to_nothing, _rewrite_in_place]


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16")], ids=["copied", "cast"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__[1:])
def test_a_damaged_source_is_eio(own, two_files, damage, options):
    mounted = own(two_files.path, "--mesh", "fsdp=2", *options)
    code = "BF16" if options else None
    tensors = {path: reference.cast(shown, code) for path, shown in reference.canonical(two_files).items()}
    damage(two_files.path / "model-00001-of-00002.safetensors")
    last = LAYERS - 1
    for path in (f"full/layers/{last}/a", "full/layers/scanned/a", f"dev1/layers/{last}/a"):
        assert error_of(read, mounted / path) == errno.EIO, path
    for path in ("full/layers/scanned/b", f"full/layers/{last}/b"):
        mounting.same_bytes(read(mounted / path), tensors[path.removeprefix("full/")].array, path)
    assert mounted.stats()["poisoned_sources"] == 1
    assert mounted.stats()["panics"] == 0
    assert mounting.mount_type(mounted.point) == "fuse.ckfs"


@pytest.mark.parametrize("damage", [_replace, _delete], ids=lambda damage: damage.__name__[1:])
def test_a_replaced_source_never_shows_other_bytes(own, two_files, damage):
    """An open descriptor may still refer to the old file: its bytes are right, EIO is right too, the new bytes are not."""
    mounted = own(two_files.path, "--mesh", "fsdp=2")
    tensors = reference.canonical(two_files)
    damage(two_files.path / "model-00001-of-00002.safetensors")
    for path in ("layers/scanned/a", "layers/3/a", "layers/scanned/b"):
        try:
            found = read(mounted / f"full/{path}")
        except OSError as error:
            assert error.errno == errno.EIO and not path.endswith("b")
        else:
            mounting.same_bytes(found, tensors[path].array, path)


def test_a_replaced_source_is_eio_once_seen(own, two_files):
    """New opens notice that the name now belongs to another file."""
    mounted = own(two_files.path)
    _replace(two_files.path / "model-00001-of-00002.safetensors")
    assert error_of(read, mounted / "full/layers/3/a") == errno.EIO
    assert mounted.stats()["poisoned_sources"] == 1


@pytest.mark.parametrize("options", [(), ("--dtype", "bf16")], ids=["copied", "cast"])
def test_truncation_while_being_read(own, two_files, options):
    """The file is cut while readers read: each gets EIO or right bytes, and the daemon lives."""
    mounted = own(two_files.path, "--mesh", "fsdp=2", *options)
    code = "BF16" if options else None
    expected = reference.cast(reference.canonical(two_files)["layers/scanned/a"], code).array.tobytes()
    wrong, stop = [], threading.Event()

    def reader():
        while not stop.is_set():
            fd = os.open(mounted / "full/layers/scanned/a", os.O_RDONLY | os.O_DIRECT)
            try:
                with mmap.mmap(-1, 1 << 20) as buffer:
                    at = 0
                    while count := os.preadv(fd, [buffer], at):
                        if buffer[:count] != expected[at : at + count]:
                            wrong.append(at)
                        at += count
                    if at != len(expected):
                        wrong.append(("short", at))
            except OSError as error:
                if error.errno != errno.EIO:
                    wrong.append(error)
            finally:
                os.close(fd)

    def guarded():
        try:
            reader()
        except OSError as error:  # open itself may fail with EIO
            if error.errno != errno.EIO:
                wrong.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    _truncate(two_files.path / "model-00001-of-00002.safetensors")
    time.sleep(0.7)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert error_of(read, mounted / "full/layers/3/a") == errno.EIO
    assert read(mounted / "full/layers/3/b")


@pytest.mark.parametrize("options", [(), ("--no-passthrough",)], ids=["passthrough", "own"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__[1:])
def test_hf_files_of_a_damaged_source(own, two_files, damage, options):
    """Byte-identical files, which the kernel may read past the daemon: opens after the damage fail."""
    mounted = own(two_files.path, *options)
    file, other = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    before = read(mounted / "hf" / file)
    assert before == (two_files.path / file).read_bytes()
    damage(two_files.path / file)
    for _ in range(2):
        assert error_of(read, mounted / "hf" / file) == errno.EIO
    assert read(mounted / "hf" / other) == (two_files.path / other).read_bytes()
    assert mounted.stats()["poisoned_sources"] == 1


def test_a_descriptor_of_a_damaged_hf_file(own, two_files):
    """Opened before the damage, it shows the original's bytes (by passthrough), or fails; never other bytes."""
    mounted = own(two_files.path)
    file = two_files.path / "model-00001-of-00002.safetensors"
    with open(mounted / "hf" / file.name, "rb") as held:
        size = file.stat().st_size
        _truncate(file)
        assert error_of(os.pread, held.fileno(), 4096, size - 8192) == errno.EIO or not os.pread(
            held.fileno(), 4096, size - 8192
        )
        try:
            found = os.pread(held.fileno(), 4096, 0)
        except OSError as error:
            assert error.errno == errno.EIO
        else:
            assert found == file.read_bytes()[:4096]


def test_damage_without_any_read_is_noticed(own, two_files):
    """Files that the kernel reads by itself are checked every few seconds."""
    mounted = own(two_files.path)
    file = two_files.path / "model-00001-of-00002.safetensors"
    assert read(mounted / "hf" / file.name) == file.read_bytes()
    if mounted.stats()["passthrough_opens"] == 0:
        pytest.skip("no passthrough here: every read meets the damage")
    _rewrite_in_place(file)
    wait_until(lambda: mounted.stats()["poisoned_sources"] == 1, what="the watcher's look")


def test_mapped_reader_gets_sigbus_not_zeros(own, two_files):
    """A client that maps a file with a removed source dies by SIGBUS, as on any file system; the daemon lives."""
    mounted = own(two_files.path, "--dtype", "bf16", "--materialize", "none")
    target = mounted / "full/layers/3/a"
    script = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)\n"
        "print('mapped', flush=True); sys.stdin.readline()\n"
        "print(sum(held[::4096]))\n"
    )
    client = subprocess.Popen(
        [mounting.shutil.which("python3"), "-c", script, target], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdout.readline() == b"mapped\n"
    _truncate_to_nothing(two_files.path / "model-00001-of-00002.safetensors")
    client.communicate(b"\n", timeout=mounting.TIMEOUT_SECONDS)
    assert client.returncode == -signal.SIGBUS
    assert read(mounted / "full/layers/3/b")
