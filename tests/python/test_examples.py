"""The scripts and manifests of examples/: what can be run of them without Slurm and Kubernetes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

import mounting
from mounting import ROOT

MANIFESTS = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))


def slurm(script: str, tmp_path, comment: str) -> subprocess.CompletedProcess:
    """Runs a prolog or epilog as Slurm does: by its environment."""
    settings = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_COMMENT": comment, "CKFS": str(mounting.find_ckfs()),
        "CKFS_SLURM_CONFIGS": str(tmp_path / "configs"), "CKFS_SLURM_MOUNTS": str(tmp_path / "run"),
    }  # fmt: skip
    return subprocess.run(
        [ROOT / "examples/slurm" / script], env=os.environ | settings, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=open(tmp_path / "log", "w"), timeout=mounting.TIMEOUT_SECONDS, check=False,
    )  # fmt: skip


def test_slurm_mounts_for_a_job_and_removes_the_mounts(fuse, repo, tmp_path):
    (tmp_path / "configs").mkdir()
    config = f'source = "{repo("llama").path}"\nmesh = "fsdp=2"\n'
    (tmp_path / "configs/llama.toml").write_text(config)
    try:
        assert slurm("prolog.sh", tmp_path, "nothing for us").returncode == 0
        assert not (tmp_path / "run").exists()
        # A name without a configuration is said, and does not drain the node.
        assert slurm("prolog.sh", tmp_path, "night run; ckfs=llama,typo").returncode == 0
        assert "asks for typo" in (tmp_path / "log").read_text()
        assert (tmp_path / "run/7/llama/dev1/embed").stat().st_size > 0
    finally:
        done = slurm("epilog.sh", tmp_path, "")
        left = mounting.mount_points(tmp_path)
        for point in left:
            mounting.detach(point)
    assert done.returncode == 0 and not left
    assert not (tmp_path / "run/7/llama").exists() and not (tmp_path / "run/7/llama.toml").exists()
    assert slurm("epilog.sh", tmp_path, "").returncode == 0


def test_slurm_fails_where_a_mount_fails(fuse, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/gone.toml").write_text('source = "/no/such/directory"\n')
    assert slurm("prolog.sh", tmp_path, "ckfs=gone").returncode != 0
    assert slurm("epilog.sh", tmp_path, "").returncode == 0


def test_a_slurm_job_mounts_trains_compares_and_unmounts(fuse, repo, tmp_path):
    """examples/slurm/train.sh, with an `srun` that runs its command once, as a job of one node does."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ckfs").symlink_to(mounting.find_ckfs())
    (tmp_path / "bin/srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tmp_path / "bin/srun").chmod(0o755)
    job = f"test-{os.getpid()}"
    settings = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": job, "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    point = Path(f"/tmp/ckfs-{job}")
    command = [ROOT / "examples/slurm/train.sh", repo("llama").path, "sh", "-c", 'ls "$mnt/hf" "$mnt/safetensors" > read']
    try:
        subprocess.run(
            command, cwd=tmp_path, env=os.environ | settings, stdin=subprocess.DEVNULL, check=True, timeout=mounting.TIMEOUT_SECONDS
        )
        assert not mounting.mount_points(point)
    finally:
        for left in mounting.mount_points(point):
            mounting.detach(left)
        point.rmdir()
    read = (tmp_path / "read").read_text().split()
    assert "config.json" in read and "dev7.safetensors" in read
    assert " hf/config.json" in (tmp_path / "sums.0").read_text()


def test_the_guide_shows_the_slurm_job_as_it_is():
    assert (ROOT / "examples/slurm/train.sh").read_text() in (ROOT / "src/guide/training.md").read_text()


def words_of(value: object):
    """All lists of words in a manifest, which may be commands."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from words_of(inner)
    elif isinstance(value, list):
        if value and all(isinstance(word, str) for word in value):
            yield value
        for inner in value:
            yield from words_of(inner)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_use_commands_and_flags_that_exist(manifest):
    for document in yaml.safe_load_all(manifest.read_text()):
        for words in words_of(document):
            if words[0] in ("/usr/bin/ckfs", "ckfs"):
                words = words[1:]
            if words[:1] not in (["mount"], ["status"], ["export"], ["csi"]):
                continue
            known = re.findall(r"--[a-z][a-z-]*", mounting.run(words[0], "--help").out + mounting.run("help", "options").out)
            assert [word for word in words[1:] if word.startswith("--") and word not in known] == [], manifest.name


def test_the_configuration_of_the_daemon_set_is_one_of_ckfs(repo, tmp_path):
    documents = yaml.safe_load_all((ROOT / "examples/kubernetes/node.yaml").read_text())
    (text,) = next(document["data"] for document in documents if document["kind"] == "ConfigMap").values()
    assert tomllib.loads(text)["mountpoint"] == "/mounts/llama"
    config = tmp_path / "llama.toml"
    config.write_text(text.replace("/models/llama", str(repo("llama").path)))
    assert "fsdp=8" in mounting.run("plan", "--config", config).out


POD = r"""
node=$PWD/node pod=$PWD/pod
mkdir node pod && mkfifo hold
mount -t tmpfs none "$node" && mount --make-shared "$node" && mkdir "$node/llama" "$pod/above" "$pod/itself"
"$CKFS" mount "$1" "$node/llama"
unshare --mount --propagation slave sh -ec 'mount --rbind "$0" "$1/above"; exec cat hold' "$node" "$pod" &
exec 3>hold  # The pod has its volume when it opens the other end.
in_pod() { nsenter --target $! --mount "$@"; }
bytes_of() { in_pod sh -c 'wc -c <"$0"' "$pod/$1"; }
bytes_of above/llama/full/embed
"$CKFS" umount "$node/llama" && "$CKFS" mount "$1" "$node/llama"
bytes_of above/llama/full/embed

in_pod mount --bind "$node/llama" "$pod/itself"
kill -9 "$(sed -n 's/^ *"pid": \([0-9]*\),*$/\1/p' "$node/llama/.ckfs/stats.json")"
while cat "$node/llama/.ckfs/stats.json"; do :; done >cat.out 2>&1
"$CKFS" mount "$1" "$node/llama"
bytes_of above/llama/full/embed
bytes_of itself/full/embed || true
"$CKFS" umount "$node/llama"
exec 3>&-
"""


def test_pods_take_the_directory_above_the_mount(repo, fuse, tmp_path):
    """In mount namespaces, as the kubelet makes them: the volume follows a restart of the daemon, and that of the mount itself is dead."""
    text = (ROOT / "examples/kubernetes/node.yaml").read_text()
    daemon_set = next(document for document in yaml.safe_load_all(text) if document["kind"] == "DaemonSet")
    volumes = daemon_set["spec"]["template"]["spec"]["volumes"]
    (above,) = (volume["hostPath"]["path"] for volume in volumes if volume["name"] == "mounts")
    assert f"hostPath volume of {above}, the directory above" in text
    assert "`" + above + "`, as a `hostPath`" in (ROOT / "src/guide/training.md").read_text()
    notes = (ROOT / "examples/helm/ckfs/templates/NOTES.txt").read_text()
    assert "hostPath volume of {{ .Values.node.hostPath }}, the directory" in notes
    if os.geteuid() != 0:
        pytest.skip("only root makes such namespaces")
    source = repo("llama")
    inside = ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", POD, "sh", source.path]
    environment = os.environ | {"CKFS": str(mounting.find_ckfs())}
    done = subprocess.run(inside, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    size = str(len(source.tensors["model.embed_tokens.weight"].data))
    assert done.returncode == 0 and done.stdout.splitlines() == [size] * 3, done
    assert "Transport endpoint is not connected" in done.stderr, done


def test_the_formula_of_homebrew_has_the_digests_of_the_archives(tmp_path):
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    digests = {"x86_64": "a" * 64, "aarch64": "b" * 64}
    names = {machine: f"ckfs-{version}-{machine}-linux.tar.gz" for machine in digests}
    (tmp_path / "SHA256SUMS").write_text("".join(f"{digests[machine]}  {names[machine]}\n" for machine in digests))
    subprocess.run([ROOT / ".ci/formula", tmp_path], check=True, timeout=60)
    text = (tmp_path / "ckfs.rb").read_text()
    for machine, processor in (("x86_64", "intel"), ("aarch64", "arm")):
        part = text[text.index(f"on_{processor} do") :]
        url, digest = re.findall(r'(?:url|sha256) "(.*)"', part)[:2]
        assert url.endswith(f"/releases/download/v{version}/{names[machine]}") and digest == digests[machine]


def test_the_image_of_a_release_has_the_programs_of_both_archives(tmp_path):
    package = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    version = package["version"]
    programs = {"x86_64": b"of x86-64", "aarch64": b"of aarch64"}
    for machine, program in programs.items():
        name = f"ckfs-{version}-{machine}-linux"
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as archive:
            for file, data in (("ckfs", program), ("LICENSE", b"L"), ("THIRD-PARTY.txt", b"T"), ("README.md", b"R")):
                info = tarfile.TarInfo(f"{name}/{file}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    image = tmp_path / f"ckfs-{version}-oci.tar"
    made = []
    for _ in range(2):
        subprocess.run([ROOT / ".ci/image", tmp_path], check=True, timeout=60)
        made.append(image.read_bytes())
    assert made[0] == made[1], "the same bytes each time"
    with tarfile.open(image) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}

    def blob(descriptor):
        algorithm, digest = descriptor["digest"].split(":")
        data = files.pop(f"blobs/{algorithm}/{digest}")
        assert hashlib.new(algorithm, data).hexdigest() == digest and len(data) == descriptor["size"]
        return data

    # Docker's own list names the same blobs, for image stores of Docker that know no layout of OCI.
    by_docker = {listed["RepoTags"][0]: listed for listed in json.loads(files.pop("manifest.json"))}
    (top,) = json.loads(files.pop("index.json"))["manifests"]
    assert top["annotations"]["org.opencontainers.image.ref.name"] == version
    found = {}
    for descriptor in json.loads(blob(top))["manifests"]:
        manifest = json.loads(blob(descriptor))
        config = json.loads(blob(manifest["config"]))
        assert {key: config[key] for key in descriptor["platform"]} == descriptor["platform"]
        (layer,) = manifest["layers"]
        listed = by_docker.pop(f"ckfs:{version}-{config['architecture']}")
        paths = [f"blobs/{named['digest'].replace(':', '/')}" for named in (manifest["config"], layer)]
        assert [listed["Config"], *listed["Layers"]] == paths
        tar = gzip.decompress(blob(layer))
        assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(tar).hexdigest()}"]
        with tarfile.open(fileobj=io.BytesIO(tar)) as tree:
            entry = tree.getmember(config["config"]["Entrypoint"][0].lstrip("/"))
            assert entry.mode == 0o755 and tree.getmember("tmp").mode == 0o1777
            found[descriptor["platform"]["architecture"]] = tree.extractfile(entry).read()
            # Without them no Hub and no bucket is trusted.
            certificates = tree.extractfile("etc/ssl/certs/ca-certificates.crt").read()
            assert certificates.count(b"BEGIN CERTIFICATE") > 10
    assert not by_docker and found == {"amd64": programs["x86_64"], "arm64": programs["aarch64"]}
    assert files.keys() == {"oci-layout"}, "each blob is named once"


def test_one_place_is_named_as_that_of_the_project():
    package = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    assert package["homepage"] == package["repository"]


def test_binstall_finds_the_archives_that_a_release_makes():
    """Names and folders of `.ci/release`, as the templates of `[package.metadata.binstall]` say them."""
    metadata = tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]["metadata"]["binstall"]
    script = (ROOT / ".ci/release").read_text()
    words = {"version": "$version", "target-arch": "$machine", "repo": "", "bin": "ckfs", "binary-ext": ""}
    said = {key: re.sub(r"{ ([a-z-]+) }", lambda found: words[found[1]], metadata[key]) for key in ("pkg-url", "bin-dir")}
    folder = re.search(r"^\s+name=(\S+)$", script, flags=re.M)[1]
    assert said["pkg-url"] == f"/releases/download/v$version/{folder}.tar.gz" and said["bin-dir"] == f"{folder}/ckfs"
    assert metadata["pkg-fmt"] == "tgz"


def test_the_chart_uses_commands_and_flags_that_exist():
    for template, command in (("node", "mount"), ("serve", "serve")):
        text = (ROOT / f"examples/helm/ckfs/templates/{template}.yaml").read_text()
        help_texts = [mounting.run(*words).out for words in ((command, "--help"), ("status", "--help"), ("help", "options"))]
        known = re.findall(r"--[a-z][a-z-]*", "".join(help_texts))
        used = re.findall(r"(?:^ *- |, )(--[a-z][a-z-]*)", text, flags=re.M)
        assert len(used) > 4 and set(used) <= set(known), set(used) - set(known)
    values = yaml.safe_load((ROOT / "examples/helm/ckfs/values.yaml").read_text())
    assert tomllib.loads(values["config"])["source"] == "/models/llama"
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    chart = yaml.safe_load((ROOT / "examples/helm/ckfs/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
