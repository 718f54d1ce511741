"use strict";
// Draws the page from the JSON beside it. No library, no request; every text goes in as text.

const data = JSON.parse(document.getElementById("data").textContent);
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

const percent = (x, digits = 1) => (x == null ? "–" : `${(100 * x).toFixed(digits)} %`);
const fixed = (digits) => (x) => (x == null ? "–" : x.toFixed(digits));
const last = (list) => list[list.length - 1];

function short(x) {
  if (x == null) return "–";
  const size = Math.abs(x);
  if (size >= 1e6) return `${(x / 1e6).toFixed(1)}M`;
  if (size >= 1e4) return `${(x / 1e3).toFixed(0)}k`;
  if (size >= 1e3) return `${(x / 1e3).toFixed(1)}k`;
  if (size >= 10 || x === 0) return x.toFixed(0);
  return size >= 0.01 ? String(Number(x.toPrecision(3))) : x.toExponential(1);
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
    note ? make("p", { class: "note" }, note) : null, ...children);
}

// --- charts -------------------------------------------------------------------------------------

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

// series: [{name, y, colour}], `from` the least top of the y axis, `mark` {x, text} a dashed line.
function lineChart(x, series, { format = short, zero = true, from = 0, mark = null, W = 500, height = 220 } = {}) {
  const values = series.flatMap((one) => one.y).filter((y) => y != null);
  if (!values.length) return make("p", { class: "note" }, "nothing was logged");
  const labelled = series.length > 1;
  const left = 44, right = labelled ? 56 : 14, top = 12, bottom = 24;
  let low = zero ? Math.min(0, ...values) : Math.min(...values);
  let high = Math.max(from, ...values);
  if (high === low) high = low + 1;
  const marks = ticks(low, high, 4);
  const step = marks.length > 1 ? marks[1] - marks[0] : high - low;
  if (marks[0] > low + step * 1e-9) marks.unshift(marks[0] - step); // the axis ends on a line
  if (last(marks) < high - step * 1e-9) marks.push(last(marks) + step);
  [low, high] = [marks[0], last(marks)];
  const x0 = x[0], x1 = last(x) === x0 ? x0 + 1 : last(x);
  const px = (v) => left + ((v - x0) / (x1 - x0)) * (W - left - right);
  const py = (v) => top + (1 - (v - low) / (high - low)) * (height - top - bottom);
  const svg = make("svg", { class: "chart", viewBox: `0 0 ${W} ${height}`, role: "img",
    "aria-label": series.map((one) => one.name).join(", ") });
  for (const y of marks) {
    svg.append(make("line", { class: "gridline", x1: left, x2: W - right, y1: py(y), y2: py(y) }),
      make("text", { x: left - 7, y: py(y) + 4, "text-anchor": "end" }, format(y)));
  }
  for (const at of ticks(x0, x1, 4)) {
    svg.append(make("text", { x: px(at), y: height - 6, "text-anchor": "middle" }, short(at)));
  }
  if (mark) {
    svg.append(make("line", { class: "best", x1: px(mark.x), x2: px(mark.x), y1: top, y2: height - bottom }),
      make("text", { class: "best-label", x: px(mark.x) - 6, y: height - bottom - 8, "text-anchor": "end" }, mark.text));
  }
  let free = -Infinity; // labels at the curves' ends, pushed apart from top to bottom
  const ends = series.map((one) => ({ one, at: py(last(one.y.filter((y) => y != null)) ?? low) }));
  for (const { one, at } of ends.sort((a, b) => a.at - b.at)) {
    let path = "", pen = "M";
    one.y.forEach((y, i) => {
      if (y == null) { pen = "M"; return; }
      path += `${pen}${px(x[i]).toFixed(1)},${py(y).toFixed(1)}`;
      pen = "L";
    });
    svg.append(make("path", { class: "curve", d: path, style: `stroke:${one.colour}` }));
    if (one.y.length === 1) svg.append(make("circle", { cx: px(x[0]), cy: at, r: 3, style: `fill:${one.colour}` }));
    if (labelled) {
      free = Math.max(free + 13, at + 4);
      svg.append(make("text", { class: "label", x: W - right + 7, y: free, style: `fill:${one.colour}` }, one.name));
    }
  }
  svg.append(hoverLayer(svg, x, series, { px, py, left, right, top, bottom, W, height, format }));
  return svg;
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
        ...series.map((one) => tipRow(one.name, format(one.y[near]), one.colour)));
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

const depthColour = (k) => `var(--d${Math.min(8, k)})`;
// Curves need more contrast than token backgrounds: the depth scale is read from its dark end.
const curveColour = (k, count) => `color-mix(in oklab, var(--accent) ${Math.round(100 - (62 * k) / Math.max(1, count - 1))}%, var(--third))`;

// --- head ---------------------------------------------------------------------------------------

const drafts = data.evaluation?.drafts ?? [];
const first = drafts[0];

function head() {
  const bird = make("svg", { viewBox: "0 0 48 48", "aria-hidden": "true" },
    make("path", { fill: "currentColor", d: "M6 29c7 1 11-2 14-8 3-7 8-11 14-11 3 0 5 1 6 4l5 2-5 2c0 12-8 21-20 21-3 0-6-.5-8-1.5l-8 5.500 2.500-8.500C4.500 33 4.500 31 6 29z" }),
    make("path", { fill: "none", stroke: "var(--paper)", "stroke-width": 2, "stroke-linecap": "round", d: "M20 31c6 0 11-4 12-10" }),
    make("circle", { cx: 35, cy: 14.5, r: 1.6, fill: "var(--paper)" }));
  const words = [data.method && `${data.method} draft`, data.target && `for ${data.target}`].filter(Boolean).join(" ");
  page.append(make("header", {}, bird, make("div", {}, make("h1", {}, data.name), make("p", {}, words))));
}

function card(name, value, unit, sub, kind = "") {
  return make("div", { class: `card ${kind}` }, make("div", { class: "name" }, name),
    make("div", { class: "value" }, value, unit ? make("small", {}, ` ${unit}`) : null),
    make("div", { class: "sub" }, sub));
}

// How many texts a speed-up stands on; figures from before this was kept do not say.
function onTexts(speed) {
  return speed.texts == null ? "" : `; ${speed.texts} text${speed.texts === 1 ? "" : "s"} timed`;
}

function cards() {
  const found = [], held = data.held_out;
  if (first) {
    found.push(card("acceptance length", first.acceptance_length.toFixed(2), "",
      `tokens per round; ${first.method}, ${first.joint.length} drafted`, "first"));
    const speed = first.speed;
    if (speed && !speed.disturbed) {
      const gain = speed.measured_speedup_live_sample;
      found.push(card("measured speed-up", `${gain.toFixed(2)}×`, "",
        `pays from ${speed.break_even_acceptance_length.toFixed(2)} tokens per round${onTexts(speed)}`, gain < 1 ? "bad" : ""));
    }
    if (first.live) {
      found.push(card("lossless", `${first.live.same_texts} of ${first.live.texts}`, "",
        "answers decoded live are the target's own, token for token",
        first.live.agrees ? "" : "bad"));
    }
  }
  if (held.best != null) {
    found.push(card("held-out acceptance", held.length[held.best].toFixed(2), "",
      `best at step ${held.step[held.best].toLocaleString("en")}; ${held.length[0].toFixed(2)} before training`,
      first ? "" : "first"));
  }
  const seconds = data.training.seconds;
  if (seconds != null) {
    const speeds = data.training.tokens_per_s.filter((x) => x != null).sort((a, b) => a - b);
    const middle = speeds[Math.floor(speeds.length / 2)];
    found.push(card("training", ...duration(seconds),
      `${last(data.training.step).toLocaleString("en")} steps${middle ? `, ${short(middle)} tokens/s` : ""}`));
  }
  page.append(make("div", { class: "cards" }, ...found));
}

// --- token view ---------------------------------------------------------------------------------

const [TEXT, DEPTH, ROUND, TARGET_P, DRAFT_P, INSTEAD, INSTEAD_P] = [0, 1, 2, 3, 4, 5, 6];
const quoted = (text) => `“${text.replaceAll("\n", "⏎")}”`;

function tokenStyle(token, mode) {
  if (mode === "depth") {
    if (!token[DEPTH]) return "";
    return `background:${depthColour(token[DEPTH])};${token[DEPTH] > 5 ? "color:var(--on-deep)" : ""}`;
  }
  if (token[DRAFT_P] == null) return "";
  return `background:color-mix(in srgb, var(--d5) ${Math.round(85 * token[DRAFT_P])}%, transparent)`;
}

function tokenTip(token) {
  const place = ["1st", "2nd", "3rd"][token[DEPTH] - 1] ?? `${token[DEPTH]}th`;
  const who = token[DEPTH] ? `drafted as the ${place} of its round, accepted`
    : token[ROUND] < 0 ? "the first token: the prompt's own pass" : "the target's own";
  const rows = [make("b", {}, quoted(token[TEXT])), make("div", {}, who)];
  if (token[TARGET_P] != null) rows.push(tipRow("target's probability", percent(token[TARGET_P])));
  if (token[DRAFT_P] != null) rows.push(tipRow("draft's probability", percent(token[DRAFT_P])));
  if (token[INSTEAD] != null) rows.push(tipRow(`the draft said ${quoted(token[INSTEAD])}`, percent(token[INSTEAD_P])));
  return rows;
}

function tokenSpan(token, mode, all) {
  const own = !token[DEPTH];
  const span = make("span", { class: `t${own ? " own" : ""}${token[ROUND] < 0 ? " first" : ""}`,
    style: tokenStyle(token, mode), "data-depth": token[DEPTH], "data-round": token[ROUND] });
  token[TEXT].split("\n").forEach((part, i) => {
    if (i) span.append(make("span", { class: "nl" }, "⏎"), "\n");
    span.append(part);
  });
  span.addEventListener("mousemove", (event) => showTip(event, ...tokenTip(token)));
  const same = (on) => all().forEach((other) =>
    other.classList.toggle("same", on && token[ROUND] >= 0 && other.dataset.round === span.dataset.round));
  span.addEventListener("mouseenter", () => same(true));
  span.addEventListener("mouseleave", () => { hideTip(); same(false); });
  return span;
}

function depthLegend(depth) {
  const swatches = Array.from({ length: depth }, (_, k) =>
    make("span", { class: "t", style: tokenStyle(["", k + 1], "depth") }, `${k + 1}`));
  return make("div", { class: "legend" }, make("span", {}, "drafted and accepted at depth"), ...swatches,
    make("span", { style: "margin-left:10px" }, "the target's own"), make("span", { class: "t own" }, "token"));
}

function tokenView(samples, depth) {
  const state = { sample: 0, mode: "depth" };
  const asked = make("div", { class: "asked" }), said = make("div", { class: "said" });
  const figures = make("span", { class: "note" }), foot = make("div", { class: "foot" });
  const press = (buttons, chosen) => buttons.forEach((b, i) => b.setAttribute("aria-pressed", i === chosen));
  const names = samples.map((one, i) => samples.filter((o) => o.category === one.category).length > 1
    ? `${one.category} ${samples.slice(0, i + 1).filter((o) => o.category === one.category).length}` : one.category);
  const tabs = names.map((name, i) => make("button", { type: "button",
    onclick: () => { state.sample = i; draw(); } }, name || `answer ${i + 1}`));
  const modes = ["depth", "confidence"];
  const switches = modes.map((mode) => make("button", { type: "button",
    onclick: () => { state.mode = mode; draw(); } }, mode === "depth" ? "who wrote it" : "how sure the draft was"));
  function draw() {
    const one = samples[state.sample];
    press(tabs, state.sample);
    press(switches, modes.indexOf(state.mode));
    asked.textContent = one.prompt;
    const spans = [];
    spans.push(...one.tokens.map((token) => tokenSpan(token, state.mode, () => spans)));
    said.replaceChildren(...spans);
    const drafted = one.tokens.filter((token) => token[DEPTH]).length;
    figures.textContent = `${one.tokens.length} tokens in ${one.rounds} rounds, `
      + `${one.acceptance_length.toFixed(2)} a round; the draft wrote ${percent(drafted / one.tokens.length, 0)}`;
    foot.replaceChildren(depthLegend(depth), figures);
  }
  draw();
  const known = samples.some((one) => one.tokens.some((token) => token[DRAFT_P] != null));
  return make("div", { class: "panel", id: "tokens" },
    make("div", { class: "bar-row" }, make("div", { class: "tabs" }, ...tabs),
      known ? make("div", { class: "switch" }, ...switches) : null), asked, said, foot);
}

// --- sections -----------------------------------------------------------------------------------

function tokens() {
  if (!first?.samples?.length) return;
  section("What the draft knows",
    "Answers of the target, decoded with the draft. Green tokens were drafted and accepted, the deeper the further ahead; "
    + "underlined ones are the target's own and end a round. Point at a token for both models' probabilities.",
    tokenView(first.samples, first.joint.length));
}

function lengthBars(title, note, key) {
  const names = Object.keys(first[key] ?? {});
  if (!names.length) return null;
  const rows = names.map((name) => ({ name: name.replace("<=", "≤"),
    values: drafts.map((draft) => draft[key][name]?.acceptance_length ?? null),
    notes: drafts.map((draft, i) => (i ? "" : `${(draft[key][name]?.rounds ?? 0).toLocaleString("en")} rounds`)) }));
  const most = Math.max(...rows.flatMap((row) => row.values.map((v) => v ?? 0)), 1.5);
  return panel(title, note, legend(drafts.map((draft) => draft.draft)), bars(rows, { most, base: 1 }));
}

function positions() {
  const depth = Math.max(...drafts.map((draft) => draft.joint.length));
  const rows = Array.from({ length: depth }, (_, k) => ({ name: `token ${k + 1}`,
    colour: drafts.length === 1 ? `color-mix(in oklab, var(--accent) ${100 - 8 * k}%, var(--third))` : null,
    values: drafts.map((draft) => draft.joint[k] ?? null),
    notes: drafts.map((draft) => (draft.conditional[k] == null ? "" : `${(100 * draft.conditional[k]).toFixed(0)} % of the reached`)) }));
  return panel("By position", "share of rounds in which this token and all before it were accepted",
    legend(drafts.map((draft) => draft.draft)), bars(rows, { most: 1, format: percent }));
}

function pays() {
  const speed = first.speed;
  if (!speed) return null;
  if (speed.disturbed) {
    return panel("Does it pay?", null, make("p", { class: "note" },
      "The clock was disturbed while this was measured: a round seemed cheaper than the plain step that it holds. Measure again."));
  }
  const length = first.acceptance_length, even = speed.break_even_acceptance_length;
  const round = speed.draft_ms_per_round + speed.verify_ms_per_round;
  const most = Math.max(round, speed.plain_step_ms * length);
  const ms = (x) => `${x.toFixed(1)} ms`;
  return panel("Does it pay?", `one round costs ${even.toFixed(2)} plain steps and yields ${length.toFixed(2)} tokens`,
    bars([
      { name: "draft, a round", values: [speed.draft_ms_per_round] },
      { name: "verify, a round", values: [speed.verify_ms_per_round] },
      { name: "plain, the same tokens", values: [speed.plain_step_ms * length], colour: "var(--second)" },
    ], { most, format: ms }),
    make("p", { class: "note", style: "margin-top:10px" },
      `${speed.plain_tokens_per_s.toFixed(1)} tokens/s without the draft, ${speed.speculative_tokens_per_s.toFixed(1)} with it `
      + `(one text at a time${onTexts(speed)}, this machine, Hugging Face)`));
}

function acceptance() {
  if (!first) {
    section("Acceptance", "Figures on answers of the target, by category and length, and the token view come from an evaluation.",
      panel("Not measured yet", null, make("p", { class: "note" }, "run ", make("code", {}, "fledge report RUN --measure"))));
    return;
  }
  const asked = data.evaluation;
  section("Acceptance", `On ${asked.answers} answers of the target, ${asked.answer_tokens.toLocaleString("en")} tokens, in ${first.rounds.toLocaleString("en")} rounds.`,
    make("div", { class: "grid two" }, positions(), lengthBars("By category", "tokens per round; a bar begins at 1, where a draft gains nothing", "by_category"),
      lengthBars("By context", "tokens known when the round begins", "by_context"), pays()),
    make("p", { class: "note definition" }, `${first.definition[0].toUpperCase()}${first.definition.slice(1)}.`));
}

function heldOut() {
  const held = data.held_out;
  if (!held.step.length) return;
  const mark = held.best == null ? null : { x: held.step[held.best], text: "best" };
  const how = held.replayed ? "tokens per round, replayed over the held-out rows" : "1 + the sum of the joint rates";
  const curves = held.joint.map((y, k) => ({ name: `token ${k + 1}`, y, colour: curveColour(k, held.joint.length) }));
  section("Held-out acceptance over time", "Measured during training on rows it never sees; the best step is the checkpoint that is kept.",
    make("div", { class: "grid two" },
      panel("Acceptance length", how, lineChart(held.step, [{ name: "length", y: held.length, colour: COLOURS[0] }],
        { zero: false, from: 1.2, mark, format: fixed(2) })),
      panel("By depth", "share of rounds in which this token and all before it were accepted",
        lineChart(held.step, curves, { format: (x) => percent(x, 0), mark }))));
}

function training() {
  const t = data.training;
  if (!t.step.length) return;
  const curve = (title, note, y, options, colour = COLOURS[0]) => y.some((v) => v != null)
    ? panel(title, note, lineChart(t.step, [{ name: title.toLowerCase(), y, colour }], { W: 330, height: 180, ...options })) : null;
  const depths = t.joint.map((y, k) => ({ name: `token ${k + 1}`, y, colour: curveColour(k, t.joint.length) }));
  section("Training", "Every logged step.", make("div", { class: "grid" },
    curve("Loss", "weighted over depths", t.loss, { zero: false, format: fixed(2) }, COLOURS[1]),
    depths.length ? panel("Accuracy by depth", "this token and all before it right, on training rows",
      lineChart(t.step, depths, { W: 330, height: 180, format: (x) => percent(x, 0) })) : null,
    curve("Gradient norm", "before clipping", t.grad_norm, {}, COLOURS[3]),
    curve("Learning rate", "", t.lr, { format: (x) => (x ? x.toExponential(0) : "0") }, COLOURS[2]),
    curve("Tokens per second", "of packs, padding included", t.tokens_per_s, {}, COLOURS[2]),
    curve("Waiting for the target", "share of a step", t.target_share, { from: 1, format: (x) => percent(x, 0) }, COLOURS[3])));
}

function table(entries) {
  return make("table", {}, make("tbody", {}, ...entries.map(([name, value]) =>
    make("tr", {}, make("td", {}, name), make("td", {}, typeof value === "string" ? value : JSON.stringify(value))))));
}

function recipe() {
  const parts = Object.entries(data.recipe).filter(([, fields]) => fields && typeof fields === "object");
  if (!parts.length) return;
  section("Recipe", "Every field of the run, defaults included.", make("div", { class: "facts" },
    ...parts.map(([name, fields]) => make("section", { class: "panel" }, make("h3", {}, name), table(Object.entries(fields))))));
}

function machine() {
  const m = data.machine;
  if (!m) return;
  const facts = [["processor", `${m.cpu || "?"}, ${m.cpu_cores} cores`]];
  if (m.memory_bytes) facts.push(["memory", gigabytes(m.memory_bytes)]);
  for (const gpu of m.gpus) facts.push(["GPU", `${gpu.name}, ${gigabytes(gpu.memory_bytes)}`]);
  facts.push(["system", m.system]);
  section("Machine", "Where the run was trained.", make("div", { class: "grid" },
    make("div", { class: "panel" }, table(facts)), make("div", { class: "panel" }, table(Object.entries(m.versions)))));
}

page.replaceChildren();
head();
cards();
tokens();
acceptance();
heldOut();
training();
recipe();
machine();
page.append(make("footer", {}, `Made by fledge ${data.version}. This page holds all its data and asks nobody for anything.`));
