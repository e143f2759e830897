"""The package as it is published: built, checked, and installed in clean environments."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import slicewise

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "package.md"


def run(*command: object, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command outside the project, and without its environment."""
    hidden = ("PYTHON", "VIRTUAL_ENV", "COVERAGE", "COV_CORE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(f"{command}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with source distribution and wheel; the wheel is made from the former."""
    folder = tmp_path_factory.mktemp("dist")
    # From a copy: a build leaves metadata beside the sources, which is then found first.
    source = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", cwd=ROOT).stdout.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("*.whl")
    return found


def installed(wheel: Path, folder: Path, extra: str) -> Path:
    """A clean environment with one extra; returns the folder of its programs."""
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    programs = folder / "env" / "bin"
    run(programs / "pip", "install", "--quiet", f"{wheel}[{extra}]", cwd=folder)
    return programs


def test_the_index_accepts_the_description(built: Path) -> None:
    files = sorted(built.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    done = run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=built)
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_holds_all_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = run("git", "ls-files", "src", cwd=ROOT).stdout.split()
    source = {name.removeprefix("src/") for name in listed}
    assert source <= held | {name for name in source if name.endswith((".md", ".go"))}
    assert held <= source


def test_the_description_has_no_links_into_the_repository() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE.read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith("https://")] == []


def test_an_agent_needs_nothing_else(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path, "agent")
    names = run(programs / "pip", "list", "--format=freeze", cwd=tmp_path).stdout.lower()
    found = set(re.findall(r"^([a-z0-9-]+)==", names, re.MULTILINE))
    assert found - {"pip", "setuptools", "wheel"} == {"slicewise", "nvidia-ml-py"}
    text = run(programs / "python", "-m", "slicewise.agent", "--help", cwd=tmp_path).stdout
    assert "--token-file" in text
    refused = run(programs / "slicewise", "geometry", cwd=tmp_path, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert "slicewise[cli]" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_library_and_commands_work_outside_the_repository(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path, "cli")
    text = run(programs / "slicewise", "--version", cwd=tmp_path).stdout
    assert text == f"slicewise {slicewise.__version__}\n"
    assert "A100-80GB" in run(programs / "slicewise", "geometry", cwd=tmp_path).stdout
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    printed = run(programs / "python", "-c", example, cwd=tmp_path).stdout
    assert printed.startswith("Instance(id=0, gpu=0, profile='2g.20gb'")
    refused = run(programs / "slicewise", "simulate", cwd=tmp_path, check=False)
    assert refused.returncode != 0
    assert "slicewise[lab]" in refused.stderr
    assert refused.stderr.count("\n") == 1
