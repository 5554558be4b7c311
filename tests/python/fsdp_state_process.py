"""A training by FSDP2 on ranks of this machine, each a process: saved in the middle, or resumed.

    python fsdp_state_process.py RANKS DIRECTORY               trains, saves to DIRECTORY/state, trains on, and keeps the end
    python fsdp_state_process.py RANKS DIRECTORY CHECKPOINT    resumes from a checkpoint, and compares the end with that one
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 3


class Training:
    def __init__(self, ranks: int, seed: int, lr: float) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 8))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (ranks,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.123)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            # All ranks draw the same: the mean of equal gradients is exact for any power of two.
            self.model(torch.randn(4, 16)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        extra = {"step": self.step, "name": "run", "rng": torch.get_rng_state(), "schedule": self.schedule.state_dict()}
        return {"model": model, "optim": optimizer, "extra": extra}

    def resume(self, path: str) -> None:
        self.train(1)  # Every state of the optimizer is there, with other values.
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        extra = state["extra"]
        assert (extra["step"], extra["name"]) == (STEPS, "run"), extra
        self.step = extra["step"]
        torch.set_rng_state(extra["rng"])
        self.schedule.load_state_dict(extra["schedule"])

    def end(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        found = {"step": self.step, "groups": optimizer["param_groups"], "lr": self.schedule.get_last_lr()}
        tensors = dict(model) | {f"{name}.{key}": value for name, of in optimizer["state"].items() for key, value in of.items()}
        return found | {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in tensors.items()}


def run(rank: int, ranks: int, directory: str, checkpoint: str | None) -> None:
    store = f"file://{directory}/store-{ranks}-{checkpoint is None}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    training = Training(ranks, seed=7 if checkpoint is None else 8, lr=3e-3 if checkpoint is None else 1.0)
    kept = f"{directory}/end.pt"
    if checkpoint is None:
        training.train(STEPS)
        dcp.save(training.state(), checkpoint_id=f"{directory}/state")
        training.train(STEPS)
        end = training.end()
        if rank == 0:
            torch.save(end, kept)
    else:
        training.resume(checkpoint)
        training.train(STEPS)
        end, expected = training.end(), torch.load(kept)
        assert end.keys() == expected.keys() and len(end) > 20
        for key, value in expected.items():
            assert torch.equal(end[key], value) if isinstance(value, torch.Tensor) else end[key] == value, key
    dist.destroy_process_group()


def main() -> None:
    ranks, directory, checkpoint = int(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
    torch.set_num_threads(1)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(rank, ranks, directory, checkpoint)
                code = 0
            finally:
                # The traceback of a failure comes before the end of the process.
                sys.excepthook(*sys.exc_info()) if code else None
                os._exit(code)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))


if __name__ == "__main__":
    main()
