"""The table of routes: all operations of the API."""

from __future__ import annotations

from slicewise.api.agents import (
    AdoptBody,
    DesiredView,
    ForeignView,
    HelloBody,
    ReportBody,
    ReportView,
    SessionView,
)
from slicewise.api.allocations import (
    AllocationBody,
    AllocationPage,
    AllocationView,
    BatchBody,
    BatchView,
    DryRun,
    ExtendBody,
    QueuePage,
)
from slicewise.api.cluster import ClusterView, ModelList, PolicyList
from slicewise.api.defrag import MovesBody, MovesView, PlanView
from slicewise.api.events import EventPage
from slicewise.api.health import ClockStepBody, ClockStepView, ClockView, Health, Readiness
from slicewise.api.nodes import DrainBody, NodeBody, NodeDetail, NodePage, NodeView
from slicewise.api.policy import PolicyStatus
from slicewise.api.sign_in import CodeBody, SignedInView, SignInView
from slicewise.api.stats import StatsView
from slicewise.api.tenants import (
    NewTokenView,
    RotateBody,
    TenantBody,
    TenantPage,
    TenantPatch,
    TenantView,
    TokenBody,
    TokenPage,
    TokenView,
    WhoView,
)
from slicewise.server import openapi
from slicewise.server.app import Route
from slicewise.server.auth import ADMIN, AGENT, EVERYONE, LOOKERS, STAFF, USERS, WATCHERS
from slicewise.server.pagination import PageQuery
from slicewise.server.routes import (
    agents,
    allocations,
    backup,
    clock,
    cluster,
    defrag,
    dry_run,
    events,
    health,
    listing,
    nodes,
    policy,
    sign_in,
    stats,
    tenants,
)
from slicewise.server.routes.agents import DesiredQuery
from slicewise.server.routes.allocations import AllocationQuery
from slicewise.server.routes.cluster import ClusterQuery
from slicewise.server.routes.defrag import PlanQuery
from slicewise.server.routes.dry_run import DryRunQuery
from slicewise.server.routes.events import AuditQuery, EventQuery
from slicewise.server.routes.listing import ListQuery
from slicewise.server.routes.stats import StatsQuery

ROUTES = (
    Route(
        "POST", "/v1/allocations", "createAllocation", "Create an allocation",
        allocations.create, USERS, {201: AllocationView, 202: AllocationView},
        problems=(404, 409), body=AllocationBody, key=True, writes=True, tag="allocations",
    ),
    Route(
        "DELETE", "/v1/allocations/{id}", "releaseAllocation", "Release an allocation",
        allocations.release, USERS, {200: AllocationView},
        problems=(404,), key=True, writes=True, tag="allocations",
    ),
    Route(
        "POST", "/v1/allocations/{id}/extend", "extendLease", "Extend an allocation's lease",
        allocations.extend, USERS, {200: AllocationView},
        problems=(404, 409), body=ExtendBody, key=True, writes=True, tag="allocations",
    ),
    Route(
        "GET", "/v1/allocations/{id}", "getAllocation", "Get an allocation",
        allocations.get, LOOKERS, {200: AllocationView}, problems=(404,),
        query=AllocationQuery, tag="allocations",
    ),
    Route(
        "GET", "/v1/allocations", "listAllocations", "List allocations",
        listing.allocations, LOOKERS, {200: AllocationPage}, query=ListQuery, tag="allocations",
    ),
    Route(
        "POST", "/v1/allocations/batch", "createAllocations",
        "Create several allocations, all or none",
        allocations.create_batch, USERS, {201: BatchView},
        problems=(404, 409), body=BatchBody, key=True, writes=True, tag="allocations",
    ),
    Route(
        "POST", "/v1/allocations/dry-run", "dryRun", "Show where a request would be placed",
        dry_run.dry_run, USERS, {200: DryRun},
        problems=(404,), body=AllocationBody, query=DryRunQuery, tag="allocations",
    ),
    Route(
        "GET", "/v1/queue", "getQueue", "List the queue",
        listing.queue, LOOKERS, {200: QueuePage}, query=PageQuery, tag="allocations",
    ),
    Route(
        "POST", "/v1/nodes", "addNode", "Register a node",
        nodes.add, STAFF, {201: NodeView}, problems=(409,), body=NodeBody, key=True, writes=True,
        tag="nodes",
    ),
    Route(
        "GET", "/v1/nodes", "listNodes", "List nodes",
        nodes.list_page, LOOKERS, {200: NodePage}, query=PageQuery, tag="nodes",
    ),
    Route(
        "GET", "/v1/nodes/{name}", "getNode", "Get a node and its GPUs",
        nodes.get, EVERYONE, {200: NodeDetail}, problems=(404,), tag="nodes",
    ),
    Route(
        "DELETE", "/v1/nodes/{name}", "removeNode", "Remove an empty node",
        nodes.remove, STAFF, {200: NodeView}, problems=(404, 409), writes=True, tag="nodes",
    ),
    Route(
        "POST", "/v1/nodes/{name}/cordon", "cordonNode", "Stop placing instances on a node",
        nodes.cordon, STAFF, {200: NodeView}, problems=(404,), writes=True, tag="nodes",
    ),
    Route(
        "POST", "/v1/nodes/{name}/uncordon", "uncordonNode", "Resume placing instances on a node",
        nodes.uncordon, STAFF, {200: NodeView}, problems=(404,), writes=True, tag="nodes",
    ),
    Route(
        "POST", "/v1/nodes/{name}/drain", "drainNode", "Drain a node",
        nodes.drain, STAFF, {200: NodeView}, problems=(404,), body=DrainBody, optional_body=True,
        writes=True, tag="nodes",
    ),
    Route(
        "POST", "/v1/nodes/{name}/accept", "acceptNode", "Accept a driver's geometry",
        nodes.accept, STAFF, {200: NodeView}, problems=(404, 409), writes=True, tag="nodes",
    ),
    Route(
        "POST", "/v1/nodes/{name}/foreign/{uuid}/adopt", "adoptForeign",
        "Make a foreign instance an allocation",
        nodes.adopt, STAFF, {201: AllocationView}, problems=(404, 409), body=AdoptBody,
        writes=True, tag="nodes",
    ),
    Route(
        "POST", "/v1/nodes/{name}/foreign/{uuid}/evict", "evictForeign",
        "Destroy a foreign instance",
        nodes.evict, STAFF, {202: ForeignView}, problems=(404,), writes=True, tag="nodes",
    ),
    Route(
        "GET", "/v1/agent/desired", "agentDesired", "Get the desired state of a node",
        agents.desired, AGENT, {200: DesiredView}, problems=(409,), query=DesiredQuery,
        tag="agents",
    ),
    Route(
        "POST", "/v1/agent/report", "agentReport", "Report the actual state of a node",
        agents.report, AGENT, {200: ReportView}, problems=(409,), body=ReportBody, writes=True,
        tag="agents",
    ),
    Route(
        "POST", "/v1/agent/hello", "agentHello", "Begin a session for a node",
        agents.hello, AGENT, {200: SessionView}, problems=(409,), body=HelloBody, writes=True,
        tag="agents",
    ),
    Route(
        "POST", "/v1/tenants", "addTenant", "Create a tenant",
        tenants.add, ADMIN, {201: TenantView}, problems=(409,), body=TenantBody, writes=True,
        tag="tenants",
    ),
    Route(
        "GET", "/v1/tenants", "listTenants", "List tenants",
        tenants.list_page, LOOKERS, {200: TenantPage}, query=PageQuery, tag="tenants",
    ),
    Route(
        "GET", "/v1/tenants/{name}", "getTenant", "Get a tenant",
        tenants.get, LOOKERS, {200: TenantView}, problems=(404,), tag="tenants",
    ),
    Route(
        "PATCH", "/v1/tenants/{name}", "changeTenant", "Change a tenant's terms",
        tenants.change, ADMIN, {200: TenantView}, problems=(404,), body=TenantPatch, writes=True,
        tag="tenants",
    ),
    Route(
        "DELETE", "/v1/tenants/{name}", "removeTenant", "Remove a tenant without allocations",
        tenants.remove, ADMIN, {200: TenantView}, problems=(404, 409), writes=True, tag="tenants",
    ),
    Route(
        "POST", "/v1/tokens", "issueToken", "Issue a token",
        tenants.issue_token, ADMIN, {201: NewTokenView}, problems=(404, 409), body=TokenBody,
        writes=True, tag="tokens",
    ),
    Route(
        "GET", "/v1/tokens", "listTokens", "List tokens",
        tenants.tokens, ADMIN, {200: TokenPage}, query=PageQuery, tag="tokens",
    ),
    Route(
        "POST", "/v1/tokens/{id}/rotate", "rotateToken", "Replace a token",
        tenants.rotate_token, ADMIN, {201: NewTokenView}, problems=(404, 409), body=RotateBody,
        optional_body=True, writes=True, tag="tokens",
    ),
    Route(
        "DELETE", "/v1/tokens/{id}", "revokeToken", "Revoke a token",
        tenants.revoke_token, ADMIN, {200: TokenView}, problems=(404,), writes=True, tag="tokens",
    ),
    Route(
        "GET", "/v1/whoami", "whoami", "Get the bearer of this token",
        tenants.whoami, EVERYONE, {200: WhoView}, tag="tokens",
    ),
    Route(
        "GET", "/v1/cluster", "getCluster", "Get the cluster",
        cluster.cluster, LOOKERS, {200: ClusterView, 304: ""}, query=ClusterQuery, tag="cluster",
    ),
    Route(
        "GET", "/v1/stats", "getStats", "Get recent statistics",
        stats.recent, LOOKERS, {200: StatsView}, query=StatsQuery, tag="cluster",
    ),
    Route(
        "GET", "/v1/models", "listModels", "List GPU models",
        cluster.models, EVERYONE, {200: ModelList}, tag="cluster",
    ),
    Route(
        "GET", "/v1/policies", "listPolicies", "List policies",
        cluster.policies, EVERYONE, {200: PolicyList}, tag="cluster",
    ),
    Route(
        "GET", "/v1/policy", "getPolicy", "Get the policy in force, and what rehearsals found",
        policy.status, LOOKERS, {200: PolicyStatus}, tag="cluster",
    ),
    Route(
        "GET", "/v1/defrag/plan", "planDefrag", "Plan moves of instances",
        defrag.plan, WATCHERS, {200: PlanView}, problems=(403,), query=PlanQuery, tag="cluster",
    ),
    Route(
        "POST", "/v1/defrag", "defrag", "Execute planned moves",
        defrag.move, STAFF, {200: MovesView}, problems=(409,), body=MovesBody, writes=True,
        tag="cluster",
    ),
    Route(
        "GET", "/v1/events", "followEvents", "Follow the journal as server-sent events",
        events.events, LOOKERS, {200: "text/event-stream"}, problems=(410,),
        query=EventQuery, tag="events",
    ),
    Route(
        "GET", "/v1/audit", "audit", "List journal entries, newest first",
        events.audit, STAFF, {200: EventPage}, query=AuditQuery, tag="events",
    ),
    Route(
        "GET", "/v1/clock", "getClock", "Get service time and the wall clock",
        clock.get, LOOKERS, {200: ClockView}, tag="clock",
    ),
    Route(
        "POST", "/v1/clock/accept", "acceptClock", "Set service time to the wall clock",
        clock.accept, ADMIN, {200: ClockStepView}, problems=(409,), body=ClockStepBody, key=True,
        writes=True, tag="clock",
    ),
    Route(
        "GET", "/v1/backup", "getBackup", "Back up the service",
        backup.backup, ADMIN, {200: "application/gzip"}, problems=(409,), tag="backup",
    ),
    Route(
        "GET", "/metrics", "metrics", "Metrics for Prometheus",
        health.metrics, None, {200: "text/plain"}, problems=(401, 403, 429), tag="health",
        unlimited=True,
    ),
    Route(
        "GET", "/v1/sign-in", "getSignIn", "Show how people sign in",
        sign_in.show, None, {200: SignInView}, tag="tokens",
    ),
    Route(
        "POST", "/v1/sign-in/code", "exchangeCode", "Exchange an authorization code for a token",
        sign_in.exchange, None, {200: SignedInView}, problems=(400, 404, 503), body=CodeBody,
        tag="tokens",
    ),
    Route(
        "GET", "/openapi.json", "openapi", "This document",
        openapi.openapi, None, {200: "application/json"}, tag="health",
    ),
    Route(
        "GET", "/healthz", "healthz", "Check that the process runs",
        health.healthz, None, {200: Health}, tag="health", unlimited=True,
    ),
    Route(
        "GET", "/readyz", "readyz", "Check that the process is ready",
        health.readyz, None, {200: Readiness, 503: Readiness}, tag="health", unlimited=True,
    ),
)  # fmt: skip
