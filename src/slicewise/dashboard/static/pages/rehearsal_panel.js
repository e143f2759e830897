/** The table that places requests: which, since when, and what the last rehearsal found. */

import { pill } from "../look/table.js";
import { fill, h } from "../shell/dom.js";
import { clock, count, duration, percent, plural } from "../shell/format.js";

const ACTIVITIES = {
  off: "Rehearsals are off",
  elsewhere: "The leader rehearses",
  learning: "Rehearses once enough is known of the demand",
  running: "A rehearsal is running",
  waiting: "Rehearses when the demand changes, or the next rehearsal is due",
};
const MOST_SHARES = 6;

/** @param {HTMLElement} element @param {any} status what GET /v1/policy returned */
export function renderPolicy(element, status) {
  const { rehearsal, rehearsals } = status;
  fill(element,
    h("p", { data: { policy: status.table ?? status.policy } },
      h("strong", {}, status.table ?? status.policy), `: ${status.words.replace(/\.$/, "")}`,
      status.table && ` — ${status.since ? `since ${clock(status.since)}` : "from the beginning"}`,
      status.why && `; ${status.why}`, "."),
    status.table && facts(status),
    rehearsal && bars(rehearsal),
    rehearsals && h("p", { class: "soft small" }, `${ACTIVITIES[rehearsals.activity]}${rehearsals.detail ? `: ${rehearsals.detail}` : ""}.`));
}

/** What was asked for, and what became of it. @param {any} status */
function facts({ demand, seen, switches }) {
  if (!demand) return null;
  const parts = [];
  if (seen?.requests) parts.push(`${percent(seen.rejected, seen.requests, 2)} of ${plural(seen.requests, "request")} rejected since then`);
  if (demand.requests) {
    const shares = demand.shares.slice(0, MOST_SHARES).map((one) => `${text(one.wanted)} ${percent(one.share, 1)}`);
    const more = demand.shares.length - shares.length;
    parts.push(`asked for: ${shares.join(", ")}${more > 0 ? ` and ${count(more)} more` : ""}`);
  }
  if (demand.mean_lifetime !== null) parts.push(`mean lifetime ${duration(demand.mean_lifetime)}, ${percent(demand.stated, 1)} announced`);
  if (switches) parts.push(plural(switches, "change of table", "changes of table"));
  return h("p", { class: "soft small" }, parts.join(" · "));
}

/** @param {any} wanted */
function text(wanted) {
  const what = wanted.profile ?? `${wanted.need.compute} compute and ${wanted.need.memory_gb} GB`;
  return wanted.models.length ? `${what} on ${wanted.models.join(" or ")}` : what;
}

/** Expected rejections by candidate: a bar each, with its interval. @param {any} rehearsal */
function bars({ at, load, candidates }) {
  const sorted = [...candidates].sort((one, other) => one.rejected.value - other.rejected.value);
  const most = Math.max(...sorted.map((one) => one.rejected.high), 1e-9);
  const width = (value) => `${(100 * Math.max(0, value)) / most}%`;
  return h("div", {},
    h("h3", {}, `Expected rejections, rehearsed at ${clock(at)} at ${percent(load, 1)} load`),
    h("div", { class: "expected-wrap", tabindex: "0", role: "region", "aria-label": "Expected rejections by table" }, h("table", { class: "expected" },
      h("caption", { class: "unseen" }, "Share of requests that each table is expected to reject"),
      h("thead", {}, h("tr", {}, ["Table", "Rejected", "95% interval", "Slices", "Compared with least-lost"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, sorted.map((one) => h("tr", { data: { candidate: one.table } },
        h("th", { scope: "row", title: one.words }, one.table, " ", one.in_use && pill("in use")),
        h("td", { class: "number" }, percent(one.rejected.value, 1, 3)),
        h("td", { class: "span" },
          h("span", { class: "track", role: "img", "aria-label": `${percent(one.rejected.low, 1, 3)} to ${percent(one.rejected.high, 1, 3)}` },
            h("span", { class: one.in_use ? "length used" : "length", style: { width: width(one.rejected.value) } }),
            h("span", { class: "whisker", style: { left: width(one.rejected.low), width: width(one.rejected.high - Math.max(0, one.rejected.low)) } }))),
        h("td", { class: "number" }, percent(one.rejected_slices.value, 1, 3)),
        h("td", { class: "soft" }, compared(one))))))));
}

/** @param {any} one a candidate */
function compared({ table, fewer }) {
  if (table === "least-lost") return "";
  const [low, high] = [Math.min(Math.abs(fewer.low), Math.abs(fewer.high)), Math.max(Math.abs(fewer.low), Math.abs(fewer.high))];
  if (fewer.low > 0) return `${percent(low, 1, 3)} to ${percent(high, 1, 3)} fewer`;
  if (fewer.high < 0) return `${percent(low, 1, 3)} to ${percent(high, 1, 3)} more`;
  return "no certain difference";
}
