/** Notices, confirmation dialogs, and placeholders while data is loading or missing. */

import { fill, h } from "./dom.js";

const region = h("div", { class: "notices", role: "status", "aria-live": "polite" });

/** @param {Element} root */
export function placeNotices(root) {
  root.append(region);
}

/**
 * @param {string} text
 * @param {"good" | "bad"} [kind]
 */
export function notice(text, kind = "good") {
  const sign = kind === "good" ? "✓" : "!";
  const box = h("div", { class: `notice ${kind}` }, h("span", { "aria-hidden": "true" }, sign), text);
  region.append(box);
  while (region.children.length > 4) region.firstElementChild?.remove();
  setTimeout(() => box.remove(), kind === "good" ? 6000 : 12000);
}

/**
 * Ask before something is done; resolves to what was filled in, or null.
 * @param {{title: string, text: string, act: string, danger?: boolean, body?: Node[]}} question
 * @returns {Promise<FormData | null>}
 */
export function confirm({ title, text, act, danger = false, body = [] }) {
  const form = /** @type {HTMLFormElement} */ (h("form", { method: "dialog" },
    h("h2", { id: "question" }, title),
    text && h("p", {}, text),
    ...body,
    h("div", { class: "row end" },
      h("button", { type: "submit", value: "no", formnovalidate: true }, "Cancel"),
      h("button", { type: "submit", value: "yes", class: danger ? "danger" : "primary" }, act)),
  ));
  const dialog = /** @type {HTMLDialogElement} */ (
    h("dialog", { "aria-labelledby": "question" }, form)
  );
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const chosen = dialog.returnValue === "yes" ? new FormData(form) : null;
      dialog.remove();
      resolve(chosen);
    });
    dialog.showModal();
  });
}

/**
 * Do something, and tell how it went.
 * @param {() => Promise<unknown>} work
 * @param {string} done
 */
export async function attempt(work, done) {
  try {
    const answer = await work();
    notice(done);
    return answer;
  } catch (error) {
    notice(error instanceof Error ? error.message : String(error), "bad");
    return null;
  }
}

/**
 * A state of a whole page or panel: empty, loading, or failed.
 * @param {"empty" | "loading" | "error"} kind
 * @param {string} title
 * @param {string} [text]
 * @param {Node} [action]
 */
export function standIn(kind, title, text = "", action = undefined) {
  const sign = { empty: "▱", loading: "", error: "!" }[kind];
  return h("div", { class: `stand-in ${kind}`, role: kind === "error" ? "alert" : "status" },
    h("div", { class: "sign", "aria-hidden": "true" }, sign),
    h("p", { class: "title" }, title),
    text && h("p", {}, text),
    action);
}

/** @type {WeakMap<Element, number>} */
const latest = new WeakMap();

/**
 * Load something into an element, with its states; what was asked for later goes before it.
 * @template T
 * @param {Element} element
 * @param {string} what
 * @param {() => Promise<T>} load
 * @param {(value: T) => void} show
 */
export async function loading(element, what, load, show) {
  const turn = (latest.get(element) ?? 0) + 1;
  latest.set(element, turn);
  const timer = setTimeout(() => {
    if (!element.childElementCount) fill(element, standIn("loading", `Loading ${what} …`));
  }, 150);
  try {
    const value = await load();
    clearTimeout(timer);
    if (latest.get(element) === turn) show(value);
  } catch (error) {
    clearTimeout(timer);
    if (latest.get(element) !== turn) return;
    if (error instanceof DOMException && error.name === "AbortError") return;
    const again = h("button", { type: "button",
      on: { click: () => { fill(element); loading(element, what, load, show); } } }, "Try again");
    const why = error instanceof Error ? error.message : String(error);
    fill(element, standIn("error", `Could not load ${what}`, why, again));
  }
}
