"""The fake driver, built once, and machines to try it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakedriver.driver import attached, built

from slicewise.fakedriver import Machine


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's library, shared by all workers of a run."""
    return built(tmp_path_factory.getbasetemp().parent / "fakedriver")


@pytest.fixture
def machine(tmp_path: Path, library: Path) -> Machine:
    """Two H200 with MIG on."""
    return Machine.create(tmp_path / "machine", "H200", 2)


@pytest.fixture
def nvml(machine: Machine, library: Path) -> Iterator[Any]:
    """NVIDIA's binding, initialised on ``machine``."""
    with attached(machine, library) as binding:
        yield binding


@pytest.fixture
def gpu(nvml: Any) -> Any:
    """The handle of the first GPU."""
    return nvml.nvmlDeviceGetHandleByIndex(0)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Machine]:
    """A maker of further machines, each in a file of its own."""
    made: list[Machine] = []

    def machine(model: Any = "H200", gpus: int = 1, **options: Any) -> Machine:
        made.append(Machine.create(tmp_path / f"m{len(made)}", model, gpus, **options))
        return made[-1]

    return machine
