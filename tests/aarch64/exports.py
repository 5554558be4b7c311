"""Exports the generated repositories of the tests by two programs, and compares every byte.

    exports.py PROGRAM PROGRAM     each is a command, for example "target/debug/ckfs" and "qemu-aarch64 target/…/ckfs"

The repositories hold each dtype, each quantization scheme and each family of the layouts, once, with the flags that show most:
an export takes two seconds of a processor's emulation. The two programs have other kernels: one runs those of its processor,
the other those of another architecture.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS / "python"))

import quantized_repos  # noqa: E402
import repos  # noqa: E402

# Values of all kinds are cast to each kind of float. A decoded float32 shows every bit of a scheme's arithmetic. The layout is
# the one with the most operators.
CASTS = [["--dtype", cast] for cast in ("f16", "bf16", "f32")]
ALL_CASTS = {"edge_values", "every_dtype", "block_fp8_bf16"}
QUANTIZED = ["--dtype", "f32", "--layout", "hf"]
SHARDED = ["--layout", "maxtext", "--mesh", "fsdp=2", "--dtype", "bf16"]


def cases(work: Path) -> list[tuple[str, Path, list[str]]]:
    """Name, source and flags of each export."""
    found = []
    for name, build in repos.BUILDERS.items():
        source = build(work / "repos" / name).path
        found += [(name, source, flags) for flags in CASTS[: 3 if name in ALL_CASTS else 1]]
    for name, build in quantized_repos.BUILDERS.items():
        source = build(work / "quantized" / name, "wild").repo.path
        found.append((name, source, QUANTIZED))
    for family in sorted((TESTS / "fixtures" / "maxtext").iterdir()):
        found.append((family.name, family / "hf", SHARDED))
    return found


def export(program: str, source: Path, flags: list[str], target: Path) -> tuple[int, str]:
    # Bundles hold each tensor once; the other files have the same bytes.
    command = [*shlex.split(program), "export", str(source), str(target), "--only", "safetensors/*", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stderr


def files(root: Path) -> dict[str, bytes | str]:
    """Contents by relative path; the target of a link."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file() and not name.startswith(".ckfs/"):
            found[name] = path.read_bytes()
    return found


def compare(programs: list[str], work: Path, number: int, case: tuple[str, Path, list[str]]) -> tuple[int, int, str]:
    """Numbers of files and bytes, and what differs."""
    name, source, flags = case
    what = f"{name} {' '.join(flags)}"
    targets = [work / f"{number}-{side}" for side in range(2)]
    results = [export(program, source, flags, target) for program, target in zip(programs, targets, strict=True)]
    if results[0][0] != results[1][0]:
        return 0, 0, f"{what}: exit codes {results[0][0]} and {results[1][0]}: {results[1][1][-500:]}"
    if results[0][0]:
        same = results[0][1] == results[1][1]
        return 0, 0, "" if same else f"{what}: refused in other words: {results[0][1]} and {results[1][1]}"
    one, other = map(files, targets)
    for target in targets:
        subprocess.run(["rm", "-rf", str(target)], check=True)
    differ = sorted(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))
    size = sum(len(content) for content in one.values())
    return len(one), size, f"{what}: {differ[:5]} differ" if differ else ""


def main() -> int:
    programs = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="ckfs-exports-") as text:
        work = Path(text)
        every = cases(work)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(compare, programs, work, number, case) for number, case in enumerate(every)]
            results = [job.result() for job in jobs]
    faults = [fault for *_, fault in results if fault]
    refused = sum(not count for count, *_ in results)
    for fault in faults:
        print(fault)
    total = sum(count for count, *_ in results), sum(size for _, size, _ in results)
    print(f"{len(every)} exports, {refused} refused alike: {total[0]} files, {total[1]} bytes compared, {len(faults)} differ")
    # A comparison of nothing would pass.
    return bool(faults) or refused * 4 > len(every) or total[1] < 1 << 20


if __name__ == "__main__":
    sys.exit(main())
