"""The built-in models match the hardware's tables and are consistent."""

from collections.abc import Iterator
from itertools import combinations

import pytest

from slicewise.catalog import Catalog, CatalogEntry, Level
from slicewise.catalog.library import name_key
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry, Placement, Profile

ENTRIES = Catalog.builtin().entries()
SCHEDULABLE = [entry for entry in ENTRIES if entry.geometry is not None]
FAMILY = [e for e in SCHEDULABLE if (e.memory_slices, e.compute_slices) == (8, 7)]
ENGINES = ("copy", "decoder", "encoder", "jpeg", "ofa")

Row = tuple[int, tuple[int, ...], int, int, int | None]

# compute slices, starts, size, most instances, nvidia-smi id: NVIDIA's table of the A100
A100_ROWS: list[Row] = [
    (1, (0, 1, 2, 3, 4, 5, 6), 1, 7, 19),
    (1, (0, 1, 2, 3, 4, 5, 6), 1, 1, 20),
    (1, (0, 2, 4, 6), 2, 4, 15),
    (2, (0, 2, 4), 2, 3, 14),
    (3, (0, 4), 4, 2, 9),
    (4, (0,), 4, 1, 5),
    (7, (0,), 8, 1, 0),
]


def rows(entry: CatalogEntry) -> list[tuple[int, tuple[int, ...], int, int | None, int | None]]:
    geometry = entry.require()
    return [
        (f.compute, geometry.profile(f.name).starts, f.size, f.max_instances, f.id)
        for f in entry.facts
    ]


def layouts(geometry: Geometry, slice_: int = 0) -> Iterator[tuple[Placement, ...]]:
    """Every set of placements without overlap, whatever the budgets say."""
    if slice_ >= geometry.slices:
        yield ()
        return
    yield from layouts(geometry, slice_ + 1)
    for placement in geometry.placements:
        if placement.start == slice_:
            for rest in layouts(geometry, slice_ + placement.profile.size):
                yield (placement, *rest)


def within_budgets(geometry: Geometry, layout: tuple[Placement, ...]) -> bool:
    return all(
        sum(geometry.needs(p.profile)[i] for p in layout) <= budget.total
        for i, budget in enumerate(geometry.all_budgets)
    )


def most_together(geometry: Geometry, profile: Profile) -> int:
    """How many instances of one profile an empty GPU can hold, by trying every set of starts."""
    found = 0
    for number in range(1, len(profile.starts) + 1):
        for starts in combinations(profile.starts, number):
            windows = [profile.window(start) for start in starts]
            apart = sum(windows).bit_count() == number * profile.size
            affordable = all(
                need * number <= budget.total
                for need, budget in zip(geometry.needs(profile), geometry.all_budgets, strict=True)
            )
            if apart and affordable:
                found = number
    return found


def test_there_are_28_models() -> None:
    assert len(ENTRIES) == 28
    assert len(FAMILY) == 21


@pytest.mark.parametrize("entry", ENTRIES, ids=repr)
def test_every_model_has_its_facts_and_confidence(entry: CatalogEntry) -> None:
    assert entry.architecture
    assert entry.confidence is not None
    assert entry.sources
    assert entry.facts
    assert Catalog.builtin().find(entry.model) is entry


def test_files_are_named_after_their_model() -> None:
    # Looking a name up reads only the file of that name, so this must hold.
    for entry in ENTRIES:
        assert name_key(entry.model) == entry.model.lower()
        assert Catalog.builtin().find(entry.model.lower()).model == entry.model


def test_no_two_models_share_a_name() -> None:
    keys = [name_key(name) for entry in ENTRIES for name in entry.names]
    assert len(keys) == len(set(keys))


def test_no_two_models_share_a_device_id() -> None:
    ids = [device_id for entry in ENTRIES for device_id in entry.pci_device_ids]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("entry", FAMILY, ids=repr)
def test_models_of_eight_slices_are_laid_out_like_the_a100(entry: CatalogEntry) -> None:
    assert rows(entry) == A100_ROWS


def test_the_h200_is_what_nvidia_smi_prints() -> None:
    entry = Catalog.builtin().find("H200")
    assert [(f.name, *row) for f, row in zip(entry.facts, rows(entry), strict=True)] == [
        (name, *row)
        for name, row in zip(
            ["1g.18gb", "1g.18gb+me", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"],
            A100_ROWS,
            strict=True,
        )
    ]


@pytest.mark.parametrize("entry", FAMILY, ids=repr)
def test_the_driver_fills_eight_slices_from_the_end(entry: CatalogEntry) -> None:
    assert [p.preferred for p in entry.require().profiles] == [
        (6, 4, 5, 0, 1, 2, 3),
        (6, 4, 5, 0, 1, 2, 3),
        (6, 4, 0, 2),
        (4, 0, 2),
        (4, 0),
        (),
        (),
    ]


@pytest.mark.parametrize("entry", FAMILY, ids=repr)
def test_on_eight_slices_room_in_memory_means_room_in_compute(entry: CatalogEntry) -> None:
    geometry = entry.require()
    assert max(sum(p.profile.compute for p in lay) for lay in layouts(geometry)) == 7


@pytest.mark.parametrize("entry", SCHEDULABLE, ids=repr)
def test_the_maximum_instances_fit(entry: CatalogEntry) -> None:
    geometry = entry.require()
    stated = {f.name: f.max_instances for f in entry.facts if f.max_instances is not None}
    assert {name: most_together(geometry, geometry.profile(name)) for name in stated} == stated
    assert len(stated) == len(entry.facts)


# Without Thor: every profile there lists one copy engine, the whole GPU too.
WITH_ENGINES = [
    e for e in SCHEDULABLE if all(f.engines for f in e.facts) and e.model != "Thor-iGPU"
]
WITH_SM_COUNTS = [e for e in SCHEDULABLE if all(f.sm_count for f in e.facts)]


@pytest.mark.unmeasured
@pytest.mark.parametrize("entry", WITH_ENGINES, ids=repr)
def test_budgets_refuse_exactly_what_the_engines_cannot_give(entry: CatalogEntry) -> None:
    geometry = entry.require()
    engines = {f.name: [getattr(f.engines, name) for name in ENGINES] for f in entry.facts}
    totals = [max(column) for column in zip(*engines.values(), strict=True)]
    for layout in layouts(geometry):
        taken = [engines[p.profile.name] for p in layout]
        sums = [sum(column) for column in zip(*taken, strict=True)]
        possible = all(have <= total for have, total in zip(sums, totals, strict=False))
        assert within_budgets(geometry, layout) == possible, layout


@pytest.mark.parametrize("entry", WITH_SM_COUNTS, ids=repr)
def test_no_layout_needs_more_multiprocessors_than_the_gpu_has(entry: CatalogEntry) -> None:
    counts = {f.name: f.sm_count for f in entry.facts if f.sm_count is not None}
    total = max(counts.values())
    for layout in layouts(entry.require()):
        assert sum(counts[p.profile.name] for p in layout) <= total


@pytest.mark.parametrize("entry", ENTRIES, ids=repr)
def test_a_variant_is_marked_and_shares_the_windows_of_its_plain_profile(
    entry: CatalogEntry,
) -> None:
    by_name = {f.name: f for f in entry.facts}
    for facts in entry.facts:
        plain = next((facts.name[: -len(s)] for s in SUFFIXES if facts.name.endswith(s)), None)
        assert facts.variant_of == plain
        if plain is not None:
            assert by_name[plain].size == facts.size
            if entry.geometry is not None:
                assert (
                    entry.geometry.profile(plain).starts
                    == entry.geometry.profile(facts.name).starts
                )


SUFFIXES = ("+me.all", "+me", "-me", "+gfx")


def names_of(layout: tuple[Placement, ...]) -> list[str]:
    return sorted(p.profile.name for p in layout)


@pytest.mark.parametrize(
    ("model", "together"),
    [
        ("A100", ["1g.10gb+me", "1g.10gb+me"]),
        ("A30", ["1g.6gb+me", "2g.12gb+me"]),
        ("RTX PRO 6000", ["1g.24gb", "1g.24gb+me.all"]),
        ("RTX PRO 6000", ["1g.24gb+me", "2g.48gb+me.all"]),
        ("RTX PRO 6000", ["1g.24gb+me", "1g.24gb+me"]),
        ("RTX PRO 5000", ["1g.24gb", "1g.24gb+me.all"]),
        ("RTX PRO 4500", ["1g.16gb+gfx", "1g.16gb+me.all"]),
        ("Thor", ["1g.0gb", "2g.0gb"]),
        ("Thor", ["1g.0gb+gfx", "2g.0gb+gfx"]),
    ],
)
def test_these_exclude_each_other(model: str, together: list[str]) -> None:
    geometry = Catalog.builtin().find(model).require()
    found = [lay for lay in layouts(geometry) if names_of(lay) == sorted(together)]
    assert found
    assert not any(within_budgets(geometry, layout) for layout in found)


@pytest.mark.parametrize(
    ("model", "together"),
    [
        ("A100", ["1g.10gb+me", "2g.20gb", "3g.40gb", "1g.10gb"]),
        ("A30", ["1g.6gb+me", "1g.6gb", "2g.12gb"]),
        ("RTX PRO 6000", ["1g.24gb+me.all", "1g.24gb-me", "2g.48gb-me"]),
        ("RTX PRO 6000", ["1g.24gb+me", "1g.24gb+gfx", "2g.48gb"]),
        ("RTX PRO 6000D", ["1g.42gb", "1g.42gb+gfx"]),
        ("Thor", ["1g.0gb+me", "2g.0gb+gfx"]),
    ],
)
def test_these_fit_together(model: str, together: list[str]) -> None:
    geometry = Catalog.builtin().find(model).require()
    found = [lay for lay in layouts(geometry) if names_of(lay) == sorted(together)]
    assert any(within_budgets(geometry, layout) for layout in found)


def test_the_one_model_with_unknown_placements_is_refused() -> None:
    refused = [entry for entry in ENTRIES if entry.geometry is None]
    assert [entry.model for entry in refused] == ["GB300-DGX-Station-252GB"]
    (entry,) = refused
    assert entry.confidence is not None
    assert entry.confidence.placements is Level.UNKNOWN
    with pytest.raises(SlicewiseError, match="cannot be scheduled: where its profiles may start"):
        entry.require()
