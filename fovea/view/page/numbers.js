// Numbers as people read them. Not by toLocaleString: its first call loads tables for 40 ms, which the page would wait for.

/** A value in four significant digits; a dash where it is not finite. */
export function shown(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6)
    ? value.toExponential(2).replace("e+", "e")
    : grouped(Number(value.toPrecision(4)));
  return text.replaceAll("-", "−");
}

/** A value with its sign. */
export function signed(value) {
  return value > 0 ? `+${shown(value)}` : shown(value);
}

/** A whole number with separators. */
export function whole(value) {
  return grouped(value);
}

/** A number with commas between thousands, not those behind the point. */
function grouped(value) {
  const [before, after] = String(value).split(".");
  const thousands = before.replace(/\B(?=(\d{3})+$)/g, ",");
  return after === undefined ? thousands : `${thousands}.${after}`;
}

/** Round numbers within [low, high], about `count` of them. */
export function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, place) => (first + place) * step);
}

/** How long ago, in words. */
export function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}
