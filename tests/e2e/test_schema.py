"""The OpenAPI document holds against requests nobody thought of: schemathesis and a real process.

Schemathesis makes requests from the document: valid ones, ones that are wrong in every way it can
think of, and chains in which one answer's id goes into the next request. Whatever comes back must
be in the document: its status, its content type, its headers, its body. And nothing may be a 5xx.

SLICEWISE_SCHEMA_EXAMPLES says how many random requests to make of each operation; what is tried
systematically comes on top. In CI the same requests are made every time.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from tests.e2e.conftest import Open, Tell
from tests.e2e.schema_hooks import FIRST_SESSION, OWN_TOKEN
from tests.e2e.server import Server

from slicewise import load_geometry
from slicewise.control.entries import Role
from slicewise.control.geometries import record_of
from slicewise.dashboard.compare import routes
from slicewise.service.routes import Route
from slicewise.service.table import ROUTES

EXAMPLES = int(os.environ.get("SLICEWISE_SCHEMA_EXAMPLES", "5"))
SETTINGS = (
    "metrics.public=false",
    "limits.requests_per_second=1000000",
    "limits.agent_requests_per_second=1000000",
    "limits.strangers_per_second=1000000",
)
"""Metrics ask for a token, as they do beyond this machine."""
_STREAM = "text/event-stream"
_ROOT = Path(__file__).parents[2]
_LAST_CHARACTERS = 12_000

# What is wrong with a request is told by a status; those of the size of a request come on top of
# what schemathesis expects by itself.
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 404, 405, 409, 413, 415, 422, 429, 431]
"""


@dataclass
class Scene:
    """A cluster to ask about, and what is known of it: examples for schemathesis to begin with."""

    server: Server
    document: dict[str, Any]
    tokens: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By role: a token's id and its secret."""
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By operation: examples of its parameters by name, and of its body under ``body``."""

    def ask(self, status: int, method: str, path: str, body: object = None, **options: Any) -> Any:
        """Ask, and insist on how it ends."""
        got, said = self.server.ask(method, path, body, **options)
        assert got == status, said
        return said

    def token(self, role: Role, **options: Any) -> None:
        """Issue a token to ask with."""
        made = self.ask(201, "POST", "/v1/tokens", {"role": role} | options)
        self.tokens[role] = made["id"], made["token"]

    def place(self, **options: Any) -> Any:
        """Have an allocation placed, for the tenant."""
        body = {"profile": "1g.10gb", "tenant": "acme"} | options
        return self.ask(201, "POST", "/v1/allocations", body)

    def join(self, node: str) -> tuple[dict[str, Any], dict[str, Any], str]:
        """Have an agent begin: what it says, what it reports, and its session."""
        self.token(Role.AGENT, node=node)
        token = self.tokens[Role.AGENT][1]
        hello = {
            "boot": "b1",
            "agent": "0.1.0",
            "driver": "580",
            "model": "H200-141GB",
            "geometry": msgspec.to_builtins(record_of(load_geometry("H200-141GB"))),
            "disagreements": ["1g.18gb: the driver offers otherwise"],
            "gpus": [{"uuid": "GPU-0", "mig": True}],
        }
        session = self.ask(200, "POST", "/v1/agent/hello", hello, token=token)["session"]
        found = {"gpu": "GPU-0", "profile": "1g.18gb", "size": 1}
        report = {
            "session": session,
            "gpus": [{"uuid": "GPU-0", "mig": True, "temperature": 40}],
            "foreign": [found | {"uuid": f"MIG-{at}", "start": at} for at in (1, 2)],
        }
        self.ask(200, "POST", "/v1/agent/report", report, token=token)
        return hello, report, session

    def furnish(self) -> None:
        """Something of everything, and a request for every operation that will be granted."""
        for name, model, gpus in (("n1", "A100-80GB", 8), ("n2", "A30-24GB", 2), ("n3", "H20", 2)):
            self.ask(201, "POST", "/v1/nodes", {"name": name, "model": model, "gpus": gpus})
        for name in ("acme", "leaving"):
            quota = {"requests_per_second": 1e6}
            self.ask(201, "POST", "/v1/tenants", {"name": name, "quota": quota})
        for role in (Role.ADMIN, Role.OPERATOR):
            self.token(role)
        for role in (Role.TENANT, Role.READ_ONLY):
            self.token(role, tenant="acme")
        hello, report, session = self.join("g1")
        stays, goes, moves = self.place(), self.place(), self.place()
        spare = self.ask(201, "POST", "/v1/tokens", {"role": "read-only"})
        body = {"profile": "2g.20gb", "wait_seconds": 60, "labels": {"team": "vision"}}
        move = {name: moves[name] for name in ("profile", "node", "gpu", "start")}
        target = {"to_node": "n1", "to_gpu": 7, "to_start": 0}
        self.examples = {
            "createAllocation": {"body": body},
            "releaseAllocation": {"id": goes["id"]},
            "getAllocation": {"id": stays["id"]},
            "createAllocations": {"body": {"allocations": [{"profile": "1g.10gb"}]}},
            "dryRun": {"body": body, "policy": ["mfi"]},
            "addNode": {"body": {"name": "n4", "model": "A100-80GB", "gpus": 1}},
            "getNode": {"name": "n1"},
            "removeNode": {"name": "n3"},
            "cordonNode": {"name": "n2"},
            "uncordonNode": {"name": "n2"},
            "drainNode": {"name": "n2"},
            "acceptNode": {"name": "g1"},
            "adoptForeign": {"name": "g1", "uuid": "MIG-1", "body": {"tenant": "acme"}},
            "evictForeign": {"name": "g1", "uuid": "MIG-2"},
            "agentHello": {"body": hello},
            "agentDesired": {"session": session, "after": 0, "wait": 1},
            "agentReport": {"body": report},
            "addTenant": {"body": {"name": "globex"}},
            "getTenant": {"name": "acme"},
            "changeTenant": {"name": "acme", "body": {"quota": {"instances": None}}},
            "removeTenant": {"name": "leaving"},
            "issueToken": {"body": {"role": "tenant", "tenant": "acme", "note": "spare"}},
            "rotateToken": {"id": spare["id"]},
            "revokeToken": {"id": spare["id"]},
            "planDefrag": {"profile": "1g.10gb"},
            "defrag": {"body": {"moves": [{"allocation": moves["id"]} | move | target]}},
        }

    def let_wait(self) -> None:
        """Have a request of the tenant wait for longer than anybody looks."""
        body = {"profile": "7g.80gb", "count": 64, "wait_seconds": 86400, "tenant": "acme"}
        self.ask(202, "POST", "/v1/allocations", body)

    def with_examples(self) -> dict[str, Any]:
        """The document, with examples that mean something here."""
        document: dict[str, Any] = json.loads(json.dumps(self.document))
        for methods in document["paths"].values():
            for operation in methods.values():
                given = self.examples.get(operation["operationId"], {})
                for parameter in operation["parameters"]:
                    if parameter["name"] in given:
                        parameter["example"] = given[parameter["name"]]
                if "body" in given:
                    (content,) = operation["requestBody"]["content"].values()
                    content["example"] = given["body"]
        return document


@pytest.fixture
def scene(open_server: Open) -> Scene:
    """A process of its own: what one who may do everything has done would be in others' way."""
    server = open_server("schema", settings=SETTINGS)
    server.start()
    status, document = server.ask("GET", "/openapi.json")
    assert status == 200
    made = Scene(server, document)
    made.furnish()
    return made


@dataclass
class Outcome:
    """How a run of schemathesis ended."""

    status: int
    said: str
    report: dict[str, Any]

    def accepted(self) -> set[str]:
        """The operations of which a request was granted."""
        return {
            name
            for name, phases in self.report["valid_rates"].items()
            if any(phase["accepted"] for phase in phases.values())
        }


def attack(
    scene: Scene,
    folder: Path,
    role: Role | None,
    *options: str,
    document: dict[str, Any] | None = None,
) -> Outcome:
    """Let schemathesis loose on a server, as the bearer of a token or as nobody."""
    own, secret = scene.tokens[role] if role is not None else ("", "")
    (folder / "document.json").write_text(json.dumps(document or scene.with_examples()))
    (folder / "config.toml").write_text(CONFIG)
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", "config.toml"),
        *("run", "document.json", "--url", scene.server.url, "--exclude-operation-id"),
        *("followEvents", "--checks", "all", "--exclude-checks", "positive_data_acceptance"),
        *("--max-examples", str(EXAMPLES), "--continue-on-failure", "--no-color"),
        *("--report", "json", "--report-json-path", "report.json", *options),
    ]
    if role is not None:
        command += ["--header", f"Authorization: Bearer {secret}"]
    if os.environ.get("CI"):
        command += ["--generation-deterministic"]
    else:
        command += ["--generation-database", "none"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(_ROOT),
        "SCHEMATHESIS_HOOKS": "tests.e2e.schema_hooks",
        OWN_TOKEN: own,
        FIRST_SESSION: scene.examples["agentDesired"]["session"],
    }
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    said = "\n".join(line[:500] for line in ended.stdout.splitlines())[-_LAST_CHARACTERS:]
    assert (folder / "report.json").exists(), said
    return Outcome(ended.returncode, said, json.loads((folder / "report.json").read_text()))


def operation(route: Route) -> str:
    """An operation, as the report calls it."""
    return f"{route.method} {route.path}"


@pytest.mark.parametrize(
    "role", [Role.ADMIN, Role.TENANT, Role.AGENT, None], ids=lambda role: str(role or "nobody")
)
def test_every_answer_is_in_the_document(
    scene: Scene, tmp_path: Path, tell: Tell, role: Role | None
) -> None:
    if role is Role.TENANT:
        scene.let_wait()
    ended = attack(scene, tmp_path, role)
    assert ended.status == 0, ended.said
    report = ended.report
    tried = [route for route in (*ROUTES, *routes()) if _STREAM not in route.answers.values()]
    assert report["complete"]
    assert report["errors"] == []
    assert report["operations"]["tested"] == len(tried)
    assert [report["phases"][name]["status"] for name in ("examples", "coverage", "fuzzing")] == [
        "success"
    ] * 3, report["phases"]
    tell(f"schemathesis, {role or 'nobody'}: {report['test_cases']['generated']:,} requests")
    # It was not turned away at the door: whatever this role may ask, something of it was granted.
    may = {operation(route) for route in tried if route.roles is None or role in route.roles}
    if role is not Role.ADMIN:
        may -= {"GET /metrics"}  # asks for a token by itself, of one who sees everything
    # An agent sees its own node only, whose name may not be guessed.
    luck = {"GET /v1/nodes/{name}"} if role is Role.AGENT else set()
    if role is Role.ADMIN:
        luck = {"POST /v1/clock/accept"}  # while the clocks agree there is nothing to accept
    assert may - luck <= ended.accepted() <= may
    if role is not None:
        assert scene.server.ask("GET", "/v1/whoami", token=scene.tokens[role][1])[0] == 200


def test_a_document_that_is_not_true_is_found_out(scene: Scene, tmp_path: Path) -> None:
    wrong = scene.with_examples()
    del wrong["paths"]["/v1/allocations/{id}"]["get"]["responses"]["404"]
    wrong["components"]["schemas"]["WhoView"]["properties"]["id"] = {"type": "integer"}
    names = ("getAllocation", "whoami")
    only = [option for name in names for option in ("--include-operation-id", name)]
    ended = attack(scene, tmp_path, Role.TENANT, *only, document=wrong)
    assert ended.status == 1, ended.said
    assert "Undocumented status code" in ended.said
    assert "Response violates schema" in ended.said


# The stream of events does not end, so it is asked for here.


def head_of_stream(
    server: Server, query: str, headers: dict[str, str]
) -> tuple[int, str, list[str]]:
    """The status, the content type, and the first blocks of a stream or all of a refusal."""
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    try:
        connection.request("GET", f"/v1/events{query}", headers=headers)
        answer = connection.getresponse()
        content = answer.headers["content-type"].split(";")[0]
        if answer.status != 200:
            return answer.status, content, [answer.read().decode()]
        blocks: list[str] = []
        block = ""
        while len(blocks) < 6:
            line = answer.readline().decode()
            block += line
            if line == "\n":
                blocks.append(block)
                block = ""
        return answer.status, content, blocks
    finally:
        connection.close()


@pytest.mark.parametrize("role", [Role.ADMIN, Role.OPERATOR, Role.TENANT, Role.READ_ONLY, None])
@pytest.mark.parametrize(
    ("query", "last"),
    [
        ("?after=0", None),
        ("", "0"),
        ("?after=3", "1"),
        ("?after=-1", None),
        ("?after=x", None),
        ("?after=", None),
        ("?after=1&after=2", None),
        ("?before=1", None),
        ("?after=99999999999999999999", None),
        ("?after=99999999999999999", None),
        ("", "0123456789abcdef-1"),
        ("", "-1"),
        ("", "x"),
        ("", "9" * 18),
        ("?%ff", None),
    ],
)
def test_the_stream_of_events_is_as_documented(
    shared: Scene, role: Role | None, query: str, last: str | None
) -> None:
    headers = {} if last is None else {"last-event-id": last}
    if role is not None:
        headers["authorization"] = f"Bearer {shared.tokens[role][1]}"
    status, content, blocks = head_of_stream(shared.server, query, headers)
    answers = shared.document["paths"]["/v1/events"]["get"]["responses"]
    assert list(answers[str(status)]["content"]) == [content]
    good = query in ("", "?after=0", "?after=3") and (last or "0") in ("0", "1")
    gone = query == "?after=99999999999999999" or "-" in (last or "").lstrip("-")
    assert status == (401 if role is None else 200 if good else 410 if gone else 400)
    if status != 200:
        check(shared, "Problem", json.loads(blocks[0]))
        return
    assert re.fullmatch(r"retry: 2000\nid: [0-9a-f]{16}-\d+\n\n", blocks[0])
    numbers = [0]
    for block in blocks[1:]:
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line)
        event = json.loads(fields["data"])
        check(shared, "EventView", event)
        assert fields["id"].rpartition("-")[2] == str(event["seq"])
        assert fields["event"] == event["kind"]
        numbers.append(event["seq"])
    assert numbers == sorted(set(numbers))


def check(scene: Scene, name: str, value: object) -> None:
    """Hold a value against a schema of the document."""
    whole = {"$ref": f"#/components/schemas/{name}", "components": scene.document["components"]}
    jsonschema_rs.Draft202012Validator(whole).validate(value)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One process for those who only look."""
    server = Server(tmp_path_factory.mktemp("stream"), settings=SETTINGS)
    try:
        server.start()
        made = Scene(server, server.ask("GET", "/openapi.json")[1])
        made.furnish()
        made.let_wait()
        yield made
    finally:
        server.kill()
