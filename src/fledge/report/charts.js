"use strict";
// What the page is made of: elements, numbers as texts, curves, bars. No library.

const page = document.getElementById("page");
const tip = document.getElementById("tip");
const COLOURS = ["var(--accent)", "var(--second)", "var(--third)", "var(--fourth)"];
const SVG = "http://www.w3.org/2000/svg";

// --- small things -------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "circle", "g"].includes(tag);
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") node.style.cssText = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

// Formats: a number, and how many more digits than usual (see `telling`).
const percents = (digits) => (x, more = 0) => (x == null ? "–" : `${(100 * x).toFixed(digits + more)} %`);
const percent = percents(1);
const fixed = (digits) => (x, more = 0) => (x == null ? "–" : x.toFixed(digits + more));
const scientific = (x, more = 0) => (x == null ? "–" : x ? x.toExponential(more) : "0");
const last = (list) => list[list.length - 1];

function short(x, more = 0) {
  if (x == null) return "–";
  const size = Math.abs(x);
  if (size >= 1e6) return `${(x / 1e6).toFixed(1 + more)}M`;
  if (size >= 1e4) return `${(x / 1e3).toFixed(more)}k`;
  if (size >= 1e3) return `${(x / 1e3).toFixed(1 + more)}k`;
  if (size >= 10 || x === 0) return x.toFixed(x ? more : 0);
  return size >= 0.01 ? String(Number(x.toPrecision(3 + more))) : x.toExponential(1 + more);
}

function duration(seconds) {
  if (seconds < 120) return [seconds.toFixed(0), "s"];
  if (seconds < 7200) return [(seconds / 60).toFixed(1), "min"];
  return [(seconds / 3600).toFixed(1), "h"];
}

const gigabytes = (bytes) => `${(bytes / 2 ** 30).toFixed(0)} GiB`;

function showTip(event, ...children) {
  tip.replaceChildren(...children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const right = event.clientX + 16 + box.width > innerWidth;
  const below = event.clientY + 20 + box.height > innerHeight;
  tip.style.left = `${Math.max(8, right ? event.clientX - box.width - 12 : event.clientX + 16)}px`;
  tip.style.top = `${Math.max(8, below ? event.clientY - box.height - 14 : event.clientY + 20)}px`;
}

const hideTip = () => { tip.hidden = true; };
const tipRow = (name, value, colour) => make("div", { class: "row" },
  make("span", {}, colour ? make("i", { style: `background:${colour}` }) : null, name),
  make("span", {}, value));

function section(title, lead, ...children) {
  if (!children.some((child) => child != null)) return;
  page.append(make("h2", {}, title), make("p", { class: "lead" }, lead), ...children.filter(Boolean));
}

function panel(title, note, ...children) {
  return make("div", { class: "panel" }, make("h3", {}, title),
    note ? make("p", { class: "note" }, note) : null, ...children.filter(Boolean));
}

// --- charts -------------------------------------------------------------------------------------

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

// A format takes a number and how many more digits than usual: as many as make all marks differ.
function telling(marks, format) {
  for (let more = 0; more < 8; more += 1) {
    if (new Set(marks.map((at) => format(at, more))).size === marks.length) return (x) => format(x, more);
  }
  return format;
}

// The marks of an axis that ends on its first and last one.
function axis(low, high) {
  const marks = ticks(low, high, 4);
  const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
  if (marks[0] > low + step * 1e-9) marks.unshift(marks[0] - step);
  if (last(marks) < high - step * 1e-9) marks.push(last(marks) + step);
  return marks;
}

// Where labels go that want to be at `wanted` (ascending): in that order, `gap` apart, above `most`.
function apart(wanted, gap, least, most) {
  const at = [];
  wanted.forEach((y, i) => at.push(Math.max(y, i ? at[i - 1] + gap : least)));
  for (let i = at.length - 1, free = most; i >= 0; i -= 1, free -= gap) at[i] = Math.min(at[i], free);
  return at;
}

// A chart is drawn as wide as its place is, so that its letters are never scaled.
const drawings = [];
function lineChart(x, series, options = {}) {
  const place = make("div", { class: "drawing" });
  drawings.push(() => place.replaceChildren(drawChart(x, series, { ...options, W: place.clientWidth || 440 })));
  return place;
}

function drawAll() {
  for (const draw of drawings) draw();
}

// series: [{name, y, colour, dash}], `from` the least top of the y axis, `mark` {x, text} a dashed line.
function drawChart(x, series, { format = short, zero = true, from = 0, mark = null, W, height = 220 }) {
  const values = series.flatMap((one) => one.y).filter((y) => y != null);
  if (!values.length) return make("p", { class: "note" }, "nothing was logged");
  const labelled = series.length > 1;
  const left = 48, right = labelled ? (series.length > 9 ? 66 : 58) : 14, top = mark ? 22 : 12, bottom = 24;
  const high = Math.max(from, ...values), least = zero ? Math.min(0, ...values) : Math.min(...values);
  const marks = axis(least, high === least ? least + 1 : high);
  const [low, most] = [marks[0], last(marks)];
  const x0 = x[0], x1 = last(x) === x0 ? x0 + 1 : last(x);
  const px = (v) => left + ((v - x0) / (x1 - x0)) * (W - left - right);
  const py = (v) => top + (1 - (v - low) / (most - low)) * (height - top - bottom);
  const svg = make("svg", { class: "chart", viewBox: `0 0 ${W} ${height}`, role: "img",
    "aria-label": series.map((one) => one.name).join(", ") });
  const told = telling(marks, format);
  for (const y of marks) {
    svg.append(make("line", { class: "gridline", x1: left, x2: W - right, y1: py(y), y2: py(y) }),
      make("text", { x: left - 7, y: py(y) + 4, "text-anchor": "end" }, told(y)));
  }
  const steps = ticks(x0, x1, W < 360 ? 3 : 4).filter(Number.isInteger);
  const step = telling(steps, short);
  for (const at of steps) {
    svg.append(make("text", { x: px(at), y: height - 6, "text-anchor": "middle" }, step(at)));
  }
  if (mark) {
    const at = px(mark.x), side = at > W / 2 ? "end" : "start";
    svg.append(make("line", { class: "best", x1: at, x2: at, y1: top, y2: height - bottom }),
      make("text", { class: "best-label", x: at, y: top - 8, "text-anchor": side }, mark.text));
  }
  for (const one of series) svg.append(...strokes(one, x, px, py));
  if (labelled) svg.append(...endLabels(series, py, { x: W - right + 8, low, top, floor: height - bottom }));
  svg.append(hoverLayer(svg, x, series, { px, py, left, right, top, bottom, W, height, format }));
  return svg;
}

function strokes({ y, colour, dash }, x, px, py) {
  let path = "", pen = "M";
  y.forEach((value, i) => {
    if (value == null) { pen = "M"; return; }
    path += `${pen}${px(x[i]).toFixed(1)},${py(value).toFixed(1)}`;
    pen = "L";
  });
  const drawn = [make("path", { class: "curve", d: path, style: `stroke:${colour}`, "stroke-dasharray": dash })];
  const [only, more] = y.filter((value) => value != null); // one point alone has no line
  if (only != null && more == null) {
    drawn.push(make("circle", { cx: px(x[y.indexOf(only)]), cy: py(only), r: 3, style: `fill:${colour}` }));
  }
  return drawn;
}

// The names at the curves' ends; where there is no room for all, of every second one, third one, ...
function endLabels(series, py, { x, low, top, floor }) {
  const gap = 13, every = Math.ceil((series.length * gap) / (floor - top));
  const ends = series.filter((_, k) => k % every === 0)
    .map((one) => ({ one, at: py(last(one.y.filter((y) => y != null)) ?? low) + 4 }))
    .sort((a, b) => a.at - b.at);
  const at = apart(ends.map((end) => end.at), gap, top, floor + 4);
  return ends.map(({ one }, i) => make("text", { class: "label", x, y: at[i], style: `fill:${one.colour}` }, one.name));
}

function hoverLayer(svg, x, series, { px, py, left, right, top, bottom, W, height, format }) {
  const cross = make("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
  const dots = series.map((one) => make("circle", { r: 3.5, style: `fill:${one.colour}`, visibility: "hidden" }));
  svg.append(cross, ...dots);
  return make("rect", { class: "hover", x: left, y: top, width: W - left - right, height: height - top - bottom,
    onmousemove: (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * W;
      let near = 0;
      x.forEach((value, i) => { if (Math.abs(px(value) - at) < Math.abs(px(x[near]) - at)) near = i; });
      cross.setAttribute("x1", px(x[near]));
      cross.setAttribute("x2", px(x[near]));
      cross.setAttribute("visibility", "visible");
      series.forEach((one, i) => {
        const y = one.y[near];
        dots[i].setAttribute("visibility", y == null ? "hidden" : "visible");
        if (y != null) { dots[i].setAttribute("cx", px(x[near])); dots[i].setAttribute("cy", py(y)); }
      });
      showTip(event, make("div", {}, `step ${x[near]}`),
        ...series.map((one) => tipRow(one.name, format(one.y[near], 1), one.colour)));
    },
    onmouseleave: () => {
      hideTip();
      for (const node of [cross, ...dots]) node.setAttribute("visibility", "hidden");
    } });
}

// rows: [{name, values, notes}], one value per series. Bars start at `base`: a length of 1 is no gain.
function bars(rows, { most, base = 0, format = fixed(2) }) {
  const grid = make("div", { class: "bars" });
  for (const row of rows) {
    row.values.forEach((value, i) => {
      const share = value == null ? 0 : Math.max(0, Math.min(1, (value - base) / (most - base)));
      grid.append(
        make("span", { class: "what" }, i === 0 ? row.name : ""),
        make("span", { class: "track" }, make("span", { class: "fill",
          style: `width:${(100 * share).toFixed(1)}%;background:${row.colour ?? COLOURS[i % COLOURS.length]}` })),
        make("span", { class: "number" }, format(value), row.notes?.[i] ? make("small", {}, ` ${row.notes[i]}`) : null));
    });
  }
  return grid;
}

const legend = (names) => names.length < 2 ? null : make("div", { class: "key" },
  ...names.map((name, i) => make("span", {}, make("i", { style: `background:${COLOURS[i % COLOURS.length]}` }), name)));

// Who is who among tokens 1, 2, 3, ...: eight colours that differ for every kind of eyes, then dashed.
const curveColour = (k) => `var(--k${(k % 8) + 1})`;
const byDepth = (curves) => curves.map((y, k) =>
  ({ name: `token ${k + 1}`, y, colour: curveColour(k), dash: k < 8 ? null : "5 3" }));

// The shade of a token that was drafted at depth k of `depth`: as far apart as the scale allows.
const shade = (k, depth) => (depth > 8 || depth < 2 ? Math.min(8, k) : Math.round(1 + ((k - 1) * 7) / (depth - 1)));
