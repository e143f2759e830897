/** Overview: acceptance, rejections, capacity and queue over time, as this process saw them. */

import { lineChart } from "../look/chart.js";
import { pill, Table } from "../look/table.js";
import { get } from "../shell/api.js";
import { choice, fill, h } from "../shell/dom.js";
import { clock, count, duration, percent } from "../shell/format.js";
import { loading, standIn } from "../shell/notice.js";
import { keepFresh } from "./refreshing.js";
import { renderPolicy } from "./rehearsal_panel.js";

const WINDOWS = [["900", "15 minutes"], ["3600", "hour"], ["21600", "6 hours"], ["86400", "day"]];
const REFRESH = 5000;
const LINES = 7;

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export function show(element, context) {
  const { live, signal, who } = context;
  let seconds = 3600;
  const figures = h("div", { class: "figures" });
  const charts = Array.from({ length: 6 }, () => h("div", { class: "chart card" }));
  const note = h("p", { class: "soft" });
  const table = new Table({
    caption: "Rejected requests",
    key: (one) => String(one.seq),
    words: (one) => [one.tenant, one.wanted, one.reason, one.detail].join(" "),
    empty: standIn("empty", "No rejected requests", "Rejected requests appear here, each with the reason."),
    columns: [
      { name: "When", tight: true, cell: (one) => clock(one.at) },
      { name: "Tenant", cell: (one) => one.tenant, sort: (one) => one.tenant },
      { name: "Requested", tight: true, cell: (one) => (one.count > 1 ? `${one.count} × ${one.wanted}` : one.wanted), sort: (one) => one.wanted },
      { name: "Reason", cell: (one) => pill(one.reason), sort: (one) => one.reason },
      { name: "Why", free: true, cell: (one) => one.detail },
    ],
  });
  const ground = h("div", {});
  fill(element,
    h("div", { class: "bar" }, h("h1", {}, "Overview"), note),
    h("div", { class: "tools" }, choice("The last", WINDOWS, String(seconds), (value) => { seconds = Number(value); load(); })),
    ground);
  const policy = h("div", { class: "card" });
  const scene = [figures, h("div", { class: "grid" }, charts),
    h("h2", { class: "under" }, "How requests are placed"), policy,
    h("h2", { class: "under" }, "Rejected requests, and why"), h("div", { class: "tools" }, table.search), table.element];

  async function load() {
    const both = () => Promise.all([get("/v1/stats", { seconds, rejections: 200 }, signal), get("/v1/policy", {}, signal)]);
    await loading(ground, "the last hour", both, ([view, status]) => {
      if (!ground.contains(figures)) fill(ground, scene);
      render(view);
      renderPolicy(policy, status);
    });
  }

  /** @param {any} view */
  function render(view) {
    const { points } = view;
    const now = points.at(-1);
    const sum = (of) => points.reduce((total, point) => total + of(point), 0);
    const refusals = (point) => Object.values(point.rejected).reduce((total, times) => total + times, 0);
    const accepted = sum((point) => point.accepted);
    const rejected = sum(refusals);
    const waits = sum((point) => point.waited);
    const wait = sum((point) => (point.mean_wait ?? 0) * point.waited);
    fill(note, `${who.tenant ? "Your own requests; capacity is that of the whole cluster. " : ""}Seen by this process since ${clock(view.since)}.`);
    const figure = (name, value, more) => h("div", { class: "card figure" },
      h("div", { class: "soft small" }, name), h("div", { class: "value", data: { figure: name } }, value), h("div", { class: "soft small" }, more));
    fill(figures,
      figure("Accepted", percent(accepted, accepted + rejected, 1), `${count(accepted)} of ${count(accepted + rejected)} requests`),
      figure("Rejected", count(rejected), topReason(points)),
      figure("Slices taken", percent(now.slices - now.free_slices, now.slices), `${count(now.free_slices)} of ${count(now.slices)} free`),
      figure("Mean F", now.fragmentation.toFixed(2), "room lost to fragmentation"),
      figure("Waiting", count(now.waiting), waits ? `${count(waits)} served after ${duration(wait / waits)} on average` : "none served from the queue"),
      figure("Instances", count(now.instances), live.totals ? `on ${count(live.totals.active_gpus)} of ${count(live.totals.gpus)} GPUs` : ""));
    const to = Date.parse(now.at);
    const from = Math.max(to - seconds * 1000, Math.min(Date.parse(points[0].at), to - 60000));
    const at = points.map((point) => Date.parse(point.at));
    const line = (name, of) => ({ name, points: points.map((point, index) => [at[index], of(point)]) });
    // The last interval is incomplete: its counts would look like a drop.
    const counted = (name, of) => ({ name, points: line(name, of).points.slice(0, points.length > 1 ? -1 : undefined) });
    const draw = (index, title, series, more = {}) => lineChart(charts[index], {
      title, series, from, to, across: (value) => new Date(value).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" }), ...more });
    const each = `each ${duration(view.step)}`;
    const reasons = [...new Set(points.flatMap((point) => Object.keys(point.rejected)))].sort();
    draw(0, `Requests, ${each}`, [counted("accepted", (point) => point.accepted), counted("had to wait", (point) => point.queued), counted("rejected", refusals)]);
    draw(1, `Rejections by reason, ${each}`, reasons.length ? reasons.map((reason) => counted(reason, (point) => point.rejected[reason] ?? 0)) : [line("rejected", () => 0)]);
    draw(2, "Slices taken", [line("taken", (point) => (point.slices ? (100 * (point.slices - point.free_slices)) / point.slices : null))], { most: 100, unit: (value) => `${Math.round(value)}%` });
    draw(3, "Fragmentation, mean F of a GPU", [line("F", (point) => point.fragmentation)], { unit: (value) => value.toFixed(value < 10 ? 2 : 0) });
    draw(4, "Placements left, by profile", chosen(now.placements).map((name) => line(name, (point) => point.placements[name] ?? null)));
    draw(5, "Queue", [line("waiting", (point) => point.waiting), line("mean wait, s", (point) => point.mean_wait), line("longest wait, s", (point) => point.longest_wait)]);
    table.rows = view.rejections;
  }

  /** The profiles to show: the plain ones, the largest first. @param {Record<string, number>} placements */
  function chosen(placements) {
    const plain = new Map();
    for (const geometry of live.geometries.values()) {
      for (const profile of geometry.plain) if (profile.name in placements) plain.set(profile.name, profile.size);
    }
    return [...plain].sort((one, other) => other[1] - one[1]).slice(0, LINES).map(([name]) => name);
  }

  keepFresh(context, load, { every: 1500 });
  const timer = setInterval(() => { if (!document.hidden) load(); }, REFRESH);
  signal.addEventListener("abort", () => clearInterval(timer));
  load();
}

/** @param {any[]} points */
function topReason(points) {
  const sums = new Map();
  for (const point of points) for (const [reason, times] of Object.entries(point.rejected)) sums.set(reason, (sums.get(reason) ?? 0) + times);
  const [top] = [...sums].sort((one, other) => other[1] - one[1]);
  return top ? `mostly ${top[0]} (${count(top[1])})` : "none";
}
