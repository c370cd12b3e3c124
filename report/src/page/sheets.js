"use strict";
// Sections, tables, and sheets of pictures with what they show.

const main = document.getElementById("main");

function section(id, title, ...children) {
  const content = children.flat(Infinity).filter((child) => child !== null && child !== undefined);
  if (content.length === 0) return;
  main.append(el("section", { id }, el("h2", {}, title), ...content));
  document.getElementById("nav").append(el("a", { href: `#${id}` }, title));
}

function table(headings, rows, numbers) {
  const kind = (i) => (numbers.includes(i) ? { class: "number" } : {});
  const head = el("tr", {}, ...headings.map((text, i) => el("th", kind(i), text)));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, i) => el("td", kind(i), cell === null || cell === undefined ? "–" : cell))));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

function sheet(of, note, extra) {
  if (!of || of.rows.length === 0) return null;
  const tile = (t, heading) => {
    const image = el("img", { src: t.src, alt: t.caption, title: t.caption });
    if (t.mark) image.className = t.mark;
    return el("figure", {}, image, el("figcaption", { title: t.caption }, heading || t.caption));
  };
  const heading = (j) => (j > 0 && of.headings.length > 2 ? of.headings[j] : "");
  const rows = of.rows.map((row) => el("div", { class: "row" }, ...row.map((t, j) => tile(t, heading(j)))));
  return [el("p", { class: "note" }, note), extra, el("div", { class: "sheet" }, ...rows)];
}

function neighborLegend(of) {
  if (!of.rows.some((row) => row.some((tile) => tile.mark))) return null;
  const key = (name, text) => { const mark = el("i"); mark.style.background = `var(--${name})`; return el("span", {}, mark, text); };
  return el("div", { class: "legend" }, key("good", "same class"), key("bad", "another class"));
}

const seen = (of) => `Images of ${of.set}, seen by ${of.network_description}.`;

const patchNote = (of) => `The first three principal components of the features of all patches, or of all cells of the last feature map of a convolutional network, as red, green and blue: a color means the same in every row. ${seen(of)}`;

const attentionNote = (of) => `What the class token attends to in the last block: the mean of all heads, then up to 12 heads, from black, the lowest weight of each, to white, its highest. ${seen(of)}`;

const neighborNote = (of) => `Images, each with those of ${of.n_candidates.toLocaleString("en")} whose features have the largest cosine. ${seen(of)}`;
