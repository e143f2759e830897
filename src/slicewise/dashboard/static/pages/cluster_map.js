/** The map of the cluster: a canvas of the size of the view, on which only visible GPUs are drawn. */

import { bits } from "../look/geometry.js";
import { theme, themed } from "../look/palette.js";
import { isFresh, paintStrip, reservedWords, sized } from "../look/strip.js";
import { h } from "../shell/dom.js";

const STRIP = 22;
const SCORE = 4;
const ROW = STRIP + SCORE + 12;
const MODEL_ROW = 34;
const LABEL = 128;
const NARROW = 640;
const NAME_ROW = 20;
const GAP = 14;
const EDGE = 12;

/**
 * @typedef {import("../shell/live.js").Gpu} Gpu
 * @typedef {import("../shell/live.js").Node} Node
 * @typedef {{y: number, height: number, model?: string, count?: number, node?: Node, gpus?: Gpu[]}} Block
 */

export class ClusterMap {
  /**
   * @param {import("../shell/live.js").Live} live
   * @param {{look: () => import("../look/strip.js").Look, chosen: (gpu: Gpu | null) => void,
   *   signal: AbortSignal}} options
   */
  constructor(live, { look, chosen, signal }) {
    this._live = live;
    this._look = look;
    this._chosen = chosen;
    /** @type {Block[]} */
    this._blocks = [];
    /** @type {Gpu[]} */
    this._order = [];
    this._count = 0;
    this._height = 0;
    this._wanted = 15;
    this._slice = 15;
    /** @type {{node: string, index: number} | null} */
    this.focus = null;
    /** @type {Gpu | null} */
    this._hover = null;
    this._waiting = false;
    this.canvas = /** @type {HTMLCanvasElement} */ (h("canvas", {
      tabindex: "0", role: "application", "aria-roledescription": "map of GPUs",
      "aria-label": "Map of the cluster", "aria-describedby": "map-help",
    }));
    this._space = h("div", { class: "space" });
    this.element = h("div", { class: "map" }, this.canvas, this._space);
    const watch = new ResizeObserver(() => this.layout());
    watch.observe(this.element);
    theme.addEventListener("change", () => this.draw(), { signal });
    signal.addEventListener("abort", () => watch.disconnect());
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.canvas.addEventListener("pointermove", (event) => this._point(event));
    this.canvas.addEventListener("pointerleave", () => this._setHover(null));
    this.canvas.addEventListener("click", (event) => {
      const gpu = this._at(event);
      if (gpu) this.choose(gpu);
    });
    this.canvas.addEventListener("keydown", (event) => this._key(event));
    this.canvas.addEventListener("focus", () => {
      if (!this.focus && this._order.length) this.choose(this._order[0]);
      this.draw();
    });
    this.canvas.addEventListener("blur", () => this.draw());
    /** @type {Node[]} */
    this._nodes = [];
    /** @type {(gpu: Gpu) => boolean} */
    this._shown = () => true;
  }

  /** Number of GPUs shown. */
  get count() {
    return this._count;
  }

  /** Show these nodes and of them those GPUs. @param {Node[]} nodes @param {(gpu: Gpu) => boolean} shown */
  show(nodes, shown) {
    this._nodes = nodes;
    this._shown = shown;
    this._count = nodes.reduce((sum, node) => sum + node.gpus.filter(shown).length, 0);
    this.layout();
  }

  /** How wide a slice is drawn. @param {number} width */
  zoom(width) {
    this._wanted = width;
    this.layout();
  }

  layout() {
    const width = this.element.clientWidth;
    if (!width) return;
    const narrow = width < NARROW;
    this._left = narrow ? EDGE : LABEL;
    this._top = narrow ? NAME_ROW : 0;
    this._slice = this._fit(width - this._left - EDGE);
    this._blocks = [];
    this._order = [];
    let y = 4;
    let model = "";
    for (const node of this._nodes) {
      const gpus = node.gpus.filter(this._shown);
      if (!gpus.length) continue;
      if (node.model !== model) {
        model = node.model;
        this._blocks.push({ y, height: MODEL_ROW, model, count: 0 });
        y += MODEL_ROW;
      }
      const header = this._blocks.findLast((block) => block.model);
      if (header) header.count += gpus.length;
      const columns = this._columns(node.model, width);
      const rows = Math.ceil(gpus.length / columns);
      const height = this._top + rows * ROW + (narrow ? 6 : 2);
      this._blocks.push({ y, height, node, gpus });
      for (const gpu of gpus) this._order.push(gpu);
      y += height;
    }
    this._height = y + 8;
    this._space.style.height = `${Math.max(0, this._height - this.element.clientHeight)}px`;
    this.draw();
  }

  /**
   * How wide a slice is drawn, so that GPUs fill a row: 1, 2, 4, 8 … of the largest model.
   * @param {number} room
   */
  _fit(room) {
    const slices = Math.max(1, ...this._nodes.map((node) => this._live.geometries.get(node.model)?.slices ?? 8));
    const least = 0.78 * this._wanted * slices + GAP;
    const columns = 2 ** Math.max(0, Math.floor(Math.log2((room + GAP) / least)));
    const width = ((room + GAP) / columns - GAP) / slices;
    return Math.min(1.9 * this._wanted, width);
  }

  /** @param {string} model */
  _cell(model) {
    return (this._live.geometries.get(model)?.slices ?? 8) * this._slice + GAP;
  }

  /** @param {string} model @param {number} width */
  _columns(model, width) {
    return Math.max(1, Math.floor((width - this._left - EDGE + GAP + 1) / this._cell(model)));
  }

  /** Draw again before the next frame. */
  draw() {
    if (this._waiting) return;
    this._waiting = true;
    requestAnimationFrame(() => {
      this._waiting = false;
      this.paint();
    });
  }

  /** Draw the visible part now. */
  paint() {
    const width = this.element.clientWidth;
    const height = this.element.clientHeight;
    if (!width || !height) return;
    const context = sized(this.canvas, width, height);
    const top = this.element.scrollTop;
    const now = performance.now();
    const look = { ...this._look(), now };
    let shining = false;
    for (let at = this._first(top); at < this._blocks.length; at += 1) {
      const block = this._blocks[at];
      if (block.y > top + height) break;
      if (block.model) this._paintModel(context, block, block.y - top, width);
      else shining = this._paintNode(context, block, block.y - top, width, height, look) || shining;
    }
    if (shining && !matchMedia("(prefers-reduced-motion: reduce)").matches) this.draw();
  }

  /** The first visible block. @param {number} top */
  _first(top) {
    let low = 0;
    let high = this._blocks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this._blocks[middle].y + this._blocks[middle].height < top) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** @param {CanvasRenderingContext2D} context @param {Block} block @param {number} y @param {number} width */
  _paintModel(context, block, y, width) {
    context.fillStyle = themed("soft");
    context.font = "600 12px system-ui, sans-serif";
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    const words = `${block.model} · ${block.count} GPU${block.count === 1 ? "" : "s"}`;
    context.fillText(words, EDGE, y + 22);
    context.strokeStyle = themed("rule");
    context.lineWidth = 1;
    context.beginPath();
    const from = EDGE + context.measureText(words).width + 12;
    context.moveTo(from, Math.round(y + 18) + 0.5);
    context.lineTo(width - EDGE, Math.round(y + 18) + 0.5);
    context.stroke();
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {Block} block @param {number} y
   * @param {number} width @param {number} height @param {import("../look/strip.js").Look} look
   */
  _paintNode(context, block, y, width, height, look) {
    const { node, gpus } = /** @type {{node: Node, gpus: Gpu[]}} */ (block);
    const ready = node.state === "ready";
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.fillStyle = themed("ink");
    context.font = "500 13px system-ui, sans-serif";
    // The name of a node with many GPUs stays in view.
    const beside = this._top ? y : Math.min(Math.max(y, 2), y + block.height - ROW);
    context.fillText(clip(context, node.name, LABEL - EDGE - 14), EDGE, beside + 15);
    if (!ready) {
      context.fillStyle = themed("warn");
      context.font = "600 11px system-ui, sans-serif";
      if (this._top) context.fillText(node.state, EDGE + context.measureText(node.name).width * 1.25 + 14, y + 15);
      else context.fillText(node.state, EDGE, beside + 29);
    }
    const cell = this._cell(node.model);
    const columns = this._columns(node.model, width);
    let shining = false;
    gpus.forEach((gpu, place) => {
      const box = this._box(place, columns, cell, y);
      if (box.y > height || box.y + ROW < 0) return;
      shining = this._paintGpu(context, gpu, box, look, ready) || shining;
    });
    return shining;
  }

  /** @param {number} place @param {number} columns @param {number} cell @param {number} y */
  _box(place, columns, cell, y) {
    return {
      x: this._left + (place % columns) * cell,
      y: y + this._top + Math.floor(place / columns) * ROW + 2,
      width: cell - GAP,
      height: STRIP,
    };
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {Gpu} gpu
   * @param {{x: number, y: number, width: number, height: number}} box
   * @param {import("../look/strip.js").Look} look @param {boolean} ready
   */
  _paintGpu(context, gpu, box, look, ready) {
    const geometry = this._live.geometryOf(gpu);
    paintStrip(context, box, this._live.strip(gpu), look);
    if (!ready) {
      context.strokeStyle = themed("warn");
      context.lineWidth = 1.5;
      context.setLineDash([3, 2]);
      context.strokeRect(box.x - 1.5, box.y - 1.5, box.width + 4, box.height + 4);
      context.setLineDash([]);
    }
    const score = geometry ? geometry.score(gpu.mask) : 0;
    const bottom = box.y + box.height + 4;
    context.fillStyle = themed("rule");
    context.fillRect(box.x, bottom, box.width, 3);
    if (score && geometry) {
      context.fillStyle = themed("score");
      context.fillRect(box.x, bottom, Math.max(2, (box.width * score) / geometry.worst), 3);
    }
    const focused = this.focus?.node === gpu.node && this.focus.index === gpu.index;
    if (focused || this._hover === gpu) {
      context.strokeStyle = themed(focused ? "accent" : "soft");
      context.lineWidth = focused ? 2.5 : 1.5;
      context.beginPath();
      context.roundRect(box.x - 4, box.y - 4, box.width + 9, box.height + 14, 5);
      context.stroke();
    }
    return gpu.instances.some((one) => isFresh(one, look.now ?? 0));
  }

  // Pointing and keys

  /** @param {MouseEvent} event */
  _at(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const x = event.clientX - bounds.left;
    const y = event.clientY - bounds.top + this.element.scrollTop;
    const block = this._blocks[this._first(y)];
    if (!block?.node || !block.gpus || y < block.y) return null;
    const cell = this._cell(block.node.model);
    const columns = this._columns(block.node.model, this.element.clientWidth);
    const column = Math.floor((x - this._left) / cell);
    const row = Math.floor((y - block.y - this._top) / ROW);
    if (column < 0 || column >= columns || row < 0) return null;
    return block.gpus[row * columns + column] ?? null;
  }

  /** @param {PointerEvent} event */
  _point(event) {
    this._setHover(this._at(event));
    if (this._hover) {
      const score = this._live.geometryOf(this._hover)?.score(this._hover.mask) ?? 0;
      const free = this._live.strip(this._hover).slices - bits(this._hover.mask);
      const held = this._hover.reserved ? `; ${reservedWords(this._hover.reserved)}` : "";
      this.canvas.title = `${this._hover.node}, GPU ${this._hover.index}: ${free} free, F ${score}${held}`;
    } else this.canvas.removeAttribute("title");
  }

  /** @param {Gpu | null} gpu */
  _setHover(gpu) {
    if (gpu === this._hover) return;
    this._hover = gpu;
    this.canvas.style.cursor = gpu ? "pointer" : "default";
    this.draw();
  }

  /** @param {KeyboardEvent} event */
  _key(event) {
    const at = this._order.findIndex((gpu) => gpu.node === this.focus?.node && gpu.index === this.focus.index);
    const gpu = this._order[at];
    const model = gpu ? this._live.nodes.get(gpu.node)?.model ?? "" : "";
    const row = this._columns(model, this.element.clientWidth);
    const page = row * Math.max(1, Math.floor(this.element.clientHeight / ROW) - 1);
    const last = this._order.length - 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, PageDown: page,
      PageUp: -page, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (step === undefined || last < 0) return;
    event.preventDefault();
    this.choose(this._order[Math.max(0, Math.min(last, Math.max(at, 0) + step))]);
  }

  /** Point at a GPU and bring it into view. @param {Gpu} gpu */
  choose(gpu) {
    this.focus = { node: gpu.node, index: gpu.index };
    const block = this._blocks.find((one) => one.node?.name === gpu.node);
    if (block?.gpus) {
      const columns = this._columns(block.node.model, this.element.clientWidth);
      const row = Math.floor(block.gpus.indexOf(gpu) / columns);
      const y = block.y + this._top + row * ROW;
      const view = this.element;
      if (y < view.scrollTop) view.scrollTop = Math.max(0, y - ROW);
      else if (y + ROW > view.scrollTop + view.clientHeight) view.scrollTop = y + 2 * ROW - view.clientHeight;
    }
    this._chosen(gpu);
    this.draw();
  }
}

/** @param {CanvasRenderingContext2D} context @param {string} text @param {number} width */
function clip(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}
