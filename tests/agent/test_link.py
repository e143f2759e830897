"""The talk with the service: leaders, refusals, silence, sessions; reports when there is news."""

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
    FIGURES_SECONDS,
    LOOK_SECONDS,
    REPEAT_SECONDS,
    Worker,
    boot_id,
)
from slicewise.agent.carrying import growing_wait
from slicewise.agent.conversation import Conversation, Pace
from slicewise.agent.link import Link, RefusedError, Service, UnreachableError
from slicewise.agent.migmode import Switch
from slicewise.agent.wanted import AnswerError, Desired, read_desired
from slicewise.core.errors import SlicewiseError

PACE = Pace(poll=5.0, longest=0.02, slow=0.02, linger=0.0)
HELLO: dict[str, object] = {
    "boot": "b", "agent": "1", "driver": "d", "model": "m", "geometry": {}, "disagreements": [],
    "gpus": [],
}  # fmt: skip
NEWS: dict[str, object] = {"gpus": [], "instances": [], "foreign": []}


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
def talking(
    service: Service, wanted: Callable[[Desired], None] = lambda desired: None
) -> Iterator[tuple[Conversation, list[str]]]:
    ends: list[str] = []
    talk = Conversation(
        service, wanted, ends.append, lambda error: ends.append(repr(error)), PACE, random.Random(1)
    )
    talk.start()
    yield talk, ends
    talk.close()


def until(tiny: TinyService, done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    with tiny.changed:
        while not done():
            tiny.changed.wait(0.02)
            assert time.monotonic() < end


@pytest.mark.parametrize(
    ("server", "complaint"),
    [("", "is not the URL"), ("gpu-07:8080", "is not the URL"), ("ftp://x", "is not the URL"),
     ("http://[::1", "is not the URL"), ("http://a..b:80", "is not the URL"),
     (f"http://{'a' * 64}.example", "is not the URL"),
     ("http://x:99999", "has no port"), ("http://x:0", "has no port"),
     ("http://x/a b", "is not the URL"), ("http://x/ü", "is not the URL"),
     ("//x:80", "is not the URL"), ("http://me:secret@x", "has no user, password"),
     ("http://x?a=1", "no user, password, query"), ("http://x/#top", "query or fragment")],
)  # fmt: skip
def test_addresses_are_checked(server: str, complaint: str, token_file: Path) -> None:
    with pytest.raises(SlicewiseError, match=complaint) as refusal:
        Service.named(server, token_file)
    assert "secret" not in str(refusal.value)


def test_a_path_in_front_of_the_service_is_kept(tiny: TinyService, token_file: Path) -> None:
    link = Link(Service.named(f"{tiny.url}/mig/", token_file))
    tiny.refusals = [(200, {})]
    link.call("POST", "/v1/agent/hello", HELLO)
    assert tiny.requests == ["POST /mig/v1/agent/hello"]
    link.close()


def test_files_are_checked(tmp_path: Path, token_file: Path) -> None:
    with pytest.raises(SlicewiseError, match="cannot be read"):
        Service.named("http://x", tmp_path / "missing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(SlicewiseError, match="does not hold a token"):
        Service.named("http://x", tmp_path / "empty")
    with pytest.raises(SlicewiseError, match="cannot be used as certificates"):
        Service.named("https://x", token_file, tmp_path / "empty")


def test_a_call_goes_to_the_leader(tiny: TinyService, token_file: Path) -> None:
    with serving(TinyService()) as follower:
        follower.refusals = [(503, {"leader": tiny.url, "detail": "not here"})]
        link = Link(Service.named(follower.url, token_file))
        assert link.call("POST", "/v1/agent/hello", HELLO) == {"session": "s1", "node": "gpu-07"}
        assert len(tiny.hellos) == 1
        link.close()


def test_nobody_is_led_from_tls_to_none_or_in_circles(tiny: TinyService, token_file: Path) -> None:
    link = Link(Service.named(tiny.url, token_file))
    link._at = "https://x"
    assert not link._go_to(tiny.url)
    link._at = tiny.url
    for leader in (tiny.url, "http://[::1", "http://x:99999", "http://a..b"):
        tiny.refusals = [(503, {"leader": leader})]
        with pytest.raises(UnreachableError):
            link.call("GET", "/x")
    with serving(TinyService()) as other:
        tiny.refusals = [(503, {"leader": other.url})] * 9
        other.refusals = [(503, {"leader": tiny.url})] * 9
        with pytest.raises(UnreachableError, match="do not agree on who leads"):
            link.call("GET", "/x")
    link.close()


def test_one_of_several_addresses_is_enough(tiny: TinyService, token_file: Path) -> None:
    link = Link(Service.named(f"http://127.0.0.1:9, {tiny.url}/", token_file))
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9: it cannot be reached"):
        link.call("POST", "/v1/agent/hello", HELLO)
    link.call("POST", "/v1/agent/hello", HELLO)
    token_file.write_text("revoked")
    with pytest.raises(RefusedError, match="nobody knows this token") as refused:
        link.call("POST", "/v1/agent/hello", HELLO)
    assert refused.value.status == 401
    link.close()


@pytest.mark.parametrize("status", [500, 502, 503])
def test_an_address_that_fails_is_named_and_left(
    status: int, tiny: TinyService, token_file: Path
) -> None:
    with serving(TinyService()) as broken:
        broken.refusals = [(status, {"detail": "out of order"})] * 9
        link = Link(Service.named(f"{broken.url},{tiny.url}", token_file))
        with pytest.raises(UnreachableError, match=f"^{broken.url}: out of order"):
            link.call("POST", "/v1/agent/hello", HELLO)
        link.call("POST", "/v1/agent/hello", HELLO)
        link.close()


def test_a_fault_of_its_own_is_not_silence(tiny: TinyService, token_file: Path) -> None:
    """A thread that ends unheard would leave an agent that looks well and never hears again."""

    def wanted(desired: Desired) -> None:
        raise ZeroDivisionError

    with talking(Service.named(tiny.url, token_file), wanted) as (talk, ends):
        talk.hello(HELLO)
        until(tiny, lambda: bool(ends))
        assert ends == ["ZeroDivisionError()"]


def test_what_is_wanted_arrives_and_news_is_sent(tiny: TinyService, token_file: Path) -> None:
    seen: list[Desired] = []

    def wanted(desired: Desired) -> None:
        with tiny.changed:
            seen.append(desired)
            tiny.changed.notify_all()

    with talking(Service.named(tiny.url, token_file), wanted) as (talk, ends):
        talk.report(NEWS)  # Not before hello.
        talk.hello(HELLO)
        until(tiny, lambda: bool(seen) and bool(tiny.reports))
        with tiny.changing() as office:
            office.place("a", "GPU-0", "1g.6gb", 3, 1)
        until(tiny, lambda: len(seen) == 2)
        (item,) = seen[1].instances
        assert (item.part, item.present, item.key.start) == (("a", 0), True, 3)
        # The node changed: another hello, another session, the report again; nobody is superseded.
        talk.hello(dict(HELLO))
        until(tiny, lambda: len(tiny.hellos) == 2 and len(tiny.reports) == 2 and len(seen) == 3)
        # The service forgot the session, as after a restore: hello again.
        with tiny.changed:
            tiny.refusals = [(409, {"reason": "unknown", "detail": "no such session"})]
        talk.report({**NEWS, "foreign": []})
        until(tiny, lambda: len(tiny.hellos) == 3 and len(tiny.reports) == 3)
        assert ends == []


def test_every_hello_is_followed_by_a_report(tiny: TinyService, token_file: Path) -> None:
    """Until then nothing is placed on the node, so a service that forgets must not wait long."""

    def both(times: int) -> Callable[[], bool]:
        return lambda: len(tiny.hellos) == len(tiny.reports) == times

    with talking(Service.named(tiny.url, token_file)) as (talk, _):
        talk.hello(HELLO)
        talk.report(NEWS)
        for number in range(1, 6):
            until(tiny, both(number))
            # The session is forgotten, and there is nothing new to say.
            with tiny.changing():
                tiny.refusals = [(409, {"reason": "unknown", "detail": "no such session"})]
        until(tiny, both(6))
        spoken = [path for path in tiny.requests if path.startswith("POST")]
        assert spoken == ["POST /v1/agent/hello", "POST /v1/agent/report"] * 6
        # The session is known, and what was said in it is not: an older state was restored.
        last = len(tiny.requests) - tiny.requests[::-1].index("POST /v1/agent/hello")
        until(tiny, lambda: tiny.requests[last:].count("GET /v1/agent/desired") >= 2)
        with tiny.changing():
            tiny.seq -= 3
        until(tiny, lambda: len(tiny.reports) == 7)
        assert len(tiny.hellos) == 6


def test_it_goes_on_after_refusals_and_silence(
    tiny: TinyService, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token_file.write_text("revoked")
    with talking(Service.named(tiny.url, token_file)) as (talk, ends):
        talk.hello(HELLO)
        until(tiny, lambda: len(tiny.requests) > 2)
        token_file.write_text(TOKEN)
        until(tiny, lambda: bool(tiny.hellos))
        with tiny.changed:
            tiny.refusals = [(500, {}), (502, {}), (429, {}), (400, {"detail": "no"})]
        talk.report(NEWS)
        until(tiny, lambda: bool(tiny.reports))
        assert ends == []
    told = [record.getMessage() for record in caplog.records]
    refused = [line for line in told if "the service refuses (401): nobody knows" in line]
    assert len(refused) == 1, "what is wrong is said once"


def test_sessions_that_are_over_at_once_are_not_begun_without_end(
    tiny: TinyService, token_file: Path
) -> None:
    talk = Conversation(
        Service.named(tiny.url, token_file), lambda desired: None, print, print, PACE
    )
    talk.hello(HELLO)
    talk.report(NEWS)
    waits = [talk._speak()]
    for _ in range(3):
        tiny.refusals = [(409, {"reason": "unknown", "detail": "say hello again"})]
        assert talk._speak() == 0.0
        waits.append(talk._speak())
    assert waits[:2] == [0.0, 0.0], "once is no reason to wait"
    assert all(waits[2:])
    assert len(tiny.hellos) == 4
    talk._ask()
    tiny.refusals = [(409, {"reason": "unknown", "detail": "say hello again"})]
    assert [talk._speak(), talk._speak()] == [0.0, 0.0]
    talk.close()
    for link in talk._links:
        link.close()


def test_a_superseded_agent_ends(tiny: TinyService, token_file: Path) -> None:
    with talking(Service.named(tiny.url, token_file)) as (talk, ends):
        talk.hello(HELLO)
        until(tiny, lambda: "GET /v1/agent/desired" in tiny.requests)
        with tiny.changing():
            tiny.session = "another's"
        until(tiny, lambda: bool(ends))
        assert ends == ["a newer session has begun"]


def test_a_poll_is_held_open_and_closed_at_once(tiny: TinyService, token_file: Path) -> None:
    """No busy polling: an idle agent has one poll open, and nothing else is asked."""
    with talking(Service.named(tiny.url, token_file)) as (talk, _):
        talk.hello(HELLO)
        until(tiny, lambda: tiny.requests.count("GET /v1/agent/desired") == 2)
        time.sleep(0.2)
        assert tiny.requests.count("GET /v1/agent/desired") == 2
        assert talk.settled
        talk.close()
        assert not any(thread.is_alive() for thread in talk._threads)


@pytest.mark.parametrize(
    "body",
    [None, [], {}, {"seq": "1", "instances": []}, {"seq": 1, "instances": [3], "evict": []},
     {"seq": 1, "instances": {}, "evict": []}, {"seq": True, "instances": [], "evict": []},
     {"seq": 1, "instances": [{"wanted": "moved"}], "evict": []},
     {"seq": 1, "instances": [{"wanted": "absent"}], "evict": []},
     {"seq": 1, "instances": [], "evict": [{"gpu": "GPU-0"}]}],
)  # fmt: skip
def test_an_answer_that_is_in_doubt_is_refused_whole(body: object) -> None:
    with pytest.raises(AnswerError):
        read_desired(body)


def test_waits_grow_and_do_not_overflow() -> None:
    chance = random.Random(1)
    for attempts in (1, 2, 3, 7, 10**6):
        middle = min(2.0 ** min(attempts - 1, 20), 60.0)
        wait = growing_wait(attempts, chance)
        assert 0.8 * middle <= wait <= 1.2 * middle


def only(items: object) -> dict[str, object]:
    """The one item of a list."""
    assert isinstance(items, list)
    (item,) = items
    assert isinstance(item, dict)
    return item


class Desk:
    """A worker whose words are kept."""

    def __init__(self, world: World, others: Callable[[], list[str]] = lambda: []) -> None:
        self.world = world
        self.hellos: list[dict[str, object]] = []
        self.said: list[dict[str, object]] = []
        carrier = world.carrier
        self.worker = Worker(
            carrier.node, carrier, Switch(()), boot_id(), lambda: world.now, others
        )
        self.worker.say_hello = self.hellos.append
        self.worker.say = lambda body, urgent: self.said.append(body)

    def turn(self, seconds: float = LOOK_SECONDS) -> None:
        self.worker.turn()
        self.world.now += seconds


def test_reports_are_sent_for_news_and_now_and_then_while_something_runs(tmp_path: Path) -> None:
    world = World(tmp_path)
    desk = Desk(world)
    for _ in range(int(REPEAT_SECONDS / LOOK_SECONDS)):
        desk.turn()
    assert len(desk.hellos) == 1
    assert len(desk.said) == 1, "nothing runs and nothing is new"
    desk.turn()
    assert desk.said[1] == desk.said[0], "now and then it is said all the same"
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    desk.worker.want(world.office.desired())
    desk.turn()
    assert desk.said[-1]["instances"] != []
    count = len(desk.said)
    minutes = 5
    for _ in range(int(minutes * FIGURES_SECONDS / LOOK_SECONDS)):
        desk.turn()
    assert len(desk.said) - count == minutes
    world.hardware.mig["GPU-0"] = False
    world.hardware.wipe("GPU-0")
    desk.turn()
    assert len(desk.hellos) == 2, "MIG mode changed"
    told = only(desk.said[-1]["instances"])
    assert told["phase"] == "failed"
    assert "MIG mode off" in str(told["detail"])


def test_another_manager_stops_the_work(tmp_path: Path) -> None:
    world = World(tmp_path)
    here = ["nvidia-mig-parted (process 7)"]
    desk = Desk(world, lambda: here)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    desk.worker.want(world.office.desired())
    desk.turn()
    assert world.hardware.everything == []
    gpu = only(desk.said[-1]["gpus"])
    assert "another MIG manager is at work: nvidia-mig-parted" in str(gpu["problem"])
    here.clear()
    for _ in range(20):
        desk.turn()
    assert len(world.hardware.everything) == 1


def test_a_worker_wakes_for_what_is_wanted_and_stops(tmp_path: Path) -> None:
    world = World(tmp_path)
    desk = Desk(world)
    thread = threading.Thread(target=desk.worker.run)
    thread.start()
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)
    desk.worker.want(world.office.desired())
    end = time.monotonic() + 60
    while not world.hardware.everything and time.monotonic() < end:
        time.sleep(0.01)
    desk.worker.stop()
    thread.join()
    assert len(world.hardware.everything) == 1


@pytest.mark.skipif(
    shutil.which("openssl") is None and not os.environ.get("CI"),  # there nothing is skipped
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
        stranger = Link(Service.named(tiny.url, token_file))
        with pytest.raises(UnreachableError, match="its certificate is not trusted"):
            stranger.call("POST", "/v1/agent/hello", HELLO)
        with talking(Service.named(tiny.url, token_file, certificate)) as (talk, _):
            talk.hello(HELLO)
            talk.report(NEWS)
            until(tiny, lambda: bool(tiny.reports) and "GET /v1/agent/desired" in tiny.requests)
