#!/usr/bin/env bash
# Installs a release where people do, and uses it there: on bare Debian 12 and 13 for x86-64, and for aarch64 by qemu-user; under
# systemd as the first process; by dnf; as a container. Nothing of it is on the machine afterwards.
#
#   tests/hosts/hosts.sh RELEASE                     all of them; RELEASE is the directory that `.ci/release` made
#   tests/hosts/hosts.sh RELEASE trixie-arm64 image  only these
#
# Names: bookworm-amd64 trixie-amd64 bookworm-arm64 trixie-arm64, systemd-bookworm systemd-trixie, dnf, image. It needs root, and
# installs Debian's packages where they are missing. Run it by hand and before releases: a root for aarch64 takes half an hour of
# a processor to make; roots are kept as archives in the cache of the tests, and the rest is minutes.
set -euo pipefail
release=$(realpath -- "${1:?the directory of a release}")
here=$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")
shift
names=("$@")
((${#names[@]})) || names=(bookworm-amd64 trixie-amd64 bookworm-arm64 trixie-arm64 systemd-bookworm systemd-trixie dnf image)
cache=${CKFS_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ckfs}/hosts
mirror=${CKFS_DEBIAN_MIRROR:-http://deb.debian.org}/debian
export PATH=$PATH:/usr/sbin:/sbin

say() { printf '%s\n' "$*" >&2; }
[[ $(id -u) == 0 ]] || { say "hosts.sh: needs root"; exit 1; }
work=$(mktemp -d "${TMPDIR:-/tmp}/ckfs-hosts.XXXXXX")
chmod 755 "$work"
booted=
finish() {
    [[ ! $booted ]] || kill -KILL "$booted" 2>/dev/null || true
    rm -rf --one-file-system "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM

# Installs packages unless the program is there.
need() {
    command -v "$1" >/dev/null && return
    say "installing ${*:2}"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${@:2}" >/dev/null
}

# Runs a command in mounts and processes of its own, which end with it; on a system of Debian for aarch64, with its programs too.
apart() {
    if [[ $architecture == arm64 ]]; then
        "$here/emulated.py" "$@"
    else
        unshare --mount --pid --fork --kill-child --mount-proc "$@"
    fi
}

# Nothing of this shell's environment is meant for other systems.
bare=(env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8)

# Runs a command inside a root, which sees the devices of the machine, the release and these scripts.
inside() {
    local root=$1
    shift
    mkdir -p "$root/release" "$root/hosts"
    apart sh -ec 'root=$1 release=$2 here=$3; shift 3
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount --bind "$release" "$root/release"
        mount --bind "$here" "$root/hosts"
        exec "$@"' inside "$root" "$release" "$here" "${bare[@]}" chroot "$root" "$@"
}

# A bare root of a release of Debian in $work/NAME, with what is named; it is made once, and kept as an archive.
make_root() {
    local suite=$1 archive=$cache/$1-$architecture$2.tar
    local root=$work/$1-$architecture$2 packages=ca-certificates,${3:-python3,python3-venv,python3-numpy}
    if [[ ! -s $archive ]]; then
        need debootstrap debootstrap
        mkdir -p "$cache"
        # A root that nobody boots again need not reach the disk at each step.
        mkdir -p "$root/etc/dpkg/dpkg.cfg.d"
        echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/unsafe-io"
        debootstrap --foreign --arch="$architecture" --variant=minbase --include="$packages" "$suite" "$root" "$mirror" >"$work/log" ||
            { tail "$work/log" >&2; return 1; }
        # Byte code of Python's packages takes most of the time under emulation, and is made anyway for what is imported.
        if [[ $architecture == arm64 ]]; then
            printf '%s\n' /usr/bin/py3compile /usr/bin/py3compile.real : >>"$root/var/lib/dpkg/diversions"
            ln -s true "$root/usr/bin/py3compile"
        fi
        # In the namespace of another processor's programs no devices can be made; debootstrap knows such places by this word.
        apart env container=lxc chroot "$root" /debootstrap/debootstrap --second-stage >"$work/log" ||
            { tail "$work/log" >&2; return 1; }
        tar -C "$root" --one-file-system -cf "$archive.part" .
        mv "$archive.part" "$archive"
        rm -rf --one-file-system "$root"
    fi
    mkdir -p "$root"
    tar -C "$root" -xf "$archive"
    # Names of hosts are found as on this machine.
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    inside "$root" apt-get -qq update
    printf '%s\n' "$root"
}

walk() {
    local root
    [[ $architecture == amd64 ]] || need qemu-aarch64-static qemu-user-static
    root=$(make_root "$1" "")
    inside "$root" /hosts/walk.sh /release
    rm -rf --one-file-system "$root"
}

# The units, in a container that systemd has booted. It shares nothing with the machine but the kernel; its cgroups are version 2.
systemd() {
    local architecture=amd64 root
    need systemd-nspawn systemd-container
    root=$(make_root "$1" -systemd systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,procps)
    inside "$root" sh -c 'DEBIAN_FRONTEND=noninteractive apt-get -qq install -y /release/ckfs_*_amd64.deb >/dev/null 2>&1'
    SYSTEMD_NSPAWN_UNIFIED_HIERARCHY=1 systemd-nspawn --directory "$root" --boot --register=no --keep-unit --private-network \
        --console=pipe --capability=all --bind-ro="$here:/hosts" </dev/null >"$work/console" 2>&1 &
    local container=$!
    for _ in $(seq 300); do
        booted=$(pgrep -P "$container" -x systemd || true)
        [[ ! $booted || ! -S /proc/$booted/root/run/systemd/private ]] || break
        sleep 0.2
    done
    [[ $booted ]] || { tail "$work/console" >&2; return 1; }
    # As udev does where it runs.
    nsenter --target "$booted" --all sh -c '[ -e /dev/fuse ] || mknod -m 666 /dev/fuse c 10 229; systemctl is-system-running --wait >/dev/null || true'
    local code=0
    nsenter --target "$booted" --all "${bare[@]}" /hosts/services.sh || code=$?
    nsenter --target "$booted" --all systemctl --no-block poweroff || true
    wait "$container" || true
    booted=
    rm -rf --one-file-system "$root"
    return "$code"
}

# The .rpm by an installer that resolves what it needs. No distribution of RPM's is to be had from Debian's packages: a stub
# stands for the packages of one, in an empty database.
dnf() {
    local architecture=amd64 root
    root=$(make_root bookworm -rpm dnf,rpm)
    inside "$root" /hosts/rpm.sh /release
    rm -rf --one-file-system "$root"
}

# The image, by podman and skopeo: both platforms are in it, this one's runs, mounts and serves.
image() {
    local file=("$release"/ckfs-*-oci.tar) name=docker.io/library/ckfs platform version
    need podman podman crun
    need skopeo skopeo
    version=$(basename "${file[0]}" -oci.tar)
    version=${version#ckfs-}
    for platform in amd64 arm64; do
        [[ $(skopeo inspect --config --override-arch $platform "oci-archive:${file[0]}") == *"\"architecture\": \"$platform\""* ]] ||
            { say "image: no platform $platform"; return 1; }
    done
    # In mounts of its own: its storage is in $work, and its cgroups are version 2 where the machine has both.
    unshare --mount sh -c 'umount -l /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup; exec "$@"' image \
        "$here/image.sh" "${file[0]}" "$name:$version" "$work/containers"
}

failed=()
for name in "${names[@]}"; do
    begun=$SECONDS
    say "=== $name"
    architecture=${name#*-}
    case $name in
        bookworm-amd64 | trixie-amd64 | bookworm-arm64 | trixie-arm64) step=(walk "${name%-*}") ;;
        systemd-bookworm | systemd-trixie) step=(systemd "${name#*-}") ;;
        dnf | image) step=("$name") ;;
        *) say "hosts.sh: no step \"$name\""; exit 2 ;;
    esac
    # A step is a shell of its own, with `set -e` in force, which it would not be in a condition.
    set +e
    (set -e; trap - EXIT; "${step[@]}")
    code=$?
    set -e
    if ((code == 0)); then say "$name: passed in $((SECONDS - begun)) s"; else say "$name: FAILED"; failed+=("$name"); fi
done
((${#failed[@]} == 0)) || { say "hosts.sh: FAILED: ${failed[*]}"; exit 1; }
say "hosts.sh: all passed"
