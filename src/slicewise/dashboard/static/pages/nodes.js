/** Nodes: how full they are, and taking them out of service: cordon, drain, remove. */

import { labelText, meter, pill, Table } from "../look/table.js";
import { part, send } from "../shell/api.js";
import { button, choice, field, fill, h } from "../shell/dom.js";
import { plain, plural } from "../shell/format.js";
import { attempt, confirm, standIn } from "../shell/notice.js";

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export function show(element, context) {
  const { live, may, go, signal } = context;
  const staff = may("staff");
  const table = new Table({
    caption: "Nodes",
    key: (one) => one.name,
    words: (one) => [one.name, one.model, one.state, labelText(one.labels), plain(one.holds ?? {})].join(" "),
    empty: standIn("empty", "No nodes yet", staff ? "Register the first one." : "An operator registers them."),
    columns: [
      { name: "Node", cell: (one) => button(one.name, () => go("cluster", `?node=${part(one.name)}`), { class: "quiet", title: "Show it on the map" }), sort: (one) => one.name },
      { name: "Model", cell: (one) => one.model, sort: (one) => one.model },
      { name: "State", cell: (one) => [pill(one.state), ...holds(one)], sort: (one) => one.state },
      { name: "GPUs", cell: (one) => one.gpus, sort: (one) => one.gpus, number: true },
      { name: "Instances", cell: (one) => one.instances, sort: (one) => one.instances, number: true },
      { name: "Slices taken", tight: true, cell: (one) => progress(one), sort: (one) => (one.slices - one.free_slices) / one.slices },
      { name: "Labels", free: true, cell: (one) => labelText(one.labels) || "–" },
      { name: staff ? "actions" : "", cell: (one) => h("div", { class: "row" }, actions(one)) },
    ],
  });
  fill(element, h("div", { class: "bar" }, h("h1", {}, "Nodes")),
    h("div", { class: "tools" }, table.search, staff && button("Register a node", register)), table.element);

  function render() {
    table.rows = live.totals?.nodes ?? [];
  }

  /** @param {any} one */
  function progress(one) {
    const used = meter(one.slices - one.free_slices, one.slices, false);
    if (one.state !== "draining") return used;
    return [used, h("div", { class: "small" }, `draining: ${plural(one.instances, "instance")} to go`)];
  }

  /** @param {any} one */
  function holds(one) {
    return Object.entries(one.holds ?? {}).map(([word, why]) => h("div", { class: "soft small" }, `held: ${word} ${plain(why)}`));
  }

  /** @param {any} one */
  function actions(one) {
    const act = (word, press, danger = false) => button(word, press, { class: `small${danger ? " danger" : ""}`, "aria-label": `${word} ${one.name}` });
    const post = (word, done) => () => change(() => send("POST", `/v1/nodes/${part(one.name)}/${word}`), done);
    return [
      one.state === "ready" ? act("Cordon", post("cordon", `${one.name} takes no new instances`))
        : act("Uncordon", post("uncordon", `${one.name} takes new instances again`)),
      !["draining", "drained"].includes(one.state) && act("Drain", () => drain(one)),
      one.instances === 0 && act("Remove", () => remove(one), true),
    ];
  }

  /** @param {() => Promise<unknown>} work @param {string} done */
  async function change(work, done) {
    await attempt(work, done);
    await live.loadTotals();
  }

  /** @param {any} one */
  async function drain(one) {
    const evict = h("label", { class: "check" }, h("input", { type: "checkbox", name: "evict" }), "End the instances on it now");
    const chosen = await confirm({ title: `Drain ${one.name}?`, act: "Drain", body: [evict],
      text: `It takes no new instances, and is drained when the last of its ${plural(one.instances, "instance")} has ended.` });
    if (chosen) {
      await change(() => send("POST", `/v1/nodes/${part(one.name)}/drain`, { evict: chosen.has("evict") }),
        `${one.name} is being drained`);
    }
  }

  /** @param {any} one */
  async function remove(one) {
    const sure = await confirm({ title: `Remove ${one.name}?`, act: "Remove", danger: true,
      text: "The node leaves the cluster. It can be registered again." });
    if (sure) await change(() => send("DELETE", `/v1/nodes/${part(one.name)}`), `${one.name} left`);
  }

  async function register() {
    const models = live.models.filter((one) => !one.refusal).map((one) => one.name);
    const name = field("Name", { name: "name", required: true, pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]{0,62}" });
    const model = choice("Model", models, models[0], () => {}, { name: "model" });
    const gpus = field("GPUs", { name: "gpus", type: "number", min: "1", max: "1024", value: "8", required: true });
    const chosen = await confirm({ title: "Register a node", act: "Register", text: "", body: [name, model, gpus] });
    if (!chosen) return;
    const body = { name: chosen.get("name"), model: chosen.get("model"), gpus: Number(chosen.get("gpus")) };
    await change(() => send("POST", "/v1/nodes", body, { key: true }), `${body.name} joined`);
  }

  live.addEventListener("totals", render, { signal });
  render();
}
