"""`slicewise serve`: the scheduler as a service."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.control.ports import Leader, Store
    from slicewise.service.extender import Extender
    from slicewise.service.settings import Settings


def serve(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the service: its database and admin token; made if missing.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where to listen (default 127.0.0.1:8080)."),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A PostgreSQL database, instead of SQLite in the folder."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="The policy that places.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key, PEM.")] = None,
    listen_without_tls: Annotated[
        bool,
        typer.Option(
            "--listen-without-tls",
            help="Listen beyond loopback although there is no TLS: tokens then cross the "
            "network in the clear.",
        ),
    ] = False,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where others reach this process."),
    ] = None,
    init: Annotated[
        bool,
        typer.Option(
            "--init", help="Begin a new history, though a service ran from the folder before."
        ),
    ] = False,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings as TOML.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting."),
    ] = None,
) -> None:
    """Serve the HTTP API until interrupted; settings also come from a file and SLICEWISE_*."""
    try:
        from slicewise.service.beginning import check_beginning, traces
        from slicewise.service.logs import set_up_logs
        from slicewise.service.server import listening
        from slicewise.service.setting_sources import assignments, read_settings
        from slicewise.store import EmptyError, open_store
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"serving needs the extra packages of slicewise[service] ({error.name} is missing)"
        ) from None
    flags: dict[str, object] = assignments(setting or [])
    flags |= {
        key: value
        for key, value in {
            "data": data,
            "listen": listen,
            "database": database,
            "policy": policy,
            "tls.cert": tls_cert,
            "tls.key": tls_key,
            "listen_without_tls": listen_without_tls or None,
            "advertise": advertise,
        }.items()
        if value is not None
    }
    settings = read_settings(flags, os.environ, config)
    if settings.data is None:
        raise SlicewiseError("data is missing: name a folder for the service with --data DIR")
    make_folder(settings.data)
    set_up_logs(settings.log_format, settings.log_level)
    listener = listening(settings.listen)
    folder, required = settings.data, settings.require_history
    with listener, ExitStack() as opened:
        try:
            begin = init or not (required or traces(folder))
            store = open_store(folder, settings.database, begin=begin)
        except EmptyError:
            check_beginning(folder, None, init=init, required=required)
            raise
        opened.callback(store.close)
        check_beginning(folder, store.span(), init=init, required=required)
        _run(store, settings, listener)


def make_folder(folder: Path) -> None:
    """Make the folder of a service, which only its owner may look into."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        raise SlicewiseError(f"data: {folder} is a file, not a folder") from None
    except OSError as error:
        raise SlicewiseError(f"data: {folder}: {error.strerror or error}") from None


def _run(store: Store, settings: Settings, listener: socket.socket) -> None:
    from slicewise.dashboard.compare import routes
    from slicewise.dashboard.pages import Pages
    from slicewise.service.server import serve
    from slicewise.service.service import Service

    async def run() -> None:
        extender = _extender(settings)
        service = Service(
            store,
            settings,
            pages=Pages(),
            routes=(*routes(), *(extender.routes() if extender else ())),
            companions=(extender.run,) if extender else (),
        )

        def ready(url: str) -> None:
            # What is there now stays: looking through it for garbage again and again would hold
            # up requests on a large cluster.
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 20, 50)
            # A commit that is ready to go on should not wait long for the event loop.
            sys.setswitchinterval(0.0005)
            if service.plant.leads:
                typer.echo(f"slicewise: leading at {url}, admin token in {service.admin_token}")
            else:
                typer.echo(f"slicewise: following at {url}, {_who(service.plant.leader)} leads")

        await serve(service, listener, ready)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def _extender(settings: Settings) -> Extender | None:
    """The scheduler's extender, where it is switched on."""
    if not settings.extender_enabled:
        return None
    try:
        from slicewise.k8s.pods import ClusterPods
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"extender.enabled needs the extra packages of slicewise[k8s] ({error.name} is missing)"
        ) from None
    from slicewise.service.extender import Extender

    try:
        pods = ClusterPods.open(settings.extender_kubeconfig)
    except SlicewiseError as error:
        raise SlicewiseError(f"extender.kubeconfig: {error}") from None
    return Extender(pods, settings)


def _who(leader: Leader | None) -> str:
    return "nobody" if leader is None else leader.address


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """The faster event loop, where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
