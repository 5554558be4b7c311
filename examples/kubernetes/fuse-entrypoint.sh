#!/usr/bin/env bash
# The entrypoint of an image with ckfs for plugins that run any FUSE program, and mount by its call of `fusermount3` or by themselves:
#
#   entrypoint.sh SOURCE MNT [NAME=VALUE,...]
#
# * customfuse of Alibaba Cloud's CSI driver and OpenKruise's agents call it so, with the options of the volume as in mount(8):
#   `mesh=fsdp=4:tensor=2,dtype=bf16`. What is mounted must be there when the daemon is ready, and SIGTERM must unmount it.
# * meta-fuse-csi-plugin puts its own `fusermount3` first in PATH.
# * a plugin that passes a descriptor gives /dev/fd/N as MNT.
#
# Variables: CKFS_OPTIONS has options of all volumes.
set -euo pipefail

if [[ $# -lt 2 || $# -gt 3 ]]; then
    echo "usage: ${0##*/} SOURCE MNT [NAME=VALUE,...]" >&2
    exit 2
fi
words=(mount --foreground)
for options in "${CKFS_OPTIONS:-}" "${3:-}"; do
    [[ -z $options ]] || words+=(-o "$options")
done
[[ $2 == /dev/fd/* ]] || words+=(--allow-other --mkdir)
exec "${CKFS:-ckfs}" "${words[@]}" -- "$1" "$2"
