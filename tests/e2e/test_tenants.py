"""Two tenants and every route: neither ever sees or changes the other's data.

A state machine runs random actions of two tenants, each with a read-write and a read-only token,
while an operator changes nodes and quotas. `Arena.ask` checks every answer. The routes come from
the service's own table, so new ones are included automatically.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from tests.e2e.tenant_isolation import (
    BY_NAME,
    OWN,
    PROFILES,
    STREAMS,
    TEMPLATES,
    Answer,
    Arena,
    Asked,
    LeakError,
    Rival,
    filled,
    ways_to_ask,
)

from slicewise.control import views
from slicewise.control.commands import Release
from slicewise.control.ports import IdempotencyKey, Store
from slicewise.journal.entries import Role
from slicewise.server import context as site
from slicewise.server.app import Route
from slicewise.server.auth import Caller
from slicewise.server.routes import allocations, events, listing
from slicewise.server.routes.table import ROUTES
from slicewise.store import open_store

EXAMPLES = int(os.environ.get("SLICEWISE_TENANT_EXAMPLES", "12"))
"""Number of runs of the state machine."""
LOOKERS = (Role.TENANT, Role.READ_ONLY)
ASKED = [route for route in ROUTES if route.name not in STREAMS]
PAGED = [r for r in ASKED if r.query is not None and "cursor" in r.query.__struct_fields__]


def set_up(arena: Arena) -> None:
    """Give each tenant one of everything: placed, ended, waiting and cancelled allocations, and a
    key."""
    first: tuple[dict[str, Any], ...] = (
        {"profile": "1g.10gb"},
        {"profile": "1g.10gb", "lease_seconds": 500},
        {"profile": "2g.20gb"},
        {"profile": "7g.80gb", "count": 9, "wait_seconds": 1000},
        {"profile": "7g.80gb", "count": 9, "wait_seconds": 1000, "priority": 2},
    )
    for rival in arena.rivals:
        for number, terms in enumerate(first):
            made = create(arena, rival, terms, key=f"k{number}")
            if number in (2, 4):
                release(arena, rival, made.json["id"])


def create(arena: Arena, rival: Rival, terms: dict[str, Any], key: str | None = None) -> Answer:
    """Create an allocation with a unique label."""
    label = f"label-of-{rival.name}-{len(rival.private)}"
    rival.private[label] = None
    body = terms | {"labels": {"team": label}}
    route = BY_NAME["createAllocation"]
    return arena.ask(rival, Role.TENANT, Asked(route, route.path, body=body, key=key))


def release(arena: Arena, rival: Rival, identity: str, key: str | None = None) -> Answer:
    """Try to release an allocation."""
    route = BY_NAME["releaseAllocation"]
    return arena.ask(rival, Role.TENANT, Asked(route, f"/v1/allocations/{identity}", key=key))


def belongings(arena: Arena, rival: Rival) -> list[str]:
    """Return one thing of every kind that a tenant owns."""
    state = arena.harness.service.runtime.state
    kinds: dict[str, str] = {"name": rival.name}
    for identity in rival.ids:
        record = state.allocations.get(identity)
        token = identity in state.tokens
        kinds[record.state if record else "token" if token else "ended"] = identity
    labels = [text for text in rival.private if text.startswith("label-of")]
    return [*kinds.values(), *labels[-1:]]


def sweep(arena: Arena, rival: Rival, role: Role) -> None:
    """Request the other tenant's things on every route, in every position."""
    for what in belongings(arena, arena.other(rival)):
        for route in ASKED:
            for asked in ways_to_ask(route, what, rival.name):
                arena.ask_about(rival, role, asked, what)
    arena.follow(rival, role, 0)


def read_own(arena: Arena, rival: Rival, role: Role) -> None:
    """Check that a tenant sees all of its own data."""
    held = arena.holdings(rival).allocations
    route = BY_NAME["listAllocations"]
    page = arena.ask(rival, role, Asked(route, route.path, "limit=1000")).json
    assert {view["id"] for view in page["allocations"]} == set(held)
    ended = {i for i in rival.ids if i.startswith("a")} - set(held)
    found = set()
    for state in ("released", "cancelled"):
        query = f"limit=1000&state={state}"
        page = arena.ask(rival, role, Asked(route, route.path, query)).json
        found |= {view["id"] for view in page["allocations"]}
    assert found == ended
    route = BY_NAME["getQueue"]
    queue = arena.ask(rival, role, Asked(route, route.path)).json
    waiting = {identity for identity, record in held.items() if record.state == "queued"}
    assert {view["id"] for view in queue["allocations"]} == waiting
    assert queue["waiting"] == len(waiting)
    for identity in rival.ids:
        if identity.startswith("a"):
            path = f"/v1/allocations/{identity}"
            assert arena.ask(rival, role, Asked(BY_NAME["getAllocation"], path)).status == 200
    route = BY_NAME["listTenants"]
    (view,) = arena.ask(rival, role, Asked(route, route.path)).json["tenants"]
    assert view["name"] == rival.name
    instances = sum(len(record.parts) for record in held.values())
    assert (view["usage"]["instances"], view["usage"]["waiting"]) == (instances, len(waiting))


class TenantMachine(RuleBasedStateMachine):
    """Random actions of two tenants, on a store in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        self.kept = self.open(folder)
        self.arena = Arena(folder, self.kept)

    def open(self, folder: Path) -> Store | None:
        """Open the store."""
        return None

    def teardown(self) -> None:
        """Stop the service."""
        self.arena.close()
        if self.kept is not None:
            self.kept.close()
        self.folder.cleanup()

    @initialize()
    def begin(self) -> None:
        """Give both tenants something to protect."""
        set_up(self.arena)

    who = st.integers(0, 1)
    role = st.sampled_from(LOOKERS)
    keys = st.sampled_from([None, "k0", "k1", "k2", "k3", "k4", "k5", "k6"])

    @rule(
        who=who,
        profile=st.sampled_from(PROFILES),
        count=st.sampled_from([1, 1, 1, 2, 9]),
        wait=st.sampled_from([0, 0, 30, 1000]),
        priority=st.integers(-1, 2),
        lease=st.sampled_from([None, 40]),
        key=keys,
    )
    def create(
        self,
        who: int,
        profile: str,
        count: int,
        wait: int,
        priority: int,
        lease: int | None,
        key: str | None,
    ) -> None:
        """Create an allocation; the key may be used already, also by the other tenant."""
        rival = self.arena.rivals[who]
        terms = {"profile": profile, "count": count, "wait_seconds": wait, "priority": priority}
        create(self.arena, rival, terms | ({"lease_seconds": lease} if lease else {}), key)

    @rule(who=who, key=keys)
    def create_again(self, who: int, key: str) -> None:
        """Repeat a request."""
        rival = self.arena.rivals[who]
        if key in rival.kept:
            self.arena.ask(rival, Role.TENANT, rival.kept[key][0])

    @rule(who=who, key=keys)
    def copy_foreign_request(self, who: int, key: str) -> None:
        """Send the other tenant's exact request with its key."""
        rival = self.arena.rivals[who]
        other = self.arena.other(rival)
        if key in other.kept:
            asked = other.kept[key][0]
            for text in [text for text in other.private if text in asked.text()]:
                if text.startswith("label-of"):
                    del other.private[text]  # now both have this label
                    rival.copied.append(text)
            self.arena.ask(rival, Role.TENANT, asked)

    @rule(who=who, profiles=st.lists(st.sampled_from(PROFILES), min_size=1, max_size=3), key=keys)
    def create_batch(self, who: int, profiles: list[str], key: str | None) -> None:
        """Create several allocations at once."""
        route = BY_NAME["createAllocations"]
        body = {"allocations": [{"profile": profile} for profile in profiles]}
        asked = Asked(route, route.path, body=body, key=key)
        self.arena.ask(self.arena.rivals[who], Role.TENANT, asked)

    @rule(who=who, key=keys, data=st.data())
    def release_own(self, who: int, key: str | None, data: st.DataObject) -> None:
        """Release an own allocation, ended or not."""
        rival = self.arena.rivals[who]
        own = [identity for identity in rival.ids if identity.startswith("a")]
        release(self.arena, rival, data.draw(st.sampled_from(own)), key)

    @rule(who=who, role=role, data=st.data())
    def request_foreign(self, who: int, role: Role, data: st.DataObject) -> None:
        """Request anything of the other tenant on any route."""
        rival = self.arena.rivals[who]
        what = data.draw(st.sampled_from(list(self.arena.other(rival).private)))
        route = BY_NAME[data.draw(st.sampled_from([route.name for route in ASKED]))]
        asked = data.draw(st.sampled_from(list(ways_to_ask(route, what, rival.name))))
        self.arena.ask_about(rival, role, asked, what)

    @rule(who=who, role=role, data=st.data())
    def read_anything(self, who: int, role: Role, data: st.DataObject) -> None:
        """Call any reading route with any mix of own and foreign parameters."""
        rival = self.arena.rivals[who]
        words = [*rival.private, *self.arena.other(rival).private, *PROFILES, "n1", "n2"]
        words += ["queued", "placed", "released", "cancelled", "true", "1", "2", "A100-80GB"]
        gets = [route.name for route in ASKED if route.method == "GET"]
        route = BY_NAME[data.draw(st.sampled_from(gets))]
        path = filled(route, {}, data.draw(st.sampled_from(words)))
        fields = [] if route.query is None else list(route.query.__struct_fields__)
        chosen = data.draw(st.lists(st.sampled_from(fields), unique=True)) if fields else []
        query = "&".join(f"{n}={quote(data.draw(st.sampled_from(words)))}" for n in chosen)
        self.arena.ask(rival, role, Asked(route, path, query))

    @rule(who=who, role=role, state=st.sampled_from(["", "&state=released", "&state=cancelled"]))
    def steal_a_cursor(self, who: int, role: Role, state: str) -> None:
        """Continue from a cursor of the other tenant or of the operator."""
        arena, rival = self.arena, self.arena.rivals[who]
        theirs = arena.other(rival)
        cursors = set()
        for route in PAGED:
            query = f"limit=1{state}" if route.name == "listAllocations" else "limit=1"
            if route.roles is not None and role in route.roles:
                page = arena.ask(theirs, role, Asked(route, route.path, query))
                cursors.add(page.json["next"])
            cursors.add(arena.staff(200, "GET", f"{route.path}?{query}").json["next"])
        for route in PAGED:
            for cursor in cursors - {None}:
                for more in ("", state) if route.name == "listAllocations" else ("",):
                    query = f"cursor={cursor}{more}"
                    arena.ask(rival, role, Asked(route, route.path, query))

    @rule(who=who, role=role, back=st.integers(0, 60), resumed=st.booleans())
    def follow(self, who: int, role: Role, back: int, resumed: bool) -> None:
        """Read the event stream from any position."""
        seq = self.arena.harness.service.runtime.replica.seq
        self.arena.follow(self.arena.rivals[who], role, max(0, seq - back), resumed)

    @rule(who=who, role=role)
    def read_own(self, who: int, role: Role) -> None:
        """Check that a tenant sees all of its own data."""
        read_own(self.arena, self.arena.rivals[who], role)

    @rule(who=who, role=role)
    def sweep(self, who: int, role: Role) -> None:
        """Request the other tenant's things on every route."""
        sweep(self.arena, self.arena.rivals[who], role)

    # Operator

    @rule(seconds=st.sampled_from([1, 45, 600]))
    def expire(self, seconds: int) -> None:
        """Advance the clock: leases and waits expire when the next command is handled.

        The command is sent here, so what ends now is not attributed to a tenant.
        """
        self.arena.harness.clock.now += seconds
        self.arena.staff(404, "POST", "/v1/nodes/nowhere/cordon")

    @rule(node=st.sampled_from(["n1", "n2"]), turn=st.sampled_from(["cordon", "uncordon", "drain"]))
    def change_node(self, node: str, turn: str) -> None:
        """Cordon, uncordon or drain a node."""
        body = {"evict": True} if turn == "drain" else None
        self.arena.staff(200, "POST", f"/v1/nodes/{node}/{turn}", body)

    @rule(who=who, instances=st.sampled_from([None, 3, 100]))
    def change_quota(self, who: int, instances: int | None) -> None:
        """Change a quota."""
        body = {"quota": {"instances": instances, "max_priority": 1 if instances == 3 else 0}}
        self.arena.staff(200, "PATCH", f"/v1/tenants/{self.arena.rivals[who].name}", body)

    @rule(who=who, profile=st.sampled_from(PROFILES))
    def create_for(self, who: int, profile: str) -> None:
        """Create an allocation for a tenant, as the operator."""
        body = {"profile": profile, "tenant": self.arena.rivals[who].name}
        self.arena.staff(None, "POST", "/v1/allocations", body)

    @rule()
    def defragment(self) -> None:
        """Move instances, as the operator."""
        plan = self.arena.staff(200, "GET", "/v1/defrag/plan?budget=4").json
        if plan["moves"]:
            self.arena.staff(200, "POST", "/v1/defrag", {"moves": plan["moves"]})

    @rule(who=who, role=role)
    def renew_token(self, who: int, role: Role) -> None:
        """Revoke a token and issue another."""
        rival = self.arena.rivals[who]
        route = BY_NAME["whoami"]
        own = self.arena.ask(rival, role, Asked(route, route.path)).json
        self.arena.staff(200, "DELETE", f"/v1/tokens/{own['id']}")
        body = {"role": role, "tenant": rival.name, "note": f"note-of-{rival.name}"}
        made = self.arena.staff(201, "POST", "/v1/tokens", body).json
        rival.tokens[role] = made["token"]
        rival.private[made["token"]] = None


class TenantMachineOnSqlite(TenantMachine):
    """The same on SQLite."""

    def open(self, folder: Path) -> Store | None:
        """Open the store."""
        return open_store(folder)


def run(machine: type[TenantMachine], examples: int, **options: Any) -> None:
    """Run a state machine."""
    options.setdefault("phases", [Phase.reuse, Phase.generate, Phase.shrink])
    options.setdefault("stateful_step_count", 40)
    chosen = settings(max_examples=examples, deadline=None, **options)
    run_state_machine_as_test(machine, settings=chosen)


def test_tenants_are_isolated() -> None:
    run(TenantMachine, EXAMPLES)


def test_tenants_are_isolated_on_sqlite() -> None:
    run(TenantMachineOnSqlite, max(2, EXAMPLES // 10))


# Systematic checks


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """Two tenants with one of everything."""
    made = Arena(tmp_path)
    set_up(made)
    yield made
    made.close()


def test_foreign_ids_on_every_route_in_every_position(arena: Arena) -> None:
    for rival in arena.rivals:
        for role in LOOKERS:
            read_own(arena, rival, role)
            sweep(arena, rival, role)
    assert arena.asked > 100 * len(ROUTES)


def test_every_request_body_has_a_complete_template() -> None:
    """The templates must cover every field of a body, or foreign ids are not tried there."""
    bodies = {route.body for route in ROUTES if route.body is not None}
    assert bodies == set(TEMPLATES)
    for kind, templates in TEMPLATES.items():
        fields = {name for template in templates for name in template}
        assert fields == {field.encode_name for field in msgspec.structs.fields(kind)}, kind
        for template in templates:
            msgspec.convert(template, kind)
    assert OWN in str(TEMPLATES)


def test_every_streaming_route_is_followed() -> None:
    assert {"followEvents"} == STREAMS


# Mutations: the tests detect leaks


def _sees(self: Caller, tenant: str) -> bool:
    return True


def _key(tenant: str, key: str) -> IdempotencyKey:
    return IdempotencyKey("everybody", key)


def _release(allocation: str, tenant: str | None = None) -> Release:
    return Release(allocation)


async def _ended(
    context: Any, request: Any, query: Any, tenant: Any, matches: Any, limit: int
) -> Any:
    rows = context.runtime.store.history(before=None, limit=limit, kinds=("ended",))
    return [row.entry.allocation for row in rows], None


def _event(*_: object) -> bool:
    return True


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "every caller sees everything": lambda p: p.setattr(Caller, "sees", _sees),
    "keys are shared": lambda p: p.setattr(site, "IdempotencyKey", _key),
    "a release does not check the tenant": lambda p: p.setattr(allocations, "Release", _release),
    "tokens have no tenant": lambda p: p.setattr(Caller, "tenant", None),
    "pages are not filtered by tenant": lambda p: p.setattr(listing, "_ended", _ended),
    "events are not filtered by tenant": lambda p: p.setattr(events, "_sees", _event),
    "events name the actor": lambda p: p.setattr(views, "SERVICE_ACTORS", _Anything()),
    "any caller may act for any tenant": lambda p: p.setattr(
        Caller, "acts_for", lambda self, named: named or self.token.tenant.name
    ),
}


class _Anything:
    def __contains__(self, thing: object) -> bool:
        return True


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_injected_leaks_are_detected(monkeypatch: pytest.MonkeyPatch, mutation: str) -> None:
    MUTATIONS[mutation](monkeypatch)
    with pytest.raises(AssertionError):
        run(
            TenantMachine,
            200,
            phases=[Phase.generate],
            stateful_step_count=10,
            report_multiple_bugs=False,
            database=None,
        )


def test_a_new_route_is_tested_automatically(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route added later, which returns everything to everyone, is tested automatically."""
    told = BY_NAME["listTokens"]
    new = Route(
        "GET", "/v1/everything/{name}", "everything", "Everything", told.handler,
        frozenset(Role), told.answers, query=told.query,
    )  # fmt: skip
    monkeypatch.setattr(
        arena.harness.service.app, "router", type(arena.harness.service.app.router)([*ROUTES, new])
    )
    monkeypatch.setitem(globals(), "ASKED", [*ASKED, new])
    with pytest.raises(LeakError):
        sweep(arena, arena.rivals[0], Role.TENANT)
