// Images with the boxes and points of answers drawn over them; coordinates are shares of width and height.

import { element } from "./dom.js";
import { imageAddress } from "./source.js";

const SMALL_PX = 128; // narrower images are enlarged without smoothing

/** An image of a run; `marks` are pairs of an answer's number and its mark on the image. */
export function picture(run, image, number, marks) {
  const address = imageAddress(run, image.name);
  if (!address) return element("figure", { class: "shot" }, element("p", { class: "soft" }, `Image ${number} is not in this file; \`fovea view\` shows it.`));
  const shown = element("img", { alt: `Image ${number}`, src: address, loading: "lazy" });
  const root = element("figure", { class: "shot" }, shown, marks.map(([answer, mark]) => drawn(answer, mark)));
  shown.addEventListener("load", () => root.classList.toggle("small", shown.naturalWidth < SMALL_PX));
  shown.addEventListener("error", () => root.replaceChildren(element("p", { class: "soft" }, `Image ${number} is missing: its file in samples/images is gone.`)));
  return root;
}

function drawn(answer, mark) {
  const isBox = mark.xy.length === 4;
  const label = [answer === null ? "" : `#${answer + 1}`, mark.label].filter(Boolean).join(" ");
  const node = element("div", { class: `mark ${isBox ? "box" : "point"} hue${(answer ?? 0) % 6}`, title: label, "data-answer": answer },
    element("span", { class: "label" }, element("bdi", {}, label)));
  const [x1, y1, x2, y2] = mark.xy.map((share) => Math.min(1, Math.max(0, share)));
  node.style.left = percent(isBox ? Math.min(x1, x2) : x1);
  node.style.top = percent(isBox ? Math.min(y1, y2) : y1);
  if (isBox) {
    node.style.width = percent(Math.abs(x2 - x1));
    node.style.height = percent(Math.abs(y2 - y1));
  }
  return node;
}

function percent(share) {
  return `${(100 * share).toFixed(2)}%`;
}
