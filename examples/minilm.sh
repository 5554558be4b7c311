#!/usr/bin/env bash
# The worked example on real weights: creates the Python environment if it is missing, builds ckfs, runs minilm.py.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
venv=$(tests/python/setup.sh)
if [[ -z ${CKFS_BIN:-} ]]; then
    cargo build --locked --release --quiet
    export CKFS_BIN=${CARGO_TARGET_DIR:-$PWD/target}/release/ckfs
fi
exec "$venv/bin/python" examples/minilm.py "$@"
