"""The deployment files agree with the service."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType

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
