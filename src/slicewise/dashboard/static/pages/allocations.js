/** Allocations, current and ended. */

import { labelText, pill, Table } from "../look/table.js";
import { pages, part, send } from "../shell/api.js";
import { button, choice, fill, h, id } from "../shell/dom.js";
import { ago, clock, count, slices } from "../shell/format.js";
import { attempt, confirm, loading, standIn } from "../shell/notice.js";
import { keepFresh } from "./refreshing.js";
import { wanted } from "./activity.js";

const STATES = [["", "living"], ["placed", "placed"], ["creating", "creating"], ["active", "active"],
  ["queued", "queued"], ["releasing", "releasing"], ["released", "released"], ["failed", "failed"],
  ["cancelled", "cancelled"]];
const ENDED = ["released", "failed", "cancelled"];
/** How many are loaded at first, and with every click on the button. */
const AT_A_TIME = 1000;
/** Pages of ended allocations may be short: how many to request until there are enough. */
const PAGES_AT_A_TIME = 5;

/** What was asked for. @param {any} one */
export const asked = (one) => wanted({ profile: one.wanted.profile ?? (one.wanted.need ? null : one.profile),
  compute: one.wanted.need?.compute, memory_gb: one.wanted.need?.memory_gb }, one.count);

/** Where it is. @param {any} one */
export const places = (one) => one.instances.map((piece) => h("div", {}, `${piece.node} GPU ${piece.gpu}, ${slices(piece.start, piece.size)}`,
  piece.env && h("div", { class: "id soft" }, piece.env)));

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export function show(element, context) {
  const { may, signal } = context;
  const query = new URLSearchParams(location.search);
  let state = query.get("state") ?? "";
  const table = new Table({
    caption: "Allocations",
    search: query.get("search") ?? "",
    key: (one) => one.id,
    words: (one) => [one.id, one.state, one.tenant, one.profile, one.node, one.model, labelText(one.labels), one.cause,
      ...one.instances.map((piece) => piece.node)].join(" "),
    empty: standIn("empty", "No allocations here", "What is asked for and placed appears in this table by itself."),
    columns: [
      { name: "Allocation", cell: (one) => id(one.id), sort: (one) => one.id },
      { name: "State", cell: (one) => [pill(one.state), one.detail && h("div", { class: "soft small" }, one.detail)], sort: (one) => one.state },
      { name: "Tenant", cell: (one) => one.tenant, sort: (one) => one.tenant },
      { name: "Profile", tight: true, cell: asked, sort: (one) => one.profile ?? "" },
      { name: "Place", cell: (one) => (one.instances.length ? places(one) : one.waiting?.detail ?? "–"), sort: (one) => one.node ?? "" },
      { name: "Since", tight: true, cell: (one) => [ago(one.placed_at ?? one.requested_at), one.ended_at ? h("div", { class: "soft small" }, `ended ${ago(one.ended_at)}, ${one.cause}`)
        : one.ends_at && h("div", { class: "soft small" }, `until ${clock(one.ends_at)}`)], sort: (one) => one.placed_at ?? one.requested_at },
      { name: "Labels", free: true, cell: (one) => labelText(one.labels) || "–", sort: (one) => labelText(one.labels) },
      { name: may("use") ? "actions" : "", cell: (one) => !one.ended_at && button("Release", () => release(one), {
        class: "small danger", "aria-label": `Release ${one.id}` }) },
    ],
  });
  let most = AT_A_TIME;
  const told = h("p", { class: "soft small", role: "status" });
  const more = button("Load older ones", async () => {
    most += AT_A_TIME;
    more.toggleAttribute("disabled", true);
    await load();
    more.toggleAttribute("disabled", false);
  }, { hidden: true });
  const list = h("div", {});
  fill(element, h("div", { class: "bar" }, h("h1", {}, "Allocations")),
    h("div", { class: "tools" }, table.search, choice("State", STATES, state, (value) => { state = value; most = AT_A_TIME; load(); })),
    h("div", { class: "row" }, told, more), list);

  async function load() {
    await loading(list, "allocations", async () => {
      const found = [];
      let last = { next: null, total: null };
      const asking = pages("/v1/allocations", { limit: AT_A_TIME, state, newest: true },
        PAGES_AT_A_TIME * (most / AT_A_TIME), signal);
      for await (const page of asking) {
        found.push(...page.allocations);
        last = page;
        if (found.length >= most) break;
      }
      return { found, last };
    }, ({ found, last }) => {
      if (!list.contains(table.element)) fill(list, table.element);
      table.rows = found;
      more.hidden = last.next === null;
      const some = ENDED.includes(state) ? `The ${count(found.length)} that ended last`
        : `The newest ${count(found.length)} of ${count(last.total)}`;
      fill(told, last.next === null ? "" : `${some} are loaded, and searched.`);
    });
  }

  /** @param {any} one */
  async function release(one) {
    const sure = await confirm({ title: "Release this allocation?", act: "Release", danger: true,
      text: `${asked(one)} of ${one.tenant} (${one.id}) ends, and its slices are free.` });
    if (!sure) return;
    await attempt(() => send("DELETE", `/v1/allocations/${part(one.id)}`), `Released ${one.id}`);
    load();
  }

  keepFresh(context, load, { kinds: /^(allocated|served|queued|ended|moved|part|lease)/ });
  load();
}

