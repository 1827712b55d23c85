// The page keeps its state in its address, such as #samples?step=50&kind=count: it can be shared, and Back works.

/** The page's name and parameters, from the address. */
export function readAddress() {
  const [page, query] = location.hash.slice(1).split("?");
  return { page: page || "overview", parameters: new URLSearchParams(query) };
}

/** Go to a page and change parameters of the address; null or "" removes one. Listeners of `hashchange` draw it. */
export function goTo(page, changes = {}) {
  const { parameters } = readAddress();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") parameters.delete(name);
    else parameters.set(name, value);
  }
  const query = parameters.toString();
  location.hash = query ? `${page}?${query}` : page;
}

/** A parameter as a number; null if it is not set. */
export function numberOf(parameters, name) {
  const text = parameters.get(name);
  return text === null || text === "" || Number.isNaN(Number(text)) ? null : Number(text);
}
