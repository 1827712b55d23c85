// The page that opens first: remarks of the runs, their figures with intervals, the learning curve, time and memory.

import { goTo } from "./address.js";
import { axisOf } from "./axis.js";
import { chart } from "./chart.js";
import { curveOf } from "./curves.js";
import { element, foreign } from "./dom.js";
import { load } from "./source.js";
import { figureTables } from "./tables.js";

const LEARNING = ["reward", "accuracy/dev"];

/** The page; `refresh(runs)` takes the newest facts, `draw()` loads and shows the summaries. */
export function overviewPage() {
  const top = element("div", {});
  const bottom = element("div", {});
  const box = element("div", { class: "charts learning" });
  const root = element("section", { class: "page overview" }, top, box, bottom);
  const charts = LEARNING.map((name) => [name, chart(name, { onPoint, onPick: (step) => goTo("samples", { step, group: null }) })]);
  let runs = [];
  let drawn = "";

  function onPoint(x) {
    for (const [, each] of charts) each.point(x);
  }

  /** Returns whether there is anything new. */
  async function refresh(newRuns) {
    const state = () => JSON.stringify(runs.map((run) => [run.step, run.finished, run.hints]));
    const before = state();
    runs = newRuns;
    return before !== state();
  }

  async function draw() {
    const summaries = await Promise.all(runs.map((_, place) => load(`summary/${place}/0`)));
    const text = JSON.stringify([summaries, runs.map((run) => [run.hints, run.about])]);
    if (text !== drawn) {
      drawn = text; // a poll leaves what is being read as it is
      top.replaceChildren(...remarks(runs), element("div", { class: "headlines" }, runs.map((run, place) => headline(run, place, summaries[place], runs.length))));
      bottom.replaceChildren(...figureTables(runs, summaries), ...machine(runs, summaries));
    }
    await drawCharts();
  }

  async function drawCharts() {
    const known = charts.filter(([name]) => runs.some((run) => run.metrics.includes(name)));
    if (box.childElementCount !== known.length) box.replaceChildren(...known.map(([, each]) => each.root));
    const axis = await axisOf("step", runs);
    await Promise.all(known.map(async ([name, each]) => each.draw(await Promise.all(runs.map((run, place) => curveOf(run, place, name))), axis, { log: false, smoothing: 0 })));
  }

  return { root, refresh, draw, focusSearch: () => {} };
}

/** What the runs have remarked, such as a reward that is a constant. */
function remarks(runs) {
  const lines = runs.flatMap((run, place) => run.hints.map((hint) =>
    element("p", {}, runs.length > 1 ? [element("strong", { class: `run${place % 6}` }, foreign(run.name)), " "] : null, foreign(hint))));
  return lines.length ? [element("div", { class: "remarks", role: "note" }, lines)] : [];
}

/** What a run was, and its main figures. */
function headline(run, place, summary, numRuns) {
  const isOne = numRuns === 1;
  return element("section", { class: "headline-of" },
    element("div", {},
      isOne ? null : element("h2", { class: `run${place % 6}` }, foreign(run.name)),
      isOne && summary.line ? element("p", { class: "soft" }, summary.line) : null,
      stats(summary.headline, isOne ? "figures headline" : "figures"),
      summary.notes.map((note) => element("p", { class: "soft" }, note))),
    isOne ? element("dl", { class: "about" }, Object.entries(run.about).map(([label, text]) => element("div", {}, element("dt", {}, label), element("dd", {}, foreign(text))))) : null);
}

function stats(all, name) {
  if (!all.length) return null;
  return element("dl", { class: name }, all.map(({ label, value, note }) =>
    element("div", {}, element("dt", {}, label), element("dd", {}, value), note ? element("dd", { class: "soft" }, note) : null)));
}

function machine(runs, summaries) {
  return summaries.flatMap((summary, place) => summary.machine.length
    ? [element("h2", {}, "Memory and throughput", runs.length > 1 ? [" of ", element("span", { class: `run${place % 6}` }, foreign(runs[place].name))] : null), stats(summary.machine, "figures")]
    : []);
}
