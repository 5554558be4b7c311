"""`ckfs.jax`: arrays with the shardings of an abstract tree, in one process and in two."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import package
from guide_blocks import ROOT
from servers import free_port

package.import_ckfs()


@pytest.mark.parametrize("processes", [1, 2])
def test_arrays_of_every_sharding(repo, processes):
    script = ROOT / "tests/python/jax_process.py"
    words = [str(processes), str(free_port()), str(repo("llama").path)]
    running = [
        subprocess.Popen([sys.executable, script, str(number), *words], stdout=-1, stderr=-1, text=True) for number in range(processes)
    ]
    for process in running:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-4000:]
        assert json.loads(out.splitlines()[-1])["checked"] > 100
