// Creates elements without parsing markup: whatever a model or a data set wrote is shown as text.

/** An HTML element. Attributes that are functions become event listeners; attributes that are false or null are left out. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element; arguments as for `element`. */
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

/** Text from a model or a data set inside a line of the page, isolated so that its writing direction does not spread. */
export function foreign(text) {
  return element("bdi", {}, text);
}

/** A paragraph of text from a model or a data set, in the writing direction of its script. */
export function words(text, className = "words") {
  return element("div", { class: className, dir: "auto" }, text);
}
