"""torchtitan's own trainer on processors, for `run_process.py`: called in each of its processes.

The trainer, its parallelisms, its checkpointer and its adapter are torchtitan's, unchanged. What differs from a run on
accelerators: the type of the device and what is asked of it (name, memory), attention (torchtitan's other module, without a
kernel for accelerators), sums of gradients without a factor, which gloo has not, batches of random tokens, and fewer layers.
Packages that are not installed, of data sets and of logging, are replaced by empty ones. Before each step is saved, the trainer's
own export of the model of that moment to the format of Hugging Face is written to `TRUTH/<step>.safetensors`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torchtitan_process
import vllm_process

PAUSE_SECONDS = 0.8
TOKENS = 32
LAYERS = 2


def on_processors() -> None:
    """torchtitan asks torch for an accelerator, and takes what it is told. It measures the memory of the device, too."""
    import types

    import torch

    torch._utils._get_available_device_type = lambda: "cpu"
    for name in ("reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cpu, name, lambda *_: None)
    torch.cpu.memory_stats = lambda *_: {}
    torch.cpu.get_device_name = lambda *_: "processor"
    torch.cpu.current_device = lambda *_: 0
    torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
    torchtitan_process.STUBS.remove("torchdata")
    sys.meta_path.insert(0, torchtitan_process.Finder())
    sys.modules["torch.utils.tensorboard"] = vllm_process.Stub("torch.utils.tensorboard")


def random_tokens():
    """A class of batches of random tokens, the same in each run."""
    from dataclasses import dataclass

    import torch
    from torchtitan.components.dataloader import ParallelAwareDataloader

    class Rows(torch.utils.data.IterableDataset):
        def __init__(self, length: int, rank: int) -> None:
            self.length, self.random = length, torch.Generator().manual_seed(rank)

        def __iter__(self):
            while True:
                row = torch.randint(0, TOKENS, (self.length + 1,), generator=self.random)
                yield {"input": row[:-1], "positions": torch.arange(self.length)}, row[1:]

    class Loader(ParallelAwareDataloader):
        @dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            pass

        def __init__(
            self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_more: object
        ) -> None:
            super().__init__(Rows(seq_len, dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size)

    return Loader.Config()


def made_small(model) -> None:
    """Fewer layers, and attention as torch computes it on any device, in place of a compiled kernel."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    del model.layers[LAYERS:]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()


def main(
    flavor: str,
    run: Path,
    truth: Path,
    steps: int,
    kept: int,
    before_save: Callable[[Path, int], None],
    settings: dict[str, object],
) -> None:
    on_processors()
    import importlib

    import torch
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.checkpointer import MODEL, AsyncMode
    from torchtitan.config import ConfigManager
    from torchtitan.tools.logging import init_logger

    init_logger()
    family = flavor.partition("_")[0]
    config = getattr(importlib.import_module(f"torchtitan.models.{family}.config_registry"), flavor)()
    made_small(config.model_spec.model)
    config.dataloader = random_tokens()
    config.dump_folder, config.checkpoint.folder = str(run.parent), run.name
    config.hf_assets_path = str(truth.parent / "model")
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.keep_latest_k = True, 1, kept
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, 32, 2
    config.training.disable_cuda_graphs = True
    config.validator.enable = False
    config.lr_scheduler.warmup_steps = 1
    for name, value in settings.items():
        at, _, last = name.rpartition(".")
        of = config
        for part in at.split("."):
            of = getattr(of, part)
        setattr(of, last, value)

    trainer = config.build()
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            # Divides by itself.
            module.set_force_sum_reduction_for_comms(True)
    checkpointer, save = trainer.checkpointer, trainer.checkpointer.save

    def save_and_tell(step: int, last_step: bool = False) -> bool:
        """Its own export of the model first, by all ranks."""
        before_save(truth, step)
        exported = truth / f"export-{step}"
        checkpointer.dcp_save(checkpointer.states[MODEL].state_dict(), str(exported), AsyncMode.DISABLED, to_hf=True)
        if torch.distributed.get_rank() == 0:
            files = list(exported.glob("*.safetensors"))
            assert len(files) == 1, files
            os.rename(files[0], truth / f"{step}.safetensors")
            shutil.rmtree(exported)
        done = save(step, last_step=last_step)
        time.sleep(PAUSE_SECONDS)
        return done

    checkpointer.save = save_and_tell
    trainer.train()
    checkpointer.maybe_wait_for_saving()
    trainer.close()
    torch.distributed.destroy_process_group()
