"""Decides the next step for an instance: create, complete, adopt, destroy, or wait.

This module alone decides which instances are destroyed. An instance is destroyed only if the
desired state lists it as absent (`plan_absent`) or evicts it by UUID (`plan_eviction`), and only if
the record identifies it beyond doubt. Instances that are not listed are never touched.

All functions are pure. After every step the GPU is read again and the next step is planned from
that reading, so an agent that was killed between two steps continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from slicewise.agent.desired_state import DesiredInstance, Eviction
from slicewise.agent.driver import ComputeReading, GpuReading, InstanceReading, InstanceRef
from slicewise.agent.record import InstanceKey, RecordedInstance, Stage


class Action(Enum):
    """The kinds of steps."""

    NONE = "none"
    """The actual state is the desired state."""
    ADOPT = "adopt"
    """Record an existing instance under this item."""
    RECORD_INTENT = "record the intent"
    CREATE_GPU_INSTANCE = "create the GPU instance"
    RECORD_CREATED = "record its id"
    CREATE_COMPUTE_INSTANCE = "create the compute instance"
    RECORD_COMPLETE = "record its UUID"
    DESTROY_COMPUTE_INSTANCE = "destroy the compute instance"
    RECORD_BARE = "record that the compute instance is gone"
    DESTROY_GPU_INSTANCE = "destroy the GPU instance"
    FORGET = "forget"
    """Drop the record entry: its instance does not exist."""
    WAIT = "wait"
    """Something blocks the item, possibly for a short time only."""
    REFUSE = "refuse"
    """The item is impossible; waiting does not help."""


@dataclass(frozen=True)
class Step:
    """A step and the instance it applies to."""

    action: Action
    target: InstanceRef | None = None
    compute: ComputeReading | None = None
    uuid: str = ""
    reason: str = ""
    size: int = 0
    occupied: bool = False
    """Whether the step waits for slices that only foreign or stray instances occupy."""


class RecordView(Protocol):
    """The part of `Record` that planning needs."""

    def get(self, key: InstanceKey) -> RecordedInstance | None:
        """The recorded instance at this place."""
        ...


def plan_present(
    item: DesiredInstance,
    gpu: GpuReading,
    record: RecordView,
    releasing: Collection[tuple[str, int]] = (),
) -> Step:
    """Plan the next step to create an instance. ``releasing`` lists the parts being released."""
    offer = gpu.profile(item.profile)
    if gpu.mig is not True:
        lacks = "does not support MIG" if gpu.mig is None else "has MIG mode off"
        return Step(Action.REFUSE, reason=f"{gpu.uuid} {lacks}")
    if offer is None or item.start not in offer.starts or item.size != offer.size:
        return Step(
            Action.REFUSE,
            reason=f"the driver of {gpu.uuid} does not offer {item.profile} with {item.size} "
            f"slices at slice {item.start}",
        )
    own, found = record.get(item.key), gpu.at(item.profile, item.start)
    if found is not None and _has_desired_uuid(item, own, found):
        recorded_for_item = own is not None and own.matches(found) and own.part == item.part
        if not recorded_for_item:
            return _adopt(item, gpu, found)
    ours = own is not None and own.part == item.part
    if own is not None and found is not None and own.matches(found):
        if ours:
            return _plan_completion(own, gpu, found)
    elif own is not None and not (ours and own.stage is Stage.INTENT and found is None):
        # The recorded instance is gone or was replaced by a foreign one. An intent without an
        # instance is kept, because the instance is created next.
        return Step(Action.FORGET)
    blocking = [i for i in gpu.instances if i.overlaps(item.start, item.size)]
    if blocking:
        return _wait_for_slices(gpu, blocking, record, releasing)
    if own is None:
        return Step(Action.RECORD_INTENT, size=item.size)
    target = InstanceRef(gpu.uuid, -1, offer.id, item.start)
    return Step(Action.CREATE_GPU_INSTANCE, target, size=item.size)


def plan_absent(
    item: DesiredInstance,
    gpu: GpuReading,
    record: RecordView,
    listed: Collection[tuple[str, int]] = (),
) -> Step:
    """Plan the next step to destroy a released instance, but not another one in its place.

    An instance may be adopted and released before the agent learns of the adoption. The record
    does not have it under this part then, and the UUID identifies it. It is adopted first, unless
    the record has it under one of the ``listed`` parts.
    """
    own, found = record.get(item.key), gpu.at(item.profile, item.start)
    ours = own is not None and own.part == item.part
    if gpu.mig is None and (ours or item.uuid):
        return Step(Action.WAIT, reason=f"{gpu.uuid} does not report whether it supports MIG")
    if own is not None and ours:
        if found is not None and own.matches(found):
            return _plan_destruction(own, gpu, found)
        return Step(Action.FORGET)
    if found is None or not _has_desired_uuid(item, own, found) or _is_listed(own, found, listed):
        return Step(Action.NONE)
    return _adopt(item, gpu, found)


def plan_eviction(
    item: Eviction, gpu: GpuReading, record: RecordView, listed: Collection[tuple[str, int]]
) -> Step:
    """Plan the next step to destroy a foreign instance with the UUID that an operator named.

    The instance is recorded first, because it has no UUID once its compute instance is destroyed.
    An instance that the record has under one of the ``listed`` parts is not evicted.
    """
    own, found = record.get(item.key), gpu.at(item.profile, item.start)
    if own is not None and own.allocation == "":
        if found is None or not own.matches(found):
            return Step(Action.FORGET)
        if own.uuid == item.uuid:
            return _plan_destruction(own, gpu, found)
        return Step(Action.NONE)
    if found is None or effective_uuid(own, found) != item.uuid or _is_listed(own, found, listed):
        return Step(Action.NONE)
    return _adopt(item, gpu, found)


def _plan_completion(own: RecordedInstance, gpu: GpuReading, found: InstanceReading) -> Step:
    """Plan the next step for an own GPU instance, until it has its compute instance."""
    target = _ref(gpu, found)
    if not found.compute:
        if own.stage is Stage.CREATED:
            return Step(Action.CREATE_COMPUTE_INSTANCE, target)
        return Step(Action.RECORD_CREATED, target)
    if own.stage is Stage.COMPLETE:
        return Step(Action.NONE, target, uuid=own.uuid)
    if len(found.compute) > 1:
        return Step(
            Action.REFUSE,
            target,
            reason=f"{own.key} has {len(found.compute)} compute instances, which another program "
            "created",
        )
    return Step(Action.RECORD_COMPLETE, target, uuid=found.uuid)


def _plan_destruction(own: RecordedInstance, gpu: GpuReading, found: InstanceReading) -> Step:
    """Plan the next step to destroy a recorded instance: compute instances first."""
    target = _ref(gpu, found)
    if found.compute:
        return Step(Action.DESTROY_COMPUTE_INSTANCE, target, compute=found.compute[-1])
    if own.stage is not Stage.BARE:
        return Step(Action.RECORD_BARE, target)
    return Step(Action.DESTROY_GPU_INSTANCE, target)


def effective_uuid(own: RecordedInstance | None, found: InstanceReading) -> str:
    """The UUID of an instance; an own instance without compute instance keeps the recorded one."""
    return found.uuid or (own.uuid if own is not None and own.matches(found) else "")


def _adopt(item: DesiredInstance | Eviction, gpu: GpuReading, found: InstanceReading) -> Step:
    return Step(Action.ADOPT, _ref(gpu, found), uuid=item.uuid, size=found.size)


def _has_desired_uuid(
    item: DesiredInstance, own: RecordedInstance | None, found: InstanceReading
) -> bool:
    return item.uuid != "" and item.uuid == effective_uuid(own, found)


def _is_listed(
    own: RecordedInstance | None, found: InstanceReading, listed: Collection[tuple[str, int]]
) -> bool:
    return own is not None and own.matches(found) and own.part in listed


def _ref(gpu: GpuReading, found: InstanceReading) -> InstanceRef:
    return InstanceRef(gpu.uuid, found.id, found.profile_id, found.start)


def _wait_for_slices(
    gpu: GpuReading,
    blocking: list[InstanceReading],
    record: RecordView,
    releasing: Collection[tuple[str, int]],
) -> Step:
    """Wait for the instances that occupy the slices, and name them."""
    descriptions: list[str] = []
    being_released = False
    for found in blocking:
        own = record.get(InstanceKey(gpu.uuid, found.profile, found.start))
        if own is None or not own.matches(found) or own.allocation == "":
            owner = "which is not ours (foreign)"
        elif own.part in releasing:
            owner = f"which is being released by {own.allocation}"
            being_released = True
        else:
            owner = f"which was created for {own.allocation}"
        name = found.uuid or f"GPU instance {found.id}"
        place = f"{found.profile or 'unknown profile'} at slice {found.start}"
        descriptions.append(f"{name} ({place}), {owner}")
    reason = f"its slices on {gpu.uuid} are taken by {' and '.join(descriptions)}"
    return Step(Action.WAIT, reason=reason, occupied=not being_released)
