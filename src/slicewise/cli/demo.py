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
from slicewise.cli.rehearsal_process import rehearse_with
from slicewise.cli.serve import loop_factory, make_folder
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.client import AsyncClient
    from slicewise.demo.agents import AgentProcesses
    from slicewise.server.service import Service

DEFAULT_FOLDER = Path("slicewise-demo")
_STATUS_SECONDS = 1.0
"""Interval between two updates of the status line."""


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
            help="Listen beyond loopback; there is no TLS, so tokens cross the network in the "
            "clear.",
        ),
    ] = False,
    rate: Annotated[float, typer.Option(metavar="N", help="Requests a second.")] = 4.0,
    hold: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long an instance is held, on average.")
    ] = 25.0,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="Stop after this many requests.")
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", help="The same seed gives the same requests.")
    ] = 1,
    agents: Annotated[
        bool,
        typer.Option(
            "--agents",
            help="Run a real agent for every node, on a fake driver; needs a C compiler.",
        ),
    ] = False,
) -> None:
    """Start a demo service: five simulated nodes, three tenants, live traffic."""
    if not 0.01 <= rate <= 10_000:
        raise SlicewiseError(f"rate must be 0.01 to 10000 a second, not {rate:g}")
    if not 0.01 <= hold <= 1e6:
        raise SlicewiseError(f"hold must be 0.01 to 1000000 seconds, not {hold:g}")
    if requests is not None and requests < 1:
        raise SlicewiseError(f"requests must be at least 1, not {requests}")
    with service_packages("the demo"):
        from slicewise.config.logs import set_up_logs
        from slicewise.config.sources import read_settings
        from slicewise.dashboard.comparison_routes import routes
        from slicewise.dashboard.pages import StaticPages
        from slicewise.server.server import listening
        from slicewise.server.service import Service
        from slicewise.store import open_store
    # Ignore the environment: its settings are for a real service.
    given = {"data": data.absolute(), "listen": listen, "listen_without_tls": True}
    settings = read_settings(given, {})
    if not (settings.listen.loopback or listen_without_tls):
        raise SlicewiseError(
            f"--listen {settings.listen} can be reached from other machines, and tokens would "
            f"cross the network in the clear; listen on 127.0.0.1:{settings.listen.port}, or add "
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
            service = Service(
                store,
                settings,
                pages=StaticPages(),
                routes=routes(),
                rehearse=rehearse_with(settings.data),
            )
            assert service.admin_token is not None  # the service has a data folder
            rng = random.Random(seed)
            clients = _DemoClients(service.admin_token, rate, hold, requests, rng, fleet)
            await _serve_clients(service, listener, clients)

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run())


def _fleet(data: Path) -> AgentProcesses:
    from slicewise.demo.agents import AgentProcesses

    return AgentProcesses((data / "agents").absolute())


async def _serve_clients(service: Service, listener: socket.socket, clients: _DemoClients) -> None:
    """Run the service until its clients end or are interrupted."""
    from slicewise.server.server import serve

    loop = asyncio.get_running_loop()
    running: asyncio.Task[None] | None = None

    def ready(url: str) -> None:
        nonlocal running
        running = asyncio.create_task(clients.run(url))
        # The clients end before the service does.
        running.add_done_callback(lambda _: serving.cancel())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, running.cancel)

    serving = asyncio.create_task(serve(service, listener, ready))
    try:
        await serving
    except asyncio.CancelledError:
        if running is None or not running.done():
            raise
    finally:
        if running is not None:
            running.cancel()
            await asyncio.wait({running})
    if running is not None and not running.cancelled():
        running.result()


@dataclass(frozen=True)
class _DemoClients:
    """The clients of the demo: an admin who sets up the cluster, and the traffic of tenants."""

    token: Path
    rate: float
    hold: float
    requests: int | None
    rng: random.Random
    fleet: AgentProcesses | None = None
    """The agents of the nodes, with --agents."""

    async def run(self, url: str) -> None:
        """Set up the cluster, print how to use it, and send requests."""
        from slicewise.client import AsyncClient

        secret = self.token.read_text(encoding="utf-8").strip()
        async with AsyncClient(url, secret) as admin:
            try:
                if self.fleet is not None:
                    await self.fleet.start(url, admin)
                await self._run(url, admin)
            finally:
                if self.fleet is not None:
                    await self.fleet.stop()

    async def _run(self, url: str, admin: AsyncClient) -> None:
        from slicewise.demo.cluster import set_up
        from slicewise.demo.traffic import Traffic

        secrets = await set_up(admin, agents=self.fleet is not None)
        typer.echo(self._welcome(url))
        traffic = Traffic(url, secrets, self.rng, self.rate, self.hold)
        summaries: list[Callable[[], str]] = [traffic.summary]
        tasks = {asyncio.create_task(_show_status(summaries))}
        if self.fleet is not None:
            from slicewise.demo.agents import InstancePhases

            phases = InstancePhases()
            summaries.append(phases.summary)
            tasks.add(asyncio.create_task(phases.follow(admin)))
        try:
            await traffic.run(self.requests)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for summary in summaries:
                typer.echo(summary())

    def _about_agents(self) -> str:
        if self.fleet is None:
            return ""
        return "  an agent on every node creates the instances, on a fake driver\n"

    def _about_instances(self) -> str:
        if self.fleet is None:
            return ""
        return "  slicewise ls\n  slicewise nodes show dgx-01\n"

    def _welcome(self, url: str) -> str:
        from slicewise.demo.cluster import NODES, TENANTS

        gpus = sum(count for _, _, count in NODES)
        server = shlex.quote(url)
        return (
            f"slicewise is at {url}\n"
            f"  {len(NODES)} simulated nodes with {gpus} GPUs, {len(TENANTS)} tenants, about "
            f"{self.rate:g} requests a second\n"
            f"{self._about_agents()}"
            f"  the admin token is in {self.token}\n"
            "Open it in a browser and sign in with the token to see the slices.\n"
            "Try in another terminal:\n"
            f"  export SLICEWISE_SERVER={server}\n"
            f"  export SLICEWISE_TOKEN_FILE={shlex.quote(str(self.token))}\n"
            "  slicewise top\n"
            f"{self._about_instances()}"
            "  slicewise submit 2g.20gb\n"
            "  slicewise explain 3g.40gb\n"
            f'  curl -H "Authorization: Bearer $(cat $SLICEWISE_TOKEN_FILE)" {url}/v1/cluster\n'
            "Ctrl-C ends it."
        )


async def _show_status(summaries: Sequence[Callable[[], str]]) -> None:
    """Show a status line if the output is a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        return
    with console.status("") as status:
        while True:
            status.update("; ".join(summary() for summary in summaries))
            await asyncio.sleep(_STATUS_SECONDS)
