"""Whether taints, selectors and affinity let a pod run on a node, as kube-scheduler decides it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from slicewise.kubernetes.api import (
    LabelSelector,
    Node,
    NodeSelector,
    NodeTerm,
    Pod,
    Requirement,
    Taint,
    Toleration,
)

_CORDONED = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
_NUMBER = re.compile("-?[0-9]{1,18}")


def excluded(pod: Pod, node: Node, taints: Iterable[Taint]) -> str | None:
    """Why taints, selectors or affinity exclude a pod from a node; None if they do not."""
    tolerations = pod.spec.tolerations
    if node.spec.unschedulable and not tolerated(_CORDONED, tolerations):
        return "is cordoned"
    for taint in taints:
        if not tolerated(taint, tolerations):
            value = f"={taint.value}" if taint.value else ""
            return f"has taint {taint.key}{value}:{taint.effect}, which is not tolerated"
    labels = node.metadata.labels
    if any(labels.get(key) != value for key, value in pod.spec.node_selector.items()):
        return "does not match the pod's node selector"
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    if affinity and affinity.required and not matches(affinity.required, node):
        return "does not match the pod's node affinity"
    return None


def tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
    return any(_tolerates(toleration, taint) for toleration in tolerations)


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    match toleration.operator:
        case "" | "Equal":
            return toleration.value == taint.value
        case "Exists":
            return True
        case "Lt" | "Gt":
            return _compares(taint.value, toleration.operator, toleration.value)
        case _:
            return False


def matches(selector: NodeSelector, node: Node) -> bool:
    """Whether a term of a selector holds for a node; an empty term never does."""
    return any(_holds(term, node) for term in selector.node_selector_terms)


def labels_match(selector: LabelSelector, labels: Mapping[str, str]) -> bool:
    """Whether a selector holds for labels."""
    return all(labels.get(key) == value for key, value in selector.match_labels.items()) and all(
        _meets(one, labels) for one in selector.match_expressions
    )


def _holds(term: NodeTerm, node: Node) -> bool:
    if not term.match_expressions and not term.match_fields:
        return False
    fields = {"metadata.name": node.metadata.name}
    return all(_meets(one, node.metadata.labels) for one in term.match_expressions) and all(
        one.operator in ("In", "NotIn") and len(one.values) == 1 and _meets(one, fields)
        for one in term.match_fields
    )


def _meets(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    """Whether labels meet a requirement; an invalid requirement is never met."""
    value, values = labels.get(requirement.key), requirement.values
    match requirement.operator:
        case "In":
            return value in values
        case "NotIn":
            return bool(values) and value not in values
        case "Exists":
            return value is not None and not values
        case "DoesNotExist":
            return value is None and not values
        case "Gt" | "Lt":
            return (
                value is not None
                and len(values) == 1
                and _compares(value, requirement.operator, values[0])
            )
        case _:
            return False


def _compares(value: str, operator: str, bound: str) -> bool:
    """Whether one integer is less or greater than the other; False if one is invalid."""
    if not _NUMBER.fullmatch(value) or not _NUMBER.fullmatch(bound):
        return False
    one, other = int(value), int(bound)
    return one < other if operator == "Lt" else one > other
