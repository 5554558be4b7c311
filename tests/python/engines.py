#!/usr/bin/env python3
"""Unpacks into a directory the modules of vLLM and SGLang that download a model, from the distributions on PyPI. The engines as a
whole, with what they need of a GPU, are gigabytes. `setup.sh` calls it.

    engines.py DIRECTORY
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path

FILES = "https://files.pythonhosted.org/packages"
# Below the address: the digest of the file, the directory in it, and the modules.
ENGINES = {
    "f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/vllm-0.33.0.tar.gz": (
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        "vllm-0.33.0/",
        [
            "vllm/model_executor/model_loader/weight_utils.py",
            "vllm/transformers_utils/config.py",
            "vllm/transformers_utils/repo_utils.py",
        ],
    ),
    "57/dd/0206d00b2ea5b163bbdd216e91cc4f23ea90fde8620db0a6272d4236b68e/sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl": (
        "00b3cd5b265ac76c64185fbb6b95424f324ddd9f428d0306b77bc9db9d859937",
        "",
        ["sglang/srt/model_loader/weight_utils.py", "sglang/srt/utils/common.py", "sglang/srt/utils/hf_transformers/common.py"],
    ),
}


def reader(name: str, body: bytes) -> Callable[[str], bytes]:
    if name.endswith(".whl"):
        return zipfile.ZipFile(io.BytesIO(body)).read
    archive = tarfile.open(fileobj=io.BytesIO(body))
    return lambda path: archive.extractfile(path).read()


def main() -> None:
    out = Path(sys.argv[1])
    for address, (digest, above, modules) in ENGINES.items():
        with urllib.request.urlopen(f"{FILES}/{address}", timeout=300) as reply:
            body = reply.read()
        if hashlib.sha256(body).hexdigest() != digest:
            sys.exit(f"{FILES}/{address}: expected the SHA-256 {digest}, found {hashlib.sha256(body).hexdigest()}")
        read = reader(address, body)
        for module in modules:
            (out / module).parent.mkdir(parents=True, exist_ok=True)
            (out / module).write_bytes(read(above + module))


if __name__ == "__main__":
    main()
