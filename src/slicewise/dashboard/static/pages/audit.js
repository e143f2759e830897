/** Audit log: the journal, the newest entries first. */

import { Table } from "../look/table.js";
import { get } from "../shell/api.js";
import { button, choice, field, fill, h, id } from "../shell/dom.js";
import { clock } from "../shell/format.js";
import { loading, notice, standIn } from "../shell/notice.js";
import { sentence } from "./activity.js";
import { keepFresh } from "./refreshing.js";

const KINDS = [["", "all"], "allocated", "rejected", "queued", "served", "ended", "moved", "lease-extended", "lease-ending", "policy-chosen", "node-added",
  "node-turned", "node-removed", "model-entered", "model-forgotten", "tenant-set", "tenant-removed", "token-issued", "token-expiring", "token-revoked", "agent-joined", "part-turned",
  "node-held", "gpu-held", "foreign-seen", "foreign-evicted", "foreign-gone"];
const PAGE = 200;

/** What a token's bearer is, behind its id. @param {any} one */
const who = (one) => (one.role ? ` ${one.role}${one.note ? `: ${one.note}` : ""}` : "");

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export function show(element, context) {
  const { signal } = context;
  const wanted = { kind: "", tenant: "", subject: "" };
  /** @type {any[]} */
  let entries = [];
  let next = /** @type {string | null} */ (null);
  /** Counts reloads of the list: replies to earlier requests are discarded. */
  let turn = 0;
  const table = new Table({
    caption: "Entries of the journal",
    key: (one) => String(one.seq),
    words: (one) => [one.seq, one.kind, one.actor, one.note, one.origin, one.tenant, one.subject, sentence(one)].join(" "),
    empty: standIn("empty", "No entries", "Nothing of this kind has happened."),
    columns: [
      { name: "Entry", cell: (one) => one.seq, number: true },
      { name: "When", tight: true, cell: (one) => clock(one.at) },
      { name: "Kind", tight: true, cell: (one) => one.kind },
      { name: "Tenant", cell: (one) => one.tenant ?? "–" },
      { name: "What", free: true, cell: sentence },
      { name: "By", cell: (one) => [id(one.actor), who(one)] },
      { name: "From", tight: true, cell: (one) => one.origin || "–" },
    ],
  });
  const list = h("div", {});
  const more = button("Older entries", () => page(), { hidden: true });
  const typed = (name) => (event) => { wanted[name] = event.target.value.trim(); reload(); };
  fill(element, h("div", { class: "bar" }, h("h1", {}, "Audit log")),
    h("div", { class: "tools" }, table.search,
      choice("Kind", KINDS, "", (value) => { wanted.kind = value; reload(); }),
      field("Tenant", { type: "search", on: { change: typed("tenant") } }),
      field("Id or name", { type: "search", on: { change: typed("subject") } })),
    list, h("div", { class: "row" }, more));

  const ask = (cursor) => get("/v1/audit", { ...wanted, limit: PAGE, cursor }, signal);

  async function reload() {
    turn += 1;
    entries = [];
    await load();
  }

  async function load() {
    await loading(list, "the journal", () => ask(null), (view) => {
      if (!list.contains(table.element)) fill(list, table.element);
      const known = entries[0]?.seq ?? -1;
      const first = view.events.at(-1)?.seq ?? 0;
      if (first > known) {
        // The new page has a gap to the entries shown: replace them.
        turn += 1;
        entries = view.events;
        next = view.next;
      } else entries = [...view.events.filter((one) => one.seq > known), ...entries];
      render();
    });
  }

  async function page() {
    const mine = turn;
    more.toggleAttribute("disabled", true);
    try {
      const view = await ask(next);
      if (mine !== turn) return;
      entries = [...entries, ...view.events];
      next = view.next;
      render();
    } catch (error) {
      if (!signal.aborted) notice(error instanceof Error ? error.message : String(error), "bad");
    } finally {
      more.toggleAttribute("disabled", false);
    }
  }

  function render() {
    table.rows = entries;
    more.hidden = next === null;
  }

  keepFresh(context, load, { every: 2000 });
  load();
}
