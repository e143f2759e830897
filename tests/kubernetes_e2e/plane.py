"""A private Kubernetes control plane: real programs on loopback, in a temporary folder.

    with Plane() as plane:
        plane.kubectl("get", "nodes")

etcd, kube-apiserver, kube-controller-manager and kube-scheduler are the real ones; kwok
simulates the nodes, so that pods run. RBAC is on. Slow features that the tests do not need are off:
only some controllers run, nodes send no heartbeats and none are expected, and pods get no service
account (so that a new namespace can be used immediately). The processes always end with the thread
that started them.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import httpx
import pytest
from scripts.test_services import MissingServiceError
from tests.kubernetes_e2e.api import CORE, PATIENCE_SECONDS, Api, until
from tests.kubernetes_e2e.programs import require_programs

PARTS = ("etcd", "apiserver", "controller-manager", "scheduler", "kwok")
"""All parts in the order they are started."""
CONTROLLERS = (
    "resourceclaim-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "serviceaccount-controller",
    "serviceaccount-token-controller",
    "clusterrole-aggregation-controller",
    "pod-garbage-collector-controller",
    "taint-eviction-controller",
    "device-taint-eviction-controller",
    "job-controller",
    "statefulset-controller",
    "disruption-controller",
    "deployment-controller",
    "replicaset-controller",
    "persistentvolume-binder-controller",
)
STAGES = Path(__file__).with_name("stages.yaml")
_PROGRAMS = {
    "etcd": "etcd",
    "apiserver": "kube-apiserver",
    "controller-manager": "kube-controller-manager",
    "scheduler": "kube-scheduler",
    "kwok": "kwok",
}
_READY = {
    "etcd": "http://127.0.0.1:{}/readyz",
    "apiserver": "https://127.0.0.1:{}/readyz",
    "controller-manager": "https://127.0.0.1:{}/healthz",
    "scheduler": "https://127.0.0.1:{}/readyz",
    "kwok": "http://127.0.0.1:{}/readyz",
}
_TRIES = 5
# The kernel ends the process with its parent, even after SIGKILL.
TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class PortTakenError(Exception):
    """Raised when another process took a port after it was found to be free."""


class Plane:
    """One control plane. Parts are named as in ``PARTS``; each writes NAME.log in ``folder``."""

    def __init__(
        self,
        parts: Iterable[str] = PARTS,
        flags: Mapping[str, Sequence[str]] | None = None,
        controllers: Sequence[str] = CONTROLLERS,
    ) -> None:
        self.programs = require_programs()
        self.parts = tuple(part for part in PARTS if part in set(parts))
        self.folder = Path(tempfile.mkdtemp(prefix="slicewise-k8s-"))
        self.ca = self.folder / "certificate.pem"
        self.kubeconfig = self.folder / "admin.kubeconfig"
        self.token = secrets.token_hex(16)
        self._key = self.folder / "key.pem"
        self._flags = dict(flags or {})
        self._controllers = controllers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}
        self._api: Api | None = None

    def __enter__(self) -> Plane:
        try:
            self._make_secrets()
            self._start()
        except BaseException:
            self.destroy()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.destroy()

    @property
    def server(self) -> str:
        """The address of the API server."""
        return f"https://127.0.0.1:{self._ports['apiserver']}"

    @property
    def api(self) -> Api:
        """The API as an admin, for any number of threads."""
        if self._api is None:
            self._api = Api(self.server, self.ca, self.token)
        return self._api

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        """What kubectl prints, as an admin; a refusal is an error with what it said."""
        done = subprocess.run(
            [self.programs / "kubectl", "--kubeconfig", self.kubeconfig, *arguments],
            env={**os.environ, "HOME": str(self.folder)},  # its cache of API discovery
            input=input,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def plugin(self, *arguments: str, kubeconfig: Path | None = None) -> str:
        """What ``kubectl slicewise`` prints, with the rights of a kubeconfig."""
        done = subprocess.run(
            [self.programs / "kubectl", "slicewise", *arguments],
            env={
                **{key: value for key, value in os.environ.items() if key != "COLUMNS"},
                "HOME": str(self.folder),
                "KUBECONFIG": str(kubeconfig or self.kubeconfig),
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"kubectl slicewise {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def token_of(self, service_account: str) -> str:
        """A token of a ServiceAccount, given as namespace/name, for a day."""
        namespace, name = service_account.split("/")
        made = self.api.create(
            f"{CORE}/namespaces/{namespace}/serviceaccounts/{name}/token",
            {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": 86400},
            },
        )
        return str(made["status"]["token"])

    def api_for(self, service_account: str) -> Api:
        """The API as a ServiceAccount, given as namespace/name; close it after use."""
        return Api(self.server, self.ca, self.token_of(service_account))

    def kubeconfig_for(self, service_account: str) -> Path:
        """A kubeconfig with a token of a ServiceAccount, given as namespace/name."""
        namespace, name = service_account.split("/")
        path = self.folder / f"{namespace}.{name}.kubeconfig"
        self._write_kubeconfig(path, self.token_of(service_account), namespace)
        return path

    def log(self, part: str) -> str:
        """The log of a part."""
        path = self.folder / f"{part}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def runs(self, part: str) -> bool:
        """Whether a part's process exists, running or paused."""
        process = self._processes.get(part)
        return process is not None and process.poll() is None

    def process_id(self, part: str) -> int:
        """The id of a part's process."""
        return self._processes[part].pid

    def pause(self, part: str) -> None:
        """Pause a part: it neither answers nor ends."""
        self._processes[part].send_signal(signal.SIGSTOP)

    def resume(self, part: str) -> None:
        """Resume a paused part."""
        self._processes[part].send_signal(signal.SIGCONT)

    def kill(self, part: str) -> None:
        """Kill a part, as in a crash."""
        self._processes[part].kill()
        self._processes[part].wait()

    def stop(self, part: str) -> None:
        """Terminate a part and wait until it has ended."""
        process = self._processes[part]
        process.terminate()
        process.send_signal(signal.SIGCONT)  # in case it was paused
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start(self, part: str) -> None:
        """Start a stopped part at its previous address, and wait until it is ready."""
        assert not self.runs(part), f"{part} runs already"
        self._launch(part)
        self._await(part)

    def restart(self, part: str) -> None:
        """Stop a part, if it runs, and start it again."""
        if self.runs(part):
            self.stop(part)
        self.start(part)

    def destroy(self) -> None:
        """End every process that was started here and remove its files."""
        if self._api is not None:
            self._api.close()
        for process in reversed(self._processes.values()):
            process.kill()  # nothing of it is kept
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # Starting

    def _make_secrets(self) -> None:
        if shutil.which("openssl") is None:
            raise MissingServiceError(
                "openssl is not installed: the Kubernetes tests make a certificate with it"
            )
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
             "-nodes", "-keyout", self._key, "-out", self.ca, "-days", "2", "-subj",
             "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
            check=True, capture_output=True,
        )  # fmt: skip
        admin = f'{self.token},admin,admin,"system:masters"\n'
        (self.folder / "tokens.csv").write_text(admin)

    def _start(self) -> None:
        for attempt in range(1, _TRIES + 1):
            names = [*PARTS, "etcd-peer"]
            self._ports = dict(zip(names, free_ports(len(names)), strict=True))
            self._write_kubeconfig(self.kubeconfig, self.token, "default")
            try:
                # The later parts wait for the API server themselves, so all start in parallel.
                for part in self.parts:
                    self._launch(part)
                    if part in ("etcd", "apiserver"):
                        self._await(part)
                for part in self.parts:
                    self._await(part)
            except PortTakenError:
                for part in self._processes:
                    self.kill(part)
                self._processes.clear()
                shutil.rmtree(self.folder / "etcd", ignore_errors=True)
                if attempt == _TRIES:
                    raise
            else:
                return

    def _launch(self, part: str) -> None:
        program = self.programs / _PROGRAMS[part]
        command = [str(program), *self._arguments(part), *self._flags.get(part, ())]
        with (self.folder / f"{part}.log").open("ab") as log:
            self._processes[part] = subprocess.Popen(
                [sys.executable, "-S", "-c", TIED, str(os.getpid()), *command],
                cwd=self.folder,
                env={**os.environ, "HOME": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _await(self, part: str) -> None:
        """Wait until a part reports that it is ready."""
        address = _READY[part].format(self._ports[part])

        def ready() -> bool:
            if not self.runs(part):
                said = self.log(part)
                if "address already in use" in said:
                    raise PortTakenError(f"{part}: {said[-500:]}")
                raise RuntimeError(f"{part} has ended: {said[-4000:]}")
            # The scheduler and the controllers use self-signed certificates.
            return httpx.get(address, verify=False, trust_env=False).is_success

        until(f"{part} is ready", ready)

    def _arguments(self, part: str) -> list[str]:
        port = self._ports[part]
        # Many programs on few cores: client-side rate limits would only make tests slow.
        client = [f"--kubeconfig={self.kubeconfig}", "--kube-api-qps=1000", "--kube-api-burst=2000"]
        serving = ["--bind-address=127.0.0.1", f"--secure-port={port}", "--profiling=false"]
        match part:
            case "etcd":
                peer = f"http://127.0.0.1:{self._ports['etcd-peer']}"
                return [
                    f"--data-dir={self.folder / 'etcd'}",
                    f"--listen-client-urls=http://127.0.0.1:{port}",
                    f"--advertise-client-urls=http://127.0.0.1:{port}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster=default={peer}",
                    "--unsafe-no-fsync",  # no power failures here
                    "--log-level=warn",
                ]
            case "apiserver":
                return [
                    *serving,
                    f"--etcd-servers=http://127.0.0.1:{self._ports['etcd']}",
                    "--advertise-address=127.0.0.1",
                    "--endpoint-reconciler-type=none",
                    "--service-cluster-ip-range=10.96.0.0/16",
                    f"--tls-cert-file={self.ca}",
                    f"--tls-private-key-file={self._key}",
                    f"--token-auth-file={self.folder / 'tokens.csv'}",
                    "--authorization-mode=RBAC",
                    "--service-account-issuer=https://slicewise.test",
                    f"--service-account-key-file={self.ca}",
                    f"--service-account-signing-key-file={self._key}",
                    "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
                ]
            case "controller-manager":
                return [
                    *serving,
                    *client,
                    "--leader-elect=false",
                    f"--cert-dir={self.folder / part}",
                    f"--controllers={','.join(self._controllers)}",
                    f"--service-account-private-key-file={self._key}",
                    f"--root-ca-file={self.ca}",
                ]
            case "scheduler":
                return [
                    *serving,
                    *client,
                    "--leader-elect=false",
                    f"--cert-dir={self.folder / part}",
                ]
            case "kwok":
                return [
                    f"--kubeconfig={self.kubeconfig}",
                    f"--config={STAGES}",
                    "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
                    "--node-lease-duration-seconds=0",
                    f"--server-address=127.0.0.1:{port}",
                ]
        raise ValueError(part)

    def _write_kubeconfig(self, path: Path, token: str, namespace: str) -> None:
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "plane",
                    "cluster": {"server": self.server, "certificate-authority": str(self.ca)},
                }
            ],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [
                {
                    "name": "plane",
                    "context": {"cluster": "plane", "user": "user", "namespace": namespace},
                }
            ],
            "current-context": "plane",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(document))


def free_ports(count: int) -> list[int]:
    """Free ports outside the range that the system uses for outgoing connections.

    Otherwise a client that keeps calling a stopped server could be assigned the server's port.
    """
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_lent = int(limits.read_text().split()[0]) if limits.exists() else 32768
    lowest = 10000 if first_lent > 12000 else first_lent
    highest = first_lent if first_lent > 12000 else 60000
    found: list[int] = []
    with_chance = random.SystemRandom()
    while len(found) < count:
        port = with_chance.randrange(lowest, highest)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


@cache
def the_plane() -> Plane:
    """The plane that the tests of this process share, each in its own namespace."""
    try:
        plane = Plane()
        plane.__enter__()
    except MissingServiceError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    atexit.register(plane.destroy)
    return plane
