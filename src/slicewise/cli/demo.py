"""`slicewise demo`: the service with a simulated cluster, sample tenants and live traffic."""

from __future__ import annotations

import asyncio
import random
import shlex
import signal
import socket
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
    from slicewise.demo.traffic import Traffic
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
    rate: Annotated[float, typer.Option(metavar="N", help="Requests a second.")] = 4.0,
    hold: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long an instance is held, on average.")
    ] = 25.0,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="End after so many requests.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed asks for the same.")] = 1,
) -> None:
    """Start a service to look at: five nodes that do not exist, three tenants, live traffic."""
    if not 0.01 <= rate <= 10_000:
        raise SlicewiseError(f"rate must be 0.01 to 10000 a second, not {rate:g}")
    if not 0.01 <= hold <= 1e6:
        raise SlicewiseError(f"hold must be 0.01 to 1000000 seconds, not {hold:g}")
    if requests is not None and requests < 1:
        raise SlicewiseError(f"requests must be at least 1, not {requests}")
    with service_packages("the demonstration"):
        from slicewise.service.logs import set_up_logs
        from slicewise.service.server import listening
        from slicewise.service.service import Service
        from slicewise.service.settings import read_settings
        from slicewise.store import open_store
    # Settings of a real service, in the environment, are not those of this one.
    settings = read_settings({"data": data.absolute(), "listen": listen}, {})
    set_up_logs(settings.log_format, "warning")
    with ExitStack() as stack:
        try:
            listener = stack.enter_context(listening(settings.listen))
        except SlicewiseError as error:
            raise SlicewiseError(f"{error}; choose another port with --listen HOST:PORT") from None
        make_folder(data)
        store = open_store(settings.data, settings.database)
        stack.callback(store.close)

        async def run() -> None:
            service = Service(store, settings)
            assert service.admin_token is not None  # there is a folder for it
            script = _Script(service.admin_token, rate, hold, requests, random.Random(seed))
            await _perform(service, listener, script)

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(run())


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

    async def play(self, url: str) -> None:
        """Set the scene, say what there is to see, and let guests come and go."""
        from slicewise.client import AsyncClient
        from slicewise.demo.scene import set_up
        from slicewise.demo.traffic import Traffic

        secret = self.token.read_text(encoding="utf-8").strip()
        async with AsyncClient(url, secret) as admin:
            secrets = await set_up(admin)
        typer.echo(self._welcome(url))
        traffic = Traffic(url, secrets, self.rng, self.rate, self.hold)
        watching = asyncio.create_task(_watch(traffic))
        try:
            await traffic.run(self.requests)
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            typer.echo(traffic.summary())

    def _welcome(self, url: str) -> str:
        from slicewise.demo.scene import GUESTS, NODES

        gpus = sum(count for _, _, count in NODES)
        server = shlex.quote(url)
        return (
            f"slicewise is at {url}\n"
            f"  {len(NODES)} simulated nodes with {gpus} GPUs, {len(GUESTS)} tenants, about "
            f"{self.rate:g} requests a second\n"
            f"  the admin token is in {self.token}\n"
            "Try, in another terminal:\n"
            f"  export SLICEWISE_SERVER={server}\n"
            f"  export SLICEWISE_TOKEN_FILE={shlex.quote(str(self.token))}\n"
            "  slicewise top\n"
            "  slicewise submit 2g.20gb\n"
            "  slicewise explain 3g.40gb\n"
            f'  curl -H "Authorization: Bearer $(cat $SLICEWISE_TOKEN_FILE)" {url}/v1/cluster\n'
            "Ctrl-C ends it."
        )


async def _watch(traffic: Traffic) -> None:
    """Keep a line about the traffic at the bottom of a terminal; say nothing elsewhere."""
    console = Console(highlight=False)
    if not console.is_terminal:
        return
    with console.status(traffic.summary()) as status:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            status.update(traffic.summary())
