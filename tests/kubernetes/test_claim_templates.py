"""The claim templates of unmodified pods: their names, and when they are created."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from slicewise.catalog.library import Catalog
from slicewise.core.errors import SlicewiseError
from slicewise.kubernetes.api import Pod, ResourceClaim
from slicewise.kubernetes.backoff import FIRST_SECONDS
from slicewise.kubernetes.claim_parameters import read_parameters
from slicewise.kubernetes.claim_templates import (
    ClaimTemplates,
    missing_templates,
    template,
    template_parameters,
)
from slicewise.kubernetes.pending_claims import PendingClaims

SMALL = "slicewise-mig-1g.10gb-x1"


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (SMALL, ({"profile": "1g.10gb"}, 1)),
        ("slicewise-mig-3g.40gb-x32", ({"profile": "3g.40gb"}, 32)),
        ("slicewise-mig-1g.10gb.me-x2", ({"profile": "1g.10gb+me"}, 2)),
        ("slicewise-mig-1g.24gb.me.all-x1", ({"profile": "1g.24gb+me.all"}, 1)),
        ("slicewise-mig-1g.24gb-me-x1", ({"profile": "1g.24gb-me"}, 1)),
        ("slicewise-need-2c-20gb", ({"compute": 2, "memoryGB": 20}, 1)),
        ("slicewise-need-0c-20gb", ({"compute": 0, "memoryGB": 20}, 1)),
    ],
)
def test_a_name_says_what_is_in_the_template(name: str, asked: object) -> None:
    assert template_parameters(name) == asked


@pytest.mark.parametrize(
    "name",
    [
        "half-gpu",
        "slicewise-mig-1g.10gb",
        "slicewise-mig-1g.10gb-x0",
        "slicewise-mig-1g.10gb-x33",
        "slicewise-mig-1g.10gb-x01",
        "slicewise-mig-1g.10gb-xmany",
        "slicewise-mig-big-x1",
        "slicewise-need-0c-0gb",
        "slicewise-need-2c",
        "my-slicewise-mig-1g.10gb-x1",
    ],
)
def test_other_templates_are_left_alone(name: str) -> None:
    assert template_parameters(name) is None
    assert list(missing_templates(waiting("a", name))) == []


def test_a_claim_from_the_template_asks_for_the_profile_of_each_model() -> None:
    named = {one.name for entry in Catalog.builtin().entries() for one in entry.facts}
    assert len(named) > 50
    for profile in named:
        name = f"slicewise-mig-{profile.replace('+', '.')}-x3"
        made = template("team", name)
        claim = msgspec.convert({"metadata": {"name": "c"}, **made["spec"]}, ResourceClaim)
        asked = read_parameters(claim, {})
        assert asked is not None
        assert not asked.problem
        assert [device.want.want for device in asked.devices] == [profile] * 3


def waiting(name: str, *templates: str, made: bool = False, namespace: str = "team") -> Pod:
    claims = [{"name": f"c{i}", "resourceClaimTemplateName": t} for i, t in enumerate(templates)]
    statuses = [{"name": one["name"], "resourceClaimName": "made"} for one in claims if made]
    pod = {
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}"},
        "spec": {"resourceClaims": claims},
        "status": {"resourceClaimStatuses": statuses},
    }
    return msgspec.convert(pod, Pod)


class Scene:
    """Templates that are created at once, or refused."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending = PendingClaims()
        self.created: list[str] = []
        self.told: list[tuple[str, str]] = []
        self.refusal: SlicewiseError | None = None
        self.templates = ClaimTemplates(
            self.pending, self.create, self.run, self.tell, lambda: self.now
        )

    def create(self, body: dict[str, Any]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.created.append(f"{body['metadata']['namespace']}/{body['metadata']['name']}")

    def run(self, work: Callable[[], Any], then: Callable[[Any, Any], None]) -> None:
        try:
            then(work(), None)
        except SlicewiseError as error:
            then(None, error)

    def tell(self, pod: Pod, text: str) -> None:
        self.told.append((pod.metadata.name, text))

    def arrive(self, pod: Pod) -> None:
        self.pending.set_pod(pod)
        self.templates.pod_changed(pod)

    def later(self, seconds: float = FIRST_SECONDS) -> None:
        self.now += seconds
        self.templates.retry()


def test_a_template_is_created_once_for_all_pods_of_a_namespace() -> None:
    scene = Scene()
    for number in range(3):
        scene.arrive(waiting(f"p{number}", SMALL))
    scene.arrive(waiting("other", SMALL, namespace="else"))
    scene.arrive(waiting("own", "my-template"))
    assert scene.created == [f"team/{SMALL}", f"else/{SMALL}"]
    assert scene.told == []


def test_a_template_that_was_deleted_is_created_again() -> None:
    scene = Scene()
    scene.arrive(waiting("a", SMALL))
    scene.arrive(waiting("a", SMALL, made=True))
    scene.later()
    assert scene.created == [f"team/{SMALL}"]
    assert scene.templates.next_time is None
    scene.arrive(waiting("b", SMALL))  # whether it is still there is not known
    scene.later()
    scene.later(2 * FIRST_SECONDS)
    assert scene.created == [f"team/{SMALL}"] * 4  # b still has no claim


def test_a_refusal_is_told_to_the_pods_and_to_the_operator_and_tried_again() -> None:
    scene = Scene()
    scene.refusal = SlicewiseError("you may not")
    scene.arrive(waiting("a", SMALL))
    scene.arrive(waiting("b", SMALL))
    text = f"the claim template {SMALL} cannot be created: you may not"
    assert scene.told == [("a", text), ("b", text)]
    assert scene.templates.summary() == f"unmodified pods wait for their claims: team: {text}"
    scene.refusal = None
    scene.later()
    assert scene.created == [f"team/{SMALL}"]
    assert scene.templates.summary() == ""


def test_many_refusals_are_counted() -> None:
    scene = Scene()
    scene.refusal = SlicewiseError("no")
    for number in range(5):
        scene.arrive(waiting("a", SMALL, namespace=f"n{number}"))
    assert scene.templates.summary().endswith("; and 2 more")
    for number in range(5):
        scene.pending.drop_pod(f"n{number}/a")
    scene.later()
    assert scene.templates.summary() == ""


def test_a_replica_that_leads_no_more_forgets() -> None:
    scene = Scene()
    scene.refusal = SlicewiseError("no")
    scene.arrive(waiting("a", SMALL))
    scene.templates.clear()
    assert scene.templates.summary() == ""
    assert scene.templates.next_time is None
    scene.refusal = None
    scene.arrive(waiting("a", SMALL))
    assert scene.created == [f"team/{SMALL}"]
