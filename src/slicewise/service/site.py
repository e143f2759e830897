"""The site: what handlers work with, and the one way in which they have something changed."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

from slicewise.catalog import Catalog
from slicewise.control.actors import UnauthenticatedError
from slicewise.control.answers import RefusedError
from slicewise.control.commands import Command
from slicewise.control.ports import Key
from slicewise.control.state import State
from slicewise.engine.explain import Explainer
from slicewise.policies.base import Policy
from slicewise.policies.registry import policy
from slicewise.service.auth import Caller, authenticate
from slicewise.service.capacity import Capacity
from slicewise.service.contacts import Contacts
from slicewise.service.failures import Failures
from slicewise.service.history import History
from slicewise.service.http import Reply, Request, reply
from slicewise.service.metrics import Metrics
from slicewise.service.plant import Plant
from slicewise.service.rates import Limits
from slicewise.service.settings import Settings
from slicewise.service.snapshot import Snapshots
from slicewise.service.streams import Streams
from slicewise.service.turns import FairLock, Flights, Turns

REPLAYED = (b"idempotency-replayed", b"true")
_AGAIN = (b"retry-after", b"1")


class Site:
    """The process's plant, its settings and its catalog of GPU models."""

    def __init__(self, plant: Plant, settings: Settings, catalog: Catalog) -> None:
        self.plant = plant
        self.settings = settings
        self.catalog = catalog
        self.turns = Turns(plant.timer)
        """Of requests on the event loop."""
        self.flights = Flights(
            settings.requests_in_flight, settings.unread_bytes, settings.unread_bytes_in_all
        )
        self.computing = FairLock()
        """Held while a thread computes for seconds: one at a time, in rotation between callers."""
        self.looking = FairLock()
        """Held while a thread looks into the journal: commits use the same database."""
        self.surveying = asyncio.Lock()
        """Held while an agent's GPU model is looked at and entered."""
        self.patching = asyncio.Lock()
        """Held by whoever changes what it has just read."""

        self.contacts = Contacts(plant, settings.agents_lost_seconds)
        plant.replica.on_news = self.contacts.look
        self.streams = Streams(settings.streams, settings.streams_per_tenant)
        self.limits = Limits(settings, plant.timer)
        self.failures = Failures(self.limits)
        self.metrics = Metrics(
            plant, self.streams, self.contacts, lambda: self.capacity, self.failures
        )
        self.limits.on_limited = self.metrics.count_limited
        self.history = History(plant, lambda: self.capacity)
        self.document = b"{}"
        """The OpenAPI document of its routes."""
        self._policies: dict[str, Policy] = {}
        self._process = secrets.token_hex(4).encode()
        self._tools_of: tuple[Capacity, Explainer, Snapshots] | None = None
        self._for: State | None = None

    @property
    def state(self) -> State:
        """What is committed."""
        return self.plant.state

    @property
    def capacity(self) -> Capacity:
        """Measures the state."""
        return self._tools()[0]

    @property
    def explainer(self) -> Explainer:
        """Explains decisions on the state."""
        return self._tools()[1]

    def policy(self, name: str) -> Policy:
        """The policy of that name, the same object every time."""
        if name not in self._policies:
            self._policies[name] = policy(name)
        return self._policies[name]

    @property
    def snapshots(self) -> Snapshots:
        """Encodes the state."""
        return self._tools()[2]

    def tag(self, seq: int, caller: Caller) -> bytes:
        """What tells apart the versions of the state that callers may have: an ETag."""
        return b'"%b-%d-%b"' % (self._process, seq, (caller.tenant or "").encode().hex().encode())

    def _tools(self) -> tuple[Capacity, Explainer, Snapshots]:
        """What has tables of its own over the state: made anew only when that is another one."""
        state = self.plant.state
        if self._tools_of is None or self._for is not state:
            capacity = Capacity(state)
            self._tools_of = (
                capacity,
                Explainer(state.scheduler),
                Snapshots(state, capacity, self.plant.history),
            )
            self._for = state
        return self._tools_of

    async def write(self, request: Request, command: Command, acts_for: str = "") -> Reply:
        """Have a command carried out, once even if it is sent again with the same key."""
        caller, text = request.caller, request.key()
        key, digest = None, ""
        if text is not None:
            owner = self._owner(acts_for, caller.tenant or "")
            key = Key(owner, text)
            whole = f"{request.method} {request.path}\n".encode() + request.raw
            digest = hashlib.sha256(whole).hexdigest()
        self.check(caller)  # by the wall clock as well; the desk goes by service time alone
        told = await self.plant.ask(command, caller.actor, key, digest, request.share)
        if told.replayed:
            return reply(told.answer, REPLAYED)
        return reply(told.answer, _AGAIN) if told.answer.status == 503 else reply(told.answer)

    async def authenticate(self, request: Request) -> Caller:
        """The bearer of a request's token; without a valid one it is refused, and remembered."""
        header = request.headers.get(b"authorization")
        try:
            return authenticate(self.state, header, self.plant.latest(), request.address)
        except UnauthenticatedError as refusal:
            failure = refusal
        raise await self.failures.note(request.address, failure)

    def check(self, caller: Caller) -> None:
        """Refuse a caller whose token has been revoked or has expired since the request began."""
        caller.check(self.state, self.plant.latest())

    def _owner(self, acts_for: str, tenant: str) -> str:
        """Whose keys those are: of this tenant, not of another one that had its name before."""
        standing = self.state.tenants.get(tenant or acts_for)
        return f"{acts_for}:{tenant}:{standing.since if standing is not None else 0}"

    def page(self, limit: int | None) -> int:
        """How many items a page has."""
        most = self.settings.page
        if limit is not None and limit > most:
            raise RefusedError(400, f"a page has at most {most} items", field="limit")
        return min(100, most) if limit is None else limit
