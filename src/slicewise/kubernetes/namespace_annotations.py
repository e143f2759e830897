"""The annotations of a namespace: its quota, and its place in the queue.

A limit that cannot be read is never taken as no limit, unless the operator has chosen so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slicewise.journal.entries import QuotaRecord
from slicewise.kubernetes.api import Namespace

QUOTA = {
    "slicewise.dev/memory-slices": "memory_slices",
    "slicewise.dev/compute-slices": "compute_slices",
    "slicewise.dev/instances": "instances",
}
"""The annotations of a namespace that set its quota."""
WEIGHT = "slicewise.dev/weight"
GUARANTEE = "slicewise.dev/guarantee"
MAX_PRIORITY = "slicewise.dev/max-priority"
"""The annotations of a namespace that set its place in the queue."""

Unreadable = Literal["last", "nothing", "unlimited"]
"""The limit in place of an unreadable one."""

_NUMBER = re.compile("[0-9]{1,9}")
_DECIMAL = re.compile("[0-9]{1,9}([.][0-9]{1,9})?")
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class NamespaceTerms:
    """What the annotations of a namespace say, and what is wrong with them."""

    quota: QuotaRecord
    known: dict[str, int]
    """The limits that were readable last, by their name in the quota."""
    problems: tuple[str, ...] = ()


def read_annotations(
    namespace: Namespace, known: Mapping[str, int], unreadable: Unreadable
) -> NamespaceTerms:
    """The terms of a namespace; ``known`` are the limits that were readable before."""
    annotations = namespace.metadata.annotations
    problems: list[str] = []

    def number(annotation: str, default: int, instead: str) -> int:
        text = annotations.get(annotation)
        if text is None or _NUMBER.fullmatch(text):
            return default if text is None else int(text)
        problems.append(
            f"{_quoted(annotation, text)} is not a number of at most 9 digits: {instead}"
        )
        return default

    limits: dict[str, int | None] = {}
    readable: dict[str, int] = {}
    for annotation, name in QUOTA.items():
        text = annotations.get(annotation)
        if text is None:
            limits[name] = None
        elif _NUMBER.fullmatch(text):
            limits[name] = readable[name] = int(text)
        else:
            if name in known:
                readable[name] = known[name]
            limits[name], words = _instead(known.get(name), unreadable)
            number(annotation, 0, words)
    weight, text = 1.0, annotations.get(WEIGHT)
    if text is not None and _DECIMAL.fullmatch(text) and float(text):
        weight = float(text)
    elif text is not None:
        problems.append(f"{_quoted(WEIGHT, text)} is not a positive number: the weight is 1")
    quota = QuotaRecord(
        **limits,
        weight=weight,
        guarantee=number(GUARANTEE, 0, "the guarantee is 0"),
        max_priority=number(MAX_PRIORITY, 0, "the highest priority that counts is 0"),
    )
    return NamespaceTerms(quota, readable, tuple(problems))


def _instead(known: int | None, unreadable: Unreadable) -> tuple[int | None, str]:
    """The limit in place of an unreadable one, and how to say so."""
    if unreadable == "unlimited":
        return None, "there is no such limit meanwhile, as configured"
    if unreadable == "last" and known is not None:
        return known, f"the last known limit of {known} applies"
    return 0, "the namespace gets nothing more"


def _quoted(annotation: str, text: str) -> str:
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return f"annotation {annotation}: {shown!r}"
