/** Cluster: every GPU as its strip of slices, live. */

import { bits } from "../look/geometry.js";
import { age, ages, profileColour, FOREIGN, theme } from "../look/palette.js";
import { shortProfile } from "../look/strip.js";
import { pages } from "../shell/api.js";
import { choice, fill, h, setOptions } from "../shell/dom.js";
import { clock, count, plural } from "../shell/format.js";
import { standIn } from "../shell/notice.js";
import { sentence } from "./activity.js";
import { ClusterMap } from "./cluster_map.js";
import { showDetails } from "./gpu_details.js";

const ROOM = [["", "any"], ["empty", "empty"], ["busy", "with instances"], ["full", "full"],
  ["stranded", "with stranded slices"], ["reserved", "with a reserved window"]];
const ZOOMS = [["9", "small"], ["15", "medium"], ["22", "large"]];
const ACTIVITY = 6;

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export function show(element, context) {
  const { live, signal } = context;
  const wanted = new URLSearchParams(location.search);
  const filter = { model: "", node: wanted.get("node") ?? "", tenant: "", state: "", room: "" };
  let colouring = "profile";
  /** @type {Map<string, number>} */
  const since = new Map();
  /** @type {import("../shell/live.js").Gpu | null} */
  let chosen = null;

  const look = () => ({
    colour: {
      profile: (one) => profileColour(one.profile, one.size),
      tenant: (one) => live.tenants.of(one.tenant),
      age: (one) => age(one.since ?? since.get(one.allocation ?? "")).colour,
    }[colouring],
    label: colouring === "tenant" ? (one) => one.tenant ?? "" : shortProfile,
    dim: filter.tenant ? (one) => one.tenant !== filter.tenant : undefined,
  });
  const details = h("aside", { class: "details", "aria-label": "The chosen GPU", "aria-live": "polite" });
  const map = new ClusterMap(live, { look, signal, chosen: (gpu) => {
    chosen = gpu;
    showDetails(details, gpu, context, look());
  } });
  const legend = h("div", { class: "legend", "aria-label": "Legend" });
  const summary = h("p", { class: "soft", id: "map-count" });
  const activity = h("ol", { class: "activity", "aria-label": "Recent events" });
  const stage = h("div", { class: "stage" });

  const model = choice("Model", [["", "all"]], "", (value) => { filter.model = value; arrange(); });
  const tenant = choice("Tenant", [["", "all"]], "", (value) => { filter.tenant = value; arrange(); });
  const state = choice("Node state", [["", "any"]], "", (value) => { filter.state = value; arrange(); });
  const node = h("label", { class: "field" }, h("span", {}, "Node"), h("input", {
    type: "search", placeholder: "name", value: filter.node,
    on: { input: (event) => { filter.node = event.target.value; arrange(); } },
  }));
  fill(element,
    h("div", { class: "bar" }, h("h1", {}, "Cluster"), summary),
    h("div", { class: "tools" },
      choice("Colour by", ["profile", "tenant", "age"], colouring, (value) => {
        colouring = value;
        if (value === "age") loadAges();
        refresh();
      }),
      model, node, tenant, state,
      choice("Room", ROOM, "", (value) => { filter.room = value; arrange(); }),
      choice("Size", ZOOMS, "15", (value) => map.zoom(Number(value)))),
    legend,
    h("p", { id: "map-help", class: "unseen" },
      "Each GPU is a strip of slices. Move between GPUs with the arrow keys; the chosen one is described beside the map."),
    stage,
    h("section", { class: "recent-events" }, h("h2", {}, "Recent events"), activity));

  function nodes() {
    const text = filter.node.trim().toLowerCase();
    return [...live.nodes.values()]
      .filter((one) => (!filter.model || one.model === filter.model)
        && (!filter.state || one.state === filter.state)
        && (!text || one.name.toLowerCase().includes(text)))
      .sort((a, b) => a.model.localeCompare(b.model)
        || a.name.localeCompare(b.name, "en", { numeric: true }));
  }

  /** @param {import("../shell/live.js").Gpu} gpu */
  function shown(gpu) {
    if (filter.tenant && !gpu.instances.some((one) => one.tenant === filter.tenant)) return false;
    if (!filter.room) return true;
    const strip = live.strip(gpu);
    const taken = bits(gpu.mask);
    if (filter.room === "empty") return taken === 0;
    if (filter.room === "busy") return taken > 0;
    if (filter.room === "reserved") return gpu.reserved !== null;
    if (filter.room === "full") return taken === strip.slices;
    return strip.stranded !== 0;
  }

  function arrange() {
    map.show(nodes(), shown);
    fill(summary, live.nodes.size ? `${count(map.count)} of ${plural(total(), "GPU")} shown` : "");
    const nothing = !live.nodes.size
      ? standIn("empty", "No nodes yet", "Register one with POST /v1/nodes, or start an agent on it.")
      : standIn("empty", "No GPU fits these filters", "Widen them to see more.");
    fill(stage, map.count ? map.element : nothing, details);
    if (map.count) map.layout();
  }

  function total() {
    let sum = 0;
    for (const one of live.nodes.values()) sum += one.gpus.length;
    return sum;
  }

  function offer() {
    const all = [...live.nodes.values()];
    const names = (values) => [...new Set(values)].sort();
    setOptions(model.querySelector("select"), [["", "all"], ...names(all.map((one) => one.model))], filter.model);
    setOptions(state.querySelector("select"), [["", "any"], ...names(all.map((one) => one.state))], filter.state);
    const tenants = live.tenantNames();
    live.tenants.know(tenants);
    setOptions(tenant.querySelector("select"), [["", "all"], ...tenants], filter.tenant);
  }

  function explain() {
    const entries = colouring === "age" ? ages
      : colouring === "tenant" ? [...live.tenantNames().slice(0, 12).map((name) => ({ words: name, colour: live.tenants.of(name) })),
        ...(live.who.tenant ? [{ words: "other tenants", colour: FOREIGN }] : [])]
        : profiles();
    const key = JSON.stringify([colouring, entries]);
    if (legend.dataset.key === key) return;
    legend.dataset.key = key;
    fill(legend,
      entries.map(({ words, colour }) => h("span", { class: "key" },
        h("i", { class: "swatch", style: { background: colour } }), words)),
      h("span", { class: "key" }, h("i", { class: "swatch free" }), "free"),
      h("span", { class: "key", title: "Free slices that are enough for a profile, and lie so that it has no window" },
        h("i", { class: "swatch stranded" }), "stranded"),
      h("span", { class: "key", title: "Windows that are kept for requests that have waited long" },
        h("i", { class: "swatch reserved" }), "reserved"),
      h("span", { class: "key" }, h("i", { class: "swatch score" }), "F, the longer the more room is lost"));
  }

  function profiles() {
    const seen = new Map();
    for (const one of new Set([...live.nodes.values()].map((each) => each.model))) {
      for (const profile of live.geometries.get(one)?.plain ?? []) {
        const colour = profileColour(profile.name, profile.size);
        const words = profile.name.split(".")[0] + (colour === profileColour("1g", 2) && profile.size > 1 && profile.compute === 1 ? " wide" : "");
        if (!seen.has(colour)) seen.set(colour, { words, colour });
      }
    }
    return [...seen.values()];
  }

  async function loadAges() {
    try {
      for await (const page of pages("/v1/allocations", { limit: 1000 }, 60, signal)) {
        for (const one of page.allocations) if (one.placed_at) since.set(one.id, Date.parse(one.placed_at));
        delete details.dataset.key;
        refresh();
      }
    } catch { /* ages stay unknown; the map says so */ }
  }

  let waiting = false;
  function refresh() {
    explain();
    if (chosen) {
      chosen = live.gpu(chosen.node, chosen.index);
      if (!details.contains(document.activeElement)) showDetails(details, chosen, context, look());
    }
    map.draw();
  }
  function changed() {
    if (waiting) return;
    waiting = true;
    setTimeout(() => {
      waiting = false;
      if (signal.aborted) return;
      offer();
      if (filter.tenant || filter.room) arrange();
      refresh();
    }, 250);
    map.draw();
  }
  function tell() {
    fill(activity, live.activity.length ? live.activity.slice(0, ACTIVITY).map((entry) =>
      h("li", {}, h("time", {}, clock(entry.at)), sentence(entry)))
      : h("li", { class: "soft" }, "Nothing has happened since you signed in."));
  }

  theme.addEventListener("change", refresh, { signal });
  live.addEventListener("nodes", () => { offer(); arrange(); }, { signal });
  live.addEventListener("change", changed, { signal });
  live.addEventListener("entries", tell, { signal });
  offer();
  arrange();
  explain();
  tell();
  showDetails(details, null, context, look());
}
