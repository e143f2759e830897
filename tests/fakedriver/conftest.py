"""Fixtures: the fake driver library and simulated machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakedriver.driver import attached, built

from slicewise.fakedriver import Machine


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver library, shared by all workers of a run."""
    return built(tmp_path_factory.getbasetemp().parent / "fakedriver")


@pytest.fixture
def machine(tmp_path: Path, library: Path) -> Machine:
    """A machine with two H200 and MIG on."""
    return Machine.create(tmp_path / "machine", "H200", 2)


@pytest.fixture
def nvml(machine: Machine, library: Path) -> Iterator[Any]:
    """pynvml, initialized on ``machine``."""
    with attached(machine, library) as binding:
        yield binding


@pytest.fixture
def gpu(nvml: Any) -> Any:
    """The handle of the first GPU."""
    return nvml.nvmlDeviceGetHandleByIndex(0)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Machine]:
    """A function that creates further machines, each in its own file."""
    made: list[Machine] = []

    def machine(model: Any = "H200", gpus: int = 1, **options: Any) -> Machine:
        made.append(Machine.create(tmp_path / f"m{len(made)}", model, gpus, **options))
        return made[-1]

    return machine
