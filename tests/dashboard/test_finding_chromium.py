"""Finding the browser, and the message without one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from scripts import test_services as services


def test_a_named_program_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", "/opt/browser")
    assert services.chromium_program() == Path("/opt/browser")


def test_it_has_several_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHROMIUM", raising=False)
    there = {"google-chrome": "/usr/bin/google-chrome"}
    monkeypatch.setattr(shutil, "which", lambda name: there.get(name))
    assert services.chromium_program() == Path("/usr/bin/google-chrome")


@pytest.mark.parametrize(("user", "apt"), [(0, None), (1000, "/usr/bin/apt-get")])
def test_the_message_without_a_browser_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, user: int, apt: str | None
) -> None:
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: apt if name == "apt-get" else None)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(services.MissingServiceError, match="package chromium, or name the program"):
        services.require_chromium()
