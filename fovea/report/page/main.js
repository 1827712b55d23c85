// The page: its head, the pages in it, and the poll that keeps them up to date.

import { goTo, readAddress } from "./address.js";
import { curvesPage } from "./curves.js";
import { element, foreign } from "./dom.js";
import { heldOutPage } from "./heldout.js";
import { listen } from "./keys.js";
import { ago, whole } from "./numbers.js";
import { overviewPage } from "./overview.js";
import { samplesPage } from "./samples.js";
import { settingsPage } from "./settings.js";
import { isExported, load } from "./source.js";

const POLL_MS = 2000;
const [head, main, alert, help] = ["head", "main", "alert", "help"].map((id) => document.getElementById(id));
const pages = { overview: overviewPage(), curves: curvesPage(), samples: samplesPage(), "held-out": heldOutPage(), settings: settingsPage() };
/** By page, a test that returns true if an exported file has data for it; other pages always have. */
const CONTENT = {
  curves: (all) => all.some((run) => run.metrics.length),
  samples: (all) => all.some((run) => run.entries),
  "held-out": (all) => all.some((run) => run.evaluations.length),
};
const status = element("div", { class: "runs" });
const tabs = Object.keys(pages).map((name) => element("a", { href: `#${name}` }, name));

function pageName() {
  const { page } = readAddress();
  return page in pages ? page : "overview";
}

function drawHead(runs) {
  const title = runs[0].title; // only an evaluation has a title; its targets are shown as runs
  document.title = `${title ?? runs.map((run) => run.name).join(" | ")} · Fovea`;
  if (title) head.querySelector("h1").replaceChildren(foreign(title));
  for (const tab of tabs) tab.hidden = isExported && !(CONTENT[tab.textContent]?.(runs) ?? true);
  status.replaceChildren(...runs.map((run, place) => element("details", { class: "run" },
    element("summary", {}, element("span", { class: `dot run${place % 6}` }), element("strong", {}, foreign(run.name)), element("span", { class: "soft" }, ` ${progress(run)}`)),
    element("dl", { class: "about" }, Object.entries({ folder: run.folder, ...run.about }).map(([label, text]) =>
      element("div", {}, element("dt", {}, label), element("dd", {}, foreign(text))))))));
}

const isRead = (run) => run.share_read === 1;

function progress(run) {
  if (!isRead(run)) return `reading metrics.jsonl: ${Math.floor(100 * run.share_read)} %`;
  if (run.finished && !run.step) return ""; // a target of an evaluation
  const steps = run.max_steps ? `step ${whole(run.step)} of ${whole(run.max_steps)}` : `step ${whole(run.step)}`;
  if (run.finished) return `${steps}, finished`;
  if (isExported) return steps; // an exported page cannot know how long ago the step was
  return run.seconds_since_step === null ? "no step yet" : `${steps}, ${ago(run.seconds_since_step)}`;
}

let runs = [];
let headText = "";
let hasFailed = false; // true until a poll has read everything again

async function poll() {
  try {
    runs = await load("runs");
    const text = JSON.stringify(runs.map((run) => [run.name, progress(run), run.about]));
    if (text !== headText) drawHead(runs);
    headText = text;
    const page = pages[pageName()];
    if (runs.every(isRead) && ((await page.refresh(runs)) || hasFailed)) await page.draw();
    alert.hidden = true;
    hasFailed = false;
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  hasFailed = true;
  alert.textContent = `The newest data could not be read: ${error.message}`;
  alert.hidden = false;
}

async function show() {
  const name = pageName();
  const [, query] = location.hash.split("?");
  for (const tab of tabs) {
    tab.ariaCurrent = tab.textContent === name ? "page" : null;
    tab.href = `#${tab.textContent}${query ? `?${query}` : ""}`; // keep what was chosen when switching pages
  }
  const page = pages[name];
  if (!page.root.isConnected) main.replaceChildren(page.root);
  if (!runs.length || !runs.every(isRead)) return;
  try {
    await page.refresh(runs);
    await page.draw();
  } catch (error) {
    fail(error);
  }
}

/** Poll one request at a time: of two concurrent replies, the older one could arrive last. */
async function keepPolling() {
  for (;;) {
    if (!document.hidden) await poll();
    await nextPoll();
  }
}

/** Wait until the next poll is due, or the page becomes visible. */
function nextPoll() {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", end);
      resolve();
    };
    const reads = !hasFailed && !document.hidden && !runs.every(isRead); // a long run is read piece by piece, one per poll
    const timer = setTimeout(end, reads ? 0 : POLL_MS);
    document.addEventListener("visibilitychange", end);
  });
}

const samples = pages.samples;
const onSamples = (action) => (key) => {
  if (pageName() === "samples") return action();
  return !key.startsWith("Arrow") && goTo("samples"); // on other pages the arrow keys scroll
};
listen([
  [["o"], "overview", () => goTo("overview")],
  [["c"], "curves", () => goTo("curves")],
  [["s"], "samples", () => goTo("samples")],
  [["e"], "held-out answers", () => goTo("held-out")],
  [["t"], "settings and console", () => goTo("settings")],
  [["j", "ArrowDown"], "next group", onSamples(() => samples.move(1))],
  [["k", "ArrowUp"], "group before", onSamples(() => samples.move(-1))],
  [["]", "ArrowRight"], "next recorded step", onSamples(() => samples.moveStep(1))],
  [["[", "ArrowLeft"], "step before", onSamples(() => samples.moveStep(-1))],
  [["h"], "heat of tokens: none, advantage, mismatch", onSamples(() => samples.nextHeat())],
  [["/"], "search or filter", () => pages[pageName()].focusSearch()],
], help);

const isInList = !isExported && /\/runs\/[^/]+\/$/.test(location.pathname); // the page was opened from the list of `fovea view FOLDER`
head.append(element("h1", {}, isInList ? element("a", { href: "../../" }, "all runs") : "Fovea"), element("nav", { "aria-label": "Pages" }, tabs), status,
  element("button", { type: "button", class: "keys", click: () => help.showModal() }, "keys ", element("kbd", {}, "?")));
addEventListener("hashchange", show);
await show();
await (isExported ? poll() : keepPolling());
