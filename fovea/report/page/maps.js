// Where an answer looks: its occlusion map, drawn over the picture, or the command that makes one.

import { goTo, readAddress } from "./address.js";
import { element, foreign } from "./dom.js";
import { shown } from "./numbers.js";

/** True if the address asks for maps wherever there are some. */
export function wantsMaps() {
  return readAddress().parameters.get("maps") === "on";
}

/** The switch for all maps of a page; `draw(runs)` shows its state, and hides it where no run has a map. */
export function mapSwitch(page) {
  const box = element("input", { type: "checkbox", class: "maps", change: () => switchMaps(page) });
  const root = element("label", {}, box, " maps");
  function draw(runs) {
    [box.checked, root.hidden] = [wantsMaps(), !runs.some((run) => run.maps)];
  }
  return { root, draw };
}

/** Show the maps of a page, or no longer. */
export function switchMaps(page) {
  goTo(page, { maps: wantsMaps() ? null : "on" });
}

/** The command that makes the map of an answer; "" where the run has no folder. */
export function commandOf(run, which) {
  return run.mapped_by && which ? `${run.mapped_by} --recorded ${which}` : "";
}

/** The button of an answer, which draws its maps over the pictures `figures`, or shows the command that makes one below itself; null without either. */
export function mapButton(maps, figures, command) {
  if (!figures.length || !(maps.length || command)) return null;
  const button = element("button", { type: "button", class: maps.length ? "map" : "map none", "aria-pressed": "false", title: "where the answer looks", click: () => press(button) }, "map");
  button.show = maps.length ? () => drawAll(maps, figures) : () => [below(button, hint(command))];
  return button;
}

/** Show or hide what a button stands for; of the answers to one row one map is shown at a time. */
function press(button) {
  const [on, row] = [button.ariaPressed !== "true", button.closest("article")];
  for (const other of row.querySelectorAll("button.map")) {
    for (const node of other.drawn ?? []) node.remove();
    [other.drawn, other.ariaPressed] = [[], "false"];
  }
  if (on) [button.drawn, button.ariaPressed] = [button.show(), "true"];
}

/** Show the first map of a row that has one. */
export function showFirst(row) {
  row.querySelector("button.map:not(.none)")?.click();
}

function below(button, node) {
  button.closest(".score").after(node);
  return node;
}

function drawAll(maps, figures) {
  return maps.filter((map) => figures[map.image - 1]).flatMap((map) => {
    const figure = figures[map.image - 1];
    const [cover, note] = [coverOf(map), noteOf(map)];
    figure.querySelector("img")?.after(cover);
    figure.after(note);
    return [cover, note];
  });
}

const DIM = 0.3; // brightness, without colour, of what the answer does not depend on, as in the PNG of `fovea saliency`

/** Two layers, of which one takes colour and one light, so that a patch of share s is s times itself and 1 - s times dim grey. */
function coverOf(map) {
  const shares = sharesOf(map);
  const bright = (share) => share + DIM * (1 - share);
  return element("div", { class: "cover", "aria-hidden": "true" },
    layer(map, "grey", 128, shares.map((share) => (DIM * (1 - share)) / bright(share))),
    layer(map, "dark", 0, shares.map((share) => 1 - bright(share))));
}

function sharesOf({ falls }) {
  const most = falls.flat().reduce((high, fall) => Math.max(high, fall), 0);
  return falls.flat().map((fall) => (most > 0 ? Math.max(0, fall) / most : 0));
}

/** Patches of one tone, each with its opacity. */
function layer({ falls, patch_px: side, size: [width, height] }, name, tone, opacities) {
  const canvas = element("canvas", { class: name, width: falls[0].length, height: falls.length });
  const pixels = new ImageData(falls[0].length, falls.length);
  opacities.forEach((opacity, place) => pixels.data.set([tone, tone, tone, Math.round(255 * opacity)], 4 * place));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  canvas.style.width = `${(100 * side * falls[0].length) / width}%`; // patches at the edge may reach over it
  canvas.style.height = `${(100 * side * falls.length) / height}%`;
  return canvas;
}

function noteOf(map) {
  const most = map.falls.flat().reduce((high, fall) => Math.max(high, fall), 0);
  return element("p", { class: "soft note", title: `with ${map.patch_px} px hidden` }, `log-prob ${shown(map.logprob)}, up to ${shown(most)} lower · `, foreign(map.weights));
}

/** The command, ready to copy. */
function hint(command) {
  const text = element("code", {}, command);
  const copy = element("button", { type: "button", click: () => copied(copy, text) }, "copy");
  return element("p", { class: "soft command" }, "No map yet: ", text, " ", copy);
}

async function copied(button, text) {
  try {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "copied";
  } catch { // not allowed here: then it is selected, for the keys that copy
    getSelection().selectAllChildren(text);
  }
}
