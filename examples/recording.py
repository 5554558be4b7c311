"""Records a short session with the demo's model and draws it as an animated SVG, which needs no player and no script.

    python examples/recording.py recording.svg

The commands are run as they are shown, `ckfs` and `python` those of PATH, in a directory of their own. Only the time that typing takes is
made up, and that directory is shown as `~`. One that cannot be run ends the recording.
"""

from __future__ import annotations

import fcntl
import html
import os
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

COMMANDS = [
    "ckfs plan demo/model --mesh fsdp=4,tensor=2",
    "ckfs mount demo/model mnt --mkdir --mesh fsdp=4,tensor=2 --log-file log",
    "ls mnt",
    """python -c "import numpy; print(numpy.load('mnt/npy/dev3/layers/scanned/wq.npy').shape)\"""",
    "ckfs verify mnt",
    "ckfs umount mnt",
]
COLUMNS, ROWS = 96, 60
# Of the drawing, in pixels, and of the show, in seconds.
WIDTH, LINE, LETTER, LEFT, TOP = 800, 19, 7.85, 16, 44
TYPING, AFTER, PERIOD = 0.03, 0.9, 20.0


def run(command: str, where: Path) -> list[str]:
    """The lines that a command prints on a terminal."""
    terminal, inside = os.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    fixed = {"HOME": str(where), "TERM": "dumb", "NO_COLOR": "1", "LC_ALL": "C.UTF-8", "COLUMNS": str(COLUMNS)}
    # Progress is for standard error that is a terminal: it would be another one each time.
    done = subprocess.run(
        ["bash", "-c", command], cwd=where, env=os.environ | fixed, stdin=subprocess.DEVNULL, stdout=inside, stderr=subprocess.PIPE,
        timeout=60, check=False,
    )  # fmt: skip
    os.close(inside)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # The other end is closed, and all is read.
            part = b""
        if not part:
            break
        shown += part
    os.close(terminal)
    text = (shown + done.stderr).decode().replace("\r\n", "\n").replace(str(where), "~").expandtabs()
    if done.returncode != 0:
        sys.exit(f"recording: {command}: exit {done.returncode}\n{text}")
    return text.rstrip("\n").split("\n") if text.strip() else []


def record(where: Path) -> list[tuple[str, list[str]]]:
    subprocess.run(["ckfs", "demo", "--keep", "--dir", where / "demo"], cwd=where, capture_output=True, check=True, timeout=60)
    subprocess.run(["ckfs", "umount", where / "demo/mnt"], capture_output=True, check=True, timeout=60)
    return [(command, run(command, where)) for command in COMMANDS]


def draw(session: list[tuple[str, list[str]]]) -> str:
    """Each line appears at its time; a command is uncovered letter by letter. Where motion is not wanted, all is there at once."""
    lines, styles, now, row = [], [], 0.5, 0

    def line(text: str, kind: str, at: float) -> None:
        nonlocal row
        y = TOP + row * LINE
        share = at / PERIOD * 100
        styles.append(f"@keyframes l{row} {{ 0%, {share:.2f}% {{ opacity: 0 }} {share + 0.01:.2f}%, 97% {{ opacity: 1 }} 100% {{ opacity: 0 }} }}")
        styles.append(f".l{row} {{ animation: l{row} {PERIOD:g}s infinite step-end }}")
        if kind == "command":
            end, letters = share + len(text) * TYPING / PERIOD * 100, len(text)
            width = letters * LETTER + 4
            styles.append(f"@keyframes t{row} {{ 0%, {share:.2f}% {{ transform: none }} {end:.2f}%, 100% {{ transform: translateX({width:.0f}px) }} }}")
            styles.append(f".t{row} {{ animation: t{row} {PERIOD:g}s infinite steps({letters}) }}")
            cover = f'<rect class="cover t{row}" x="{LEFT + 2 * LETTER:g}" y="{y - 14}" width="{WIDTH}" height="{LINE}"/>'
            lines.append(f'<g class="l{row}"><text x="{LEFT}" y="{y}"><tspan class="prompt">$ </tspan>{html.escape(text)}</text>{cover}</g>')
        else:
            lines.append(f'<text class="out l{row}" x="{LEFT}" y="{y}">{html.escape(text)}</text>')
        row += 1

    for command, shown in session:
        line(command, "command", now)
        now += len(command) * TYPING + 0.3
        for text in shown:
            line(text, "output", now)
            now += 0.03
        now += AFTER
    if now > PERIOD * 0.9:
        sys.exit(f"recording: {now:.1f} s of {PERIOD:g} s leave no time to read the end")
    height = TOP + row * LINE
    motion = "\n".join(styles)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="A session: plan, mount, ls, numpy, verify, umount">
<style>
text {{ font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre; fill: #e4e8f0 }}
.out {{ fill: #aab3c5 }} .prompt {{ fill: #8aa4ff }} .frame, .cover {{ fill: #161a22 }} .cover {{ display: none }}
@media (prefers-reduced-motion: no-preference) {{
.cover {{ display: inline }}
{motion}
}}
</style>
<rect class="frame" width="{WIDTH}" height="{height}" rx="8"/>
<g fill="#3a4252"><circle cx="20" cy="16" r="5"/><circle cx="36" cy="16" r="5"/><circle cx="52" cy="16" r="5"/></g>
<svg width="{WIDTH - 8}" height="{height}">
{chr(10).join(lines)}
</svg>
</svg>
"""


def main() -> None:
    # A directory of fixed length: lines of the plan are wrapped by it.
    with tempfile.TemporaryDirectory(prefix="ckfs-", dir="/tmp") as place:
        try:
            drawn = draw(record(Path(place)))
        finally:
            for mount in ("mnt", "demo/mnt"):
                subprocess.run(["ckfs", "umount", "--lazy", Path(place) / mount], capture_output=True, check=False, timeout=60)
    Path(sys.argv[1]).write_text(drawn)


if __name__ == "__main__":
    main()
