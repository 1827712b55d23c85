// Where data come from: the server of `fovea view`, or the scripts of an exported folder. Both know the same paths.

export const isExported = document.documentElement.hasAttribute("data-exported");
const arrived = new Map();

if (isExported) {
  self.foveaData = (path, value) => arrived.set(path, value);
}

/** The value at a path such as `step/0/50`; an Error with the server's reason where there is none. */
export function load(path) {
  return isExported ? loadScript(path) : fetchJson(path);
}

/** The address of a stored image. */
export function imageAddress(run, name) {
  return `images/${run}/${encodeURIComponent(name)}.png`;
}

async function fetchJson(path) {
  const response = await fetch(`data/${path}`);
  const value = await response.json();
  if (!response.ok) throw new Error(value.error);
  return value;
}

function loadScript(path) {
  if (arrived.has(path)) return Promise.resolve(arrived.get(path));
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `data/${path}.js`;
    script.onload = () => resolve(arrived.get(path));
    script.onerror = () => reject(new Error(`data/${path}.js is not in this folder`));
    document.head.append(script);
  });
}
