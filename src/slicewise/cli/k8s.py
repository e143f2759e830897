"""`slicewise k8s`: the Kubernetes controller."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import re
import secrets
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from slicewise.core.errors import SlicewiseError, UnknownNameError

if TYPE_CHECKING:
    from slicewise.engine.rehearsal import Rehearsal
    from slicewise.kubernetes.api_client import ApiClient
    from slicewise.kubernetes.conflicts import When
    from slicewise.kubernetes.controller import Controller
    from slicewise.kubernetes.namespace_annotations import Unreadable

_HOLD_BACK = ("auto", "always", "never")
_UNREADABLE = ("last", "nothing", "unlimited")


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
    reserve_after: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long a pod waits before a window is reserved for it, such as 30s, 5m or 1h; "
            "0: as soon as it is overtaken; never: no window is reserved.",
        ),
    ] = "5m",
    reserve_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="The largest part of the GPUs of a model with a reserved window; a namespace may "
            "have half of it. 0: none.",
        ),
    ] = 0.10,
    settle_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            max=600,
            help="How long a pod is held back while claims of other classes compete for its GPU.",
        ),
    ] = 5.0,
    preempt_for: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS",
            help="Evict pods of lower priorities for waiting pods of this priority class; may be "
            "repeated (default: no pod is evicted).",
        ),
    ] = None,
    cool_down: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long the slices of a bound pod that vanished without an end (deleted by "
            "force, or with its node) are not given out again; 0: not at all.",
        ),
    ] = "90s",
    hold_back: Annotated[
        str,
        typer.Option(
            metavar="WHEN",
            help="When pods are held back until no claim of another class can have the same "
            "slices: auto (on nodes for which such claims compete, or did in the last ten "
            "minutes), always or never.",
        ),
    ] = "auto",
    unreadable_quota: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="The limit of a namespace whose annotation cannot be read: last (the last known "
            "limit; nothing if none is known), nothing (the namespace gets no more) or unlimited.",
        ),
    ] = "last",
    qps: Annotated[
        float,
        typer.Option(
            min=1,
            max=10_000,
            help="The most requests to the Kubernetes API per second; messages to pods have a "
            "quarter as many of their own.",
        ),
    ] = 200.0,
    burst: Annotated[
        int,
        typer.Option(min=1, max=100_000, help="The most requests at once, if few came before."),
    ] = 400,
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
        from slicewise.engine.reservation_rules import ReservationRules
        from slicewise.kubernetes.api_client import ApiClient
        from slicewise.kubernetes.controller import Controller, ControllerOptions
        from slicewise.kubernetes.preemption import PreemptionRules
        from slicewise.kubernetes.rate_limit import RequestLimits
    except ModuleNotFoundError as error:
        raise SlicewiseError(
            f"Kubernetes needs the extra packages of slicewise[k8s] ({error.name} is missing)"
        ) from None
    options = ControllerOptions(
        policy=policy,
        namespace=namespace,
        lease=lease,
        identity=identity or f"{socket.gethostname()}-{secrets.token_hex(3)}",
        lease_seconds=lease_seconds,
        reservations=ReservationRules(_seconds("--reserve-after", reserve_after), reserve_share),
        preemption=PreemptionRules(_class_names("--preempt-for", preempt_for or [])),
        settle_seconds=settle_seconds,
        hold_back=cast("When", _one_of("--hold-back", hold_back, _HOLD_BACK)),
        unreadable_quota=cast(
            "Unreadable", _one_of("--unreadable-quota", unreadable_quota, _UNREADABLE)
        ),
        cool_down=_limited("--cool-down", cool_down),
    )
    address = [""]
    link = ApiClient.open(kubeconfig, context)
    link.limits = RequestLimits(qps, burst)
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


def _one_of(flag: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise UnknownNameError(flag, text, known)
    return text


_CLASS_NAME = re.compile("[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def _class_names(flag: str, names: list[str]) -> frozenset[str]:
    for name in names:
        if not _CLASS_NAME.fullmatch(name):
            raise SlicewiseError(
                f"{flag} {name!r} is no name of a priority class: repeat the flag for several"
            )
    return frozenset(names)


_LONGEST_SECONDS = 3600.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile("([0-9]{1,6}(?:[.][0-9]{1,3})?)([smhd]?)")


def _seconds(flag: str, text: str) -> float:
    if text == "never":
        return math.inf
    found = _TIME.fullmatch(text)
    if found is None:
        raise SlicewiseError(f"{flag} {text}: write a time such as 30s, 5m or 1h, or never")
    return float(found[1]) * _UNITS[found[2] or "s"]


def _limited(flag: str, text: str) -> float:
    """A time that ends."""
    seconds = math.inf if text == "never" else _seconds(flag, text)
    if seconds > _LONGEST_SECONDS:
        raise SlicewiseError(f"{flag} {text}: write a time of at most 1h, such as 30s or 2m")
    return seconds


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
        from slicewise.cli.rehearsal_process import rehearse_with
        from slicewise.cli.serve import loop_factory
        from slicewise.config.logs import set_up_logs
        from slicewise.config.sources import read_settings
        from slicewise.dashboard.comparison_routes import routes
        from slicewise.dashboard.pages import StaticPages
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

    async def choose(rehearsal: Rehearsal) -> str:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()

        def told(why: str) -> None:
            loop.call_soon_threadsafe(answer.set_result, why)

        controller.choose(rehearsal, told)
        return await answer

    source = Source(
        read_only_message="this dashboard of a Kubernetes cluster is read-only: create, change and "
        "delete pods, claims, nodes and namespaces in the cluster, for instance with kubectl",
        problem=lambda: controller.problem,
        warnings=lambda: controller.warnings,
        leads=lambda: controller.leads,
        choose=choose,
        collectors=(ControllerMetrics(controller),),
    )

    async def run() -> None:
        service = Service(
            controller.cache.journal,
            settings,
            pages=StaticPages(),
            routes=routes(),
            source=source,
            rehearse=rehearse_with(None),
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
