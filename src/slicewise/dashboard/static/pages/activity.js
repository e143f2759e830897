/** Entries of the journal as sentences. */

import { brief, clock, plain } from "../shell/format.js";

/** @param {any} want */
export function wanted(want, count = 1) {
  const times = count > 1 ? `${count} × ` : "";
  if (want?.profile) return times + want.profile;
  return `${times}at least ${want?.compute ?? 0} compute and ${want?.memory_gb ?? 0} GB`;
}

/** @param {any[]} parts */
function places(parts) {
  return (parts ?? []).map((one) => `${one.node} GPU ${one.gpu} slice ${one.start}`).join(", ");
}

/**
 * What an entry says, in one sentence.
 * @param {import("../shell/stream.js").Entry} told
 */
export function sentence({ kind, entry, subject }) {
  switch (kind) {
    case "allocated":
      return `${entry.allocation.tenant.name} got ${wanted(entry.allocation.want, entry.allocation.count)} on ${places(entry.allocation.parts)}`;
    case "served":
      return `${entry.tenant.name} got what it waited for on ${places(entry.parts)}`;
    case "queued":
      return `${entry.allocation.tenant.name} waits for ${wanted(entry.allocation.want, entry.allocation.count)}: ${entry.allocation.detail ?? ""}`;
    case "rejected":
      return `${entry.tenant.name} was refused ${wanted(entry.want, entry.count)}: ${entry.detail}`;
    case "ended": {
      const { tenant, want, count, cause, parts } = entry.allocation;
      const where = places(parts);
      return `${tenant.name}: ${wanted(want, count)} ended${where ? ` on ${where}` : " without a place"}, ${cause ?? ""}`;
    }
    case "moved":
      return `${entry.tenant.name}: ${brief(entry.allocation)} moved to ${places([entry.part])}`;
    case "lease-extended":
      return `${entry.tenant.name}: the lease of ${brief(entry.allocation)} was extended, and ends at ${clock(new Date(entry.ends * 1000).toISOString())}`;
    case "lease-ending":
      return `${entry.tenant.name}: the lease of ${brief(entry.allocation)} ends at ${clock(new Date(entry.ends * 1000).toISOString())}`;
    case "node-added":
      return `node ${entry.node} joined with ${entry.gpus} ${entry.model}`;
    case "node-turned":
      return `node ${entry.node} is ${entry.phase}`;
    case "node-removed":
      return `node ${entry.node} left`;
    case "tenant-set":
      return `tenant ${entry.tenant.name} was set, quota ${quota(entry.quota)}`;
    case "tenant-removed":
      return `tenant ${entry.tenant.name} was removed`;
    case "token-issued":
      return `a token ${entry.role} was issued${entry.tenant ? ` to ${entry.tenant.name}` : ""}${entry.note ? ` (${entry.note})` : ""}`;
    case "token-expiring":
      return `token ${brief(entry.token)} was rotated, and is void from ${clock(new Date(entry.expires * 1000).toISOString())} on`;
    case "token-revoked":
      return `token ${entry.token} was revoked`;
    case "model-entered":
      return `GPU model ${entry.geometry.model} added`;
    case "model-forgotten":
      return `GPU model ${entry.model} was forgotten: no node has it`;
    case "part-turned":
      return `${entry.tenant.name}: ${brief(entry.allocation)} is ${entry.phase} on ${entry.node}${entry.detail ? `: ${entry.detail}` : ""}`;
    case "agent-joined":
      return `the agent of ${entry.node} reported${entry.rebooted ? " after a restart of the node" : ""}: driver ${entry.driver}`;
    case "geometry-accepted":
      return `the geometry that the driver of ${entry.node} tells was accepted`;
    case "node-held":
      return `node ${entry.node} ${holds(entry.reasons)}`;
    case "gpu-held":
      return `GPU ${entry.gpu} of ${entry.node} ${holds(entry.reasons)}`;
    case "foreign-seen":
      return `an instance that is no allocation's was found on ${entry.node}: ${entry.name}`;
    case "foreign-evicted":
      return `the instance ${entry.name} on ${entry.node}, no allocation's, is to be destroyed`;
    case "foreign-gone":
      return `the instance ${entry.name} on ${entry.node}, no allocation's, is gone`;
    case "reserved":
      return `${entry.tenant.name}: ${entry.windows.length
        ? `reserved ${entry.windows.map((one) => `GPU ${one.gpu} of ${one.node}`).join(", ")} for a waiting request`
        : "its reservation for one kind of request has ended"}`;
    case "policy-chosen":
      return `requests are placed by ${entry.choice.form ?? "least-lost"}${entry.choice.leases ? "+leases" : ""}: ${entry.why}`;
    case "clock-set":
      return `service time was moved by ${entry.by} seconds`;
    case "turn-taken":
      return `the policy goes on from GPU ${entry.turn}`;
    default:
      return `${kind}${subject ? ` ${subject}` : ""}: ${plain(rest(entry))}`;
  }
}

/** @param {Record<string, string>} reasons */
function holds(reasons) {
  const named = Object.entries(reasons ?? {});
  if (!named.length) return "is held no more";
  return `is held: ${named.map(([word, why]) => (why ? `${word}, ${why}` : word)).join("; ")}`;
}

/** @param {any} limits */
export function quota(limits) {
  const named = Object.entries(limits ?? {}).filter(([, value]) => value !== null);
  return named.length ? named.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ") : "unlimited";
}

/** @param {any} entry */
function rest(entry) {
  return Object.fromEntries(Object.entries(entry ?? {}).filter(([name]) => name !== "kind"));
}
