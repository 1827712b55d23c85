// The head of the overview: remarks of the runs, and their final figures on held-out rows.

import { element, foreign } from "./dom.js";

/** What the runs have remarked, such as a reward that is a constant. */
export function remarks(runs) {
  const lines = runs.flatMap((run, place) => run.hints.map((hint) =>
    element("p", {}, runs.length > 1 ? [element("strong", { class: `run${place % 6}` }, foreign(run.name)), " "] : null, foreign(hint))));
  return lines.length ? [element("div", { class: "remarks", role: "note" }, lines)] : [];
}

/** The table of all runs that have ended, a column for each stage of each. */
export function finalTable(runs) {
  const ended = runs.map((run, place) => ({ run, place, table: run.held_out })).filter(({ table }) => table);
  if (!ended.length) return [];
  const names = [...new Set(ended.flatMap(({ table }) => table.rows.map(([name]) => name)))];
  const ofRuns = element("tr", {}, element("th", {}), ended.map(({ run, place, table }) =>
    element("th", { colspan: table.columns.length + 1, class: `run${place % 6}` }, foreign(run.name))));
  const stages = element("tr", {}, element("th", {}, "mean"), ended.map(({ table }) => [...table.columns, "n"].map((each) => element("th", {}, each))));
  const cells = (table, name) => {
    const [, texts, n] = table.rows.find(([each]) => each === name) ?? [name, table.columns.map(() => ""), ""];
    return [...texts, n].map((text) => element("td", {}, text));
  };
  const controls = ended.flatMap(({ run, table }) => Object.entries(table.controls).map(([name, percent]) => [ended.length > 1 ? [foreign(run.name), ", "] : null, `${name}: ${percent}\u00a0%`]));
  const notScored = ended.filter(({ table }) => table.not_scored).map(({ run, table }) =>
    element("p", { class: "soft" }, ended.length > 1 ? [foreign(run.name), ": "] : null, table.not_scored));
  return [element("details", { class: "metrics", open: true, id: "final" }, element("summary", {}, "Held-out rows, with 95 % intervals"),
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, runs.length > 1 ? ofRuns : null, stages),
      element("tbody", {}, names.map((name) => element("tr", {}, element("td", {}, foreign(name)), ended.map(({ table }) => cells(table, name))))))),
    controls.length ? element("p", { class: "soft" }, "Accuracy after RL without the true image: ", controls.flatMap((each, place) => [place ? "; " : "", each]), ".") : null,
    notScored)];
}
