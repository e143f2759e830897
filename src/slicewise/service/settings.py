"""Settings: one table of keys, read from a file, the environment and flags, checked at start.

A flag goes before the environment, and the environment before the file. Whatever is wrong is said
in one line with the key and where its value came from.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints
from urllib.parse import urlsplit

from slicewise.control.desk import QUEUED_PER_TENANT
from slicewise.control.models import MOST_MODELS, MOST_STATES
from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.engine.queue import Discipline
from slicewise.policies.registry import policy_class
from slicewise.service.addresses import FORWARDED, X_FORWARDED_FOR, Network, network

ENVIRONMENT = "SLICEWISE_"
_CLIENTS = frozenset({"SLICEWISE_SERVER", "SLICEWISE_TOKEN", "SLICEWISE_TOKEN_FILE"})
"""What those who talk to a service set, perhaps in the same shell."""
_RESEMBLES = 0.8
"""How alike a variable must be to a key to count as misspelt: others may begin the same."""


class Address(NamedTuple):
    """A host and a port to listen on."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError("must be text in one line")
    return value


def _path(value: object) -> Path:
    return value if isinstance(value, Path) else Path(_text(value))


def _paths(value: object) -> tuple[Path, ...]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list):
        raise ValueError("must be a list of paths")
    return tuple(map(_path, value))


def _networks(value: object) -> tuple[Network, ...]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list):
        raise ValueError("must be a list of networks such as 10.0.0.0/8")
    return tuple(network(_text(one)) for one in value)


def _flag(value: object) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.casefold() in known:
        return known[value.casefold()]
    raise ValueError("must be true or false")


def _whole(least: int, most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        text = value.replace("_", "") if isinstance(value, str) else value
        if isinstance(text, str) and text.removeprefix("-").isdecimal():
            text = int(text)
        if isinstance(text, bool) or not isinstance(text, int) or not least <= text <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return text

    return parse


def _number(least: float, most: float) -> Callable[[object], float]:
    def parse(value: object) -> float:
        problem = ValueError(f"must be a number from {least:g} to {most:g}")
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise problem
        try:
            number = float(value)
        except ValueError:
            raise problem from None
        if not least <= number <= most:
            raise problem
        return number

    return parse


def _retention(value: object) -> float:
    days = _number(0, 36_500)(value)
    if 0 < days < 1:
        raise ValueError("must be 0 or a number from 1 to 36500")
    return days


def _one_of(*known: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in known:
            raise ValueError(f"must be {' or '.join(known)}")
        return str(value)

    return parse


def _address(value: object) -> Address:
    host, colon, port = _text(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and int(port) <= 65535):
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:8080")
    return Address(host, int(port))


def _url(value: object) -> str:
    text = _text(value)
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("must be a URL, such as https://slicewise-1.example:8443")
    return text


def _policy(value: object) -> str:
    policy_class(_text(value))  # an unknown name is refused, with the near ones
    return str(value)


_LOOPBACK = Address("127.0.0.1", 8080)


class Key(NamedTuple):
    """A key of the settings."""

    name: str
    """As in the file, with dots for its tables."""
    parse: Callable[[object], Any]
    doc: str
    secret: bool = False
    """Whether its value must not be repeated."""

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return ENVIRONMENT + self.name.replace(".", "_").upper()


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)  # a secret may be among them
class Settings:
    """Everything that can be set, with what it is unless set."""

    data: Annotated[
        Path | None,
        Key(
            "data",
            _path,
            "Folder of the service: its database, unless one is named elsewhere, "
            "and the file admin-token.",
        ),
    ] = None
    listen: Annotated[
        Address, Key("listen", _address, "Where to listen; port 0 takes any that is free.")
    ] = _LOOPBACK
    listen_without_tls: Annotated[
        bool,
        Key(
            "listen_without_tls",
            _flag,
            "Listen beyond loopback although there is no TLS: tokens "
            "then cross the network in the clear.",
        ),
    ] = False
    advertise: Annotated[
        str | None,
        Key(
            "advertise",
            _url,
            "The URL at which others reach this process, told by standbys to "
            "those who want to write.",
        ),
    ] = None
    database: Annotated[
        str | None,
        Key("database", _text, "URL of a database, instead of SQLite in the folder.", True),
    ] = None
    require_history: Annotated[
        bool,
        Key(
            "require_history",
            _flag,
            "Never begin a new history: an empty database means that a volume is not mounted.",
        ),
    ] = False
    tls_cert: Annotated[Path | None, Key("tls.cert", _path, "Certificate chain, PEM.")] = None
    tls_key: Annotated[Path | None, Key("tls.key", _path, "Private key, PEM.")] = None
    policy: Annotated[str, Key("policy", _policy, "The policy that places.")] = "default"
    geometry: Annotated[
        tuple[Path, ...], Key("geometry", _paths, "TOML files with GPU models of your own.")
    ] = ()
    backfill: Annotated[
        int,
        Key(
            "queue.backfill",
            _whole(0, 10_000),
            "How many requests behind a blocked one are tried; 0 is strictly first in, first out.",
        ),
    ] = 32
    overtakes: Annotated[
        int,
        Key("queue.overtakes", _whole(0, 10_000), "How often a waiting request may be overtaken."),
    ] = 100
    requests_per_second: Annotated[
        float,
        Key(
            "limits.requests_per_second",
            _number(0.001, 1e6),
            "For every tenant whose quota does not say.",
        ),
    ] = 1000.0
    agent_requests_per_second: Annotated[
        float,
        Key(
            "limits.agent_requests_per_second",
            _number(0.001, 1e6),
            "For every node's agent.",
        ),
    ] = 20.0
    hellos_per_minute: Annotated[
        float,
        Key(
            "limits.hellos_per_minute",
            _number(0.01, 1e6),
            "How often a node's agent may begin a session.",
        ),
    ] = 20.0
    strangers_per_second: Annotated[
        float,
        Key(
            "limits.strangers_per_second",
            _number(0.001, 1e6),
            "Requests of one client address without a valid token; more are answered late.",
        ),
    ] = 100.0
    body_bytes: Annotated[
        int, Key("limits.body_bytes", _whole(1024, 1 << 26), "The largest body of a request.")
    ] = 1 << 16
    head_bytes: Annotated[
        int,
        Key(
            "limits.head_bytes",
            _whole(1024, 1 << 20),
            "The longest URL and headers of a request together.",
        ),
    ] = 1 << 14
    page: Annotated[int, Key("limits.page", _whole(1, 1000), "The most items of one page.")] = 1000
    streams: Annotated[
        int,
        Key(
            "limits.streams",
            _whole(0, 100_000),
            "Event streams at a time; an eighth of them is kept for callers without a tenant.",
        ),
    ] = 512
    streams_per_tenant: Annotated[
        int,
        Key(
            "limits.streams_per_tenant",
            _whole(0, 100_000),
            "Event streams of one tenant at a time.",
        ),
    ] = 32
    connections: Annotated[
        int,
        Key(
            "limits.connections",
            _whole(16, 1_000_000),
            "Connections at a time; beyond it the client with the most loses one.",
        ),
    ] = 10_000
    requests_in_flight: Annotated[
        int,
        Key(
            "limits.requests_in_flight",
            _whole(1, 100_000),
            "Requests of one tenant, or of one other token, that may be under way at a time.",
        ),
    ] = 512
    unread_bytes: Annotated[
        int,
        Key(
            "limits.unread_bytes",
            _whole(1 << 16, 1 << 40),
            "Bytes of answers that one tenant, or one other token, may leave unread.",
        ),
    ] = 32 << 20
    unread_bytes_in_all: Annotated[
        int,
        Key(
            "limits.unread_bytes_in_all",
            _whole(1 << 16, 1 << 40),
            "The same of all callers together; each may always have one answer.",
        ),
    ] = 256 << 20
    queued_per_tenant: Annotated[
        int,
        Key(
            "limits.queued_per_tenant",
            _whole(0, 1_000_000),
            "Requests of one tenant that may wait in the queue; more are refused.",
        ),
    ] = QUEUED_PER_TENANT
    models: Annotated[
        int,
        Key("limits.models", _whole(1, 10_000), "GPU models that the nodes may have in all."),
    ] = MOST_MODELS
    states: Annotated[
        int,
        Key(
            "limits.states",
            _whole(1000, 10_000_000),
            "States that these models may have in all; a usual model has a few hundred.",
        ),
    ] = MOST_STATES
    waiting: Annotated[
        int,
        Key(
            "limits.waiting",
            _whole(1, 1_000_000),
            "Requests that may wait to be written; more are sent away.",
        ),
    ] = 10_000
    answers_hours: Annotated[
        float,
        Key(
            "answers.hours",
            _number(0.01, 24 * 365),
            "How long answers to idempotency keys are kept.",
        ),
    ] = 24.0
    journal_days: Annotated[
        float,
        Key(
            "journal.days",
            _retention,
            "How long entries stay in the journal, at least a day; 0 is for ever.",
        ),
    ] = 90.0
    journal_archive: Annotated[
        Path | None,
        Key(
            "journal.archive",
            _path,
            "Folder of JSON lines to which entries are appended before they leave the journal.",
        ),
    ] = None
    lease_seconds: Annotated[
        float,
        Key("lease.seconds", _number(0.5, 3600), "How long a leader leads without being heard of."),
    ] = 10.0
    clock_max_gap_hours: Annotated[
        float,
        Key(
            "clock.max_gap_hours",
            _number(0, 24 * 365),
            "How far ahead of the last known time the clock may be at a start; further is a step, "
            "which is held.",
        ),
    ] = 1.0
    agents_lost_seconds: Annotated[
        float,
        Key(
            "agents.lost_seconds",
            _number(1, 86400),
            "How long an agent may not be heard of before its node takes no new instances.",
        ),
    ] = 90.0
    agents_after_reboot: Annotated[
        str,
        Key(
            "agents.after_reboot",
            _one_of("recreate", "fail"),
            "What becomes of the allocations on a node that was restarted: their instances are "
            "made anew, or they fail.",
        ),
    ] = "recreate"
    extender_enabled: Annotated[
        bool,
        Key(
            "extender.enabled",
            _flag,
            "Answer a Kubernetes scheduler as its extender, and bind pods for it.",
        ),
    ] = False
    extender_kubeconfig: Annotated[
        Path | None,
        Key(
            "extender.kubeconfig",
            _path,
            "How to reach the Kubernetes API; unless set, as the service account of the pod.",
        ),
    ] = None
    extender_client_ca: Annotated[
        Path | None,
        Key("extender.client_ca", _path, "Who signs the scheduler's client certificate, PEM."),
    ] = None
    extender_client_name: Annotated[
        str,
        Key("extender.client_name", _text, "The common name in the scheduler's certificate."),
    ] = "system:kube-scheduler"
    extender_tenants: Annotated[
        str,
        Key(
            "extender.tenants",
            _one_of("create", "refuse"),
            "What becomes of pods whose namespace is no tenant: it is made one, or they are "
            "refused.",
        ),
    ] = "create"
    extender_active_seconds: Annotated[
        float,
        Key(
            "extender.active_seconds",
            _number(1, 600),
            "How long a binding waits until an agent has made the instances.",
        ),
    ] = 30.0
    metrics_public: Annotated[
        bool, Key("metrics.public", _flag, "Serve /metrics without a token.")
    ] = False
    trusted_proxies: Annotated[
        tuple[Network, ...],
        Key(
            "proxies.trusted",
            _networks,
            "Networks of the proxies in front of the service, which are believed when they say "
            "for whom they ask.",
        ),
    ] = ()
    proxies_header: Annotated[
        str,
        Key(
            "proxies.header",
            _one_of(X_FORWARDED_FOR, FORWARDED),
            "The header in which they say so.",
        ),
    ] = X_FORWARDED_FOR
    log_format: Annotated[
        str, Key("log.format", _one_of("text", "json"), "How log lines look.")
    ] = "text"
    log_level: Annotated[
        str, Key("log.level", _one_of("debug", "info", "warning", "error"), "What is logged.")
    ] = "info"
    log_requests: Annotated[bool, Key("log.requests", _flag, "Log every request.")] = False

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


_FIELDS = {
    hint.__metadata__[0].name: name
    for name, hint in get_type_hints(Settings, include_extras=True).items()
}
KEYS: dict[str, Key] = {
    hint.__metadata__[0].name: hint.__metadata__[0]
    for hint in get_type_hints(Settings, include_extras=True).values()
}
"""Every key by name."""


def read_settings(
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> Settings:
    """The settings that these sources give; ``flags`` by key, None where one was not given."""
    values: dict[str, object] = {}
    for key, value, where in (
        *_from_file(file),
        *_from_environment(environment),
        *((_known(name, "flag"), v, "flag") for name, v in flags.items() if v is not None),
    ):
        try:
            values[_FIELDS[key.name]] = key.parse(value)
        except (ValueError, SlicewiseError) as error:
            given = "" if key.secret else f", not {value!r}"
            problem = str(error) + (given if isinstance(error, ValueError) else "")
            raise SlicewiseError(f"{key.name} ({where}): {problem}") from None
    return Settings(**values)  # type: ignore[arg-type]  # each was parsed as its key says


def assignments(given: list[str]) -> dict[str, object]:
    """Settings written as KEY=VALUE."""
    values: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise SlicewiseError(f"--set {text!r} must be KEY=VALUE, such as queue.backfill=16")
        values[_known(name, "flag").name] = value
    return values


def _known(name: str, where: str) -> Key:
    if name not in KEYS:
        raise UnknownNameError(f"setting ({where})", name, KEYS, f"known: {', '.join(KEYS)}")
    return KEYS[name]


def _from_file(path: Path | None) -> Iterator[tuple[Key, object, str]]:
    if path is None:
        return
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise SlicewiseError(f"{path}: not TOML: {error}") from None
    for name, value in document.items():
        if isinstance(value, dict):
            for inner, part in value.items():
                yield _known(f"{name}.{inner}", str(path)), part, str(path)
        else:
            yield _known(name, str(path)), value, str(path)


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[Key, object, str]]:
    variables = {key.variable: key for key in KEYS.values()}
    for name, value in environment.items():
        if name in variables:
            yield variables[name], value, name
        elif name.startswith(ENVIRONMENT) and name not in _CLIENTS:
            near = difflib.get_close_matches(name, variables, 1, _RESEMBLES)
            if near:
                raise SlicewiseError(
                    f"unknown setting {name!r} (environment); did you mean {near[0]}?"
                )
