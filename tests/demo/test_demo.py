"""The demonstration: started, left to itself, interrupted, started again."""

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
from slicewise.demo.scene import GUESTS, NODES, NOTE, set_up
from slicewise.demo.traffic import Traffic


class Demo:
    """`slicewise demo` as a process, and what it printed."""

    def __init__(self, folder: Path, *options: str) -> None:
        # Whoever tries it may have a service of their own.
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
        """Read until a line with this text comes."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if text in line:
                return line
        _, err = self.process.communicate()
        raise AssertionError(f"it ended with\n{self.printed}\n{err}")

    def end(self, number: signal.Signals | None = None) -> tuple[int, str]:
        """Wait for its end, which a signal may bring about; its status and its standard error."""
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
def test_it_runs_until_interrupted_and_starts_again(tmp_path: Path, number: signal.Signals) -> None:
    options = ("--listen", "127.0.0.1:0", "--rate", "50", "--hold", "5")
    demo = Demo(tmp_path, *options)
    url = demo.wait_for("slicewise is at").split()[-1]
    demo.wait_for("Ctrl-C ends it")
    token = tmp_path / "demo" / "admin-token"
    assert f"export SLICEWISE_SERVER={url}\n" in demo.printed
    assert f"export SLICEWISE_TOKEN_FILE={token}\n" in demo.printed  # found from anywhere
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


def test_it_may_be_shown_elsewhere(tmp_path: Path) -> None:
    demo = Demo(
        tmp_path, "--listen", "0.0.0.0:0", "--listen-without-tls", "--rate", "50", "--requests", "3"
    )
    assert "http://0.0.0.0:" in demo.wait_for("slicewise is at")
    assert demo.end() == (0, "")
    assert "3 requests: " in demo.printed


def test_it_ends_while_it_starts(tmp_path: Path) -> None:
    demo = Demo(tmp_path, "--listen", "127.0.0.1:0")
    while not (tmp_path / "demo").exists():  # by then signals are its own, or nearly
        assert demo.process.poll() is None
    status, err = demo.end(signal.SIGINT)
    assert status in (0, 130)
    assert "Traceback" not in err


def test_a_port_that_is_taken(tmp_path: Path) -> None:
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


def test_a_folder_that_is_in_use(tmp_path: Path) -> None:
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
            "--listen 0.0.0.0:8099 can be reached from elsewhere, and tokens would cross the "
            "network in the clear; listen on 127.0.0.1:8099, or say --listen-without-tls",
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


def test_the_scene_is_set_once(service: Running) -> None:
    async def twice() -> None:
        async with AsyncClient(service.url, service.token) as admin:
            first = await set_up(admin)
            async with AsyncClient(service.url, first["training"]) as guest:
                left = await guest.allocate("7g.80gb")
            second = await set_up(admin)
            assert first.keys() == second.keys() == {guest.name for guest in GUESTS}
            assert not set(first.values()) & set(second.values())
            assert (await admin.allocation(left.id)).state == "released"
            assert [node.name async for node in admin.nodes()] == sorted(n for n, _, _ in NODES)
            notes = [token.note async for token in admin.tokens()]
            assert notes.count(NOTE) == len(GUESTS)  # those of the first time are void
            tenant = await admin.tenant("training")
            assert tenant.quota.memory_slices == 128

    asyncio.run(twice())


def test_guests_ask_for_what_there_is() -> None:
    catalog = Catalog.builtin()
    offered = {
        profile.name for _, model, _ in NODES for profile in catalog.find(model).require().profiles
    }
    for guest in GUESTS:
        assert set(guest.likes) <= offered
    assert sum(guest.share for guest in GUESTS) == pytest.approx(1)


def test_guests_come_and_go(service: Running) -> None:
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


def test_too_many_guests_wait_or_are_turned_away(service: Running) -> None:
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


def test_nobody_waits_for_the_answer_another_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many come as were meant to, but for a service that does not answer at all."""
    under_way = most = 0

    async def slowly(*_: object, **__: object) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        while most < 7:  # nobody is answered before seven have asked
            await asyncio.sleep(0)
        under_way -= 1
        raise UnreachableError("nothing more is of interest")

    monkeypatch.setattr(AsyncClient, "allocate", slowly)
    monkeypatch.setattr("slicewise.demo.traffic._AT_ONCE", 7)
    secrets = dict.fromkeys((guest.name for guest in GUESTS), "sw_nobody")
    traffic = Traffic("http://127.0.0.1:1", secrets, random.Random(1), 10_000, 1)
    asyncio.run(traffic.run(30))
    assert (most, traffic.summary()) == (7, "30 requests: 30 failed")


def test_a_service_that_fails_is_counted(service: Running) -> None:
    async def play() -> Traffic:
        nobody = dict.fromkeys((guest.name for guest in GUESTS), "sw_nobody")
        traffic = Traffic(service.url, nobody, random.Random(1), 1000, 1)
        assert traffic.summary() == "0 requests: none yet"
        await traffic.run(3)
        return traffic

    assert asyncio.run(play()).summary() == "3 requests: 3 failed"
