"""Compares the state that the API reports with the earlier answers: nothing lost, nothing added.

This needs no journal. It requires a moment without calls in flight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
from tests.e2e.call_log import LABEL, Call, CallLog, Kind
from tests.e2e.history_checker import wanted
from tests.e2e.server import Server
from tests.e2e.slice_ownership import Slice, answered_slices, overlaps

_TRIES = 200


def open_allocations(server: Server) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return all allocations that have not ended, and the cluster with its GPUs, of one moment."""
    for _ in range(_TRIES):
        before = _get(server, "/v1/cluster")["seq"]
        allocations: list[dict[str, Any]] = []
        cursor = ""
        while True:
            page = _get(server, f"/v1/allocations?limit=1000{cursor}")
            allocations += page["allocations"]
            if page["next"] is None:
                break
            cursor = f"&cursor={page['next']}"
        cluster = _get(server, "/v1/cluster?gpus=true")
        if cluster["seq"] == before:
            return allocations, cluster
    raise AssertionError(f"the state kept changing in {_TRIES} reads")


def compare(record: CallLog, server: Server) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the problems of the reported state, and the state itself."""
    allocations, cluster = open_allocations(server)
    calls = record.calls
    return [
        *overlaps(allocations),
        *_against_devices(allocations, cluster),
        *_against_calls(calls, allocations),
        *_ended(calls, server),
    ], allocations


def _against_devices(allocations: list[dict[str, Any]], cluster: dict[str, Any]) -> list[str]:
    """Check that the GPUs show exactly the instances of the allocations."""
    shown: dict[Slice, str] = {}
    for device in cluster["devices"]:
        for instance in device["instances"]:
            for piece in range(instance["start"], instance["start"] + instance["size"]):
                shown[device["node"], device["gpu"], piece] = instance["allocation"]
    told = {piece: one["id"] for one in allocations for piece in answered_slices(one)}
    found = []
    if shown != told:
        found.append(f"GPUs and allocations differ: {set(shown.items()) ^ set(told.items())}")
    if len(told) != cluster["slices"] - cluster["free_slices"]:
        found.append(f"{len(told)} slices are held, but {cluster['free_slices']} are free")
    return found


def _against_calls(calls: Iterable[Call], allocations: list[dict[str, Any]]) -> list[str]:
    found = []
    there = {one["id"]: one for one in allocations}
    asked: defaultdict[str, list[Call]] = defaultdict(list)
    by_label: dict[str, Call] = {}
    answered: dict[str, tuple[str, dict[str, Any]]] = {}
    moved: set[str] = set()
    for call in calls:
        if call.kind is Kind.RELEASE:
            asked[call.subject].append(call)
        elif call.kind is Kind.MOVE:
            moved |= {move["allocation"] for move in msgspec.json.decode(call.body)["moves"]}
        elif call.kind in (Kind.CREATE, Kind.BATCH):
            by_label |= {label: call for label, _ in wanted(call)}
            if call.known and call.status in (201, 202):
                content = call.decoded()
                for one in content["allocations"] if call.kind is Kind.BATCH else [content]:
                    answered[one["labels"][LABEL]] = one["id"], one
    for identity, content in answered.values():
        if content["state"] == "placed" and content["ends_at"] is None and identity not in asked:
            if identity not in there:
                found.append(f"allocation {identity} was placed and not released, but is gone")
            elif identity not in moved and there[identity]["instances"] != content["instances"]:
                found.append(f"allocation {identity} is not where it was placed")
    for identity, releases in asked.items():
        if identity in there and any(call.status == 200 for call in releases):
            found.append(f"allocation {identity} was released but still exists")
    for one in allocations:
        label = one["labels"].get(LABEL, "")
        maker = by_label.get(label)
        if maker is None:
            found.append(f"no call requested allocation {one['id']}")
        elif maker.known and answered.get(label, ("",))[0] != one["id"]:
            found.append(f"allocation {one['id']} exists, but call {label} got another answer")
    labels = [one["labels"].get(LABEL) for one in allocations]
    if len(set(labels)) != len(labels):
        found.append("a call has two allocations")
    return found


def _ended(calls: list[Call], server: Server) -> list[str]:
    """Check that the latest answered releases are reported as ended."""
    found = []
    done = [call for call in calls if call.kind is Kind.RELEASE and call.status == 200]
    for call in done[-5:]:
        content = _get(server, call.path)
        if content["state"] not in ("released", "cancelled"):
            found.append(f"allocation {call.subject} was released but is {content['state']}")
    return found


def _get(server: Server, path: str) -> Any:
    status, content = server.ask("GET", path)
    assert status == 200, f"GET {path}: {status} {content}"
    return content
