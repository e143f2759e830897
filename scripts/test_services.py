"""Find the programs that the tests start, and install them where possible.

Usage: test_services.py

Prints the folder of the PostgreSQL programs and the paths of the browser, the proxies and openssl.
Where they are missing, root on Debian or Ubuntu gets them from the distribution's packages;
elsewhere this exits with 1 and says what to install.
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
"""Packages that are called like the one program the tests want of them."""
INSTALL_SECONDS = 600


class MissingServiceError(Exception):
    """A service that the tests need is not here and cannot be installed."""


def postgres_programs() -> Path | None:
    """The folder that holds initdb and postgres, of the newest version there is."""
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
    """Chromium, wherever it is called how."""
    named = os.environ.get("CHROMIUM")
    if named:
        return Path(named)
    for name in ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome"):
        found = shutil.which(name)
        if found:
            return Path(found)
    return None


def require_postgres() -> Path:
    """The folder of the PostgreSQL programs, which are installed if need be and possible."""
    return _require(
        "PostgreSQL", PACKAGE, "the folder of its programs in PG_BIN", postgres_programs
    )


def require_chromium() -> Path:
    """The browser that the dashboard is tried in, installed if need be and possible."""
    return _require("Chromium", BROWSER, "the program in CHROMIUM", chromium_program)


def require_program(name: str) -> Path:
    """A program that its package is called by, such as a proxy, installed if need be."""

    def find() -> Path | None:
        # Programs of the system are not on everyone's path.
        found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
        return Path(found) if found else None

    return _require(name, name, "a folder that holds it in PATH", find)


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
    # Tests run side by side, and only one of them can install at a time.
    patient = f"-oDPkg::Lock::Timeout={INSTALL_SECONDS}"
    install = [apt, "install", patient, "--yes", "--quiet", "--no-install-recommends", package]
    for command in ([apt, "update", patient, "--quiet"], install):
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
        # Lists that cannot be updated may still name the package, so only installing must work.
        if done.returncode and command is install:
            raise MissingServiceError(
                f"{what} is not installed, and '{' '.join(command)}' failed: {problem}"
            )
    found = find()
    if found is None:
        raise MissingServiceError(f"the package {package} was installed and brought no {what}")
    return found


def main() -> int:
    """Print where they are."""
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
