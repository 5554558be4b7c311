#!/usr/bin/env python3
"""Three ways from a Hugging Face repository to MaxText's weights on 8 devices, in one table. Run by hand:

    tests/maxtext/compare.py [--size 2] [--dir /var/tmp/ckfs-maxtext] [--keep]

(a) MaxText's converter `to_maxtext`, unmodified from PyPI, then an Orbax restore of its output;
(b) `ckfs mount --layout maxtext`, then the same Orbax restore of the mount;
(c) Orbax's own reader of safetensors, then the same transforms in JAX, jitted.

Each way ends when all arrays are on the devices (8 CPU devices, mesh fsdp=4,tensor=2), in the converter's types. Time is that
of whole processes from their start, interpreter and imports included. Memory is the largest sum over all processes of a way at
one moment: resident, and of that the anonymous part (mapped source files count as resident in (b) but are page cache). Written
bytes are those that the processes caused, by the kernel's account. Files are in the page cache at the start of each way.
Afterwards every device's shard is hashed; the hashes of (a) and (b), and of (c), are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import llama

HERE = Path(__file__).resolve().parent
MESH = "fsdp=4,tensor=2"
CKFS = os.environ.get("CKFS_BIN", str(HERE.parents[1] / "target/release/ckfs"))
FLAGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}


# ---- The processes that restore ----


def grid():
    import jax

    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def nested(flat: dict[str, object]) -> dict:
    tree: dict = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return tree


def at(tree: dict, name: str) -> object:
    for key in name.split("."):
        tree = tree[key]
    return tree


def restore_orbax(items: str, size: llama.Size) -> dict[str, object]:
    """The restore of (a) and (b), with the same target."""
    import jax
    import orbax.checkpoint as ocp

    def leaf(shape: tuple, spec: tuple) -> object:
        sharding = jax.sharding.NamedSharding(grid(), jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, llama.BF16, sharding=sharding)

    target = nested({f"params.params.{name}": leaf(*of) for name, of in size.leaves().items()})
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=96))
    args = ocp.args.PyTreeRestore(
        item=target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    restored = checkpointer.restore(items, args=args)
    return {name: at(restored, f"params.params.{name}") for name in size.leaves()}


def restore_safetensors(repo: str, size: llama.Size) -> dict[str, object]:
    """(c): Orbax reads each tensor in the sharding that its leaf needs, so that the transforms move no data between devices."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint.experimental.v1 as ocp

    P, head = jax.sharding.PartitionSpec, llama.HEAD
    mesh = grid()

    def interleaved(x):
        return jnp.stack([x[..., : head // 2], x[..., head // 2 :]], axis=-1).reshape(x.shape)

    def scaled(x):
        return (x.astype(jnp.float32) * jnp.float32(1 / head**0.5)).astype(x.dtype)

    def heads(x):
        return x.T.reshape(size.hidden, -1, head)

    layer: dict[str, tuple[str, tuple, Callable]] = {
        "self_attention.query.kernel": ("self_attn.q_proj", ("tensor", "fsdp"), lambda x: scaled(interleaved(heads(x)))),
        "self_attention.key.kernel": ("self_attn.k_proj", ("tensor", "fsdp"), lambda x: interleaved(heads(x))),
        "self_attention.value.kernel": ("self_attn.v_proj", ("tensor", "fsdp"), heads),
        "self_attention.out.kernel": ("self_attn.o_proj", ("fsdp", "tensor"), lambda x: x.T.reshape(-1, head, size.hidden)),
        "mlp.wi_0.kernel": ("mlp.gate_proj", ("tensor", "fsdp"), lambda x: x.T),
        "mlp.wi_1.kernel": ("mlp.up_proj", ("tensor", "fsdp"), lambda x: x.T),
        "mlp.wo.kernel": ("mlp.down_proj", ("fsdp", "tensor"), lambda x: x.T),
        "pre_self_attention_layer_norm.scale": ("input_layernorm", ("tensor",), lambda x: x),
        "post_self_attention_layer_norm.scale": ("post_attention_layernorm", ("tensor",), lambda x: x),
    }
    single: dict[str, tuple[str, tuple, Callable]] = {
        "token_embedder.embedding": ("model.embed_tokens.weight", ("tensor", "fsdp"), lambda x: x),
        "decoder.decoder_norm.scale": ("model.norm.weight", ("tensor",), lambda x: x),
        "decoder.logits_dense.kernel": ("lm_head.weight", ("tensor", "fsdp"), lambda x: x.T),
    }
    sources: dict[str, tuple[list[str], tuple, Callable]] = {
        name: ([source], spec, transform) for name, (source, spec, transform) in single.items()
    }
    for name, (source, spec, transform) in layer.items():
        names = [f"model.layers.{n}.{source}.weight" for n in range(llama.LAYERS)]
        sources[f"decoder.layers.{name}"] = (names, spec, transform)
    shapes = {f"{name}.weight": shape for name, shape in size.layer().items()}
    ends = {"model.embed_tokens.weight": (size.vocab, size.hidden), "lm_head.weight": (size.vocab, size.hidden)}

    def shape_of(source: str) -> tuple[int, ...]:
        short = ".".join(source.split(".")[3:])
        return shapes.get(short) or ends.get(source) or (size.hidden,)

    target = {
        source: jax.ShapeDtypeStruct(shape_of(source), llama.BF16, sharding=jax.sharding.NamedSharding(mesh, P(*spec)))
        for names, spec, _ in sources.values()
        for source in names
    }
    with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
        loaded = ocp.load(repo, target)
    out = {}
    for name, (names, _, transform) in sources.items():
        _, spec = size.leaves()[name]
        stack = name.startswith("decoder.layers.")

        def build(parts, transform=transform, stack=stack):
            parts = [transform(part) for part in parts]
            return jnp.stack(parts, axis=1) if stack else parts[0]

        sharding = jax.sharding.NamedSharding(mesh, P(*spec))
        out[name] = jax.jit(build, out_shardings=sharding)([loaded.pop(source) for source in names])
        out[name].block_until_ready()
    return out


def child(kind: str, path: str, size: str, digests: str) -> None:
    """Restores, reports it on standard output, then writes the hash of each device's shard of each leaf."""
    started = time.monotonic()
    import jax

    jax.devices()
    import orbax.checkpoint  # noqa: F401
    import orbax.checkpoint.experimental.v1  # noqa: F401

    imported = time.monotonic()
    restore = {"orbax": restore_orbax, "safetensors": restore_safetensors}[kind]
    arrays = restore(path, llama.SIZES[size])
    jax.block_until_ready(arrays)
    done = time.monotonic()
    print(json.dumps({"restored": True, "import": imported - started, "restore": done - imported}), flush=True)
    sys.stdin.readline()
    write_digests(arrays, Path(digests))


def write_digests(arrays: dict[str, object], path: Path) -> None:
    import hashlib

    import numpy as np

    out = {}
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            data = np.asarray(shard.data)
            digest = hashlib.sha256(np.ascontiguousarray(data).view(np.uint16)).hexdigest()
            out[f"dev{shard.device.id}/{name}"] = [str(data.dtype), list(data.shape), digest]
    path.write_text(json.dumps(out))


# ---- Measuring ----


class Watch:
    """Sums memory and written bytes over the descendants of this process and over other given processes, until stopped."""

    def __init__(self) -> None:
        self.others: list[int] = []
        self.rss = self.anonymous = 0
        self.wrote: dict[int, int] = {}
        self.began = time.monotonic()
        self.seconds = 0.0
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def loop(self) -> None:
        while not self.stopping.wait(0.03):
            self.sample()

    def sample(self) -> None:
        rss = anonymous = 0
        for pid in [*descendants(os.getpid()), *self.others]:
            try:
                status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                rss += int(status["VmRSS"].split()[0])
                anonymous += int(status["RssAnon"].split()[0]) + int(status["RssShmem"].split()[0])
                io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
                self.wrote[pid] = int(io["write_bytes"])
            except (OSError, KeyError):
                continue
        self.rss, self.anonymous = max(self.rss, rss), max(self.anonymous, anonymous)

    def stop(self) -> None:
        self.seconds = time.monotonic() - self.began
        self.sample()
        self.stopping.set()
        self.thread.join()

    def figures(self) -> dict[str, float]:
        return {
            "seconds": self.seconds,
            "rss": self.rss * 1024,
            "anonymous": self.anonymous * 1024,
            "written": sum(self.wrote.values()),
        }


def descendants(root: int) -> Iterator[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    todo = list(parents.get(root, []))
    while todo:
        pid = todo.pop()
        yield pid
        todo += parents.get(pid, [])


def restoring(kind: str, path: Path, size: str, digests: Path) -> tuple[subprocess.Popen, dict]:
    """Starts a process that restores, and waits for the end of the restore."""
    command = [sys.executable, str(HERE / "compare.py"), "--child", kind, str(path), size, str(digests)]
    running = subprocess.Popen(
        command, env=os.environ | FLAGS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    errors: list[str] = []
    threading.Thread(target=lambda: errors.extend(running.stderr), daemon=True).start()
    for line in running.stdout:
        if line.startswith('{"restored"'):
            return running, json.loads(line)
    running.wait()
    time.sleep(0.2)
    raise RuntimeError(f"restore failed:\n{''.join(errors)[-4000:]}")


def finish(running: subprocess.Popen) -> None:
    running.stdin.write("\n")
    running.stdin.close()
    if running.wait():
        raise RuntimeError("hashing failed")


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def converted(work: Path, repo: Path, size: str) -> dict:
    """(a)"""
    out = work / "converted"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable, "-m", "maxtext.checkpoint_conversion.to_maxtext", "model_name=llama3.1-8b",
        f"--hf_model_path={repo}", f"base_output_directory={out}", "scan_layers=true", "hardware=cpu",
        "skip_jax_distributed_system=true", "use_multimodal=false", *llama.SIZES[size].settings(),
    ]  # fmt: skip
    before, watch = load(), Watch()
    with open(work / "to_maxtext.log", "w") as log:
        subprocess.run(command, env=os.environ | FLAGS, stdout=log, stderr=log, check=True, cwd=work)
    convert = time.monotonic() - watch.began
    running, phases = restoring("orbax", out / "0/items", size, work / "a.json")
    watch.stop()
    finish(running)
    disk = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    return watch.figures() | {"convert": convert, "kept": disk, "restore": phases["restore"], "load": f"{before}-{load()}"}


def mounted(work: Path, repo: Path, size: str) -> dict:
    """(b)"""
    point = work / "mnt"
    point.mkdir(exist_ok=True)
    before, watch = load(), Watch()
    subprocess.run([CKFS, "mount", str(repo), str(point), "--layout", "maxtext", "--mesh", MESH, "-q"], check=True)
    try:
        watch.others.append(daemon(point))
        ready = time.monotonic() - watch.began
        running, phases = restoring("orbax", point / "orbax/0/items", size, work / "b.json")
        watch.stop()
        stats = json.loads((point / ".ckfs/stats.json").read_text())
        finish(running)
    finally:
        subprocess.run([CKFS, "umount", str(point)], check=True)
    fetched = sum(stats["bytes_fetched"].values())
    return watch.figures() | {
        "mount": ready, "kept": 0, "restore": phases["restore"], "fetched": fetched, "load": f"{before}-{load()}",
    }  # fmt: skip


def daemon(point: Path) -> int:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(point).encode() in words and words[0].endswith(b"ckfs"):
                return int(entry.name)
    raise RuntimeError(f"no process serves {point}")


def jitted(work: Path, repo: Path, size: str) -> dict:
    """(c)"""
    before, watch = load(), Watch()
    running, phases = restoring("safetensors", repo, size, work / "c.json")
    watch.stop()
    finish(running)
    return watch.figures() | {"kept": 0, "restore": phases["restore"], "load": f"{before}-{load()}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=llama.SIZES, default="2", help="about how many GB of weights")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp/ckfs-maxtext"))
    parser.add_argument("--ways", default="abc")
    parser.add_argument("--keep", action="store_true", help="keeps the repository and what was converted")
    args = parser.parse_args()
    work = args.dir
    work.mkdir(parents=True, exist_ok=True)
    repo = work / f"hf-{args.size}"
    total = sum(f.stat().st_size for f in repo.glob("*.safetensors")) if repo.exists() else llama.write(repo, llama.SIZES[args.size])
    print(f"repository: {total / 1e9:.2f} GB of bf16, {os.cpu_count()} cores", flush=True)
    rows = {}
    for way, run in {"a": converted, "b": mounted, "c": jitted}.items():
        if way in args.ways:
            for file in repo.iterdir():
                file.read_bytes()
            rows[way] = run(work, repo, args.size)
            print(way, json.dumps(rows[way]), flush=True)
    print("\n| way | seconds | of that, the restore | peak memory, GB (anonymous) | written, GB | left on disk, GB | load |")
    print("|---|---|---|---|---|---|---|")
    for way, row in rows.items():
        memory = f"{row['rss'] / 1e9:.2f} ({row['anonymous'] / 1e9:.2f})"
        written, kept = row["written"] / 1e9, row["kept"] / 1e9
        print(f"| {way} | {row['seconds']:.1f} | {row['restore']:.1f} | {memory} | {written:.3f} | {kept:.2f} | {row['load']} |")
    digests = {way: json.loads((work / f"{way}.json").read_text()) for way in rows}
    first = next(iter(digests))
    leaves = llama.SIZES[args.size].leaves()
    for way in list(digests)[1:]:
        assert digests[way].keys() == digests[first].keys() and len(digests[way]) == 8 * len(leaves)
        other = [name for name, shard in digests[way].items() if shard != digests[first][name]]
        print(f"{first} and {way}: {len(digests[way]) - len(other)} of {len(digests[way])} shards are equal bit for bit", other[:8])
    if not args.keep:
        shutil.rmtree(repo)
        shutil.rmtree(work / "converted", ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
