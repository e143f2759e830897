"""Client certificates: only those of the right authority, with a rule, and while they are valid."""

from __future__ import annotations

import http.client
import os
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.hostile.halfway import Halfway
from tests.e2e.hostile.test_revoked import HELLO, ONE, seq
from tests.e2e.server import PATIENCE_SECONDS, Server, wait_until
from tests.identity.certificates import SERVER, Authority

from slicewise.agent.service_client import ServiceAddress, ServiceClient

RULES = """
[[certificate]]
where = { common_name = "node-*" }
role = "agent"
node = "*"

[[certificate]]
where = { uri = "spiffe://example.org/ops" }
role = "operator"

[[certificate]]
where = { common_name = "acme-*" }
role = "tenant"
tenant = "acme"
"""


class Guarded:
    """A service that asks for client certificates."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.authority = Authority(folder / "ca")
        own = self.authority.issue("slicewise", usage=SERVER)
        self.rules = folder / "rules.toml"
        self.rules.write_text(RULES)
        settings = [
            f"tls.cert={own}", f"tls.key={own}", f"tls.client_ca={self.authority.file}",
            f"sign_in.rules={self.rules}", "limits.strangers_per_second=1000000", *more,
        ]  # fmt: skip
        self.server = Server(folder / "service", settings=settings)
        self.server.tls = self.authority.context(self.authority.issue("acme-test"))
        self.server.start()
        node = {"name": "n1", "model": "A100-80GB", "gpus": 50}
        for path, body in (("/v1/tenants", {"name": "acme"}), ("/v1/nodes", node)):
            assert self.server.ask("POST", path, body)[0] == 201

    def who(self, certificate: Path | None) -> tuple[int, dict[str, Any]]:
        """The answer to a request with this certificate and no token."""
        context = self.authority.context(certificate)
        answer = httpx.get(f"{self.server.url}/v1/whoami", verify=context, trust_env=False)
        return answer.status_code, answer.json()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    made = Guarded(tmp_path_factory.mktemp("guarded"))
    yield made
    made.server.kill()


@pytest.fixture
def guarded(shared: Guarded) -> Guarded:
    """The rules as they were at first."""
    shared.rules.write_text(RULES)
    certificate = shared.authority.issue("acme-first")
    wait_until(lambda: shared.who(certificate)[1].get("role") == "tenant")
    return shared


def test_rights_follow_the_rules(guarded: Guarded) -> None:
    issue = guarded.authority.issue
    agent = guarded.who(issue("node-gpu-7"))[1]
    assert (agent["id"], agent["role"], agent["node"]) == (
        "cert:agent:node-gpu-7",
        "agent",
        "gpu-7",
    )
    assert guarded.who(issue("x", uri="spiffe://example.org/ops"))[1]["role"] == "operator"
    assert guarded.who(issue("acme-ci"))[1]["tenant"] == "acme"
    assert guarded.who(issue("node-"))[0] == 403
    assert guarded.who(issue("other"))[0] == 403
    assert guarded.who(issue("x", uri="spiffe://example.org/ops/evil"))[0] == 403
    assert guarded.who(None)[0] == 401


def test_a_token_comes_before_the_certificate(guarded: Guarded) -> None:
    status, found = guarded.server.ask("GET", "/v1/whoami")
    assert (status, found["role"]) == (200, "admin"), "its connections have a certificate of acme"
    assert guarded.server.ask("GET", "/v1/whoami", token="sw_wrong")[0] == 401


@pytest.mark.parametrize(
    "what", ["wrong CA", "wrong CA of the same name", "expired", "of a server"]
)
def test_a_wrong_certificate_is_not_let_in(guarded: Guarded, tmp_path: Path, what: str) -> None:
    name = "node-gpu-7"
    wrong: dict[str, Callable[[], Path]] = {
        "wrong CA": lambda: Authority(tmp_path, "evil").issue(name),
        "wrong CA of the same name": lambda: Authority(tmp_path).issue(name),
        "expired": lambda: guarded.authority.issue(name, valid=timedelta(seconds=-5)),
        "of a server": lambda: guarded.authority.issue(name, usage=SERVER),
    }
    before = seq(guarded.server)
    with pytest.raises(httpx.TransportError):
        guarded.who(wrong[what]())
    assert seq(guarded.server) == before
    assert guarded.who(guarded.authority.issue(name))[0] == 200


def test_an_agent_needs_no_token(guarded: Guarded, tmp_path: Path) -> None:
    authority = guarded.authority
    certificate = tmp_path / "node.pem"
    certificate.write_bytes(authority.issue("node-gpu-8").read_bytes())
    address = ServiceAddress.parse(guarded.server.url, None, authority.file, certificate)
    client = ServiceClient(address)
    answer = client.call("POST", "/v1/agent/hello", HELLO)
    assert isinstance(answer, dict)
    assert answer["node"] == "gpu-8"
    _, page = guarded.server.ask("GET", "/v1/audit?kind=agent-joined&subject=gpu-8")
    assert {entry["actor"] for entry in page["events"]} == {"cert:agent:node-gpu-8"}
    client.close()
    # The next connection uses the file as it is then.
    certificate.write_bytes(authority.issue("node-gpu-9").read_bytes())
    again = ServiceClient(address)
    answer = again.call("POST", "/v1/agent/hello", HELLO)
    assert isinstance(answer, dict)
    assert answer["node"] == "gpu-9"
    again.close()


def test_commands_use_a_certificate(guarded: Guarded) -> None:
    own = {name: one for name, one in os.environ.items() if not name.startswith("SLICEWISE_")}
    certificate = guarded.authority.issue("x", uri="spiffe://example.org/ops")
    environment = own | {
        "SLICEWISE_SERVER": guarded.server.url,
        "SLICEWISE_CLIENT_CERT": str(certificate),
        "SSL_CERT_FILE": str(guarded.authority.file),
    }
    done = subprocess.run(
        [sys.executable, "-m", "slicewise.cli", "nodes", "cordon", "n1"],
        env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert guarded.server.ask("POST", "/v1/nodes/n1/uncordon")[0] == 200


def test_nothing_is_written_after_the_rules_have_changed(guarded: Guarded) -> None:
    certificate = guarded.authority.issue("acme-ci")
    context = guarded.authority.context(certificate)
    request = Halfway(guarded.server, "POST", "/v1/allocations", None, ONE, context=context)
    stream = Halfway(guarded.server, "GET", "/v1/events", None, patience=60, context=context)
    refused = '[[certificate]]\nwhere = { common_name = "acme-ci" }\nrole = "none"\n'
    guarded.rules.write_text(refused + RULES)
    wait_until(lambda: guarded.who(certificate)[0] == 403)
    before = seq(guarded.server)
    assert request.finish()[0] == 403
    assert stream.read()[0] == 200, "it had begun, and has ended"
    assert seq(guarded.server) == before


def test_a_connection_has_rights_as_long_as_its_certificate(guarded: Guarded) -> None:
    certificate = guarded.authority.issue("acme-brief", valid=timedelta(seconds=8))
    context = guarded.authority.context(certificate)
    connection = http.client.HTTPSConnection(*guarded.server.address, context=context, timeout=60)

    def ask() -> tuple[int, bytes]:
        connection.request("GET", "/v1/whoami")
        answer = connection.getresponse()
        return answer.status, answer.read()

    assert ask()[0] == 200
    opened = connection.sock
    wait_until(lambda: ask()[0] == 401)
    assert b"this certificate has expired" in ask()[1]
    assert connection.sock is opened, "it is the same connection"
    connection.close()


def test_a_certificate_can_be_required(tmp_path: Path) -> None:
    strict = Guarded(tmp_path, "tls.client_required=true")
    try:
        assert strict.who(strict.authority.issue("acme-ci"))[0] == 200
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            strict.who(None)
    finally:
        strict.server.kill()
