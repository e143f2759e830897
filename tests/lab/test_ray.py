"""Sweeps on Ray: a real cluster of two nodes on this machine, and its errors.

Ray runs in separate processes here. Its nodes listen on the loopback interface only, require a
token, and keep their files in a separate folder, so that they disturb no other programs.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slicewise import SlicewiseError, policy
from slicewise.catalog import load_geometry
from slicewise.cli.main import exit_status
from slicewise.lab import ray_executor as on_ray
from slicewise.lab.checkpoint import FILE_NAME
from slicewise.lab.executors import Job
from slicewise.lab.experiment import Steady
from slicewise.lab.fingerprint import digest, made_with
from slicewise.lab.mix import parse_mix
from slicewise.lab.ray_executor import RayExecutor, on_node

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None and not os.environ.get("CI"),  # there nothing is skipped
    reason="the extra [ray] is not installed",
)

SWEEP = """
experiment = "steady"
policies = ["mfi", "first-fit"]
distributions = ["uniform", "bimodal"]
loads = [0.8, 1.0]
gpus = 16
runs = 5
"""

CLUSTER = """
import sys
from ray.cluster_utils import Cluster

ALONE = {"num_cpus": 1, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.1"}

def tell(*words):
    print(*words, flush=True)

def processes(node):
    return [p.process.pid for kind in node.all_processes.values() for p in kind]

cluster = Cluster(initialize_head=True, head_node_args={**ALONE, "include_dashboard": False})
last = cluster.add_node(**ALONE)
tell("started", *processes(cluster.head_node), *processes(last))
tell("ready", cluster.address)
for line in sys.stdin:
    if line.strip() == "add":
        last = cluster.add_node(**ALONE)
        tell("started", *processes(last))
        tell("added", last.node_id)
    else:
        cluster.remove_node(last, allow_graceful=False)
        tell("killed")
cluster.shutdown()
tell("over")
"""


@dataclass
class RayCluster:
    """The process that keeps the nodes, and how to reach them."""

    keeper: subprocess.Popen[str]
    environment: dict[str, str]
    pids: list[int]
    address: str = ""

    def ask(self, command: str, answer: str) -> str:
        """Give a command and wait for its answer."""
        assert self.keeper.stdin is not None
        self.keeper.stdin.write(f"{command}\n")
        self.keeper.stdin.flush()
        return self.wait_for(answer)

    def wait_for(self, answer: str) -> str:
        assert self.keeper.stdout is not None
        for line in self.keeper.stdout:  # Ray may print lines of its own
            first, _, rest = line.strip().partition(" ")
            if first == "started":
                self.pids += map(int, rest.split())
            if first == answer:
                return rest
        raise AssertionError(f"the cluster ended before it said {answer!r}")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the cluster's environment."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )


def still_there(pids: list[int], folder: str) -> list[int]:
    """Processes of this cluster that are alive; a process id may have been reused since."""

    def command(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            return ""

    return [pid for pid in pids if folder in command(pid)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes with one core each; all processes are ended afterwards."""
    # Not pytest's folder: the path of a socket may not be long.
    folder = tempfile.mkdtemp(prefix="ray")
    environment = {
        **os.environ,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # means: use the loopback interface
    }
    keeper = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    started = RayCluster(keeper, environment, [])
    try:
        started.address = started.wait_for("ready")
        yield started
        keeper.stdin.close()
        started.wait_for("over")
        keeper.wait()
        assert still_there(started.pids, folder) == []
    finally:
        for pid in still_there(started.pids, folder):
            os.kill(pid, signal.SIGKILL)
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def sweep_locally(file: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    arguments = ["sweep", str(file), "--out", str(out), "--workers", "1", "--json"]
    assert exit_status(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def workers_of_runs(out: Path) -> list[str]:
    """The worker of every finished run."""
    with closing(sqlite3.connect(out / FILE_NAME)) as database:
        return [worker for (worker,) in database.execute("SELECT worker FROM runs")]


@needs_ray
def test_two_nodes_give_the_same_results_as_one_core(
    cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP)
    out = tmp_path / "ray"
    command = ["-m", "slicewise.cli", "sweep", str(file), "--out", str(out), "--json"]
    on_cluster = cluster.run(*command, "--ray", cluster.address)
    assert on_cluster.returncode == 0, on_cluster.stderr
    nodes = set(workers_of_runs(out))
    assert len(nodes) == 2
    assert all(name.startswith("node ") for name in nodes)
    alone = tmp_path / "alone"
    assert on_cluster.stdout == sweep_locally(file, alone, capsys)
    for name in ("runs.parquet", "summary.parquet", "report.html"):
        assert (out / name).read_bytes() == (alone / name).read_bytes()
    # What is finished here need not be run there.
    again = cluster.run(*command[:4], "--out", str(alone), "--ray", cluster.address)
    assert again.returncode == 0
    assert "60 of 60 runs are finished already" in again.stderr


WAITING_FOR_A_NODE = """
import sys
from slicewise.cli.main import run
from slicewise.lab.checkpoint import Checkpoint

lost, *arguments = sys.argv[1:]
keep, seen = Checkpoint.keep, []

def keep_and_wait(log, done):
    keep(log, done)
    seen.append(done.worker)
    if done.worker == f"node {lost}" and seen.count(done.worker) == 1:
        print("working", file=sys.stderr, flush=True)
        sys.stdin.readline()

Checkpoint.keep = keep_and_wait
run(arguments)
"""


@needs_ray
def test_jobs_of_a_lost_node_run_elsewhere(
    cluster: RayCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "sweep.toml", tmp_path / "ray"
    file.write_text(SWEEP.replace("runs = 5", "runs = 20\nduration = 400"))
    lost = cluster.ask("add", "added")
    arguments = ["sweep", str(file), "--out", str(out), "--json", "--ray", cluster.address]
    with subprocess.Popen(
        [sys.executable, "-c", WAITING_FOR_A_NODE, lost, *arguments],
        env=cluster.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stderr is not None
        try:
            # The node has completed a job and has others assigned: now it is removed.
            assert "working\n" in driver.stderr
            cluster.ask("kill", "killed")
            output, problem = driver.communicate("go on\n")
        finally:
            driver.kill()
    assert driver.returncode == 0, problem
    done = workers_of_runs(out)
    assert len(done) == 2 * (2 * 3) * 20
    assert 0 < done.count(f"node {lost}") < len(done)
    assert output == sweep_locally(file, tmp_path / "alone", capsys)


POLICY_OF_THIS_MACHINE = """
import sys, types
from slicewise.cli.main import run
from slicewise.policies import registry
from slicewise.policies.mfi import Mfi

# A policy of a package that only this machine has.
only_here = types.ModuleType("only_here")
sys.modules["only_here"] = only_here
only_here.Local = type("Local", (Mfi,), {"__module__": "only_here", "name": "local"})
known = registry.policy_class
registry.policy_class = lambda name: only_here.Local if name == "local" else known(name)
run(sys.argv[1:])
"""


@needs_ray
def test_a_policy_missing_on_a_node_is_named(cluster: RayCluster, tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP.replace('"first-fit"', '"local"'))
    arguments = ["sweep", str(file), "--out", str(tmp_path / "out"), "--ray", "auto"]
    refused = cluster.run("-c", POLICY_OF_THIS_MACHINE, *arguments)
    assert refused.returncode == 2
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("slicewise: error")]
    assert "a policy is missing there (No module named 'only_here')" in line
    assert "Traceback" not in refused.stderr


@needs_ray
def test_an_unreachable_address(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(SWEEP)
    for address, problem in (
        ("127.0.0.1:1", "Connection refused"),
        ("nonsense", "Invalid address format"),
    ):
        command = ["-m", "slicewise.cli", "sweep", str(file), "--out", str(tmp_path / "out")]
        refused = subprocess.run(
            [sys.executable, *command, "--ray", address],
            env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert refused.returncode == 2
        assert refused.stderr.startswith("slicewise: error: no Ray cluster can be joined at ")
        assert refused.stderr.count("\n") == 1
        assert problem in refused.stderr


# What happens on a node, without a cluster.


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Steady:
    """A node that has been sent an experiment."""
    geometry = load_geometry("A100-80GB")
    experiment = Steady((parse_mix("uniform", geometry),), (policy("mfi"),), 4, 2, lifetimes=5)
    monkeypatch.setattr(on_ray, "_received", {"key": [experiment]})
    return experiment


def test_a_node_runs_a_job(received: Steady) -> None:
    job = Job(0, 0, 0, (0, 1))
    samples = on_node("key", [None], made_with(), digest(received, 0, 0), tuple(job))
    assert isinstance(samples, dict)
    for run in job.runs:
        assert (samples[run] == received.simulate(0, 0, run, lambda units: None)).all()


def test_a_node_with_other_versions_is_not_used(received: Steady) -> None:
    job, means = (0, 0, 0, (0,)), digest(received, 0, 0)
    assert on_node("key", [None], {**made_with(), "slicewise": "9.9"}, means, job) == (
        f"slicewise is {made_with()['slicewise']} there and 9.9 here; install the same"
    )
    assert "numpy is" in str(on_node("key", [None], {**made_with(), "numpy": "1.0"}, means, job))
    assert "decides differently there" in str(on_node("key", [None], made_with(), "another", job))


def test_the_error_of_a_job_is_returned(received: Steady) -> None:
    outcome = on_node("key", [None], made_with(), "any", (0, 3, 0, (0,)))
    assert isinstance(outcome, IndexError)


class Ref(str):
    """A stand-in for Ray's reference to a task."""


class SmallRay:
    """As much of Ray as an executor needs, in this process: tasks run when asked for."""

    class exceptions:  # noqa: N801
        class RayError(Exception):
            pass

    def __init__(self, answer: object, cores: int = 1) -> None:
        self.answer, self.cores = answer, cores

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cores} if self.cores else {}

    def put(self, parcel: bytes) -> Ref:
        return Ref("parcel")

    def remote(self, **options: object) -> Any:
        return lambda function: SimpleNamespace(remote=lambda *arguments: Ref("task"))

    def wait(self, references: list[Ref]) -> tuple[list[Ref], list[Ref]]:
        return references[:1], references[1:]

    def get(self, reference: Ref) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return "n1", self.answer


@pytest.mark.parametrize(
    ("ray", "problem"),
    [
        (SmallRay("slicewise is old there"), "Ray node n1: slicewise is old there"),
        (SmallRay(SmallRay.exceptions.RayError("died\nTraceback")), "lost 4 times .*: died$"),
        (SmallRay(SmallRay.exceptions.RayError()), "lost 4 times .*: RayError$"),
        (SmallRay("", cores=0), "no CPU to work on"),
    ],
)
def test_errors_of_a_cluster_are_one_line(received: Steady, ray: SmallRay, problem: str) -> None:
    with pytest.raises(SlicewiseError, match=problem):
        list(on_ray._work(ray, [received], [Job(0, 0, 0, (0,))], lambda units: None))


def test_an_error_of_a_job_is_raised_unchanged(received: Steady) -> None:
    class Handed(SmallRay):
        def get(self, reference: Ref) -> object:
            return "n1", IndexError("out of range")

    with pytest.raises(IndexError, match="out of range"):
        list(on_ray._work(Handed(""), [received], [Job(0, 0, 0, (0,))], lambda units: None))


TAKE_THERE = """
import sys
sys.modules["slicewise"] = None
import ray
from ray import cloudpickle

task = cloudpickle.loads(bytes.fromhex(sys.stdin.read()))
ray.get_runtime_context = lambda: type("Context", (), {"get_node_id": lambda self: "n1"})()
print(*task("key", [], {}, "", ()))
"""

SEND = """
from ray import cloudpickle
from slicewise.lab.ray_executor import _make_task

print(cloudpickle.dumps(_make_task()).hex())
"""


@needs_ray
def test_a_node_without_slicewise_says_so() -> None:
    sent = subprocess.run(
        [sys.executable, "-c", SEND], capture_output=True, text=True, check=True
    ).stdout
    said = subprocess.run(
        [sys.executable, "-c", TAKE_THERE], input=sent, capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith("n1 slicewise cannot be used there (")
    assert "install slicewise[lab,ray]" in said


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(SlicewiseError("one sentence")))
    assert str(error) == "one sentence"


def test_without_ray_the_error_names_the_extra(
    received: Steady, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SlicewiseError, match=r"install slicewise\[ray\]"):
        list(RayExecutor("auto").work([received], [Job(0, 0, 0, (0,))], lambda units: None))
    assert list(RayExecutor("auto").work([received], [], lambda units: None)) == []
