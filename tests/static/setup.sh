#!/usr/bin/env bash
# Creates the Python environment of the static checks and prints its path. It is outside the tree, named by the hash of its
# requirements, and kept.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
hash=$( (cat "$here/requirements.txt"; echo "$tag"; "$python" -c 'import sys; print(sys.base_prefix)') | sha256sum | cut -c1-16)
cache=${CKFS_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ckfs}
venv=$cache/static-$hash

if [[ ! -e $venv/complete ]]; then
    mkdir -p "$cache"
    exec 9>"$cache/lock-static" && flock 9
fi
if [[ ! -e $venv/complete ]]; then
    rm -rf "$venv"
    "$python" -m venv "$venv" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps --only-binary :all: \
        --requirement "$here/requirements.txt" >&2
    date >"$venv/complete"
fi
echo "$venv"
