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

from slicewise.cli.connection import service_packages
from slicewise.cli.rehearsal_process import rehearse_with
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.config.settings import Settings
    from slicewise.control.ports import Store
    from slicewise.server.extender.extender import Extender


def serve(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Data folder: database and admin token; created if missing.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where to listen (default 127.0.0.1:8080)."),
    ] = None,
    database: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A PostgreSQL database, in place of SQLite."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="The placement policy.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key, PEM.")] = None,
    listen_without_tls: Annotated[
        bool,
        typer.Option(
            "--listen-without-tls",
            help="Listen beyond loopback without TLS: tokens cross the network in the clear.",
        ),
    ] = False,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The URL of this process for other processes."),
    ] = None,
    init: Annotated[
        bool,
        typer.Option(
            "--init", help="Start a new history, even if the folder was used by a service before."
        ),
    ] = False,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings as TOML.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting."),
    ] = None,
) -> None:
    """Serve the HTTP API until interrupted; settings also come from a file and SLICEWISE_*."""
    with service_packages("serving"):
        from slicewise.config.logs import set_up_logs
        from slicewise.config.sources import assignments, read_settings
        from slicewise.server.bootstrap import check_history, traces
        from slicewise.server.server import listening
        from slicewise.store import EmptyError, open_store
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
            check_history(folder, None, init=init, required=required)
            raise
        opened.callback(store.close)
        check_history(folder, store.span(), init=init, required=required)
        _run(store, settings, listener)


def make_folder(folder: Path) -> None:
    """Create the data folder of a service, readable by its owner only."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        raise SlicewiseError(f"data: {folder} is a file, not a folder") from None
    except OSError as error:
        raise SlicewiseError(f"data: {folder}: {error.strerror or error}") from None


def _run(store: Store, settings: Settings, listener: socket.socket) -> None:
    from slicewise.dashboard.comparison_routes import routes
    from slicewise.dashboard.pages import StaticPages
    from slicewise.server.server import serve
    from slicewise.server.service import Service

    async def run() -> None:
        extender = _extender(settings)
        service = Service(
            store,
            settings,
            pages=StaticPages(),
            routes=(*routes(), *(extender.routes() if extender else ())),
            companions=(extender.run,) if extender else (),
            rehearse=rehearse_with(settings.data),
        )

        def ready(url: str) -> None:
            # The state is large and stays: scanning it for garbage would hold up requests.
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 20, 50)
            # The store's thread takes the interpreter's lock after every statement of a commit.
            sys.setswitchinterval(0.0001)
            if service.runtime.leads:
                typer.echo(f"slicewise: leading at {url}, admin token in {service.admin_token}")
            else:
                leader = service.runtime.leader
                who = "none" if leader is None else leader.address
                typer.echo(f"slicewise: following at {url}, {who} leads")

        await serve(service, listener, ready)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def _extender(settings: Settings) -> Extender | None:
    """The scheduler extender, if it is enabled."""
    if not settings.extender_enabled:
        return None
    try:
        from slicewise.kubernetes.extender_pods import ClusterPods
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"extender.enabled needs the extra packages of slicewise[k8s] ({error.name} is missing)"
        ) from None
    from slicewise.server.extender.extender import Extender

    try:
        pods = ClusterPods.open(settings.extender_kubeconfig)
    except SlicewiseError as error:
        raise SlicewiseError(f"extender.kubeconfig: {error}") from None
    return Extender(pods, settings)


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """The event loop of uvloop, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
