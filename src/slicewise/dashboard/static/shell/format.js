/** Format numbers and times. */

const whole = new Intl.NumberFormat("en");
const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

/** @param {number} value */
export const count = (value) => whole.format(value);

/**
 * @param {number} part
 * @param {number} all
 */
export function percent(part, all, digits = 0) {
  return all ? `${((100 * part) / all).toFixed(digits)}%` : "–";
}

/**
 * @param {number} number
 * @param {string} one
 * @param {string} [many]
 */
export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** A length of time, in its two largest units. @param {number} seconds */
export function duration(seconds) {
  let rest = Math.max(0, Math.round(seconds));
  const words = [];
  for (const [unit, length] of UNITS) {
    if (rest >= length) {
      words.push(`${Math.floor(rest / length)} ${unit}`);
      rest %= length;
    }
    if (words.length === 2) break;
  }
  return words.join(" ") || "0 s";
}

/** How long ago a moment was. @param {string | number | null | undefined} moment */
export function ago(moment) {
  const at = millis(moment);
  if (at === null) return "–";
  const seconds = (Date.now() - at) / 1000;
  return seconds < 2 ? "just now" : `${duration(seconds)} ago`;
}

/** @param {string | number | null | undefined} moment */
export function millis(moment) {
  if (moment === null || moment === undefined || moment === "") return null;
  const at = typeof moment === "number" ? moment * 1000 : Date.parse(moment);
  return Number.isNaN(at) ? null : at;
}

/** A time in the viewer's time zone. @param {string | number | null | undefined} moment */
export function clock(moment) {
  const at = millis(moment);
  if (at === null) return "–";
  const date = new Date(at);
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString()
    ? time
    : `${date.toLocaleDateString("en-CA")} ${time}`;
}

/** Which slices a window covers. @param {number} start @param {number} size */
export function slices(start, size) {
  return size === 1 ? `slice ${start}` : `slices ${start}–${start + size - 1}`;
}

/**
 * An id short enough to stand in a row. Ids begin with the time at which they were made, so only
 * their ends tell those apart that were made at about the same time.
 * @param {string} id
 */
export const brief = (id) => (id.length > 12 ? `${id[0]}…${id.slice(-8)}` : id);

/** The value of an unknown field. @param {unknown} value */
export function plain(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
