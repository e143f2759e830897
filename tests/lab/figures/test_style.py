"""Each policy has one style, and matplotlib's settings are restored."""

import subprocess
import sys
from itertools import combinations

import matplotlib
import pytest

from slicewise.lab.figures.style import house_style, legend_columns, plain, policy_style

BUILT_IN = ["mfi", "mfi-overlap", "first-fit", "best-fit", "worst-fit", "round-robin", "oracle"]


def test_no_two_policies_share_a_colour_a_marker_or_a_line() -> None:
    for one, other in combinations(map(policy_style, BUILT_IN), 2):
        assert one.colour != other.colour
        assert one.marker != other.marker
        assert one.line != other.line


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("MFI", "mfi"),
        ("FF", "first-fit"),
        ("BF-BI", "best-fit"),
        ("WF-BI", "worst-fit"),
        ("RR", "round-robin"),
    ],
)
def test_the_names_of_the_paper_look_like_ours(short: str, full: str) -> None:
    assert policy_style(short) == policy_style(full)


def test_a_strict_policy_keeps_its_colour_with_another_fill() -> None:
    fair, strict = policy_style("best-fit"), policy_style("best-fit-strict")
    assert strict.colour == fair.colour
    assert strict.hatch != fair.hatch
    assert strict.marker_face != fair.marker_face


def test_the_limit_looks_different_from_policies() -> None:
    limit = policy_style("oracle")
    assert limit.hatch
    assert limit.hatch not in {policy_style(f"{name}-strict").hatch for name in BUILT_IN[:-1]}


def test_an_unknown_policy_always_looks_the_same() -> None:
    assert policy_style("acme") == policy_style("acme")
    assert policy_style("acme").colour not in {policy_style(name).colour for name in BUILT_IN}
    assert policy_style("acme") != policy_style("zeta")


def test_the_style_is_reset_afterwards() -> None:
    before = dict(matplotlib.rcParams)
    with house_style():
        assert matplotlib.rcParams["axes.titleweight"] == "bold"
    assert dict(matplotlib.rcParams) == before


def test_a_dollar_sign_does_not_start_a_formula() -> None:
    assert plain("a $x$") == r"a \$x\$"


def test_legends_do_not_grow_wider_than_their_figure() -> None:
    assert legend_columns(["FF", "RR"], 10) == 2
    assert legend_columns(["a-rather-long-policy-name"] * 6, 6) == 2
    assert legend_columns([], 10) == 1
    assert legend_columns(["x" * 500], 1) == 1


def test_the_room_itself_is_light_and_nothing_needs_pyplot() -> None:
    code = (
        "import sys, slicewise, slicewise.lab.figures, slicewise.lab.paper.report\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import slicewise.lab.figures.bars, slicewise.lab.figures.curves\n"
        "import slicewise.lab.figures.save, slicewise.lab.figures.slicemap\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
