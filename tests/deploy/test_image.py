"""The container image: built and run."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from scripts.test_services import MissingServiceError
from tests.deploy.image import ROOT, Builder

import slicewise

TAG = "localhost/slicewise:test"
PYTHON = "/opt/slicewise/bin/python"
MOST_MIB = 430
"""The size of the image with the base of the tests. A lock file with test tools makes it 1,500."""
PATIENCE_SECONDS = 60


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    """An image that was just built."""
    try:
        # podman refuses folders with long names, such as those of pytest.
        made = Builder(Path(tempfile.mkdtemp(prefix="slicewise-")))
        made.build(TAG)
    except MissingServiceError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
    yield made
    made.remove()


@pytest.fixture
def container(builder: Builder) -> Iterator[str]:
    """A running service in a read-only container, which has a port of the host."""
    name = builder.run(
        *("--detach", "--read-only", "--network", "host", TAG, "--listen", "127.0.0.1:0")
    )
    yield name
    builder.podman("rm", "--force", "--time", "0", name)


def address(builder: Builder, name: str) -> str:
    """Where the service in a container listens."""
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        found = re.search(r"leading at (http://\S+?),", builder.podman("logs", name))
        if found:
            return found[1]
        time.sleep(0.2)
    raise AssertionError(f"not ready: {builder.podman('logs', name)}")


@pytest.mark.timeout(1800)
def test_the_image_is_lean(builder: Builder, capsys: pytest.CaptureFixture[str]) -> None:
    [facts] = json.loads(builder.podman("image", "inspect", TAG))
    mib = facts["Size"] / (1 << 20)
    with capsys.disabled():
        print(f"\ncontainer image: {mib:.0f} MiB")
    assert mib < MOST_MIB
    config = facts["Config"]
    assert config["User"] == "10001"
    assert config["Labels"]["org.opencontainers.image.version"] == slicewise.__version__
    assert "healthz" in str(facts["Healthcheck"])
    listed = builder.run(
        *("--rm", "--network", "none", "--entrypoint", PYTHON, TAG, "-c"),
        "import importlib.metadata as m; print(*sorted(d.name.lower() for d in m.distributions()))",
    ).split()
    assert {"slicewise", "psycopg", "kubernetes", "nvidia-ml-py"} <= set(listed)
    unwanted = {"pytest", "hypothesis", "mypy", "ruff", "playwright", "pip", "setuptools", "numba"}
    assert unwanted.isdisjoint(listed)


def test_it_serves_writes_nothing_outside_its_volume_and_stops(
    builder: Builder, container: str
) -> None:
    url = address(builder, container)
    assert httpx.get(f"{url}/healthz", trust_env=False).json() == {"status": "ok"}
    token = builder.podman("exec", container, "cat", "/var/lib/slicewise/admin-token")
    cluster = httpx.get(
        f"{url}/v1/cluster", headers={"Authorization": f"Bearer {token}"}, trust_env=False
    )
    assert cluster.status_code == 200
    touched = builder.podman(
        *("exec", container, "sh", "-c"),
        "for path in /x /usr/x /opt/slicewise/x; do touch $path 2>/dev/null && echo $path; done; :",
    )
    assert touched == ""
    assert builder.podman("exec", container, "id", "-u") == "10001"
    builder.podman("stop", "--time", "30", container)
    [state] = json.loads(builder.podman("inspect", container))
    assert state["State"]["ExitCode"] == 0


def test_agent_and_controller_start_from_it(builder: Builder) -> None:
    for command in ("agent", "k8s"):
        program = "/opt/slicewise/bin/slicewise"
        text = builder.run("--rm", "--network", "none", "--entrypoint", program, TAG, command, "-h")
        assert f"slicewise {command}" in text


def test_the_lock_file_of_the_image_is_part_of_the_other() -> None:
    def pins(path: Path) -> set[str]:
        return set(re.findall(r"^([a-z0-9.-]+==[^ ;]+)", path.read_text(encoding="utf-8"), re.M))

    of_image = pins(ROOT / "deploy" / "requirements.lock")
    assert len(of_image) > 30
    assert of_image <= pins(ROOT / "requirements.lock")
    text = (ROOT / "deploy" / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in text
    assert text.count("--hash=sha256:") > len(of_image)
