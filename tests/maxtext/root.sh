#!/usr/bin/env bash
# Where no Python 3.12 is at hand: makes the root of Debian 13 with its Python 3.13 and the environment of setup.sh, for
# `follow.py --root ROOT`. Needs root rights, debootstrap, 4 GB and some minutes. `root.sh ROOT off` undoes its two mounts.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
root=$1
mirror=${MIRROR:-http://deb.debian.org/debian}

if [[ ${2:-} == off ]]; then
    umount "$root/dev" "$root/proc"
    exit
fi
if [[ ! -e $root/usr/bin/python3 ]]; then
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates trixie "$root" "$mirror" >&2
fi
mountpoint -q "$root/proc" || mount --bind /proc "$root/proc"
mountpoint -q "$root/dev" || mount --bind /dev "$root/dev"
# The network and the package index as this system has them.
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}"; do
    if [[ -e $file ]]; then install -D -m 644 "$file" "$root$file"; fi
done
install -D -t "$root/opt/ckfs-maxtext" "$here/setup.sh" "$here/requirements.txt"
HOME=/root TMPDIR=/var/tmp chroot "$root" /opt/ckfs-maxtext/setup.sh /opt/venv-maxtext >&2
echo "$root"
