"""Fixtures: the fake driver library and simulated machines."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slicewise.agent.nvml import Nvml
from slicewise.fakedriver import Machine, build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver library."""
    return build(tmp_path_factory.getbasetemp().parent / "fakedriver")


MachineMaker = Callable[..., Machine]


@pytest.fixture
def machine_of(tmp_path: Path) -> MachineMaker:
    """A function that creates simulated machines."""
    made: list[Machine] = []

    def make(model: str = "H200-141GB", gpus: int = 1, mig: bool = True) -> Machine:
        machine = Machine.create(
            tmp_path / f"machine-{len(made)}", model, gpus, mig=mig, seed=len(made) + 1
        )
        made.append(machine)
        return machine

    return make


@pytest.fixture
def opened(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Machine], Nvml]]:
    """A function that opens the driver of a machine in this process, through pynvml."""
    ctypes.CDLL(str(library))  # pynvml loads the same SONAME and gets this library.
    drivers: list[Nvml] = []

    def open_driver(machine: Machine) -> Nvml:
        for driver in drivers:  # The library is attached to one machine at a time.
            driver.close()
        for name, value in machine.environment(library).items():
            if name != "LD_LIBRARY_PATH":
                monkeypatch.setenv(name, value)
        drivers.append(Nvml())
        return drivers[-1]

    yield open_driver
    for driver in drivers:
        driver.close()
