"""The commands `slicewise backup`, `restore` and `verify`."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from tests.store.busy import fill
from tests.store.conftest import Destination

from slicewise.cli.main import exit_status
from slicewise.store import open_store, verify
from slicewise.store.sqlite import DATABASE


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = exit_status([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_backup_verify_and_restore(
    home: Destination, other_home: Destination, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = home.open()
    rows = len(fill(store).office.rows)
    file = tmp_path / "backup.jsonl.gz"
    if home.database is None:
        status, _, err = run(capsys, "backup", *home.options, file)
        assert status == 2
        assert "slicewise backup --server URL FILE" in err
        assert err.count("\n") == 1
        store.close()
    status, out, err = run(capsys, "backup", *home.options, file)
    assert (status, err) == (0, "")
    assert out == f"{file}: {rows} rows of the journal, {file.stat().st_size} bytes\n"
    store.close()
    status, out, _ = run(capsys, "restore", *other_home.options, file)
    assert (status, out) == (0, f"{rows} rows of the journal restored from {file}\n")
    for where in (home.options, other_home.options, ["--backup", str(file)]):
        status, out, _ = run(capsys, "verify", *where)
        assert status == 0
        assert out.startswith(f"{rows} rows, 2 snapshots, ")
        assert out.endswith("answers: clean\n")


def test_json(home: Destination, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = home.open()
    busy = fill(store)
    rows = len(busy.office.rows)
    store.close()
    file = tmp_path / "backup"
    _, out, _ = run(capsys, "backup", "--json", *home.options, file)
    size = file.stat().st_size
    assert json.loads(out) == {"file": str(file), "rows": rows, "bytes": size}
    _, out, _ = run(capsys, "restore", "--json", "--data", tmp_path / "made" / "new", file)
    assert json.loads(out) == {"file": str(file), "rows": rows}
    _, out, _ = run(capsys, "verify", "--json", *home.options)
    assert json.loads(out) == {
        "clean": True,
        "rows": rows,
        "snapshots": 2,
        "answers": len(busy.answers),
        "findings": [],
        "more": 0,
    }


def test_findings_are_printed_and_the_exit_status_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path)
    rows = len(fill(store).office.rows)
    store.close()
    with sqlite3.connect(tmp_path / DATABASE) as database:
        database.execute("UPDATE journal SET epoch = 5 WHERE seq = 100")
    database.close()
    status, out, _ = run(capsys, "verify", "--data", tmp_path)
    assert status == 1
    assert out.splitlines()[:3] == [
        "entry 100 is not what was written, or does not follow the one before",
        "entry 100 was written in epoch 5, and the last epoch is 1",
        "entry 101 was written in epoch 1, after entries of epoch 5",
    ]
    assert out.splitlines()[3].startswith(f"{rows} rows")
    assert out.endswith(": 3 findings\n")
    status, out, _ = run(capsys, "verify", "--json", "--data", tmp_path)
    assert status == 1
    assert json.loads(out)["clean"] is False


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["backup", "file"], "--server, --data or --database"),
        (["restore", "file"], "--data or --database"),
        (["verify"], "--data, --database or --backup"),
    ],
)
def test_exactly_one_store_must_be_named(
    command: list[str], options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for places in ([], ["--data", "x", "--database", "postgresql://y/z"]):
        status, _, err = run(capsys, *command, *places)
        assert status == 2
        assert f"name one of {options}, not" in err


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    (tmp_path / "empty").mkdir()
    for arguments, problem in (
        (["backup", "--data", tmp_path / "nowhere", tmp_path / "new"], "there is no folder"),
        (["backup", "--data", tmp_path / "empty", file], "already exists"),
        (["backup", "--data", tmp_path / "empty", tmp_path / "new"], "holds no database"),
        (["backup", "--data", tmp_path / "empty", tmp_path / ("x" * 300)], "cannot be written"),
        (["verify", "--data", tmp_path / "empty"], "holds no database"),
        (["verify", "--backup", file], "damaged or was cut short"),
        (["restore", "--data", tmp_path / "new", file], "damaged or was cut short"),
        (["restore", "--data", file / "x", tmp_path / "nothing"], "No such file"),
        (["verify", "--database", "mysql://x/y"], "must be a URL that begins with postgresql://"),
    ):
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert problem in err
        assert err.startswith("slicewise: error: ")
        assert err.count("\n") == 1


def test_a_folder_that_cannot_be_created(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path)
    fill(store, 50)
    assert verify(store).clean
    store.close()
    assert run(capsys, "backup", "--data", tmp_path, tmp_path / "backup")[0] == 0
    status, _, err = run(
        capsys, "restore", "--data", tmp_path / "backup" / "under", tmp_path / "backup"
    )
    assert status == 2
    assert "cannot be created" in err
