/** Tenants and quotas: what each holds and may hold. */

import { meter, shareBar, Table } from "../look/table.js";
import { pages, part, send } from "../shell/api.js";
import { button, field, fill, h } from "../shell/dom.js";
import { attempt, confirm, loading, standIn } from "../shell/notice.js";
import { keepFresh } from "./refreshing.js";

/** The terms of a tenant: the field, its label, its value when left empty, its minimum. */
const TERMS = [
  ["memory_slices", "Slices at a time", null, "0"],
  ["compute_slices", "Compute slices at a time", null, "0"],
  ["instances", "Instances at a time", null, "0"],
  ["requests_per_second", "Requests a second", null, "0"],
  ["weight", "Weight among tenants", 1, "0.001"],
  ["guarantee", "Guaranteed slices", 0, "0"],
  ["max_priority", "Highest priority against other tenants", 0, "-100"],
  ["default_lease_seconds", "Usual lease in seconds", null, "0"],
  ["max_lease_seconds", "Longest lease in seconds", null, "0"],
];

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export function show(element, context) {
  const { live, may, go, signal, who } = context;
  let weights = 0;
  const admin = may("admin");
  const table = new Table({
    caption: "Tenants",
    key: (one) => one.name,
    words: (one) => one.name,
    empty: standIn("empty", "No tenants", "An admin creates them."),
    columns: [
      { name: "Tenant", cell: (one) => button(one.name, () => go("allocations", `?search=${part(one.name)}`), { class: "quiet", title: "Show its allocations" }), sort: (one) => one.name },
      { name: "Slices", tight: true, cell: (one) => meter(one.usage.memory_slices, one.quota.memory_slices), sort: (one) => one.usage.memory_slices },
      { name: "Compute", tight: true, cell: (one) => meter(one.usage.compute_slices, one.quota.compute_slices), sort: (one) => one.usage.compute_slices },
      { name: "Instances", tight: true, cell: (one) => meter(one.usage.instances, one.quota.instances), sort: (one) => one.usage.instances },
      { name: "Share", tight: true, cell: share, sort: (one) => one.usage.memory_slices / (one.quota.weight ?? 1) },
      { name: "Waiting", cell: (one) => one.usage.waiting, sort: (one) => one.usage.waiting, number: true },
      { name: "Requests a second", cell: (one) => one.quota.requests_per_second ?? "as for all", number: true },
      { name: "Highest priority", cell: (one) => one.quota.max_priority ?? 0, number: true },
      { name: admin ? "actions" : "", cell: (one) => h("div", { class: "row" },
        button("Quota", () => change(one), { class: "small", "aria-label": `Change the quota of ${one.name}` }),
        one.usage.instances + one.usage.waiting === 0 && button("Remove", () => remove(one), { class: "small danger", "aria-label": `Remove ${one.name}` })) },
    ],
  });
  const list = h("div", {});
  fill(element, h("div", { class: "bar" }, h("h1", {}, "Tenants and quotas")),
    h("div", { class: "tools" }, table.search, admin && button("Create a tenant", create)), list);

  async function load() {
    await loading(list, "tenants", async () => {
      const found = [];
      for await (const page of pages("/v1/tenants", { limit: 1000 }, 10, signal)) found.push(...page.tenants);
      return found;
    }, (found) => {
      if (!list.contains(table.element)) fill(list, table.element);
      weights = found.reduce((sum, one) => sum + (one.quota.weight ?? 1), 0);
      table.rows = found;
    });
  }

  /** What a tenant holds of the cluster, against its guarantee and its part by weight. @param {any} one */
  function share(one) {
    const all = live.totals?.slices ?? 0;
    const weight = one.quota.weight ?? 1;
    // A tenant sees no others, and so cannot know what its weight is worth.
    const fair = who.tenant === null && weights ? (all * weight) / weights : null;
    return shareBar(one.usage.memory_slices, all, one.quota.guarantee ?? 0, weight, fair);
  }

  /** @param {Record<string, number | null>} quota */
  const inputs = (quota) => TERMS.map(([name, label, empty, min]) => field(String(label), { name, type: "number", step: "any",
    min, placeholder: empty === null ? "no limit" : String(empty), value: quota[String(name)] ?? "" }));
  /** @param {FormData} form */
  const limits = (form) => Object.fromEntries(TERMS.map(([name, , empty]) => {
    const text = String(form.get(String(name)) ?? "").trim();
    return [name, text === "" ? empty : Number(text)];
  }));

  async function create() {
    const name = field("Name", { name: "name", required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]{0,62}" });
    const form = await confirm({ title: "Create a tenant", act: "Create", text: "Limits left empty are none.", body: [name, ...inputs({})] });
    if (!form) return;
    await attempt(() => send("POST", "/v1/tenants", { name: form.get("name"), quota: limits(form) }), `Tenant ${form.get("name")} created`);
    load();
  }

  /** @param {any} one */
  async function change(one) {
    const form = await confirm({ title: `Quota of ${one.name}`, act: "Change", text: "Limits left empty are none.", body: inputs(one.quota) });
    if (!form) return;
    await attempt(() => send("PATCH", `/v1/tenants/${part(one.name)}`, { quota: limits(form) }), `Quota of ${one.name} changed`);
    load();
  }

  /** @param {any} one */
  async function remove(one) {
    const sure = await confirm({ title: `Remove ${one.name}?`, act: "Remove", danger: true, text: "Its tokens are void from then on." });
    if (!sure) return;
    await attempt(() => send("DELETE", `/v1/tenants/${part(one.name)}`), `Tenant ${one.name} removed`);
    load();
  }

  keepFresh(context, load, { kinds: /^(tenant|allocated|served|queued|ended)/, every: 1500 });
  load();
}
