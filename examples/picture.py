"""Draws how one tensor of a mount comes from the source, as SVG: from the manifest that every mount has.

    python examples/picture.py MNT/.ckfs/manifest.json picture.svg [TENSOR]

The left column has the source tensors, the middle one the stacked tensor, cut as the mesh cuts it, the right one the devices' files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f"]
WIDTH, ROW, TOP = 960, 56, 66


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}" stroke="#444"/>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    middle = (x + to_x) / 2
    return (
        f'<path d="M{x:g} {y:g} C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"'
        ' fill="none" stroke="#888" marker-end="url(#tip)"/>'
    )


def bands(regions: list[dict], axis: int, extent: int, x: float, y: float, width: float, height: float) -> list[str]:
    """A tensor with its cut along an axis, one band of colour a device."""
    drawn = []
    for region in regions:
        begin, length = region["offset"][axis] / extent, region["shape"][axis] / extent
        drawn.append(box(x, y + begin * height, width, length * height, COLOURS[region["device"] % len(COLOURS)]))
    return drawn


def draw(manifest: dict, path: str) -> str:
    tensor = next(row for row in manifest["tensors"] if row["path"] == path)
    shape, regions, sources = tensor["shape"], tensor["regions"], tensor["sources"]
    axis = next(axis for axis, spec in enumerate(tensor["spec"]) if spec)
    rows = max(len(sources), len(regions))
    height = rows * ROW
    parts = [
        text(20, 28, "original files", 15), text(370, 28, f"{path} {shape}", 15), text(690, 28, "files of the mount", 15),
        text(20, 48, "one tensor a layer"), text(370, 48, "never stored: a view, cut by the mesh"), text(690, 48, "made when they are read"),
    ]  # fmt: skip
    for number, name in enumerate(sources):
        y = TOP + number * ROW
        parts += bands(regions, axis, shape[axis], 20, y, 36, ROW - 12)
        parts += [text(64, y + ROW / 2 - 2, name.removeprefix("model."), 12), arrow(285, y + ROW / 2 - 6, 362, TOP + height / 2)]
    depth = 7
    for layer in reversed(range(len(sources))):
        x, y = 380 + layer * depth, TOP + 20 + (len(sources) - 1 - layer) * depth
        parts += bands(regions, axis, shape[axis], x, y, 130, height - 60)
    for region in sorted(regions, key=lambda region: region["offset"][axis]):
        device = region["device"]
        y = TOP + device * ROW
        where = ", ".join(f"{name}={at}" for name, at in manifest["devices"][device]["coordinates"].items())
        parts += [
            arrow(560, TOP + height / 2, 680, y + ROW / 2 - 6), box(690, y, 36, ROW - 16, COLOURS[device % len(COLOURS)]),
            text(734, y + 16, f"dev{device}/{path}", 12), text(734, y + 34, f"{where}: {region['shape']}", 12),
        ]  # fmt: skip
    tip = '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto"><path d="M0 0 L8 4 L0 8" fill="#888"/></marker></defs>'
    total = TOP + height + 10
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}"'
        ' font-family="sans-serif" fill="#222">'
    )
    return "\n".join([opening, tip, box(0, 0, WIDTH, total, "#fff").replace(' stroke="#444"', ""), *parts, "</svg>"]) + "\n"


def main() -> None:
    manifest, target, *more = sys.argv[1:]
    Path(target).write_text(draw(json.loads(Path(manifest).read_text()), *(more or ["layers/scanned/wq"])))


if __name__ == "__main__":
    main()
