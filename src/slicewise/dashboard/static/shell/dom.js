/** Create elements. Text is always inserted as text, never as markup. */

/**
 * @typedef {Node | string | number | null | undefined | false} Child
 * @typedef {Record<string, unknown>} Props
 */

import { brief } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element with its attributes and children.
 * `on` holds listeners, `data` data attributes, `style` CSS properties; false and null leave out.
 * @param {string} tag
 * @param {Props} [props]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, props = {}, ...children) {
  return /** @type {HTMLElement} */ (dress(document.createElement(tag), props, children));
}

/**
 * An id in short: all of it shows when it is pointed at, and is what is copied.
 * @param {string} full
 * @returns {HTMLElement}
 */
export function id(full) {
  return h("span", {
    class: "id",
    title: full,
    on: {
      copy: (/** @type {ClipboardEvent} */ event) => {
        event.clipboardData?.setData("text/plain", full);
        event.preventDefault();
      },
    },
  }, brief(full));
}

/**
 * The same for SVG.
 * @param {string} tag
 * @param {Props} [props]
 * @param {...(Child | Child[])} children
 * @returns {SVGElement}
 */
export function svg(tag, props = {}, ...children) {
  return /** @type {SVGElement} */ (dress(document.createElementNS(SVG, tag), props, children));
}

/**
 * @param {Element} element
 * @param {Props} props
 * @param {(Child | Child[])[]} children
 */
function dress(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(/** @type {object} */ (value))) {
        element.addEventListener(event, listener);
      }
    } else if (name === "data") {
      Object.assign(/** @type {HTMLElement} */ (element).dataset, value);
    } else if (name === "style") {
      for (const [key, text] of Object.entries(/** @type {object} */ (value))) {
        /** @type {HTMLElement} */ (element).style.setProperty(key, String(text));
      }
    } else if (name === "value" || name === "checked" || name === "selected") {
      /** @type {Record<string, unknown>} */ (/** @type {unknown} */ (element))[name] = value;
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...nodes(children));
  return element;
}

/**
 * @param {(Child | Child[])[]} children
 * @returns {(Node | string)[]}
 */
function nodes(children) {
  return children
    .flat()
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}

/**
 * Replace what an element holds.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
}

/**
 * A labelled choice.
 * @param {string} label
 * @param {readonly (string | [string, string])[]} options values, or values with their words
 * @param {string} chosen
 * @param {(value: string) => void} change
 * @param {Props} [props]
 */
export function choice(label, options, chosen, change, props = {}) {
  const select = /** @type {HTMLSelectElement} */ (h("select", { "aria-label": label, ...props }));
  select.addEventListener("change", () => change(select.value));
  setOptions(select, options, chosen);
  return h("label", { class: "field" }, h("span", {}, label), select);
}

/**
 * @param {HTMLSelectElement} select
 * @param {readonly (string | [string, string])[]} options
 * @param {string} chosen
 */
export function setOptions(select, options, chosen) {
  const pairs = options.map((one) => (typeof one === "string" ? [one, one] : one));
  const key = JSON.stringify(pairs);
  if (select.dataset.options !== key) {
    select.dataset.options = key;
    fill(select, ...pairs.map(([value, text]) => h("option", { value }, text)));
  }
  if (select.value !== chosen) select.value = chosen;
}

/**
 * A labelled input.
 * @param {string} label
 * @param {Props} props
 */
export function field(label, props) {
  return h("label", { class: "field" }, h("span", {}, label), h("input", props));
}

/**
 * @param {string} text
 * @param {() => void} press
 * @param {Props} [props]
 */
export function button(text, press, props = {}) {
  return h("button", { type: "button", ...props, on: { click: press } }, text);
}
