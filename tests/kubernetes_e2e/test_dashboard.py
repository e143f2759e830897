"""The dashboard of a Kubernetes cluster, in a real browser: complete and read-only.

With SLICEWISE_SCREENS set, the picture of docs/kubernetes.md is taken again.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from tests.dashboard.browser import ARTEFACTS, PAGES, Visitor, chromium
from tests.e2e.server import Server
from tests.kubernetes_e2e.api import CORE, until
from tests.kubernetes_e2e.cluster import (
    allocated,
    claims_of,
    device_request,
    namespace,
    node,
    pod,
    pods_in,
    publish,
    template,
    templates_in,
    until_running,
    withdraw,
)
from tests.kubernetes_e2e.plane import Plane
from tests.kubernetes_e2e.replica import OUR_CLASS, Replica, running, wants

SCREENS = Path(__file__).parents[2] / "docs" / "screens"
NODES = ("gpu-1", "gpu-2", "gpu-3")
SPACES = ("vision", "speech", "batch")
ASKED: dict[str, list[tuple[str, str]]] = {
    "vision": [
        *((f"train-{number}", "3g.40gb") for number in range(3)),
        *((f"label-{number}", "1g.10gb") for number in range(5)),
    ],
    "speech": [
        *((f"serve-{number}", "2g.20gb") for number in range(4)),
        ("tune-0", "7g.80gb"),
        ("tune-1", "4g.40gb"),
    ],
    "batch": [("night-0", "1g.20gb"), ("night-1", "1g.20gb")],
}
"""By namespace: running pods and their requests."""
OFFERED = ("Release", "Cancel", "Cordon", "Uncordon", "Drain", "Remove", "Register a node", "Quota",
           "Create a tenant", "Submit", "Approve", "Carry out")  # fmt: skip
"""The buttons that change something, for those who may."""


class Shown:
    """A replica with the parts of a server that a browser needs."""

    def __init__(self, replica: Replica, token: Path) -> None:
        line = until("it can be seen", lambda: self._line(replica))
        self.url = line[1]
        self.token = token.read_text().strip()

    @staticmethod
    def _line(replica: Replica) -> re.Match[str] | None:
        return re.search(r"listening at (\S+); dashboard: token in", replica.log.read_text())

    def get(self, path: str) -> Any:
        """The API's answer to a request."""
        answer = httpx.get(
            f"{self.url}{path}", headers={"Authorization": f"Bearer {self.token}"}, trust_env=False
        )
        assert answer.is_success, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for the tests of this file."""
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def shown(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Shown]]:
    """Two replicas over three nodes, whose pods run and wait; the leader comes first."""
    folder = tmp_path_factory.mktemp("replicas")
    with ExitStack() as stack:
        publish(plane.api, [node(name) for name in NODES], "A100-80GB", 2)
        stack.callback(withdraw, plane.api, NODES)
        for space in SPACES:
            stack.enter_context(namespace(plane.api, space))
        quota = {"slicewise.dev/memory-slices": "5"}
        plane.api.patch(f"{CORE}/namespaces/batch", {"metadata": {"annotations": quota}})
        shows = []
        for name in ("one", "two"):
            token = folder / f"{name}.token"
            flags = ["--listen", "127.0.0.1:0", "--token-file", str(token), "--lease-seconds", "2"]
            replica = stack.enter_context(running(plane.kubeconfig, folder, *flags, name=name))
            shows.append(Shown(replica, token))
        populate(plane)
        yield shows


def populate(plane: Plane) -> None:
    """Pods that run in three namespaces, and three that wait, each for another reason."""
    for space, asked in ASKED.items():
        for profile in {profile for _, profile in asked} | {"7g.80gb", "1g.20gb"}:
            name = profile.replace(".", "-")
            request = device_request(OUR_CLASS)
            made = template(name, request, config=[wants(profile=profile)])
            plane.api.create(templates_in(space), made)
        for name, profile in asked:
            plane.api.create(pods_in(space), pod(name, templates=[profile.replace(".", "-")]))
        for name, _ in asked:
            until_running(plane.api, space, name)
    plane.api.create(pods_in("batch"), pod("night-2", templates=["1g-20gb"]))
    plane.api.create(pods_in("speech"), pod("tune-2", templates=["7g-80gb"] * 3))
    plane.api.create(pods_in("vision"), pod("train-3", templates=["7g-80gb"]))


@pytest.fixture
def visitor(browser: Browser, shown: list[Shown]) -> Iterator[Visitor]:
    """A user who has signed in at the leader; there must be no errors in the window."""
    visitor = Visitor(browser, cast(Server, shown[0]))
    visitor.sign_in(shown[0].token)
    yield visitor
    visitor.close()


def keep(page: Page, name: str) -> None:
    """Keep a picture of a page."""
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=ARTEFACTS / f"kubernetes-{name}.png")


def test_the_map_shows_every_slice(plane: Plane, visitor: Visitor, shown: list[Shown]) -> None:
    page = visitor.go("cluster")
    map_ = page.get_by_role("application")
    map_.focus()
    expect(page.locator(".totals div", has_text="GPUs").locator("dd")).to_have_text("6")
    instances = sum(map(len, ASKED.values()))
    told = page.locator(".totals div", has_text="instances").locator("dd")
    expect(told).to_have_text(str(instances))
    expect(page.get_by_text("gpu-1").first).to_be_visible()
    page.wait_for_timeout(300)
    keep(page, "cluster")
    if os.environ.get("SLICEWISE_SCREENS"):
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        picture.save(SCREENS / "kubernetes.webp", quality=82, method=6)


def test_allocations_name_claim_pod_and_place(plane: Plane, visitor: Visitor) -> None:
    page = visitor.go("allocations")
    page.get_by_label("Search").fill("tune-0")
    row = page.get_by_role("row").filter(has_text="tune-0")
    expect(row).to_have_count(1)
    [claim] = claims_of(plane.api, "speech", "tune-0")
    [(where, device)] = allocated(plane.api, "speech", "tune-0")
    expect(row).to_contain_text(f"claim={claim}")
    expect(row).to_contain_text("pod=tune-0")
    expect(row).to_contain_text("speech")
    expect(row).to_contain_text("7g.80gb")
    number = device.split("-")[1]
    expect(row).to_contain_text(f"{where} GPU {number}")
    page.get_by_label("Search").fill("")
    keep(page, "allocations")


def test_the_queue_shows_the_reason(visitor: Visitor) -> None:
    page = visitor.go("queue")
    for name, why in (
        ("night-2", "namespace 'batch' uses 4 of its 5 memory slices, and this would take 2 more"),
        ("tune-2", "no GPU has enough free for 7g.80gb"),
        ("train-3", "no GPU has enough free for 7g.80gb"),
    ):
        row = page.get_by_role("row").filter(has_text=name)
        expect(row.first).to_contain_text(why)
    keep(page, "queue")


def test_nodes_and_namespaces(visitor: Visitor) -> None:
    page = visitor.go("nodes")
    for name in NODES:
        expect(page.get_by_role("row").filter(has_text=name)).to_contain_text("ready")
    page = visitor.go("tenants")
    row = page.get_by_role("row").filter(has=page.get_by_role("button", name="batch", exact=True))
    expect(row).to_contain_text("4")
    expect(row).to_contain_text("5")
    keep(page, "tenants")


def test_no_control_changes_anything(visitor: Visitor, shown: list[Shown]) -> None:
    links = visitor.page.get_by_role("navigation").get_by_role("link").all_inner_texts()
    assert "ClaimParameters" not in links
    assert "Audit log" not in links
    for place in [place for place, title in PAGES.items() if title in links]:
        page = visitor.go(place)
        visitor.live()
        for name in OFFERED:
            assert page.get_by_role("button", name=name).count() == 0, (place, name)
    answer = httpx.post(
        f"{shown[0].url}/v1/allocations",
        json={"profile": "1g.10gb"},
        headers={"Authorization": f"Bearer {shown[0].token}"},
        trust_env=False,
    )
    assert answer.status_code == 403
    assert "Kubernetes" in answer.json()["detail"]


def test_changes_appear_without_a_reload(plane: Plane, visitor: Visitor) -> None:
    page = visitor.go("allocations")
    row = page.get_by_role("row").filter(has_text="night-1")
    expect(row).to_have_count(1)
    plane.api.delete(f"{pods_in('batch')}/night-1")
    expect(row).to_have_count(0)
    until_running(plane.api, "batch", "night-2")  # the quota has room for it now
    expect(page.get_by_role("row").filter(has_text="night-2")).to_contain_text("placed")


def test_every_replica_shows_the_same(shown: list[Shown]) -> None:
    def view(one: Shown) -> dict[str, Any]:
        placed = {
            (each["id"], each["tenant"], each["node"], each["profile"], each["labels"]["pod"])
            for each in one.get("/v1/allocations?limit=1000")["allocations"]
        }
        waits = {
            (each["labels"]["pod"], each["waiting"]["reason"])
            for each in one.get("/v1/queue")["allocations"]
        }
        return {"placed": placed, "waits": waits}

    first, second = shown
    until("both show the same", lambda: view(first) == view(second))
    assert {name for name, _ in view(second)["waits"]} == {"tune-2", "train-3"}
    roles = {first.get("/readyz")["role"], second.get("/readyz")["role"]}
    assert roles == {"leading", "following"}
