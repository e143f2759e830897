"""Find the PostgreSQL that the tests start, and install it where that is possible.

Usage: test_services.py

Prints the folder of the PostgreSQL programs. Where they are missing, root on Debian or Ubuntu gets
them from the distribution's packages; elsewhere this exits with 1 and says what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = "postgresql"
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


def require_postgres() -> Path:
    """The folder of the PostgreSQL programs, which are installed if need be and possible."""
    found = postgres_programs()
    if found is not None:
        return found
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise MissingServiceError(
            "PostgreSQL is not installed, and installing it needs apt-get and root: install the "
            f"package {PACKAGE}, or name the folder of its programs in PG_BIN"
        )
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = [apt, "install", "--yes", "--quiet", "--no-install-recommends", PACKAGE]
    for command in ([apt, "update", "--quiet"], install):
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
                f"PostgreSQL is not installed, and '{' '.join(command)}' took too long"
            ) from None
        problem = done.stderr.strip().splitlines()[-1:]
        # Lists that cannot be updated may still name the package, so only installing must work.
        if done.returncode and command is install:
            raise MissingServiceError(
                f"PostgreSQL is not installed, and '{' '.join(command)}' failed: {problem}"
            )
    found = postgres_programs()
    if found is None:
        raise MissingServiceError(f"the package {PACKAGE} was installed and brought no initdb")
    return found


def main() -> int:
    """Print where PostgreSQL is."""
    try:
        print(require_postgres())
    except MissingServiceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
