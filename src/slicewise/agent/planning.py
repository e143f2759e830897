"""The next step towards what is wanted, from what there is: pure, one step at a time.

After every step the GPU is read again and the next step is planned from that. So nothing depends
on what was done before: an agent that died between any two steps goes on as if it had not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from slicewise.agent.driver import At, ComputeReading, GpuReading, InstanceReading
from slicewise.agent.record import Key, Own, Stage
from slicewise.agent.wanted import Evicted, Wanted


class Do(Enum):
    """What is to be done next."""

    NOTHING = "nothing"
    """It is as it should be."""
    CLAIM = "claim"
    """Write down that the instance there is this one."""
    INTEND = "intend"
    MAKE = "make the GPU instance"
    NOTE_MADE = "note its id"
    MAKE_COMPUTE = "make the compute instance"
    NOTE_WHOLE = "note its UUID"
    END_COMPUTE = "destroy the compute instance"
    NOTE_BARE = "note that its compute instance is gone"
    END = "destroy the GPU instance"
    FORGET = "forget it"
    """Take it out of the record: it is not there."""
    WAIT = "wait"
    """Something is in the way that may go away."""
    REFUSE = "refuse"
    """It cannot be had, however long one waits."""


@dataclass(frozen=True)
class Step:
    """A step, and what it is done to."""

    do: Do
    at: At | None = None
    compute: ComputeReading | None = None
    uuid: str = ""
    reason: str = ""
    size: int = 0
    taken: bool = False
    """Whether it waits for slices that others have."""


class Book(Protocol):
    """A record, as far as planning looks into it."""

    def get(self, key: Key) -> Own | None:
        """The own instance at that place."""
        ...


def toward_present(
    item: Wanted, gpu: GpuReading, book: Book, leaving: Collection[tuple[str, int]] = ()
) -> Step:
    """The next step to have an instance; ``leaving`` are the parts that are being released."""
    offer = gpu.profile(item.profile)
    if gpu.mig is not True:
        lacks = "does not support MIG" if gpu.mig is None else "has MIG mode off"
        return Step(Do.REFUSE, reason=f"{gpu.uuid} {lacks}")
    if offer is None or item.start not in offer.starts or item.size != offer.size:
        return Step(
            Do.REFUSE,
            reason=f"the driver of {gpu.uuid} does not offer {item.profile} with {item.size} "
            f"slices at slice {item.start}",
        )
    own, there = book.get(item.key), gpu.at(item.profile, item.start)
    if there is not None and _is_named(item, own, there) and not _is(own, there, item):
        return _claim(item, gpu, there)
    ours = own is not None and own_part(own) == item.part
    if own is not None and there is not None and own.is_it(there):
        if ours:
            return _complete(own, gpu, there)
    elif own is not None and not (ours and own.stage is Stage.INTENT and there is None):
        # Ours is gone, or a stranger's is in its place. What was meant but not made is made now.
        return Step(Do.FORGET)
    blocking = [i for i in gpu.instances if i.overlaps(item.start, item.size)]
    if blocking:
        return Step(Do.WAIT, reason=_in_the_way(gpu, blocking, book, leaving), taken=True)
    if own is None:
        return Step(Do.INTEND, size=item.size)
    return Step(Do.MAKE, At(gpu.uuid, -1, offer.id, item.start), size=item.size)


def _complete(own: Own, gpu: GpuReading, there: InstanceReading) -> Step:
    """The next step for a GPU instance of ours, until it has its compute instance."""
    at = _at(gpu, there)
    if not there.compute:
        return Step(Do.MAKE_COMPUTE if own.stage is Stage.MADE else Do.NOTE_MADE, at)
    if own.stage is Stage.WHOLE:
        return Step(Do.NOTHING, at, uuid=own.uuid)
    if len(there.compute) > 1:
        return Step(
            Do.REFUSE, at,
            reason=f"somebody else made compute instances in {own.key}: there are "
            f"{len(there.compute)}",
        )  # fmt: skip
    return Step(Do.NOTE_WHOLE, at, uuid=there.uuid)


def toward_absent(
    item: Wanted, gpu: GpuReading, book: Book, listed: Collection[tuple[str, int]] = ()
) -> Step:
    """The next step to be rid of an instance; of this one only, not of what took its place.

    What was adopted and released before we heard of it is known by its UUID: the record has it as
    somebody else's, and whose that was does not count unless it is of the ``listed`` parts.
    """
    own, there = book.get(item.key), gpu.at(item.profile, item.start)
    ours = own is not None and own_part(own) == item.part
    if gpu.mig is None and (ours or item.uuid):
        return Step(Do.WAIT, reason=f"{gpu.uuid} does not say whether it has MIG")
    if own is not None and ours:
        if there is not None and own.is_it(there):
            return _dismantle(own, gpu, there)
        return Step(Do.FORGET)
    if there is not None and _is_named(item, own, there) and not _is_listed(own, there, listed):
        return _claim(item, gpu, there)
    return Step(Do.NOTHING)


def toward_evicted(
    item: Evicted, gpu: GpuReading, book: Book, listed: Collection[tuple[str, int]]
) -> Step:
    """The next step to destroy somebody else's instance, if it is exactly the one that was named.

    It is written down first: half destroyed it has no UUID left to be known by. An instance of
    ``listed`` parts is not evicted, whatever its name.
    """
    own, there = book.get(item.key), gpu.at(item.profile, item.start)
    if own is not None and own.allocation == "":
        if there is None or not own.is_it(there):
            return Step(Do.FORGET)
        if own.uuid == item.uuid:
            return _dismantle(own, gpu, there)
        return Step(Do.NOTHING)
    if there is None or known_by(own, there) != item.uuid or _is_listed(own, there, listed):
        return Step(Do.NOTHING)
    return _claim(item, gpu, there)


def _dismantle(own: Own, gpu: GpuReading, there: InstanceReading) -> Step:
    """The next step to destroy an instance: compute instances first, then the GPU instance."""
    at = _at(gpu, there)
    if there.compute:
        return Step(Do.END_COMPUTE, at, compute=there.compute[-1])
    return Step(Do.END if own.stage is Stage.BARE else Do.NOTE_BARE, at)


def known_by(own: Own | None, there: InstanceReading) -> str:
    """The UUID of what is there; one of ours that has lost its compute instance keeps its own."""
    return there.uuid or (own.uuid if own is not None and own.is_it(there) else "")


def own_part(own: Own) -> tuple[str, int]:
    """Which instance of which allocation an own instance is."""
    return own.allocation, own.index


def _claim(item: Wanted | Evicted, gpu: GpuReading, there: InstanceReading) -> Step:
    return Step(Do.CLAIM, _at(gpu, there), uuid=item.uuid, size=there.size)


def _is_named(item: Wanted, own: Own | None, there: InstanceReading) -> bool:
    return item.uuid != "" and item.uuid == known_by(own, there)


def _is_listed(
    own: Own | None, there: InstanceReading, listed: Collection[tuple[str, int]]
) -> bool:
    return own is not None and own.is_it(there) and own_part(own) in listed


def _is(own: Own | None, there: InstanceReading, item: Wanted) -> bool:
    return own is not None and own.is_it(there) and own_part(own) == item.part


def _at(gpu: GpuReading, there: InstanceReading) -> At:
    return At(gpu.uuid, there.id, there.profile_id, there.start)


def _in_the_way(
    gpu: GpuReading,
    blocking: list[InstanceReading],
    book: Book,
    leaving: Collection[tuple[str, int]],
) -> str:
    """Who has the slices, by name."""
    told: list[str] = []
    for there in blocking:
        own = book.get(Key(gpu.uuid, there.profile, there.start))
        if own is None or not own.is_it(there) or own.allocation == "":
            whose = "which is not ours (foreign)"
        elif own_part(own) in leaving:
            whose = f"which is being released by {own.allocation}"
        else:
            whose = f"which was made for {own.allocation}"
        name = there.uuid or f"GPU instance {there.id}"
        place = f"{there.profile or 'unknown profile'} at slice {there.start}"
        told.append(f"{name} ({place}), {whose}")
    return f"its slices on {gpu.uuid} are taken by {' and '.join(told)}"
