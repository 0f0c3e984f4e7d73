"use strict";
// Draws the charts of a report from the numbers that the page contains, and shows the values at the pointer.
(() => {
const root = document.documentElement;
window.addEventListener("error", (event) => { root.dataset.error = event.message; });
const data = JSON.parse(document.getElementById("data").textContent);
const NAMESPACE = document.querySelector("svg").namespaceURI;
const WINDOWS = [0, 1 / 240, 1 / 120, 1 / 60, 1 / 30, 1 / 15, 1 / 8];
const SMOOTH_POINTS = 500;
const MARGIN = { left: 62, right: 12, top: 8, bottom: 34 };
const X_WORDS = { steps: "step", tokens: data.counts, time: "training time" };
const state = { axis: "steps", smooth: 0, hidden: new Set(), zoom: null, marks: true };

// Numbers ---------------------------------------------------------------------------------------------------------

const sums = (deltas) => { let total = 0; return deltas.map((each) => (total += each)); };
const significant = (value, digits) => String(Number(value.toPrecision(digits)));

function scaled(value, step, names, digits) {
  let index = 0;
  while (index + 1 < names.length && Math.abs(value) >= step * (1 - 5e-4)) { value /= step; index += 1; }
  return significant(value, digits) + names[index];
}

function timed(seconds, digits = 3) {
  if (seconds < 0) return `-${timed(-seconds, digits)}`;
  if (seconds < 60) return seconds < 1 ? scaled(seconds * 1e6, 1000, [" us", " ms", " s"], digits)
    : `${significant(seconds, digits)} s`;
  const whole = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${two(Math.floor(whole % 3600 / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${two(Math.floor(whole % 86400 / 3600))} h`;
}

const WRITTEN = {
  plain: (value, digits) => significant(value, digits).replace("e+", "e"),
  count: (value, digits) => scaled(value, 1000, ["", "K", "M", "B", "T", "Q"], digits),
  percent: (value, digits) => `${significant(100 * value, digits)}%`,
  bytes: (value, digits) => scaled(value, 1000, [" B", " kB", " MB", " GB", " TB", " PB"], digits),
  seconds: timed,
};
const place = (value, digits) => state.axis === "time" ? timed(value)
  : state.axis === "tokens" ? WRITTEN.count(value, digits) : Math.round(value).toLocaleString("en");

// Index at which `wanted` belongs among ascending numbers: the first one whose number is not below it.
function below(numbers, wanted) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

function nearest(numbers, wanted) {
  const index = below(numbers, wanted);
  if (index === 0) return 0;
  if (index === numbers.length) return index - 1;
  return wanted - numbers[index - 1] <= numbers[index] - wanted ? index - 1 : index;
}

// Curves ----------------------------------------------------------------------------------------------------------

for (const run of data.runs) {
  for (const axis of ["tokens", "time"]) if (run[axis]) run[axis].steps = sums(run[axis].steps);
}

function placed(run, steps) {
  const line = data.runs[run][state.axis];
  if (state.axis === "steps") return steps;
  if (!line) return steps.map(() => NaN);
  return steps.map((step) => {
    const last = line.steps.length - 1;
    if (step > line.steps[last]) return NaN;
    const index = below(line.steps, step);
    if (line.steps[index] === step || index === 0) return line.values[index];
    const share = (step - line.steps[index - 1]) / (line.steps[index] - line.steps[index - 1]);
    return line.values[index - 1] + share * (line.values[index] - line.values[index - 1]);
  });
}

for (const chart of data.charts) {
  const several = data.runs.length > 1;
  chart.curves.forEach((curve, number) => {
    curve.steps = sums(curve.steps);
    if (curve.middle) curve.middle.steps = sums(curve.middle.steps);
    const own = chart.curves.filter((each, index) => each.run === curve.run && index < number).length;
    const colour = several ? data.runs[curve.run].colour : number % data.colours;
    const dashes = several ? (data.runs[curve.run].dashes + own) % 4 : curve.dashed ? 1 : 0;
    curve.look = `c${colour} d${dashes}`;
    curve.label = several ? [data.runs[curve.run].name, curve.name].filter(Boolean).join(", ")
      : curve.name || chart.name;
  });
}

function average(values, start, end, kind) {
  if (kind === "mean") {
    let total = 0;
    for (let index = start; index < end; index += 1) total += values[index];
    return total / (end - start);
  }
  const ordered = Float64Array.from(values.slice(start, end)).sort(), half = ordered.length >> 1;
  return ordered.length % 2 ? ordered[half] : (ordered[half - 1] + ordered[half]) / 2;
}

// Averages over a symmetric window around points. It is narrower at both ends of a curve, so that a steep start is
// not distorted and the end does not fluctuate.
function smoothed(curve, kind) {
  const { steps, values } = curve.middle || curve;
  const points = values.length, window = Math.round(WINDOWS[state.smooth] * points);
  const merged = curve.middle ? curve.middle.of : 1;
  if (!state.smooth || curve.few || (window < 3 && !curve.middle)) return null;
  const every = Math.max(1, points / SMOOTH_POINTS), found = { steps: [], values: [], window: 0 };
  for (let next = 0; next < points; next += every) {
    const centre = Math.min(points - 1, Math.round(next));
    const side = Math.min(centre, points - 1 - centre, window >> 1);
    found.steps.push(steps[centre]);
    found.values.push(average(values, centre - side, centre + side + 1, kind));
  }
  found.window = Math.max(1, Math.round((2 * (window >> 1) + 1) * merged));
  return found;
}

function arrange(chart) {
  for (const curve of chart.curves) {
    curve.at = placed(curve.run, curve.steps);
    curve.smooth = smoothed(curve, chart.middle);
    if (curve.smooth) curve.smooth.at = placed(curve.run, curve.smooth.steps);
  }
}

// Scales ----------------------------------------------------------------------------------------------------------

function round_step(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5, 10].find((digit) => power * digit >= least * (1 - 1e-9)) || 10);
}

function time_step(least) {
  const steps = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200];
  if (least <= 30) return round_step(least);
  return steps.find((each) => each >= least) || 86400 * round_step(least / 86400);
}

function ticks(low, high, most, step_of = round_step) {
  const step = step_of((high - low) / most), found = [];
  if (!(step > 0) || !Number.isFinite(step)) return [low];
  for (let count = Math.ceil(low / step - 1e-9); count * step <= high + step * 1e-9 && found.length < 50; count += 1)
    found.push(count * step);
  return found;
}

function log_ticks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), found = [];
  const digits = last - first > 3 ? [1] : high < 10 * low ? [1, 1.5, 2, 3, 4, 5, 7] : [1, 2, 5];
  const every = Math.max(1, Math.ceil((last - first) / 6));
  for (let power = first; power <= last; power += every)
    for (const digit of digits) {
      const value = digit * 10 ** power;
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) found.push(value);
    }
  return found.length > 1 ? found : [low, high];
}

const shown = (chart) => chart.curves.filter((curve) => !state.hidden.has(curve.run));

function span_of_all() {
  let low = Infinity, high = -Infinity;
  for (const chart of data.charts)
    for (const curve of shown(chart))
      for (const at of curve.at) if (at === at) { low = Math.min(low, at); high = Math.max(high, at); }
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [Math.min(low, state.axis === "steps" ? low : 0), high];
}

function span_of(chart, left, right) {
  let low = Infinity, high = -Infinity;
  for (const curve of shown(chart)) {
    curve.values.forEach((value, index) => {
      if (curve.at[index] >= left && curve.at[index] <= right && (!chart.log || value > 0)) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    });
  }
  if (low > high) return [chart.log ? 0.1 : 0, 1];
  if (chart.log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
  if (chart.zero && low >= 0) return [0, high * 1.06 || 1];
  const margin = 0.05 * (high - low) || Math.abs(high) * 0.05 || 1;
  return [low - margin, high + margin];
}

// Charts ----------------------------------------------------------------------------------------------------------

function made(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

function box(parent, name, kind = "", text = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

function path_of(at, values, x, y, left, right) {
  const parts = [];
  let pen = "M";
  const first = Math.max(0, below(at, left) - 1), last = Math.min(at.length - 1, below(at, right));
  for (let index = first; index <= last; index += 1) {
    const across = Math.round(10 * x(at[index])) / 10, up = Math.round(10 * y(values[index])) / 10;
    if (!(Number.isFinite(across) && Number.isFinite(up))) continue;
    parts.push(`${pen}${across} ${up}`);
    pen = "L";
  }
  return parts.join("");
}

function build(chart, parent, number) {
  const figure = box(parent, "figure", "chart");
  const head = box(figure, "figcaption");
  box(head, "h3", "", chart.name);
  if (chart.unit) box(head, "span", "unit", chart.unit);
  const label = box(head, "label", "log");
  chart.box = box(label, "input");
  chart.box.type = "checkbox";
  chart.box.checked = chart.log;
  chart.box.addEventListener("change", () => { chart.log = chart.box.checked; draw(chart); });
  label.append(" log");
  chart.svg = made(figure, "svg", { role: "img", tabindex: 0, "aria-label": `${chart.name}, curves` });
  chart.place = box(figure, "div", "place");
  chart.legend = box(figure, "ul", "legend");
  for (const curve of chart.curves) {
    curve.item = box(chart.legend, "li", curve.look);
    made(made(curve.item, "svg", { width: 26, height: 10, "aria-hidden": "true" }), "path",
      { d: "M1 5H25", class: `line ${curve.look}` });
    box(curve.item, "span", "name", curve.label);
    curve.told = box(curve.item, "b");
    curve.told.dataset.curve = `${number}/${curve.run}/${curve.key}`;
  }
  listen(chart);
}

function draw(chart, room = chart.svg.clientWidth) {
  const width = Math.max(240, room || 480), height = Math.round(Math.min(300, 140 + width / 4));
  const [left, right] = state.zoom || state.span, [low, high] = span_of(chart, left, right);
  const inner = width - MARGIN.left - MARGIN.right, tall = height - MARGIN.top - MARGIN.bottom;
  const x = (value) => MARGIN.left + inner * (value - left) / (right - left);
  const turned = chart.log ? Math.log : Number, base = turned(low), whole = turned(high) - base;
  const y = (value) => MARGIN.top + tall * (1 - (turned(value) - base) / whole);
  Object.assign(chart, { width, height, x, y, left, right });
  chart.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.svg.replaceChildren();
  made(made(made(chart.svg, "defs"), "clipPath", { id: `clip${chart.id}` }), "rect",
    { x: MARGIN.left, y: MARGIN.top - 2, width: inner, height: tall + 4 });
  const frame = made(chart.svg, "g", { class: "frame" });
  const levels = chart.log ? log_ticks(low, high) : ticks(low, high, Math.max(3, tall / 40));
  let digits = 3;
  const distinct = () => new Set(levels.map((each) => WRITTEN[chart.number](each, digits))).size === levels.length;
  while (digits < 8 && !distinct()) digits += 1;
  for (const value of levels) {
    made(frame, "path", { d: `M${MARGIN.left} ${y(value).toFixed(1)}h${inner}`, class: "grid" });
    made(frame, "text", { x: MARGIN.left - 6, y: y(value) + 4, class: "left" },
      value ? WRITTEN[chart.number](value, digits) : "0");
  }
  const [apart, step_of] = state.axis === "time" ? [85, time_step] : [55, round_step];
  for (const value of ticks(left, right, Math.max(2, inner / apart), step_of)) {
    if (state.axis === "steps" && value !== Math.round(value)) continue;
    made(frame, "path", { d: `M${x(value).toFixed(1)} ${MARGIN.top}v${tall}`, class: "grid" });
    const right_end = x(value) > width - 34;
    made(frame, "text", { x: right_end ? width - 2 : x(value), y: height - 18, class: right_end ? "end" : "below" },
      value ? place(value, 6) : "0");
  }
  made(frame, "text", { x: MARGIN.left + inner, y: height - 3, class: "end" }, X_WORDS[state.axis]);
  const [raw, curves] = [0, 1].map(() => made(chart.svg, "g", { "clip-path": `url(#clip${chart.id})` }));
  const dots = chart.curves.length <= 4;
  for (const curve of chart.curves) {
    const hidden = state.hidden.has(curve.run);
    curve.item.hidden = hidden;
    if (hidden) continue;
    const faint = curve.smooth ? " faint" : "";
    made(curve.smooth ? raw : curves, "path",
      { d: path_of(curve.at, curve.values, x, y, left, right), class: `line ${curve.look}${faint}` });
    if (curve.smooth)
      made(curves, "path",
        { d: path_of(curve.smooth.at, curve.smooth.values, x, y, left, right), class: `line strong ${curve.look}` });
    if ((curve.few && dots) || curve.values.length < 3)
      curve.values.forEach((value, index) => {
        if (curve.at[index] >= left && curve.at[index] <= right)
          made(curves, "circle", { cx: x(curve.at[index]), cy: y(value), r: 3, class: `dot ${curve.look}` });
      });
  }
  const windows = new Set(shown(chart).filter((curve) => curve.smooth).map((curve) => curve.smooth.window));
  chart.said = windows.size ? `; bold: the ${chart.middle} of ${[...windows].join(" or ")} steps` : "";
  if (state.marks) draw_marks(chart, height - MARGIN.bottom);
  chart.cursor = made(chart.svg, "g", { class: "cursor" });
  chart.band = made(chart.svg, "rect", { class: "band", y: MARGIN.top, height: tall, width: 0 });
  point(chart, null);
}

function draw_marks(chart, floor) {
  const layer = made(chart.svg, "g", { class: "marks" });
  data.runs.forEach((run, number) => {
    if (state.hidden.has(number)) return;
    const own = placed(number, run.marks.map((mark) => mark.step));
    run.marks.forEach((mark, index) => {
      if (!(own[index] >= chart.left && own[index] <= chart.right)) return;
      const across = chart.x(own[index]).toFixed(1);
      const look = data.runs.length > 1 ? `c${run.colour}` : "single";
      if (mark.kind === "resumed")
        made(layer, "path", { d: `M${across} ${MARGIN.top}V${floor}`, class: `resumed ${look}` });
      const shape = made(layer, "path", {
        d: data.shapes[mark.kind], transform: `translate(${across} ${floor - 6 - 11 * (number % 8)})`,
        class: `mark ${mark.kind.replace(" ", "-")} ${look}`,
      });
      made(shape, "title", {}, `${data.runs.length > 1 ? `${run.name}, ` : ""}step ${mark.step}: ${mark.words}`);
    });
  });
}

// Show the values at a position of the horizontal axis; for null, the last values.
function point(chart, at) {
  chart.cursor.replaceChildren();
  let told = "";
  for (const curve of shown(chart)) {
    const index = at === null ? curve.values.length - 1 : nearest(curve.at, at);
    const value = curve.values[index];
    curve.told.textContent = WRITTEN[chart.number](value, 6);
    curve.told.dataset.step = curve.steps[index];
    if (at === null || !Number.isFinite(curve.at[index])) continue;
    told = told || place(at, 6);
    made(chart.cursor, "circle", {
      cx: chart.x(curve.at[index]), cy: chart.y(value), r: 4, class: `dot ${curve.look}` });
  }
  if (at !== null) {
    const across = chart.x(at);
    made(chart.cursor, "path", { d: `M${across} ${MARGIN.top}V${chart.height - MARGIN.bottom}`, class: "guide" });
  }
  chart.place.textContent = (at === null ? "last values" : `${X_WORDS[state.axis]} ${told}`) + chart.said;
}

const point_all = (at) => data.charts.forEach((chart) => point(chart, at));

function listen(chart) {
  let start = null;
  const inside = (event) => {
    const frame = chart.svg.getBoundingClientRect();
    const across = (event.clientX - frame.left) * chart.width / frame.width;
    const share = (across - MARGIN.left) / (chart.width - MARGIN.left - MARGIN.right);
    return chart.left + Math.min(1, Math.max(0, share)) * (chart.right - chart.left);
  };
  chart.svg.addEventListener("pointermove", (event) => {
    const at = inside(event);
    point_all(at);
    if (start === null) return;
    const [one, other] = [chart.x(start), chart.x(at)].sort((a, b) => a - b);
    chart.band.setAttribute("x", one);
    chart.band.setAttribute("width", other - one);
  });
  chart.svg.addEventListener("pointerdown", (event) => {
    point_all(inside(event));
    if (event.pointerType === "mouse" && event.button === 0) {
      start = inside(event);
      chart.svg.setPointerCapture(event.pointerId);
    }
  });
  chart.svg.addEventListener("pointerup", (event) => {
    const first = start, second = inside(event);
    start = null;
    chart.band.setAttribute("width", 0);
    if (first === null || Math.abs(chart.x(first) - chart.x(second)) < 8) return;
    state.zoom = [Math.min(first, second), Math.max(first, second)];
    draw_all();
  });
  chart.svg.addEventListener("pointerleave", () => { if (start === null) point_all(null); });
  chart.svg.addEventListener("dblclick", () => { state.zoom = null; draw_all(); });
  chart.svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const from = chart.key_at === undefined ? chart.right : chart.key_at;
    chart.key_at = Math.min(chart.right, Math.max(chart.left, from + move * (chart.right - chart.left) / 100));
    point_all(chart.key_at);
  });
}

// Controls --------------------------------------------------------------------------------------------------------

function draw_all(anew = false) {
  if (anew) data.charts.forEach(arrange);
  state.span = span_of_all();
  // All widths are read before any chart is drawn. Otherwise the browser would compute the layout again for each.
  const widths = data.charts.map((chart) => chart.svg.clientWidth);
  data.charts.forEach((chart, number) => draw(chart, widths[number]));
  document.getElementById("whole").hidden = state.zoom === null;
  document.getElementById("smoothing").textContent = state.smooth
    ? `over ${significant(100 * WINDOWS[state.smooth], 2)}% of a run` : "none";
  root.dataset.axis = state.axis;
  root.dataset.wider = Math.max(0, root.scrollWidth - root.clientWidth);
}

function start() {
  const began = performance.now();
  const parent = document.getElementById("charts");
  data.charts.forEach((chart, number) => { chart.id = number; build(chart, parent, number); });
  const slider = document.getElementById("smooth");
  const many = data.charts.some((chart) => chart.curves.some((curve) => curve.count > 200));
  slider.value = state.smooth = many ? 3 : 0;
  slider.addEventListener("input", () => { state.smooth = Number(slider.value); draw_all(true); });
  for (const choice of document.querySelectorAll("input[name=axis]"))
    choice.addEventListener("change", () => { state.axis = choice.value; state.zoom = null; draw_all(true); });
  for (const choice of document.querySelectorAll("input[data-run]"))
    choice.addEventListener("change", () => {
      const run = Number(choice.dataset.run);
      if (choice.checked) state.hidden.delete(run); else state.hidden.add(run);
      draw_all();
    });
  const marks = document.getElementById("marks");
  marks.addEventListener("change", () => { state.marks = marks.checked; draw_all(); });
  document.getElementById("whole").addEventListener("click", () => { state.zoom = null; draw_all(); });
  const theme = document.getElementById("theme");
  theme.addEventListener("change", () => {
    if (theme.value) root.dataset.theme = theme.value; else delete root.dataset.theme;
  });
  // Settings in the fragment of a link: #x=time&smooth=0&colours=dark
  const asked = new URLSearchParams(location.hash.slice(1));
  const axis = document.querySelector(`input[name=axis][value="${CSS.escape(asked.get("x") || "")}"]`);
  if (axis) { axis.checked = true; state.axis = axis.value; }
  if (/^[0-6]$/.test(asked.get("smooth"))) slider.value = state.smooth = Number(asked.get("smooth"));
  if (["light", "dark"].includes(asked.get("colours"))) root.dataset.theme = theme.value = asked.get("colours");
  draw_all(true);
  let width = parent.clientWidth;
  new ResizeObserver(() => {
    if (parent.clientWidth === width) return;
    width = parent.clientWidth;
    draw_all();
  }).observe(parent);
  for (const each of document.querySelectorAll("[data-scripted]")) each.hidden = false;
  root.dataset.milliseconds = Math.round(performance.now() - began);
  root.dataset.drawn = "yes";
}

start();
})();
