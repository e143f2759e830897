"""`slicewise k8s`: the controller that gives pods their slices."""

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
    from slicewise.k8s.controller import Controller
    from slicewise.k8s.link import Link
    from slicewise.k8s.rivals import When

_HOLD_BACK = ("auto", "always", "never")


def k8s(
    kubeconfig: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="How to reach the cluster; inside one, the pod's own account."
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(metavar="NAME", help="The context of the kubeconfig.")
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="The policy that places.")
    ] = "default",
    namespace: Annotated[
        str, typer.Option(metavar="NAME", help="Where the lease of the leader is.")
    ] = "slicewise",
    lease: Annotated[
        str, typer.Option(metavar="NAME", help="The lease: replicas that share it take turns.")
    ] = "slicewise",
    identity: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What this replica is called (default: the host)."),
    ] = None,
    lease_seconds: Annotated[
        float,
        typer.Option(min=1, max=3600, help="After so long without a word, another one leads."),
    ] = 15.0,
    backfill: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Pods behind a blocked one that are tried.")
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
            help="When pods are held back until it is certain that no claim of another class was "
            "given the same slices: always, auto (while some are about) or never (there are none).",
        ),
    ] = "always",
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Serve metrics, health and the dashboard there, to read."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A secret for those who look; made if it is missing."),
    ] = None,
    open_metrics: Annotated[
        bool, typer.Option("--open-metrics", help="Give metrics to whoever asks.")
    ] = False,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key, PEM.")] = None,
    listen_without_tls: Annotated[
        bool,
        typer.Option("--listen-without-tls", help="Listen beyond loopback although without TLS."),
    ] = False,
) -> None:
    """Give the pods of a Kubernetes cluster their slices, until interrupted."""
    try:
        from slicewise.engine.queue import Discipline
        from slicewise.k8s.controller import Controller, Options
        from slicewise.k8s.link import Link
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
    link = Link.open(kubeconfig, context)
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
    typer.echo(f"slicewise: following {controller.server} as {controller.options.identity}")
    controller.run()


def _serving(
    controller: Controller,
    link: Link,
    flags: dict[str, object],
    token_file: Path | None,
    address: list[str],
) -> None:
    """Run the controller beside the reading half of the service."""
    try:
        from slicewise.cli.serve import loop_factory
        from slicewise.dashboard.compare import routes
        from slicewise.dashboard.pages import Pages
        from slicewise.k8s.metrics import ControllerMetrics
        from slicewise.service.logs import set_up_logs
        from slicewise.service.server import listening, serve
        from slicewise.service.service import Service
        from slicewise.service.setting_sources import read_settings
        from slicewise.service.source import Source
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"--listen needs the extra packages of slicewise[service] ({error.name} is missing)"
        ) from None
    settings = read_settings({k: v for k, v in flags.items() if v is not None}, {}, None)
    link.check()
    token = _let_look(controller, token_file)
    set_up_logs(settings.log_format, settings.log_level)
    listener = listening(settings.listen)
    thread = threading.Thread(target=_run_until_over, args=(controller,), name="controller")
    source = Source(
        change_it_there="this shows a Kubernetes cluster and changes nothing in it: create, "
        "change and delete pods, claims, nodes and namespaces there, with kubectl for instance",
        problem=lambda: controller.problem,
        leads=lambda: controller.leads,
        collectors=(ControllerMetrics(controller),),
    )

    async def run() -> None:
        service = Service(
            controller.board.journal, settings, pages=Pages(), routes=routes(), source=source
        )

        def ready(url: str) -> None:
            address[0] = url
            typer.echo(
                f"slicewise: following {controller.server} as {controller.options.identity}, "
                f"to be seen at {url}, {token}"
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


def _let_look(controller: Controller, file: Path | None) -> str:
    """Let whoever has the secret of a file look; returns where it is, in words."""
    from slicewise.service.first_start import write_secret

    if file is None:
        return "by nobody: no token file is named"
    if not file.exists():
        try:
            write_secret(file, f"sw_{secrets.token_urlsafe(32)}")
        except SlicewiseError as error:
            # In a cluster the file is a Secret's: where there is none, pods run all the same.
            return f"by nobody: {error}"
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SlicewiseError(f"{file}: cannot be read: {error}") from None
    if not secret:
        raise SlicewiseError(f"{file}: it holds no token")
    controller.board.let_look(hashlib.sha256(secret.encode()).hexdigest())
    return f"token in {file}"


def _run_until_over(controller: Controller) -> None:
    """A controller that cannot go on ends the process: another replica is to take over."""
    try:
        controller.run()
    except BaseException:
        os.kill(os.getpid(), signal.SIGTERM)
        raise
