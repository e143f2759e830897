"""The compose file: what it names exists, and its Prometheus scrapes a real service."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import yaml  # type: ignore[import-untyped]
from scripts.test_services import MissingServiceError, require_program
from tests.e2e.server import Server, free_port, wait_until

from slicewise import __version__
from slicewise.config.settings import KEYS

FOLDER = Path(__file__).parents[2] / "deploy" / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]


def test_the_service_is_our_image_with_settings_that_exist() -> None:
    service = SERVICES["slicewise"]
    assert service["image"] == f"slicewise:{__version__}"
    build = service["build"]
    assert (FOLDER / build["context"] / build["dockerfile"]).exists()
    variables = {key.variable for key in KEYS.values()}
    assert set(service["environment"]) <= variables
    assert service["read_only"]


def test_nothing_is_reachable_from_other_machines() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_volumes_and_secrets_exist() -> None:
    for service in SERVICES.values():
        for mount in service.get("volumes", ()):
            source, _, _ = mount.partition(":")
            assert source in COMPOSE["volumes"] or (FOLDER / source).is_file(), mount
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])


def program() -> Path:
    try:
        return require_program("prometheus")
    except MissingServiceError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


def local(mounted: str, token: Path) -> str:
    """The file here that the compose file mounts at a path there."""
    if mounted == "/run/secrets/prometheus-token":
        return str(token)
    for mount in SERVICES["prometheus"]["volumes"]:
        source, _, rest = mount.partition(":")
        if rest.partition(":")[0] == mounted:
            return str((FOLDER / source).resolve())
    raise AssertionError(f"{mounted} is not mounted")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "service")
    made.start()
    yield made
    made.kill()


def test_prometheus_scrapes_the_service_and_has_our_rules(server: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(server.issue_token(role="read-only")["token"])
    given = (FOLDER / "prometheus.yml").read_text(encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(given)
    config["rule_files"] = [local(path, token) for path in config["rule_files"]]
    (job,) = config["scrape_configs"]
    job["authorization"]["credentials_file"] = local(
        job["authorization"]["credentials_file"], token
    )
    assert job["static_configs"] == [{"targets": ["slicewise:8080"]}]
    job["static_configs"] = [{"targets": ["{}:{}".format(*server.address)]}]
    config["global"]["scrape_interval"] = "1s"
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    listen = f"127.0.0.1:{free_port()}"
    command: list[str] = [
        str(program()), f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={listen}",
    ]  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:

        def ask(path: str) -> Any:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                with urllib.request.urlopen(f"http://{listen}{path}", timeout=30) as answer:
                    return json.load(answer)["data"]
            except URLError:
                return None

        def scraped() -> list[Any] | None:
            found = ask("/api/v1/query?query=slicewise_is_leader")
            return found["result"] if found else None

        found = wait_until(scraped)
        assert found
        assert found[0]["value"][1] == "1"
        groups = ask("/api/v1/rules")["groups"]
        names = {rule["name"] for group in groups for rule in group["rules"]}
        assert "SlicewiseNoLeader" in names
        assert all(rule["health"] != "err" for group in groups for rule in group["rules"])
    finally:
        process.kill()
        process.wait()
