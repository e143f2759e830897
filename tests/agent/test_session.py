"""The service client, the session, and the driver loop with its reports."""

from __future__ import annotations

import os
import random
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.agent.service import TOKEN, TinyService, serving
from tests.agent.simulated import World

from slicewise.agent.agent import (
    ACTIVE_REPORT_SECONDS,
    IDLE_REPORT_SECONDS,
    REFRESH_SECONDS,
    DriverLoop,
    boot_id,
)
from slicewise.agent.desired_state import AnswerError, Desired, parse_desired
from slicewise.agent.mig_mode import MigModeSwitch
from slicewise.agent.reconciler import backoff
from slicewise.agent.service_client import (
    RefusedError,
    ServiceAddress,
    ServiceClient,
    UnreachableError,
)
from slicewise.agent.session import Intervals, Session
from slicewise.core.errors import SlicewiseError

INTERVALS = Intervals(poll=5.0, max_backoff=0.02, refused=0.02, report_delay=0.0)
HELLO: dict[str, object] = {
    "boot": "b", "agent": "1", "driver": "d", "model": "m", "geometry": {}, "disagreements": [],
    "gpus": [],
}  # fmt: skip
REPORT: dict[str, object] = {"gpus": [], "instances": [], "foreign": []}


@pytest.fixture
def tiny() -> Iterator[TinyService]:
    with serving(TinyService()) as service:
        yield service


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


@contextmanager
def open_session(
    service: ServiceAddress, on_desired: Callable[[Desired], None] = lambda desired: None
) -> Iterator[tuple[Session, list[str]]]:
    ends: list[str] = []
    session = Session(
        service,
        on_desired,
        ends.append,
        lambda error: ends.append(repr(error)),
        INTERVALS,
        random.Random(1),
    )
    session.start()
    yield session, ends
    session.close()


def until(tiny: TinyService, done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    with tiny.changed:
        while not done():
            tiny.changed.wait(0.02)
            assert time.monotonic() < end


@pytest.mark.parametrize(
    ("server", "message"),
    [("", "is not the URL"), ("gpu-07:8080", "is not the URL"), ("ftp://x", "is not the URL"),
     ("http://[::1", "is not the URL"), ("http://a..b:80", "is not the URL"),
     (f"http://{'a' * 64}.example", "is not the URL"),
     ("http://x:99999", "has no port"), ("http://x:0", "has no port"),
     ("http://x/a b", "is not the URL"), ("http://x/ü", "is not the URL"),
     ("//x:80", "is not the URL"), ("http://me:secret@x", "has no user, password"),
     ("http://x?a=1", "no user, password, query"), ("http://x/#top", "query or fragment")],
)  # fmt: skip
def test_urls_are_checked(server: str, message: str, token_file: Path) -> None:
    with pytest.raises(SlicewiseError, match=message) as refusal:
        ServiceAddress.parse(server, token_file)
    assert "secret" not in str(refusal.value)


def test_path_of_the_url_is_kept(tiny: TinyService, token_file: Path) -> None:
    client = ServiceClient(ServiceAddress.parse(f"{tiny.url}/mig/", token_file))
    tiny.refusals = [(200, {})]
    client.call("POST", "/v1/agent/hello", HELLO)
    assert tiny.requests == ["POST /mig/v1/agent/hello"]
    client.close()


def test_files_are_checked(tmp_path: Path, token_file: Path) -> None:
    with pytest.raises(SlicewiseError, match="cannot be read"):
        ServiceAddress.parse("http://x", tmp_path / "missing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(SlicewiseError, match="does not hold a token"):
        ServiceAddress.parse("http://x", tmp_path / "empty")
    with pytest.raises(SlicewiseError, match="cannot be used as certificates"):
        ServiceAddress.parse("https://x", token_file, tmp_path / "empty")


def test_call_follows_the_leader(tiny: TinyService, token_file: Path) -> None:
    with serving(TinyService()) as follower:
        follower.refusals = [(503, {"leader": tiny.url, "detail": "not here"})]
        client = ServiceClient(ServiceAddress.parse(follower.url, token_file))
        assert client.call("POST", "/v1/agent/hello", HELLO) == {"session": "s1", "node": "gpu-07"}
        assert len(tiny.hellos) == 1
        client.close()


def test_leader_without_tls_and_redirect_loops_are_not_followed(
    tiny: TinyService, token_file: Path
) -> None:
    client = ServiceClient(ServiceAddress.parse(tiny.url, token_file))
    client._url = "https://x"
    assert not client._follow(tiny.url)
    client._url = tiny.url
    for leader in (tiny.url, "http://[::1", "http://x:99999", "http://a..b"):
        tiny.refusals = [(503, {"leader": leader})]
        with pytest.raises(UnreachableError):
            client.call("GET", "/x")
    with serving(TinyService()) as other:
        tiny.refusals = [(503, {"leader": other.url})] * 9
        other.refusals = [(503, {"leader": tiny.url})] * 9
        with pytest.raises(UnreachableError, match="do not agree on a leader"):
            client.call("GET", "/x")
    client.close()


def test_next_address_is_tried(tiny: TinyService, token_file: Path) -> None:
    client = ServiceClient(ServiceAddress.parse(f"http://127.0.0.1:9, {tiny.url}/", token_file))
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9: it cannot be reached"):
        client.call("POST", "/v1/agent/hello", HELLO)
    client.call("POST", "/v1/agent/hello", HELLO)
    token_file.write_text("revoked")
    with pytest.raises(RefusedError, match="unknown token") as refused:
        client.call("POST", "/v1/agent/hello", HELLO)
    assert refused.value.status == 401
    client.close()


@pytest.mark.parametrize("status", [500, 502, 503])
def test_failing_address_is_named_and_skipped(
    status: int, tiny: TinyService, token_file: Path
) -> None:
    with serving(TinyService()) as broken:
        broken.refusals = [(status, {"detail": "out of order"})] * 9
        client = ServiceClient(ServiceAddress.parse(f"{broken.url},{tiny.url}", token_file))
        with pytest.raises(UnreachableError, match=f"^{broken.url}: out of order"):
            client.call("POST", "/v1/agent/hello", HELLO)
        client.call("POST", "/v1/agent/hello", HELLO)
        client.close()


def test_unexpected_exception_is_reported(tiny: TinyService, token_file: Path) -> None:
    """Otherwise the thread would end and the agent would never poll again."""

    def on_desired(desired: Desired) -> None:
        raise ZeroDivisionError

    with open_session(ServiceAddress.parse(tiny.url, token_file), on_desired) as (session, ends):
        session.hello(HELLO)
        until(tiny, lambda: bool(ends))
        assert ends == ["ZeroDivisionError()"]


def test_desired_state_arrives_and_reports_are_sent(tiny: TinyService, token_file: Path) -> None:
    seen: list[Desired] = []

    def on_desired(desired: Desired) -> None:
        with tiny.changed:
            seen.append(desired)
            tiny.changed.notify_all()

    with open_session(ServiceAddress.parse(tiny.url, token_file), on_desired) as (session, ends):
        session.report(REPORT)  # Sent only after hello.
        session.hello(HELLO)
        until(tiny, lambda: bool(seen) and bool(tiny.reports))
        with tiny.changing() as state:
            state.place("a", "GPU-0", "1g.6gb", 3, 1)
        until(tiny, lambda: len(seen) == 2)
        (item,) = seen[1].instances
        assert (item.part, item.present, item.key.start) == (("a", 0), True, 3)
        # The node changed: a new hello and session, and the report again.
        session.hello(dict(HELLO))
        until(tiny, lambda: len(tiny.hellos) == 2 and len(tiny.reports) == 2 and len(seen) == 3)
        # The service does not know the session, as after a restore: hello again.
        with tiny.changed:
            tiny.refusals = [(409, {"reason": "unknown", "detail": "no such session"})]
        session.report({**REPORT, "foreign": []})
        until(tiny, lambda: len(tiny.hellos) == 3 and len(tiny.reports) == 3)
        assert ends == []


def test_every_hello_is_followed_by_a_report(tiny: TinyService, token_file: Path) -> None:
    """The service places nothing on the node until it has a report."""

    def both(times: int) -> Callable[[], bool]:
        return lambda: len(tiny.hellos) == len(tiny.reports) == times

    with open_session(ServiceAddress.parse(tiny.url, token_file)) as (session, _):
        session.hello(HELLO)
        session.report(REPORT)
        for number in range(1, 6):
            until(tiny, both(number))
            # The session is unknown, and there is no new report.
            with tiny.changing():
                tiny.refusals = [(409, {"reason": "unknown", "detail": "no such session"})]
        until(tiny, both(6))
        posts = [path for path in tiny.requests if path.startswith("POST")]
        assert posts == ["POST /v1/agent/hello", "POST /v1/agent/report"] * 6
        # The session is known, but an older state was restored: the report is missing.
        last = len(tiny.requests) - tiny.requests[::-1].index("POST /v1/agent/hello")
        until(tiny, lambda: tiny.requests[last:].count("GET /v1/agent/desired") >= 2)
        with tiny.changing():
            tiny.seq -= 3
        until(tiny, lambda: len(tiny.reports) == 7)
        assert len(tiny.hellos) == 6


def test_session_continues_after_refusals_and_errors(
    tiny: TinyService, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token_file.write_text("revoked")
    with open_session(ServiceAddress.parse(tiny.url, token_file)) as (session, ends):
        session.hello(HELLO)
        until(tiny, lambda: len(tiny.requests) > 2)
        token_file.write_text(TOKEN)
        until(tiny, lambda: bool(tiny.hellos))
        with tiny.changed:
            tiny.refusals = [(500, {}), (502, {}), (429, {}), (400, {"detail": "no"})]
        session.report(REPORT)
        until(tiny, lambda: bool(tiny.reports))
        assert ends == []
    reported = [record.getMessage() for record in caplog.records]
    refused = [line for line in reported if "the service refused (401): unknown" in line]
    assert len(refused) == 1, "a problem is logged once"


def test_backoff_between_sessions_that_end_at_once(tiny: TinyService, token_file: Path) -> None:
    session = Session(
        ServiceAddress.parse(tiny.url, token_file), lambda desired: None, print, print, INTERVALS
    )
    session.hello(HELLO)
    session.report(REPORT)
    waits = [session._send_next()]
    for _ in range(3):
        tiny.refusals = [(409, {"reason": "unknown", "detail": "say hello again"})]
        assert session._send_next() == 0.0
        waits.append(session._send_next())
    assert waits[:2] == [0.0, 0.0], "no wait after the first one"
    assert all(waits[2:])
    assert len(tiny.hellos) == 4
    session._poll()
    tiny.refusals = [(409, {"reason": "unknown", "detail": "say hello again"})]
    assert [session._send_next(), session._send_next()] == [0.0, 0.0]
    session.close()
    session._report_client.close()
    session._poll_client.close()


def test_superseded_session_ends(tiny: TinyService, token_file: Path) -> None:
    with open_session(ServiceAddress.parse(tiny.url, token_file)) as (session, ends):
        session.hello(HELLO)
        until(tiny, lambda: "GET /v1/agent/desired" in tiny.requests)
        with tiny.changing():
            tiny.session = "another's"
        until(tiny, lambda: bool(ends))
        assert ends == ["a newer session has begun"]


def test_poll_is_held_open_and_interrupted_by_close(tiny: TinyService, token_file: Path) -> None:
    """An idle agent has one open poll and sends nothing else."""
    with open_session(ServiceAddress.parse(tiny.url, token_file)) as (session, _):
        session.hello(HELLO)
        until(tiny, lambda: tiny.requests.count("GET /v1/agent/desired") == 2)
        time.sleep(0.2)
        assert tiny.requests.count("GET /v1/agent/desired") == 2
        assert session.settled
        session.close()
        assert not any(thread.is_alive() for thread in session._threads)


@pytest.mark.parametrize(
    "body",
    [None, [], {}, {"seq": "1", "instances": []}, {"seq": 1, "instances": [3], "evict": []},
     {"seq": 1, "instances": {}, "evict": []}, {"seq": True, "instances": [], "evict": []},
     {"seq": 1, "instances": [{"wanted": "moved"}], "evict": []},
     {"seq": 1, "instances": [{"wanted": "absent"}], "evict": []},
     {"seq": 1, "instances": [], "evict": [{"gpu": "GPU-0"}]}],
)  # fmt: skip
def test_invalid_answers_are_rejected(body: object) -> None:
    with pytest.raises(AnswerError):
        parse_desired(body)


def test_the_notice_of_an_instance_is_read_and_may_be_missing() -> None:
    body = {
        "allocation": "a",
        "index": 0,
        "gpu": "GPU-0",
        "profile": "1g.6gb",
        "start": 0,
        "size": 1,
        "wanted": "present",
    }
    for more, notice in (({}, ""), ({"notice": "2026-11-18T12:00:30Z"}, "2026-11-18T12:00:30Z")):
        desired = parse_desired({"seq": 1, "instances": [body | more]})
        assert [one.notice for one in desired.instances] == [notice]


def test_backoff_grows_and_does_not_overflow() -> None:
    rng = random.Random(1)
    for attempts in (1, 2, 3, 7, 10**6):
        middle = min(2.0 ** min(attempts - 1, 20), 60.0)
        wait = backoff(attempts, rng)
        assert 0.8 * middle <= wait <= 1.2 * middle


def only(items: object) -> dict[str, object]:
    """The only item of a list."""
    assert isinstance(items, list)
    (item,) = items
    assert isinstance(item, dict)
    return item


class LoopHarness:
    """A driver loop that keeps its messages."""

    def __init__(self, world: World, others: Callable[[], list[str]] = lambda: []) -> None:
        self.world = world
        self.hellos: list[dict[str, object]] = []
        self.reports: list[dict[str, object]] = []
        reconciler = world.reconciler
        self.loop = DriverLoop(
            reconciler.node, reconciler, MigModeSwitch(()), boot_id(), lambda: world.now, others
        )
        self.loop.send_hello = self.hellos.append
        self.loop.send_report = lambda body, urgent: self.reports.append(body)

    def step(self, seconds: float = REFRESH_SECONDS) -> None:
        self.loop.run_once()
        self.world.now += seconds


def test_reports_are_sent_on_change_and_at_intervals(tmp_path: Path) -> None:
    world = World(tmp_path)
    harness = LoopHarness(world)
    for _ in range(int(IDLE_REPORT_SECONDS / REFRESH_SECONDS)):
        harness.step()
    assert len(harness.hellos) == 1
    assert len(harness.reports) == 1, "nothing is active and nothing changed"
    harness.step()
    assert harness.reports[1] == harness.reports[0], "an unchanged report is repeated"
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    harness.loop.set_desired(world.service.desired())
    harness.step()
    assert harness.reports[-1]["instances"] != []
    count = len(harness.reports)
    minutes = 5
    for _ in range(int(minutes * ACTIVE_REPORT_SECONDS / REFRESH_SECONDS)):
        harness.step()
    assert len(harness.reports) - count == minutes
    world.hardware.mig["GPU-0"] = False
    world.hardware.wipe("GPU-0")
    harness.step()
    assert len(harness.hellos) == 2, "MIG mode changed"
    reported = only(harness.reports[-1]["instances"])
    assert reported["phase"] == "failed"
    assert "MIG mode off" in str(reported["detail"])


def test_other_manager_stops_all_changes(tmp_path: Path) -> None:
    world = World(tmp_path)
    here = ["nvidia-mig-parted (process 7)"]
    harness = LoopHarness(world, lambda: here)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    harness.loop.set_desired(world.service.desired())
    harness.step()
    assert world.hardware.everything == []
    gpu = only(harness.reports[-1]["gpus"])
    assert "another MIG manager is running: nvidia-mig-parted" in str(gpu["problem"])
    here.clear()
    for _ in range(20):
        harness.step()
    assert len(world.hardware.everything) == 1


def test_loop_wakes_for_a_new_desired_state_and_stops(tmp_path: Path) -> None:
    world = World(tmp_path)
    harness = LoopHarness(world)
    thread = threading.Thread(target=harness.loop.run)
    thread.start()
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)
    harness.loop.set_desired(world.service.desired())
    end = time.monotonic() + 60
    while not world.hardware.everything and time.monotonic() < end:
        time.sleep(0.01)
    harness.loop.stop()
    thread.join()
    assert len(world.hardware.everything) == 1


@pytest.mark.skipif(
    shutil.which("openssl") is None and not os.environ.get("CI"),  # nothing is skipped in CI
    reason="makes a certificate with openssl",
)
def test_certificates_are_checked(token_file: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(TinyService(), context) as tiny:
        untrusting = ServiceClient(ServiceAddress.parse(tiny.url, token_file))
        with pytest.raises(UnreachableError, match="its certificate is not trusted"):
            untrusting.call("POST", "/v1/agent/hello", HELLO)
        with open_session(ServiceAddress.parse(tiny.url, token_file, certificate)) as (session, _):
            session.hello(HELLO)
            session.report(REPORT)
            until(tiny, lambda: bool(tiny.reports) and "GET /v1/agent/desired" in tiny.requests)
