/** Colours: those of Okabe and Ito and tints of them, used consistently on all pages. */

const BY_COMPUTE = { 7: "#b9a6d3", 4: "#8fc3e8", 3: "#8ed1bd", 2: "#f3cf7a" };
const ONE_WIDE = "#f2ae8a";
const ONE_SLICE = "#e8a6c8";
const OTHERS = [...Object.values(BY_COMPUTE), ONE_WIDE, ONE_SLICE];
/** Light enough for dark text. */
const TENANTS = ["#8fc3e8", "#f3cf7a", "#8ed1bd", "#e8a6c8", "#f2ae8a", "#b9a6d3", "#d9d38a", "#a9c59b"];
const AGES = [
  [60, "under 1 min", "#fff3b0"],
  [600, "under 10 min", "#f3cf7a"],
  [3600, "under 1 h", "#c9b79c"],
  [6 * 3600, "under 6 h", "#a3a9b8"],
  [24 * 3600, "under a day", "#8296bd"],
  [Infinity, "a day or more", "#6b8ac4"],
];
export const FOREIGN = "#b9c0c9";
/** Text on blocks: dark in both themes, since blocks stay light. */
export const LETTERS = "#111820";

/** Lines of charts: visible in both themes, each with a different dash. */
export const LINES = [
  ["var(--line-1)", ""],
  ["var(--line-2)", "6 3"],
  ["var(--line-3)", "2 3"],
  ["var(--line-4)", "8 3 2 3"],
  ["var(--line-5)", "1 2"],
  ["var(--line-6)", "10 3"],
  ["var(--line-7)", "4 2 1 2"],
];

/** @param {string} profile @param {number} size */
export function profileColour(profile, size) {
  const found = /^(\d+)g\b/.exec(profile);
  if (!found) return OTHERS[hash(profile) % OTHERS.length];
  const compute = Number(found[1]);
  if (compute === 1) return size === 1 ? ONE_SLICE : ONE_WIDE;
  return BY_COMPUTE[compute] ?? OTHERS[compute % OTHERS.length];
}

/** Colours of tenants, assigned in the order of their names. */
export class TenantColours {
  constructor() {
    /** @type {Map<string, number>} */
    this._numbers = new Map();
  }

  /** @param {Iterable<string>} names */
  know(names) {
    for (const name of [...names].sort()) {
      if (!this._numbers.has(name)) this._numbers.set(name, this._numbers.size);
    }
  }

  /** @param {string | null | undefined} name */
  of(name) {
    if (!name) return FOREIGN;
    if (!this._numbers.has(name)) this._numbers.set(name, this._numbers.size);
    return TENANTS[this._numbers.get(name) % TENANTS.length];
  }
}

/** @param {number | null | undefined} since milliseconds */
export function age(since) {
  if (!since) return { words: "not known", colour: FOREIGN };
  const seconds = (Date.now() - since) / 1000;
  const [, words, colour] = AGES.find(([limit]) => seconds < limit);
  return { words, colour };
}

/** The legend of ages. */
export const ages = AGES.map(([, words, colour]) => ({ words, colour }));

/** @type {Map<string, string>} */
const read = new Map();

/** A colour of the page, for a canvas. @param {string} name */
export function themed(name) {
  let value = read.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    read.set(name, value);
  }
  return value;
}

/** Emits `change` when the theme changes. */
export const theme = new EventTarget();

export function themeChanged() {
  read.clear();
  theme.dispatchEvent(new Event("change"));
}

/** @param {string} text */
function hash(text) {
  let value = 2166136261;
  for (const letter of text) value = Math.imul(value ^ letter.codePointAt(0), 16777619) >>> 0;
  return value;
}
