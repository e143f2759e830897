"""The package as others import it: light, typed, and with a pinned set of names."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import version

import pytest

import slicewise
import slicewise.client


def test_importing_it_stays_light() -> None:
    code = (
        "import sys, slicewise; "
        "heavy = {'numba', 'numpy', 'matplotlib', 'typer', 'rich'} & set(sys.modules);"
        "print(sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist_and_are_pinned() -> None:
    assert sorted(slicewise.__all__) == slicewise.__all__
    for name in slicewise.__all__:
        assert getattr(slicewise, name) is not None
    public = {name for name in vars(slicewise) if not name.startswith("_")}
    rooms = {module.name for module in pkgutil.iter_modules(slicewise.__path__)}
    assert public - rooms <= set(slicewise.__all__) - {"__version__"}
    assert set(slicewise.__all__) <= set(dir(slicewise))
    with pytest.raises(AttributeError, match="'slicewise' has no attribute 'Clutser'"):
        slicewise.Clutser  # type: ignore[attr-defined]  # noqa: B018


def test_public_names_of_the_client_exist() -> None:
    assert sorted(slicewise.client.__all__) == slicewise.client.__all__
    for name in slicewise.client.__all__:
        assert getattr(slicewise.client, name) is not None
    with pytest.raises(AttributeError, match=r"'slicewise\.client' has no attribute 'AsynClient'"):
        slicewise.client.AsynClient  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("module", ["slicewise", "slicewise.core.geometry",
                                    "slicewise.catalog.library"])  # fmt: skip
def test_examples_in_docstrings_are_true(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_version_is_the_packages() -> None:
    assert version("slicewise") == slicewise.__version__
