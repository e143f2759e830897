"""Output of the service commands: event lines, columns, the screen of `top`."""

from __future__ import annotations

import contextlib
import io
import json
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
import pytest
from rich.console import Console
from tests.tenants import ref

from slicewise.api.base import Fragmentation
from slicewise.api.cluster import ModelUse
from slicewise.api.nodes import GpuView, InstanceView
from slicewise.cli import formatting
from slicewise.cli.event_text import event_line
from slicewise.cli.top_screen import DETAILED_GPUS, EventRates, screen
from slicewise.client import ClusterView, EventView, NodeView
from slicewise.journal import agent_entries as hardware
from slicewise.journal import entries, policy_entries, reclaim_entries
from slicewise.journal import lease_entries as leases
from slicewise.journal.entries import AnyEntry, Part, QuotaRecord, Role, Want

PART = Part("n1", 0, "A100-80GB", "1g.10gb", 6, 1, 1, 10.0)
RECORD = entries.AllocationRecord(
    "a1", ref("acme"), Want("1g.10gb", models=("A30",)), count=2, parts=(PART, PART), detail="full",
    cause=entries.Cause.LEASE,
)  # fmt: skip

FAILED = msgspec.structs.replace(RECORD, cause=entries.Cause.FAILED, detail="no luck")


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        (entries.Allocated(RECORD), "allocated a1 of acme: 1g.10gb on n1 GPU 0 at slice 6, 1g.10gb "
         "on n1 GPU 0 at slice 6"),
        (entries.Queued(RECORD, 3), "queued a1 of acme: 2 x 1g.10gb on A30; full"),
        (entries.Served("a1", ref("acme"), (PART,)),
         "served a1 of acme: 1g.10gb on n1 GPU 0 at slice 6"),
        (entries.Rejected(ref("acme"), Want(None, 1, 8.0), 1, "capacity", "no room"),
         "rejected 1 compute slice and 8 GB for acme (capacity): no room"),
        (entries.Ended(RECORD), "ended a1 of acme: lease ended"),
        (entries.Moved("a1", ref("acme"), 0, PART), "moved a1 of acme: now 1g.10gb on n1 GPU 0 at "
         "slice 6"),
        (leases.LeaseExtended("a1", ref("acme"), 60.0, 90.0),
         "lease-extended a1 of acme: its lease now ends at 1970-01-01T00:01:30.000Z"),
        (leases.LeaseEnding("a1", ref("acme"), 90.0),
         "lease-ending a1 of acme: its lease ends at 1970-01-01T00:01:30.000Z"),
        (entries.NodeAdded("n1", "A30", 2, 0), "node-added n1: 2 x A30"),
        (entries.NodeTurned("n1", entries.NodePhase.CORDONED), "node-turned n1: cordoned"),
        (entries.NodeRemoved("n1"), "node-removed n1"),
        (entries.TenantSet(ref("acme"), QuotaRecord(instances=2)), "tenant-set acme: instances 2"),
        (entries.TenantRemoved(ref("acme")), "tenant-removed acme"),
        (entries.TokenIssued("t1", "", Role.AGENT, None, node="n1", note="x\x1b[2J"),
         r"token-issued t1: agent n1 (x\x1b[2J)"),
        (entries.TokenIssued("t2", "", Role.ADMIN, replaces="t1"),
         "token-issued t2: admin, replaces t1"),
        (entries.TokenExpiring("t1", 0.0),
         "token-expiring t1: expires at 1970-01-01T00:00:00.000Z"),
        (entries.TokenRevoked("t1"), "token-revoked t1"),
        (entries.ModelEntered(entries.GeometryRecord("A30", 4, 4, ())), "model-entered A30"),
        (entries.ModelForgotten("A30"), "model-forgotten A30"),
        (entries.ClockSet(-1.5), "clock-set service time moved by -1.500 seconds"),
        (entries.Reserved(ref("acme"), entries.Want("7g.80gb"), 1, ()),
         "reserved acme: 7g.80gb: none"),
        (entries.Reserved(ref("acme"), entries.Want("7g.80gb"), 2, (
            entries.WindowRecord("n1", 0, "7g.80gb", 0),
            entries.WindowRecord("n1", 1, "7g.80gb", 0, 60.0))),
         "reserved acme: 2 x 7g.80gb at n1 GPU 0 slice 0, n1 GPU 1 slice 0 from "
         "1970-01-01T00:01:00.000Z"),
        (entries.TurnTaken(7), "turn-taken to 7"),
        (policy_entries.PolicyChosen(policy_entries.ChoiceRecord("time", leases=True), "why", 9, 0),
         "policy-chosen time+leases: why"),
        (hardware.AgentJoined("n1", "s1", "b", "580", "1.0", 0, ("GPU-0",), True),
         "agent-joined n1: agent 1.0, driver 580, 1 GPU, after a reboot"),
        (hardware.GeometryAccepted("n1"), "geometry-accepted n1: the geometry of its driver"),
        (hardware.NodeHeld("n1", {"unknown": "not heard of"}),
         "node-held n1: no new instances (unknown: not heard of)"),
        (hardware.GpuHeld("n1", 3, {}), "gpu-held n1 GPU 3: new instances allowed again"),
        (hardware.PartTurned("a1", ref("acme"), 0, "n1", hardware.Phase.QUARANTINED, "MIG-1",
                             "in use", 10),
         "part-turned a1 of acme: instance 0 on n1 is quarantined MIG-1, tried 10 times; in use"),
        (hardware.ForeignSeen("n1", "MIG-1", hardware.Foreign(0, "MIG-1", "1g.10gb", 2, 1)),
         "foreign-seen n1: MIG-1, 1g.10gb at slice 2 of GPU 0, is foreign; its slices cannot be "
         "blocked"),
        (hardware.ForeignEvicted("n1", "MIG-1"), "foreign-evicted n1: MIG-1 will be destroyed"),
        (hardware.ForeignGone("n1", "MIG-1"), "foreign-gone n1: MIG-1"),
        (reclaim_entries.Reclaiming("a1", ref("acme"), 30.0, reclaim_entries.GpuRef("n1", 0)),
         "reclaiming a1 of acme: it ends at 1970-01-01T00:00:30.000Z"),
        (reclaim_entries.Reclaiming("a1", ref("acme"), None),
         "reclaiming a1 of acme: its notice was withdrawn"),
        (reclaim_entries.HeldBack("a1", ref("acme"), 60.0),
         "held-back a1 of acme: not before 1970-01-01T00:01:00.000Z"),
        (reclaim_entries.HeldBack("a1", ref("acme"), None),
         "held-back a1 of acme: it may be placed"),
        (entries.Ended(FAILED), "ended a1 of acme: failed; no luck"),
    ],
)  # fmt: skip
def test_every_entry_has_a_line(
    entry: AnyEntry, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    event = EventView(
        seq=1,
        at="2026-01-02T03:04:05.678Z",
        actor="t",
        kind=entries.kind(entry),
        tenant=None,
        tenant_id=None,
        subject="",
        entry=entry,
    )
    assert event_line(event) == f"1 2026-01-02 03:04:05 {told}"


def test_foreign_instances_and_holds_are_shown() -> None:
    view = cluster(1, 1)
    node = msgspec.structs.replace(view.nodes[0], holds={"unknown": "x"}, held_gpus=2)
    assert view.devices is not None
    (gpu,) = view.devices
    pieces = [
        InstanceView(profile="1g.10gb", start=at, size=1, allocation=None, tenant=None, phase=phase)
        for at, phase in enumerate(("foreign", "stray", "releasing", "quarantined", "active"))
    ]
    gpu = msgspec.structs.replace(gpu, mask="11111000", instances=tuple(pieces))
    view = msgspec.structs.replace(view, nodes=(node,), devices=(gpu,))
    line = drawn(view)[-1]
    assert "xx-!1" in line
    assert line.endswith("held: unknown, 2 GPUs")
    one = msgspec.structs.replace(node, holds={}, held_gpus=1)
    assert formatting.holds_of(one) == "1 GPU"


def test_all_kinds_of_entries_are_covered() -> None:
    tested = {
        type(entry)
        for mark in test_every_entry_has_a_line.pytestmark  # type: ignore[attr-defined]
        for entry, _ in mark.args[1]
    }
    assert tested == set(get_args(AnyEntry))


def drawn(view: ClusterView, width: int = 80, height: int = 24, **options: Any) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=True, color_system=None)
    console.print(screen(view, console, **options))
    return file.getvalue().splitlines()


def cluster(nodes: int, gpus: int, detailed: bool = True, name: str = "node-{}") -> ClusterView:
    names = [name.format(number) for number in range(nodes)]
    instance = InstanceView(profile="3g.40gb", start=4, size=4, allocation=None, tenant=None)
    devices = tuple(
        GpuView(node=one, gpu=gpu, mask="00001111", fragmentation=0, instances=(instance,))
        for one in names
        for gpu in range(gpus)
    )
    total = nodes * gpus
    fits = {"1g.10gb": total, "1g.10gb+me": total, "7g.80gb": 0}
    return ClusterView(
        seq=1,
        history="",
        policy="mfi",
        gpus=total,
        active_gpus=total,
        slices=8 * total,
        free_slices=4 * total,
        instances=total,
        waiting=0,
        fragmentation=Fragmentation(partial=1.0, overlap=2.0),
        models=(
            ModelUse(
                model="A100-80GB",
                gpus=total,
                schedulable_gpus=total,
                slices=8 * total,
                free_slices=4 * total,
                placements=fits,
                fits=fits,
            ),
        ),
        nodes=tuple(
            NodeView(
                name=one,
                model="A100-80GB",
                gpus=gpus,
                state=entries.NodePhase.READY,
                instances=gpus,
                slices=8 * gpus,
                free_slices=4 * gpus,
                labels={},
            )
            for one in names
        ),
        devices=devices if detailed else None,
    )


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_text_is_cut_at_any_width(width: int) -> None:
    lines = drawn(cluster(2, 8), width)
    assert all(len(line) <= width for line in lines)
    strips = [line for line in lines if "3███" in line]
    assert sum(line.count("3███") for line in strips) == 16
    assert not any("+me" in line for line in lines)
    counts = {line.count("3███") for line in strips}
    assert max(counts) - min(counts) <= 1  # about as many on each line


def test_more_nodes_than_lines() -> None:
    lines = drawn(cluster(50, 2), height=20)
    assert len(lines) <= 20
    shown = sum(line.startswith("node-") for line in lines)
    assert lines[-1] == f"... and {50 - shown} more nodes"


def test_many_gpus_are_shown_node_by_node() -> None:
    half = cluster(2, DETAILED_GPUS, detailed=False)
    assert "node-0 ▏████████████████░░░░░░░░░░░░░░░░▏ 4096/8192 free" in drawn(half)


def test_problems_and_rates_are_shown() -> None:
    lines = drawn(cluster(1, 1), rates={"placed": 1.25, "ended": 0.0}, trouble="no answer")
    assert any("1.2/s placed   0.0/s ended" in line for line in lines)
    assert "no answer" in lines


def test_an_empty_cluster_can_be_drawn() -> None:
    assert any("0/0 slices (0%)" in line for line in drawn(cluster(0, 0)))


def test_terminals_without_unicode_get_ascii() -> None:
    class Ascii(Console):
        encoding = "ascii"

    console = Ascii(file=io.StringIO(), width=80, color_system=None)
    console.print(screen(cluster(1, 1), console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "node-0 |....3===|" in text
    text.encode("ascii")


def test_rates_use_a_sliding_window() -> None:
    event_rates = EventRates(100.0)
    for now in (100.0, 101.0, 102.0, 103.0):
        event_rates.count(now, "allocated")
    event_rates.count(104.0, "served")
    event_rates.count(104.0, "ended")
    event_rates.count(104.0, "node-added")
    assert event_rates.rates(104.0) == {"placed": 5 / 4, "ended": 1 / 4, "rejected": 0}
    assert event_rates.rates(112.5) == {"placed": 2 / 10, "ended": 1 / 10, "rejected": 0}
    assert event_rates.rates(200.0) == {"placed": 0, "ended": 0, "rejected": 0}


def columns(*rows: tuple[str, ...], header: tuple[str, ...] = ("Name", "N", "Note")) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        formatting.print_columns(header, rows, "nothing")
    return out.getvalue().splitlines()


def test_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    note = "a sentence that goes on and on " * 5
    assert columns(("a", "1", "x"), ("long-name", "12", "")) == [
        "Name        N  Note",
        "a           1  x",
        "long-name  12",
    ]
    assert columns() == ["nothing"]
    assert columns(("a", "", ""), ("b", "", "")) == ["Name", "a", "b"]  # empty ones are left out
    assert columns(("a", "1", note))[1] == f"a     1  {note.strip()}"  # in a pipe: one line a row
    monkeypatch.setenv("COLUMNS", "60")
    folded = columns(("a" * 21, "1", note))
    assert len(folded) > 3
    assert all(len(line) <= 60 for line in folded)
    assert all(line.startswith(" " * 26) for line in folded[2:])
    assert " ".join(" ".join(folded[1:]).split()) == f"{'a' * 21} 1 {note.strip()}"
    monkeypatch.setenv("COLUMNS", "10")
    assert columns(("a" * 21, "1", "word"))[1].startswith("a" * 21)  # an id is never broken


def test_timestamps_are_shortened() -> None:
    now = datetime(2026, 1, 2, 0, 30, tzinfo=UTC)
    assert formatting.short(None) == ""
    assert formatting.short("2026-01-02T00:29:59.123Z", now) == "00:29:59"
    assert formatting.short("2026-01-01T23:59:58.000Z", now) == "23:59:58"  # half an hour ago
    assert formatting.short("2026-01-02T12:29:59.999Z", now) == "12:29:59"
    assert formatting.short("2026-01-02T12:30:00.000Z", now) == "2026-01-02"
    assert formatting.short("2001-02-03T04:05:06.789Z") == "2001-02-03"


def test_show_json_accepts_one_or_several(capsys: pytest.CaptureFixture[str]) -> None:
    formatting.show_json([PART])
    assert json.loads(capsys.readouterr().out) == [msgspec.to_builtins(PART)]
    formatting.print_result(PART, False, "a sentence")
    assert capsys.readouterr().out == "a sentence\n"
