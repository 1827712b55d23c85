// One group: a question with its images, and a run's answers to it.

import { answerCard } from "./answer.js";
import { element, foreign, words } from "./dom.js";
import { legend } from "./heat.js";
import { picture } from "./marks.js";
import { whole } from "./numbers.js";

/** The view of the `place`-th group of a step, of run number `run` with these facts; `scale` is the value at which colours are strongest, `title` names the run if several are shown. */
export function groupView(run, facts, step, place, group, { heat, scale, title }) {
  const images = group.messages.flatMap((message) => message.parts.filter((part) => typeof part !== "string"));
  const marks = group.answers.flatMap((answer, number) => answer.marks.map((mark) => [number, mark]));
  const readout = element("p", { class: "readout soft", "aria-live": "polite", hidden: heat === "none" }, legend(heat, scale));
  const figures = images.map((image, place) => picture(run, image, place + 1, marks.filter(([, mark]) => mark.image === place + 1)));
  const options = { heat, scale, repeats: facts.repeats, firstImage: images.length + 1, onToken: (text) => readout.replaceChildren(foreign(text)) };
  const root = element("article", { class: `group${images.length ? "" : " text-only"}` },
    element("p", { class: "soft place" }, title ? element("strong", { class: `run${run % 6}` }, foreign(title)) : null,
      title ? " · " : "", `step ${whole(step)} · `, foreign(group.kind), group.id ? [" · ", foreign(group.id)] : null),
    images.length ? element("div", { class: "images" }, figures) : null,
    element("div", { class: "text" },
      words(group.question, "words question"),
      element("p", { class: "truth" }, element("span", { class: "soft" }, "Truth: "), foreign(group.truth)),
      promptAsRead(group),
      readout,
      element("ol", { class: "answers" }, group.answers.map((answer, number) => answerCard(run, answer, number, { ...options, label: numbered(answer, number) })))));
  root.addEventListener("pointerover", (event) => pointOut(root, event.target));
  root.addEventListener("pointerleave", () => pointOut(root, root));
  root.addEventListener("focusin", (event) => pointOut(root, event.target));
  return root;
}

function numbered(answer, number) {
  return element("span", { class: answer.marks.length ? `number hue${number % 6}` : "number" }, `#${number + 1}`);
}

/** The prompt with its roles, folded; null if it holds only the question. */
function promptAsRead(group) {
  const texts = group.messages.flatMap((message) => message.parts.filter((part) => typeof part === "string"));
  if (texts.length === 1 && texts[0] === group.question) return null;
  let image = 0;
  return element("details", { class: "prompt" }, element("summary", {}, "The prompt as the model read it"),
    group.messages.map((message) => element("div", { class: "message" }, element("span", { class: "soft" }, foreign(message.role)),
      message.parts.map((part) => (typeof part === "string" ? words(part) : element("p", { class: "soft" }, `[image ${++image}]`))))));
}

/** Highlight the marks of the answer under the mouse and fade the marks of the others. */
function pointOut(root, target) {
  const answer = target.closest("[data-answer]")?.dataset.answer;
  for (const mark of root.querySelectorAll(".mark")) mark.classList.toggle("faded", answer !== undefined && mark.dataset.answer !== answer);
}
