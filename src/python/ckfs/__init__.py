"""Checkpoints as a training program wants them: stacked, renamed, cast, and cut to one device's shard.

In process, without a mount:

    import ckfs

    ck = ckfs.open("/data/llama", layout="canonical", mesh={"fsdp": 4}, dtype="bf16")
    ck["layers.scanned.wq"][2:4, ..., ::2]     # reads these bytes only
    shards = ck.load(device=3)                 # arrays by name, by all processors

`ckfs.torch` fills modules and state dicts, DTensors by their own placements; `ckfs.jax` makes arrays with any sharding.

By the program, as files:

    with ckfs.mount("/data/llama", mesh={"fsdp": 4, "tensor": 2}, dtype="bf16") as path:
        weights = numpy.load(path / "npy/dev3/layers/scanned/wq.npy")

Keywords are the program's flags with underscores for dashes; `ckfs mount --help` explains them.
"""

from __future__ import annotations

import importlib
import subprocess
from types import ModuleType
from typing import TYPE_CHECKING

from ._checkpoint import Checkpoint, Tensor, open
from ._errors import Error, ForkError, LoadError, PlanError, PlanWarning, ReadError, UsageError
from ._plan import Plan
from ._program import Mount, Server, mount, plan, program, run, serve
from ._settings import MountSettings, OpenSettings, ServeSettings

if TYPE_CHECKING:
    __version__: str
    from . import jax as jax
    from . import torch as torch

__all__ = [
    "Checkpoint", "Error", "ForkError", "LoadError", "Mount", "MountSettings", "OpenSettings", "Plan", "PlanError",
    "PlanWarning", "ReadError", "ServeSettings", "Server", "Tensor", "UsageError", "__version__", "mount", "open", "plan",
    "program", "run", "serve",
]  # fmt: skip


def __getattr__(name: str) -> ModuleType | str:
    if name == "__version__":
        # A package without the extension calls a program, whose version is its own.
        try:
            version: str = importlib.import_module(f"{__name__}._ckfs").VERSION
        except ImportError:
            return subprocess.run([program(), "--version"], capture_output=True, check=True, text=True).stdout.split()[1]
        return version
    # Both import their framework, which takes seconds.
    if name in ("torch", "jax"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
