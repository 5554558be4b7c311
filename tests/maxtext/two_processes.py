#!/usr/bin/env python3
"""Two processes of four devices each restore one mount: what was fetched from the source, and was it right? Run by hand:

    tests/maxtext/two_processes.py [--size 2] [--dir /var/tmp/ckfs-maxtext] [ckfs flags ...]

Every shard's hash is compared with that of the raw file of the same device.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import compare
import llama


def child(items: str, size: str, digests: str, address: str, rank: str) -> None:
    import jax

    jax.distributed.initialize(address, 2, int(rank))
    jax.devices()
    import orbax.checkpoint  # noqa: F401

    started = time.monotonic()
    arrays = compare.restore_orbax(items, llama.SIZES[size])
    jax.block_until_ready(arrays)
    print(json.dumps({"restored": True, "restore": time.monotonic() - started}), flush=True)
    sys.stdin.readline()
    # Numbers of devices skip from process to process; in the mesh they are in order.
    number = {device.id: d for d, device in enumerate(compare.grid().devices.flat)}
    compare.write_digests(arrays, Path(digests))
    found = json.loads(Path(digests).read_text())
    renamed = {f"dev{number[int(name.split('/')[0][3:])]}/{name.split('/')[1]}": shard for name, shard in found.items()}
    Path(digests).write_text(json.dumps(renamed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=llama.SIZES, default="2")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp/ckfs-maxtext"))
    args, flags = parser.parse_known_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    repo, point = args.dir / f"hf-{args.size}", args.dir / "mnt-two"
    point.mkdir(exist_ok=True)
    if not repo.exists():
        llama.write(repo, llama.SIZES[args.size])
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
    mount = [compare.CKFS, "mount", repo, point, "--layout", "maxtext", "--mesh", compare.MESH, "-q", *flags]
    subprocess.run(mount, check=True)
    try:
        environment = os.environ | compare.FLAGS | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        files = [args.dir / f"two-{rank}.json" for rank in range(2)]
        before = compare.load()
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", str(point / "orbax/0/items"), args.size, str(file), address, str(rank)],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        seconds = []
        for process in running:
            for line in process.stdout:
                if line.startswith('{"restored"'):
                    seconds.append(json.loads(line)["restore"])
                    break
        stats = json.loads((point / ".ckfs/stats.json").read_text())
        for process in running:
            compare.finish(process)
        total = sum(file.stat().st_size for file in repo.glob("*.safetensors"))
        fetched = sum(stats["bytes_fetched"].values())
        print(f"restored in {', '.join(f'{s:.1f} s' for s in seconds)} (load {before} to {compare.load()})")
        print(f"fetched {fetched} of {total} bytes of source files: {fetched / total:.4f} times")
        print({name: value for name, value in stats.items() if "tile" in name or "prefetch" in name})
        shards = [json.loads(file.read_text()) for file in files]
        assert not shards[0].keys() & shards[1].keys() and len(shards[0]) == len(shards[1])
        for name, (_, _, digest) in (shards[0] | shards[1]).items():
            device, leaf = name.split("/")
            raw = (point / device / "params" / leaf.replace(".", "/")).read_bytes()
            assert hashlib.sha256(raw).hexdigest() == digest, name
        print(f"{sum(map(len, shards))} shards equal the raw files bit for bit")
    finally:
        subprocess.run([compare.CKFS, "umount", point], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
