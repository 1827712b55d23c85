// The filter of the list of groups: question type, reward, step, signal and truncation. It is part of the address.

import { goTo, numberOf } from "./address.js";
import { element } from "./dom.js";

/** The rows that pass the filter in an address. */
export function filtered(rows, parameters) {
  const kind = parameters.get("kind");
  const only = parameters.get("only");
  const within = (value, least, most) => (least === null || value >= least) && (most === null || value <= most);
  const [low, high] = [numberOf(parameters, "low"), numberOf(parameters, "high")];
  const [from, to] = [numberOf(parameters, "from"), numberOf(parameters, "to")];
  return rows.filter((row) =>
    (!kind || row.kind === kind) &&
    ((low === null && high === null) || (row.mean !== null && within(row.mean, low, high))) &&
    within(row.step, from, to) &&
    (only !== "truncated" || row.truncated > 0) &&
    (only !== "mixed" || row.high > row.low) &&
    (only !== "equal" || row.high === row.low));
}

/** The controls of the filter; `draw(rows, parameters)` updates them. */
export function filterBar() {
  const kind = element("select", { id: "kind", change: () => set({ kind: kind.value }) });
  const only = element("select", { id: "only", change: () => set({ only: only.value }) },
    option("", "all groups"), option("mixed", "rewards differ"), option("equal", "rewards equal"), option("truncated", "with truncated"));
  const numbers = [
    ["low", "reward from"], ["high", "to"], ["from", "step from"], ["to", "to"],
  ].map(([name, label]) => [name, numberInput(name, label)]);
  const clear = element("button", { type: "button", click: () => set({ kind: "", only: "", low: "", high: "", from: "", to: "" }) }, "clear");
  const root = element("form", { class: "toolbar filters", role: "search", submit: (event) => event.preventDefault() },
    element("label", {}, "type ", kind), element("label", {}, "show ", only),
    numbers.map(([, input]) => input.parent), clear);

  function draw(rows, parameters) {
    const kinds = kindsOf(rows);
    if (kinds.join("\n") !== [...kind.options].slice(1).map((each) => each.value).join("\n")) {
      kind.replaceChildren(option("", "all"), ...kinds.map((name) => option(name, name)));
    }
    kind.value = parameters.get("kind") ?? "";
    only.value = parameters.get("only") ?? "";
    for (const [name, input] of numbers) if (document.activeElement !== input.box) input.box.value = parameters.get(name) ?? "";
  }

  return { root, draw, focus: () => kind.focus() };
}

function kindsOf(rows) {
  const kinds = new Set();
  for (const row of rows) kinds.add(row.kind);
  return [...kinds].sort();
}

function set(changes) {
  goTo("samples", { ...changes, step: null, group: null });
}

function option(value, label) {
  return element("option", { value }, label);
}

function numberInput(name, label) {
  const box = element("input", { type: "number", name, step: "any", change: () => set({ [name]: box.value }) });
  return { box, parent: element("label", {}, `${label} `, box) };
}
