"""Parameters of claims: profile, need, class; and the messages on invalid ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.kubernetes.objects import OURS, claim, device_class, wants

from slicewise.core.request import Need, Request
from slicewise.kubernetes.claim_parameters import RequestedDevices, is_ours, read_parameters

CLASSES = {
    OURS: device_class(),
    "big.slicewise.dev": device_class("big.slicewise.dev", profile="7g.80gb"),
    "mig.nvidia.com": device_class("mig.nvidia.com", sealed=False),
}


def request(name: str = "r", device: str = OURS, **exactly: object) -> dict[str, Any]:
    return {"name": name, "exactly": {"deviceClassName": device, **exactly}}


def test_a_class_is_ours_by_name_unless_kube_scheduler_would_allocate_it() -> None:
    assert is_ours(OURS, {})
    assert is_ours(OURS, {OURS: device_class()})
    assert not is_ours(OURS, {OURS: device_class(sealed=False)})
    assert not is_ours("mig.nvidia.com", CLASSES)
    assert not is_ours("slicewise.dev", {})


def test_a_class_need_not_exist() -> None:
    ask = read_parameters(claim("c", config=[wants(profile="1g.10gb")]), {})
    assert ask is not None
    assert ask.devices == (RequestedDevices("r", Request("1g.10gb")),)


def test_claims_of_other_classes_are_ignored() -> None:
    assert read_parameters(claim("c", request(device="mig.nvidia.com")), CLASSES) is None
    assert read_parameters(claim("c", request(device="unheard-of")), CLASSES) is None
    assert read_parameters(claim("c", {"name": "r", "firstAvailable": [{}]}), CLASSES) is None


def test_a_profile_a_need_and_a_class_with_a_profile() -> None:
    asked = claim(
        "c",
        request("a", count=2),
        request("b"),
        request("w", "big.slicewise.dev"),
        config=[
            wants(profile="1g.10gb") | {"requests": ["a"]},
            wants(compute=2, memoryGB=15, models=["A100"]) | {"requests": ["b"]},
        ],
    )
    ask = read_parameters(asked, CLASSES)
    assert ask is not None
    assert not ask.problem
    assert ask.devices == (
        RequestedDevices("a", Request("1g.10gb")),
        RequestedDevices("a", Request("1g.10gb")),
        RequestedDevices("b", Request(Need(2, 15.0), ("A100",))),
        RequestedDevices("w", Request("7g.80gb")),
    )


def test_parameters_of_the_claim_replace_those_of_the_class() -> None:
    ask = read_parameters(
        claim("c", request(device="big.slicewise.dev"), config=[wants(compute=1)]), CLASSES
    )
    assert ask is not None
    assert ask.devices == (RequestedDevices("r", Request(Need(1, 0.0))),)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (claim("c"), "does not say what it wants"),
        (claim("c", config=[wants(profil="1g.10gb")]), "unknown parameter 'profil'"),
        (claim("c", config=[wants(profile="1g", compute=1)]), "not both"),
        (claim("c", config=[wants(profile=7)]), "must be a name"),
        (claim("c", config=[wants(compute="two")]), "number of slices"),
        (claim("c", config=[wants(compute=True)]), "number of slices"),
        (claim("c", config=[wants(memoryGB="20Gi")]), "memoryGB must be a number"),
        (claim("c", config=[wants(compute=1, models="A100")]), "list of names"),
        (
            claim("c", config=[{"opaque": {"driver": "slicewise.dev", "parameters": "1g"}}]),
            "must be an object",
        ),
        (
            claim(
                "c",
                config=[wants(kind="X")],
            ),
            "kind Slices",
        ),
        (claim("c", request(), request("s", "mig.nvidia.com")), "use two claims"),
        (claim("c", request(allocationMode="All")), "allocationMode All"),
        (claim("c", request(selectors=[{"cel": {"expression": "true"}}])), "selectors"),
        (claim("c", request(adminAccess=True)), "adminAccess"),
        (claim("c", request(capacity={"requests": {}})), "capacity"),
        (claim("c", request(count=33), config=[wants(profile="1g.10gb")]), "33 devices"),
        (claim("c", request(count=2**62), config=[wants(profile="1g.10gb")]), "more than the 32"),
        (
            claim(
                "c",
                request("a", count=17),
                request("b", count=17),
                config=[wants(profile="1g.10gb")],
            ),
            "34 devices",
        ),
    ],
)
def test_invalid_parameters_are_refused_by_name(made: Any, words: str) -> None:
    ask = read_parameters(made, CLASSES)
    assert ask is not None
    assert words in ask.problem
    assert ask.devices == ()


def test_constraints_are_refused() -> None:
    made = claim("c", config=[wants(profile="1g.10gb")])
    devices = msgspec.structs.replace(made.spec.devices, constraints=({"matchAttribute": "x"},))
    made = msgspec.structs.replace(made, spec=msgspec.structs.replace(made.spec, devices=devices))
    ask = read_parameters(made, CLASSES)
    assert ask is not None
    assert "constraints" in ask.problem
