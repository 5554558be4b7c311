"""README.md and the guide: every command gives what the page shows, links lead somewhere, and no page is forgotten."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree
from pathlib import Path

import pytest
import yaml

import guide_blocks
import mounting
import package
import repos
from guide_blocks import GUIDE, NEEDS, PAGES, ROOT, Block
from servers import NAMES as REMOTE, STUB_SETTINGS, Stub

package.import_ckfs()

# Plain blocks of the README: what a new user, and `.ci/run`, types first.
SETUP = {"cargo run --release -- demo", "tests/run"}

BLOCKS = [block for page in PAGES for block in guide_blocks.blocks(page)]

pytestmark = pytest.mark.usefixtures("fuse")


def misspelt(path: Path) -> repos.Repo:
    """A repository in which one tensor has a misspelt name in every layer."""
    tensors = repos.llama_tensors("typo", layers=3)
    tensors = {name.replace("self_attn.o_proj", "self_atn.o_proj"): tensor for name, tensor in tensors.items()}
    return repos.write(path, {"model.safetensors": tensors}, repos.base_config("llama", "LlamaForCausalLM", 3))


def turned(path: Path) -> repos.Repo:
    """A repository whose keys are stored the other way round."""
    tensors = repos.llama_tensors("turned", layers=3)
    for name, tensor in tensors.items():
        if name.endswith("k_proj.weight"):
            tensors[name] = repos.Tensor.of(tensor.code, tensor.array().T)
    return repos.write(path, {"model.safetensors": tensors}, repos.base_config("llama", "LlamaForCausalLM", 3))


# Repositories that pages name besides that of `ckfs demo`.
OTHERS = {
    "moe": repos.BUILDERS["qwen3_moe"],
    "gemma3": repos.BUILDERS["gemma3"],
    "fp8": repos.BUILDERS["block_fp8_bf16"],
    "typo": misspelt,
    "turned": turned,
}


def environment(home: Path) -> dict[str, str]:
    path = f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    fixed = {"PATH": path, "HOME": str(home), "COLUMNS": "120", "LC_ALL": "C.UTF-8", "XDG_STATE_HOME": str(home / "state")}
    return os.environ | fixed


def run_console(block: Block, where: Path) -> list[str]:
    """What is wrong."""
    wrong = []
    for command in guide_blocks.commands(block):
        # A terminal shows both streams. Descriptors of a daemon would keep a pipe open, so output goes to a file.
        with open(where.parent / "output", "w+b") as output:
            done = subprocess.run(
                ["bash", "-c", f"set -euo pipefail\n{command.text}"], cwd=where, env=environment(where.parent),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=mounting.TIMEOUT_SECONDS,
                check=False,
            )  # fmt: skip
            output.seek(0)
            found = output.read().decode().rstrip().splitlines()
        if (done.returncode != 0) != command.fails or not guide_blocks.matches(command.expected, found):
            wrong.append("\n".join([f"{block}: $ {command.text}", f"exit {done.returncode}, found:", *found]))
    return wrong


# Compares as `doctest` does, with an ellipsis for what varies.
DOCTEST = """
import doctest, sys
test = doctest.DocTestParser().get_doctest({text!r}, {{}}, {name!r}, None, 0)
runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
found = runner.run(test)
sys.exit(found.failed > 0 or found.attempted == 0)
"""


def run_python(block: Block, where: Path) -> list[str]:
    """What is wrong."""
    script = block.text
    if block.kind == "pycon":
        script = DOCTEST.format(text=block.text.replace("…", "..."), name=str(block))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=where, env=environment(where.parent), stdin=subprocess.DEVNULL,
        capture_output=True, timeout=3 * mounting.TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    return [] if done.returncode == 0 else [f"{block}\n{done.stdout.decode()}\n{done.stderr.decode()}"]


@pytest.fixture
def place(tmp_path: Path):
    """A home directory with the program, and in it the directory in which a page's commands are run."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ckfs").symlink_to(mounting.find_ckfs())
    where = tmp_path / "work"
    where.mkdir()
    yield where
    for point in mounting.mount_points(tmp_path):
        mounting.detach(point)


@pytest.fixture
def network(monkeypatch):
    """Serves a repository, on this machine, as `org/demo` of a Hub and as `s3://models/demo`; no other network is asked for."""
    stubs = []
    for name in REMOTE:
        monkeypatch.delenv(name, raising=False)

    def serve(repository: Path) -> None:
        bucket = repository.parent / "buckets/models"
        bucket.mkdir(parents=True)
        (bucket / "demo").symlink_to(repository)
        stubs.append(Stub("hub", f"org/demo={repository}"))
        stubs.append(Stub("store", bucket.parent))
        monkeypatch.setenv("HF_ENDPOINT", stubs[0].url)
        for name, value in STUB_SETTINGS["s3"](stubs[1].url).items():
            monkeypatch.setenv(name, value)

    yield serve
    for stub in stubs:
        stub.close()


def runs(block: Block) -> bool:
    return block.needs is None and block.file is None and block.kind in ("console", "python", "pycon")


def marked(page: Path):
    """A page that shows all mounts of the host has no mount of another test beside it, which may be one that does not answer."""
    return pytest.param(page, id=page.stem, marks=[pytest.mark.alone] if "$ ckfs status |" in page.read_text() else [])


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if any(map(runs, guide_blocks.blocks(page)))])
def test_commands_give_what_the_page_shows(page, place, network):
    text = page.read_text()
    for name, build in OTHERS.items():
        if f"repos/{name}" in text:
            build(place / "repos" / name)
    if "demo/" in text and page.name != "README.md":
        mounting.run("demo", "--keep", "--dir", place / "demo")
        mounting.run("umount", place / "demo/mnt")
    served = False
    wrong = []
    for block in guide_blocks.blocks(page):
        if not served and re.search(r"org/demo|s3://models/demo", block.text):
            network(place / "demo/model")
            served = True
        if block.file:
            (place / block.file).write_text(block.text)
        if runs(block):
            wrong += (run_console if block.kind == "console" else run_python)(block, place)
    if wrong:
        pytest.fail("\n\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind in ("toml", "yaml")], ids=str)
def test_data_can_be_read(block):
    if block.kind == "toml":
        tomllib.loads(block.text)
    else:
        assert list(yaml.safe_load_all(block.text))


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.kind == "console" and block.needs], ids=str)
def test_commands_that_are_not_run_have_flags_that_exist(block):
    """All that is checked of them is that `ckfs` knows each command and each flag."""
    assert block.needs in NEEDS
    subcommands = set(re.findall(r"^  (\w+)  ", mounting.run("--help").out, flags=re.M))
    for command in guide_blocks.commands(block):
        words = shlex.split(command.text, comments=True)
        # `ckfs mount`, also as the image of a container: `ckfs:0.1.0 mount`.
        starts = [n for n in range(1, len(words)) if words[n - 1].partition(":")[0] == "ckfs" and words[n] in subcommands]
        for start in starts:
            # What follows `--` is a command of its own.
            own = words[start + 1 :]
            own = own[: own.index("--")] if "--" in own else own
            helps = mounting.run(words[start], "--help").out + mounting.run("help", "options").out
            known = set(re.findall(r"--[a-z][a-z-]*", helps))
            flags = {word.partition("=")[0] for word in own if word.startswith("--")}
            assert flags <= known, f"{block}: {flags - known} of `ckfs {words[start]}`"


def test_every_script_of_a_page_is_run_by_a_command_below_it():
    for block in BLOCKS:
        if block.kind == "python" and block.file:
            below = [other for other in BLOCKS if other.page == block.page and other.line > block.line and runs(other)]
            assert any(re.search(rf"\$ .*\b{re.escape(block.file)}\b", other.text) for other in below), block


def test_every_command_is_in_a_block_that_is_known_to_be_run_or_not():
    for block in BLOCKS:
        if block.kind == "text" and block.text.strip() not in SETUP:
            assert not re.search(r"^(\$ |ckfs )", block.text, flags=re.M), block


def test_the_readme_has_the_commands_of_the_first_setup():
    plain = {block.text.strip() for block in guide_blocks.blocks(PAGES[0]) if block.kind == "text"}
    assert SETUP <= plain


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    names: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), flags=re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        same = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in names)
        names.append(f"{name}-{same}" if same else name)
    return set(names)


def links(page: Path) -> list[str]:
    """What the links of a page lead to: in the text, by labels, and of pictures."""
    text = re.sub(r"`[^`]*`", "", prose(page))
    labels = dict(re.findall(r"^\[([^\]]+)\]:\s*(\S+)", text, flags=re.M))
    used = re.findall(r"\]\[([^\]]+)\]", text) + re.findall(r"(?<!\])\[([a-z][a-z-]*)\](?![(\[:])", text)
    assert set(used) == set(labels), f"{page.name}: labels {set(used) ^ set(labels)} are used or defined only"
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text) + list(labels.values())


def test_links_lead_somewhere():
    for page in [*PAGES, *(ROOT / ".github").glob("*.md")]:
        for target in links(page):
            if not target.startswith("https://"):
                name, _, anchor = target.partition("#")
                file = page.parent / name if name else page
                assert file.exists(), f"{page.name}: {target}"
                assert not anchor or anchor in anchors(file), f"{page.name}: {target}, expected one of {anchors(file)}"


def test_lines_fit_a_terminal():
    """`less` shows the pages, as a package installs them, without a broken line."""
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            shown = re.sub(r"https://\S+", "", line)
            assert len(shown) <= 120, f"{page.name}:{number}: {len(shown)} characters"


def test_every_page_is_in_the_documentation_and_in_the_contents():
    modules = (GUIDE / "mod.rs").read_text()
    labels = (GUIDE / "links.txt").read_text()
    contents = (GUIDE / "contents.md").read_text()
    for page in GUIDE.glob("*.md"):
        assert f'include_str!("{page.name}")' in modules or f'"{page.name}"' in modules, page
        if page.stem != "contents":
            module = page.stem.replace("-", "_")
            assert f"crate::guide::{module}" in labels and f"]: {page.name}" in contents, page


# What a client is imported as, if not by its own name. The fsspec of the tests makes s3fs of "s3".
IMPORTED = {"orbax-checkpoint": "orbax", "runai-model-streamer": "runai_model_streamer", "s3fs": 'filesystem("s3"'}

# What the tests of servers import beside clients.
TOOLS = {"pytest", "botocore"}


def imported(patterns: list[str]) -> tuple[set[str], str]:
    """The modules that some tests import, those of scripts in their texts too, and all their text."""
    files = {file for pattern in patterns for file in (ROOT / "tests/python").glob(pattern)}
    text = "\n".join(file.read_text() for file in files)
    lines = re.findall(r"^ *(?:import ([\w., ]+)|from ([\w.]+) import)", text, flags=re.M)
    names = (name for several, one in lines for name in (several or one).split(","))
    return {name.split(" as ")[0].strip().split(".")[0] for name in names}, text


def test_the_table_of_clients_is_that_of_the_tests():
    """Every client has the version that the tests install, and tests of each of its doors import it; none of a server's is left out."""
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "tests/python/requirements.txt").read_text(), flags=re.M))
    doors = {
        "serve": imported(["test_serve*.py"]),
        "Python": imported(["test_in_process*.py", "test_filesystem.py", "test_module.py", "*_process.py"]),
        "mount": imported(["test_clients.py", "test_formats_*.py", "test_layouts_*.py", "*_process.py"]),
    }
    section = (GUIDE / "doors.md").read_text().partition("## Clients that are tested")[2].partition("tried by hand")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in section.splitlines() if row.startswith("|")][2:]
    assert rows == sorted(rows), "in order"
    for client, version, of in rows:
        assert pins.get(client) == version, f"{client}: the tests install {pins.get(client)}"
        name = IMPORTED.get(client, client)
        for door in of.split(", "):
            modules, text = doors[door]
            assert name in modules or ("(" in name and name in text), f"{client}: no test of {door} imports it"
    known = {IMPORTED.get(client, client) for client, *_ in rows}
    clients = {name for name in doors["serve"][0] if name in pins} - TOOLS
    assert clients <= known, f"without a row: {clients - known}"


def test_the_readme_stays_short():
    words = len(PAGES[0].read_text().split())
    assert words <= 1000, words


def test_the_recording_is_what_the_commands_print(place):
    """`examples/recording.py` runs a session; the recording in the repository is what it records today, and a browser can read it."""
    drawn = place / "recording.svg"
    command = [sys.executable, ROOT / "examples/recording.py", drawn]
    subprocess.run(command, check=True, timeout=3 * mounting.TIMEOUT_SECONDS, env=environment(place.parent))
    assert drawn.read_text() == (ROOT / "examples/recording.svg").read_text()
    lines = ["".join(element.itertext()) for element in xml.etree.ElementTree.parse(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert "$ ckfs verify mnt" in lines and any("compared, no difference" in line for line in lines)


def test_the_picture_is_that_of_the_demo(place):
    """`examples/picture.py` draws the plan of the demo's model; the picture in the repository is what it draws today."""
    mounting.run("demo", "--keep", "--dir", place / "demo")
    picture = place / "picture.svg"
    manifest = place / "demo/mnt/.ckfs/manifest.json"
    subprocess.run([sys.executable, ROOT / "examples/picture.py", manifest, picture], check=True, timeout=60)
    assert picture.read_text() == (ROOT / "examples/picture.svg").read_text()
