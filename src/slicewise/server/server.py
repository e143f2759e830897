"""Run the HTTP service on a socket until a signal stops it: listener, TLS, graceful shutdown."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Callable

import uvicorn

from slicewise.config.logs import logger
from slicewise.config.settings import Settings
from slicewise.config.values import Address
from slicewise.core.errors import SlicewiseError
from slicewise.server.limits import Connections, raise_file_limit
from slicewise.server.protocol import guarded
from slicewise.server.service import Service

log = logger()

_SHUTDOWN_SECONDS = 30
"""Time for running requests to complete."""
_BACKLOG = 2048


def listening(address: Address) -> socket.socket:
    """A listening socket at this address."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(tuple(address))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise SlicewiseError(f"listen: cannot listen on {address}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket, settings: Settings) -> str:
    """The URL of a listening socket, with its actual port."""
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{Address(settings.listen.host, listener.getsockname()[1])}"


def reached_at(url: str) -> str:
    """The URL for other hosts: the host name in place of a wildcard address."""
    for wildcard in ("//0.0.0.0:", "//[::]:"):
        url = url.replace(wildcard, f"//{socket.gethostname()}:")
    return url


async def serve(service: Service, listener: socket.socket, ready: Callable[[str], None]) -> None:
    """Run a service until a signal or a failure ends it; ``ready`` is called with its URL."""
    settings = service.settings
    url = url_of(listener, settings)
    try:
        server = _Server(_config(service))
    except SlicewiseError:
        listener.close()
        raise
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled.set)
    log.info("metrics", access="public" if settings.metrics_public else "with a token")
    # Listen before the journal has been read, so that health probes are answered meanwhile.
    serving = asyncio.create_task(server.serve([listener]))
    starting = asyncio.create_task(service.start(settings.advertise or reached_at(url)))
    ending = asyncio.create_task(signalled.wait())
    failing = asyncio.create_task(service.failed.wait())
    try:
        await asyncio.wait({starting, ending, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            ready(url)
            await asyncio.wait({ending, failing, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        log.info("stopping")
        for task in (starting, ending, failing):
            task.cancel()
        service.close_streams()
        server.should_exit = True
        await serving
        await service.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if service.runtime.failure is not None:
        raise SlicewiseError(service.runtime.failure)


class _Server(uvicorn.Server):
    """A uvicorn server that installs no signal handlers."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)


def _config(service: Service) -> uvicorn.Config:
    settings = service.settings
    authority = settings.tls_client_ca or settings.extender_client_ca
    asked = ssl.CERT_REQUIRED if settings.tls_client_required else ssl.CERT_OPTIONAL
    try:
        config = uvicorn.Config(
            service.app,
            http=guarded(
                settings.head_bytes,
                service.context.metrics.count_malformed,
                Connections(raise_file_limit(settings.connections)),
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            headers=[("x-content-type-options", "nosniff")],
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            # A trusted client certificate replaces a token.
            ssl_ca_certs=None if authority is None else str(authority),
            ssl_cert_reqs=ssl.CERT_NONE if authority is None else asked,
        )
        config.load()
    except OSError as error:  # an SSLError is one
        own = "tls.client_ca" if settings.tls_client_ca else "extender.client_ca"
        keys = "tls.cert, tls.key" + ("" if authority is None else f", {own}")
        raise SlicewiseError(f"{keys}: cannot be used: {error}") from None
    return config
