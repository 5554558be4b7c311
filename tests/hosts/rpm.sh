#!/usr/bin/env bash
# Inside a root with dnf: the .rpm is installed, used, installed again, and removed. Run by `hosts.sh`.
#
#   rpm.sh RELEASE        the directory of the release's files, as the root sees it
set -euo pipefail
rpm=$(echo "$1"/ckfs-*."$(uname -m)".rpm)
say() { printf 'rpm: %s\n' "$*"; }
fail() { say "FAILED: $*"; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What a distribution has: a shell for the scripts of packages, and what the package recommends.
cat >"$work/base.spec" <<END
Name: base
Version: 1
Release: 1
Summary: stands for a distribution
License: none
BuildArch: noarch
Provides: /bin/sh fuse3 ca-certificates
%description
%files
END
rpmbuild -bb --quiet --define "_topdir $work/top" "$work/base.spec" >/dev/null 2>&1
base=$(echo "$work"/top/RPMS/noarch/base-1-1.noarch.rpm)

installed() {
    [[ $(ckfs --version | sed -n 1p) == "ckfs $(rpm -q --queryformat '%{VERSION}' ckfs)" ]] || fail "ckfs --version"
    [[ $(mount.ckfs --version) == "$(ckfs --version)" ]] || fail "mount.ckfs"
    [[ -z $(rpm --verify ckfs) ]] || fail "rpm --verify: $(rpm --verify ckfs)"
    ckfs demo --keep --dir "$work/demo" >"$work/log" 2>&1 || { cat "$work/log"; fail "ckfs demo"; }
    ckfs umount "$work/demo/mnt"
    say "dnf: $(rpm -q ckfs), $(rpm -q --queryformat '%{SIZE}' ckfs) bytes in $(rpm -ql ckfs | wc -l) files"
}
removed() {
    [[ ! -e /usr/bin/ckfs && ! -L /usr/sbin/mount.ckfs && ! -e /etc/ckfs ]] || fail "left behind"
}

offline=(--assumeyes --quiet --disablerepo='*')
dnf "${offline[@]}" install "$base" "$rpm" >"$work/log" 2>&1 || { cat "$work/log"; fail "dnf install"; }
installed
dnf "${offline[@]}" reinstall "$rpm" >"$work/log" 2>&1 || { cat "$work/log"; fail "dnf reinstall"; }
[[ -L /usr/sbin/mount.ckfs ]] || fail "mount.ckfs is gone after an installation over the old one"
dnf "${offline[@]}" remove ckfs >"$work/log" 2>&1 || { cat "$work/log"; fail "dnf remove"; }
removed
say "PASSED"
