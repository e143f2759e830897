"""Allocations over HTTP: create, queue, reject, release, list."""

from __future__ import annotations

from tests.server.harness import Harness


def test_an_allocation_is_placed_and_released(busy: Harness) -> None:
    made = busy.post("/v1/allocations", {"profile": "3g.40gb"})
    assert made.status_code == 201
    body = made.json()
    assert {"id", "state", "tenant", "node", "gpu", "model", "profile", "start", "size"} <= set(
        body
    )
    assert (body["state"], body["tenant"], body["node"]) == ("placed", "default", "n1")
    assert (body["model"], body["profile"], body["size"]) == ("A100-80GB", "3g.40gb", 4)
    assert busy.get(f"/v1/allocations/{body['id']}").json() == body
    gone = busy.delete(f"/v1/allocations/{body['id']}")
    assert gone.status_code == 200
    assert gone.json()["state"] == "released"
    assert gone.json()["cause"] == "released"
    assert busy.get("/v1/cluster").json()["free_slices"] == 16


def test_ended_allocations_are_shown_unchanged(busy: Harness) -> None:
    identity = busy.place()["id"]
    first = busy.delete(f"/v1/allocations/{identity}").json()
    again = busy.delete(f"/v1/allocations/{identity}")
    assert again.status_code == 200
    assert again.json() == first == busy.get(f"/v1/allocations/{identity}").json()
    assert busy.delete("/v1/allocations/unknown").status_code == 404
    assert busy.get("/v1/allocations/unknown").status_code == 404
    assert busy.get("/v1/allocations/" + "x" * 70).status_code == 404
    assert busy.get("/v1/allocations/%C3%A9").status_code == 404


def test_reasons_of_a_rejection(busy: Harness) -> None:
    full = [busy.place("7g.80gb") for _ in range(2)]
    answer = busy.post("/v1/allocations", {"profile": "1g.10gb"})
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["reason"] == "capacity"
    assert answer.json()["type"] == "urn:slicewise:problem:capacity"
    assert "1g.10gb" in answer.json()["detail"]
    for one in full:
        busy.delete(f"/v1/allocations/{one['id']}")
    for _ in range(14):
        busy.place("1g.10gb")
    listed = busy.get("/v1/allocations").json()["allocations"]
    for one in listed:
        if one["start"] % 2:
            busy.delete(f"/v1/allocations/{one['id']}")
    answer = busy.post("/v1/allocations", {"profile": "2g.20gb"})
    assert answer.json()["reason"] == "fragmented"
    token = busy.tenant("small", memory_slices=1)
    answer = busy.post("/v1/allocations", {"profile": "2g.20gb"}, token=token)
    assert answer.status_code == 409
    assert answer.json()["reason"] == "quota"


def test_a_need_and_models(busy: Harness) -> None:
    made = busy.post(
        "/v1/allocations", {"need": {"compute": 2, "memory_gb": 15}, "models": ["a100"]}
    )
    assert made.status_code == 201
    assert made.json()["profile"] == "2g.20gb"
    assert made.json()["wanted"]["models"] == ["A100-80GB"]
    unknown = busy.post("/v1/allocations", {"profile": "1g.10gb", "models": ["a1000"]})
    assert unknown.status_code == 400
    assert unknown.json()["field"] == "models"
    elsewhere = busy.post("/v1/allocations", {"profile": "1g.10gb", "models": ["H100-80GB-SXM5"]})
    assert elsewhere.status_code == 409


def test_invalid_bodies_are_refused(busy: Harness) -> None:
    bodies: list[object] = [
        {},
        {"profile": "1g.10gb", "need": {"compute": 1, "memory_gb": 1}},
        {"profile": "1g.10gb", "count": 0},
        {"profile": "1g.10gb", "color": "red"},
        {"profile": "1g.10gb\n"},
        {"profile": "1g.10gb", "labels": {"a b": "c"}},
        {"profile": "nonsense"},
        {"profile": 7},
        [],
    ]
    for body in bodies:
        answer = busy.post("/v1/allocations", body)
        assert answer.status_code == 400, body
        assert answer.headers["content-type"] == "application/problem+json"
    assert "color" in busy.post("/v1/allocations", {"color": 1}).json()["detail"]
    assert busy.post("/v1/allocations", {"profile": 7}).json()["field"] == "profile"


def test_several_instances_are_placed_all_or_none(busy: Harness) -> None:
    made = busy.place("3g.40gb", count=4)
    assert len(made["instances"]) == 4
    assert busy.post("/v1/allocations", {"profile": "1g.10gb"}).status_code == 409
    busy.delete(f"/v1/allocations/{made['id']}")
    assert busy.post("/v1/allocations", {"profile": "3g.40gb", "count": 5}).status_code == 409
    assert busy.get("/v1/cluster").json()["free_slices"] == 16


def test_a_batch(busy: Harness) -> None:
    body = {"allocations": [{"profile": "3g.40gb"}, {"profile": "7g.80gb"}]}
    answer = busy.post("/v1/allocations/batch", body, key="b")
    assert answer.status_code == 201
    assert [a["profile"] for a in answer.json()["allocations"]] == ["3g.40gb", "7g.80gb"]
    again = busy.post("/v1/allocations/batch", body, key="b")
    assert again.headers["idempotency-replayed"] == "true"
    assert again.content == answer.content
    refused = busy.post("/v1/allocations/batch", body)
    assert refused.status_code == 409
    assert refused.json()["index"] == 1
    assert len(busy.get("/v1/allocations").json()["allocations"]) == 2


def test_a_batch_belongs_to_one_tenant_and_is_not_queued(busy: Harness) -> None:
    waits = {"allocations": [{"profile": "1g.10gb"}, {"profile": "1g.10gb", "wait_seconds": 5}]}
    answer = busy.post("/v1/allocations/batch", waits)
    assert (answer.status_code, answer.json()["index"]) == (400, 1)
    mixed = {"allocations": [{"profile": "1g.10gb"}, {"profile": "1g.10gb", "tenant": "x"}]}
    assert busy.post("/v1/allocations/batch", mixed).status_code == 400
    assert busy.post("/v1/allocations/batch", {"allocations": []}).status_code == 400
    wrong = {"allocations": [{"profile": "1g.10gb"}, {}]}
    assert busy.post("/v1/allocations/batch", wrong).json()["index"] == 1


def test_a_queued_request_is_placed_when_there_is_room(busy: Harness) -> None:
    full = [busy.place("7g.80gb")["id"] for _ in range(2)]
    waiting = busy.post("/v1/allocations", {"profile": "1g.10gb", "wait_seconds": 60})
    assert waiting.status_code == 202
    body = waiting.json()
    assert body["state"] == "queued"
    assert body["waiting"]["position"] == 1
    assert body["waiting"]["reason"] == "capacity"
    second = busy.post("/v1/allocations", {"profile": "2g.20gb", "wait_seconds": 60}).json()
    queue = busy.get("/v1/queue").json()
    assert queue["waiting"] == 2
    assert [a["id"] for a in queue["allocations"]] == [body["id"], second["id"]]
    page = busy.get("/v1/queue?limit=1").json()
    assert [a["id"] for a in page["allocations"]] == [body["id"]]
    page = busy.get(f"/v1/queue?limit=1&cursor={page['next']}").json()
    assert [a["id"] for a in page["allocations"]] == [second["id"]]
    assert page["next"] is None
    listed = busy.get("/v1/allocations?state=queued").json()["allocations"]
    assert {one["id"] for one in listed} == {body["id"], second["id"]}
    busy.delete(f"/v1/allocations/{full[0]}")
    served = busy.get(f"/v1/allocations/{body['id']}").json()
    assert served["state"] == "placed"
    assert busy.get("/v1/queue").json()["waiting"] == 0


def test_timeouts_in_the_queue_and_leases(busy: Harness) -> None:
    for _ in range(2):
        busy.place("7g.80gb", lease_seconds=100)
    waiting = busy.post("/v1/allocations", {"profile": "1g.10gb", "wait_seconds": 10}).json()
    cancelled = busy.post("/v1/allocations", {"profile": "1g.10gb", "wait_seconds": 50}).json()
    assert busy.delete(f"/v1/allocations/{cancelled['id']}").json()["state"] == "cancelled"
    busy.clock.now += 11
    busy.post("/v1/nodes/n1/uncordon")  # any command wakes the commit loop
    assert busy.get(f"/v1/allocations/{waiting['id']}").json()["cause"] == "waited too long"
    busy.clock.now += 100
    busy.post("/v1/nodes/n1/uncordon")
    assert busy.get("/v1/allocations").json()["allocations"] == []
    ended = busy.get("/v1/allocations?state=released").json()["allocations"]
    assert [one["cause"] for one in ended] == ["lease ended"] * 2
    ended = busy.get("/v1/allocations?state=cancelled").json()["allocations"]
    assert {one["id"] for one in ended} == {waiting["id"], cancelled["id"]}


def test_a_lease_is_extended(busy: Harness) -> None:
    token = busy.tenant("acme", max_lease_seconds=5000)
    made = busy.place(token=token, lease_seconds=1000)
    path = f"/v1/allocations/{made['id']}/extend"
    first = busy.post(path, {"lease_seconds": 2000}, token=token, key="k")
    assert first.status_code == 200, first.text
    assert first.json()["lease_seconds"] == 2000
    busy.clock.now += 10
    again = busy.post(path, {"lease_seconds": 2000}, token=token, key="k")
    assert again.json() == first.json()
    assert again.headers["idempotency-replayed"] == "true"
    assert busy.post(path, {"lease_seconds": 2001}, token=token, key="k").status_code == 422
    assert busy.get(f"/v1/allocations/{made['id']}").json()["ends_at"] == first.json()["ends_at"]
    other = busy.post(path, {"lease_seconds": 2000}, token=token, key="other")
    assert other.json()["ends_at"] > first.json()["ends_at"]
    long = busy.post(path, {"lease_seconds": 5001}, token=token)
    assert (long.status_code, long.json()["reason"]) == (409, "quota")
    for body in ({}, {"lease_seconds": 0}, {"lease": 60}):
        assert busy.post(path, body, token=token).status_code == 400
    busy.delete(f"/v1/allocations/{made['id']}")
    for key in (None, "late"):
        over = busy.post(path, {"lease_seconds": 3000}, token=token, key=key)
        assert (over.status_code, over.json()["reason"]) == (409, "ended")
    replayed = busy.post(path, {"lease_seconds": 2000}, token=token, key="k")
    assert replayed.json() == first.json(), "what a key was answered stays"
    unknown = busy.post("/v1/allocations/a1/extend", {"lease_seconds": 1}, token=token)
    assert unknown.status_code == 404


def test_a_key_covers_all_terms_of_a_request(busy: Harness) -> None:
    body = {"profile": "1g.10gb", "lease_seconds": 60}
    assert busy.post("/v1/allocations", body, key="k").status_code == 201
    for more in ({"preemptible": True}, {"expected_seconds": 60}, {"lease_seconds": 61}):
        assert busy.post("/v1/allocations", body | more, key="k").status_code == 422
    for odd in ({"preemptible": "yes"}, {"expected_seconds": 0}, {"expected_seconds": -1.0}):
        assert busy.post("/v1/allocations", body | odd).status_code == 400


def test_a_tenant_is_warned_before_a_lease_ends(busy: Harness) -> None:
    mine, other = busy.tenant("acme"), busy.tenant("other")
    made = busy.place(token=mine, lease_seconds=1000)
    path = f"/v1/allocations/{made['id']}/extend"
    busy.clock.now += 700
    busy.post("/v1/nodes/n1/uncordon")  # any command wakes the commit loop
    assert busy.post(path, {"lease_seconds": 1000}, token=mine).status_code == 200
    busy.clock.now += 700
    busy.post("/v1/nodes/n1/uncordon")
    listed = busy.get(f"/v1/audit?subject={made['id']}").json()["events"]
    kinds = [one["kind"] for one in listed]
    assert kinds == ["lease-ending", "lease-extended", "lease-ending", "allocated"]
    assert [one["actor"] for one in listed[::2]] == ["clock"] * 2

    async def seen(token: str, count: int) -> list[str]:
        async with busy.stream("/v1/events?after=0", token=token) as reader:
            return [(await reader.event())["event"] for _ in range(count)]

    assert busy.run(seen(mine, 6))[2:] == kinds[::-1]
    busy.place(token=other)
    assert busy.run(seen(other, 3))[2:] == ["allocated"]


def test_filters_and_pages(busy: Harness) -> None:
    token = busy.tenant("acme")
    ids = [busy.place("1g.10gb", labels={"n": str(n % 2), "all": "x:y"})["id"] for n in range(4)]
    own = busy.place("2g.20gb", token=token)["id"]

    def listed(query: str, **options: str) -> list[str]:
        answer = busy.get(f"/v1/allocations?{query}", **options)
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()["allocations"]]

    assert set(listed("")) == {*ids, own}
    assert listed("tenant=acme") == [own]
    assert listed("tenant=unknown") == []
    assert listed("profile=2g.20gb") == [own]
    assert set(listed("label=n:1&label=all:x:y")) == {ids[1], ids[3]}
    assert listed("label=n:0&label=n:1") == listed("label=n:1&label=n:0") == []
    assert set(listed("node=n1&model=A100-80GB&state=placed")) == {*ids, own}
    assert listed("node=n2") == []
    assert listed("model=H200") == []
    assert listed("", token=token) == [own]
    assert listed("tenant=default", token=token) == []
    # Page by page, while allocations end in between.
    seen = []
    cursor = ""
    for _ in range(10):
        page = busy.get(f"/v1/allocations?limit=2{cursor}").json()
        seen += [one["id"] for one in page["allocations"]]
        if page["next"] is None:
            break
        busy.delete(f"/v1/allocations/{seen[-1]}")
        cursor = f"&cursor={page['next']}"
    assert sorted(seen) == sorted([*ids, own])
    for one in {*ids, own}:
        busy.delete(f"/v1/allocations/{one}")
    seen = []
    cursor = ""
    for _ in range(10):
        page = busy.get(f"/v1/allocations?state=released&limit=2{cursor}").json()
        seen += [one["id"] for one in page["allocations"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert sorted(seen) == sorted([*ids, own])
    assert listed("state=released", token=token) == [own]
    assert listed("state=released&tenant=default", token=token) == []


def test_lists_newest_first(busy: Harness) -> None:
    ids = []
    for step in (0, 1, 1, 5, 9):
        busy.clock.now += step
        ids.append(busy.place(labels={"step": str(step)})["id"])
    in_order = [one["id"] for one in busy.get("/v1/allocations").json()["allocations"]]
    assert in_order == ids
    seen: list[str] = []
    page = {"next": ""}
    while page["next"] is not None:
        cursor = f"&cursor={page['next']}" if page["next"] else ""
        page = busy.get(f"/v1/allocations?newest=true&limit=2{cursor}").json()
        assert page["total"] == 5
        seen += [one["id"] for one in page["allocations"]]
    assert seen == in_order[::-1]
    assert busy.get("/v1/allocations?label=step:1&limit=1").json()["total"] == 2
    assert busy.get("/v1/allocations?state=released&newest=true").json()["total"] is None


def test_invalid_queries_of_pages_are_refused(busy: Harness) -> None:
    for query in (
        "limit=0",
        "limit=1001",
        "limit=ten",
        "limit=1&limit=2",
        "cursor=!",
        "cursor=aGVsbG8",
        "state=lost",
        "colour=red",
        "label=nothing",
        "tenant=",
        "state=released&cursor=aGVsbG8",
        "a=b&" * 40,
        "profile=%ff",
    ):
        answer = busy.get(f"/v1/allocations?{query}")
        assert answer.status_code == 400, query
    assert busy.get("/v1/queue?cursor=aGVsbG8").status_code == 400


def test_idempotency(busy: Harness) -> None:
    body = {"profile": "1g.10gb"}
    first = busy.post("/v1/allocations", body, key="once")
    again = busy.post("/v1/allocations", body, key="once")
    assert again.status_code == 201
    assert again.content == first.content
    assert again.headers["idempotency-replayed"] == "true"
    assert "idempotency-replayed" not in first.headers
    other = busy.post("/v1/allocations", {"profile": "2g.20gb"}, key="once")
    assert other.status_code == 422
    identity = first.json()["id"]
    gone = busy.delete(f"/v1/allocations/{identity}", key="gone")
    again = busy.delete(f"/v1/allocations/{identity}", key="gone")
    assert again.content == gone.content
    assert again.headers["idempotency-replayed"] == "true"
    assert busy.delete("/v1/allocations/other", key="gone").status_code == 422
    # Another tenant's key of the same name is another key.
    token = busy.tenant("acme")
    mine = busy.post("/v1/allocations", body, key="once", token=token)
    assert mine.status_code == 201
    assert mine.json()["id"] != identity
    assert len(busy.get("/v1/allocations").json()["allocations"]) == 1


def test_keys_must_be_printable(busy: Harness) -> None:
    for key in ("", " ", "x" * 129, "a\tb"):
        answer = busy.post(
            "/v1/allocations", {"profile": "1g.10gb"}, headers={"idempotency-key": key}
        )
        assert answer.status_code == 400, key
    assert busy.get("/v1/allocations").json()["allocations"] == []
    assert busy.post("/v1/allocations", {"profile": "1g.10gb"}, key="x" * 128).status_code == 201


def test_a_tenant_acts_for_itself_only(busy: Harness) -> None:
    token = busy.tenant("acme")
    assert busy.place(token=token)["tenant"] == "acme"
    assert busy.place(token=token, tenant="acme")["tenant"] == "acme"
    for other in ("default", "unknown"):
        answer = busy.post("/v1/allocations", {"profile": "1g.10gb", "tenant": other}, token=token)
        assert answer.status_code == 403
    assert busy.place(tenant="acme")["tenant"] == "acme"
    answer = busy.post("/v1/allocations", {"profile": "1g.10gb", "tenant": "unknown"})
    assert answer.status_code == 404
