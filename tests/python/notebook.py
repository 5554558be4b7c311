"""Runs the cells of a notebook in this process, as Jupyter's kernel does for those that only show their last expression.

    "$(tests/python/setup.sh)/bin/python" tests/python/notebook.py examples/tensors.ipynb     writes its outputs anew
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
from pathlib import Path


def run(cells: list[dict]) -> list[list[dict]]:
    """The outputs of each cell, in this directory."""
    names: dict[str, object] = {"__name__": "__main__"}
    outputs: list[list[dict]] = []
    count = 0
    for cell in cells:
        if cell["cell_type"] != "code":
            outputs.append([])
            continue
        count += 1
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"cell {count}", "exec"), names)
        value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names) if last else None
        outputs.append([] if value is None else [shown(value, count)])
    return outputs


def shown(value: object, count: int) -> dict:
    page = getattr(value, "_repr_html_", None)
    data = {"text/html": [page()]} if page else {"text/plain": repr(value).splitlines(keepends=True)}
    return {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}


def main(path: Path) -> None:
    import mounting
    import package

    package.import_ckfs()
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        mounting.run("demo", "--keep", "--dir", "demo")
        mounting.run("umount", "demo/mnt")
        outputs = run(notebook["cells"])
    count = 0
    for cell, made in zip(notebook["cells"], outputs):
        if cell["cell_type"] == "code":
            count += 1
            cell |= {"outputs": made, "execution_count": count}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
