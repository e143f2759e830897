"""What the published experiment measures, compiled and on the engine."""

from __future__ import annotations

import numpy as np
import pytest

from slicewise import Cluster, Geometry, policy
from slicewise.lab.experiment import TRACE, Published
from slicewise.lab.measure import PARTS, Measure
from slicewise.lab.mix import parse_mix
from slicewise.lab.paper.readings import READINGS, ReadingName
from slicewise.lab.results import mean_fragmentation, published_rows
from slicewise.lab.runner import run_experiment
from slicewise.lab.workload import BINS

SCHEMES = tuple(READINGS[ReadingName.DATA].schemes)


def ignore(units: int) -> None:
    """Ignore progress."""


def test_a_gpu_is_measured_by_hand(a100: Geometry) -> None:
    """A 1g.20gb at 0: 2 of 8 memory slices, 1 of 7 compute slices."""
    cluster = Cluster.of(a100, 2)
    cluster.place(1, "1g.20gb", 0)
    assert Measure.MEMORY.totals(cluster) == (2, 8)  # 4g and 3g are blocked at 0
    used, score = Measure.COMPUTE.totals(cluster)
    assert used / Measure.COMPUTE.units(a100) == pytest.approx((2 / 8 + 1 / 7) / 2)
    # Compute slice 1 is free: 1g.10gb at 1 adds 1, 2g.20gb at 0 adds 2, 3g 3, 4g 4.
    assert score == 10


@pytest.mark.parametrize("name", SCHEMES)
def test_compute_measured_on_the_engine_gives_the_same(a100: Geometry, name: str) -> None:
    mixes = (parse_mix("bimodal", a100),)
    fast = Published(mixes, (policy(name),), 5, 2, 3, measure=Measure.COMPUTE)
    slow = Published(mixes, (policy(name),), 5, 2, 3, True, measure=Measure.COMPUTE)
    for run in range(2):
        ours = fast.simulate(0, 0, run, ignore)
        assert (ours == slow.simulate(0, 0, run, ignore)).all()
        assert ours[:, 5].sum() > 0


def test_the_measure_changes_no_decision(a100: Geometry) -> None:
    mixes = (parse_mix("skew-small", a100),)
    one, other = (Published(mixes, (policy("mfi"),), 9, 1, 1, measure=m) for m in Measure)
    ours, theirs = one.simulate(0, 0, 0, ignore), other.simulate(0, 0, 0, ignore)
    for column in (0, 1, 2, 4):  # arrivals, accepted, scheduled, active
        assert (ours[:, column] == theirs[:, column]).all()


def test_severity_by_hand() -> None:
    """Two slots in bin 0 with F 3 on 2 active GPUs and 4 on 4; one in bin 2 with none active."""
    trace = np.zeros((3, len(TRACE)), np.int32)
    trace[:, 3], trace[:, 4] = (2, 4, 0), (3, 4, 0)
    bins = np.array([0, 0, 2])
    ends = np.searchsorted(bins, np.arange(BINS), side="right")
    over_slots = Measure.COMPUTE.severity(trace, bins, ends)
    assert over_slots.tolist() == [2.5 * PARTS] + [0] * (BINS - 1)
    at_ends = Measure.MEMORY.severity(trace, bins, ends)
    assert at_ends.tolist() == [4, 4] + [0] * (BINS - 2)


def test_rows_are_means_over_slots(a100: Geometry) -> None:
    experiment = Published(
        (parse_mix("uniform", a100),), (policy("mfi-compute"),), 4, 3, 1, measure=Measure.COMPUTE
    )
    outcome = run_experiment(experiment, 1, ignore)
    rows = published_rows(outcome, "mfi-compute")
    (mean,) = mean_fragmentation(outcome)
    samples = [outcome.samples[0, 0][run] for run in range(3)]
    expected = np.mean([s[:, 5].sum() / s[:, 0].sum() / PARTS for s in samples])
    assert mean["fragmentation"] == pytest.approx(expected)
    last = rows[-1]
    arrived = sum(s[-1, 0] for s in samples)
    assert last["fragmentation"] == pytest.approx(sum(s[-1, 5] for s in samples) / arrived / PARTS)
    used = np.mean([s[-1, 3] for s in samples])
    assert last["utilization_percent"] == pytest.approx(100 * used / (4 * 2 * 8 * 7))
