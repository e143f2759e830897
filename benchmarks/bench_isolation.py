"""Measure the effect of one caller's flood of requests on another tenant.

Starts a real `slicewise serve` on SQLite with full sync, registers 10,048 GPUs with 20,000
allocations, and measures the latency of a quiet tenant's writes: alone, and during each flood, in
one run. Every ratio is to the quiet tenant alone, measured right before the flood.

The quiet tenant, a reader of /healthz and the flood are separate processes. Each connection sends
its next request when the last is answered. The flood runs at a lower priority, to keep the cost of
generating it out of the result. `--quick` takes seconds on a small cluster, `--json` prints all
figures, and `--source DIR` measures slicewise from another checkout.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODEL, NODE_GPUS = "A100-80GB", 8
PROFILES = ("1g.10gb", "2g.20gb", "1g.10gb", "3g.40gb")
TARGET_RATIO, TARGET_HEALTH_MS = 10.0, 100.0
QUIET_PAUSE, HEALTH_PAUSE = 0.01, 0.025
LIMIT = 1000
"""Default rate limit of a tenant, in requests per second."""


# Requests and clients


def message(method: str, path: str, token: str, body: object = None) -> bytes:
    """Encode an HTTP request."""
    text = "" if body is None else json.dumps(body)
    content = f"content-type: application/json\r\ncontent-length: {len(text)}\r\n" if text else ""
    auth = f"authorization: Bearer {token}\r\n" if token else ""
    return f"{method} {path} HTTP/1.1\r\nhost: bench\r\n{auth}{content}\r\n{text}".encode()


Script = Iterator[bytes]


def submits(token: str, holds: list[str]) -> Script:
    """Create an allocation, then release it."""
    for profile in itertools.cycle(PROFILES):
        while holds:
            yield message("DELETE", f"/v1/allocations/{holds.pop()}", token)
        yield message("POST", "/v1/allocations", token, {"profile": profile})


def batches(token: str, holds: list[str]) -> Script:
    """Create 50 allocations at once, then release them."""
    body = {"allocations": [{"profile": "1g.10gb"}] * 50}
    while True:
        while holds:
            yield message("DELETE", f"/v1/allocations/{holds.pop()}", token)
        yield message("POST", "/v1/allocations/batch", token, body)


def reads(path: str) -> Callable[[str, list[str]], Script]:
    """Repeat the same read."""
    return lambda token, holds: itertools.repeat(message("GET", path, token))


def compares(token: str, holds: list[str]) -> Script:
    """Compare policies, with another seed each time."""
    while True:
        seed = random.randrange(1 << 30)
        yield message("GET", f"/v1/compare?gpus=64&steps=500&seed={seed}", token)


def dry_runs(token: str, holds: list[str]) -> Script:
    """Dry-run a request with eight policies and all alternatives."""
    names = ("mfi", "mfi-overlap", "first-fit", "best-fit", "worst-fit", "least-lost")
    query = "&".join(f"policy={name}" for name in (*names, "peer-nvidia-dra", "mfi"))
    path = f"/v1/allocations/dry-run?alternatives=50&{query}"
    return itertools.repeat(message("POST", path, token, {"profile": "1g.10gb"}))


def guesses(token: str, holds: list[str]) -> Script:
    """Send random tokens."""
    while True:
        yield message("GET", "/v1/whoami", f"sw_{random.randbytes(16).hex()}")


def hellos(token: str, holds: list[str]) -> Script:
    """Start an agent session, with another geometry each time."""
    for number in itertools.count(random.randrange(1 << 30)):
        profiles = [
            {"name": f"{n}g.{n}{number % 997}gb", "size": n, "compute": n, "memory_gb": 10 * n}
            | {"starts": list(range(8 - n + 1))}
            for n in (1, 2, 3)
        ]
        geometry = {"model": f"X{number}", "slices": 8, "compute": 7, "profiles": profiles}
        yield message(
            *("POST", "/v1/agent/hello", token),
            {
                "boot": "b",
                "agent": "0",
                "driver": "0",
                "model": f"X{number}",
                "geometry": geometry | {"memory_gb": 80},
                "gpus": [{"uuid": "GPU-bench", "mig": True}],
            },
        )


SCRIPTS: dict[str, Callable[[str, list[str]], Script]] = {
    "submits": submits,
    "batches": batches,
    "cluster": reads("/v1/cluster?gpus=true"),
    "lists": reads("/v1/allocations?limit=1000"),
    "labels": reads("/v1/allocations?label=x:y"),
    "history": reads("/v1/allocations?state=released&label=x:y"),
    "compares": compares,
    "dry runs": dry_runs,
    "streams": reads("/v1/events?after=0"),
    "guesses": guesses,
    "hellos": hellos,
    "health": reads("/healthz"),
}


class Client(asyncio.Protocol):
    """One connection that sends a request, waits for the answer, pauses, and repeats."""

    def __init__(self, spec: dict[str, Any], tally: Tally, token: str) -> None:
        self._holds: list[str] = []
        self._script = SCRIPTS[spec["script"]](token, self._holds)
        self._pause: float = spec["pause"]
        self._tally = tally
        self._buffer = bytearray()
        self._whole = 0
        self._sent = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """Reconnect, as a stubborn flood would."""
        self._tally.cut += 1

    def _ask(self) -> None:
        if not self._transport.is_closing():
            self._sent = time.perf_counter()
            self._transport.write(next(self._script))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._whole:
            head = self._buffer.find(b"\r\n\r\n")
            if head < 0:
                return
            at = self._buffer.find(b"content-length: ", 0, head)
            if at < 0:  # a stream never completes
                self._tally.streamed += len(data)
                self._buffer.clear()
                return
            length = int(self._buffer[at + 16 : self._buffer.find(b"\r\n", at)])
            self._whole = head + 4 + length
        if len(self._buffer) < self._whole:
            return
        status = int(self._buffer[9:12])
        self._tally.count(time.perf_counter() - self._sent, status)
        if status == 201:
            body = json.loads(self._buffer[self._buffer.find(b"\r\n\r\n") :])
            self._holds += [one["id"] for one in body.get("allocations", [body])]
        self._buffer.clear()
        self._whole = 0
        asyncio.get_running_loop().call_later(self._pause, self._ask)


class Tally:
    """Statuses and latencies of the answers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.statuses: Counter[int] = Counter()
        self.streamed = 0
        self.cut = 0

    def count(self, seconds: float, status: int) -> None:
        self.seconds.append(seconds)
        self.statuses[status] += 1

    def result(self) -> dict[str, Any]:
        found = sorted(self.seconds)
        at = {
            p: found[min(len(found) - 1, len(found) * p // 100)] if found else 0 for p in (50, 99)
        }
        return {
            "requests": len(found),
            "statuses": dict(self.statuses),
            "streamed": self.streamed,
            "cut": self.cut,
            "p50": 1e3 * at[50],
            "p99": 1e3 * at[99],
            "max": 1e3 * found[-1] if found else 0.0,
        }


async def ask(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the clients of a specification for its duration."""
    loop, tally = asyncio.get_running_loop(), Tally()
    tokens = itertools.cycle(spec["tokens"])
    clients = []
    for _ in range(spec["clients"]):
        made = lambda: Client(spec, tally, next(tokens))  # noqa: E731
        clients.append((await loop.create_connection(made, *spec["address"]))[0])
    await asyncio.sleep(spec["seconds"])
    result = tally.result()
    for transport in clients:
        transport.abort()
    return result


# Server


class Server:
    """A service process with a populated cluster."""

    def __init__(self, folder: Path, source: Path) -> None:
        run = "from slicewise.cli.main import run; run()"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", run, "serve", "--data", str(folder)),
                *("--listen", "127.0.0.1:0", "--set", "log.level=error"),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(source / "src")},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if "leading at" not in line:
            raise SystemExit("the server did not start")
        host, port = line.split("http://")[1].split(",")[0].split(":")
        self.address = host, int(port)
        self._admin = (folder / "admin-token").read_text().strip()

    def ask(self, method: str, path: str, body: object = None, token: str = "") -> Any:
        """Send a request, as the admin by default."""
        headers = {"authorization": f"Bearer {token or self._admin}"}
        if body is not None:
            headers["content-type"] = "application/json"
        connection = http.client.HTTPConnection(*self.address, timeout=120)
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        if answer.status >= 400:
            raise SystemExit(f"{method} {path}: {text}")
        return json.loads(text)

    def populate(self, gpus: int, allocations: int) -> None:
        """Register nodes and tenants, and place the busy tenants' allocations."""
        for number in range(gpus // NODE_GPUS):
            body = {"name": f"node-{number:05}", "model": MODEL, "gpus": NODE_GPUS}
            self.ask("POST", "/v1/nodes", body)
        free = {"requests_per_second": 1e6}
        for name, quota in (("quiet", {}), ("busy", {}), ("greedy", free)):
            self.ask("POST", "/v1/tenants", {"name": name, "quota": quota})
        token = self.token(role="tenant", tenant="busy")
        for _ in range(allocations // 100):
            some = [
                {"profile": PROFILES[i % len(PROFILES)], "labels": {"x": "z", "team": str(i % 7)}}
                for i in range(100)
            ]
            self.ask("POST", "/v1/allocations/batch", {"allocations": some}, token)

    def token(self, **terms: str) -> str:
        """Issue a token."""
        made: str = self.ask("POST", "/v1/tokens", terms)["token"]
        return made

    def memory(self) -> float:
        """Return the peak resident memory in MB since the last call."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")
        (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024

    def processor_seconds(self) -> float:
        """Processor time of the service so far, user and system together."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


class Process:
    """Clients in a separate process, for one measurement."""

    def __init__(self, spec: dict[str, Any], nice: int = 0) -> None:
        self._process = subprocess.Popen(
            ["nice", "-n", str(nice), sys.executable, __file__, "--ask", json.dumps(spec)],
            stdout=subprocess.PIPE,
            text=True,
        )

    def result(self) -> dict[str, Any]:
        """Wait for the process and return its result."""
        out, _ = self._process.communicate(timeout=600)
        said: dict[str, Any] = json.loads(out)
        return said


# Measurements


def floods(server: Server) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Return every flood: its name, and the clients that produce it."""
    busy = [server.token(role="tenant", tenant="busy")]
    greedy = [server.token(role="tenant", tenant="greedy")]
    agents = [server.token(role="agent", node=f"hostile-{n}") for n in range(4)]

    def clients(script: str, count: int, tokens: list[str], pause: float = 0.0) -> dict[str, Any]:
        return {"script": script, "clients": count, "tokens": tokens, "pause": pause}

    yield "submits at the limit", [clients("submits", 40, busy, 40 / LIMIT)]
    yield "submits beyond the limit", [clients("submits", 100, busy)]
    yield "submits without limit", [clients("submits", 100, greedy)]
    yield "cluster reads", [clients("cluster", 100, busy)]
    yield "list reads", [clients("lists", 100, busy)]
    yield "label filters", [clients("labels", 100, busy)]
    yield "history reads", [clients("history", 100, busy)]
    yield "batches", [clients("batches", 20, greedy)]
    yield "dry runs", [clients("dry runs", 100, busy)]
    yield "compare", [clients("compares", 100, busy)]
    streams = [clients("streams", 32, busy), clients("submits", 40, greedy, 40 / LIMIT)]
    yield "event streams", streams
    yield "bad tokens", [clients("guesses", 100, [""])]
    yield "agent hellos", [clients("hellos", 20, agents)]


def measure(server: Server, seconds: float, flood: list[dict[str, Any]], nice: int = 10) -> Any:
    """Measure the quiet tenant, health checks and memory during a flood."""
    address = {"address": server.address}
    begun = [
        Process(spec | address | {"seconds": seconds + 2.0}, nice) for spec in flood
    ]  # before and after the other clients
    time.sleep(1.0 if flood else 0.0)
    server.memory()
    rest = {"clients": 1, "seconds": seconds, **address}
    token = [server.token(role="tenant", tenant="quiet")]
    quiet = Process({"script": "submits", "tokens": token, "pause": QUIET_PAUSE, **rest})
    health = Process({"script": "health", "tokens": [""], "pause": HEALTH_PAUSE, **rest})
    found = {"quiet": quiet.result(), "health": health.result(), "memory": server.memory()}
    return found | {"flood": [process.result() for process in begun]}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements."""
    found: dict[str, Any] = {"gpus": options.gpus, "allocations": options.allocations, "floods": {}}
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        Server(Path(folder), options.source) as server,
    ):
        server.populate(options.gpus, options.allocations)
        for name, flood in floods(server):
            if options.only and options.only not in name:
                continue
            if not options.json:
                print(f"measuring: {name}", file=sys.stderr, flush=True)
            alone = measure(server, options.seconds, [])
            during = measure(server, options.seconds, flood)
            found["floods"][name] = {"alone": alone, "during": during}
    return found


def rows(found: dict[str, Any]) -> Iterator[str]:
    """Yield the rows of the table."""
    yield f"{found['gpus']:,} GPUs, {found['allocations']:,} allocations; milliseconds"
    yield (
        f"  {'':25} {'quiet alone':>13} {'during the flood':>17} {'p99':>6}  {'health':>7} "
        f"{'memory':>7}  the flood's"
    )
    yield (
        f"  {'':25} {'p50':>6} {'p99':>6} {'p50':>9} {'p99':>7} {'ratio':>6}  {'max':>7} "
        f"{'MB':>7}  answers a second"
    )
    for name, pair in found["floods"].items():
        alone, during = pair["alone"]["quiet"], pair["during"]["quiet"]
        ratio = during["p99"] / alone["p99"] if alone["p99"] else float("nan")
        health = pair["during"]["health"]["max"]
        statuses: Counter[str] = Counter()
        for one in pair["during"]["flood"]:
            statuses.update(one["statuses"])
        rate = sum(statuses.values()) / (found["seconds"] + 2.0)
        seen = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
        missed = [] if ratio <= TARGET_RATIO else ["p99 missed"]
        missed += [] if health <= TARGET_HEALTH_MS else ["health missed"]
        yield (
            f"  {name:25} {alone['p50']:6.1f} {alone['p99']:6.1f} {during['p50']:9.1f} "
            f"{during['p99']:7.1f} {ratio:6.1f}  {health:7.1f} {pair['during']['memory']:7.0f}  "
            f"{rate:.0f} ({seen}) {', '.join(missed)}"
        )


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--gpus", type=int, default=10_048)
    parser.add_argument("--allocations", type=int, default=20_000)
    parser.add_argument("--only", help="only floods with this text in their name")
    parser.add_argument("--folder", type=Path, help="folder of the database (on a real disk)")
    parser.add_argument("--source", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--quick", action="store_true", help="short, on 800 GPUs")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        print(json.dumps(asyncio.run(ask(json.loads(options.ask)))))
        return
    if options.quick:
        options.seconds, options.gpus, options.allocations = 1.0, 800, 1000
    found = run(options) | {"seconds": options.seconds}
    print(json.dumps(found, indent=2) if options.json else "\n".join(rows(found)))


if __name__ == "__main__":
    main()
