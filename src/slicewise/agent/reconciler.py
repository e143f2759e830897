"""Carries out the planned steps: one attempt per item that is due, with backoff after failures.

What to do is decided in `planning`. This module executes the steps, retries, and gives up in the
end. It runs in the driver thread only.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from slicewise.agent.cdi import Cdi
from slicewise.agent.desired_state import Desired, DesiredInstance, Eviction
from slicewise.agent.driver import GPU_NOT_FOUND, DriverError, GpuReading, InstanceRef
from slicewise.agent.node_state import MAX_MESSAGE, NodeState
from slicewise.agent.planning import Action, Step, plan_absent, plan_eviction, plan_present
from slicewise.agent.record import Record, RecordedInstance, RecordError, Stage

_log = logging.getLogger("slicewise.agent")

CREATE_ATTEMPTS = 8
"""Failed attempts after which the agent gives up creating an instance."""
OCCUPIED_ATTEMPTS = 4
"""The same while a foreign or stray instance occupies the slices."""
DESTROY_ATTEMPTS = 10
"""Failed attempts after which an instance is quarantined."""
MAX_BACKOFF = 60.0
QUARANTINE_SECONDS = 300.0
"""Time between attempts to destroy a quarantined instance."""
_MAX_STEPS = 40
_MANY_ATTEMPTS = 100
"""A number of attempts at which the backoff has reached its maximum."""

Item = DesiredInstance | Eviction
"""An item of the desired state."""


class Phase(StrEnum):
    """The phase of an instance, as named in the service's API."""

    CREATING = "creating"
    ACTIVE = "active"
    RELEASING = "releasing"
    GONE = "gone"
    FAILED = "failed"
    QUARANTINED = "quarantined"


@dataclass
class Progress:
    """The progress of one item of the desired state."""

    phase: Phase | None = None
    """None while there is nothing to report."""
    uuid: str = ""
    detail: str = ""
    attempts: int = 0
    """Failed attempts so far."""
    due: float = -math.inf
    """Time of the next attempt."""


def backoff(attempts: int, rng: random.Random, longest: float = MAX_BACKOFF) -> float:
    """Exponential backoff: 1, 2, 4, ... seconds up to ``longest``, with 20 % jitter."""
    # Avoid powers of large numbers: an outage of days adds up to many attempts.
    wait = longest if attempts > 16 else min(2.0 ** max(attempts - 1, 0), longest)
    return wait * rng.uniform(0.8, 1.2)


class Reconciler:
    """Brings the instances of the node in line with the desired state."""

    def __init__(
        self,
        node: NodeState,
        record: Record,
        cdi: Cdi | None,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.node = node
        self.record = record
        self.desired = Desired()
        self._cdi = cdi
        self._clock = clock
        self._rng = rng
        self.on_change: Callable[[bool], None] = lambda urgent: None
        """Called when there is something to report; the argument means urgent."""
        self._progress: dict[Item, Progress] = {}
        self._fresh: set[str] = set()
        """GPUs that were read in this round and not changed since."""

    def set_desired(self, desired: Desired) -> None:
        """Replace the desired state; items that stay keep their progress."""
        noticed = {(item.part, item.notice) for item in self.desired.instances}
        self.desired = desired
        for item in desired.instances:
            if item.notice and item.present and (item.part, item.notice) not in noticed:
                _log.warning("%s for %s ends at %s", item.key, item.allocation, item.notice)
        items: list[Item] = [*desired.instances, *desired.evict]
        before = {_identity(item): progress for item, progress in self._progress.items()}
        self._progress = {
            item: before.get(_identity(item)) or Progress() for item in dict.fromkeys(items)
        }

    def progress(self, item: Item) -> Progress:
        """The progress of an item of the desired state."""
        return self._progress[item]

    def next_due(self) -> float:
        """Time of the next attempt."""
        return min((progress.due for progress in self._progress.values()), default=math.inf)

    def reconcile(self, refreshed: bool, stop: Callable[[], bool] = lambda: False) -> None:
        """Attempt every item that is due.

        ``refreshed`` tells that all GPUs were just read: finished items are then checked as well.
        """
        # Readings of a refresh are current: these GPUs need not be read again.
        self._fresh = {gpu for gpu in self.node.gpus if refreshed and self.node.is_read(gpu)}
        if refreshed:
            for progress in self._progress.values():
                if progress.phase in (Phase.ACTIVE, Phase.GONE, None):
                    progress.due = -math.inf
        # Releases go first: they free slices for new instances.
        for item in sorted(self._progress, key=_order):
            if stop():
                return
            if self._clock() >= self._progress[item].due:
                self._attempt(item)
        self._clean_up()

    def _attempt(self, item: Item) -> None:
        """Make one attempt: execute steps until the item is done or blocked."""
        progress = self._progress[item]
        before = (progress.phase, progress.uuid, progress.detail)
        adopting = False
        try:
            for _ in range(_MAX_STEPS):
                gpu = self._read_gpu(item)
                if gpu is None:
                    break
                step = self._plan(item, gpu)
                if self._concludes(item, step, gpu):
                    break
                adopting = step.action is Action.ADOPT
                if not adopting:
                    self._report_started(item)
                self._fresh.discard(item.gpu)
                self._execute(item, step)
            else:
                self._retry_later(item, f"{item.key} is not done after {_MAX_STEPS} steps")
        except (DriverError, RecordError) as error:
            self._fresh.discard(item.gpu)
            self._drop_unused_intent(item)
            if adopting and isinstance(item, DesiredInstance) and item.present:
                # The instance exists and is in use: a full disk must not make it "creating".
                _log.warning("%s cannot be adopted yet: %s", item.uuid, error)
                self._postpone(item)
            else:
                self._retry_later(item, str(error))
        if (progress.phase, progress.uuid, progress.detail) != before:
            self.on_change(True)

    def _read_gpu(self, item: Item) -> GpuReading | None:
        """Return a current reading of the GPU, or None if the attempt ends here."""
        if item.gpu in self._fresh and item.gpu in self.node.readings:
            return self.node.readings[item.gpu]
        try:
            if self.node.is_absent(item.gpu):
                raise DriverError(GPU_NOT_FOUND, "nvmlDeviceGetCount", f"{item.gpu} is not here")
            reading = self.node.read(item.gpu)
        except DriverError as error:
            if not isinstance(item, DesiredInstance):
                raise
            own = self.record.get(item.key)
            ours = own is not None and own.part == item.part
            if item.present and (item.uuid or (ours and own and own.stage is Stage.COMPLETE)):
                # The instance existed and its present state is unknown: report no change.
                self._postpone(item)
                return None
            known = item.present or ours or item.uuid
            if error.code == GPU_NOT_FOUND and not known:
                # The agent never had this instance, and its GPU is not in this node.
                self._finish(item, Phase.GONE)
                return None
            raise
        self._fresh.add(item.gpu)
        return reading

    def _plan(self, item: Item, gpu: GpuReading) -> Step:
        listed = {desired.part for desired in self.desired.instances}
        if isinstance(item, Eviction):
            return plan_eviction(item, gpu, self.record, listed)
        if item.present:
            releasing = {one.part for one in self.desired.instances if not one.present}
            return plan_present(item, gpu, self.record, releasing)
        return plan_absent(item, gpu, self.record, listed)

    def _concludes(self, item: Item, step: Step, gpu: GpuReading) -> bool:
        """Handle a step that ends the attempt; return False if the step must be executed."""
        if step.action is Action.NONE:
            if isinstance(item, Eviction) or not item.present:
                self._finish(item, Phase.GONE)
            else:
                problem = self._write_cdi_file(item, gpu, step.uuid)
                self._finish(item, Phase.ACTIVE, step.uuid, problem)
        elif step.action is Action.WAIT:
            self._drop_unused_intent(item)
            limit = OCCUPIED_ATTEMPTS if step.occupied else CREATE_ATTEMPTS
            self._retry_later(item, step.reason, limit)
        elif step.action is Action.REFUSE:
            self._drop_unused_intent(item)
            if gpu.mig is False and item.gpu in self.node.mig_problems:
                # MIG mode is about to be enabled; what prevents it may pass.
                self._retry_later(item, self.node.mig_problems[item.gpu])
            else:
                self._give_up(item, step.reason)
        elif self.node.conflict:
            self._postpone(item)
            self._progress[item].detail = self.node.conflict
        else:
            return False
        return True

    def _execute(self, item: Item, step: Step) -> None:
        """Execute one step; the next one is planned from its result."""
        driver, key = self.node.driver, item.key
        target = step.target or InstanceRef(item.gpu, -1, -1, item.start)
        match step.action:
            case Action.ADOPT:
                stage = Stage.COMPLETE if step.uuid else Stage.CREATED
                self.record.put(_recorded(item, step.size, stage, target.id, step.uuid))
                _log.info("adopted %s as %s", step.uuid or key, key)
            case Action.RECORD_INTENT:
                self.record.put(_recorded(item, step.size))
            case Action.CREATE_GPU_INSTANCE:
                driver.create_gpu_instance(item.gpu, target.profile_id, item.start, step.size)
            case Action.RECORD_CREATED:
                self.record.advance(key, Stage.CREATED, target.id)
            case Action.CREATE_COMPUTE_INSTANCE:
                driver.create_compute_instance(target)
            case Action.RECORD_COMPLETE:
                self.record.advance(key, Stage.COMPLETE, target.id, step.uuid)
            case Action.DESTROY_COMPUTE_INSTANCE:
                assert step.compute is not None
                if self._cdi is not None:
                    self._cdi.remove(step.compute.uuid)
                driver.destroy_compute_instance(target, step.compute)
            case Action.RECORD_BARE:
                self.record.advance(key, Stage.BARE, target.id)
            case Action.DESTROY_GPU_INSTANCE:
                driver.destroy_gpu_instance(target)
            case Action.FORGET:
                own = self.record.get(key)
                if own is not None and own.stage is Stage.COMPLETE:
                    _log.warning("another program destroyed %s (%s)", own.uuid, key)
                self.record.drop(key)
            case _:
                raise AssertionError(step.action)

    def _drop_unused_intent(self, item: Item) -> None:
        """Drop an intent without an instance: a foreign one created there later would match it."""
        own = self.record.get(item.key)
        if own is None or own.stage is not Stage.INTENT:
            return
        with contextlib.suppress(DriverError, RecordError):
            gpu = self.node.read(item.gpu)
            found = gpu.at(item.profile, item.start)
            if found is None or not own.matches(found):
                self.record.drop(item.key)

    def _report_started(self, item: Item) -> None:
        """Report that work on the item has started."""
        if not isinstance(item, DesiredInstance):
            return
        progress = self._progress[item]
        if progress.phase in (None, Phase.ACTIVE, Phase.GONE):
            if progress.phase is Phase.ACTIVE:
                progress.detail = "the instance was destroyed or changed, and is created again"
                progress.attempts = 0
            progress.phase = Phase.CREATING if item.present else Phase.RELEASING
            progress.uuid = ""
            self.on_change(False)

    def _finish(self, item: Item, phase: Phase, uuid: str = "", detail: str = "") -> None:
        progress = self._progress[item]
        if progress.phase is not phase and isinstance(item, DesiredInstance):
            state = f"is active: {uuid}" if phase is Phase.ACTIVE else "is gone"
            _log.info("%s for %s %s", item.key, item.allocation, state)
        if progress.attempts and phase is Phase.ACTIVE and not detail:
            detail = f"after {progress.attempts} failed attempts"
        progress.phase, progress.uuid, progress.detail = phase, uuid, detail
        if phase is not Phase.ACTIVE:
            progress.attempts = 0
        progress.due = math.inf

    def _retry_later(self, item: Item, reason: str, limit: int = CREATE_ATTEMPTS) -> None:
        """Count a failed attempt: schedule the next one, give up creating, or quarantine."""
        progress = self._progress[item]
        progress.attempts += 1
        progress.detail = reason[:MAX_MESSAGE]
        attempts = progress.attempts
        progress.due = self._clock() + backoff(attempts, self._rng)
        creating = isinstance(item, DesiredInstance) and item.present
        if creating:
            progress.phase = Phase.CREATING
            if attempts >= limit:
                self._give_up(item, f"given up after {attempts} attempts: {reason}")
                return
        else:
            progress.phase = Phase.RELEASING
            if attempts >= DESTROY_ATTEMPTS:
                progress.phase = Phase.QUARANTINED
                progress.due = self._clock() + backoff(
                    _MANY_ATTEMPTS, self._rng, QUARANTINE_SECONDS
                )
        operation = "creating" if creating else "destroying"
        _log.warning("%s %s failed, attempt %d: %s", operation, item.key, attempts, reason)

    def _postpone(self, item: Item) -> None:
        """Try again later without counting or reporting a failed attempt."""
        self._progress[item].due = self._clock() + backoff(_MANY_ATTEMPTS, self._rng)

    def _give_up(self, item: Item, reason: str) -> None:
        """Fail an instance that cannot be created; destroying is retried without end."""
        progress = self._progress[item]
        if not (isinstance(item, DesiredInstance) and item.present):
            self._retry_later(item, reason)
            return
        progress.phase, progress.uuid, progress.due = Phase.FAILED, "", math.inf
        progress.detail = reason[:MAX_MESSAGE]
        _log.error("%s for %s failed: %s", item.key, item.allocation, reason)

    def _write_cdi_file(self, item: DesiredInstance, gpu: GpuReading, uuid: str) -> str:
        """Write the instance's CDI file; return why it could not be written, or ""."""
        found = gpu.at(item.profile, item.start)
        if self._cdi is None or found is None:
            return ""
        try:
            self._cdi.write(gpu, found, uuid)
        except RecordError as error:
            return f"usable, but not by containers: {error}"[:MAX_MESSAGE]
        return ""

    def _clean_up(self) -> None:
        """Drop record entries and CDI files of instances that no longer exist."""
        listed = {item.key for item in self._progress}
        for own in self.record:
            if own.key in listed or own.gpu not in self._fresh:
                continue
            found = self.node.readings[own.gpu].at(own.profile, own.start)
            if found is None or not own.matches(found):
                with contextlib.suppress(RecordError):
                    self.record.drop(own.key)
        if self._cdi is not None:
            complete = [own.uuid for own in self.record if own.stage is Stage.COMPLETE]
            self._cdi.remove_all_except(complete)


def _recorded(
    item: Item, size: int, stage: Stage = Stage.INTENT, id: int | None = None, uuid: str = ""
) -> RecordedInstance:
    allocation, index = item.part if isinstance(item, DesiredInstance) else ("", 0)
    return RecordedInstance(
        item.gpu, item.profile, item.start, size, allocation, index, stage, id, uuid
    )


def _identity(item: Item) -> object:
    """The identity of an item across desired states; a UUID may be added later."""
    if isinstance(item, DesiredInstance):
        return (item.part, item.key, item.size, item.present)
    return item


def _order(item: Item) -> tuple[int, str, int, str, int]:
    """Sort key: releases, then evictions, then new instances."""
    releasing = isinstance(item, DesiredInstance) and not item.present
    order = 0 if releasing else 1 if isinstance(item, Eviction) else 2
    part = item.part if isinstance(item, DesiredInstance) else ("", 0)
    return (order, item.gpu, item.start, *part)
