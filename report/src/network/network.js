"use strict";
// The page of a network, made from the data embedded in it.

const { network, version, made_at_s } = JSON.parse(document.getElementById("data").textContent);
const { gallery } = network;

document.getElementById("title").textContent = network.name;
document.title = `${network.name} · Ocelli network`;

const facts = network.facts.map(([name, value]) => [name, el("div", { class: "words" }, value)]);
section("network", "Network", table(["", ""], facts, []));
section("patches", "Patch features", sheet(gallery.patches, patchNote(gallery)));
section("attention", "Attention", gallery.attention.rows.length > 0
  ? sheet(gallery.attention, attentionNote(gallery))
  : el("p", { class: "note" }, "This network has no class token, and so no attention of one."));
section("neighbors", "Nearest neighbors", sheet(gallery.neighbors, neighborNote(gallery), neighborLegend(gallery.neighbors)));

document.getElementById("footer").textContent = `Made by ocelli ${version}, ${new Date(1000 * made_at_s).toLocaleString()}.`;
document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
