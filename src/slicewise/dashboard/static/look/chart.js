/** Small line charts in SVG: an axis, a few lines with different dashes, and a text summary. */

import { fill, h, svg } from "../shell/dom.js";
import { LINES } from "./palette.js";

const LEFT = 40;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 20;

/**
 * @typedef {{name: string, points: [number, number | null][]}} Series
 * @typedef {{title: string, series: Series[], from: number, to: number, wide?: boolean,
 *   most?: number, unit?: (value: number) => string, across?: (value: number) => string}} Chart
 */

/**
 * Draw a chart into an element; drawn again, it replaces what was there.
 * @param {HTMLElement} element
 * @param {Chart} chart
 */
export function lineChart(element, chart) {
  const width = Math.max(260, Math.min(chart.wide ? 1400 : 700, element.clientWidth - 28 || 460));
  const height = chart.wide ? 130 : 150;
  const { from, to } = chart;
  const unit = chart.unit ?? ((value) => (Number.isInteger(value) ? String(value) : value.toFixed(1)));
  const across = chart.across ?? String;
  const values = chart.series.flatMap((one) => one.points.map(([, value]) => value ?? 0));
  const highest = Math.max(0, ...values);
  const top = chart.most ?? (highest ? nice(highest) : 1);
  const x = (at) => LEFT + ((at - from) / (to - from || 1)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - (value / top) * (height - TOP - BOTTOM);
  const said = svg("g", {});
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${chart.title}: ${chart.series.map((one) => `${one.name} ${latest(one, unit)}`).join(", ") || "nothing yet"}` },
  [0, 0.5, 1].map((share) => [
    svg("line", { class: "mesh", x1: LEFT, x2: width - RIGHT, y1: y(top * share), y2: y(top * share) }),
    svg("text", { class: "axis", x: LEFT - 6, y: y(top * share) + 4, "text-anchor": "end" }, unit(top * share)),
  ]).flat(),
  [0, 0.5, 1].map((share) => svg("text", { class: "axis", x: x(from + (to - from) * share), y: height - 4,
    "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, across(from + (to - from) * share))),
  chart.series.map((one, index) => svg("path", { d: path(one.points, x, y), fill: "none",
    style: { stroke: LINES[index % LINES.length][0] }, "stroke-width": 1.8,
    "stroke-dasharray": LINES[index % LINES.length][1] || null, "stroke-linejoin": "round" })),
  said);
  drawing.addEventListener("pointermove", (event) => point(/** @type {PointerEvent} */ (event)));
  drawing.addEventListener("pointerleave", () => { fill(said); keys(null); });
  const legend = h("div", { class: "keys" });
  fill(element, h("h2", {}, chart.title), legend, drawing);
  keys(null);

  /** @param {PointerEvent} event */
  function point(event) {
    const bounds = drawing.getBoundingClientRect();
    const at = from + (((event.clientX - bounds.left) / bounds.width) * width - LEFT) / (width - LEFT - RIGHT) * (to - from);
    const inside = Math.max(from, Math.min(to, at));
    fill(said, svg("line", { class: "cross", x1: x(inside), x2: x(inside), y1: TOP, y2: height - BOTTOM }),
      svg("text", { class: "said", x: x(inside), y: TOP + 2, "text-anchor": inside > (from + to) / 2 ? "end" : "start",
        dx: inside > (from + to) / 2 ? -6 : 6 }, across(inside)));
    keys(inside);
  }

  /** @param {number | null} at */
  function keys(at) {
    fill(legend, chart.series.map((one, index) => h("span", {},
      svg("svg", { viewBox: "0 0 26 8", "aria-hidden": "true" }, svg("line", { x1: 0, x2: 26, y1: 4, y2: 4,
        style: { stroke: LINES[index % LINES.length][0] }, "stroke-width": 2.4, "stroke-dasharray": LINES[index % LINES.length][1] || null })),
      `${one.name} `, h("b", {}, at === null ? latest(one, unit) : valueAt(one, at, unit)))));
  }
}

/** @param {Series} series @param {(value: number) => string} unit */
function latest(series, unit) {
  const last = series.points.findLast(([, value]) => value !== null);
  return last ? unit(/** @type {number} */ (last[1])) : "–";
}

/** @param {Series} series @param {number} at @param {(value: number) => string} unit */
function valueAt(series, at, unit) {
  let best = null;
  for (const point of series.points) {
    if (point[1] !== null && (!best || Math.abs(point[0] - at) < Math.abs(best[0] - at))) best = point;
  }
  return best ? unit(/** @type {number} */ (best[1])) : "–";
}

/**
 * @param {[number, number | null][]} points
 * @param {(at: number) => number} x
 * @param {(value: number) => number} y
 */
function path(points, x, y) {
  let open = false;
  const parts = [];
  points.forEach(([at, value], index) => {
    if (value === null) {
      open = false;
      return;
    }
    const alone = !open && (points[index + 1]?.[1] ?? null) === null;
    parts.push(`${open ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}${alone ? "m-4 0h4" : ""}`);
    open = true;
  });
  return parts.join("") || "M0 0";
}

/** The next round number. @param {number} value */
function nice(value) {
  const base = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((times) => times * base).find((one) => one >= value - 1e-9) ?? 10 * base;
}
