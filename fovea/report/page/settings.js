// The page with the settings and the console output of each run.

import { element, foreign } from "./dom.js";
import { load } from "./source.js";

/** The page; `refresh(runs)` updates the facts about the runs, `draw()` loads and shows settings and output. */
export function settingsPage() {
  const consoles = element("div", { class: "consoles" });
  const tables = element("div", {});
  const root = element("section", { class: "page" }, consoles, tables);
  const search = element("input", { type: "search", placeholder: "setting", "aria-label": "Search settings", input: () => drawSettings() });
  const table = element("table", { class: "settings" });
  tables.append(element("div", { class: "toolbar" }, search), element("div", { class: "scroll" }, table));
  let runs = [];
  let settings = [];

  /** Returns true if a run has printed something new. */
  async function refresh(newRuns) {
    const before = JSON.stringify(runs.map((run) => run.console_bytes));
    runs = newRuns;
    return before !== JSON.stringify(runs.map((run) => run.console_bytes));
  }

  async function draw() {
    const loaded = await Promise.all(runs.map((_, place) => load(`about/${place}/0`)));
    settings = loaded.map((each) => new Map(each.settings));
    drawSettings();
    // the targets of an evaluation have no console output
    loaded.forEach((each, place) => (each.console || !runs[place].title) && drawConsole(each.console, place));
  }

  function drawConsole(text, place) {
    const box = consoles.children[place] ?? consoles.appendChild(consoleBox(runs[place], place, runs.length > 1));
    const lines = box.querySelector("pre");
    const shown = text || "This run did not record its console output.";
    if (lines.textContent === shown) return;
    const wasAtEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 4;
    lines.textContent = shown;
    if (wasAtEnd) lines.scrollTop = lines.scrollHeight; // follow new lines only if the user was at the end
  }

  /** The settings whose names contain this text; settings that differ between runs come first. */
  function drawSettings() {
    const text = search.value.trim().toLowerCase();
    const keys = [...new Set(settings.flatMap((each) => [...each.keys()]))].filter((key) => key.toLowerCase().includes(text));
    const differs = (key) => settings.some((each) => each.get(key) !== settings[0].get(key));
    const rows = [...keys.filter(differs), ...keys.filter((key) => !differs(key))];
    table.replaceChildren(
      element("thead", {}, element("tr", {}, element("th", {}, "setting"), runs.map((run, place) => element("th", { class: `run${place % 6}` }, foreign(run.name))))),
      element("tbody", {}, rows.map((key) => element("tr", { class: differs(key) ? "differs" : null }, element("td", {}, foreign(key)),
        settings.map((each) => element("td", {}, foreign(each.get(key) ?? "–")))))));
  }

  return { root, refresh, draw, focusSearch: () => search.focus() };
}

function consoleBox(run, place, isOneOfSeveral) {
  const title = isOneOfSeveral ? ["Console of ", element("span", { class: `run${place % 6}` }, foreign(run.name))] : "Console";
  return element("details", { class: "metrics", open: true }, element("summary", {}, title), element("pre", { class: "console", tabindex: 0 }));
}
