
"use strict";
// Elements are made one by one and text goes into text nodes, so that nothing from a run is read as HTML.
const SVG = "http://www.w3.org/2000/svg";
const EVERY_MS = 3000;
const MAX_POINTS = 300;

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function drawing(name, attributes, title) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (title) {
    const text = document.createElementNS(SVG, "title");
    text.append(title);
    made.append(text);
  }
  return made;
}

function placed(kind, side, share, text) {
  const label = element("span", { class: kind }, text);
  label.style[side] = `${(share * 100).toFixed(2)}%`;
  return label;
}

function short(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit) return `${Number((value / unit).toPrecision(3))}${letter}`;
  }
  if (size > 0 && size < 1e-3) return value.toExponential(1);
  return `${Number(value.toPrecision(4))}`;
}

function ticks(low, high) {
  if (!(high > low)) return [low];
  const raw = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((one) => one >= raw * 0.999);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n++) found.push(n * step);
  return found;
}

function thin(points) {
  if (points.length <= MAX_POINTS) return points;
  const found = [];
  for (let i = 0; i < MAX_POINTS; i++) {
    const piece = points.slice(
      Math.floor((i * points.length) / MAX_POINTS), Math.floor(((i + 1) * points.length) / MAX_POINTS));
    found.push([0, 1].map((axis) => piece.reduce((sum, point) => sum + point[axis], 0) / piece.length));
  }
  return found;
}

function lineChart(points, chart, planned, marks) {
  const scale = chart.percent ? 100 : 1;
  const all = points.map(([x, y]) => [x, y * scale]);
  const drawn = thin(all);
  const plan = planned === undefined ? [] : [planned * scale];
  const xs = drawn.map((point) => point[0]);
  const ys = [...drawn.map((point) => point[1]), ...plan];
  const left = Math.min(...xs);
  const right = Math.max(...xs);
  let low = chart.from_zero ? Math.min(0, ...ys) : Math.min(...ys);
  let high = Math.max(...ys);
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
  low -= chart.from_zero ? 0 : margin;
  high += margin;
  const across = (x) => (x - left) / (right - left || 1);
  const down = (y) => (high - y) / (high - low);
  const image = drawing("svg", {
    viewBox: "0 0 1000 1000", preserveAspectRatio: "none", role: "img", "aria-label": chart.label });
  const plot = element("div", { class: "plot" }, image);
  const suffix = chart.percent ? "%" : "";
  for (const tick of ticks(low, high)) {
    image.append(drawing("path", { class: "grid", d: `M0 ${down(tick) * 1000}H1000` }));
    plot.append(placed("y", "top", down(tick), short(tick) + suffix));
  }
  for (const tick of ticks(left, right)) plot.append(placed("x", "left", across(tick), short(tick)));
  for (const mark of marks) {
    const x = Math.min(Math.max(across(mark), 0), 1) * 1000;
    image.append(drawing("path", { class: "mark", d: `M${x} 0V1000` }, `resumed at step ${mark}`));
  }
  for (const y of plan) {
    image.append(drawing("path", { class: "plan", d: `M0 ${down(y) * 1000}H1000` }, `plan: ${short(y)}${suffix}`));
  }
  const path = drawn.map(([x, y]) => `${(across(x) * 1000).toFixed(1)} ${(down(y) * 1000).toFixed(1)}`).join(" ");
  const line = drawing("path", { class: "line", d: `M${path}${drawn.length > 1 ? "" : "h0.01"}` });
  line.style.stroke = "var(--blue)";
  image.append(line);
  plot.append(element("span", { class: "x-name" }, "step"));
  const newest = `now ${short(all[all.length - 1][1])}${suffix}` + plan.map((y) => `, plan ${short(y)}${suffix}`).join("");
  return element("section", {}, element("figure", { class: "chart" },
    element("figcaption", {}, chart.label, element("small", {}, newest)), plot));
}

function heatMap(map) {
  const columns = map.values.length;
  const rows = map.ranks.length;
  const largest = Math.max(...map.values.flat()) || 1;
  const image = drawing("svg", {
    viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", role: "img", "aria-label": map.label });
  map.values.forEach((column, x) => column.forEach((value, y) => {
    const shown = map.is_share ? `${Math.round(value * 100)}%` : `${value} ${map.unit}`;
    const cell = drawing("rect", { x, y, width: 1.02, height: 1.02 },
      `rank ${map.ranks[y]}, step ${map.steps[x]}: ${shown}`);
    cell.style.fillOpacity = 0.04 + (0.96 * value) / largest;
    image.append(cell);
  }));
  const plot = element("div", { class: "plot" }, image);
  plot.style.height = `${Math.max(48, Math.min(16 * rows, 320))}px`;
  const labelled = rows > 4 ? [0, Math.floor(rows / 2), rows - 1] : map.ranks.map((_, row) => row);
  for (const row of new Set(labelled)) plot.append(placed("y", "top", (row + 0.5) / rows, `${map.ranks[row]}`));
  plot.append(placed("x first", "left", 0, `${map.steps[0]}`));
  if (columns > 1) plot.append(placed("x last", "left", 1, `${map.steps[columns - 1]}`));
  plot.append(element("span", { class: "x-name" }, "step; one row per rank"));
  return element("figure", { class: "chart heat" },
    element("figcaption", {}, map.label, element("small", {}, `darkest: ${map.largest}`)), plot);
}

function table(title, names, rows) {
  if (!rows.length) return null;
  const head = element("tr", {}, ...names.map((name) => element("th", {}, name)));
  const body = rows.map((row) => element("tr", {}, ...row.map((text) =>
    element("td", text === "incomplete" ? { class: "bad" } : {}, text))));
  return element("section", {}, element("h2", {}, title), element("div", { class: "wide" },
    element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))));
}

function ago(seconds) {
  const [size, unit] = seconds < 120 ? [1, "s"] : seconds < 7200 ? [60, "min"] : [3600, "h"];
  return `${Math.max(0, Math.round(seconds / size))} ${unit} ago`;
}

function header(run) {
  const it = run.summary;
  const parts = [
    element("h1", {}, it.name, element("span", { class: `pill ${it.status}` }, it.status)),
    element("p", {}, it.subtitle)];
  if (it.reason) parts.push(element("p", {}, it.reason));
  const known = [];
  const step = it.last.step;
  if (step !== null) known.push(it.max_steps ? `step ${step} of ${it.max_steps}` : `step ${step}`);
  if (it.last.loss !== null) known.push(`loss ${short(it.last.loss)}`);
  if (it.last.learning_rate !== null) known.push(`learning rate ${short(it.last.learning_rate)}`);
  const line = element("p", { class: "now" }, known.join(" · ") || "nothing is logged yet");
  if (run.aliveAt !== null) {
    const seconds = run.now - run.aliveAt;
    const isQuiet = it.status === "running" && seconds > 600;
    line.append(" · ", element("span", isQuiet ? { class: "quiet" } : {}, `last record ${ago(seconds)}`));
  }
  parts.push(line);
  if (it.max_steps && step !== null) {
    parts.push(element("progress", { max: it.max_steps, value: Math.min(step, it.max_steps), "aria-label": "steps" }));
  }
  return element("header", {}, ...parts);
}

function tiles(list) {
  return element("section", { class: `tiles of-${list.length}` }, ...list.map((tile) =>
    element("div", tile.is_known ? {} : { class: "unknown" },
      element("span", {}, tile.name), element("strong", {}, tile.value), element("small", {}, tile.note))));
}

function sentence(text) {
  return `${text.slice(0, 1).toUpperCase()}${text.slice(1)}.`;
}

function advice(it) {
  const items = it.advice.map((one) => element("li", {}, element("b", {}, one.check), " ",
    element("span", { class: "share" }, one.share),
    element("p", {}, `${sentence(one.fix)} `, element("em", {}, `Measured: ${one.problem}.`))));
  const found = items.length ? element("ol", {}, ...items)
    : element("p", {}, "No bottleneck found: no measured share is above its limit.");
  const notes = it.notes.map((note) => element("p", { class: "note" }, sentence(note)));
  return element("section", { class: `bottlenecks${items.length ? "" : " none"}` },
    element("h2", {}, "What to change first"), found, ...notes);
}

function alarms(it) {
  const items = (it.alarms || []).map((one) => element("li", {},
    element("b", { class: one.level }, one.kind), ` at step ${one.step}, ${one.time}: ${one.text}`));
  return items.length
    ? element("section", { class: "alarms" }, element("h2", {}, "Alarms"), element("ul", {}, ...items)) : null;
}

function charts(run, described) {
  const made = [];
  for (const chart of described) {
    const points = run.points[chart.key] || [];
    if (points.length && !(chart.unless && run.points[chart.unless])) {
      made.push(lineChart(points, chart, chart.plan ? run.summary.plan[chart.plan] : undefined, run.summary.marks));
    }
  }
  return element("div", { class: "pair" }, ...made);
}

function draw(run, described) {
  const it = run.summary;
  const parts = [header(run), tiles(it.tiles), alarms(it), advice(it), charts(run, described)];
  if (it.ranks.length) parts.push(element("section", {}, element("h2", {}, "Ranks"), ...it.ranks.map(heatMap)));
  parts.push(element("section", {}, element("h2", {}, "Plan and measurement"),
    ...it.plan.lines.map((line) => element("p", {}, sentence(line)))));
  parts.push(table("Launches", ["", "from step", "processes", "time", "lost"], it.launches));
  parts.push(table("Recoveries", ["first step", "what failed", "steps repeated", "time", "parts of it"], it.recoveries));
  parts.push(table("Checkpoints", ["folder", "size", "processes", "state"], it.checkpoints));
  run.place.replaceChildren(...parts.filter((part) => part !== null));
}

function take(run, answer) {
  if (answer.generation !== run.generation || answer.first === 0) run.points = {};
  run.generation = answer.generation;
  run.next = answer.next;
  run.now = answer.now;
  run.aliveAt = answer.alive_at;
  for (const [key, values] of Object.entries(answer.points)) {
    const known = run.points[key] || (run.points[key] = []);
    values.forEach((value, i) => {
      if (key !== "step" && value !== null) known.push([answer.points.step[i], value]);
    });
  }
  if (answer.summary) run.summary = answer.summary;
  run.version = answer.version;
}

async function read(address) {
  const answer = await fetch(address, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

async function update(run, described) {
  const asked = new URLSearchParams({
    run: run.name, after: run.next, generation: run.generation, version: run.version });
  take(run, await read(`api/run.json?${asked}`));
  draw(run, described);
}

async function start() {
  const state = document.getElementById("state");
  let runs = [];
  let described = [];
  for (;;) {
    try {
      if (!runs.length) {
        const found = await read("api/runs.json");
        described = found.charts;
        runs = found.runs.map((name) => ({
          name, next: 0, generation: -1, version: "", points: {}, summary: null, place: element("article", {}) }));
        const main = document.getElementById("runs");
        main.className = runs.length === 1 ? "one" : "";
        main.replaceChildren(...runs.map((run) => run.place));
        document.title = `${found.runs.join(", ")} · hfscale`;
      }
      for (const run of runs) await update(run, described);
      state.textContent = `Updated ${new Date().toLocaleTimeString()}.`;
    } catch (error) {
      state.textContent = `Not updated: ${error.message}.`;
    }
    await new Promise((done) => setTimeout(done, EVERY_MS));
  }
}

start();
