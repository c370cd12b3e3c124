"use strict";
// The sections of the page, made from the data embedded in it.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const several = runs.length > 1;

const dot = (run) => { const node = el("span", { class: "dot" }); node.style.background = color(run); return node; };
const named = (run) => el("span", { class: "named" }, dot(run), runs[run].overview.name);

// Makes one part per run, under the run's name if there are several runs.
function perRun(make) {
  return runs.flatMap((run, i) => {
    const parts = [make(run, i)].flat(Infinity).filter((part) => part !== null && part !== undefined);
    if (parts.length === 0) return [];
    return several ? [el("h3", {}, named(i)), ...parts] : parts;
  });
}

// 115.3 -> 1 min 55 s: a duration in its two largest units
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
  return `${Math.floor(s / 86400)} days ${Math.floor(s / 3600) % 24} h`;
}

// 12.345 -> 12.35 ms, 2500 -> 2.5 s, 115289 -> 1 min 55 s
function milliseconds(ms) {
  if (ms < 1000) return `${short(ms)} ms`;
  return ms < 59500 ? `${String(Number((ms / 1000).toPrecision(3)))} s` : duration(ms / 1000);
}

function overview() {
  const rows = runs.map((run, i) => {
    const o = run.overview;
    const states = [el("span", { class: `state ${o.state.replace(" ", "-")}`, title: o.why }, o.state)];
    if (o.collapsed) states.push(" ", el("span", { class: "state collapsed" }, "collapsed"));
    return [el("span", { title: run.workdir }, named(i)), run.recipe, o.method, o.backbone, el("span", {}, ...states),
      `${o.step.toLocaleString("en")} of ${o.total_steps.toLocaleString("en")}`, short(o.loss),
      o.best ? el("span", { title: `${o.best.words}; ${o.best.about}` }, `${o.best.metric} ${o.best.course}`)
        : o.learning ? el("span", { title: o.learning.words }, `views ${o.learning.course} (random ${o.learning.random_percent.toFixed(1)}, of ${o.learning.n_images})`) : null, short(o.images_per_s), duration(o.seconds_left)];
  });
  const headings = ["run", "recipe", "method", "backbone", "state", "step", "loss", "score: first → best → last", "images/s", "time left"];
  const scored = runs.filter((run) => run.overview.best);
  const searched = runs.filter((run) => run.overview.learning);
  const why = runs.filter((run) => run.overview.why !== run.overview.state);
  return [table(headings, rows, [5, 6, 8, 9]),
    ...searched.map((run) => el("p", { class: "note" }, `${several ? `${run.overview.name}, without` : "Without"} labels: the run is ${run.overview.learning.words}.`)),
    ...scored.map((run) => el("p", { class: "note" }, `${several ? `${run.overview.name}: ` : ""}${run.overview.best.words}; ${run.overview.best.about}.`)),
    ...why.map((run) => el("p", { class: "note" }, `${run.overview.name} ${run.overview.why}`))];
}

// Order of the charts: the most important ones first.
const ORDER = ["train/loss", "probe/", "views/", "health/", "train/", "knobs/", "rate/", "time/"];
const rank = (name) => { const found = ORDER.findIndex((start) => name.startsWith(start)); return found < 0 ? ORDER.length : found; };
// Shown beside others, or not at all.
const HIDDEN = ["train/samples", "train/epoch", "views/random_weights"];

function curves(wanted) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.series)))].filter((name) => wanted(name) && !HIDDEN.includes(name));
  names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
  const rows = Math.max(...runs.map((run) => (run.series["train/loss"] || []).length));
  const constant = [];
  const charts = [];
  for (const name of names) {
    for (const { title, lines } of comparable(name)) {
      const values = new Set(lines.flatMap((line) => line.points.map((p) => p[1])));
      if (values.size === 1) constant.push(`${title} ${short([...values][0])}`);
      else if (lines.some((line) => line.points.length > 1)) charts.push(new Chart(title, lines).node);
    }
  }
  return [
    charts.length ? el("div", { class: "charts" }, ...charts) : null,
    constant.length ? el("p", { class: "note" }, `${rows === 1 ? "The only row so far" : "The same in every row"}: ${constant.join(", ")}.`) : null,
  ];
}

// Returns the lines of the metric `name` that one chart may hold. Losses and gradients of different methods are of different
// quantities: each method has a chart of its own.
function comparable(name) {
  const lines = runs.map((run, i) => ({ run: i, name: run.overview.name, points: run.series[name] || [] })).filter((line) => line.points.length > 0);
  if (name === "views/retrieval") {
    const random = lines.map((line) => ({ run: line.run, name: `${line.name}, random weights`, points: runs[line.run].series["views/random_weights"] || [], dashed: true }));
    return [{ title: name, lines: [...lines, ...random] }];
  }
  const methods = [...new Set(lines.map((line) => runs[line.run].overview.method))];
  if (!name.startsWith("train/") || methods.length < 2) return [{ title: name, lines }];
  return methods.map((method) => ({ title: `${name} · ${method}`, lines: lines.filter((line) => runs[line.run].overview.method === method) }));
}

const sameKind = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// {"k":[10,20],"temperature":0.07} -> k 10, 20; temperature 0.07
function settings(kind) {
  if (!kind.settings) return "";
  const value = (v) => (Array.isArray(v) ? v.map(short).join(", ") : typeof v === "number" ? short(v) : String(v));
  const all = kind.seed ? { ...JSON.parse(kind.settings), seed: kind.seed } : JSON.parse(kind.settings);
  return Object.entries(all).filter(([, v]) => v !== null && v !== false).map(([key, v]) => `${key.replace(/_/g, " ")} ${value(v)}`).join("; ");
}

const counted = (set, images) => (images ? `${set} (${images.toLocaleString("en")})` : set);
const fitted = (kind) => (kind.train ? counted(kind.train, kind.train_images) : "–");

// Scores of what a run trains beside its backbone.
const ownMetrics = data.own_metrics;

function scores() {
  const kinds = [];
  for (const run of runs) for (const { kind } of run.scores) if (!kinds.some((other) => sameKind(other, kind))) kinds.push(kind);
  if (kinds.length === 0) return [];
  // The scores of what a run itself trains come first.
  const others = (kind) => Number(!ownMetrics.includes(kind.metric));
  kinds.sort((a, b) => others(a) - others(b) || a.set.localeCompare(b.set) || a.metric.localeCompare(b.metric, "en", { numeric: true }));
  const of = (run, kind) => (run.scores.find((score) => sameKind(score.kind, kind)) || { points: [] }).points;
  const moving = kinds.filter((kind) => runs.some((run) => of(run, kind).length > 1));
  const charts = moving.map((kind) => {
    const point = (p) => [p.step, p.value, ...(p.interval || [])];
    const lines = runs.map((run, i) => ({ run: i, name: run.overview.name, points: of(run, kind).map(point) }));
    const alike = kinds.filter((other) => other.metric === kind.metric && other.set === kind.set && other.network === kind.network);
    const what = [kind.metric, kind.set, kind.network, alike.length > 1 ? `fitted on ${fitted(kind)}; ${settings(kind)}` : ""];
    return new Chart(what.filter((word) => word).join(" · "), lines, { dots: true }).node;
  });
  const cell = (run, kind) => {
    const points = of(run, kind);
    const last = points.find((p) => p.step === run.overview.result_step) || points[points.length - 1];
    if (!last) return null;
    const range = last.interval ? ` (${last.interval[0].toFixed(1)} – ${last.interval[1].toFixed(1)})` : "";
    return `${kind.measure ? last.value.toFixed(2) : short(last.value)}${range} at ${last.step.toLocaleString("en")}`;
  };
  const rows = kinds.map((kind) => {
    const what = kind.measure && !["accuracy", kind.metric].includes(kind.measure) ? `${kind.metric} (${kind.measure})` : kind.metric;
    const network = kind.network ? `${kind.network}; ` : "";
    const wrapped = (words) => el("div", { class: "words" }, words);
    return [what, ...runs.map((run) => cell(run, kind)), wrapped(counted(kind.set, kind.test_images)), wrapped(fitted(kind)),
      wrapped(`${network}${kind.transform}`), wrapped(settings(kind))];
  });
  const headings = ["score", ...runs.map((run) => run.overview.name), "test set", "fitted on", "images", "settings"];
  return [
    el("p", { class: "note" }, "In percent, accuracies where nothing else is said, with the middle 95 % of resampled test sets; measures that need no labels as they are. Of each, the checkpoint that is the result of the run, or the newest that was scored."),
    table(headings, rows, runs.map((_, i) => 1 + i)),
    charts.length ? el("div", { class: "charts" }, ...charts) : null,
  ];
}

// Whether a confusion counts pixels, not images.
const countsPixels = (confusion) => confusion.kind.measure === "mIoU";

function matrix(confusion) {
  const { classes, matrix: counts, by_class: accuracies } = confusion;
  const isOfPixels = countsPixels(confusion);
  const head = el("tr", {}, el("th"), ...classes.map((name) => el("th", {}, name)), el("th", {}, isOfPixels ? "IoU in %" : "%"));
  const rows = counts.map((row, i) => {
    const total = row.reduce((a, b) => a + b, 0);
    const cells = row.map((count, j) => {
      const share = total ? count / total : 0;
      // Numbers of pixels are long: their shares of a class are shown.
      const shown = isOfPixels ? percent(100 * share) : String(count);
      const cell = el("td", { title: `${classes[i]} taken for ${classes[j]}: ${count} of ${total}` }, count ? shown : "");
      cell.style.background = i === j ? `rgb(44 138 75 / ${share})` : `rgb(194 59 59 / ${Math.min(1, 2 * share)})`;
      return cell;
    });
    const accuracy = accuracies[i];
    return el("tr", {}, el("th", {}, classes[i]), ...cells, el("td", {}, accuracy === null ? "–" : accuracy.toFixed(0)));
  });
  return el("div", { class: "scroll" }, el("table", { class: "matrix" }, el("thead", {}, head), el("tbody", {}, ...rows)));
}

function confusedPairs(confusion) {
  const rows = confusion.pairs.map(([label, predicted, count]) => [confusion.classes[label], confusion.classes[predicted], String(count)]);
  return table(["class", "taken for", countsPixels(confusion) ? "pixels" : "images"], rows, [2]);
}

function confusions(run) {
  if (run.confusions.length === 0) return null;
  const title = (c) => `${c.kind.metric} · ${c.kind.set} · step ${c.step.toLocaleString("en")}`;
  const place = el("div");
  const choice = el("select", { "aria-label": "score" }, ...run.confusions.map((c, i) => el("option", { value: i }, title(c))));
  const show = () => { const c = run.confusions[choice.value]; place.replaceChildren(c.matrix ? matrix(c) : confusedPairs(c)); };
  choice.addEventListener("change", show);
  // The score of what the run itself trains, or else the one that is usually quoted.
  const own = run.confusions.findIndex((c) => ownMetrics.includes(c.kind.metric));
  const usual = run.confusions.findIndex((c) => c.kind.metric === "knn_20");
  choice.value = Math.max(0, own >= 0 ? own : usual);
  show();
  return [choice, place];
}

const setAndStep = (of) => `${of.kind.set}, step ${of.step.toLocaleString("en")}`;
const percent = (value) => `${value.toFixed(1)} %`;

// Whether an image may have several of the classes of a classifier.
const hasSeveral = (of) => of.kind.metric === data.multi_label_metric;

// The share of right predictions in each bin of probabilities, as bars; a dot is at the mean probability of a bin, and on the
// line where the two are equal.
function reliability(of) {
  const { ece, bins } = of.calibration;
  const [left, right, top, bottom] = [40, 346, 10, 214];
  const x = (v) => left + (v / 100) * (right - left);
  const y = (v) => bottom - (v / 100) * (bottom - top);
  const most = Math.max(1, ...bins.map((bin) => bin.n));
  const chart = svg("svg", { viewBox: "0 0 360 256", role: "img", "aria-label": `calibration on ${setAndStep(of)}` });
  for (const t of [0, 25, 50, 75, 100]) {
    chart.append(svg("line", { class: "grid", x1: left, x2: right, y1: y(t), y2: y(t) }));
    chart.append(svg("text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, String(t)));
    chart.append(svg("text", { x: x(t), y: bottom + 16, "text-anchor": "middle" }, String(t)));
  }
  chart.append(svg("text", { x: left, y: bottom + 34 }, "across: probability in %; up: share that is right in %"));
  bins.forEach((bin, i) => {
    // A file may hold anything.
    if (bin.n === 0 || bin.confidence === null || bin.accuracy === null) return;
    const [from, to] = [(100 * i) / bins.length, (100 * (i + 1)) / bins.length];
    const bar = svg("rect", { class: "share", x: x(from) + 1, y: y(bin.accuracy), width: x(to) - x(from) - 2, height: y(0) - y(bin.accuracy) });
    bar.style.opacity = 0.25 + 0.75 * (bin.n / most);
    const dot = svg("circle", { class: "mean", cx: x(bin.confidence), cy: y(bin.accuracy), r: 3 });
    const n = bin.n.toLocaleString("en");
    const words = `${percent(from)} to ${percent(to)}: ` + (hasSeveral(of)
      ? `${n} times, a class had such a probability, ${percent(bin.confidence)} on average; ${percent(bin.accuracy)} of these images have it`
      : `${n} images, predicted with ${percent(bin.confidence)} on average; ${percent(bin.accuracy)} are right`);
    for (const mark of [bar, dot]) { mark.append(svg("title", {}, words)); chart.append(mark); }
  });
  chart.append(svg("line", { class: "equal", x1: x(0), x2: x(100), y1: y(0), y2: y(100) }));
  return el("div", { class: "reliability" }, el("h4", {}, `${setAndStep(of)}: error ${percent(ece)}`), chart);
}

function calibrations(run) {
  const shown = run.classifiers.filter((of) => of.calibration.bins.some((bin) => bin.n > 0));
  if (shown.length === 0) return null;
  const nBins = [...new Set(shown.map((of) => of.calibration.bins.length))].join(" or ");
  return [el("p", { class: "note" }, `How often the classifier is right when it gives its prediction a certain probability: on the line, it is as sure as it should be; below the line, too sure. The error is the expected calibration error, the mean distance from the line over all images (Guo et al. 2017, ${nBins} bins). The darker a bar, the more images it has.`),
    shown.some(hasSeveral) ? el("p", { class: "note" }, "Where an image may have several classes, a prediction is that it has a certain class, and every class of every image counts.") : null,
    el("div", { class: "charts" }, ...shown.map(reliability))];
}

function classScores(run) {
  const shown = run.classifiers.filter((of) => of.by_class.length > 0);
  if (shown.length === 0) return null;
  const list = (of) => el("details", {}, el("summary", {}, `${setAndStep(of)}: ${of.by_class.length.toLocaleString("en")} classes`),
    table(["class", "average precision in %"], of.by_class.map(({ class: name, value }) => [el("div", { class: "words" }, name), value.toFixed(2)]), [1]));
  return [el("p", { class: "note" }, "Average precision of the classes that images of the test set have, the lowest first. An image may have several classes, so that none is taken for another."), ...shown.map(list)];
}

function worstImages(run) {
  const shown = run.classifiers.filter((of) => of.worst.length > 0);
  if (shown.length === 0) return null;
  const words = (text) => el("div", { class: "words" }, text);
  const list = (of) => {
    const rows = of.worst.map((image) => [words(image.key), words(image.class), words(image.predicted), image.probability.toFixed(1), image.loss.toFixed(3), words(image.shard || "–")]);
    const picture = of.worst_picture ? el("div", { class: "scroll" }, el("img", { src: of.worst_picture, alt: `images of ${of.kind.set} with the largest loss` })) : null;
    return [picture, el("details", {}, el("summary", {}, `${setAndStep(of)}: ${of.worst.length.toLocaleString("en")} images`),
      table(["image", "class", "predicted", hasSeveral(of) ? "largest probability in %" : "its probability in %", "loss", "shard"], rows, [3, 4]))];
  };
  return [el("p", { class: "note" }, "The images of the test set on which the classifier has the largest loss, the largest first. Wrong labels are often among them."), ...shown.map(list)];
}

function masks(run) {
  const shown = run.masks.filter((of) => of.worst_masks.length > 0);
  if (shown.length === 0) return null;
  const words = (text) => el("div", { class: "words" }, text);
  const list = (of) => {
    const rows = of.worst_masks.map((image) => [words(image.key), image.accuracy.toFixed(1), words(image.shard || "–")]);
    const picture = of.mask_picture ? el("div", { class: "scroll" }, el("img", { src: of.mask_picture, alt: `images of ${of.kind.set} beside their true and predicted classes` })) : null;
    return [picture, el("details", {}, el("summary", {}, `${setAndStep(of)}: ${of.worst_masks.length.toLocaleString("en")} images`),
      table(["image", "right pixels in %", "shard"], rows, [1]))];
  };
  return [el("p", { class: "note" }, "The images of the test set of which the smallest share of pixels is labeled correctly, each beside its true and its predicted classes. Wrong masks are often among them."), ...shown.map(list)];
}

const gallery = (name, note, legend) => perRun((run) => {
  if (run.no_gallery) return el("p", { class: "note" }, `No pictures: ${run.no_gallery}`);
  return run.gallery ? sheet(run.gallery[name], note(run.gallery), legend ? legend(run.gallery[name]) : null) : null;
});

function stages(run) {
  const { step_ms: total, rank_wait_ms: waiting, parts } = run.stages;
  if (!total) return null;
  const known = parts.reduce((sum, [, ms]) => sum + ms, 0);
  const all = [...parts, ["rest", Math.max(0, total - known)]];
  const bar = el("div", { class: "stages", role: "img", "aria-label": "share of each stage" });
  const legend = el("div", { class: "legend" });
  all.forEach(([name, ms], i) => {
    const share = ms / Math.max(total, known);
    if (share < 0.001) return;
    const shade = name === "rest" ? "var(--line)" : COLORS[i % COLORS.length];
    const part = el("div", { title: `${name}: ${milliseconds(ms)}` });
    part.style.width = `${100 * share}%`;
    part.style.background = shade;
    bar.append(part);
    const key = el("i");
    key.style.background = shade;
    legend.append(el("span", {}, key, `${name} ${milliseconds(ms)}, ${(100 * share).toFixed(0)} %`));
  });
  const ranks = waiting > 0.001 * total ? ` Of that, ${milliseconds(waiting)} are spent waiting for other ranks.` : "";
  return [el("p", { class: "note" }, `A step takes ${milliseconds(total)}, the mean of the newest rows, as the host sees it: work that a GPU still has before it counts where the host waits for it.${ranks}`), bar, legend];
}

function warnings(run) {
  if (run.warnings.length === 0) return el("p", { class: "note" }, "No warnings.");
  const groups = new Map();
  for (const warning of run.warnings) {
    // Warnings that differ in their numbers alone are grouped.
    const key = warning.concern + warning.message.replace(/[0-9.]+/g, "#").slice(0, 60);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(warning);
  }
  return [...groups.values()].map((all) => {
    const last = all[all.length - 1];
    // Messages count steps from 0; the page shows the number of steps taken.
    const at = (warning) => (warning.step + 1).toLocaleString("en");
    const when = all.length > 1 ? `${all.length} times, steps ${at(all[0])} to ${at(last)}; the last: ` : `step ${at(last)}: `;
    return el("p", { class: "warning" }, el("strong", {}, last.concern.replace("_", " ")), ` · ${when}${last.message.replace(/^step \d+: /, "")}`);
  });
}

function bad(run) {
  if (run.n_bad === 0) return null;
  const card = (sample) => el("div", {}, sample.tile ? el("img", { src: sample.tile.src, alt: sample.key }) : el("div", { class: "none" }, "no pixels"),
    el("div", {}, el("strong", {}, sample.key), el("div", {}, sample.shard), el("div", {}, sample.reason)));
  const more = run.n_bad > run.bad.length ? `; the first ${run.bad.length} are shown` : "";
  return [el("p", { class: "note" }, `${run.n_bad.toLocaleString("en")} samples could not be used and were replaced by others${more}. A picture shows what a forgiving decoder makes of the damaged file.`), el("div", { class: "bad" }, ...run.bad.map(card))];
}

function command(run) {
  if (!run.continue) return el("p", { class: "note" }, "This run was started by a release that did not note its command; the same command continues it.");
  // Browsers grant access to the clipboard only to local files and https pages.
  const copy = navigator.clipboard ? el("button", { type: "button" }, "copy") : null;
  if (copy) copy.addEventListener("click", () => navigator.clipboard.writeText(run.continue).then(() => { copy.textContent = "copied"; }));
  const many = run.start.world_size > 1;
  const ranks = many ? ` on ${run.start.world_size} ranks` : "";
  const how = many ? `under the launcher that started its ${run.start.world_size} ranks` : "as it stands";
  return [el("p", { class: "note" }, `Last started${ranks} on ${run.start.host}, ${new Date(1000 * run.start.at_s).toLocaleString()}, release ${run.start.version}. The command continues the run ${how}.`),
    el("div", { class: "command" }, el("pre", {}, run.continue), copy || "")];
}

function recipes() {
  const parts = [];
  if (several && data.settings.length) {
    const rows = data.settings.map(([key, values]) => [key, ...values]);
    parts.push(el("h3", {}, "What differs"), table(["key", ...runs.map((run) => run.overview.name)], rows, []));
  }
  return [...parts, ...perRun((run) => [command(run), el("details", {}, el("summary", {}, "plan.toml: the recipe with every default filled in"), el("pre", {}, run.plan))])];
}

document.getElementById("title").textContent = several ? `${runs.length} runs` : runs[0].overview.name;
document.title = `${several ? `${runs.length} runs` : runs[0].overview.name} · Ocelli report`;
section("overview", "Overview", overview());
section("scores", "Scores", scores());
const nBefore = shared.charts.length;
const drawn = curves((name) => !/^(health|time|rate)\//.test(name));
const methods = new Set(runs.map((run) => run.overview.method));
const apart = methods.size > 1 ? " Losses of different methods cannot be compared, and are in charts of their own." : "";
const howToRead = shared.charts.length > nBefore
  ? `By steps taken. Drag over a chart to zoom all of them, double-click for the whole run.${apart}`
  : "No metric has two rows yet: charts appear with the second step.";
section("curves", "Curves", [
  several ? el("div", { class: "legend" }, ...runs.map((_, i) => named(i))) : null,
  el("p", { class: "note" }, howToRead),
  ...drawn,
]);
section("confusions", "Confusion", perRun(confusions));
section("classes", "Classes", perRun(classScores));
section("calibration", "Calibration", perRun(calibrations));
section("worst", "Worst images", perRun(worstImages));
section("masks", "Masks", perRun(masks));
section("patches", "Patch features", gallery("patches", patchNote));
section("attention", "Attention", gallery("attention", attentionNote));
section("neighbors", "Nearest neighbors", gallery("neighbors", neighborNote, neighborLegend));
section("views", "Views", gallery("views", (of) => `Images of ${of.set}, each with the views that the run's augmentation makes of it.`));
section("health", "Health", [...perRun(warnings), ...curves((name) => name.startsWith("health/"))]);
section("throughput", "Throughput", [...perRun(stages), ...curves((name) => /^(rate|time)\//.test(name))]);
section("quarantine", "Quarantine", perRun(bad));
section("recipe", "Recipe and command", recipes());
// All charts are in the page now and have a width; later each is drawn again when its own width changes.
shared.charts.forEach((chart) => chart.draw());
document.getElementById("footer").textContent = `Made by ocelli ${data.version}, ${new Date(1000 * data.made_at_s).toLocaleString()}. Curves of more than 2,000 rows keep the lowest and the highest value of each stretch.`;

document.getElementById("smoothing").addEventListener("input", (event) => {
  shared.smoothing = Number(event.target.value);
  shared.charts.forEach((chart) => chart.draw());
});
document.getElementById("reset").addEventListener("click", () => zoomTo(null));
document.getElementById("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
