"""Allocation ids: another tenant's id is indistinguishable from one that never existed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.harness import Harness

from slicewise.store.memory import MemoryStore

METHODS = ("GET", "DELETE", "DELETE with a key")


class Looks(list[dict[str, Any]]):
    """Counts the reads of the store."""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Harness]:
    """A service with a node of two GPUs."""
    harness = Harness(tmp_path)
    harness.node()
    yield harness
    harness.close()


@pytest.fixture
def looks(busy: Harness, monkeypatch: pytest.MonkeyPatch) -> Looks:
    seen = Looks()
    history = MemoryStore.history

    def look(self: MemoryStore, **options: Any) -> Any:
        seen.append(options)
        return history(self, **options)

    monkeypatch.setattr(MemoryStore, "history", look)
    return seen


def ask(harness: Harness, method: str, identity: str, token: str, key: str) -> httpx.Response:
    verb, _, keyed = method.partition(" ")
    return harness.call(
        verb, f"/v1/allocations/{identity}", token=token, key=key if keyed else None
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_foreign_id_costs_the_same_as_a_missing_one(
    busy: Harness, looks: Looks, method: str
) -> None:
    mine, other = busy.tenant("acme"), busy.tenant("other")
    living = busy.place(token=mine)["id"]
    ended = busy.place(token=mine)["id"]
    busy.delete(f"/v1/allocations/{ended}", token=mine)
    never = "a" + "2" * (len(living) - 1)
    done = []
    ask(busy, method, never, other, "first")  # fill the caches
    for identity in (never, living, ended):
        looks.clear()
        answer = ask(busy, method, identity, other, f"for-{identity}")
        assert answer.status_code == 404
        told = answer.text.replace(identity, "ID")
        done.append((told, [look | {"subject": "ID"} for look in looks]))
    assert done[0][1], "the store was asked"
    assert done[0] == done[1] == done[2]
    assert busy.get(f"/v1/allocations/{living}", token=mine).json()["state"] == "placed"


def test_a_repeated_release_gets_the_same_answer_however_it_ended(busy: Harness) -> None:
    token = busy.tenant("acme")
    released, over = (busy.place(token=token, lease_seconds=60)["id"] for _ in range(2))
    busy.clock.now += 59
    answers = [ask(busy, METHODS[2], released, token, "one") for _ in range(2)]
    busy.clock.now += 2
    busy.get("/v1/whoami")
    busy.delete(f"/v1/allocations/{over}", token=token)  # ended by its lease, or by this
    answers += [ask(busy, METHODS[2], over, token, "two") for _ in range(2)]
    for first, again in (answers[:2], answers[2:]):
        assert (first.status_code, again.status_code) == (200, 200)
        assert first.content == again.content
        assert "idempotency-replayed" not in first.headers
        assert again.headers["idempotency-replayed"] == "true"
    reused = ask(busy, METHODS[2], released, token, "two")
    assert reused.status_code == 422
