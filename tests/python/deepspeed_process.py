"""One of several processes of DeepSpeed on the CPU: `deepspeed_process.py DIRECTORY STAGE DTYPE [UNIVERSAL]`, rank and address from the
environment.

Trains two steps of a model with tied, frozen and oddly sized parameters, and buffers, and saves a checkpoint: from the beginning, or from
the universal checkpoint in a directory.
"""

from __future__ import annotations

import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import deepspeed.comm.torch  # noqa: F401
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 11)
        self.down = nn.Linear(11, 5, bias=False)
        self.cube = nn.Parameter(torch.randn(2, 3, 5))
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor([2.0]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("places", torch.arange(3))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = self.down(torch.relu(self.up(hidden))) + self.frozen(hidden).sum() + self.cube.sum() * self.scalar
        return self.head(hidden).float().pow(2).sum()


def main(directory: str, stage: str, dtype: str, universal: str | None = None) -> None:
    # The shared memory of DeepSpeed is a program in C++ that it compiles; gloo does without.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo")
    model = Model(seed=0 if universal is None else 1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": int(stage), "sub_group_size": 60},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == "bf16"},
        "checkpoint": {"load_universal": universal is not None},
    }
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    groups = [[value for _, value in trained if value.ndim > 1], [value for _, value in trained if value.ndim == 1]]
    lr = 1e-2 if universal is None else 1.0
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if universal is not None:
        engine.load_checkpoint(universal)
        assert engine.global_steps == 2
    for _ in range(2):
        loss = engine(torch.tensor([[1, 2, 3]]) + int(os.environ["RANK"]))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(directory)
    torch.distributed.barrier()
    # Threads of gloo may end the process with an error when it takes its modules apart.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
