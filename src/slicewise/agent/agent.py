"""The running agent: one thread calls the driver, a `Session` talks to the service.

`run` starts both and waits until one of them ends or a signal arrives. `DriverLoop` reads the
driver, reconciles, and reports changes.
"""

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

from slicewise.agent.cdi import Cdi
from slicewise.agent.desired_state import Desired
from slicewise.agent.driver import Driver, DriverError
from slicewise.agent.exclusivity import NodeLock, other_managers
from slicewise.agent.health import Health
from slicewise.agent.mig_mode import MigModeSwitch
from slicewise.agent.node_state import DriverChangedError, GpuIndex, NodeState
from slicewise.agent.reconciler import Phase, Reconciler
from slicewise.agent.record import Record
from slicewise.agent.reports import hello, report, without_measurements
from slicewise.agent.service_client import ServiceAddress
from slicewise.agent.session import Intervals, Session
from slicewise.core.errors import SlicewiseError

_log = logging.getLogger("slicewise.agent")

REFRESH_SECONDS = 10.0
"""How often all GPUs are read."""
ACTIVE_REPORT_SECONDS = 60.0
"""How often measurements are reported while instances are active."""
IDLE_REPORT_SECONDS = 600.0
"""How often an unchanged report is repeated without active instances. A service that was restored
from a backup may lack the last report, and places nothing on the node until it has one."""
MANAGERS_SECONDS = 60.0
"""How often the agent looks for other MIG managers."""
EXIT_OK, EXIT_RESTART, EXIT_SUPERSEDED = 0, 1, 3
"""Exit statuses: stopped on request; must be restarted; another agent uses this node's token."""


@dataclass(frozen=True)
class AgentOptions:
    """The options of an agent."""

    server: str
    token_file: Path | None
    state: Path = Path("/var/lib/slicewise-agent")
    cdi: Path | None = Path("/var/run/cdi")
    enable_mig: Sequence[str] = ()
    ca: Path | None = None
    ignore_managers: Sequence[str] = ()
    intervals: Intervals = field(default_factory=Intervals)
    client_cert: Path | None = None
    client_key: Path | None = None


class DriverLoop:
    """The loop around the driver: read the GPUs, reconcile, report. All driver calls are here."""

    def __init__(
        self,
        node: NodeState,
        reconciler: Reconciler,
        mig_mode: MigModeSwitch,
        boot: str,
        clock: Callable[[], float],
        find_managers: Callable[[], list[str]] = lambda: [],
    ) -> None:
        self.node = node
        self.reconciler = reconciler
        reconciler.on_change = self._report_changes
        self._mig_mode = mig_mode
        self._boot = boot
        self._clock = clock
        self._find_managers = find_managers
        self._next_refresh = -math.inf
        self._next_manager_check = -math.inf
        self._hello_sent: object = None
        """The GPUs and MIG modes of the last hello."""
        self._reported = ""
        """The last report, without measurements."""
        self._reported_at = -math.inf
        self._new_desired: Desired | None = None
        self._wakeup = threading.Condition()
        self._stopping = False
        self.send_hello: Callable[[dict[str, object]], None] = lambda body: None
        self.send_report: Callable[[dict[str, object], bool], None] = lambda body, urgent: None

    def set_desired(self, desired: Desired) -> None:
        """Set a new desired state; safe from any thread."""
        with self._wakeup:
            self._new_desired = desired
            self._wakeup.notify_all()

    def stop(self) -> None:
        """Stop before the next step; safe from any thread."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify_all()

    def run(self) -> None:
        """Run until stopped."""
        while not self._stopping:
            self.run_once()
            with self._wakeup:
                if self._new_desired is None and not self._stopping:
                    # The wait is limited, so a clock that jumps cannot delay the next refresh.
                    left = min(self._next_refresh, self.reconciler.next_due()) - self._clock()
                    self._wakeup.wait(min(max(left, 0.0), REFRESH_SECONDS))

    def run_once(self) -> None:
        """Read the GPUs if that is due, reconcile, and report changes."""
        with self._wakeup:
            desired, self._new_desired = self._new_desired, None
        if desired is not None:
            self.reconciler.set_desired(desired)
        refresh = self._clock() >= self._next_refresh
        if refresh:
            self._refresh()
        self.reconciler.reconcile(refresh, lambda: self._stopping)
        self._report_changes()

    def _report_changes(self, urgent: bool = True) -> None:
        """Report the node's state if it changed, or if the last report is too old."""
        body = report(self.node, self.reconciler)
        state, now = without_measurements(body), self._clock()
        items = self.reconciler.desired.instances
        active = any(self.reconciler.progress(item).phase is Phase.ACTIVE for item in items)
        interval = ACTIVE_REPORT_SECONDS if active else IDLE_REPORT_SECONDS
        if state == self._reported and now < self._reported_at + interval:
            return
        self._reported, self._reported_at = state, now
        self.send_report(body, urgent)

    def _refresh(self) -> None:
        """Read all GPUs, and send hello if the GPUs or their MIG modes changed."""
        self._next_refresh = self._clock() + REFRESH_SECONDS
        if boot_id() != self._boot:
            raise DriverChangedError("the node's boot id changed while the agent was running")
        try:
            self.node.refresh()
        except DriverError as error:
            _log.error("the driver does not answer: %s", error)
            return
        self._check_managers()
        self._mig_mode.attempt(self.node)
        self.node.read_usage()
        body = hello(self.node, self._boot, agent_version())
        if body is None:
            return
        gpus = [(gpu, self.node.mig(gpu)) for gpu in self.node.gpus]
        if gpus != self._hello_sent:
            self._hello_sent = gpus
            self.send_hello(body)

    def _check_managers(self) -> None:
        """Stop changing the GPUs while another MIG manager runs."""
        if self._clock() < self._next_manager_check:
            return
        self._next_manager_check = self._clock() + MANAGERS_SECONDS
        managers = self._find_managers()
        before = self.node.conflict
        names = ", ".join(managers)
        self.node.conflict = f"another MIG manager is running: {names}" if managers else ""
        if self.node.conflict and self.node.conflict != before:
            _log.error("%s; instances are not created or destroyed", self.node.conflict)


def host_root() -> Path:
    """The root of the node's file system; tests replace it."""
    return Path(os.environ.get("SLICEWISE_HOST_ROOT", "/"))


def boot_id_file() -> Path:
    """The file with the node's boot id."""
    return host_root() / "proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """Read the boot id, which changes with every start of the node."""
    path = boot_id_file()
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        raise SlicewiseError(
            f"{str(path)!r} cannot be read, so a restart of the node would go unnoticed"
        ) from None


def agent_version() -> str:
    """The version of this package."""
    try:
        return version("slicewise")
    except PackageNotFoundError:  # Run from a source tree that is not installed.
        return "unknown"


def run(
    options: AgentOptions, open_driver: Callable[[], Driver], stop: threading.Event | None = None
) -> int:
    """Run the agent until it is stopped, and return the exit status."""
    service = ServiceAddress.parse(
        options.server, options.token_file, options.ca, options.client_cert, options.client_key
    )
    lock = NodeLock(options.state, boot_id_file())
    try:
        find_managers = partial(other_managers, options.ignore_managers, host_root())
        managers = find_managers()
        if managers:
            raise SlicewiseError(
                f"another MIG manager is running on this node: {', '.join(managers)}; stop it, or "
                "name it with --ignore-manager if it does not touch these GPUs"
            )
        driver = open_driver()
        try:
            loop = _prepare(options, driver, find_managers)
            return _run(loop, service, options.intervals, stop or threading.Event())
        finally:
            driver.close()
    finally:
        lock.release()


def _prepare(
    options: AgentOptions, driver: Driver, find_managers: Callable[[], list[str]]
) -> DriverLoop:
    """Read the record and the GPUs; raise if the agent cannot work on this node."""
    boot = boot_id()
    record = Record(options.state, boot)
    if record.warning:
        _log.warning("%s", record.warning)
    node = NodeState(driver, GpuIndex(options.state), Health(options.state, boot))
    node.refresh()
    if not node.gpus:
        raise SlicewiseError(node.list_error or "the driver lists no GPU on this node")
    if all(node.is_read(gpu) and node.readings[gpu].mig is None for gpu in node.gpus):
        names = sorted({reading.name for reading in node.readings.values()})
        raise SlicewiseError(f"no GPU of this node supports MIG: {', '.join(names)}")
    mig_mode = MigModeSwitch(options.enable_mig)
    mig_mode.check(node)
    model = node.model()
    for difference in model.differences if model is not None else ():
        _log.warning("%s", difference)
    cdi = None if options.cdi is None else Cdi(options.cdi, node.version, host_root())
    reconciler = Reconciler(node, record, cdi, time.monotonic, random.Random())
    return DriverLoop(node, reconciler, mig_mode, boot, time.monotonic, find_managers)


def _run(
    loop: DriverLoop, service: ServiceAddress, intervals: Intervals, stop: threading.Event
) -> int:
    """Run the driver loop and the session until one of them ends or a signal arrives."""
    outcome: list[tuple[int, str]] = []

    def end(status: int, message: str) -> None:
        outcome.append((status, message))
        stop.set()

    def on_superseded(message: str) -> None:
        end(EXIT_SUPERSEDED, f"another agent has taken over this node: {message}")

    def on_failure(error: BaseException) -> None:
        _log.error("internal error", exc_info=error)
        end(EXIT_RESTART, f"internal error: {error!r}")

    def work() -> None:
        try:
            loop.run()
        except SlicewiseError as error:
            end(EXIT_RESTART, str(error))
        except BaseException as error:
            on_failure(error)

    session = Session(service, loop.set_desired, on_superseded, on_failure, intervals)
    loop.send_hello, loop.send_report = session.hello, session.report
    thread = threading.Thread(target=work, name="agent-driver", daemon=True)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    _log.info("%d GPUs, driver %s", len(loop.node.gpus), loop.node.version)
    session.start()
    thread.start()
    stop.wait()
    loop.stop()
    session.close()
    thread.join(1.0)
    if thread.is_alive():
        _log.warning("exiting while a driver call is still running")
    status, message = outcome[0] if outcome else (EXIT_OK, "stopped; all instances stay")
    _log.log(logging.ERROR if status else logging.INFO, "%s", message)
    return status
