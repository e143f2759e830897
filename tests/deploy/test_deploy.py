"""The deployment files agree with the service."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from scripts.test_services import MissingServiceError, require_program

from slicewise.config.sources import read_settings

DEPLOY = Path(__file__).parents[2] / "deploy"


def _dashboard() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_dashboard", DEPLOY / "grafana" / "make_dashboard.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_grafana_dashboard_is_up_to_date() -> None:
    written = (DEPLOY / "grafana" / "slicewise.json").read_text(encoding="utf-8")
    assert written == _dashboard().text()


def test_the_settings_file_is_accepted() -> None:
    settings = read_settings({}, {}, DEPLOY / "slicewise.toml")
    assert str(settings.listen) == "127.0.0.1:8080"
    assert settings.log_format == "json"


def test_the_unit_and_the_container_use_existing_options() -> None:
    unit = (DEPLOY / "slicewise.service").read_text(encoding="utf-8")
    container = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    for text in (unit, container):
        assert re.search(r"slicewise\W+\s*\W*serve", text)
        assert "--data" in text
    assert "USER 10001" in container
    assert "DynamicUser=yes" in unit


def test_all_files_are_readable() -> None:
    for path in DEPLOY.rglob("*"):
        assert os.access(path, os.R_OK)


@pytest.mark.parametrize("name", ["slicewise.service", "slicewise-agent.service"])
def test_systemd_accepts_the_units(name: str, tmp_path: Path) -> None:
    try:
        analyze = require_program("systemd-analyze", package="systemd")
    except MissingServiceError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    text = (DEPLOY / name).read_text(encoding="utf-8")
    unit = tmp_path / name
    # Programs must exist for the check; those of the unit do only once it is installed.
    unit.write_text(re.sub(r"/opt/slicewise/bin/\w+", "/bin/true", text), encoding="utf-8")
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
