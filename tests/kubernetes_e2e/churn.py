"""Pods that come and go on one node through the whole chain, while its parts are killed.

Usage: python -m tests.kubernetes_e2e.churn [--pods N] [--real] [--stock] [--calm] [--forced SHARE]
                                            [--gpus N] [--cool-down S] [--seed N] [--json FILE]

Pods with instances of three sizes live for a moment and are deleted, some at once (as with
``kubectl delete --force``), some before they run. Meanwhile the kubelet, NVIDIA's driver and
slicewise are killed in turn and started again; with ``--calm`` nothing is. All the time an observer
looks at the API and at the GPUs:

- an instance belongs to an allocated claim, but for the time that the kubelet needs after the end;
- what a running pod was given exists;
- instances of allocated claims do not overlap;
- no pod is stuck: bound, and not running for ``STUCK_SECONDS``; with a real kubelet for thrice as
  long, because it tries a failed prepare again only after 60 to 90 seconds. Such a pod is deleted,
  and counted.
  If the driver is killed between its two notes of a claim, it refuses the claim for ever (upstream
  1452); pods of such claims are counted apart;
- all pods run unless they are deleted before, and in the end nothing is left.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

import httpx
from tests.kubernetes_e2e.api import CORE, RESOURCE, ApiError, Json, until
from tests.kubernetes_e2e.chain import MODEL, PROFILES, Chain, Place, chain, places_of
from tests.kubernetes_e2e.cluster import namespace, pods_in
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import Replica

from slicewise.catalog import Catalog
from slicewise.fakedriver import build

STUCK_SECONDS = 60.0
_REAL_KUBELET = 3
_LOOK_SECONDS = 0.1
_AT_ONCE = 5
"""Pods at a time for each GPU: a few more than fit."""
_WEIGHTS = {"one": 5, "two": 3, "three": 2}
_LIFE_SECONDS = 2.0
_EARLY = 0.05
_DISTURBANCES = ("kubelet", "driver", "slicewise")
_EVERY_PODS = 25


@dataclass
class Outcome:
    """What was done and seen."""

    made: int = 0
    ran: int = 0
    early: int = 0
    """Deleted before they ran."""
    graceful: int = 0
    forced: int = 0
    killed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0
    stuck: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Stuck as well, because the driver was killed while it prepared their claims: it does not
    recover from that, whatever the slices."""
    causes: dict[str, str] = field(default_factory=dict)
    """What the kubelet said of each stuck pod the last time."""
    refused: list[str] = field(default_factory=list)
    """What the driver said to calls that failed."""
    overlaps: list[str] = field(default_factory=list)
    longest_without_claim: float = 0
    """Seconds that an instance existed without an allocated claim."""
    longest_without_instance: float = 0
    """Seconds that a pod ran without what it was given."""
    latencies: list[float] = field(default_factory=list)
    """From the creation of a pod to its running, in seconds."""

    def quantile(self, percent: int) -> float:
        """A quantile of the latencies."""
        return quantiles(self.latencies, n=100, method="inclusive")[percent - 1]

    def table(self) -> dict[str, object]:
        """The figures."""
        return {
            "pods": self.made,
            "ran": self.ran,
            "deleted before they ran": self.early,
            "deleted gracefully": self.graceful,
            "deleted at once": self.forced,
            **{f"{name} killed": count for name, count in self.killed.items()},
            "seconds": round(self.seconds),
            "stuck pods": len(self.stuck),
            "stuck as the driver was killed while it prepared": len(self.broken),
            "refused calls": len(self.refused),
            "overlaps": len(self.overlaps),
            "longest instance without a claim, s": round(self.longest_without_claim, 1),
            "longest pod without its instance, s": round(self.longest_without_instance, 1),
            **{
                f"creation to running, {percent}%, s": round(self.quantile(percent), 2)
                for percent in (50, 90, 99)
                if len(self.latencies) > 1
            },
        }


class _Since:
    """For how long something has been so, by key."""

    def __init__(self) -> None:
        self._first: dict[object, float] = {}
        self.longest = 0.0

    def note(self, keys: set[object], now: float) -> None:
        self._first = {key: self._first.get(key, now) for key in keys}
        self.longest = max([self.longest, *(now - first for first in self._first.values())])


class Observer(threading.Thread):
    """Looks at pods, claims and GPUs until it is stopped."""

    def __init__(self, there: Chain, space: str, outcome: Outcome) -> None:
        super().__init__(daemon=True)
        self._chain, self._space, self._outcome = there, space, outcome
        self._over = threading.Event()
        self._orphans, self._missing = _Since(), _Since()
        self._sizes = {
            fact.id: fact.size
            for fact in Catalog.builtin().find(MODEL).facts
            if fact.id is not None
        }
        self.error: BaseException | None = None
        self.pods: dict[str, Json] = {}
        """By name, as last seen."""
        self._given: dict[str, list[Place]] = {}
        """By claim: the places of its instances."""

    def given(self, pod: str) -> list[Place]:
        """Where a pod was last seen to have instances."""
        found = self.pods.get(pod, {"status": {}})
        statuses = found["status"].get("resourceClaimStatuses", [])
        names = [one.get("resourceClaimName") for one in statuses]
        return [place for name in names for place in self._given.get(name, [])]

    def run(self) -> None:
        try:
            while not self._over.wait(_LOOK_SECONDS):
                with suppress(ApiError, httpx.HTTPError):
                    self._look()
        except BaseException as error:
            self.error = error
            raise

    def stop(self) -> None:
        """Stop looking, and write down what was seen."""
        self._over.set()
        self.join()
        if self.error is not None:
            raise self.error
        self._outcome.longest_without_claim = self._orphans.longest
        self._outcome.longest_without_instance = self._missing.longest

    def _look(self) -> None:
        api, space = self._chain.api, self._space
        before = self._chain.places()
        pods = api.items(f"{pods_in(space)}?resourceVersion=0")
        claims = api.items(f"{RESOURCE}/namespaces/{space}/resourceclaims")
        after = self._chain.places()
        now = time.monotonic()
        self.pods = {one["metadata"]["name"]: one for one in pods}
        given = self._given = {one["metadata"]["name"]: places_of(one) for one in claims}
        allocated = [place for found in given.values() for place in found]
        self._orphans.note({place for place in before & after if place not in allocated}, now)
        for index, one in enumerate(allocated):
            for other in allocated[:index]:
                if one.gpu == other.gpu and self._window(one) & self._window(other):
                    self._outcome.overlaps.append(f"{one} and {other}")
        missing: set[object] = set()
        for pod in pods:
            runs = pod["status"].get("phase") == "Running"
            if (
                runs
                and "deletionTimestamp" not in pod["metadata"]
                and not set(self.given(pod["metadata"]["name"])) <= before | after
            ):
                missing.add(pod["metadata"]["uid"])
        self._missing.note(missing, now)

    def _window(self, place: Place) -> int:
        return ((1 << self._sizes[place.profile]) - 1) << place.start


class Churn:
    """The pods of one run."""

    def __init__(
        self,
        there: Chain,
        space: str,
        replica: Replica | None,
        seed: int = 0,
        forced: float = 0.3,
        every: int = _EVERY_PODS,
        tell: Callable[[Outcome], object] = lambda outcome: None,
    ) -> None:
        """``every`` so many pods one part is killed; 0: never. ``tell`` is called with each pod."""
        self.outcome = Outcome()
        self._tell = tell
        self._chain, self._space, self._replica = there, space, replica
        self._chance = random.Random(seed)
        self._forced, self._every = forced, every
        self._stuck_seconds = STUCK_SECONDS * (_REAL_KUBELET if there.node is not None else 1)
        self._prefix = "" if replica is not None else "stock-"
        self._observer = Observer(there, space, self.outcome)
        self._created: dict[str, float] = {}
        self._running: dict[str, float] = {}
        """When a pod that runs is to be deleted."""
        self._early: dict[str, float] = {}
        """When a pod is to be deleted even if it does not run."""
        self._bound: dict[str, float] = {}

    def run(self, pods: int) -> Outcome:
        """Make so many pods, and delete them all."""
        self._observer.start()
        try:
            return self._run(pods)
        finally:
            self._observer.stop()

    def _run(self, pods: int) -> Outcome:
        started = time.monotonic()
        outcome = self.outcome
        while outcome.made < pods:
            if len(self._created) < _AT_ONCE * len(self._chain.machine.gpus):
                self._make()
                if self._every and outcome.made % self._every == 0:
                    self._disturb()
            self._look()
            self._delete_some()
            time.sleep(0.02)
        until("all pods have run and are deleted", self._all_deleted)
        until("all pods are gone", lambda: not self._chain.api.items(pods_in(self._space)) or None)
        self._chain.until_places()
        outcome.seconds = time.monotonic() - started
        if self._chain.kubelet is not None:
            outcome.refused = list(self._chain.kubelet.refusals)
        return outcome

    def _make(self) -> None:
        title = self._chance.choices(list(PROFILES), [_WEIGHTS[name] for name in PROFILES])[0]
        name = f"p{self.outcome.made}"
        self._chain.make_pod(self._space, name, self._prefix + title, grace=2)
        self._created[name] = time.monotonic()
        if self._chance.random() < _EARLY:
            self._early[name] = time.monotonic() + self._chance.uniform(0, _LIFE_SECONDS)
        self.outcome.made += 1
        self._tell(self.outcome)

    def _look(self) -> None:
        """Note which pods run, and remove those that are stuck."""
        now = time.monotonic()
        seen = self._observer.pods
        for name, created in list(self._created.items()):
            pod = seen.get(name)
            if pod is None or name in self._running:
                continue
            if pod["status"].get("phase") == "Running":
                self._running[name] = now + self._chance.uniform(0, _LIFE_SECONDS)
                self._bound.pop(name, None)
                self.outcome.ran += 1
                self.outcome.latencies.append(now - created)
            elif (
                pod["spec"].get("nodeName")
                and now - self._bound.setdefault(name, now) > self._stuck_seconds
            ):
                (self.outcome.broken if self._is_broken(name) else self.outcome.stuck).append(name)
                self.outcome.causes[name] = self._cause(name)
                self._delete(name, at_once=True)

    def _is_broken(self, name: str) -> bool:
        """Whether the driver began to prepare a claim of the pod, and never said why it did not."""
        claim = f"{self._space}/{name}-"
        lines = [line for line in self._chain.driver.log.splitlines() if claim in line]
        begun = any("unprepare failed for partially prepared claim" in line for line in lines)
        return begun and not any("prepare devices failed" in line for line in lines)

    def _cause(self, name: str) -> str:
        """What the kubelet, or else the scheduler, said of a pod the last time."""
        path = f"{CORE}/namespaces/{self._space}/events?fieldSelector=involvedObject.name={name}"
        found = [
            one
            for one in self._chain.api.items(path)
            if one.get("source", {}).get("component") == "kubelet" or "Scheduling" in one["reason"]
        ]
        found.sort(
            key=lambda one: (one["type"] == "Warning", int(one["metadata"]["resourceVersion"]))
        )
        given = ", ".join(map(str, self._observer.given(name)))
        return f"{given}: {found[-1]['reason']}: {found[-1]['message']}" if found else given

    def _delete_some(self) -> None:
        now = time.monotonic()
        for name, end in list(self._running.items()):
            if now >= end:
                self._delete(name, self._chance.random() < self._forced)
        for name, end in list(self._early.items()):
            if now >= end and name not in self._running:
                self.outcome.early += 1
                self._delete(name, self._chance.random() < self._forced)

    def _delete(self, name: str, at_once: bool) -> None:
        end = "?gracePeriodSeconds=0" if at_once else ""
        self._chain.api.delete(f"{pods_in(self._space)}/{name}{end}")
        if at_once:
            self.outcome.forced += 1
        else:
            self.outcome.graceful += 1
        for known in (self._created, self._running, self._early, self._bound):
            known.pop(name, None)

    def _all_deleted(self) -> bool:
        self._look()
        self._delete_some()
        return not self._created

    def _disturb(self) -> None:
        """Kill one part; the others go on."""
        victim = _DISTURBANCES[self.outcome.made // self._every % len(_DISTURBANCES)]
        match victim:
            case "kubelet":
                self._chain.restart_kubelet()
            case "driver":
                self._chain.restart_driver()
            case "slicewise" if self._replica is not None:
                self._replica.kill()
                self._replica.start()
            case _:
                return
        self.outcome.killed[victim] = self.outcome.killed.get(victim, 0) + 1


def _tell(outcome: Outcome) -> None:
    """Print how far it is, every hundred pods."""
    if outcome.made % 100 == 0:
        stuck = len(outcome.causes)
        print(f"{time.strftime('%H:%M:%S')} {outcome.made} pods, {stuck} stuck", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes_e2e.churn")
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--real", action="store_true", help="a real kubelet and containers")
    parser.add_argument("--stock", action="store_true", help="without slicewise")
    parser.add_argument("--calm", action="store_true", help="nothing is killed")
    parser.add_argument("--forced", type=float, default=0.3, help="share deleted at once")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument(
        "--cool-down", type=int, default=5, help="for slices of pods that vanished, in seconds"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # clean up then, too
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sw-")))
        plane = stack.enter_context(Plane())
        there = stack.enter_context(
            chain(plane, build(folder / "library"), folder, real=chosen.real, gpus=chosen.gpus)
        )
        space = stack.enter_context(namespace(plane.api))
        there.make_templates(space)
        replica = None
        if not chosen.stock:
            cool_down = f"{chosen.cool_down}s"
            replica = Replica(
                plane.kubeconfig, folder, "--lease-seconds", "2", "--cool-down", cool_down
            )
            replica.start()
            stack.callback(replica.kill)
        every = 0 if chosen.calm else _EVERY_PODS
        churn = Churn(there, space, replica, chosen.seed, chosen.forced, every, _tell)
        try:
            outcome = churn.run(chosen.pods)
        except BaseException:
            print(json.dumps(churn.outcome.table(), indent=2))
            print(json.dumps(churn.outcome.causes, indent=2))
            print(plane.kubectl("get", "pods,resourceclaims", "-A", "-o", "wide"))
            print(there.places(), *there.kubelet.refusals[-5:] if there.kubelet else (), sep="\n")
            raise
    print(json.dumps(outcome.table(), indent=2))
    for name, cause in outcome.causes.items():
        print(f"{name}: {cause}")
    for refused in outcome.refused[:5]:
        print(refused)
    if chosen.json:
        chosen.json.write_text(json.dumps(outcome.table(), indent=2) + "\n")
    if outcome.stuck or outcome.overlaps or outcome.longest_without_instance > STUCK_SECONDS:
        print("error: there should be no stuck pods, overlaps, or pods without their instances")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
