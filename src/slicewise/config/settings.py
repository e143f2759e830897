"""The settings of a service: every key, its type, its default and the rules between keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from slicewise.config.addresses import Network
from slicewise.config.values import (
    Address,
    as_address,
    as_algorithms,
    as_networks,
    as_path,
    as_paths,
    as_policy,
    as_provider_url,
    as_retention,
    as_text,
    as_texts,
    as_url,
)
from slicewise.control.gpu_models import MAX_CLUSTER_STATES, MAX_MODELS
from slicewise.control.quota import QueueLimits
from slicewise.core.errors import SlicewiseError
from slicewise.engine.reclaim import ReclaimRules
from slicewise.engine.reservation_rules import ReservationRules

T = TypeVar("T")

VARIABLE_PREFIX = "SLICEWISE_"
_SECRET = frozenset({"database"})
"""Keys with values that must not appear in messages."""

OptionalPath = Annotated[Path | None, as_path]
PerSecond = Annotated[float, Meta(ge=0.001, le=1e6)]
Count = Annotated[int, Meta(ge=0, le=10_000)]
StreamCount = Annotated[int, Meta(ge=0, le=100_000)]
Bytes = Annotated[int, Meta(ge=1 << 16, le=1 << 40)]


def _key(name: str, default: T) -> T:
    """A field with a key that differs from its name: ``table.key`` in the file."""
    field: T = msgspec.field(default=default, name=name)
    return field


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings with their defaults."""

    data: OptionalPath = None
    """Folder of the service: the SQLite database and the file admin-token."""
    listen: Annotated[Address, as_address] = Address("127.0.0.1", 8080)
    """Where to listen; port 0 takes any free port."""
    listen_without_tls: bool = False
    """Listen beyond loopback without TLS: tokens cross the network in the clear."""
    advertise: Annotated[str | None, as_url] = None
    """The URL of this process for others; standbys answer writes with the leader's."""
    database: Annotated[str | None, as_text] = None
    """URL of a PostgreSQL database, in place of SQLite in the folder."""
    require_history: bool = False
    """Refuse to start with an empty database, which may mean that a volume is not mounted."""
    tls_cert: OptionalPath = _key("tls.cert", None)
    """Certificate chain, PEM."""
    tls_key: OptionalPath = _key("tls.key", None)
    """Private key, PEM."""
    tls_client_ca: OptionalPath = _key("tls.client_ca", None)
    """The CA of client certificates, PEM: a trusted one has the rights of its rule."""
    tls_client_required: bool = _key("tls.client_required", False)
    """Refuse connections without a trusted client certificate."""
    oidc_issuer: Annotated[str | None, as_provider_url] = _key("oidc.issuer", None)
    """The OpenID Connect provider whose tokens are accepted, as its tokens name it."""
    oidc_audience: Annotated[tuple[str, ...], as_texts] = _key("oidc.audience", ())
    """The audiences that its tokens may be for, such as the client id of slicewise there."""
    oidc_client: Annotated[str | None, as_text] = _key("oidc.client", None)
    """The client id with which the dashboard and `slicewise login` sign people in."""
    oidc_scopes: Annotated[tuple[str, ...], as_texts] = _key(
        "oidc.scopes", ("openid", "profile", "email", "groups")
    )
    """What they ask the provider for."""
    oidc_jwks: Annotated[str | None, as_provider_url] = _key("oidc.jwks", None)
    """The URL of its keys; by default as its discovery document says."""
    oidc_algorithms: Annotated[tuple[str, ...], as_algorithms] = _key(
        "oidc.algorithms", ("RS256", "ES256")
    )
    """The algorithms that its tokens may be signed with."""
    oidc_ca: OptionalPath = _key("oidc.ca", None)
    """The CA of its certificate, PEM; by default those that Python trusts."""
    oidc_refresh_seconds: Annotated[float, Meta(ge=10, le=86400)] = _key(
        "oidc.refresh_seconds", 300.0
    )
    """How often its keys are fetched."""
    sign_in_rules: OptionalPath = _key("sign_in.rules", None)
    """The file with the rules from claims to rights, read again when it changes."""
    policy: Annotated[str, as_policy] = "default"
    """The placement policy."""
    geometry: Annotated[tuple[Path, ...], as_paths] = ()
    """TOML files with additional GPU models."""
    reserve_after: Annotated[float, Meta(ge=0, le=86400 * 365)] = _key("queue.reserve_after", 300.0)
    """How many seconds a request waits before a window is reserved for it."""
    reserve_share: Annotated[float, Meta(ge=0, le=1)] = _key("queue.reserve_share", 0.10)
    """The largest share of a model's GPUs with a reserved window; 0 reserves none."""
    reclaim: Literal["never", "guarantee"] = _key("queue.reclaim", "never")
    """Whether preemptible allocations end for a tenant that stays within its guarantee."""
    reclaim_grace: Annotated[float, Meta(ge=0, le=86400 * 365)] = _key("queue.reclaim_grace", 120.0)
    """How many seconds such a request waits before it claims a window."""
    reclaim_min_run: Annotated[float, Meta(ge=0, le=86400 * 365)] = _key(
        "queue.reclaim_min_run", 600.0
    )
    """How many seconds an allocation runs before it may be reclaimed."""
    reclaim_notice: Annotated[float, Meta(ge=0, le=86400)] = _key("queue.reclaim_notice", 30.0)
    """How many seconds before its end a reclaimed allocation is told."""
    preemptible_price: Annotated[int, Meta(ge=1, le=100)] = _key("queue.preemptible_price", 100)
    """What a preemptible slice counts in the share of its tenant, in percent."""
    rehearsal_enabled: bool = _key("rehearsal.enabled", True)
    """Rehearse tables on the demand, if the policy is `rehearsed`."""
    rehearsal_share: Annotated[float, Meta(ge=0.001, le=1)] = _key("rehearsal.share", 0.05)
    """The largest share of one processor core for rehearsals."""
    requests_per_second: PerSecond = _key("limits.requests_per_second", 1000.0)
    """For each tenant without a rate in its quota."""
    agent_requests_per_second: PerSecond = _key("limits.agent_requests_per_second", 20.0)
    """For each node's agent."""
    hellos_per_minute: Annotated[float, Meta(ge=0.01, le=1e6)] = _key(
        "limits.hellos_per_minute", 20.0
    )
    """How often a node's agent may start a session."""
    strangers_per_second: PerSecond = _key("limits.strangers_per_second", 100.0)
    """Requests without a valid token from one client address; more are delayed."""
    body_bytes: Annotated[int, Meta(ge=1024, le=1 << 26)] = _key("limits.body_bytes", 1 << 16)
    """The largest request body."""
    head_bytes: Annotated[int, Meta(ge=1024, le=1 << 20)] = _key("limits.head_bytes", 1 << 14)
    """The largest URL and headers of a request together."""
    page: Annotated[int, Meta(ge=1, le=1000)] = _key("limits.page", 1000)
    """The most items of a page."""
    streams: StreamCount = _key("limits.streams", 512)
    """Concurrent event streams; an eighth is reserved for callers without a tenant."""
    streams_per_tenant: StreamCount = _key("limits.streams_per_tenant", 32)
    """Concurrent event streams of one tenant."""
    connections: Annotated[int, Meta(ge=16, le=1_000_000)] = _key("limits.connections", 10_000)
    """Concurrent connections; beyond it, the client with the most loses one."""
    requests_in_flight: Annotated[int, Meta(ge=1, le=100_000)] = _key(
        "limits.requests_in_flight", 512
    )
    """Concurrent requests of one tenant, or of one token without a tenant."""
    unread_bytes: Bytes = _key("limits.unread_bytes", 32 << 20)
    """Bytes of answers that one tenant, or one token without a tenant, may leave unread."""
    unread_bytes_in_all: Bytes = _key("limits.unread_bytes_in_all", 256 << 20)
    """The same for all callers together; each may always have one answer."""
    queued_per_tenant: Annotated[int, Meta(ge=0, le=1_000_000)] = _key(
        "limits.queued_per_tenant", QueueLimits().requests
    )
    """Requests of one tenant that may wait in the queue; more are rejected."""
    lines_per_tenant: Annotated[int, Meta(ge=1, le=1_000_000)] = _key(
        "limits.lines_per_tenant", QueueLimits().lines
    )
    """Lines of one tenant in the queue: different kinds of requests; more are rejected."""
    models: Annotated[int, Meta(ge=1, le=10_000)] = _key("limits.models", MAX_MODELS)
    """GPU models of all nodes together."""
    states: Annotated[int, Meta(ge=1000, le=10_000_000)] = _key("limits.states", MAX_CLUSTER_STATES)
    """States of these models together; a common model has a few hundred."""
    waiting: Annotated[int, Meta(ge=1, le=1_000_000)] = _key("limits.waiting", 10_000)
    """Requests that may wait for a commit; more are refused."""
    answers_hours: Annotated[float, Meta(ge=0.01, le=24 * 365)] = _key("answers.hours", 24.0)
    """Retention of answers to idempotency keys."""
    journal_days: Annotated[float, as_retention] = _key("journal.days", 90.0)
    """Retention of journal entries, at least a day; 0 keeps them for ever."""
    journal_archive: OptionalPath = _key("journal.archive", None)
    """Folder for JSON lines of entries that leave the journal."""
    lease_seconds: Annotated[float, Meta(ge=0.5, le=3600)] = _key("lease.seconds", 10.0)
    """How long a leader leads without renewing its lease."""
    lease_warning_seconds: Annotated[float, Meta(ge=0, le=7 * 86400)] = _key(
        "leases.warning_seconds", 300.0
    )
    """How long before the end of a lease its tenant is warned, if it is twice as long; 0 never."""
    clock_max_gap_hours: Annotated[float, Meta(ge=0, le=24 * 365)] = _key(
        "clock.max_gap_hours", 1.0
    )
    """How far the clock may be ahead of the last known time at a start; more is a held step."""
    agents_lost_seconds: Annotated[float, Meta(ge=1, le=86400)] = _key("agents.lost_seconds", 90.0)
    """How long an agent may be silent before its node gets no new instances."""
    agents_after_reboot: Literal["recreate", "fail"] = _key("agents.after_reboot", "recreate")
    """Whether allocations on a rebooted node get new instances or fail."""
    extender_enabled: bool = _key("extender.enabled", False)
    """Serve as the extender of a Kubernetes scheduler, and bind pods for it."""
    extender_kubeconfig: OptionalPath = _key("extender.kubeconfig", None)
    """How to reach the Kubernetes API; by default as the pod's service account."""
    extender_client_ca: OptionalPath = _key("extender.client_ca", None)
    """The CA of the scheduler's client certificate, PEM."""
    extender_client_name: Annotated[str, as_text] = _key(
        "extender.client_name", "system:kube-scheduler"
    )
    """The common name in the scheduler's certificate."""
    extender_tenants: Literal["create", "refuse"] = _key("extender.tenants", "create")
    """Whether a namespace that is no tenant becomes one or its pods are refused."""
    extender_active_seconds: Annotated[float, Meta(ge=1, le=600)] = _key(
        "extender.active_seconds", 30.0
    )
    """How long a binding waits for the agent to create the instances."""
    metrics_public: bool = _key("metrics.public", False)
    """Serve /metrics without a token."""
    trusted_proxies: Annotated[tuple[Network, ...], as_networks] = _key("proxies.trusted", ())
    """Networks of trusted proxies; their forwarding header names the client."""
    proxies_header: Literal["x-forwarded-for", "forwarded"] = _key(
        "proxies.header", "x-forwarded-for"
    )
    """The forwarding header that the proxies set."""
    log_format: Literal["text", "json"] = _key("log.format", "text")
    """Format of log lines."""
    log_level: Literal["debug", "info", "warning", "error"] = _key("log.level", "info")
    """The least severe level that is logged."""
    log_requests: bool = _key("log.requests", False)
    """Log every request."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls.cert" if self.tls_cert is None else "tls.key"
            raise SlicewiseError(f"{missing} is missing: TLS needs both tls.cert and tls.key")
        if not (self.listen.loopback or self.tls_cert or self.listen_without_tls):
            raise SlicewiseError(
                f"listen: {self.listen} can be reached from other machines, and without TLS tokens "
                "would cross the network in the clear; set tls.cert and tls.key, or "
                "listen_without_tls"
            )
        if self.extender_client_ca is not None and self.tls_cert is None:
            raise SlicewiseError(
                "extender.client_ca: client certificates need TLS; set tls.cert and tls.key as well"
            )
        if self.tls_client_ca is None:
            if self.tls_client_required:
                raise SlicewiseError("tls.client_ca is missing: tls.client_required needs it")
        elif self.tls_cert is None or self.sign_in_rules is None:
            missing = "sign_in.rules" if self.tls_cert else "tls.cert"
            raise SlicewiseError(f"{missing} is missing: tls.client_ca needs it")
        elif self.extender_client_ca not in (None, self.tls_client_ca):
            raise SlicewiseError(
                "extender.client_ca must be the same as tls.client_ca: a connection does not tell "
                "which of two authorities signed its certificate"
            )
        provider = (self.oidc_audience, self.oidc_client, self.oidc_jwks, self.oidc_ca)
        if self.oidc_issuer is None and any(provider):
            raise SlicewiseError("oidc.issuer is missing: the other keys of oidc belong to it")
        if self.oidc_issuer is not None:
            for key, given in (
                ("oidc.audience", self.oidc_audience or self.oidc_client),
                ("sign_in.rules", self.sign_in_rules),
            ):
                if not given:
                    raise SlicewiseError(f"{key} is missing: oidc.issuer needs it")

    @property
    def audience(self) -> tuple[str, ...]:
        """The audiences that tokens of the provider may be for."""
        client = () if self.oidc_client is None else (self.oidc_client,)
        return (*self.oidc_audience, *client)

    @property
    def extender_creates_tenants(self) -> bool:
        """Whether a namespace becomes a tenant with its first pod."""
        return self.extender_tenants == "create"

    @property
    def queue_limits(self) -> QueueLimits:
        """How much of the queue one tenant may take."""
        return QueueLimits(self.queued_per_tenant, self.lines_per_tenant)

    @property
    def reservation_rules(self) -> ReservationRules:
        """When windows are reserved for queued requests."""
        return ReservationRules(self.reserve_after, self.reserve_share)

    @property
    def reclaim_rules(self) -> ReclaimRules:
        """When allocations end for a tenant that claims its guarantee."""
        return ReclaimRules(
            self.reclaim == "guarantee",
            self.reclaim_grace,
            self.reclaim_min_run,
            self.reclaim_notice,
        )

    @property
    def address(self) -> str:
        """The URL of this process for others, according to the settings."""
        scheme = "http" if self.tls_cert is None else "https"
        return self.advertise or f"{scheme}://{self.listen}"

    def __repr__(self) -> str:
        return "Settings(...)"  # the database's URL may contain a password


class SettingKey(NamedTuple):
    """A key of the settings."""

    name: str
    field: str
    kind: Any
    """The annotated type of its values."""

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return VARIABLE_PREFIX + self.name.replace(".", "_").upper()

    @property
    def secret(self) -> bool:
        """Whether messages must not contain its value."""
        return self.name in _SECRET


KEYS = {
    field.encode_name: SettingKey(field.encode_name, field.name, field.type)
    for field in msgspec.structs.fields(Settings)
}
"""Every key by name."""
