"""`.ckfs/metrics` of a real mount, read by the parsers of Prometheus' own Python client."""

from __future__ import annotations

import errno
import os

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from mounting import Mount, error_of, read, run

GAUGES = {"ckfs_degraded", "ckfs_poisoned_sources", "ckfs_stalled_sources", "ckfs_in_flight_requests"}
GAUGES |= {f"ckfs_memory_{what}_bytes" for what in ("held", "limit", "budget", "resident")}


def samples(mounted: Mount, parse=parse_openmetrics) -> dict[tuple, float]:
    """Values by name and labels."""
    text = (mounted / ".ckfs/metrics").read_text()
    found = {}
    for family in parse(text):
        for sample in family.samples:
            key = (sample.name, *sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_openmetrics_accepts_all(own, repo):
    mounted = own(repo("llama").path, "--mesh", "fsdp=2")
    size = len(read(mounted / "full/layers/scanned/wq"))
    mounted.stats_of_reads()
    text = (mounted / ".ckfs/metrics").read_text()
    assert len(text) == (mounted / ".ckfs/metrics").stat().st_size and text.endswith("\n# EOF\n")
    families = {family.name: family for family in parse_openmetrics(text)}
    assert all(name.startswith("ckfs_") for name in families)
    assert all(family.documentation.strip() for family in families.values()), "each has its line of help"
    assert GAUGES <= {name for name, family in families.items() if family.type == "gauge"}
    kinds = {name: family.type for name, family in families.items() if name not in GAUGES}
    assert kinds.pop("ckfs_build") == "info" and kinds.pop("ckfs_latency_seconds") == "histogram"
    kinds.pop("ckfs_memory_shared_bytes", None)
    assert set(kinds.values()) == {"counter"}, kinds
    values = samples(mounted)
    version = run("--version").out.split()[1]
    assert values["ckfs_build_info", ("version", version)] == 1
    paths = {labels[0][1] for name, *labels in values if name == "ckfs_served_bytes_total"}
    assert paths == {"identical", "runs", "tiles", "generated"}
    assert values["ckfs_served_bytes_total", ("path", "runs")] >= size
    assert values["ckfs_ops_total", ("op", "read")] >= 1 and values["ckfs_errors_total", ("op", "read")] == 0
    assert values["ckfs_latency_seconds_bucket", ("le", "+Inf"), ("op", "read")] >= 1
    assert values["ckfs_memory_limit_bytes",] >= values["ckfs_memory_budget_bytes", ("part", "cache")] > 0
    assert values["ckfs_poisoned_sources",] == 0 and values["ckfs_degraded",] == 0


def test_the_classic_parser_finds_the_same_numbers(own, repo):
    mounted = own(repo("llama").path)
    read(mounted / "full/embed")
    mounted.stats_of_reads()
    names = {"ckfs_tile_hits_total", "ckfs_served_bytes_total", "ckfs_poisoned_sources", "ckfs_build_info"}
    modern, classic = samples(mounted), samples(mounted, parse_classic)
    assert {key: value for key, value in modern.items() if key[0] in names} == {
        key: value for key, value in classic.items() if key[0] in names
    }


def test_a_changed_source_is_degraded(own, two_files):
    mounted = own(two_files.path)
    weights = sorted(two_files.path.glob("*.safetensors"))
    os.utime(weights[0])
    codes = {error_of(read, path) for path in (mounted.point / "full").rglob("*") if path.is_file()}
    assert codes == {None, errno.EIO}
    values = samples(mounted)
    assert (values["ckfs_degraded",], values["ckfs_poisoned_sources",]) == (1, 1)
    assert values["ckfs_failed_opens_total",] >= 1
    stats = mounted.stats()
    assert stats["health"] == "degraded" and stats["poisoned_files"] == [str(weights[0])]
    (problem,) = stats["problems"]
    assert set(problem) == {"kind", "file", "cause", "remedy", "first", "last", "ended", "count"}
    assert problem["file"] == str(weights[0]) and str(mounted.point) in problem["remedy"]
    assert run("status", mounted.point, expect=1).out.count(str(weights[0])) >= 1
