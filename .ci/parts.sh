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
# The parts that run beside others: name and process.
declare -A beside=()

# Mount points below this run's directory, innermost first.
left_behind() { awk -v below="$work/" 'index($5, below) == 1 { print $5 }' /proc/self/mountinfo | sort -r; }

finish() {
    local code=$? point
    trap - EXIT
    # Groups of their own.
    for name in "${!beside[@]}"; do kill -- "-${beside[$name]}" 2>/dev/null || true; done
    wait
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

# Runs one part with `set -e` in force (it would not be inside a condition). Its exit code and times are in files.
run_part() {
    local begun=$SECONDS code
    running=$1
    set +e
    (
        trap 'times >"$work/times.$running"' EXIT
        set -e
        "part_$1"
    )
    code=$?
    set -e
    echo "$code $((SECONDS - begun))" >"$work/part.$1"
}

# Remembers how long a part took, how much processor time, and a failure.
note() {
    local seconds=0 code=1 failure='' processor
    read -r code seconds <"$work/part.$1" || true
    if ((code)); then failed+=("$1") failure=" FAILED"; fi
    processor=$(awk '{ gsub(/[ms]/, " "); sum += 60 * ($1 + $3) + $2 + $4 } END { print sum + 0 }' "$work/times.$1" || true)
    rows+=("$seconds" "$processor" "$1${2:-}$failure")
}

# What runs beside is shown when it is waited for.
join_beside() {
    local name
    for name in "${!beside[@]}"; do
        say ""
        say "=== waiting for $name, beside others"
        renice -n 0 -g "${beside[$name]}" >/dev/null 2>&1 || true # what is left of it need not give way any more
        wait "${beside[$name]}" || true
        cat "$work/beside.$name" >&2
        note "$name" " (beside others)"
        unset "beside[$name]"
    done
}

run_parts() {
    local name
    for name in "$@"; do
        [[ $name == wait || $(type -t "part_${name%&}") == function ]] || { say "tests/run: no part \"$name\""; exit 2; }
    done
    for name in "$@"; do
        say ""
        case $name in
            wait) join_beside ;;
            *"&")
                name=${name%&}
                say "=== $name, beside the next parts"
                set -m
                (trap - EXIT INT TERM && renice -n 19 -p "$BASHPID" >/dev/null && run_part "$name") >"$work/beside.$name" 2>&1 &
                beside[$name]=$!
                set +m
                ;;
            *)
                say "=== $name"
                run_part "$name"
                note "$name"
                ;;
        esac
        [[ $name != host || ${#failed[@]} == 0 ]] || break
    done
    join_beside
}
