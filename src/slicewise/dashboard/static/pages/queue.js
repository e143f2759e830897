/** Queue: queued requests and why they wait, in the order in which they are served. */

import { labelText, Table } from "../look/table.js";
import { pages, part, send } from "../shell/api.js";
import { button, fill, h, id } from "../shell/dom.js";
import { ago, clock, count } from "../shell/format.js";
import { attempt, confirm, loading, standIn } from "../shell/notice.js";
import { asked } from "./allocations.js";
import { keepFresh } from "./refreshing.js";

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export function show(element, context) {
  const { may, go, signal } = context;
  const table = new Table({
    caption: "Requests that wait",
    key: (one) => one.id,
    words: (one) => [one.id, one.tenant, one.profile, one.waiting?.reason, one.waiting?.detail, labelText(one.labels)].join(" "),
    empty: standIn("empty", "The queue is empty", "Requests that may wait appear here when they do not fit."),
    columns: [
      { name: "Place", cell: (one) => one.waiting?.position ?? "–", sort: (one) => one.waiting?.position ?? 0, number: true },
      { name: "Allocation", cell: (one) => id(one.id) },
      { name: "Tenant", cell: (one) => one.tenant, sort: (one) => one.tenant },
      { name: "Asks for", tight: true, cell: asked, sort: asked },
      { name: "Priority", cell: (one) => one.priority, sort: (one) => one.priority, number: true },
      { name: "Waits", tight: true, cell: (one) => [ago(one.requested_at).replace(" ago", ""),
        one.waiting?.deadline && h("div", { class: "soft small" }, `gives up ${clock(one.waiting.deadline)}`)], sort: (one) => one.requested_at },
      { name: "Why", free: true, cell: (one) => one.waiting?.detail ?? "–" },
      { name: "Labels", free: true, cell: (one) => labelText(one.labels) || "–", sort: (one) => labelText(one.labels) },
      { name: "actions", cell: (one) => h("div", { class: "row" },
        may("staff") && one.waiting?.reason === "fragmented" && button("Plan moves", () => go("defrag", `?profile=${part(one.profile ?? "")}`), { class: "small" }),
        may("use") && button("Cancel", () => cancel(one), { class: "small danger", "aria-label": `Cancel ${one.id}` })) },
    ],
  });
  const told = h("p", { class: "soft small", role: "status" });
  const list = h("div", {});
  fill(element, h("div", { class: "bar" }, h("h1", {}, "Queue"),
    h("p", { class: "soft" }, "Served by priority, then in the order of arrival; smaller ones may go ahead a limited number of times.")),
  h("div", { class: "tools" }, table.search), told, list);

  async function load() {
    await loading(list, "the queue", async () => {
      const found = [];
      let waiting = 0;
      for await (const page of pages("/v1/queue", { limit: 1000 }, 5, signal)) {
        found.push(...page.allocations);
        waiting = page.waiting;
      }
      return { found, waiting };
    }, ({ found, waiting }) => {
      if (!list.contains(table.element)) fill(list, table.element);
      table.rows = found;
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

  keepFresh(context, load, { kinds: /^(queued|served|ended|allocated|overtaken)/ });
  load();
}
