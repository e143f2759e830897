"""The app context: the state and services that handlers use, and the way to submit commands."""

from __future__ import annotations

import asyncio
import hashlib
import secrets

from slicewise.api.allocations import AllocationView
from slicewise.catalog import Catalog
from slicewise.config.settings import Settings
from slicewise.control.actors import UnauthenticatedError
from slicewise.control.answers import RefusedError
from slicewise.control.commands import Command
from slicewise.control.ports import IdempotencyKey
from slicewise.control.state import State
from slicewise.control.waiting import Waiting
from slicewise.engine.explain import Explainer
from slicewise.journal.entries import AllocationRecord
from slicewise.policies.base import Policy
from slicewise.policies.registry import policy
from slicewise.runtime.agent_liveness import AgentLiveness
from slicewise.runtime.rehearsals import Rehearsals, Rehearse
from slicewise.runtime.runtime import Runtime
from slicewise.server.auth import PEER, AuthFailures, Caller, authenticate
from slicewise.server.capacity import FreeCapacity
from slicewise.server.certificates import identity_of
from slicewise.server.cluster_views import ClusterJson
from slicewise.server.limits import FairLock, FairTurns, InFlight, RateLimits, Streams
from slicewise.server.metrics import Metrics
from slicewise.server.recent_stats import RecentStats
from slicewise.server.requests import HttpRequest, Reply, reply
from slicewise.server.sign_in import SignIn

REPLAYED = (b"idempotency-replayed", b"true")
_RETRY = (b"retry-after", b"1")


class AppContext:
    """What handlers share: the runtime, settings, GPU models, limits, metrics and statistics."""

    def __init__(
        self,
        runtime: Runtime,
        settings: Settings,
        catalog: Catalog,
        rehearse: Rehearse | None = None,
    ) -> None:
        self.runtime = runtime
        self.settings = settings
        self.catalog = catalog
        self.turns = FairTurns(runtime.timer)
        self.in_flight = InFlight(
            settings.requests_in_flight, settings.unread_bytes, settings.unread_bytes_in_all
        )
        self.computing = FairLock()
        """Held while a thread computes for seconds: one computation at a time."""
        self.journal_lock = FairLock()
        """Held while a thread reads the journal: commits use the same database."""
        self.new_model = asyncio.Lock()
        """Held while a new GPU model is computed and registered."""
        self.patching = asyncio.Lock()
        """Held between reading a resource and submitting the change to it."""

        self.liveness = AgentLiveness(runtime, settings.agents_lost_seconds)
        runtime.replica.on_change = self.liveness.notify_polls
        self.rehearsals = Rehearsals(runtime, settings, rehearse)
        self.streams = Streams(settings.streams, settings.streams_per_tenant)
        self.backups = 0
        """Backups being streamed."""
        self.limits = RateLimits(settings, runtime.timer)
        self.auth_failures = AuthFailures(self.limits)
        self.sign_in = SignIn(settings)
        self.sign_in.on_change = runtime.replica.notify  # streams and polls check their callers
        self.metrics = Metrics(
            runtime,
            self.streams,
            self.liveness,
            lambda: self.capacity,
            self.rehearsals,
            self.sign_in,
        )
        self.limits.on_limited = self.metrics.count_limited
        self.auth_failures.on_failure = self.metrics.count_auth_failure
        self.recent_stats = RecentStats(runtime, lambda: self.capacity)
        self.document = b"{}"
        """The OpenAPI document."""
        self._policies: dict[str, Policy] = {}
        self._process = secrets.token_hex(4).encode()
        self._derived: tuple[State, FreeCapacity, Explainer, ClusterJson, Waiting] | None = None

    @property
    def state(self) -> State:
        """The committed state."""
        return self.runtime.state

    @property
    def capacity(self) -> FreeCapacity:
        """The free capacity of the committed state."""
        return self._from_state()[1]

    @property
    def explainer(self) -> Explainer:
        """Explains decisions on the committed state."""
        return self._from_state()[2]

    @property
    def cluster_json(self) -> ClusterJson:
        """The committed state of the cluster as JSON."""
        return self._from_state()[3]

    @property
    def waiting(self) -> Waiting:
        """Decides as the command handler would, on the committed state, and explains the queue."""
        return self._from_state()[4]

    def view(self, record: AllocationRecord) -> AllocationView:
        """The view of an allocation in the committed state."""
        return self.waiting.view(record, self.runtime.clock())

    def _from_state(self) -> tuple[State, FreeCapacity, Explainer, ClusterJson, Waiting]:
        """The objects with tables over the state, rebuilt when the runtime loads a new state."""
        state = self.runtime.state
        if self._derived is None or self._derived[0] is not state:
            capacity = FreeCapacity(state)
            explainer = Explainer(state.scheduler)
            self._derived = (
                state,
                capacity,
                explainer,
                ClusterJson(state, capacity, self.runtime.history),
                Waiting(state, self.runtime.source is None),
            )
        return self._derived

    def policy(self, name: str) -> Policy:
        """The policy of this name; the same object on every call."""
        if name not in self._policies:
            self._policies[name] = policy(name)
        return self._policies[name]

    def tag(self, seq: int, caller: Caller) -> bytes:
        """The ETag of the state at this journal entry, as the caller sees it."""
        scope = "" if caller.tenant is None else caller.tenant.id
        return b'"%b-%d-%b"' % (self._process, seq, scope.encode().hex().encode())

    async def write(self, request: HttpRequest, command: Command, acts_for: str = "") -> Reply:
        """Submit a command and return its answer; a repeated Idempotency-Key replays the first."""
        caller, text = request.caller, request.key()
        key, digest = None, ""
        if text is not None:
            key = IdempotencyKey(self._key_owner(caller, acts_for), text)
            whole = f"{request.method} {request.path}\n".encode() + request.raw
            digest = hashlib.sha256(whole).hexdigest()
        self.check(caller)  # by the wall clock too: the command handler knows service time only
        outcome = await self.runtime.submit(command, caller.actor, key, digest, request.share)
        if outcome.replayed:
            return reply(outcome.answer, REPLAYED)
        if outcome.answer.status == 503:
            return reply(outcome.answer, _RETRY)
        return reply(outcome.answer)

    async def authenticate(self, request: HttpRequest) -> Caller:
        """Return the bearer of the request's token; count and refuse failures."""
        header = request.headers.get(b"authorization")
        try:
            return authenticate(self.state, header, self.runtime.latest(), request.address)
        except UnauthenticatedError as error:
            failure = error
        certificate = request.scope.get(PEER)
        if header is None and certificate is not None and self.settings.tls_client_ca is not None:
            try:
                identity = identity_of(certificate, self.sign_in.certificate_rules)
                token = identity.token(self.state, self.runtime.latest())
                return Caller(token, request.address, identity=identity)
            except UnauthenticatedError as error:
                failure = error
        provider = self.sign_in.tokens
        if provider is not None and header is not None and failure.why == "unknown":
            try:
                return await provider.authenticate(
                    self.state, header, self.runtime.latest(), request.address
                )
            except UnauthenticatedError as error:
                failure = error
        raise await self.auth_failures.count(request.address, failure)

    def check(self, caller: Caller) -> None:
        """Refuse a caller whose token was revoked or expired since the request began."""
        caller.check(self.state, self.runtime.latest())

    def _key_owner(self, caller: Caller, acts_for: str) -> str:
        """Return the owner of a caller's idempotency keys.

        That is its tenant; for callers without one, the staff that acts for a tenant.
        """
        if caller.tenant is not None:
            return caller.tenant.id
        return f"staff {self.tenant_id(acts_for)}"

    def tenant_id(self, name: str) -> str:
        """Return the id of the tenant of this name.

        Anything else is taken for the id itself, which may be that of a removed tenant.
        """
        tenant = self.state.tenants_by_name.get(name)
        return name if tenant is None else tenant.ref.id

    def page(self, limit: int | None) -> int:
        """The number of items on a page, given the requested limit."""
        maximum = self.settings.page
        if limit is not None and limit > maximum:
            raise RefusedError(400, f"a page has at most {maximum} items", field="limit")
        return min(100, maximum) if limit is None else limit
