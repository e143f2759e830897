"""Traces are read row by row; invalid rows are skipped with their line number, or refused."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise import Geometry, Need, SlicewiseError
from slicewise.lab.trace import (
    Fitted,
    Share,
    Trace,
    TraceFormat,
    TraceRow,
    covering_profile,
    fit,
    read_trace,
)

PODS = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
pod-0,12000,16384,1,1000,,LS,Running,0,5000,0
pod-1,6000,12288,1,460,,LS,Succeeded,100,400,101
pod-2,20000,65536,0,0,,LS,Running,150,5000,152
pod-3,6000,12288,8,1000,V100,BE,Failed,200,260,230
pod-4,6000,12288,1,120,,BE,Pending,100,300,
pod-5,6000,12288,1,500,,BE,Failed,300,300,300
pod-6,6000,12288,1,810,,LS,Running,250,,251
"""
"""In the form of the published trace: one pod without a GPU, one that never ran, one of zero
lifetime, and two that were running at the end."""

PLAIN = """\
arrival,lifetime,profile,compute,memory_gb,count,tenant
0,100,1g.10gb,,,,ann
2.5,10,,2,15,,bob
1,,7g.80gb,,,2,ann
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def read(folder: Path, text: str, form: TraceFormat | None = None, strict: bool = False) -> Trace:
    file = folder / "trace.csv"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    return read_trace(file, form, strict=strict)


def labels(fitted: Fitted) -> dict[int, str]:
    return {job.line: job.label for job in fitted.jobs}


def test_pods_become_rows(folder: Path) -> None:
    trace = read(folder, PODS, strict=True)
    assert trace.format is TraceFormat.ALIBABA
    assert trace.rows == (
        TraceRow(2, Fraction(0), None, Share(1000)),
        TraceRow(3, Fraction(100), Fraction(300), Share(460)),
        TraceRow(6, Fraction(100), Fraction(200), Share(120)),
        TraceRow(5, Fraction(200), Fraction(60), Share(1000), 8),
        TraceRow(8, Fraction(250), None, Share(810)),
    )
    assert (trace.without_gpu, trace.zero_lifetime, trace.malformed) == (1, 1, ())


def test_plain_rows_have_a_profile_or_a_need(folder: Path) -> None:
    trace = read(folder, PLAIN, strict=True)
    assert trace.format is TraceFormat.PLAIN
    assert trace.rows == (
        TraceRow(2, Fraction(0), Fraction(100), "1g.10gb", 1, "ann"),
        TraceRow(4, Fraction(1), None, "7g.80gb", 2, "ann"),
        TraceRow(3, Fraction(5, 2), Fraction(10), Need(2, 15), 1, "bob"),
    )


def test_columns_may_be_in_any_order_and_extra_ones_are_ignored(folder: Path) -> None:
    text = "\ufeffprofile, note ,lifetime,arrival\r\n1g.10gb,x, 3 ,4\r\n\r\n1g.10gb,y,0,4\r\n"
    trace = read(folder, text, strict=True)
    assert trace.rows == (TraceRow(2, Fraction(4), Fraction(3), "1g.10gb"),)
    assert trace.zero_lifetime == 1


def test_a_file_that_fits_both_formats_is_read_as_the_given_one(folder: Path) -> None:
    text = (
        "arrival,lifetime,profile,num_gpu,gpu_milli,creation_time,deletion_time\n"
        "1,2,1g.10gb,1,1000,10,30\n"
    )
    assert read(folder, text).rows[0].arrival == 10
    assert read(folder, text, TraceFormat.PLAIN).rows[0].arrival == 1


BAD_PODS = {
    "pod,1,1,1,1000,,LS,Running,5,x,5": "deletion_time 'x' is not a time in seconds",
    "pod,1,1,1,1000,,LS,Running,,9,5": "creation_time '' is not a time",
    "pod,1,1,1,1000,,LS,Running,9,5,5": "deletion_time 5 is before creation_time 9",
    "pod,1,1,-1,1000,,LS,Running,5,9,5": "num_gpu '-1' is not a whole number from 0",
    "pod,1,1,1,0,,LS,Running,5,9,5": "gpu_milli '0' is not a whole number from 1 to 1000",
    "pod,1,1,1,1001,,LS,Running,5,9,5": "gpu_milli '1001'",
    "pod,1,1,1,1000,,LS,Running,1e9,1e9,5": "creation_time '1e9'",
    "pod,1,1,1,1000": "5 cells where the header has 11",
}
BAD_PLAIN = {
    "0,10,,,,,": "needs a profile, or both compute and memory_gb",
    "0,10,,2,,,": "needs a profile, or both compute and memory_gb",
    "0,10,1g.10gb,2,,,": "has a profile and compute",
    "0,10,1g.10gb,,,0,": "count '0' is not a whole number from 1",
    "0,10,1g.10gb,,,1.5,": "count '1.5'",
    "-1,10,1g.10gb,,,,": "arrival '-1' is not a time",
    "nan,10,1g.10gb,,,,": "arrival 'nan' is not a time",
    "0,inf,1g.10gb,,,,": "lifetime 'inf' is not a time",
    "0,10,,1,much,,": "memory_gb 'much' is not an amount of GB",
    "0,10,,1,9999999999999,,": "or more than there is",
}


@pytest.mark.parametrize(
    ("good", "row", "reason"),
    [(PODS, row, reason) for row, reason in BAD_PODS.items()]
    + [(PLAIN, row, reason) for row, reason in BAD_PLAIN.items()],
)
def test_malformed_rows_are_skipped_or_refused_by_line(
    folder: Path, good: str, row: str, reason: str
) -> None:
    line = good.count("\n") + 1
    trace = read(folder, f"{good}{row}\n")
    assert trace.rows == read(folder, good).rows
    assert [problem.line for problem in trace.malformed] == [line]
    assert reason in trace.malformed[0].reason
    with pytest.raises(SlicewiseError, match=f"trace.csv, line {line}: ") as refusal:
        read(folder, f"{good}{row}\n", strict=True)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "form", "problem"),
    [
        ("", None, "the header is of no known format"),
        ("a,b\n1,2\n", None, "the header is of no known format"),
        ("arrival,lifetime\n", None, "needs the column 'profile', or 'compute' and 'memory_gb'"),
        (PODS, TraceFormat.PLAIN, "format plain needs the column 'arrival'"),
        (PLAIN, TraceFormat.ALIBABA, "format alibaba-2023 needs the column 'num_gpu'"),
        ("arrival,lifetime,profile,arrival\n", None, "column 'arrival' appears twice"),
        (PLAIN + '0,1,"1g', None, "line 5: not CSV"),
        (PLAIN + "0,1," + "x" * 200_000, None, "not CSV: field larger"),
        ("\udcff", None, "cannot be read"),
    ],
)
def test_files_that_are_not_traces_are_rejected(
    folder: Path, text: str, form: TraceFormat | None, problem: str
) -> None:
    with pytest.raises(SlicewiseError, match=r"trace\.csv") as refusal:
        read(folder, text, form)
    assert problem in str(refusal.value)


def test_a_missing_file_is_rejected(folder: Path) -> None:
    for path in (folder / "none.csv", folder, Path("nul\0")):
        with pytest.raises(SlicewiseError, match="cannot be read"):
            read_trace(path)


@settings(max_examples=150, deadline=None)
@given(
    text=st.one_of(
        st.text(),
        st.lists(st.text('0159.,-e"\n\x00 xg', max_size=12), max_size=8).map(
            lambda rows: PLAIN + "\n".join(rows)
        ),
    )
)
def test_any_text_gives_a_trace_or_an_error(
    a100: Geometry, text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with contextlib.suppress(SlicewiseError):
        fit(read(tmp_path_factory.mktemp("trace"), text), a100)


@pytest.mark.parametrize(
    ("share", "profile"),
    [
        ("0.001", "1g.10gb"),
        ("0.125", "1g.10gb"),
        ("0.126", "1g.20gb"),
        ("1/7", "1g.20gb"),
        ("0.143", "2g.20gb"),
        ("0.25", "2g.20gb"),
        ("0.251", "3g.40gb"),
        ("3/7", "3g.40gb"),
        ("0.429", "4g.40gb"),
        ("0.5", "4g.40gb"),
        ("0.501", "7g.80gb"),
        ("1", "7g.80gb"),
    ],
)
def test_the_smallest_profile_that_covers_a_share(a100: Geometry, share: str, profile: str) -> None:
    covering = covering_profile(a100, Fraction(share))
    assert covering is not None
    assert covering.name == profile


def test_covering_on_every_model(geometry: Geometry) -> None:
    """The chosen profile suffices, no smaller one does, and larger shares never get less."""
    before = 0
    for milli in range(1, 1001):
        share = Fraction(milli, 1000)
        covers = [
            profile
            for profile in geometry.plain_profiles
            if profile.compute >= share * geometry.compute
            and profile.size >= share * geometry.slices
        ]
        chosen = covering_profile(geometry, share)
        if chosen is None:
            assert not covers
            continue
        assert chosen in covers
        assert chosen.size == min(profile.size for profile in covers) >= before
        before = chosen.size


def test_shares_are_scaled_and_several_gpus_are_whole_ones(folder: Path, a100: Geometry) -> None:
    trace = read(folder, PODS)
    literal = {2: "7g.80gb", 3: "4g.40gb", 5: "8 x 7g.80gb", 6: "1g.10gb", 8: "7g.80gb"}
    assert labels(fit(trace, a100)) == literal
    smaller = {2: "2g.20gb", 3: "1g.10gb", 5: "8 x 7g.80gb", 6: "1g.10gb", 8: "2g.20gb"}
    assert labels(fit(trace, a100, Fraction("0.2"))) == smaller
    larger = fit(trace, a100, Fraction(2))
    assert labels(larger) == {3: "7g.80gb", 5: "8 x 7g.80gb", 6: "2g.20gb"}
    assert larger.no_profile == 2
    assert {job.line: job.slices for job in larger.jobs} == {3: 8, 5: 64, 6: 2}


def test_profiles_of_other_models_are_malformed_rows(folder: Path, a100: Geometry) -> None:
    text = PLAIN + "5,1,1g.11gb,,,,\n6,1,,9,10,,\n"
    trace = read(folder, text, strict=True)
    fitted = fit(trace, a100)
    assert labels(fitted) == {
        2: "1g.10gb",
        3: "2 compute slices and 15 GB",
        4: "2 x 7g.80gb",
    }
    assert [job.slices for job in fitted.jobs] == [1, 16, 2]
    assert fitted.no_profile == 1
    ((line, reason),) = fitted.malformed
    assert line == 5
    assert "unknown profile on A100-80GB '1g.11gb'" in reason
    with pytest.raises(SlicewiseError, match=r"trace\.csv, line 5: unknown profile"):
        fit(trace, a100, strict=True)
