"""What the tests of the agent share: the fake driver, built once, and machines on it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slicewise.agent.nvml import Nvml
from slicewise.fakedriver import Machine, build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver's library."""
    return build(tmp_path_factory.getbasetemp().parent / "fakedriver")


MachineMaker = Callable[..., Machine]


@pytest.fixture
def machine_of(tmp_path: Path) -> MachineMaker:
    """Makes machines that do not exist."""
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
    """Opens the driver of a machine in this process, through NVIDIA's own binding."""
    ctypes.CDLL(str(library))  # The linker knows it by its name from now on.
    drivers: list[Nvml] = []

    def open_driver(machine: Machine) -> Nvml:
        for driver in drivers:  # The library knows one machine until everybody has let go of it.
            driver.close()
        for name, value in machine.environment(library).items():
            if name != "LD_LIBRARY_PATH":
                monkeypatch.setenv(name, value)
        drivers.append(Nvml())
        return drivers[-1]

    yield open_driver
    for driver in drivers:
        driver.close()
