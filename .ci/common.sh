# To be sourced by `tests/run`, and by the parts that are scripts of their own: what several parts need.
say() { printf '%s\n' "$*" >&2; }
as_root() { if [[ $(id -u) == 0 ]]; then "$@"; else sudo -n "$@"; fi; }

# In a shell of its own, whose end lets go of the lock: a part beside this one may install something too.
install_package() (
    say "installing $*"
    exec 9>"${TMPDIR:-/tmp}/ckfs-apt.lock"
    flock 9
    for attempt in 1 2 3; do
        as_root apt-get -qq update && as_root env DEBIAN_FRONTEND=noninteractive \
            apt-get -qq install -y --no-install-recommends "$@" >/dev/null && exit 0
        sleep $((attempt * 5))
    done
    say "cannot install $*: needs apt-get, and root or sudo without a password"
    exit 1
)

# One build serves lints and tests: clippy is the compiler of what it looks at. `all` and `weekly` ask for it.
lint_builds() {
    export RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-Dwarnings__CLIPPY_HACKERY__
}
# A command without it, for what is measured or released: clippy leaves out optimizations that come before its lints.
unlinted() { env --unset RUSTC_WORKSPACE_WRAPPER --unset CLIPPY_ARGS "$@"; }

# Where cargo builds, and the target of released programs, which run on every distribution.
built=${CARGO_TARGET_DIR:-target}
static_target=x86_64-unknown-linux-musl
# What cargo needs to build for it, and the program as users get it: see `need_release`.
release_target=()
program=

# Whether static programs can be built here.
need_static() {
    { command -v musl-gcc >/dev/null || install_package musl-tools; } && rustup --quiet target add "$static_target" && return 0
    say "static program: NOT BUILT, $static_target is not to be had here"
    return 1
}

# The program as it is released, built once for all parts that use it. Without a C library for static programs it is this machine's.
need_release() {
    local directory=$built
    if need_static; then
        . .ci/cross.sh
        release_target=(--target "$static_target")
        directory+=/$static_target
    fi
    unlinted cargo build --locked --release --quiet --bin ckfs "${release_target[@]}"
    program=$(realpath -- "$directory/release/ckfs")
    say "$program: $(($(stat -c %s "$program") / 1024)) KiB"
}
