/** The state of the cluster in this page: loaded once, then updated by journal entries. */

import { Geometry, maskOf } from "../look/geometry.js";
import { TenantColours } from "../look/palette.js";
import { get, part } from "./api.js";
import { EventStream } from "./stream.js";

/**
 * @typedef {import("../look/geometry.js").Instance} Instance
 * @typedef {import("../look/strip.js").Reserved} Reserved
 * @typedef {{node: string, index: number, instances: Instance[], mask: number, used: number[],
 *   reserved: Reserved | null, more: Record<string, unknown>}} Gpu
 * @typedef {{name: string, model: string, state: string, labels: Record<string, string>,
 *   gpus: Gpu[], more: Record<string, unknown>}} Node
 */

/** Behind by more than this, reloading is faster than catching up. */
const TOO_FAR = 3000;
const TOTALS_EVERY = 2000;
/** A tenant receives only its own events: changes by others show at the next refresh. */
const LOOK_AGAIN = 5000;
const KEPT_ACTIVITY = 60;
/** Entries that change no GPU. */
const ELSEWHERE = new Set(["rejected", "queued", "turn-taken", "tenant-set",
  "tenant-removed", "token-issued", "token-revoked", "token-expiring", "model-entered", "model-forgotten",
  "clock-set", "lease-extended", "lease-ending", "policy-chosen"]);
const NODE_FIELDS = ["name", "model", "gpus", "state", "instances", "slices", "free_slices", "labels"];
const GPU_FIELDS = ["node", "gpu", "mask", "fragmentation", "instances", "reserved"];

/** Emits `change` (GPUs), `nodes`, `totals`, `status` and `entries`. */
export class Live extends EventTarget {
  /** @param {{role: string, tenant: string | null}} who */
  constructor(who) {
    super();
    this.who = who;
    this.status = "connecting";
    this.why = "";
    this.history = "";
    this.seq = 0;
    /** @type {Map<string, Geometry>} */
    this.geometries = new Map();
    /** @type {any[]} */
    this.models = [];
    /** @type {Map<string, Node>} */
    this.nodes = new Map();
    /** @type {any} */
    this.totals = null;
    /** @type {import("./stream.js").Entry[]} */
    this.activity = [];
    this.tenants = new TenantColours();
    this.loaded = false;
    /** @type {Map<string, Set<Gpu>>} */
    this._where = new Map();
    this._stream = new EventStream({
      entries: (entries) => this._take(entries),
      status: (status, why) => this._setStatus(status, why),
      resume: () => this._resume(),
    });
    /** @type {Map<string, number>} */
    this._timers = new Map();
    this._stopped = false;
    /** By load that is under way: the entries that came meanwhile. @type {Set<import("./stream.js").Entry[]>} */
    this._meanwhile = new Set();
    this._took = 0;
    this._totalled = 0;
  }

  async start() {
    await this._loadModels();
    await this.load();
    if (["admin", "operator"].includes(this.who.role)) {
      const past = await get("/v1/audit", { limit: 20 }).catch(() => ({ events: [] }));
      this.activity = past.events.filter((entry) => entry.seq <= this.seq);
    }
    this._stream.follow(this._place());
    if (this.who.tenant !== null) this._later("again", LOOK_AGAIN, () => this._lookAgain());
  }

  stop() {
    this._stopped = true;
    this._stream.stop();
    for (const timer of this._timers.values()) clearTimeout(timer);
  }

  retryNow() {
    this._stream.retryNow();
  }

  async _loadModels() {
    this.models = (await get("/v1/models")).models;
    this.geometries = new Map(
      this.models.filter((model) => model.profiles.length).map((m) => [m.name, new Geometry(m)]),
    );
  }

  /** Reload everything. */
  async load() {
    const begun = performance.now();
    /** @type {import("./stream.js").Entry[]} */
    const meanwhile = [];
    this._meanwhile.add(meanwhile);
    let view;
    try {
      view = await get("/v1/cluster", { gpus: true });
      if (view.nodes.some((node) => !this.geometries.has(node.model))) await this._loadModels();
    } finally {
      this._meanwhile.delete(meanwhile);
    }
    if (this._stopped) return;
    const before = this._where;
    this._where = new Map();
    this.nodes = new Map();
    for (const node of view.nodes) this._addNode(node);
    for (const device of view.devices ?? []) {
      const gpu = this.nodes.get(device.node)?.gpus[device.gpu];
      if (!gpu) continue;
      gpu.more = rest(device, GPU_FIELDS);
      gpu.reserved = device.reserved ?? null;
      gpu.instances = device.instances.map((one) => {
        const known = one.allocation && [...(before.get(one.allocation) ?? [])][0];
        const since = known?.instances.find((old) => old.allocation === one.allocation)?.since;
        return { ...one, since: since ?? null };
      });
      this._settle(gpu);
    }
    if (this.history !== view.history) this.activity = [];
    this.history = view.history;
    this.seq = view.seq;
    for (const entry of meanwhile) if (entry.seq > this.seq) this._advance(entry);
    this._took = performance.now() - begun;
    this.totals = { ...view, devices: null };
    this.loaded = true;
    this._tell("nodes");
    this._tell("change");
    this._tell("totals");
  }

  /** What the GPU looks like, for drawing. @param {Gpu} gpu */
  strip(gpu) {
    const geometry = this.geometryOf(gpu);
    const { instances, reserved } = gpu;
    if (!geometry) return { slices: 8, instances, stranded: 0, reserved };
    return { slices: geometry.slices, instances, stranded: geometry.stranded(gpu.mask, gpu.used), reserved };
  }

  /** @param {Gpu} gpu */
  geometryOf(gpu) {
    return this.geometries.get(this.nodes.get(gpu.node)?.model ?? "");
  }

  /** @param {string} node @param {number} index */
  gpu(node, index) {
    return this.nodes.get(node)?.gpus[index] ?? null;
  }

  /** Names of all tenants seen here. */
  tenantNames() {
    const names = new Set();
    for (const node of this.nodes.values()) {
      for (const gpu of node.gpus) for (const one of gpu.instances) if (one.tenant) names.add(one.tenant);
    }
    return [...names].sort();
  }

  // Entries of the journal

  /** @param {import("./stream.js").Entry[]} entries */
  _take(entries) {
    const fresh = entries.filter((entry) => entry.seq > this.seq);
    if (!fresh.length) return;
    let changed = false;
    for (const entry of fresh) changed = this._advance(entry) || changed;
    for (const meanwhile of this._meanwhile) meanwhile.push(...fresh);
    this.activity = [...fresh.reverse(), ...this.activity].slice(0, KEPT_ACTIVITY);
    this.dispatchEvent(new CustomEvent("entries", { detail: fresh }));
    if (changed) this._tell("change");
    // Refresh soon after a quiet time, and at a limited rate under load.
    const quiet = performance.now() - this._totalled;
    this._later("totals", Math.max(200, TOTALS_EVERY - quiet), () => this.loadTotals());
  }

  /** @param {import("./stream.js").Entry} told */
  _advance(told) {
    this.seq = told.seq;
    return this._apply(told);
  }

  /**
   * @param {import("./stream.js").Entry} told
   * @returns {boolean} whether a GPU changed
   */
  _apply(told) {
    const { kind, entry } = told;
    const at = Date.parse(told.at);
    switch (kind) {
      case "allocated":
        for (const piece of entry.allocation.parts ?? []) {
          this._put(piece, entry.allocation.id, entry.allocation.tenant.name, at);
        }
        return true;
      case "served":
        for (const piece of entry.parts) this._put(piece, entry.allocation, entry.tenant.name, at);
        return true;
      case "ended":
        // On a node with an agent, slices stay occupied until the agent has destroyed the instance.
        if (entry.allocation.parts?.some((piece) => piece.phase)) {
          for (const one of this._instances(entry.allocation.id)) one.phase = "releasing";
        } else this._remove(entry.allocation.id);
        return true;
      case "part-turned":
        this._turn(entry);
        return true;
      case "moved":
        this._move(entry, at);
        return true;
      case "node-added":
        this._addNode({ name: entry.node, model: entry.model, gpus: entry.gpus, state: "ready",
          labels: entry.labels ?? {} });
        this._tell("nodes");
        return true;
      case "node-turned": {
        const node = this.nodes.get(entry.node);
        if (node) node.state = entry.phase;
        this._tell("nodes");
        return true;
      }
      case "node-removed":
        this.nodes.delete(entry.node);
        this._tell("nodes");
        return true;
      default:
        // An unknown kind of entry: its effect shows after the next refresh.
        if (!ELSEWHERE.has(kind)) this._lookSoon();
        return false;
    }
  }

  /** @param {any} node */
  _addNode(node) {
    const nothing = this.geometries.get(node.model)?.usedBy([]) ?? [];
    const gpus = Array.from({ length: node.gpus }, (_, index) => ({
      node: node.name, index, instances: [], mask: 0, used: nothing, reserved: null, more: {},
    }));
    this.nodes.set(node.name, {
      name: node.name, model: node.model, state: node.state, labels: node.labels ?? {}, gpus,
      more: rest(node, NODE_FIELDS),
    });
    if (!this.geometries.has(node.model)) this._later("load", 500, () => this._reload());
  }

  /** @param {any} piece @param {string} allocation @param {string} tenant @param {number} since */
  _put(piece, allocation, tenant, since) {
    const gpu = this.gpu(piece.node, piece.gpu);
    if (!gpu) return;
    gpu.instances.push({
      profile: piece.profile, start: piece.start, size: piece.size, allocation, tenant, since,
      phase: piece.phase ?? null, born: performance.now(),
    });
    this._settle(gpu);
  }

  /** @param {string} allocation */
  _remove(allocation) {
    for (const gpu of this._where.get(allocation) ?? []) {
      gpu.instances = gpu.instances.filter((one) => one.allocation !== allocation);
      this._settle(gpu);
    }
    this._where.delete(allocation);
  }

  /** @param {string} allocation */
  _instances(allocation) {
    const homes = [...(this._where.get(allocation) ?? [])];
    return homes.flatMap((gpu) => gpu.instances.filter((one) => one.allocation === allocation));
  }

  /** An agent has come further with an instance. @param {any} entry */
  _turn(entry) {
    const mine = this._instances(entry.allocation);
    if (mine.length !== 1) this._lookSoon();
    else if (entry.phase === "gone") this._remove(entry.allocation);
    else mine[0].phase = entry.phase;
  }

  /** @param {any} entry @param {number} at */
  async _move(entry, at) {
    const mine = this._instances(entry.allocation);
    if (mine.length === 1) {
      this._remove(entry.allocation);
      this._put(entry.part, entry.allocation, entry.tenant.name, mine[0].since ?? at);
      return;
    }
    try {
      const view = await get(`/v1/allocations/${part(entry.allocation)}`);
      this._remove(entry.allocation);
      for (const piece of view.instances) this._put(piece, view.id, view.tenant, at);
      this._tell("change");
    } catch {
      this._later("load", 500, () => this._reload());
    }
  }

  /** Work out what follows from a GPU's instances. @param {Gpu} gpu */
  _settle(gpu) {
    gpu.instances.sort((one, other) => one.start - other.start);
    gpu.mask = maskOf(gpu.instances);
    gpu.used = this.geometryOf(gpu)?.usedBy(gpu.instances) ?? [];
    for (const one of gpu.instances) {
      if (!one.allocation) continue;
      const homes = this._where.get(one.allocation);
      if (homes) homes.add(gpu);
      else this._where.set(one.allocation, new Set([gpu]));
    }
  }

  // Refreshing

  async _resume() {
    const view = await get("/v1/cluster");
    const another = view.history !== this.history; // after a restore, all entries seen so far are void
    if (another || view.seq < this.seq || view.seq - this.seq > TOO_FAR) await this.load();
    return this._place();
  }

  /** The id to resume the event stream from. */
  _place() {
    return `${this.history}-${this.seq}`;
  }

  _lookSoon() {
    // A large cluster takes longer to load, and is loaded less often.
    this._later("load", Math.max(1000, 15 * this._took), () => this._reload());
  }

  async _reload() {
    await this.load().catch(() => this._later("load", LOOK_AGAIN, () => this._reload()));
  }

  /** Load the totals of the cluster. */
  async loadTotals() {
    const view = await get("/v1/cluster").catch(() => null);
    if (!view || this._stopped) return;
    this.totals = view;
    this._totalled = performance.now();
    for (const fresh of view.nodes) {
      const node = this.nodes.get(fresh.name);
      if (node) node.more = rest(fresh, NODE_FIELDS);
    }
    this._tell("totals");
  }

  async _lookAgain() {
    const begun = performance.now();
    if (!document.hidden && this.status === "live") {
      const view = await get("/v1/cluster").catch(() => null);
      if (view && view.seq > this.seq) await this.load().catch(() => {});
    }
    // A large cluster takes longer to load, and is refreshed less often.
    const pause = Math.max(LOOK_AGAIN, 20 * (performance.now() - begun));
    if (!this._stopped) this._later("again", pause, () => this._lookAgain());
  }

  /** @param {string} name @param {number} wait @param {() => void} work */
  _later(name, wait, work) {
    if (this._timers.has(name)) return;
    const timer = setTimeout(() => {
      this._timers.delete(name);
      work();
    }, wait);
    this._timers.set(name, timer);
  }

  /** @param {"live" | "lost"} status @param {string} why */
  _setStatus(status, why) {
    if (status === "live" && this.status === "lost") this._later("totals", 0, () => this.loadTotals());
    this.status = status;
    this.why = why;
    this._tell("status");
  }

  /** @param {string} what */
  _tell(what) {
    this.dispatchEvent(new Event(what));
  }
}

/** The fields this page has no words for. @param {any} view @param {string[]} known */
function rest(view, known) {
  return Object.fromEntries(Object.entries(view).filter(([name]) => !known.includes(name)));
}
