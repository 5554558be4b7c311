"""Settings as keywords: those of the program's flags, with underscores for dashes."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

Path: TypeAlias = str | os.PathLike[str]
Mesh: TypeAlias = str | Mapping[str, int]
"""Named axes with sizes, the last one fastest: `{"fsdp": 4, "tensor": 2}` or `"fsdp=4,tensor=2"`."""
Devices: TypeAlias = int | Sequence[int] | str
Patterns: TypeAlias = str | Sequence[str]
Allow: TypeAlias = bool | str | Sequence[str]
Time: TypeAlias = int | str
Size: TypeAlias = int | str


class OpenSettings(TypedDict, total=False):
    """What `ckfs.open` takes besides the source. `ckfs plan --help` explains each under the name of its flag."""

    mesh: Mesh
    replicate: Patterns
    layout: Path
    set: Mapping[str, str | int | float | bool]
    dtype: Any
    """A name such as `"bf16"`, or a dtype of numpy, ml_dtypes, torch or jax."""
    dequantize: Any
    """`True` for the model's own dtype, or a dtype."""
    cast: Sequence[Mapping[str, str]]
    quantize: str
    gguf_type: Literal["f32", "f16", "bf16", "q8_0"]
    requantize: Literal["keep:compressed-tensors", "keep:modelopt", "keep:fp8", "keep:mxfp4"]
    quantize_only: Patterns
    quantize_ignore: Patterns
    shard: Path
    shard_rules: Sequence[Mapping[str, Any]]
    logical_rules: Sequence[Mapping[str, Any]]
    devices: Devices
    unscanned: bool
    even: bool
    allow_missing: Allow
    allow_unmapped: Allow
    rename: Sequence[str | Mapping[str, str]] | str
    strip_prefix: str
    add_prefix: str
    source_rename: Sequence[str | Mapping[str, Any]] | str
    tied: Literal["auto", "alias", "absent"]
    lora: Path
    merge_lora: Path
    include: Patterns
    exclude: Patterns
    layers: str
    renumber: bool
    no_mtp: bool
    text_only: bool
    part: Literal["text", "vision", "audio", "encoder", "mtp", "draft"]
    chunk_bytes: Size
    max_shard_bytes: Size
    config_from: Path
    fill_from: Path
    base: Path
    config: Path
    source_io: Literal["auto", "mmap", "pread"]
    source_timeout: Time
    training_state: bool
    duplicates: Literal["index", "last", "refuse"]
    variant: str
    allow_unfinished: bool
    average: str
    follow_symlinks: bool
    offline: bool
    cache_dir: Path
    cache_disk_bytes: Size
    prefetch: Literal["auto", "on", "off"]
    hf_cache: Literal["read", "share"]
    allow_http: bool
    materialize: Path
    cache_bytes: Size
    threads: int


class ServeSettings(OpenSettings, total=False):
    """What `ckfs.serve` takes besides the source: `ckfs serve --help` explains each under the name of its flag."""

    listen: str
    name: str
    token_file: Path
    allow_anyone: bool
    allow_host: Patterns
    steps: str
    steps_poll: Time
    on_step: str
    file_mode: str
    dir_mode: str
    log_file: Path


class MountSettings(OpenSettings, total=False):
    """What `ckfs.mount`, `ckfs.run` and `ckfs.plan` take besides the source: flags of the program."""

    timeout: Time
    steps: str
    steps_poll: Time
    mkdir: bool
    allow_other: bool
    file_mode: str
    dir_mode: str
    uid: int
    gid: int
    read_ahead: int
    no_passthrough: bool
    direct_io: Allow
    grace: Time
    drain: Time
    on_step: str
    log_file: Path


# Settings that files have and flags have not.
WITHOUT_FLAG = ("cast", "shard_rules", "logical_rules")
DTYPES = ("dtype", "dequantize")


def unknown(name: str, known: Sequence[str]) -> TypeError:
    """The error for a keyword that is no setting, with the nearest one."""
    near = difflib.get_close_matches(name, known, 1)
    return TypeError(f"unknown setting `{name}`; did you mean `{near[0]}`?" if near else f"unknown setting `{name}`")


def _dtype(value: Any) -> Any:
    if isinstance(value, (str, bool)):
        return value
    # numpy's dtypes have a name, their types have one too, and torch's are written with the module's name.
    name = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
    return str(name).removeprefix("torch.")


def _value(name: str, value: Any) -> Any:
    """A value as the table of settings reads it: a text, a number, a bool, a list or a dict."""
    if name in DTYPES:
        return _dtype(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if name == "mesh" and isinstance(value, Mapping):
        return ",".join(f"{axis}={size}" for axis, size in value.items())
    if name == "devices" and not isinstance(value, str):
        return ",".join(map(str, value if isinstance(value, Sequence) or hasattr(value, "__iter__") else [value]))
    if isinstance(value, Mapping):
        return {str(key): _value("", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_value("", item) for item in value]
    return value


def values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the extension takes them. `None` stands for a setting that is not given."""
    given = {name: _value(name, value) for name, value in settings.items() if value is not None}
    for name in ("replicate", "include", "exclude", "rename", "source_rename", "quantize_only", "quantize_ignore"):
        if isinstance(given.get(name), str):
            given[name] = [given[name]]
    return given


def flags(settings: Mapping[str, Any], of: type = MountSettings) -> list[str]:
    """Settings as the program takes them. Raises `TypeError` for one that is not of the command."""
    words: list[str] = []
    known = [name for name in of.__annotations__ if name not in WITHOUT_FLAG]
    for name, value in values(settings).items():
        if name in WITHOUT_FLAG:
            raise TypeError(f"the setting `{name}` is one of files: give `config`")
        if name not in known:
            raise unknown(name, known)
        flag = "--" + name.replace("_", "-")
        if isinstance(value, dict):
            value = [f"{key}={item}" for key, item in value.items()]
        for item in value if isinstance(value, list) else [value]:
            if item is True:
                words.append(flag)
            elif isinstance(item, dict):
                words.append(f"{flag}={item['match']}=>{item['to']}")
            elif item is not False:
                words.append(f"{flag}={item}")
    return words
