"""The reconciler: attempts, backoff, strays, adoption, eviction, unreadable GPUs."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.agent.simulated import World

from slicewise.agent.desired_state import Eviction
from slicewise.agent.mig_mode import MigModeSwitch
from slicewise.agent.reconciler import (
    CREATE_ATTEMPTS,
    DESTROY_ATTEMPTS,
    MAX_BACKOFF,
    OCCUPIED_ATTEMPTS,
    QUARANTINE_SECONDS,
)
from slicewise.agent.record import Record


def reported_foreign(world: World) -> list[tuple[object, object]]:
    reported = world.service.last_report["foreign"]
    assert isinstance(reported, list)
    return [(one["uuid"], one["why"]) for one in reported]


def test_busy_instance_is_retried_then_quarantined(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    world.hardware.busy.add(("GPU-0", 0))
    world.service.release("a")
    waits = []
    for attempt in range(1, DESTROY_ATTEMPTS + 3):
        moment = world.now
        world.step()
        reported = world.service.phases["a", 0]
        quarantined = attempt >= DESTROY_ATTEMPTS
        assert reported["phase"] == ("quarantined" if quarantined else "releasing")
        assert reported["attempts"] == attempt
        assert "it is in use" in str(reported["detail"])
        (item,) = world.reconciler.desired.instances
        due = world.reconciler.progress(item).due
        waits.append(due - moment)
        world.now = due
    expected = [min(2.0**n, MAX_BACKOFF) for n in range(DESTROY_ATTEMPTS - 1)] + [
        QUARANTINE_SECONDS
    ] * 3
    for wait, middle in zip(waits, expected, strict=True):
        assert 0.8 * middle <= wait <= 1.2 * middle
    assert len(world.hardware.everything) == 1
    assert not list((tmp_path / "cdi").iterdir()), "no new container may use it"
    world.hardware.busy.clear()
    world.settle()
    world.check()
    assert ("a", 0) in world.service.released


def test_foreign_instance_in_the_way_is_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.hardware.create_foreign("GPU-0", "1g.6gb", 1)
    world.service.place("a", "GPU-0", "2g.12gb", 0, 2)
    for _ in range(OCCUPIED_ATTEMPTS):
        assert ("a", 0) not in world.service.failures
        world.step()
    failure = world.service.failures["a", 0]
    assert "MIG-1 (1g.6gb at slice 1), which is not ours (foreign)" in failure
    world.settle()
    world.check()
    # If the foreign instance is destroyed in time, creation succeeds.
    world.service.place("b", "GPU-0", "2g.12gb", 0, 2)
    world.step()
    world.hardware.wipe("GPU-0")
    world.settle()
    world.check()
    assert ("b", 0) in world.service.instances


def test_service_restored_from_a_backup_finds_strays(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    (uuid,) = [item.uuid for item in world.service.instances.values()]
    world.service.instances.clear()
    for _ in range(3):
        world.step()
    assert reported_foreign(world) == [(uuid, "stray")]
    # An allocation at the same placement does not get the stray.
    world.service.place("b", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    assert "which was created for a" in world.service.failures["b", 0]
    assert reported_foreign(world) == [(uuid, "stray")]
    # An operator adopts the stray by UUID.
    world.service.place("c", "GPU-0", "1g.6gb", 0, 1)
    world.service.instances["c", 0] = replace(world.service.instances["c", 0], uuid=uuid)
    world.settle()
    world.check()
    assert world.service.instances["c", 0].uuid == uuid


def test_a_notice_is_logged_once_and_reported_until_it_is_withdrawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    (uuid,) = [item.uuid for item in world.service.instances.values()]

    def notice(text: str) -> object:
        told = replace(world.service.instances["a", 0], notice=text)
        world.service.instances["a", 0] = told
        for _ in range(2):
            world.step()
        return world.service.phases["a", 0]["detail"]

    assert notice("") == ""
    assert notice("2026-11-18T12:00:30Z") == "its slices are reclaimed at 2026-11-18T12:00:30Z"
    assert notice("") == ""
    messages = [record.getMessage() for record in caplog.records]
    assert sum("for a ends at 2026-11-18T12:00:30Z" in message for message in messages) == 1
    assert world.service.instances["a", 0].uuid == uuid, "it is left as it is"
    notice("2026-11-18T12:01:30Z")
    world.service.release("a")
    world.settle()
    assert ("a", 0) in world.service.released


def make_stray(world: World) -> str:
    """Create an instance, let the service forget it, and return its UUID."""
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    uuid = world.service.instances["a", 0].uuid
    world.service.instances.clear()
    world.step()
    assert reported_foreign(world) == [(uuid, "stray")]
    return uuid


def adopt(world: World, uuid: str, present: bool = True) -> None:
    world.service.place("c", "GPU-0", "1g.6gb", 0, 1)
    adopted = replace(world.service.instances["c", 0], uuid=uuid, present=present)
    world.service.instances["c", 0] = adopted


def test_stray_adopted_and_released_at_once_is_destroyed(tmp_path: Path) -> None:
    world = World(tmp_path)
    adopt(world, make_stray(world), present=False)
    world.settle()
    assert ("c", 0) in world.service.released
    assert reported_foreign(world) == []
    world.check()
    assert world.hardware.everything == []


@pytest.mark.parametrize("order", ["evict", "adopt", "release"])
def test_stray_without_compute_instance_keeps_its_uuid(order: str, tmp_path: Path) -> None:
    world = World(tmp_path)
    uuid = make_stray(world)
    (instance,) = world.hardware.gpus["GPU-0"]
    world.hardware.gpus["GPU-0"] = [replace(instance, compute=())]
    world.step()
    assert reported_foreign(world) == [(uuid, "stray")]
    if order == "evict":
        world.service.evict = [Eviction("GPU-0", "1g.6gb", 0, uuid)]
    else:
        adopt(world, uuid, present=order == "adopt")
    world.settle()
    world.check()
    assert len(world.hardware.everything) == (1 if order == "adopt" else 0)
    assert world.service.failures == {}


def test_adoption_waits_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adopted instance must not be reported as creating or failed."""
    world = World(tmp_path)
    uuid = make_stray(world)
    (tmp_path / "instances.json").unlink()
    world.start()
    adopt(world, uuid)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(CREATE_ATTEMPTS + 2):
            world.step()
            assert ("c", 0) not in world.service.phases
    world.settle()
    world.check()
    assert world.service.instances["c", 0].uuid == uuid


def test_stray_is_evicted_by_uuid_and_desired_instances_are_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.service.place("b", "GPU-0", "1g.6gb", 1, 1)
    world.settle()
    first, second = (item.uuid for item in world.service.instances.values())
    del world.service.instances["a", 0]
    world.step()
    for start, uuid in ((0, "MIG-of-another"), (1, second)):
        world.service.evict = [Eviction("GPU-0", "1g.6gb", start, uuid)]
        world.step()
        assert len(world.hardware.everything) == 2
    world.service.evict = [Eviction("GPU-0", "1g.6gb", 0, first)]
    world.settle()
    world.check()
    assert [instance.uuid for _, instance in world.hardware.everything] == [second]


def test_lost_record_is_replaced_by_uuids(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.service.place("b", "GPU-0", "1g.6gb", 1, 1)
    world.settle()
    (tmp_path / "instances.json").unlink()
    world.start()
    world.service.release("b")
    world.settle()
    world.check()
    assert len(Record(tmp_path, "1")) == 1
    # An instance that the service does not know by UUID is foreign.
    (tmp_path / "instances.json").unlink()
    world.start()
    uuid = world.service.instances["a", 0].uuid
    world.service.instances["a", 0] = replace(
        world.service.instances["a", 0], uuid="", present=False
    )
    world.settle()
    assert reported_foreign(world) == [(uuid, "foreign")]
    assert ("a", 0) in world.service.released


def test_destroyed_instance_is_recreated(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    before = world.service.instances["a", 0].uuid
    world.hardware.wipe("GPU-0")
    world.settle()
    world.check()
    assert world.service.instances["a", 0].uuid != before
    # A foreign instance in its place is not adopted.
    world.hardware.wipe("GPU-0")
    world.hardware.create_foreign("GPU-0", "1g.6gb", 0)
    world.settle()
    assert "which is not ours" in world.service.failures["a", 0]
    world.check()
    assert len(world.hardware.foreign) == 1


def test_foreign_instance_created_after_the_refresh_is_not_destroyed(tmp_path: Path) -> None:
    """It has the place and the ids of the released instance."""
    world = World(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    world.service.release("a")
    world.reconciler.set_desired(world.service.desired())
    world.reconciler.node.refresh()
    world.hardware.wipe("GPU-0")
    assert world.hardware.create_foreign("GPU-0", "1g.6gb", 0)
    world.reconciler.reconcile(True)
    world.settle()
    assert ("a", 0) in world.service.released
    assert {i.uuid for _, i in world.hardware.everything} == world.hardware.foreign != set()
    world.check()


def test_creation_waits_for_mig_mode(tmp_path: Path) -> None:
    """As after a restart of the node, when another process uses the GPU first."""
    world = World(tmp_path)
    world.hardware.mig["GPU-0"] = False
    world.driver.running = [77]
    node, switch = world.reconciler.node, MigModeSwitch(["GPU-0"])
    node.refresh()
    switch.attempt(node)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.step()
    assert "processes use the GPU: 77" in str(world.service.phases["a", 0]["detail"])
    world.driver.running = []
    switch.attempt(node)
    world.settle()
    world.check()
    assert world.service.failures == {}


def test_unreadable_gpu_keeps_its_reported_state(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.hardware.create_foreign("GPU-0", "1g.6gb", 1)
    world.settle()
    kept = reported_foreign(world)
    world.hardware.missing = {"GPU-0"}
    world.service.place("b", "GPU-0", "1g.6gb", 2, 1)
    for _ in range(CREATE_ATTEMPTS + 2):
        world.step()
        assert world.service.phases["a", 0]["phase"] == "active"
        assert reported_foreign(world) == kept
    assert "GPU-0 is not here" in world.service.failures["b", 0]
    world.hardware.missing = set()
    world.settle()
    world.check()


def test_instances_of_a_missing_gpu_are_not_gone(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    world.settle()
    world.hardware.missing = {"GPU-0"}
    world.service.release("a")
    for _ in range(DESTROY_ATTEMPTS + 1):
        world.step()
    assert world.service.phases["a", 0]["phase"] == "quarantined"
    # No instance survives a reboot.
    world.hardware.reboot()
    world.start()
    world.settle()
    assert ("a", 0) in world.service.released
