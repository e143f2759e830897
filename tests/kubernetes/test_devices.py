"""Reading pools: which publications count, which devices are not offered, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.kubernetes.publishing import Json, decoded, device, nvidia, publication
from tests.kubernetes_e2e.nvidia import devices_at, gpu_uuid

from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.devices.geometry import WHOLE
from slicewise.kubernetes.devices.pool_reading import Gpu, Library, PoolReading, read_pool

H100 = "H100-80GB-SXM5"
BANKS = {"bank-0": 1, "bank-1": 1, "bank-2": 1}
TOTALS: dict[str, str | int] = {**BANKS, "cores": 6}


def reading(slices: list[Json], library: Library | None = None) -> PoolReading:
    return read_pool(decoded(slices), library or Library())


def half(start: int, **more: Any) -> Json:
    """A sound device: one bank and two cores."""
    return device(f"half-{start}", {f"bank-{start}": 1, "cores": 2}, "half", **more)


HALVES = [half(0), half(1), half(2)]


def read_cards(devices: list[Json], totals: Mapping[str, str | int] = TOTALS) -> PoolReading:
    return reading(publication(totals, devices))


def only(found: PoolReading) -> Gpu:
    assert found.trouble is None
    [gpu] = found.gpus
    return gpu


# A node with NVIDIA's driver


def test_a_node_of_nvidias_driver() -> None:
    found = reading(nvidia(H100, gpus=11, node="n7"))
    assert (found.driver, found.pool, found.generation) == ("gpu.nvidia.com", "n7", 1)
    assert found.trouble is None
    assert found.odd == {}
    assert [gpu.counter_set for gpu in found.gpus] == [f"gpu-{n}-counter-set" for n in range(11)]
    assert len({id(gpu.geometry) for gpu in found.gpus}) == 1
    for number, gpu in enumerate(found.gpus):
        assert (gpu.driver, gpu.pool, gpu.node_name) == ("gpu.nvidia.com", "n7", "n7")
        assert gpu.uuid == gpu_uuid("n7", number)
        assert gpu.geometry.model == "NVIDIA-H100"
        for start, name in devices_at(H100, number, "1g.10gb+me").items():
            assert gpu.devices["1g.10gb+me", start] == name
            assert gpu.places[name] == ("1g.10gb+me", start)
        assert gpu.devices[WHOLE, 0] == f"gpu-{number}"
        assert set(gpu.devices) == {(p.profile.name, p.start) for p in gpu.geometry.placements}
        assert {name: place for place, name in gpu.devices.items()} == gpu.places


def test_counters_and_devices_in_one_slice_as_for_older_clusters() -> None:
    shared, *others = nvidia(H100, gpus=2)
    for number, one in enumerate(others):
        one["spec"]["sharedCounters"] = [shared["spec"]["sharedCounters"][number]]
        one["spec"]["pool"]["resourceSliceCount"] = 2
    assert [g.devices for g in reading(others).gpus] == [
        g.devices for g in reading(nvidia(H100, gpus=2)).gpus
    ]


def test_attributes_may_stand_in_any_domain() -> None:
    published = nvidia(H100)
    for one in published[1]["spec"]["devices"]:
        one["attributes"] = {
            name if "/" in name else f"gpu.nvidia.com/{name}": value
            for name, value in one["attributes"].items()
        }
    one["attributes"] = {
        name.replace("gpu.nvidia.com", "other.example.com"): value
        for name, value in one["attributes"].items()
    }
    assert only(reading(published)).places == only(reading(nvidia(H100))).places


def test_a_library_that_forgets_still_gives_the_same_geometry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slicewise.kubernetes.devices.geometry._MAX_SHAPES", 1)
    library = Library()
    models = [only(reading(nvidia(model), library)).geometry for model in (H100, "A30", H100)]
    assert models[0] is models[2]


# Generations and completeness


def test_only_the_newest_generation_counts() -> None:
    older, newer = nvidia("A30"), nvidia(H100)
    for one in newer:
        one["spec"]["pool"]["generation"] = 2
    found = reading([*newer, *older])
    assert found.generation == 2
    assert only(found).geometry.model == "NVIDIA-H100"


@pytest.mark.parametrize("kept", [[0], [1], [0, 1, 1]])
def test_an_incomplete_generation_gives_nothing(kept: list[int]) -> None:
    published = nvidia(H100)
    for one in published:
        one["spec"]["pool"]["generation"] = 2
    found = reading([*(published[n] for n in kept), *nvidia(H100)])
    assert found.trouble == (
        f"pool n1 of gpu.nvidia.com: {len(kept)} of 2 slices of generation 2 exist"
    )
    assert (found.gpus, found.odd) == ((), {})


def test_a_pool_that_contradicts_itself_gives_nothing() -> None:
    twice = publication(TOTALS, [half(0), half(0)])
    assert reading(twice).trouble == "pool p of cards.example.com: device half-0 exists twice"
    sets = publication(TOTALS, HALVES)
    sets[0]["spec"]["sharedCounters"] *= 2
    assert "counter set card exists twice" in str(reading(sets).trouble)
    nowhere = read_cards([device("d", {"bank-0": 1}, "half", counter_set="other")])
    assert "device d: no counter set other" in str(nowhere.trouble)
    unknown = read_cards([device("d", {"bank-9": 1}, "half")])
    assert "device d: no counter bank-9 in card" in str(unknown.trouble)
    for found in (reading(twice), reading(sets), nowhere, unknown):
        assert found.gpus == ()


def test_a_pool_without_slices_raises() -> None:
    with pytest.raises(SlicewiseError, match="without slices"):
        read_pool([], Library())


# Another driver


def test_another_driver_with_other_names() -> None:
    devices = [
        *HALVES,
        *(
            device(f"big-{n}", {f"bank-{n}": 1, f"bank-{n + 1}": 1, "cores": 3}, "big")
            for n in (0, 1)
        ),
        device("card", TOTALS, capacity={"memory": {"value": "24Gi"}}),
    ]
    gpu = only(read_cards(devices))
    geometry = gpu.geometry
    assert (geometry.model, geometry.slices, geometry.compute) == ("GPU", 3, 3)
    assert {p.name: (p.size, p.compute, p.starts) for p in geometry.profiles} == {
        "half": (1, 1, (0, 1, 2)),
        "big": (2, 1, (0, 1)),
        WHOLE: (3, 3, (0,)),
    }
    # No other device has the whole window, so the whole GPU counts by itself.
    assert geometry.profile(WHOLE).variant_of is None
    assert geometry.profile(WHOLE).memory_gb == 24
    assert geometry.budgets == ()
    assert gpu.uuid == ""


def test_compute_by_the_share_of_multiprocessors() -> None:
    totals = {**BANKS, "Multiprocessors": 96}
    needs = {"small": 16, "middle": 30, "large": 96, "none": 0}
    devices = [
        device(name, {"bank-0": 1, "Multiprocessors": taken}, name) for name, taken in needs.items()
    ]
    geometry = only(read_cards(devices, totals)).geometry
    assert {p.name: p.compute for p in geometry.profiles} == {
        "small": 1, "middle": 2, "large": 6, "none": 0
    }  # fmt: skip


def test_compute_slices_never_forbid_what_the_counters_allow() -> None:
    devices = [device(f"d{n}", {f"bank-{n}": 1}, "2g.10gb") for n in range(3)]
    geometry = only(read_cards(devices)).geometry
    assert (geometry.compute, geometry.profile("2g.10gb").compute) == (6, 2)


def test_memory_by_capacity_if_the_name_has_none() -> None:
    def sized(name: str, value: str) -> Json:
        return device(
            name, {"bank-0": 1}, name, capacity={"cards.example.com/memory": {"value": value}}
        )

    geometry = only(read_cards([sized("a", "9984Mi"), sized("b", "lots")])).geometry
    assert {p.name: p.memory_gb for p in geometry.profiles} == {"a": 10, "b": 0}
    assert geometry.memory_gb == 10


def test_a_variant_has_the_window_of_a_plain_profile() -> None:
    totals = {f"bank-{n}": 1 for n in range(4)}

    def window(name: str, size: int) -> Json:
        return device(name.replace("+", "-p-"), {f"bank-{n}": 1 for n in range(size)}, name)

    geometry = only(
        read_cards(
            [
                window("1g.5gb", 1),
                window("1g.5gb+me", 1),
                window("1g.5gb-me", 1),
                window("2g.5gb+me", 2),
                window("tall", 1),
                window("tall-er", 3),
                window("4g.20gb", 4),
                window("4g.20gb+gfx", 4),
            ],
            totals,
        )
    ).geometry
    assert {p.name: p.variant_of for p in geometry.profiles} == {
        "1g.5gb": None, "1g.5gb+me": "1g.5gb", "1g.5gb-me": "1g.5gb",
        "2g.5gb+me": None, "tall": None, "tall-er": None,
        "4g.20gb": None, "4g.20gb+gfx": "4g.20gb",
    }  # fmt: skip


def test_the_whole_gpu_gets_an_unused_profile_name() -> None:
    gpu = only(read_cards([*HALVES, device("one", BANKS, "gpu"), device("all", TOTALS)]))
    assert gpu.places["one"] == ("gpu", 0)
    assert gpu.places["all"] == ("gpu~", 0)
    assert gpu.geometry.profile("gpu~").variant_of == "gpu"


def test_the_slices_are_the_family_that_all_devices_use() -> None:
    totals = {**BANKS, **{f"port-{n}": 1 for n in range(5)}, "odd-0": 1, "odd-2": 1, "lone-0": 1}
    gpu = only(read_cards(HALVES, {**totals, "cores": 6}))
    assert gpu.geometry.slices == 3
    assert set(gpu.places) == {"half-0", "half-1", "half-2"}


def test_different_gpus_of_one_name_get_different_models() -> None:
    library = Library()
    published = nvidia(H100)
    plain = only(reading(published, library)).geometry
    published[1]["spec"]["devices"] = [
        d for d in published[1]["spec"]["devices"] if "+me" not in str(d["attributes"])
    ]
    lesser = only(reading(published, library)).geometry
    assert plain.model == "NVIDIA-H100"
    assert lesser.model.startswith("NVIDIA-H100~")
    assert only(reading(published, library)).geometry is lesser
    for one in published[1]["spec"]["devices"]:
        one["attributes"]["productName"]["string"] = " NVIDIA (R) H100/Other "
    assert only(reading(published, library)).geometry.model == "NVIDIA-R-H100-Other"


def test_a_counter_may_be_called_compute() -> None:
    totals = {**BANKS, "compute": 2}
    devices = [device(f"d{n}", {f"bank-{n}": 1, "compute": 1}, "2g.10gb") for n in range(3)]
    # Without own multiples, the compute budget is sufficient.
    assert only(read_cards(devices, totals)).geometry.budgets == ()
    more = [*devices, device("e", {"bank-2": 1}, "2g.20gb")]
    geometry = only(read_cards(more, totals)).geometry
    assert [(b.name, b.total) for b in geometry.budgets] == [("compute~", 2)]


def test_two_names_for_one_place() -> None:
    other = {**half(0), "name": "twin"}
    gpu = only(read_cards([*HALVES, other]))
    assert gpu.devices["half", 0] == "half-0"
    assert gpu.places["twin"] == gpu.places["half-0"] == ("half", 0)
    hurt = [{**HALVES[0], "taints": [{"key": "ill", "effect": "NoSchedule"}]}, other]
    assert only(read_cards(hurt)).devices["half", 0] == "twin"


# Devices that are not offered


def test_the_taints_of_a_gpu_are_those_of_its_devices_that_keep_claims_away() -> None:
    taint = {"key": "ill.example.com", "value": "yes", "effect": "NoExecute"}
    note = {"key": "seen.example.com", "effect": "None"}
    gpu = only(
        read_cards(
            [
                half(0, taints=[note, taint]),
                half(1, taints=[note]),
                half(2, taints=[{"key": "ill", "effect": "NoSchedule"}]),
            ]
        )
    )
    assert {(taint.key, taint.value, taint.effect) for taint in gpu.taints} == {
        ("ill.example.com", "yes", "NoExecute"),
        ("ill", "", "NoSchedule"),
    }
    assert set(gpu.devices.values()) == {"half-0", "half-1", "half-2"}
    assert set(gpu.places) == {"half-0", "half-1", "half-2"}
    assert gpu.geometry is not None


TWO_SETS = {
    **device("odd", {"bank-0": 1}, "half"),
    "consumesCounters": [
        {"counterSet": "card", "counters": {"bank-0": {"value": "1"}}},
        {"counterSet": "other", "counters": {"bank-0": {"value": "1"}}},
    ],
}


@pytest.mark.parametrize(
    ("odd", "reason", "touched"),
    [
        (device("odd", None, "half"), "it takes nothing from a counter set", ()),
        (TWO_SETS, "it takes from several counter sets", ("card", "other")),
        (
            device("odd", {"bank-0": 1, "bank-2": 1}, "wide"),
            "its slices 0, 2 are not next to each other",
            ("card",),
        ),
        (device("odd", {"cores": 1}, "wide"), "it takes no slices", ("card",)),
        (device("odd", {"bank-0": "500m"}, "wide"), "it takes a part of a slice", ("card",)),
        (
            device("odd", {"bank-0": 1, "cores": 7}, "wide"),
            "it takes 7 of counter cores, of which there is 6",
            ("card",),
        ),
        (
            device("odd", {"bank-0": 1, "cores": -1}, "wide"),
            "it takes -1 of counter cores, of which there is 6",
            ("card",),
        ),
        (
            device("odd", {"bank-0": "one"}, "wide"),
            "'one' is not a quantity; write it like 2, 1.5, 100m, 20Gi or 2e3",
            ("card",),
        ),
        (device("odd", {"bank-0": 1}, "a b"), "its profile 'a b' is not a name", ("card",)),
        (
            device("odd", {"bank-0": 1}),
            "it has no profile and is not the whole of its GPU",
            ("card",),
        ),
        (
            device("odd", TOTALS, attributes={"type": {"string": "vfio"}}),
            "it has no profile and is not the whole of its GPU",
            ("card",),
        ),
        (
            half(0, allowMultipleAllocations=True) | {"name": "odd"},
            "it can be allocated several times at once",
            ("card",),
        ),
        (
            half(0, bindingConditions=["ready"]) | {"name": "odd"},
            "it has binding conditions of its driver's own",
            ("card",),
        ),
    ],
)
def test_an_odd_device_is_not_offered_and_does_not_affect_others(
    odd: Json, reason: str, touched: tuple[str, ...]
) -> None:
    published = publication(TOTALS, [odd, *HALVES])
    published[0]["spec"]["sharedCounters"].append(
        {"name": "other", "counters": {"bank-0": {"value": "1"}}}
    )
    found = reading(published)
    assert {name: (o.reason, o.counter_sets) for name, o in found.odd.items()} == {
        "odd": (reason, touched)
    }
    sound = only(read_cards(HALVES))
    assert only(found).devices == sound.devices
    assert only(found).geometry.profiles[0].starts == (0, 1, 2)


def test_profiles_with_different_devices_are_not_offered() -> None:
    larger = device("larger", {"bank-0": 1, "bank-1": 1, "cores": 2}, "half")
    other = device("third", {"bank-0": 1, "cores": 1}, "third")
    found = read_cards([*HALVES, larger, other])
    assert set(only(found).places) == {"third"}
    assert {o.reason for o in found.odd.values()} == {
        "the devices of its profile half do not all take the same"
    }
    assert set(found.odd) == {"half-0", "half-1", "half-2", "larger"}


def test_a_gpu_without_parts_is_not_offered() -> None:
    found = read_cards([device("all", TOTALS)])
    assert found.gpus == ()
    assert found.odd["all"].reason == "its GPU has no device with a profile"


@pytest.mark.parametrize(
    ("totals", "reason"),
    [
        ({"bank-0": 1, "memory": 6}, "no counters that could be slices"),
        ({"bank-0": 1, "bank-2": 1, "memory": 6}, "no counters that could be slices"),
        ({"bank-0": 2, "bank-1": 2, "memory": 6}, "no counters that could be slices"),
        ({"bank-0": "much", "bank-1": 1, "memory": 6}, "'much' is not a quantity"),
        ({**{f"bank-{n}": 1 for n in range(17)}, "memory": 6}, "17 is not in 1..16"),
    ],
)
def test_an_invalid_gpu_is_not_offered(totals: dict[str, str | int], reason: str) -> None:
    found = read_cards([device("d", {"bank-0": 1, "memory": 2}, "half")], totals)
    assert found.trouble is None
    assert found.gpus == ()
    assert reason in found.odd["d"].reason
    assert found.odd["d"].counter_sets == ("card",)


@pytest.mark.parametrize("budgets", [0, 1])
def test_a_gpu_with_too_many_states_is_not_offered(budgets: int) -> None:
    totals = {**{f"bank-{n}": 1 for n in range(15)}, "cores": 10**6}
    devices = [
        device(f"d{n}", {f"bank-{n}": 1, "cores": budgets * (1 + 2**n)}, f"kind{n}")
        for n in range(15)
    ]
    found = read_cards(devices, totals)
    assert found.gpus == ()
    assert found.odd["d3"].reason == "its GPU can be in more than 20,000 states"


def test_compute_slices_may_make_too_many_states_as_well() -> None:
    devices = [
        device(f"d{n}-{compute}", {f"bank-{n}": 1}, f"{compute}g.1gb")
        for n in range(13)
        for compute in (1, 2)
    ]
    found = read_cards(devices, {f"bank-{n}": 1 for n in range(13)})
    assert found.gpus == ()
    assert found.odd["d3-1"].reason == "its GPU can be in more than 20,000 states"


def test_a_gpu_must_be_on_one_named_node() -> None:
    reason = "the devices of its GPU are not on one node that is named"
    nowhere = reading(publication(TOTALS, HALVES, node=""))
    assert nowhere.odd["half-1"].reason == reason
    each = [half(n, nodeName="n5") for n in range(3)]
    assert only(reading(publication(TOTALS, each, node=""))).node_name == "n5"
    spread = [half(n, nodeName=f"n{n}") for n in range(3)]
    found = reading(publication(TOTALS, spread, node=""))
    assert found.gpus == ()
    assert {o.reason for o in found.odd.values()} == {reason}
