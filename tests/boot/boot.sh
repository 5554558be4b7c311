#!/usr/bin/env bash
# Boots kernels of Debian in QEMU, without KVM, and tests the static program on each: it mounts, counts pages, measures cold
# reads and memory, compares every byte by read, mmap and O_DIRECT, verifies, is killed, and mounts again. `init` runs there.
# With systemd as the first process `services.py` runs there: mounts are handed over and killed under readers.
#
#   tests/boot/boot.sh                     5.10 6.1 6.12 arm64-16k arm64-64k systemd-6.1 systemd-6.12
#   tests/boot/boot.sh 6.12 arm64-16k      only these
#
# A kernel that Debian has no package of (arm64-64k today) is reported as not run; a word that names none of the above is an
# error. The newest packages of three releases of Debian are looked up and fetched with an own state of apt, so that nothing of
# the machine's changes; QEMU and cross compilers are installed. Run it by hand and before releases: it takes minutes a kernel.
#
#   CKFS_BOOT_PROFILE=dev    another profile of cargo than `release` for the program
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
here=tests/boot
profile=${CKFS_BOOT_PROFILE:-release}
cache=${CKFS_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ckfs}/boot
mesh=fsdp=2,tensor=2
limit_s=3600
work=$(mktemp -d "${TMPDIR:-/tmp}/ckfs-boot.XXXXXX")
guest=
trap '[[ ! $guest ]] || kill "$guest"; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

say() { printf '%s\n' "$*" >&2; }
as_root() { if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi; }

# Architecture of Debian, page in bytes, and the names of the package: of one kernel to boot.
declare -A kernels=(
    [5.10]='amd64 4096 linux-image-5\.10\.[0-9]+-[0-9]+-cloud-amd64'
    [6.1]='amd64 4096 linux-image-6\.1\.[0-9]+-[0-9]+-cloud-amd64'
    [6.12]='amd64 4096 linux-image-6\.12\.[0-9]+(\+deb[0-9]+)?-cloud-amd64'
    [arm64-16k]='arm64 16384 linux-image-[0-9.]+(\+deb[0-9]+)?-arm64-16k'
    [arm64-64k]='arm64 65536 linux-image-[0-9.]+(\+deb[0-9]+)?-arm64-64k'
)
names=("$@")
((${#names[@]})) || names=(5.10 6.1 6.12 arm64-16k arm64-64k systemd-6.1 systemd-6.12)
for name in "${names[@]}"; do
    [[ ${kernels[${name#systemd-}]:-} ]] || { say "boot.sh: no kernel \"$name\", expected some of: ${!kernels[*]}"; exit 2; }
done

missing=()
need() { command -v "$1" >/dev/null || [[ -x /usr/sbin/$1 ]] || missing+=("${@:2}"); }
need qemu-system-aarch64 qemu-system-arm
need qemu-system-x86_64 qemu-system-x86
need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu libc6-dev-arm64-cross
need musl-gcc musl-tools
need depmod kmod
need cpio cpio
need xz xz-utils
need mkfs.ext4 e2fsprogs
if ((${#missing[@]})); then
    say "installing ${missing[*]}"
    as_root apt-get -qq update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
fi
export PATH=$PATH:/usr/sbin:/sbin

# apt with its own lists, for both architectures and three releases of Debian.
mkdir -p "$cache"/{lists/partial,archives/partial,debs}
: >"$cache/status"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
mirror=${CKFS_DEBIAN_MIRROR:-http://deb.debian.org}
{
    for release in bullseye bookworm trixie; do
        echo "deb [signed-by=$keys] $mirror/debian $release main"
        echo "deb [signed-by=$keys] $mirror/debian-security $release-security main"
    done
} >"$cache/sources.list"
own=(-o "Dir::State=$cache" -o "Dir::State::status=$cache/status" -o "Dir::Cache=$cache"
    -o "Dir::Etc::sourcelist=$cache/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root -o Acquire::Languages=none)
# A release that the mirror has no more is missed when its kernel is looked up.
apt-get -qq "${own[@]}" update || say "boot.sh: not all lists of packages could be fetched"

# Prints the path of the newest package that matches a pattern; nothing if there is none.
package() {
    local architecture=$1 pattern=$2 name lists=()
    mapfile -t lists < <(apt-get "${own[@]}" indextargets --format '$(FILENAME)' 'Created-By: Packages' \
        "Architecture: $architecture")
    name=$(/usr/lib/apt/apt-helper cat-file "${lists[@]}" | sed -n 's/^Package: //p' | { grep -xE "$pattern" || true; } |
        sort -uV | tail -n 1)
    [[ -n $name ]] || return 0
    (cd "$cache/debs" && apt-get -qq "${own[@]}" download "$name:$architecture")
    find "$cache/debs" -name "${name}_*_$architecture.deb" -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d' ' -f2-
}

# The program and the reader for an architecture, and a shell.
prepare() {
    local architecture=$1 target linker=() built=$profile
    [[ -d $work/$architecture ]] && return
    case $architecture in
        amd64) target=x86_64-unknown-linux-musl ;;
        arm64)
            target=aarch64-unknown-linux-musl
            linker=(-C linker=aarch64-linux-gnu-gcc)
            ;;
    esac
    rustup --quiet target add "$target"
    CC_x86_64_unknown_linux_musl=musl-gcc CC_aarch64_unknown_linux_musl=aarch64-linux-gnu-gcc \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=aarch64-linux-gnu-gcc \
        cargo build --locked --quiet --bin ckfs --profile "$profile" --target "$target"
    [[ $profile != dev ]] || built=debug
    mkdir -p "$work/$architecture/bin"
    rustc --edition 2024 -O --target "$target" "${linker[@]}" -C strip=symbols -o "$work/$architecture/bin/reader" \
        $here/reader.rs
    local strip=strip
    [[ $architecture == amd64 ]] || strip=aarch64-linux-gnu-strip
    "$strip" -o "$work/$architecture/bin/ckfs" "${CARGO_TARGET_DIR:-target}/$target/$built/ckfs"
    dpkg-deb --fsys-tarfile "$(package "$architecture" busybox-static)" |
        tar -C "$work/$architecture" -x --wildcards '*bin/busybox'
    [[ -e $work/$architecture/bin/busybox ]] || mv "$work/$architecture/usr/bin/busybox" "$work/$architecture/bin/"
}

# The disk of the guests: repositories, and what this machine's program makes of one of them.
make_disk() {
    prepare amd64
    python3 $here/repository.py "$work/disk"
    "$work/amd64/bin/ckfs" export --quiet "$work/disk/tiny" "$work/disk/expected" --mesh "$mesh" >/dev/null
    "$work/amd64/bin/ckfs" export --quiet "$work/disk/wide" "$work/disk/expected-wide" --mesh fsdp=8 \
        --only "full/*" --only "dev3/*" >/dev/null
    mkfs.ext4 -q -O ^has_journal -d "$work/disk" "$work/disk.img" 512M >/dev/null
    rm -rf "$work/disk"
}

# The disk of a guest that systemd boots: Debian with the program, its units, a model and the readers.
make_services_disk() {
    [[ ! -e $work/services.img ]] || return 0
    need mmdebstrap mmdebstrap
    ((${#missing[@]} == 0)) || as_root apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
    local root=$work/services archive=$cache/services-bookworm.tar part=$cache/services-part.tar
    if [[ ! -e $archive ]]; then
        mmdebstrap --quiet --variant=minbase --include=systemd,systemd-sysv,dbus,udev,procps,python3 bookworm "$part" "$mirror/debian"
        mv "$part" "$archive"
    fi
    mkdir -p "$root"
    tar -C "$root" -xf "$archive"
    prepare amd64
    cp "$work/amd64/bin/ckfs" "$root/usr/bin/"
    cp systemd/*@.service "$root/lib/systemd/system/"
    cp $here/services.py tests/python/restart_process.py "$root/opt/"
    python3 $here/repository.py "$work/repositories"
    cp -r "$work/repositories/tiny" "$root/opt/model"
    mkdir -p "$root/etc/ckfs" "$root/etc/systemd/system/ckfs@.service.d" "$root/etc/systemd/system/multi-user.target.wants"
    printf '[Unit]\nStartLimitIntervalSec=0\n' >"$root/etc/systemd/system/ckfs@.service.d/often.conf"
    cat >"$root/etc/systemd/system/services.service" <<UNIT
[Unit]
After=multi-user.target
[Service]
Type=oneshot
TimeoutStartSec=infinity
Environment=HOME=/root
ExecStart=/usr/bin/python3 /opt/services.py
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
UNIT
    ln -s ../services.service "$root/etc/systemd/system/multi-user.target.wants/services.service"
    ln -s /dev/null "$root/etc/systemd/system/serial-getty@ttyS0.service"
    mkfs.ext4 -q -d "$root" "$work/services.img" 2G >/dev/null
    rm -rf "$root" "$work/repositories"
}

# Boots a kernel of a package; the guest's console goes to a file.
boot() {
    local architecture=$1 page=$2 deb=$3 console=$4 init=$5 disk=$6 tree=$work/kernel root=$work/root version path qemu
    rm -rf "$tree" "$root"
    mkdir -p "$tree" "$root"
    dpkg-deb -x "$deb" "$tree"
    [[ -d $tree/lib/modules ]] || ln -s usr/lib "$tree/lib"
    version=$(ls "$tree/lib/modules")
    depmod -b "$tree" "$version"
    cp -a "$work/$architecture/." "$root/"
    cp "$init" "$root/init"
    chmod 755 "$root/init"
    mkdir "$root/modules"
    # In the order of loading; what is built in is left out.
    for name in virtio_pci virtio_blk crc32c_generic ext4 fuse; do
        modprobe -d "$tree" -S "$version" --show-depends "$name" 2>/dev/null | sed -n 's/^insmod \([^ ]*\).*/\1/p'
    done | awk '!seen[$0]++' | while read -r path; do
        name=$(basename "${path%.xz}")
        if [[ $path == *.xz ]]; then xz -dc "$path"; else cat "$path"; fi >"$root/modules/$name"
        echo "/modules/$name"
    done >"$root/modules/order"
    (cd "$root" && find . | cpio --quiet -o -H newc -R 0:0) >"$work/initrd"
    case $architecture in
        amd64) qemu=(qemu-system-x86_64 -machine q35) ;;
        arm64) qemu=(qemu-system-aarch64 -machine virt) ;;
    esac
    local serial=ttyS0
    [[ $architecture == amd64 ]] || serial=ttyAMA0
    # On a busy host the timer's interrupt comes too late for the kernel's check of it.
    timeout -k 10 "$limit_s" "${qemu[@]}" -accel tcg,thread=multi -cpu max -smp 2 -m 1536 -no-reboot -display none \
        -monitor none -serial "file:$console" -nic none -kernel "$tree/boot/vmlinuz-$version" -initrd "$work/initrd" \
        -drive "file=$disk,format=raw,if=none,id=disk,snapshot=on" -device virtio-blk-pci,drive=disk \
        -append "console=$serial quiet panic=-1 no_timer_check rdinit=/init ckfs.page=$page" </dev/null &
    guest=$!
    wait "$guest" || say "qemu ended with $?"
    guest=
}

make_disk
failed=()
for name in "${names[@]}"; do
    read -r architecture page pattern <<<"${kernels[${name#systemd-}]}"
    deb=$(package "$architecture" "$pattern")
    if [[ -z $deb ]]; then
        say "$name: NOT RUN, no package matches $pattern:$architecture"
        continue
    fi
    prepare "$architecture"
    say "=== $name: $(basename "$deb")"
    begun=$SECONDS
    console=$work/console-$name
    case $name in
        systemd-*)
            make_services_disk
            boot "$architecture" "$page" "$deb" "$console" $here/init-systemd "$work/services.img"
            ;;
        *) boot "$architecture" "$page" "$deb" "$console" $here/init "$work/disk.img" ;;
    esac
    tr -d '\r' <"$console" | grep -a '^boot: ' >&2 || true
    if tr -d '\r' <"$console" | grep -aq '^boot: .*PASSED'; then
        say "$name: passed in $((SECONDS - begun)) s"
    else
        say "$name: FAILED; the end of its console:"
        tail -n 60 "$console" >&2
        failed+=("$name")
    fi
done
((${#failed[@]} == 0)) || { say "boot.sh: FAILED: ${failed[*]}"; exit 1; }
