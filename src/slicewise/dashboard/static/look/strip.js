/** A GPU drawn as its strip of slices: instances as blocks, free slices, hatched where stranded. */

import { clock, slices } from "../shell/format.js";
import { LETTERS, profileColour, FOREIGN, themed } from "./palette.js";

/**
 * @typedef {import("./geometry.js").Instance} Instance
 * @typedef {{start: number, size: number, tenant: string | null, profile: string | null,
 *   count: number | null, opens_at: string | null}} Reserved
 * @typedef {{slices: number, instances: Instance[], stranded: number, reserved?: Reserved | null, ghost?: Instance | null,
 *   leaving?: Instance | null}} Strip
 * @typedef {{colour?: (one: Instance) => string, label?: (one: Instance) => string,
 *   dim?: (one: Instance) => boolean, now?: number, mark?: Instance | null}} Look
 */

const FLASH = 1600;
/** Opacity of instances on nodes with an agent, by phase. */
const PHASES = { placed: 0.7, creating: 0.7, releasing: 0.4, quarantined: 0.4 };
/** @type {Map<string, CanvasPattern>} */
const patterns = new Map();

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} colour
 */
function hatch(context, colour) {
  const key = `${colour}`;
  let pattern = patterns.get(key);
  if (!pattern) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const pen = /** @type {CanvasRenderingContext2D} */ (tile.getContext("2d"));
    pen.strokeStyle = colour;
    pen.lineWidth = 1.3;
    pen.beginPath();
    for (const shift of [-6, 0, 6]) {
      pen.moveTo(shift - 1, 7);
      pen.lineTo(shift + 7, -1);
    }
    pen.stroke();
    pattern = /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat"));
    patterns.set(key, pattern);
  }
  return pattern;
}

/** Whether an instance is on the hardware and is no allocation's. @param {Instance} one */
export const isForeign = (one) => ["foreign", "stray"].includes(one.phase ?? "");

/** What a block says, as far as there is room. @param {Instance} one */
export const shortProfile = (one) => one.profile.split(".")[0];

/**
 * Paint one GPU into a box.
 * @param {CanvasRenderingContext2D} context
 * @param {{x: number, y: number, width: number, height: number}} box
 * @param {Strip} strip
 * @param {Look} [look]
 */
export function paintStrip(context, box, strip, look = {}) {
  const { x, y, width, height } = box;
  const each = width / strip.slices;
  const ink = themed("free-edge");
  context.fillStyle = themed("free");
  context.fillRect(x, y, width, height);
  if (strip.stranded) {
    context.fillStyle = hatch(context, themed("stranded"));
    for (let slice = 0; slice < strip.slices; slice += 1) {
      if (strip.stranded & (1 << slice)) context.fillRect(x + slice * each, y, each, height);
    }
  }
  context.strokeStyle = ink;
  context.lineWidth = 1;
  context.beginPath();
  for (let slice = 0; slice <= strip.slices; slice += 1) {
    const at = Math.round(x + slice * each) + 0.5;
    context.moveTo(at, y + 0.5);
    context.lineTo(at, y + height + 0.5);
  }
  context.moveTo(x + 0.5, y + 0.5);
  context.lineTo(x + width + 0.5, y + 0.5);
  context.moveTo(x + 0.5, y + height + 0.5);
  context.lineTo(x + width + 0.5, y + height + 0.5);
  context.stroke();
  for (const one of strip.instances) {
    block(context, x + one.start * each, y, one.size * each, height, one, look);
  }
  if (strip.reserved) reservation(context, x, y, each, height, strip.reserved);
  if (strip.leaving) outline(context, x, y, each, height, strip.leaving, themed("bad"), true);
  if (strip.ghost) ghost(context, x, y, each, height, strip.ghost, look);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x @param {number} y @param {number} width @param {number} height
 * @param {Instance} one
 * @param {Look} look
 */
function block(context, x, y, width, height, one, look) {
  const colour = isForeign(one) ? FOREIGN : look.colour ? look.colour(one) : profileColour(one.profile, one.size);
  context.globalAlpha = look.dim?.(one) ? 0.28 : (PHASES[one.phase ?? ""] ?? 1);
  context.fillStyle = colour;
  rounded(context, x + 1.5, y + 1.5, width - 2, height - 2, Math.min(3, height / 4));
  context.fill();
  context.strokeStyle = "rgba(17, 24, 32, 0.55)";
  context.lineWidth = 1;
  context.stroke();
  const whole = look.label ? look.label(one) : shortProfile(one);
  const fits = (text) => Math.min(12, height * 0.62, (width - 4) / (text.length * 0.62));
  const text = fits(whole) >= 7 ? whole : whole.slice(0, 2);
  const letters = fits(text);
  if (text && letters >= 7) {
    context.fillStyle = LETTERS;
    context.font = `600 ${letters}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, x + width / 2, y + height / 2 + 1);
  }
  context.globalAlpha = 1;
  const shines = one.born && look.now && look.now - one.born < FLASH;
  if (shines || one === look.mark) {
    context.strokeStyle = themed("accent");
    context.globalAlpha = shines ? 1 - (look.now - one.born) / FLASH : 1;
    context.lineWidth = 3;
    rounded(context, x, y, width + 1, height + 1, 4);
    context.stroke();
    context.globalAlpha = 1;
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x @param {number} y @param {number} each @param {number} height
 * @param {Instance} one
 * @param {Look} look
 */
function ghost(context, x, y, each, height, one, look) {
  context.fillStyle = look.colour ? look.colour(one) : profileColour(one.profile, one.size);
  context.fillRect(x + one.start * each + 1, y + 1, one.size * each - 1, height - 1);
  outline(context, x, y, each, height, one, themed("accent"), false);
  context.fillStyle = LETTERS;
  context.font = `700 ${Math.min(12, height * 0.62)}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(shortProfile(one), x + (one.start + one.size / 2) * each, y + height / 2 + 1);
}

/**
 * A reserved window: an outline with a bar, over whatever is still in it.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x @param {number} y @param {number} each @param {number} height
 * @param {Reserved} one
 */
function reservation(context, x, y, each, height, one) {
  const [left, width] = [x + one.start * each + 1.5, one.size * each - 2];
  context.strokeStyle = context.fillStyle = themed("reserved");
  context.lineWidth = 2;
  context.setLineDash([5, 3]);
  context.strokeRect(left, y + 1.5, width, height - 2);
  context.setLineDash([]);
  context.fillRect(left, y + height - 3, width, 3);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x @param {number} y @param {number} each @param {number} height
 * @param {Instance} one
 * @param {string} colour
 * @param {boolean} dashed
 */
function outline(context, x, y, each, height, one, colour, dashed) {
  context.strokeStyle = colour;
  context.lineWidth = 2.5;
  context.setLineDash(dashed ? [4, 3] : []);
  context.strokeRect(x + one.start * each + 1.5, y + 1, one.size * each - 2, height - 1);
  context.setLineDash([]);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x @param {number} y @param {number} width @param {number} height
 * @param {number} radius
 */
function rounded(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
}

/** Whether an instance still shines because it is new. @param {Instance} one @param {number} now */
export const isFresh = (one, now) => Boolean(one.born) && now - one.born < FLASH;

/**
 * A canvas for one GPU, with a text alternative for screen readers.
 * @param {Strip} strip
 * @param {{width?: number, height?: number, label: string, look?: Look}} options
 */
export function stripCanvas(strip, { width = 240, height = 26, label, look }) {
  const canvas = document.createElement("canvas");
  canvas.className = "strip";
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", label);
  const context = sized(canvas, width + 2, height + 2);
  paintStrip(context, { x: 0, y: 0, width, height }, strip, look);
  return canvas;
}

/**
 * Size a canvas in CSS pixels, sharp on every screen.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 */
export function sized(canvas, width, height) {
  const ratio = globalThis.devicePixelRatio || 1;
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** What a GPU holds, in words. @param {Strip} strip */
export function inWords(strip) {
  const parts = strip.instances.map(
    (one) => `${one.profile} at ${one.start}${one.tenant ? ` of ${one.tenant}` : ""}`,
  );
  const held = strip.reserved ? `; ${reservedWords(strip.reserved)}` : "";
  return (parts.length ? parts.join(", ") : "empty") + held;
}

/** A reserved window, in words. @param {Reserved} one */
export function reservedWords(one) {
  const where = `${slices(one.start, one.size)} ${one.size === 1 ? "is" : "are"} reserved`;
  if (!one.tenant) return `${where} for another tenant`;
  const times = (one.count ?? 1) > 1 ? `${one.count} × ` : "";
  return `${where} for ${one.tenant}: ${times}${one.profile}, ${one.opens_at ? `from ${clock(one.opens_at)} at the latest` : "from a time that is not known"}`;
}
