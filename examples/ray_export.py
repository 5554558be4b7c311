"""An export by the tasks of a Ray cluster: python ray_export.py TASKS SOURCE DIR [FLAGS]

DIR is on a file system that all nodes have, or an address of a bucket. A task that fails is started again, perhaps on another node,
and goes on where it was.
"""

import os
import subprocess
import sys

import ray


@ray.remote(max_retries=3, retry_exceptions=True, scheduling_strategy="SPREAD")
def export(program: str, part: str, words: list[str]) -> str:
    done = subprocess.run([program, "export", *words, "--part", part], stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"part {part}: {done.stderr.strip()}")
    return done.stderr.strip()


def main() -> None:
    tasks, words = int(sys.argv[1]), sys.argv[2:]
    ray.init()
    program = os.environ.get("CKFS", "ckfs")
    print(*ray.get([export.remote(program, f"{number}/{tasks}", words) for number in range(tasks)]), sep="\n")


if __name__ == "__main__":
    main()
