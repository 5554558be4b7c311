"""`ckfs plan --html`: what the page holds, and what a real browser makes of it."""

from __future__ import annotations

import json
import math
import os
import re
import struct
from pathlib import Path

import pytest

import browser as browsers
import mounting
import repos
from mounting import run

# Screenshots are kept for people.
SHOTS = Path(os.environ.get("CARGO_TARGET_DIR", mounting.ROOT / "target")) / "plan-html"
PAGE_BYTES_MAX = 5_000_000


def page_data(page: Path) -> dict:
    """The plan that a page holds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), flags=re.S)
    return json.loads(found[1])


def write_page(target: Path, source: Path, *flags: object) -> dict:
    run("plan", source, *flags, "--html", target)
    assert target.stat().st_size <= PAGE_BYTES_MAX
    return page_data(target)


def expanded(pairs: list[int]) -> list[int]:
    return [number for number, times in zip(pairs[::2], pairs[1::2], strict=True) for _ in range(times)]


def spans(data: dict, row: dict, device: int) -> dict[str, tuple[int, int]]:
    """By source tensor of the row that the device reads: its first byte in the file and its end, as the page's script finds them."""
    view = data["views"][0]["page"]
    number, *parts = view["cuts"][row["cut"]]
    at = expanded(view["device_maps"][number])[device]
    held, experts, *ranges = parts[at]
    found = {}
    for kind, _, stacked, sources, expert in row["leaves"]:
        if not held or (experts and expert is not None and not experts[0] <= expert <= experts[1]):
            continue
        if any(not ranges[axis][0] <= index < sum(ranges[axis]) for axis, index in stacked):
            continue
        for source, _, first, end, _, _ in view["patterns"][expanded(row["reads_of"][kind])[at]]:
            name, _, begin, *_ = sources[source]
            # The boxes of one tensor have one name.
            low, high = found.get(name, (begin + first, begin + end))
            found[name] = (min(low, begin + first), max(high, begin + end))
    return found


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", ["--mesh", "fsdp=2,tensor=2"]),
        ("llama", ["--mesh", "fsdp=3", "--unscanned"]),
        ("qwen3_moe", ["--mesh", "expert=2,tensor=2"]),
        ("qwen3_moe", ["--mesh", "fsdp=2,expert=2", "--unscanned"]),
        ("llama", ["--mesh", "tensor=2", "--layout", "maxtext"]),
        ("phi3", ["--mesh", "fsdp=3,tensor=2"]),
        ("a dcp of llama", ["--mesh", "fsdp=2,tensor=2"]),
        ("block_fp8_bf16", ["--mesh", "fsdp=2,tensor=2", "--dequantize"]),
    ],
)
def test_the_bytes_of_the_page_are_those_that_explain_names(name, flags, repo, tmp_path):
    if name == "a dcp of llama":
        run("export", repo("llama").path, tmp_path / "made", "--mesh", "fsdp=3", "--only", "dcp")
        source = tmp_path / "made/dcp"
    else:
        source = repo(name).path
    data = write_page(tmp_path / "plan.html", source, *flags)
    view = data["views"][0]
    compared = 0
    for row in view["page"]["rows"]:
        for device in (0, len(view["devices"]) - 1):
            if row["count"] > 1:
                continue
            explained = run("explain", source, f"dev{view['devices'][device]['device']}/{row['path']}", *flags, "--json", "--all").json()
            expected: dict[str, tuple[int, int]] = {}
            for piece in (piece for segment in explained["segments"] for piece in segment.get("pieces", [])):
                if "tensor" in piece:
                    first, end = expected.get(piece["tensor"], (piece["file_start"], piece["file_end"]))
                    expected[piece["tensor"]] = (min(first, piece["file_start"]), max(end, piece["file_end"]))
            found = spans(data, row, device)
            assert expected.keys() <= found.keys() and expected == {name: found[name] for name in expected}, (row["name"], device)
            compared += len(expected)
    assert compared > 0 or "--unscanned" in flags


def test_single_experts_are_on_their_own_devices(repo, tmp_path):
    flags = ["--mesh", "expert=2", "--unscanned"]
    source = repo("qwen3_moe").path
    data = write_page(tmp_path / "plan.html", source, *flags)
    rows = [row for row in data["views"][0]["page"]["rows"] if "experts" in row["name"]]
    assert rows
    manifest = json.loads(run("cat", source, ".ckfs/manifest.json", *flags).out)
    for row in rows:
        both = [spans(data, row, device) for device in (0, 1)]
        assert both[0] and both[1] and not both[0].keys() & both[1].keys()
        for device, found in enumerate(both):
            holders = {
                tensor["sources"][0] for tensor in manifest["tensors"]
                if any(region["device"] == device and 0 not in region["shape"] for region in tensor["regions"]) and len(tensor["sources"]) == 1
            }  # fmt: skip
            assert found.keys() <= holders


def test_the_page_says_what_the_text_says(repo, tmp_path):
    source, flags = repo("llama").path, ["--mesh", "fsdp=2,tensor=2"]
    data = write_page(tmp_path / "plan.html", source, *flags)
    report = run("plan", source, *flags, "--json").json()["views"][0]
    view = data["views"][0]
    # The same members, but for the tensors, which the page groups and draws.
    reads = report["amplification"]
    del report["tensors"], reads["tensors"]
    assert report == {key: value for key, value in view.items() if key not in ("page", "more")}
    assert view["more"] == {} and view["page"]["more_devices"] == 0 and reads["advice"]
    text = run("plan", "-v", source, *flags).out
    assert "dev3 = fsdp=1,tensor=1" in text
    for reason in reads["reasons"]:
        assert reason["text"] in text and "tensor=2" in reason["mesh_axes"] + ["tensor=2"]
    for line in reads["advice"]:
        assert f"advice: {line}" in text


def test_the_estimate_to_train_counts_weights_gradients_and_adam(repo, tmp_path):
    """Computed again from the shards that the manifest names."""
    source = repo("llama").path
    width = {"BF16": 2, "F16": 2, "F32": 4}
    for flags in (["--dtype", "bf16"], ["--dtype", "f32"]):
        flags += ["--mesh", "fsdp=3,tensor=2"]
        report = run("plan", source, *flags, "--json").json()["views"][0]
        manifest = json.loads(run("cat", source, ".ckfs/manifest.json", *flags).out)
        bundled = {tensor["path"] for tensor in report["tensors"] if tensor["bundled"]}
        for device in report["devices"]:
            held = training = 0
            for tensor in manifest["tensors"]:
                if tensor["path"] not in bundled:
                    continue
                (region,) = [region for region in tensor["regions"] if region["device"] == device["device"]]
                numbers, each = math.prod(region["shape"]), width[tensor["dtype"]]
                held += numbers * each
                # The weight, its gradient, two moments in f32, and a copy in f32 of what is narrower.
                training += numbers * (2 * each + 8 + (4 if each < 4 else 0))
            assert (device["bytes"], device["training_bytes"]) == (held, training)


def test_text_and_json_are_printed_with_and_without_a_page(repo, tmp_path):
    source = repo("llama").path
    for flags in ([], ["--json"], ["-v"]):
        page = tmp_path / f"plan{len(flags)}.html"
        assert run("plan", source, *flags, "--html", page).out == run("plan", source, *flags).out
        assert page.stat().st_size > 10_000


def test_only_a_regular_file_is_replaced_and_only_by_a_whole_page(repo, tmp_path):
    source = repo("llama").path
    old = tmp_path / "plan.html"
    old.write_text("old")
    for wrong in ("-", tmp_path, "/dev/null", tmp_path / "missing/plan.html"):
        done = run("plan", source, "--html", wrong, expect=2)
        assert str(wrong).removesuffix("/plan.html") in done.err and not done.out
    run("plan", source, "--mesh", "fdsp=2", "--html", old, expect=1)
    assert old.read_text() == "old"
    run("plan", source, "--html", old)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"] and "ckfs plan" in old.read_text()


def sparse(path: Path, shapes: dict[str, list[int]]) -> Path:
    """A repository whose weights are holes."""
    header, end = {}, 0
    for name, (rows, columns) in shapes.items():
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [end, end := end + rows * columns * 2]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.mkdir()
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return path


HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>\"'&\u202e"


def test_very_many_tensors_and_devices_stay_below_the_bound(tmp_path):
    """Names and shapes that cannot be grouped: the smallest ones are folded, and the page says so."""
    shapes = {f"{HOSTILE}{'y' * (number % 70)}{number:x}z": [64 + number % 97, 32 + number % 53] for number in range(2500)}
    page = tmp_path / "plan.html"
    data = write_page(page, sparse(tmp_path / "hostile", shapes), "--mesh", "fsdp=2048")
    view = data["views"][0]["page"]
    assert len(data["views"][0]["devices"]) == 1024 and view["more_devices"] == 1024 and view["folded"]["groups"] + len(view["rows"]) == 2500
    assert view["folded"]["without_bytes"] > 0
    assert page.stat().st_size > PAGE_BYTES_MAX / 4


@pytest.fixture
def browser(tmp_path):
    if browsers.find() is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no browser, and CI=true: expected one of {browsers.PROGRAMS}")
        pytest.skip("no browser: `tests/run host` installs one")
    found = browsers.Browser(tmp_path / "profile")
    yield found
    found.close()


def ready(browser: browsers.Browser, page: Path) -> None:
    browser.open(page)
    assert browser.value("document.documentElement.dataset.ready") == "true"
    # Rows are drawn when they come into sight.
    browser.value("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")


def test_a_browser_shows_the_plan_and_a_click_the_bytes_of_a_tensor(browser, repo, tmp_path):
    source, page = repo("llama").path, tmp_path / "plan.html"
    data = write_page(page, source, "--mesh", "fsdp=2,tensor=2")
    for name, width, height, dark in [("wide", 1440, 1000, False), ("dark", 1440, 1000, True), ("narrow", 420, 1400, False)]:
        browser.window(width, height, dark)
        ready(browser, page)
        image = browser.screenshot(SHOTS / f"{name}.png")
        assert len(image) > 20_000, "the picture has nearly nothing in it"
        assert browser.value("document.documentElement.scrollWidth <= window.innerWidth"), f"{name}: the page is too wide"
    browser.window(1440, 1000)
    ready(browser, page)
    rows = data["views"][0]["page"]["rows"]
    row = next(row for row in rows if row["name"] == "layers.scanned.wo")
    canvas = f'[data-row="{rows.index(row)}"] canvas'
    x, y = browser.point(canvas, x=0.9)
    browser.move(x, y)
    assert "dev3" in browser.value("document.getElementById('tip').innerText")
    browser.click(x, y)
    shown = browser.value("document.getElementById('detail').innerText")
    assert "layers.scanned.wo" in shown and "dev3 · fsdp=1, tensor=1" in shown
    for name, (first, end) in spans(data, row, 3).items():
        assert name in shown and f"bytes {first:,} to {end:,}" in shown
    browser.click(*browser.point("#head", x=0.1, y=0.5))
    shown = browser.value("document.getElementById('detail').innerText")
    assert shown.startswith("dev0") and "model-00001" in shown
    browser.value("document.getElementById('filter').value = 'w_up'; document.getElementById('filter').dispatchEvent(new Event('input'))")
    assert browser.value("[...document.querySelectorAll('[data-row]')].filter((row) => !row.hidden).length") == 1
    assert browser.complaints == [] and browser.requests == [page.as_uri()]


def test_a_browser_shows_two_meshes_side_by_side(browser, repo, tmp_path):
    source, page = repo("llama").path, tmp_path / "plan.html"
    meshes = ["fsdp=8", "fsdp=2,tensor=4"]
    data = write_page(page, source, *(word for mesh in meshes for word in ("--mesh", mesh)))
    alone = [run("plan", source, "--mesh", mesh, "--json").json()["views"][0] for mesh in meshes]
    for width in (1400, 1024, 480):
        browser.window(width, 1100)
        ready(browser, page)
        browser.screenshot(SHOTS / f"compared-{width}.png")
        assert browser.value("document.documentElement.scrollWidth <= window.innerWidth"), f"{width}: the page is too wide"
    cells = "[...document.querySelectorAll('#compared tr')].map((row) => [...row.children].map((cell) => cell.innerText))"
    (_, *names), *rows = browser.value(f"JSON.parse(JSON.stringify({cells}))")
    assert names == meshes and [view["name"] for view in data["views"]] == meshes
    table = {name: values for name, *values in rows}
    assert table["Devices"] == ["8", "8"]

    def shown(number):
        for unit in ("B", "KiB", "MiB"):
            if number < 1024:
                break
            number /= 1024
        return f"{math.floor(number * 10) / 10:.1f} {unit}" if number < 100 else f"{math.floor(number)} {unit}"

    for at, view in enumerate(alone):
        held = [device["bytes"] for device in view["devices"]]
        reads = view["amplification"]["devices"]
        worst = max(read["paged_bytes"] / read["needed_bytes"] for read in reads)
        assert shown(max(held)) in table["Held per device"][at]
        assert table["To train, per device"][at] == shown(max(device["training_bytes"] for device in view["devices"]))
        assert table["Read per device"][at] == shown(max(read["paged_bytes"] for read in reads))
        assert table["Over-read, at worst"][at] == (f"{math.floor(worst * 100) / 100:.2f} times" if worst > 1.02 else "none")
    assert "Fetched per device" not in table, "nothing of a local source is fetched"
    # A click on a mesh draws it below.
    pressed = "document.querySelector('#compared button[aria-pressed=\\'true\\']').innerText"
    assert browser.value(pressed) == meshes[0] and "fsdp=8" in browser.value("document.getElementById('cards').innerText")
    browser.click(*browser.point("#compared th:nth-child(3) button"))
    assert browser.value(pressed) == meshes[1] and "fsdp=2, tensor=4" in browser.value("document.getElementById('cards').innerText")
    assert browser.complaints == []


def test_warnings_are_the_first_tile_and_red(browser, repo, tmp_path):
    """Of a source that warns; one without warnings has no such tile."""
    page = tmp_path / "plan.html"
    for flags, warned in ([], False), (["--text-only"], True):
        data = write_page(page, repo("llama").path, *flags)
        browser.window(1400, 900)
        ready(browser, page)
        assert bool(data["views"][0]["warnings"] + data["warnings"]) == warned
        first = "document.querySelector('.card')"
        assert (browser.value(f"{first}.innerText").startswith("Warnings"), browser.value(f"{first}.classList.contains('bad')")) == (warned, warned)
        if warned:
            assert data["views"][0]["warnings"][0] in browser.value(f"{first}.innerText")


def test_names_of_a_checkpoint_are_text_to_a_browser(browser, tmp_path):
    page = tmp_path / "plan.html"
    shapes = {f"{HOSTILE}.{word}": [64, 32] for word in ("a", "b")} | {f"model.layers.{n}.w": [32, 32] for n in range(3)}
    write_page(page, sparse(tmp_path / HOSTILE.replace("/", "|")[:80], shapes), "--mesh", "fsdp=512,tensor=2")
    browser.window(1440, 1000)
    ready(browser, page)
    assert browser.value("document.title").endswith("ckfs plan") and browser.value("document.images.length") == 0
    assert browser.value("document.getElementById('matrix').innerText").count("onerror=alert(1)") >= 2
    # The policy refuses what the page does not hold itself, whoever asks for it.
    assert browser.value("(() => { const s = document.createElement('script'); s.textContent = 'window.taken = 1'; document.body.append(s); return window.taken })()") is None
    refused = browser.complaints
    assert len(refused) == 1 and "Content Security Policy" in refused[0]
    browser.screenshot(SHOTS / "many-devices.png")
