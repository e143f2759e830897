"""Carrying out what is planned, step by step, with patience: attempts, growing waits, giving up."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from slicewise.agent.cdi import Cdi
from slicewise.agent.driver import GPU_NOT_FOUND, At, DriverError, GpuReading
from slicewise.agent.node import SENTENCE, Node
from slicewise.agent.planning import (
    Do,
    Step,
    known_by,
    own_part,
    toward_absent,
    toward_evicted,
    toward_present,
)
from slicewise.agent.record import Key, Own, Record, RecordError, Stage
from slicewise.agent.wanted import Desired, Evicted, Wanted

_log = logging.getLogger("slicewise.agent")

CREATE_ATTEMPTS = 8
TAKEN_ATTEMPTS = 4
"""So often is looked whether slices that somebody else has become free."""
DESTROY_ATTEMPTS = 10
LONGEST_WAIT = 60.0
SELDOM = 300.0
"""How often destroying is tried once an instance is quarantined."""
_MOST_STEPS = 40


class Phase(StrEnum):
    """How far an instance has got, in the service's words."""

    CREATING = "creating"
    ACTIVE = "active"
    RELEASING = "releasing"
    GONE = "gone"
    FAILED = "failed"
    QUARANTINED = "quarantined"


@dataclass
class Standing:
    """How it stands with one thing that is wanted."""

    phase: Phase | None = None
    """None while there is nothing to say."""
    uuid: str = ""
    detail: str = ""
    attempts: int = 0
    due: float = -math.inf
    """When to try next."""


def growing_wait(attempts: int, chance: random.Random, longest: float = LONGEST_WAIT) -> float:
    """1, 2, 4, ... seconds up to the longest, give or take a fifth."""
    # No power of a large number: whoever waits for days has made many attempts.
    wait = longest if attempts > 16 else min(2.0 ** max(attempts - 1, 0), longest)
    return wait * chance.uniform(0.8, 1.2)


class Carrier:
    """Brings the node to what is wanted, as far as it can be brought."""

    def __init__(
        self,
        node: Node,
        record: Record,
        cdi: Cdi | None,
        clock: Callable[[], float],
        chance: random.Random,
        told: Callable[[bool], None] = lambda urgent: None,
    ) -> None:
        """``told`` is called when there is news to report, and whether it is urgent."""
        self.node = node
        self.record = record
        self.desired = Desired()
        self._cdi = cdi
        self._clock = clock
        self._chance = chance
        self._told = told
        self._standings: dict[Wanted | Evicted, Standing] = {}
        self._fresh: set[str] = set()
        """GPUs that were read in this round and not touched since."""

    def take(self, desired: Desired) -> None:
        """What is wanted from now on."""
        self.desired = desired
        items: list[Wanted | Evicted] = [*desired.instances, *desired.evict]
        before = {_identity(item): standing for item, standing in self._standings.items()}
        self._standings = {
            item: before.get(_identity(item)) or Standing() for item in dict.fromkeys(items)
        }

    def standing(self, item: Wanted | Evicted) -> Standing:
        """How it stands with something that is wanted."""
        return self._standings[item]

    def due(self) -> float:
        """When the next attempt is to be made."""
        return min((s.due for s in self._standings.values()), default=math.inf)

    def round(self, looked: bool, stop: Callable[[], bool] = lambda: False) -> None:
        """Do all that is due; after a look, see to what was finished as well."""
        # What a look has read is as fresh as can be.
        self._fresh = {gpu for gpu in self.node.gpus if looked and self.node.is_read(gpu)}
        if looked:
            for standing in self._standings.values():
                if standing.phase in (Phase.ACTIVE, Phase.GONE, None):
                    standing.due = -math.inf
        # What leaves makes room for what comes.
        for item in sorted(self._standings, key=_rank):
            if stop():
                return
            if self._clock() >= self._standings[item].due:
                self._pursue(item)
        self._tidy()

    def _pursue(self, item: Wanted | Evicted) -> None:
        """One attempt: steps until it is done, or something is in the way."""
        standing = self._standings[item]
        before = (standing.phase, standing.uuid, standing.detail)
        claiming = False
        try:
            for _ in range(_MOST_STEPS):
                gpu = self._reading(item)
                if gpu is None:
                    break
                step = self._plan(item, gpu)
                if self._settled(item, step, gpu):
                    break
                claiming = step.do is Do.CLAIM
                if not claiming:
                    self._say_begun(item)
                self._fresh.discard(item.gpu)
                self._carry_out(item, step)
            else:
                self._again(item, f"{item.key} does not come to rest")
        except (DriverError, RecordError) as error:
            self._fresh.discard(item.gpu)
            self._withdraw_intent(item)
            if claiming and isinstance(item, Wanted) and item.present:
                # It is there and in use: a full disk is no reason to call it unmade.
                _log.warning("%s cannot be taken over yet: %s", item.uuid, error)
                self._put_off(item)
            else:
                self._again(item, str(error))
        if (standing.phase, standing.uuid, standing.detail) != before:
            self._told(True)

    def _reading(self, item: Wanted | Evicted) -> GpuReading | None:
        """The GPU as it is, or None where no more can be said of the item."""
        if item.gpu in self._fresh and item.gpu in self.node.seen:
            return self.node.seen[item.gpu]
        try:
            if self.node.is_absent(item.gpu):
                raise DriverError(GPU_NOT_FOUND, "nvmlDeviceGetCount", f"{item.gpu} is not here")
            reading = self.node.read(item.gpu)
        except DriverError as error:
            if not isinstance(item, Wanted):
                raise
            own = self.record.get(item.key)
            ours = own is not None and own_part(own) == item.part
            if item.present and (item.uuid or (ours and own and own.stage is Stage.WHOLE)):
                # It was there, and whether it still is nobody knows: nothing is said.
                self._put_off(item)
                return None
            known = item.present or ours or item.uuid
            if error.code == GPU_NOT_FOUND and not known:
                # Never heard of, and on a GPU that is not here.
                self._finish(item, Phase.GONE)
                return None
            raise
        self._fresh.add(item.gpu)
        return reading

    def _plan(self, item: Wanted | Evicted, gpu: GpuReading) -> Step:
        listed = {wanted.part for wanted in self.desired.instances}
        if isinstance(item, Evicted):
            return toward_evicted(item, gpu, self.record, listed)
        if item.present:
            leaving = {wanted.part for wanted in self.desired.instances if not wanted.present}
            return toward_present(item, gpu, self.record, leaving)
        return toward_absent(item, gpu, self.record, listed)

    def _settled(self, item: Wanted | Evicted, step: Step, gpu: GpuReading) -> bool:
        """Deal with a step that needs no doing; False for one that does."""
        if step.do is Do.NOTHING:
            if isinstance(item, Evicted) or not item.present:
                self._finish(item, Phase.GONE)
            else:
                self._finish(item, Phase.ACTIVE, step.uuid, self._offer(item, gpu, step.uuid))
        elif step.do is Do.WAIT:
            self._withdraw_intent(item)
            leaving = "being released" in step.reason
            self._again(item, step.reason, TAKEN_ATTEMPTS if step.taken and not leaving else 0)
        elif step.do is Do.REFUSE:
            self._withdraw_intent(item)
            if gpu.mig is False and item.gpu in self.node.remarks:
                # It is to be switched on, and somebody keeps it from that.
                self._again(item, self.node.remarks[item.gpu])
            else:
                self._give_up(item, step.reason)
        elif self.node.trouble:
            self._put_off(item)
            self._standings[item].detail = self.node.trouble
        else:
            return False
        return True

    def _carry_out(self, item: Wanted | Evicted, step: Step) -> None:
        """One step; each leaves behind what the next is planned from."""
        driver, key = self.node.driver, item.key
        at = step.at or At(item.gpu, -1, -1, item.start)
        match step.do:
            case Do.CLAIM:
                stage = Stage.WHOLE if step.uuid else Stage.MADE
                self.record.put(_own(item, step.size, stage, at.id, step.uuid))
                _log.info("%s is taken over as %s", step.uuid or key, key)
            case Do.INTEND:
                self.record.put(_own(item, step.size))
            case Do.MAKE:
                driver.create_gpu_instance(item.gpu, at.profile_id, item.start, step.size)
            case Do.NOTE_MADE:
                self.record.advance(key, Stage.MADE, at.id)
            case Do.MAKE_COMPUTE:
                driver.create_compute_instance(at)
            case Do.NOTE_WHOLE:
                self.record.advance(key, Stage.WHOLE, at.id, step.uuid)
            case Do.END_COMPUTE:
                assert step.compute is not None
                if self._cdi is not None:
                    self._cdi.withdraw(step.compute.uuid)
                driver.destroy_compute_instance(at, step.compute)
            case Do.NOTE_BARE:
                self.record.advance(key, Stage.BARE, at.id)
            case Do.END:
                driver.destroy_gpu_instance(at)
            case Do.FORGET:
                own = self.record.get(key)
                if own is not None and own.stage is Stage.WHOLE:
                    _log.warning("%s (%s) is gone: somebody else destroyed it", own.uuid, key)
                self.record.drop(key)
            case _:
                raise AssertionError(step.do)

    def _withdraw_intent(self, item: Wanted | Evicted) -> None:
        """Take an intent back if nothing came of it, or what others make there would seem ours."""
        own = self.record.get(item.key)
        if own is None or own.stage is not Stage.INTENT:
            return
        with contextlib.suppress(DriverError, RecordError):
            gpu = self.node.read(item.gpu)
            there = gpu.at(item.profile, item.start)
            if there is None or not own.is_it(there):
                self.record.drop(item.key)

    def _say_begun(self, item: Wanted | Evicted) -> None:
        """Let it be known that work has begun."""
        if not isinstance(item, Wanted):
            return
        standing = self._standings[item]
        begun = Phase.CREATING if item.present else Phase.RELEASING
        if standing.phase in (None, Phase.ACTIVE, Phase.GONE):
            if standing.phase is Phase.ACTIVE:
                standing.detail = "it was gone or changed, and is being made again"
                standing.attempts = 0
            standing.phase, standing.uuid = begun, ""
            self._told(False)

    def _finish(
        self, item: Wanted | Evicted, phase: Phase, uuid: str = "", detail: str = ""
    ) -> None:
        standing = self._standings[item]
        if standing.phase is not phase and isinstance(item, Wanted):
            word = f"is there: {uuid}" if phase is Phase.ACTIVE else "is gone"
            _log.info("%s for %s %s", item.key, item.allocation, word)
        if standing.attempts and phase is Phase.ACTIVE and not detail:
            detail = f"after {standing.attempts} attempts that failed"
        standing.phase, standing.uuid, standing.detail = phase, uuid, detail
        if phase is not Phase.ACTIVE:
            standing.attempts = 0
        standing.due = math.inf

    def _again(self, item: Wanted | Evicted, reason: str, most: int = 0) -> None:
        """An attempt failed: try again later, or give up where that may be done."""
        standing = self._standings[item]
        standing.attempts += 1
        standing.detail = reason[:SENTENCE]
        attempts = standing.attempts
        standing.due = self._clock() + growing_wait(attempts, self._chance)
        creating = isinstance(item, Wanted) and item.present
        if creating:
            standing.phase = Phase.CREATING
            if attempts >= (most or CREATE_ATTEMPTS):
                self._give_up(item, f"given up after {attempts} attempts: {reason}")
                return
        else:
            standing.phase = Phase.RELEASING
            if attempts >= DESTROY_ATTEMPTS:
                standing.phase = Phase.QUARANTINED
                standing.due = self._clock() + growing_wait(LONG_AGO, self._chance, SELDOM)
        doing = "making" if creating else "destroying"
        _log.warning("%s %s failed, attempt %d: %s", doing, item.key, attempts, reason)

    def _put_off(self, item: Wanted | Evicted) -> None:
        """Try again later; that is no attempt that failed, and nothing is said of it."""
        self._standings[item].due = self._clock() + growing_wait(LONG_AGO, self._chance)

    def _give_up(self, item: Wanted | Evicted, reason: str) -> None:
        standing = self._standings[item]
        if not (isinstance(item, Wanted) and item.present):
            self._again(item, reason)
            return
        standing.phase, standing.uuid, standing.due = Phase.FAILED, "", math.inf
        standing.detail = reason[:SENTENCE]
        _log.error("%s for %s failed: %s", item.key, item.allocation, reason)

    def _offer(self, item: Wanted, gpu: GpuReading, uuid: str) -> str:
        """Write the instance's CDI file; what kept it from being written is said, no more."""
        there = gpu.at(item.profile, item.start)
        if self._cdi is None or there is None:
            return ""
        try:
            self._cdi.offer(gpu, there, uuid)
        except RecordError as error:
            return f"it can be used, but not by containers: {error}"[:SENTENCE]
        return ""

    def _tidy(self) -> None:
        """Forget what is of no more use: entries of what is gone, and their CDI files."""
        listed = {item.key for item in self._standings}
        for own in self.record:
            if own.key in listed or own.gpu not in self._fresh:
                continue
            there = self.node.seen[own.gpu].at(own.profile, own.start)
            if there is None or not own.is_it(there):
                with contextlib.suppress(RecordError):
                    self.record.drop(own.key)
        if self._cdi is not None:
            self._cdi.keep([own.uuid for own in self.record if own.stage is Stage.WHOLE])

    def foreign(self) -> list[dict[str, object]]:
        """What is on the GPUs and not wanted: of others, or ours that nobody lists any more."""
        listed = {(item.part, item.key) for item in self.desired.instances}
        found: list[dict[str, object]] = []
        for gpu in self.node.gpus:
            reading = self.node.seen.get(gpu)
            for there in reading.instances if reading is not None else ():
                key = Key(gpu, there.profile, there.start)
                own = self.record.get(key)
                ours = own is not None and own.is_it(there)
                if own is not None and ours and (own_part(own), key) in listed:
                    continue
                stray = own is not None and ours and own.allocation != ""
                found.append(
                    {
                        "gpu": gpu,
                        "uuid": known_by(own, there),
                        "profile": there.profile,
                        "start": there.start,
                        "size": there.size,
                        "why": "stray" if stray else "foreign",
                    }
                )
        return found + self._unseen(listed)

    def _unseen(self, listed: set[tuple[tuple[str, int], Key]]) -> list[dict[str, object]]:
        """What the record alone knows of, on GPUs that could not be read since the start."""
        return [
            {
                "gpu": own.gpu,
                "uuid": own.uuid,
                "profile": own.profile,
                "start": own.start,
                "size": own.size,
                "why": "stray" if own.allocation else "foreign",
            }
            for own in self.record
            if own.gpu in self.node.gpus
            and own.gpu not in self.node.seen
            and own.stage is not Stage.INTENT
            and (own_part(own), own.key) not in listed
        ]


LONG_AGO = 100
"""So many attempts that the wait no longer grows."""


def _own(
    item: Wanted | Evicted, size: int, stage: Stage = Stage.INTENT, id: int | None = None,
    uuid: str = "",
) -> Own:  # fmt: skip
    allocation, index = item.part if isinstance(item, Wanted) else ("", 0)
    return Own(item.gpu, item.profile, item.start, size, allocation, index, stage, id, uuid)


def _identity(item: Wanted | Evicted) -> object:
    """What makes two wishes the same one: the UUID is learnt on the way."""
    if isinstance(item, Wanted):
        return (item.part, item.key, item.size, item.present)
    return item


def _rank(item: Wanted | Evicted) -> tuple[int, str, int, str, int]:
    leaving = isinstance(item, Wanted) and not item.present
    order = 0 if leaving else 1 if isinstance(item, Evicted) else 2
    part = item.part if isinstance(item, Wanted) else ("", 0)
    return (order, item.gpu, item.start, *part)
