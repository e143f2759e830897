"""The settings of a service: every key, its default, and what holds between them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_type_hints

from slicewise.control.desk import QUEUED_PER_TENANT
from slicewise.control.models import MOST_MODELS, MOST_STATES
from slicewise.core.errors import SlicewiseError
from slicewise.engine.queue import Discipline
from slicewise.service.addresses import FORWARDED, X_FORWARDED_FOR, Network
from slicewise.service.setting_values import (
    Address,
    Key,
    as_address,
    as_flag,
    as_networks,
    as_path,
    as_paths,
    as_policy,
    as_retention,
    as_text,
    as_url,
    number_between,
    one_of,
    whole_number,
)

_LOOPBACK = Address("127.0.0.1", 8080)


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)  # a secret may be among them
class Settings:
    """Everything that can be set, with what it is unless set."""

    data: Annotated[
        Path | None,
        Key(
            "data",
            as_path,
            "Folder of the service: its database, unless one is named elsewhere, "
            "and the file admin-token.",
        ),
    ] = None
    listen: Annotated[
        Address, Key("listen", as_address, "Where to listen; port 0 takes any that is free.")
    ] = _LOOPBACK
    listen_without_tls: Annotated[
        bool,
        Key(
            "listen_without_tls",
            as_flag,
            "Listen beyond loopback although there is no TLS: tokens "
            "then cross the network in the clear.",
        ),
    ] = False
    advertise: Annotated[
        str | None,
        Key(
            "advertise",
            as_url,
            "The URL at which others reach this process, told by standbys to "
            "those who want to write.",
        ),
    ] = None
    database: Annotated[
        str | None,
        Key("database", as_text, "URL of a database, instead of SQLite in the folder.", True),
    ] = None
    require_history: Annotated[
        bool,
        Key(
            "require_history",
            as_flag,
            "Never begin a new history: an empty database means that a volume is not mounted.",
        ),
    ] = False
    tls_cert: Annotated[Path | None, Key("tls.cert", as_path, "Certificate chain, PEM.")] = None
    tls_key: Annotated[Path | None, Key("tls.key", as_path, "Private key, PEM.")] = None
    policy: Annotated[str, Key("policy", as_policy, "The policy that places.")] = "default"
    geometry: Annotated[
        tuple[Path, ...], Key("geometry", as_paths, "TOML files with GPU models of your own.")
    ] = ()
    backfill: Annotated[
        int,
        Key(
            "queue.backfill",
            whole_number(0, 10_000),
            "How many requests behind a blocked one are tried; 0 is strictly first in, first out.",
        ),
    ] = 32
    overtakes: Annotated[
        int,
        Key(
            "queue.overtakes",
            whole_number(0, 10_000),
            "How often a waiting request may be overtaken.",
        ),
    ] = 100
    requests_per_second: Annotated[
        float,
        Key(
            "limits.requests_per_second",
            number_between(0.001, 1e6),
            "For every tenant whose quota does not say.",
        ),
    ] = 1000.0
    agent_requests_per_second: Annotated[
        float,
        Key(
            "limits.agent_requests_per_second",
            number_between(0.001, 1e6),
            "For every node's agent.",
        ),
    ] = 20.0
    hellos_per_minute: Annotated[
        float,
        Key(
            "limits.hellos_per_minute",
            number_between(0.01, 1e6),
            "How often a node's agent may begin a session.",
        ),
    ] = 20.0
    strangers_per_second: Annotated[
        float,
        Key(
            "limits.strangers_per_second",
            number_between(0.001, 1e6),
            "Requests of one client address without a valid token; more are answered late.",
        ),
    ] = 100.0
    body_bytes: Annotated[
        int, Key("limits.body_bytes", whole_number(1024, 1 << 26), "The largest body of a request.")
    ] = 1 << 16
    head_bytes: Annotated[
        int,
        Key(
            "limits.head_bytes",
            whole_number(1024, 1 << 20),
            "The longest URL and headers of a request together.",
        ),
    ] = 1 << 14
    page: Annotated[
        int, Key("limits.page", whole_number(1, 1000), "The most items of one page.")
    ] = 1000
    streams: Annotated[
        int,
        Key(
            "limits.streams",
            whole_number(0, 100_000),
            "Event streams at a time; an eighth of them is kept for callers without a tenant.",
        ),
    ] = 512
    streams_per_tenant: Annotated[
        int,
        Key(
            "limits.streams_per_tenant",
            whole_number(0, 100_000),
            "Event streams of one tenant at a time.",
        ),
    ] = 32
    connections: Annotated[
        int,
        Key(
            "limits.connections",
            whole_number(16, 1_000_000),
            "Connections at a time; beyond it the client with the most loses one.",
        ),
    ] = 10_000
    requests_in_flight: Annotated[
        int,
        Key(
            "limits.requests_in_flight",
            whole_number(1, 100_000),
            "Requests of one tenant, or of one other token, that may be under way at a time.",
        ),
    ] = 512
    unread_bytes: Annotated[
        int,
        Key(
            "limits.unread_bytes",
            whole_number(1 << 16, 1 << 40),
            "Bytes of answers that one tenant, or one other token, may leave unread.",
        ),
    ] = 32 << 20
    unread_bytes_in_all: Annotated[
        int,
        Key(
            "limits.unread_bytes_in_all",
            whole_number(1 << 16, 1 << 40),
            "The same of all callers together; each may always have one answer.",
        ),
    ] = 256 << 20
    queued_per_tenant: Annotated[
        int,
        Key(
            "limits.queued_per_tenant",
            whole_number(0, 1_000_000),
            "Requests of one tenant that may wait in the queue; more are refused.",
        ),
    ] = QUEUED_PER_TENANT
    models: Annotated[
        int,
        Key("limits.models", whole_number(1, 10_000), "GPU models that the nodes may have in all."),
    ] = MOST_MODELS
    states: Annotated[
        int,
        Key(
            "limits.states",
            whole_number(1000, 10_000_000),
            "States that these models may have in all; a usual model has a few hundred.",
        ),
    ] = MOST_STATES
    waiting: Annotated[
        int,
        Key(
            "limits.waiting",
            whole_number(1, 1_000_000),
            "Requests that may wait to be written; more are sent away.",
        ),
    ] = 10_000
    answers_hours: Annotated[
        float,
        Key(
            "answers.hours",
            number_between(0.01, 24 * 365),
            "How long answers to idempotency keys are kept.",
        ),
    ] = 24.0
    journal_days: Annotated[
        float,
        Key(
            "journal.days",
            as_retention,
            "How long entries stay in the journal, at least a day; 0 is for ever.",
        ),
    ] = 90.0
    journal_archive: Annotated[
        Path | None,
        Key(
            "journal.archive",
            as_path,
            "Folder of JSON lines to which entries are appended before they leave the journal.",
        ),
    ] = None
    lease_seconds: Annotated[
        float,
        Key(
            "lease.seconds",
            number_between(0.5, 3600),
            "How long a leader leads without being heard of.",
        ),
    ] = 10.0
    clock_max_gap_hours: Annotated[
        float,
        Key(
            "clock.max_gap_hours",
            number_between(0, 24 * 365),
            "How far ahead of the last known time the clock may be at a start; further is a step, "
            "which is held.",
        ),
    ] = 1.0
    agents_lost_seconds: Annotated[
        float,
        Key(
            "agents.lost_seconds",
            number_between(1, 86400),
            "How long an agent may not be heard of before its node takes no new instances.",
        ),
    ] = 90.0
    agents_after_reboot: Annotated[
        str,
        Key(
            "agents.after_reboot",
            one_of("recreate", "fail"),
            "What becomes of the allocations on a node that was restarted: their instances are "
            "created again, or they fail.",
        ),
    ] = "recreate"
    extender_enabled: Annotated[
        bool,
        Key(
            "extender.enabled",
            as_flag,
            "Answer a Kubernetes scheduler as its extender, and bind pods for it.",
        ),
    ] = False
    extender_kubeconfig: Annotated[
        Path | None,
        Key(
            "extender.kubeconfig",
            as_path,
            "How to reach the Kubernetes API; unless set, as the service account of the pod.",
        ),
    ] = None
    extender_client_ca: Annotated[
        Path | None,
        Key("extender.client_ca", as_path, "Who signs the scheduler's client certificate, PEM."),
    ] = None
    extender_client_name: Annotated[
        str,
        Key("extender.client_name", as_text, "The common name in the scheduler's certificate."),
    ] = "system:kube-scheduler"
    extender_tenants: Annotated[
        str,
        Key(
            "extender.tenants",
            one_of("create", "refuse"),
            "What becomes of pods whose namespace is no tenant: it is made one, or they are "
            "refused.",
        ),
    ] = "create"
    extender_active_seconds: Annotated[
        float,
        Key(
            "extender.active_seconds",
            number_between(1, 600),
            "How long a binding waits until an agent has made the instances.",
        ),
    ] = 30.0
    metrics_public: Annotated[
        bool, Key("metrics.public", as_flag, "Serve /metrics without a token.")
    ] = False
    trusted_proxies: Annotated[
        tuple[Network, ...],
        Key(
            "proxies.trusted",
            as_networks,
            "Networks of the proxies in front of the service, which are believed when they say "
            "for whom they ask.",
        ),
    ] = ()
    proxies_header: Annotated[
        str,
        Key(
            "proxies.header",
            one_of(X_FORWARDED_FOR, FORWARDED),
            "The header in which they say so.",
        ),
    ] = X_FORWARDED_FOR
    log_format: Annotated[str, Key("log.format", one_of("text", "json"), "How log lines look.")] = (
        "text"
    )
    log_level: Annotated[
        str, Key("log.level", one_of("debug", "info", "warning", "error"), "What is logged.")
    ] = "info"
    log_requests: Annotated[bool, Key("log.requests", as_flag, "Log every request.")] = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls.cert" if self.tls_cert is None else "tls.key"
            raise SlicewiseError(f"{missing} is missing: TLS needs tls.cert and tls.key both")
        if not (self.listen.loopback or self.tls_cert or self.listen_without_tls):
            raise SlicewiseError(
                f"listen: {self.listen} can be reached from elsewhere, and without TLS tokens "
                "would cross the network in the clear; set tls.cert and tls.key, or say "
                "listen_without_tls"
            )
        if self.extender_client_ca is not None and self.tls_cert is None:
            raise SlicewiseError(
                "extender.client_ca: a client's certificate is shown over TLS only; set tls.cert "
                "and tls.key as well"
            )

    @property
    def extender_creates_tenants(self) -> bool:
        """Whether a namespace becomes a tenant when its first pod asks."""
        return self.extender_tenants == "create"

    @property
    def discipline(self) -> Discipline:
        """How the queue is served."""
        return Discipline(self.backfill, self.overtakes)

    @property
    def address(self) -> str:
        """Where others reach this process, as far as settings tell."""
        scheme = "http" if self.tls_cert is None else "https"
        return self.advertise or f"{scheme}://{self.listen}"


_BY_FIELD: dict[str, Key] = {
    field: hint.__metadata__[0]
    for field, hint in get_type_hints(Settings, include_extras=True).items()
}
KEYS = {key.name: key for key in _BY_FIELD.values()}
"""Every key by name."""
FIELDS = {key.name: field for field, key in _BY_FIELD.items()}
"""The field of the settings that holds a key's value."""
