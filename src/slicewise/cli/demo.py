"""`slicewise demo`: the service with a simulated cluster, sample tenants and live traffic."""

from __future__ import annotations

import asyncio
import random
import shlex
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from slicewise.cli.connection import service_packages
from slicewise.cli.serve import loop_factory, make_folder
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.client import AsyncClient
    from slicewise.demo.agents import Fleet
    from slicewise.service.service import Service

DEFAULT_FOLDER = Path("slicewise-demo")
_LOOK_SECONDS = 1.0
"""How often the line at the bottom of a terminal is drawn again."""


def demo(
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for its database and tokens.")
    ] = DEFAULT_FOLDER,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 is any free one.")
    ] = "127.0.0.1:8080",
    listen_without_tls: Annotated[
        bool,
        typer.Option(
            "--listen-without-tls",
            help="Listen beyond loopback: it has no TLS, and tokens cross the network in the "
            "clear.",
        ),
    ] = False,
    rate: Annotated[float, typer.Option(metavar="N", help="Requests a second.")] = 4.0,
    hold: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long an instance is held, on average.")
    ] = 25.0,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="End after so many requests.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed asks for the same.")] = 1,
    agents: Annotated[
        bool,
        typer.Option(
            "--agents",
            help="Run a real agent for every node, on a driver for GPUs that do not exist; needs "
            "a C compiler.",
        ),
    ] = False,
) -> None:
    """Start a service to look at: five nodes that do not exist, three tenants, live traffic."""
    if not 0.01 <= rate <= 10_000:
        raise SlicewiseError(f"rate must be 0.01 to 10000 a second, not {rate:g}")
    if not 0.01 <= hold <= 1e6:
        raise SlicewiseError(f"hold must be 0.01 to 1000000 seconds, not {hold:g}")
    if requests is not None and requests < 1:
        raise SlicewiseError(f"requests must be at least 1, not {requests}")
    with service_packages("the demonstration"):
        from slicewise.dashboard.compare import routes
        from slicewise.dashboard.pages import Pages
        from slicewise.service.logs import set_up_logs
        from slicewise.service.server import listening
        from slicewise.service.service import Service
        from slicewise.service.setting_sources import read_settings
        from slicewise.store import open_store
    # Settings of a real service, in the environment, are not those of this one.
    given = {"data": data.absolute(), "listen": listen, "listen_without_tls": True}
    settings = read_settings(given, {})
    if not (settings.listen.loopback or listen_without_tls):
        raise SlicewiseError(
            f"--listen {settings.listen} can be reached from elsewhere, and tokens would cross the "
            f"network in the clear; listen on 127.0.0.1:{settings.listen.port}, or say "
            "--listen-without-tls"
        )
    set_up_logs(settings.log_format, "warning")
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(listening(settings.listen))
        except SlicewiseError as error:
            raise SlicewiseError(f"{error}; choose another port with --listen HOST:PORT") from None
        make_folder(data)
        store = open_store(settings.data, settings.database)
        stack.callback(store.close)
        fleet = _fleet(data) if agents else None

        async def run() -> None:
            service = Service(store, settings, pages=Pages(), routes=routes())
            assert service.admin_token is not None  # there is a folder for it
            rng = random.Random(seed)
            script = _Script(service.admin_token, rate, hold, requests, rng, fleet)
            await _perform(service, listener, script)

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run())


def _fleet(data: Path) -> Fleet:
    from slicewise.demo.agents import Fleet

    return Fleet((data / "agents").absolute())


async def _perform(service: Service, listener: socket.socket, script: _Script) -> None:
    """Run the service for as long as the play goes on."""
    from slicewise.service.server import serve

    loop = asyncio.get_running_loop()
    playing: asyncio.Task[None] | None = None

    def ready(url: str) -> None:
        nonlocal playing
        playing = asyncio.create_task(script.play(url))
        # The guests leave first, then the house is closed.
        playing.add_done_callback(lambda _: serving.cancel())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, playing.cancel)

    serving = asyncio.create_task(serve(service, listener, ready))
    try:
        await serving
    except asyncio.CancelledError:
        if playing is None or not playing.done():
            raise
    finally:
        if playing is not None:
            playing.cancel()
            await asyncio.wait({playing})
    if playing is not None and not playing.cancelled():
        playing.result()


@dataclass(frozen=True)
class _Script:
    """What is played to an audience, and for how long."""

    token: Path
    rate: float
    hold: float
    requests: int | None
    rng: random.Random
    fleet: Fleet | None = None
    """The agents of the nodes, if they are to have any."""

    async def play(self, url: str) -> None:
        """Set the scene, say what there is to see, and let guests come and go."""
        from slicewise.client import AsyncClient

        secret = self.token.read_text(encoding="utf-8").strip()
        async with AsyncClient(url, secret) as admin:
            try:
                if self.fleet is not None:
                    await self.fleet.start(url, admin)
                await self._play(url, admin)
            finally:
                if self.fleet is not None:
                    await self.fleet.stop()

    async def _play(self, url: str, admin: AsyncClient) -> None:
        from slicewise.demo.scene import set_up
        from slicewise.demo.traffic import Traffic

        secrets = await set_up(admin, agents=self.fleet is not None)
        typer.echo(self._welcome(url))
        traffic = Traffic(url, secrets, self.rng, self.rate, self.hold)
        tellers: list[Callable[[], str]] = [traffic.summary]
        beside = {asyncio.create_task(_watch(tellers))}
        if self.fleet is not None:
            from slicewise.demo.agents import Stages

            stages = Stages()
            tellers.append(stages.summary)
            beside.add(asyncio.create_task(stages.follow(admin)))
        try:
            await traffic.run(self.requests)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            for tell in tellers:
                typer.echo(tell())

    def _about_agents(self) -> str:
        if self.fleet is None:
            return ""
        return (
            "  an agent on every node makes the instances, on a driver for GPUs that do not exist\n"
        )

    def _about_instances(self) -> str:
        if self.fleet is None:
            return ""
        return "  slicewise ls\n  slicewise nodes show dgx-01\n"

    def _welcome(self, url: str) -> str:
        from slicewise.demo.scene import GUESTS, NODES

        gpus = sum(count for _, _, count in NODES)
        server = shlex.quote(url)
        return (
            f"slicewise is at {url}\n"
            f"  {len(NODES)} simulated nodes with {gpus} GPUs, {len(GUESTS)} tenants, about "
            f"{self.rate:g} requests a second\n"
            f"{self._about_agents()}"
            f"  the admin token is in {self.token}\n"
            "Open it in a browser and sign in with the token to see the slices.\n"
            "Try, in another terminal:\n"
            f"  export SLICEWISE_SERVER={server}\n"
            f"  export SLICEWISE_TOKEN_FILE={shlex.quote(str(self.token))}\n"
            "  slicewise top\n"
            f"{self._about_instances()}"
            "  slicewise submit 2g.20gb\n"
            "  slicewise explain 3g.40gb\n"
            f'  curl -H "Authorization: Bearer $(cat $SLICEWISE_TOKEN_FILE)" {url}/v1/cluster\n'
            "Ctrl-C ends it."
        )


async def _watch(tellers: Sequence[Callable[[], str]]) -> None:
    """Keep a line about it all at the bottom of a terminal; say nothing elsewhere."""
    console = Console(highlight=False)
    if not console.is_terminal:
        return
    with console.status("") as status:
        while True:
            status.update("; ".join(tell() for tell in tellers))
            await asyncio.sleep(_LOOK_SECONDS)
