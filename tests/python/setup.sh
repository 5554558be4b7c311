#!/usr/bin/env bash
# Creates the Python environment of the client tests and prints its path.
#
#   tests/python/setup.sh          all clients: 5.4 GB
#   tests/python/setup.sh short    what the short form of `tests/run` uses, without frameworks: 0.2 GB; the large one, if it is there
#
# It is outside the tree, named by the hash of its requirements and of the engines' modules in it, so that a change of requirements creates a new one and an
# old one is reused at once. The file `complete` is written last, under a lock: an incomplete environment is created anew.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
requirements=$here/requirements.txt
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "setup.sh: $python is $("$python" --version 2>&1), expected Python 3.11 or later (set PYTHON)" >&2
    exit 1
}

as_root() { if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi; }

tag=$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
hash=$( (cat "$requirements" "$here/engines.py"; echo "$tag"; "$python" -c 'import sys; print(sys.base_prefix)') | sha256sum | cut -c1-16)
cache=${CKFS_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ckfs}
venv=$cache/venv-$hash
names= # of packages; none is all
size="5.4 GB, one to a few minutes"
modules="jax, numpy, orbax.checkpoint, peft, pytest, safetensors, torch, transformers"
if [[ ${1:-} == short && ! -e $venv/complete ]]; then
    # With what they depend on; the versions are those of the whole list.
    names="pytest|pytest-xdist|execnet|iniconfig|packaging|pluggy|Pygments|numpy|ml_dtypes|safetensors|huggingface_hub|annotated-doc"
    names+="|anyio|click|filelock|fsspec|h11|hf-xet|httpcore2|httpx2|idna|markdown-it-py|mdurl|PyYAML|rich|shellingham|tqdm|truststore"
    names+="|typer|typing_extensions|prometheus_client"
    venv+=-$(sha256sum <<<"$names" | cut -c1-8)
    size="0.2 GB"
    modules="huggingface_hub, ml_dtypes, numpy, pytest, safetensors"
fi

if [[ ! -e $venv/complete ]]; then
    mkdir -p "$cache"
    exec 9>"$cache/lock" && flock 9
fi
if [[ ! -e $venv/complete ]]; then
    # Debian splits venv's pip off into its own package.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null && command -v apt-get >/dev/null; then
        as_root apt-get -qq update >&2 && as_root apt-get -qq install -y --no-install-recommends python3-venv >&2
    fi
    rm -rf "$venv"
    echo "setup.sh: making $venv ($size)" >&2
    "$python" -m venv "$venv" >&2
    mkdir "$venv/tmp" # wheels are unpacked here: /tmp may be small
    grep -E "${names:+^($names)==}" "$requirements" >"$venv/requirements.txt"
    for attempt in 1 2 3; do
        TMPDIR=$venv/tmp "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-cache-dir --no-deps \
            --only-binary :all: --requirement "$venv/requirements.txt" >&2 && break
        [[ $attempt == 3 ]] && { echo "setup.sh: pip failed three times" >&2; exit 1; }
        sleep $((attempt * 5))
    done
    [[ $names ]] || "$venv/bin/python" "$here/engines.py" "$venv/engines" >&2
    "$venv/bin/python" -c "import $modules" >&2
    rm -rf "$venv/tmp"
    date >"$venv/complete"
fi
echo "$venv"
