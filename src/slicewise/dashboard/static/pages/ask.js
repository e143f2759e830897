/** Ask: show where each policy would place a request; submit and release it. */

import { profileColour, theme, themed } from "../look/palette.js";
import { inWords, stripCanvas } from "../look/strip.js";
import { asQuery, get, pages, part, send } from "../shell/api.js";
import { button, choice, field, fill, h, setOptions } from "../shell/dom.js";
import { plural, slices } from "../shell/format.js";
import { attempt, notice, standIn } from "../shell/notice.js";
import { asked } from "./allocations.js";

const COMPARED = ["least-lost", "mfi", "best-fit", "first-fit", "worst-fit", "round-robin", "peer-nvidia-dra"];
const WAITS = [["0", "not at all"], ["60", "1 minute"], ["600", "10 minutes"], ["3600", "1 hour"], ["86400", "1 day"]];
const LEASES = [["", "until released"], ["600", "10 minutes"], ["3600", "1 hour"], ["86400", "1 day"]];

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export async function show(element, context) {
  const { live, who, signal } = context;
  const models = [...new Set([...live.nodes.values()].map((node) => node.model))].sort();
  if (!models.length) {
    fill(element, h("h1", {}, "Ask"), standIn("empty", "No nodes yet", "There is nothing to ask for until a node is registered."));
    return;
  }
  const want = { by: "profile", profile: "", compute: "1", memory: "10", model: "", count: "1", wait: "0",
    lease: "", priority: "0", labels: "", tenant: who.tenant ?? "default" };
  const known = (await get("/v1/policies", {}, signal)).policies.map((one) => one.name);
  const compared = COMPARED.filter((name) => known.includes(name)).slice(0, 8);

  const profile = choice("Profile", [], "", (value) => set("profile", value));
  const need = h("div", { class: "pair" },
    field("Compute, at least", { type: "number", min: "0", max: "64", value: want.compute, on: { input: typed("compute") } }),
    field("GB, at least", { type: "number", min: "0", max: "10000", value: want.memory, on: { input: typed("memory") } }));
  const radio = (value, words) => h("label", { class: "check" }, h("input", { type: "radio", name: "by", value,
    checked: want.by === value, on: { change: () => { want.by = value; form(); consult(); } } }), words);
  const tenant = choice("For tenant", [want.tenant], want.tenant, (value) => set("tenant", value));
  const go = button("Submit", submit, { class: "primary" });
  const verdict = h("div", { "aria-live": "polite" });
  const mine = h("div", {});
  fill(element,
    h("div", { class: "bar" }, h("h1", {}, "Ask"),
      h("p", { class: "soft" }, "See where a request would go and what it would cost the rest, before you send it.")),
    h("div", { class: "two" },
      h("div", { class: "card" },
        h("fieldset", {}, h("legend", { class: "unseen" }, "What to ask for"), radio("profile", "A profile"), radio("need", "A need")),
        profile, need,
        choice("On model", [["", "any"], ...models], "", (value) => { set("model", value); form(); }),
        h("div", { class: "pair" },
          field("How many", { type: "number", min: "1", max: "64", value: "1", on: { input: typed("count") } }),
          field("Priority", { type: "number", min: "-100", max: "100", value: "0", on: { input: typed("priority") } }),
          choice("It may wait", WAITS, "0", (value) => set("wait", value)),
          choice("It lasts", LEASES, "", (value) => set("lease", value))),
        field("Labels", { placeholder: "job=training-7, team=vision", on: { input: typed("labels") } }),
        who.tenant ? null : tenant,
        h("div", { class: "row" }, go),
        mine),
      verdict));

  function typed(name) {
    return (event) => set(name, event.target.value);
  }

  function set(name, value) {
    want[name] = value;
    consult();
  }

  function form() {
    profile.hidden = want.by !== "profile";
    need.hidden = want.by !== "need";
    const offered = new Map();
    for (const model of want.model ? [want.model] : models) {
      for (const one of live.geometries.get(model)?.profiles.values() ?? []) {
        offered.set(one.name, `${one.name} (${plural(one.size, "slice")}, ${one.compute} compute)`);
      }
    }
    if (!offered.has(want.profile)) want.profile = offered.has("3g.40gb") ? "3g.40gb" : [...offered.keys()][0];
    setOptions(/** @type {HTMLSelectElement} */ (profile.querySelector("select")), [...offered], want.profile);
  }

  function body() {
    const labels = Object.fromEntries(want.labels.split(",").map((text) => text.split("=").map((word) => word.trim()))
      .filter(([key, value]) => key && value !== undefined));
    return {
      ...(want.by === "profile" ? { profile: want.profile } : { need: { compute: Number(want.compute), memory_gb: Number(want.memory) } }),
      ...(want.model ? { models: [want.model] } : {}),
      count: Number(want.count), priority: Number(want.priority), wait_seconds: Number(want.wait),
      ...(want.lease ? { lease_seconds: Number(want.lease) } : {}),
      labels, tenant: want.tenant,
    };
  }

  let timer = 0;
  let turn = 0;
  function consult(wait = 200) {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      turn += 1;
      const mineTurn = turn;
      try {
        const view = await send("POST", `/v1/allocations/dry-run${asQuery({ alternatives: 4, policy: compared })}`, body());
        if (turn === mineTurn && !signal.aborted) showVerdict(view);
      } catch (error) {
        if (turn !== mineTurn || signal.aborted) return;
        told = "";
        fill(verdict, h("div", { class: "card verdict rejected" }, h("h2", {}, "This cannot be asked"),
          h("p", {}, error instanceof Error ? error.message : String(error))));
      }
    }, wait);
  }

  let told = "";
  /** @param {any} view */
  function showVerdict(view) {
    // Updated only when it changes, since screen readers announce updates.
    const strips = [...view.instances, ...view.alternatives].map((one) => live.gpu(one.node, one.gpu)?.mask);
    const key = JSON.stringify([{ ...view, seq: 0 }, strips, themed("ink")]);
    if (key === told) return;
    told = key;
    const [first] = view.instances;
    const sign = { placed: "✓", queued: "…", rejected: "✗" }[view.outcome];
    const title = { placed: "It would be placed", queued: "It would wait", rejected: `It would be rejected${view.reason ? `: ${view.reason}` : ""}` }[view.outcome];
    fill(verdict,
      h("div", { class: `card verdict ${view.outcome}`, id: "verdict" },
        h("h2", {}, `${sign} ${title}`), h("p", {}, view.detail),
        view.reason === "fragmented" && context.may("staff") && h("div", { class: "row" },
          button("Plan moves that make it fit", () => context.go("defrag", want.by === "profile" ? asQuery({ profile: want.profile }) : ""))),
        view.ahead > 0 && h("p", { class: "soft" }, `${plural(view.ahead, "request")} of this tenant wait${view.ahead === 1 ? "s" : ""} for the same already.`),
        h("div", { class: "choices" }, view.instances.slice(0, 8).map((one, index) => h("div", {},
          drawing(one, one.profile, one.size), index === 0 && view.cost && costs(view.cost))))),
      h("h2", { class: "under" }, "What each policy would do"),
      h("div", { class: "choices" }, together(view.policies).map((group) => policyCard(group, first, view))),
      view.alternatives.length ? h("h2", { class: "under" }, "Runners-up, and why they lost") : null,
      h("div", { class: "choices" }, view.alternatives.map((one) => h("div", { class: "card" },
        drawing(one, one.profile, sizeOf(one.model, one.profile)), costs(one.cost),
        h("p", { class: "soft small" }, one.why),
        one.alike > 1 && h("p", { class: "soft small" }, `${one.alike - 1} more like it.`)))));
  }

  /** Policies that would do the same, side by side. @param {any[]} choices */
  function together(choices) {
    /** @type {Map<string, any[]>} */
    const groups = new Map();
    for (const one of choices) {
      const key = JSON.stringify(one.spot ?? one.detail);
      groups.set(key, [...(groups.get(key) ?? []), one]);
    }
    return [...groups.values()];
  }

  /** @param {any[]} group @param {any} first @param {any} view */
  function policyCard(group, first, view) {
    const [one] = group;
    const title = h("h3", {}, group.map(({ policy }, index) => [index ? ", " : "", policy,
      policy === view.policy && h("span", { class: "pill good" }, "decides here")]).flat());
    if (!one.spot) return h("div", { class: "card" }, title, h("p", { class: "soft" }, `✗ ${one.detail}`));
    const same = first && one.spot.node === first.node && one.spot.gpu === first.gpu && one.spot.start === first.start;
    const chosen = first?.profile ?? want.profile;
    const model = live.nodes.get(one.spot.node)?.model ?? "";
    return h("div", { class: `card${same ? " same" : ""}` }, title,
      drawing(one.spot, chosen, sizeOf(model, chosen)), costs(one.cost));
  }

  /** @param {string} model @param {string} name */
  const sizeOf = (model, name) => live.geometries.get(model)?.profiles.get(name)?.size ?? 1;

  /** @param {any} spot @param {string} name @param {number} size */
  function drawing(spot, name, size) {
    const gpu = live.gpu(spot.node, spot.gpu);
    const words = `${spot.node} GPU ${spot.gpu}, ${slices(spot.start, size)}`;
    if (!gpu) return h("p", {}, words);
    const ghost = { profile: name, start: spot.start, size };
    return h("div", {}, h("p", { class: "small" }, words),
      stripCanvas({ ...live.strip(gpu), ghost }, { width: 232, height: 26,
        label: `${words}: ${name} would go there, beside ${inWords(live.strip(gpu))}`,
        look: { colour: (one) => profileColour(one.profile, one.size) } }));
  }

  /** @param {any} cost */
  function costs(cost) {
    if (!cost) return null;
    const signed = (value) => (value > 0 ? `+${value}` : String(value));
    return h("div", { class: "costs" },
      h("span", {}, "F ", h("b", {}, signed(cost.fragmentation.partial))),
      h("span", {}, "placements lost ", h("b", {}, String(cost.placements_lost))));
  }

  /** @type {any[]} */
  const sent = [];
  async function submit() {
    /** @type {HTMLButtonElement} */ (go).disabled = true;
    try {
      const view = await send("POST", "/v1/allocations", body(), { key: true });
      sent.unshift(view);
      notice(view.status === 201 ? `Placed ${asked(view)}` : `${asked(view)} waits`);
    } catch (error) {
      sent.unshift({ problem: error instanceof Error ? error.message : String(error), reason: error.reason });
      notice(error instanceof Error ? error.message : String(error), "bad");
    }
    /** @type {HTMLButtonElement} */ (go).disabled = false;
    showSent();
    consult(0);
  }

  function showSent() {
    fill(mine, h("h3", {}, "Sent from here"), h("ul", { class: "instances", id: "sent" }, sent.slice(0, 8).map((one) => {
      if (one.problem) return h("li", {}, h("span", { class: "pill bad" }, one.reason ? `rejected: ${one.reason}` : "refused"), h("div", {}, one.problem));
      const where = one.instances.map((piece) => `${piece.node} GPU ${piece.gpu}, ${slices(piece.start, piece.size)}`).join("; ");
      return h("li", {}, h("b", {}, asked(one)), ` ${one.ended ? "released" : where || `waits: ${one.waiting?.detail}`}`,
        h("div", { class: "row" }, h("span", { class: "id soft small" }, one.id),
          !one.ended && button("Release", async () => {
            if (await attempt(() => send("DELETE", `/v1/allocations/${part(one.id)}`), `Released ${one.id}`)) one.ended = true;
            showSent();
            consult(0);
          }, { class: "small danger", "aria-label": `Release ${one.id}` })));
    })));
  }

  if (!who.tenant) {
    (async () => {
      const names = [];
      for await (const page of pages("/v1/tenants", { limit: 1000 }, 5, signal)) names.push(...page.tenants.map((one) => one.name));
      setOptions(/** @type {HTMLSelectElement} */ (tenant.querySelector("select")), names, want.tenant);
    })().catch(() => {});
  }
  let fresh = 0;
  live.addEventListener("change", () => {
    if (!fresh) fresh = setTimeout(() => { fresh = 0; if (!signal.aborted) consult(0); }, 800);
  }, { signal });
  theme.addEventListener("change", () => consult(0), { signal });
  form();
  consult(0);
}
