// Colours tokens by a value: blue above zero and orange below, stronger the further away from zero.

import { element } from "./dom.js";
import { shown, signed } from "./numbers.js";

export const HEATS = ["none", "advantage", "mismatch"];
const SMALLEST_MISMATCH = 0.01; // nats; smaller ones are only rounding and should stay pale

/** The values of a heat for recorded tokens [T], null if not finite; empty if the run has not recorded them. */
export function valuesOf(tokens, heat) {
  if (heat === "advantage") return tokens.advantages;
  if (heat === "mismatch") return !tokens.engine_logprobs.length ? [] : tokens.trainer_logprobs.map((logprob, place) => mismatchOf(logprob, tokens.engine_logprobs[place]));
  return [];
}

/** The trainer's log-prob minus the engine's; null if either of them is not finite, which JSON stores as null. */
function mismatchOf(trainer, engine) {
  return trainer === null || engine === null ? null : trainer - engine;
}

/** The value at which colours are strongest: the greatest absolute value in these answers. */
export function scaleOf(answers, heat) {
  const all = answers.flatMap((answer) => answer.turns).flatMap((turn) => (turn.tokens ? valuesOf(turn.tokens, heat) : []));
  const greatest = all.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  return heat === "mismatch" && all.length ? Math.max(greatest, SMALLEST_MISMATCH) : greatest;
}

/** The recorded tokens of a turn, in colour; `onToken` is called with the facts about the token under the mouse. */
export function heated(tokens, heat, scale, onToken) {
  const values = valuesOf(tokens, heat);
  const spans = tokens.pieces.map((piece, place) => tokenSpan(piece, values[place], scale, place));
  const read = (event) => {
    const place = event.target.dataset.place;
    if (place !== undefined) onToken(facts(tokens, Number(place)));
  };
  return element("div", { class: "words tokens", dir: "auto", pointerover: read, click: read }, spans);
}

/** A sentence that explains the colours of a group. */
export function legend(heat, scale) {
  if (!scale) return heat === "mismatch" ? "No log-probs of the trainer were recorded." : "All advantages are 0, or none were recorded.";
  const meaning = heat === "mismatch" ? "the trainer's log-prob minus the engine's" : "the advantage";
  return `Blue above 0, orange below: ${meaning}, strongest at ±${shown(scale)}. Point at a token.`;
}

function tokenSpan(piece, value, scale, place) {
  const span = element("span", { class: `token ${value < 0 ? "below" : "above"}`, "data-place": place }, piece);
  if (value && scale) span.style.setProperty("--heat", `${Math.round((100 * Math.abs(value)) / scale)}%`);
  return span;
}

function facts(tokens, place) {
  const [engine, trainer, advantage] = [tokens.engine_logprobs[place], tokens.trainer_logprobs[place], tokens.advantages[place]];
  const pieces = [`${JSON.stringify(tokens.pieces[place])}`];
  if (engine !== undefined) pieces.push(`log-prob ${shown(engine)} engine`);
  if (trainer !== undefined) pieces.push(`${shown(trainer)} trainer`);
  if (engine !== undefined && trainer !== undefined) pieces.push(`mismatch ${signed(mismatchOf(trainer, engine))}`);
  if (advantage !== undefined) pieces.push(`advantage ${signed(advantage)}`);
  return pieces.join(" · ");
}
