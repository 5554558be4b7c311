#!/usr/bin/env bash
# Checks the types of the Python package, as it is installed: by mypy, strictly, and by pyright, with the frameworks of the tests. A
# program of a user's is checked too. The extension must be built.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
bin=$(tests/static/setup.sh)/bin
python=$(tests/python/setup.sh)/bin/python
package=$(cd tests/python && "$python" -c 'import package; print(package.path())')
user=$PWD/tests/static/typed_use.py
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cd -- "$package"
"$bin/mypy" --strict --python-executable "$python" --cache-dir "$work" -p ckfs
MYPYPATH=$package "$bin/mypy" --strict --python-executable "$python" --cache-dir "$work" "$user"
cp "$user" "$work/use.py"
cp -rL ckfs "$work/ckfs"
cat >"$work/pyrightconfig.json" <<END
{"include": ["ckfs", "use.py"], "enableTypeIgnoreComments": true, "reportUnnecessaryTypeIgnoreComment": "error"}
END
cd -- "$work"
"$bin/pyright" --pythonpath "$python" --warnings
