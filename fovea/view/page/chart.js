// One metric by step, a line per run. The mean of each point is the line, least and greatest value are its band.

import { drawing, element } from "./dom.js";
import { shown, ticks, whole } from "./numbers.js";

const HEIGHT = 150;
const MARGIN = { top: 8, right: 10, bottom: 20, left: 56 };

/** A chart; `draw(curves, lastSteps)` takes one curve per run or null and the newest step of each, `point(step)` marks a step, `onPoint` and `onPick` get one. */
export function chart(name, { onPoint, onPick }) {
  const value = element("output", {});
  const picture = drawing("svg", { class: "plot", height: HEIGHT, role: "img", tabindex: 0 });
  const root = element("figure", { class: "chart" }, element("figcaption", {}, element("bdi", {}, name), value), picture);
  let scale = null;
  let curves = [];
  let pointed = null;
  let lastSteps = [1];

  function draw(newCurves, newLastSteps) {
    [curves, lastSteps] = [newCurves, newLastSteps];
    scale = scaleOf(curves, Math.max(...lastSteps), picture.clientWidth || 320);
    const known = curves.find((curve) => curve);
    root.title = known ? [known.unit, known.meaning].filter(Boolean).join(": ") : "";
    picture.setAttribute("aria-label", `${name} by step, ${curves.map((curve) => shown(last(curve)?.mean ?? null)).join(" and ")} at the end`);
    picture.replaceChildren(...(scale ? [...axes(scale), ...curves.flatMap((curve, run) => lines(curve, run, scale))] : []));
    point(pointed);
  }

  function point(step) {
    pointed = step;
    picture.querySelectorAll(".pointed").forEach((node) => node.remove());
    const values = curves.map((curve) => (step === null ? last(curve) : nearest(curve, step)));
    value.replaceChildren(...values.map((at, run) => element("span", { class: `run${run % 6}` }, shown(at?.mean ?? null), step === null ? when(at, lastSteps[run]) : "")));
    if (step === null || !scale) return;
    picture.append(drawing("line", { class: "pointed", x1: scale.x(step), x2: scale.x(step), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    curves.forEach((curve, run) => {
      const at = nearest(curve, step);
      if (at) picture.append(drawing("circle", { class: `pointed run${run % 6}`, cx: scale.x(at.step), cy: scale.y(at.mean), r: 3 }));
    });
  }

  const stepAt = (event) => scale && scale.step(event.clientX - picture.getBoundingClientRect().left);
  picture.addEventListener("pointermove", (event) => onPoint(stepAt(event)));
  picture.addEventListener("pointerleave", () => onPoint(null));
  picture.addEventListener("click", (event) => scale && onPick(stepAt(event)));
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!scale || (!move && event.key !== "Enter")) return;
    event.preventDefault();
    event.stopPropagation();
    const step = pointed ?? scale.lastStep;
    if (move) onPoint(Math.min(scale.lastStep, Math.max(scale.firstStep, step + move * scale.keyStep)));
    else onPick(step);
  });
  new ResizeObserver(() => draw(curves, lastSteps)).observe(picture);
  return { root, draw, point };
}

/** All charts of a page have the steps from 1 to the last one of its runs. */
function scaleOf(curves, lastStep, width) {
  const drawn = curves.filter((curve) => curve && curve.step.length);
  if (!drawn.length) return null;
  const all = (name) => drawn.flatMap((curve) => (curve[name].length ? curve[name] : curve.mean));
  const firstStep = 1;
  let [low, high] = [Math.min(...all("low")), Math.max(...all("high"))];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  const [bottom, top] = [HEIGHT - MARGIN.bottom, MARGIN.top];
  const steps = Math.max(1, lastStep - firstStep);
  return {
    firstStep, lastStep, low, high, left, right,
    keyStep: Math.max(1, Math.round(steps / 50)),
    x: (step) => left + ((step - firstStep) / steps) * (right - left),
    y: (number) => bottom + ((number - low) / (high - low)) * (top - bottom),
    step: (x) => Math.round(Math.min(lastStep, Math.max(firstStep, firstStep + ((x - left) / (right - left)) * steps))),
  };
}

function axes(scale) {
  const rows = ticks(scale.low, scale.high, 5).map((number) => [
    drawing("line", { class: "grid", x1: scale.left, x2: scale.right, y1: scale.y(number), y2: scale.y(number) }),
    drawing("text", { x: scale.left - 6, y: scale.y(number) + 4, "text-anchor": "end" }, shown(number)),
  ]);
  const whereSteps = scale.lastStep > scale.firstStep ? ticks(scale.firstStep, scale.lastStep, 4) : [scale.firstStep];
  const steps = whereSteps.filter(Number.isInteger).map((step) =>
    drawing("text", { x: scale.x(step), y: HEIGHT - 4, "text-anchor": "middle" }, whole(step)));
  return [...rows.flat(), ...steps];
}

function lines(curve, run, scale) {
  if (!curve || !curve.step.length) return [];
  const at = (values) => values.map((number, place) => `${scale.x(curve.step[place]).toFixed(1)},${scale.y(number).toFixed(1)}`);
  const colour = `run${run % 6}`;
  const band = curve.low.length
    ? [drawing("polygon", { class: `band ${colour}`, points: [...at(curve.high), ...at(curve.low).reverse()].join(" ") })]
    : [];
  const few = curve.step.length <= 30
    ? at(curve.mean).map((pair) => drawing("circle", { class: colour, cx: pair.split(",")[0], cy: pair.split(",")[1], r: 2 }))
    : [];
  return [...band, drawing("polyline", { class: `line ${colour}`, points: at(curve.mean).join(" ") }), ...few];
}

function last(curve) {
  return curve && curve.mean.length ? { step: curve.step[curve.step.length - 1], mean: curve.mean[curve.mean.length - 1] } : null;
}

/** The step of a value that is not of its run's newest one: not every metric is measured in every step. */
function when(at, lastStep) {
  const isOld = at && lastStep - at.step > lastStep / 100; // the last of many points is a mean of several steps
  return isOld ? element("small", { class: "soft" }, ` at ${whole(at.step)}`) : "";
}

function nearest(curve, step) {
  if (!curve || !curve.step.length) return null;
  const place = curve.step.reduce((best, each, here) => (Math.abs(each - step) < Math.abs(curve.step[best] - step) ? here : best), 0);
  return { step: curve.step[place], mean: curve.mean[place] };
}
