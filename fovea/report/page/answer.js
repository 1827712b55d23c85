// One answer of a group: its score and its turns, the images that the environment added among them.

import { element, foreign, words } from "./dom.js";
import { heated } from "./heat.js";
import { picture } from "./marks.js";
import { shown, signed } from "./numbers.js";

export const RIGHT = 0.5; // accuracy from which an answer counts as correct, as in the reports

/** The card of answer `number`, of the run with this place; `firstImage` is the number of the first image after the prompt, `label` stands before its figures. */
export function answerCard(run, answer, number, { heat, scale, firstImage, onToken, repeats, label }) {
  const turns = answer.turns.length ? answer.turns : [{ messages: [], text: answer.text, finish: answer.finish, tokens: null }];
  const marks = answer.marks.map((mark) => [number, mark]);
  let image = firstImage;
  const pictureWithMarks = (part) => {
    const place = image++;
    return picture(run, part, place, marks.filter(([, mark]) => mark.image === place));
  };
  const shownTurns = turns.map((turn) => {
    const messages = turn.messages.map((message) => element("div", { class: "message" },
      element("span", { class: "soft" }, foreign(message.role)),
      message.parts.map((part) => (typeof part === "string" ? words(part) : pictureWithMarks(part)))));
    return [messages, turnText(turn, heat, scale, onToken)];
  });
  return element("li", { class: `answer${answer.accuracy >= RIGHT ? " right" : ""}`, "data-answer": number, tabindex: -1 },
    scoreLine(answer, label, turns, repeats), shownTurns);
}

function turnText(turn, heat, scale, onToken) {
  if (heat !== "none" && turn.tokens) {
    const rest = textAfter(turn);
    return [heated(turn.tokens, heat, scale, onToken), rest ? words(rest, "words unrecorded") : null];
  }
  return words(turn.text || "(nothing)");
}

/** The text after the recorded tokens, of an answer longer than the recorded ones. */
function textAfter(turn) {
  const recorded = turn.tokens.pieces.join("");
  return turn.text.startsWith(recorded) ? turn.text.slice(recorded.length) : "";
}

/** The figures of an answer; parts of the reward that repeat another one in the whole run are left out. */
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
    answer.finish === "length" ? element("span", { class: "truncated" }, "truncated at the length limit") : null);
}
