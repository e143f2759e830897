"""From the driver's words to a geometry, and where it differs from the catalog."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.agent.simulated import World

from slicewise.agent.discovery import examine, geometry_record, model_name, problem, ranges
from slicewise.agent.driver import DriverError, GpuReading, ProfileReading
from slicewise.agent.node import _few
from slicewise.agent.text import discover, places
from slicewise.catalog import Catalog
from slicewise.catalog.entry import Entry

SCHEDULABLE = [entry for entry in Catalog.builtin().entries() if entry.geometry is not None]


def reading(entry: Entry) -> GpuReading:
    """A GPU as the catalog has it."""
    facts = {fact.name: fact for fact in entry.facts}
    return GpuReading(
        "GPU-0", 0, f"NVIDIA {entry.aliases[0] if entry.aliases else entry.model}",
        int(entry.memory_gb * 1024), mig=True, pending=True,
        profiles=tuple(
            ProfileReading(number, p.name, p.size, p.compute, 1, facts[p.name].max_instances or 1,
                           p.starts)
            for number, p in enumerate(entry.require().profiles)
        ),
    )  # fmt: skip


H200 = reading(Catalog.builtin().find("H200-141GB"))


@pytest.mark.parametrize("entry", SCHEDULABLE, ids=lambda entry: entry.model)
def test_what_the_catalog_knows_is_recognised(entry: Entry) -> None:
    facts = [fact.max_instances for fact in entry.facts]
    finding = examine(reading(entry))
    assert finding is not None
    if None not in facts:
        assert finding.disagreements == ()
        assert finding.model == entry.model
        assert finding.geometry is entry.geometry


def change(which: str, **changes: object) -> GpuReading:
    profiles = tuple(replace(p, **changes) if p.name == which else p for p in H200.profiles)  # type: ignore[arg-type]
    return replace(H200, profiles=profiles)


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        (change("1g.18gb", starts=(0, 1, 2, 3, 4, 5)),
         "1g.18gb: the driver offers starts 0-5, the catalog 0-6"),
        (change("2g.35gb", starts=(0, 2)),
         "2g.35gb: the driver offers starts 0,2, the catalog 0,2,4"),
        (change("3g.71gb", compute=4),
         "3g.71gb: it has 4 compute slices by the driver, 3 by the catalog"),
        (change("3g.71gb", size=3),
         "3g.71gb: it takes 3 memory slices by the driver, 4 by the catalog"),
        (change("1g.18gb+me", maximum=2),
         "1g.18gb+me: a GPU holds 2 by the driver, 1 by the catalog"),
        (change("7g.141gb", name="7g.150gb"),
         "7g.150gb: the driver offers it, the catalog does not know it"),
    ],
)  # fmt: skip
def test_a_disagreement_is_told_by_profile(gpu: GpuReading, told: str) -> None:
    finding = examine(gpu)
    assert finding is not None
    assert told in finding.disagreements
    assert finding.model == "H200"
    # The driver wins: its placements are the geometry's, the catalog's budgets stay.
    offered = {p.name: p.starts for p in gpu.profiles}
    assert {p.name: p.starts for p in finding.geometry.profiles} == offered
    assert [budget.name for budget in finding.geometry.budgets] == ["media-extension"]
    assert finding.geometry.profile("1g.18gb+me").uses == {"media-extension": 1}


def test_a_model_nobody_knows_is_described_by_its_driver() -> None:
    gpu = replace(H200, name="NVIDIA Z9 (secret)", pci_device="0xFFFF")
    finding = examine(gpu)
    assert finding is not None
    assert finding.model == "Z9-secret"
    assert "the catalog does not know NVIDIA Z9 (secret)" in finding.disagreements[0]
    geometry = finding.geometry
    assert (geometry.slices, geometry.compute, geometry.memory_gb) == (8, 7, 141)
    assert geometry.profile("1g.18gb+me").variant_of == "1g.18gb"
    assert geometry.profile("1g.18gb+me").uses == {"media-extension": 1}
    record = geometry_record(geometry)
    assert json.loads(json.dumps(record)) == record
    assert record["budgets"] == {"media-extension": 1}


def test_profiles_that_make_no_geometry_are_a_problem() -> None:
    broken = replace(H200, name="Z9", profiles=(replace(H200.profiles[0], starts=(0, 99)),))
    assert examine(broken) is None
    assert "make no geometry" in problem(broken)
    assert examine(replace(H200, mig=None, profiles=())) is None


def test_names_and_numbers_in_few_words() -> None:
    assert model_name("NVIDIA A100-SXM4-80GB") == "A100-SXM4-80GB"
    assert model_name("***") == "GPU"
    assert [ranges(n) for n in ([0, 1, 2], [0, 1], [4], [0, 2, 4])] == ["0-2", "0,1", "4", "0,2,4"]
    assert places(H200.profiles[0]) == "{0..6}:1"
    assert len(_few(["x"] * 100)) == 64
    assert _few(["x"] * 100)[-1] == "and 37 more"


def test_discover_tells_what_cannot_be_read(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    world.hardware.stranger_makes("GPU-0", "1g.6gb", 1)
    world.driver.pending["GPU-0"] = False
    world.hardware.add("GPU-0", 5, 2, False)
    text = discover(world.driver, as_json=False)
    assert "GPU 0 GPU-0: MIG on, off after a reset, 2 instances" in text
    assert "  1g.6gb at slice 1, GPU instance 0: MIG-1" in text
    assert "  2g.12gb at slice 2, GPU instance 1: no compute instance" in text
    world.driver.gpus = lambda: ["GPU-0", DriverError(15, "x")]  # type: ignore[method-assign]
    world.ticks.fail_at = {world.ticks.count + 1: (15, False)}
    text = discover(world.driver, as_json=False)
    assert text.count("the GPU is lost") == 2
    assert "GPU 0: GPU-0: the GPU is lost" in text
    told = json.loads(discover(world.driver, as_json=True))
    assert "problem" in told["gpus"][1]
    changed = replace(H200, uuid="GPU-0", profiles=change("2g.35gb", starts=(0, 2)).profiles)
    world.driver.read = lambda gpu: changed  # type: ignore[method-assign]
    text = discover(world.driver, as_json=False)
    assert "not as the catalog has it\n  2g.35gb: the driver offers starts" in text
