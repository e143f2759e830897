"""References are complete: commands, public names, policies, packages, pictures, quoted figures."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import slicewise
from slicewise import lab
from slicewise.policies.registry import _entries


def script(root: Path, name: str) -> ModuleType:
    """Import a script of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", root / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_of(root: Path, name: str) -> str:
    return (root / name).read_text(encoding="utf-8")


def test_the_command_reference_is_up_to_date(root: Path) -> None:
    made = script(root, "make_cli_reference").reference()
    if made != text_of(root, "docs/cli.md"):
        pytest.fail(
            "docs/cli.md is out of date; run .venv/bin/python docs/make_cli_reference.py",
            pytrace=False,
        )


def test_the_command_reference_does_not_depend_on_the_terminal(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = script(root, "make_cli_reference").reference
    narrow = make()
    monkeypatch.setenv("COLUMNS", "200")
    assert make() == narrow


def test_every_public_name_is_in_the_python_reference(root: Path) -> None:
    reference = text_of(root, "docs/python-api.md")
    missing = [name for name in slicewise.__all__ if f"`{name}`" not in reference]
    assert not missing, "missing in docs/python-api.md"
    listed = re.findall(r"^\| `(\w+)` \|", reference, re.MULTILINE)
    assert not set(listed) - set(slicewise.__all__), (
        "docs/python-api.md lists names that are not public"
    )
    experiments = re.findall(r"^\| `lab\.(\w+)` \|", reference, re.MULTILINE)
    assert sorted(experiments) == sorted(lab.__all__)


def test_every_policy_is_documented(root: Path) -> None:
    reference = text_of(root, "docs/policies.md")
    own = [name for name, entry in _entries().items() if entry.value.startswith("slicewise.")]
    missing = [name for name in own if f"[`{name}`]" not in reference]
    assert not missing, "missing in the table of docs/policies.md"


def test_every_package_is_in_the_architecture(root: Path) -> None:
    package = root / "src" / "slicewise"
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    listed = set(re.findall(r"^\| `(\w+)` +\|", text_of(root, "ARCHITECTURE.md"), re.MULTILINE))
    assert packages == listed, "the table of packages in ARCHITECTURE.md is out of date"


def test_files_named_in_the_architecture_exist(root: Path) -> None:
    named = re.findall(r"`([\w/]+(?:\.(?:json|md|py|toml)|/))`", text_of(root, "ARCHITECTURE.md"))
    assert len(named) > 150
    missing = {
        path
        for path in named
        if not (root / path).exists() and not (root / "src" / "slicewise" / path).exists()
    }
    assert not missing


def test_every_picture_has_a_function_that_draws_it(root: Path) -> None:
    drawn = set(script(root, "make_pictures").PICTURES)
    assert drawn == {path.stem for path in (root / "docs" / "pictures").iterdir()}


def test_the_findings_quote_the_experiments(root: Path) -> None:
    """The table of rejections in the findings has the figures of docs/experiments.md."""
    findings = text_of(root, "docs/research/findings.md")
    experiments = text_of(root, "docs/experiments.md")
    full = experiments[experiments.index("$ slicewise simulate --experiment steady") :]
    distributions = ("uniform", "skew-small", "skew-big", "bimodal")
    rows = re.findall(r"^\| `([a-z-]+)` +\|(.*±.*)\|$", findings, re.MULTILINE)
    assert len(rows) == 7
    for policy, cells in rows:
        quoted = [cell.replace(" ", "") for cell in cells.split("|")]
        for distribution, number in zip(distributions, quoted, strict=True):
            part = full[full.index(f"\n{distribution}\n") :]
            line = next(line for line in part.splitlines() if line.split()[:1] == [policy])
            assert line.split()[1] == number, f"{policy}, {distribution}"
