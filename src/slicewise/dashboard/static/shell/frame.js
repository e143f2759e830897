/** The frame of every page: navigation, totals of the cluster, state of the connection. */

import { button, fill, h } from "./dom.js";
import { count, percent } from "./format.js";
import { themeChanged } from "../look/palette.js";

const THEME = "slicewise.theme";
const ROLES = {
  admin: "admin", operator: "operator", tenant: "tenant", "read-only": "read-only", agent: "agent",
};

/** @typedef {import("../pages/places.js").Place} Place */

export class Frame {
  /**
   * @param {Element} root
   * @param {{places: Place[], who: any, live: import("./live.js").Live,
   *   go: (id: string) => void, leave: () => void}} parts
   */
  constructor(root, { places, who, live, go, leave }) {
    this._live = live;
    /** @type {Map<string, HTMLElement>} */
    this._links = new Map();
    this.main = h("main", { id: "main", tabindex: "-1" });
    this._totals = h("dl", { class: "totals", "aria-label": "The cluster now" });
    this._status = h("div", { class: "line", role: "status" });
    this._banner = h("div", { class: "banner", role: "alert", hidden: true });
    const menu = h("nav", { "aria-label": "Pages", id: "menu" });
    let group = "";
    for (const place of places) {
      if (place.group !== group) {
        group = place.group;
        menu.append(h("p", { class: "group" }, group));
      }
      const link = h("a", { href: `/${place.id}`, on: { click: (event) => {
        if (event.metaKey || event.ctrlKey || event.shiftKey) return;
        event.preventDefault();
        go(place.id);
      } } }, place.title);
      this._links.set(place.id, link);
      menu.append(link);
    }
    const name = who.tenant ? `${who.tenant} · ${ROLES[who.role] ?? who.role}` : ROLES[who.role] ?? who.role;
    root.append(
      h("a", { class: "skip", href: "#main", on: { click: (event) => {
        event.preventDefault();
        this.main.focus();
      } } }, "Skip to the page"),
      h("header", { class: "top" },
        h("a", { class: "brand", href: "/cluster", "aria-label": "slicewise, to the cluster",
          on: { click: (event) => { event.preventDefault(); go("cluster"); } } },
        logo(), h("span", {}, "slicewise")),
        this._totals,
        h("div", { class: "who" },
          this._status,
          h("span", { class: "name", title: who.note ? `token ${who.id}: ${who.note}` : `token ${who.id}` }, name),
          themeButton(),
          button("Sign out", leave, { class: "quiet" }))),
      this._banner,
      h("div", { class: "body" }, menu, this.main));
    live.addEventListener("totals", () => this._showTotals());
    live.addEventListener("status", () => this._showStatus());
    this._showTotals();
    this._showStatus();
  }

  /** @param {string} id */
  mark(id) {
    for (const [name, link] of this._links) {
      if (name === id) {
        link.setAttribute("aria-current", "page");
        if (link.offsetParent) link.scrollIntoView({ block: "nearest", inline: "nearest" });
      } else link.removeAttribute("aria-current");
    }
  }

  _showTotals() {
    const view = this._live.totals;
    if (!view) return;
    const used = view.slices - view.free_slices;
    const pair = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
    fill(this._totals,
      pair("GPUs", count(view.gpus)),
      pair("instances", count(view.instances)),
      pair("slices taken", percent(used, view.slices)),
      pair("mean F", view.fragmentation.partial.toFixed(2)),
      pair("waiting", count(view.waiting)),
      pair("policy", view.policy));
  }

  _showStatus() {
    const { status, why } = this._live;
    const words = { live: "live", lost: "disconnected", connecting: "connecting" }[status] ?? status;
    fill(this._status, h("span", { class: `dot ${status}`, "aria-hidden": "true" }), words);
    this._banner.hidden = status !== "lost";
    if (status === "lost") {
      fill(this._banner, h("span", {}, `Disconnected, retrying: ${why}. The data shown is out of date.`),
        button("Try now", () => this._live.retryNow()));
    }
  }
}

export function logo() {
  return h("span", { class: "logo", "aria-hidden": "true" },
    h("i", { class: "a" }), h("i", { class: "b" }), h("i", { class: "c" }));
}

const SYSTEM = "(prefers-color-scheme: dark)";
matchMedia(SYSTEM).addEventListener("change", themeChanged);

/** The media query of the dark style sheet: always, never, or as the system prefers. */
export function applyTheme() {
  const chosen = localStorage.getItem(THEME);
  const sheet = document.getElementById("dark");
  sheet.media = chosen ? (chosen === "dark" ? "all" : "not all") : SYSTEM;
}

function themeButton() {
  const dark = () => matchMedia(document.getElementById("dark").media).matches;
  const switcher = button("", () => {
    const next = dark() ? "light" : "dark";
    localStorage.setItem(THEME, next);
    applyTheme();
    themeChanged();
    label();
  }, { class: "quiet theme" });
  const label = () => {
    const next = dark() ? "Light" : "Dark";
    fill(switcher, next);
    switcher.setAttribute("aria-label", `${next} theme`);
  };
  label();
  return switcher;
}
