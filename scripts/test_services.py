"""Find the external programs that the tests start, and install them if possible.

Usage: test_services.py

Prints the folder of the PostgreSQL programs and the paths of the browser, the proxies and openssl.
Missing programs are installed from the distribution's packages if this runs as root on Debian or
Ubuntu. Otherwise it exits with 1 and names the package to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGE = "postgresql"
BROWSER = "chromium"
PROGRAMS = ("nginx", "haproxy", "openssl", "faketime")
"""Programs with the same name as their package."""
INSTALL_SECONDS = 600


class MissingServiceError(Exception):
    """Raised when a program is missing and cannot be installed."""


def postgres_programs() -> Path | None:
    """Return the folder with initdb and postgres of the newest installed version."""
    named = os.environ.get("PG_BIN")
    on_path = shutil.which("initdb")
    candidates = [
        *([Path(named)] if named else []),
        *([Path(on_path).resolve().parent] if on_path else []),
        *sorted(
            Path("/usr/lib/postgresql").glob("*/bin"),
            key=lambda folder: [int(p) for p in folder.parent.name.split(".") if p.isdigit()],
            reverse=True,
        ),
        *sorted(Path("/usr").glob("pgsql-*/bin"), reverse=True),
    ]
    for folder in candidates:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


def chromium_program() -> Path | None:
    """Return the path of Chromium or Chrome, under any of its names."""
    named = os.environ.get("CHROMIUM")
    if named:
        return Path(named)
    for name in ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome"):
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def require_postgres() -> Path:
    """Return the folder of the PostgreSQL programs; install them if necessary."""
    return _require(
        "PostgreSQL", PACKAGE, "the folder of its programs in PG_BIN", postgres_programs
    )


def require_chromium() -> Path:
    """Return the path of the browser for the dashboard tests; install it if necessary."""
    return _require("Chromium", BROWSER, "the program in CHROMIUM", chromium_program)


def require_program(name: str, package: str | None = None) -> Path:
    """Return the path of a program; install its package if necessary."""

    def find() -> Path | None:
        # /usr/sbin is not on the PATH of unprivileged users.
        found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
        return Path(found) if found else None

    return _require(name, package or name, "a folder that holds it in PATH", find)


def _require(what: str, package: str, otherwise: str, find: Callable[[], Path | None]) -> Path:
    found = find()
    if found is not None:
        return found
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise MissingServiceError(
            f"{what} is not installed, and installing it needs apt-get and root: install the "
            f"package {package}, or name {otherwise}"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Tests run in parallel, and only one process at a time can install.
    lock_wait = f"-oDPkg::Lock::Timeout={INSTALL_SECONDS}"
    install = [
        apt,
        "install",
        lock_wait,
        "--yes",
        "--quiet",
        "--no-install-recommends",
        package,
    ]
    for command in ([apt, "update", lock_wait, "--quiet"], install):
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise MissingServiceError(
                f"{what} is not installed, and '{' '.join(command)}' took too long"
            ) from None
        problem = done.stderr.strip().splitlines()[-1:]
        # Package lists that failed to update may still contain the package: ignore that failure.
        if done.returncode and command is install:
            raise MissingServiceError(
                f"{what} is not installed, and '{' '.join(command)}' failed: {problem}"
            )
    found = find()
    if found is None:
        raise MissingServiceError(f"the package {package} was installed, but {what} was not found")
    return found


def main() -> int:
    """Print the paths of all programs."""
    try:
        print(require_postgres())
        print(require_chromium())
        for name in PROGRAMS:
            print(require_program(name))
    except MissingServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
