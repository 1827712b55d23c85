// One answer of a group: its score and its turns, as a conversation with the images and results that the environment added.

import { element, foreign, words } from "./dom.js";
import { heated } from "./heat.js";
import { picture } from "./marks.js";
import { shown, signed, whole } from "./numbers.js";

export const RIGHT = 0.5; // least accuracy of a correct answer, as in the reports
const ENDS = { max_turns: "ended at the limit of turns", max_tokens: "ended at the limit of tokens" };

/** The card of an answer. `firstImage` is the number of the first image after the prompt; `label` is shown before the figures. */
export function answerCard(run, answer, number, { heat, scale, firstImage, onToken, repeats, label }) {
  const { turns } = answer;
  const marks = answer.marks.map((mark) => [number, mark]);
  let image = firstImage;
  const pictureWithMarks = (part) => {
    const place = image++;
    return picture(run, part, place, marks.filter(([, mark]) => mark.image === place));
  };
  const shownTurns = turns.map((turn, place) => element("div", { class: "turn" },
    turn.messages.map((message, of) => observation(message, of ? 0 : turn.seconds, pictureWithMarks)),
    turns.length > 1 ? turnLine(turn, place + 1) : null,
    turnText(turn, heat, scale, onToken)));
  return element("li", { class: `answer${answer.accuracy >= RIGHT ? " right" : ""}`, "data-answer": number, tabindex: -1 },
    scoreLine(answer, label, turns, repeats), shownTurns);
}

/** A message of the environment, such as a tool's result, with its pictures; `seconds` is the time of the reply, shown from 0.1 s on. */
function observation(message, seconds, pictureOf) {
  const isResult = message.role === "tool";
  return element("div", { class: `message${isResult ? " result" : ""}${message.failed ? " failed" : ""}` },
    element("p", { class: "soft from" }, element("span", {}, foreign(message.role)),
      message.tool ? element("strong", { class: "tool" }, foreign(message.tool)) : null,
      message.failed ? element("span", { class: "truncated" }, "failed") : null,
      seconds >= 0.1 ? element("span", {}, `after ${shown(seconds)} s`) : null),
    message.parts.map((part) => (typeof part === "string" ? words(part) : pictureOf(part))));
}

/** The figures of a turn, shown above the model's text if an answer has several turns. */
function turnLine(turn, number) {
  return element("p", { class: "soft from" },
    element("span", {}, `model · turn ${whole(number)}`),
    typeof turn.reward === "number" ? element("span", { class: turn.reward < 0 ? "negative" : turn.reward > 0 ? "positive" : "soft" }, `reward ${signed(turn.reward)}`) : null,
    turn.finish === "length" ? element("span", { class: "truncated" }, "truncated") : null);
}

function turnText(turn, heat, scale, onToken) {
  if (heat !== "none" && turn.tokens) {
    const rest = textAfter(turn);
    return [heated(turn.tokens, heat, scale, onToken), rest ? words(rest, "words unrecorded") : null];
  }
  return words(turn.text || "(nothing)");
}

/** The text after the recorded tokens, for an answer of which not all tokens were recorded. */
function textAfter(turn) {
  const recorded = turn.tokens.pieces.join("");
  return turn.text.startsWith(recorded) ? turn.text.slice(recorded.length) : "";
}

/** The figures of an answer; parts of the reward that equal another part in the whole run are left out. */
function scoreLine(answer, label, turns, repeats) {
  const advantages = turns.flatMap((turn) => turn.tokens?.advantages ?? []);
  const [least, most] = advantages.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  const advantage = least === most ? signed(least) : `${signed(least)} to ${signed(most)}`;
  const parts = [...Object.entries(answer.parts).filter(([name]) => !repeats.includes(`reward/${name}`)), ...answer.image_parts.flatMap((of, place) => Object.entries(of).map(([name, value]) => [`image ${place + 1} ${name}`, value]))];
  return element("p", { class: "score" },
    label,
    element("span", {}, "reward ", element("strong", {}, shown(answer.reward))),
    element("span", {}, `accuracy ${shown(answer.accuracy)}`),
    advantages.length ? element("span", { class: least < 0 ? "negative" : most > 0 ? "positive" : "soft" }, `advantage ${advantage}`) : null,
    parts.map(([name, value]) => element("span", { class: "part" }, foreign(name), ` ${shown(value)}`)),
    turns.at(-1).finish === "length" ? element("span", { class: "truncated" }, "truncated at the length limit") : null,
    ENDS[answer.end] ? element("span", { class: "truncated" }, ENDS[answer.end]) : null);
}
