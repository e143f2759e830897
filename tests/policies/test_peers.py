"""The rules of other systems: hand-worked, on every state, and legal on random streams."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from slicewise import (
    Catalog,
    Cluster,
    Geometry,
    GpuState,
    Instance,
    Need,
    Profile,
    Reason,
    Rejection,
    Request,
    Scheduler,
    TablePolicy,
    policy,
    policy_names,
)
from slicewise.core.states import state_space
from slicewise.policies.fits import FirstFit
from slicewise.policies.peers.first_match import NvidiaDra
from slicewise.policies.peers.hami import Hami, HamiRegions, HamiScored
from slicewise.policies.peers.volcano import templates

PEERS = [name for name in policy_names() if name.startswith("peer-")]


def fill(geometry: Geometry, *nodes: list[str]) -> Cluster:
    """Return nodes with these instances, one text such as ``"4g.40gb@0 1g.10gb@6"`` per GPU."""
    cluster = Cluster()
    for number, layouts in enumerate(nodes):
        ids = cluster.add_node(f"n{number}", geometry, len(layouts)).gpus
        for gpu, layout in zip(ids, layouts, strict=True):
            for item in layout.split():
                profile, _, start = item.partition("@")
                cluster.place(gpu, profile, int(start))
    return cluster


def outcome(result: Instance | Rejection) -> tuple[int, int] | Reason:
    return result.reason if isinstance(result, Rejection) else (result.gpu, result.start)


def state_of(geometry: Geometry, layout: str) -> GpuState:
    return fill(geometry, [layout]).state(0)


FULL = "7g.80gb@0"


@pytest.mark.parametrize(
    ("name", "profile", "nodes", "expected"),
    [
        # gpu-0-mig-1g10gb-19-0 is the first name of all: slice 0, which takes 4g from the GPU.
        ("peer-nvidia-dra", "1g.10gb", [["", ""]], (0, 0)),
        ("peer-nvidia-dra", "4g.40gb", [["1g.10gb@0", ""]], (1, 0)),
        # ...-3g40gb-9-0 comes before ...-3g40gb-9-4.
        ("peer-nvidia-dra", "3g.40gb", [["1g.10gb@6", ""]], (0, 0)),
        ("peer-nvidia-dra", "7g.80gb", [["1g.10gb@6"]], Reason.CAPACITY),
        # Without a given start the driver begins at 6 for 1g and at 4 for 2g and 3g.
        ("peer-driver-default", "1g.10gb", [["", ""]], (0, 6)),
        ("peer-driver-default", "1g.10gb", [["1g.10gb@6 1g.10gb@4"]], (0, 5)),
        ("peer-driver-default", "2g.20gb", [["3g.40gb@4", ""]], (0, 0)),
        # 5 compute slices are free on GPU 0, 3 on GPU 1, none on GPU 2: the tightest that holds a
        # 1g is GPU 1, and of 0, 6, 4, 1, ... the first that is free there is 6.
        ("peer-parvagpu", "1g.10gb", [["2g.20gb@0", "4g.40gb@0", FULL]], (1, 6)),
        ("peer-parvagpu", "1g.10gb", [[""]], (0, 0)),
        ("peer-parvagpu", "1g.10gb", [["1g.10gb@0 1g.10gb@6"]], (0, 4)),
        ("peer-parvagpu", "2g.20gb", [["2g.20gb@0"]], (0, 4)),
        ("peer-parvagpu", "3g.40gb", [[""]], (0, 4)),
        ("peer-parvagpu", "3g.40gb", [["3g.40gb@4"]], (0, 0)),
        # Six slices are free on both; of compute six on GPU 0 and five on GPU 1.
        ("peer-parvagpu", "4g.40gb", [["1g.20gb@4", "1g.10gb@5 1g.10gb@6"]], (1, 0)),
        # 12 of 16 slots are free on n0 and 15 on n1; there the first GPU, lowest start.
        ("peer-das", "1g.10gb", [["3g.40gb@0", ""], ["1g.10gb@0", ""]], (2, 1)),
        # 4g needs its lower half, and the emptier node n1 has none left.
        ("peer-das", "4g.40gb", [["3g.40gb@0", ""], ["1g.10gb@0", "1g.10gb@0"]], (1, 0)),
        ("peer-das", "1g.10gb", [["", ""], ["", ""]], (0, 0)),
        # n1 is the fuller node; on it the emptier GPU. 1g from above: 6.
        ("peer-hami", "1g.10gb", [["", "1g.10gb@6"], ["3g.40gb@4", "1g.10gb@6"]], (3, 5)),
        ("peer-hami", "3g.40gb", [[""]], (0, 4)),
        ("peer-hami", "2g.20gb", [[""]], (0, 0)),
        ("peer-hami", "1g.20gb", [[""]], (0, 6)),
        # A 7g fits on the emptier node only.
        ("peer-hami", "7g.80gb", [["1g.10gb@6"], [""]], (1, 0)),
        ("peer-hami", "7g.80gb", [["1g.10gb@6"]], Reason.CAPACITY),
        # Start 0 leaves a run of seven, 1 to 7; start 6 only one of six, 0 to 5.
        ("peer-hami-scored", "1g.10gb", [[""]], (0, 0)),
        # Start 2 leaves a run of five, 3 to 7; start 6 only one of four, 2 to 5.
        ("peer-hami-scored", "1g.10gb", [["2g.20gb@0"]], (0, 2)),
        # Both halves leave a run of four; in the lower one 4g, and more 1g and 2g, survive.
        ("peer-hami-scored", "3g.40gb", [[""]], (0, 4)),
        # Either half stays empty; the lower is for small ones, the upper for 3g.
        ("peer-hami-regions", "1g.10gb", [[""]], (0, 0)),
        ("peer-hami-regions", "3g.40gb", [[""]], (0, 4)),
        # The lower half is touched already and the upper one stays empty.
        ("peer-hami-regions", "2g.20gb", [["1g.10gb@0"]], (0, 2)),
        # Here it is the reverse, and small ones avoid the middle: 6 before 5.
        ("peer-hami-regions", "1g.10gb", [["1g.10gb@4"]], (0, 6)),
        ("peer-hami-regions", "4g.40gb", [["1g.10gb@4"]], (0, 0)),
        # The 1g on GPU 0 took the template of seven 1g: no 2g there, though slices are free.
        ("peer-volcano", "2g.20gb", [["1g.10gb@0", ""]], (1, 0)),
        ("peer-volcano", "1g.10gb", [["", "1g.10gb@0"]], (1, 1)),
        # Three 2g and a 1g at 6 are one template: the fullest GPU that has a 1g free is GPU 1.
        ("peer-volcano", "1g.10gb", [["1g.10gb@0", "2g.20gb@0 2g.20gb@2"]], (1, 6)),
        ("peer-volcano", "3g.40gb", [["3g.40gb@4", ""]], (0, 0)),
        ("peer-volcano", "7g.80gb", [["1g.10gb@0", ""]], (1, 0)),
        ("peer-volcano", "4g.40gb", [["1g.10gb@0"]], Reason.FRAGMENTED),
        # No template has both 3g and 2g: a GPU with both is not used.
        ("peer-volcano", "1g.10gb", [["3g.40gb@4 2g.20gb@0", ""]], (1, 0)),
    ],
)
def test_choice(
    a100: Geometry,
    name: str,
    profile: str,
    nodes: list[list[str]],
    expected: tuple[int, int] | Reason,
) -> None:
    assert outcome(Scheduler(fill(a100, *nodes), name).submit(profile)) == expected


def test_device_names_sort_as_text() -> None:
    """Start 10 sorts before start 2, as in the device names."""
    long = Geometry("long", 12, 12, (Profile("1g", 1, 1, 1, tuple(range(12))),))
    scheduler = Scheduler(Cluster.of(long, 1), "peer-nvidia-dra")
    starts = [outcome(scheduler.submit("1g")) for _ in range(5)]
    assert starts == [(0, 0), (0, 1), (0, 10), (0, 11), (0, 2)]


def test_the_dra_driver_is_first_fit_where_starts_have_one_digit(geometry: Geometry) -> None:
    for state in state_space(geometry).states:
        for profile in geometry.profiles:
            assert NvidiaDra().prefer(state, profile) == FirstFit().prefer(state, profile)


# Slow twins of the rules that depend only on a GPU's state.


def windows(geometry: Geometry) -> list[set[int]]:
    return [
        set(range(start, start + profile.size))
        for profile in geometry.plain_profiles
        for start in profile.starts
    ]


def run_length(free: set[int]) -> int:
    """Return the length of the longest run of free slices."""
    best = here = 0
    for s in range(max(free, default=-1) + 1):
        here = here + 1 if s in free else 0
        best = max(best, here)
    return best


def hami(geometry: Geometry, free: set[int], profile: Profile, starts: list[int]) -> int:
    return max(starts) if profile.name[:2] in ("1g", "3g") else min(starts)


def hami_scored(geometry: Geometry, free: set[int], profile: Profile, starts: list[int]) -> int:
    def score(start: int) -> tuple[int, int]:
        left = free - set(range(start, start + profile.size))
        return run_length(left), sum(window <= left for window in windows(geometry))

    best = max(map(score, starts))
    return next(start for start in starts if score(start) == best)


def hami_regions(geometry: Geometry, free: set[int], profile: Profile, starts: list[int]) -> int:
    """On an A100: halves of four slices, the upper one for profiles of size four."""

    def score(start: int) -> tuple[int, bool, int]:
        left = free - set(range(start, start + profile.size))
        empty = sum(half <= left for half in ({0, 1, 2, 3}, {4, 5, 6, 7}))
        upper = start >= 4
        outward = start - 4 if upper else 4 - start - profile.size
        return empty, (profile.size == 4) == upper, outward

    best = max(map(score, starts))
    return next(start for start in starts if score(start) == best)


@pytest.mark.parametrize(
    ("rule", "twin"),
    [
        (Hami.on_node, hami),
        (HamiScored.on_node, hami_scored),
        (HamiRegions.on_node, hami_regions),
    ],
)
def test_starts_on_every_state(
    a100: Geometry,
    rule: type[TablePolicy],
    twin: Callable[[Geometry, set[int], Profile, list[int]], int],
) -> None:
    chosen = rule()
    for state in state_space(a100).states:
        free = {s for s in range(8) if not state.mask >> s & 1}
        for profile in a100.plain_profiles:
            starts = [s for s in profile.starts if set(range(s, s + profile.size)) <= free]
            choice = chosen.prefer(state, profile)
            if state.free_compute < profile.compute or not starts:
                assert choice is None
                continue
            assert choice is not None
            assert choice.start == twin(a100, free, profile, starts)
            assert choice.key == pytest.approx((8 - len(free)) / 8 + state.used[0] / 7)


@pytest.mark.parametrize(
    ("name", "orders", "key"),
    [
        (
            "peer-driver-default",
            {
                "1g.10gb": (6, 4, 5, 0, 1, 2, 3),
                "1g.20gb": (6, 4, 0, 2),
                "2g.20gb": (4, 0, 2),
                "3g.40gb": (4, 0),
            },
            lambda state: 0,
        ),
        (
            "peer-parvagpu",
            {
                "1g.10gb": (0, 6, 4, 1, 2, 3, 5),
                "1g.20gb": (0, 6, 4, 2),
                "2g.20gb": (0, 4, 2),
                "3g.40gb": (4, 0),
            },
            lambda state: 7 - state.used[0],
        ),
    ],
)
def test_orders_on_every_state(
    a100: Geometry,
    name: str,
    orders: dict[str, tuple[int, ...]],
    key: Callable[[GpuState], int],
) -> None:
    chosen = policy(name)
    assert isinstance(chosen, TablePolicy)
    for state in state_space(a100).states:
        for profile in a100.plain_profiles:
            order = orders.get(profile.name, (0,))
            fits = state.free_compute >= profile.compute
            open_ = [s for s in order if fits and not profile.window(s) & state.mask]
            choice = chosen.prefer(state, profile)
            assert choice == ((key(state), open_[0]) if open_ else None)


def test_a_gpu_without_halves_is_filled_from_below() -> None:
    """A window across the middle makes the GPU one region, as on Thor."""
    odd = Geometry("odd", 3, 3, (Profile("1g", 1, 1, 1, (0, 1, 2)), Profile("2g", 2, 2, 2, (0, 1))))
    choice = HamiRegions.on_node().prefer(state_of(odd, "1g@0"), odd.profile("1g"))
    assert choice is not None
    assert choice.start == 1


def test_nodes_are_compared_in_whole_percent(a100: Geometry) -> None:
    """26 GPUs have 208 slots: with 205 or 204 of them left, both nodes are at 98%."""

    def node(layout: str) -> list[str]:
        return [layout] + [""] * 25

    def chosen(first: str, second: str) -> tuple[int, int] | Reason:
        cluster = fill(a100, node(first), node(second))
        return outcome(Scheduler(cluster, "peer-das").submit("1g.10gb"))

    assert chosen("2g.20gb@0 1g.10gb@2", "2g.20gb@0") == (0, 3)
    assert chosen("2g.20gb@0 2g.20gb@2", "2g.20gb@0") == (26, 2)


@pytest.mark.parametrize("name", ["peer-das", "peer-hami"])
def test_drained_nodes_are_excluded(a100: Geometry, name: str) -> None:
    cluster = fill(a100, [""], ["1g.10gb@0"])
    scheduler = Scheduler(cluster, name)
    cluster.drain("n0")
    placed = scheduler.submit("2g.20gb")
    assert isinstance(placed, Instance)
    assert placed.gpu == 1
    cluster.drain("n1")
    assert isinstance(scheduler.submit("1g.10gb"), Rejection)


# Volcano's templates.


def shape(template: Iterable[object]) -> str:
    parts = [f"{p.profile.name}@{p.start}" for p in template]  # type: ignore[attr-defined]
    return " ".join(parts)


def test_templates_are_the_published_ones_and_two_more(a100: Geometry) -> None:
    """docs/design/dynamic-mig.md has 7 x 1g; 3 x 2g + 1g; 2 x 3g; 7g."""
    assert [shape(template) for template in templates(a100)] == [
        "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6",
        "1g.20gb@0 1g.20gb@2 1g.20gb@4 1g.20gb@6",
        "2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.10gb@6",
        "3g.40gb@0 3g.40gb@4",
        "4g.40gb@0 1g.10gb@4 1g.10gb@5 1g.10gb@6",
        "7g.80gb@0",
    ]
    a30 = Catalog.builtin().find("A30").require()
    assert [shape(template) for template in templates(a30)] == [
        "1g.6gb@0 1g.6gb@1 1g.6gb@2 1g.6gb@3",
        "2g.12gb@0 2g.12gb@2",
        "4g.24gb@0",
    ]


def test_a_template_stays_until_the_gpu_is_empty(a100: Geometry) -> None:
    scheduler = Scheduler(Cluster.of(a100, 1), "peer-volcano")
    pair = scheduler.submit("2g.20gb")
    small = scheduler.submit("1g.10gb")
    assert [outcome(pair), outcome(small)] == [(0, 0), (0, 6)]
    assert isinstance(pair, Instance)
    assert isinstance(small, Instance)
    # The remaining 1g at 6 would fit the template of seven, but the GPU has that of 2g.
    scheduler.release(pair)
    assert outcome(scheduler.submit("1g.10gb")) is Reason.CAPACITY
    assert outcome(scheduler.submit("2g.20gb")) == (0, 0)
    for instance in list(scheduler.cluster.instances()):
        scheduler.release(instance)
    assert outcome(scheduler.submit("3g.40gb")) == (0, 0)
    assert outcome(scheduler.submit("1g.10gb+me")) is Reason.CAPACITY


def test_templates_belong_to_one_cluster(a100: Geometry) -> None:
    volcano = policy("peer-volcano")
    for want in ("2g.20gb", "1g.10gb"):
        scheduler = Scheduler(Cluster.of(a100, 1), volcano)
        assert outcome(scheduler.submit(want)) == (0, 0)
        assert outcome(scheduler.submit(want)) == (0, scheduler.cluster.instance(0).size)


# All peers, on random streams.


@pytest.mark.parametrize("name", PEERS)
def test_random_streams_are_placed_legally(a100: Geometry, name: str) -> None:
    """All placements are legal, and no request with an open window is rejected, except by Volcano's
    templates."""
    rng = random.Random(11)
    a30 = Catalog.builtin().find("A30").require()
    cluster = Cluster()
    for number, (model, gpus) in enumerate([(a100, 3), (a30, 2), (a100, 1)]):
        cluster.add_node(f"n{number}", model, gpus)
    scheduler = Scheduler(cluster, name)
    wants = [Request(profile.name) for profile in (*a100.profiles, *a30.profiles)]
    wants += [Request(Need(2, 10)), Request(Need(1, 30)), Request("no.such"), Request(Need(3, 0))]
    living: list[Instance] = []
    placed = 0
    for step in range(1200):
        if living and rng.random() < 0.45:
            scheduler.release(living.pop(rng.randrange(len(living))))
        if step % 100 == 50:
            cluster.drain("n2")
        if step % 100 == 75:
            cluster.resume("n2")
        want = rng.choice(wants)
        result = scheduler.submit(want)
        if isinstance(result, Instance):
            living.append(result)
            placed += 1
        elif name != "peer-volcano":
            states = [cluster.state(gpu) for gpu in cluster.schedulable]
            assert not any(
                state.feasible_starts(profile)
                for state in states
                for _, profile in want.candidates(state.geometry)
            )
    assert placed > 200


def test_das_on_one_node_is_first_fit(a100: Geometry) -> None:
    rng = random.Random(5)
    das, first_fit = (Scheduler(Cluster.of(a100, 6), n) for n in ("peer-das", "first-fit"))
    living: list[int] = []
    for _ in range(400):
        want = rng.choice(a100.plain_profiles).name
        ours, theirs = das.submit(want), first_fit.submit(want)
        assert outcome(ours) == outcome(theirs)
        if isinstance(ours, Instance):
            living.append(ours.id)
        if living and rng.random() < 0.6:
            gone = living.pop(rng.randrange(len(living)))
            das.release(gone)
            first_fit.release(gone)
