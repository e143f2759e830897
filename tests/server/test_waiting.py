"""The queue over HTTP: lines, reasons, reserved windows, and what tenants see of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Harness

HOUR = 3600.0


class Contest:
    """Tenant acme holds both GPUs with leases and goes on asking; zen waits for a whole GPU."""

    def __init__(self, folder: Path) -> None:
        self.harness = Harness(folder)
        self.tokens = {tenant: self.harness.tenant(tenant) for tenant in ("acme", "zen")}
        self.harness.node()
        first, *_ = [
            self.ask("acme", profile, lease_seconds=5 * HOUR)
            for profile in ("3g.40gb", "3g.40gb", "4g.40gb")
        ]
        self.waits = self.ask("zen", "7g.80gb", wait_seconds=9 * HOUR)
        assert self.waits["state"] == "queued"
        self.harness.clock.now += 60
        self.ask("acme", "1g.10gb", lease_seconds=30)  # it overtakes
        self.harness.clock.now += 300
        self.harness.delete(f"/v1/allocations/{first['id']}")
        filled = range(16)  # until no open window is left
        assert any("id" not in self.ask("acme", "1g.10gb", lease_seconds=5 * HOUR) for _ in filled)

    def ask(self, tenant: str, profile: str, **terms: Any) -> Any:
        body = {"profile": profile, **terms}
        return self.harness.post("/v1/allocations", body, token=self.tokens[tenant]).json()

    def get(self, path: str, tenant: str | None = None) -> Any:
        token = "" if tenant is None else self.tokens[tenant]
        answer = self.harness.get(path, token=token)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def reserved(self, tenant: str | None = None) -> list[Any]:
        devices = self.get("/v1/cluster?gpus=true", tenant)["devices"]
        return [one["reserved"] for one in devices if one["reserved"]]


@pytest.fixture
def contest(tmp_path: Path) -> Iterator[Contest]:
    made = Contest(tmp_path)
    yield made
    made.harness.close()


def test_the_holder_of_a_reservation_reads_where_and_when(contest: Contest) -> None:
    for tenant in ("zen", None):
        waiting = contest.get(f"/v1/allocations/{contest.waits['id']}", tenant)["waiting"]
        assert (waiting["position"], waiting["reason"]) == (1, "own reservation")
        (window,) = waiting["reserved"]
        assert (window["profile"], window["start"]) == ("7g.80gb", 0)
        assert window["blockers"] >= 1
        assert waiting["expected_at"] == window["opens_at"] is not None
        where = f"GPU {window['gpu']} of 'n1' from slice 0"
        assert waiting["detail"] == f"reserved on {where}, where 1 instance has to end first"
        assert waiting["kept_from"] == []
        (line,) = contest.get("/v1/queue", tenant)["lines"]
        assert (line["tenant"], line["waiting"], line["count"]) == ("zen", 1, 1)
        assert (line["first"], line["reason"]) == (contest.waits["id"], "own reservation")
        assert line["reserved"] == [window]
        assert line["expected_at"] == window["opens_at"]
        assert line["share"] == 0
        (shown,) = contest.reserved(tenant)
        assert (shown["node"], shown["gpu"]) == (window["node"], window["gpu"])
        assert (shown["tenant"], shown["profile"], shown["count"]) == ("zen", "7g.80gb", 1)
        assert (shown["start"], shown["size"], shown["opens_at"]) == (0, 8, window["opens_at"])
        (device,) = [
            one
            for one in contest.get(f"/v1/nodes/{window['node']}", tenant)["devices"]
            if one["reserved"]
        ]
        assert device["reserved"] == shown


def test_others_see_that_a_window_is_reserved_and_no_more(contest: Contest) -> None:
    (shown,) = contest.reserved("acme")
    assert (shown["start"], shown["size"]) == (0, 8)
    assert {shown[name] for name in ("tenant", "profile", "count", "opens_at")} == {None}
    assert contest.get("/v1/queue", "acme")["lines"] == []
    blocked = contest.ask("acme", "1g.10gb", wait_seconds=HOUR)
    assert blocked["state"] == "queued"
    waiting = contest.get(f"/v1/allocations/{blocked['id']}?plan=true", "acme")["waiting"]
    assert waiting["reason"] == "reserved"
    assert waiting["kept_from"] == [shown]
    assert waiting["others_ahead"] is True
    assert (waiting["reserved"], waiting["expected_at"], waiting["repack"]) == ([], None, None)
    (told,) = contest.get(f"/v1/allocations/{blocked['id']}")["waiting"]["kept_from"]
    assert (told["tenant"], told["profile"]) == ("zen", "7g.80gb")
    secret = ["zen", contest.waits["id"]]
    for path in (
        "/v1/cluster?gpus=true",
        "/v1/nodes/n1",
        "/v1/queue",
        f"/v1/allocations/{blocked['id']}",
        "/v1/allocations",
        "/v1/stats",
    ):
        text = contest.harness.get(path, token=contest.tokens["acme"]).text
        assert not [word for word in secret if word in text], path
    (line,) = contest.get("/v1/queue", "acme")["lines"]
    assert line["tenant"] == "acme"
    assert line["share"] > 0


def test_a_dry_run_tells_of_reservations_and_of_requests_that_wait(contest: Contest) -> None:
    def tried() -> Any:
        body = {"profile": "1g.10gb", "wait_seconds": 60}
        path = "/v1/allocations/dry-run?plan=true"
        answer = contest.harness.post(path, body, token=contest.tokens["acme"]).json()
        assert "zen" not in str(answer)
        return answer

    first = tried()
    assert (first["outcome"], first["reason"], first["ahead"]) == ("queued", "reserved", 0)
    assert first["repack"] is None
    contest.ask("acme", "1g.10gb", wait_seconds=HOUR)
    contest.ask("acme", "1g.10gb", wait_seconds=HOUR)
    assert tried()["ahead"] == 2


def test_a_reservation_leaves_the_totals_as_they_are(contest: Contest) -> None:
    view = contest.get("/v1/cluster?gpus=true")
    taken = sum(one["mask"].count("1") for one in view["devices"])
    (model,) = view["models"]
    assert model["free_slices"] == view["free_slices"] == 16 - taken
    assert model["schedulable_gpus"] == 2
    assert view["nodes"][0]["free_slices"] == 16 - taken


def test_the_window_goes_when_its_holder_does(contest: Contest) -> None:
    for tenant in ("acme", "zen", None):
        assert len(contest.reserved(tenant)) == 1
    gone = contest.harness.delete(f"/v1/allocations/{contest.waits['id']}")
    assert gone.json()["state"] == "cancelled"
    for tenant in ("acme", "zen", None):
        assert contest.reserved(tenant) == []


def test_metrics_of_the_queue(contest: Contest) -> None:
    lines = contest.harness.get("/metrics").text.splitlines()
    assert "slicewise_queue_depth 1.0" in lines
    assert "slicewise_queue_lines 1.0" in lines
    assert "slicewise_reserved_windows 1.0" in lines
    assert "slicewise_queue_oldest_seconds 360.0" in lines


def test_the_shortest_plan_is_named(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.node(gpus=2)
    small = [harness.post("/v1/allocations", {"profile": "1g.10gb"}).json() for _ in range(14)]
    kept = {0: 0, 1: 0}  # one instance on each GPU
    for one in small:
        if kept[one["gpu"]]:
            harness.delete(f"/v1/allocations/{one['id']}")
        kept[one["gpu"]] = 1
    body = {"profile": "7g.80gb", "wait_seconds": 60}
    tried = harness.post("/v1/allocations/dry-run?plan=true", body).json()
    assert tried["outcome"] == "queued"
    assert tried["repack"]["moves"] == 1
    where = tried["repack"]["room_at"]
    assert (where["node"], where["start"]) == ("n1", 0)
    said = f"1 move of an instance would make room for it on GPU {where['gpu']} of 'n1' at slice 0"
    assert tried["repack"]["detail"] == said
    assert harness.post("/v1/allocations/dry-run", body).json()["repack"] is None
    waits = harness.post("/v1/allocations", body).json()
    path = f"/v1/allocations/{waits['id']}"
    assert harness.get(f"{path}?plan=true").json()["waiting"]["repack"] == tried["repack"]
    assert harness.get(path).json()["waiting"]["repack"] is None
    both = harness.post("/v1/allocations/dry-run?plan=true", body | {"count": 2}).json()
    assert both["repack"] == {
        "moves": None,
        "room_at": None,
        "detail": "not even moving all instances would make room: 14 slices are free on A100-80GB, "
        "and it takes 16",
    }
    pair = {"profile": "4g.40gb", "count": 3}
    unknown = harness.post("/v1/allocations/dry-run?plan=true", pair).json()
    assert (unknown["outcome"], unknown["repack"]) == ("rejected", None)
    other = harness.post("/v1/allocations/dry-run?plan=true", {"profile": "4g.24gb"}).json()
    assert other["repack"]["detail"] == "no node has a GPU model that offers 4g.24gb"
    harness.close()


def test_a_plan_may_be_unknown(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.node(gpus=3)
    for one in [harness.place() for _ in range(21)]:
        if one["start"] in (2, 5):
            harness.delete(f"/v1/allocations/{one['id']}")
    tried = harness.post("/v1/allocations/dry-run?plan=true", {"profile": "7g.80gb"}).json()
    assert (tried["outcome"], tried["reason"]) == ("rejected", "capacity")
    assert tried["repack"] == {
        "moves": None,
        "room_at": None,
        "detail": "no plan of up to 4 moves is known that makes room for it",
    }
    harness.close()


def test_requests_are_paged_oldest_first_and_lines_in_fair_order(contest: Contest) -> None:
    ids = [contest.waits["id"]]
    for tenant, profile in (("acme", "4g.40gb"), ("zen", "4g.40gb"), ("acme", "4g.40gb")):
        contest.harness.clock.now += 1
        ids.append(contest.ask(tenant, profile, wait_seconds=HOUR)["id"])
    found: list[str] = []
    path = "/v1/queue?limit=3"
    while path:
        page = contest.get(path)
        found += [one["id"] for one in page["allocations"]]
        path = f"/v1/queue?limit=3&cursor={page['next']}" if page["next"] else ""
    assert found == ids
    lines = [(one["tenant"], one["first"], one["waiting"]) for one in page["lines"]]
    assert lines == [("zen", ids[0], 1), ("zen", ids[2], 1), ("acme", ids[1], 2)]
    own = contest.get("/v1/queue", "acme")
    assert (own["waiting"], [one["id"] for one in own["allocations"]]) == (2, [ids[1], ids[3]])
    second = contest.get(f"/v1/allocations/{ids[3]}", "acme")["waiting"]
    assert (second["position"], second["others_ahead"]) == (2, True)
    first = contest.get(f"/v1/allocations/{ids[0]}", "zen")["waiting"]
    assert (first["position"], first["others_ahead"]) == (1, False)
