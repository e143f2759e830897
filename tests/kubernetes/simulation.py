"""A deterministic simulation of two controllers, Kubernetes and its users, in any order of steps.

Two replicas of the controller run against a fake API. A byte string selects every step: the events
that a watch delivers, the next call of a writer, the actions of Kubernetes and its users, and the
faults. The same bytes give the same story; `Simulation(choices, tell=print).run()` prints it.

No step may raise an exception in a controller or a writer, and no two pods may be bound on the same
slices. At the end all pending work is completed and time passes. Then the caches must agree with
the API, and no pod may wait that could be placed: see `verdict`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.kubernetes import jobs
from tests.kubernetes.actors import (
    NODE_NAMES,
    PROFILES,
    STOCK,
    TEAM,
    ClaimController,
    Seats,
    StockScheduler,
    add_base_objects,
    add_node,
    claim_names,
    deallocate,
    end_pod,
    fits,
    is_over,
    is_stock,
    make_claim,
    make_pod,
    publish,
    seats_of,
    slices_of,
    withdraw,
)
from tests.kubernetes.fake_api import FakeApi
from tests.kubernetes.jobs import FakeExecutor
from tests.kubernetes.objects import OURS
from tests.kubernetes.simulated import LEASE, Replica
from tests.kubernetes.verdict import Verdict
from tests.kubernetes_e2e.nvidia import DRIVER

from slicewise.core.errors import SlicewiseError
from slicewise.engine.reservation_rules import ReservationRules
from slicewise.kubernetes.api_client import ApiUnreachableError, KubernetesApiError
from slicewise.kubernetes.claim_client import Decision
from slicewise.kubernetes.conflicts import When
from slicewise.kubernetes.informer import (
    CLAIMS,
    CLASSES,
    KINDS,
    NAMESPACES,
    NODES,
    PODS,
    SLICES,
    TAINT_RULES,
)

POD_NAMES = ("p0", "p1", "p2", "p3")
_LIFETIMES = ((None, ""), (None, "30"), (60, ""), (600, "soon"))
"""What pods say of how long they run: a deadline, and an annotation."""
SHARED = ("s0", "s1")
RIVALS = ("r0", "r1")
_COOL_DOWN = 20.0
_AT_REST = (1.0, 6.0, 20.0, 60.0, 310.0)
"""Waiting times at the end; together they exceed every timeout and the longest backoff."""
_MOST_ROUNDS = 2000


@dataclass
class _Lingering:
    """The instances of a pod that was deleted by force."""

    seats: Seats
    until: float
    known: list[Replica]
    """The replicas that knew the pod as a user of its claim."""


class Simulation:
    """One run, selected by a byte string."""

    def __init__(self, choices: bytes, tell: Callable[[str], object] = lambda _: None) -> None:
        self._choices = iter(choices)
        self._tell = tell
        self.now = 1000.0
        self.api = FakeApi()
        self.api.gate = jobs.gate
        add_base_objects(self.api)
        self.api.tell = tell
        self.claim_controller = ClaimController(self.api)
        self.scheduler = StockScheduler(self.api)
        chosen: tuple[When, ...] = ("never", *("auto",) * 4, *("always",) * 3)
        self._hold_back = chosen[self._choose(8)]
        self._rules = ReservationRules(0.0, 1.0) if self._choose(4) else ReservationRules()
        self._cool_down = (0.0, _COOL_DOWN)[self._choose(4) > 0]
        self._lingering: list[_Lingering] = []
        self.replicas = [self._replica(name) for name in ("one", "two")]
        self._cast = 1 + self._choose(len(POD_NAMES))
        self._firsts = (8, 8, 7, 6)[self._choose(4)]
        self._deeds = self._table(
            (12, self._hear),
            (8, self._step),
            (10, self._hear_and_step),
            (16, self._write),
            (10, self._write_amiss),
            (2, self._tell_pods),
            (4, self._make_pod),
            (2, self._make_shared),
            (4, self._make_rival),
            (5, self._end_pod),
            (3, self._remove_by_force),
            (1, self._delete_claim),
            (4, self._claims_of_pods),
            (2, self._flap),
            (8, self._clear_claims),
            (6, self._scheduler_hears),
            (12, self._schedule),
            (4, self._refuse),
            (4, self._take_away),
            (4, self._cut),
            (2, self._change_node),
            (1, self._protect),
            (1, self._taint),
            (1, self._change_class),
            (1, self._change_quota),
            (5, self._pass_time),
            (2, self._beat),
            (1, self._restart),
            (4, self._all_of_one),
        )

    def _table(self, *deeds: tuple[int, Callable[[], None]]) -> list[Callable[[], None]]:
        """The step for each byte; in each story some steps are frequent and others never occur."""
        always = (self._hear_and_step, self._write, self._make_pod)
        named = [
            deed
            for weight, deed in deeds
            for _ in range(weight * (3 if deed in always else (0, 1, 2, 6)[self._choose(4)]))
        ]
        return [named[byte * len(named) // 256] for byte in range(256)]

    def _replica(self, name: str) -> Replica:
        made = Replica(
            self.api, name, lambda: self.now, self._hold_back, self._rules, self._cool_down
        )
        writer = made.controller._writer
        write = writer.write

        def checked(decision: Decision) -> None:
            self._check_cooled(made, decision)
            write(decision)

        writer.write = checked  # type: ignore[method-assign]
        return made

    def run(self) -> None:
        """Play the story and check the result."""
        try:
            self.replicas[0].controller.elector.beat()
            if self._choose(8):  # else it begins with the lists
                self._busy(self.replicas[0])
            for choice in self._choices:
                self._deeds[choice]()
            self.come_to_rest()
            Verdict(self.api, self.replicas).check()
        finally:
            for replica in self.replicas:
                replica.end()

    # Choosing

    def _choose(self, many: int) -> int:
        return next(self._choices, 0) % many

    def _one_of(self, kind: str) -> str | None:
        there = sorted(self.api.there[kind])
        chosen = self._choose(max(1, len(there)))
        return there[chosen] if there else None

    def _some_replica(self) -> Replica:
        """A replica, mostly the first."""
        return self.replicas[self._choose(8) >= self._firsts]

    def _say(self, *words: object) -> None:
        self._tell(f"{self.now:8.1f} " + " ".join(map(str, words)))

    # Replicas

    def _hear(self) -> None:
        replica, kind = self._some_replica(), self._choose(16)
        chosen = (CLAIMS.name, PODS.name, *replica.streams)[kind % 8]
        if replica.hear(chosen, 1 + kind // 4):
            self._say(replica.name, "hears of", chosen)

    def _step(self) -> None:
        replica = self._some_replica()
        self._say(replica.name, "steps")
        self.step(replica)

    def _hear_and_step(self) -> None:
        """Deliver all events; only writes are outstanding."""
        self._all_or_half(self._some_replica(), True)

    def _all_or_half(self, replica: Replica, everything: bool) -> None:
        self._say(replica.name, "hears of", "everything" if everything else "claims", "and steps")
        if everything:
            replica.hear_all()
        else:
            replica.hear(CLAIMS.name, 1 << 30)
        self.step(replica)

    def step(self, replica: Replica) -> None:
        """Let a controller handle its messages and decide."""
        replica.step()
        self._look()

    def _write(self) -> None:
        replica, chosen = self._some_replica(), self._choose(32)
        which, calls = chosen % 8, 1 + chosen // 8
        if replica.writers.jobs:
            self._say(replica.name, "goes on writing", which, "for", calls, "calls")
            for _ in range(calls):
                self._go_on(replica.writers, which)
        elif which < 3:
            self._make_pod()
        else:
            self._all_or_half(replica, which > 3)

    def _go_on(
        self,
        crew: FakeExecutor,
        which: int,
        fault: SlicewiseError | None = None,
        lands: bool = False,
    ) -> None:
        mistake = crew.go_on(which, fault, lands)
        if mistake is not None:
            raise mistake

    def _write_amiss(self) -> None:
        replica, which, how = self._some_replica(), self._choose(8), self._choose(8)
        if not replica.writers.jobs:
            return
        fault: SlicewiseError = ApiUnreachableError("no answer")
        if how >= 6:
            fault = KubernetesApiError(403, "Forbidden", "not now")
        self._say(replica.name, "goes on writing", which, "with", fault, how)
        self._go_on(replica.writers, which, fault, how in (1, 3, 5))

    def _tell_pods(self) -> None:
        self._go_on(self._some_replica().recorders, self._choose(2))

    def _all_of_one(self) -> None:
        """Let a replica do all its work, as in normal operation."""
        replica = self._some_replica()
        self._say(replica.name, "does everything")
        self._busy(replica)

    def _busy(self, replica: Replica) -> bool:
        some = False
        for _ in range(100):
            told = replica.hear_all()
            before = self.api.changes
            self.step(replica)
            for crew in (replica.writers, replica.recorders):
                told |= bool(crew.jobs)
                while crew.jobs:
                    self._go_on(crew, 0)
            self.step(replica)
            if not told and self.api.changes == before:
                return some
            some = True
        raise AssertionError(f"replica {replica.name} does not come to an end")

    def _cut(self) -> None:
        replica, kind, how = self._some_replica(), self._choose(len(KINDS)), self._choose(4)
        stream = list(replica.streams.values())[kind]
        self._say(replica.name, "mends" if stream.cut_off else "cuts", stream.kind.name, how)
        if stream.cut_off:
            stream.mend(how > 0)
        else:
            stream.cut()
            if how:
                stream.mend(how > 1)

    def _beat(self) -> None:
        replica = self._some_replica()
        replica.controller.elector.beat()
        self._say(replica.name, "beats; leads:", replica.controller.leads)

    def _restart(self) -> None:
        which, late = self._choose(2), self._choose(4)
        self._say(self.replicas[which].name, "is killed and restarted")
        self.replicas[which].end()
        self.replicas[which] = self._replica(f"{self.replicas[which].name}'")
        if late:
            self.expire(LEASE + 1, [True, True])
            self._busy(self.replicas[which])

    # Kubernetes and its users

    def _make_pod(self) -> None:
        name, what = POD_NAMES[self._choose(self._cast)], self._choose(16)
        if f"{TEAM}/{name}" in self.api.there[PODS.name]:
            bound = self.api.there[PODS.name][f"{TEAM}/{name}"]["spec"].get("nodeName")
            if bound or what < 4:
                self._end(f"{TEAM}/{name}", what % 2 == 0)
            return
        shared = [one for one in SHARED if f"{TEAM}/{one}" in self.api.there[CLAIMS.name]]
        templates = [PROFILES[what % 3]] * (1 + (what // 3 % 2))
        claims = shared[: what % 3] if what >= 8 else []
        if claims and what % 2:
            templates = []
        self._say("pod", name, "comes, for", templates, claims)
        make_pod(self.api, name, templates, claims, *_LIFETIMES[self._choose(4)])
        for _ in range(self._choose(4) and 2 * len(templates)):
            self.claim_controller.see_to_pod(f"{TEAM}/{name}")

    def _make_shared(self) -> None:
        name, what = SHARED[self._choose(2)], self._choose(3)
        if f"{TEAM}/{name}" not in self.api.there[CLAIMS.name]:
            self._say("claim", name, "comes")
            make_claim(self.api, name, PROFILES[what])

    def _make_rival(self) -> None:
        name, what = RIVALS[self._choose(2)], self._choose(3)
        if self._hold_back != "never" and f"{TEAM}/{name}" not in self.api.there[PODS.name]:
            self._say("rival", name, "comes, for", PROFILES[what])
            make_pod(self.api, name, [STOCK + PROFILES[what]], [])

    def _end_pod(self) -> None:
        key, done = self._one_of(PODS.name), self._choose(2)
        if key is not None:
            self._end(key, bool(done))

    def _end(self, key: str, done: bool) -> None:
        """End a pod, and let Kubernetes do some of the work on its claims."""
        self._say("pod", key, "ends")
        claims = claim_names(self.api.there[PODS.name][key])
        end_pod(self.api, key, done)
        for _ in range(self._choose(4)):
            for name in claims:
                if name in self.api.there[CLAIMS.name]:
                    self.claim_controller.see_to_claim(name or "")

    def _remove_by_force(self) -> None:
        """Delete a running pod at once: its instances exist until the kubelet has removed them."""
        running = [
            key
            for key, pod in sorted(self.api.there[PODS.name].items())
            if pod["spec"].get("nodeName") and not is_over(pod)
        ]
        chosen = self._choose(len(running) or 1)
        if not running:
            return
        uid = self.api.there[PODS.name][running[chosen]]["metadata"]["uid"]
        self._say("pod", running[chosen], "is deleted by force")
        for claim in self.api.there[CLAIMS.name].values():
            reserved = {one["uid"] for one in claim["status"].get("reservedFor", ())}
            if reserved == {uid}:
                known = [one for one in self.replicas if one.knows_user(claim, uid)]
                self._lingering.append(
                    _Lingering(seats_of(claim), self.now + self._cool_down, known)
                )
        self.api.delete(PODS.name, running[chosen])

    def _check_cooled(self, replica: Replica, decision: Decision) -> None:
        """Check that a replica does not give out slices of a pod that it saw vanish a moment ago.

        That is all it can know: not after a restart, nor once another allocator has used them.
        """
        self._drop_given_out()
        given = [(seat.pool, seat.device) for grant in decision.grants for seat in grant.devices]
        for one in list(self._lingering):
            if fits([*one.seats, *given]):
                continue
            assert replica not in one.known or self.now >= one.until, f"{given} is still in use"
            self._lingering.remove(one)

    def _drop_given_out(self) -> None:
        """Forget what kube-scheduler has given out: it knows of no cool-down."""
        for claim in self.api.there[CLAIMS.name].values():
            if is_stock(claim) and seats_of(claim):
                self._lingering = [
                    one for one in self._lingering if fits([*one.seats, *seats_of(claim)])
                ]

    def _delete_claim(self) -> None:
        key = self._one_of(CLAIMS.name)
        if key is not None:
            self._say("claim", key, "is deleted")
            self.api.delete(CLAIMS.name, key)

    def _claims_of_pods(self) -> None:
        key = self._one_of(PODS.name)
        if key is not None:
            for _ in range(1 + 4 * self._choose(2)):
                self._make_claims(key)
            self._say("claims are made for", key)

    def _make_claims(self, key: str) -> None:
        """Create the claims of a pod.

        With ``auto``, the first claim of another class may come while an allocation is written: a
        known gap. So here it comes at other times, and the replicas see it before they decide.
        """
        auto = self._hold_back == "auto" and key.removeprefix(f"{TEAM}/") in RIVALS
        if auto and any(replica.writers.jobs for replica in self.replicas):
            return
        self.claim_controller.see_to_pod(key)
        for replica in self.replicas if auto else ():
            replica.hear(PODS.name, 1 << 30)
            replica.hear(CLAIMS.name, 1 << 30)

    def _flap(self) -> None:
        key = self._one_of(PODS.name)
        if key is not None and self.claim_controller.start_flapping(key):
            self._say("the claims of", key, "are recorded in turns from now on")

    def _clear_claims(self) -> None:
        chosen, every = self._one_of(CLAIMS.name), self._choose(2)
        for key in sorted(self.api.there[CLAIMS.name]):
            if every or key == chosen:
                self._say("claim", key, "is looked after")
                self.claim_controller.see_to_claim(key)

    def _scheduler_hears(self) -> None:
        many = (1, 2, 1 << 30, 1 << 30)[self._choose(4)]
        if self.scheduler.hear(many):
            self._say("the scheduler hears of claims", many)

    def _schedule(self) -> None:
        key = self._one_of(PODS.name)
        if key is not None:
            self._say("the scheduler looks at", key)
            self.scheduler.see_to(key)
            self._look()

    def _refuse(self) -> None:
        key = self._one_of(PODS.name)
        if key is not None:
            self._say("the scheduler refuses", key)
            self.scheduler.hear(1 << 30)
            self.scheduler.see_to(key, refuse=True)

    def _take_away(self) -> None:
        """Deallocate an unused claim, as kube-scheduler does at times."""
        idle = [
            key
            for key, one in sorted(self.api.there[CLAIMS.name].items())
            if seats_of(one) and not one["status"].get("reservedFor")
        ]
        chosen, heard = self._choose(len(idle) or 1), self._choose(2)
        if idle:
            self._say("devices are taken away from", idle[chosen])
            if heard:
                self.replicas[0].hear(CLAIMS.name, 1 << 30)
            self.api.change(CLAIMS.name, idle[chosen], deallocate)
            if heard:
                self._all_or_half(self.replicas[0], False)

    def _change_node(self) -> None:
        name, what = NODE_NAMES[self._choose(2)], self._choose(6)
        self._say("node", name, "changes", what)
        there = name in self.api.there[NODES.name]
        self._lingering = [one for one in self._lingering if one.seats[0][0] != name]
        slices = slices_of(self.api, name)
        if what == 0 and slices:
            self.api.delete(SLICES.name, slices[-1])  # the others do not form a pool
        elif what <= 1:
            withdraw(self.api, name)
            if not slices:
                publish(self.api, name)
        elif not there:
            add_node(self.api, name)
        elif what <= 3:
            self.api.delete(NODES.name, name)
        else:
            closed = self.api.there[NODES.name][name]["spec"].get("unschedulable", False)
            self.api.change(
                NODES.name, name, lambda one: one["spec"].update(unschedulable=not closed)
            )

    def _taint(self) -> None:
        """Taint the devices of a node by a rule, or end that."""
        name = NODE_NAMES[self._choose(2)]
        self._say("a taint on the devices of", name, "comes or goes")
        if name in self.api.there[TAINT_RULES.name]:
            self.api.delete(TAINT_RULES.name, name)
            return
        taint = {"key": "sick", "effect": "NoSchedule"}
        spec = {"taint": taint, "deviceSelector": {"pool": name}}
        self.api.make(TAINT_RULES.name, {"metadata": {"name": name}, "spec": spec})

    def _protect(self) -> None:
        """Let an admission policy protect a claim from slicewise, or end that."""
        key = self._one_of(CLAIMS.name)
        if key is not None:
            self._say("claim", key, "is protected, or no longer")
            self.api.protected ^= {key}

    def _change_class(self) -> None:
        """Create or delete our class, sealed or not: claims are ours if it is absent or sealed."""
        sealed = self._choose(2)
        self._say("the class", OURS, "is", "sealed" if sealed else "open", "or goes")
        if OURS in self.api.there[CLASSES.name]:
            self.api.delete(CLASSES.name, OURS)
        else:
            expression = "false" if sealed else f'device.driver == "{DRIVER}"'
            spec = {"selectors": [{"cel": {"expression": expression}}]}
            self.api.make(CLASSES.name, {"metadata": {"name": OURS}, "spec": spec})

    def _change_quota(self) -> None:
        """Change the quota of the namespace, or delete and create it."""
        what = self._choose(4)
        self._say("the namespace changes", what)
        if what == 3:
            self.api.delete(NAMESPACES.name, TEAM)
        if TEAM not in self.api.there[NAMESPACES.name]:
            self.api.make(NAMESPACES.name, {"metadata": {"name": TEAM}})
        limits = {"slicewise.dev/memory-slices": str(what)} if what else {}
        self.api.change(
            NAMESPACES.name, TEAM, lambda one: one["metadata"].update(annotations=limits)
        )

    def _pass_time(self) -> None:
        seconds, beats = (0.1, 0.6, 3.0, 6.0, 11.0, 14.0)[self._choose(6)], self._choose(6)
        self.expire(seconds, [beats < 3, beats not in (2, 4, 5)])

    def expire(self, seconds: float, beat: list[bool]) -> None:
        """Advance the clock; replicas with ``beat`` renew their lease or try to acquire it.

        kube-scheduler completes its writes before, and the replicas see them: the settling time of
        tentative claims relies on it.
        """
        if not all(beat):
            self._say(f"{seconds} seconds pass; leases are seen to:", beat)
        if any(is_stock(one) for one in self.api.there[CLAIMS.name].values()):
            self.scheduler.finish_plans()
            for replica in self.replicas:
                replica.hear(PODS.name, 1 << 30)
                replica.hear(CLAIMS.name, 1 << 30)
                self.step(replica)
        left = seconds
        while left > 0:
            self.now += min(left, LEASE / 2)
            left -= LEASE / 2
            for replica, does in zip(self.replicas, beat, strict=True):
                if does:
                    replica.controller.elector.beat()

    # Invariants

    def _look(self) -> None:
        """Check that no two pods are bound on the same slices."""
        bound = {
            pod["metadata"]["uid"]
            for pod in self.api.there[PODS.name].values()
            if pod["spec"].get("nodeName") and not is_over(pod)
        }
        self._drop_given_out()
        used = [
            seat
            for claim in self.api.there[CLAIMS.name].values()
            if any(one["uid"] in bound for one in claim["status"].get("reservedFor", ()))
            for seat in seats_of(claim)
        ]
        assert fits(used), f"pods are bound on the same slices: {used}"

    def come_to_rest(self) -> None:
        """Complete all pending work without faults, and let time pass."""
        self._say("all faults end; pending work is completed")
        for name in NODE_NAMES:
            if name not in self.api.there[NODES.name]:
                add_node(self.api, name)
            if len(slices_of(self.api, name)) == 1:
                withdraw(self.api, name)
        self.api.delete(CLASSES.name, OURS)
        self.api.protected.clear()
        for name in NODE_NAMES:
            self.api.delete(TAINT_RULES.name, name)
        self.api.change(NAMESPACES.name, TEAM, lambda one: one["metadata"].pop("annotations", 0))
        quiet = 0
        for _ in range(_MOST_ROUNDS):
            before = self.api.changes
            for replica in self.replicas:
                for stream in replica.streams.values():
                    stream.mend(True)
            busy = [self._busy(replica) for replica in self.replicas]
            while self.scheduler.hear(1 << 30):
                pass
            for key in sorted(self.api.there[PODS.name]):
                self._make_claims(key)
                self.scheduler.see_to(key)
                self._look()
            for key in sorted(self.api.there[CLAIMS.name]):
                self.claim_controller.see_to_claim(key)
            still = self.api.changes == before and not any(busy)
            quiet = quiet + 1 if still else 0
            if quiet == len(_AT_REST):
                return
            self.expire(_AT_REST[quiet], [True, True])
        raise AssertionError("it does not come to rest")
