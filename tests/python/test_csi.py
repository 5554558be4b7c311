"""The node plugin of Kubernetes: calls as the kubelet makes them, pods played by mount namespaces."""

from __future__ import annotations

import array
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

import mounting
from csi_client import Client
from mounting import find_ckfs, mount_points, run, wait_until

MOUNT = {"mount": {}, "access_mode": {"mode": 1}}


class Plugin:
    """A plugin, its state directory, and the directory of the kubelet."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.state = directory, directory / "state"
        self.socket, self.pods = directory / "csi.sock", directory / "pods"
        self.pods.mkdir()
        self.processes: list[subprocess.Popen] = []
        self.client: Client | None = None
        self.log = directory / "plugin.log"
        self.env = {**os.environ, "HOME": str(directory), "CKFS_LOG": "ckfs=info"}

    def spawn(self, *words: object) -> subprocess.Popen:
        with self.log.open("ab") as log:
            process = subprocess.Popen([find_ckfs(), "csi", *map(str, words)], stderr=log, env=self.env)
        self.processes.append(process)
        return process

    def start(self, *flags: object) -> subprocess.Popen:
        process = self.spawn("--endpoint", f"unix://{self.socket}", "--node", "n1", "--state", self.state, *flags)
        if self.client is not None:
            self.client.close()
        wait_until(lambda: self.answers(process), what="the plugin listens")
        self.client = Client(self.socket)
        return process

    def answers(self, process: subprocess.Popen) -> bool:
        assert process.poll() is None, self.log.read_text()
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(str(self.socket)) == 0

    def target(self, name: str) -> Path:
        target = self.pods / name / "mount"
        target.parent.mkdir(exist_ok=True)
        return target

    def fields(self, name: str, attributes: dict, secrets: dict | None = None) -> dict:
        pod = {"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": name}
        context = {**{key: str(value) for key, value in attributes.items()}, **pod}
        target = str(self.target(name))
        return {"volume_id": name, "target_path": target, "volume_capability": MOUNT, "volume_context": context, "secrets": secrets or {}}

    def publish(self, name: str, attributes: dict, secrets: dict | None = None) -> Path:
        self.client.call("Node/NodePublishVolume", **self.fields(name, attributes, secrets))
        return self.target(name)

    def unpublish(self, name: str) -> None:
        self.client.call("Node/NodeUnpublishVolume", volume_id=name, target_path=str(self.target(name)))

    def pid(self, target: Path) -> int:
        return json.loads((target / ".ckfs/stats.json").read_text())["pid"]

    def check_nothing_left(self) -> None:
        assert mount_points(self.directory) == []
        assert [*(self.state / "mounts").iterdir(), *(self.state / "volumes").iterdir()] == []
        wait_until(lambda: not processes_of(self.state), what="the end of daemons and keepers")
        assert not any(pod.iterdir() for pod in [*self.pods.iterdir()] if (pod / "mount").exists())


def processes_of(directory: Path) -> list[str]:
    return subprocess.run(["pgrep", "-f", f"mount --config {directory}"], capture_output=True, text=True, check=False).stdout.split()


@pytest.fixture
def plugin(tmp_path, fuse):
    if os.getuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("not root, and CI=true")
        pytest.skip("not root")
    plugin = Plugin(tmp_path)
    yield plugin
    for process in plugin.processes:
        process.kill()
        process.wait()
    for point in mounting.mount_points(tmp_path):
        mounting.detach(point)


def test_a_volume_is_published_read_and_taken_away(plugin, repo):
    plugin.start()
    source = repo("llama").path
    attributes = {"source": source, "mesh": "fsdp=2", "dtype": "bf16", "even": "true"}
    target = plugin.publish("pod1", attributes)
    run("export", source, plugin.directory / "expected", "--mesh", "fsdp=2", "--dtype", "bf16")
    for file in (plugin.directory / "expected/dev1").rglob("*"):
        if file.is_file():
            assert (target / "dev1" / file.relative_to(plugin.directory / "expected/dev1")).read_bytes() == file.read_bytes()
    with pytest.raises(OSError):
        (target / "new").write_text("")
    # Again, and beside it another pod of the same configuration: one daemon. One of another configuration has its own.
    plugin.publish("pod1", attributes)
    assert len(mount_points(plugin.pods)) == 1
    second, other = plugin.publish("pod2", attributes), plugin.publish("pod3", {**attributes, "dtype": "f32"})
    assert plugin.pid(second) == plugin.pid(target) != plugin.pid(other)
    code, why = plugin.client.error("Node/NodePublishVolume", **plugin.fields("pod1", {"source": source}))
    assert code == "ALREADY_EXISTS" and "with other attributes" in why
    stats = plugin.client.call("Node/NodeGetVolumeStats", volume_id="pod1", volume_path=str(target))
    assert {usage.unit for usage in stats.usage} == {1, 2} and all(usage.total > 0 for usage in stats.usage)
    assert not stats.volume_condition.abnormal and stats.volume_condition.message == "it answers"
    for name in ("pod1", "pod1", "pod3"):
        plugin.unpublish(name)
    assert plugin.client.error("Node/NodeGetVolumeStats", volume_id="pod1", volume_path=str(target))[0] == "NOT_FOUND"
    assert (second / "full/embed").stat().st_size > 0
    plugin.unpublish("pod2")
    plugin.check_nothing_left()


def test_what_is_wrong_is_the_message_and_has_a_code(plugin, repo):
    plugin.start("--root", repo("llama").path.parent)
    source = repo("llama").path
    for attributes, secrets, expected, said in [
        ({"mesh": "fsdp=2"}, {}, "INVALID_ARGUMENT", "attribute source: expected"),
        ({"source": source, "dtpye": "bf16"}, {}, "INVALID_ARGUMENT", "did you mean `dtype`"),
        ({"source": source, "on_step": "id"}, {}, "INVALID_ARGUMENT", "the node decides it"),
        ({"source": "/etc"}, {}, "INVALID_ARGUMENT", "a path must be below"),
        ({"source": source.parent / "no such repository"}, {}, "NOT_FOUND", "no such file or directory"),
        ({"source": source, "layout": "maxtxt"}, {}, "INVALID_ARGUMENT", "maxtext"),
        ({"source": source, "mesh": "other=2"}, {}, "FAILED_PRECONDITION", "other"),
        ({"source": source}, {"LD_PRELOAD": "hidden"}, "INVALID_ARGUMENT", "unknown key \"LD_PRELOAD\""),
    ]:
        code, why = plugin.client.error("Node/NodePublishVolume", **plugin.fields("pod1", attributes, secrets))
        assert code == expected and said.lower() in why.lower(), (attributes, code, why)
        assert "hidden" not in plugin.log.read_text()
    assert plugin.client.error("Controller/CreateVolume")[0] == "UNIMPLEMENTED"
    assert plugin.client.error("Node/NodeStageVolume")[0] == "UNIMPLEMENTED"
    plugin.check_nothing_left()


def test_secrets_are_of_the_daemon_alone(plugin, repo):
    plugin.env["HF_TOKEN"] = "of-the-node"
    plugin.start()
    attributes = {"source": repo("llama").path}
    first, second, none = (
        plugin.publish(name, attributes, secrets)
        for name, secrets in [("a", {"token": "hidden-1"}), ("b", {"token": "hidden-2", "AWS_REGION": "x"}), ("c", {})]
    )
    pids = [plugin.pid(target) for target in (first, second, none)]
    assert len(set(pids)) == 3
    variables = [dict(row.split(b"=", 1) for row in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if row) for pid in pids]
    assert [found.get(b"HF_TOKEN") for found in variables] == [b"hidden-1", b"hidden-2", b"of-the-node"]
    assert variables[1][b"AWS_REGION"] == b"x"
    for pid in pids:
        assert b"hidden" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for directory, below, names in os.walk(plugin.state):
        below[:] = [name for name in below if name != "mnt"]
        for file in [Path(directory) / name for name in names]:
            assert not file.is_file() or b"hidden" not in file.read_bytes(), file
    assert "hidden" not in plugin.log.read_text()
    for name in ("a", "b", "c"):
        plugin.unpublish(name)
    plugin.check_nothing_left()


POD = """
import os, sys
target = sys.argv[1]
file = open(target + "/full/embed", "rb", buffering=0)
expected = file.read()
print("reads", flush=True)
for _ in sys.stdin:
    assert os.pread(file.fileno(), len(expected), 0) == expected
    with open(target + "/full/final_norm", "rb") as other:
        assert other.read()
    print("reads", flush=True)
"""


@pytest.mark.parametrize("outlives", ["plugin", "mounter"])
def test_a_pod_reads_on_when_the_plugin_is_killed_and_replaced(plugin, repo, outlives):
    flags = []
    if outlives == "mounter":
        # The plugin's container ends with all its processes: daemons are those of another.
        mounter = plugin.directory / "mounter.sock"
        plugin.spawn("--mount-for", mounter)
        wait_until(mounter.exists, what="the mounter listens")
        flags = ["--mounter", mounter]
    first = plugin.start(*flags)
    attributes = {"source": repo("llama").path, "mesh": "fsdp=2"}
    target = plugin.publish("pod1", attributes)
    words = ["unshare", "--mount", "--propagation", "slave", "python3", "-c", POD, target]
    pod = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def reads() -> None:
        assert pod.stdout.readline() == "reads\n"

    def goes_on() -> None:
        pod.stdin.write("again\n")
        reads()

    reads()
    first.send_signal(signal.SIGKILL)
    first.wait()
    goes_on()
    plugin.start(*flags)
    goes_on()
    daemon = plugin.pid(target)
    # The next plugin goes on with what is mounted.
    assert plugin.pid(plugin.publish("pod2", attributes)) == daemon
    plugin.publish("pod1", attributes)
    if resends():
        os.kill(daemon, signal.SIGKILL)
        goes_on()
        assert plugin.pid(target) != daemon
    pod.stdin.close()
    assert pod.wait(mounting.TIMEOUT_SECONDS) == 0
    plugin.unpublish("pod1")
    plugin.unpublish("pod2")
    plugin.check_nothing_left()


def resends() -> bool:
    return tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 9)


def test_a_daemon_that_is_gone_with_its_keeper_is_started_again(plugin, repo):
    first = plugin.start()
    target = plugin.publish("pod1", {"source": repo("llama").path})
    expected = (target / "full/embed").read_bytes()
    first.kill()
    first.wait()
    # As when a node's container with all its processes ends.
    for pid in processes_of(plugin.state):
        os.kill(int(pid), signal.SIGSTOP)
    for pid in processes_of(plugin.state):
        os.kill(int(pid), signal.SIGKILL)
    wait_until(lambda: not processes_of(plugin.state), what="the end of all processes")
    plugin.start()
    wait_until(lambda: mounting.error_of((target / "full/embed").read_bytes) is None, what="it is mounted again")
    assert (target / "full/embed").read_bytes() == expected
    plugin.unpublish("pod1")
    plugin.check_nothing_left()


def test_the_plugin_of_a_live_socket_is_not_replaced(plugin):
    plugin.start()
    words = ["csi", "--endpoint", f"unix://{plugin.socket}", "--node", "n2", "--state", plugin.state]
    assert "another process answers there" in run(*words, expect=1, env=plugin.env).err
    info = plugin.client.call("Identity/GetPluginInfo")
    assert info.name == "csi.ckfs" and info.vendor_version in run("--version").out
    assert plugin.client.call("Node/NodeGetInfo").node_id == "n1"
    process = plugin.processes[0]
    process.terminate()
    assert process.wait(mounting.TIMEOUT_SECONDS) == 0 and not plugin.socket.exists()


@pytest.mark.skipif("CKFS_CSI_SANITY" not in os.environ, reason="CKFS_CSI_SANITY names no csi-sanity of kubernetes-csi/csi-test")
def test_csi_sanity(plugin, repo):
    plugin.start()
    # Some cases of nodes make their volume by a controller, which this driver has none of: it is played.
    played = f"unix://{plugin.directory}/c.sock"
    controller = plugin.client.controller(played, {"source": str(repo("llama").path), "mesh": "fsdp=2"})
    program = [os.environ["CKFS_CSI_SANITY"], "--csi.endpoint", f"unix://{plugin.socket}", "--csi.mountdir", plugin.directory / "sanity"]
    for service, more in [("Identity Service", []), ("Node Service", ["--csi.controllerendpoint", played])]:
        words = [*program, *more, "--ginkgo.focus", service, "--ginkgo.no-color"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=mounting.TIMEOUT_SECONDS, check=False)
        assert done.returncode == 0, done.stdout[-8000:]
        print(done.stdout[-300:])
    controller.stop(None)
    plugin.check_nothing_left()


NOBODY = 65534


class Driver:
    """What a node plugin with sidecars does: it mounts, listens in a directory of the pod, and passes the descriptor."""

    def __init__(self, directory: Path, name: str, listens: str) -> None:
        self.point, self.place = directory / f"mnt-{name}", directory / "shared/.volumes" / name
        self.point.mkdir()
        self.place.mkdir(parents=True)
        self.device = os.open("/dev/fuse", os.O_RDWR)
        data = f"fd={self.device},rootmode=40000,user_id={NOBODY},group_id={NOBODY},allow_other,default_permissions"
        libc = ctypes.CDLL(None, use_errno=True)
        names = [text.encode() for text in ("driver", str(self.point), "fuse")]
        assert libc.mount(*names, 6, data.encode()) == 0, os.strerror(ctypes.get_errno())
        self.socket = socket.socket(socket.AF_UNIX)
        with tempfile.TemporaryDirectory() as short:
            (Path(short) / "d").symlink_to(self.place)
            self.socket.bind(f"{short}/d/{listens}")
        self.socket.listen()
        for path in (self.place, self.place / listens):
            os.chown(path, NOBODY, NOBODY)

    def send(self, message: bytes, copies: int) -> None:
        connection, _ = self.socket.accept()
        fds = array.array("i", [self.device] * copies)
        connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        connection.close()
        self.socket.close()
        os.close(self.device)


@pytest.mark.parametrize("protocol", ["gcs", "hf"])
def test_a_sidecar_serves_what_a_driver_mounts(plugin, repo, tmp_path, protocol):
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_mode & 0o5 != 0o5 and directory.is_relative_to(tempfile.gettempdir()):
            directory.chmod(directory.stat().st_mode | 0o55)
    source = tmp_path / "model"
    shutil.copytree(repo("llama").path, source)
    program = tmp_path / "ckfs"
    shutil.copy(find_ckfs(), program)
    good, bad = (Driver(tmp_path, name, {"gcs": "socket", "hf": "s"}[protocol]) for name in ("good", "bad"))
    os.chown(tmp_path / "shared", NOBODY, NOBODY)

    def options(key: str) -> list[str]:
        return [f"ckfs:source={source}", f"ckfs:{key}=fsdp=2", "ckfs:dtype=f32"]

    if protocol == "hf":
        for driver, key in ((good, "mesh"), (bad, "mush")):
            words = ["hf-mount-fuse-sidecar", "--read-only", *[f"--{option}" for option in options(key)], "repo", "org/name", "/tmp"]
            (driver.place / "args").write_text("\n".join(words) + "\n")
    env = {**os.environ, "HOME": str(tmp_path), "CKFS_LOG": ""}
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--bounding-set=-all", "--no-new-privs"]
    sidecar = subprocess.Popen([*user, program, "csi", "--sidecar", tmp_path / "shared"], env=env)
    plugin.processes.append(sidecar)
    for driver, key in ((good, "mesh"), (bad, "mush")):
        message = json.dumps({"volumeName": "v", "bucketName": "models", "options": ["implicit-dirs", *options(key)]}).encode()
        driver.send(message if protocol == "gcs" else b"\0", 1 if protocol == "gcs" else 4)
    run("export", source, tmp_path / "expected", "--mesh", "fsdp=2", "--dtype", "f32")
    for name in ("dev0/embed", "dev1/embed", "full/final_norm"):
        assert (good.point / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    wait_until((bad.place / "error").exists, what="the reason")
    assert "did you mean `mesh`" in (bad.place / "error").read_text()
    sidecar.terminate()
    assert sidecar.wait(mounting.TIMEOUT_SECONDS) == 0


def test_the_entrypoint_of_generic_drivers_mounts_until_it_is_ended(fuse, repo, tmp_path):
    script = mounting.ROOT / "examples/kubernetes/fuse-entrypoint.sh"
    env = {**os.environ, "CKFS": str(find_ckfs()), "CKFS_OPTIONS": "dtype=f32", "HOME": str(tmp_path)}
    point = tmp_path / "mnt"
    process = subprocess.Popen([script, repo("llama").path, point, "mesh=fsdp=2,even"], env=env, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or (point / "dev1/embed").exists(), what="it is mounted")
        config = (point / ".ckfs/config.toml").read_text()
        assert 'dtype = "float32"' in config and "even = true" in config
        process.terminate()
        assert process.wait(mounting.TIMEOUT_SECONDS) == 0, process.stderr.read()
        assert mounting.mount_type(point) is None
    finally:
        process.kill()
        mounting.detach(point)
    assert subprocess.run([script, "only"], env=env, capture_output=True, check=False).returncode == 2


def test_the_chart_uses_flags_that_exist():
    text = (mounting.ROOT / "examples/helm/ckfs/templates/csi.yaml").read_text()
    found = set(re.findall(r"^ +- (--[a-z-]+)=", text, re.MULTILINE)) | {"--mount-for"}
    assert len(found) > 5 and found <= set(re.findall(r"--[a-z][a-z-]*", run("csi", "--help").out))
