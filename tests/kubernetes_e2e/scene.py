"""Shared by the tests of faults: a replica that is restarted, and pods that come and go."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx
from tests.kubernetes_e2e.api import Api, ApiError, Json, until
from tests.kubernetes_e2e.checker import Verdict, Witness, lives, until_quiet
from tests.kubernetes_e2e.cluster import (
    claim,
    claims_in,
    clear,
    device_request,
    pod,
    pods_in,
    suppress_conflict,
    template,
    templates_in,
)
from tests.kubernetes_e2e.faults import Fault, Proxy, Write
from tests.kubernetes_e2e.nvidia import MIG_CLASS
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, Replica, wants

T = TypeVar("T")

ROUNDS = int(os.environ.get("SLICEWISE_K8S_ROUNDS", "0"))
"""The number of rounds; 0 is the short version for daily use."""
MODEL = "A100-80GB"
LEASE_SECONDS = "2"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/slicewise"


class Living:
    """A replica behind a proxy; it is restarted after a kill, as by Kubernetes."""

    def __init__(self, plane: Plane, folder: Path, *flags: str, name: str = "r0") -> None:
        self.proxy = Proxy(plane, folder, name)
        self.name = name
        self.replica = Replica(
            self.proxy.kubeconfig, folder, "--lease-seconds", LEASE_SECONDS, *flags, name=name
        )
        self.lives = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"keeper of {name}", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            self.replica.start()
            self.lives += 1
            assert self.replica.process is not None
            self.replica.process.wait()

    @property
    def has_led(self) -> bool:
        """Whether any of its processes has been the leader."""
        log = self.replica.log
        return log.exists() and f"leading as {self.name}" in log.read_text()

    def kill(self, _: Write | None = None) -> None:
        """End it at once."""
        self.replica.kill()

    def close(self) -> None:
        """Stop it without a restart."""
        self._stopping.set()
        while self._thread.is_alive():
            if self.replica.process is not None:
                self.replica.kill()
            self._thread.join(0.1)
        self.proxy.close()


@contextmanager
def living(plane: Plane, folder: Path, *flags: str, name: str = "r0") -> Iterator[Living]:
    """A replica that runs until the end of the block."""
    one = Living(plane, folder, *flags, name=name)
    try:
        yield one
    except BaseException:
        print(one.name, *one.proxy.writes[-40:], sep="\n")
        if one.replica.log.exists():
            print(one.replica.log.read_text()[-4000:])
        print(plane.kubectl("get", "pods,resourceclaims", "-A", "-o", "wide"))
        raise
    finally:
        one.close()


@contextmanager
def witnessed(plane: Plane) -> Iterator[Witness]:
    """Check everything that happens in the block; there must be no violations."""
    with Witness(plane) as witness:
        yield witness
        settled(plane.api, witness)


def settled(api: Api, witness: Witness) -> Verdict:
    """Wait until the cluster is quiet, and check that there were no violations."""
    until_quiet(api)
    verdict = witness.verdict()
    print(verdict)
    assert not verdict.faults, verdict.faults
    return verdict


def make_templates(api: Api, space: str, device_class: str = OUR_CLASS) -> None:
    """The templates that the pods here use; those of the stock class begin with ``stock-``."""
    for name, profile, count in (
        ("one", "1g.10gb", 1),
        ("two", "2g.20gb", 1),
        ("three", "3g.40gb", 1),
        ("pair", "1g.10gb", 2),
        ("whole", "7g.80gb", 1),
    ):
        with suppress_conflict():
            if device_class == OUR_CLASS:
                request = device_request(OUR_CLASS, count=count)
                made = template(name, request, config=[wants(profile=profile)])
            else:
                request = device_request(MIG_CLASS, profile=profile, count=count)
                made = template(f"stock-{name}", request)
            api.create(templates_in(space), made)


def make_urgent(api: Api) -> None:
    """A class of pods that are served before others."""
    urgent = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "urgent"},
        "value": 1000,
    }
    with suppress_conflict():
        api.create("/apis/scheduling.k8s.io/v1/priorityclasses", urgent)


def make_claim(api: Api, space: str, name: str, profile: str) -> Json:
    """A claim of our class without a template."""
    made = claim(name, device_request(OUR_CLASS), config=[wants(profile=profile)])
    return api.create(claims_in(space), made)


def make_pod(
    api: Api, space: str, name: str, *templates: str, shared: Sequence[str] = (), **what: object
) -> Json:
    """A pod with claims from templates, or with existing claims."""
    return api.create(pods_in(space), pod(name, templates, shared, **what))  # type: ignore[arg-type]


def remove_pod(api: Api, space: str, name: str) -> None:
    """Delete a pod at once."""
    api.delete(f"{pods_in(space)}/{name}?gracePeriodSeconds=0")


def running(api: Api, space: str) -> list[str]:
    """The pods that run."""
    found = api.items(pods_in(space))
    return [
        one["metadata"]["name"]
        for one in found
        if one["status"].get("phase") == "Running" and lives(one)
    ]


def until_run(api: Api, space: str, *names: str) -> None:
    """Wait until all of these pods run."""
    until(f"{names} run in {space}", lambda: set(names) <= set(running(api, space)))


def holder(api: Api) -> str:
    """Who leads, or led last."""
    found = api.find(LEASE)
    return "" if found is None else str(found["spec"].get("holderIdentity") or "")


def condition(api: Api, space: str, name: str) -> Json | None:
    """The messages of slicewise to a pod."""
    found = api.get(f"{pods_in(space)}/{name}")
    conditions = {one["type"]: one for one in found["status"].get("conditions", [])}
    return conditions.get("slicewise.dev/Placed")


def _is_full(names: set[str]) -> bool:
    """Whether the pods that run leave no room for another of `play`."""
    return names >= {"c", "d"} or (names >= {"a", "b"} and not names.isdisjoint({"c", "d"}))


def play(api: Api, space: str, pause: float = 0.0) -> None:
    """Five pods for a node with two GPUs: one of two claims, one of a claim with two devices, two
    of which one has to wait until the other is deleted, and one that is deleted early, after
    ``pause`` seconds. All that are not deleted run in the end. When writes fail, the two that need
    a whole GPU may both come first, and the others wait for the deletion.
    """
    make_templates(api, space)
    make_pod(api, space, "a", "three", "one")
    make_pod(api, space, "b", "pair")
    make_pod(api, space, "c", "whole")
    make_pod(api, space, "d", "whole")
    make_pod(api, space, "gone", "one")
    time.sleep(pause)
    remove_pod(api, space, "gone")
    until("no other pod fits", lambda: _is_full(set(running(api, space))))
    first, *_ = sorted({"c", "d"} & set(running(api, space)))
    [other] = {"c", "d"} - {first}
    remove_pod(api, space, first)
    until_run(api, space, "a", "b", other)


def play_with(
    api: Api, space: str, one: Living, faults: dict[int, Fault], pause: float = 0.0
) -> list[Write]:
    """Create and delete the pods with these faults; returns the writes."""
    one.proxy.begin(faults)
    play(api, space, pause)
    until_quiet(api)
    writes = list(one.proxy.writes)
    one.proxy.begin()
    clear(api, space)
    return writes


def sample(steps: Sequence[T], count: int) -> list[T]:
    """Some of many steps, spread evenly; all of them in a long run."""
    if ROUNDS or len(steps) <= count:
        return list(steps)
    return [steps[i * (len(steps) - 1) // (count - 1)] for i in range(count)]


class Load(threading.Thread):
    """Pods that come and go at random until they are stopped."""

    def __init__(
        self,
        api: Api,
        space: str,
        templates: Sequence[str],
        most: int,
        seed: int = 0,
        pause: float = 0.05,
        prefix: str = "l",
    ) -> None:
        super().__init__(daemon=True)
        self._api, self._space, self._templates = api, space, templates
        self._most, self._pause, self._prefix = most, pause, prefix
        self._chance = random.Random(seed)
        self._stop_it = threading.Event()
        self.made = 0
        self.ran = 0
        """Pods that were seen running."""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            there: dict[str, bool] = {}
            while not self._stop_it.wait(self._pause):
                with suppress(ApiError, httpx.HTTPError):
                    self._step(there)
        except BaseException as error:
            self.error = error
            raise

    def _step(self, there: dict[str, bool]) -> None:
        if len(there) < self._most:
            name = f"{self._prefix}{self.made}"
            many = 2 if self._chance.random() < 0.3 else 1
            make_pod(self._api, self._space, name, *self._chance.choices(self._templates, k=many))
            there[name] = False
            self.made += 1
            return
        for name in running(self._api, self._space):
            if there.get(name) is False:
                there[name] = True
                self.ran += 1
        victims = [name for name, ran in there.items() if ran] or (
            list(there) if self._chance.random() < 0.05 else []
        )
        if victims:
            name = self._chance.choice(victims)
            remove_pod(self._api, self._space, name)
            del there[name]

    def end(self) -> None:
        """Stop creating and deleting pods."""
        self._stop_it.set()
        self.join()
        assert self.error is None
