/** Load a list, and again when its contents may have changed. */

/**
 * @param {import("../main.js").Context} context
 * @param {() => Promise<void>} load
 * @param {{kinds?: RegExp, every?: number}} [options] which entries matter; how often at most
 */
export function keepFresh({ live, signal }, load, { kinds = /./, every = 700 } = {}) {
  let timer = 0;
  let busy = false;
  let again = false;
  const run = async () => {
    timer = 0;
    if (busy) {
      again = true;
      return;
    }
    busy = true;
    const begun = performance.now();
    await load().catch(() => {});
    busy = false;
    const took = performance.now() - begun;
    if (again && !signal.aborted) {
      again = false;
      timer = setTimeout(run, Math.max(every, 5 * took));
    }
  };
  const soon = () => {
    if (!timer && !signal.aborted) timer = setTimeout(run, every);
  };
  live.addEventListener("entries", (event) => {
    if (/** @type {CustomEvent} */ (event).detail.some((entry) => kinds.test(entry.kind))) soon();
  }, { signal });
  live.addEventListener("status", () => { if (live.status === "live") soon(); }, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  return soon;
}
