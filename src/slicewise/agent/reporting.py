"""The agent's report: all it sees on its node, and what of it is worth telling at once."""

from __future__ import annotations

import json

from slicewise.agent.carrying import Carrier, Phase
from slicewise.agent.node import Node

_FIGURES = ("temperature", "memory_used")
"""What changes all the time: sent along, but no reason to send."""


def report(node: Node, carrier: Carrier) -> dict[str, object]:
    """All that is to be said; the session is added when it is sent."""
    used = {uuid: size for usage in node.usage.values() for uuid, size in usage.instances}
    return {
        "gpus": [_gpu(node, gpu) for gpu in node.gpus],
        "instances": _instances(carrier, used),
        "foreign": carrier.foreign(),
    }


def essence(told: dict[str, object]) -> str:
    """A report without its figures, to compare it by."""

    def bare(items: object) -> object:
        assert isinstance(items, list)
        return [{k: v for k, v in item.items() if k not in _FIGURES} for item in items]

    return json.dumps({name: bare(items) for name, items in told.items()}, sort_keys=True)


def _gpu(node: Node, gpu: str) -> dict[str, object]:
    told: dict[str, object] = {
        "uuid": gpu,
        "mig": node.mig(gpu),
        "problem": node.problem(gpu),
    }
    usage = node.usage.get(gpu)
    if usage is not None:
        told["memory_used"] = usage.memory_used
        if usage.temperature is not None:
            told["temperature"] = usage.temperature
    return told


def _instances(carrier: Carrier, used: dict[str, int]) -> list[dict[str, object]]:
    told: list[dict[str, object]] = []
    for item in carrier.desired.instances:
        standing = carrier.standing(item)
        if standing.phase is None:
            continue
        one: dict[str, object] = {
            "allocation": item.allocation,
            "index": item.index,
            "phase": str(standing.phase),
            "uuid": standing.uuid,
            "detail": standing.detail,
            "attempts": standing.attempts,
        }
        if standing.phase is Phase.ACTIVE and standing.uuid in used:
            one["memory_used"] = used[standing.uuid]
        told.append(one)
    return told
