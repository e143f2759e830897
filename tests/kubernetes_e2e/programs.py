"""Real programs that the tests start, built once from Go modules, most of them in this folder.

Usage: python -m tests.kubernetes_e2e.programs [--node]

Prints what is built and its folder: a cache outside the checkout, named by a digest of all
inputs. The first time takes minutes and needs the network for the modules' sources.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.test_services import MissingServiceError

GO = (1, 26)
"""The oldest Go that builds them."""
KUBERNETES = "v1.36.4"
_BUILD_SECONDS = 3600
_FLAGS = ("-mod=readonly", "-trimpath", "-buildvcs=false")
_LINKER_FLAGS = f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES}"
# As Kubernetes' own releases are built; and no C compiler is needed.
_ENVIRONMENT = {"CGO_ENABLED": "0", "GOWORK": "off"}
_WITH_C = {"CGO_ENABLED": "1", "GOWORK": "off"}


class Program(NamedTuple):
    """A program, the module of this folder that pins it, and its package."""

    name: str
    module: str
    package: str
    c: bool = False
    """Whether it is built with a C compiler."""
    tags: str = ""


PROGRAMS = (
    Program("etcd", "controlplane", "go.etcd.io/etcd/server/v3"),
    Program("kube-apiserver", "controlplane", "k8s.io/kubernetes/cmd/kube-apiserver"),
    Program(
        "kube-controller-manager", "controlplane", "k8s.io/kubernetes/cmd/kube-controller-manager"
    ),
    Program("kube-scheduler", "controlplane", "k8s.io/kubernetes/cmd/kube-scheduler"),
    Program("kubectl", "controlplane", "k8s.io/kubernetes/cmd/kubectl"),
    Program("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
)
HELM = (Program("helm", "helm", "helm.sh/helm/v4/cmd/helm"),)
"""Built separately: few tests need it, and it takes as long as all the others."""
DRA_DRIVER = (
    # Under another name: on nodes, our agent refuses to run beside the driver.
    Program(
        "dra-driver",
        "dra_driver",
        "sigs.k8s.io/dra-driver-nvidia-gpu/cmd/gpu-kubelet-plugin",
        c=True,
    ),
    Program("kubelet-client", "dra_driver", "./kubelet_client"),
    Program("container", "dra_driver", "./container"),
)
"""NVIDIA's driver, a program that calls it as a kubelet does, and what runs in containers."""
NODE = (
    Program("kubelet", "kubelet", "k8s.io/kubernetes/cmd/kubelet"),
    Program(
        "containerd",
        "containerd",
        "github.com/containerd/containerd/v2/cmd/containerd",
        tags="no_btrfs",
    ),
    Program(
        "containerd-shim-runc-v2",
        "containerd",
        "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
    ),
    Program("ctr", "containerd", "github.com/containerd/containerd/v2/cmd/ctr"),
)
"""What runs pods on a node, beside runc: that needs a library for its filters of system calls, and
comes from the system."""
DEX = (Program("dex", "../identity/dex", "./provider"),)
"""An OpenID Connect provider, for the tests of sign-in."""
_WHAT = {
    DEX: "Dex",
    PROGRAMS: f"Kubernetes {KUBERNETES}",
    HELM: "helm",
    DRA_DRIVER: "NVIDIA's DRA driver",
    NODE: "the kubelet and containerd",
}
_HERE = Path(__file__).parent


def require_helm(tell: Callable[[str], None] = lambda line: None) -> Path:
    """The program that renders charts."""
    return _require(HELM, tell) / "helm"


def require_dex(tell: Callable[[str], None] = lambda line: None) -> Path:
    """The OpenID Connect provider."""
    return _require(DEX, tell) / "dex"


def require_dra_driver(tell: Callable[[str], None] = lambda line: None) -> Path:
    """The folder with NVIDIA's DRA driver and the program that calls it."""
    return _require(DRA_DRIVER, tell)


def require_node(tell: Callable[[str], None] = lambda line: None) -> Path:
    """The folder with the programs that run pods on a node."""
    return _require(NODE, tell)


def require_programs(tell: Callable[[str], None] = lambda line: None) -> Path:
    """The folder with all programs; missing ones are built, by one process at a time."""
    return _require(PROGRAMS, tell)


def _require(programs: tuple[Program, ...], tell: Callable[[str], None]) -> Path:
    go, version = _go()
    folder = _folder(version, programs)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [p for p in programs if not (folder / p.name).exists()]
        if missing:
            tell(f"Building {_WHAT[programs]} for the tests (minutes, the first time).")
        for number, program in enumerate(missing, 1):
            tell(f"  {number} of {len(missing)}: {program.name}")
            _build(go, program, folder)
    return folder


def _go() -> tuple[str, str]:
    """Go and its version, or a sentence that says what is required."""
    wanted = ".".join(map(str, GO))
    named = os.environ.get("GO", "go")
    go = shutil.which(named) or shutil.which(named, path="/usr/local/go/bin")
    if go is None:
        raise MissingServiceError(
            f"Go is not installed: the tests build Kubernetes and other programs with Go {wanted} "
            "or newer; install it, or name the program in GO"
        )
    done = subprocess.run(
        [go, "env", "GOVERSION"], cwd=_HERE, capture_output=True, text=True, check=False
    )
    version = done.stdout.strip()
    found = re.match(r"go(\d+)\.(\d+)", version)
    if done.returncode or found is None or (int(found[1]), int(found[2])) < GO:
        what = version or done.stderr.strip() or "not Go"
        raise MissingServiceError(
            f"{go} is {what}: the tests build Kubernetes and other programs with Go {wanted} or "
            "newer; install it, or name the program in GO"
        )
    return go, version


def _folder(version: str, programs: Sequence[Program]) -> Path:
    """A folder for exactly these sources, this Go and these flags."""
    told = hashlib.sha256(repr((version, _FLAGS, _LINKER_FLAGS, _ENVIRONMENT)).encode())
    if special := [program for program in programs if program.c or program.tags]:
        told.update(repr(special).encode())
    for module in sorted({program.module for program in programs}):
        for name in ("go.mod", "go.sum"):
            told.update((_HERE / module / name).read_bytes())
        for source in sorted((_HERE / module).glob("*/*.go")):
            told.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "slicewise" / "k8s" / told.hexdigest()[:16]


def _build(go: str, program: Program, folder: Path) -> None:
    if program.c and not any(map(shutil.which, ("cc", "gcc"))):
        raise MissingServiceError(f"{program.name} is built with a C compiler, and there is none")
    unfinished = folder / f"{program.name}.unfinished"
    command = [go, "build", *_FLAGS, "-ldflags", _LINKER_FLAGS]
    command += ["-tags", program.tags, "-o", str(unfinished), program.package]
    try:
        done = subprocess.run(
            ["nice", "-n", "5", *command],
            cwd=_HERE / program.module,
            env={**os.environ, **(_WITH_C if program.c else _ENVIRONMENT)},
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MissingServiceError(f"building {program.name} took too long") from None
    if done.returncode:
        problem = " ".join(done.stderr.split()[-60:])
        raise MissingServiceError(f"{program.name} cannot be built: {problem}")
    unfinished.replace(folder / program.name)


def main(arguments: Sequence[str]) -> int:
    """Build what is missing and print where they are; those of a node only with ``--node``."""
    wanted = [require_programs, require_helm, require_dra_driver, require_dex]
    if "--node" in arguments:
        wanted.append(require_node)
    try:
        for require in wanted:
            print(require(lambda line: print(line, flush=True)))
    except MissingServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
