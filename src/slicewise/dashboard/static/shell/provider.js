/** Sign-in with an identity provider: the authorization code flow with PKCE (RFC 7636). */

import { get, keepToken, send } from "./api.js";

const KEY = "slicewise.sign-in";
/** Where the provider sends people back to. */
export const RETURN = "/sign-in";

/** @typedef {{issuer: string | null, client: string, scopes: string[],
 *   authorization_endpoint: string | null}} Provider */

/** @returns {Promise<Provider | null>} the provider, if people can sign in with one */
export async function provider() {
  const found = await get("/v1/sign-in").catch(() => null);
  return found?.issuer && found.authorization_endpoint ? found : null;
}

/** Whether the browser can compute the challenge: over https, or on this machine. */
export const secure = () => Boolean(globalThis.crypto?.subtle);

/**
 * Go to the provider. What proves that this tab asked for the code stays in the tab.
 * @param {Provider} found
 */
export async function leaveForProvider(found) {
  const state = random(), verifier = random();
  const place = location.pathname === RETURN ? "/" : location.pathname + location.search;
  sessionStorage.setItem(KEY, JSON.stringify({ state, verifier, place, issuer: found.issuer }));
  const url = new URL(/** @type {string} */ (found.authorization_endpoint));
  const asked = {
    response_type: "code",
    client_id: found.client,
    redirect_uri: location.origin + RETURN,
    scope: found.scopes.join(" "),
    state,
    code_challenge: await challenge(verifier),
    code_challenge_method: "S256",
  };
  for (const [name, value] of Object.entries(asked)) url.searchParams.set(name, value);
  location.assign(url);
}

/**
 * Back from the provider: exchange the code, which works once, and forget it.
 * @returns {Promise<string>} why it failed, or nothing
 */
export async function returnFromProvider() {
  const given = new URLSearchParams(location.search);
  const kept = JSON.parse(sessionStorage.getItem(KEY) ?? "null");
  sessionStorage.removeItem(KEY);
  history.replaceState(null, "", kept?.place ?? "/");
  const state = given.get("state"), code = given.get("code"), issuer = given.get("iss");
  if (!kept || !state || state !== kept.state || (issuer !== null && issuer !== kept.issuer)) {
    return "this sign-in was not begun in this tab: begin again";
  }
  if (!code) {
    const why = given.get("error_description") ?? given.get("error") ?? "it sent no code";
    return `the identity provider refused: ${why}`;
  }
  try {
    const answer = await send("POST", "/v1/sign-in/code", {
      code, verifier: kept.verifier, redirect_uri: location.origin + RETURN,
    });
    keepToken(answer.token);
    return "";
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

/** @param {string} verifier */
async function challenge(verifier) {
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier));
  return encode(new Uint8Array(digest));
}

const random = () => encode(crypto.getRandomValues(new Uint8Array(32)));

/** @param {Uint8Array} bytes */
function encode(bytes) {
  const text = btoa(String.fromCharCode(...bytes));
  return text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
