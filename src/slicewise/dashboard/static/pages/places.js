/** The pages and their roles. All are loaded at the start, so they work without a connection. */

import * as allocations from "./allocations.js";
import * as ask from "./ask.js";
import * as audit from "./audit.js";
import * as cluster from "./cluster.js";
import * as compare from "./compare.js";
import * as defrag from "./defrag.js";
import * as overview from "./overview.js";
import * as nodes from "./nodes.js";
import * as queue from "./queue.js";
import * as tenants from "./tenants.js";

const STAFF = ["admin", "operator"];

/**
 * @typedef {{id: string, title: string, group: string, roles?: string[], everything?: boolean,
 *   page: {show: (element: HTMLElement, context: import("../main.js").Context) => void | Promise<void>}}} Place
 */

/** @type {Place[]} */
export const PLACES = [
  { id: "cluster", title: "Cluster", group: "See", page: cluster },
  { id: "overview", title: "Overview", group: "See", page: overview },
  { id: "compare", title: "Compare policies", group: "See", page: compare },
  { id: "ask", title: "Ask", group: "Use", roles: [...STAFF, "tenant"], page: ask },
  { id: "allocations", title: "Allocations", group: "Use", page: allocations },
  { id: "queue", title: "Queue", group: "Use", page: queue },
  { id: "nodes", title: "Nodes", group: "Run", page: nodes },
  { id: "defrag", title: "Defragment", group: "Run", roles: [...STAFF, "read-only"], everything: true, page: defrag },
  { id: "tenants", title: "Tenants and quotas", group: "Run", page: tenants },
  { id: "audit", title: "Audit log", group: "Run", roles: STAFF, page: audit },
];
