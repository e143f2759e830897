"""Building and loading the library."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.fakedriver.driver import built

from slicewise.core.errors import SlicewiseError
from slicewise.fakedriver import Machine, build
from slicewise.fakedriver import library as driver_library


def test_the_same_source_is_built_once(library: Path) -> None:
    folder = library.parent.parent
    made = library.stat().st_mtime_ns
    assert build(folder) == library
    assert library.stat().st_mtime_ns == made
    assert library.name == "libnvidia-ml.so.1"


def test_concurrent_builds(tmp_path: Path, library: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build(tmp_path), range(4)))
    assert len(paths) == 1
    assert [path.name for path in paths.pop().parent.iterdir()] == ["libnvidia-ml.so.1"]


def test_missing_compiler_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(SlicewiseError, match="needs a C compiler") as caught:
        build(tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("CC", "my-compiler")
    with pytest.raises(SlicewiseError, match="but my-compiler was not found"):
        build(tmp_path)


def test_compiler_error_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'stdint.h: No such file' >&2\necho more >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(SlicewiseError) as caught:
        build(tmp_path / "out")
    assert str(caught.value).endswith("cannot compile the fake driver: stdint.h: No such file")
    assert not list((tmp_path / "out").glob("*/*"))


def test_unwritable_folder_is_named(tmp_path: Path, library: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SlicewiseError, match=r"file/fakedriver-.*cannot be built here"):
        build(tmp_path / "file")


def test_tests_skip_without_a_compiler_but_fail_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs a C compiler"):
        built(tmp_path)
    monkeypatch.setenv("CI", "1")
    with pytest.raises(SlicewiseError, match="needs a C compiler"):
        built(tmp_path)


def test_pynvml_finds_the_library_by_path_and_preloading(library: Path, machine: Machine) -> None:
    ask = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())"
    found = subprocess.check_output(
        [sys.executable, "-c", ask], env=os.environ | machine.environment(library), text=True
    )
    assert found == "2\n"
    variables = machine.environment(library)
    del variables["LD_LIBRARY_PATH"]
    preload = f"import ctypes; ctypes.CDLL({str(library)!r}); {ask}"
    found = subprocess.check_output(
        [sys.executable, "-c", preload], env=os.environ | variables, text=True
    )
    assert found == "2\n"


def test_library_without_a_machine_reports_the_cause(library: Path, tmp_path: Path) -> None:
    def error_output(**variables: str) -> tuple[str, str]:
        program = f"import ctypes; print(ctypes.CDLL({str(library)!r}).nvmlInit_v2())"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout, done.stderr

    assert error_output(SLICEWISE_FAKE_NVML="") == (
        "9\n",
        "slicewise fake driver: SLICEWISE_FAKE_NVML: does not name a state file\n",
    )
    missing = tmp_path / "missing"
    answer, words = error_output(SLICEWISE_FAKE_NVML=str(missing))
    assert answer == "9\n"
    assert words == f"slicewise fake driver: {missing}: No such file or directory\n"
    (tmp_path / "other").write_text("no machine")
    answer, words = error_output(SLICEWISE_FAKE_NVML=str(tmp_path / "other"))
    assert answer == "9\n"
    assert words.endswith("is not a state file of the fake driver\n")


def test_state_file_of_another_version_is_refused(library: Path, machine: Machine) -> None:
    raw = bytearray(machine.path.read_bytes())
    raw[8] ^= 1
    machine.path.write_bytes(raw)
    with pytest.raises(SlicewiseError, match="not a state file of this version"):
        Machine(machine.path)
    program = f"import ctypes; print(ctypes.CDLL({str(library)!r}).nvmlInit_v2())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | machine.environment(library),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "9\n"
    assert "was created by another version of the fake driver" in done.stderr


def test_library_exports_only_nvml_functions(library: Path) -> None:
    names = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in names.stdout.splitlines()}
    assert exported == {*driver_library.functions(), "nvmlErrorString"}
