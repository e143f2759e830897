"""The agent is killed between any two steps, and calls fail with any code: it always recovers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.agent.simulated import Steps, World

from slicewise.agent import cdi, health, node_state, record
from slicewise.agent.desired_state import Eviction
from slicewise.agent.driver import DriverError

CODES = (1, 2, 3, 4, 6, 10, 15, 16, 17, 19, 20, 23, 27, 28, 29, 999)
PLACES = [("1g.6gb", 1, s) for s in range(4)] + [("2g.12gb", 2, s) for s in (0, 2)]
PLACES += [("4g.24gb", 4, 0), ("1g.6gb+me", 1, 0)]


@pytest.fixture(autouse=True)
def count_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count writes to disk as steps; skip fsync, which only matters for power failures."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    write = record.write_file

    def counted(path: Path, text: str, mode: int = 0o600) -> None:
        steps = Current.steps
        if steps is None:
            write(path, text, mode)
            return
        try:
            steps.before(f"write {path.name}")
        except DriverError:
            raise record.RecordError("the disk is full") from None
        write(path, text, mode)
        try:
            steps.after(f"write {path.name}")
        except DriverError:
            raise record.RecordError("the disk is full") from None

    for module in (record, cdi, health, node_state):
        monkeypatch.setattr(module, "write_file", counted)
    yield
    Current.steps = None


class Current:
    """The steps of the current world."""

    steps: Steps | None = None


def world_in(folder: Path, gpus: int = 1) -> World:
    Current.steps = None
    world = World(folder, gpus)
    Current.steps = world.steps
    return world


def lifecycle(world: World) -> None:
    """Create, release and reuse instances beside a foreign one."""
    world.hardware.create_foreign("GPU-0", "1g.6gb", 1)
    world.service.place("a", "GPU-0", "2g.12gb", 2, 2)
    world.settle()
    world.check()
    world.service.release("a")
    world.settle()
    world.check()
    world.service.place("b", "GPU-0", "1g.6gb", 3, 1)
    world.service.place("c", "GPU-0", "1g.6gb", 2, 1)
    world.settle()
    world.check()
    assert len(world.hardware.foreign) == 1


def test_lifecycle_without_failures(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    lifecycle(world)
    assert world.kills == 0
    assert {"b", "c"} == {allocation for allocation, _ in world.service.instances}


def test_killed_before_and_after_every_step(tmp_path: Path) -> None:
    """Each step of a lifecycle, once before and once after its effect."""
    calm = world_in(tmp_path / "calm")
    lifecycle(calm)
    total = calm.steps.count
    tried = 0
    for moment in range(2, 2 * total + 2):
        world = world_in(tmp_path / str(moment))
        world.steps.kill_at = {moment}
        lifecycle(world)
        assert world.service.failures == {}
        tried += world.kills
    print(f"{tried} kills in {total} steps, each recovered")
    assert tried > total


def test_killed_during_creation_and_released_before_the_restart(tmp_path: Path) -> None:
    """An instance that was released meanwhile is destroyed from any stage."""
    calm = world_in(tmp_path / "calm")
    calm.service.place("a", "GPU-0", "2g.12gb", 2, 2)
    calm.step()
    total = calm.steps.count
    assert total > 8
    for moment in range(2, 2 * total + 2):
        world = world_in(tmp_path / str(moment))
        world.hardware.create_foreign("GPU-0", "1g.6gb", 1)
        world.service.place("a", "GPU-0", "2g.12gb", 2, 2)
        world.steps.kill_at = {moment}
        world.step()
        world.service.release("a")
        world.settle()
        world.check()
        assert world.service.instances == {}
        assert [instance.uuid for _, instance in world.hardware.everything] == ["MIG-1"]


def test_unused_intent_is_dropped(tmp_path: Path) -> None:
    """After a failed creation, an instance that appears at the place is foreign."""
    world = world_in(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)

    def refuse(*args: object) -> None:
        raise DriverError(23, "create_gpu_instance")

    world.driver.create_gpu_instance = refuse  # type: ignore[method-assign, assignment]
    world.step()
    assert len(world.reconciler.record) == 0
    theirs = world.hardware.add("GPU-0", 14, 0, False)
    world.settle()
    assert world.hardware.everything == [("GPU-0", theirs)]
    assert "which is not ours" in world.service.failures["a", 0]


def test_every_call_fails_once(tmp_path: Path) -> None:
    """Each call of a lifecycle fails once, with and without effect; the agent recovers."""
    calm = world_in(tmp_path / "calm")
    lifecycle(calm)
    tried = 0
    for step in range(1, calm.steps.count + 1):
        for number, done in enumerate((False, True)):
            code = CODES[(step + 7 * number) % len(CODES)]
            world = world_in(tmp_path / f"{step}-{number}")
            world.steps.fail_at = {step: (code, done)}
            lifecycle(world)
            assert world.service.failures == {}
            tried += 1
    print(f"{tried} calls failed, each recovered")


def test_call_that_always_fails_is_explained(tmp_path: Path) -> None:
    for code in CODES:
        world = world_in(tmp_path / str(code))
        world.service.place("a", "GPU-0", "1g.6gb", 0, 1)

        def refuse(*args: object, code: int = code) -> None:
            raise DriverError(code, "create_compute_instance")

        world.driver.create_compute_instance = refuse  # type: ignore[method-assign, assignment]
        world.settle(80)
        assert "given up after 8 attempts" in world.service.failures["a", 0]
        assert ("a", 0) in world.service.released
        world.check()
        assert world.hardware.everything == []


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_events(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Allocations, foreign instances, reboots, faults and kills in any order; then all settles."""
    world = world_in(tmp_path_factory.mktemp("world"), gpus=2)
    draw = data.draw
    world.steps.kill_at = set(draw(st.lists(st.integers(2, 600), max_size=6)))
    for step in draw(st.lists(st.integers(1, 300), max_size=8)):
        world.steps.fail_at[step] = (draw(st.sampled_from(CODES)), draw(st.booleans()))
    number = 0
    for _ in range(draw(st.integers(1, 14))):
        gpu = draw(st.sampled_from(["GPU-0", "GPU-1"]))
        profile, size, start = draw(st.sampled_from(PLACES))
        match draw(st.sampled_from(["place", "place", "release", "foreign", "destroy", "turn",
                                    "busy", "idle", "evict", "adopt", "reboot", "restart", "lose",
                                    "back"])):  # fmt: skip
            case "place":
                if not world.service.blocked(gpu, start, size):
                    number += 1
                    world.service.place(f"a{number}", gpu, profile, start, size)
            case "release":
                present = [w for w in world.service.instances.values() if w.present]
                if present:
                    world.service.release(draw(st.sampled_from(present)).allocation)
            case "foreign":
                world.hardware.create_foreign(gpu, profile, start)
            case "destroy":
                here = world.hardware.gpus[gpu]
                if here:
                    gone = draw(st.sampled_from(here))
                    here.remove(gone)
                    world.hardware.foreign -= {c.uuid for c in gone.compute}
            case "busy":
                world.hardware.busy.add((gpu, start))
            case "idle":
                world.hardware.busy.clear()
            case "evict" | "adopt" as order:
                foreign = world.service.last_report.get("foreign", [])
                assert isinstance(foreign, list)
                named = [f for f in foreign if f["uuid"] in world.hardware.foreign]
                if named:
                    one = draw(st.sampled_from(named))
                    if order == "evict":
                        world.service.evict.append(
                            Eviction(one["gpu"], one["profile"], one["start"], one["uuid"])
                        )
                    else:
                        number += 1
                        world.service.place(
                            f"a{number}", one["gpu"], one["profile"], one["start"], one["size"]
                        )
                        adopted = world.service.instances[f"a{number}", 0]
                        world.service.instances[f"a{number}", 0] = replace(
                            adopted, uuid=one["uuid"]
                        )
                        world.hardware.foreign.discard(one["uuid"])
            case "reboot":
                world.hardware.reboot()
                world.start()
            case "restart":
                world.start()
            case "lose":
                world.hardware.missing.add(gpu)
            case "back":
                world.hardware.missing.clear()
        existing = set(world.hardware.foreign)
        evicted = {e.uuid for e in world.service.evict}
        world.step()
        assert existing - evicted <= world.hardware.foreign, "a foreign instance was touched"
    world.hardware.busy.clear()
    world.hardware.missing.clear()
    world.steps.kill_at, world.steps.fail_at = set(), {}
    existing = set(world.hardware.foreign) - {e.uuid for e in world.service.evict}
    world.settle(150)
    assert existing <= world.hardware.foreign
    world.check()
