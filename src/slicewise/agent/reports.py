"""The messages the agent sends: hello introduces the node, a report describes its full state."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slicewise.agent.desired_state import DesiredInstance
from slicewise.agent.node_state import MAX_MESSAGE, NodeState
from slicewise.agent.planning import effective_uuid
from slicewise.agent.reconciler import Phase, Reconciler
from slicewise.agent.record import InstanceKey, Stage
from slicewise.core.geometry import Geometry

_MAX_DIFFERENCES = 64
_MEASUREMENTS = ("temperature", "memory_used")
"""Fields that change all the time: a change of them alone does not trigger a report."""


def hello(node: NodeState, boot: str, agent: str) -> dict[str, object] | None:
    """The hello message; None while the model of the node's GPUs is unknown."""
    model = node.model()
    if model is None:
        return None
    return {
        "boot": boot,
        "agent": agent,
        "driver": node.version,
        "model": model.name,
        "geometry": encode_geometry(model.geometry),
        "disagreements": _shorten(model.differences),
        "gpus": [
            {"uuid": gpu, "mig": node.mig(gpu), "problem": node.problem(gpu)} for gpu in node.gpus
        ],
    }


def report(node: NodeState, reconciler: Reconciler) -> dict[str, object]:
    """The full state of the node; the session adds its id when it sends the report."""
    return {
        "gpus": [_gpu(node, gpu) for gpu in node.gpus],
        "instances": _instances(node, reconciler),
        "foreign": unlisted_instances(node, reconciler),
    }


def without_measurements(report: dict[str, object]) -> str:
    """A report without its measurements, for comparison with the previous one."""

    def strip(items: object) -> object:
        assert isinstance(items, list)
        return [{k: v for k, v in item.items() if k not in _MEASUREMENTS} for item in items]

    return json.dumps({name: strip(items) for name, items in report.items()}, sort_keys=True)


def encode_geometry(geometry: Geometry) -> dict[str, object]:
    """Encode a geometry as JSON."""
    return {
        "model": geometry.model,
        "slices": geometry.slices,
        "compute": geometry.compute,
        "memory_gb": geometry.memory_gb,
        "budgets": {budget.name: budget.total for budget in geometry.budgets},
        "profiles": [
            {
                "name": profile.name,
                "size": profile.size,
                "compute": profile.compute,
                "memory_gb": profile.memory_gb,
                "starts": list(profile.starts),
                "preferred": list(profile.preferred),
                "uses": dict(profile.uses),
                "variant_of": profile.variant_of,
            }
            for profile in geometry.profiles
        ],
    }


def _gpu(node: NodeState, gpu: str) -> dict[str, object]:
    body: dict[str, object] = {
        "uuid": gpu,
        "mig": node.mig(gpu),
        "problem": node.problem(gpu),
    }
    usage = node.usage.get(gpu)
    if usage is not None:
        body["memory_used"] = usage.memory_used
        if usage.temperature is not None:
            body["temperature"] = usage.temperature
    return body


def _instances(node: NodeState, reconciler: Reconciler) -> list[dict[str, object]]:
    """The progress of all desired instances."""
    memory = {uuid: used for usage in node.usage.values() for uuid, used in usage.instances}
    bodies: list[dict[str, object]] = []
    for item in reconciler.desired.instances:
        progress = reconciler.progress(item)
        if progress.phase is None:
            continue
        body: dict[str, object] = {
            "allocation": item.allocation,
            "index": item.index,
            "phase": str(progress.phase),
            "uuid": progress.uuid,
            "detail": progress.detail or _notice(item),
            "attempts": progress.attempts,
        }
        if progress.phase is Phase.ACTIVE and progress.uuid in memory:
            body["memory_used"] = memory[progress.uuid]
        bodies.append(body)
    return bodies


def _notice(item: DesiredInstance) -> str:
    """The notice to show for an instance in use; empty if there is none."""
    return f"its slices are reclaimed at {item.notice}" if item.notice and item.present else ""


def unlisted_instances(node: NodeState, reconciler: Reconciler) -> list[dict[str, object]]:
    """Instances that are not desired: foreign ones, and strays that the agent created.

    Recorded instances on GPUs that were not read since the agent started are included.
    """
    record = reconciler.record
    listed = {(item.part, item.key) for item in reconciler.desired.instances}
    bodies: list[dict[str, object]] = []
    for gpu in node.gpus:
        reading = node.readings.get(gpu)
        for found in reading.instances if reading is not None else ():
            key = InstanceKey(gpu, found.profile, found.start)
            own = record.get(key)
            if own is not None and own.matches(found) and (own.part, key) in listed:
                continue
            stray = own is not None and own.matches(found) and own.allocation != ""
            bodies.append(_unlisted(key, found.size, effective_uuid(own, found), stray))
    for own in record:
        unread = own.gpu in node.gpus and own.gpu not in node.readings
        if unread and own.stage is not Stage.INTENT and (own.part, own.key) not in listed:
            bodies.append(_unlisted(own.key, own.size, own.uuid, own.allocation != ""))
    return bodies


def _unlisted(key: InstanceKey, size: int, uuid: str, stray: bool) -> dict[str, object]:
    return {
        "gpu": key.gpu,
        "uuid": uuid,
        "profile": key.profile,
        "start": key.start,
        "size": size,
        "why": "stray" if stray else "foreign",
    }


def _shorten(messages: Sequence[str]) -> list[str]:
    """Limit the number and length of messages to what the service accepts."""
    short = [message[:MAX_MESSAGE] for message in messages]
    if len(short) <= _MAX_DIFFERENCES:
        return short
    rest = len(short) - _MAX_DIFFERENCES + 1
    return [*short[: _MAX_DIFFERENCES - 1], f"and {rest} more"]
