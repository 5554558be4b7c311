#!/usr/bin/env bash
# Inside the root of a bare Debian, of this processor or another: the package is installed, used and removed; then the wheel. Run by
# `hosts.sh`.
#
#   walk.sh RELEASE        the directory of the release's files, as the root sees it
set -euo pipefail
release=$1
work=$(mktemp -d /var/tmp/walk.XXXXXX)
trap 'umount "$work/m" 2>/dev/null || true; rm -rf "$work"' EXIT
export HOME=$work TMPDIR=$work LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive
cd "$work"
say() { printf 'walk: %s: %s\n' "$about" "$*"; }
fail() { say "FAILED: $*"; exit 1; }
. /etc/os-release
about="$ID $VERSION_ID $(uname -m)"

# --- the package, by apt, with what it recommends
deb=$(echo "$release"/ckfs_*_"$(dpkg --print-architecture)".deb)
apt-get -qq install -y "$deb" >apt.log 2>&1 || { cat apt.log; fail "apt install"; }
command -v fusermount3 >/dev/null || fail "fuse3 is not installed with the package"
say "installed: $(dpkg-query -W -f '${Package} ${Version} ${Architecture} ${Installed-Size} KiB' ckfs)"
[[ $(ckfs --version | sed -n 1p) == ckfs\ * && -d /etc/ckfs ]] || fail "ckfs --version"
[[ $(mount.ckfs --version) == "$(ckfs --version)" ]] || fail "mount.ckfs"
ckfs doctor >doctor.log 2>&1 || { cat doctor.log; fail "ckfs doctor"; }
say "doctor: $(grep -c '^ok ' doctor.log) ok; $(grep -v '^ok ' doctor.log | tr -s ' ' | tr '\n' ';')"
begun=$SECONDS
ckfs demo --keep --dir demo >demo.log 2>&1 || { cat demo.log; fail "ckfs demo"; }
ckfs umount demo/mnt
say "demo: $((SECONDS - begun)) s"
ckfs plan demo/model --mesh fsdp=2 >plan.log || fail "ckfs plan"
ckfs export --quiet demo/model out --mesh fsdp=2 --dtype f32 || fail "ckfs export"
mkdir m
ckfs mount --quiet demo/model m --mesh fsdp=2 --dtype f32 || fail "ckfs mount"
files=0
while read -r name; do
    cmp "out/$name" "m/$name" || fail "$name differs between export and mount"
    files=$((files + 1))
done < <(cd out && find . -type f ! -path './.ckfs/*')
((files > 10)) || fail "$files files compared"
ckfs verify --full m >verify.log 2>&1 || { cat verify.log; fail "ckfs verify"; }
ckfs umount m || fail "ckfs umount"
[[ -z $(ls m) ]] || fail "mounted after ckfs umount"
say "mount: $files files as exported, verified, unmounted"

# --- the wheel, by pip: the package's program is in it, and tensors are read in process
python3 -m venv --system-site-packages venv
venv/bin/python -m pip install --quiet --disable-pip-version-check --no-index --find-links "$release" ckfs || fail "pip install ckfs"
[[ $(venv/bin/ckfs --version) == "$(ckfs --version)" ]] || fail "the program of the wheel is another"
venv/bin/python "$(dirname "$0")/in_process.py" demo/model out || fail "import ckfs"
say "wheel: $(venv/bin/python -m pip list --disable-pip-version-check 2>/dev/null | grep '^ckfs'), in process as exported"

# --- and away: nothing is left but what was configured
apt-get -qq purge -y ckfs >apt.log 2>&1 || { cat apt.log; fail "apt purge"; }
left=$(find /usr /etc /var/lib/systemd /lib/systemd -name '*ckfs*' 2>/dev/null | grep -v /dpkg/ || true)
[[ -z $left ]] || fail "left behind: $left"
say "PASSED"
