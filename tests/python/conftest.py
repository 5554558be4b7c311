"""Fixtures: tiny repos by name, mounts shared by the tests that only read, and mounts of a test's own."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

# Before transformers is imported: the tests use no network, and draw no progress bars into the report.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest

import mounting
import package
import repos
from mounting import Mount
from servers import clean  # noqa: F401  a fixture


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts a job in the background with these ignored, and programs pass that on; tests send Ctrl-C to theirs.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    config.addinivalue_line("markers", "alone: measures time, or uses all processors, and is not run beside other tests")
    config.addinivalue_line("markers", "weekly: uses all processors for minutes, and is about what seldom changes")
    try:
        # Also in the process that shows the warnings of others: it imports their classes.
        package.import_ckfs()
    except FileNotFoundError:
        pass  # the tests that need the extension say so


# Begun first: of what takes a minute or more, the last would keep one process busy while the others have nothing to do.
LONG = ("engines", "guide", "megatron", "quantize", "quantized", "remote_stores", "restart", "runs", "stress", "training_state")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


def pytest_report_header() -> str:
    try:
        return f"ckfs: {mounting.find_ckfs()}"
    except FileNotFoundError as error:
        return f"ckfs: {error}"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files of the tests are here, mount points too."""
    return tmp_path_factory.mktemp("ckfs")


@pytest.fixture(scope="session")
def fuse(base: Path):
    """Needs /dev/fuse: in CI its absence is a failure, elsewhere the tests are reported as skipped."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        if os.environ.get("CI") == "true":
            pytest.fail("/dev/fuse is missing or closed to this user, and CI=true")
        pytest.skip("/dev/fuse is missing or closed to this user")
    yield
    for point in mounting.mount_points(base):
        mounting.detach(point)


@pytest.fixture(scope="session")
def repo(base: Path) -> Callable[[str], repos.Repo]:
    """A repo by the name of its builder; written once and never changed."""
    made: dict[str, repos.Repo] = {}

    def get(name: str) -> repos.Repo:
        if name not in made:
            made[name] = repos.BUILDERS[name](base / "repos" / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def shared(base: Path, repo: Callable[[str], repos.Repo], fuse: None) -> Callable[..., Mount]:
    """A mount of a repo with options, mounted once and kept until the end of the session."""
    made: dict[tuple, Mount] = {}

    def get(name: str, *args: object) -> Mount:
        key = (name, *map(str, args))
        if key not in made:
            made[key] = mounting.mount(repo(name).path, base / "shared" / str(len(made)), *args)
        return made[key]

    return get


@pytest.fixture
def own(base: Path, tmp_path: Path, fuse: None):
    """A mount of this test's own, which it may damage; unmounted at the end of the test in every case."""
    points, numbers = [], itertools.count()

    def get(source: Path | str, *args: object, **more: object) -> Mount:
        points.append(tmp_path / f"mnt{next(numbers)}")
        return mounting.mount(source, points[-1], *args, **more)

    yield get
    for point in points:
        mounting.detach(point)


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[..., repos.Repo]:
    """A repo of this test's own, which it may damage."""
    return lambda name, **more: repos.BUILDERS[name](tmp_path / name, **more)


@pytest.fixture
def two_files(tmp_path: Path) -> repos.Repo:
    """A repo to be damaged."""
    return repos.two_files(tmp_path / "source")


@pytest.fixture(scope="session")
def wide(base: Path) -> repos.Repo:
    """A large repo, for tests that depend on sizes."""
    return repos.wide(base / "repos/wide")
