"""``python -m slicewise.agent``: the agent with nothing but Python and NVML."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from slicewise.agent.agent import Options, run
from slicewise.agent.logs import set_up_logs
from slicewise.agent.nvml import Nvml
from slicewise.agent.text import discover
from slicewise.core.errors import SlicewiseError


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        prog="python -m slicewise.agent",
        description="Make the MIG instances of this node as the scheduler decides.",
    )
    add = made.add_argument
    add("--server", metavar="URL", help="the service; several processes of it with commas between")
    add("--token-file", metavar="FILE", type=Path, help="file with this node's token")
    add("--state", metavar="DIR", type=Path, default=Options.state, help="folder for its records")
    add("--cdi", metavar="DIR", type=Path, default=Options.cdi,
        help="folder for CDI specifications")  # fmt: skip
    add("--enable-mig", metavar="UUID", action="append", default=[],
        help="switch MIG mode on for this GPU; may be repeated")  # fmt: skip
    add("--ca", metavar="FILE", type=Path, help="certificates the service's is checked against")
    add("--ignore-manager", metavar="NAME", action="append", default=[],
        help="work although this other MIG manager is here; may be repeated")  # fmt: skip
    add("--json-logs", action="store_true", help="log lines as JSON")
    add("--discover", action="store_true", help="print what the driver offers, and change nothing")
    add("--json", action="store_true", help="with --discover: print JSON")
    return made


def start(
    server: str | None,
    token_file: Path | None,
    state: Path,
    cdi: Path,
    enable_mig: Sequence[str],
    ca: Path | None,
    ignore_manager: Sequence[str],
    json_logs: bool,
) -> int:
    """Run the agent as these options say."""
    if not server:
        raise SlicewiseError("--server URL is needed, or --discover to look only")
    if token_file is None:
        raise SlicewiseError(
            "--token-file FILE is needed: a token of role agent, made by `slicewise tokens`"
        )
    set_up_logs(json_logs)
    options = Options(server, token_file, state, cdi, tuple(enable_mig), ca, tuple(ignore_manager))
    return run(options, Nvml)


def look(as_json: bool) -> str:
    """What the driver offers."""
    driver = Nvml()
    try:
        return discover(driver, as_json)
    finally:
        driver.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; what went wrong is one line."""
    given = parser().parse_args(arguments)
    try:
        if given.discover:
            sys.stdout.write(look(given.json))
            sys.stdout.flush()
            return 0
        if given.json:
            raise SlicewiseError("--json goes with --discover")
        return start(
            given.server, given.token_file, given.state, given.cdi, given.enable_mig, given.ca,
            given.ignore_manager, given.json_logs,
        )  # fmt: skip
    except SlicewiseError as error:
        sys.stderr.write(f"slicewise: error: {' '.join(str(error).split())}\n")
        return 2
    except BrokenPipeError:  # What reads the output has gone: the status any tool has then.
        sys.stdout = None
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
