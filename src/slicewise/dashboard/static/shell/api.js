/** Requests to the service. Answers are JSON; every refusal has a message. */

const KEY = "slicewise.token";

/** A refusal, with the message of the service. */
export class ApiError extends Error {
  /**
   * @param {number} status 0 if there was no reply
   * @param {string} detail
   * @param {{reason?: string, field?: string, leader?: string}} [more]
   */
  constructor(status, detail, more = {}) {
    super(detail);
    this.status = status;
    this.reason = more.reason ?? null;
    this.field = more.field ?? null;
    this.leader = more.leader ?? null;
  }
}

/** Notified when the token is no longer valid. */
export const events = new EventTarget();

/** @returns {string | null} */
export function token() {
  return sessionStorage.getItem(KEY);
}

/** @param {string | null} secret */
export function keepToken(secret) {
  if (secret === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, secret);
}

/**
 * A request with the token; the caller reads the body.
 * @param {string} path
 * @param {RequestInit & {headers?: Record<string, string>}} [options]
 */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const secret = token();
  if (secret !== null) headers.authorization = `Bearer ${secret}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiError(0, "the service does not answer");
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  const detail = problem.detail ?? `the service answered ${response.status}`;
  if (response.status === 401 && secret !== null && secret === token()) {
    events.dispatchEvent(new CustomEvent("unknown", { detail }));
  }
  throw new ApiError(response.status, detail, problem);
}

/**
 * @param {string} path
 * @param {Record<string, string | number | boolean | null | undefined | string[]>} [query]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function get(path, query = {}, signal) {
  try {
    return await (await ask(path + asQuery(query), { signal })).json();
  } catch (error) {
    // The service may limit pages to fewer items: then use its default.
    if (!(error instanceof ApiError && error.field === "limit" && query.limit)) throw error;
    return get(path, { ...query, limit: null }, signal);
  }
}

/**
 * @param {"POST" | "PATCH" | "DELETE"} method
 * @param {string} path
 * @param {unknown} [body]
 * @param {{key?: boolean}} [options] with a key, sending it twice by accident does it once
 * @returns {Promise<any>}
 */
export async function send(method, path, body, options = {}) {
  /** @type {Record<string, string>} */
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (options.key) headers["idempotency-key"] = identity();
  const response = await ask(path, {
    method,
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  return { status: response.status, ...(await response.json()) };
}

/** All items of a list, page by page, up to a number of pages. */
export async function* pages(path, query = {}, most = 100, signal = undefined) {
  let cursor = null;
  for (let page = 0; page < most; page += 1) {
    const answer = await get(path, { ...query, cursor }, signal);
    yield answer;
    if (answer.next === null || answer.next === undefined) return;
    cursor = answer.next;
  }
}

/** `crypto.randomUUID` needs a secure context; random values do not. */
function identity() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @param {Record<string, unknown>} query */
export function asQuery(query) {
  const parts = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) parts.append(name, String(one));
  }
  const text = parts.toString();
  return text && `?${text}`;
}

/** @param {string} name */
export const part = (name) => encodeURIComponent(name);
