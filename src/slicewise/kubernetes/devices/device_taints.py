"""Device taints: those that drivers publish, and those of DeviceTaintRules."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from slicewise.kubernetes.api import DeviceTaint, DeviceTaintRule, DeviceToleration

Tolerations = tuple[DeviceToleration, ...]
_EXCLUDING = ("NoSchedule", "NoExecute")


def keeps_away(taint: DeviceTaint) -> bool:
    """Whether a taint keeps claims away, and is not just a note."""
    return taint.effect in _EXCLUDING


def selects(rule: DeviceTaintRule, driver: str, pool: str, devices: Collection[str]) -> bool:
    """Whether a rule taints one of the devices of a GPU."""
    chosen = rule.spec.device_selector
    return (
        chosen is not None
        and keeps_away(rule.spec.taint)
        and chosen.driver in (None, driver)
        and chosen.pool in (None, pool)
        and (chosen.device is None or chosen.device in devices)
    )


def tolerated(taints: Iterable[DeviceTaint], requests: Iterable[Tolerations]) -> bool:
    """Whether every request tolerates all taints."""
    return all(
        any(_tolerates(one, taint) for one in tolerations)
        for tolerations in requests
        for taint in taints
    )


def _tolerates(one: DeviceToleration, taint: DeviceTaint) -> bool:
    return (
        one.effect in ("", taint.effect)
        and (one.key == taint.key or (not one.key and one.operator == "Exists"))
        and (one.operator == "Exists" or (one.operator == "Equal" and one.value == taint.value))
    )
