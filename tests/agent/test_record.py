"""The record on disk, and the GPU index."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from tests.agent.simulated import World

from slicewise.agent.node_state import GpuIndex, assign_indexes
from slicewise.agent.reconciler import Phase
from slicewise.agent.record import InstanceKey, Record, RecordedInstance, RecordError, Stage
from slicewise.core.errors import SlicewiseError

OWN = RecordedInstance("GPU-0", "1g.6gb", 3, 1, "a", 0)


def test_record_is_read_again(tmp_path: Path) -> None:
    record = Record(tmp_path, "boot")
    record.put(OWN)
    record.advance(OWN.key, Stage.CREATED, 5)
    record.advance(OWN.key, Stage.COMPLETE, 5, "MIG-1")
    again = Record(tmp_path, "boot")
    (own,) = again
    assert (own.stage, own.id, own.uuid, own.key) == (Stage.COMPLETE, 5, "MIG-1", OWN.key)
    assert again.warning == ""
    again.drop(OWN.key)
    assert len(Record(tmp_path, "boot")) == 0
    assert (tmp_path / "instances.json").stat().st_mode & 0o777 == 0o600


def test_entries_of_an_earlier_boot_are_dropped(tmp_path: Path) -> None:
    Record(tmp_path, "boot").put(OWN)
    later = Record(tmp_path, "another")
    assert len(later) == 0
    assert "dropped 1 recorded instances" in later.warning


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"boot": "boot", "instances": [{}]}', '{"boot":"boot","instances":[3]}',
     json.dumps({"boot": "boot", "instances": [{**vars(OWN), "stage": "created"}]}),
     json.dumps({"boot": "boot", "instances": [{**vars(OWN), "start": "3"}]}),
     json.dumps({"boot": "boot", "instances": [{**vars(OWN), "gpu": 7}]})],
)  # fmt: skip
def test_invalid_record_is_renamed(tmp_path: Path, text: str) -> None:
    (tmp_path / "instances.json").write_text(text)
    record = Record(tmp_path, "boot")
    assert len(record) == 0
    assert "was renamed to" in record.warning
    assert (tmp_path / "instances.broken").read_text() == text


def test_binary_record_is_renamed(tmp_path: Path) -> None:
    """As after a power failure."""
    (tmp_path / "instances.json").write_bytes(b'{"boot": "\xff\xfe')
    assert "was renamed to" in Record(tmp_path, "boot").warning


def test_unreadable_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "instances.json").mkdir()
    with pytest.raises(SlicewiseError, match="cannot be read"):
        Record(tmp_path, "boot")


def test_full_disk_prevents_creation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    world.service.place("a", "GPU-0", "1g.6gb", 0, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RecordError, match="No space left"):
            Record(tmp_path, "1").put(OWN)
        world.step()
        assert world.hardware.everything == []
        reported = world.service.phases["a", 0]
        assert reported["phase"] == "creating"
        assert "No space left on device" in str(reported["detail"])
    assert not list(tmp_path.glob(".*.new"))
    world.settle()
    world.check()
    assert world.service.phases["a", 0]["phase"] == Phase.ACTIVE


def test_key_as_text() -> None:
    assert str(InstanceKey("GPU-0", "1g.6gb", 3)) == "1g.6gb at slice 3 of GPU-0"
    assert "unknown profile" in str(InstanceKey("GPU-0", "", 3))


@pytest.mark.parametrize(
    ("known", "found", "expected"),
    [("", "abc", "abc"), ("abc", "abc", "abc"), ("abc", "ac", "abc"), ("abc", "cab", "abc"),
     ("abc", "axc", "axc"), ("abc", "abcd", "abcd"), ("abc", "xy", "xyc"), ("abc", "", "abc")],
)  # fmt: skip
def test_missing_gpu_keeps_its_index(known: str, found: str, expected: str, tmp_path: Path) -> None:
    assert assign_indexes(list(known), list(found)) == list(expected)
    GpuIndex(tmp_path).update(list(known))
    assert GpuIndex(tmp_path).update(list(found)) == list(expected)
