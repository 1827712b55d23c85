// Formats numbers for people. It avoids toLocaleString, whose first call loads tables for 40 ms.

/** A value with four significant digits; a dash if it is not finite. */
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

/** A fraction in percent with one decimal; halves are rounded up, as in the tables for the terminal. */
export function percent(fraction) {
  return (100 * fraction * (1 + 1e-12)).toFixed(1);
}

/** A whole number with thousands separators. */
export function whole(value) {
  return grouped(value);
}

/** A number with commas between thousands before the decimal point. */
function grouped(value) {
  const [before, after] = String(value).split(".");
  const thousands = before.replace(/\B(?=(\d{3})+$)/g, ",");
  return after === undefined ? thousands : `${thousands}.${after}`;
}

/** Round numbers within [low, high]: at least `count`, and fewer than three times as many. */
export function ticks(low, high, count) {
  const power = 10 ** Math.floor(Math.log10(high - low));
  const sizes = [5, 2, 1, 0.5, 0.2, 0.1].map((factor) => factor * power);
  const step = sizes.find((size) => numbersOf(low, high, size) >= count) ?? sizes[sizes.length - 1];
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: numbersOf(low, high, step) }, (_, place) => (first + place) * step);
}

/** The number of multiples of `step` within [low, high]. */
function numbersOf(low, high, step) {
  return Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
}

/** Powers of ten within [low, high], both above 0; if there are fewer than two, also their multiples by 2 and 5, else round numbers. */
export function logTicks(low, high) {
  const least = Math.floor(Math.log10(low));
  const powers = Array.from({ length: Math.ceil(Math.log10(high)) - least + 1 }, (_, place) => 10 ** (least + place));
  const within = (numbers) => numbers.filter((number) => number >= low * (1 - 1e-9) && number <= high * (1 + 1e-9));
  const [tens, finer] = [within(powers), within(powers.flatMap((power) => [power, 2 * power, 5 * power]))];
  if (tens.length < 2) return finer.length < 2 ? ticks(low, high, 3) : finer;
  return tens.filter((_, place) => place % Math.ceil(tens.length / 5) === 0);
}

const SHORT = [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]]; // [used from this size, divisor, letter]

/** A value on an axis in few characters: 12,000 becomes 12k. */
export function short(value) {
  const [, divisor, letter] = SHORT.find(([from]) => Math.abs(value) >= from) ?? [0, 1, ""];
  return `${shown(value / divisor)}${letter}`;
}

/** A time span in words, such as "5 min ago". */
export function ago(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return seconds < 129600 ? `${Math.round(seconds / 3600)} h ago` : `${Math.round(seconds / 86400)} days ago`;
}
