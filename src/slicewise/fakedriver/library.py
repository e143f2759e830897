"""Compiles the fake driver library from its C sources."""

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
"""The name of NVIDIA's library, by which programs load it."""

_FLAGS = (
    *("-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-fvisibility=hidden"),
    *("-shared", "-pthread", f"-Wl,-soname,{SONAME}"),
)


def build(folder: str | Path) -> Path:
    """Compile the library under this folder, unless it exists already, and return its path.

    Each version of the source has its own subfolder, which can be used as ``LD_LIBRARY_PATH``.
    Several processes may build at once: the library is moved into place when it is complete.
    """
    compiler = _compiler()
    target = Path(folder) / f"fakedriver-{_build_key(compiler)}"
    library = target / SONAME
    if library.exists():
        return library
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target) as work:
            _compile(compiler, Path(work)).replace(library)
    except OSError as error:
        raise SlicewiseError(
            f"{target}: the fake driver cannot be built here: {error.strerror or error}"
        ) from None
    return library


@cache
def sources() -> dict[str, str]:
    """The C source files by name."""
    items = (files("slicewise.fakedriver") / "nvml").iterdir()
    texts = {item.name: item.read_text("utf-8") for item in items if item.is_file()}
    return {name: texts[name] for name in sorted(texts) if name.endswith((".c", ".h"))}


@cache
def digest() -> int:
    """A digest of the source; a library accepts only state files with its own digest."""
    content = "".join(f"{name}\0{text}\0" for name, text in sources().items())
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "little")


@cache
def functions() -> tuple[str, ...]:
    """The NVML functions that count calls and support faults, in the order of the counters."""
    return tuple(re.findall(r"^    X\((nvml\w+)\)", sources()["functions.h"], re.MULTILINE))


def _compiler() -> str:
    """The C compiler: ``CC`` if it is set, else the one of the system."""
    named = os.environ.get("CC", "").split()
    candidates = named[:1] or ["cc", "gcc", "clang"]
    for name in candidates:
        found = shutil.which(name)
        if found is not None:
            return found
    raise SlicewiseError(
        f"the fake driver needs a C compiler, but {' or '.join(candidates)} was not found; "
        "install one (on Debian: apt install gcc libc6-dev) or name it in CC"
    )


def _build_key(compiler: str) -> str:
    """Identifies a build by source, compiler and flags."""
    content = f"{digest():016x} {compiler} {' '.join(_FLAGS)}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _compile(compiler: str, work: Path) -> Path:
    """Compile the sources in a temporary folder."""
    for name, text in sources().items():
        (work / name).write_text(text, "utf-8")
    units = [name for name in sources() if name.endswith(".c")]
    command = [compiler, *_FLAGS, f"-DSOURCE_DIGEST={digest()}ull", "-o", SONAME, *units]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        message = next(iter(done.stderr.strip().splitlines()), f"status {done.returncode}")
        raise SlicewiseError(f"{compiler} cannot compile the fake driver: {message}")
    return work / SONAME
