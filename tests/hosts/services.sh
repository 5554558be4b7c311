#!/usr/bin/env bash
# Inside a system that systemd has booted, with the package installed: the units as an administrator uses them. Run by `hosts.sh`.
#
#   services.sh        as root of the system; prints one line for what was shown, and ends at the first that is not so
set -euo pipefail
export SYSTEMD_COLORS=0 SYSTEMD_PAGER=

say() { printf 'services: %s\n' "$*"; }
fail() {
    journalctl --no-pager -n 40 -o short-precise >&2 || true
    say "FAILED: $*"
    exit 1
}
# A property of a unit.
of() { systemctl show --value -p "$2" "$1"; }
# Waits until a command succeeds, as many seconds as the first argument says.
within() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || fail "not in time: $*"
        sleep 0.2
    done
}
is() { [[ $(of "$1" "$2") == "$3" ]]; }
other_pid() { [[ $(of "$1" MainPID) != "$2" && $(of "$1" MainPID) != 0 ]]; }
is_away() { [[ $(grep -c " $1 fuse" /proc/self/mounts) == 0 ]]; }
# Whether the journal of a unit has a line like this. All of it is read: a closed pipe would count as a failure.
logged() { [[ $(journalctl -o cat -u "$1" | grep -c "$2") != 0 ]]; }
# Makes a drop-in of a unit from standard input, or from a file.
drop_in() {
    mkdir -p "/etc/systemd/system/$1.d"
    cat >"/etc/systemd/system/$1.d/$2.conf"
    systemctl daemon-reload
}
examples=/usr/share/doc/ckfs/examples

say "$(systemctl --version | head -n 1), $(ckfs --version | head -n 1)"
ckfs demo --keep --dir /srv/demo >/dev/null
ckfs umount /srv/demo/mnt
model=/srv/demo/model
chmod -R a+rX /srv/demo
mkdir -p /mnt/small

# --- the mount: up when it answers, seen by others, in the journal with its fields
sed -e "s#^source = .*#source = \"$model\"#; s#^mountpoint = .*#mountpoint = \"/mnt/small\"#" $examples/example.toml \
    >/etc/ckfs/small.toml
systemctl start ckfs@small
is ckfs@small ActiveState active || fail "ckfs@small is $(of ckfs@small ActiveState)"
[[ $(of ckfs@small Type) == notify && -s /mnt/small/full/embed ]] || fail "active, but the mount does not answer"
setpriv --reuid nobody --clear-groups cat /mnt/small/full/embed >/dev/null || fail "another user cannot read"
say "mount: active after READY=1, $(of ckfs@small StatusText)"
systemctl reload ckfs@small
is ckfs@small ActiveState active || fail "after a reload"
# A daemon that was killed: readers have errors until the next one mounts.
pid=$(of ckfs@small MainPID)
kill -KILL "$pid"
within 20 other_pid ckfs@small "$pid"
within 20 is ckfs@small ActiveState active
cmp /mnt/small/full/embed /srv/demo/model/embed 2>/dev/null || cat /mnt/small/full/embed >/dev/null || fail "after SIGKILL"
[[ $(grep -c ' /mnt/small fuse' /proc/self/mounts) == 1 ]] || fail "mounts: $(grep /mnt/small /proc/self/mounts)"
say "killed: mounted again, one mount"

# --- a stop with a reader: a warning in the journal, with its priority and fields; the reader ends in peace
exec 7</mnt/small/full/embed
systemctl --no-block stop ckfs@small
within 20 is_away /mnt/small
found=$(journalctl -o json -u ckfs@small CKFS_MOUNT=/mnt/small "CKFS_SOURCE=$model" PRIORITY=4 SYSLOG_IDENTIFIER=ckfs -n 1)
[[ $found == *detaching* ]] || fail "no warning with its fields: $found"
[[ $(wc -c <&7) -gt 0 ]] || fail "an open file is cut off"
exec 7<&-
within 10 is ckfs@small ActiveState inactive
say "journal: a warning with CKFS_MOUNT, CKFS_SOURCE, PRIORITY=4"

# --- WatchdogSec: signs of life arrive, and a daemon that is stopped is started anew
drop_in ckfs@small.service watchdog <<<$'[Service]\nWatchdogSec=4'
systemctl restart ckfs@small
pid=$(of ckfs@small MainPID)
first=$(of ckfs@small WatchdogTimestampMonotonic)
sleep 5
second=$(of ckfs@small WatchdogTimestampMonotonic)
((second > first && first > 0)) || fail "no sign of life in 5 s: $first, $second"
is ckfs@small MainPID "$pid" || fail "a daemon that lives was started anew"
kill -STOP "$pid"
begun=$SECONDS
within 30 other_pid ckfs@small "$pid"
within 30 is ckfs@small ActiveState active
logged ckfs@small "[Ww]atchdog timeout" || fail "not by the watchdog"
cat /mnt/small/full/embed >/dev/null || fail "after the watchdog"
say "watchdog: signs of life arrive; stopped, mounted again after $((SECONDS - begun)) s"
systemctl stop ckfs@small
is_away /mnt/small || fail "mounted after systemctl stop"

# --- a wrong configuration is tried once; one that is not there is not begun
sed -e 's/^layout = .*/layout = "no-such"/; s#/mnt/small#/mnt/wrong#' /etc/ckfs/small.toml >/etc/ckfs/wrong.toml
mkdir -p /mnt/wrong
systemctl start ckfs@wrong && fail "a wrong configuration starts"
sleep 2
[[ $(of ckfs@wrong ExecMainStatus) == 2 && $(of ckfs@wrong NRestarts) == 0 ]] ||
    fail "wrong: status $(of ckfs@wrong ExecMainStatus), $(of ckfs@wrong NRestarts) restarts"
is ckfs@wrong ActiveState failed || fail "a wrong configuration is $(of ckfs@wrong ActiveState)"
say "wrong configuration: code 2, no restart"
systemctl start ckfs@nothing && fail "a configuration that is not there starts"
# A source that is out of reach may come: it is tried again.
sed -e "s#^source = .*#source = \"/srv/later\"#; s#/mnt/small#/mnt/later#" /etc/ckfs/small.toml >/etc/ckfs/later.toml
mkdir -p /mnt/later
systemctl start ckfs@later && fail "a source that is not there starts"
ln -s "$model" /srv/later
within 20 is ckfs@later ActiveState active
say "source that was late: mounted after $(of ckfs@later NRestarts) restarts"
systemctl stop ckfs@later

# --- the drop-ins, as they are shipped
drop_in ckfs@wrong.service check-first <$examples/drop-in/check-first.conf
systemctl reset-failed ckfs@wrong
systemctl start ckfs@wrong || fail "a condition that does not hold is no failure"
is ckfs@wrong ActiveState inactive || fail "check-first: $(of ckfs@wrong ActiveState)"
logged ckfs@wrong "Skipped due to 'exec-condition'" || fail "check-first: not passed over"
say "check-first.conf: passed over, not failed"
cat >/etc/systemd/system/data.mount <<END
[Mount]
What=tmpfs
Where=/data
Type=tmpfs
END
drop_in ckfs@small.service data <$examples/drop-in/data.conf
[[ $(of ckfs@small Requires) == *data.mount* && $(of ckfs@small After) == *data.mount* ]] || fail "RequiresMountsFor"
systemctl start ckfs@small
is data.mount ActiveState active || fail "/data was not mounted first"
say "data.conf: /data was mounted first"
drop_in ckfs@small.service memory <$examples/drop-in/memory.conf
[[ $(of ckfs@small MemoryMax) == $((32 << 30)) ]] || fail "MemoryMax"
drop_in ckfs@small.service late-network <$examples/drop-in/late-network.conf
[[ $(of ckfs@small TimeoutStartUSec) == 30min ]] || fail "TimeoutStartSec"
mkdir -p /etc/systemd/system/reader.service.d
printf '[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/cat /mnt/small/full/embed\nStandardOutput=null\n' \
    >/etc/systemd/system/reader.service
systemctl stop ckfs@small
sed 's/llama/small/' $examples/drop-in/reader.conf | drop_in reader.service ckfs
systemctl start reader || fail "reader.conf: the reader started before the mount"
is ckfs@small ActiveState active || fail "reader.conf"
systemctl stop ckfs@small
is reader.service ActiveState inactive || fail "a reader goes on without its mount"
say "reader.conf: started the mount, ended with it"

# --- the server: a user without rights, the same for all instances, since they share a cache
for port in 18765 18766; do
    printf 'source = "%s"\nmesh = "fsdp=2"\n[serve]\nlisten = "127.0.0.1:%s"\n' "$model" $port >/etc/ckfs/web$port.toml
    systemctl start ckfs-serve@web$port
done
# Answers in bash: a bare system has no curl.
ask() {
    exec 5<>/dev/tcp/127.0.0.1/"$1"
    printf 'GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n' "$2" >&5
    head -n 1 <&5
    exec 5<&-
}
users=()
for port in 18765 18766; do
    [[ $(ask $port /readyz) == *" 200 "* ]] || fail "serve: $(ask $port /readyz)"
    pid=$(of ckfs-serve@web$port MainPID)
    users+=("$(awk '/^Uid/ { print $2 }' "/proc/$pid/status")")
    [[ $(awk '/^CapEff/ { print $2 }' "/proc/$pid/status") == 0000000000000000 ]] || fail "the server has capabilities"
    nsenter --target "$pid" --mount --setuid "${users[-1]}" --setgid "${users[-1]}" touch "/var/cache/ckfs-serve/$port" ||
        fail "serve@web$port cannot write its cache"
done
[[ ${users[0]} == "${users[1]}" && ${users[0]} != 0 ]] || fail "the servers run as ${users[*]}"
pid=$(of ckfs-serve@web18765 MainPID)
drop_in ckfs-serve@web18765.service watchdog <<<$'[Service]\nWatchdogSec=4'
systemctl restart ckfs-serve@web18765
pid=$(of ckfs-serve@web18765 MainPID)
sleep 5
is ckfs-serve@web18765 MainPID "$pid" || fail "a server that lives was started anew"
kill -STOP "$pid"
within 30 other_pid ckfs-serve@web18765 "$pid"
within 30 is ckfs-serve@web18765 ActiveState active
[[ $(ask 18765 /readyz) == *" 200 "* ]] || fail "serve after the watchdog"
systemctl stop 'ckfs-serve@*'
say "serve: two, as one user without rights, each writes the cache; stopped, started anew"

# --- the unit of users
if command -v loginctl >/dev/null && command -v fusermount3 >/dev/null; then
    useradd --create-home ada 2>/dev/null || true
    loginctl enable-linger ada
    within 20 test -S "/run/user/$(id -u ada)/bus"
    as_ada() { setpriv --reuid ada --regid ada --init-groups env HOME=/home/ada XDG_RUNTIME_DIR="/run/user/$(id -u ada)" "$@"; }
    as_ada mkdir -p /home/ada/.config/ckfs /home/ada/mnt
    printf 'source = "%s"\nmountpoint = "/home/ada/mnt"\nmesh = "fsdp=2"\n' "$model" | as_ada tee /home/ada/.config/ckfs/own.toml >/dev/null
    as_ada systemctl --user start ckfs@own || { as_ada systemctl --user status ckfs@own; fail "the unit of users"; }
    as_ada cat /home/ada/mnt/full/embed >/dev/null || fail "the mount of a user"
    pid=$(as_ada systemctl --user show --value -p MainPID ckfs@own)
    kill -KILL "$pid"
    sleep 3
    as_ada cat /home/ada/mnt/full/embed >/dev/null || fail "the mount of a user after SIGKILL"
    as_ada systemctl --user stop ckfs@own
    is_away /home/ada/mnt || fail "the mount of a user is left"
    say "unit of users: mounted, killed and mounted again, stopped"
fi
say "PASSED"
