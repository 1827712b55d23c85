// The page of held-out answers: the same rows of all runs side by side, to compare two seeds for example.

import { goTo, readAddress } from "./address.js";
import { answerCard, RIGHT } from "./answer.js";
import { element, foreign, words } from "./dom.js";
import { picture } from "./marks.js";
import { percent, whole } from "./numbers.js";
import { load } from "./source.js";

const SHOWN = 40; // number of rows shown at first, and added by each press of the button
const isRight = (answer) => answer.accuracy >= RIGHT;
const FILTERS = {
  "": ["all rows", () => true],
  differ: ["right in some", (row) => row.answers.some((one) => one && isRight(one)) && !row.answers.every((one) => one && isRight(one))],
  wrong: ["wrong in all", (row) => row.answers.every((one) => !one || !isRight(one))],
  right: ["right in all", (row) => row.answers.every((one) => one && isRight(one))],
};

/** The page; `refresh(runs)` updates the facts about the runs, `draw()` shows the evaluation that the address names. */
export function heldOutPage() {
  const choice = element("select", { id: "evaluation", change: () => goTo("held-out", { of: choice.value }) });
  const only = element("select", { id: "outcome", change: () => goTo("held-out", { outcome: only.value }) },
    Object.entries(FILTERS).map(([name, [label]]) => element("option", { value: name }, label)));
  const kind = element("select", { id: "row-kind", change: () => goTo("held-out", { kind: kind.value }) });
  const tally = element("div", { class: "tally" });
  const list = element("div", {});
  const bar = element("div", { class: "toolbar" }, element("label", {}, "evaluation ", choice), element("label", {}, "type ", kind), element("label", {}, "show ", only));
  const root = element("section", { class: "page" }, bar, tally, list);
  let runs = [];
  let drawn = "";

  /** Returns true if the list of evaluations has changed. */
  async function refresh(newRuns) {
    const before = names().join();
    runs = newRuns;
    return names().join() !== before;
  }

  function names() {
    const isTest = (name) => name.startsWith("test-");
    const all = [...new Set(runs.flatMap((run) => run.evaluations))];
    return [...all.filter(isTest), ...all.filter((name) => !isTest(name)).sort().reverse()];
  }

  async function draw() {
    const { parameters } = readAddress();
    const all = names();
    const inAllRuns = all.find((name) => runs.every((run) => run.evaluations.includes(name)));
    const name = all.includes(parameters.get("of")) ? parameters.get("of") : inAllRuns ?? all[0];
    const key = JSON.stringify([all, name, parameters.get("kind"), parameters.get("outcome")]);
    if (key === drawn) return; // do not redraw at every poll what the user is reading
    drawn = key;
    const found = await Promise.all(runs.map((run, place) => answersOf(run, place, name)));
    if (key !== drawn) return; // the user has chosen something else meanwhile
    const rows = merged(found);
    fill(choice, all.map((each) => [each, each]), name);
    fill(kind, [["", "all"], ...[...new Set(rows.map((row) => row.kind))].sort().map((each) => [each, each])], parameters.get("kind") ?? "");
    only.value = parameters.get("outcome") in FILTERS ? parameters.get("outcome") : "";
    const passing = rows.filter((row) => (!kind.value || row.kind === kind.value) && FILTERS[only.value][1](row));
    tally.replaceChildren(...(name ? tallyOf(rows, runs) : []));
    list.replaceChildren(element("p", { class: "soft" }, name ? `${whole(passing.length)} of ${whole(rows.length)} rows` : "No held-out row has been answered yet."));
    more(passing, 0);
  }

  /** Show the next rows, and a button that shows the rows after them. */
  function more(rows, from) {
    const shown = rows.slice(from, from + SHOWN).map((row) => rowView(row, runs));
    list.append(...shown);
    if (rows.length <= from + SHOWN) return;
    const button = element("button", { type: "button", click: () => { button.remove(); more(rows, from + SHOWN); } }, `${whole(rows.length - from - SHOWN)} more`);
    list.append(button);
  }

  return { root, refresh, draw, focusSearch: () => choice.focus() };
}

function fill(select, options, value) {
  select.replaceChildren(...options.map(([name, label]) => element("option", { value: name }, label)));
  select.value = options.some(([name]) => name === value) ? value : options[0]?.[0];
}

async function answersOf(run, place, name) {
  const number = run.evaluations.indexOf(name);
  if (number < 0) return [];
  const loaded = await load(`answers/${place}/${number}`);
  if (loaded.name !== name) return []; // a new evaluation has changed the numbers: the next poll asks again
  return loaded.rows;
}

/** The rows of all runs, in the order of the first run; rows with equal id, question and truth are merged. */
function merged(found) {
  const rows = new Map();
  found.forEach((answers, run) => {
    for (const row of answers) {
      const key = JSON.stringify([row.id, row.question, row.truth]);
      if (!rows.has(key)) rows.set(key, { ...row, run, answers: found.map(() => null) });
      [rows.get(key).answers[run]] = row.answers;
    }
  });
  return [...rows.values()];
}

/** Accuracies over the rows that all runs have answered; for two runs also how many rows only one of them got right. */
function tallyOf(rows, runs) {
  const shared = rows.filter((row) => row.answers.every(Boolean));
  if (!shared.length) return [element("p", { class: "soft" }, "The runs have no row in common.")];
  const count = (passes) => whole(shared.filter((row) => passes(row.answers.map(isRight))).length);
  const figures = runs.map((run, place) => [[element("span", { class: `run${place % 6}` }, foreign(run.name))],
    `${percent(shared.reduce((sum, row) => sum + row.answers[place].accuracy, 0) / shared.length)}\u00a0%`]);
  const outcomes = runs.length === 2 ? [
    ["both right", count(([one, other]) => one && other)],
    [["only ", foreign(runs[0].name)], count(([one, other]) => one && !other)],
    [["only ", foreign(runs[1].name)], count(([one, other]) => !one && other)],
    ["neither", count(([one, other]) => !one && !other)],
  ] : [];
  return [element("dl", { class: "figures" }, [...figures, ...outcomes, ["rows", whole(shared.length)]].map(([label, text]) =>
    element("div", {}, element("dt", {}, label), element("dd", {}, text))))];
}

function rowView(row, runs) {
  const images = row.messages.flatMap((message) => message.parts).map((image, place) => picture(row.run, image, place + 1, []));
  return element("article", { class: `group held-out${images.length ? "" : " text-only"}` },
    element("p", { class: "soft place" }, foreign(row.id), " · ", foreign(row.kind), row.image_type === null ? null : [" · ", foreign(row.image_type)], row.index < 0 ? null : ` · row ${whole(row.index)}`),
    images.length ? element("div", { class: "images" }, images) : null,
    element("div", { class: "text" },
      row.question ? words(row.question, "words question") : null,
      element("p", { class: "truth" }, element("span", { class: "soft" }, "Truth: "), foreign(row.truth)),
      element("ol", { class: "answers side-by-side" }, row.answers.map((answer, place) => answerView(answer, place, runs)))));
}

function answerView(answer, place, runs) {
  const label = runs.length > 1 ? element("strong", { class: `run${place % 6}` }, foreign(runs[place].name)) : null;
  if (!answer) return element("li", { class: "answer" }, element("p", { class: "score" }, label, element("span", { class: "soft" }, "has not answered this row")));
  return answerCard(place, answer, place, { heat: "none", repeats: runs[place].repeats, label });
}
