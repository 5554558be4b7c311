#!/usr/bin/env bash
# With podman: the image of a release is loaded, and does as the guide says. Run by `hosts.sh`, in mounts of its own.
#
#   image.sh ARCHIVE NAME STORAGE
set -euo pipefail
archive=$1 name=$2 storage=$3
say() { printf 'image: %s\n' "$*"; }
fail() { say "FAILED: $*"; exit 1; }
podman() { command podman --root "$storage/root" --runroot "$storage/run" --storage-driver vfs --cgroup-manager cgroupfs --events-backend file "$@"; }
# Limits as they are here: an engine's own may be above them.
run() { podman run --rm --cgroups=disabled --ulimit nofile=1024:4096 --ulimit nproc=4096:4096 "$@"; }
data=$storage/data mounts=$storage/mounts
mkdir -p "$data" "$mounts"

podman load --quiet --input "$archive"
say "$(podman image inspect --format '{{.Os}}/{{.Architecture}} {{.Size}} bytes' "$name")"
version=$(run --network=none "$name" --version | sed -n 1p)
[[ $version == "ckfs ${name##*:}" ]] || fail "--version: $version"

# Files that do not need a mount: any user, no rights, nothing written but the target.
run --network=none --device /dev/fuse --cap-add SYS_ADMIN --volume "$data:/data" "$name" demo --keep --dir /data/demo >"$storage/log" 2>&1 ||
    { cat "$storage/log"; fail "demo"; }
say "demo, in the container: $(tail -n 1 "$storage/log")"
chmod -R a+rX "$data"
run --network=none --user 65532 --read-only --cap-drop ALL --volume "$data:/data:ro" "$name" plan /data/demo/model --mesh fsdp=2 >"$storage/log" 2>&1 ||
    { cat "$storage/log"; fail "plan"; }
mkdir "$data/out"
chown 65532 "$data/out"
run --network=none --user 65532 --read-only --cap-drop ALL --volume "$data:/data" "$name" export --quiet /data/demo/model /data/out/e --mesh fsdp=2 ||
    fail "export"
say "plan and export: user 65532, no capability, nothing writable"

# The Hub is out of reach, but would be trusted.
! run --network=none "$name" plan org/name --source-timeout 2s >"$storage/log" 2>&1 || fail "a name of the Hub is planned without a network"
! grep -i certificate "$storage/log" || fail "no certificates"
say "Hub: $(tail -n 1 "$storage/log")"

# A mount of the container that is seen outside.
mount --bind "$mounts" "$mounts"
mount --make-rshared "$mounts"
run --detach --name mounted --network=none --device /dev/fuse --cap-add SYS_ADMIN --volume "$data:/data:ro" --volume "$mounts:/mnt:rshared" \
    "$name" mount /data/demo/model /mnt/llama --mkdir --mesh fsdp=2 --foreground --allow-other >/dev/null
for _ in $(seq 100); do [[ ! -s $mounts/llama/full/embed ]] || break; sleep 0.1; done
files=0
while read -r file; do
    cmp "$data/out/e/$file" "$mounts/llama/$file" || fail "$file differs between export and mount"
    files=$((files + 1))
done < <(cd "$data/out/e" && find . -type f ! -path './.ckfs/*')
((files > 10)) || fail "$files files compared"
podman exec mounted /usr/bin/ckfs status /mnt/llama >"$storage/log" || { cat "$storage/log"; fail "status, by exec"; }
podman stop --time 40 mounted >/dev/null
! grep -q " $mounts/llama " /proc/self/mountinfo || fail "mounted after the container's end"
say "mount: $files files as exported, seen outside, unmounted by SIGTERM"

# Files over HTTP, without any right.
run --detach --name served --network=host --user 65532 --read-only --cap-drop ALL --volume "$data:/data:ro" "$name" \
    serve /data/demo/model --mesh fsdp=2 --listen 127.0.0.1:18767 >/dev/null
served() { python3 -c 'import sys, urllib.request as r; sys.stdout.buffer.write(r.urlopen("http://127.0.0.1:18767" + sys.argv[1]).read())' "$1"; }
for _ in $(seq 100); do served /readyz >/dev/null 2>&1 && break; sleep 0.1; done
served /files/full/embed | cmp - "$data/out/e/full/embed" || fail "serve"
podman stop --time 40 served >/dev/null
say "serve: user 65532, no capability; a file as exported"
# Its own removal of ended containers may still go on.
podman rm --all --force >/dev/null
podman rmi --all --force >/dev/null
say "PASSED"
