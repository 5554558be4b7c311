"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const ROW_HEIGHT = 34, CELL_MIN = 7, CELL_MAX = 96, BAND = 17, NUMBERS = 15, BARS = 24, OVER = 10, RUNS_DRAWN = 400;
  // Over-read up to this factor comes from pages at the ends of long runs.
  const NOTABLE = 1.02;
  // From this factor on, a host that runs only some of the devices reads its bytes twice or more.
  const SEVERE = 2;
  // Characters at the end of a name that are always shown: names differ there.
  const ENDING = 18;

  // Text only: names come from checkpoints.
  const make = (tag, name, ...children) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => child instanceof Node ? child : String(child)));
    return element;
  };
  const count = (number) => number.toLocaleString("en");
  const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
  const bytes = (number) => {
    if (number < 1024) return `${number} B`;
    const units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let unit = -1;
    do { number /= 1024; unit += 1; } while (number >= 1024 && unit < units.length - 1);
    return `${number < 100 ? (Math.floor(number * 10) / 10).toFixed(1) : Math.floor(number)} ${units[unit]}`;
  };
  const percent = (part, whole) => whole ? `${(Math.floor((part / whole) * 1000) / 10).toFixed(1)} %` : "0.0 %";
  const factor = ([needed, paged]) => needed ? paged / needed : 1;
  const severity = (number) => number >= SEVERE ? "bad" : number > NOTABLE ? "warm" : "";
  const hundredths = (number) => (Math.floor(number * 100 + 1e-9) / 100).toFixed(2);
  const times = (reads) => `${hundredths(factor(reads))} times`;
  const listed = (shape) => `[${shape.join(", ")}]`;
  const specText = (spec) => `[${spec.map((axis) => axis === null ? "-" : Array.isArray(axis) ? `[${axis.join(",")}]` : axis).join(",")}]`;
  const pair = (reads) => [reads.needed_bytes, reads.paged_bytes];
  const expand = (pairs) => {
    const numbers = [];
    for (let at = 0; at < pairs.length; at += 2) for (let turn = 0; turn < pairs[at + 1]; turn += 1) numbers.push(pairs[at]);
    return numbers;
  };

  const TRAINING = "weights, gradients and Adam in f32, without activations";
  const state = { view: 0, row: null, device: 0, file: null, filter: "" };
  let view, drawn = new Map(), cell = 20, colors = {};

  const readColors = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["track", "soft", "accent", "text", "muted", "warm", "bad", "band", "line", "panel"]) colors[name] = style.getPropertyValue(`--${name}`).trim();
  };
  const canvasOf = (canvas, width, height) => {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    return pen;
  };

  // Prepares a view once: devices by column, parts by row and device.
  const prepare = (of) => {
    if (of.ready) return of;
    of.ready = true;
    Object.assign(of, of.page, {
      coordinates: of.devices.map((device) => device.coordinates), device_bytes: of.devices.map((device) => device.bytes),
      device_training: of.devices.map((device) => device.training_bytes), worst: pair(of.page.extremes.worst),
      all_warnings: [...data.warnings, ...of.warnings], more_warnings: (data.more.warnings || 0) + (of.more.warnings || 0),
      devices: of.devices.map((device) => device.device), device_reads: of.amplification.devices.map(pair),
      mesh: of.mesh.axes, mesh_devices: of.mesh.devices, union: pair(of.amplification.union),
    });
    of.maps = of.device_maps.map(expand);
    of.rows.forEach((row, index) => {
      row.index = index;
      row.reads_parts = (row.reads_of || []).map(expand);
      if (row.cut === undefined) return;
      const [map, ...parts] = of.cuts[row.cut];
      row.part_of = of.maps[map];
      row.parts = parts.map(([held, experts, ...ranges]) => ({ held, experts, ranges }));
      const whole = (ranges) => ranges.every(([start, length], axis) => start === 0 && length === row.shape[axis]);
      const split = row.shape.map((extent, axis) => row.parts.some((part) => part.held && (part.ranges[axis][0] !== 0 || part.ranges[axis][1] !== extent)));
      row.split = row.shape.map((_, axis) => axis).filter((axis) => split[axis]);
      const others = row.shape.map((_, axis) => axis).filter((axis) => !split[axis]).reverse();
      row.pair = [...row.split, ...others].slice(0, 2).sort((a, b) => a - b);
      row.parts.forEach((part) => { part.whole = part.held > 0 && whole(part.ranges); });
    });
    return of;
  };
  const partOf = (row, at) => row.part_of ? row.parts[row.part_of[at]] : null;
  const partBytes = (row, part) => Math.floor((part.ranges.reduce((all, [, length]) => all * length, 1) * part.held * row.bits) / 8);
  const deviceName = (at) => `dev${view.devices[at]}`;
  const coordinates = (at) => view.mesh.map((axis, index) => `${axis.name}=${view.coordinates[at][index]}`).join(", ");

  // A part inside the outline of its tensor: the second drawn axis goes to the right, the first one down.
  const drawPart = (pen, row, part, x, y, width, height, fill) => {
    pen.fillStyle = colors.track;
    pen.fillRect(x, y, width, height);
    if (!part || !part.held) return;
    const along = (axis) => axis === undefined || !row.shape[axis] ? [0, 1] : part.ranges[axis].map((number) => number / row.shape[axis]);
    const [down, right] = row.pair.length === 2 ? [along(row.pair[0]), along(row.pair[1])] : [along(row.pair[0]), [0, 1]];
    pen.fillStyle = fill;
    // A part of one in thousands is still seen.
    const side = ([start, length], whole) => {
      const size = Math.max(Math.min(3, whole), length * whole);
      return [Math.min(start * whole, whole - size), size];
    };
    const [[left, wide], [top, high]] = [side(right, width), side(down, height)];
    pen.fillRect(x + left, y + top, wide, high);
  };
  const drawRow = (row) => {
    const canvas = drawn.get(row.index);
    if (!canvas) return;
    const pen = canvasOf(canvas, view.devices.length * cell, ROW_HEIGHT);
    const selected = state.row === row.index && row.part_of ? row.part_of[state.device] : -1;
    const gap = cell >= 14 ? 3 : 1;
    view.devices.forEach((_, at) => {
      const part = partOf(row, at);
      const same = row.part_of && row.part_of[at] === selected && part.held;
      drawPart(pen, row, part, at * cell, 0, cell - gap, ROW_HEIGHT, same ? colors.accent : colors.soft);
      if (state.row === row.index && at === state.device) {
        pen.strokeStyle = colors.text;
        pen.lineWidth = 1.5;
        pen.strokeRect(at * cell + 0.75, 0.75, cell - gap - 1.5, ROW_HEIGHT - 1.5);
      }
    });
  };
  const mostBytes = () => Math.max(1, ...view.device_bytes);
  const overReads = () => view.device_reads.some((reads) => factor(reads) > NOTABLE);
  const drawHead = () => {
    const canvas = $("head");
    const axes = view.mesh.length;
    const pen = canvasOf(canvas, view.devices.length * cell, axes * BAND + NUMBERS + BARS + (overReads() ? OVER : 0));
    const gap = cell >= 14 ? 3 : 1;
    const family = getComputedStyle(document.body).fontFamily;
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    view.mesh.forEach((axis, index) => {
      let begin = 0;
      for (let at = 1; at <= view.devices.length; at += 1) {
        const same = at < view.devices.length && view.coordinates[at].slice(0, index + 1).join() === view.coordinates[begin].slice(0, index + 1).join();
        if (same) continue;
        const [x, width] = [begin * cell, (at - begin) * cell - gap];
        pen.fillStyle = view.coordinates[begin][index] % 2 ? colors.track : colors.band;
        pen.fillRect(x, index * BAND, width, BAND - 3);
        pen.font = `11px ${family}`;
        const label = String(view.coordinates[begin][index]);
        pen.fillStyle = colors.muted;
        if (pen.measureText(label).width < width - 2) pen.fillText(label, x + width / 2, index * BAND + BAND / 2 - 1);
        begin = at;
      }
    });
    pen.font = `10.5px ${family}`;
    const widest = pen.measureText(String(view.devices[view.devices.length - 1])).width + 6;
    const every = Math.max(1, Math.ceil(widest / cell));
    const most = mostBytes();
    view.devices.forEach((device, at) => {
      const x = at * cell;
      const on = at === state.device;
      pen.fillStyle = on ? colors.text : colors.muted;
      if (at % every === 0) pen.fillText(device, x + (cell - gap) / 2, axes * BAND + NUMBERS / 2 - 1);
      const height = Math.max(1, (view.device_bytes[at] / most) * (BARS - 4));
      pen.fillStyle = on ? colors.accent : colors.soft;
      pen.fillRect(x, axes * BAND + NUMBERS + BARS - 4 - height, cell - gap, height);
      if (overReads()) {
        pen.globalAlpha = Math.min(1, Math.max(0.06, (factor(view.device_reads[at]) - 1) / 1.5));
        pen.fillStyle = severity(factor(view.device_reads[at])) === "bad" ? colors.bad : colors.warm;
        pen.fillRect(x, axes * BAND + NUMBERS + BARS, cell - gap, OVER - 4);
        pen.globalAlpha = 1;
      }
    });
  };

  const showTip = (event, title, ...lines) => {
    const tip = $("tip");
    tip.replaceChildren(make("b", "", title), ...lines.filter(Boolean).map((line) => make("div", "", line)));
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, window.innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + height > window.innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
  };
  const hideTip = () => { $("tip").hidden = true; };
  const deviceAt = (event) => {
    const at = Math.floor(event.offsetX / cell);
    return at >= 0 && at < view.devices.length ? at : null;
  };
  const partText = (row, part) => {
    if (!part) return "not in this page";
    if (!part.held) return "nothing of it";
    const of = row.count > 1 ? `${plural(part.held, "tensor")} of ${count(row.count)}${part.experts ? `, experts ${part.experts.join(" to ")}` : ""}, each ` : "";
    if (part.whole) return `${of}whole`;
    return of + row.split.map((axis) => `axis ${axis}: ${count(part.ranges[axis][0])} to ${count(part.ranges[axis][0] + part.ranges[axis][1])} of ${count(row.shape[axis])}`).join("; ");
  };

  const observer = () => new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const index = Number(entry.target.dataset.row);
      const canvas = entry.target.querySelector("canvas");
      if (entry.isIntersecting) { drawn.set(index, canvas); drawRow(view.rows[index]); }
      else if (drawn.delete(index)) { canvas.width = 0; }
    }
  }, { root: $("matrix"), rootMargin: "300px" });

  const rowElement = (row) => {
    const more = [row.count > 1 ? `${count(row.count)} ×` : "", row.dtype, listed(row.shape), specText(row.spec)].filter(Boolean).join(" ");
    const ends = row.name.length > 2 * ENDING ? [make("span", "begin", row.name.slice(0, -ENDING)), row.name.slice(-ENDING)] : [row.name];
    const name = make("button", "name", make("b", "", ...ends), make("span", "", `${more} · ${bytes(row.bytes)}`));
    name.type = "button";
    name.addEventListener("click", () => select(row.index, state.device));
    const canvas = make("canvas");
    canvas.style.width = `${view.devices.length * cell}px`;
    canvas.style.height = `${ROW_HEIGHT}px`;
    canvas.addEventListener("click", (event) => { const at = deviceAt(event); if (at !== null) select(row.index, at); });
    canvas.addEventListener("mousemove", (event) => {
      const at = deviceAt(event);
      if (at === null) return hideTip();
      const part = partOf(row, at);
      showTip(event, row.name, `${deviceName(at)}${view.mesh.length ? ` · ${coordinates(at)}` : ""}`, partText(row, part), part && part.held ? bytes(partBytes(row, part)) : "");
    });
    canvas.addEventListener("mouseleave", hideTip);
    const element = make("div", "row", name, canvas);
    element.dataset.row = row.index;
    return element;
  };
  const showMatrix = () => {
    const matrix = $("matrix");
    drawn = new Map();
    const left = window.innerWidth <= 720 ? 150 : 300;
    const room = matrix.clientWidth - left - 36;
    cell = Math.max(CELL_MIN, Math.min(CELL_MAX, Math.floor(room / view.devices.length)));
    const labels = [...view.mesh.map((axis) => [axis.name, BAND]), ["device", NUMBERS], [`bytes, at most ${bytes(Math.max(0, ...view.device_bytes))}`, BARS]];
    if (overReads()) labels.push(["over-read", OVER]);
    const names = make("div", "name", ...labels.map(([label, height]) => {
      const line = make("div", "", label);
      line.style.height = line.style.lineHeight = `${height}px`;
      return line;
    }));
    const canvas = make("canvas");
    canvas.id = "head";
    canvas.addEventListener("click", (event) => { const at = deviceAt(event); if (at !== null) select(null, at); });
    canvas.addEventListener("mousemove", (event) => {
      const at = deviceAt(event);
      if (at === null) return hideTip();
      showTip(event, deviceName(at), coordinates(at), `holds ${bytes(view.device_bytes[at])}, ${percent(view.device_bytes[at], view.bytes)}`, `reads ${times(view.device_reads[at])} what it needs`);
    });
    canvas.addEventListener("mouseleave", hideTip);
    matrix.replaceChildren(make("div", "row head", names, canvas), ...view.rows.map(rowElement), make("p", "empty", "No tensor has such a name."));
    drawHead();
    const watch = observer();
    matrix.querySelectorAll("[data-row]").forEach((element) => watch.observe(element));
    applyFilter();
  };
  const applyFilter = () => {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    $("matrix").querySelectorAll("[data-row]").forEach((element) => {
      const row = view.rows[Number(element.dataset.row)];
      const text = `${row.name} ${row.path} ${row.dtype}`.toLowerCase();
      element.hidden = !words.every((word) => text.includes(word)) || (state.file !== null && !(row.files || []).some(([file]) => file === state.file));
      shown += element.hidden ? 0 : 1;
    });
    $("matrix").querySelector(".empty").hidden = shown > 0;
  };

  const facts = (rows) => make("dl", "facts", ...rows.filter(([, value]) => value !== null && value !== "").flatMap(([key, value]) => [make("dt", "", key), make("dd", "", value)]));
  const stepper = (row) => {
    const step = (label, text, by) => {
      const button = make("button", "", text);
      button.type = "button";
      button.setAttribute("aria-label", label);
      button.addEventListener("click", () => select(row, (state.device + by + view.devices.length) % view.devices.length));
      return button;
    };
    return make("span", "step", step("previous device", "‹", -1), step("next device", "›", 1));
  };
  const fileName = (number) => data.files[number] ? data.files[number].path : "a file that this page does not list";
  const runText = ([start, run, loops]) => {
    const runs = loops.reduce((all, [extent]) => all * extent, 1);
    if (runs === 1) return null;
    return `${count(runs)} runs of ${bytes(run)}, one every ${bytes(loops[loops.length - 1][1])}`;
  };
  // The source tensor as a strip, with the runs that the device needs.
  const strip = (length, reads) => {
    const canvas = make("canvas");
    requestAnimationFrame(() => {
      const width = canvas.clientWidth || 320;
      const pen = canvasOf(canvas, width, 10);
      canvas.style.width = "";
      pen.fillStyle = colors.track;
      pen.fillRect(0, 0, width, 10);
      if (!reads) return;
      const scale = width / Math.max(1, length);
      const bar = (start, run, fill) => { pen.fillStyle = fill; pen.fillRect(start * scale, 0, Math.max(1, run * scale), 10); };
      const walk = (start, run, loops) => {
        if (!loops.length) return bar(start, run, colors.accent);
        for (let turn = 0; turn < loops[0][0]; turn += 1) walk(start + turn * loops[0][1], run, loops.slice(1));
      };
      for (const [start, run, loops] of reads[4]) {
        const runs = loops.reduce((all, [extent]) => all * extent, 1);
        const end = start + run + loops.reduce((all, [extent, stride]) => all + (extent - 1) * stride, 0);
        if (runs <= Math.min(RUNS_DRAWN, width / 3)) walk(start, run, loops);
        else { bar(start, end - start, colors.soft); }
      }
      if (reads[5]) bar(reads[2], reads[3] - reads[2], colors.soft);
    });
    return canvas;
  };
  const sourceElement = ([name, file, start, end, codec], reads) => {
    const runs = reads && reads[4].length === 1 && !reads[5] ? runText(reads[4][0]) : reads && reads[4].length + reads[5] > 1 ? `${count(reads[4].length + reads[5])} sets of runs` : null;
    const where = reads ? `bytes ${count(start + reads[2])} to ${count(start + reads[3])}` : "none of its bytes";
    const needed = reads ? `${bytes(reads[1])} of ${bytes(end - start)}` : "";
    return make("div", "source", make("div", "mono", name), strip(end - start, reads),
      make("div", "muted", [fileName(file), where, needed, runs, codec ? `decoded from ${codec}` : null].filter(Boolean).join(" · ")));
  };
  const sources = (row, part) => {
    if (!row.leaves) return [make("h3", "", "Bytes of the source files"), make("p", "muted", "Left out to keep this page small: ckfs explain shows them.")];
    const found = [];
    for (const [kind, member, at, list, expert] of row.leaves) {
      if (!part.held || (part.experts && expert !== null && (expert < part.experts[0] || expert > part.experts[1])) || at.some(([axis, index]) => index < part.ranges[axis][0] || index >= part.ranges[axis][0] + part.ranges[axis][1])) continue;
      const pattern = view.patterns[row.reads_parts[kind][row.parts.indexOf(part)]];
      const of = new Map(pattern.map((reads) => [reads[0], reads]));
      if (member) found.push(make("h3", "mono", member));
      list.forEach((source, number) => { if (of.has(number)) found.push(sourceElement(source, of.get(number))); });
    }
    const more = row.more_leaves ? `and ${count(row.more_leaves)} more, of other layers or experts` : "";
    return [make("h3", "", "Bytes of the source files"), ...(found.length ? found : [make("p", "muted", part.held ? "Its sources are not among those that this page lists: ckfs explain shows them." : "This device reads nothing of it.")]), make("p", "note", more)];
  };
  const sameDevices = (row, at) => {
    const same = view.devices.filter((_, other) => other !== at && row.part_of[other] === row.part_of[at]);
    return same.length ? `${same.slice(0, 12).map((device) => `dev${device}`).join(", ")}${same.length > 12 ? ` and ${count(same.length - 12)} more` : ""}` : "";
  };
  const showTensor = (row, at) => {
    const part = partOf(row, at);
    const detail = $("detail");
    const title = make("div", "title", make("h2", "", row.name), stepper(row.index));
    const place = make("p", "muted", `${deviceName(at)}${view.mesh.length ? ` · ${coordinates(at)}` : ""}`);
    if (!part) return detail.replaceChildren(title, place, make("p", "note", "The parts of this tensor are left out to keep this page small: ckfs explain shows them."));
    const figure = make("canvas", "shape");
    const [down, right] = row.pair.length === 2 ? row.pair : [row.pair[0], undefined];
    const tall = Math.min(2.2, Math.max(0.35, Math.sqrt((row.shape[down] || 1) / (row.shape[right] || 1)))) || 1;
    const [width, height] = tall > 1 ? [150 / Math.sqrt(tall), 150] : [150 / Math.sqrt(tall), 150 * Math.sqrt(tall)];
    const pen = canvasOf(figure, width, Math.min(height, 170));
    drawPart(pen, row, part, 0, 0, width, Math.min(height, 170), colors.accent);
    const axes = row.pair.map((axis, index) => `${index ? "→" : "↓"} axis ${axis}: ${count(row.shape[axis])}`).join("  ·  ");
    const over = row.reads && factor(row.reads) > NOTABLE ? `${times(row.reads)} the bytes needed, at worst` : "";
    detail.replaceChildren(title, place, figure, make("p", "caption", axes || "scalar"), facts([
      ["holds", partText(row, part)],
      ["bytes", part.held ? `${bytes(partBytes(row, part))} of ${bytes(row.bytes)}` : "0 B"],
      ["shard", part.held ? `${row.dtype} ${listed(part.ranges.map(([, length]) => length))}` : ""],
      ["tensor", `${row.dtype} ${listed(row.shape)}`],
      ["spec", specText(row.spec)],
      ["layers", row.layers || ""],
      ["file", make("code", "", `${view.name ? `${view.name}/` : ""}${deviceName(at)}/${row.path}`)],
      ["also on", sameDevices(row, at)],
      ["reads", over],
    ]), ...sources(row, part));
  };
  const showDevice = (at) => {
    const held = view.rows.map((row) => [row, partOf(row, at)]).filter(([, part]) => part && part.held);
    held.sort((a, b) => partBytes(...b) - partBytes(...a));
    const files = new Map();
    for (const [row] of held) for (const [file] of row.files || []) files.set(file, (files.get(file) || 0) + 1);
    const line = ([row, part]) => {
      const button = make("button", "file", make("span", "line", make("code", "", row.name), make("span", "muted", bytes(partBytes(row, part)))));
      button.type = "button";
      button.addEventListener("click", () => select(row.index, at));
      return button;
    };
    $("detail").replaceChildren(make("div", "title", make("h2", "", deviceName(at)), stepper(null)), make("p", "muted", coordinates(at)), facts([
      ["holds", `${bytes(view.device_bytes[at])}, ${percent(view.device_bytes[at], view.bytes)} of the tensors`],
      ["to train", `${bytes(view.device_training[at])}: ${TRAINING}`],
      ["needs", `${bytes(view.device_reads[at][0])} of the source files`],
      ["reads", `${bytes(view.device_reads[at][1])} in whole pages: ${times(view.device_reads[at])}`],
      ["from", plural(files.size, "file")],
    ]), make("h3", "", "Its largest tensors"), ...held.slice(0, 12).map(line),
    make("p", "note", held.length > 12 ? `and ${count(held.length - 12)} more` : ""),
    make("h3", "", "Files it reads from"), ...[...files.keys()].slice(0, 24).map((file) => make("div", "file", make("code", "", fileName(file)))),
    make("p", "note", files.size > 24 ? `and ${count(files.size - 24)} more` : ""));
  };
  const select = (index, at) => {
    const before = state.row;
    state.row = index;
    state.device = at;
    $("matrix").querySelectorAll(".row.on").forEach((element) => element.classList.remove("on"));
    if (index !== null) $("matrix").querySelector(`[data-row="${index}"]`)?.classList.add("on");
    if (before !== null) drawRow(view.rows[before]);
    if (index !== null) { drawRow(view.rows[index]); showTensor(view.rows[index], at); } else showDevice(at);
    drawHead();
  };

  // What one view has to say of all its devices, in words.
  const heldText = ({ extremes: { least_bytes: least, most_bytes: most } }) => least === most ? bytes(most) : `${bytes(least)} to ${bytes(most)}`;
  const worstText = (of) => factor(of.worst) > NOTABLE ? `${hundredths(factor(of.worst))} times` : "none";
  const showCompared = () => {
    if (data.views.length < 2) return;
    const fetched = data.fetched_bytes.some((number) => number !== null);
    // Name, what is shown of a view, its number where less is better, its severity.
    const lines = [
      ["Devices", (of) => count(of.devices.length + of.more_devices)],
      ["Held per device", (of) => `${heldText(of)}, ${percent(of.extremes.most_bytes, of.bytes)}`, (of) => of.extremes.most_bytes],
      ["To train, per device", (of) => bytes(of.extremes.training_bytes), (of) => of.extremes.training_bytes],
      ["Read per device", (of) => bytes(of.extremes.paged_bytes), (of) => of.extremes.paged_bytes],
      ["Over-read, at worst", worstText, (of) => factor(of.worst), (of) => severity(factor(of.worst))],
      ["Over-read, all together", (of) => `${hundredths(factor(of.union))} times`, (of) => factor(of.union), (of) => severity(factor(of.union))],
      ...(fetched ? [["Fetched per device", (of, index) => bytes(data.fetched_bytes[index]), (_, index) => data.fetched_bytes[index]]] : []),
      ["Warnings", (of) => count(of.all_warnings.length + of.more_warnings), undefined, (of) => of.all_warnings.length ? "bad" : ""],
    ];
    const views = data.views.map(prepare);
    const heads = views.map((of, index) => {
      const button = make("button", "", of.name || "view");
      button.type = "button";
      button.addEventListener("click", () => showView(index));
      return make("th", "", button);
    });
    const rows = lines.map(([name, shown, number, level]) => {
      const numbers = number ? views.map(number) : [];
      const best = Math.min(...numbers), differ = numbers.some((other) => other !== best);
      return make("tr", "", make("th", "", name), ...views.map((of, index) => make("td", [level ? level(of) : "", differ && numbers[index] === best ? "best" : ""].join(" "), shown(of, index))));
    });
    const note = ["Held and read: by the device with the most. To train: ", TRAINING, ". The least of a line is bold. A click on a mesh shows it below.",
      data.more_views ? ` ${plural(data.more_views, "view")} more are left out of this page.` : ""].join("");
    $("compared").replaceChildren(make("h2", "", "Meshes compared"),
      make("div", "columns", make("table", "", make("thead", "", make("tr", "", make("th", "", ""), ...heads)), make("tbody", "", ...rows))), make("p", "note", note));
    $("compared").hidden = false;
  };
  const card = (label, value, more, level) => make("div", `card ${level || ""}`, make("div", "label", label), make("div", "value", value), make("div", "more", more));
  const showCards = () => {
    const { least_bytes: least, most_bytes: most } = view.extremes;
    const worst = factor(view.worst), warned = view.all_warnings.length + view.more_warnings;
    const lost = view.left_out.reduce((all, names) => all + names.count, 0);
    const mesh = view.mesh.map((axis) => `${axis.name}=${axis.size}`).join(", ") || "no mesh";
    const devices = view.devices.length + view.more_devices;
    $("cards").replaceChildren(
      ...(warned ? [card("Warnings", count(warned), `${view.all_warnings[0] || ""}${warned > 1 ? ` … and ${count(warned - 1)} more, below under remarks` : ""}`, "bad whole")] : []),
      card("Tensors", count(view.tensors), `${bytes(view.bytes)} in all, ${view.dtype ? `floats as ${view.dtype}` : "as stored"}`),
      card("Devices", count(devices), devices === view.mesh_devices ? mesh : `listed, of ${count(view.mesh_devices)}: ${mesh}`),
      card(least === most ? "Per device" : "Per device, at most", bytes(most), `${percent(most, view.bytes)} of the tensors${least === most ? "" : `, at least ${bytes(least)}`}`),
      card("To train, per device", bytes(view.extremes.training_bytes), TRAINING),
      card("Over-read", worstText(view), `${worst > NOTABLE ? `a device reads ${hundredths(worst)} times its bytes from disk` : "a device reads its own bytes only"}${view.devices.length > 1 ? `; all together ${hundredths(factor(view.union))} times` : ""}`, severity(worst)),
      card("Layout", view.layout, view.family ? `family ${view.family}` : "family not known"),
      card("Left out", lost ? plural(lost, "tensor") : "nothing", view.missing.length ? `${plural(view.missing.length, "name")} missing` : `${plural(view.raw_files, "raw file")} per device`),
    );
  };
  const table = (heads, rows, numbers) => {
    const line = (cells, tag) => make("tr", "", ...cells.map((text, at) => make(tag, numbers.includes(at) ? "number" : "", text)));
    return make("table", "", make("thead", "", line(heads, "th")), make("tbody", "", ...rows.map((row) => line(row, "td"))));
  };
  const showMesh = () => {
    const rows = view.mesh.map((axis) => [make("code", "", `${axis.name}=${axis.size}`), axis.rule, count(axis.tensors_split), percent(axis.bytes_split, view.bytes)]);
    const last = view.devices.length - 1;
    const example = view.mesh.length ? `Device numbers count the mesh axes in this order, the last one fastest: ${deviceName(last)} = ${coordinates(last)}.` : "One device holds everything.";
    $("mesh").replaceChildren(make("h2", "", "Mesh"), ...(rows.length ? [table(["axis", "splits", "tensors", "bytes"], rows, [2, 3])] : []), make("p", "note", example));
  };
  const showOverRead = () => {
    const { reasons, advice } = view.amplification;
    const rows = reasons.map((reason) => [make("div", "", make("code", "", reason.name), make("div", "muted", reason.text)), times(pair(reason))]);
    const none = "A device reads what it needs, and whole pages at the ends of its parts.";
    $("over-read").replaceChildren(make("h2", "", "Over-read"),
      ...(rows.length ? [table(["tensors, and why", "reads"], rows, [1])] : [make("p", "note", overReads() ? "Pages at the ends of short runs: see the tensors." : none)]),
      ...(advice.length ? [make("div", "advice", make("b", "", "What would change it"), make("ul", "", ...advice.map((text) => make("li", "", text))))] : []));
  };
  const item = (entry) => {
    if (typeof entry === "string" || entry.text) return make("li", "", entry.text || entry);
    if (entry.reason) return make("li", "", `${entry.format || entry.path}: ${entry.reason}`);
    const { name, count: number, nearest } = entry;
    return make("li", "", make("code", "", name), number > 1 ? ` ${plural(number, "tensor")}` : "", nearest ? `; the nearest name is ${nearest}` : "");
  };
  // A list of the view, or another one.
  const group = (title, name, open, entries = view[name] || [], more = view.more[name] || 0) => {
    if (!entries.length && !more) return null;
    const items = entries.map(item);
    if (more) items.push(make("li", "muted", `and ${count(more)} more`));
    const element = make("details", "group", make("summary", "", title, make("span", "muted", count(entries.length + more))), make("ul", "scroll", ...items));
    element.open = open;
    return element;
  };
  const showLeftOut = () => {
    const groups = [
      group("Missing tensors", "missing", true), group("Unexpected tensors", "unexpected", true), group("Differences between layers", "holes", true),
      group("Warnings", "warnings", true, view.all_warnings, view.more_warnings),
      group("Tensors that the layout or a flag leaves out", "left_out", true), group("Companions that no decoder reads", "dropped", false),
      group("Tensors that keep their dtype", "kept_f32", false), group("Files that are left out", "files", true, data.files.filter((file) => file.reason), 0),
      group("Formats that this mount would not have", "unavailable", true),
    ].filter(Boolean);
    $("left-out").replaceChildren(make("h2", "", "Left out, and remarks"), ...(groups.length ? groups : [make("p", "note", "Nothing: every tensor of the source is in the plan.")]));
  };
  const showFiles = () => {
    const users = new Map();
    for (const row of view.rows) for (const [file, number] of row.files || []) users.set(file, (users.get(file) || 0) + number);
    const weights = data.files.map((file, number) => [number, file]).filter(([number]) => users.has(number));
    const most = Math.max(1, ...weights.map(([, file]) => file.bytes));
    const lines = weights.map(([number, { path, bytes: size }]) => {
      const meter = make("i");
      meter.style.width = `${(size / most) * 100}%`;
      const button = make("button", "file", make("span", "line", make("code", "", path), make("span", "muted", `${plural(users.get(number), "tensor")}, ${bytes(size)}`)), make("div", "meter", meter));
      button.type = "button";
      button.setAttribute("aria-pressed", String(state.file === number));
      button.addEventListener("click", () => { state.file = state.file === number ? null : number; applyFilter(); showFiles(); });
      return button;
    });
    const note = state.file === null ? "A click on a file shows only the tensors that are read from it." : "Only the tensors of the selected file are shown above.";
    $("files").replaceChildren(make("h2", "", `Files ${lines.length ? `(${count(lines.length)})` : ""}`), make("p", "note", note), make("div", "scroll", ...lines),
      make("p", "note", data.more_files ? `${plural(data.more_files, "file")} more are left out to keep this page small.` : ""));
  };
  const foldedText = () => {
    const { groups, tensors, bytes: size, without_cut: cuts, without_bytes: sizes } = view.folded;
    return [
      view.more_devices ? `${plural(view.more_devices, "device")} after ${deviceName(view.devices.length - 1)} are folded.` : "",
      groups ? `${plural(groups, "row")} with ${plural(tensors, "tensor")}, ${bytes(size)}, the smallest ones, are folded.` : "",
      cuts ? `The parts of ${plural(cuts, "row")} are left out.` : "",
      sizes > cuts ? `The source bytes of ${plural(sizes - cuts, "row")} are left out.` : "",
      groups || cuts || sizes > cuts ? "This keeps the page below 5 MB; ckfs plan --json has all." : "",
    ].filter(Boolean).join(" ");
  };
  const showView = (index) => {
    state.view = index;
    state.row = null;
    state.device = 0;
    state.file = null;
    view = prepare(data.views[index]);
    $("compared").querySelectorAll("button").forEach((button, at) => button.setAttribute("aria-pressed", String(at === index)));
    showCards();
    showMatrix();
    showMesh();
    showOverRead();
    showLeftOut();
    showFiles();
    $("folded").textContent = foldedText();
    const first = view.rows.reduce((best, row) => best === null || row.bytes > view.rows[best].bytes ? row.index : best, null);
    if (first !== null) select(first, 0);
    else $("detail").replaceChildren(make("p", "muted", "No tensors."));
  };

  readColors();
  $("title").textContent = data.source;
  $("subtitle").textContent = [data.dialect.text, data.container, data.revision ? `revision ${data.revision}` : null, `ckfs ${data.version}`].filter(Boolean).join(" · ");
  showCompared();
  $("filter").addEventListener("input", (event) => { state.filter = event.target.value; applyFilter(); });
  document.addEventListener("keydown", (event) => {
    if (event.target === $("filter") || event.altKey || event.ctrlKey || event.metaKey || !view) return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || document.activeElement === $("matrix")) return;
    event.preventDefault();
    select(state.row, (state.device + by + view.devices.length) % view.devices.length);
  });
  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { const { row, device } = state; showMatrix(); select(row, device); }, 120);
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); drawn.forEach((_, index) => drawRow(view.rows[index])); select(state.row, state.device); });
  if (data.views.length) showView(0);
  document.documentElement.dataset.ready = "true";
})();
