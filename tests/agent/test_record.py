"""The record on disk: whole or not at all, over with the boot, and never guessed at."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from tests.agent.simulated import World

from slicewise.agent.carrying import Phase
from slicewise.agent.record import Key, Own, Record, RecordError, Stage
from slicewise.agent.seats import Seats, seat
from slicewise.core.errors import SlicewiseError

OWN = Own("GPU-0", "1g.6gb", 3, 1, "a", 0)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    record = Record(tmp_path, "boot")
    record.put(OWN)
    record.advance(OWN.key, Stage.MADE, 5)
    record.advance(OWN.key, Stage.WHOLE, 5, "MIG-1")
    again = Record(tmp_path, "boot")
    (own,) = again
    assert (own.stage, own.id, own.uuid, own.key) == (Stage.WHOLE, 5, "MIG-1", OWN.key)
    assert again.remark == ""
    again.drop(OWN.key)
    assert len(Record(tmp_path, "boot")) == 0
    assert (tmp_path / "instances.json").stat().st_mode & 0o777 == 0o600


def test_after_a_restart_of_the_node_it_is_over(tmp_path: Path) -> None:
    Record(tmp_path, "boot").put(OWN)
    later = Record(tmp_path, "another")
    assert len(later) == 0
    assert "1 recorded instances are over" in later.remark


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"boot": "boot", "instances": [{}]}', '{"boot":"boot","instances":[3]}',
     json.dumps({"boot": "boot", "instances": [{**vars(OWN), "stage": "made"}]}),
     json.dumps({"boot": "boot", "instances": [{**vars(OWN), "start": "3"}]}),
     json.dumps({"boot": "boot", "instances": [{**vars(OWN), "gpu": 7}]})],
)  # fmt: skip
def test_what_is_no_record_is_put_aside(tmp_path: Path, text: str) -> None:
    (tmp_path / "instances.json").write_text(text)
    record = Record(tmp_path, "boot")
    assert len(record) == 0
    assert "was put aside" in record.remark
    assert (tmp_path / "instances.broken").read_text() == text


def test_what_is_no_text_is_put_aside(tmp_path: Path) -> None:
    """As a disk may leave it after power has failed."""
    (tmp_path / "instances.json").write_bytes(b'{"boot": "\xff\xfe')
    assert "was put aside" in Record(tmp_path, "boot").remark


def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "instances.json").mkdir()
    with pytest.raises(SlicewiseError, match="cannot be read"):
        Record(tmp_path, "boot")


def test_without_room_on_the_disk_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.office.place("a", "GPU-0", "1g.6gb", 0, 1)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RecordError, match="No space left"):
            Record(tmp_path, "1").put(OWN)
        world.turn()
        assert world.hardware.everything == []
        told = world.office.phases["a", 0]
        assert told["phase"] == "creating"
        assert "No space left on device" in str(told["detail"])
    assert not list(tmp_path.glob(".*.new"))
    world.settle()
    world.check()
    assert world.office.phases["a", 0]["phase"] == Phase.ACTIVE


def test_a_key_reads_as_a_place() -> None:
    assert str(Key("GPU-0", "1g.6gb", 3)) == "1g.6gb at slice 3 of GPU-0"
    assert "unknown profile" in str(Key("GPU-0", "", 3))


@pytest.mark.parametrize(
    ("remembered", "found", "seats"),
    [("", "abc", "abc"), ("abc", "abc", "abc"), ("abc", "ac", "abc"), ("abc", "cab", "abc"),
     ("abc", "axc", "axc"), ("abc", "abcd", "abcd"), ("abc", "xy", "xyc"), ("abc", "", "abc")],
)  # fmt: skip
def test_a_missing_gpu_moves_no_other(
    remembered: str, found: str, seats: str, tmp_path: Path
) -> None:
    assert seat(list(remembered), list(found)) == list(seats)
    Seats(tmp_path).take(list(remembered))
    assert Seats(tmp_path).take(list(found)) == list(seats)
