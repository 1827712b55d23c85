// Keyboard shortcuts of the page, and the dialog that lists them.

import { element } from "./dom.js";

const ARROWS = { ArrowDown: "↓", ArrowUp: "↑", ArrowRight: "→", ArrowLeft: "←" };

/** Listen for keys: `actions` are triples of keys, meaning and function; a function that returns false leaves the key to the browser. */
export function listen(actions, help) {
  const all = [...actions, [["?"], "these keys", () => (help.open ? help.close() : help.showModal())]];
  help.replaceChildren(element("h2", {}, "Keys"),
    element("dl", {}, all.flatMap(([keys, meaning]) => [element("dt", {}, keys.map((key) => element("kbd", {}, ARROWS[key] ?? key))), element("dd", {}, meaning)])),
    element("form", { method: "dialog" }, element("button", {}, "close")));
  help.addEventListener("click", (event) => event.target === help && help.close());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches("input:not([type=checkbox]), select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const found = all.find(([keys]) => keys.includes(event.key));
    if (!found || (help.open && event.key !== "?")) return;
    if (found[2](event.key) !== false) event.preventDefault();
  });
}
