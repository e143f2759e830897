"""`slicewise k8s`: the Kubernetes controller."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from slicewise.core.errors import SlicewiseError, UnknownNameError

if TYPE_CHECKING:
    from slicewise.kubernetes.api_client import ApiClient
    from slicewise.kubernetes.conflicts import When
    from slicewise.kubernetes.controller import Controller

_HOLD_BACK = ("auto", "always", "never")


def k8s(
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The kubeconfig (default: inside a cluster, the service account)."
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="NAME", help="The context of the kubeconfig.")
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME", help="The placement policy.")] = "default",
    namespace: Annotated[
        str, typer.Option(metavar="NAME", help="The namespace of the lease.")
    ] = "slicewise",
    lease: Annotated[
        str, typer.Option(metavar="NAME", help="The name of the lease; one of its replicas leads.")
    ] = "slicewise",
    identity: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The name of this replica (default: the host name)."),
    ] = None,
    lease_seconds: Annotated[
        float,
        typer.Option(
            min=1, max=3600, help="Another replica takes over after this time without renewal."
        ),
    ] = 15.0,
    backfill: Annotated[
        int,
        typer.Option(min=0, max=1_000_000, help="How many pods behind a blocked one are tried."),
    ] = 256,
    overtakes: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="How often a pod may be overtaken.")
    ] = 1024,
    settle_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            max=600,
            help="How long a pod is held back while claims of other classes compete for its GPU.",
        ),
    ] = 5.0,
    hold_back: Annotated[
        str,
        typer.Option(
            metavar="WHEN",
            help="When pods are held back until no claim of another class can have the same "
            "slices: always, auto (while such claims are expected) or never.",
        ),
    ] = "always",
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Serve metrics, health and the dashboard at this address."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the dashboard's token; created if missing."),
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Serve metrics without a token.")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key, PEM.")] = None,
    listen_without_tls: Annotated[
        bool,
        typer.Option(
            "--listen-without-tls", help="Allow other addresses than loopback without TLS."
        ),
    ] = False,
) -> None:
    """Run the Kubernetes controller: allocate slices to pods until interrupted."""
    try:
        from slicewise.engine.queue import Discipline
        from slicewise.kubernetes.api_client import ApiClient
        from slicewise.kubernetes.controller import Controller, Options
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"Kubernetes needs the extra packages of slicewise[k8s] ({error.name} is missing)"
        ) from None
    options = Options(
        policy=policy,
        namespace=namespace,
        lease=lease,
        identity=identity or f"{socket.gethostname()}-{secrets.token_hex(3)}",
        lease_seconds=lease_seconds,
        discipline=Discipline(backfill, overtakes),
        settle_seconds=settle_seconds,
        hold_back=_when(hold_back),
    )
    address = [""]
    link = ApiClient.open(kubeconfig, context)
    controller = Controller(link, options, address=lambda: address[0])
    flags: dict[str, object] = {
        "listen": listen,
        "policy": policy,
        "tls.cert": tls_cert,
        "tls.key": tls_key,
        "listen_without_tls": listen_without_tls or None,
        "metrics.public": open_metrics or None,
    }
    if listen is None:
        link.check()
        _alone(controller)
    else:
        _serving(controller, link, flags, token_file, address)


def _when(text: str) -> When:
    if text not in _HOLD_BACK:
        raise UnknownNameError("--hold-back", text, _HOLD_BACK)
    return cast("When", text)


def _alone(controller: Controller) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: controller.stop())
    typer.echo(f"slicewise: watching {controller.server} as {controller.options.identity}")
    controller.run()


def _serving(
    controller: Controller,
    link: ApiClient,
    flags: dict[str, object],
    token_file: Path | None,
    address: list[str],
) -> None:
    """Run the controller with the read-only part of the service."""
    try:
        from slicewise.cli.serve import loop_factory
        from slicewise.config.logs import set_up_logs
        from slicewise.config.sources import read_settings
        from slicewise.dashboard.comparison_routes import routes
        from slicewise.dashboard.pages import Pages
        from slicewise.kubernetes.metrics import ControllerMetrics
        from slicewise.runtime.source import Source
        from slicewise.server.server import listening, serve
        from slicewise.server.service import Service
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"--listen needs the extra packages of slicewise[service] ({error.name} is missing)"
        ) from None
    settings = read_settings({k: v for k, v in flags.items() if v is not None}, {}, None)
    link.check()
    token = _add_viewer_token(controller, token_file)
    set_up_logs(settings.log_format, settings.log_level)
    listener = listening(settings.listen)
    thread = threading.Thread(target=_run_or_exit, args=(controller,), name="controller")
    source = Source(
        read_only_message="this dashboard of a Kubernetes cluster is read-only: create, change and "
        "delete pods, claims, nodes and namespaces in the cluster, for instance with kubectl",
        problem=lambda: controller.problem,
        leads=lambda: controller.leads,
        collectors=(ControllerMetrics(controller),),
    )

    async def run() -> None:
        service = Service(
            controller.cache.journal, settings, pages=Pages(), routes=routes(), source=source
        )

        def ready(url: str) -> None:
            address[0] = url
            typer.echo(
                f"slicewise: watching {controller.server} as {controller.options.identity}, "
                f"listening at {url}; dashboard: {token}"
            )

        await serve(service, listener, ready)

    with listener:
        thread.start()
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(run())
        finally:
            controller.stop()
            thread.join()


def _add_viewer_token(controller: Controller, file: Path | None) -> str:
    """Set the token of the dashboard from a file; returns a description for the user."""
    from slicewise.server.bootstrap import write_private

    if file is None:
        return "disabled: no --token-file"
    if not file.exists():
        try:
            write_private(file, f"sw_{secrets.token_urlsafe(32)}")
        except SlicewiseError as error:
            # In a cluster the file comes from a Secret, which is optional.
            return f"disabled: {error}"
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SlicewiseError(f"{file}: cannot be read: {error}") from None
    if not secret:
        raise SlicewiseError(f"{file}: the file contains no token")
    controller.cache.add_viewer_token(hashlib.sha256(secret.encode()).hexdigest())
    return f"token in {file}"


def _run_or_exit(controller: Controller) -> None:
    """Run the controller; if it fails, end the process, and another replica takes over."""
    try:
        controller.run()
    except BaseException:
        os.kill(os.getpid(), signal.SIGTERM)
        raise
