// A chart of one metric with a line per run. The line joins the means of the points; its band spans least and greatest values.

import { drawing, element } from "./dom.js";
import { logTicks, short, shown, ticks, whole } from "./numbers.js";

const HEIGHT = 150;
const MARGIN = { top: 8, right: 10, bottom: 20, left: 56 };
const LABEL_PX = 24; // half the width of the widest label of the x axis

/**
 * A chart; `draw(curves, axis, look)` takes a curve or null for each run, the x axis, and `{ log, smoothing }`.
 * `point(x)` marks a value of x, `onPoint` is called with the x under the mouse, `onPick` with the clicked step.
 */
export function chart(name, { onPoint, onPick }) {
  const value = element("output", {});
  const picture = drawing("svg", { class: "plot", height: HEIGHT, role: "img", tabindex: 0 });
  const root = element("figure", { class: "chart" }, element("figcaption", {}, element("bdi", {}, name), value), picture);
  let scale = null;
  let curves = [];
  let axis = null;
  let look = { log: false, smoothing: 0 };
  let pointed = null;

  function draw(newCurves, newAxis, newLook) {
    [axis, look] = [newAxis, newLook];
    curves = newCurves.map((curve, run) => curve && placed(curve, run, axis));
    redraw();
  }

  function redraw() {
    if (!axis) return;
    scale = scaleOf(curves, axis, look.log, picture.clientWidth || 320);
    const known = curves.find((curve) => curve);
    root.title = known ? [known.unit, known.meaning].filter(Boolean).join(": ") : "";
    picture.setAttribute("aria-label", `${name} by step, ${curves.map((curve) => shown(last(curve)?.mean ?? null)).join(" and ")} at the end`);
    picture.replaceChildren(...(scale ? [...axes(scale, axis), ...curves.flatMap((curve, run) => lines(curve, run, scale, look.smoothing))] : []));
    point(pointed);
  }

  function point(x) {
    pointed = x;
    picture.querySelectorAll(".pointed").forEach((node) => node.remove());
    const values = curves.map((curve) => (x === null ? last(curve) : nearest(curve, x)));
    value.replaceChildren(...values.map((at, run) => element("span", { class: `run${run % 6}` }, shown(at?.mean ?? null), x === null ? when(at, axis.lastSteps[run]) : "")));
    if (x === null || !scale) return;
    picture.append(drawing("line", { class: "pointed", x1: scale.x(x), x2: scale.x(x), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }));
    values.forEach((at, run) => {
      if (at && scale.has(at.mean)) picture.append(drawing("circle", { class: `pointed run${run % 6}`, cx: scale.x(at.x), cy: scale.y(at.mean), r: 3 }));
    });
  }

  /** Call `onPick` with the step at x; on an axis of time or tokens, with the step of the nearest point of a curve. */
  function pick(x) {
    onPick(axis.kind === "step" ? x : Math.round(nearest(curves.find((curve) => curve && curve.x.length), x).step));
  }

  const placeAt = (event) => scale && scale.place(event.clientX - picture.getBoundingClientRect().left);
  picture.addEventListener("pointermove", (event) => onPoint(placeAt(event)));
  picture.addEventListener("pointerleave", () => onPoint(null));
  picture.addEventListener("click", (event) => scale && pick(placeAt(event)));
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!scale || (!move && event.key !== "Enter")) return;
    event.preventDefault();
    event.stopPropagation();
    const x = pointed ?? axis.last;
    if (move) onPoint(Math.min(axis.last, Math.max(axis.first, x + move * scale.keyStep)));
    else pick(x);
  });
  new ResizeObserver(redraw).observe(picture);
  return { root, draw, point };
}

/** The curve with the x value of each point; without points if their x values are not known. */
function placed(curve, run, axis) {
  const x = curve.step.map((step) => axis.at(run, step));
  return { ...curve, x: x.some(Number.isNaN) ? [] : x };
}

/** The scales of a chart. All charts of a page share one x axis; a log scale leaves out values that are not above 0. */
function scaleOf(curves, axis, isLog, width) {
  const drawn = curves.filter((curve) => curve && curve.x.length);
  const has = (number) => !isLog || number > 0;
  const all = (name) => drawn.flatMap((curve) => (curve[name].length ? curve[name] : curve.mean)).filter(has);
  let [low, high] = [Math.min(...all("low"), ...all("mean")), Math.max(...all("high"))];
  if (low > high) return null; // no curve has a value
  if (low === high) [low, high] = isLog ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const [left, right] = [MARGIN.left, width - MARGIN.right];
  const [bottom, top] = [HEIGHT - MARGIN.bottom, MARGIN.top];
  const range = axis.last - axis.first || 1;
  const isSteps = axis.kind === "step";
  const share = isLog
    ? (number) => Math.log(Math.max(number, low) / low) / Math.log(high / low)
    : (number) => (number - low) / (high - low);
  const place = (x) => Math.min(axis.last, Math.max(axis.first, axis.first + ((x - left) / (right - left)) * range));
  return {
    low, high, left, right, isLog, has,
    keyStep: isSteps ? Math.max(1, Math.round(range / 50)) : range / 50,
    x: (at) => left + ((at - axis.first) / range) * (right - left),
    y: (number) => bottom + share(number) * (top - bottom),
    place: (x) => (isSteps ? Math.round(place(x)) : place(x)),
  };
}

function axes(scale, axis) {
  const rows = (scale.isLog ? logTicks(scale.low, scale.high) : ticks(scale.low, scale.high, 3)).map((number) => [
    drawing("line", { class: "grid", x1: scale.left, x2: scale.right, y1: scale.y(number), y2: scale.y(number) }),
    drawing("text", { x: scale.left - 6, y: scale.y(number) + 4, "text-anchor": "end" }, short(number)),
  ]);
  const places = axis.last > axis.first ? ticks(axis.first, axis.last, 3) : [axis.first];
  const below = places.filter((place) => axis.kind !== "step" || Number.isInteger(place)).map((place) => {
    const x = scale.x(place);
    return drawing("text", { class: "x", x: Math.min(x, scale.right), y: HEIGHT - 4, "text-anchor": x > scale.right - LABEL_PX ? "end" : "middle" }, axis.label(place));
  });
  return [...rows.flat(), ...below];
}

function lines(curve, run, scale, smoothing) {
  if (!curve || !curve.x.length) return [];
  const colour = `run${run % 6}`;
  const spans = spansOf(curve.step);
  const at = (values, places) => places.filter((place) => scale.has(curve.mean[place]))
    .map((place) => `${scale.x(curve.x[place]).toFixed(1)},${scale.y(values[place]).toFixed(1)}`);
  const line = (values, faded) => spans.map((places) => drawing("polyline", { class: `line ${colour}${faded}`, points: at(values, places).join(" ") }));
  const band = curve.low.length
    ? spans.map((places) => drawing("polygon", { class: `band ${colour}`, points: [...at(curve.high, places), ...at(curve.low, places).reverse()].join(" ") }))
    : [];
  const values = smoothing ? smoothed(curve.mean, smoothing) : curve.mean;
  const isFew = curve.x.length <= 30 && !smoothing;
  const dots = spans.filter((places) => isFew || places.length === 1).flatMap((places) => at(values, places))
    .map((pair) => drawing("circle", { class: colour, cx: pair.split(",")[0], cy: pair.split(",")[1], r: 2 }));
  return [...band, ...(smoothing ? line(curve.mean, " faded") : []), ...line(values, ""), ...dots];
}

/** Groups of points that are joined by a line: where a metric is missing at some steps, the line is interrupted. */
function spansOf(steps) {
  const widths = steps.slice(1).map((step, place) => step - steps[place]);
  const usual = [...widths].sort((one, other) => one - other)[Math.floor(widths.length / 2)];
  const spans = [[0]];
  widths.forEach((width, place) => (width >= 2 * usual ? spans.push([place + 1]) : spans[spans.length - 1].push(place + 1)));
  return spans;
}

/** The exponential moving average with bias correction; `weight` is the weight of the earlier values. */
function smoothed(values, weight) {
  let [sum, weights] = [0, 0];
  return values.map((value) => {
    [sum, weights] = [weight * sum + value, weight * weights + 1];
    return sum / weights;
  });
}

function last(curve) {
  return curve && curve.x.length ? pointOf(curve, curve.x.length - 1) : null;
}

/** The step of a value, if it is older than its run's newest step: not every metric is measured at every step. */
function when(at, lastStep) {
  const isOld = at && lastStep - at.step > lastStep / 100; // the last point may be a mean over several steps
  return isOld ? element("small", { class: "soft" }, ` at ${whole(at.step)}`) : "";
}

function nearest(curve, x) {
  if (!curve || !curve.x.length) return null;
  return pointOf(curve, curve.x.reduce((best, each, here) => (Math.abs(each - x) < Math.abs(curve.x[best] - x) ? here : best), 0));
}

function pointOf(curve, place) {
  return { x: curve.x[place], step: curve.step[place], mean: curve.mean[place] };
}
