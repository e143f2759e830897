"""Hand-worked decisions of every policy on A100-80GB; masks are written slice 0 first."""

from __future__ import annotations

import pytest

from slicewise import Cluster, Geometry, Reason, Rejection, Scheduler, load_geometry, policy


def fill(a100: Geometry, *gpus: str) -> Cluster:
    """Return a cluster with these instances, one text such as ``"4g.40gb@0 1g.10gb@6"`` per GPU."""
    cluster = Cluster.of(a100, len(gpus))
    for gpu, layout in enumerate(gpus):
        for item in layout.split():
            profile, _, start = item.partition("@")
            cluster.place(gpu, profile, int(start))
    return cluster


def outcome(cluster: Cluster, policy: str, profile: str) -> tuple[int, int] | Reason:
    result = Scheduler(cluster, policy).submit(profile)
    return result.reason if isinstance(result, Rejection) else (result.gpu, result.start)


@pytest.mark.parametrize(
    ("policy", "profile", "gpus", "expected"),
    [
        # GPU 1 already has its lower half broken: one more 1g there adds no fragmentation, while
        # slice 1 of GPU 0 would keep 3g, 4g and a pair of 2-slice windows from it.
        ("mfi", "1g.10gb", ["", "1g.10gb@0"], (1, 1)),
        # A whole 7g adds nothing to an empty GPU: the lowest id wins the tie.
        ("mfi", "7g.80gb", ["1g.10gb@6", "", ""], (1, 0)),
        # Both halves of an empty GPU cost a 3g nothing under `partial`: the lowest start wins.
        ("mfi", "3g.40gb", [""], (0, 0)),
        # Under `overlap` the lower half also blocks 4g, so the upper one is cheaper.
        ("mfi-overlap", "3g.40gb", [""], (0, 4)),
        ("mfi-overlap", "1g.10gb", [""], (0, 6)),
        # In compute slices: a 3g at 0 leaves compute slice 3 to a 1g, a 2g and a 4g that are
        # blocked; at 4 every window that it blocks has its compute slices busy.
        ("mfi-compute", "3g.40gb", [""], (0, 4)),
        # At 6 only a 3g at 4 is blocked with compute slices free; at 4 a 2g, too.
        ("mfi-compute", "1g.10gb", [""], (0, 6)),
        # Both GPUs then have compute slices 0 and 1 busy. Before, GPU 1 strands a 1g.20gb at 0
        # besides the 2g, 3g and 4g, because compute slice 0 is free: F falls by 3 there, by 2 on
        # GPU 0. The free memory slice 1 of GPU 0 strands it as well for `either`: a tie.
        ("mfi-compute", "1g.10gb", ["1g.10gb@0", "1g.10gb@1"], (1, 0)),
        ("mfi-either", "1g.10gb", ["1g.10gb@0", "1g.10gb@1"], (0, 1)),
        # A GPU without a feasible start is left out.
        ("mfi-either", "7g.80gb", ["1g.10gb@0", ""], (1, 0)),
        # Least-lost: 5 placements at 4 (1g, both pairs, 3g, 7g), 6 at 0 (4g as well). At 6 they
        # would be 4, but nothing fits on slice 7 then, which counts as 2 more.
        ("least-lost", "1g.10gb", [""], (0, 4)),
        # This is the only placement.
        ("least-lost", "1g.10gb", ["4g.40gb@0 2g.20gb@4"], (0, 6)),
        # Above: three 1g, two 1g.20gb, a 2g, a 3g, a 7g. Below: four, two, two, 3g, 4g, 7g.
        ("least-lost", "3g.40gb", [""], (0, 4)),
        # An empty GPU comes last, though the other loses as much (1g, 1g.20gb, 2g) or more.
        ("least-lost", "2g.20gb", ["", "4g.40gb@0"], (1, 4)),
        # Both lose the same three at 4; five occupied slices are worth more than one.
        ("least-lost", "1g.10gb", ["1g.10gb@6", "4g.40gb@0 1g.10gb@6"], (1, 4)),
        # The half-full GPU loses 4 (1g, 1g.20gb, 2g, 3g) less 2, the other 3 less a half.
        ("least-lost", "1g.10gb", ["1g.10gb@6", "4g.40gb@0"], (1, 4)),
        # Least lost time: the same slices are taken, but the windows of the 3g, the 4g and the 7g
        # have two instances on GPU 1. One more is the last to leave one time in three, not two.
        ("least-lost-time", "1g.10gb", ["2g.20gb@0", "1g.10gb@0 1g.10gb@1"], (1, 2)),
        ("least-lost", "1g.10gb", ["2g.20gb@0", "1g.10gb@0 1g.10gb@1"], (0, 2)),
        # An empty GPU comes last: a 7g may be asked for.
        ("least-lost-time", "2g.20gb", ["", "4g.40gb@0"], (1, 4)),
        # First-fit takes the first window, even the most harmful one.
        ("first-fit", "1g.10gb", ["3g.40gb@4", ""], (0, 0)),
        ("first-fit", "7g.80gb", ["1g.10gb@6", ""], (1, 0)),
        # Best-fit: the fullest GPU, then the driver's order of starts (6 first for 1g).
        ("best-fit", "1g.10gb", ["", "3g.40gb@0", "1g.10gb@0"], (1, 6)),
        ("best-fit", "2g.20gb", ["", "1g.10gb@4"], (1, 0)),
        # Worst-fit: the emptiest GPU.
        ("worst-fit", "1g.10gb", ["1g.10gb@0", "", ""], (1, 6)),
        # Strict: GPU 0 has four free slices, enough for 4g by count, but not the lower half.
        ("first-fit-strict", "4g.40gb", ["3g.40gb@0", ""], Reason.FRAGMENTED),
        ("first-fit", "4g.40gb", ["3g.40gb@0", ""], (1, 0)),
        # 4g leaves only three compute slices: by compute GPU 0 is not even considered.
        ("first-fit-strict", "4g.40gb", ["4g.40gb@0", ""], (1, 0)),
        ("best-fit-strict", "4g.40gb", ["", "3g.40gb@0"], Reason.FRAGMENTED),
        ("best-fit", "4g.40gb", ["", "3g.40gb@0"], (0, 0)),
        # The emptiest GPU (five free) has no window for 3g, the fuller one has.
        (
            "worst-fit-strict",
            "3g.40gb",
            ["2g.20gb@0 1g.10gb@5", "3g.40gb@0"],
            Reason.FRAGMENTED,
        ),
        ("worst-fit", "3g.40gb", ["2g.20gb@0 1g.10gb@5", "3g.40gb@0"], (1, 4)),
        # Round-robin strict looks at GPU 0 only.
        ("round-robin-strict", "7g.80gb", ["7g.80gb@0", ""], Reason.CAPACITY),
        ("round-robin-strict", "3g.40gb", ["1g.10gb@1 1g.10gb@5", ""], Reason.FRAGMENTED),
        ("round-robin", "7g.80gb", ["7g.80gb@0", ""], (1, 0)),
        # Without an open window every policy rejects, with a reason.
        ("mfi", "7g.80gb", ["1g.10gb@0", "1g.10gb@0"], Reason.CAPACITY),
        ("mfi", "4g.40gb", ["1g.10gb@0", "3g.40gb@0"], Reason.FRAGMENTED),
        ("mfi", "2g.10gb", [""], Reason.UNKNOWN_PROFILE),
    ],
)
def test_choice(
    a100: Geometry,
    policy: str,
    profile: str,
    gpus: list[str],
    expected: tuple[int, int] | Reason,
) -> None:
    assert outcome(fill(a100, *gpus), policy, profile) == expected


@pytest.mark.parametrize(
    ("model", "one", "two", "step"),
    [("A30", "1g.6gb", "2g.12gb", 1), ("RTX-PRO-6000-Blackwell-96GB", "1g.24gb", "2g.48gb", 3)],
)
def test_least_lost_uses_the_occupied_share(model: str, one: str, two: str, step: int) -> None:
    """The models have the same windows with slices of different size: decisions are equal."""
    geometry = load_geometry(model)
    # Next to the 1g one placement is lost, less a quarter of four. In the half next to the 2g two
    # are (1g and 2g), less a half of four. A tie: the lowest id.
    assert outcome(fill(geometry, f"{one}@0", f"{two}@0"), "least-lost", one) == (0, step)
    assert outcome(fill(geometry, f"{two}@0", f"{one}@0"), "least-lost", one) == (0, 2 * step)
    # With both halves begun one is lost and half is occupied: better than either.
    begun = f"{one}@0 {one}@{2 * step}"
    assert outcome(fill(geometry, f"{one}@0", begun), "least-lost", one) == (1, step)


def test_round_robin_wraps_around(a100: Geometry) -> None:
    scheduler = Scheduler(Cluster.of(a100, 3), "round-robin")
    placed = [scheduler.submit("4g.40gb") for _ in range(3)]
    assert [p.gpu for p in placed if not isinstance(p, Rejection)] == [0, 1, 2]
    strict = Scheduler(Cluster.of(a100, 2), "round-robin-strict")
    outcomes = [strict.submit("4g.40gb") for _ in range(4)]
    assert [isinstance(o, Rejection) for o in outcomes] == [False, False, True, True]


def test_exclusive_media_engines_are_assigned_once(a100: Geometry) -> None:
    scheduler = Scheduler(Cluster.of(a100, 2), "mfi")
    gpus = [scheduler.submit("1g.10gb+me") for _ in range(3)]
    assert [g.gpu for g in gpus if not isinstance(g, Rejection)] == [0, 1]
    assert isinstance(gpus[2], Rejection)
    assert gpus[2].reason is Reason.CAPACITY


@pytest.mark.parametrize(
    ("policy_name", "words"),
    [("mfi", "F grows by 4"), ("mfi-either", "F in compute slices grows by 4")],
)
def test_mfi_names_its_score_in_words(a100: Geometry, policy_name: str, words: str) -> None:
    assert policy(policy_name).in_words(4, a100) == words
