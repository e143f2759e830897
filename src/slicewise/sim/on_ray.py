"""A Ray cluster as the crew: every job is a task, and what a lost node was doing is done again.

Only jobs and results travel. Each node needs slicewise, NumPy and the packages of the policies
installed in the versions of the machine that asks; a node where something differs is named, and
nothing it computed is used.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import socket
from collections.abc import Callable, Generator, Sequence
from typing import Any

from slicewise.core.errors import SlicewiseError
from slicewise.sim.crew import Done, Job, Samples, perform, sharing_tables
from slicewise.sim.experiment import Experiment, Tick
from slicewise.sim.meaning import digest, made_with

_AHEAD = 2
"""Tasks under way for each core: while a result travels, the next job is there already."""

_HOST_AND_PORT = re.compile(r"(?:ray://)?\[?(?P<host>[^/\[\]]+)\]?:(?P<port>\d{1,5})")
_PATIENCE_S = 10.0

_RETRIES = 3
"""How often a job is begun anew after its worker or node was lost."""


class OnRay:
    """The nodes of a Ray cluster that is running already."""

    def __init__(self, address: str) -> None:
        """Remember the address: ``HOST:PORT``, or ``auto`` for the cluster of this machine."""
        self.address = address

    def work(
        self, experiments: Sequence[Experiment], jobs: Sequence[Job], tick: Tick
    ) -> Generator[Done]:
        """Do all jobs; a tick is a whole job here."""
        if not jobs:
            return
        ray = _connect(self.address)
        try:
            yield from _work(ray, list(experiments), jobs, tick)
        finally:
            ray.shutdown()


def _connect(address: str) -> Any:
    """Ray, connected; it reports nothing to anybody and prints nothing."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise SlicewiseError("ray is not installed: install slicewise[ray]") from None
    _knock(address)
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # there is no common class of what may go wrong here
        raise _unreachable(address, error) from None
    return ray


def _knock(address: str) -> None:
    """See that somebody is there: Ray itself would go on trying for minutes."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None:
        return  # "auto", or something that Ray refuses at once
    try:
        socket.create_connection((found["host"], int(found["port"])), _PATIENCE_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: Exception) -> SlicewiseError:
    why = getattr(error, "strerror", None) or " ".join(str(error).split())
    return SlicewiseError(
        f"no Ray cluster can be joined at {address!r}: {why or type(error).__name__}"
    )


def _work(
    ray: Any, experiments: list[Experiment], jobs: Sequence[Job], tick: Tick
) -> Generator[Done]:
    parcel = pickle.dumps(experiments)
    key = hashlib.sha256(parcel).hexdigest()
    held = [ray.put(parcel)]  # in a list, or every task would fetch it before it begins
    task = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(_errand())
    waiting = iter(jobs)
    under_way: dict[Any, Job] = {}
    while True:
        cores = int(ray.cluster_resources().get("CPU", 0))  # nodes come and go
        if not cores:
            raise SlicewiseError("the Ray cluster has no CPU to work on")
        while len(under_way) < _AHEAD * cores and (job := next(waiting, None)) is not None:
            means = digest(experiments[job.experiment], job.mix, job.entrant)
            under_way[task.remote(key, held, made_with(), means, tuple(job))] = job
        if not under_way:
            return
        for reference in ray.wait(list(under_way))[0]:
            job = under_way.pop(reference)
            node, samples = _result(ray, reference)
            tick(len(job.runs) * experiments[job.experiment].units(job.mix))
            yield Done(job, samples, f"node {node}")


def _result(ray: Any, reference: Any) -> tuple[str, Samples]:
    """What a task brought back; what went wrong there is raised here."""
    try:
        node, report = ray.get(reference)
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise SlicewiseError(
            f"a job was lost {_RETRIES + 1} times on the Ray cluster: {why[0]}"
        ) from None
    if isinstance(report, str):
        raise SlicewiseError(f"Ray node {node}: {report}")
    if isinstance(report, Exception):
        raise report
    return node, report


def _errand() -> Callable[..., tuple[str, Samples | Exception | str]]:
    """The task, made here so that Ray sends its code along: slicewise may be missing there."""

    def errand(*work: Any) -> tuple[str, Samples | Exception | str]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        try:
            from slicewise.sim.on_ray import on_node
        except ImportError as error:
            return node, f"slicewise cannot be used there ({error}); install slicewise[lab,ray]"
        return node, on_node(*work)

    return errand


_received: dict[str, list[Experiment]] = {}
"""On a node, the experiments of the sweep at hand; they keep their compiled tables."""


def on_node(
    key: str, held: list[Any], versions: dict[str, str], means: str, plain_job: tuple[Any, ...]
) -> Samples | Exception | str:
    """On a node: the samples of a job, an error to raise, or why the node cannot be used."""
    for package, here in made_with().items():
        if here != versions[package]:
            return f"{package} is {here} there and {versions[package]} here; install the same"
    try:
        experiments = _unpacked(key, held[0])
    except (ImportError, AttributeError) as error:
        return f"a policy is missing there ({error}); install its package on every node"
    job = Job(*plain_job)
    try:
        if digest(experiments[job.experiment], job.mix, job.entrant) != means:
            return "a policy decides otherwise there; install the same packages on every node"
        return perform(experiments, job, lambda units: None)
    except Exception as error:
        return error


def _unpacked(key: str, reference: Any) -> list[Experiment]:
    if key not in _received:
        import ray

        _received.clear()
        _received[key] = sharing_tables(pickle.loads(ray.get(reference)))
    return _received[key]
