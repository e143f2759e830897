"""A dry run over HTTP tells what the request would have got at that entry of the journal (I8)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
from tests.control.control_plane import ControlPlane
from tests.server.harness import Harness

from slicewise.control.commands import Create, Terms
from slicewise.control.ports import rows_after
from slicewise.control.snapshot import restore_snapshot, snapshot_of
from slicewise.control.state import State
from slicewise.journal.entries import Want

CLIENTS, CALLS = 6, 40
PROFILES = ("1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb")


async def _ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    return (await client.post(path, json=body)).json()


async def _tenant(harness: Harness, token: str, seed: int, told: list[tuple[Any, Any]]) -> None:
    """Create, release and try requests, one after the other."""
    rng = random.Random(seed)
    living: list[str] = []
    transport = httpx.ASGITransport(harness.service.app)
    headers = {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers=headers
    ) as client:
        for _ in range(CALLS):
            body: dict[str, Any] = {"profile": rng.choice(PROFILES), "count": rng.choice([1, 1, 2])}
            dice = rng.random()
            if dice < 0.4:
                told.append((body, await _ask(client, "/v1/allocations/dry-run", body)))
            elif dice < 0.8 or not living:
                made = await _ask(client, "/v1/allocations", body | {"wait_seconds": 3600})
                living += [made["id"]] if "id" in made else []
            else:
                await client.delete(f"/v1/allocations/{living.pop(rng.randrange(len(living)))}")


def test_dry_runs_beside_concurrent_requests_agree_with_the_journal(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    try:
        harness.node(gpus=4)
        told: dict[str, list[tuple[Any, Any]]] = {}
        tokens = {}
        for number in range(CLIENTS):
            name = f"tenant-{number}"
            harness.post("/v1/tenants", {"name": name})
            issued = harness.post("/v1/tokens", {"role": "tenant", "tenant": name}).json()
            tokens[name], told[name] = issued["token"], []

        async def all_at_once() -> None:
            await asyncio.gather(
                *(
                    _tenant(harness, tokens[name], seed, told[name])
                    for seed, name in enumerate(told)
                )
            )

        harness.run(all_at_once())
        assert harness.store is not None
        rows = list(rows_after(harness.store, 0))
    finally:
        harness.close()
    runs = [(body, reply, name) for name, made in told.items() for body, reply in made]
    runs.sort(key=lambda run: run[1]["seq"])
    assert len(runs) > CLIENTS * CALLS / 4
    assert {reply["outcome"] for _, reply, _ in runs} == {"placed", "rejected"}
    state, position = State(), 0
    for body, reply, name in runs:
        while state.seq < reply["seq"]:
            state.apply(rows[position])
            position += 1
        copy = restore_snapshot(snapshot_of(state), State())
        control = ControlPlane(state=copy)
        control.now = state.at
        terms = Terms(Want(profile=body["profile"]), body["count"])
        status, answer = control.ask(Create(name, terms))
        if reply["outcome"] == "placed":
            assert status == 201
            expected = [(p["node"], p["gpu"], p["start"]) for p in answer["instances"]]
            assert [(p["node"], p["gpu"], p["start"]) for p in reply["instances"]] == expected
        else:
            assert (status, answer["reason"]) == (409, reply["reason"])
