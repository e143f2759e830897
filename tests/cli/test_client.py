"""The service commands, against a real service."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import stat
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
from tests.client.running import Running, running

from slicewise.api.allocations import AllocationView
from slicewise.cli import completion
from slicewise.cli.allocations import StateName
from slicewise.cli.main import exit_status
from slicewise.cli.main import run as main_run
from slicewise.cli.tenants import RoleName
from slicewise.cli.top_live import _transient
from slicewise.client import ApiError, Client, Problem, UnreachableError
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Role

ID = r"a[a-z2-7]{20}"
Run = Callable[..., "Outcome"]


class Outcome(NamedTuple):
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[list[str]]:
        """The words of each line."""
        return [line.split() for line in self.out.splitlines()]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One service for all tests, with two nodes of two models."""
    with running(tmp_path_factory.mktemp("service")) as made:
        with Client(made.url, made.token) as client:
            client.add_node("n1", "A100-80GB", 2)
            client.add_node("n2", "A30-24GB", 1, labels={"rack": "r1"})
        yield made


@pytest.fixture
def admin(service: Running) -> Iterator[Client]:
    """An admin client; the service is emptied after the test."""
    with Client(service.url, service.token) as client:
        yield client
        for one in list(client.allocations()):
            client.release(one.id)


@pytest.fixture
def run(service: Running, admin: Client, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function that runs a command as the admin."""
    for name in [name for name in os.environ if name.startswith("SLICEWISE_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("SLICEWISE_SERVER", service.url)
    monkeypatch.setenv("SLICEWISE_TOKEN_FILE", str(service.token_file))
    return outcome


def outcome(*arguments: str) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = exit_status(arguments)
    return Outcome(status, out.getvalue(), err.getvalue())


def good(run: Run, *arguments: str) -> Outcome:
    """Run a command that succeeds."""
    made = run(*arguments)
    assert (made.status, made.err) == (0, ""), made
    return made


def refused(run: Run, *arguments: str) -> str:
    """Run a command that fails with one line."""
    made = run(*arguments)
    assert made.status == 2, made
    assert made.out == ""
    assert len(made.err.splitlines()) == 1
    return made.err.removeprefix("slicewise: error: ").strip()


# Allocations


def test_submit_show_ls_release(run: Run) -> None:
    made = good(run, "submit", "3g.40gb", "--label", "app=web", "--label", "note=a=b c")
    match = re.fullmatch(rf"({ID}) 3g\.40gb on n1 GPU 0 at slice \d\n", made.out)
    assert match is not None
    identity = match[1]
    shown = good(run, "show", identity)
    facts = dict(line.split(maxsplit=1) for line in shown.out.splitlines())
    assert facts["allocation"] == identity
    assert facts["state"] == "placed"
    assert facts["request"] == "3g.40gb"
    assert facts["labels"] == "app=web note=a=b c"
    assert facts["instance"].endswith("(A100-80GB)")
    assert "ended" not in facts
    (listed,) = good(run, "ls").lines[1:]
    assert listed[:5] == [identity, "placed", "default", "3g.40gb", "n1"]
    for option in (
        ("--state", "placed"),
        ("--profile", "3g.40gb"),
        ("--node", "n1"),
        ("--model", "A100-80GB"),
        ("--tenant", "default"),
        ("--label", "app=web", "--label", "note=a=b c"),
    ):
        assert identity in good(run, "ls", *option).out
    for option in (("--state", "queued"), ("--node", "n2"), ("--label", "app=other")):
        assert good(run, "ls", *option).out == "no allocations\n"
    assert good(run, "release", identity).out == f"{identity} released\n"
    assert good(run, "release", identity).out == f"{identity} released\n"  # changes nothing
    assert "ended      20" in good(run, "show", identity).out
    assert identity in good(run, "ls", "--state", "released").out


def test_the_same_in_json(run: Run) -> None:
    made = good(run, "submit", "1g.10gb", "--json").json
    assert made["state"] == "placed"
    assert good(run, "show", made["id"], "--json").json == made
    assert good(run, "ls", "--json").json == [made]
    (ended,) = good(run, "release", made["id"], "--json").json
    assert (ended["id"], ended["state"]) == (made["id"], "released")
    assert good(run, "queue", "--json").json == []
    assert good(run, "ls", "--json").json == []


def test_needs_leases_labels_and_keys(run: Run) -> None:
    made = good(
        run, "submit", "--compute", "1", "--memory", "8", "--model", "a100", "--model", "A30-24GB",
        "--count", "2", "--lease", "600", "--priority", "5", "--tenant", "default", "--key", "k1",
        "--preemptible", "--expected-seconds", "300.5",
    )  # fmt: skip
    identity = made.out.split()[0]
    assert len(made.lines) == 2
    shown = good(run, "show", identity).out
    assert "request    2 x 1 compute slice and 8 GB on A100-80GB or A30-24GB\n" in shown
    assert "priority   5\n" in shown
    assert "terms      preemptible\n" in shown
    assert "expected   300.5 seconds\n" in shown
    assert "lease ends 20" in shown
    assert shown.count("instance   ") == 2
    assert len(good(run, "ls").lines) == 3
    again = good(
        run, "submit", "--compute", "1", "--memory", "8", "--model", "a100", "--model", "A30-24GB",
        "--count", "2", "--lease", "600", "--priority", "5", "--tenant", "default", "--key", "k1",
        "--preemptible", "--expected-seconds", "300.5",
    )  # fmt: skip
    assert again == made
    assert good(run, "submit", "--memory", "20").out.split()[1] in ("2g.20gb", "1g.20gb", "4g.24gb")


def test_a_lease_is_extended(run: Run) -> None:
    identity = good(run, "submit", "1g.10gb", "--lease", "600").out.split()[0]
    first = good(run, "show", identity, "--json").json["ends_at"]
    longer = good(run, "extend", identity, "900", "--key", "k", "--json").json
    assert longer["ends_at"] > first
    again = good(run, "extend", identity, "900", "--key", "k").out
    assert again == f"{identity}: its lease ends at {longer['ends_at']}\n"
    told = refused(run, "extend", identity, "0")
    assert told == "invalid lease_seconds: expected float > 0.0"
    good(run, "release", identity)
    assert refused(run, "extend", identity, "900") == (
        f"allocation {identity!r} has ended: its lease cannot be extended"
    )
    endless = good(run, "submit", "1g.10gb").out.split()[0]
    assert "has no lease to extend" in refused(run, "extend", endless, "900")
    good(run, "release", endless)


def test_a_rejection_is_reported_with_exit_status_1(run: Run) -> None:
    good(run, "submit", "7g.80gb", "--count", "2")
    told = run("submit", "1g.10gb")
    assert (told.status, told.out) == (1, "")
    assert re.fullmatch(r"rejected \(capacity\): no GPU has enough free for 1g\.10gb.*\n", told.err)
    as_json = run("submit", "1g.10gb", "--json")
    assert (as_json.status, as_json.err) == (1, "")
    assert (as_json.json["reason"], as_json.json["status"]) == ("capacity", 409)


def test_waiting(run: Run, admin: Client) -> None:
    assert good(run, "queue").out == "the queue is empty\n"
    whole = good(run, "submit", "7g.80gb", "--count", "2").out.split()[0]
    waits = good(run, "submit", "1g.10gb", "--wait", "600", "--priority", "7")
    identity = waits.out.split()[0]
    assert re.fullmatch(
        rf"{ID} is number 1 in its line: no GPU has enough free for .*\n", waits.out
    )
    header, row = good(run, "queue").lines
    assert header[:4] == ["Tenant", "Request", "Waiting", "Oldest"]
    assert row[:3] == ["default", "1g.10gb", "1"]
    assert row[4:7] == ["capacity:", "no", "GPU"]
    (line,) = good(run, "queue", "--json").json
    assert (line["first"], line["waiting"], line["reserved"]) == (identity, 1, [])
    header, row = good(run, "queue", "--requests").lines
    assert header == [
        "Allocation",
        "Tenant",
        "Request",
        "Priority",
        "Since",
        "Until",
        "Place",
        "Why",
    ]
    assert row[:4] == [identity, "default", "1g.10gb", "7"]
    assert row[-2:] == ["1", "capacity"]
    assert good(run, "queue", "--requests", "--json").json[0]["id"] == identity
    said = good(run, "queue", "--why", identity).out.splitlines()
    assert 3 <= len(said) <= 6
    assert said[0].startswith(f"{identity} waits for 1g.10gb of default, since ")
    assert said[1].startswith("  why: capacity: no GPU has enough free for 1g.10gb")
    assert said[2].startswith("  moves: not even moving all instances would make room: 0 slices")
    assert said[3] == "  place: number 1 in its line; no other tenant comes first"
    assert said[4].startswith("  expected: not known; it gives up at 20")
    explained = good(run, "queue", "--why", identity, "--json").json["waiting"]
    assert explained["repack"]["moves"] is None
    assert "does not wait: it is placed" in good(run, "queue", "--why", whole).out
    assert "give one of them" in refused(run, "queue", "--why", identity, "--requests")
    shown = good(run, "show", identity).out
    assert "waiting    number 1 in its line" in shown
    assert "why        capacity: no GPU" in shown
    assert "until      20" in shown
    good(run, "release", whole)
    assert good(run, "show", identity, "--json").json["state"] == "placed"
    good(run, "release", identity)


def test_waiting_until_placed(run: Run, service: Running, admin: Client) -> None:
    assert " on n1 GPU " in good(run, "submit", "1g.10gb", "--wait", "60", "--until-placed").out
    whole = admin.allocate("7g.80gb")
    admin.allocate("1g.10gb", count=6)
    process = subprocess.Popen(
        [sys.executable, "-m", "slicewise.cli", "submit", "7g.80gb", "--wait", "600",
         "--until-placed"],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    while not service.service.context.streams.open:
        assert process.poll() is None
        time.sleep(0.02)
    admin.release(whole.id)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert re.fullmatch(rf"{ID} 7g\.80gb on n1 GPU \d at slice 0\n", out)
    vain = run("submit", "7g.80gb", "--wait", "0.2", "--until-placed")
    assert (vain.status, vain.err) == (1, "")
    assert re.fullmatch(rf"{ID} cancelled \(waited too long\)\n", vain.out)


def test_release_continues_after_an_unknown_allocation(run: Run) -> None:
    first, second = (good(run, "submit", "1g.10gb").out.split()[0] for _ in range(2))
    made = run("release", first, "nothing", second, "more")
    assert made.status == 2
    assert made.out == f"{first} released\n{second} released\n"
    assert made.err == ("slicewise: error: no allocation 'nothing'; no allocation 'more'\n")
    assert good(run, "ls").out == "no allocations\n"


def test_release_reports_what_it_did_before_a_failure(run: Run) -> None:
    first = good(run, "submit", "1g.10gb").out.split()[0]
    made = run("release", first, "a/b")
    assert (made.status, made.out) == (2, f"{first} released\n")
    assert made.err == "slicewise: error: 'a/b' is not a valid name or id\n"


def test_a_limited_list_is_marked(run: Run, admin: Client) -> None:
    for _ in range(3):
        admin.allocate("1g.10gb")
    made = run("ls", "--limit", "2")
    assert len(made.lines) == 3
    assert made.err == "there are more than 2: --limit N shows them\n"
    assert len(good(run, "ls", "--limit", "3").lines) == 4


def test_explain(run: Run, admin: Client) -> None:
    admin.allocate("1g.10gb")
    made = good(run, "explain", "3g.40gb", "--policy", "mfi", "--policy", "worst-fit")
    first, cost, *rest = made.out.splitlines()
    assert re.fullmatch(r"placed: 3g\.40gb would go to GPU \d of 'n1' at slice \d", first)
    assert re.fullmatch(
        r"  by rehearsed \(table least-lost\), at the cost of F [+-]\d+ and \d+ open placements",
        cost,
    )
    columns = ["Alternative", "Slices", "Start", "F", "Lost", "Alike", "Why", "not"]
    assert rest[1].split() == columns
    policies = {line.split()[0] for line in rest if " GPU " in line}
    assert policies >= {"mfi", "worst-fit"}
    document = good(run, "explain", "3g.40gb", "--policy", "mfi", "--json").json
    assert document["outcome"] == "placed"
    assert [choice["policy"] for choice in document["policies"]] == ["mfi"]
    several = good(run, "explain", "--compute", "1", "--count", "2", "--model", "A30-24GB").out
    assert several.count("1g.6gb on n2 GPU 0 at slice") == 2
    admin.allocate("7g.80gb")
    admin.allocate("7g.80gb", wait_seconds=600)
    nowhere = good(run, "explain", "7g.80gb", "--policy", "mfi").out
    assert nowhere.startswith("rejected (capacity): ")
    assert "  1 request waits for the same already\n" in nowhere
    assert re.search(r"^mfi +none: ", nowhere, re.MULTILINE)
    admin.allocate("7g.80gb", wait_seconds=600)
    assert "  2 requests wait for the same already\n" in good(run, "explain", "7g.80gb").out


def test_invalid_requests(run: Run) -> None:
    assert "name a profile, or a need" in refused(run, "submit")
    assert "not both" in refused(run, "explain", "1g.10gb", "--compute", "1")
    assert refused(run, "submit", "1g.10gb", "--label", "app") == "label 'app' is not KEY=VALUE"
    assert "'a' is given twice" in refused(run, "ls", "--label", "a=1", "--label", "a=2")
    assert refused(run, "submit", "1g.10gb", "--count", "0") == "invalid count: expected int >= 1"
    assert "invalid wait_seconds: expected float" in refused(
        run, "submit", "1g.10gb", "--wait", "-1"
    )
    assert "idempotency key must be" in refused(run, "submit", "1g.10gb", "--key", "")
    assert "unknown profile '9g.1gb'" in refused(run, "submit", "9g.1gb")
    assert "unknown policy 'x'" in refused(run, "explain", "1g.10gb", "--policy", "x")
    assert "no tenant 'unknown'" in refused(run, "submit", "1g.10gb", "--tenant", "unknown")
    assert refused(run, "show", "nothing") == "no allocation 'nothing'"
    assert "not a valid name or id" in refused(run, "show", "../nodes")
    assert "'asleep' is not one of 'queued', 'placed'" in refused(run, "ls", "--state", "asleep")
    assert refused(run, "ls", "--limit", "0") == "limit must be at least 1, not 0"


# Nodes, tenants, tokens


def test_nodes(run: Run, admin: Client) -> None:
    header, first, second = good(run, "nodes").lines
    assert header == ["Node", "Model", "GPUs", "State", "Instances", "Free", "slices", "Labels"]
    assert first == ["n1", "A100-80GB", "2", "ready", "0", "16/16"]
    assert second == ["n2", "A30-24GB", "1", "ready", "0", "4/4", "rack=r1"]
    assert [node["name"] for node in good(run, "nodes", "--json").json] == ["n1", "n2"]
    made = good(run, "nodes", "add", "n3", "--model", "h100", "--gpus", "1", "--label", "a=b")
    assert made.out == "n3: 1 x H100-80GB-SXM5, ready\n"
    assert "already exists" in refused(run, "nodes", "add", "n3", "--model", "h100", "--gpus", "1")
    assert good(run, "nodes", "cordon", "n3").out == "n3: cordoned\n"
    assert good(run, "nodes", "uncordon", "n3").out == "n3: ready\n"
    made = good(run, "submit", "7g.80gb", "--model", "h100")
    identity = made.out.split()[0]
    assert good(run, "nodes", "drain", "n3").out == "n3: draining, 1 instance left\n"
    assert "n3" in refused(run, "nodes", "rm", "n3")
    assert good(run, "nodes", "drain", "n3", "--evict").out == "n3: drained\n"
    assert "state      released (evicted)" in good(run, "show", identity).out
    assert good(run, "nodes", "rm", "n3").out == "n3: removed\n"
    for action in ("cordon", "uncordon", "drain", "rm"):
        assert refused(run, "nodes", action, "n3") == "no node 'n3'"
    added = good(run, "nodes", "add", "n4", "--model", "A30", "--gpus", "1", "--json").json
    assert added["model"] == "A30-24GB"
    for action, state in (("cordon", "cordoned"), ("uncordon", "ready"), ("drain", "drained")):
        assert good(run, "nodes", action, "n4", "--json").json["state"] == state
    assert good(run, "nodes", "rm", "n4", "--json").json["name"] == "n4"
    assert "unknown GPU model" in refused(run, "nodes", "add", "x", "--model", "T4", "--gpus", "1")
    assert "invalid gpus" in refused(run, "nodes", "add", "x", "--model", "A30", "--gpus", "0")


def test_tenants_and_quotas(run: Run, admin: Client) -> None:
    assert good(run, "tenants").lines[1] == ["default", *("0000"), "1", "0", "0"]
    made = good(
        run, "tenants", "add", "acme", "--memory-slices", "8", "--instances", "2",
        "--requests-per-second", "2.5", "--max-priority", "-1", "--weight", "0.5",
        "--guarantee", "7", "--max-lease", "3600", "--default-lease", "90.5",
    )  # fmt: skip
    assert made.out == "acme: created\n"
    header, acme, _ = good(run, "tenants").lines
    assert header == [
        "Tenant", "Memory", "Compute", "Instances", "Waiting",
        "Weight", "Guarantee", "Priority", "Rate", "Lease",
    ]  # fmt: skip
    assert acme[:9] == ["acme", "0/8", "0", "0/2", "0", "0.5", "7", "-1", "2.5/s"]
    assert " ".join(acme[9:]) == "90.5 s, at most 3600 s"
    assert good(run, "tenants", "quota", "acme", "--instances", "none").out == "acme: changed\n"
    changed = good(run, "tenants", "quota", "acme", "--compute-slices", "5", "--json").json
    assert changed["quota"] == {
        "memory_slices": 8,
        "compute_slices": 5,
        "requests_per_second": 2.5,
        "max_priority": -1,
        "weight": 0.5,
        "guarantee": 7,
        "default_lease_seconds": 90.5,
        "max_lease_seconds": 3600,
    }
    good(run, "tenants", "quota", "acme", "--max-lease", "none", "--memory-slices", "1e1")
    assert good(run, "tenants").lines[1][9:] == ["90.5", "s"]
    assert admin.tenant("acme").quota.memory_slices == 10
    full = run("submit", "3g.40gb", "--count", "3", "--tenant", "acme")
    assert full.status == 1
    assert full.err.startswith("rejected (quota): ")
    assert "already exists" in refused(run, "tenants", "add", "acme")
    assert "name at least one term" in refused(run, "tenants", "quota", "acme")
    for text in ("some", "nan", "inf", "1.5", ""):
        assert refused(run, "tenants", "quota", "acme", "--instances", text) == (
            f"--instances must be a whole number or none, not {text!r}"
        )
    for option, text, kind in (
        ("--requests-per-second", "x", "a number or none"),
        ("--max-lease", "inf", "a number or none"),
        ("--weight", "none", "a number"),
        ("--guarantee", "none", "a whole number"),
    ):
        told = refused(run, "tenants", "add", "x", option, text)
        assert told == f"{option} must be {kind}, not {text!r}"
    assert "invalid quota.instances: expected int >= 0" in refused(
        run, "tenants", "add", "x", "--instances", "-1"
    )
    assert good(run, "tenants", "--json").json[0]["name"] == "acme"
    assert good(run, "tenants", "rm", "acme").out == "acme: removed\n"
    assert refused(run, "tenants", "rm", "acme") == "no tenant 'acme'"


def test_tokens(run: Run, admin: Client, service: Running, tmp_path: Path) -> None:
    admin.add_tenant("acme")
    made = good(run, "tokens", "issue", "tenant", "--tenant", "acme", "--note", "of a test")
    first, secret = made.out.split("\n")[:2]
    assert re.fullmatch(r"t[a-z2-7]{20} tenant", first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLICEWISE_TOKEN", secret)
        patch.delenv("SLICEWISE_TOKEN_FILE")
        assert good(run, "tenants").lines[1:] == [["acme", *("0000"), "1", "0", "0"]]
        assert refused(run, "tokens") == "a token of role tenant may not do this"
        by_file = good(run, "tokens", "--token-file", str(service.token_file))  # goes first
        assert " admin " in by_file.out
    file = tmp_path / "acme-token"
    made = good(run, "tokens", "issue", "read-only", "--tenant", "acme", "--out", str(file),
                "--expires-in", "3600")  # fmt: skip
    assert re.fullmatch(rf"t[a-z2-7]{{20}} read-only, in {re.escape(str(file))}\n", made.out)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with Client(service.url, file.read_text().strip()) as acme:
        assert acme.whoami().role == "read-only"
    assert "already exists" in refused(run, "tokens", "issue", "admin", "--out", str(file))
    kept = tmp_path / "kept"
    assert "must name its tenant" in refused(run, "tokens", "issue", "tenant", "--out", str(kept))
    assert not kept.exists()  # nothing was issued, nothing is left behind
    assert "cannot be written" in refused(
        run, "tokens", "issue", "admin", "--out", str(tmp_path / "no" / "such")
    )
    agent = ("agent", "--node", "n1", "--out", str(kept))
    told = good(run, "tokens", "issue", *agent, "--json").json
    assert (told["node"], told["token"]) == ("n1", "")
    shown = good(run, "tokens", "issue", "operator", "--json").json
    assert shown["token"].startswith("sw_")
    listed = good(run, "tokens")
    assert listed.lines[0] == ["Token", "Role", "For", "Expires", "Note"]
    assert [told["id"], "agent", "n1", "never"] in listed.lines
    assert "sw_" not in listed.out
    assert {one["id"] for one in good(run, "tokens", "--json").json} >= {told["id"]}
    gone = good(run, "tokens", "revoke", told["id"])
    assert gone.out == f"{told['id']}: revoked\n"
    assert "no token" in refused(run, "tokens", "revoke", told["id"])
    assert "'king' is not one of 'admin', 'operator'" in refused(run, "tokens", "issue", "king")
    assert good(run, "tokens", "revoke", shown["id"], "--json").json["id"] == shown["id"]
    admin.remove_tenant("acme")


@pytest.mark.parametrize("group", ["nodes", "tenants", "tokens"])
def test_options_go_after_the_command(run: Run, group: str) -> None:
    arguments = {"nodes": ("cordon", "n1"), "tenants": ("rm", "x"), "tokens": ("revoke", "x")}
    command = arguments[group]
    for option in (("--server", "http://x"), ("--token-file", "x"), ("--json",)):
        assert refused(run, group, *option, *command) == (
            f"put {option[0]} after {command[0]!r}, not before it"
        )


def test_the_enums_match_the_service() -> None:
    assert [*RoleName] == [*Role]
    assert [*StateName] == [*get_args(get_type_hints(AllocationView)["state"])]


# Finding the service


def test_no_token(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLICEWISE_TOKEN_FILE")
    for command in (["ls"], ["submit", "1g.10gb"], ["nodes"], ["events"], ["top"]):
        assert refused(run, *command).startswith("no token: name its file with --token-file")


def test_invalid_token_files(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert refused(run, "ls", "--token-file", str(missing)) == (
        f"the token file {str(missing)!r} cannot be read: No such file or directory"
    )
    assert "Is a directory" in refused(run, "ls", "--token-file", str(tmp_path))
    for content in (b"", b"two words", b"\xff\xfe\x00", "ключ".encode(), b"a\nb"):
        file = tmp_path / "token"
        file.write_bytes(content)
        assert "token" in refused(run, "ls", "--token-file", str(file))
    file.write_text("sw_unknown\n")
    told = refused(run, "ls", "--token-file", str(file))
    assert told.startswith("unknown token; it may have been revoked (token from ")
    assert str(file) in told


def test_a_bad_token_in_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLICEWISE_TOKEN_FILE")
    monkeypatch.setenv("SLICEWISE_TOKEN", "two words")
    assert refused(run, "ls") == "SLICEWISE_TOKEN does not hold a token"
    monkeypatch.setenv("SLICEWISE_TOKEN", "sw_unknown")
    assert "(token from SLICEWISE_TOKEN, server http://" in refused(run, "ls")


def test_an_unreachable_service(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicewise.cli.connection.PATIENCE", 0.0)
    for command in (["ls"], ["events"], ["top", "--once"], ["release", "x"]):
        told = refused(run, *command, "--server", "http://127.0.0.1:1")
        assert told == (
            "no answer from http://127.0.0.1:1: connection refused; is the service running there? "
            "(--server URL names another)"
        )
    assert "is not the address of a server" in refused(run, "ls", "--server", "127.0.0.1:1")


# Watching


def test_events(run: Run, admin: Client) -> None:
    admin.add_tenant("watched")
    admin.remove_tenant("watched")
    seq = admin.readiness().seq
    made = good(run, "events", "--after", str(seq - 2), "--count", "2")
    me = admin.whoami()
    by = f" [{me.id}, admin ({me.note}), from 127.0.0.1]"
    assert [line.split(" ", 3)[3] for line in made.out.splitlines()] == [
        f"tenant-set watched: no limits{by}",
        f"tenant-removed watched{by}",
    ]
    as_json = good(run, "events", "--after", str(seq - 1), "--count", "1", "--json")
    assert json.loads(as_json.out)["seq"] == seq
    assert refused(run, "events", "--count", "0") == "count must be at least 1, not 0"
    assert refused(run, "events", "--after", "-1") == "after must be at least 0, not -1"


def test_events_end_quietly_when_interrupted(service: Running, run: Run) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "slicewise.cli", "events", "--after", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "tenant-set" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")


def test_top_once(run: Run, admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.allocate("3g.40gb")
    admin.cordon("n2")
    made = good(run, "top", "--once").out
    admin.uncordon("n2")
    assert re.match(r"slicewise \d\d:\d\d:\d\d   1 of 3 GPUs in use   4/20 slices \(20%\)", made)
    assert "A100-80GB  12/16  1g.10gb 2   " in made
    (n1,) = (line for line in made.splitlines() if line.startswith("n1 "))
    assert re.fullmatch(r"n1 ▏(░░░░3███|3███░░░░)▏░░░░░░░░▏", n1)
    assert "n2 ▏░░░░▏ cordoned" in made
    document = good(run, "top", "--once", "--json").json
    assert document["gpus"] == len(document["devices"]) == 3
    assert good(run, "top").out.startswith("slicewise ")  # no terminal: once is enough
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")  # one that can only be written to, line by line
    assert "slicewise " in good(run, "top").out
    assert "interval must be 0.1 to 3600" in refused(run, "top", "--interval", "0")


def test_top_on_a_terminal(run: Run, service: Running, admin: Client) -> None:
    """Draws a frame, and another one after a change, on a pseudo terminal; Ctrl-C ends it."""
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "slicewise.cli", "top", "--interval", "0.1"],
        stdin=child,
        stdout=child,
        stderr=child,
        env=os.environ | {"TERM": "xterm-256color", "PYTHONUTF8": "1"},
    )
    os.close(child)
    seen = ""

    def read_until(there: Callable[[], object]) -> None:
        nonlocal seen
        while not there():
            seen += os.read(terminal, 65536).decode(errors="replace")

    read_until(lambda: "n1 ▏░░░░░░░░▏░░░░░░░░▏" in plain(seen))
    read_until(lambda: service.service.context.streams.open)
    assert "0.0/s placed" in plain(seen)
    identity = admin.allocate("7g.80gb").id
    read_until(lambda: "7███████" in plain(seen))
    admin.release(identity)
    read_until(lambda: re.search(r"[1-9]/s placed", plain(seen)))
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the other end is gone
        while True:
            seen += os.read(terminal, 65536).decode(errors="replace")
    assert process.wait() == 0
    os.close(terminal)
    assert "Traceback" not in seen
    assert "\x1b[?1049l" in seen  # the screen is restored


def test_top_survives_transient_errors() -> None:
    def said(status: int) -> ApiError:
        return ApiError(Problem(type="", title="", detail="it is busy", status=status))

    for passing in (UnreachableError("it is busy"), said(429), said(503)):
        assert _transient(passing) == "it is busy"
    for final in (SlicewiseError("no words"), said(401)):
        with pytest.raises(SlicewiseError):
            _transient(final)


def plain(text: str) -> str:
    """The text on a terminal, without colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


# How things look


def test_a_terminal_without_unicode(
    run: Run, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = admin.allocate("1g.10gb", labels={"name": "Zoë 日本 🚀"}).id
    told = []
    for arguments in (["show", identity], ["events", "--after", "0", "--json", "--count", "1"]):
        raw = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="latin-1"))
        with pytest.raises(SystemExit) as ended:
            main_run(arguments)
        assert ended.value.code == 0
        told.append(raw.getvalue().decode("latin-1"))
    assert r"labels     name=Zoë \u65e5\u672c \U0001f680" in told[0]
    assert json.loads(told[1])["seq"] == 1


def test_control_characters_in_labels_are_escaped(run: Run, admin: Client) -> None:
    identity = admin.allocate("1g.10gb", labels={"evil": "\x1b[2J\u202e\nx"}).id
    shown = good(run, "show", identity).out
    assert r"labels     evil=\x1b[2J\u202e\nx" in shown
    assert "\x1b" not in shown


# Completion


def complete(words: str) -> list[str]:
    """The completions of a command line."""
    environment = os.environ | {
        "_SLICEWISE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from slicewise.cli.main import run; run()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_completion_of_commands_and_options(run: Run, admin: Client) -> None:
    assert complete("slicewise no") == ["nodes"]
    assert complete("slicewise nodes dr") == ["drain"]
    assert complete("slicewise tokens issue op") == ["operator"]
    assert complete("slicewise nodes drain n") == ["n1", "n2"]  # from the service


def test_completion_of_names(run: Run, admin: Client, service: Running) -> None:
    context: Any = SimpleNamespace(
        params={"server": service.url, "token_file": str(service.token_file)}
    )
    identity = admin.allocate("1g.10gb").id
    assert completion.allocations(context, identity[:5]) == [identity]
    assert completion.nodes(context, "") == ["n1", "n2"]
    assert completion.tenants(context, "d") == ["default"]
    assert len(completion.tokens(context, "t")) >= 1
    assert completion.models("A30") == ["A30-24GB"]
    assert completion.profiles("7g.8") == ["7g.80gb"]
    assert len(completion.profiles("")) <= 100
    assert "mfi" in completion.policies("m")
    context.params["server"] = "http://127.0.0.1:1"
    assert completion.nodes(context, "") == []  # an error would be invisible here


def test_completion_can_be_shown() -> None:
    script = f"{sys.executable} -m slicewise.cli --show-completion; echo status=$?"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert "_slicewise_completion" in done.stdout.lower()
    assert done.stdout.endswith("status=0\n")


def test_without_the_extra_packages(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "slicewise.client", None)
    told = refused(run, "ls")
    assert told.startswith("talking to a service needs the extra packages of slicewise[service]")
