"""Enables MIG mode on the GPUs that an operator named with ``--enable-mig``, and on no others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slicewise.agent.driver import DriverError
from slicewise.agent.node_state import NodeState
from slicewise.core.errors import SlicewiseError

_log = logging.getLogger("slicewise.agent")


class MigModeSwitch:
    """The GPUs on which MIG mode must still be enabled; each is enabled once."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._remaining = list(dict.fromkeys(gpus))

    def check(self, node: NodeState) -> None:
        """Raise for a GPU that is not in this node or does not support MIG."""
        for gpu in self._remaining:
            if gpu not in node.gpus:
                known = ", ".join(node.gpus) or "none"
                raise SlicewiseError(
                    f"--enable-mig {gpu}: this node has no such GPU (its GPUs: {known})"
                )
            if gpu in node.readings and node.readings[gpu].mig is None:
                name = node.readings[gpu].name
                raise SlicewiseError(f"--enable-mig {gpu}: {name} does not support MIG")

    def attempt(self, node: NodeState) -> None:
        """Enable MIG mode where no process runs; record why it was not possible elsewhere."""
        for gpu in list(self._remaining):
            if node.conflict or not node.is_read(gpu):
                continue
            problem = self._enable(node, gpu)
            if problem and node.mig_problems.get(gpu) != problem:
                _log.warning("%s: %s", gpu, problem)
            node.mig_problems.pop(gpu, None)
            if problem:
                node.mig_problems[gpu] = problem
            else:
                self._remaining.remove(gpu)

    @staticmethod
    def _enable(node: NodeState, gpu: str) -> str:
        """Enable MIG mode on one GPU; return why it is not on, or ""."""
        reading = node.readings[gpu]
        if reading.mig:
            return ""
        if reading.pending:
            return "MIG mode is enabled, but takes effect only after a reset of the GPU"
        try:
            processes = node.driver.processes(gpu)
            if processes:
                shown = ", ".join(map(str, processes[:5]))
                more = ", ..." if len(processes) > 5 else ""
                return f"MIG mode cannot be enabled while processes use the GPU: {shown}{more}"
            _log.info("enabling MIG mode on %s", gpu)
            node.driver.enable_mig(gpu)
            reading = node.read(gpu)
        except DriverError as error:
            return f"MIG mode could not be enabled: {error}"
        return "" if reading.mig else "MIG mode is enabled, but the GPU needs a reset"
