#!/usr/bin/env bash
# Installs Azurite, the emulator of Azure's blob store, and prints the path of its program.
#
# It is outside the tree, named by its version, and made under a lock as the Python environment is. Exit code 3: npm is missing
# and cannot be installed.
set -euo pipefail

# The newest that runs on the Node.js of Debian 12.
version=3.35.0
cache=${CKFS_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ckfs}
dir=$cache/azurite-$version

as_root() { if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi; }

if [[ ! -e $dir/complete ]]; then
    mkdir -p "$cache"
    exec 9>"$cache/lock-azurite" && flock 9
fi
if [[ ! -e $dir/complete ]]; then
    if ! command -v npm >/dev/null && command -v apt-get >/dev/null; then
        echo "azurite.sh: installing nodejs and npm" >&2
        { as_root apt-get -qq update && as_root apt-get -qq install -y --no-install-recommends nodejs npm; } >&2 || true
    fi
    command -v npm >/dev/null || { echo "azurite.sh: npm is missing: install nodejs and npm" >&2; exit 3; }
    rm -rf "$dir"
    mkdir "$dir"
    echo "azurite.sh: making $dir (190 MB, less than a minute)" >&2
    for attempt in 1 2 3; do
        npm install --prefix "$dir" --no-audit --no-fund --ignore-scripts --omit=dev --omit=optional --loglevel=error \
            "azurite@$version" >&2 && break
        [[ $attempt == 3 ]] && { echo "azurite.sh: npm failed three times" >&2; exit 1; }
        sleep $((attempt * 5))
    done
    date >"$dir/complete"
fi
echo "$dir/node_modules/.bin/azurite-blob"
