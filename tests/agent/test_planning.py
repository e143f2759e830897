"""Planning: every kind of record entry against every kind of instance."""

from __future__ import annotations

from itertools import product

import pytest
from tests.agent.simulated import Hardware

from slicewise.agent.desired_state import DesiredInstance, Eviction
from slicewise.agent.driver import ComputeReading, GpuReading, InstanceReading
from slicewise.agent.planning import Action, Step, plan_absent, plan_eviction, plan_present
from slicewise.agent.record import InstanceKey, RecordedInstance, Stage

GPU = "GPU-0"
PROFILES = Hardware.of().profiles()
TWO = next(p for p in PROFILES if p.name == "2g.12gb")
ITEM = DesiredInstance("a", 0, GPU, TWO.name, 2, 2, True)
KEY = ITEM.key
COMPLETING = {Action.CREATE_COMPUTE_INSTANCE, Action.RECORD_CREATED, Action.RECORD_COMPLETE}
DESTROYING = {Action.DESTROY_GPU_INSTANCE, Action.DESTROY_COMPUTE_INSTANCE}


class FakeRecord(dict[InstanceKey, RecordedInstance]):
    """A record in memory."""


def gpu(*instances: InstanceReading, mig: bool | None = True) -> GpuReading:
    return GpuReading(GPU, 0, "A30", 24576, mig=mig, profiles=PROFILES, instances=instances)


def found(id: int = 5, uuids: tuple[str, ...] = ("MIG-1",)) -> InstanceReading:
    compute = tuple(ComputeReading(n, uuid) for n, uuid in enumerate(uuids))
    return InstanceReading(id, TWO.id, TWO.name, 2, 2, compute)


RECORDS = [None] + [
    RecordedInstance(GPU, TWO.name, 2, 2, allocation, 0, stage, id, uuid)
    for allocation, (stage, id, uuid) in product(
        ("a", "b", ""),
        ((Stage.INTENT, None, ""), (Stage.CREATED, 5, ""), (Stage.CREATED, 6, ""),
         (Stage.COMPLETE, 5, "MIG-1"), (Stage.COMPLETE, 5, "MIG-9"), (Stage.COMPLETE, 6, "MIG-1"),
         (Stage.BARE, 5, "MIG-1")),
    )
]  # fmt: skip
INSTANCES = [None, *(found(uuids=u) for u in ((), ("MIG-1",), ("MIG-2",), ("MIG-1", "MIG-2")))]
UUIDS = ["", "MIG-1", "MIG-2"]


def is_ours(own: RecordedInstance | None, instance: InstanceReading | None) -> bool:
    """The reference implementation of ``RecordedInstance.matches``, case by case."""
    if own is None or instance is None:
        return False
    has = [c.uuid for c in instance.compute]
    match own.stage:
        case Stage.INTENT:
            return has == []
        case Stage.CREATED:
            return own.id == instance.id
        case Stage.COMPLETE:
            return own.id == instance.id and (has == [] or own.uuid in has)
        case Stage.BARE:
            return own.id == instance.id and has == []


def named(own: RecordedInstance | None, instance: InstanceReading) -> str:
    """The UUID by which the service knows an instance, even without compute instance."""
    if instance.compute:
        return instance.compute[0].uuid
    return own.uuid if own is not None and is_ours(own, instance) else ""


@pytest.mark.parametrize("uuid", UUIDS)
@pytest.mark.parametrize("instance", INSTANCES)
@pytest.mark.parametrize("own", RECORDS)
def test_only_ordered_and_recorded_instances_are_destroyed(
    own: RecordedInstance | None, instance: InstanceReading | None, uuid: str
) -> None:
    record = FakeRecord() if own is None else FakeRecord({KEY: own})
    here = gpu(*([] if instance is None else [instance]))
    ours = is_ours(own, instance)
    assert ours == (own is not None and instance is not None and own.matches(instance))
    present = plan_present(DesiredInstance(**{**vars(ITEM), "uuid": uuid}), here, record)
    assert present.action not in DESTROYING
    if present.action is Action.CREATE_GPU_INSTANCE:
        assert instance is None
        assert own is not None
    if present.action in COMPLETING:
        assert ours
        assert own is not None
        assert own.allocation == "a"
    if present.action is Action.ADOPT:
        assert instance is not None
        assert named(own, instance) == uuid != ""
    absent = plan_absent(
        DesiredInstance(**{**vars(ITEM), "uuid": uuid, "present": False}), here, record
    )
    if absent.action in DESTROYING:
        assert ours
        assert own is not None
        assert own.allocation == "a"
    if absent.action is Action.ADOPT:
        assert own is None or own.allocation != "a"
        assert instance is not None
        assert named(own, instance) == uuid != ""
    elif own is None or own.allocation != "a":
        assert instance is None or not uuid or named(own, instance) != uuid, (
            "it would never be destroyed"
        )
    evicted = plan_eviction(Eviction(GPU, TWO.name, 2, uuid), here, record, {("a", 0)})
    if evicted.action in DESTROYING:
        assert ours
        assert own is not None
        assert own.allocation == ""
        assert own.uuid == uuid
    if evicted.action is Action.ADOPT:
        assert instance is not None
        assert named(own, instance) == uuid
        assert not (ours and own is not None and own.allocation == "a"), "it is desired"


def test_instance_adopted_and_released_at_once_is_destroyed_unless_listed() -> None:
    record = FakeRecord(
        {KEY: RecordedInstance(GPU, TWO.name, 2, 2, "b", 0, Stage.COMPLETE, 5, "MIG-1")}
    )
    item = DesiredInstance(**{**vars(ITEM), "uuid": "MIG-1", "present": False})
    claim = plan_absent(item, gpu(found()), record, {item.part})
    assert (claim.action, claim.uuid) == (Action.ADOPT, "MIG-1")
    assert plan_absent(item, gpu(found()), record, {item.part, ("b", 0)}).action is Action.NONE


def waiting_reason(step: Step) -> str:
    assert step.action is Action.WAIT
    return step.reason


def test_blocking_instances_are_named() -> None:
    foreign = InstanceReading(7, 14, "1g.6gb", 3, 1, (ComputeReading(0, "MIG-7"),))
    assert "MIG-7 (1g.6gb at slice 3), which is not ours (foreign)" in waiting_reason(
        plan_present(ITEM, gpu(foreign), FakeRecord())
    )
    key = InstanceKey(GPU, "1g.6gb", 3)
    own = RecordedInstance(GPU, "1g.6gb", 3, 1, "b", 0, Stage.COMPLETE, 7, "MIG-7")
    blocked = plan_present(ITEM, gpu(foreign), FakeRecord({key: own}), {("b", 0)})
    assert "which is being released by b" in waiting_reason(blocked)
    stray = plan_present(ITEM, gpu(foreign), FakeRecord({key: own}))
    assert "which was created for b" in waiting_reason(stray)


@pytest.mark.parametrize(
    ("changed", "mig", "reason"),
    [
        ({}, False, "has MIG mode off"),
        ({}, None, "does not support MIG"),
        ({"start": 1}, True, "does not offer 2g.12gb with 2 slices at slice 1"),
        ({"size": 3}, True, "does not offer 2g.12gb with 3 slices"),
        ({"profile": "9g.9gb"}, True, "does not offer 9g.9gb"),
    ],
)
def test_impossible_items_are_refused(
    changed: dict[str, object], mig: bool | None, reason: str
) -> None:
    item = DesiredInstance(**{**vars(ITEM), **changed})
    step = plan_present(item, gpu(mig=mig), FakeRecord())
    assert step.action is Action.REFUSE
    assert reason in step.reason


def test_instance_with_foreign_compute_instances_is_refused() -> None:
    own = RecordedInstance(GPU, TWO.name, 2, 2, "a", 0, Stage.CREATED, 5)
    step = plan_present(ITEM, gpu(found(uuids=("x", "y"))), FakeRecord({KEY: own}))
    assert step.action is Action.REFUSE
    assert "has 2 compute instances, which another program created" in step.reason


def test_gpu_with_unknown_mig_mode_is_not_taken_for_empty() -> None:
    own = RecordedInstance(GPU, TWO.name, 2, 2, "a", 0, Stage.COMPLETE, 5, "MIG-1")
    absent = DesiredInstance(**{**vars(ITEM), "present": False})
    assert plan_absent(absent, gpu(mig=None), FakeRecord({KEY: own})).action is Action.WAIT
    assert plan_absent(absent, gpu(mig=None), FakeRecord()).action is Action.NONE
    assert plan_absent(absent, gpu(mig=False), FakeRecord({KEY: own})).action is Action.FORGET
