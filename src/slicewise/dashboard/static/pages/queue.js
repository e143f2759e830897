/** Queue: its lines in fair order and why they wait, and the single requests. */

import { labelText, Table } from "../look/table.js";
import { pages, part, send } from "../shell/api.js";
import { button, fill, h, id } from "../shell/dom.js";
import { ago, clock, count, percent } from "../shell/format.js";
import { attempt, confirm, loading, standIn } from "../shell/notice.js";
import { asked } from "./allocations.js";
import { keepFresh } from "./refreshing.js";

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export function show(element, context) {
  const { may, go, signal } = context;
  const table = new Table({
    caption: "Single requests, oldest first",
    key: (one) => one.id,
    words: (one) => [one.id, one.tenant, one.profile, one.waiting?.reason, one.waiting?.detail, labelText(one.labels)].join(" "),
    empty: standIn("empty", "No request waits", ""),
    columns: [
      { name: "Place", cell: (one) => one.waiting?.position ?? "–", sort: (one) => one.waiting?.position ?? 0, number: true },
      { name: "Allocation", cell: (one) => id(one.id) },
      { name: "Tenant", cell: (one) => one.tenant, sort: (one) => one.tenant },
      { name: "Asks for", tight: true, cell: asked, sort: asked },
      { name: "Priority", cell: (one) => one.priority, sort: (one) => one.priority, number: true },
      { name: "Waits", tight: true, cell: (one) => [ago(one.requested_at).replace(" ago", ""),
        one.waiting?.deadline && h("div", { class: "soft small" }, `gives up ${clock(one.waiting.deadline)}`)], sort: (one) => one.requested_at },
      { name: "Expected", tight: true, cell: (one) => one.waiting?.expected_at ? `by ${clock(one.waiting.expected_at)}` : "not known" },
      { name: "Why", free: true, cell: (one) => one.waiting?.detail ?? "–" },
      { name: "Labels", free: true, cell: (one) => labelText(one.labels) || "–", sort: (one) => labelText(one.labels) },
      { name: "actions", cell: (one) => h("div", { class: "row" },
        may("staff") && one.waiting?.reason === "fragmented" && button("Plan moves", () => go("defrag", `?profile=${part(one.profile ?? "")}`), { class: "small" }),
        may("use") && button("Cancel", () => cancel(one), { class: "small danger", "aria-label": `Cancel ${one.id}` })) },
    ],
  });
  const lines = new Table({
    caption: "Lines, in the order in which they are served",
    key: (line) => line.first,
    words: (line) => [line.tenant, asked(line), line.reason, line.detail].join(" "),
    empty: standIn("empty", "The queue is empty", "Requests that may wait appear here when they do not fit."),
    columns: [
      { name: "Tenant", cell: (line) => line.tenant, sort: (line) => line.tenant },
      { name: "Asks for", tight: true, cell: asked, sort: asked },
      { name: "Requests", cell: (line) => line.waiting, sort: (line) => line.waiting, number: true },
      { name: "Oldest waits", tight: true, cell: (line) => ago(line.oldest).replace(" ago", ""), sort: (line) => line.oldest },
      { name: "Share", tight: true, cell: (line) => [percent(line.share, 1, 1),
        line.within_guarantee && h("div", { class: "soft small" }, "within its guarantee")], sort: (line) => line.share },
      { name: "Expected", tight: true, cell: (line) => line.expected_at ? `by ${clock(line.expected_at)}` : "not known", sort: (line) => line.expected_at ?? "~" },
      { name: "Why the first waits", free: true, cell: (line) => [h("span", { class: "pill" }, line.reason), ` ${line.detail}`], sort: (line) => line.reason },
      { name: "actions", cell: (line) => h("div", { class: "row" },
        may("staff") && line.reason === "fragmented" && button("Plan moves", () => go("defrag", `?profile=${part(line.wanted.profile ?? "")}`), { class: "small" })) },
    ],
  });
  const told = h("p", { class: "soft small", role: "status" });
  const list = h("div", {});
  const single = h("section", {}, h("h2", { class: "under" }, "Requests"), h("div", { class: "tools" }, table.search), told, table.element);
  fill(element, h("div", { class: "bar" }, h("h1", {}, "Queue"),
    h("p", { class: "soft" }, "A line holds the requests of one tenant for the same instances. The tenant with the least in use for its weight is served first, "
      + "guarantees before all; windows are reserved for requests that wait long.")),
  list, single);

  async function load() {
    await loading(list, "the queue", async () => {
      const found = [];
      let waiting = 0;
      let inLine = [];
      for await (const page of pages("/v1/queue", { limit: 1000 }, 5, signal)) {
        found.push(...page.allocations);
        waiting = page.waiting;
        inLine = page.lines;
      }
      return { found, waiting, inLine };
    }, ({ found, waiting, inLine }) => {
      if (!list.contains(lines.element)) fill(list, lines.element);
      lines.rows = inLine;
      table.rows = found;
      single.hidden = !found.length;
      fill(told, waiting > found.length ? `The first ${count(found.length)} of ${count(waiting)} are loaded, and searched.` : "");
    });
  }

  /** @param {any} one */
  async function cancel(one) {
    const sure = await confirm({ title: "Stop waiting?", act: "Stop waiting", danger: true,
      text: `The request of ${one.tenant} for ${asked(one)} leaves the queue.` });
    if (!sure) return;
    await attempt(() => send("DELETE", `/v1/allocations/${part(one.id)}`), `Cancelled ${one.id}`);
    load();
  }

  keepFresh(context, load, { kinds: /^(queued|served|ended|allocated|reserved|moved)/ });
  load();
}
