"""Policies are found through entry points, built-in ones and those of other packages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from slicewise import SlicewiseError, UnknownNameError, policy, policy_names
from slicewise.policies import registry
from slicewise.policies.registry import check_different

ROOT = Path(__file__).parents[2]


def test_every_built_in_policy_has_a_name_and_a_summary() -> None:
    own = [name for name in policy_names() if registry._entries()[name].value.startswith("slicew")]
    assert set(own) >= {
        "mfi",
        "mfi-overlap",
        "mfi-compute",
        "mfi-either",
        *(f"{rule}{form}" for rule in ("first-fit", "best-fit", "worst-fit", "round-robin")
          for form in ("", "-strict")),
    }  # fmt: skip
    for name in own:
        made = policy(name)
        assert made.name == name
        assert made.summary.endswith(".")
        assert "\n" not in made.summary


def test_an_unknown_policy_suggests_similar_names() -> None:
    with pytest.raises(UnknownNameError, match="did you mean first-fit"):
        policy("first-fits")


def test_aliases_name_the_same_policy() -> None:
    check_different((policy("mfi"), policy("default")))
    with pytest.raises(SlicewiseError, match="policy 'rehearsed' is named twice"):
        check_different((policy("rehearsed"), policy("mfi"), policy("default")))


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points of other packages."""
    found: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    registry._entries.cache_clear()
    registry.policy_class.cache_clear()
    yield found
    registry._entries.cache_clear()
    registry.policy_class.cache_clear()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no.such.module:Thing", "cannot be loaded: No module"),
        ("slicewise.core.cluster:Cluster", "not a subclass"),
        ("slicewise.core.idset:NONE", "not a subclass"),
        ("slicewise.policies.mfi:Mfi", "must have name = 'odd'"),
    ],
)
def test_a_broken_entry_point_states_the_problem(
    entries: list[EntryPoint], value: str, problem: str
) -> None:
    entries.append(EntryPoint("odd", value, registry.GROUP))
    with pytest.raises(registry.PolicyLoadError, match=problem):
        policy("odd")


def test_built_in_policies_cannot_be_replaced(entries: list[EntryPoint]) -> None:
    entries.append(EntryPoint("mfi", "elsewhere:Mfi", registry.GROUP))
    entries.append(EntryPoint("mfi", "slicewise.policies.mfi:Mfi", registry.GROUP))
    assert policy("mfi").name == "mfi"


def test_a_third_party_policy_of_under_thirty_lines_is_found(tmp_path: Path) -> None:
    """The example package of the documentation, in a fresh interpreter."""
    source = ROOT / "examples" / "third-party-policy"
    lines = (source / "tidy_policy.py").read_text().splitlines()
    assert len(lines) < 30
    meta = tmp_path / "tidy_policy-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: tidy-policy\nVersion: 1.0\n")
    (meta / "entry_points.txt").write_text("[slicewise.policies]\ntidy = tidy_policy:Tidy\n")
    code = (
        "import slicewise as s; c = s.Cluster.of(s.load_geometry('A100-80GB'), 2);"
        "k = s.Scheduler(c, 'tidy'); a, b = k.submit('2g.20gb'), k.submit('2g.20gb');"
        "print(a.gpu, a.start, b.gpu, b.start, k.scans)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{source}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["0", "0", "0", "2", "False"]
