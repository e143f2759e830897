"""Whether a pod may be on a node by what both say of themselves, whatever is free there.

The rules are those of kube-scheduler's plugins NodeUnschedulable, TaintToleration and NodeAffinity.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from slicewise.k8s.api import Node, NodeSelector, NodeTerm, Pod, Requirement, Taint, Toleration

_CORDONED = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
_NUMBER = re.compile("-?[0-9]{1,18}")


def why_not(pod: Pod, node: Node, taints: Iterable[Taint]) -> str | None:
    """Why a pod may not be on a node, by what both say of themselves."""
    tolerations = pod.spec.tolerations
    if node.spec.unschedulable and not _tolerated(_CORDONED, tolerations):
        return "is cordoned"
    for taint in taints:
        if not _tolerated(taint, tolerations):
            value = f"={taint.value}" if taint.value else ""
            return f"has taint {taint.key}{value}:{taint.effect}, which is not tolerated"
    labels = node.metadata.labels
    if any(labels.get(key) != value for key, value in pod.spec.node_selector.items()):
        return "does not match the pod's node selector"
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    if affinity and affinity.required and not matches(affinity.required, node):
        return "does not match the pod's node affinity"
    return None


def keeps_away(taint: Taint) -> bool:
    """Whether a taint keeps pods away that do not tolerate it; others only ask them to."""
    return taint.effect in ("NoSchedule", "NoExecute")


def _tolerated(taint: Taint, tolerations: Iterable[Toleration]) -> bool:
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


# Selecting nodes


def matches(selector: NodeSelector, node: Node) -> bool:
    """Whether one of the selector's terms holds for the node; an empty term never does."""
    return any(_holds(term, node) for term in selector.node_selector_terms)


def _holds(term: NodeTerm, node: Node) -> bool:
    if not term.match_expressions and not term.match_fields:
        return False
    fields = {"metadata.name": node.metadata.name}
    return all(_meets(one, node.metadata.labels) for one in term.match_expressions) and all(
        one.operator in ("In", "NotIn") and len(one.values) == 1 and _meets(one, fields)
        for one in term.match_fields
    )


def _meets(requirement: Requirement, labels: Mapping[str, str]) -> bool:
    """Whether labels are as required; what makes no sense is never met."""
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
    """Whether one whole number is less or greater than the other."""
    if not _NUMBER.fullmatch(value) or not _NUMBER.fullmatch(bound):
        return False
    one, other = int(value), int(bound)
    return one < other if operator == "Lt" else one > other
