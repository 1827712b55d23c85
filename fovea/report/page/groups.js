// The index of each run's groups: loaded once, after that only its new entries are.

import { load } from "./source.js";

/** The groups of one run, sorted by step and place. */
export function groupIndex(run) {
  const steps = new Map();
  let read = 0;
  let rows = [];

  /** Load the entries that the run has written since the last call; returns true if there were any. */
  async function refresh(total) {
    if (total <= read) return false;
    const first = read;
    const loaded = await load(`entries/${run}/${first}`);
    const entries = loaded.slice(read - first); // a key press may have loaded some of them during a poll
    read += entries.length;
    for (const [step, groups] of entries) steps.set(step, groups); // a repeated step has a later entry, which wins
    rows = [...steps.keys()].sort((one, other) => one - other).flatMap((step) => steps.get(step).map((group, place) => rowOf(step, place, group)));
    return entries.length > 0;
  }

  return { refresh, rows: () => rows };
}

function rowOf(step, place, group) {
  // by index: destructuring is slow, and a long run has tens of thousands of groups
  return { step, place, kind: group[0], row: group[1], mean: group[2], low: group[3], high: group[4], truncated: group[5], answers: group[6] };
}

/** The index of the first row with at least this step, by binary search in the sorted rows; `rows.length` if there is none. */
export function firstFrom(rows, step) {
  let [low, high] = [0, rows.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle].step < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The group of the same row at the nearest step; undefined if there is none. */
export function sameRow(rows, row, step) {
  const same = rows.filter((each) => each.row === row);
  return same.sort((one, other) => Math.abs(one.step - step) - Math.abs(other.step - step))[0];
}

/** The steps that have groups. */
export function stepsOf(rows) {
  return [...new Set(rows.map((row) => row.step))];
}
