"""A geometry allows exactly what the published counters allow."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kubernetes.publishing import (
    Json,
    counters,
    decoded,
    device,
    legal_by_counters,
    legal_by_geometry,
    nvidia,
    publication,
)

from slicewise.catalog import Catalog, CatalogEntry
from slicewise.core.geometry import Geometry
from slicewise.kubernetes.devices.geometry import WHOLE
from slicewise.kubernetes.devices.pool_reading import Gpu, Library, Place, read_pool

MODELS = [entry for entry in Catalog.builtin().entries() if entry.geometry is not None]

OTHERWISE = {"Thor-iGPU"}
"""Its instances are distinguished by contexts, which the driver does not count."""

LIBRARY = Library()


def only_gpu(slices: list[Json]) -> Gpu:
    reading = read_pool(decoded(slices), LIBRARY)
    assert reading.trouble is None
    assert reading.odd == {}
    [gpu] = reading.gpus
    return gpu


def profiles(geometry: Geometry) -> set[tuple[object, ...]]:
    """A model's profiles without their budgets, which have other names here."""
    return {
        (p.name, p.size, p.compute, p.memory_gb, p.starts, p.variant_of)
        for p in geometry.profiles
        if p.name != WHOLE
    }


def as_in_the_catalog(geometry: Geometry) -> set[frozenset[Place]]:
    """The legal sets, without the whole GPU, which is not in the catalog."""
    legal = legal_by_geometry(geometry)
    return {places for places in legal if (WHOLE, 0) not in places}


def in_catalog_terms(slices: list[Json], geometry: Geometry) -> list[Json]:
    """The ResourceSlices with the catalog's budgets as counters, except for the memory slices."""

    def amounts(found: Json, amounts: dict[str, int]) -> Json:
        slices = {name: value for name, value in found.items() if name.startswith("memory-slice-")}
        return {**slices, **counters(amounts)}

    totals = {budget.name: budget.total for budget in geometry.all_budgets}
    for one in slices:
        for shared in one["spec"].get("sharedCounters", ()):
            shared["counters"] = amounts(shared["counters"], totals)
        for published in one["spec"].get("devices", ()):
            name = published["attributes"].get("profile", {}).get("string")
            needs = totals
            if name is not None:
                taken = geometry.needs(geometry.profile(name))
                needs = dict(zip(totals, taken, strict=True))
            [consumed] = published["consumesCounters"]
            consumed["counters"] = amounts(consumed["counters"], needs)
    return slices


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.model)
def test_every_model_is_recovered_from_nvidias_publication(entry: CatalogEntry) -> None:
    published = nvidia(entry.model)
    gpu = only_gpu(published)
    known = entry.require()
    assert gpu.geometry.slices == known.slices
    assert profiles(gpu.geometry) == profiles(known)
    assert gpu.geometry.compute == known.compute
    assert gpu.geometry.memory_gb == known.memory_gb
    assert gpu.geometry.has(WHOLE) == (not entry.architecture.startswith("Ampere"))
    legal = legal_by_geometry(gpu.geometry)
    assert {frozenset(gpu.devices[place] for place in places) for places in legal} == (
        legal_by_counters(published, set(gpu.places), gpu)
    )
    same = as_in_the_catalog(gpu.geometry) == legal_by_geometry(known)
    assert same == (entry.model not in OTHERWISE)


@pytest.mark.parametrize("entry", MODELS, ids=lambda entry: entry.model)
def test_every_model_is_recovered_from_its_budgets_as_counters(entry: CatalogEntry) -> None:
    known = entry.require()
    published = in_catalog_terms(nvidia(entry.model), known)
    gpu = only_gpu(published)
    assert profiles(gpu.geometry) == profiles(known)
    assert gpu.geometry.compute == known.compute
    assert as_in_the_catalog(gpu.geometry) == legal_by_geometry(known)


def test_an_h100_keeps_only_the_binding_budget() -> None:
    geometry = only_gpu(nvidia("H100-80GB-SXM5")).geometry
    assert [(b.name, b.total) for b in geometry.budgets] == [("ofa-engines", 1)]
    assert {p.name for p in geometry.profiles if p.uses} == {"1g.10gb+me", "7g.80gb", WHOLE}
    whole = geometry.profile(WHOLE)
    assert (whole.size, whole.compute, whole.memory_gb, whole.starts) == (8, 7, 80, (0,))
    assert whole.variant_of == "7g.80gb"
    assert [p.name for p in geometry.plain_profiles] == [
        "1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"
    ]  # fmt: skip


AMOUNTS = st.sampled_from(["0", "1", "2", "3", "500m", "1500m", "1Ki", "3Ki"])


@st.composite
def cards(draw: st.DrawFn) -> list[Json]:
    """A GPU of an unknown driver."""
    slices = draw(st.integers(2, 5))
    names = draw(st.lists(st.sampled_from(["cores", "links", "compute"]), unique=True))
    totals = {name: draw(st.sampled_from(["1", "2", "4", "2500m", "5Ki"])) for name in names}
    whole_total = {**totals, **{f"bank-{number}": "1" for number in range(slices)}}
    devices: list[Json] = []
    for number in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, slices))
        needs = {name: draw(AMOUNTS) for name in names}
        starts = draw(st.sets(st.integers(0, slices - size), min_size=1))
        for start in starts:
            window = {f"bank-{bank}": "1" for bank in range(start, start + size)}
            devices.append(device(f"d{number}-{start}", {**window, **needs}, f"kind{number}"))
    if draw(st.booleans()):
        devices.append(device("all", whole_total))
    return publication(whole_total, draw(st.permutations(devices)))


@given(cards())
def test_a_geometry_allows_exactly_what_the_counters_allow(published: list[Json]) -> None:
    reading = read_pool(decoded(published), LIBRARY)
    assert reading.trouble is None
    for name, odd in reading.odd.items():
        # The only anomalies generated: more than exists, or no device with a profile is left.
        assert "of which there is" in odd.reason or (
            name == "all" and odd.reason == "its GPU has no device with a profile"
        )
    for gpu in reading.gpus:
        assert {*gpu.places, *reading.odd} == {d["name"] for d in published[1]["spec"]["devices"]}
        legal = legal_by_geometry(gpu.geometry)
        assert {frozenset(gpu.devices[place] for place in places) for places in legal} == (
            legal_by_counters(published, set(gpu.places), gpu)
        )
        for budget in gpu.geometry.budgets:
            fewer = tuple(b for b in gpu.geometry.budgets if b is not budget)
            looser = tuple(
                replace(p, uses={n: used for n, used in p.uses.items() if n != budget.name})
                for p in gpu.geometry.profiles
            )
            assert legal_by_geometry(replace(gpu.geometry, budgets=fewer, profiles=looser)) > legal


@given(cards(), st.randoms(use_true_random=False))
def test_equal_gpus_share_a_geometry_in_any_order_of_devices(
    published: list[Json], random: Random
) -> None:
    first = read_pool(decoded(published), LIBRARY)
    random.shuffle(published[1]["spec"]["devices"])
    again = read_pool(decoded(published), LIBRARY)
    assert [g.geometry for g in first.gpus] == [g.geometry for g in again.gpus]
    assert [g.places for g in first.gpus] == [g.places for g in again.gpus]
    assert first.odd == again.odd
