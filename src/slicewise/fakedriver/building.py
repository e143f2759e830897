"""Building the fake driver with the system's C compiler."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path

from slicewise.core.errors import SlicewiseError

SONAME = "libnvidia-ml.so.1"
"""What programs ask the dynamic linker for: NVIDIA's own name."""

_FLAGS = (
    *("-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-fvisibility=hidden"),
    *("-shared", "-pthread", f"-Wl,-soname,{SONAME}"),
)


def build(folder: str | Path) -> Path:
    """The driver's library under this folder, built unless it was built from the same source.

    Each version of the source gets a folder of its own, whose path can be ``LD_LIBRARY_PATH``.
    Several processes may build at once: a library appears whole or not at all.
    """
    compiler = _compiler()
    home = Path(folder) / f"fakedriver-{_key(compiler)}"
    library = home / SONAME
    if library.exists():
        return library
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as work:
            made = _compile(compiler, Path(work))
            made.replace(library)
    except OSError as error:
        raise SlicewiseError(
            f"{home}: the fake driver cannot be built here: {error.strerror or error}"
        ) from None
    return library


@cache
def sources() -> dict[str, str]:
    """The driver's source files by name."""
    found = (item for item in (files("slicewise.fakedriver") / "nvml").iterdir())
    texts = {item.name: item.read_text("utf-8") for item in found if item.is_file()}
    return dict(sorted((n, t) for n, t in texts.items() if n.endswith((".c", ".h"))))


@cache
def digest() -> int:
    """A number that stands for the source; a library works on states of its own digest only."""
    told = "".join(f"{name}\0{text}\0" for name, text in sources().items())
    return int.from_bytes(hashlib.sha256(told.encode()).digest()[:8], "little")


@cache
def functions() -> tuple[str, ...]:
    """The functions that count their calls and can be made to fail, in the driver's order."""
    return tuple(re.findall(r"^    X\((nvml\w+)\)", sources()["functions.h"], re.MULTILINE))


def _compiler() -> str:
    """The C compiler: the one ``CC`` names, or the system's."""
    named = os.environ.get("CC", "").split()
    candidates = named[:1] or ["cc", "gcc", "clang"]
    for name in candidates:
        found = shutil.which(name)
        if found is not None:
            return found
    raise SlicewiseError(
        f"the fake driver needs a C compiler, and there is no {' or '.join(candidates)} here; "
        "install one (on Debian: apt install gcc libc6-dev) or name it in CC"
    )


def _key(compiler: str) -> str:
    """What tells one build from another: source, compiler and flags."""
    told = f"{digest():016x} {compiler} {' '.join(_FLAGS)}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _compile(compiler: str, work: Path) -> Path:
    """Compile the source in a folder of its own."""
    for name, text in sources().items():
        (work / name).write_text(text, "utf-8")
    units = [name for name in sources() if name.endswith(".c")]
    command = [compiler, *_FLAGS, f"-DSOURCE_DIGEST={digest()}ull", "-o", SONAME, *units]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = next(iter(done.stderr.strip().splitlines()), f"status {done.returncode}")
        raise SlicewiseError(f"{compiler} cannot compile the fake driver: {complaint}")
    return work / SONAME
