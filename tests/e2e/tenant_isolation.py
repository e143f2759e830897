"""A harness for two tenants of one service, who must not see or change each other's data.

All requests of a rival tenant go through this harness. It searches every answer, byte by byte, for
data of the other tenant: names, ids, labels and secrets. It also checks that a request does not
change what the other tenant holds.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import msgspec
from tests.server.harness import Harness

from slicewise.api.agents import AdoptBody, HelloBody, ReportBody
from slicewise.api.allocations import AllocationBody, BatchBody, ExtendBody
from slicewise.api.defrag import MovesBody
from slicewise.api.health import ClockStepBody
from slicewise.api.nodes import DrainBody, NodeBody
from slicewise.api.sign_in import CodeBody
from slicewise.api.tenants import RotateBody, TenantBody, TenantPatch, TokenBody
from slicewise.control.ports import Store
from slicewise.journal.entries import AllocationRecord, QuotaRecord, Role, TokenIssued, concerns
from slicewise.server.app import Route
from slicewise.server.routes.table import ROUTES

NODES = (("n1", "A100-80GB", 2), ("n2", "A30-24GB", 1))
PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb", "1g.6gb")
BY_NAME = {route.name: route for route in ROUTES}
STREAMS = {route.name for route in ROUTES if "text/event-stream" in route.answers.values()}
_QUIET_TURNS = 20
_CURSOR = re.compile(rb'"next":"([^"]*)"')
_ADVICE = re.compile(rb'(unknown [^";]*;)[^"]*')
"""Suggestions of known names: a random id may be similar to any of them."""

OWN = "own"
"""Placeholder for the caller's own name."""

TEMPLATES: dict[type, tuple[dict[str, Any], ...]] = {
    AllocationBody: (
        {
            "profile": "1g.10gb",
            "models": ["A100-80GB"],
            "count": 64,
            "priority": 0,
            "wait_seconds": 0,
            "lease_seconds": 60,
            "labels": {"team": "x"},
            "tenant": OWN,
            "preemptible": True,
            "expected_seconds": 60,
        },
        {"need": {"compute": 1, "memory_gb": 5}, "count": 64, "tenant": OWN},
    ),
    BatchBody: (
        {
            "allocations": [
                {"profile": "1g.10gb"},
                {"profile": "7g.80gb", "count": 9, "tenant": OWN},
            ]
        },
    ),
    ExtendBody: ({"lease_seconds": 60},),
    NodeBody: ({"name": "x", "model": "A100-80GB", "gpus": 1, "labels": {"team": "x"}},),
    DrainBody: ({"evict": True},),
    AdoptBody: ({"tenant": OWN, "labels": {"team": "x"}},),
    HelloBody: (
        {
            "boot": "b",
            "agent": "1",
            "driver": "580",
            "model": "A100-80GB",
            "geometry": {"model": "m", "slices": 1, "compute": 1, "profiles": []},
            "gpus": [{"uuid": "GPU-0", "mig": True, "problem": ""}],
            "life": "",
            "disagreements": ["they differ"],
        },
    ),
    ReportBody: (
        {
            "session": "s",
            "gpus": [{"uuid": "GPU-0", "mig": True}],
            "instances": [{"allocation": "x", "index": 0, "phase": "gone"}],
            "foreign": [{"gpu": "GPU-0", "uuid": "MIG-0", "profile": "p", "start": 0, "size": 1}],
        },
    ),
    TenantBody: ({"name": "x", "quota": {"instances": 0}},),
    TenantPatch: ({"quota": {"instances": 0}},),
    TokenBody: (
        {"role": "tenant", "tenant": "x", "node": "x", "note": "x", "expires_in_seconds": 60},
    ),
    RotateBody: ({"overlap_seconds": 60, "expires_in_seconds": 60},),
    ClockStepBody: ({"step_seconds": 1.5},),
    CodeBody: ({"code": "c", "verifier": "v" * 43, "redirect_uri": "https://x.example"},),
    MovesBody: (
        {
            "moves": [
                {"allocation": "x", "index": 0, "profile": "1g.10gb", "node": "n1", "gpu": 0}
                | {"start": 0, "to_node": "n1", "to_gpu": 1, "to_start": 0}
            ]
        },
    ),
}
"""Complete request bodies of every type; another tenant's id is put in place of each text.

All of them must be refused: a label with another tenant's id would legitimately return that id.
"""


class Asked(NamedTuple):
    """A request."""

    route: Route
    path: str
    query: str = ""
    body: object = None
    key: str | None = None

    def __repr__(self) -> str:
        return f"{self.route.method} {self.target} {json.dumps(self.body)} with key {self.key}"

    @property
    def target(self) -> str:
        """The request target."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def text(self) -> str:
        """All text of the request, decoded: the caller knows it already."""
        cursors = re.findall(r"cursor=([^&]*)", self.query)
        marks = "".join(_decoded(cursor.encode()) for cursor in cursors)
        return f"{unquote(self.target)} {json.dumps(self.body)} {self.key} {marks}"


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def json(self) -> Any:
        """The decoded body."""
        return json.loads(self.body)

    def text(self) -> bytes:
        """Every byte of the response, and the decoded content of its cursors."""
        marks = "".join(_decoded(cursor) for cursor in _CURSOR.findall(self.body)).encode()
        heads = b"\n".join(name + b": " + value for name, value in self.headers.items())
        return b"\n".join((heads, self.body, marks))


def _decoded(cursor: bytes) -> str:
    try:
        return base64.urlsafe_b64decode(cursor + b"=" * (-len(cursor) % 4)).decode()
    except ValueError:
        return ""


@dataclass
class Holdings:
    """Everything that a tenant holds."""

    quota: QuotaRecord
    allocations: dict[str, AllocationRecord]
    tokens: dict[str, TokenIssued]


@dataclass
class Rival:
    """One of the two tenants, with a token of each role."""

    name: str
    tokens: dict[Role, str] = field(default_factory=dict)
    """Secrets by role."""
    private: dict[str, None] = field(default_factory=dict)
    """Texts that the other tenant must not see, oldest first."""
    ids: dict[str, None] = field(default_factory=dict)
    """Ids of its allocations and tokens; also private."""
    kept: dict[str, tuple[Asked, Answer]] = field(default_factory=dict)
    """Requests and final answers by idempotency key."""
    copied: list[str] = field(default_factory=list)
    """Labels of the other tenant that this one has put on its own allocations."""


class LeakError(AssertionError):
    """Raised when a tenant saw or changed data of the other."""


class Arena:
    """One service with two rival tenants and an operator."""

    def __init__(self, folder: Path, store: Store | None = None) -> None:
        self.harness = Harness(folder, {"requests_per_second": 1e6}, store)
        self._seq = 0
        self.asked = 0
        self.rivals = [Rival("zq-anna"), Rival("xk-bert")]
        for name, model, gpus in NODES:
            self.harness.node(name=name, model=model, gpus=gpus)
        for rival in self.rivals:
            self.harness.tenant(rival.name)
            rival.private[rival.name] = None
            for role in (Role.TENANT, Role.READ_ONLY):
                note = f"note-of-{rival.name}"
                rival.tokens[role] = self.harness.token(role, tenant=rival.name, note=note)
                rival.private |= dict.fromkeys((rival.tokens[role], note))
        self.operator = self.harness.token("operator")
        state = self.harness.service.runtime.state
        staff = [i for i, token in state.tokens.items() if token.tenant is None]
        self._staff = (*staff, self.operator, self.harness.admin)
        self._learn()

    def close(self) -> None:
        """Stop the service."""
        self.harness.close()

    # Ownership

    def other(self, rival: Rival) -> Rival:
        """Return the other tenant."""
        first, second = self.rivals
        return second if rival is first else first

    def holdings(self, rival: Rival) -> Holdings:
        """Return everything that a tenant holds now."""
        state = self.harness.service.runtime.state
        standing = state.tenants_by_name[rival.name]
        return Holdings(
            standing.quota,
            {identity: state.allocations[identity] for identity in standing.allocations},
            {i: token for i, token in state.tokens.items() if token.tenant == standing.ref},
        )

    def _learn(self) -> dict[str, list[str]]:
        """Read new journal rows; return their kinds by the tenant they concern."""
        assert self.harness.store is not None
        kinds: dict[str, list[str]] = {rival.name: [] for rival in self.rivals}
        for row in self.harness.store.rows(self._seq, 10_000):
            self._seq = row.seq
            tenant, subject = concerns(row.entry)
            for rival in self.rivals:
                if tenant is not None and tenant.name == rival.name:
                    kinds[rival.name].append(str(row.entry.__struct_config__.tag))
                    if subject and subject != rival.name:
                        rival.ids[subject] = rival.private[subject] = None
        return kinds

    # Requests

    def ask(self, rival: Rival, role: Role, asked: Asked) -> Answer:
        """Send a request as a tenant, and check that it affects only that tenant."""
        victim = self.other(rival)
        before = self.holdings(victim)
        answer = self._send(asked, rival.tokens[role])
        kinds = self._learn()
        self._check_answer(rival, role, asked, answer)
        if set(kinds[victim.name]) - {"served", "reserved"}:
            raise LeakError(f"{asked} of {rival.name} wrote {kinds[victim.name]}")
        self._check_holdings(asked, before, self.holdings(victim))
        if asked.key is not None and answer.status != 403:
            self._check_key(rival, asked, answer)
        return answer

    def _check_answer(self, rival: Rival, role: Role, asked: Asked, answer: Answer) -> None:
        assert answer.status < 500, (asked, answer)
        assert answer.status != 429, (asked, answer)
        roles = asked.route.roles
        if roles is not None:
            assert (answer.status == 403) >= (role not in roles), (asked, answer)
        self.search(rival, asked.text(), answer.text(), asked)

    def search(self, rival: Rival, sent: str, got: bytes, asked: object) -> None:
        """Search bytes for foreign or staff data that the caller did not send."""
        for label in rival.copied:  # it contains the other tenant's name
            got = got.replace(label.encode(), b"")
        for private in (*self.other(rival).private, *self._staff):
            if private.encode() in got and private not in sent:
                raise LeakError(f"{rival.name} was told {private!r} by {asked}: {got[:2000]!r}")

    def _check_holdings(self, asked: Asked, before: Holdings, after: Holdings) -> None:
        """Check that holdings are unchanged, except for waiting requests that were placed."""
        records = {
            identity: msgspec.structs.replace(
                record,
                placed=was.placed,
                parts=was.parts,
                reason=was.reason,
                detail=was.detail,
            )
            if (was := before.allocations.get(identity)) and was.state == "queued"
            else record
            for identity, record in after.allocations.items()
        }
        if Holdings(after.quota, records, after.tokens) != before:
            raise LeakError(f"{asked} changed {before} to {after}")

    def _check_key(self, rival: Rival, asked: Asked, answer: Answer) -> None:
        """Check that a key refers only to the tenant's own earlier request."""
        assert asked.key is not None
        replayed = b"idempotency-replayed" in answer.headers
        known = rival.kept.get(asked.key)
        if known is None:
            if replayed or answer.status == 422:
                raise LeakError(f"{rival.name} never used the key of {asked}: {answer}")
            if answer.status in (200, 201, 202, 409):
                rival.kept[asked.key] = asked, answer
        elif known[0] == asked:
            assert replayed, (asked, answer)
            assert answer[::2] == known[1][::2], (asked, answer, known[1])
        else:
            assert answer.status in (400, 404, 422), (asked, answer)
            assert not replayed

    def staff(self, status: int | None, method: str, path: str, body: object = None) -> Answer:
        """Send a request as an operator, or as the admin if only the admin may."""
        path, _, query = path.partition("?")
        admin = path.startswith(("/v1/tenants", "/v1/tokens"))
        route = next(route for route in ROUTES if route.method == method)
        asked = Asked(route, path, query, body)
        answer = self._send(asked, self.harness.admin if admin else self.operator)
        assert answer.status < 500, answer
        assert status in (None, answer.status), answer
        self._learn()
        return answer

    def _send(self, asked: Asked, secret: str) -> Answer:
        self.asked += 1
        self.harness.ticks += 0.001
        body = b"" if asked.body is None else json.dumps(asked.body).encode()
        headers = [(b"authorization", b"Bearer " + secret.encode())]
        if asked.body is not None:
            headers.append((b"content-type", b"application/json"))
        if asked.key is not None:
            headers.append((b"idempotency-key", asked.key.encode()))
        scope = {
            "type": "http",
            "method": asked.route.method,
            "path": unquote(asked.path),
            "query_string": asked.query.encode(),
            "headers": headers,
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        got: list[Any] = []

        async def receive() -> Any:
            return messages.pop()

        async def send(message: Any) -> None:
            got.append(message)

        self.harness.run(self.harness.service.app(scope, receive, send))
        start, *chunks = got
        return Answer(
            start["status"], dict(start["headers"]), b"".join(chunk["body"] for chunk in chunks)
        )

    # Attacks

    def ask_about(self, rival: Rival, role: Role, asked: Asked, what: str) -> None:
        """Request something of the other tenant; the answer must be the same as for a missing
        thing."""
        answer = self.ask(rival, role, asked)
        nothing = f"{what}y"  # a name that does not exist
        twin = self.ask(
            rival,
            role,
            Asked(
                asked.route,
                asked.path.replace(quote(what), quote(nothing)),
                asked.query.replace(quote(what), quote(nothing)),
                json.loads(json.dumps(asked.body).replace(what, nothing)),
                asked.key and asked.key.replace(what, nothing),
            ),
        )
        bodies = answer.body, twin.body.replace(nothing.encode(), what.encode())
        received, expected = (_ADVICE.sub(rb"\1", body) for body in bodies)
        if (answer.status, received) != (twin.status, expected):
            raise LeakError(f"{rival.name} can tell by {asked}: {answer} {twin}")

    def follow(self, rival: Rival, role: Role, after: int, resumed: bool = False) -> None:
        """Read the event stream to its end; it must have all own events and no others."""
        assert self.harness.store is not None
        own = [
            row.seq
            for row in self.harness.store.rows(after, 100_000)
            if (tenant := concerns(row.entry)[0]) is not None and tenant.name == rival.name
        ]
        headers = [(b"authorization", b"Bearer " + rival.tokens[role].encode())]
        if resumed:
            headers.append((b"last-event-id", b"%d" % after))
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v1/events",
            "query_string": b"" if resumed else b"after=%d" % after,
            "headers": headers,
        }
        got = self.harness.run(self._read(scope))
        self.search(rival, "", got, f"events after {after}")
        events = re.findall(rb"^id: [0-9a-f]{16}-(\d+)\nevent: ", got, re.MULTILINE)
        assert [int(number) for number in events] == own

    async def _read(self, scope: dict[str, Any]) -> bytes:
        """Read a stream until it is idle."""
        messages: list[Any] = []
        left = asyncio.Event()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)

        app, replica = self.harness.service.app, self.harness.service.runtime.replica
        task = asyncio.create_task(app(scope, receive, send))
        quiet = 0
        while quiet < _QUIET_TURNS:  # no pause: all events are available
            seen = len(messages)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(messages) == seen else 0
        left.set()
        await asyncio.sleep(0)
        replica.notify()
        await task
        assert messages[0]["status"] == 200
        return b"".join(message.get("body", b"") for message in messages)


# Requests


def ways_to_ask(route: Route, what: str, own: str) -> Iterator[Asked]:
    """Yield requests of a route with ``what`` in each position, and ``own`` elsewhere."""
    for slot in route.parameters:
        for key in (None, "stolen") if route.key else (None,):
            yield Asked(route, filled(route, {slot: what}, own), body=_plain(route), key=key)
    path = filled(route, {}, own)
    fields = () if route.query is None else route.query.__struct_fields__
    for name in fields:
        for value in (what, f"team:{what}", f"{what}:x"):
            for more in ("", "&state=released") if "state" in fields else ("",):
                yield Asked(route, path, f"{name}={quote(value)}{more}", _plain(route))
    for template in () if route.body is None else TEMPLATES[route.body]:
        for body in with_each_text(_made_own(template, own), what):
            yield Asked(route, path, body=body)
    if route.key:
        yield Asked(route, path, body=_plain(route), key=what)
    if not route.parameters:
        yield Asked(route, path, body=_plain(route))


def filled(route: Route, chosen: dict[str, str], own: str) -> str:
    """Return a route's path with its parameters replaced."""
    path = route.path
    for name in route.parameters:
        path = path.replace(f"{{{name}}}", quote(chosen.get(name, own), safe=""))
    return path


def _plain(route: Route) -> object:
    """Return a body that changes nothing."""
    if route.body is None or route.optional_body:
        return None
    return {"profile": "4g.40gb", "count": 64} if route.body is AllocationBody else {"x": 1}


def _made_own(template: Any, own: str) -> Any:
    return json.loads(json.dumps(template).replace(f'"{OWN}"', json.dumps(own)))


def with_each_text(template: Any, what: str) -> Iterator[Any]:
    """Yield the template once for every text in it, with that text replaced."""
    if isinstance(template, dict):
        for key, part in template.items():
            yield from ({**template, key: other} for other in with_each_text(part, what))
            if key == "team":
                yield {what: part}
    elif isinstance(template, list):
        for index, part in enumerate(template):
            for other in with_each_text(part, what):
                yield [*template[:index], other, *template[index + 1 :]]
    elif isinstance(template, str):
        yield what
