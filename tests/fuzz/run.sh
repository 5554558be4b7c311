#!/usr/bin/env bash
# Coverage-guided fuzzing of every parser of untrusted bytes, on stable Rust.
#
#   tests/fuzz/run.sh [SECONDS [TARGET...]]     seconds for each target (10 by default); by default all targets
#   tests/fuzz/run.sh --keep SECONDS [TARGET...]     also adds what was found to tests/fuzz/corpus
#
# An input that fails is left in target/fuzz/TARGET, and its path is printed; `CKFS_FUZZ_TARGET=TARGET target/fuzz/release/guided FILE`
# runs it again. The seed of the random numbers is printed and can be set: CKFS_FUZZ_SEED. Needs a C++ compiler for libFuzzer.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
keep=false
if [[ ${1:-} == --keep ]]; then keep=true; shift; fi
seconds=${1:-10}
shift || true
build=target/fuzz
# What `cargo fuzz` sets too: counters at the edges of the control flow, for libFuzzer to read.
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
-Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-simplifycfg-branch-fold-threshold=0 -Ccodegen-units=1 --cfg fuzzing"
# With a target, so that build scripts and procedural macros are built without the counters.
host=$(rustc -vV | sed -n 's/^host: //p')
cargo build --quiet --release --manifest-path tests/fuzz/Cargo.toml --target "$host" --target-dir "$build"
program=$build/$host/release/guided
read -ra targets <<<"${*:-$(sed -n 's/.*Target { name: "\([a-z0-9_]*\)".*/\1/p; s/^ *name: "\([a-z0-9_]*\)",$/\1/p' tests/fuzz/targets.rs | tr '\n' ' ')}"
seed=${CKFS_FUZZ_SEED:-$RANDOM}
for target in "${targets[@]}"; do
    work=$build/$target
    mkdir -p "$work/found" "$work/corpus"
    export CKFS_FUZZ_TARGET=$target CKFS_FUZZ_SEEDS=$work/corpus
    echo "fuzz: $target, $seconds s, CKFS_FUZZ_SEED=$seed"
    "$program" -seed="$seed" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=8192 \
        -print_final_stats=1 -verbosity=0 -artifact_prefix="$work/" "$work/found" "$work/corpus" 2>&1 |
        grep -E "stat::number_of_executed_units|stat::new_units_added|ERROR|panicked|Test unit written" || true
    [[ ${PIPESTATUS[0]} == 0 ]] || { echo "fuzz: $target FAILED"; exit 1; }
    if $keep; then
        mkdir -p "$work/merged"
        "$program" -merge=1 -max_len=2048 -verbosity=0 "$work/merged" "$work/found" "$work/corpus" >/dev/null 2>&1
        python3 - "$target" "$work/merged" <<'P'
import pathlib, sys
target, directory = sys.argv[1], pathlib.Path(sys.argv[2])
# The smallest inputs: together they reach nearly all that the larger ones do.
inputs = sorted((path.read_bytes() for path in directory.iterdir()), key=lambda data: (len(data), data))
lines, total = [], 0
for data in inputs:
    total += len(data)
    if total > 16384:
        break
    lines.append(data.hex())
pathlib.Path("tests/fuzz/corpus", target + ".hex").write_text("".join(line + "\n" for line in lines if line))
P
    fi
done
