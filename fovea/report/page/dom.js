// Elements, made without markup: whatever a model or a data set wrote arrives as text.

/** An HTML element. Attributes that are functions become listeners of that event; false and null leave one out. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element, as `element`. */
export function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Foreign text inside a line of ours: its direction does not spill over. */
export function foreign(text) {
  return element("bdi", {}, text);
}

/** A paragraph of foreign text, in the direction of its own script. */
export function words(text, className = "words") {
  return element("div", { class: className, dir: "auto" }, text);
}
