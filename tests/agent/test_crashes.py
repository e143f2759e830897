"""The agent dies between any two steps, calls fail with any code: all heals, strangers are safe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.agent.simulated import Ticks, World

from slicewise.agent import cdi, health, record, seats
from slicewise.agent.driver import DriverError
from slicewise.agent.wanted import Evicted

CODES = (1, 2, 3, 4, 6, 10, 15, 16, 17, 19, 20, 23, 27, 28, 29, 999)
PLACES = [("1g.6gb", 1, s) for s in range(4)] + [("2g.12gb", 2, s) for s in (0, 2)]
PLACES += [("4g.24gb", 4, 0), ("1g.6gb+me", 1, 0)]


@pytest.fixture(autouse=True)
def writing_ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Writes to disk are steps as well; nothing is synced, since no power fails here."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    write = record.write_file

    def counted(path: Path, text: str, mode: int = 0o600) -> None:
        ticks = Current.ticks
        if ticks is None:
            write(path, text, mode)
            return
        try:
            ticks.before(f"write {path.name}")
        except DriverError:
            raise record.RecordError("the disk is full") from None
        write(path, text, mode)
        try:
            ticks.after(f"write {path.name}")
        except DriverError:
            raise record.RecordError("the disk is full") from None

    for module in (record, cdi, health, seats):
        monkeypatch.setattr(module, "write_file", counted)
    yield
    Current.ticks = None


class Current:
    """The world whose disk is written to."""

    ticks: Ticks | None = None


def world_in(folder: Path, gpus: int = 1) -> World:
    Current.ticks = None
    world = World(folder, gpus)
    Current.ticks = world.ticks
    return world


def life(world: World) -> None:
    """A stranger's neighbour, an instance made and used, released, and the place used again."""
    world.hardware.stranger_makes("GPU-0", "1g.6gb", 1)
    world.office.place("a", "GPU-0", "2g.12gb", 2, 2)
    world.settle()
    world.check()
    world.office.release("a")
    world.settle()
    world.check()
    world.office.place("b", "GPU-0", "1g.6gb", 3, 1)
    world.office.place("c", "GPU-0", "1g.6gb", 2, 1)
    world.settle()
    world.check()
    assert len(world.hardware.strangers) == 1


def test_a_life_without_accidents(tmp_path: Path) -> None:
    world = world_in(tmp_path)
    life(world)
    assert world.deaths == 0
    assert {"b", "c"} == {allocation for allocation, _ in world.office.wanted}


def test_killed_before_and_after_every_step(tmp_path: Path) -> None:
    """Every step of a life, once before and once after its effect."""
    calm = world_in(tmp_path / "calm")
    life(calm)
    total = calm.ticks.count
    tried = 0
    for moment in range(2, 2 * total + 2):
        world = world_in(tmp_path / str(moment))
        world.ticks.kill_at = {moment}
        life(world)
        assert world.office.failures == {}
        tried += world.deaths
    print(f"{tried} deaths in {total} steps of a life, each healed")
    assert tried > total


def test_killed_while_making_and_released_before_the_next_start(tmp_path: Path) -> None:
    """What was begun and is no longer wanted is taken down from wherever it has got."""
    calm = world_in(tmp_path / "calm")
    calm.office.place("a", "GPU-0", "2g.12gb", 2, 2)
    calm.turn()
    total = calm.ticks.count
    assert total > 8
    for moment in range(2, 2 * total + 2):
        world = world_in(tmp_path / str(moment))
        world.hardware.stranger_makes("GPU-0", "1g.6gb", 1)
        world.office.place("a", "GPU-0", "2g.12gb", 2, 2)
        world.ticks.kill_at = {moment}
        world.turn()
        world.office.release("a")
        world.settle()
        world.check()
        assert world.office.wanted == {}
        assert [there.uuid for _, there in world.hardware.everything] == ["MIG-1"]


def test_an_intent_that_came_to_nothing_claims_nothing(tmp_path: Path) -> None:
    """After a refusal, what somebody makes at that place is theirs, even half made."""
    world = world_in(tmp_path)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)

    def refuse(*args: object) -> None:
        raise DriverError(23, "create_gpu_instance")

    world.driver.create_gpu_instance = refuse  # type: ignore[method-assign, assignment]
    world.turn()
    assert len(world.carrier.record) == 0
    theirs = world.hardware.add("GPU-0", 14, 0, False)
    world.settle()
    assert world.hardware.everything == [("GPU-0", theirs)]
    assert "which is not ours" in world.office.failures["a", 0]


def test_every_call_fails_with_every_code(tmp_path: Path) -> None:
    """Every call of a life fails once, undone or done, with several codes; then all is well."""
    calm = world_in(tmp_path / "calm")
    life(calm)
    tried = 0
    for tick in range(1, calm.ticks.count + 1):
        for number, done in enumerate((False, True)):
            code = CODES[(tick + 7 * number) % len(CODES)]
            world = world_in(tmp_path / f"{tick}-{number}")
            world.ticks.fail_at = {tick: (code, done)}
            life(world)
            assert world.office.failures == {}
            tried += 1
    print(f"{tried} calls failed, each was made good")


def test_a_call_that_always_fails_is_a_failure_that_explains_itself(tmp_path: Path) -> None:
    for code in CODES:
        world = world_in(tmp_path / str(code))
        world.office.place("a", "GPU-0", "1g.6gb", 0, 1)

        def refuse(*args: object, code: int = code) -> None:
            raise DriverError(code, "create_compute_instance")

        world.driver.create_compute_instance = refuse  # type: ignore[method-assign, assignment]
        world.settle(80)
        assert "given up after 8 attempts" in world.office.failures["a", 0]
        assert ("a", 0) in world.office.released
        world.check()
        assert world.hardware.everything == []


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_happens_ends_well(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Allocations, strangers, reboots, faults and deaths in any order; then quiet."""
    world = world_in(tmp_path_factory.mktemp("world"), gpus=2)
    draw = data.draw
    world.ticks.kill_at = set(draw(st.lists(st.integers(2, 600), max_size=6)))
    for tick in draw(st.lists(st.integers(1, 300), max_size=8)):
        world.ticks.fail_at[tick] = (draw(st.sampled_from(CODES)), draw(st.booleans()))
    number = 0
    for _ in range(draw(st.integers(1, 14))):
        gpu = draw(st.sampled_from(["GPU-0", "GPU-1"]))
        profile, size, start = draw(st.sampled_from(PLACES))
        match draw(st.sampled_from(["place", "place", "release", "stranger", "destroy", "turn",
                                    "busy", "idle", "evict", "adopt", "reboot", "restart", "lose",
                                    "back"])):  # fmt: skip
            case "place":
                if not world.office.blocked(gpu, start, size):
                    number += 1
                    world.office.place(f"a{number}", gpu, profile, start, size)
            case "release":
                present = [w for w in world.office.wanted.values() if w.present]
                if present:
                    world.office.release(draw(st.sampled_from(present)).allocation)
            case "stranger":
                world.hardware.stranger_makes(gpu, profile, start)
            case "destroy":
                here = world.hardware.gpus[gpu]
                if here:
                    gone = draw(st.sampled_from(here))
                    here.remove(gone)
                    world.hardware.strangers -= {c.uuid for c in gone.compute}
            case "busy":
                world.hardware.busy.add((gpu, start))
            case "idle":
                world.hardware.busy.clear()
            case "evict" | "adopt" as order:
                foreign = world.office.told.get("foreign", [])
                assert isinstance(foreign, list)
                named = [f for f in foreign if f["uuid"] in world.hardware.strangers]
                if named:
                    one = draw(st.sampled_from(named))
                    if order == "evict":
                        world.office.evict.append(
                            Evicted(one["gpu"], one["profile"], one["start"], one["uuid"])
                        )
                    else:
                        number += 1
                        world.office.place(
                            f"a{number}", one["gpu"], one["profile"], one["start"], one["size"]
                        )
                        adopted = world.office.wanted[f"a{number}", 0]
                        world.office.wanted[f"a{number}", 0] = replace(adopted, uuid=one["uuid"])
                        world.hardware.strangers.discard(one["uuid"])
            case "reboot":
                world.hardware.reboot()
                world.start()
            case "restart":
                world.start()
            case "lose":
                world.hardware.missing.add(gpu)
            case "back":
                world.hardware.missing.clear()
        strangers = set(world.hardware.strangers)
        evicted = {e.uuid for e in world.office.evict}
        world.turn()
        assert strangers - evicted <= world.hardware.strangers, "a stranger's instance was touched"
    world.hardware.busy.clear()
    world.hardware.missing.clear()
    world.ticks.kill_at, world.ticks.fail_at = set(), {}
    strangers = set(world.hardware.strangers) - {e.uuid for e in world.office.evict}
    world.settle(150)
    assert strangers <= world.hardware.strangers
    world.check()
