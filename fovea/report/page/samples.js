// The page of samples: the list of groups that pass the filter, and the chosen group next to the same row in other runs.

import { goTo, numberOf, readAddress } from "./address.js";
import { element, foreign } from "./dom.js";
import { filterBar, filtered } from "./filters.js";
import { groupView } from "./group.js";
import { firstFrom, groupIndex, sameRow, stepsOf } from "./groups.js";
import { HEATS, scaleOf } from "./heat.js";
import { longList } from "./list.js";
import { shown, whole } from "./numbers.js";
import { isExported, load } from "./source.js";

/** The page; `refresh(runs)` loads new index entries, `draw()` shows the group that the address names. */
export function samplesPage() {
  const bar = filterBar();
  const runChoice = element("select", { change: () => goTo("samples", { run: runChoice.value, step: null, group: null }) });
  const heatChoice = element("select", { id: "heat", change: () => goTo("samples", { heat: heatChoice.value }) },
    HEATS.map((heat) => element("option", { value: heat }, { none: "plain", advantage: "advantage", mismatch: "engine/trainer mismatch" }[heat])));
  const follow = element("input", { type: "checkbox", change: () => (follow.checked ? goTo("samples", { step: null, group: null }) : move(0)) });
  const rowsOfRun = element("label", {}, "rows of ", runChoice);
  bar.root.append(element("label", {}, "tokens ", heatChoice), rowsOfRun, isExported ? "" : element("label", {}, follow, " follow the newest"));
  const heads = ["step", "type", "mean reward"].map((text) => element("span", {}, text));
  const list = longList("Groups", { address: addressOf, content: listed, heads });
  const count = element("p", { class: "soft" });
  const leftOut = element("p", { class: "soft" });
  const truncation = element("p", { class: "soft" }, element("span", { class: "truncated" }, "…"), " has truncated answers");
  const shownGroups = element("div", { class: "side-by-side" });
  const root = element("section", { class: "page samples" }, bar.root,
    element("div", { class: "columns" }, element("nav", { "aria-label": "Groups" }, count, truncation, leftOut, list.root), shownGroups));
  const indexes = [];
  const early = new Map(); // the newest step of each run, by path: it is requested while the index is still loading
  let runs = [];
  let drawn = "";

  /** Returns true if there is anything new. */
  async function refresh(newRuns) {
    runs = newRuns;
    if (!indexes.length) runs.forEach(loadEarly);
    const changed = await Promise.all(runs.map((run, place) => (indexes[place] ??= groupIndex(place)).refresh(run.entries)));
    return changed.some(Boolean);
  }

  function loadEarly(run, place) {
    if (run.newest_entry === null || readAddress().parameters.has("step")) return;
    const path = `step/${place}/${run.newest_entry}`;
    early.set(path, load(path).catch(() => null)); // `draw` asks again and shows the error
  }

  /** The listed rows, and the index of the chosen one among them. */
  function state() {
    const { parameters } = readAddress();
    const run = Math.min(runs.length - 1, numberOf(parameters, "run") ?? 0);
    const rows = indexes[run]?.rows() ?? [];
    const passing = filtered(rows, parameters);
    return { parameters, run, rows, passing, chosen: chosenOf(passing, parameters) };
  }

  async function draw() {
    const { parameters, run, rows, passing, chosen } = state();
    const heat = heatOf(parameters);
    bar.draw(rows, parameters);
    rowsOfRun.hidden = runs.length < 2;
    if (!runChoice.length) runChoice.append(...runs.map((each, place) => element("option", { value: place }, each.name)));
    [runChoice.value, heatChoice.value, follow.checked] = [run, heat, !parameters.has("step")];
    count.textContent = `${whole(passing.length)} of ${whole(rows.length)} groups`;
    leftOut.textContent = runs[run]?.left_out ?? "";
    list.show(passing, chosen);
    truncation.hidden = !passing.some((row) => row.truncated);
    const wanted = chosen < 0 ? [] : sides(run, passing[chosen]);
    const key = JSON.stringify([heat, rows.length > 0, wanted]);
    if (key === drawn) return; // do not redraw at every poll what the user is reading
    drawn = key;
    const found = await Promise.all(wanted.map(([place, row]) => groupOf(place, row)));
    early.clear(); // a step that is repeated has other groups
    if (key !== drawn) return; // the user has chosen something else meanwhile
    const scale = scaleOf(found.flatMap(({ group }) => group?.answers ?? []), heat); // one scale for all runs, so that colours can be compared
    shownGroups.replaceChildren(...(wanted.length ? found.map((each) => viewOf(each, heat, scale)) : [nothing(rows)]));
    if (found.some(({ problem }) => problem)) drawn = ""; // the next draw tries again
  }

  /** The chosen group and the same row in each other run, in the order of the runs. */
  function sides(run, row) {
    const others = runs.map((_, place) => place).filter((place) => place !== run);
    return [[run, row], ...others.map((place) => [place, sameRow(indexes[place].rows(), row.row, row.step)])].sort(([one], [other]) => one - other);
  }

  async function groupOf(place, row) {
    if (!row) return { place };
    try {
      const path = `step/${place}/${row.step}`;
      const { groups } = (await early.get(path)) ?? (await load(path));
      return { place, row, group: groups[row.place] };
    } catch (error) {
      return { place, problem: error.message };
    }
  }

  function viewOf({ place, row, group, problem }, heat, scale) {
    const title = runs.length > 1 ? runs[place].name : "";
    if (group) return groupView(place, runs[place], row.step, row.place, group, { heat, scale, title });
    const text = problem
      ? element("p", { class: "problem" }, problem)
      : element("p", { class: "soft" }, foreign(title), ": this row is in none of its recorded steps.");
    return element("article", { class: "group text-only" }, text);
  }

  function choose(row) {
    if (row) goTo("samples", { step: row.step, group: row.place });
  }

  function move(by) {
    const { passing, chosen } = state();
    choose(passing[Math.min(passing.length - 1, Math.max(0, chosen + by))]);
  }

  function moveStep(by) {
    const { passing, chosen } = state();
    const steps = stepsOf(passing);
    const step = steps[steps.indexOf(passing[chosen]?.step) + by];
    choose(passing.find((row) => row.step === step));
  }

  function nextHeat() {
    goTo("samples", { heat: HEATS[(HEATS.indexOf(heatOf(readAddress().parameters)) + 1) % HEATS.length] });
  }

  return { root, refresh, draw, move, moveStep, nextHeat, focusSearch: bar.focus };
}

/** The index of the chosen row: the row that the address names, else the first of its step, the nearest step with rows, or the newest step. */
function chosenOf(passing, parameters) {
  if (!passing.length) return -1;
  const step = numberOf(parameters, "step") ?? passing[passing.length - 1].step;
  const place = numberOf(parameters, "group");
  const from = firstFrom(passing, step);
  for (let exact = from; passing[exact]?.step === step; exact++) if (passing[exact].place === place) return exact;
  const isEarlierNearest = from === passing.length || (from > 0 && step - passing[from - 1].step <= passing[from].step - step);
  return isEarlierNearest ? firstFrom(passing, passing[from - 1].step) : from;
}

function heatOf(parameters) {
  const heat = parameters.get("heat");
  return HEATS.includes(heat) ? heat : "none";
}

function listed(row) {
  return [
    element("span", {}, whole(row.step)), foreign(row.kind),
    element("span", { class: "reward", title: `rewards from ${shown(row.low)} to ${shown(row.high)}` }, shown(row.mean)),
    row.truncated ? element("span", { class: "truncated", title: `${row.truncated} of ${row.answers} answers truncated` }, "…") : null,
  ];
}

function addressOf(row) {
  const { parameters } = readAddress();
  parameters.set("step", row.step);
  parameters.set("group", row.place);
  return `#samples?${parameters}`;
}

function nothing(rows) {
  const text = rows.length ? "No group passes the filter." : "No step has been recorded yet: log.samples_every_steps sets how often one is.";
  return element("article", { class: "group text-only" }, element("p", { class: "soft" }, text));
}
