"""Rehearsals of a service: what becomes of results, failures and hangs, and what is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.harness import Harness

from slicewise.api.base import moment
from slicewise.control.rehearsal_job import decode_job, encode_result
from slicewise.engine.rehearsal import Finding, Interval, Rehearsal, Standing
from slicewise.policies.rehearsed import DEFAULT_CHOICE, Choice
from slicewise.runtime.background_process import BackgroundError
from slicewise.runtime.rehearsals import Rehearsals
from slicewise.runtime.source import Source
from slicewise.server.service import Service

NONE = Interval(0.0, 0.0, 0.0)
MANY = Interval(0.02, 0.018, 0.022)
FEW = Interval(0.01, 0.009, 0.011)


def time_wins(job: bytes) -> bytes:
    """The result of a rehearsal in which `time` is better than `least-lost`."""
    estimate = decode_job(job).estimate
    asked_for = tuple(str(request.want) for request in estimate.asked_for)
    won = Choice("time", asked_for)
    findings = (
        Finding(DEFAULT_CHOICE, 48, MANY, FEW, NONE, NONE, NONE),
        Finding(won, 48, FEW, FEW, FEW, NONE, FEW),
    )
    standing = Standing(won, estimate.requests, estimate.changes, rehearsed=True)
    return encode_result(Rehearsal(standing, "it is better", 0.85, findings))


class Stage:
    """A service whose rehearsals do as the test says."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.jobs: list[bytes] = []
        self.outcome: Any = time_wins
        self.takes = 0.0
        self.gate: asyncio.Event | None = None
        self.looking: asyncio.Task[None] | None = None
        self.h = Harness(folder, {"policy": "rehearsed"} | settings, rehearse=self._rehearse)

    async def _rehearse(self, job: bytes) -> bytes:
        self.jobs.append(job)
        if self.gate is not None:
            await self.gate.wait()
        self.h.ticks += self.takes
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return bytes(self.outcome(job)) if callable(self.outcome) else bytes(self.outcome)

    def demand(self, rounds: int = 10) -> None:
        """Have a tenant ask for enough to rehearse."""
        self.h.node(gpus=8)
        token = self.h.tenant("acme")
        for number in range(rounds):
            profile = ("1g.10gb", "2g.20gb")[number % 2]
            count = (40, 16)[number % 2]
            for _ in range(number % 2 + 1):
                body = self.h.place(profile, count=count, token=token)
                self.h.clock.now += 10
                self.h.delete(f"/v1/allocations/{body['id']}", token=token)

    def look(self, service: Service | None = None) -> Rehearsals:
        """Let the service look once whether to rehearse."""
        rehearsals = (service or self.h.service).context.rehearsals
        self.h.run(rehearsals.look())
        return rehearsals

    def shown(self, token: str | None = "", service: Service | None = None) -> Any:
        """What `GET /v1/policy` shows."""
        answer = self.h.get("/v1/policy", token=token, service=service)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.h.close()


def test_nothing_is_rehearsed_before_enough_is_known(stage: Stage) -> None:
    stage.demand(rounds=2)
    rehearsals = stage.look()
    assert stage.jobs == []
    assert rehearsals.activity == "learning"
    shown = stage.shown()
    assert (shown["table"], shown["since"], shown["rehearsal"]) == ("least-lost", None, None)
    assert shown["why"] == "nothing has been rehearsed yet"


def test_the_winner_decides_and_is_shown_with_what_was_found(stage: Stage) -> None:
    stage.demand()
    rehearsals = stage.look()
    assert (len(stage.jobs), rehearsals.finished, rehearsals.activity) == (1, 1, "waiting")
    shown = stage.shown()
    assert (shown["policy"], shown["table"], shown["why"]) == ("rehearsed", "time", "it is better")
    assert shown["asked_for"] == ["1g.10gb", "2g.20gb"]
    assert shown["since"] == shown["rehearsal"]["at"] == moment(stage.h.clock.now)
    assert shown["rehearsal"]["load"] == 0.85
    first, second = shown["rehearsal"]["candidates"]
    assert (first["table"], first["in_use"], first["rejected"]["value"]) == (
        "least-lost",
        False,
        0.02,
    )
    assert (second["table"], second["in_use"]) == ("time", True)
    assert second["rejected"] == {"value": 0.01, "low": 0.009, "high": 0.011}
    demand = shown["demand"]
    assert demand["requests"] == 360
    assert demand["mean_lifetime"] == pytest.approx(10)
    assert {one["wanted"]["profile"] for one in demand["shares"]} == {"1g.10gb", "2g.20gb"}
    assert shown["seen"] == {"requests": 0, "rejected": 0}


def test_a_tenant_sees_the_table_and_nothing_of_the_demand_of_others(stage: Stage) -> None:
    stage.demand()
    stage.look()
    shown = stage.shown(token=stage.h.token("tenant", tenant="acme"))
    hidden = {"switches", "rehearsals", "why", "asked_for", "demand", "seen", "rehearsal"}
    assert {name for name in shown if shown[name] is None} == hidden
    assert shown["table"] == "time"
    assert stage.h.get("/v1/policy", token=None).status_code == 401


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (BackgroundError("was not done after 900 seconds"), "was not done after 900 seconds"),
        (b"", "has no usable result"),
        (b"Segmentation fault\n", "has no usable result"),
        (b'{"standing": {"choice": 7}}', "has no usable result"),
        (b"[" * 100_000, "has no usable result"),
    ],
)
def test_a_rehearsal_that_fails_changes_nothing_and_is_tried_again_later(
    stage: Stage, outcome: object, problem: str
) -> None:
    stage.demand()
    stage.outcome = outcome
    for pause in (60, 120, 240):
        rehearsals = stage.look()
        assert problem in rehearsals.problem
        assert problem in stage.shown()["rehearsals"]["detail"]
        stage.h.ticks += pause - 1
        failed = rehearsals.failed
        assert stage.look().failed == failed
        stage.h.ticks += 1
    assert stage.shown()["table"] == "least-lost"
    stage.h.place("3g.40gb", tenant="acme")
    stage.outcome = time_wins
    stage.h.ticks += 10_000
    assert stage.look().problem == ""
    stage.h.ticks += 10
    assert stage.shown()["table"] == "time"


def test_a_result_that_knows_too_little_leaves_the_table(stage: Stage) -> None:
    stage.demand()
    stage.outcome = encode_result(None)
    assert stage.look().problem == "too little is known of the demand"
    assert stage.shown()["table"] == "least-lost"


def test_a_request_during_a_rehearsal_is_decided_and_makes_its_result_stale(stage: Stage) -> None:
    stage.demand()

    async def during() -> None:
        stage.gate = asyncio.Event()
        stage.looking = asyncio.create_task(stage.h.service.context.rehearsals.look())
        while not stage.jobs:
            await asyncio.sleep(0)
        assert stage.h.service.context.rehearsals.activity == "running"

    stage.h.run(during())
    stage.h.place("7g.80gb", tenant="acme")
    assert stage.gate is not None
    stage.gate.set()
    rehearsals = stage.h.service.context.rehearsals
    stage.h.wait_for(lambda: rehearsals.problem)
    assert rehearsals.problem == (
        "the rehearsal is out of date: the demand or the choice has changed since"
    )
    assert stage.shown()["table"] == "least-lost"


def test_a_rehearsal_that_hangs_ends_with_the_service(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.demand()
    stage.gate = asyncio.Event()
    stage.h.wait_for(lambda: stage.jobs)  # the service looks by itself
    stage.h.place("7g.80gb", tenant="acme")
    stage.h.close()


def test_rehearsals_take_their_share_of_the_time_and_no_more(stage: Stage) -> None:
    stage.demand()
    stage.takes = 3.0
    stage.outcome = encode_result(None)  # so that the next one is due at once
    rehearsals = stage.look()
    assert (len(stage.jobs), rehearsals.seconds) == (1, 3.0)
    stage.h.ticks += 3.0 / 0.05 - 3.0 - 0.01
    stage.look()
    assert len(stage.jobs) == 1
    stage.h.ticks += 0.02
    stage.look()
    assert len(stage.jobs) == 2


def test_a_standby_knows_the_table_and_rehearses_once_it_leads(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lease_seconds=3600.0)  # the clock of the test jumps
    stage.demand()
    stage.look()
    second = stage.h.open("second")
    assert second.context.rehearsals.activity == "elsewhere"
    shown = stage.shown(service=second)
    mine = stage.shown()
    assert {**shown, "rehearsals": None} == {**mine, "rehearsals": None}
    stage.look(second)
    assert len(stage.jobs) == 1
    stage.h.run(stage.h.service.stop())
    stage.h.services.remove(stage.h.service)
    stage.h.wait_for(lambda: second.runtime.leads and second.runtime.furnished)
    stage.h.service = second
    assert stage.shown()["table"] == "time"
    stage.h.place("7g.80gb", tenant="acme")
    assert stage.shown()["table"] == "least-lost"
    assert second.context.rehearsals.activity == "learning"
    stage.h.close()


def test_without_rehearsals_the_table_returns_to_least_lost_and_the_reason_is_shown(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    stage.demand()
    stage.look()
    assert stage.shown()["table"] == "time"
    stage.h.run(stage.h.service.stop())
    stage.h.services.clear()
    stage.h.service = stage.h.open("first", rehearsal_enabled=False)
    assert stage.look().activity == "off"
    shown = stage.shown()
    assert shown["table"] == "least-lost"
    assert shown["why"] == shown["rehearsals"]["detail"] == "rehearsal.enabled is false"
    assert len(stage.jobs) == 1
    stage.h.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"policy": "mfi"}, "the policy is set to mfi"),
        ({}, "numba is not installed: install slicewise[lab]"),
    ],
)
def test_why_nothing_is_rehearsed(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    h = Harness(tmp_path, {"policy": "rehearsed"} | settings)
    rehearsals = h.service.context.rehearsals
    assert (rehearsals.activity, rehearsals.why_off) == ("off", why)
    shown = h.get("/v1/policy").json()
    assert shown["table"] == (None if settings else "least-lost")
    assert shown["rehearsals"]["detail"] == why
    h.close()


def test_a_process_beside_the_one_that_decides_hands_it_the_result(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the Kubernetes controller, whose state the service follows."""
    stage.demand()
    handed: list[Rehearsal] = []

    async def choose(rehearsal: Rehearsal) -> str:
        handed.append(rehearsal)
        return "it came too late"

    runtime = stage.h.service.runtime
    monkeypatch.setattr(runtime, "source", Source("read-only"))
    rehearsals = stage.look()
    assert rehearsals.why_off == "this process takes no part in the decisions"
    assert not stage.jobs
    monkeypatch.setattr(runtime, "source", Source("read-only", leads=lambda: False, choose=choose))
    assert stage.look().activity == "elsewhere"
    assert not stage.jobs
    monkeypatch.setattr(runtime, "source", Source("read-only", choose=choose))
    assert stage.look().problem == "it came too late"
    assert [one.standing.choice.form for one in handed] == ["time"]
    assert stage.shown()["table"] == "least-lost"
