/** The dashboard: sign in, build the frame, show the requested page. */

import { ApiError, events, keepToken, token } from "./shell/api.js";
import { button, fill, h } from "./shell/dom.js";
import { applyTheme, Frame } from "./shell/frame.js";
import { Live } from "./shell/live.js";
import { showLogin, whoIs } from "./shell/login.js";
import { placeNotices, standIn } from "./shell/notice.js";
import { RETURN, returnFromProvider } from "./shell/provider.js";
import { PLACES } from "./pages/places.js";

/**
 * @typedef {{who: any, live: Live, go: (id: string, query?: string) => void,
 *   may: (what: "use" | "staff" | "admin") => boolean, signal: AbortSignal}} Context
 */

const MAY = {
  use: ["admin", "operator", "tenant"],
  staff: ["admin", "operator"],
  admin: ["admin"],
};

const root = /** @type {HTMLElement} */ (document.getElementById("app"));
/** @type {(() => void) | null} */
let closeHouse = null;

applyTheme();
placeNotices(document.body);
events.addEventListener("unknown", (event) => leave(/** @type {CustomEvent} */ (event).detail));
begin();

async function begin() {
  if (location.pathname === RETURN) {
    fill(root, h("main", {}, standIn("loading", "Signing in …")));
    const refused = await returnFromProvider();
    if (refused) {
      showLogin(root, enter, refused);
      return;
    }
  }
  if (token() === null) {
    showLogin(root, enter);
    return;
  }
  fill(root, h("main", {}, standIn("loading", "Signing in …")));
  const { who, why, later } = await whoIs();
  if (who) {
    enter(who);
  } else if (later) {
    const retry = setTimeout(begin, 3000);
    fill(root, h("main", {}, standIn("error", "The service is not ready",
      `${why}. It may be restarting; this page retries automatically.`,
      button("Try now", () => { clearTimeout(retry); begin(); }))));
  } else {
    keepToken(null);
    showLogin(root, enter, why);
  }
}

/** @param {any} who */
async function enter(who) {
  closeHouse?.();
  const live = new Live(who);
  const places = PLACES.filter((place) => isFor(place, who));
  /** @type {AbortController} */
  let visit = new AbortController();
  let closed = false;

  const show = async () => {
    visit.abort();
    visit = new AbortController();
    const { signal } = visit;
    const id = location.pathname.slice(1) || "cluster";
    const place = places.find((one) => one.id === id) ?? places[0];
    frame.mark(place.id);
    document.title = `${place.title} · slicewise`;
    const may = (what) => MAY[what].includes(who.role);
    const element = document.createElement("div");
    element.className = `page ${place.id}`;
    fill(frame.main, element);
    frame.main.scrollTop = 0;
    try {
      await place.page.show(element, { who, live, go, may, signal });
    } catch (error) {
      if (signal.aborted) return;
      const why = error instanceof Error ? error.message : String(error);
      fill(element, h("h1", {}, place.title), standIn("error", "This page could not be loaded", why, button("Try again", show)));
    }
  };
  /** @param {string} id @param {string} [query] */
  const go = (id, query = "") => {
    history.pushState(null, "", `/${id}${query}`);
    show();
    frame.main.focus({ preventScroll: true });
  };

  fill(root);
  const frame = new Frame(root, { places, who, live, go, leave: () => leave("") });
  addEventListener("popstate", show);
  closeHouse = () => {
    closed = true;
    visit.abort();
    live.stop();
    removeEventListener("popstate", show);
    closeHouse = null;
  };
  fill(frame.main, standIn("loading", "Loading the cluster …"));
  const open = async () => {
    try {
      await live.start();
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return;
      const why = error instanceof Error ? error.message : String(error);
      fill(frame.main, standIn("error", "Could not load the cluster", why, button("Try again", open)));
      return;
    }
    if (!closed) show();
  };
  open();
}

/** @param {any} place @param {any} who */
function isFor(place, who) {
  return (!place.roles || place.roles.includes(who.role)) && !(place.everything && who.tenant);
}

/** @param {string} why */
function leave(why) {
  closeHouse?.();
  keepToken(null);
  showLogin(root, enter, why);
}
