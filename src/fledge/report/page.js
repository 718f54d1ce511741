// Draws the page from the JSON beside it. No request; every text goes in as text.

const data = JSON.parse(document.getElementById("data").textContent);

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
      `tokens per round on new prompts; ${first.method}, ${first.joint.length} drafted`, "first"));
    const speed = first.speed;
    if (speed && !speed.disturbed) {
      const gain = speed.measured_speedup_live_sample;
      const more = gain < 1 ? "; why not here: below" : onTexts(speed);
      found.push(card("measured speed-up", `${gain.toFixed(2)}×`, "",
        `pays from ${speed.break_even_acceptance_length.toFixed(2)} tokens per round${more}`, gain < 1 ? "bad" : ""));
    }
    if (first.live) {
      found.push(card("lossless", `${first.live.same_texts} of ${first.live.texts}`, "",
        "answers decoded live are the target's own, token for token",
        first.live.agrees ? "" : "bad"));
    }
  }
  if (held.best != null) {
    found.push(card("held-out acceptance", held.length[held.best].toFixed(2), "",
      `tokens per round on held-out rows; best at step ${held.step[held.best].toLocaleString("en")}, ${held.length[0].toFixed(2)} before training`,
      first ? "" : "first"));
  }
  const seconds = data.training.seconds;
  if (seconds != null) {
    const speeds = data.training.tokens_per_s.filter((x) => x != null).sort((a, b) => a - b);
    const middle = speeds[Math.floor(speeds.length / 2)];
    found.push(card("training", ...duration(seconds),
      `${last(data.training.step).toLocaleString("en")} steps${middle ? `, ${short(middle)} tokens/s` : ""}${onMachine()}`));
  }
  page.append(make("div", { class: "cards" }, ...found));
  const why = whyTwoLengths();
  if (why) page.append(make("p", { class: "note definition", id: "two-lengths" }, why));
}

function onMachine() {
  const m = data.machine;
  if (!m) return "";
  return ` on ${m.gpus.length ? `${m.gpus.length > 1 ? `${m.gpus.length} × ` : ""}${m.gpus[0].name}` : `${m.cpu || "a CPU"}, ${m.cpu_cores} cores`}`;
}

// Two lengths of one draft stand side by side: say what each of them counts.
function whyTwoLengths() {
  const held = data.held_out;
  if (!first || held.best == null) return null;
  const [asked, kept] = [first.acceptance_length.toFixed(2), held.length[held.best].toFixed(2)];
  if (asked === kept) return null;
  return `Why ${asked} and ${kept}? ${asked} counts tokens by rounds through the target's own answers to ${data.evaluation.answers} new prompts; `
    + `${kept} counts them by rounds along the rows that training held out, whose texts resemble those it learned from.`;
}

// --- where it does not pay ----------------------------------------------------------------------

const onCpu = () => (data.evaluation.target?.device ?? "").startsWith("cpu");
const here = () => (onCpu() ? "this CPU" : "this machine");

// Why a speed-up is below 1, from its own times.
function whyBelowOne(speed) {
  const ratio = (ms) => (ms / speed.plain_step_ms).toFixed(2);
  const read = first.joint.length + 1;
  const lines = [`Below 1 on ${here()}: reading ${read} tokens at once takes ${ratio(speed.verify_ms_per_round)} times as long as reading one, `
    + `and drafting adds ${ratio(speed.draft_ms_per_round)}; a round yields ${first.acceptance_length.toFixed(2)} tokens.`];
  if (onCpu()) {
    if (data.evaluation.target.dtype === "float32") {
      lines.push("In float32, every token of a pass costs a CPU compute; in bfloat16, on a CPU that multiplies it (avx512_bf16 or amx_bf16), "
        + "a few tokens cost about as much as one: measure with --dtype bfloat16.");
    }
    lines.push("The smaller the target, the larger the share of the draft. A GPU verifies a few tokens in the time of one.");
  }
  return make("p", { class: "note", id: "below-one", style: "margin-top:10px" }, lines.join(" "));
}

// --- token view ---------------------------------------------------------------------------------

const [TEXT, DEPTH, ROUND, TARGET_P, DRAFT_P, INSTEAD, INSTEAD_P] = [0, 1, 2, 3, 4, 5, 6];
const quoted = (text) => `“${text.replaceAll("\n", "⏎")}”`;

function tokenStyle(token, mode, depth) {
  if (mode === "depth") {
    if (!token[DEPTH]) return "";
    const at = shade(token[DEPTH], depth);
    return `background:var(--d${at});${at > 5 ? "color:var(--on-deep)" : ""}`;
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

function tokenSpan(token, { mode, depth }, all) {
  const own = !token[DEPTH];
  const span = make("span", { class: `t${own ? " own" : ""}${token[ROUND] < 0 ? " first" : ""}`,
    style: tokenStyle(token, mode, depth), "data-depth": token[DEPTH], "data-round": token[ROUND] });
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
    make("span", { class: "t", style: tokenStyle(["", k + 1], "depth", depth) }, `${k + 1}`));
  return make("div", { class: "legend" }, make("span", {}, "drafted and accepted at depth"), ...swatches,
    make("span", { style: "margin-left:10px" }, "the target's own"), make("span", { class: "t own" }, "token"));
}

function tokenView(samples, drafted) {
  const depth = Math.max(drafted, ...samples.flatMap((one) => one.tokens.map((token) => token[DEPTH])));
  const state = { sample: 0, mode: "depth", depth };
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
    spans.push(...one.tokens.map((token) => tokenSpan(token, state, () => spans)));
    said.replaceChildren(...spans);
    const written = one.tokens.filter((token) => token[DEPTH]).length;
    figures.textContent = `${one.tokens.length} tokens in ${one.rounds} rounds, `
      + `${one.acceptance_length.toFixed(2)} a round; the draft wrote ${percents(0)(written / one.tokens.length)}`;
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
  if (names.length < 2) return null; // one bar would say what the card says
  const rows = names.map((name) => ({ name: name.replace("<=", "≤"),
    values: drafts.map((draft) => draft[key][name]?.acceptance_length ?? null),
    notes: drafts.map((draft, i) => (i ? "" : `${(draft[key][name]?.rounds ?? 0).toLocaleString("en")} rounds`)) }));
  const most = Math.max(...rows.flatMap((row) => row.values.map((v) => v ?? 0)), 1.5);
  return panel(title, note, legend(drafts.map((draft) => draft.draft)), bars(rows, { most, base: 1 }));
}

function positions() {
  const depth = Math.max(...drafts.map((draft) => draft.joint.length));
  const rows = Array.from({ length: depth }, (_, k) => ({ name: `token ${k + 1}`,
    colour: drafts.length === 1 ? curveColour(k) : null,
    values: drafts.map((draft) => draft.joint[k] ?? null),
    notes: drafts.map((draft) => (draft.conditional[k] == null ? "" : `${(100 * draft.conditional[k]).toFixed(0)} % of the reached`)) }));
  return panel("By position", "share of rounds in which this token and all before it were accepted",
    legend(drafts.map((draft) => draft.draft)), bars(rows, { most: 1, format: percent }));
}

// Which first rejections cost how much; figures from before this was kept say nothing.
function losses() {
  const found = first.where_it_fails;
  if (!found) return null;
  const of = (draft, name) => draft.where_it_fails?.causes?.[name];
  const rows = Object.keys(found.causes).map((name) => ({ name: found.causes[name].title,
    values: drafts.map((draft) => of(draft, name)?.share ?? null),
    notes: drafts.map((draft) => (of(draft, name) ? `${of(draft, name).rejected.toLocaleString("en")} of ${of(draft, name).judged.toLocaleString("en")} rejected` : "")) }));
  rows.push({ name: "none: the text ends", values: drafts.map((draft) => draft.where_it_fails?.end_of_text?.share ?? null) });
  const most = Math.max(...rows.flatMap((row) => row.values.map((v) => v ?? 0)), 0.01);
  return panel("Where it fails", `share of the ${found.lost_length.toFixed(2)} tokens lost per round, by the first rejected token; each line counts what those above it leave`,
    legend(drafts.map((draft) => draft.draft)), bars(rows, { most, format: percent }),
    make("p", { class: "note", id: "remedy", style: "margin-top:10px" }, `${found.remedy[0].toUpperCase()}${found.remedy.slice(1)}.`));
}

function pays() {
  const speed = first.speed;
  if (!speed) return null;
  if (speed.disturbed) {
    return panel("Does it pay?", null, make("p", { class: "note" },
      "The clock was disturbed while this was measured: a round seemed cheaper than the plain step it contains. Measure again."));
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
      + `(one text at a time${onTexts(speed)}, ${here()}, Hugging Face)`),
    speed.measured_speedup_live_sample < 1 ? whyBelowOne(speed) : null);
}

function acceptance() {
  if (!first) {
    section("Acceptance", "Figures on answers of the target, by category and length, and the token view come from an evaluation.",
      panel("Not measured yet", null, make("p", { class: "note" }, "run ", make("code", {}, "fledge eval RUN --out RUN/eval.json"))));
    return;
  }
  const asked = data.evaluation;
  section("Acceptance", `On ${asked.answers} answers of the target, ${asked.answer_tokens.toLocaleString("en")} tokens, in ${first.rounds.toLocaleString("en")} rounds.`,
    make("div", { class: "columns" }, positions(), lengthBars("By category", "tokens per round; a bar begins at 1, where a draft gains nothing", "by_category"),
      lengthBars("By context", "tokens known when the round begins", "by_context"), losses(), pays()),
    make("p", { class: "note definition" }, `${first.definition[0].toUpperCase()}${first.definition.slice(1)}.`));
}

function confidence() {
  const found = first?.calibration;
  if (!found?.temperatures?.length) return;
  const rows = found.temperatures.map((temperature, k) => ({ name: `token ${k + 1}`,
    values: [found.error_before[k], found.error_after[k]], notes: ["", `temperature ${temperature.toFixed(2)}`] }));
  const most = Math.max(0.01, ...found.error_before, ...found.error_after);
  section("Calibration", "The draft predicts the probability that all tokens up to a depth are accepted; replay shows how often they were. "
    + "Temperatures are fitted on these answers; each half is judged with those fitted on the other half.",
    make("div", { class: "grid two", id: "confidence" },
      panel("Calibration error", "mean distance between predicted and observed", legend(["uncalibrated", "with temperatures"]), bars(rows, { most, format: percent }))));
}

function heldOut() {
  const held = data.held_out;
  if (!held.step.length) return;
  const mark = held.best == null ? null : { x: held.step[held.best], text: "best" };
  section("Held-out acceptance over time", "Measured during training on rows it never sees; the best step is the checkpoint that is kept.",
    make("div", { class: "grid two" },
      panel("Acceptance length", "tokens per round, replayed over the held-out rows", lineChart(held.step, [{ name: "length", y: held.length, colour: COLOURS[0] }],
        { zero: false, from: 1.2, mark, format: fixed(2) })),
      panel("By depth", "share of rounds in which this token and all before it were accepted",
        lineChart(held.step, byDepth(held.joint), { format: percents(0), mark }))));
}

// Evaluations, then what is to come with its interval; a finished run has only the longer ones to show.
function ahead() {
  const f = data.forecast;
  if (!f) return;
  const between = (one) => `${one.length.toFixed(2)} (${one.low.toFixed(2)} to ${one.high.toFixed(2)})`;
  const rows = [["measured last", f.measured.toFixed(2)], ["twice the data", between(f.twice_data)], ["twice the time", between(f.twice_time)]];
  if (!f.finished) rows.splice(1, 0, [`at step ${f.steps.toLocaleString("en")}`, between(f.end)]);
  const limits = f.limits.map((one) => [one.name, `+${one.gain.toFixed(1)} %: ${one.says}`]);
  section("Forecast", `Forecast ${f.by_whom || "from the run's own curve"}, in tokens per round on its held-out rows; the interval should hold eight runs in ten.`,
    make("div", { class: "grid two", id: "forecast" },
      f.finished ? null : panel("Acceptance length", "measured, forecast, and its interval", aheadChart(f)),
      panel("How far it can go", stopping(f), table(rows)),
      limits.length ? panel("What limits it", "what the length would gain if this alone were gone", table(limits)) : null));
}

function aheadChart(f) {
  const held = data.held_out, kept = held.step.map((step, i) => [step, held.length[i]]).filter(([step]) => step < f.path[0][0]);
  const x = [...kept.map(([step]) => step), ...f.path.map(([step]) => step)];
  const before = kept.map(() => null), after = f.path.map(() => null);
  const series = (name, of, colour, dash) => ({ name, y: [...before, ...f.path.map(([, one]) => of(one))], colour, dash });
  return lineChart(x, [{ name: "measured", y: [...kept.map(([, length]) => length), ...after], colour: COLOURS[0] },
    series("forecast", (one) => one.length, COLOURS[1]), series("low", (one) => one.low, COLOURS[1], "4 3"),
    series("high", (one) => one.high, COLOURS[1], "4 3")], { zero: false, from: 1.2, format: fixed(2) });
}

function stopping(f) {
  if (f.gain_per_hour == null) return null;
  const gain = `${f.gain.toFixed(1)} % in ${duration(3600 * f.hours).join(" ")}`;
  if (f.finished) return `as long again would gain ${gain}`;
  if (f.stop_at == null) return `the rest gains ${gain}: worth it to the end`;
  return `the rest gains ${gain}; less than 1 % an hour from step ${f.stop_at.toLocaleString("en")} on: stop there`;
}

function training() {
  const t = data.training;
  if (!t.step.length) return;
  const curve = (title, note, y, options, colour = COLOURS[0]) => y.some((v) => v != null)
    ? panel(title, note, lineChart(t.step, [{ name: title.toLowerCase(), y, colour }], { height: 180, ...options })) : null;
  section("Training", "Every logged step.", make("div", { class: "row" },
    curve("Loss", "weighted over depths", t.loss, { zero: false, format: fixed(2) }, COLOURS[1]),
    t.joint.length ? panel("Accuracy by depth", "all up to this token right, on training rows",
      lineChart(t.step, byDepth(t.joint), { height: 180, format: percents(0) })) : null,
    curve("Gradient norm", "before clipping", t.grad_norm, {}, COLOURS[3]),
    curve("Learning rate", "of the optimizer", t.lr, { format: scientific }, COLOURS[2]),
    curve("Tokens per second", "of packs, padding included", t.tokens_per_s, {}, COLOURS[2]),
    curve("Waiting for the target", "share of a step", t.target_share, { from: 1, format: percents(0) }, COLOURS[3])));
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
  section("Machine", "Where the run was trained.", make("div", { class: "columns" },
    make("div", { class: "panel" }, table(facts)), make("div", { class: "panel" }, table(Object.entries(m.versions)))));
}

page.replaceChildren();
head();
cards();
tokens();
acceptance();
confidence();
heldOut();
ahead();
training();
recipe();
machine();
page.append(make("footer", {}, `Made by fledge ${data.version}. This page contains all its data and loads nothing from elsewhere.`));
drawAll();
addEventListener("resize", drawAll);
