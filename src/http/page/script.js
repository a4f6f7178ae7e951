"use strict";
// Reads /metrics once a second while it is visible, keeps fifteen minutes, and draws them. No state is kept anywhere else.
const EVERY = 1000, KEPT = 900, WINDOW = 10, LEFT = 58; // Milliseconds; samples; seconds that rates and percentiles are taken over; pixels.
const LIMITS = ["rows", "knee", "ladder", "deadline", "padding", "bytes", "retry"];
const byId = id => document.getElementById(id);
const samples = []; // Ascending in time: {at, series: Map of family to [{labels, value}]}.
const charts = []; // Everything drawn: {figure, draw}.
let paused = false, timer = 0, cursor = null, failing = false;

// ---- Reading ----

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

function parse(text) {
  const series = new Map();
  for (const line of text.split("\n")) {
    const found = line[0] === "#" ? null : LINE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, key, value] of (found[2] || "").matchAll(LABEL)) {
      labels[key] = value.replace(/\\(.)/g, (_, c) => c === "n" ? "\n" : c);
    }
    if (!series.has(found[1])) series.set(found[1], []);
    series.get(found[1]).push({labels, value: found[3] === "+Inf" ? Infinity : Number(found[3])});
  }
  return series;
}

const matches = (labels, wanted) => Object.entries(wanted).every(([key, value]) => labels[key] === value);
const all = (sample, name, wanted = {}) => (sample.series.get("concertina_" + name) || []).filter(s => matches(s.labels, wanted));
const total = (sample, name, wanted) => all(sample, name, wanted).reduce((sum, s) => sum + s.value, 0);
const one = (sample, name, wanted) => { const [s] = all(sample, name, wanted); return s ? s.value : null; };

/** The sample that rates at `index` are taken against. */
function before(index) {
  let at = index;
  while (at > 0 && samples[index].at - samples[at].at < WINDOW * 1000) at--;
  return at;
}

/** How much a counter grew over the window. A counter that fell began anew. */
function grown(index, name, wanted) {
  const now = total(samples[index], name, wanted), then = total(samples[before(index)], name, wanted);
  return now < then ? now : now - then;
}

function perSecond(index, name, wanted) {
  const seconds = (samples[index].at - samples[before(index)].at) / 1000;
  return seconds > 0 ? grown(index, name, wanted) / seconds : null;
}

/** A quantile of what a histogram saw over the window, in proportion within its bucket; null if it saw nothing. */
function quantile(index, name, wanted, share) {
  const now = new Map(), then = new Map();
  for (const [sample, sums] of [[samples[index], now], [samples[before(index)], then]]) {
    for (const {labels, value} of all(sample, name + "_bucket", wanted)) {
      const edge = labels.le === "+Inf" ? Infinity : Number(labels.le);
      sums.set(edge, (sums.get(edge) || 0) + value);
    }
  }
  const edges = [...now.keys()].sort((a, b) => a - b);
  const counts = edges.map(edge => now.get(edge) - (then.get(edge) || 0));
  const wantedCount = share * (counts.at(-1) || 0);
  if (!(wantedCount > 0)) return null;
  const place = counts.findIndex(count => count >= wantedCount);
  const [low, below] = place > 0 ? [edges[place - 1], counts[place - 1]] : [0, 0];
  if (edges[place] === Infinity) return low;
  return low + (edges[place] - low) * (wantedCount - below) / Math.max(counts[place] - below, 1e-9);
}

// ---- Saying ----

function round(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  return Number.isInteger(value) && size < 1e5 ? value.toLocaleString("en") : size >= 100 ? Math.round(value).toLocaleString("en") : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}
function bytes(value) {
  if (value === null || value === undefined) return "–";
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (Math.abs(value) >= 1024 && place + 1 < names.length) { value /= 1024; place++; }
  return (place === 0 ? value : value >= 100 ? value.toFixed(0) : value.toFixed(1)) + " " + names[place];
}
const seconds = value => value === null || value === undefined ? "–"
  : value >= 1 ? value.toFixed(2) + " s" : value >= 0.01 ? (1e3 * value).toFixed(0) + " ms" : (1e3 * value).toFixed(2) + " ms";
const percent = value => value === null || value === undefined ? "–" : (100 * value).toFixed(0) + "%";
const clock = at => new Date(at).toLocaleTimeString("en-GB");

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}
function shape(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// ---- Drawing ----

/**
 * A chart over time. `lines`: {name, value(index), kind: "line" | "dashed" | "area" | "said", color, clip}; areas stand
 * on each other, what is only said has no line, what may be clipped does not stretch the axis.
 * `say` writes a value, `log` draws a logarithmic axis, `most(index)` is a value that the axis always reaches.
 */
function chart(parent, title, lines, {say = round, log = false, most = null, least = 0} = {}) {
  const when = make("span", {class: "when"}), legend = make("dl", {class: "legend"});
  const svg = shape("svg", {role: "img", tabindex: "0", preserveAspectRatio: "none"});
  const figure = make("figure", {}, make("figcaption", {}, make("h4", {}, title), when), svg, legend);
  const readouts = lines.map(line => {
    const value = make("dd", {}, "–");
    legend.append(make("div", {}, make("i", {class: "k" + line.color, "aria-hidden": "true"}), make("dt", {}, line.name), value));
    return value;
  });
  parent.append(figure);
  const range = () => {
    // As much as was asked for, as far as there is anything, and a minute at least.
    const span = 1000 * Number(byId("span").value), end = samples.at(-1).at;
    const begin = Math.max(end - span, Math.min(samples[0].at, end - 60000));
    return {begin, end, first: samples.findIndex(sample => sample.at >= begin)};
  };
  const point = event => {
    const box = svg.getBoundingClientRect(), {begin, end, first} = range();
    const at = begin + (end - begin) * (event.clientX - box.left - LEFT) / Math.max(box.width - LEFT - 4, 1);
    const found = samples.findIndex(sample => sample.at >= at);
    cursor = samples[Math.max(found < 0 ? samples.length - 1 : found, first)].at;
    drawAll();
  };
  svg.addEventListener("pointermove", event => { if (samples.length) point(event); });
  svg.addEventListener("pointerleave", () => { cursor = null; drawAll(); });
  svg.addEventListener("blur", () => { cursor = null; drawAll(); });
  svg.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10}[event.key];
    if (event.key === "Escape") cursor = null;
    else if (step && samples.length) {
      const place = cursor === null ? samples.length - 1 : samples.findIndex(sample => sample.at >= cursor);
      cursor = samples[Math.min(Math.max(place + step, range().first), samples.length - 1)].at;
    } else return;
    event.preventDefault();
    drawAll();
  });

  const draw = () => {
    const {begin, end, first} = range();
    const width = svg.clientWidth || 480, height = svg.clientHeight || 170;
    const left = LEFT, right = width - 4, top = 8, bottom = height - 18;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const indices = [];
    for (let index = first; index < samples.length; index++) indices.push(index);
    const values = lines.map(line => indices.map(index => line.value(index)));
    const areas = lines.map((line, place) => line.kind === "area" ? place : -1).filter(place => place >= 0);
    const tops = indices.map((_, i) => areas.reduce((sum, place) => sum + (values[place][i] || 0), 0));
    const flat = values.filter((_, place) => ["line", "dashed"].includes(lines[place].kind) && !lines[place].clip).flat().filter(value => value !== null && isFinite(value));
    const high = Math.max(least, ...tops, ...flat, ...(most ? indices.map(most) : []), 0) || 1;
    const low = log ? Math.max(Math.min(...flat.filter(value => value > 0), high / 10), high / 1e4) : 0;
    const [up, down] = log ? [10 ** Math.ceil(Math.log10(high)), 10 ** Math.floor(Math.log10(low))] : [high * 1.05, 0];
    const x = index => left + (right - left) * (samples[index].at - begin) / (end - begin);
    const part = value => log ? Math.log(Math.max(value, down) / down) / Math.log(up / down) : value / up;
    const y = value => bottom - (bottom - top) * Math.min(part(value), 1);
    svg.replaceChildren();
    const marks = log ? [] : [0, high / 2, high];
    if (log) for (let mark = down; mark <= up * 1.01; mark *= 10) marks.push(mark);
    for (const mark of marks) {
      svg.append(shape("line", {class: "grid", x1: left, x2: right, y1: y(mark), y2: y(mark)}));
      svg.append(shape("text", {x: left - 5, y: y(mark) + 4, "text-anchor": "end"}, say(mark).replace(/\.0+(?=\s|$|%)/, "")));
    }
    svg.append(shape("text", {x: left, y: height - 4}, clock(begin)));
    svg.append(shape("text", {x: right, y: height - 4, "text-anchor": "end"}, clock(end)));
    const floor = indices.map(() => 0);
    lines.forEach((line, place) => {
      const points = [];
      if (line.kind === "area") {
        const under = [...floor];
        indices.forEach((index, i) => { floor[i] += values[place][i] || 0; points.push(`${x(index).toFixed(1)},${y(floor[i]).toFixed(1)}`); });
        const back = indices.map((index, i) => `${x(index).toFixed(1)},${y(under[i]).toFixed(1)}`).reverse();
        svg.append(shape("polygon", {class: `area k${line.color}`, points: [...points, ...back].join(" ")}));
        return;
      }
      if (line.kind === "said") return;
      let path = "", pen = "M";
      indices.forEach((index, i) => {
        const value = values[place][i];
        if (value === null || !isFinite(value)) { pen = "M"; return; }
        path += `${pen}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      });
      svg.append(shape("path", {class: `line k${line.color} ${line.kind === "dashed" ? "dashed" : ""}`, d: path || "M0 0"}));
    });
    const shown = cursor === null ? samples.length - 1 : Math.max(samples.findIndex(sample => sample.at >= cursor), 0);
    if (cursor !== null) svg.append(shape("line", {class: "cursor", x1: x(shown), x2: x(shown), y1: top, y2: bottom}));
    when.textContent = cursor === null ? "" : clock(samples[shown].at);
    const said = lines.map((line, place) => {
      const text = (line.say || say)(line.value(shown));
      readouts[place].textContent = text;
      return `${line.name} ${text}`;
    });
    svg.setAttribute("aria-label", `${title}, ${cursor === null ? "now" : "at " + clock(samples[shown].at)}: ${said.join(", ")}`);
  };
  charts.push({figure, draw});
}

function drawAll() {
  if (!samples.length) return;
  for (const {figure, draw} of charts) {
    const folded = figure.closest("details");
    if (!folded || folded.open) draw();
  }
}

// ---- What is shown ----

const line = (name, color, value, rest = {}) => ({name, color, value, kind: "line", ...rest});
const known = new Set();

function memoryChart(device) {
  const kind = name => index => one(samples[index], "memory_bytes", {device, kind: name});
  const idle = index => Math.max((kind("committed")(index) || 0) - (kind("allocated")(index) || 0), 0);
  chart(byId("memory"), `Device ${device}`, [
    line("in use by models", 0, kind("allocated"), {kind: "area"}),
    line("held idle", 2, idle, {kind: "area"}),
    line("outside: others, and this process itself", 1, kind("outside"), {kind: "area"}),
    line("limit", 4, index => Math.min(kind("limit")(index) ?? Infinity, kind("total")(index) ?? Infinity), {kind: "dashed"}),
    line("total", 5, kind("total"), {kind: "dashed"}),
  ], {say: bytes, most: kind("total")});
  // A few megabytes in use are nothing on a device of many gigabytes: the same again, on a scale of its own.
  chart(byId("memory"), `Device ${device}: run memory`, [
    line("promised to batches", 0, kind("run_reserved"), {kind: "area"}),
    line("runs may use", 4, kind("run_budget"), {kind: "dashed", clip: true}),
    line("in use by models", 2, kind("allocated")),
    line("held by models", 3, kind("committed")),
  ], {say: bytes});
}

function modelCharts(model, version) {
  const wanted = {model, version}, by = extra => ({...wanted, ...extra});
  const brief = make("span", {class: "brief"});
  const body = make("div", {class: "charts"});
  const folded = make("details", {}, make("summary", {}, make("h3", {}, `${model} / ${version}`), brief), body);
  folded.open = byId("model-list").children.length < 4;
  folded.addEventListener("toggle", drawAll);
  byId("model-list").append(folded);
  const gone = index => all(samples[index], "queue_rows", wanted).length === 0;
  const share = limit => index => {
    const count = grown(index, "batch_limited_total", wanted);
    return count > 0 ? grown(index, "batch_limited_total", by({by: limit})) / count : null;
  };
  const rows = index => {
    const count = grown(index, "batch_rows_count", wanted);
    return count > 0 ? grown(index, "batch_rows_sum", wanted) / count : null;
  };
  const late = part => index => quantile(index, "request_seconds", wanted, part);
  chart(body, "Latency of requests", [
    line("p50", 0, late(0.5)), line("p90", 1, late(0.9)), line("p99", 4, late(0.99)),
  ], {say: seconds, log: true});
  chart(body, "Rows per second", [
    line("offered", 0, index => one(samples[index], "offered_rows_per_second", wanted)),
    line("answered", 2, index => perSecond(index, "batch_rows_sum", wanted)),
    line("capacity", 4, index => one(samples[index], "capacity_rows_per_second", wanted), {kind: "dashed"}),
    line("saturation", 5, index => one(samples[index], "saturation", wanted), {kind: "said"}),
  ]);
  chart(body, "Rows per batch", [
    line("mean", 0, rows), line("99 of 100 at most", 1, index => {
      const most = quantile(index, "batch_rows", wanted, 0.99);
      return most === null ? null : Math.ceil(most);
    }, {kind: "dashed"}),
  ]);
  chart(body, "What limited batches", LIMITS.map((limit, place) => line(limit, [0, 2, 3, 1, 6, 4, 5][place], share(limit), {kind: "area"})),
    {say: percent, least: 1});
  chart(body, "Queue", [
    line("rows that wait", 0, index => one(samples[index], "queue_rows", wanted)),
    line("refused per second", 4, index => perSecond(index, "rejections_total", wanted)),
    line("the oldest waits", 5, index => one(samples[index], "queue_oldest_seconds", wanted), {kind: "said", say: seconds}),
  ]);
  const spent = stages => index => {
    const sum = grown(index, "stage_seconds_total", wanted);
    const own = stages.reduce((sum, stage) => sum + grown(index, "stage_seconds_total", by({stage})), 0);
    return sum > 0 ? own / sum : null;
  };
  const stages = [["queue", 1, ["queue"]], ["compute", 0, ["compute"]],
    ["gather, scatter", 2, ["gather", "scatter"]], ["decode, encode", 4, ["decode", "encode"]]];
  chart(body, "Where the time goes", stages.map(([name, color, parts]) => line(name, color, spent(parts), {kind: "area"})), {say: percent, least: 1});
  return () => {
    const last = samples.length - 1;
    folded.hidden = gone(last);
    brief.textContent = `${round(perSecond(last, "batch_rows_sum", wanted))} rows/s, p99 ${seconds(late(0.99)(last))}, `
      + `${round(rows(last))} rows a batch, saturation ${round(one(samples[last], "saturation", wanted))}`;
  };
}

const briefs = [];
function discover(sample) {
  for (const {labels} of all(sample, "memory_bytes", {kind: "total"})) {
    if (!known.has("device " + labels.device)) { known.add("device " + labels.device); memoryChart(labels.device); }
  }
  for (const {labels: {model, version}} of all(sample, "queue_rows")) {
    const name = JSON.stringify([model, version]);
    if (!known.has(name)) { known.add(name); briefs.push(modelCharts(model, version)); }
  }
}

const TILES = [
  ["Saturation", i => one(samples[i], "saturation_pod"), round, value => value > 1],
  ["Replicas wanted", i => one(samples[i], "desired_replicas"), round],
  ["Answers per second", i => perSecond(i, "requests_total", {code: "ok"}), round],
  ["Errors per second", i => { const r = perSecond(i, "requests_total"); return r === null ? null : r - perSecond(i, "requests_total", {code: "ok"}); },
    round, value => value > 0],
  ["p50", i => quantile(i, "request_seconds", {}, 0.5), seconds],
  ["p99", i => quantile(i, "request_seconds", {}, 0.99), seconds],
  ["Requests inside", i => one(samples[i], "requests_in_flight"), round],
  ["Rows that wait", i => total(samples[i], "queue_rows"), round],
  ["Cut by memory", i => { const n = grown(i, "batch_limited_total"); return n > 0 ? grown(i, "batch_limited_total", {by: "bytes"}) / n : null; },
    percent, value => value > 0.05],
];
const tiles = TILES.map(([name]) => {
  const value = make("dd", {}, "–"), tile = make("div", {}, make("dt", {}, name), value);
  byId("tiles").append(tile);
  return {tile, value};
});

// ---- What happened ----

const states = new Map();
function tell(at, text) {
  const list = byId("events");
  list.querySelector(".none")?.remove();
  list.prepend(make("li", {}, make("time", {datetime: new Date(at).toISOString()}, clock(at)), text));
  while (list.children.length > 100) list.lastChild.remove();
}

/** Tells when a condition begins and ends; what held at the first look is told as well. */
function watch(key, at, holds, begins, ends) {
  const was = states.get(key) || false;
  states.set(key, holds);
  if (holds && !was) tell(at, begins);
  if (!holds && was) tell(at, ends);
}

function happened(index) {
  const sample = samples[index], {at} = sample, previous = samples[index - 1];
  for (const {labels: {model, version}} of all(sample, "queue_rows")) {
    const wanted = {model, version}, name = `${model} / ${version}`;
    const cut = grown(index, "batch_limited_total", {...wanted, by: "bytes"}), batches = grown(index, "batch_limited_total", wanted);
    const full = states.get("bytes " + name) ? cut > 0 : batches > 0 && cut / batches > 0.05;
    watch("bytes " + name, at, full, `${name}: memory makes batches smaller.`, `${name}: memory no longer makes batches smaller.`);
    const refused = grown(index, "rejections_total", wanted);
    watch("refused " + name, at, refused > 0, `${name}: requests are refused.`, `${name}: no request is refused any more.`);
    const retried = grown(index, "retried_rows_total", {...wanted, reason: "out_of_memory"});
    watch("retried " + name, at, retried > 0, `${name}: batches ran out of memory and ran again in halves.`, `${name}: no batch runs out of memory any more.`);
  }
  const saturation = one(sample, "saturation_pod") ?? 0;
  watch("saturated", at, saturation > (states.get("saturated") ? 0.95 : 1),
    "More is asked than can be done: saturation is over 1.", "What is asked can be done again: saturation is below 1.");
  if (!previous) return;
  for (const {labels: {device}, value: now} of all(sample, "memory_bytes", {kind: "limit"})) {
    const size = one(sample, "memory_bytes", {device, kind: "total"}) ?? Infinity;
    const then = one(previous, "memory_bytes", {device, kind: "limit"});
    if (then !== null && Math.min(then, size) !== Math.min(now, size)) {
      tell(at, `Device ${device}: the limit went from ${bytes(Math.min(then, size))} to ${bytes(Math.min(now, size))}.`);
    }
  }
  for (const {labels: {device}, value: size} of all(sample, "memory_bytes", {kind: "total"})) {
    const key = "outside " + device, now = one(sample, "memory_bytes", {device, kind: "outside"}) ?? 0;
    const told = states.get(key) ?? now;
    states.set(key, told);
    if (Math.abs(now - told) > size / 20) {
      tell(at, `Device ${device}: others ${now > told ? "took" : "gave back"} ${bytes(Math.abs(now - told))}.`);
      states.set(key, now);
    }
  }
}

// ---- Going on ----

function say(text, bad) {
  const state = byId("state");
  if (state.textContent !== text) state.textContent = text;
  state.classList.toggle("bad", bad);
}

async function look() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  const began = Date.now();
  try {
    const answer = await fetch("metrics", {cache: "no-store", signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error("HTTP " + answer.status);
    take({at: began, series: parse(await answer.text())});
    if (failing) tell(began, "The server answers again.");
    failing = false;
    say("Live", false);
  } catch (error) {
    if (!failing) tell(began, "The server does not answer.");
    failing = true;
    say(`No answer since ${clock(samples.at(-1)?.at ?? began)}`, true);
    if (!(error instanceof TypeError) && error.name !== "TimeoutError") console.error(error);
  }
  timer = setTimeout(look, Math.max(EVERY - (Date.now() - began), 100));
}

function take(sample) {
  samples.push(sample);
  if (samples.length > KEPT) samples.shift();
  const last = samples.length - 1;
  discover(sample);
  byId("version").textContent = all(sample, "build_info")[0]?.labels.version ?? "";
  TILES.forEach(([, value, write, bad], place) => {
    const found = value(last);
    tiles[place].value.textContent = write(found);
    tiles[place].tile.classList.toggle("bad", Boolean(bad && found !== null && bad(found)));
  });
  briefs.forEach(brief => brief());
  happened(last);
  drawAll();
}

byId("span").addEventListener("change", drawAll);
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) { clearTimeout(timer); say("Paused", false); } else look();
});
document.addEventListener("visibilitychange", look);
addEventListener("resize", drawAll);
look();
