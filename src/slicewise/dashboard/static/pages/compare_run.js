/** A comparison: steps from the service, replayed on two clusters. */

import { maskOf } from "../look/geometry.js";
import { get } from "../shell/api.js";

const PAGE = 250;

/**
 * @typedef {import("../look/geometry.js").Instance & {ends: number}} Guest
 * @typedef {{gpu: number | null, start: number | null, reason: string | null, detail: string | null,
 *   accepted: number, occupied: number, stranded: number, fragmentation: number}} Outcome
 * @typedef {{profile: string, lifetime: number, a: Outcome, b: Outcome}} Step
 */

/** One of the two clusters. */
export class Side {
  /** @param {import("../look/geometry.js").Geometry} geometry @param {number} gpus */
  constructor(geometry, gpus) {
    this.geometry = geometry;
    /** @type {Guest[][]} */
    this.gpus = Array.from({ length: gpus }, () => []);
    /** @type {Guest | null} */
    this.latest = null;
  }

  /** @param {number} slot @param {Step} step @param {Outcome} outcome */
  apply(slot, step, outcome) {
    this.latest = null;
    this.gpus.forEach((guests, index) => {
      if (guests.some((one) => one.ends === slot)) {
        this.gpus[index] = guests.filter((one) => one.ends !== slot);
      }
    });
    if (outcome.gpu === null) return;
    const size = this.geometry.profiles.get(step.profile)?.size ?? 1;
    this.latest = { profile: step.profile, start: outcome.start ?? 0, size, ends: slot + step.lifetime };
    this.gpus[outcome.gpu] = [...this.gpus[outcome.gpu], this.latest];
  }

  /** What a GPU looks like. @param {number} index */
  strip(index) {
    const instances = this.gpus[index];
    const mask = maskOf(instances);
    const stranded = this.geometry.stranded(mask, this.geometry.usedBy(instances));
    return { slices: this.geometry.slices, instances, stranded };
  }
}

/** A run, loaded as far as it has been played. */
export class Run {
  /**
   * @param {Record<string, string | number>} terms
   * @param {import("../shell/live.js").Live} live
   * @param {AbortSignal} signal
   */
  constructor(terms, live, signal) {
    this.terms = terms;
    this._live = live;
    this._signal = signal;
    /** @type {Step[]} */
    this.steps = [];
    this.at = 0;
    /** @type {any} */
    this.head = null;
    /** @type {Promise<void> | null} */
    this._fetching = null;
    /** @type {Side | null} */
    this.a = null;
    /** @type {Side | null} */
    this.b = null;
  }

  /** Load at least this many steps. @param {number} steps */
  async reach(steps) {
    while (this.steps.length < steps) {
      this._fetching ??= this._fetch().finally(() => { this._fetching = null; });
      await this._fetching;
    }
  }

  async _fetch() {
    const view = await get("/v1/compare", { ...this.terms, begin: this.steps.length, steps: PAGE }, this._signal);
    if (!this.head) {
      this.head = view;
      this.rewind();
    }
    this.steps.push(...view.steps);
  }

  rewind() {
    const geometry = this._live.geometries.get(this.head.model);
    this.a = new Side(geometry, this.head.gpus);
    this.b = new Side(geometry, this.head.gpus);
    this.at = 0;
  }

  /** Go to this step, applying those in between. @param {number} to */
  goTo(to) {
    if (to < this.at) this.rewind();
    while (this.at < Math.min(to, this.steps.length)) {
      const step = this.steps[this.at];
      this.a.apply(this.at, step, step.a);
      this.b.apply(this.at, step, step.b);
      this.at += 1;
    }
  }

  /** The last step played. */
  get last() {
    return this.at ? this.steps[this.at - 1] : null;
  }
}
