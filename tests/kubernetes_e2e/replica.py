"""A replica of the controller as a separate process, as users run it, and claims of its class."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kubernetes_e2e.api import Json

OUR_CLASS = "mig.slicewise.dev"
PARAMETERS = {"apiVersion": "slicewise.dev/v1", "kind": "Slices"}

SEALED: Json = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "DeviceClass",
    "metadata": {"name": OUR_CLASS},
    "spec": {
        "selectors": [{"cel": {"expression": "false"}}],
        "config": [{"opaque": {"driver": "slicewise.dev", "parameters": PARAMETERS}}],
    },
}


def wants(*requests: str, **parameters: object) -> Json:
    """The configuration of a claim: a profile, or a need, for these requests or for all."""
    config: Json = {"opaque": {"driver": "slicewise.dev", "parameters": PARAMETERS | parameters}}
    return config | ({"requests": list(requests)} if requests else {})


class Replica:
    """One process.

    It does not let slices cool down, unless a flag says so: most tests here delete pods by force,
    and their nodes have no kubelet that would have to remove anything.
    """

    def __init__(self, kubeconfig: Path, folder: Path, *flags: str, name: str = "r0") -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [
            sys.executable, "-m", "slicewise.cli", "k8s", "--kubeconfig", str(kubeconfig),
            "--identity", name, "--namespace", "default", "--cool-down", "0", *flags,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process without waiting for it."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Terminate the process and wait for it."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait()


@contextmanager
def running(kubeconfig: Path, folder: Path, *flags: str, name: str = "r0") -> Iterator[Replica]:
    """A replica that runs meanwhile."""
    replica = Replica(kubeconfig, folder, *flags, name=name)
    replica.start()
    try:
        yield replica
    finally:
        process = replica.process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
