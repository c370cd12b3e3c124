"use strict";
// The page of clusters, made from the data embedded in it.

const { map, version } = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const number = (value) => value.toLocaleString("en");

const kept = map.n_kept !== null;
document.getElementById("title").textContent = `Clusters of ${map.name}`;
document.title = `Clusters of ${map.name}`;

const levels = map.n_clusters.map((n, i) => `${number(n)} of level ${i + 1}`).join(", ");
main.append(el("p", { class: "note" }, `${number(map.n_images)} images; clusters: ${levels}. ${map.about}`));
if (kept) main.append(el("p", { class: "note" }, `${number(map.n_kept)} images are kept; the others are faded below.`));

const most = Math.max(1, ...map.sizes.map((pair) => pair[0]));
const bars = map.sizes.map(([before, after]) => {
  const bar = el("div", { title: kept ? `${number(before)} images, ${number(after)} kept` : `${number(before)} images` });
  const part = (value) => { const node = el("i"); node.style.height = `${(100 * value) / most}%`; return node; };
  bar.append(part(before), ...(kept ? [part(after)] : []));
  return bar;
});
main.append(el("h2", {}, `Sizes of the clusters of level ${map.level}`));
main.append(el("p", { class: "note" }, kept
  ? `From the largest, ${number(most)} images, to the smallest; gray: before, blue: kept.`
  : `From the largest, ${number(most)} images, to the smallest.`));
main.append(el("div", { class: "sizes", role: "img", "aria-label": "sizes of clusters" }, ...bars));

const n_of_level = map.n_clusters[map.level - 1];
main.append(el("h2", {}, map.clusters.length < n_of_level
  ? `The ${number(map.clusters.length)} clusters that are shown, of ${number(n_of_level)}`
  : "Clusters"));
for (const cluster of map.clusters) {
  const classes = cluster.classes.map(([name, n]) => `${name}: ${number(n)}`).join(", ");
  const size = cluster.n_kept === null ? `${number(cluster.n_images)} images` : `${number(cluster.n_images)} images, ${number(cluster.n_kept)} kept`;
  const tiles = cluster.tiles.map(({ tile, is_kept }) => el("figure", { class: is_kept === false ? "out" : "" },
    el("img", { src: tile.src, alt: tile.caption }), el("figcaption", {}, tile.caption)));
  main.append(el("section", { class: "cluster" },
    el("h3", {}, `Cluster ${cluster.number}`, el("span", {}, size), classes ? el("span", {}, `most frequent classes ${classes}`) : null),
    el("div", { class: "sheet tiles" }, ...tiles)));
}

document.getElementById("footer").textContent = `Made by ocelli ${version}.`;
document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
