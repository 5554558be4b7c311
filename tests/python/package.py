"""The Python package under test: the files of `src/python/ckfs`, and the extension that cargo has built."""

from __future__ import annotations

import os
import sys
import tempfile
import tomllib
from pathlib import Path

from mounting import ROOT

FILES = ROOT / "src/python/ckfs"


def find_extension() -> Path:
    """The extension: `CKFS_EXTENSION`, else the newest of the builds."""
    if chosen := os.environ.get("CKFS_EXTENSION"):
        return Path(chosen).resolve()
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [path for path in (target / "release/lib_ckfs.so", target / "debug/lib_ckfs.so") if path.exists()]
    if not built:
        raise FileNotFoundError("no extension for Python: run `cargo build -p ckfs-python`")
    return max(built, key=lambda path: path.stat().st_mtime)


def place(directory: Path, extension: bool = True) -> Path:
    """Links the package into a directory, which can then be in `PYTHONPATH`. Several processes may do so at once."""
    package = directory / "ckfs"
    package.mkdir(parents=True, exist_ok=True)
    links = {path.name: path for path in FILES.iterdir() if path.is_file()}
    if extension:
        links["_ckfs.abi3.so"] = find_extension()
    for name, path in links.items():
        made = Path(tempfile.mkdtemp(dir=directory)) / name
        made.symlink_to(path)
        made.rename(package / name)
        made.parent.rmdir()
    # As an installer leaves it, for programs that ask which protocols are installed.
    info = directory / "ckfs-0.dist-info"
    info.mkdir(exist_ok=True)
    project = tomllib.loads((FILES.parent / "pyproject.toml").read_text())["project"]
    groups = {f"[{group}]": [f"{name} = {at}" for name, at in found.items()] for group, found in project["entry-points"].items()}
    lines = [line for group, found in groups.items() for line in (group, *found)]
    for name, text in (("METADATA", "Metadata-Version: 2.1\nName: ckfs\nVersion: 0\n"), ("entry_points.txt", "\n".join(lines))):
        made = Path(tempfile.mkdtemp(dir=directory)) / name
        made.write_text(text)
        made.rename(info / name)
        made.parent.rmdir()
    return directory


def path() -> Path:
    """The directory with the package, made once for all processes of a run."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return place(target / "python")


def import_ckfs() -> None:
    """Makes `import ckfs` find the package under test, here and in processes that are started."""
    directory = str(path())
    if directory not in sys.path:
        sys.path.insert(0, directory)
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{directory}:{others}" if others else directory
