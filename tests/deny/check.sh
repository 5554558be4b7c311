#!/usr/bin/env bash
# Checks licences, sources and known vulnerabilities of the dependencies. The list of vulnerabilities comes from the network: where it
# cannot be fetched, that check is reported as not done.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
. .ci/common.sh

log=$(mktemp)
trap 'rm -f "$log"' EXIT
deny=$(tests/deny/setup.sh)
"$deny" --log-level error check licenses bans sources
if "$deny" --log-level error fetch db 2>"$log"; then
    "$deny" --log-level error check advisories
else
    say "advisories: NOT CHECKED, the database could not be fetched"
fi
