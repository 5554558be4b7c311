"""MaxText's layout restored by two processes of four devices each, from one mount."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mounting
from servers import free_port

pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")
HERE = Path(__file__).parent
MESH = "fsdp=4,tensor=2"


def fetched(mounted: mounting.Mount) -> int:
    return sum(mounted.stats()["bytes_fetched"].values())


def test_each_byte_is_fetched_once_by_both_together(own, repo, tmp_path):
    """Split arrays by their chunks; arrays that both need, such as norms, through the kernel's page cache."""
    source = repo("llama")
    mounted = own(source.path, "--mesh", MESH, "--layout", "maxtext")
    rows = [row for row in mounted.manifest()["tensors"] if row["bundled"]]
    before = fetched(mounted)
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE),
    }  # fmt: skip
    command = [sys.executable, str(HERE / "orbax_process.py"), str(mounted.point), MESH, f"127.0.0.1:{free_port()}"]
    results = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    running = [
        subprocess.Popen([*command, str(rank), str(result), "params"], env=environment)
        for rank, result in enumerate(results)
    ]
    try:
        for process in running:
            process.wait(timeout=180)
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    total = sum(file.stat().st_size for file in source.path.glob("*.safetensors"))
    assert fetched(mounted) - before <= 1.02 * total
    first, second = (json.loads(result.read_text())["shards"] for result in results)
    assert len(first) == len(second) == 4 * len(rows) and not first.keys() & second.keys()
    for path, digest in (first | second).items():
        assert hashlib.sha256((mounted / path).read_bytes()).hexdigest() == digest, path
