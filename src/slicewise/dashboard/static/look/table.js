/** Tables that can be searched and sorted; on a phone each row becomes a card. */

import { fill, h } from "../shell/dom.js";
import { percent, plural } from "../shell/format.js";
import { standIn } from "../shell/notice.js";

const SHOWN = 200;

/**
 * @template T
 * @typedef {{name: string, cell: (row: T) => import("../shell/dom.js").Child | import("../shell/dom.js").Child[],
 *   sort?: (row: T) => string | number, number?: boolean, tight?: boolean, free?: boolean}} Column
 */

/** @template T */
export class Table {
  /**
   * @param {{caption: string, columns: Column<T>[], words: (row: T) => string, empty: Node,
   *   key?: (row: T) => string, search?: string}} options
   */
  constructor({ caption, columns, words, empty, key, search = "" }) {
    this._columns = columns.filter((column) => column.name !== "");
    this._words = words;
    this._empty = empty;
    this._key = key;
    /** @type {T[]} */
    this._rows = [];
    this._sorted = { column: -1, down: false };
    this._most = SHOWN;
    this._input = /** @type {HTMLInputElement} */ (h("input", { type: "search", value: search,
      on: { input: () => { this._most = SHOWN; this._render(); } } }));
    this.search = h("label", { class: "field" }, h("span", {}, "Search"), this._input);
    this._heads = this._columns.map((column, index) => h("th", { scope: "col", class: kind(column) },
      column.sort ? h("button", { type: "button", on: { click: () => this._sortBy(index) } }, column.name)
        : column.name === "actions" ? h("span", { class: "unseen" }, "Actions") : column.name));
    this._body = h("tbody", {});
    this._count = h("p", { class: "soft small", role: "status" });
    this._table = h("div", { class: "scroll" }, h("table", {},
      h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, this._heads)), this._body));
    this._rest = h("div", {});
    this.element = h("div", {}, this._count, this._table, this._rest);
  }

  /** @param {T[]} rows */
  set rows(rows) {
    this._rows = rows;
    this._keepingFocus(() => this._render());
  }

  /** Keep the focus on a button of a row when the rows are redrawn. @param {() => void} work */
  _keepingFocus(work) {
    const active = document.activeElement;
    const row = this._body.contains(active) ? active?.closest("tr") : null;
    const place = row ? [...row.querySelectorAll("button")].findIndex((one) => one === active) : -1;
    const key = row?.dataset.key;
    work();
    if (!row) return;
    const again = [...this._body.children].find((one) => /** @type {HTMLElement} */ (one).dataset.key === key);
    (again?.querySelectorAll("button")[place] ?? this._input).focus({ preventScroll: true });
  }

  /** @param {number} index */
  _sortBy(index) {
    this._sorted = { column: index, down: this._sorted.column === index && !this._sorted.down };
    this._heads.forEach((head, place) => {
      if (place === index) head.setAttribute("aria-sort", this._sorted.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this._render();
  }

  _render() {
    const wanted = this._input.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let found = this._rows.filter((row) => {
      const words = this._words(row).toLowerCase();
      return wanted.every((word) => words.includes(word));
    });
    const sort = this._columns[this._sorted.column]?.sort;
    if (sort) {
      const sign = this._sorted.down ? -1 : 1;
      found = found.toSorted((one, other) => {
        const [a, b] = [sort(one), sort(other)];
        return sign * (typeof a === "number" && typeof b === "number" ? a - b
          : String(a).localeCompare(String(b), "en", { numeric: true }));
      });
    }
    const shown = found.slice(0, this._most);
    fill(this._body, shown.map((row) => h("tr", { data: this._key ? { key: this._key(row) } : {} },
      this._columns.map((column) => h("td", { class: kind(column), data: { name: column.name === "actions" ? "" : column.name } },
        h("div", { class: "cell" }, column.cell(row)))))));
    const all = this._rows.length;
    fill(this._count, all && found.length !== all ? `${found.length} of ${plural(all, "row")}` : plural(all, "row"));
    this._count.hidden = !all;
    this._table.hidden = !found.length;
    fill(this._rest, found.length ? null : all ? standIn("empty", "Nothing fits this search", "") : this._empty,
      found.length > shown.length && h("button", { type: "button",
        on: { click: () => { this._most += SHOWN; this._render(); } } }, "Show more"));
  }
}

/** How a column is set: numbers to the right, short things unbroken, long ones broken anywhere. @param {any} column */
function kind({ number, tight, free }) {
  return [number && "number", tight && "tight", free && "free"].filter(Boolean).join(" ") || null;
}

const KINDS = { ready: "good", placed: "good", active: "good", cordoned: "warn", draining: "warn",
  drained: "warn", queued: "warn", creating: "warn", releasing: "warn", failed: "bad", rejected: "bad" };

/** A state by its name, whatever it is. @param {string} state */
export const pill = (state) => h("span", { class: `pill ${KINDS[state] ?? ""}` }, state);

/** How much of a limit is used. @param {number} used @param {number | null | undefined} limit */
export function meter(used, limit, alarm = true) {
  if (limit === null || limit === undefined) return h("span", {}, `${used}`, h("span", { class: "soft" }, " of any"));
  const share = limit ? Math.min(100, (100 * used) / limit) : 100;
  return h("span", {}, `${used} of ${limit}`,
    h("span", { class: `meter${alarm && share >= 90 ? " over" : ""}`, "aria-hidden": "true" }, h("i", { style: { width: `${share}%` } })));
}

/**
 * A part of the whole as a bar, with a mark at what is guaranteed and one at the part by weight.
 * @param {number} used @param {number} all @param {number} guarantee @param {number} weight
 * @param {number | null} fair
 */
export function shareBar(used, all, guarantee, weight, fair) {
  const at = (value) => `${all ? Math.min(100, (100 * value) / all) : 0}%`;
  const words = [guarantee && `${percent(guarantee, all)} guaranteed`,
    fair === null ? `weight ${weight}` : `${percent(fair, all)} by weight ${weight}`].filter(Boolean);
  return h("span", {}, percent(used, all),
    h("span", { class: "meter share", "aria-hidden": "true" }, h("i", { style: { width: at(used) } }),
      guarantee ? h("b", { class: "guarantee", style: { left: at(guarantee) } }) : null,
      fair === null ? null : h("b", { class: "fair", style: { left: at(fair) } })),
    ...words.map((line) => h("span", { class: "soft small" }, line)));
}

/** @param {Record<string, string>} labels */
export const labelText = (labels) => Object.entries(labels ?? {}).map(([key, value]) => `${key}=${value}`).join(", ");
