"""Scripts in processes that begin with their modules imported: to import torch takes longer than most of what they do.

`forked.py MODULE…` imports the modules once. For each line of JSON on its standard input it forks one process for each rank, which
runs the script as `python SCRIPT …` or `python -m MODULE …` would, waits for them, and prints their exit codes.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

HERE = Path(__file__).parent
# The compiler of torch, which sharded modules and optimizers import when they are first used, and which takes the longest.
COMPILER = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx", "torch._inductor.test_operators")
# What the savers and loaders of torch have in common, and Megatron-Core.
TORCH = (
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", *COMPILER,
    "transformers.models.llama.modeling_llama",
)  # fmt: skip
MEGATRON = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.dist_checkpointing", *COMPILER)
# Only ends a hang.
HANG_SECONDS = 900


class Job:
    """The ranks of one script, which have been started."""

    def __init__(self, forks: Forks, command: tuple[object, ...], ranks: list[dict[str, str]]) -> None:
        self.forks, self.command = forks, command
        self.logs = [tempfile.NamedTemporaryFile(prefix="rank-") for _ in ranks]  # noqa: SIM115
        rows = [{"environment": ranks[number], "log": log.name} for number, log in enumerate(self.logs)]
        print(json.dumps({"command": [str(word) for word in command], "ranks": rows}), file=forks.process.stdin, flush=True)

    def output(self) -> list[str]:
        """What each rank has printed so far."""
        return [Path(log.name).read_text(errors="replace") for log in self.logs]

    def wait(self) -> list[str]:
        """The output of each rank. All have succeeded."""
        try:
            ready, _, _ = select.select([self.forks.process.stdout], [], [], HANG_SECONDS)
            assert ready, f"{self.command}: not done within {HANG_SECONDS} s\n" + "\n".join(self.output())
            codes = json.loads(self.forks.process.stdout.readline())
        except BaseException:
            self.kill()
            raise
        assert not any(codes), f"{self.command}: exit codes {codes}\n" + "\n".join(self.output())
        return self.output()

    def kill(self) -> None:
        """Ends the ranks, and the process that forks: the next job has a new one."""
        self.forks.close()


class Forks:
    """A process that has imported modules, and forks."""

    def __init__(self, modules: tuple[str, ...], **environment: str) -> None:
        # A thread each, as many ranks share the processors.
        self.process = subprocess.Popen(
            [sys.executable, __file__, *modules], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


_held: dict[tuple, Forks] = {}


def start(modules: tuple[str, ...], *command: object, ranks: list[dict[str, str]] | None = None, **environment: str) -> Job:
    """Starts a script, or `-m` and a module, once for each rank's own environment. `environment` is that of the imports, too."""
    key = (modules, *sorted(environment.items()))
    if key not in _held or _held[key].process.poll() is not None:
        _held[key] = Forks(modules, **environment)
    return Job(_held[key], command, ranks or [{}])


def run(modules: tuple[str, ...], *command: object, **environment: str) -> str:
    """Runs a script alone; what it prints, errors too."""
    return start(modules, *command, **environment).wait()[0]


def ranks_of(world: int, **more: str) -> list[dict[str, str]]:
    """The environments of ranks, by which they find each other, as torchrun sets them."""
    from servers import free_port

    address = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [address | more | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def run_ranks(world: int, modules: tuple[str, ...], *command: object, **environment: str) -> list[str]:
    """Runs the ranks of a script; the output of each."""
    return start(modules, *command, ranks=ranks_of(world), **environment).wait()


def _become(command: list[str], environment: dict[str, str], log: str) -> None:
    """In the new process: runs the script, and ends."""
    code = 1
    try:
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), (to := os.open(log, os.O_WRONLY | os.O_APPEND)), to)):
            os.dup2(file, number)
        os.environ.update(environment)
        name, *sys.argv[1:] = command[1:] if command[0] == "-m" else command
        if command[0] == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = name
            runpy.run_path(name, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def main(*modules: str) -> None:
    # What modules print at import does not belong to the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        request, processes = json.loads(line), []
        for rank in request["ranks"]:
            if process := os.fork():
                processes.append(process)
            else:
                _become(request["command"], rank["environment"], rank["log"])
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
