"use strict";
// Line charts in SVG. All charts of a page share their horizontal axis, the crosshair and the zoom.

const COLORS = ["#2f6fd6", "#d9822b", "#2c9a6b", "#b1448f", "#7a6ad8", "#b5973a", "#3aa3b5", "#c25450"];
const color = (run) => COLORS[run % COLORS.length];

const SVG = "http://www.w3.org/2000/svg";
const shared = { charts: [], zoom: null, smoothing: 0 };

function svg(name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// 0.0005 -> 5e-4, 12345 -> 12,345, 0.5 -> 0.5
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

const bounds = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

// Returns about `n` round numbers between `low` and `high`.
function ticks(low, high, n) {
  const raw = (high - low) / n;
  const unit = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 5, 10].map((m) => m * unit).find((s) => s >= raw) || raw;
  const found = [];
  for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) found.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  return found;
}

// Returns the exponential moving average of a curve, with its initial bias corrected.
function smoothed(points, weight) {
  if (weight === 0) return points;
  let mean = 0;
  let norm = 0;
  return points.map(([x, y, ...rest]) => {
    mean = weight * mean + (1 - weight) * y;
    norm = weight * norm + (1 - weight);
    return [x, mean / norm, ...rest];
  });
}

function nearest(points, x) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

// `lines`: [{ run, name, points: [[x, y, low, high], …] }]; `dots` marks each point and its interval.
class Chart {
  constructor(title, lines, options) {
    this.title = title;
    this.lines = lines.filter((line) => line.points.length > 0);
    this.options = options || {};
    this.node = document.createElement("div");
    this.node.className = "chart";
    const head = document.createElement("h4");
    head.append(document.createTextNode(title));
    this.readout = document.createElement("span");
    head.append(this.readout);
    this.svg = svg("svg", { role: "img", "aria-label": title });
    this.node.append(head, this.svg);
    this.listen();
    shared.charts.push(this);
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  range() {
    if (shared.zoom) return shared.zoom;
    const ends = shared.charts.flatMap((chart) => chart.lines.flatMap((line) => [line.points[0][0], line.points[line.points.length - 1][0]]));
    const [low, high] = bounds(ends);
    return low < high ? [low, high] : [low - 1, high + 1];
  }

  draw() {
    const [width, height] = [this.svg.clientWidth, this.svg.clientHeight];
    if (width === 0) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const frame = { left: 46, right: width - 8, top: 8, bottom: height - 20 };
    const [first, last] = this.range();
    const weight = this.options.dots ? 0 : shared.smoothing;
    const visible = this.lines.map((line) => {
      const points = smoothed(line.points, weight);
      const inside = (p) => p[0] >= first && p[0] <= last;
      // Keeps one point beyond each edge, so that lines reach the edge.
      return { ...line, points: points.filter((p, i) => inside(p) || (points[i + 1] && inside(points[i + 1])) || (points[i - 1] && inside(points[i - 1]))) };
    });
    const values = visible.flatMap((line) => line.points.filter((p) => p[0] >= first && p[0] <= last).flatMap((p) => p.slice(1).filter((v) => v !== null && v !== undefined)));
    let [low, high] = values.length ? bounds(values) : [0, 1];
    if (low === high) { low -= Math.abs(low) * 0.05 + 1e-9; high += Math.abs(high) * 0.05 + 1e-9; }
    const margin = (high - low) * 0.06;
    low -= margin; high += margin;
    this.x = (v) => frame.left + ((v - first) / (last - first)) * (frame.right - frame.left);
    this.toStep = (px) => first + ((px - frame.left) / (frame.right - frame.left)) * (last - first);
    this.frame = frame;
    const y = (v) => frame.bottom - ((v - low) / (high - low)) * (frame.bottom - frame.top);
    this.svg.replaceChildren();
    for (const t of ticks(low, high, 4)) {
      this.svg.append(svg("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y(t), y2: y(t) }));
      this.svg.append(svg("text", { x: frame.left - 6, y: y(t) + 4, "text-anchor": "end" }, short(t)));
    }
    for (const t of ticks(first, last, Math.max(3, Math.floor(width / 60)))) {
      this.svg.append(svg("text", { x: Math.min(this.x(t), frame.right - 12), y: height - 5, "text-anchor": "middle" }, short(t)));
    }
    const clip = `clip${shared.charts.indexOf(this)}`;
    const box = svg("clipPath", { id: clip });
    box.append(svg("rect", { x: frame.left, y: 0, width: frame.right - frame.left, height: frame.bottom + 2 }));
    const layer = svg("g", { "clip-path": `url(#${clip})` });
    this.svg.append(box, layer);
    for (const line of visible) {
      const path = line.points.map((p, i) => `${i ? "L" : "M"}${this.x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
      layer.append(svg("path", { d: path, stroke: color(line.run), "stroke-dasharray": line.dashed ? "2 3" : line.run < COLORS.length ? "none" : "6 3" }));
      if (!this.options.dots) continue;
      for (const p of line.points) {
        if (p[2] !== undefined && p[2] !== null) layer.append(svg("line", { x1: this.x(p[0]), x2: this.x(p[0]), y1: y(p[2]), y2: y(p[3]), stroke: color(line.run), opacity: 0.6 }));
        layer.append(svg("circle", { cx: this.x(p[0]), cy: y(p[1]), r: 3, fill: color(line.run) }));
      }
    }
    this.cross = svg("line", { class: "cross", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
    this.window = svg("rect", { class: "window", y: frame.top, height: frame.bottom - frame.top, visibility: "hidden" });
    this.svg.append(this.window, this.cross);
    this.say(null);
  }

  // Shows the values at a step, or the newest ones.
  say(step) {
    const shown = this.lines.map((line) => {
      const points = smoothed(line.points, this.options.dots ? 0 : shared.smoothing);
      return step === null ? points[points.length - 1] : nearest(points, step);
    });
    this.readout.textContent = this.lines.length <= 4 ? shown.map((p) => short(p[1])).join("   ") : "";
    return shown;
  }

  point(step) {
    if (!this.cross) return;
    const hidden = step === null;
    this.cross.setAttribute("visibility", hidden ? "hidden" : "visible");
    if (!hidden) { this.cross.setAttribute("x1", this.x(step)); this.cross.setAttribute("x2", this.x(step)); }
    this.say(step);
  }

  listen() {
    let from = null;
    const at = (event) => {
      const px = event.clientX - this.svg.getBoundingClientRect().left;
      return this.toStep(Math.min(Math.max(px, this.frame.left), this.frame.right));
    };
    const leave = () => { from = null; shared.charts.forEach((chart) => chart.point(null)); hideTip(); };
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch") return;
      from = at(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => {
      const step = at(event);
      shared.charts.forEach((chart) => chart.point(step));
      if (from !== null) {
        const [a, b] = [this.x(Math.min(from, step)), this.x(Math.max(from, step))];
        for (const [key, value] of [["x", a], ["width", b - a], ["visibility", "visible"]]) this.window.setAttribute(key, value);
      }
      const shown = this.say(step);
      showTip(event, this.lines.map((line, i) => ({ color: color(line.run), text: `${line.name}: ${short(shown[i][1])}${interval(shown[i])} at step ${shown[i][0].toLocaleString("en")}` })));
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const ends = [from, at(event)].sort((a, b) => a - b);
      from = null;
      const [low, high] = this.range();
      if (ends[1] - ends[0] > (high - low) / 100) zoomTo(ends); else this.draw();
    });
    this.svg.addEventListener("pointerleave", leave);
    this.svg.addEventListener("pointercancel", leave);
    this.svg.addEventListener("dblclick", () => zoomTo(null));
  }
}

const interval = (p) => (p[2] === undefined || p[2] === null ? "" : ` (${short(p[2])} – ${short(p[3])})`);

function zoomTo(ends) {
  shared.zoom = ends;
  document.getElementById("reset").hidden = ends === null;
  shared.charts.forEach((chart) => chart.draw());
}

let tip = null;

function showTip(event, lines) {
  if (!tip) { tip = document.createElement("div"); tip.className = "tip"; document.body.append(tip); }
  tip.hidden = false;
  tip.replaceChildren(...lines.map((line) => {
    const row = document.createElement("div");
    const dot = document.createElement("span");
    dot.className = "dot";
    dot.style.background = line.color;
    row.append(dot, line.text);
    return row;
  }));
  const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
}

function hideTip() { if (tip) tip.hidden = true; }
