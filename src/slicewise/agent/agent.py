"""The agent at work: one thread for the driver, and the talk with the service beside it."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slicewise.agent.carrying import Carrier, Phase
from slicewise.agent.cdi import Cdi
from slicewise.agent.conversation import Conversation, Pace
from slicewise.agent.driver import Driver, DriverError
from slicewise.agent.health import Health
from slicewise.agent.link import Service
from slicewise.agent.lock import NodeLock
from slicewise.agent.managers import managers
from slicewise.agent.migmode import Switch
from slicewise.agent.node import DriverChangedError, Node
from slicewise.agent.record import Record
from slicewise.agent.reporting import essence, report
from slicewise.agent.seats import Seats
from slicewise.agent.wanted import Desired
from slicewise.core.errors import SlicewiseError

_log = logging.getLogger("slicewise.agent")

LOOK_SECONDS = 10.0
"""How often the driver is asked what there is; the service is not bothered with it."""
FIGURES_SECONDS = 60.0
"""How often figures are reported while something runs and nothing else is new."""
REPEAT_SECONDS = 600.0
"""How often all is reported once more while nothing runs: a service that was restored from a backup
may have lost what it was told, and takes no instances here before it knows."""
MANAGERS_SECONDS = 60.0
ENDED, AGAIN, SUPERSEDED = 0, 1, 3
"""Exit statuses: asked to end; to be started again; another agent has this node's token."""


@dataclass(frozen=True)
class Options:
    """How an agent is to work."""

    server: str
    token_file: Path
    state: Path = Path("/var/lib/slicewise-agent")
    cdi: Path | None = Path("/var/run/cdi")
    enable_mig: Sequence[str] = ()
    ca: Path | None = None
    ignore_managers: Sequence[str] = ()
    pace: Pace = field(default_factory=Pace)


class Worker:
    """All that touches the driver, in one thread; parts are given so that tests can give others."""

    def __init__(
        self,
        node: Node,
        carrier: Carrier,
        switch: Switch,
        boot: str,
        clock: Callable[[], float],
        others: Callable[[], list[str]] = lambda: [],
    ) -> None:
        self.node = node
        self.carrier = carrier
        self._switch = switch
        self._boot = boot
        self._clock = clock
        self._others = others
        self._next_look = -math.inf
        self._next_others = -math.inf
        self._introduced: object = None
        self._told = ""
        self._told_at = -math.inf
        self._wanted: Desired | None = None
        self._waiting = threading.Condition()
        self._stopping = False
        self.say_hello: Callable[[dict[str, object]], None] = lambda body: None
        self.say: Callable[[dict[str, object], bool], None] = lambda body, urgent: None

    def want(self, desired: Desired) -> None:
        """Take what is wanted; from any thread."""
        with self._waiting:
            self._wanted = desired
            self._waiting.notify_all()

    def stop(self) -> None:
        """Do no further step; from any thread."""
        with self._waiting:
            self._stopping = True
            self._waiting.notify_all()

    def stopping(self) -> bool:
        """Whether no further step is to be done."""
        return self._stopping

    def run(self) -> None:
        """Work until told to stop."""
        while not self._stopping:
            self.turn()
            with self._waiting:
                if self._wanted is None and not self._stopping:
                    # Whatever clocks do, a look is never further away than that.
                    left = min(self._next_look, self.carrier.due()) - self._clock()
                    self._waiting.wait(min(max(left, 0.0), LOOK_SECONDS))

    def turn(self) -> None:
        """Once around: look if it is time, do what is due, tell what is new."""
        with self._waiting:
            desired, self._wanted = self._wanted, None
        if desired is not None:
            self.carrier.take(desired)
        looked = self._clock() >= self._next_look
        if looked:
            self._look()
        self.carrier.round(looked, self.stopping)
        self.tell()

    def tell(self, urgent: bool = True) -> None:
        """Report, if there is anything to."""
        body = report(self.node, self.carrier)
        short, now = essence(body), self._clock()
        standings = [self.carrier.standing(item) for item in self.carrier.desired.instances]
        running = any(standing.phase is Phase.ACTIVE for standing in standings)
        often = FIGURES_SECONDS if running else REPEAT_SECONDS
        if short == self._told and now < self._told_at + often:
            return
        self._told, self._told_at = short, now
        self.say(body, urgent)

    def _look(self) -> None:
        self._next_look = self._clock() + LOOK_SECONDS
        if boot_id() != self._boot:
            raise DriverChangedError("the node's boot id is another than when the agent started")
        try:
            self.node.look()
        except DriverError as error:
            _log.error("the driver does not answer: %s", error)
            return
        self._look_for_others()
        self._switch.attempt(self.node)
        self.node.measure()
        body = self.node.hello(self._boot, agent_version())
        if body is None:
            return
        introduced = [(gpu, self.node.mig(gpu)) for gpu in self.node.gpus]
        if introduced != self._introduced:
            self._introduced = introduced
            self.say_hello(body)

    def _look_for_others(self) -> None:
        if self._clock() < self._next_others:
            return
        self._next_others = self._clock() + MANAGERS_SECONDS
        names = self._others()
        before = self.node.trouble
        self.node.trouble = f"another MIG manager is at work: {', '.join(names)}" if names else ""
        if self.node.trouble and self.node.trouble != before:
            _log.error("%s; nothing is made or destroyed while it is", self.node.trouble)


def host_root() -> Path:
    """The root folder of the node's files: its processes, sockets, units, libraries and boot id."""
    return Path(os.environ.get("SLICEWISE_HOST_ROOT", "/"))


def boot_file() -> Path:
    """Where the node says which start this is."""
    return host_root() / "proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """What changes with every start of the node."""
    path = boot_file()
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        raise SlicewiseError(
            f"{str(path)!r} cannot be read, so a restart of the node could not be noticed"
        ) from None


def agent_version() -> str:
    """The version of this package."""
    try:
        return version("slicewise")
    except PackageNotFoundError:  # Run from its source, without having been installed.
        return "unknown"


def run(options: Options, driver: Callable[[], Driver], stop: threading.Event | None = None) -> int:
    """Run the agent until it is told to stop; the exit status says why it ended."""
    service = Service.named(options.server, options.token_file, options.ca)
    lock = NodeLock(options.state, boot_file())
    try:
        find_others = partial(managers, options.ignore_managers, host_root())
        others = find_others()
        if others:
            raise SlicewiseError(
                f"another MIG manager is at work on this node: {', '.join(others)}; stop it, or "
                "name it with --ignore-manager if it does not touch these GPUs"
            )
        opened = driver()
        try:
            worker = _prepare(options, opened, find_others)
            return _run(worker, service, options.pace, stop or threading.Event())
        finally:
            opened.close()
    finally:
        lock.release()


def _prepare(options: Options, driver: Driver, others: Callable[[], list[str]]) -> Worker:
    """Everything in its place, and refused what cannot work."""
    boot = boot_id()
    record = Record(options.state, boot)
    if record.remark:
        _log.warning("%s", record.remark)
    node = Node(driver, Seats(options.state), Health(options.state, boot))
    node.look()
    if not node.gpus:
        raise SlicewiseError(node.silent or "the driver lists no GPU on this node")
    if all(node.is_read(gpu) and node.seen[gpu].mig is None for gpu in node.gpus):
        names = sorted({reading.name for reading in node.seen.values()})
        raise SlicewiseError(f"no GPU of this node supports MIG: {', '.join(names)}")
    switch = Switch(options.enable_mig)
    switch.check(node)
    finding = node.finding()
    for sentence in finding.disagreements if finding is not None else ():
        _log.warning("%s", sentence)
    cdi = None if options.cdi is None else Cdi(options.cdi, node.version, host_root())
    worker: list[Worker] = []
    carrier = Carrier(
        node, record, cdi, time.monotonic, random.Random(), lambda urgent: worker[0].tell(urgent)
    )
    worker.append(Worker(node, carrier, switch, boot, time.monotonic, others))
    return worker[0]


def _run(worker: Worker, service: Service, pace: Pace, stop: threading.Event) -> int:
    """Work and talk until one of them ends, or a signal comes."""
    outcome: list[tuple[int, str]] = []

    def end(status: int, sentence: str) -> None:
        outcome.append((status, sentence))
        stop.set()

    def superseded(sentence: str) -> None:
        end(SUPERSEDED, f"another agent has taken over this node: {sentence}")

    def failed(error: BaseException) -> None:
        _log.error("the agent has a fault of its own", exc_info=error)
        end(AGAIN, f"a fault of the agent's own: {error!r}")

    conversation = Conversation(service, worker.want, superseded, failed, pace)
    worker.say_hello, worker.say = conversation.hello, conversation.report

    def work() -> None:
        try:
            worker.run()
        except SlicewiseError as error:
            end(AGAIN, str(error))
        except BaseException as error:
            failed(error)

    thread = threading.Thread(target=work, name="agent-driver", daemon=True)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    _log.info("%d GPUs, driver %s", len(worker.node.gpus), worker.node.version)
    conversation.start()
    thread.start()
    stop.wait()
    worker.stop()
    conversation.close()
    thread.join(1.0)
    if thread.is_alive():
        _log.warning("a call to the driver is still under way and is left behind")
    status, sentence = outcome[0] if outcome else (ENDED, "ended; all instances stay as they are")
    _log.log(logging.ERROR if status else logging.INFO, "%s", sentence)
    return status
