/** Defragment: a plan of moves that make a profile fit or increase capacity, drawn move by move. */

import { maskOf } from "../look/geometry.js";
import { theme } from "../look/palette.js";
import { inWords, stripCanvas } from "../look/strip.js";
import { get, send } from "../shell/api.js";
import { button, choice, field, fill, h } from "../shell/dom.js";
import { brief, plural, slices } from "../shell/format.js";
import { confirm, loading, notice, standIn } from "../shell/notice.js";

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export function show(element, context) {
  const { live, may, signal } = context;
  const query = new URLSearchParams(location.search);
  const models = [...new Set([...live.nodes.values()].map((node) => node.model))].sort();
  const names = [...new Set(models.flatMap((model) => [...(live.geometries.get(model)?.profiles.keys() ?? [])]))];
  const want = { profile: query.get("profile") ?? "", model: "", budget: "8" };
  if (want.profile && !names.includes(want.profile)) want.profile = "";
  const result = h("div", {});
  fill(element,
    h("div", { class: "bar" }, h("h1", {}, "Defragment"),
      h("p", { class: "soft" }, "Nothing moves until you approve; a move destroys an instance and recreates it elsewhere.")),
    h("div", { class: "tools" },
      choice("Make room for", [["", "as much as possible"], ...names], want.profile, (value) => { want.profile = value; plan(); }),
      choice("On model", [["", "any"], ...models], "", (value) => { want.model = value; plan(); }),
      field("Moves, at most", { type: "number", min: "1", max: "200", value: want.budget,
        on: { change: (event) => { want.budget = event.target.value; plan(); } } }),
      button("Plan again", plan)),
    result);

  async function plan() {
    fill(result);
    await loading(result, "a plan", () => get("/v1/defrag/plan", { profile: want.profile,
      model: want.profile ? want.model : "", budget: want.budget }, signal), render);
  }

  let planned = /** @type {any} */ (null);
  theme.addEventListener("change", () => { if (planned) render(planned); }, { signal });

  /** @param {any} view */
  function render(view) {
    planned = view;
    if (!view.found) {
      fill(result, standIn("empty", `No plan of ${plural(view.budget, "move")} or fewer makes ${view.wanted} fit`,
        "Allow more moves, or wait until something ends."));
      return;
    }
    if (!view.moves.length) {
      fill(result, standIn("empty", view.wanted ? `${view.wanted} fits already` : "There is no room to be won back",
        view.fits ? `There is a window on ${view.fits.node} GPU ${view.fits.gpu} at slice ${view.fits.start}.` : "Every move would win nothing."));
      return;
    }
    const copies = new Map();
    const approve = button(`Approve ${plural(view.moves.length, "move")}`, () => carryOut(view), { class: "primary" });
    fill(result,
      h("div", { class: "card verdict placed" },
        h("h2", {}, summary(view)),
        h("p", { class: "soft" }, `${plural(view.moved_slices, "slice")} ${view.moved_slices === 1 ? "moves" : "move"}${view.fewest ? "; no shorter plan exists" : ""}.`),
        h("div", { class: "row" }, may("staff") ? approve : h("span", { class: "soft" }, "An operator may approve it."))),
      h("ol", { class: "moves" }, view.moves.map((move, index) => drawMove(move, index, copies))));
  }

  /** @param {any} view */
  function summary(view) {
    const moves = plural(view.moves.length, "move");
    if (!view.wanted) return `${moves} win${view.moves.length === 1 ? "s" : ""} back room: from ${view.room_before} open placements to ${view.room_after}`;
    return `After ${moves}, ${view.wanted} fits on ${view.fits.node} GPU ${view.fits.gpu} at slice ${view.fits.start}`;
  }

  /** The GPU as earlier moves leave it. @param {string} node @param {number} index @param {Map<string, any[]>} copies */
  function instancesOn(node, index, copies) {
    const key = `${node}/${index}`;
    if (!copies.has(key)) copies.set(key, [...(live.gpu(node, index)?.instances ?? [])]);
    return copies.get(key) ?? [];
  }

  /** @param {any} move @param {number} index @param {Map<string, any[]>} copies */
  function drawMove(move, index, copies) {
    const size = live.geometries.get(live.nodes.get(move.node)?.model ?? "")?.profiles.get(move.profile)?.size ?? 1;
    const from = instancesOn(move.node, move.gpu, copies);
    const leaving = from.find((one) => one.start === move.start) ?? { profile: move.profile, start: move.start, size };
    const before = strip(move.node, from, { leaving });
    copies.set(`${move.node}/${move.gpu}`, from.filter((one) => one !== leaving));
    const target = instancesOn(move.to_node, move.to_gpu, copies);
    const ghost = { profile: move.profile, start: move.to_start, size: leaving.size, tenant: leaving.tenant };
    const after = strip(move.to_node, target, { ghost });
    copies.set(`${move.to_node}/${move.to_gpu}`, [...target, { ...ghost, allocation: move.allocation }]);
    const words = (node, gpu, start) => `${node} GPU ${gpu}, ${slices(start, leaving.size)}`;
    const drawn = (shown, label) => h("div", {}, h("p", { class: "small" }, label),
      stripCanvas(shown, { width: 264, height: 28, label: `${label}: ${inWords(shown)}` }));
    return h("li", { class: "card move" },
      h("span", { class: "count" }, String(index + 1)),
      drawn(before, `${move.profile} of ${leaving.tenant ?? brief(move.allocation)} leaves ${words(move.node, move.gpu, move.start)}`),
      h("span", { class: "arrow", "aria-hidden": "true" }, "→"),
      drawn(after, `and goes to ${words(move.to_node, move.to_gpu, move.to_start)}`));
  }

  /** @param {string} node @param {any[]} instances @param {object} marks */
  function strip(node, instances, marks) {
    const geometry = live.geometries.get(live.nodes.get(node)?.model ?? "");
    const stranded = geometry ? geometry.stranded(maskOf(instances), geometry.usedBy(instances)) : 0;
    return { slices: geometry?.slices ?? 8, instances: [...instances], stranded, ...marks };
  }

  /** @param {any} view */
  async function carryOut(view) {
    const sure = await confirm({ title: `Make ${plural(view.moves.length, "move")}?`, act: "Move them", danger: true,
      text: "Each instance is destroyed and recreated at its new placement: all moves, or none." });
    if (!sure) return;
    try {
      const done = await send("POST", "/v1/defrag", { moves: view.moves });
      notice(`${plural(done.moves, "move")} made`);
    } catch (error) {
      notice(`${error instanceof Error ? error.message : error}; this is a new plan`, "bad");
    }
    setTimeout(() => { if (!signal.aborted) plan(); }, 300);
  }

  plan();
}
