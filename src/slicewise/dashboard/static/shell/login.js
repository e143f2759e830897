/** The sign-in page. */

import { ApiError, get, keepToken } from "./api.js";
import { button, fill, h } from "./dom.js";
import { logo } from "./frame.js";
import { leaveForProvider, provider, secure } from "./provider.js";

/**
 * @param {Element} root
 * @param {(who: any) => void} enter
 * @param {string} [said] why one stands here
 */
export function showLogin(root, enter, said = "") {
  const input = /** @type {HTMLInputElement} */ (h("input", {
    id: "token", type: "password", name: "token", autocomplete: "off", spellcheck: "false",
    required: true, "aria-describedby": "token-help token-problem",
  }));
  const problem = h("p", { id: "token-problem", class: "problem", role: "alert" }, said);
  const go = /** @type {HTMLButtonElement} */ (h("button", { type: "submit", class: "primary" }, "Sign in"));
  const form = h("form", { class: "login", on: { submit: async (event) => {
    event.preventDefault();
    const secret = input.value.trim();
    if (!secret) return;
    go.disabled = true;
    fill(problem);
    keepToken(secret);
    const { who, why } = await whoIs();
    go.disabled = false;
    if (who) {
      enter(who);
      return;
    }
    keepToken(null);
    fill(problem, why);
    input.select();
    input.focus();
  } } },
  h("h1", {}, logo(), "slicewise"),
  h("p", { class: "soft" }, "See the slices of your GPUs: where the room went, and what still fits."),
  h("label", { for: "token" }, "Token"),
  input,
  h("p", { id: "token-help", class: "soft small" },
    "The service left the first admin's token in the file admin-token of its data folder. "
    + "A token stays in this tab and is forgotten when the tab is closed."),
  problem,
  go);
  fill(root, h("main", { class: "door" }, form));
  input.focus();
  offerProvider(form);
}

/**
 * Add a button for the identity provider, if there is one.
 * @param {HTMLElement} form
 */
async function offerProvider(form) {
  const found = await provider();
  if (!found || !form.isConnected) return;
  const host = new URL(/** @type {string} */ (found.issuer)).host;
  form.append(
    h("p", { class: "soft" }, "or"),
    button(`Sign in with ${host}`, () => leaveForProvider(found), { disabled: !secure() }));
  if (!secure()) {
    form.append(h("p", { class: "soft small" }, "Signing in with the provider needs https."));
  }
}

/**
 * Who bears the token that is kept; `later` when the service cannot say at the moment.
 * @returns {Promise<{who: any, why: string, later: boolean}>}
 */
export async function whoIs() {
  try {
    const who = await get("/v1/whoami");
    if (who.role === "agent") {
      return { who: null, later: false, why: "this is an agent's token, which sees its own node only; "
        + "the dashboard needs a token of another role" };
    }
    return { who, why: "", later: false };
  } catch (error) {
    const why = error instanceof Error ? error.message : String(error);
    return { who: null, why, later: error instanceof ApiError && ![401, 403].includes(error.status) };
  }
}
