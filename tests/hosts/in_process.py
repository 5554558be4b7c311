"""Inside a bare Debian: `import ckfs` from the wheel opens a repository and reads what the program exported, by its extension.

    in_process.py SOURCE EXPORTED      exported with --mesh fsdp=2 --dtype f32
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import ckfs
import numpy as np


def main() -> None:
    source, exported = sys.argv[1], Path(sys.argv[2])
    checkpoint = ckfs.open(source, mesh={"fsdp": 2}, dtype="f32")
    compared = 0
    for name, tensor in checkpoint.items():
        path = name.replace(".", "/")
        for device in (0, 1):
            expected = (exported / f"dev{device}" / path).read_bytes()
            found = bytearray(len(expected))
            tensor.read_into(found, tensor.region(device))
            assert found == expected, f"{name} of device {device}"
        whole = tensor[...]
        assert whole.dtype == np.float32 and whole.tobytes() == (exported / "full" / path).read_bytes(), name
        compared += whole.nbytes
    assert compared > 1000, compared
    where = f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}"
    print(f"{compared} bytes on {where}")


if __name__ == "__main__":
    main()
