"""The documents, found once; a test that asks for ``document`` runs for each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for every document."""
    if "document" in metafunc.fixturenames:
        metafunc.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
