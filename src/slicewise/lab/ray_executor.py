"""Runs jobs on a Ray cluster: every job is a task, and the jobs of a lost node run again.

Only jobs and results are sent. Each node needs slicewise, NumPy and the packages of the policies
in the versions of the driver. A node that differs is an error that names it; its results are not
used.
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
from slicewise.lab.executors import Done, Job, Samples, run_job, share_tables
from slicewise.lab.experiment import Experiment, Tick
from slicewise.lab.fingerprint import digest, made_with

_TASKS_PER_CORE = 2
"""Tasks per core: the next job is queued while a result is sent."""

_HOST_AND_PORT = re.compile(r"(?:ray://)?\[?(?P<host>[^/\[\]]+)\]?:(?P<port>\d{1,5})")
_CONNECT_TIMEOUT_S = 10.0

_RETRIES = 3
"""How often a job is retried after its worker or node was lost."""


class RayExecutor:
    """Runs jobs on the nodes of a running Ray cluster."""

    def __init__(self, address: str) -> None:
        """Take the address: ``HOST:PORT``, or ``auto`` for the cluster of this machine."""
        self.address = address

    def work(
        self, experiments: Sequence[Experiment], jobs: Sequence[Job], tick: Tick
    ) -> Generator[Done]:
        """Run all jobs; progress is reported per job."""
        if not jobs:
            return
        ray = _connect(self.address)
        try:
            yield from _work(ray, list(experiments), jobs, tick)
        finally:
            ray.shutdown()


def _connect(address: str) -> Any:
    """Connect to Ray, with its usage reports and its output turned off."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise SlicewiseError("ray is not installed: install slicewise[ray]") from None
    _check_reachable(address)
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except Exception as error:  # Ray raises many unrelated classes
        raise _unreachable(address, error) from None
    return ray


def _check_reachable(address: str) -> None:
    """Raise if the address does not accept connections; Ray would retry for minutes."""
    found = _HOST_AND_PORT.fullmatch(address)
    if found is None:
        return  # "auto", or text that Ray rejects at once
    try:
        socket.create_connection((found["host"], int(found["port"])), _CONNECT_TIMEOUT_S).close()
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
    pickled = pickle.dumps(experiments)
    key = hashlib.sha256(pickled).hexdigest()
    held = [ray.put(pickled)]  # in a list, or every task would fetch it before it starts
    task = ray.remote(num_cpus=1, max_retries=_RETRIES, scheduling_strategy="SPREAD")(_make_task())
    remaining = iter(jobs)
    running: dict[Any, Job] = {}
    while True:
        cores = int(ray.cluster_resources().get("CPU", 0))  # nodes may join and leave
        if not cores:
            raise SlicewiseError("the Ray cluster has no CPU to work on")
        while len(running) < _TASKS_PER_CORE * cores and (job := next(remaining, None)) is not None:
            means = digest(experiments[job.experiment], job.mix, job.entrant)
            running[task.remote(key, held, made_with(), means, tuple(job))] = job
        if not running:
            return
        for reference in ray.wait(list(running))[0]:
            job = running.pop(reference)
            node, samples = _result(ray, reference)
            tick(len(job.runs) * experiments[job.experiment].units(job.mix))
            yield Done(job, samples, f"node {node}")


def _result(ray: Any, reference: Any) -> tuple[str, Samples]:
    """Return the node and samples of a task, or raise its error."""
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


def _make_task() -> Callable[..., tuple[str, Samples | Exception | str]]:
    """Return the task as a closure, which Ray sends as code: a node may lack slicewise."""

    def task(*work: Any) -> tuple[str, Samples | Exception | str]:
        import ray

        node = ray.get_runtime_context().get_node_id()
        try:
            from slicewise.lab.ray_executor import on_node
        except ImportError as error:
            return node, f"slicewise cannot be used there ({error}); install slicewise[lab,ray]"
        return node, on_node(*work)

    return task


_received: dict[str, list[Experiment]] = {}
"""On a node: the experiments of the current sweep, which keep their compiled tables."""


def on_node(
    key: str, held: list[Any], versions: dict[str, str], means: str, plain_job: tuple[Any, ...]
) -> Samples | Exception | str:
    """On a node: return the samples of a job, an error, or why the node cannot be used."""
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
            return "a policy decides differently there; install the same packages on every node"
        return run_job(experiments, job, lambda units: None)
    except Exception as error:
        return error


def _unpacked(key: str, reference: Any) -> list[Experiment]:
    if key not in _received:
        import ray

        _received.clear()
        _received[key] = share_tables(pickle.loads(ray.get(reference)))
    return _received[key]
