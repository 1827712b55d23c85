// The page of curves: an overview, all metrics grouped by their first word, and a search.

import { goTo, numberOf, readAddress } from "./address.js";
import { AXES, axisOf } from "./axis.js";
import { chart } from "./chart.js";
import { element } from "./dom.js";
import { load } from "./source.js";

const OVERVIEW = [
  "reward", "accuracy/dev", "groups/without_signal_frac", "response_tokens_mean", "truncated_frac", "entropy", "mismatch/kl",
  "kl/reference", "kl/reward", "grad_norm", "explained_variance", "seconds/step", "tokens_per_second",
];
const MAX_PARTS = 6;
const MAX_FOUND = 30;
const MAX_SMOOTHING = 0.99;

/** The page; `refresh(runs)` updates the facts about the runs, `draw()` loads and draws the open charts. */
export function curvesPage() {
  const charts = new Map(); // by title and name: a metric has one chart in the overview and another in its section
  const opened = new Set(["Overview"]);
  const found = element("div", { class: "charts" });
  const sections = element("div", {});
  const search = element("input", { type: "search", id: "search", placeholder: "metric", "aria-label": "Search metrics", input: () => fill() });
  const xChoice = element("select", { id: "x", change: () => goTo("curves", { x: xChoice.value }) },
    Object.entries(AXES).map(([kind, label]) => element("option", { value: kind }, label)));
  const smoothing = element("input", { type: "range", id: "smooth", min: 0, max: MAX_SMOOTHING, step: 0.01, change: () => goTo("curves", { smooth: Number(smoothing.value) || null }) });
  const log = element("input", { type: "checkbox", id: "log", change: () => goTo("curves", { log: log.checked ? 1 : null }) });
  const steps = element("span", { class: "soft", id: "pointed" });
  const bar = element("div", { class: "toolbar" }, search, element("label", {}, "x ", xChoice),
    element("label", {}, "smoothing ", smoothing), element("label", {}, log, " log scale"), steps);
  const root = element("section", { class: "page" }, bar, found, sections);
  let runs = [];
  let names = "";
  let axis = null;
  addEventListener("hashchange", () => onPoint(null)); // a chart that is removed from the page gets no event when the mouse leaves it

  function metrics() {
    return [...new Set(runs.flatMap((run) => run.metrics))];
  }

  /** Metrics that equal another metric, or are only rounding errors, in every run that has them. */
  function leftOut() {
    const having = (name) => runs.filter((run) => run.metrics.includes(name));
    const outOf = (run) => [...run.repeats, ...run.rounding];
    return runs.flatMap(outOf).filter((name) => having(name).every((run) => outOf(run).includes(name)));
  }

  function chartOf(title, name) {
    const key = `${title}\n${name}`;
    if (!charts.has(key)) {
      const made = chart(name, { onPoint, onPick: (step) => goTo("samples", { step, group: null }) });
      charts.set(key, { name, timesAsked: 0, ...made });
    }
    return charts.get(key);
  }

  function onPoint(x) {
    steps.textContent = x === null ? "" : axis.named(x);
    for (const each of charts.values()) if (each.root.isConnected) each.point(x);
  }

  function put(box, title, wanted) {
    box.replaceChildren(...wanted.map((name) => chartOf(title, name).root));
    draw();
  }

  function fill() {
    const text = search.value.trim().toLowerCase();
    const matching = text ? metrics().filter((name) => name.toLowerCase().includes(text)) : [];
    sections.hidden = Boolean(text);
    sections.replaceChildren(...(text ? [] : sectionsOf(metrics(), leftOut(), opened, put)));
    put(found, "found", matching.slice(0, MAX_FOUND));
    if (text && !matching.length) found.replaceChildren(element("p", { class: "soft" }, "No metric has that in its name."));
  }

  async function draw() {
    const { parameters } = readAddress();
    const kind = parameters.get("x") in AXES ? parameters.get("x") : "step";
    const look = { log: parameters.has("log"), smoothing: Math.min(MAX_SMOOTHING, Math.max(0, numberOf(parameters, "smooth") ?? 0)) };
    [xChoice.value, smoothing.value, log.checked] = [kind, look.smoothing, look.log];
    const newAxis = axisOf(kind, runs);
    const open = [...charts.values()].filter((each) => each.root.checkVisibility());
    await Promise.all(open.map((each) => drawOne(each, newAxis, look)));
  }

  async function drawOne(each, newAxis, look) {
    const time = ++each.timesAsked;
    const [ofAll, ...curves] = await Promise.all([newAxis, ...runs.map((run, place) => curveOf(run, place, each.name))]);
    if (time !== each.timesAsked) return; // a newer call is loading these curves
    axis = ofAll;
    each.draw(curves, axis, look);
  }

  /** Returns true if there is anything new to draw. */
  async function refresh(newRuns) {
    const before = JSON.stringify(runs.map((run) => run.step));
    runs = newRuns;
    const newNames = [...metrics(), "", ...leftOut()].join("\n");
    if (newNames !== names) {
      names = newNames;
      fill();
    }
    if (!metrics().length) found.replaceChildren(element("p", { class: "soft" }, "No step has been taken yet."));
    return before !== JSON.stringify(runs.map((run) => run.step));
  }

  return { root, refresh, draw, focusSearch: () => search.focus() };
}

/** The curve of a metric of a run; null if the run does not have this metric. */
export async function curveOf(run, place, name) {
  const number = run.metrics.indexOf(name);
  if (number < 0) return null;
  const curve = await load(`curve/${place}/${number}`);
  return curve.name === name ? curve : null; // after a restart of the run its metrics have other numbers
}

/** The sections of these metrics; the overview has no metric that is in `leftOut`. `opened` holds the titles of the open sections and is kept up to date. */
function sectionsOf(names, leftOut, opened, put) {
  const shown = names.filter((name) => !leftOut.includes(name));
  const parts = shown.filter((name) => /^reward\/[^/]+$/.test(name)).slice(0, MAX_PARTS);
  const overview = [...OVERVIEW.slice(0, 2), ...parts, ...OVERVIEW.slice(2)].filter((name) => shown.includes(name));
  const groups = byFirstWord(names);
  return [
    section("Overview", overview, opened, put),
    ...[...groups.keys()].filter(Boolean).sort().map((word) => section(word, groups.get(word), opened, put)),
    ...(groups.has("") ? [section("other names", groups.get(""), opened, put)] : []),
  ];
}

function section(title, names, opened, put) {
  const box = element("div", { class: "charts" });
  const root = element("details", { class: "metrics", toggle },
    element("summary", {}, element("bdi", {}, title), element("span", { class: "soft" }, ` ${names.length}`)), box);
  root.open = opened.has(title) && names.length > 0;
  return root;

  function toggle() {
    if (!root.open) return void opened.delete(title);
    opened.add(title);
    put(box, title, names); // also for a section that was open before: charts in closed sections are not drawn
  }
}

function byFirstWord(names) {
  const groups = new Map();
  for (const name of names) {
    const word = name.includes("/") ? name.split("/")[0] : "";
    groups.set(word, [...(groups.get(word) ?? []), name]);
  }
  const alone = [...groups].filter(([word, of]) => word && of.length === 1);
  for (const [word, of] of alone) {
    groups.delete(word);
    groups.set("", [...(groups.get("") ?? []), ...of]);
  }
  return groups;
}
