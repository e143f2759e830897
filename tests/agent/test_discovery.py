"""Discovery: the geometry from the driver, and its differences from the catalog."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.agent.simulated import World

from slicewise.agent.discovery import (
    discover,
    format_numbers,
    format_placements,
    identify,
    model_name,
    unusable_reason,
)
from slicewise.agent.driver import DriverError, GpuReading, ProfileReading
from slicewise.agent.reports import _shorten, encode_geometry
from slicewise.catalog import Catalog
from slicewise.catalog.entry import CatalogEntry

SCHEDULABLE = [entry for entry in Catalog.builtin().entries() if entry.geometry is not None]


def reading(entry: CatalogEntry) -> GpuReading:
    """A GPU as the catalog describes it."""
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
def test_models_of_the_catalog_are_identified(entry: CatalogEntry) -> None:
    facts = [fact.max_instances for fact in entry.facts]
    model = identify(reading(entry))
    assert model is not None
    if None not in facts:
        assert model.differences == ()
        assert model.name == entry.model
        assert model.geometry is entry.geometry


def change(which: str, **changes: object) -> GpuReading:
    profiles = tuple(replace(p, **changes) if p.name == which else p for p in H200.profiles)  # type: ignore[arg-type]
    return replace(H200, profiles=profiles)


@pytest.mark.parametrize(
    ("gpu", "difference"),
    [
        (change("1g.18gb", starts=(0, 1, 2, 3, 4, 5)),
         "1g.18gb: starts 0-5 in the driver, 0-6 in the catalog"),
        (change("2g.35gb", starts=(0, 2)),
         "2g.35gb: starts 0,2 in the driver, 0,2,4 in the catalog"),
        (change("3g.71gb", compute=4),
         "3g.71gb: 4 compute slices in the driver, 3 in the catalog"),
        (change("3g.71gb", size=3),
         "3g.71gb: 3 memory slices in the driver, 4 in the catalog"),
        (change("1g.18gb+me", maximum=2),
         "1g.18gb+me: 2 instances per GPU in the driver, 1 in the catalog"),
        (change("7g.141gb", name="7g.150gb"),
         "7g.150gb: offered by the driver, unknown to the catalog"),
    ],
)  # fmt: skip
def test_differences_are_reported_by_profile(gpu: GpuReading, difference: str) -> None:
    model = identify(gpu)
    assert model is not None
    assert difference in model.differences
    assert model.name == "H200"
    # Placements come from the driver, budgets from the catalog.
    offered = {p.name: p.starts for p in gpu.profiles}
    assert {p.name: p.starts for p in model.geometry.profiles} == offered
    assert [budget.name for budget in model.geometry.budgets] == ["media-extension"]
    assert model.geometry.profile("1g.18gb+me").uses == {"media-extension": 1}


def test_unknown_model_is_described_by_its_driver() -> None:
    gpu = replace(H200, name="NVIDIA Z9 (secret)", pci_device="0xFFFF")
    model = identify(gpu)
    assert model is not None
    assert model.name == "Z9-secret"
    assert "the catalog does not know NVIDIA Z9 (secret)" in model.differences[0]
    geometry = model.geometry
    assert (geometry.slices, geometry.compute, geometry.memory_gb) == (8, 7, 141)
    assert geometry.profile("1g.18gb+me").variant_of == "1g.18gb"
    assert geometry.profile("1g.18gb+me").uses == {"media-extension": 1}
    record = encode_geometry(geometry)
    assert json.loads(json.dumps(record)) == record
    assert record["budgets"] == {"media-extension": 1}


def test_invalid_profiles_are_a_problem() -> None:
    broken = replace(H200, name="Z9", profiles=(replace(H200.profiles[0], starts=(0, 99)),))
    assert identify(broken) is None
    assert "are not a valid geometry" in unusable_reason(broken)
    assert identify(replace(H200, mig=None, profiles=())) is None


def test_formatting() -> None:
    assert model_name("NVIDIA A100-SXM4-80GB") == "A100-SXM4-80GB"
    assert model_name("***") == "GPU"
    assert [format_numbers(n) for n in ([0, 1, 2], [0, 1], [4], [0, 2, 4])] == [
        "0-2",
        "0,1",
        "4",
        "0,2,4",
    ]
    assert format_placements(H200.profiles[0]) == "{0..6}:1"
    assert len(_shorten(["x"] * 100)) == 64
    assert _shorten(["x"] * 100)[-1] == "and 37 more"


def test_discover_reports_read_errors(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    world.hardware.create_foreign("GPU-0", "1g.6gb", 1)
    world.driver.pending["GPU-0"] = False
    world.hardware.add("GPU-0", 5, 2, False)
    text = discover(world.driver, as_json=False)
    assert "GPU 0 GPU-0: MIG on, off after a reset, 2 instances" in text
    assert "  1g.6gb at slice 1, GPU instance 0: MIG-1" in text
    assert "  2g.12gb at slice 2, GPU instance 1: no compute instance" in text
    world.driver.gpus = lambda: ["GPU-0", DriverError(15, "x")]  # type: ignore[method-assign]
    world.steps.fail_at = {world.steps.count + 1: (15, False)}
    text = discover(world.driver, as_json=False)
    assert text.count("the GPU is lost") == 2
    assert "GPU 0: GPU-0: the GPU is lost" in text
    reported = json.loads(discover(world.driver, as_json=True))
    assert "problem" in reported["gpus"][1]
    changed = replace(H200, uuid="GPU-0", profiles=change("2g.35gb", starts=(0, 2)).profiles)
    world.driver.read = lambda gpu: changed  # type: ignore[method-assign]
    text = discover(world.driver, as_json=False)
    assert "differs from the catalog\n  2g.35gb: starts 0,2 in the driver" in text
