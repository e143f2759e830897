"""Runs tests with the fixture ``document`` once for every document."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="session")
def root() -> Path:
    """The root folder of the project."""
    return ROOT


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test with every document."""
    if "document" in metafunc.fixturenames:
        metafunc.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
