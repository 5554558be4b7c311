"""Scripts in processes that begin with their modules imported: to import torch takes longer than most of what they do.

`forked.py MODULE…` imports the modules once. For each line of JSON on its standard input it forks one process for each rank, which
runs the script as `python SCRIPT …`, `python -m MODULE …` or `python -c CODE …` would, waits for them, and prints their exit codes.
"""

from __future__ import annotations

import atexit
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
# Variables, and None for those that are not to be there.
Environment = dict[str, str | None]
# Only ends a hang.
HANG_SECONDS = 900


class Job:
    """The ranks of one script, which have been started."""

    def __init__(self, forks: Forks, command: tuple[object, ...], ranks: list[Environment]) -> None:
        self.forks, self.command = forks, command
        self._place = tempfile.TemporaryDirectory(prefix="ranks-")
        self._files = [Path(self._place.name) / str(number) for number in range(len(ranks))]
        rows = [{"environment": rank, "file": str(file)} for rank, file in zip(ranks, self._files, strict=True)]
        print(json.dumps({"command": [str(word) for word in command], "ranks": rows}), file=forks.process.stdin, flush=True)

    def output(self) -> list[str]:
        """What each rank has printed so far, without errors."""
        return [file.read_text(errors="replace") if file.exists() else "" for file in self._files]

    def said(self) -> str:
        """All that the ranks have said, to be shown with a failure."""
        files = sorted(Path(self._place.name).iterdir())
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-20_000:]}" for file in files)

    def wait(self) -> list[str]:
        """What each rank has printed. All have succeeded."""
        try:
            ready, _, _ = select.select([self.forks.process.stdout], [], [], HANG_SECONDS)
            assert ready, f"{self.command}: not done within {HANG_SECONDS} s\n{self.said()}"
            codes = json.loads(self.forks.process.stdout.readline())
        except BaseException:
            self.kill()
            raise
        assert not any(codes), f"{self.command}: exit codes {codes}\n{self.said()}"
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


def start(modules: tuple[str, ...], *command: object, ranks: list[Environment] | None = None, **environment: str) -> Job:
    """Starts a script once for each rank's own environment. `environment` is that of the imports, too."""
    key = (modules, *sorted(environment.items()))
    if key not in _held or _held[key].process.poll() is not None:
        _held[key] = Forks(modules, **environment)
    return Job(_held[key], command, ranks or [{}])


def run(modules: tuple[str, ...], *command: object, **environment: str) -> str:
    """Runs a script alone; what it prints."""
    return start(modules, *command, **environment).wait()[0]


def ranks_of(world: int, **more: str) -> list[Environment]:
    """The environments of ranks, by which they find each other, as torchrun sets them."""
    from servers import free_port

    address = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [address | more | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def run_ranks(world: int, modules: tuple[str, ...], *command: object, **environment: str) -> list[str]:
    """Runs the ranks of a script; the output of each."""
    return start(modules, *command, ranks=ranks_of(world), **environment).wait()


def _become(command: list[str], environment: Environment, file: str) -> None:
    """In the new process: runs the script, and ends."""
    code = 1
    try:
        for number, name in enumerate((os.devnull, file, f"{file}.err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY), number)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        how = command.pop(0) if command[0] in ("-m", "-c") else ""
        sys.argv = command
        if how == "-m":
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            exec(compile(command[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        # Processes that the script has started end with it.
        atexit._run_exitfuncs()
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
                _become(request["command"], rank["environment"], rank["file"])
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
