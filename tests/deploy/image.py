"""Builds the container image from packages of the distribution, without a container registry."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.test_services import MissingServiceError, require_program

ROOT = Path(__file__).parents[2]
SUITE = "trixie"
BASE = f"localhost/slicewise-base:{SUITE}"
_PACKAGES = "python3,python3-venv,ca-certificates,passwd"
_SECONDS = 900


@dataclass
class Builder:
    """podman and buildah with a store of their own."""

    store: Path

    def __post_init__(self) -> None:
        if os.geteuid() != 0:
            raise MissingServiceError("building a container image without a registry needs root")
        for name in ("podman", "buildah", "mmdebstrap", "runc"):
            require_program(name)

    def podman(self, *arguments: str, check: bool = True) -> str:
        """Run podman and return what it prints."""
        runtime = ("--runtime", "runc", "--cgroup-manager", "cgroupfs")
        return self._run("podman", *self._place, *runtime, *arguments, check=check)

    def run(self, *arguments: str) -> str:
        """Start a container with limits that a machine with few capabilities allows."""
        limits = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
        return self.podman("run", "--no-healthcheck", *limits, *arguments)

    def build(self, tag: str) -> None:
        """Build the image as `make image` does, from a base made of the distribution's packages."""
        self.podman("import", "--quiet", str(_base()), BASE)
        # Where pip and its certificates are configured for the machine, the build uses the same.
        mounts = [Path("/etc/pip.conf"), Path("/etc/ssl/certs")]
        volumes = [f"--volume={path}:{path}:ro" for path in mounts if path.exists()]
        self._run(
            "buildah",
            *self._place,
            *("build", "--quiet", "--pull-never", "--isolation", "chroot", "--format", "docker"),
            *volumes,
            *("--build-arg", f"BASE={BASE}", "--file", "deploy/Containerfile", "--tag", tag, "."),
        )

    def remove(self) -> None:
        """Remove all containers and images, and the store."""
        self.podman("rm", "--all", "--force", check=False)
        self.podman("rmi", "--all", "--force", check=False)
        shutil.rmtree(self.store, ignore_errors=True)

    @property
    def _place(self) -> tuple[str, ...]:
        store = ("--root", f"{self.store}/root", "--runroot", f"{self.store}/run")
        return (*store, "--storage-driver", "overlay")

    def _run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        return done.stdout.strip()


def _base() -> Path:
    """A root file system with Python, made once and kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slicewise" / "image"
    cache.mkdir(parents=True, exist_ok=True)
    made = cache / f"{SUITE}.tar"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            unfinished = cache / f"{SUITE}.unfinished.tar"
            command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={_PACKAGES}"]
            done = subprocess.run(
                [*command, SUITE, str(unfinished)],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
            if done.returncode:
                raise MissingServiceError(f"the base of the image: {done.stderr[-500:]}")
            unfinished.replace(made)
    return made


def main() -> int:
    """Make the base of the image."""
    print(_base())
    return 0


if __name__ == "__main__":
    sys.exit(main())
