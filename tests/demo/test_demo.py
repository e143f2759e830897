"""`slicewise demo`: start, traffic, interruption, restart."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from tests.client.running import Running, running

from slicewise.catalog import Catalog
from slicewise.cli.main import exit_status
from slicewise.client import AsyncClient, Client, UnreachableError
from slicewise.demo.cluster import NODES, NOTE, TENANTS, set_up
from slicewise.demo.traffic import Traffic


class Demo:
    """A `slicewise demo` process and its output."""

    def __init__(self, folder: Path, *options: str) -> None:
        # The user may have settings for another service.
        environment = os.environ | {
            "SLICEWISE_TOKEN": "sw_x",
            "SLICEWISE_SERVER": "http://127.0.0.1:1",
            "SLICEWISE_LISTEN": "nonsense",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slicewise.cli", "demo", "--data", "demo", *options],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.printed = ""

    def wait_for(self, text: str) -> str:
        """Read the output up to a line with this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if text in line:
                return line
        _, err = self.process.communicate()
        raise AssertionError(f"it ended with\n{self.printed}\n{err}")

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Send a signal, if given, and wait for the exit; return the status and standard error."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate()
        self.printed += out
        return self.process.returncode, err


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "service") as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_runs_until_interrupted_and_restarts(tmp_path: Path, number: signal.Signals) -> None:
    options = ("--listen", "127.0.0.1:0", "--rate", "50", "--hold", "5")
    demo = Demo(tmp_path, *options)
    url = demo.wait_for("slicewise is at").split()[-1]
    demo.wait_for("Ctrl-C ends it")
    token = tmp_path / "demo" / "admin-token"
    assert f"export SLICEWISE_SERVER={url}\n" in demo.printed
    assert f"export SLICEWISE_TOKEN_FILE={token}\n" in demo.printed  # an absolute path
    with Client(url, token.read_text().strip()) as admin:
        view = admin.cluster()
        assert view.gpus == sum(gpus for _, _, gpus in NODES)
        seen = (event for event in admin.events(0) if event.kind == "allocated")
        assert len(list(islice(seen, 5))) == 5
    assert demo.end(number) == (0, "")
    assert re.search(r"^\d+ requests: .*\d+ placed", demo.printed.splitlines()[-1])
    assert "failed" not in demo.printed
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect((host, int(port)))
    again = Demo(tmp_path, *options, "--requests", "5")
    assert again.end() == (0, "")
    assert again.printed.splitlines()[-1].startswith("5 requests: ")


def test_listen_address(tmp_path: Path) -> None:
    demo = Demo(
        tmp_path, "--listen", "0.0.0.0:0", "--listen-without-tls", "--rate", "50", "--requests", "3"
    )
    assert "http://0.0.0.0:" in demo.wait_for("slicewise is at")
    assert demo.end() == (0, "")
    assert "3 requests: " in demo.printed


def test_interrupted_during_start(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--listen", "127.0.0.1:0")
    while not (tmp_path / "demo").exists():  # signal handlers are installed at about this time
        assert demo.process.poll() is None
    status, err = demo.end(signal.SIGINT)
    assert status in (0, 130)
    assert "Traceback" not in err


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        demo = Demo(tmp_path, "--listen", address)
        status, err = demo.end()
    assert (status, demo.printed) == (2, "")
    assert err == (
        f"slicewise: error: listen: cannot listen on {address}: Address already in use; "
        "choose another port with --listen HOST:PORT\n"
    )
    assert not (tmp_path / "demo").exists()


def test_folder_in_use(tmp_path: Path) -> None:
    first = Demo(tmp_path, "--listen", "127.0.0.1:0")
    first.wait_for("Ctrl-C ends it")
    status, err = Demo(tmp_path, "--listen", "127.0.0.1:0").end()
    assert status == 2
    assert len(err.splitlines()) == 1
    assert first.end(signal.SIGINT)[0] == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--rate", "0"], "rate must be 0.01 to 10000 a second, not 0"),
        (["--hold", "-1"], "hold must be 0.01 to 1000000 seconds, not -1"),
        (["--requests", "0"], "requests must be at least 1, not 0"),
        (["--listen", "here"], "must be HOST:PORT"),
        (
            ["--listen", "0.0.0.0:8099"],
            "--listen 0.0.0.0:8099 can be reached from other machines, and tokens would cross the "
            "network in the clear; listen on 127.0.0.1:8099, or add --listen-without-tls",
        ),
    ],
)
def test_options_are_checked(
    options: list[str],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_status(["demo", *options]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_cluster_is_set_up_once(service: Running) -> None:
    async def twice() -> None:
        async with AsyncClient(service.url, service.token) as admin:
            first = await set_up(admin)
            async with AsyncClient(service.url, first["training"]) as client:
                left = await client.allocate("7g.80gb")
            second = await set_up(admin)
            assert first.keys() == second.keys() == {tenant.name for tenant in TENANTS}
            assert not set(first.values()) & set(second.values())
            assert (await admin.allocation(left.id)).state == "released"
            assert [node.name async for node in admin.nodes()] == sorted(n for n, _, _ in NODES)
            notes = [token.note async for token in admin.tokens()]
            assert notes.count(NOTE) == len(TENANTS)  # tokens of the first run are revoked
            training = await admin.tenant("training")
            assert training.quota.memory_slices == 128

    asyncio.run(twice())


def test_tenants_request_profiles_that_exist() -> None:
    catalog = Catalog.builtin()
    offered = {
        profile.name for _, model, _ in NODES for profile in catalog.find(model).require().profiles
    }
    for tenant in TENANTS:
        assert set(tenant.weights) <= offered
    assert sum(tenant.share for tenant in TENANTS) == pytest.approx(1)


def test_traffic_allocates_and_releases(service: Running) -> None:
    async def play() -> Traffic:
        async with AsyncClient(service.url, service.token) as admin:
            secrets = await set_up(admin)
            traffic = Traffic(service.url, secrets, random.Random(1), 500, 0.01)
            await traffic.run(60)
            kinds = [event.kind async for event in admin.audit()]
        assert kinds.count("allocated") == traffic.counts["placed"]
        assert kinds.count("ended") > 0
        return traffic

    traffic = asyncio.run(play())
    assert traffic.counts.total() >= 60
    assert traffic.counts["failed"] == 0
    assert traffic.summary().startswith("60 requests: ")


def test_traffic_beyond_capacity_waits_or_is_rejected(service: Running) -> None:
    async def play() -> Traffic:
        async with AsyncClient(service.url, service.token) as admin:
            secrets = await set_up(admin)
            traffic = Traffic(service.url, secrets, random.Random(1), 2000, 1000)
            await traffic.run(300)
            waiting = [one.id async for one in admin.queue()]
            assert len(waiting) == traffic.counts["queued"]
        return traffic

    traffic = asyncio.run(play())
    assert traffic.counts["queued"] > 0
    assert traffic.counts["rejected (capacity)"] > 0


def test_requests_do_not_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is kept while the service answers slowly, up to the limit in flight."""
    under_way = most = 0

    async def slowly(*_: object, **__: object) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        while most < 7:  # answer only after seven requests
            await asyncio.sleep(0)
        under_way -= 1
        raise UnreachableError("nothing more is of interest")

    monkeypatch.setattr(AsyncClient, "allocate", slowly)
    monkeypatch.setattr("slicewise.demo.traffic._MAX_IN_FLIGHT", 7)
    secrets = dict.fromkeys((tenant.name for tenant in TENANTS), "sw_unknown")
    traffic = Traffic("http://127.0.0.1:1", secrets, random.Random(1), 10_000, 1)
    asyncio.run(traffic.run(30))
    assert (most, traffic.summary()) == (7, "30 requests: 30 failed")


def test_failures_are_counted(service: Running) -> None:
    async def play() -> Traffic:
        unknown = dict.fromkeys((tenant.name for tenant in TENANTS), "sw_unknown")
        traffic = Traffic(service.url, unknown, random.Random(1), 1000, 1)
        assert traffic.summary() == "0 requests: none yet"
        await traffic.run(3)
        return traffic

    assert asyncio.run(play()).summary() == "3 requests: 3 failed"
