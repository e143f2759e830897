"""`slicewise defrag`: the cluster file, plans as text and JSON, and errors."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.cli.main import exit_status

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.json"


def outcome(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = exit_status(["defrag", *arguments])
    return status, out.getvalue(), err.getvalue()


def written(tmp_path: Path, document: object) -> str:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return str(file)


NODE = {"name": "a", "model": "A100", "gpus": 2}


def instance(**changes: object) -> dict[str, object]:
    return {"node": "a", "gpu": 0, "profile": "1g.10gb", "start": 0, **changes}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"nodes": [], "nodes": []}', "the document: the key 'nodes' is written twice"),
        (
            '{"nodes": [{"name": "a", "model": "A100", "gpus": 2, "gpus": 4}]}',
            "nodes[0]: the key 'gpus' is written twice",
        ),
    ],
)
def test_a_duplicate_key_is_named(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text("\ufeff" + text, encoding="utf-8")
    status, _, err = outcome([str(file), "--for", "1g.10gb"])
    assert (status, err) == (2, f"slicewise: error: {file}: {problem}\n")


def test_a_plan_as_text() -> None:
    status, out, _ = outcome(["--plan", str(EXAMPLE), "--for", "4g.40gb"])
    assert status == 0
    assert " 1. 1g.10gb 'notebook': blue/0 slice 0 -> green/0 slice 3\n" in out
    assert "blue/0       10001111 -> 00001111\n" in out
    assert "4g.40gb fits on blue/0 at slice 0.\n" in out
    assert "Moves: 1, slices moved: 1, room: 35 -> 47\n" in out


def test_a_plan_as_json_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(EXAMPLE.read_text(encoding="utf-8")))
    status, out, _ = outcome(["-", "--for", "7g.80gb", "--policy", "best-fit", "--json"])
    assert status == 0
    found = json.loads(out)
    assert found["found"] is found["fewest"] is True
    assert [move["profile"] for move in found["moves"]] == ["1g.10gb", "2g.20gb"]
    assert found["fits"] == {"node": "green", "gpu": 0, "start": 0}
    assert found["moved_slices"] == 3
    # Each move begins where the one before left off.
    seen: dict[str, str] = {}
    for move in found["moves"]:
        for mask in move["masks"]:
            assert seen.setdefault(mask["gpu"], mask["before"]) == mask["before"]
            seen[mask["gpu"]] = mask["after"]
    assert seen["green/0"] == "00000000"


def test_a_plan_without_a_request_compacts() -> None:
    status, out, _ = outcome([str(EXAMPLE), "--budget", "1"])
    assert status == 0
    assert out.count("->") == 4
    status, out, _ = outcome([str(EXAMPLE), "--budget", "3", "--json"])
    found = json.loads(out)
    assert found["for"] is found["fits"] is None
    assert found["room_after"] > found["room_before"]
    assert not found["fewest"]


def test_no_move_needed_and_no_plan_found(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        {
            "nodes": [NODE, {"name": "b", "model": "A100-80GB", "gpus": 1, "drained": True}],
            "instances": [
                instance(pinned=True),
                instance(gpu=1, pinned=True, name="[bold]odd[/]"),
                instance(node="b", start=3),
            ],
        },
    )
    assert "1g.10gb fits already, on a/" in outcome([file, "--for", "1g.10gb"])[1]
    assert "3 instances (2 pinned), 21 of 24 slices free" in outcome([file, "--budget", "0"])[1]
    out = outcome([file, "--for", "7g.80gb"])[1]
    assert "No plan was found that makes 7g.80gb fit (budget: 8)." in out
    found = json.loads(outcome([file, "--for", "7g.80gb", "--json"])[1])
    assert (found["found"], found["fewest"], found["moves"]) == (False, False, [])


def test_names_are_never_markup(tmp_path: Path) -> None:
    node = {**NODE, "gpus": 1}
    odd = instance(name="[bold]odd[/]", profile="2g.20gb", start=2)
    file = written(tmp_path, {"nodes": [node], "instances": [odd]})
    out = outcome([file, "--for", "4g.40gb"])[1]
    assert "2g.20gb '[bold]odd[/]': a/0 slice 2 -> a/0 slice 4" in out
    assert out.count("a/0  ") == 1, "one GPU, one line of masks"


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ([], "the document: must be an object"),
        ({"node": []}, "unknown key 'node'; known: instances, nodes"),
        ({"nodes": 3}, "nodes: must be a list"),
        ({"nodes": [3]}, "nodes[0]: must be an object"),
        ({"nodes": [{"name": "a", "model": "A100"}]}, "nodes[0]: 'gpus' is missing"),
        ({"nodes": [{**NODE, "gpus": 0}]}, "nodes[0].gpus: 0 is not in 1.."),
        ({"nodes": [{**NODE, "gpus": True}]}, "nodes[0].gpus: must be a whole number, not true"),
        ({"nodes": [{**NODE, "gpus": 10**12}]}, "is not in 1.."),
        ({"nodes": [{**NODE, "name": 1}]}, "nodes[0].name: must be text, not 1"),
        ({"nodes": [{**NODE, "drained": 1}]}, "nodes[0].drained: must be true or false, not 1"),
        ({"nodes": [{**NODE, "model": "A1000"}]}, "unknown GPU model 'A1000'"),
        ({"nodes": [NODE, NODE]}, "node 'a' already exists"),
        ({"nodes": [NODE], "instances": [instance(node="b")]}, "instances[0]: unknown node 'b'"),
        ({"nodes": [NODE], "instances": [instance(gpu=2)]}, "instances[0].gpu: node 'a' has GPUs"),
        ({"nodes": [NODE], "instances": [instance(start=7)]}, "instances[0]: 1g.10gb cannot start"),
        (
            {"nodes": [NODE], "instances": [instance(), instance()]},
            "instances[1]: 1g.10gb at slice",
        ),
        ({"nodes": [NODE], "instances": [instance(x=1)]}, "instances[0]: unknown key 'x'"),
    ],
)
def test_an_invalid_file_is_one_line(document: object, problem: str, tmp_path: Path) -> None:
    file = written(tmp_path, document)
    status, out, err = outcome([file])
    assert (status, out) == (2, "")
    assert err.startswith(f"slicewise: error: {file}: ")
    assert err.count("\n") == 1
    assert problem in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["no-such.json"], "no-such.json: cannot be read"),
        ([str(EXAMPLE), "--budget", "-1"], "budget must be 0 to 1000, not -1"),
        ([str(EXAMPLE), "--for", "4g.40g"], "unknown profile in this cluster '4g.40g'; did you"),
        ([str(EXAMPLE), "--policy", "fifo"], "unknown policy 'fifo'"),
        ([str(EXAMPLE), "--policy", "mfi,best-fit"], "--policy takes one policy, not 'mfi,best-"),
        ([], "Missing argument 'CLUSTER'"),
    ],
)
def test_an_invalid_option_is_one_line(arguments: list[str], problem: str) -> None:
    status, out, err = outcome(arguments)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert problem in err


def test_standard_input_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    status, _, err = outcome(["-"])
    assert (status, err.count("\n")) == (2, 1)
    assert "standard input: cannot be read: it is closed" in err


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["nodes", "instances", "name", "model", "gpus", "node", "gpu", "start"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(document=JUNK | st.text())
def test_no_file_causes_a_traceback(
    document: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("json") / "cluster.json"
    text = document if isinstance(document, str) else json.dumps(document)
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    status, _, err = outcome([str(file)])
    assert status in (0, 2)
    if status:
        assert err.startswith(f"slicewise: error: {file}: ")
        assert err.count("\n") == 1
