// The source of the data: the server of `fovea view`, or blocks in the exported file. Both use the same paths.

export const isExported = document.documentElement.hasAttribute("data-exported");

/** The value at a path such as `step/0/50`; throws an Error with the reason if there is none. */
export function load(path) {
  return isExported ? readBlock(path) : fetchJson(path);
}

/** The address of a stored image; null if the exported file does not hold it. */
export function imageAddress(run, name) {
  if (!isExported) return `images/${run}/${encodeURIComponent(name)}.png`;
  const block = document.getElementById(`images/${run}/${name}`);
  return block && `data:image/png;base64,${block.textContent}`;
}

async function fetchJson(path) {
  const response = await fetch(`data/${path}`);
  const value = await response.json();
  if (!response.ok) throw new Error(value.error);
  return value;
}

async function readBlock(path) {
  const block = document.getElementById(`data/${path}`);
  if (!block) throw new Error(`${path} is not in this file`);
  return JSON.parse(block.textContent);
}
