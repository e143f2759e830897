"""ResourceSlices of drivers, valid or not, and what their counters allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from tests.kubernetes_e2e.nvidia import resource_slices

from slicewise.core.geometry import Geometry
from slicewise.core.states import ILLEGAL, state_space
from slicewise.kubernetes.api import ResourceSlice
from slicewise.kubernetes.api.quantities import amount
from slicewise.kubernetes.devices.pool_reading import Gpu

Json = dict[str, Any]


def decoded(slices: Sequence[Json]) -> list[ResourceSlice]:
    """Slices as they come from the API."""
    return msgspec.json.decode(msgspec.json.encode(slices), type=list[ResourceSlice])


def nvidia(model: str, gpus: int = 1, node: str = "n1") -> list[Json]:
    """What NVIDIA's driver publishes for a node, as a copy that tests may change."""
    whole: list[Json] = msgspec.json.decode(msgspec.json.encode(resource_slices(node, model, gpus)))
    return whole


def counters(amounts: Mapping[str, str | int]) -> Json:
    """Counters in the API's form."""
    return {name: {"value": str(value)} for name, value in amounts.items()}


def device(
    name: str,
    takes: Mapping[str, str | int] | None,
    profile: str | None = None,
    counter_set: str = "card",
    **more: object,
) -> Json:
    """A device that takes these amounts of a counter set."""
    made: Json = {"name": name, **more}
    if profile is not None:
        made["attributes"] = {"profile": {"string": profile}}
    if takes is not None:
        made["consumesCounters"] = [{"counterSet": counter_set, "counters": counters(takes)}]
    return made


def publication(
    totals: Mapping[str, str | int], devices: Sequence[Json], node: str = "n1", **spec: object
) -> list[Json]:
    """A pool with one counter set, ``card``, in one slice, and its devices in another."""
    pool = {"name": "p", "generation": 1, "resourceSliceCount": 2}
    common = {"driver": "cards.example.com", "nodeName": node, "pool": pool}
    shared = [{"name": "card", "counters": counters(totals)}]
    return [
        {"metadata": {"name": "a"}, "spec": {**common, "sharedCounters": shared}},
        {"metadata": {"name": "b"}, "spec": {**common, "devices": list(devices), **spec}},
    ]


def legal_by_counters(slices: Sequence[Json], names: set[str], gpu: Gpu) -> set[frozenset[str]]:
    """Every set of these devices that the published counters allow together, one by one."""
    sets = [s for one in slices for s in one["spec"].get("sharedCounters", ())]
    totals = next(_thousandths(s["counters"]) for s in sets if s["name"] == gpu.counter_set)
    takes = {
        d["name"]: _thousandths(d["consumesCounters"][0]["counters"])
        for one in slices
        for d in one["spec"].get("devices", ())
        if d["name"] in names
    }
    order = sorted(takes)
    vectors = [[takes[name].get(counter, 0) for counter in totals] for name in order]
    found: set[frozenset[str]] = set()

    def extend(chosen: frozenset[str], at: int, left: Sequence[int]) -> None:
        found.add(chosen)
        for index in range(at, len(order)):
            after = [have - taken for have, taken in zip(left, vectors[index], strict=True)]
            if min(after) >= 0:
                extend(chosen | {order[index]}, index + 1, after)

    extend(frozenset(), 0, list(totals.values()))
    return found


def _thousandths(found: Json) -> dict[str, int]:
    """Counters as whole numbers of thousandths; nothing finer is published here."""
    exact = {name: amount(counter["value"]) * 1000 for name, counter in found.items()}
    assert all(isinstance(value, int) or value.denominator == 1 for value in exact.values())
    return {name: int(value) for name, value in exact.items()}


def legal_by_geometry(geometry: Geometry) -> set[frozenset[tuple[str, int]]]:
    """Every set of placements that a GPU of this model can hold."""
    space = state_space(geometry)
    found = {frozenset[tuple[str, int]]()}
    frontier = [(frozenset[tuple[str, int]](), 0)]
    while frontier:
        chosen, state = frontier.pop()
        for placement, after in zip(geometry.placements, space.after_place[state], strict=True):
            if after == ILLEGAL:
                continue
            more = chosen | {(placement.profile.name, placement.start)}
            if more not in found:
                found.add(more)
                frontier.append((more, after))
    return found
