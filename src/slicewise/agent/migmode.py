"""Switching MIG mode on, for the GPUs an operator named and for no others."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slicewise.agent.driver import DriverError
from slicewise.agent.node import Node
from slicewise.core.errors import SlicewiseError

_log = logging.getLogger("slicewise.agent")


class Switch:
    """The GPUs whose MIG mode is still to be switched on; each is switched once."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._left = list(dict.fromkeys(gpus))

    def check(self, node: Node) -> None:
        """Refuse names of GPUs that are not here, or have no MIG."""
        for gpu in self._left:
            if gpu not in node.gpus:
                here = ", ".join(node.gpus) or "none"
                raise SlicewiseError(
                    f"--enable-mig {gpu}: there is no such GPU here (here: {here})"
                )
            if gpu in node.seen and node.seen[gpu].mig is None:
                raise SlicewiseError(f"--enable-mig {gpu}: {node.seen[gpu].name} has no MIG")

    def attempt(self, node: Node) -> None:
        """Switch where nothing runs; where it cannot be done yet, the GPU is held and says why."""
        for gpu in list(self._left):
            if node.trouble or not node.is_read(gpu):
                continue
            remark = self._switch(node, gpu)
            if remark and node.remarks.get(gpu) != remark:
                _log.warning("%s: %s", gpu, remark)
            node.remarks.pop(gpu, None)
            if remark:
                node.remarks[gpu] = remark
            else:
                self._left.remove(gpu)

    @staticmethod
    def _switch(node: Node, gpu: str) -> str:
        """Switch one GPU; what keeps it from being on is the answer."""
        reading = node.seen[gpu]
        if reading.mig:
            return ""
        if reading.pending:
            return "MIG mode is to be on, but takes effect after a reset of the GPU only"
        try:
            busy = node.driver.processes(gpu)
            if busy:
                shown = ", ".join(map(str, busy[:5])) + (", ..." if len(busy) > 5 else "")
                return f"MIG mode is to be switched on, but processes use the GPU: {shown}"
            _log.info("switching MIG mode on for %s", gpu)
            node.driver.enable_mig(gpu)
            reading = node.read(gpu)
        except DriverError as error:
            return f"MIG mode could not be switched on: {error}"
        return "" if reading.mig else "MIG mode is to be on, but a reset of the GPU is needed"
