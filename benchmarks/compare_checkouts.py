"""Compare the rate of durable requests of this checkout with another one.

    python -m benchmarks.compare_checkouts ../old

Each checkout serves from its own sources, on SQLite with full sync and 10,000 GPUs. The load is
that of bench_service.py. Rounds alternate, so other activity on the machine affects both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bench_isolation import Server

HERE = Path(__file__).resolve().parents[1]
TENANT = "greedy"
"""A tenant without a rate limit."""


class Load:
    """The load generator process."""

    def __init__(self) -> None:
        self._runs = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("service_load.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rate(self, server: Server, token: str, clients: int, seconds: float) -> float:
        """Measure the requests per second of a server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        spec = {
            "what": "durable",
            "clients": clients,
            "seconds": seconds,
            "address": server.address,
            "host": "bench",
            "token": token,
            "run": f"{id(server)}-{next(self._runs)}",
        }
        print(json.dumps(spec), file=self._process.stdin, flush=True)
        said: dict[str, Any] = json.loads(self._process.stdout.readline())
        if set(said["statuses"]) - {"200", "201"}:
            raise SystemExit(f"unexpected answers: {said['statuses']}")
        return float(said["per_second"])

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def main() -> None:
    """Measure both checkouts and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--clients", default="8,32,128")
    parser.add_argument("--gpus", type=int, default=10_000)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(Path(folder) / "here", HERE) as here,
        Server(Path(folder) / "other", options.other) as other,
        Load() as load,
    ):
        tokens = {}
        for server in (here, other):
            server.populate(options.gpus, 10_000)
            tokens[server] = server.token(role="tenant", tenant=TENANT)
        print("clients  here  other  requests/s (medians)   here/other by round")
        print("processor time of the service in us a request is less sensitive to other load")
        for clients in map(int, options.clients.split(",")):
            rates: dict[Server, list[float]] = {here: [], other: []}
            used: dict[Server, list[float]] = {here: [], other: []}
            for number in range(options.rounds):
                for server in (here, other) if number % 2 else (other, here):
                    before = server.processor_seconds()
                    rate = load.rate(server, tokens[server], clients, options.seconds)
                    spent = server.processor_seconds() - before
                    rates[server].append(rate)
                    used[server].append(1e6 * spent / (rate * options.seconds))
            ratios = [a / b for a, b in zip(rates[here], rates[other], strict=True)]
            print(
                f"{clients:7} {statistics.median(rates[here]):6.0f} "
                f"{statistics.median(rates[other]):6.0f}   ratio {statistics.median(ratios):.2f} "
                f"({', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))}), "
                f"of the best {max(rates[here]) / max(rates[other]):.2f}   processor time "
                f"{statistics.median(used[here]):.0f} us, {statistics.median(used[other]):.0f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()
