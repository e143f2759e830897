/** The event stream: reconnects and resumes after the last entry. */

import { ApiError, ask } from "./api.js";

const FIRST_WAIT = 400;
const LONGEST_WAIT = 8000;
/** The service sends a heartbeat every 15 seconds; after this long the connection is dead. */
const SILENCE = 40000;

/**
 * @typedef {{seq: number, at: string, actor: string, kind: string, tenant: string | null,
 *   subject: string, entry: any}} Entry
 */

export class EventStream {
  /**
   * @param {{entries: (entries: Entry[]) => void,
   *   status: (status: "live" | "lost", why: string) => void,
   *   resume: () => Promise<string>}} reader `resume` says from where on to follow, after a break
   */
  constructor(reader) {
    this._reader = reader;
    this._stopped = false;
    /** @type {AbortController | null} */
    this._abort = null;
    this._seen = "";
    this._retry = () => {};
  }

  /** @param {string} place the history and the last entry that are known already */
  async follow(place) {
    this._seen = place;
    let wait = FIRST_WAIT;
    let broken = false;
    while (!this._stopped) {
      try {
        if (broken) this._seen = await this._reader.resume();
        await this._read(() => {
          wait = FIRST_WAIT;
          this._reader.status("live", "");
        });
        if (!this._stopped) this._reader.status("lost", "the service ended the connection");
      } catch (error) {
        if (this._stopped) return;
        if (error instanceof ApiError && [401, 403].includes(error.status)) return;
        const why = error instanceof ApiError ? error.message : "the connection was lost";
        this._reader.status("lost", why);
      }
      broken = true;
      await this._pause(wait * (0.75 + Math.random() / 2));
      wait = Math.min(LONGEST_WAIT, wait * 2);
    }
  }

  stop() {
    this._stopped = true;
    this._abort?.abort();
    this._retry();
  }

  /** Retry immediately. */
  retryNow() {
    this._retry();
  }

  /** @param {number} milliseconds */
  _pause(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this._retry = () => {
        clearTimeout(timer);
        resolve(undefined);
      };
    });
  }

  /** @param {() => void} connected */
  async _read(connected) {
    this._abort = new AbortController();
    const abort = this._abort;
    let watch = setTimeout(() => abort.abort(), SILENCE);
    try {
      const response = await ask(`/v1/events?after=${this._seen}`, { signal: abort.signal });
      connected();
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let buffer = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        clearTimeout(watch);
        watch = setTimeout(() => abort.abort(), SILENCE);
        buffer += value;
        const end = buffer.lastIndexOf("\n\n");
        if (end >= 0) {
          this._take(buffer.slice(0, end));
          buffer = buffer.slice(end + 2);
        }
      }
    } finally {
      clearTimeout(watch);
    }
  }

  /** @param {string} text whole blocks */
  _take(text) {
    /** @type {Entry[]} */
    const entries = [];
    for (const block of text.split("\n\n")) {
      for (const line of block.split("\n")) {
        if (line.startsWith("id: ")) this._seen = line.slice(4);
        else if (line.startsWith("data: ")) entries.push(JSON.parse(line.slice(6)));
      }
    }
    if (entries.length) this._reader.entries(entries);
  }
}
