// A list of any length that creates elements only for the rows in view and a few around them.

import { element } from "./dom.js";

const BESIDE = 8; // rows drawn above and below the rows in view, so that scrolling does not show gaps

/** The list with its heads; `show(rows, chosen)` sets its rows and the index of the chosen one (-1: none), `content(row)` draws one. */
export function longList(label, { address, content, heads }) {
  const lines = element("ol", { "aria-label": label });
  const head = element("div", { class: "heads" }, heads); // it stays in view while the rows scroll
  const root = element("div", { class: "list", scroll: () => draw() }, head, lines);
  let [rows, chosen, shownAt] = [[], -1, -1];

  function show(newRows, newChosen) {
    [rows, chosen] = [newRows, newChosen];
    root.hidden = !rows.length;
    lines.style.height = `${rows.length * rowHeight()}px`;
    // a poll must not move the list while the user scrolls
    if (chosen !== shownAt) scrollTo(chosen);
    shownAt = chosen;
    draw();
  }

  function scrollTo(place) {
    const [top, height, room] = [place * rowHeight(), rowHeight(), root.clientHeight - head.offsetHeight];
    const isInView = top >= root.scrollTop && top + height <= root.scrollTop + room;
    if (!isInView) root.scrollTop = top - (room - height) / 2;
  }

  function draw() {
    const height = rowHeight();
    const first = Math.max(0, Math.floor(root.scrollTop / height) - BESIDE);
    const last = Math.min(rows.length, Math.ceil((root.scrollTop + root.clientHeight) / height) + BESIDE);
    const focused = lines.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    lines.replaceChildren(...rows.slice(first, last).map((row, place) => line(row, first + place, height)));
    if (focused) [...lines.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
  }

  function line(row, place, height) {
    const link = element("a", { href: address(row), "aria-current": place === chosen ? "true" : null }, content(row));
    const node = element("li", { "aria-posinset": place + 1, "aria-setsize": rows.length }, link);
    node.style.top = `${place * height}px`;
    return node;
  }

  /** The height of a row in pixels, from the style sheet: touch needs higher rows than a mouse. */
  function rowHeight() {
    return parseFloat(getComputedStyle(root).getPropertyValue("--row"));
  }

  new ResizeObserver(() => show(rows, chosen)).observe(root);
  return { root, show };
}
