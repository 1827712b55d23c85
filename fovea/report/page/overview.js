// The page that opens first: findings and hints of the runs, figures with intervals, the learning curve, time and memory.

import { goTo } from "./address.js";
import { axisOf } from "./axis.js";
import { chart } from "./chart.js";
import { curveOf } from "./curves.js";
import { element, foreign } from "./dom.js";
import { load } from "./source.js";
import { figureTables } from "./tables.js";

const LEARNING = ["reward", "accuracy/dev"];

/** The page; `refresh(runs)` updates the facts about the runs, `draw()` loads and shows the summaries. */
export function overviewPage() {
  const top = element("div", {});
  const bottom = element("div", {});
  const box = element("div", { class: "charts learning" });
  const root = element("section", { class: "page overview" }, top, box, bottom);
  const charts = new Map();
  let runs = [];
  let drawn = "";

  function onPoint(x) {
    for (const each of charts.values()) each.point(x);
  }

  /** Returns true if there is anything new. */
  async function refresh(newRuns) {
    const state = () => JSON.stringify(runs.map((run) => [run.step, run.finished, run.hints, run.findings]));
    const before = state();
    runs = newRuns;
    return before !== state();
  }

  async function draw() {
    const summaries = await Promise.all(runs.map((_, place) => load(`summary/${place}/0`)));
    const text = JSON.stringify([summaries, runs.map((run) => [run.hints, run.findings, run.about])]);
    if (text !== drawn) {
      drawn = text; // do not redraw at every poll what the user is reading
      top.replaceChildren(...remarks(runs), element("div", { class: "headlines" }, runs.map((run, place) => headline(run, place, summaries[place], runs.length))));
      bottom.replaceChildren(...figureTables(runs, summaries), ...machine(runs, summaries));
    }
    await drawCharts();
  }

  async function drawCharts() {
    const wanted = new Set([...LEARNING, ...runs.flatMap((run) => run.findings.map((finding) => finding.metric))]);
    const known = [...wanted].filter((name) => runs.some((run) => run.metrics.includes(name)));
    for (const name of known) if (!charts.has(name)) charts.set(name, chart(name, { onPoint, onPick: (step) => goTo("samples", { step, group: null }) }));
    const roots = known.map((name) => charts.get(name).root);
    if (roots.some((root, place) => box.children[place] !== root) || box.childElementCount !== roots.length) box.replaceChildren(...roots);
    const axis = await axisOf("step", runs);
    await Promise.all(known.map(async (name) => charts.get(name).draw(await Promise.all(runs.map((run, place) => curveOf(run, place, name))), axis, { log: false, smoothing: 0 })));
  }

  return { root, refresh, draw, focusSearch: () => {} };
}

/** The findings, which say why runs collapsed or do not learn, and the hints of the runs. */
function remarks(runs) {
  const lines = runs.flatMap((run, place) => [...run.findings.map(finding), ...run.hints.map(foreign)].map((line) =>
    element("p", {}, runs.length > 1 ? [element("strong", { class: `run${place % 6}` }, foreign(run.name)), " "] : null, line)));
  return lines.length ? [element("div", { class: "remarks", role: "note" }, lines)] : [];
}

/** A cause, its evidence and advice; names and values of settings are not trusted and shown as text. */
function finding({ cause, evidence, advice, settings }) {
  return [element("strong", {}, `${cause}: `), `${evidence}. ${advice} `, element("code", {}, foreign(settings))];
}

/** The description of a run, and its main figures. */
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
