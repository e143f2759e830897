"""Bad input costs one clear line and a non-zero exit, never a traceback."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slicewise.cli.main import exit_status

SIMULATE = ["simulate", "--workers", "1", "--runs", "1", "--gpus", "2"]
EXAMPLES = Path(__file__).parents[2] / "examples"


def outcome(arguments: list[str], files: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """The result of a command line in a temporary folder, where it may write any file.

    Named examples are copied into that folder; the standard input is empty.
    """
    out, err = io.StringIO(), io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("sys.stdin", io.StringIO(""))
        for file in files:
            shutil.copy(EXAMPLES / file, file)
        status = exit_status(arguments)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["fly"], "No such command 'fly'"),
        (["score"], "Missing argument 'mask'"),
        (["score", "1100010"], "'1100010' is not 8 digits"),
        (["score", "11000100", "--model", "A1000"], "unknown GPU model 'A1000'; did you mean"),
        (["score", "11000100", "--model", "GB300-DGX-Station-252GB"], "cannot be scheduled"),
        (["geometry", "T4"], "unknown GPU model 'T4'"),
        (["geometry", "--geometry", "no-such.toml"], "no-such.toml: cannot be read"),
        ([*SIMULATE, "--policy", "fifo"], "unknown policy 'fifo'"),
        ([*SIMULATE, "--policy", "mfi,mfi"], "'mfi' is named twice"),
        ([*SIMULATE, "--policy", "default,rehearsed"], "'rehearsed' is named twice"),
        ([*SIMULATE, "--distribution", "normal"], "unknown distribution 'normal'"),
        ([*SIMULATE, "--distribution", "uniform", "--distribution", "uniform"], "named twice"),
        ([*SIMULATE, "--distribution", "1g.10gb=0.9"], "sums to 0.9, not to 1"),
        ([*SIMULATE, "--distribution", "1g.11gb=1"], "unknown profile on A100-80GB '1g.11gb'"),
        ([*SIMULATE, "--gpus", "-4"], "gpus must be 1 to"),
        ([*SIMULATE, "--csv", "a.svg", "--plot", "./a.svg"], "'a.svg' is named for two results"),
        ([*SIMULATE, "--runs", "0"], "runs must be 1 to"),
        ([*SIMULATE, "--seed", "-1"], "seed must be"),
        ([*SIMULATE, "--workers", "0"], "workers must be"),
        ([*SIMULATE, "--experiment", "steady", "--load", "-1"], "load -1.0 is not above 0"),
        (
            [*SIMULATE, "--experiment", "steady", "--load", "0.01"],
            "load 0.01 is too low for 2 A100",
        ),
        ([*SIMULATE, "--experiment", "steady", "--duration", "2"], "duration must be"),
        ([*SIMULATE, "--experiment", "sturdy"], "'sturdy' is not one of"),
        ([*SIMULATE, "--gpus", "many"], "'--gpus': 'many' is not a valid int"),
        ([*SIMULATE, "--csv", "/no/such/folder/x.csv"], "'/no/such/folder/x.csv' cannot be"),
        ([*SIMULATE, "--plot", "picture.gif"], "must end in .png or .svg"),
        ([*SIMULATE, "--plot", "/no/such/folder/x.png"], "cannot be written"),
        (["bench", "--gpus", "1"], "gpus must be 10 to"),
        (["bench", "--plot", "x.gif"], "must end in .png or .svg"),
        (["replay"], "Missing argument 'TRACE'"),
        (["replay", "no-such.csv"], "trace 'no-such.csv' cannot be read"),
        (["replay", "/"], "trace '/' cannot be read"),
        (["defrag"], "Missing argument 'CLUSTER'"),
        (["defrag", "no-such.json"], "no-such.json: cannot be read"),
        (["defrag", "-"], "standard input: not JSON"),
        (["defrag", "x.json", "--budget", "-1"], "budget must be 0 to"),
        (["reproduce"], "Missing option '--out'"),
        (["reproduce", "--out", "/proc/nowhere"], "'/proc/nowhere' cannot be written"),
        (["reproduce", "--out", str(EXAMPLES / "trace.csv")], "trace.csv' is a file, not a folder"),
        (["reproduce", "--out", "x", "--runs", "-1"], "runs must be 1 to"),
        (["reproduce", "--out", "x", "--reading", "mind"], "'mind' is not one of"),
        (["reproduce", "--out", "x", "--lifetime", "eternal"], "'eternal' is not one of"),
    ],
)
def test_a_line_that_says_what_is_wrong(arguments: list[str], problem: str) -> None:
    status, out, err = outcome(arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("slicewise: error: ")
    assert err.count("\n") == 1
    assert problem in err


def test_a_start_that_leaves_the_gpu_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'model = "mine"\nmemory_slices = 4\ncompute_slices = 4\n'
        '[[profile]]\nname = "2g"\nsize = 2\ncompute = 2\nstarts = [0, 3]\n'
    )
    status, _, err = outcome(["geometry", "--geometry", str(file)])
    assert status == 2
    assert "2g" in err
    assert "starts: a window of 2 at 3 leaves the GPU's slices 0..3" in err


def test_a_file_is_no_folder_for_a_service(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    status, _, err = outcome(["serve", "--data", str(file), "--listen", "127.0.0.1:0"])
    assert (status, err) == (2, f"slicewise: error: data: {file} is a file, not a folder\n")


def test_refusing_leaves_no_file_behind(tmp_path: Path) -> None:
    target = tmp_path / "out.csv"
    status, _, _ = outcome([*SIMULATE, "--csv", str(target), "--plot", "/no/such/x.png"])
    assert status == 2
    assert not target.exists()
    kept = tmp_path / "kept.csv"
    kept.write_text("precious")
    outcome([*SIMULATE, "--csv", str(kept), "--plot", "/no/such/x.png"])
    assert kept.read_text() == "precious"


class _Full(io.StringIO):
    """An output on a disk that is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_under_the_output_and_a_name_no_file_can_have(tmp_path: Path) -> None:
    err = io.StringIO()
    with contextlib.redirect_stdout(_Full()), contextlib.redirect_stderr(err):
        assert exit_status(["policies"]) == 2
    assert err.getvalue() == "slicewise: error: No space left on device\n"
    name = "a" * 300
    status, _, said = outcome(["backup", "--data", str(tmp_path), name])
    assert status == 2
    assert said.startswith(f"slicewise: error: '{name}'")
    assert said.endswith(": File name too long\n")


COMMANDS = ("geometry", "score", "policies", "simulate", "replay", "defrag")
WORDS = st.sampled_from(
    [*COMMANDS, "--model", "--geometry", "--json", "--policy",
     "--distribution", "--gpus", "--runs", "--seed", "--experiment", "--load", "--duration",
     "--gpus-per-node", "--scale", "--compress", "--begin", "--strict", "--format", "--plan",
     "--for", "--budget", "trace.csv", "cluster.json", "plain", "alibaba-2023", "7g.80gb",
     "--warmup", "--lifetime", "--no-oracle", "--csv", "--plot", "-h", "--help", "--version", "--",
     "-", "", "A100-80GB", "A30", "mfi", "first-fit,best-fit", "round-robin-strict", "uniform",
     "steady", "published", "capacity", "1g.10gb=1", "1g.6gb=0.5,4g.24gb=0.5", "a=b", "=",
     "11000100", "0000", "-1", "0", "1", "2", "3", "0.5", "nan", "inf", "1e400",
     "99999999999999999999", "/no/such/dir/f.csv", "/", "\x00", "ünïcode", "💥"]
)  # fmt: skip
LINES = st.lists(st.one_of(WORDS, st.text(max_size=6)), max_size=9)


@settings(max_examples=180, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(command=st.sampled_from(["", *COMMANDS]), rest=LINES)
def test_no_command_line_brings_a_traceback(command: str, rest: list[str]) -> None:
    files = {"replay": "trace.csv", "defrag": "cluster.json"}
    cheap = [files[command]] if command in files else []
    if command == "simulate":
        cheap = ["--workers", "1", "--runs", "1", "--gpus", "2"]
    if any(word.isdecimal() and int(word) > 3 for word in rest):
        cheap = ["--workers", "0"]  # refused before anything large is simulated
    arguments = [word for word in (command,) if word] + cheap + rest
    if "simulate" in rest:
        return  # without the cheap settings it would be a real simulation
    status, _, err = outcome(arguments, tuple(files.values()))
    assert status in (0, 2)
    if status:
        assert err.startswith("slicewise: error: ")
        assert err.count("\n") == 1


@settings(max_examples=60, deadline=None)
@given(
    text=st.one_of(
        st.text(),
        st.builds(
            lambda size, starts, extra: (
                f'model = "m"\nmemory_slices = 4\ncompute_slices = 4\n{extra}\n'
                f'[[profile]]\nname = "p"\nsize = {size}\ncompute = 1\nstarts = {starts}\n'
            ),
            st.integers(-2, 6),
            st.lists(st.integers(-2, 5), max_size=4),
            st.sampled_from(["", "memory_gb = nan", "x = 1", "memory_slices = 2", "aliases = 3"]),
        ),
    )
)
def test_no_file_brings_a_traceback(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("toml") / "gpu.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    for arguments in (
        ["geometry", "--geometry", str(file)],
        [*SIMULATE, "--geometry", str(file), "--policy", "mfi"],
    ):
        status, _, err = outcome(arguments)
        assert status in (0, 2)
        if status:
            assert err.startswith(f"slicewise: error: {file}: ")
            assert err.count("\n") == 1
