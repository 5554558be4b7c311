#!/usr/bin/env bash
# Creates the environment of the scripts in this directory, MaxText from PyPI and its imports for conversion and loading, and
# prints its path. Needs Python 3.12 or later (set PYTHON), 2.5 GB and some minutes. torch is not needed.
#
#   venv=$(tests/maxtext/setup.sh)
#   $venv/bin/python tests/maxtext/compare.py --size 2
#   $venv/bin/python tests/maxtext/logits.py
#   $venv/bin/python tests/maxtext/train.py
#   $(tests/python/setup.sh)/bin/python tests/maxtext/follow.py --maxtext $venv/bin/python
#
# Where there is no such Python, root.sh makes one in a root of Debian 13.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
venv=${1:-${CKFS_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ckfs}/venv-maxtext}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || {
    echo "setup.sh: $python is $("$python" --version 2>&1), expected Python 3.12 or later (set PYTHON)" >&2
    exit 1
}
if ! cmp -s "$here/requirements.txt" "$venv/complete"; then
    rm -rf "$venv"
    "$python" -m venv "$venv" >&2
    # MaxText's extras need TensorFlow, notebooks and cloud clients; the list has the real imports of these scripts.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --requirement "$here/requirements.txt" >&2
    "$venv/bin/python" -c 'import maxtext.checkpoint_conversion.to_maxtext, maxtext.utils.model_creation_utils' >&2
    cp "$here/requirements.txt" "$venv/complete"
fi
echo "$venv"
