"""A program of a user's, for checkers of types: what is wrong here must be found, or the comment about it is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import ckfs
import numpy as np
import numpy.typing as npt
import torch

ck = ckfs.open("/data/llama", mesh={"fsdp": 4}, devices=[0, 1], dtype=torch.bfloat16, include=["*wq*"], source_timeout="5s")
assert_type(ck.load(device=3, only="*.wq"), dict[str, npt.NDArray[Any]])
assert_type(ck.plan(), ckfs.Plan)
tensor = ck["layers.scanned.wq"]
assert_type(tensor, ckfs.Tensor)
assert_type(tensor.shape, tuple[int, ...])
assert_type(tensor.dtype, np.dtype[Any])
assert_type(tensor.shard(3), npt.NDArray[Any])
tensor.read_into(np.empty(3), np.s_[2:4, ..., ::2])
for name, other in ck.items():
    assert_type((name, other.nbytes), tuple[str, int])
with ckfs.mount("/data/llama", mesh="fsdp=2", mkdir=True) as path:
    assert_type(path, Path)
assert_type(ckfs.torch.load(ck, device=3, to="cuda"), dict[str, torch.Tensor])
assert_type(ckfs.torch.load_into(ck, torch.nn.Linear(2, 3)).missing_keys, list[str])

ckfs.open("/data/llama", mehs="fsdp=4")  # type: ignore[call-arg]
ckfs.open("/data/llama", unscanned="yes")  # type: ignore[arg-type]
ckfs.open("/data/llama", mkdir=True)  # type: ignore[call-arg]
ckfs.serve("/data/llama", mkdir=True)  # type: ignore[call-arg]
ck.load("3")  # type: ignore[arg-type]
