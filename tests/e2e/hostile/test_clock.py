"""A step of the wall clock neither ends nor extends a lease, and is reported.

The tests use real processes, each with its own wall clock.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hostile.wall_clock import DAY, ClockedServer
from tests.e2e.scenario import verified
from tests.e2e.server import PATIENCE_SECONDS, Server, wait_until
from tests.postgres import the_server

from slicewise.journal.entries import STEP_SECONDS
from slicewise.store import open_store

Open = Callable[..., ClockedServer]

NODE = {"name": "n1", "model": "A100-80GB", "gpus": 4}
SETTINGS = ("lease.seconds=1",)
LONG, SHORT = 3600, 1
ABOUT = 1800
"""Tolerance; no test takes long enough to confuse it with a step of a day."""
BOTH_WAYS = pytest.mark.parametrize("step", [DAY, -DAY], ids=["ahead", "behind"])


def place(server: Server, lease: float) -> str:
    """Place an allocation with a lease; a write also ends expired leases."""
    body = {"profile": "1g.10gb", "lease_seconds": lease}
    status, content = server.ask("POST", "/v1/allocations", body)
    assert status == 201, content
    return str(content["id"])


def state(server: Server, identity: str) -> str:
    status, content = server.ask("GET", f"/v1/allocations/{identity}")
    assert status == 200, content
    return str(content["state"])


def clock(server: Server) -> Any:
    status, content = server.ask("GET", "/v1/clock")
    assert status == 200, content
    return content


def warnings(server: Server) -> list[str]:
    content = server.readiness()
    assert content is not None
    assert content["ready"], content
    return list(content["warnings"])


def logged(server: Server, what: str) -> list[str]:
    return [line for line in server.log.read_text().splitlines() if what in line]


def command(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command against a server and return its output."""
    return subprocess.run(
        [sys.executable, "-m", "slicewise.cli", *arguments, "--server", server.url],
        env={**os.environ, "SLICEWISE_TOKEN": server.admin_token},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )


def check_lease_duration(server: Server) -> None:
    """Check that a short lease ends, and not too early."""
    begun = time.monotonic()
    identity = place(server, SHORT)
    wait_until(lambda: state(server, identity) == "released")
    assert time.monotonic() - begun >= SHORT - 0.05


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[Open]:
    """Creates servers with their own wall clocks, and kills them after the test."""
    made: list[ClockedServer] = []

    def make(name: str, database: str | None = None) -> ClockedServer:
        made.append(ClockedServer(tmp_path / name, database=database, settings=SETTINGS))
        return made[-1]

    yield make
    for server in made:
        server.destroy()


@pytest.fixture
def server(open_server: Open) -> ClockedServer:
    """A server that is not started."""
    return open_server("server")


@BOTH_WAYS
def test_a_clock_step_is_reported_and_ends_no_lease(server: ClockedServer, step: float) -> None:
    server.start()
    server.ask("POST", "/v1/nodes", NODE)
    kept = place(server, LONG)
    assert warnings(server) == []

    server.set_clock(step)
    (warning,) = wait_until(lambda: warnings(server))
    assert f"{DAY:.0f} seconds {'ahead of' if step > 0 else 'behind'} service time" in warning
    check_lease_duration(server)
    assert state(server, kept) == "placed"
    both = clock(server)
    assert (both["held"], round(both["step_seconds"] / DAY)) == (True, step / DAY)
    assert server.metric("slicewise_clock_steps_total") == 1
    assert abs(server.metric("slicewise_clock_step_seconds") - step) < 10

    server.set_clock(0)
    wait_until(lambda: not warnings(server))
    check_lease_duration(server)
    assert state(server, kept) == "placed"
    assert server.metric("slicewise_clock_step_seconds") == 0
    assert len(logged(server, "clock step held")) == len(logged(server, "clock step over")) == 1
    assert server.stop() == 0
    verified(server)


@BOTH_WAYS
def test_start_with_a_wrong_clock(server: ClockedServer, step: float) -> None:
    server.start()
    server.ask("POST", "/v1/nodes", NODE)
    kept = place(server, LONG)
    server.kill()

    server.set_clock(step)
    server.start()
    wait_until(lambda: warnings(server))
    check_lease_duration(server)
    assert state(server, kept) == "placed"

    server.set_clock(0)  # now the downtime is known
    wait_until(lambda: not warnings(server))
    assert abs(clock(server)["step_seconds"]) < STEP_SECONDS
    assert state(server, kept) == "placed"
    assert server.stop() == 0
    verified(server)


@BOTH_WAYS
def test_a_clock_step_is_accepted_only_on_command(server: ClockedServer, step: float) -> None:
    server.start()
    server.ask("POST", "/v1/nodes", NODE)
    kept = place(server, LONG)
    assert accept(server, step) == (
        409,
        "the wall clock agrees with service time: there is no step to accept",
    )

    server.set_clock(step)
    wait_until(lambda: warnings(server))
    status, why = accept(server, -step)
    assert status == 409
    assert "check the clock again" in why
    accepted = command(server, "clock", "accept")
    assert accepted.returncode == 0, accepted
    assert accepted.stdout.startswith("service time "), accepted
    wait_until(lambda: not warnings(server))
    assert abs(clock(server)["step_seconds"]) < ABOUT
    check_lease_duration(server)
    if step > 0:
        wait_until(lambda: state(server, kept) == "released")
    else:
        assert state(server, kept) == "placed"
    assert [round(event["entry"]["by"] / DAY) for event in audit(server)] == [step / DAY]

    server.kill()  # the accepted step is in the journal
    server.start()
    assert warnings(server) == []
    assert abs(clock(server)["step_seconds"]) < ABOUT
    check_lease_duration(server)
    assert server.stop() == 0
    verified(server)


def accept(server: Server, step: float) -> tuple[int, str]:
    status, content = server.ask("POST", "/v1/clock/accept", {"step_seconds": step})
    return status, content["detail"]


def audit(server: Server) -> list[Any]:
    status, content = server.ask("GET", "/v1/audit?kind=clock-set")
    assert status == 200, content
    return list(content["events"])


def test_a_token_also_expires_by_the_wall_clock(server: ClockedServer) -> None:
    server.start()
    body = {"role": "operator", "expires_in_seconds": LONG}
    status, issued = server.ask("POST", "/v1/tokens", body)
    assert status == 201, issued
    assert server.ask("GET", "/v1/whoami", token=issued["token"])[0] == 200
    server.set_clock(DAY)
    assert server.ask("GET", "/v1/whoami", token=issued["token"])[0] == 401
    server.set_clock(-DAY)
    assert server.ask("GET", "/v1/whoami", token=issued["token"])[0] == 200


@BOTH_WAYS
def test_failover_to_a_leader_with_another_clock(open_server: Open, step: float) -> None:
    url = the_server().database()
    one, two = (open_server(name, url) for name in ("one", "two"))
    two.set_clock(step)
    one.start()
    one.ask("POST", "/v1/nodes", NODE)
    kept = place(one, LONG)
    two.lent_token = one.admin_token
    two.launch()
    two.wait_until_ready("following")
    wait_until(lambda: warnings(two))  # before the failover
    one.kill()
    two.wait_until_ready("leading")
    check_lease_duration(two)
    assert state(two, kept) == "placed"
    assert round(clock(two)["step_seconds"] / DAY) == step / DAY

    one.launch()
    one.wait_until_ready("following")
    two.kill()
    one.wait_until_ready("leading")
    assert warnings(one) == []
    check_lease_duration(one)
    assert state(one, kept) == "placed"
    assert one.stop() == 0
    verified(one)


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_leadership_after_the_database_clock_was_set_back(tmp_path: Path, database: str) -> None:
    url = the_server().database() if database == "postgres" else None
    store = open_store(tmp_path, url)
    try:
        epoch = store.lead("one", "http://one", 10)
        assert epoch is not None
        assert store.lead("two", "http://two", 10) is None
        with store.transaction() as connection:
            connection.exec_driver_sql(f"UPDATE leader SET until = until + {DAY}")
        assert store.leader() is None
        assert store.lead("two", "http://two", 10) == epoch + 1
        assert store.lead("three", "http://three", 10) is None
        assert not store.renew(epoch, 10, 0)
        leader = store.leader()
        assert leader is not None
        assert leader.holder == "two"
    finally:
        store.close()
