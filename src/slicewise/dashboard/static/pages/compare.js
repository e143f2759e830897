/** Compare: two policies on the same arrivals, two clusters filling and emptying in step. */

import { profileColour, theme, themed } from "../look/palette.js";
import { lineChart } from "../look/chart.js";
import { paintStrip, sized } from "../look/strip.js";
import { asQuery, get } from "../shell/api.js";
import { button, choice, fill, h, setOptions } from "../shell/dom.js";
import { count, percent, slices } from "../shell/format.js";
import { standIn } from "../shell/notice.js";
import { Run } from "./compare_run.js";

const DEFAULTS = { a: "worst-fit", b: "least-lost", mix: "uniform", model: "A100-80GB", gpus: "16",
  load: "90", seed: "1", length: "1000", speed: "12" };
const MIXES = { uniform: "every profile alike", "skew-small": "mostly small", "skew-big": "mostly big",
  bimodal: "small and big" };
const SPEEDS = [["2", "2 a second"], ["12", "12 a second"], ["60", "60 a second"], ["600", "as fast as it goes"]];

/** @param {HTMLElement} element @param {import("../main.js").Context} context */
export async function show(element, { live, signal }) {
  const given = Object.fromEntries(new URLSearchParams(location.search));
  const terms = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) if (given[name]) terms[name] = given[name];
  let playing = false;
  let run = /** @type {Run | null} */ (null);
  let due = 0;
  let before = 0;

  const policies = (await get("/v1/policies", {}, signal)).policies;
  const names = policies.map((one) => [one.name, one.in_use ? `${one.name} (in use here)` : one.name]);
  const summary = new Map(policies.map((one) => [one.name, one.summary]));

  const set = (name) => (value) => {
    terms[name] = value;
    remember();
    if (name !== "speed") begin();
  };
  const models = live.models.filter((one) => one.profiles.length).map((one) => one.name);
  const tools = {
    a: choice("First policy", names, terms.a, set("a")),
    b: choice("Second policy", names, terms.b, set("b")),
    mix: choice("Tenants ask for", Object.entries(MIXES), terms.mix, set("mix")),
    load: choice("Load", ["60", "75", "85", "90", "100", "120", "150"].map((n) => [n, `${n}% of the GPUs`]), terms.load, set("load")),
    gpus: choice("GPUs on each side", ["4", "8", "16", "24", "32", "48", "64"], terms.gpus, set("gpus")),
    model: choice("Model", models, terms.model, set("model")),
    seed: choice("Arrivals", ["1", "2", "3", "4", "5", "6", "7", "8"].map((n) => [n, `number ${n}`]), terms.seed, set("seed")),
    length: choice("Requests", ["200", "500", "1000", "2000", "4000"], terms.length, set("length")),
    speed: choice("Speed", SPEEDS, terms.speed, set("speed")),
  };
  for (const [name, field] of Object.entries(tools)) {
    const select = field.querySelector("select");
    if (select.value !== terms[name]) {
      select.append(h("option", { value: terms[name] }, terms[name]));
      select.value = terms[name];
    }
  }
  const play = button("Play", () => (playing ? pause() : start()), { class: "primary" });
  const step = button("Step", () => { pause(); move(1); });
  const back = button("Back", () => { pause(); move(-1); });
  const restart = button("Restart", () => { pause(); seek(0); });
  const place = /** @type {HTMLInputElement} */ (h("input", { type: "range", min: "0", max: terms.length,
    value: "0", "aria-label": "Request", on: { input: () => { pause(); seek(Number(place.value)); } } }));
  const where = h("span", { class: "number", id: "compare-place" }, "0 of 0");
  const arrival = h("div", { class: "arrival" });
  const told = h("p", { class: "told", role: "status" });
  const chart = h("div", { class: "chart card" });
  const left = new Panel("a");
  const right = new Panel("b");
  const ground = h("div", {});
  fill(element,
    h("div", { class: "bar" }, h("h1", {}, "Compare policies")),
    h("p", { class: "soft lead" }, "The same requests arrive at two clusters of the same size. Only the policy that "
      + "chooses GPU and slices differs. A slice that is free but lies wrong is hatched: it is stranded, and a "
      + "request that needs it is refused although there is room."),
    h("div", { class: "tools" }, Object.values(tools)),
    ground);
  const scene = [
    h("div", { class: "player" }, play, back, step, restart, place, where),
    told, arrival,
    h("div", { class: "comparison" }, left.element, right.element),
    chart];

  function remember() {
    const changed = Object.fromEntries(Object.entries(terms).filter(([name, value]) => value !== DEFAULTS[name]));
    history.replaceState(null, "", location.pathname + asQuery(changed));
  }

  async function begin() {
    pause();
    const { length, speed, ...asked } = terms;
    run = new Run(asked, live, signal);
    const mine = run;
    if (!ground.childElementCount) fill(ground, standIn("loading", "Computing the run …"));
    try {
      await run.reach(1);
    } catch (error) {
      if (!signal.aborted && run === mine) {
        fill(ground, standIn("error", "This cannot be compared", error instanceof Error ? error.message : ""));
      }
      return;
    }
    if (signal.aborted || run !== mine) return;
    setOptions(tools.mix.querySelector("select"), run.head.mixes.map((name) => [name, MIXES[name] ?? name]), run.head.mix);
    if (!ground.contains(play)) fill(ground, scene);
    place.max = length;
    left.name(run.head.a, summary.get(run.head.a));
    right.name(run.head.b, summary.get(run.head.b));
    await seek(0);
  }

  function start() {
    playing = true;
    fill(play, "Pause");
    if (run.at >= Number(terms.length)) run.goTo(0);
    due = 0;
    before = performance.now();
    requestAnimationFrame(frame);
  }

  function pause() {
    playing = false;
    fill(play, "Play");
  }

  /** @param {number} now */
  function frame(now) {
    if (!playing || signal.aborted) return;
    due = Math.min(due + ((now - before) / 1000) * Number(terms.speed), 60);
    before = now;
    const steps = Math.floor(due);
    due -= steps;
    const end = Number(terms.length);
    const ahead = Math.min(end, run.at + Math.max(steps, 120));
    if (run.steps.length < ahead) run.reach(ahead).catch(() => pause());
    if (steps && run.head) { // a new run may not be loaded yet
      run.goTo(Math.min(end, run.at + steps));
      render();
    }
    if (run.at >= end) pause();
    else requestAnimationFrame(frame);
  }

  /** @param {number} by */
  const move = (by) => seek(Math.max(0, Math.min(Number(terms.length), run.at + by)));

  /** @param {number} to */
  async function seek(to) {
    const mine = run;
    await run.reach(to).catch(() => {});
    if (run !== mine || signal.aborted) return;
    run.goTo(to);
    render();
  }

  function render() {
    const { last, at } = run;
    place.value = String(at);
    fill(where, `${count(at)} of ${count(Number(terms.length))}`);
    left.render(run.a, last?.a, at);
    right.render(run.b, last?.b, at);
    showArrival(last, at);
    const difference = last ? last.b.accepted - last.a.accepted : 0;
    const [more, fewer] = difference >= 0 ? [run.head.b, run.head.a] : [run.head.a, run.head.b];
    left.element.classList.toggle("winner", difference < 0);
    right.element.classList.toggle("winner", difference > 0);
    fill(told, !at ? "Press Play: requests begin to arrive."
      : difference ? [h("b", {}, more), ` has accepted ${count(Math.abs(difference))} more than `, h("b", {}, fewer), ", on the same GPUs."]
        : "So far both have accepted the same number.");
    if (at % 10 === 0 || !playing) plot();
    paint();
  }

  function showArrival(last, at) {
    if (!last) {
      fill(arrival, h("span", { class: "soft" }, "No request has arrived yet."));
      return;
    }
    const size = run.a.geometry.profiles.get(last.profile)?.size ?? 1;
    fill(arrival, `Request ${count(at)} asks for`,
      h("span", { class: "block", style: { background: profileColour(last.profile, size) } }, last.profile),
      `and would stay for ${count(last.lifetime)} requests.`);
  }

  function plot() {
    const width = Number(terms.length);
    const every = Math.max(1, Math.ceil(run.at / 300));
    const points = run.steps.slice(0, run.at).map((one, index) => ({ at: index + 1,
      a: index + 1 - one.a.accepted, b: index + 1 - one.b.accepted }))
      .filter((one, index) => index % every === 0 || index === run.at - 1);
    lineChart(chart, {
      title: "Rejected so far", from: 0, to: width, wide: true,
      across: (value) => count(Math.round(value)),
      series: [
        { name: run.head.a, points: points.map(({ at, a }) => [at, a]) },
        { name: run.head.b, points: points.map(({ at, b }) => [at, b]) },
      ],
    });
  }

  function paint() {
    left.paint(run.a);
    right.paint(run.b);
  }

  const resized = new ResizeObserver(() => { if (run?.a) paint(); });
  resized.observe(element);
  signal.addEventListener("abort", () => resized.disconnect());
  theme.addEventListener("change", () => { if (run?.a) paint(); }, { signal });
  await begin();
}

/** One side: counters, the outcome of the last request, GPUs. */
class Panel {
  /** @param {"a" | "b"} side */
  constructor(side) {
    this._side = side;
    this._title = h("span", {});
    this._summary = h("p", { class: "soft small" });
    this._counters = h("dl", { class: "counters", data: { side } });
    this._fate = h("p", { class: "fate" });
    this._canvas = /** @type {HTMLCanvasElement} */ (h("canvas", { role: "img" }));
    this.element = h("section", { class: `card side ${side}` },
      h("h2", {}, this._title), this._summary, this._counters, this._fate, this._canvas);
    this._refused = false;
  }

  /** @param {string} policy @param {string} [summary] */
  name(policy, summary = "") {
    fill(this._title, policy);
    fill(this._summary, summary);
    this._policy = policy;
  }

  /** @param {import("./compare_run.js").Side} side @param {import("./compare_run.js").Outcome | undefined} last @param {number} at */
  render(side, last, at) {
    const all = side.gpus.length * side.geometry.slices;
    const pair = (name, value, kind = "") => h("div", { class: kind, data: { name } }, h("dt", {}, name), h("dd", {}, value));
    const accepted = last?.accepted ?? 0;
    fill(this._counters,
      pair("accepted", count(accepted), "good"),
      pair("rejected", count(at - accepted), "bad"),
      pair("stranded", count(last?.stranded ?? 0)),
      pair("taken", percent(last?.occupied ?? 0, all)));
    this._refused = Boolean(last && last.gpu === null);
    this._fate.classList.toggle("refused", this._refused);
    fill(this._fate, !last ? "" : last.gpu === null ? `✗ Refused: ${last.detail}`
      : `✓ Placed on GPU ${last.gpu}, ${slices(last.start, this._size(side, last))}.`);
    this._canvas.setAttribute("aria-label", `GPUs under ${this._policy}: ${accepted} accepted, `
      + `${at - accepted} rejected, ${last?.stranded ?? 0} slices stranded`);
  }

  _size(side, last) {
    return side.gpus[last.gpu].find((one) => one.start === last.start)?.size ?? 1;
  }

  /** @param {import("./compare_run.js").Side} side */
  paint(side) {
    const width = this._canvas.parentElement.clientWidth - 26;
    if (width <= 0) return;
    const columns = side.gpus.length <= 8 || width < 380 ? 2 : width > 640 ? 6 : 4;
    const cell = (width + 5) / columns;
    const tall = side.gpus.length <= 16 ? 26 : 20;
    const rows = Math.ceil(side.gpus.length / columns);
    const context = sized(this._canvas, width, rows * (tall + 8) + 4);
    side.gpus.forEach((_, index) => {
      const box = { x: 2 + (index % columns) * cell, y: 2 + Math.floor(index / columns) * (tall + 8),
        width: Math.floor(cell - 9), height: tall };
      paintStrip(context, box, side.strip(index), { mark: side.latest });
    });
    if (this._refused) {
      context.strokeStyle = themed("bad");
      context.lineWidth = 2;
      context.strokeRect(1, 1, width - 2, rows * (tall + 8) + 1);
    }
  }
}
