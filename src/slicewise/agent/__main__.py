"""The command ``python -m slicewise.agent``, which needs only Python and NVML."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slicewise.agent.agent import AgentOptions, run
from slicewise.agent.discovery import discover
from slicewise.agent.nvml import Nvml
from slicewise.core.errors import SlicewiseError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slicewise.agent",
        description="Create and destroy the MIG instances of this node as the scheduler decides.",
    )
    add = parser.add_argument
    add("--server", metavar="URL", help="the service; separate several addresses with commas")
    add("--token-file", metavar="FILE", type=Path, help="file with this node's token")
    add("--state", metavar="DIR", type=Path, default=AgentOptions.state,
        help="folder for the agent's records")  # fmt: skip
    add("--cdi", metavar="DIR", type=Path, default=AgentOptions.cdi,
        help="folder for CDI specifications")  # fmt: skip
    add("--enable-mig", metavar="UUID", action="append", default=[],
        help="enable MIG mode on this GPU; may be repeated")  # fmt: skip
    add("--ca", metavar="FILE", type=Path, help="CA certificates to verify the service with")
    add("--client-cert", metavar="FILE", type=Path,
        help="this node's client certificate, in place of a token")  # fmt: skip
    add("--client-key", metavar="FILE", type=Path, help="the key of the client certificate")
    add("--ignore-manager", metavar="NAME", action="append", default=[],
        help="run beside this other MIG manager; may be repeated")  # fmt: skip
    add("--json-logs", action="store_true", help="log lines as JSON")
    add("--discover", action="store_true", help="print what the driver offers; change nothing")
    add("--json", action="store_true", help="with --discover: print JSON")
    return parser


class _TextFormatter(logging.Formatter):
    """The message, after the level if it is a warning or an error; systemd adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        message = " ".join(record.getMessage().split())
        if record.levelno >= logging.ERROR:
            return f"error: {message}"
        return f"warning: {message}" if record.levelno >= logging.WARNING else message


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return json.dumps(
            {
                "timestamp": f"{seconds}.{int(record.msecs):03d}Z",
                "level": record.levelname.lower(),
                "event": " ".join(record.getMessage().split()),
                "logger": record.name,
            }
        )


def _configure_logging(as_json: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else _TextFormatter())
    logger = logging.getLogger("slicewise.agent")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def run_agent(
    server: str | None,
    token_file: Path | None,
    state: Path,
    cdi: Path,
    enable_mig: Sequence[str],
    ca: Path | None,
    ignore_manager: Sequence[str],
    json_logs: bool,
    client_cert: Path | None = None,
    client_key: Path | None = None,
) -> int:
    """Check the options, run the agent, and return its exit status."""
    if not server:
        raise SlicewiseError("--server URL is required, or --discover to print the GPUs only")
    if token_file is None and client_cert is None:
        raise SlicewiseError(
            "--token-file FILE is required: a token of role agent, issued by `slicewise tokens`; "
            "or --client-cert FILE"
        )
    if client_cert is not None and not all(
        one.strip().startswith("https:") for one in server.split(",")
    ):
        raise SlicewiseError("--client-cert needs a --server with https")
    _configure_logging(json_logs)
    options = AgentOptions(
        server, token_file, state, cdi, tuple(enable_mig), ca, tuple(ignore_manager),
        client_cert=client_cert, client_key=client_key,
    )  # fmt: skip
    return run(options, Nvml)


def run_discovery(as_json: bool) -> str:
    """Return what the driver offers, as text or JSON."""
    driver = Nvml()
    try:
        return discover(driver, as_json)
    finally:
        driver.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; errors are printed as one line."""
    options = _parser().parse_args(arguments)
    try:
        if options.discover:
            sys.stdout.write(run_discovery(options.json))
            sys.stdout.flush()
            return 0
        if options.json:
            raise SlicewiseError("--json requires --discover")
        return run_agent(
            options.server, options.token_file, options.state, options.cdi, options.enable_mig,
            options.ca, options.ignore_manager, options.json_logs, options.client_cert,
            options.client_key,
        )  # fmt: skip
    except SlicewiseError as error:
        sys.stderr.write(f"slicewise: error: {' '.join(str(error).split())}\n")
        return 2
    except BrokenPipeError:  # The reader of the output exited: use the customary status.
        sys.stdout = None
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
