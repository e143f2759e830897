"""How often things are tried, when they are given up, and what is said meanwhile."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.agent.simulated import World

from slicewise.agent.carrying import (
    CREATE_ATTEMPTS,
    DESTROY_ATTEMPTS,
    LONGEST_WAIT,
    SELDOM,
    TAKEN_ATTEMPTS,
)
from slicewise.agent.migmode import Switch
from slicewise.agent.record import Record
from slicewise.agent.wanted import Evicted


def foreign(world: World) -> list[tuple[object, object]]:
    told = world.office.told["foreign"]
    assert isinstance(told, list)
    return [(one["uuid"], one["why"]) for one in told]


def test_in_use_is_waited_for_then_quarantined_then_seldom_tried(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    world.hardware.busy.add(("GPU-0", 0))
    world.office.release("a")
    waits = []
    for attempt in range(1, DESTROY_ATTEMPTS + 3):
        moment = world.now
        world.turn()
        told = world.office.phases["a", 0]
        quarantined = attempt >= DESTROY_ATTEMPTS
        assert told["phase"] == ("quarantined" if quarantined else "releasing")
        assert told["attempts"] == attempt
        assert "it is in use" in str(told["detail"])
        (item,) = world.carrier.desired.instances
        due = world.carrier.standing(item).due
        waits.append(due - moment)
        world.now = due
    expected = [min(2.0**n, LONGEST_WAIT) for n in range(DESTROY_ATTEMPTS - 1)] + [SELDOM] * 3
    for wait, middle in zip(waits, expected, strict=True):
        assert 0.8 * middle <= wait <= 1.2 * middle
    assert len(world.hardware.everything) == 1
    assert not list((tmp_path / "cdi").iterdir()), "nobody new may begin to use it"
    world.hardware.busy.clear()
    world.settle()
    world.check()
    assert ("a", 0) in world.office.released


def test_slices_a_stranger_has_are_waited_for_and_the_stranger_is_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.hardware.stranger_makes("GPU-0", "1g.6gb", 1)
    world.office.place("a", "GPU-0", "2g.12gb", 0, 2)
    for _ in range(TAKEN_ATTEMPTS):
        assert ("a", 0) not in world.office.failures
        world.turn()
    failure = world.office.failures["a", 0]
    assert "MIG-1 (1g.6gb at slice 1), which is not ours (foreign)" in failure
    world.settle()
    world.check()
    # Had it gone away in time, all would have been well.
    world.office.place("b", "GPU-0", "2g.12gb", 0, 2)
    world.turn()
    world.hardware.wipe("GPU-0")
    world.settle()
    world.check()
    assert ("b", 0) in world.office.wanted


def test_a_service_restored_from_an_older_backup_finds_strays(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    (uuid,) = [item.uuid for item in world.office.wanted.values()]
    world.office.wanted.clear()
    for _ in range(3):
        world.turn()
    assert foreign(world) == [(uuid, "stray")]
    # It has no idea what is there: another's placement does not get the stray.
    world.office.place("b", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    assert "which was made for a" in world.office.failures["b", 0]
    assert foreign(world) == [(uuid, "stray")]
    # An operator adopts it by its UUID.
    world.office.place("c", "GPU-0", "1g.6gb", 0, 1)
    world.office.wanted["c", 0] = replace(world.office.wanted["c", 0], uuid=uuid)
    world.settle()
    world.check()
    assert world.office.wanted["c", 0].uuid == uuid


def stray(world: World) -> str:
    """An instance that the service has forgotten: its UUID."""
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    uuid = world.office.wanted["a", 0].uuid
    world.office.wanted.clear()
    world.turn()
    assert foreign(world) == [(uuid, "stray")]
    return uuid


def adopt(world: World, uuid: str, present: bool = True) -> None:
    world.office.place("c", "GPU-0", "1g.6gb", 0, 1)
    adopted = replace(world.office.wanted["c", 0], uuid=uuid, present=present)
    world.office.wanted["c", 0] = adopted


def test_a_stray_adopted_and_released_before_that_was_heard_of_goes(tmp_path: Path) -> None:
    world = World(tmp_path)
    adopt(world, stray(world), present=False)
    world.settle()
    assert ("c", 0) in world.office.released
    assert foreign(world) == []
    world.check()
    assert world.hardware.everything == []


@pytest.mark.parametrize("order", ["evict", "adopt", "release"])
def test_a_stray_that_is_half_destroyed_is_still_known_by_its_uuid(
    order: str, tmp_path: Path
) -> None:
    world = World(tmp_path)
    uuid = stray(world)
    (there,) = world.hardware.gpus["GPU-0"]
    world.hardware.gpus["GPU-0"] = [replace(there, compute=())]
    world.turn()
    assert foreign(world) == [(uuid, "stray")]
    if order == "evict":
        world.office.evict = [Evicted("GPU-0", "1g.6gb", 0, uuid)]
    else:
        adopt(world, uuid, present=order == "adopt")
    world.settle()
    world.check()
    assert len(world.hardware.everything) == (1 if order == "adopt" else 0)
    assert world.office.failures == {}


def test_without_room_on_the_disk_what_is_there_stays_known_by_its_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adopted instance, or one of a lost record, is not called unmade, let alone given up."""
    world = World(tmp_path)
    uuid = stray(world)
    (tmp_path / "instances.json").unlink()
    world.start()
    adopt(world, uuid)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(CREATE_ATTEMPTS + 2):
            world.turn()
            assert ("c", 0) not in world.office.phases
    world.settle()
    world.check()
    assert world.office.wanted["c", 0].uuid == uuid


def test_a_stray_is_evicted_by_name_and_what_is_wanted_is_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.office.place("b", "GPU-0", "1g.6gb", 1, 1)
    world.settle()
    first, second = (item.uuid for item in world.office.wanted.values())
    del world.office.wanted["a", 0]
    world.turn()
    for start, uuid in ((0, "MIG-of-another"), (1, second)):
        world.office.evict = [Evicted("GPU-0", "1g.6gb", start, uuid)]
        world.turn()
        assert len(world.hardware.everything) == 2
    world.office.evict = [Evicted("GPU-0", "1g.6gb", 0, first)]
    world.settle()
    world.check()
    assert [there.uuid for _, there in world.hardware.everything] == [second]


def test_an_agent_without_its_records_knows_its_instances_by_uuid(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.office.place("b", "GPU-0", "1g.6gb", 1, 1)
    world.settle()
    (tmp_path / "instances.json").unlink()
    world.start()
    world.office.release("b")
    world.settle()
    world.check()
    assert len(Record(tmp_path, "1")) == 1
    # One the service does not know by UUID stays, as somebody else's.
    (tmp_path / "instances.json").unlink()
    world.start()
    uuid = world.office.wanted["a", 0].uuid
    world.office.wanted["a", 0] = replace(world.office.wanted["a", 0], uuid="", present=False)
    world.settle()
    assert foreign(world) == [(uuid, "foreign")]
    assert ("a", 0) in world.office.released


def test_an_instance_somebody_destroyed_is_made_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    before = world.office.wanted["a", 0].uuid
    world.hardware.wipe("GPU-0")
    world.settle()
    world.check()
    assert world.office.wanted["a", 0].uuid != before
    # And one that somebody else put in its place is not taken for ours.
    world.hardware.wipe("GPU-0")
    world.hardware.stranger_makes("GPU-0", "1g.6gb", 0)
    world.settle()
    assert "which is not ours" in world.office.failures["a", 0]
    world.check()
    assert len(world.hardware.strangers) == 1


def test_what_a_stranger_made_since_the_last_look_is_not_destroyed(tmp_path: Path) -> None:
    """Same place, same ids, and after the look on which destroying ours was decided."""
    world = World(tmp_path)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    world.office.release("a")
    world.carrier.take(world.office.desired())
    world.carrier.node.look()
    world.hardware.wipe("GPU-0")
    assert world.hardware.stranger_makes("GPU-0", "1g.6gb", 0)
    world.carrier.round(True)
    world.settle()
    assert ("a", 0) in world.office.released
    assert {i.uuid for _, i in world.hardware.everything} == world.hardware.strangers != set()
    world.check()


def test_mig_mode_that_is_yet_to_be_switched_on_is_waited_for(tmp_path: Path) -> None:
    """As after a restart of the node, when something else is quicker to use the GPU."""
    world = World(tmp_path)
    world.hardware.mig["GPU-0"] = False
    world.driver.running = [77]
    node, switch = world.carrier.node, Switch(["GPU-0"])
    node.look()
    switch.attempt(node)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.turn()
    assert "processes use the GPU: 77" in str(world.office.phases["a", 0]["detail"])
    world.driver.running = []
    switch.attempt(node)
    world.settle()
    world.check()
    assert world.office.failures == {}


def test_a_gpu_that_does_not_answer_changes_nothing_that_is_there(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.hardware.stranger_makes("GPU-0", "1g.6gb", 1)
    world.settle()
    kept = foreign(world)
    world.hardware.missing = {"GPU-0"}
    world.office.place("b", "GPU-0", "1g.6gb", 2, 1)
    for _ in range(CREATE_ATTEMPTS + 2):
        world.turn()
        assert world.office.phases["a", 0]["phase"] == "active"
        assert foreign(world) == kept
    assert "GPU-0 is not here" in world.office.failures["b", 0]
    world.hardware.missing = set()
    world.settle()
    world.check()


def test_a_gpu_taken_out_keeps_its_instances_from_being_called_gone(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    world.hardware.missing = {"GPU-0"}
    world.office.release("a")
    for _ in range(DESTROY_ATTEMPTS + 1):
        world.turn()
    assert world.office.phases["a", 0]["phase"] == "quarantined"
    # After a restart nothing of it can be left.
    world.hardware.reboot()
    world.start()
    world.settle()
    assert ("a", 0) in world.office.released
