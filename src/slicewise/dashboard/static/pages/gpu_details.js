/** The details of one GPU: its instances and their tenants, its score F and the parts of it. */

import { bits } from "../look/geometry.js";
import { themed } from "../look/palette.js";
import { inWords, isForeign, reservedWords, stripCanvas } from "../look/strip.js";
import { get, part, send } from "../shell/api.js";
import { button, fill, h } from "../shell/dom.js";
import { ago, clock, plain, slices } from "../shell/format.js";
import { attempt, confirm } from "../shell/notice.js";

const NOTHING = ["–", "[]", "{}", "false", "0", ""];

/**
 * @param {HTMLElement} element
 * @param {import("../shell/live.js").Gpu | null} gpu
 * @param {import("../main.js").Context} context
 * @param {import("../look/strip.js").Look} look
 */
export function showDetails(element, gpu, context, look) {
  const { live } = context;
  const node = gpu && live.nodes.get(gpu.node);
  if (!gpu || !node) {
    delete element.dataset.key;
    fill(element, h("p", { class: "soft" }, "Choose a GPU to see what is on it and what still fits: "
      + "click it, or move over the map with the arrow keys."));
    return;
  }
  // Updated only when it changes, since screen readers announce updates.
  const key = JSON.stringify([gpu, node.state, node.more, themed("ink"), String(look.colour)]);
  if (element.dataset.key === key) return;
  element.dataset.key = key;
  const geometry = live.geometryOf(gpu);
  const strip = live.strip(gpu);
  const stranded = bits(strip.stranded);
  const free = strip.slices - bits(gpu.mask);
  const width = Math.min(300, Math.max(200, element.clientWidth - 34));
  const numbers = Array.from({ length: strip.slices }, (_, index) => h("span", {}, String(index)));
  fill(element,
    h("h2", {}, `${gpu.node} · GPU ${gpu.index}`),
    h("p", { class: "soft" }, `${node.model}, node ${node.state}; ${free} of ${strip.slices} slices free`
      + `${stranded === 0 ? "" : stranded === free ? ", all stranded" : `, ${stranded} of them stranded`}`),
    h("div", { class: "scale", style: { width: `${width + 2}px` } },
      stripCanvas(strip, { width, height: 30, label: inWords(strip), look }),
      h("div", { class: "numbers", "aria-hidden": "true" }, numbers)),
    gpu.reserved && h("p", { class: "reserved" }, `Its ${reservedWords(gpu.reserved)}.`),
    h("h3", {}, gpu.instances.length ? "Instances" : "Nothing runs here"),
    h("ul", { class: "instances" }, gpu.instances.map((one) => instance(one, context))),
    geometry && score(geometry, gpu.mask),
    more({ ...gpu.more, ...prefixed(node.more) }),
  );
}

/**
 * @param {import("../look/geometry.js").Instance} one
 * @param {import("../main.js").Context} context
 */
function instance(one, { may, go, signal }) {
  if (!one.allocation) {
    const whose = isForeign(one) ? "no allocation's" : "another tenant's";
    return h("li", {}, h("b", {}, one.profile), ` on ${slices(one.start, one.size)}, ${whose}`);
  }
  const id = one.allocation;
  const facts = h("span", { class: "soft" }, one.since ? `since ${clock(one.since / 1000)}` : "");
  const item = h("li", {},
    h("b", {}, one.profile), ` on ${slices(one.start, one.size)}, `, h("span", {}, one.tenant ?? ""), one.phase ? `, ${one.phase}` : "",
    h("br", {}), facts,
    h("div", { class: "row" },
      button("Show", () => go("allocations", `?search=${part(id)}`), { class: "small" }),
      may("use") && button("Release", () => release(id, one.profile), { class: "small danger" })));
  get(`/v1/allocations/${part(id)}`, {}, signal).then((view) => {
    const labels = Object.entries(view.labels).map(([key, value]) => `${key}=${value}`).join(", ");
    fill(facts, `since ${clock(view.placed_at)} (${ago(view.placed_at)})`
      + `${view.ends_at ? `, until ${clock(view.ends_at)}` : ""}${labels ? `; ${labels}` : ""}`
      + `${view.state === "placed" ? "" : `; ${view.state}`}`, view.env && h("div", { class: "id" }, view.env));
  }, () => {});
  return item;
}

/** @param {string} id @param {string} profile */
export async function release(id, profile) {
  const sure = await confirm({ title: "Release this allocation?", danger: true, act: "Release",
    text: `The instance ${profile} of allocation ${id} ends, and its slices are free.` });
  if (sure) await attempt(() => send("DELETE", `/v1/allocations/${part(id)}`), `Released ${id}`);
}

/** @param {import("../look/geometry.js").Geometry} geometry @param {number} mask */
function score(geometry, mask) {
  const parts = geometry.parts(mask);
  const total = geometry.score(mask);
  const list = (starts) => (starts.length ? starts.join(", ") : "–");
  return h("section", {},
    h("h3", {}, `Fragmentation F = ${total}`),
    h("p", { class: "soft small" }, total
      ? "Each window that is blocked in part, of a profile for which enough slices are free, adds its size."
      : "No window is blocked in part for a profile that would fit by its size."),
    h("table", { class: "tight" },
      h("thead", {}, h("tr", {}, ["Profile", "Open at", "Blocked at", "Adds"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, parts.map(({ profile, open, blocked, adds }) => h("tr", {},
        h("td", {}, profile.name), h("td", {}, list(open)), h("td", {}, list(blocked)),
        h("td", { class: "number" }, adds ? `${blocked.length} × ${profile.size} = ${adds}` : "0"))))));
}

/** What the service says beyond what this page knows. @param {Record<string, unknown>} fields */
function more(fields) {
  const known = Object.entries(fields).filter(([, value]) => !NOTHING.includes(plain(value)));
  if (!known.length) return null;
  return h("section", {}, h("h3", {}, "Also known"), h("dl", { class: "facts" },
    known.map(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, plain(value))]).flat()));
}

/** @param {Record<string, unknown>} fields */
function prefixed(fields) {
  return Object.fromEntries(Object.entries(fields).map(([name, value]) => [`node ${name}`, value]));
}
