"""Planning, swept: every kind of record against every kind of instance, present and absent."""

from __future__ import annotations

from itertools import product

import pytest
from tests.agent.simulated import Hardware

from slicewise.agent.driver import ComputeReading, GpuReading, InstanceReading
from slicewise.agent.planning import Do, Step, toward_absent, toward_evicted, toward_present
from slicewise.agent.record import Key, Own, Stage
from slicewise.agent.wanted import Evicted, Wanted

GPU = "GPU-0"
PROFILES = Hardware.of().profiles()
TWO = next(p for p in PROFILES if p.name == "2g.12gb")
ITEM = Wanted("a", 0, GPU, TWO.name, 2, 2, True)
KEY = ITEM.key
DESTROYING = {Do.END, Do.END_COMPUTE}


class Book(dict[Key, Own]):
    """A record that is a dictionary."""


def gpu(*instances: InstanceReading, mig: bool | None = True) -> GpuReading:
    return GpuReading(GPU, 0, "A30", 24576, mig=mig, profiles=PROFILES, instances=instances)


def there(id: int = 5, uuids: tuple[str, ...] = ("MIG-1",)) -> InstanceReading:
    compute = tuple(ComputeReading(n, uuid) for n, uuid in enumerate(uuids))
    return InstanceReading(id, TWO.id, TWO.name, 2, 2, compute)


RECORDS = [None] + [
    Own(GPU, TWO.name, 2, 2, allocation, 0, stage, id, uuid)
    for allocation, (stage, id, uuid) in product(
        ("a", "b", ""),
        ((Stage.INTENT, None, ""), (Stage.MADE, 5, ""), (Stage.MADE, 6, ""),
         (Stage.WHOLE, 5, "MIG-1"), (Stage.WHOLE, 5, "MIG-9"), (Stage.WHOLE, 6, "MIG-1"),
         (Stage.BARE, 5, "MIG-1")),
    )
]  # fmt: skip
INSTANCES = [None, *(there(uuids=u) for u in ((), ("MIG-1",), ("MIG-2",), ("MIG-1", "MIG-2")))]
UUIDS = ["", "MIG-1", "MIG-2"]


def is_ours(own: Own | None, instance: InstanceReading | None) -> bool:
    """The slow twin of ``Own.is_it``, case by case."""
    if own is None or instance is None:
        return False
    has = [c.uuid for c in instance.compute]
    match own.stage:
        case Stage.INTENT:
            return has == []
        case Stage.MADE:
            return own.id == instance.id
        case Stage.WHOLE:
            return own.id == instance.id and (has == [] or own.uuid in has)
        case Stage.BARE:
            return own.id == instance.id and has == []


def named(own: Own | None, instance: InstanceReading) -> str:
    """By what the service knows an instance: its UUID, or the one it had while it was whole."""
    if instance.compute:
        return instance.compute[0].uuid
    return own.uuid if own is not None and is_ours(own, instance) else ""


@pytest.mark.parametrize("uuid", UUIDS)
@pytest.mark.parametrize("instance", INSTANCES)
@pytest.mark.parametrize("own", RECORDS)
def test_nothing_is_destroyed_that_was_not_ordered_and_is_not_known(
    own: Own | None, instance: InstanceReading | None, uuid: str
) -> None:
    book = Book() if own is None else Book({KEY: own})
    here = gpu(*([] if instance is None else [instance]))
    ours = is_ours(own, instance)
    assert ours == (own is not None and instance is not None and own.is_it(instance))
    present = toward_present(Wanted(**{**vars(ITEM), "uuid": uuid}), here, book)
    assert present.do not in DESTROYING
    if present.do is Do.MAKE:
        assert instance is None
        assert own is not None
    if present.do in (Do.MAKE_COMPUTE, Do.NOTE_MADE, Do.NOTE_WHOLE):
        assert ours
        assert own is not None
        assert own.allocation == "a"
    if present.do is Do.CLAIM:
        assert instance is not None
        assert named(own, instance) == uuid != ""
    absent = toward_absent(Wanted(**{**vars(ITEM), "uuid": uuid, "present": False}), here, book)
    if absent.do in DESTROYING:
        assert ours
        assert own is not None
        assert own.allocation == "a"
    if absent.do is Do.CLAIM:
        assert own is None or own.allocation != "a"
        assert instance is not None
        assert named(own, instance) == uuid != ""
    elif own is None or own.allocation != "a":
        assert instance is None or not uuid or named(own, instance) != uuid, "it would stay"
    evicted = toward_evicted(Evicted(GPU, TWO.name, 2, uuid), here, book, {("a", 0)})
    if evicted.do in DESTROYING:
        assert ours
        assert own is not None
        assert own.allocation == ""
        assert own.uuid == uuid
    if evicted.do is Do.CLAIM:
        assert instance is not None
        assert named(own, instance) == uuid
        assert not (ours and own is not None and own.allocation == "a"), "it is wanted"


def test_what_was_adopted_and_released_unheard_is_destroyed_but_not_what_is_listed() -> None:
    book = Book({KEY: Own(GPU, TWO.name, 2, 2, "b", 0, Stage.WHOLE, 5, "MIG-1")})
    item = Wanted(**{**vars(ITEM), "uuid": "MIG-1", "present": False})
    claim = toward_absent(item, gpu(there()), book, {item.part})
    assert (claim.do, claim.uuid) == (Do.CLAIM, "MIG-1")
    assert toward_absent(item, gpu(there()), book, {item.part, ("b", 0)}).do is Do.NOTHING


def wait(step: Step) -> str:
    assert step.do is Do.WAIT
    return step.reason


def test_who_is_in_the_way_is_named() -> None:
    stranger = InstanceReading(7, 14, "1g.6gb", 3, 1, (ComputeReading(0, "MIG-7"),))
    assert "MIG-7 (1g.6gb at slice 3), which is not ours (foreign)" in wait(
        toward_present(ITEM, gpu(stranger), Book())
    )
    key = Key(GPU, "1g.6gb", 3)
    own = Own(GPU, "1g.6gb", 3, 1, "b", 0, Stage.WHOLE, 7, "MIG-7")
    blocked = toward_present(ITEM, gpu(stranger), Book({key: own}), {("b", 0)})
    assert "which is being released by b" in wait(blocked)
    stray = toward_present(ITEM, gpu(stranger), Book({key: own}))
    assert "which was made for b" in wait(stray)


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
def test_what_cannot_be_had_is_refused_at_once(
    changed: dict[str, object], mig: bool | None, reason: str
) -> None:
    item = Wanted(**{**vars(ITEM), **changed})
    step = toward_present(item, gpu(mig=mig), Book())
    assert step.do is Do.REFUSE
    assert reason in step.reason


def test_an_instance_others_made_compute_instances_in_is_refused() -> None:
    own = Own(GPU, TWO.name, 2, 2, "a", 0, Stage.MADE, 5)
    step = toward_present(ITEM, gpu(there(uuids=("x", "y"))), Book({KEY: own}))
    assert step.do is Do.REFUSE
    assert "somebody else made compute instances" in step.reason


def test_a_gpu_that_does_not_tell_its_mode_is_not_taken_for_empty() -> None:
    own = Own(GPU, TWO.name, 2, 2, "a", 0, Stage.WHOLE, 5, "MIG-1")
    absent = Wanted(**{**vars(ITEM), "present": False})
    assert toward_absent(absent, gpu(mig=None), Book({KEY: own})).do is Do.WAIT
    assert toward_absent(absent, gpu(mig=None), Book()).do is Do.NOTHING
    assert toward_absent(absent, gpu(mig=False), Book({KEY: own})).do is Do.FORGET
