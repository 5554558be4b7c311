#!/usr/bin/env python3
"""A soak test of runs: writers make, rename, delete and damage steps of every kind while readers compare bytes.

    steps.py [--seconds 600] [--seed N] [--readers 8] [--templates DIR]

Each kind of checkpoint has a run of its own and a mount with `--steps all`. Frameworks wrote the steps before the soak begins
(`step_templates.py`); a writer copies them as their trainers write: in order or shuffled, fast or slowly, into a directory that
is renamed in the end or not. Readers look at everything that a run shows. For each number of a step the writer keeps a *ledger*:
when a step may be there, with which values, and when it may fail. By it, a reader takes as wrong

* bytes that the step did not have while they were read, and half of them,
* a step that is listed before its writer has begun its last action, or after it was deleted and seen to be gone,
* an error of a step that nobody has touched; of a touched one, an error that is neither EIO nor ENOENT,
* `latest` at a step that is older than one that it was at before, if nobody has touched that one.

A writer takes as wrong a step that does not appear, or does not disappear, within a time. The seed is printed. Exit status 0 means
that nothing was wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

import numpy as np  # noqa: E402

import mounting  # noqa: E402
import repos  # noqa: E402
import soak  # noqa: E402

VARIANTS = 4
ALLOWED_ERRORS = {errno.EIO, errno.ENOENT}
# A step must appear, or disappear, within this time. Most of it is for a machine that does other things too.
SOON_SECONDS = 600
# Files of a step that come this late after the one before may show a step that has no mark of its own: see `settle.rs`.
QUIET_SECONDS = 0.4
STEPS_MAX = 6
GROWTH_MIB_MAX = 64


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a framework names a step, and what it writes last."""

    prefix: str
    digits: int = 0
    # Files that come last, in this order.
    marks: tuple[str, ...] = ()
    # A file of the run that names the last step.
    tracker: str | None = None
    # Written under this name, and renamed in the end.
    unfinished: str | None = None
    # A directory of safetensors files with the names of the tensors.
    has_hf: bool = False

    def name(self, number: int) -> str:
        return f"{self.prefix}{number:0{self.digits}d}"


KINDS = {
    "transformers": Kind("checkpoint-", marks=("trainer_state.json",), has_hf=True),
    "torch_dcp": Kind("step-", marks=(".metadata",)),
    "orbax": Kind("", unfinished="{}.orbax-checkpoint-tmp"),
    "megatron": Kind("iter_", 7, marks=(".metadata", "common.pt", "metadata.json"), tracker="latest_checkpointed_iteration.txt"),
    "ranks": Kind("global_step_", tracker="latest_checkpointed_iteration.txt", has_hf=True),
    "deepspeed": Kind("global_step", tracker="latest"),
}


def now() -> int:
    return time.monotonic_ns()


# --- the ledger ------------------------------------------------------------------------------------------------------


class Ledger:
    """What a writer says of its steps: a line for each event, written before it may have an effect.

    `whole` step may be there with a variant; `gone` a variant is not there any more; `unsure` errors may come from now on; `sure` they may
    not; `excuse` what was seen of it until now is no fault.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind, self.offset = path, kind, 0
        # By number: pairs of variant, begin, end; pairs of begin, end of times with errors; end of the time that is excused.
        self.there: dict[int, list[list]] = collections.defaultdict(list)
        self.failing: dict[int, list[list]] = collections.defaultdict(lambda: [[0, None]])
        self.excused: dict[int, int] = {}

    def say(self, event: str, number: int, variant: int | None = None) -> None:
        line = json.dumps([now(), event, number, variant]) + "\n"
        with open(self.path, "ab", buffering=0) as file:
            file.write(line.encode())

    def update(self) -> None:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self.offset += end
        for line in text[:end].splitlines():
            time_ns, event, number, variant = json.loads(line)
            if event == "whole":
                self.there[number].append([variant, time_ns, None])
            elif event == "gone":
                for row in self.there[number]:
                    if row[2] is None and variant in (None, row[0]):
                        row[2] = time_ns
            elif event == "unsure":
                if self.failing[number][-1][1] is not None:
                    self.failing[number].append([time_ns, None])
            elif event == "sure":
                if self.failing[number][-1][1] is None:
                    self.failing[number][-1][1] = time_ns
            elif event == "excuse":
                self.excused[number] = time_ns

    def variants(self, number: int, begin: int, end: int) -> set[int]:
        """Whose bytes may have been seen in a time."""
        rows = self.there[number]
        return {variant for variant, since, until in rows if since <= end and (until is None or until >= begin)}

    def may_fail(self, number: int, begin: int, end: int) -> bool:
        return any(since <= end and (until is None or until >= begin) for since, until in self.failing[number])

    def is_excused(self, number: int, begin: int) -> bool:
        return begin <= self.excused.get(number, 0)


# --- readers ---------------------------------------------------------------------------------------------------------


class Truth:
    """The bytes of all variants of a kind, and where a mount shows them."""

    def __init__(self, work: Path, kind: str, rows: list[dict]) -> None:
        self.kind, self.rows = KINDS[kind], {row["name"]: row for row in rows}
        directory = work / "templates/expected" / kind
        self.bytes = [{path.name: path.read_bytes() for path in (directory / str(v)).iterdir()} for v in range(VARIANTS)]

    def matching(self, name: str, found: bytes) -> set[int]:
        return {variant for variant, tensors in enumerate(self.bytes) if tensors[name] == found}


def read_at(descriptor: int, start: int, length: int) -> bytes:
    """All bytes of a span. A read whose pages are dropped while the kernel copies them ends early, and the next one has the error."""
    found = b""
    while len(found) < length and (part := os.pread(descriptor, length - len(found), start + len(found))):
        found += part
    return found


class WrongError(Exception):
    """A reader found something that the ledger does not allow."""


class Reader:
    def __init__(self, work: Path, rows: dict[str, list[dict]], seed: int) -> None:
        self.work, self.rng = work, random.Random(seed)
        self.truths = {kind: Truth(work, kind, rows[kind]) for kind in KINDS}
        self.ledgers = {kind: Ledger(work / f"{kind}.ledger", kind) for kind in KINDS}
        self.last = {kind: (None, 0) for kind in KINDS}
        self.counts: dict[str, int] = collections.Counter()

    def point(self, kind: str) -> Path:
        return self.work / "mounts" / kind

    def check(self, kind: str, number: int, what: str, begin: int, found: set[int] | None, error: OSError | None) -> None:
        """`found` are the variants that have the bytes that were read."""
        end, ledger = now(), self.ledgers[kind]
        for attempt in range(2):
            ledger.update()
            if error is not None:
                right = error.errno in ALLOWED_ERRORS and ledger.may_fail(number, begin, end)
            else:
                allowed = ledger.variants(number, begin, end)
                right = bool(allowed & found if found is not None else allowed)
            if right or (ledger.is_excused(number, begin) and not (error and error.errno not in ALLOWED_ERRORS)):
                return
            # An excuse may come late.
            if attempt == 0:
                time.sleep(2)
        rows, failing = ledger.there[number], ledger.failing[number]
        found_text = error if error is not None else f"bytes of {found or 'no variant'}" if found is not None else "it is there"
        raise WrongError(f"{kind} step {number}: {what}: {found_text}, from {begin} to {end}; ledger: {rows}, may fail {failing}")

    def numbers(self, kind: str) -> list[int]:
        begin = now()
        names = os.listdir(self.point(kind))
        numbers = [int(name) for name in names if name.isdigit()]
        for number in numbers:
            self.check(kind, number, "listed", begin, None, None)
        unknown = set(names) - {str(number) for number in numbers} - {".ckfs", "latest"}
        if unknown:
            raise WrongError(f"{kind}: listed {unknown}")
        return numbers

    def read_full(self, kind: str, number: int) -> None:
        name, row = self.rng.choice(sorted(self.truths[kind].rows.items()))
        found = (self.point(kind) / f"{number}/full/{row['path']}").read_bytes()
        self.tell(kind, number, f"full of {name}", self.truths[kind].matching(name, found), len(found))

    def read_shards(self, kind: str, number: int) -> None:
        """Both shards of a tensor. Two paths: each may be of another state of the step."""
        truth = self.truths[kind]
        name, row = self.rng.choice(sorted(truth.rows.items()))
        axis = next((axis for axis, names in enumerate(row["spec"] or []) if names), None)
        for device in range(2):
            begin = now()
            found = (self.point(kind) / f"{number}/dev{device}/{row['path']}").read_bytes()
            matching = set()
            for variant, tensors in enumerate(truth.bytes):
                whole = np.frombuffer(tensors[name], np.uint8).reshape(*row["shape"], -1)
                part = whole if axis is None else np.array_split(whole, 2, axis)[device]
                if part.tobytes() == found:
                    matching.add(variant)
            self.begin = begin
            self.tell(kind, number, f"dev{device} of {name}", matching, len(found))

    def read_hf(self, kind: str, number: int) -> None:
        directory = self.point(kind) / f"{number}/hf"
        for path in sorted(directory.glob("*.safetensors")):
            self.begin = now()
            tensors, _, _ = repos.parse_safetensors(path)
            matching = set(range(VARIANTS))
            for name, tensor in tensors.items():
                matching &= self.truths[kind].matching(name, tensor.data)
            self.tell(kind, number, f"hf/{path.name}", matching, sum(len(tensor.data) for tensor in tensors.values()))

    def read_spans(self, kind: str, number: int) -> None:
        """A file that stays open: all of it is of one state."""
        name, row = self.rng.choice(sorted(self.truths[kind].rows.items()))
        with open(self.point(kind) / f"{number}/full/{row['path']}", "rb", buffering=0) as file:
            size, matching = len(self.truths[kind].bytes[0][name]), set(range(VARIANTS))
            until = time.monotonic() + self.rng.choice([0, 0.1, 3])
            log = []
            while matching:
                start, length = self.rng.randrange(size), self.rng.choice([1, 100, 4096, 1 << 20])
                begin = now()
                try:
                    found = read_at(file.fileno(), start, min(length, size - start))
                except OSError as error:
                    self.begin = begin
                    raise error
                right = {v for v in range(VARIANTS) if self.truths[kind].bytes[v][name][start : start + length] == found}
                matching &= right
                log = [*log[-7:], (now(), start, length, len(found), found[:8].hex(), sorted(right))]
                if time.monotonic() >= until:
                    break
                time.sleep(0.02)
        what = f"spans of {name}, {size} bytes" + ("" if matching else f": {log}")
        self.tell(kind, number, what, matching, length)

    def read_manifest(self, kind: str, number: int) -> None:
        rows = json.loads((self.point(kind) / f"{number}/.ckfs/manifest.json").read_text())["tensors"]
        if {row["name"] for row in rows} != set(self.truths[kind].rows):
            self.tell(kind, number, f"manifest: {[row['name'] for row in rows]}", set(), 0)

    def look_at_latest(self, kind: str) -> int | None:
        begin = now()
        try:
            number = int(os.readlink(self.point(kind) / "latest"))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise WrongError(f"{kind}: latest: {error}") from error
            return None
        self.check(kind, number, "latest", begin, None, None)
        last, since = self.last[kind]
        if last is not None and number < last:
            ledger = self.ledgers[kind]
            if not ledger.may_fail(last, since, now()) and not ledger.is_excused(last, since):
                raise WrongError(f"{kind}: latest is {number} after {last}: {ledger.failing[last]}")
        self.last[kind] = (number, now())
        return number

    def tell(self, kind: str, number: int, what: str, matching: set[int], count: int) -> None:
        self.check(kind, number, what, self.begin, matching, None)
        self.counts["bytes"] += count

    def once(self) -> None:
        kind = self.rng.choice(list(KINDS))
        if self.rng.random() < 0.1:
            json.loads((self.point(kind) / ".ckfs/steps.json").read_text())
        latest = self.look_at_latest(kind)
        numbers = self.numbers(kind) if latest is None or self.rng.random() < 0.5 else [latest]
        if not numbers:
            time.sleep(0.02)
            return
        number = self.rng.choice(numbers)
        ways = [self.read_full, self.read_shards, self.read_spans, self.read_manifest]
        ways += [self.read_hf] * KINDS[kind].has_hf
        way = self.rng.choice(ways)
        self.begin = begin = now()
        try:
            way(kind, number)
            self.counts["right"] += 1
        except OSError as error:
            self.counts[errno.errorcode.get(error.errno, "error")] += 1
            self.check(kind, number, f"{way.__name__}", min(begin, self.begin), None, error)


def read(work: Path, rows: dict, seed: int, stop, report, calls) -> None:
    soak.end_with_the_parent()
    wrong = None
    reader = Reader(work, rows, seed)
    while not stop.is_set() and wrong is None:
        try:
            reader.once()
            with calls:
                calls.value += 1
        except WrongError as error:
            wrong = str(error)
        except Exception:  # noqa: BLE001
            wrong = traceback.format_exc()
    if wrong:
        stop.set()
    report.put((dict(reader.counts), wrong))


# --- writers ---------------------------------------------------------------------------------------------------------


class Writer:
    """Makes and unmakes the steps of one run."""

    def __init__(self, work: Path, kind: str, seed: int, edits: bool, stop) -> None:
        self.kind, self.how, self.rng, self.stop = kind, KINDS[kind], random.Random(seed), stop
        self.templates = [work / f"templates/{kind}/{variant}" for variant in range(VARIANTS)]
        self.run, self.point = work / "runs" / kind, work / "mounts" / kind
        self.ledger = Ledger(work / f"{kind}.ledger", kind)
        self.rows = {}
        self.expected = [
            {path.name: path.read_bytes() for path in (work / f"templates/expected/{kind}/{v}").iterdir()} for v in range(VARIANTS)
        ]
        # What is read from the pages of a source, by the kernel or by the daemon, may be half new in the moment of an edit.
        self.edits = edits
        self.steps: dict[int, int] = {}
        self.next, self.tracked = 1, 0
        self.latencies: list[float] = []
        self.counts: dict[str, int] = collections.Counter()
        self.wrong: list[str] = []
        self.did: list[str] = []

    def place(self, number: int) -> Path:
        return self.run / self.how.name(number)

    def track(self, number: int) -> None:
        if self.how.tracker and number > self.tracked:
            text = self.how.name(number) if self.how.tracker == "latest" else str(number)
            part = self.run / "tracker.part"
            part.write_text(text)
            part.rename(self.run / self.how.tracker)
            self.tracked = number

    # Waiting for what the mount shows.

    def is_listed(self, number: int) -> bool:
        return str(number) in os.listdir(self.point)

    def shows(self, number: int) -> int | None:
        """The variant whose first tensor a step shows."""
        name = min(self.expected[0])
        if not self.rows:
            with contextlib.suppress(OSError):
                found = json.loads((self.point / f"{number}/.ckfs/manifest.json").read_text())["tensors"]
                self.rows = {row["name"]: row for row in found}
        try:
            found = (self.point / f"{number}/full/{self.rows[name]['path']}").read_bytes()
        except (OSError, KeyError):
            return None
        return next((v for v in range(VARIANTS) if self.expected[v][name] == found), -1)

    def inode(self, number: int) -> int | None:
        """The number of a step's directory, which is another for each state of the step."""
        try:
            return os.stat(self.point / str(number)).st_ino
        except OSError:
            return None

    def until(self, what: str, true) -> bool:
        deadline = time.monotonic() + SOON_SECONDS
        while not true():
            if time.monotonic() > deadline:
                steps = (self.point / ".ckfs/steps.json").read_text()
                self.wrong.append(f"{self.kind}: {what}: not within {SOON_SECONDS} s, after {self.did[-5:]}: {steps}")
                return False
            time.sleep(0.005)
        return True

    def appears(self, number: int, variant: int) -> None:
        begun = time.monotonic()
        if self.until(f"step {number} of variant {variant}", lambda: self.shows(number) == variant):
            self.latencies.append(time.monotonic() - begun)
            for other in range(VARIANTS):
                if other != variant:
                    self.ledger.say("gone", number, other)
            self.ledger.say("sure", number)

    def disappears(self, number: int) -> None:
        if self.until(f"step {number} is gone", lambda: not self.is_listed(number)):
            self.ledger.say("gone", number)

    # What trainers do.

    def files(self, variant: int) -> list[str]:
        """Files of a step in the order of its writer."""
        template = self.templates[variant]
        names = sorted(str(path.relative_to(template)) for path in template.rglob("*") if path.is_file())
        self.rng.shuffle(names)
        return sorted(names, key=lambda name: self.how.marks.index(name) + 1 if name in self.how.marks else 0)

    def copy(self, variant: int, to: Path, number: int, last, *, slow: float, shuffled: bool) -> None:
        """Writes all files, `last` being called before the last bytes."""
        names = self.files(variant)
        if shuffled:
            self.rng.shuffle(names)
        written = time.monotonic()
        to.mkdir()
        for place, name in enumerate(names):
            data = (self.templates[variant] / name).read_bytes()
            file = to / name
            file.parent.mkdir(parents=True, exist_ok=True)
            is_renamed = name == ".metadata" and not shuffled
            with open(file.with_name(".metadata.tmp") if is_renamed else file, "wb", buffering=0) as out:
                half = self.rng.randrange(len(data) + 1)
                out.write(data[:half])
                time.sleep(self.rng.random() * slow)
                if shuffled and time.monotonic() - written > QUIET_SECONDS:
                    # This machine had other things to do: what lies there may be taken for finished.
                    self.ledger.say("excuse", number)
                    self.counts["excused"] += 1
                    last()
                if place + 1 == len(names) and not is_renamed:
                    last()
                out.write(data[half:])
                written = time.monotonic()
            if is_renamed:
                if place + 1 == len(names):
                    last()
                file.with_name(".metadata.tmp").rename(file)

    def save(self, number: int, variant: int) -> None:
        """A new step."""
        said = []

        def last() -> None:
            if not said:
                said.append(True)
                self.ledger.say("whole", number, variant)

        is_new = number > self.tracked
        has_order = bool(self.how.marks or self.how.unfinished or (self.how.tracker and is_new))
        shuffled = not has_order or self.rng.random() < 0.4
        # With an order nothing is shown before the last file, however long that takes.
        slow = 0.02 if shuffled else self.rng.choice([0, 0.05, 0.5])
        self.did.append(f"save {number} as {variant}, {'shuffled' if shuffled else 'in order'}, {slow}")
        if self.how.tracker and is_new:
            if shuffled and self.rng.random() < 0.3:
                self.track(number)
                self.copy(variant, self.place(number), number, last, slow=slow, shuffled=True)
            else:
                self.copy(variant, self.place(number), number, lambda: None, slow=slow, shuffled=shuffled)
                last()
                self.track(number)
        elif self.how.unfinished:
            part = self.run / self.how.unfinished.format(self.how.name(number))
            self.copy(variant, part, number, lambda: None, slow=slow, shuffled=shuffled)
            last()
            part.rename(self.place(number))
        elif self.rng.random() < 0.3:
            part = self.run / f"tmp-{self.how.name(number)}"
            self.copy(variant, part, number, lambda: None, slow=slow, shuffled=shuffled)
            last()
            part.rename(self.place(number))
        else:
            self.copy(variant, self.place(number), number, last, slow=slow, shuffled=shuffled)
        self.steps[number] = variant
        self.appears(number, variant)

    def new(self) -> None:
        number = self.next
        self.next += self.rng.randrange(1, 4)
        self.save(number, self.rng.randrange(VARIANTS))

    def again(self) -> None:
        """A number that was deleted, as when a run is resumed."""
        free = [number for number in range(1, self.next) if number not in self.steps]
        if free:
            self.save(self.rng.choice(free), self.rng.randrange(VARIANTS))

    def delete(self) -> None:
        number = min(self.steps) if self.rng.random() < 0.6 else self.rng.choice(list(self.steps))
        self.did.append(f"delete {number}")
        self.ledger.say("unsure", number)
        place = self.place(number)
        if self.rng.random() < 0.3:
            trash = self.run / f"{place.name}.trash"
            place.rename(trash)
            place = trash
        paths = [path for path in place.rglob("*") if path.is_file()]
        self.rng.shuffle(paths)
        slow = self.rng.choice([0, 0, 0.05])
        for path in paths:
            path.unlink()
            time.sleep(self.rng.random() * slow)
        shutil.rmtree(place)
        del self.steps[number]
        self.disappears(number)

    def weights(self, number: int) -> list[Path]:
        """Files without which no tensor, or not each, can be read."""
        place = self.place(number)
        found = [*place.rglob("*.safetensors"), *place.rglob("*.distcp"), *place.rglob("model_world_size_*")]
        found += [*place.rglob("*_optim_states.pt"), *place.rglob("manifest.ocdbt")]
        return sorted(path for path in found if path.stat().st_size > 0 and "ocdbt.process" not in str(path))

    def damage(self) -> None:
        number = self.rng.choice(list(self.steps))
        path = self.rng.choice(self.weights(number))
        how = self.rng.choice(["unlink", "empty", *(["cut"] * self.edits)])
        self.did.append(f"{how} {path.relative_to(self.run)}")
        self.ledger.say("unsure", number)
        if how == "cut":
            # At the end of a page: if a page is cut inside, its other readers see zeros in it for a moment too.
            os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
        elif how == "empty":
            (self.run / "empty").write_bytes(b"")
            (self.run / "empty").rename(path)
        else:
            path.unlink()

        def tells() -> bool:
            try:
                return not self.is_listed(number) or bool((self.point / f"{number}/.ckfs/error").read_bytes())
            except OSError:
                return False

        if self.until(f"step {number} is damaged", tells):
            self.ledger.say("gone", number)
            # It may be listed, with its error.
            self.ledger.say("whole", number, -1)
        if self.rng.random() < 0.5:
            time.sleep(self.rng.random() * 6)
        shutil.rmtree(self.place(number))
        del self.steps[number]
        self.disappears(number)

    def replace(self) -> None:
        """Another directory takes the place of a step."""
        number = self.rng.choice(list(self.steps))
        variant = (self.steps[number] + self.rng.randrange(1, VARIANTS)) % VARIANTS
        self.did.append(f"replace {number} by {variant}")
        part = self.run / f"tmp-{self.how.name(number)}"
        self.copy(variant, part, number, lambda: None, slow=0, shuffled=False)
        self.ledger.say("unsure", number)
        self.ledger.say("whole", number, variant)
        old = self.run / f"{self.how.name(number)}.trash"
        self.place(number).rename(old)
        part.rename(self.place(number))
        shutil.rmtree(old)
        self.steps[number] = variant
        self.appears(number, variant)

    def rewrite(self) -> None:
        """All files are written over, in place."""
        number = self.rng.choice(list(self.steps))
        variant = (self.steps[number] + self.rng.randrange(1, VARIANTS)) % VARIANTS
        names = self.files(variant)
        place = self.place(number)
        if not self.edits or sorted(names) != sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()):
            return
        self.did.append(f"rewrite {number} as {variant}")
        data = [(self.templates[variant] / name).read_bytes() for name in names]
        self.ledger.say("unsure", number)
        self.ledger.say("whole", number, variant)
        written = time.monotonic()
        for name, bytes_ in zip(names, data):
            with open(place / name, "r+b", buffering=0) as file:
                file.write(bytes_)
                file.truncate()
            if time.monotonic() - written > QUIET_SECONDS:
                self.ledger.say("excuse", number)
                self.counts["excused"] += 1
            written = time.monotonic()
        self.steps[number] = variant
        self.appears(number, variant)

    def touch(self) -> None:
        number = self.rng.choice(list(self.steps))
        path = self.rng.choice(self.weights(number))
        self.did.append(f"touch {path.relative_to(self.run)}")
        self.ledger.say("unsure", number)
        before = self.inode(number)
        os.utime(path)
        # It is another step from then on.
        if self.until(f"step {number} is another", lambda: self.inode(number) not in (None, before)):
            self.appears(number, self.steps[number])

    def link(self) -> None:
        """A copy of the best step, of hard links."""
        number = self.rng.choice(list(self.steps))
        place, best = self.place(number), self.run / "best"
        self.did.append(f"link {number}")
        self.ledger.say("unsure", number)
        shutil.copytree(place, best, copy_function=os.link)
        self.until(f"linked step {number}", lambda: self.shows(number) == self.steps[number])
        time.sleep(self.rng.random())
        shutil.rmtree(best)
        # Nothing tells when the mount has seen the last of the changed times: from now on errors are no fault.
        self.until(f"unlinked step {number}", lambda: self.shows(number) == self.steps[number])

    def rename(self) -> None:
        """A step gets another number."""
        number, to = self.rng.choice(list(self.steps)), self.next
        self.next += 1
        self.did.append(f"rename {number} to {to}")
        variant = self.steps.pop(number)
        self.ledger.say("unsure", number)
        self.ledger.say("whole", to, variant)
        self.place(number).rename(self.place(to))
        self.track(to)
        self.steps[to] = variant
        self.appears(to, variant)
        self.disappears(number)

    def add(self) -> None:
        """Results of an evaluation in a step: nobody may see any of it."""
        number = self.rng.choice(list(self.steps))
        self.did.append(f"add to {number}")
        (self.place(number) / f"eval-{self.counts['add']}.json").write_text('{"accuracy": 1}')

    def once(self) -> None:
        ways = [self.new] * 4 + [self.again, self.replace, self.rewrite, self.touch, self.link, self.rename, self.add, self.damage]
        way = self.rng.choice([*ways, self.delete, self.delete])
        if len(self.steps) < 2:
            way = self.new
        elif len(self.steps) >= STEPS_MAX:
            way = self.delete
        way()
        self.counts[way.__name__] += 1
        time.sleep(self.rng.random() * 0.3)

    def work(self) -> None:
        try:
            while not self.stop.is_set() and not self.wrong:
                self.once()
        except Exception:  # noqa: BLE001
            self.wrong.append(f"{self.kind}: after {self.did[-5:]}: {traceback.format_exc()}")
        if self.wrong:
            self.stop.set()


# --- the soak --------------------------------------------------------------------------------------------------------


def write_templates(directory: Path) -> None:
    directory.mkdir()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    more = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    more |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "step_templates.py"), str(directory), str(VARIANTS)]
    # To files, and in groups of their own: processes that the frameworks start may outlive them, and keep a pipe open.
    logs = [open(directory / f"rank{rank}.log", "w+") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            command, env=os.environ | more | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=log, start_new_session=True
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    if any(codes):
        texts = [Path(log.name).read_text()[-3000:] for log in logs]
        raise SystemExit("\n".join(["the frameworks did not write their steps:", *texts]))
    for log in logs:
        log.close()


class Soak:
    def __init__(self, work: Path, seed: int, templates: Path | None) -> None:
        self.work, self.rng = work, random.Random(seed)
        if templates is None or not templates.exists():
            write_templates(templates or work / "templates")
        if templates is not None:
            (work / "templates").symlink_to(templates.resolve())
        self.context = multiprocessing.get_context("spawn")
        self.stop = self.context.Event()
        self.wrong: list[str] = []
        self.writers, self.mounts, self.rows = [], {}, {}
        for kind in KINDS:
            (work / "runs" / kind).mkdir(parents=True)
            (work / f"{kind}.ledger").touch()
            edits = self.rng.random() < 0.5
            options = ["--no-passthrough", "--source-io", "pread"] if edits else []
            options += self.rng.choice([[], [], ["--direct-io"], ["--threads", "1"]])
            print(f"{kind}: {' '.join(options)}", flush=True)
            self.mounts[kind] = mounting.mount(
                work / "runs" / kind, work / "mounts" / kind, "--steps", "all", "--layout", "stored", "--mesh", "fsdp=2", *options
            )
            self.writers.append(Writer(work, kind, self.rng.randrange(1 << 30), edits, self.stop))

    def learn(self) -> None:
        """The first step of each run tells where its tensors are; its bytes are compared here."""
        for writer in self.writers:
            writer.new()
            if writer.wrong:
                continue
            rows = json.loads((writer.point / "1/.ckfs/manifest.json").read_text())["tensors"]
            self.rows[writer.kind] = rows
            expected = writer.expected[writer.steps[1]]
            found = {row["name"]: (writer.point / f"1/full/{row['path']}").read_bytes() for row in rows}
            if found != expected:
                names = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
                self.wrong.append(f"{writer.kind}: the first step differs: {names}")

    def run(self, seconds: float, readers: int) -> None:
        self.learn()
        self.wrong += [text for writer in self.writers for text in writer.wrong]
        if self.wrong:
            return
        report, calls = self.context.Queue(), self.context.Value("Q")
        args = (self.work, self.rows)
        processes = [
            self.context.Process(target=read, args=(*args, self.rng.randrange(1 << 30), self.stop, report, calls), daemon=True)
            for _ in range(readers)
        ]
        threads = [threading.Thread(target=writer.work) for writer in self.writers]
        for worker in (*processes, *threads):
            worker.start()
        pids = {kind: mounting.daemon_pid(mount.point) for kind, mount in self.mounts.items()}
        patient = time.monotonic() + soak.PATIENCE_SECONDS
        while calls.value < soak.WARM_UP_CALLS and not self.stop.wait(0.1) and time.monotonic() < patient:
            pass
        deadline = time.monotonic() + seconds
        start = {kind: soak.resources(pid) for kind, pid in pids.items()}
        self.stop.wait(max(0, deadline - time.monotonic()))
        self.stop.set()
        for thread in threads:
            thread.join()
        counts: dict[str, int] = collections.Counter()
        for _ in processes:
            found, wrong = report.get(timeout=soak.PATIENCE_SECONDS)
            counts.update(found)
            self.wrong += [wrong] if wrong else []
        end = {kind: soak.resources(pid) for kind, pid in pids.items()}
        for writer in self.writers:
            self.wrong += writer.wrong
            if self.wrong:
                print(f"{writer.kind}: {writer.did[-12:]}", flush=True)
            else:
                self.check_end(writer)
        self.grew(start, end)
        self.tell(counts)

    def check_end(self, writer: Writer) -> None:
        """What is there in the end is there, all is well, and nothing panicked."""
        listed = {row["step"] for row in json.loads((writer.point / ".ckfs/steps.json").read_text())["steps"]}
        if listed != set(writer.steps):
            self.wrong.append(f"{writer.kind}: {sorted(listed)} are shown in the end, expected {sorted(writer.steps)}")
        for number, variant in writer.steps.items():
            if writer.shows(number) != variant:
                self.wrong.append(f"{writer.kind}: step {number} is not variant {variant} in the end")
        stats = json.loads((writer.point / ".ckfs/stats.json").read_text())
        if stats["panics"] != 0 or stats["health"] != "healthy":
            self.wrong.append(f"{writer.kind}: {stats['panics']} panics, {stats['health']}: {stats['problems']}")

    def grew(self, start: dict, end: dict) -> None:
        for kind in KINDS:
            for key, most in (("anonymous_mib", GROWTH_MIB_MAX), ("threads", 24), ("descriptors", 160)):
                if end[kind][key] > start[kind][key] + most:
                    self.wrong.append(f"{kind}: {key} grew from {start[kind][key]} to {end[kind][key]}")

    def tell(self, counts: dict[str, int]) -> None:
        latencies = [latency for writer in self.writers for latency in writer.latencies]
        done: dict[str, int] = collections.Counter()
        for writer in self.writers:
            done.update(writer.counts)
        print(json.dumps({"readers": counts, "writers": done}))
        if latencies:
            print(f"appeared after {statistics.median(latencies):.2f} s (median), {max(latencies):.2f} s (longest)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--templates", type=Path, help="a directory that keeps the steps of the frameworks for the next soak")
    args = parser.parse_args()
    print(f"seed {args.seed}, {args.seconds:.0f} s, {mounting.find_ckfs()}", flush=True)
    soak.end_with_the_parent()
    with tempfile.TemporaryDirectory(prefix="ckfs-soak.") as directory:
        work = Path(directory)
        try:
            soaked = Soak(work, args.seed, args.templates)
            soaked.run(args.seconds, args.readers)
        finally:
            for point in mounting.mount_points(work):
                mounting.detach(point)
    for text in soaked.wrong:
        print(f"WRONG: {text}", flush=True)
    print("soak of steps: failed" if soaked.wrong else "soak of steps: nothing was wrong", flush=True)
    return 1 if soaked.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
