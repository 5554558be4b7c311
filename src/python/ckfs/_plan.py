"""What a checkpoint is shown as: the report of `ckfs plan --json`."""

from __future__ import annotations

import html
from typing import Any


def amount(count: int) -> str:
    """Bytes for people: `1.5 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def table(rows: list[tuple[str, str]], caption: str) -> str:
    """A table of two columns in HTML."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:left'>{html.escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption>{html.escape(caption)}</caption>{cells}</table>"


class Plan(dict[str, Any]):
    """The document that `ckfs plan --json` prints. A notebook shows it as a table."""

    def _repr_html_(self) -> str:
        parts = []
        for view in self["views"]:
            axes = ", ".join(f"{axis['name']}={axis['size']}" for axis in view["mesh"]["axes"]) or "one device"
            held = [device["bytes"] for device in view["devices"]]
            rows = [
                ("layout", str(view["layout"])),
                ("family", str(view["family"] or "unknown")),
                ("dtype", str(view["dtype"] or "as stored")),
                ("mesh", axes),
                ("tensors", str(len(view["tensors"]))),
                ("bytes", amount(view["bytes"])),
            ]
            if held:
                least, most = amount(min(held)), amount(max(held))
                rows.append(("bytes of a device", least if least == most else f"{least} to {most}"))
            rows += [("warning", warning) for warning in view["warnings"]]
            parts.append(table(rows, view["name"] or "plan"))
        return "".join(parts)
