// Tables of figures with intervals; tables of several runs with the same title are shown side by side.

import { drawing, element, foreign } from "./dom.js";
import { whole } from "./numbers.js";

const LANE_PX = 16; // height of one run's bar
const LONG = 30; // cells with more characters are text, and wrap

/** The tables of all runs, by title; `summaries` holds one summary per run. */
export function figureTables(runs, summaries) {
  const titles = [...new Set(summaries.flatMap((summary) => summary.tables.map(({ title }) => title)))];
  return titles.map((title) => {
    const sides = summaries.map((summary, place) => ({ run: runs[place], place, table: summary.tables.find((each) => each.title === title) }))
      .filter(({ table }) => table);
    return element("section", { class: "figures-table" }, element("h2", {}, title), element("div", { class: "scroll" }, tableOf(sides, runs.length > 1)));
  });
}

function tableOf(sides, areNamed) {
  const names = [...new Set(sides.flatMap(({ table }) => table.rows.map(({ name }) => name)))];
  const lines = names.map((name) => ({ name, rows: sides.map(({ table }) => table.rows.find((row) => row.name === name)) }));
  const hasBars = lines.some(({ rows }) => rows.some((row) => row?.bar));
  const hasNumbers = lines.some(({ rows }) => rows.some((row) => row && row.n !== null));
  const columns = sides.flatMap(({ table }) => table.columns);
  const last = (inLast) => [hasNumbers && element("th", {}, inLast ? "n" : ""), hasBars && element("th", { class: "chart" })];
  const hasColumns = !areNamed || columns.some(Boolean);
  const ofRuns = element("tr", {}, element("th", {}, hasColumns ? "" : sides[0].table.first), sides.map(({ run, place, table }) =>
    element("th", { colspan: table.columns.length, class: `run${place % 6}` }, foreign(run.name))), last(!hasColumns));
  const ofColumns = element("tr", {}, element("th", {}, sides[0].table.first), columns.map((each) => element("th", {}, each)), last(true));
  return element("table", { class: areNamed ? "several" : null },
    element("thead", {}, areNamed ? ofRuns : null, hasColumns ? ofColumns : null),
    element("tbody", {}, lines.map((each) => line(each, sides, hasNumbers, hasBars))));
}

function line({ name, rows }, sides, hasNumbers, hasBars) {
  const cells = sides.map(({ table }, side) => table.columns.map((_, place) => element("td", { class: rows[side]?.texts[place]?.length > LONG ? "long" : null }, rows[side]?.texts[place] ?? "")));
  return element("tr", { class: name === "all" ? "total" : null }, element("td", {}, foreign(name)), cells,
    hasNumbers && element("td", {}, numbersOf(rows)), hasBars && element("td", { class: "chart" }, bars(rows, sides)));
}

/** The numbers of rows that figures are computed from, written once if all are equal. */
function numbersOf(rows) {
  return [...new Set(rows.filter((row) => row && row.n !== null).map((row) => whole(row.n)))].join(" / ");
}

/** A lane for each run: the interval as a bar, the mean as a dot, and a paler dot for the stage before. */
function bars(rows, sides) {
  if (!rows.some((row) => row?.bar)) return null;
  const height = Math.max(1.1, sides.length * 0.7) * LANE_PX;
  const lane = height / sides.length;
  return drawing("svg", { height, "aria-hidden": "true" }, rows.map((row, side) => {
    if (!row?.bar) return null;
    const [low, mean, high] = row.bar;
    const [top, middle] = [side * lane, (side + 0.5) * lane];
    const place = sides[side].place;
    const group = (...parts) => drawing("g", { class: `run${place % 6}` }, parts);
    if (low === 0 && mean === high) return group(drawing("rect", { class: "bar", x: 0, y: top + lane * 0.2, width: percent(mean), height: lane * 0.6 }));
    return group(
      drawing("rect", { class: "rail", x: 0, y: middle - 1, width: "100%", height: 2 }),
      drawing("rect", { class: "span", x: percent(low), y: top + lane * 0.2, width: percent(high - low), height: lane * 0.6 }),
      row.before === null ? null : drawing("circle", { class: "from", cx: percent(row.before), cy: middle, r: 3 }),
      drawing("circle", { class: "to", cx: percent(mean), cy: middle, r: 4 }));
  }));
}

function percent(share) {
  return `${(100 * share).toFixed(2)}%`;
}
