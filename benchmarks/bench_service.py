"""Measure durable requests per second, relative to the most that the HTTP stack could answer.

Starts a real `slicewise serve` on SQLite with full sync, registers 10,000 GPUs, and loads it from a
second process over persistent HTTP/1.1 connections. Each connection sends its next request when the
last is answered. Every ratio is between two measurements of the same run:

- durable allocate and release, against the same requests to an endpoint of the same stack and
  process that does everything except deciding and storing;
- group commit, against a commit for every request.

service_load.py has the clients, service_no_op.py the endpoint, service_writer.py the commit loop
without HTTP. `--quick` takes seconds, `--json` prints all figures, and `--profile` prints where the
server spends its time.
"""

from __future__ import annotations

import argparse
import cProfile
import http.client
import itertools
import json
import os
import platform
import pstats
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from slicewise.cli import main as cli
from slicewise.runtime import runtime as runtime
from slicewise.runtime.commit_loop import MAX_BATCH, CommitLoop
from slicewise.server import service
from slicewise.server.routes.table import ROUTES

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script sees only its own folder
from benchmarks.service_no_op import no_op_routes
from benchmarks.service_writer import (
    MODEL,
    NODE_GPUS,
    PROFILES,
    WARM_UP_SECONDS,
    ProfiledWriter,
    measure_writer,
)

TENANT = "acme"
TARGET_RATIO, TARGET_GROUP = 0.5, 5.0
GROUP, TRANSACTION = "group", "transaction"
SINGLE = {
    TRANSACTION: "a commit for every request",
}
NO_OP, BARE, WHOAMI, DURABLE = "no-op", "bare", "whoami", "durable"
WITHOUT_KEY = "durable without key"
WHAT = {
    NO_OP: "the same POST and DELETE by the same handlers; nothing decided, nothing stored",
    BARE: "the same, and no key, no digest, and always the same bytes for an answer",
    WHOAMI: "GET /v1/whoami: no body, and hardly an answer",
    DURABLE: "POST /v1/allocations with an Idempotency-Key, then DELETE it, each durable",
    WITHOUT_KEY: "the same without an Idempotency-Key",
}


# The server, plain or instrumented


def serve_instrumented(how: str, arguments: list[str]) -> None:
    """Serve with group commit, with a commit for every request, or with a profiled event loop."""
    setattr(service, "ROUTES", (*ROUTES, *no_op_routes()))  # noqa: B010 - it is no export
    if how in (GROUP, *SINGLE):
        if how in SINGLE:
            single = partial(CommitLoop, max_batch=1)
            setattr(runtime, "CommitLoop", single)  # noqa: B010 - it is no export
        cli.run(arguments)
    profile = cProfile.Profile()

    def end(*_: object) -> None:
        profile.disable()
        profile.dump_stats(how)

    signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
    signal.signal(signal.SIGUSR2, end)
    cli.run(arguments)


class Server:
    """A service process."""

    def __init__(self, folder: Path, how: str = GROUP) -> None:
        script = [__file__, "--serve-instrumented", how]
        settings = ("limits.requests_per_second=1000000", "log.level=warning")
        self._process = subprocess.Popen(
            [
                *(sys.executable, *script, "serve", "--data", str(folder)),
                *("--listen", "127.0.0.1:0"),
                *itertools.chain.from_iterable(("--set", setting) for setting in settings),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "leading at" not in line:
            raise SystemExit("the server did not start")
        self.host = line.split("http://")[1].split(",")[0]
        self.address = self.host.split(":")[0], int(self.host.split(":")[1])
        self._admin = (folder / "admin-token").read_text().strip()
        self.token = ""
        """Token of the tenant that sends the load, once it exists."""
        self._connection = http.client.HTTPConnection(*self.address)

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send a request as the admin."""
        headers = {"authorization": f"Bearer {self._admin}", "content-type": "application/json"}
        content = None if body is None else json.dumps(body)
        self._connection.request(method, path, content, headers)
        answer = self._connection.getresponse()
        text = answer.read().decode()
        if answer.status >= 400:
            raise SystemExit(f"{method} {path}: {text}")
        return json.loads(text) if text.startswith("{") else text

    def populate(self, gpus: int, instances: int) -> None:
        """Register nodes and a tenant, and place some allocations."""
        self._connection.connect()
        assert self._connection.sock is not None
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number in range(gpus // NODE_GPUS):
            body = {"name": f"node-{number:05}", "model": MODEL, "gpus": NODE_GPUS}
            self.ask("POST", "/v1/nodes", body)
        self.ask("POST", "/v1/tenants", {"name": TENANT})
        self.token = self.ask("POST", "/v1/tokens", {"role": "tenant", "tenant": TENANT})["token"]
        for _ in range(instances // 100):
            some = [{"profile": PROFILES[i % len(PROFILES)], "tenant": TENANT} for i in range(100)]
            self.ask("POST", "/v1/allocations/batch", {"allocations": some})

    def counters(self) -> dict[str, float]:
        """Return the metrics of the server's batches, and the CPU time of its threads."""
        found = {}
        for line in self.ask("GET", "/metrics").splitlines():
            name, _, value = line.partition(" ")
            if name.startswith(("slicewise_batch_size_", "slicewise_decide_", "slicewise_commit_")):
                found[name] = float(value)
        for task in Path(f"/proc/{self._process.pid}/task").glob("*"):
            spent = int((task / "schedstat").read_text().split()[0]) / 1e9
            kind = "loop" if task.name == str(self._process.pid) else "others"
            found[f"cpu_{kind}"] = found.get(f"cpu_{kind}", 0.0) + spent
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGTERM)
        self._process.wait()


# Measurements


class Bench:
    """Measures points: one kind of request, from a number of clients, for some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._runs = itertools.count()
        self._generator = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("service_load.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def point(self, server: Server, what: str, clients: int) -> dict[str, Any]:
        """Measure one point."""
        assert self._generator.stdin is not None
        assert self._generator.stdout is not None
        spec = {
            "what": what,
            "clients": clients,
            "seconds": self._seconds,
            "address": server.address,
            "host": server.host,
            "token": server.token,
            "run": f"{os.getpid()}-{next(self._runs)}",
        }
        before = server.counters()
        print(json.dumps(spec), file=self._generator.stdin, flush=True)
        found = json.loads(self._generator.stdout.readline())
        after = server.counters()
        spent = {name: after[name] - before.get(name, 0.0) for name in after}
        known = {"200", "201", "409"}
        if not found["requests"] or set(found["statuses"]) - known:
            raise SystemExit(f"{what} with {clients} clients: {found['statuses']}")
        batches = spent["slicewise_batch_size_count"]
        return {"what": what, "clients": clients, **found} | {
            "cpu_us": {
                "loop": 1e6 * spent["cpu_loop"] / found["answered"],
                "others": 1e6 * spent["cpu_others"] / found["answered"],
                "clients": 1e6 * found["generator_seconds"] / found["answered"],
            },
            "batch": spent["slicewise_batch_size_sum"] / batches if batches else None,
            "decide_ms": 1e3 * spent["slicewise_decide_seconds_sum"] / batches if batches else None,
            "commit_ms": 1e3 * spent["slicewise_commit_seconds_sum"] / batches if batches else None,
        }

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._generator.stdin is not None
        self._generator.stdin.close()
        self._generator.wait()


def middle(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the point with the median rate."""
    ordered = sorted(points, key=lambda point: float(point["per_second"]))
    return ordered[(len(ordered) - 1) // 2]


def sync_ms(folder: Path) -> float:
    """Return the median time to make 4 KiB durable on this disk."""
    took = []
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(100):
            begun = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            took.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(took)


# Report


def rows(points: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of the table."""
    yield (
        f"  {'':19} {'clients':>7} {'requests/s':>10}   {'p50':>7} {'p90':>7} {'p99':>7} "
        f"{'max':>7} ms   {'batch':>5}  {'decide':>6} {'commit':>6} ms   "
        f"{'loop':>5} {'others':>6} {'clients':>7} us of a core"
    )
    for point in points:
        ms, cpu = point["ms"], point["cpu_us"]
        batch = (
            f"{'':5}  {'':6} {'':6}   "
            if point["batch"] is None
            else f"{point['batch']:5.1f}  {point['decide_ms']:6.2f} {point['commit_ms']:6.2f}   "
        )
        yield (
            f"  {point['what']:19} {point['clients']:7} {point['per_second']:10,.0f}   "
            f"{ms['p50']:7.2f} {ms['p90']:7.2f} {ms['p99']:7.2f} {ms['max']:7.1f}      {batch}"
            f"   {cpu['loop']:5.1f} {cpu['others']:6.1f} {cpu['clients']:7.1f}"
        )


def verdict(value: float, target: float) -> str:
    """Format a ratio and its target."""
    return f"{value:.2f} (target {target:g}: {'met' if value >= target else 'missed'})"


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (the median is reported)")
    parser.add_argument("--clients", default="1,8,32,128", help="numbers of concurrent clients")
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--instances", type=int, default=10_000, help="placed in advance")
    parser.add_argument("--folder", type=Path, help="folder of the database (on a real disk)")
    parser.add_argument("--quick", action="store_true", help="one short round on 1,000 GPUs")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--profile", action="store_true", help="print a profile instead")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = min(options.seconds, 0.5), 1
        options.gpus, options.instances = min(options.gpus, 1000), min(options.instances, 1000)
    clients = [int(text) for text in options.clients.split(",")]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.profile:
            print("\n".join(profiles(Path(folder), max(clients), options)))
            return
        found = measure(Path(folder), clients, options)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(report(found)))


def measure(folder: Path, clients: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements."""
    found: dict[str, Any] = {
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "load_average": [os.getloadavg()],
            "sync_ms": sync_ms(folder),
        },
        "gpus": options.gpus,
        "instances": options.instances,
    }
    progress = _progress(not options.json)
    most = max(clients)
    with Bench(options.seconds) as bench, ExitStack() as ends:
        progress(f"registering {options.gpus:,} GPUs")
        servers = {how: ends.enter_context(Server(folder / how, how)) for how in (GROUP, *SINGLE)}
        for server in servers.values():
            server.populate(options.gpus, options.instances)
        grid = [
            *((GROUP, what, n) for n in clients for what in (NO_OP, BARE, WHOAMI, DURABLE)),
            (GROUP, WITHOUT_KEY, most),
            *((how, DURABLE, n) for how in SINGLE for n in clients if n > 1),
        ]
        # In rounds, so that other activity on the machine affects all points equally.
        taken: dict[tuple[str, str, int], list[dict[str, Any]]] = {one: [] for one in grid}
        for _, one in itertools.product(range(options.rounds), grid):
            how, what, count = one
            progress(f"{what}, {count} clients" + (f", {SINGLE[how]}" if how in SINGLE else ""))
            taken[one].append(bench.point(servers[how], what, count))
    found["points"] = [middle(some) for (how, *_), some in taken.items() if how == GROUP]
    found["single"] = {
        how: [middle(some) for (server, *_), some in taken.items() if server == how]
        for how in SINGLE
    }
    progress("the commit loop alone")
    found["writer"] = [
        {
            "clients": most,
            "group_per_second": measure_writer(folder / f"g{turn}", MAX_BATCH, most, length),
            "single_per_second": measure_writer(folder / f"s{turn}", 1, most, length),
        }
        for length, turn in itertools.product([options.seconds], range(options.rounds))
    ]
    progress("")
    found["machine"]["load_average"].append(os.getloadavg())
    return found | {"ratios": ratios(found)}


def _progress(shown: bool) -> Callable[[str], None]:
    def progress(text: str) -> None:
        if shown and sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return progress


def ratios(found: dict[str, Any]) -> dict[str, Any]:
    """Return the ratios with a target: durable to no-op, and group commit to single."""
    rate = {(point["what"], point["clients"]): point["per_second"] for point in found["points"]}
    loop = {(point["what"], point["clients"]): point["cpu_us"]["loop"] for point in found["points"]}
    clients = sorted({count for _, count in rate})
    return {
        "durable_to_no_op": {n: rate[DURABLE, n] / rate[NO_OP, n] for n in clients},
        "durable_to_bare": {n: rate[DURABLE, n] / rate[BARE, n] for n in clients},
        "loop_no_op_to_durable": {n: loop[NO_OP, n] / loop[DURABLE, n] for n in clients},
        "best_to_best": max(rate[DURABLE, n] for n in clients)
        / max(rate[NO_OP, n] for n in clients),
        "group_to_single": {
            how: {p["clients"]: rate[DURABLE, p["clients"]] / p["per_second"] for p in points}
            for how, points in found["single"].items()
        },
        "group_to_single_writer": statistics.median(
            pair["group_per_second"] / pair["single_per_second"] for pair in found["writer"]
        ),
    }


def report(found: dict[str, Any]) -> Iterator[str]:
    """Yield the results as text."""
    machine, ratio_of = found["machine"], found["ratios"]
    begun, ended = machine["load_average"]
    yield (
        f"{machine['cores']} cores, load average {begun[0]:.1f} before and {ended[0]:.1f} after, "
        f"Python {machine['python']}, SQLite {machine['sqlite']}"
    )
    yield f"4 KiB are durable after {machine['sync_ms']:.2f} ms (median)"
    yield f"{found['gpus']:,} GPUs, {found['instances']:,} instances placed in advance"
    for name, text in WHAT.items():
        yield f"  {name:19} {text}"
    yield from rows(found["points"])
    for how, points in found["single"].items():
        yield f"  {SINGLE[how]}:"
        yield from itertools.islice(rows(points), 1, None)
    yield "durable requests to no-op requests, at the same number of clients:"
    for clients, ratio in ratio_of["durable_to_no_op"].items():
        other, loop = (
            ratio_of["durable_to_bare"][clients],
            ratio_of["loop_no_op_to_durable"][clients],
        )
        yield (
            f"  {clients:7} {verdict(ratio, TARGET_RATIO)}, to the bare one {other:.2f}; "
            f"by time of the event loop {loop:.2f}"
        )
    yield f"  the best of each: {verdict(ratio_of['best_to_best'], TARGET_RATIO)}"
    for how, by_clients in ratio_of["group_to_single"].items():
        yield f"group commit to {SINGLE[how]}:"
        for clients, ratio in by_clients.items():
            yield f"  {clients:7} {verdict(ratio, TARGET_GROUP)} over HTTP"
    pair = found["writer"][0]
    group = statistics.median(pair["group_per_second"] for pair in found["writer"])
    single = statistics.median(pair["single_per_second"] for pair in found["writer"])
    yield (
        f"  {pair['clients']:7} {verdict(ratio_of['group_to_single_writer'], TARGET_GROUP)} in the "
        f"commit loop alone: {group:,.0f} and {single:,.0f} requests/s"
    )


def profiles(folder: Path, clients: int, options: argparse.Namespace) -> Iterator[str]:
    """Yield profiles of the event loop and of the commit loop; profiling slows both down."""
    kept = folder / "profile"
    with Bench(options.seconds) as bench, Server(folder / "server", str(kept)) as server:
        server.populate(options.gpus, options.instances)
        server.signal(signal.SIGUSR1)
        point = bench.point(server, DURABLE, clients)
        server.signal(signal.SIGUSR2)
    rate = point["per_second"] * (options.seconds + WARM_UP_SECONDS)
    yield f"the event loop, {clients} clients, microseconds a request:"
    yield from _costs(pstats.Stats(str(kept)), rate)
    rate = options.seconds + WARM_UP_SECONDS
    rate *= measure_writer(folder / "w", MAX_BATCH, clients, options.seconds, ProfiledWriter)
    yield f"the commit loop alone, {clients} clients, microseconds a request:"
    yield from _costs(pstats.Stats(ProfiledWriter.profile), rate)


def _costs(stats: pstats.Stats, requests: float) -> Iterator[str]:
    """Yield the functions with the highest own time."""
    known = stats.stats.items()  # type: ignore[attr-defined]
    costly = sorted(known, key=lambda item: -float(item[1][2]))
    yield f"  {'itself':>8} {'with all':>8} {'calls':>6}"
    for (file, line, name), (_, calls, own, whole, _) in costly[:25]:
        where = f"{'/'.join(Path(file).parts[-2:])}:{line}" if line else ""
        yield (
            f"  {1e6 * own / requests:8.1f} {1e6 * whole / requests:8.1f} {calls / requests:6.2f}"
            f"  {name} {where}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve-instrumented"]:
        serve_instrumented(sys.argv[2], sys.argv[3:])
    else:
        main()
