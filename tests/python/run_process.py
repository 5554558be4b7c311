"""A trainer that goes on while its steps are read: `run_process.py KIND RUN TRUTH STEPS`, and rank and address in the environment of those that are two.

Before it saves a step it writes what the step holds to `TRUTH/<step>.safetensors`. It deletes old steps as its framework does.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np

import torchtitan_trainer

PAUSE_SECONDS = 0.8
# Steps that a trainer keeps.
KEPT = 3
# Of the models of transformers.
CONFIG = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def weights(step: int) -> dict[str, np.ndarray]:
    """What a model has learnt by a step."""
    random = np.random.default_rng(step)
    shapes = {"embed": (64, 16), "layers_0": (16, 48), "layers_1": (16, 48), "norm": (16,)}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def tell(truth: Path, step: int, tensors: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    part = truth / f"{step}.part"
    save_file(tensors, part)
    os.rename(part, truth / f"{step}.safetensors")


def wait_for_reader(truth: Path, step: int) -> None:
    """Waits until the step that this one displaces has been read: who maps a file that is deleted is ended by the kernel."""
    read, deadline = truth / f"{step - KEPT}.read", time.monotonic() + 120
    while step > KEPT and not read.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def orbax(run: Path, truth: Path, steps: int) -> None:
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(run, options=ocp.CheckpointManagerOptions(max_to_keep=KEPT, create=True))
    for step in range(1, steps + 1):
        tell(truth, step, {f"params.{name}": array for name, array in weights(step).items()})
        manager.save(step, args=ocp.args.StandardSave({"params": weights(step), "step": np.int32(step)}))
        time.sleep(PAUSE_SECONDS)
    manager.wait_until_finished()


def torch_dcp(run: Path, truth: Path, steps: int) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    for step in range(1, steps + 1):
        state = {name: torch.from_numpy(array) for name, array in weights(step).items()}
        tell(truth, step, {f"model.{name}": array for name, array in weights(step).items()})
        dcp.save({"model": state, "step": step}, checkpoint_id=run / f"step-{step}", no_dist=True)
        time.sleep(PAUSE_SECONDS)


def megatron(run: Path, truth: Path, steps: int) -> None:
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex")
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    # It waits for an accelerator that is not there.
    torch.cuda.synchronize = torch.cuda.current_device = lambda *_: "cpu"
    dist.init_process_group("gloo", init_method=f"file://{truth}/rendezvous", rank=0, world_size=1)
    for step in range(1, steps + 1):
        tell(truth, step, weights(step))
        directory = run / f"iter_{step:07d}"
        directory.mkdir()
        state = {
            name: ShardedTensor.from_rank_offsets(name, torch.from_numpy(array), replica_id=0)
            for name, array in weights(step).items()
        }
        dist_checkpointing.save(state, str(directory))
        time.sleep(0.2)
        (run / "latest_checkpointed_iteration.txt").write_text(str(step))
        time.sleep(PAUSE_SECONDS)
    dist.destroy_process_group()


def transformers(run: Path, truth: Path, steps: int, **more: object) -> None:
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    config = LlamaConfig(**CONFIG)
    torch.manual_seed(1)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (2 * steps, 8))]

    class Tell(TrainerCallback):
        """Says what the model is, in the moment before it is saved."""

        def on_step_end(self, args, state, control, model=None, **more):
            wait_for_reader(truth, state.global_step)
            # All ranks put it together, and one tells.
            whole = lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # noqa: E731
            tensors = {name: whole(tensor.detach()).numpy().copy() for name, tensor in model.state_dict().items()}
            if state.is_world_process_zero:
                tell(truth, state.global_step, tensors)
            time.sleep(PAUSE_SECONDS)

    arguments = TrainingArguments(
        output_dir=str(run), max_steps=steps, per_device_train_batch_size=2, save_steps=1, save_total_limit=KEPT, learning_rate=0.1,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no", **more,
    )  # fmt: skip
    trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, callbacks=[Tell()])
    trainer.train()
    assert trainer.is_fsdp_enabled == bool(more)


def transformers_fsdp(run: Path, truth: Path, steps: int) -> None:
    """Two processes with FSDP 2, each of which writes its own shards."""
    from accelerate import state

    # accelerate has FSDP for accelerators alone; that of torch needs none.
    begin = state.PartialState.__init__

    def begin_with_fsdp(self, *args, **more):
        begin(self, *args, **more)
        if self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type = state.DistributedType.MULTI_GPU

    state.PartialState.__init__ = begin_with_fsdp
    sharded = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    transformers(run, truth, steps, fsdp="full_shard", fsdp_config=sharded)


def torchtitan_fsdp(run: Path, truth: Path, steps: int) -> None:
    torchtitan_trainer.main("llama3_debugmodel", run, truth, steps, KEPT, wait_for_reader, {})


def torchtitan_tensor(run: Path, truth: Path, steps: int) -> None:
    """Tensor parallelism in place of FSDP, a head that is the embedding, and steps that are written in the background. The last
    one is a repository."""
    settings = {
        "parallelism.tensor_parallel_degree": 2, "checkpoint.async_mode": "async", "checkpoint.last_save_model_only": True,
        "checkpoint.last_save_in_hf": True,
    }  # fmt: skip
    # When torchtitan counts what it keeps, the step in the background may be there or not.
    before_save = lambda truth, step: wait_for_reader(truth, step + 1)  # noqa: E731
    torchtitan_trainer.main("qwen3_debugmodel", run, truth, steps, KEPT - 1, before_save, settings)


if __name__ == "__main__":
    kind, run, truth, steps = sys.argv[1:]
    globals()[kind](Path(run), Path(truth), int(steps))
