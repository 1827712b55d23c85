// The x axis of all charts: steps, or the time or the tokens that a run has used up to a step.

import { short, whole } from "./numbers.js";
import { load } from "./source.js";

export const AXES = { step: "step", seconds: "time", tokens: "tokens" };
const UNITS = [[7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]]; // [used from this many seconds, seconds per unit, unit]

/** The axis of this kind for some runs: its `first` and `last` value, `at(run, step)`, and labels of its values. */
export async function axisOf(kind, runs) {
  const lastSteps = runs.map((run) => run.step);
  if (kind === "step") {
    return { kind, first: 1, last: Math.max(1, ...lastSteps), lastSteps, at: (_, step) => step, label: short, named: (step) => `step ${whole(step)}` };
  }
  const totals = await Promise.all(runs.map((_, run) => load(`totals/${run}/${kind === "seconds" ? 0 : 1}`)));
  const most = Math.max(0, ...totals.flatMap(({ total }) => total.slice(-1)));
  const [, divisor, unit] = kind === "seconds" ? UNITS.find(([from]) => most >= from) : [0, 1, ""];
  const label = (x) => `${short(x)}${unit && ` ${unit}`}`;
  return {
    kind, first: 0, last: most / divisor || 1, lastSteps, label,
    at: (run, step) => between(totals[run], step) / divisor,
    named: (x) => (unit ? label(x) : `${label(x)} tokens`),
  };
}

/** The total at a step, interpolated linearly between known totals; NaN if there are none. */
function between({ step: steps, total }, step) {
  if (!steps.length) return NaN;
  const after = steps.findIndex((each) => each >= step);
  if (after < 0) return total[total.length - 1];
  if (after === 0) return total[0];
  const share = (step - steps[after - 1]) / (steps[after] - steps[after - 1]);
  return total[after - 1] + share * (total[after] - total[after - 1]);
}
