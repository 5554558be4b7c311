"""The blocks of README.md and of the guide: which there are, and how they are run.

The first word after the fence says what a block is, and the second word what it needs that a test does not have:

    ```console              commands after "$ ", each with its output below it; run, and compared
    ```console network      commands that need something of NEEDS; not run, but their flags must exist
    ```python, ```pycon     run in the same directory; the output of ```pycon is compared
    ```toml NAME.toml       parsed, and written to that file for the commands that follow
    ```python NAME.py       written to that file for the commands that follow, one of which has to run it
    ```text, ```yaml        shown only; YAML and TOML are parsed

In expected output "…" stands for any text of a line, and a line with nothing else for any lines. White space counts once.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "src/guide"
PAGES = [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]
KINDS = {"console", "python", "pycon", "toml", "yaml", "text"}
NEEDS = {
    "setup": "builds the program or runs all tests: `.ci/run` does the same",
    "network": "another machine",
    "root": "root, and changes to the machine",
    "cluster": "Kubernetes or Slurm",
    "framework": "a framework that the tests do not install, or its accelerator",
}


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    needs: str | None
    file: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Command:
    text: str
    expected: list[str]

    @property
    def fails(self) -> bool:
        """Whether the page shows the command's error."""
        return any(line.startswith("ckfs: error:") for line in self.expected)


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    begin, info, lines = 0, None, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif info is None:
            begin, info, lines = number, line[3:].split(), []
        else:
            found.append(_block(page, begin, info, "\n".join(lines) + "\n"))
            info = None
    assert info is None, f"{page}:{begin}: the block has no end"
    return found


def _block(page: Path, line: int, info: list[str], text: str) -> Block:
    kind, needs, file = (info or ["text"])[0], None, None
    where = f"{page}:{line}"
    assert kind in KINDS, f"{where}: a block of {kind}, expected one of {sorted(KINDS)}"
    for word in info[1:]:
        if word.endswith((".toml", ".py")):
            file = word
        else:
            assert word in NEEDS, f"{where}: {word}, expected one of {sorted(NEEDS)}"
            needs = word
    return Block(page, line, kind, needs, file, text)


def commands(block: Block) -> list[Command]:
    """The commands of a console block; a backslash continues a line."""
    found: list[Command] = []
    lines = iter(block.text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            text = line[2:]
            while text.endswith("\\"):
                text = text[:-1] + next(lines).strip()
            found.append(Command(text, []))
        else:
            assert found, f"{block}: output before the first command"
            found[-1].expected.append(line)
    for command in found:
        while command.expected and not command.expected[-1].strip():
            command.expected.pop()
    return found


def matches(expected: list[str], found: list[str]) -> bool:
    """Whether output is as expected, up to what varies."""
    if not expected:
        return not found
    if expected[0].strip() == "…":
        return any(matches(expected[1:], found[skipped:]) for skipped in range(len(found) + 1))
    return bool(found) and _line_matches(expected[0], found[0]) and matches(expected[1:], found[1:])


def _line_matches(expected: str, found: str) -> bool:
    words = lambda line: " ".join(line.split())  # noqa: E731
    pattern = ".*".join(re.escape(part) for part in words(expected).split("…"))
    return re.fullmatch(pattern, words(found)) is not None
