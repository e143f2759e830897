"""Every example in the documents is run, and what it prints is compared.

How examples are marked:

- ```python blocks of one document share a namespace and run in order. What a block prints must
  stand in a ```text block right after it; without one it must print nothing.
- In ```console blocks, ``$ slicewise ...`` is run (a backslash continues the line) and must
  succeed; lines below it are its output. ``$ make ...`` must name a target. Nothing else is run.
- In both kinds of output a line ``...`` stands for any number of lines, and blanks at the end of
  a line do not matter.
- ``<!-- long: OPTIONS -->`` before a console block adds these options to its commands, and leaves
  their output uncompared, unless SLICEWISE_LONG_EXAMPLES is set.
- ``<!-- file: PATH -->`` before a block says that it is that file, word for word.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from slicewise.cli.main import exit_status

LONG = "SLICEWISE_LONG_EXAMPLES"
ANY_LINES = "..."
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>long|file): (?P<value>.*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[a-z]+)\n(?P<content>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Fence:
    """A fenced block: its language, its lines, what is said before it, and where it is."""

    language: str
    content: str
    mark: str
    value: str
    line: int
    follows: str
    """The text between the block before and this one."""


def fences(text: str) -> list[Fence]:
    found: list[Fence] = []
    reached = 0
    for match in _FENCE.finditer(text):
        found.append(
            Fence(
                match["language"],
                match["content"],
                match["mark"] or "",
                match["value"] or "",
                text.count("\n", 0, match.start("content")) + 1,
                text[reached : match.start()],
            )
        )
        reached = match.end()
    return found


def agrees(expected: list[str], actual: list[str]) -> bool:
    """Whether lines are as expected, where ``...`` stands for any number of them."""
    if not expected:
        return not actual
    if expected[0] == ANY_LINES:
        return any(agrees(expected[1:], actual[i:]) for i in range(len(actual) + 1))
    return bool(actual) and expected[0] == actual[0] and agrees(expected[1:], actual[1:])


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def compare(where: str, expected: str, actual: str) -> None:
    if not agrees(lines(expected), lines(actual)):
        pytest.fail(f"{where} shows\n\n{expected}\nbut the output is\n\n{actual}", pytrace=False)


@pytest.fixture
def workshop(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run examples in: files go nowhere else, and terminals are 80 wide."""
    (tmp_path / "examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("workshop")
def test_python_blocks_print_what_is_shown(document: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = fences(document.read_text(encoding="utf-8"))
    for index, block in enumerate(blocks):
        if block.language != "python":
            continue
        printed = io.StringIO()
        padding = "\n" * (block.line - 1)  # so that a traceback names the document's line
        with contextlib.redirect_stdout(printed):
            exec(compile(padding + block.content, str(document), "exec"), names)
        shown = [b for b in blocks[index + 1 : index + 2] if b.language == "text"]
        expected = "".join(b.content for b in shown if not b.follows.strip())
        compare(f"{document.name}, line {block.line}", expected, printed.getvalue())


@dataclass(frozen=True)
class Command:
    """A command of a console block and the output below it."""

    words: list[str]
    output: str


def commands(content: str) -> list[Command]:
    found: list[Command] = []
    for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
        line, _, output = part.replace("\\\n", " ").partition("\n")
        found.append(Command(shlex.split(line), output))
    return found


@pytest.mark.usefixtures("workshop")
def test_commands_print_what_is_shown(
    document: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One process is enough, and the result is the same.
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    for block in fences(document.read_text(encoding="utf-8")):
        if block.language != "console":
            continue
        shortened = block.mark == "long" and not os.environ.get(LONG)
        for command in commands(block.content):
            if command.words[0] != "slicewise":
                continue
            arguments = command.words[1:] + (shlex.split(block.value) if shortened else [])
            where = f"{document.name}, line {block.line}, {shlex.join(command.words)}"
            status = exit_status(arguments)
            output, problem = capsys.readouterr()
            assert status == 0, f"{where}: {problem}"
            if command.output.strip() and not shortened:
                compare(where, command.output, output)


def test_make_targets_exist(document: Path, root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"^\$ make ([a-z]+)|`make ([a-z]+)", text, re.MULTILINE))
    assert {target for pair in named for target in pair if target} <= targets


def test_files_are_shown_word_for_word(document: Path, root: Path) -> None:
    for block in fences(document.read_text(encoding="utf-8")):
        if block.mark == "file":
            assert block.content == (root / block.value).read_text(encoding="utf-8"), block.value


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("a\nb", "a\nb  ", True),
        ("a\nb", "a\nc", False),
        ("a\n...", "a\nb\nc", True),
        ("...\nc", "a\nb\nc", True),
        ("a\n...\nc", "a\nc", True),
        ("a\n...\nd", "a\nb\nc", False),
        ("", "a", False),
        ("", "", True),
    ],
)
def test_outputs_are_compared_up_to_what_is_left_out(
    expected: str, actual: str, same: bool
) -> None:
    assert agrees(lines(expected), lines(actual)) is same


def test_blocks_are_found_with_their_marks() -> None:
    text = (
        "x\n\n<!-- long: --runs 2 -->\n```console\n$ slicewise a \\\n  b\nout\n$ slicewise c\n```\n"
    )
    (block,) = fences(text)
    assert (block.language, block.mark, block.value, block.line) == (
        "console",
        "long",
        "--runs 2",
        5,
    )
    assert commands(block.content) == [
        Command(["slicewise", "a", "b"], "out\n"),
        Command(["slicewise", "c"], ""),
    ]
