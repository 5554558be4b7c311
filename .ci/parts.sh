# To be sourced by `tests/run`, which has a function for each part: runs them, and tells how long each took, and which failed.
CI=${CI:-false}
export CI
export CARGO_TERM_PROGRESS_WHEN=never RUST_BACKTRACE=1
export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0} # a fresh checkout gains nothing by gigabytes of it
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/ckfs-run.XXXXXX")
chmod 755 "$TMPDIR" # a test mounts below it as another user
work=$TMPDIR
export TMPDIR XDG_STATE_HOME=$TMPDIR/state # for the logs of daemons
. .ci/common.sh
rows=() failed=()
# The parts that run: name and process, which leads a group of its own. What a part prints is in `$work/out.NAME`.
declare -A running=()

# Mount points below this run's directory, innermost first.
left_behind() { awk -v below="$work/" 'index($5, below) == 1 { print $5 }' /proc/self/mountinfo | sort -r; }

finish() {
    local code=$? point
    trap - EXIT
    for name in "${!running[@]}"; do kill -- "-${running[$name]}" 2>/dev/null || true; done
    wait
    # Again at the end, where it is found.
    for name in "${failed[@]}"; do
        say $'\n'"=== of $name, which failed"
        grep -E '^(test .* FAILED|FAILED |ERROR |WRONG|error|E  )|panicked at' "$work/out.$name" | head -n 40 >&2 || true
        say "..."
        tail -n 20 "$work/out.$name" >&2 || true
    done
    while read -r point; do
        say "tests/run: left behind: $point"
        failed+=("mounts left behind")
        umount -l "$point" 2>/dev/null || fusermount3 -uz "$point" || true
    done < <(left_behind)
    rm -rf --one-file-system "$work" || true
    if ((${#rows[@]})); then
        say ""
        say "seconds  of processor  part"
        printf '%7.0f  %12.0f  %s\n' "${rows[@]}" >&2
        printf '%7d  %12s  total\n' "$SECONDS" "" >&2
    fi
    if ((${#failed[@]})); then
        say "tests/run: FAILED: ${failed[*]}"
        code=1
    elif ((code == 0)); then
        say "tests/run: all passed"
    fi
    exit "$code"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Starts one part with `set -e` in force (it would not be inside a condition). Its exit code and times are in files.
start() {
    local begun=$SECONDS
    : >"$work/out.$1"
    set -m
    (
        trap - EXIT INT TERM
        [[ -z ${2:-} ]] || renice -n 19 -p "$BASHPID" >/dev/null
        set +e
        (
            times_of=$work/times.$1 # a variable of the shell: those of a function are gone when it fails
            trap 'times >"$times_of"' EXIT
            set -e
            "part_$1"
        )
        echo "$? $((SECONDS - begun))" >"$work/part.$1"
    ) >>"$work/out.$1" 2>&1 &
    running[$1]=$!
    set +m
}

# Waits for a part. Remembers how long it took, how much processor time, and a failure.
join() {
    local seconds=0 code=1 failure='' processor
    wait "${running[$1]}" || true
    kill -- "-${running[$1]}" 2>/dev/null || true # what it has left
    unset "running[$1]"
    read -r code seconds <"$work/part.$1" || true
    if ((code)); then failed+=("$1") failure=" FAILED"; fi
    processor=$(awk '{ gsub(/[ms]/, " "); sum += 60 * ($1 + $3) + $2 + $4 } END { print sum + 0 }' "$work/times.$1" || true)
    rows+=("$seconds" "$processor" "$1${2:-}$failure")
}

# What runs beside is shown when it is waited for.
join_beside() {
    local name
    for name in "${!running[@]}"; do
        say $'\n'"=== waiting for $name, beside others"
        renice -n 0 -g "${running[$name]}" >/dev/null 2>&1 || true # what is left of it need not give way any more
        follow "$name"
        join "$name" " (beside others)"
    done
}

# Shows what a part prints, until its end. It is waited for, so that a signal is not.
follow() {
    tail --lines=+1 --follow --pid="${running[$1]}" --sleep-interval=0.2 "$work/out.$1" >&2 &
    wait $!
}

run_parts() {
    local name
    for name in "$@"; do
        [[ $name == wait || $(type -t "part_${name%&}") == function ]] || { say "tests/run: no part \"$name\""; exit 2; }
    done
    for name in "$@"; do
        case $name in
            wait) join_beside ;;
            *"&")
                say $'\n'"=== ${name%&}, beside the next parts"
                start "${name%&}" beside
                ;;
            *)
                say $'\n'"=== $name"
                start "$name"
                follow "$name"
                join "$name"
                ;;
        esac
        [[ $name != host || ${#failed[@]} == 0 ]] || break
    done
    join_beside
}
