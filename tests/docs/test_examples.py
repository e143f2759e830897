"""Runs every example in the documents and compares its output.

How examples are marked:

- Examples of one document run in order, in one folder. ```python blocks share a namespace; the
  output of a block must be in a ```text block right after it, or be empty.
- In ```console blocks, ``$ slicewise ...`` is run (a backslash continues the line) and must
  succeed; the lines below it are its output. ``$ make ...`` must name a target. Other commands are
  not run.
- In both kinds of output, a line ``...`` matches any number of lines, and ``...`` within a line any
  text. Trailing blanks are ignored.
- ``<!-- long: OPTIONS -->`` before a console block adds these options to its commands and skips the
  comparison of their output, unless SLICEWISE_LONG_EXAMPLES is set.
- ``<!-- file: PATH -->`` before a block requires that it is identical to that file.
- ``<!-- service -->`` anywhere in a document starts an empty service for it and sets
  SLICEWISE_SERVER and SLICEWISE_TOKEN_FILE. ``$ curl ...`` is run too, if curl is installed.
  Ids in such a document are placeholders: each is bound to a real id when it first occurs in an
  output, and replaced by it in later commands. Dates and times match any others.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.client.running import running

from slicewise.cli.main import exit_status

LONG = "SLICEWISE_LONG_EXAMPLES"
SERVICE = "<!-- service -->"
ANY = "..."
ID = r"[at][a-z2-7]{20}"
_SPECIAL = re.compile(
    rf"(?P<any>\.\.\.)|(?P<id>\b{ID}\b)|(?P<time>(?<![0-9])[0-9]+(?:[:-][0-9]{{2}}){{2}}(?![0-9]))"
)
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>long|file): (?P<value>.*?) -->\n)?"
    r"^(?P<indent> *)```(?P<language>[a-z]+)\n(?P<content>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Fence:
    """A fenced block: its language, content, mark and line."""

    language: str
    content: str
    mark: str
    value: str
    line: int
    follows: str
    """The text between the previous block and this one."""


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


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


@dataclass
class Placeholders:
    """Binds the ids in a document to the ids of the service."""

    of_service: bool = True
    """Whether the document has a service; without one, ids and times are compared literally."""
    real: dict[str, str] = field(default_factory=dict)

    def substitute(self, text: str) -> str:
        """Return a command with the service's ids."""
        return re.sub(rf"\b{ID}\b", lambda found: self.real.get(found[0], found[0]), text)

    def matches(self, expected: str, actual: str) -> bool:
        """Return whether an output matches, and bind the new ids in it."""
        seen: dict[str, str] = {}
        pattern = "".join(
            r"(?:.*\n)*?" if line == ANY else self._line(line, seen) + "\n"
            for line in lines(expected)
        )
        match = re.fullmatch(pattern, "".join(f"{line}\n" for line in lines(actual)))
        if match is None:
            return False
        self.real |= {name: match[group] for name, group in seen.items()}
        return True

    def _line(self, line: str, seen: dict[str, str]) -> str:
        parts: list[str] = []
        reached = 0
        for match in _SPECIAL.finditer(line):
            parts.append(re.escape(line[reached : match.start()]))
            reached = match.end()
            if match["any"]:
                parts.append(".*")
            elif not self.of_service:
                parts.append(re.escape(match[0]))
            elif match["time"]:
                parts.append(re.sub("[0-9]", "[0-9]", match[0]))
            elif (name := match["id"]) in self.real:
                parts.append(re.escape(self.real[name]))
            elif name in seen:
                parts.append(f"(?P={seen[name]})")
            else:
                seen[name] = f"id{len(seen)}"
                parts.append(f"(?P<{seen[name]}>{ID})")
        return "".join((*parts, re.escape(line[reached:])))


def compare(where: str, expected: str, actual: str, placeholders: Placeholders) -> None:
    if not placeholders.matches(expected, actual):
        pytest.fail(f"{where} shows\n\n{expected}\nbut the output is\n\n{actual}", pytrace=False)


@pytest.fixture
def example_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run examples in, with a terminal width of 80."""
    (tmp_path / "examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    # One process is enough; the results are the same.
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    return tmp_path


@contextlib.contextmanager
def service_in(folder: Path) -> Iterator[None]:
    """Start an empty service and point commands to it."""
    with running(folder / "data") as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLICEWISE_SERVER", service.url)
        patch.setenv("SLICEWISE_TOKEN_FILE", str(service.token_file))
        yield


@dataclass(frozen=True)
class Command:
    """A command of a console block and the output below it."""

    line: str
    output: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)


def commands(content: str) -> list[Command]:
    found: list[Command] = []
    for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
        line, _, output = part.replace("\\\n", " ").partition("\n")
        found.append(Command(line, output))
    return found


@dataclass
class ExampleRunner:
    """Runs all examples of a document."""

    document: Path
    capsys: pytest.CaptureFixture[str]
    with_service: bool
    namespace: dict[str, object] = field(default_factory=lambda: {"__name__": "__main__"})

    def __post_init__(self) -> None:
        self.placeholders = Placeholders(self.with_service)

    def run(self) -> None:
        blocks = fences(self.document.read_text(encoding="utf-8"))
        for index, block in enumerate(blocks):
            if block.language == "python":
                after = [b for b in blocks[index + 1 : index + 2] if b.language == "text"]
                self._python(block, "".join(b.content for b in after if not b.follows.strip()))
            elif block.language == "console":
                for command in commands(block.content):
                    self._console(block, command)

    def _python(self, block: Fence, expected: str) -> None:
        printed = io.StringIO()
        padding = "\n" * (block.line - 1)  # tracebacks then show the document's line number
        with contextlib.redirect_stdout(printed):
            code = compile(padding + block.content, str(self.document), "exec")
            exec(code, self.namespace)
        self._compare(f"line {block.line}", expected, printed.getvalue())

    def _console(self, block: Fence, command: Command) -> None:
        program = command.words[0]
        where = f"line {block.line}, {command.line}"
        if program == "curl" and self.with_service and shutil.which("curl"):
            line = self.placeholders.substitute(command.line).replace("curl", "curl -s", 1)
            done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{where}: {done.stderr}"
            self._compare(where, command.output, done.stdout)
        if program != "slicewise":
            return
        shortened = block.mark == "long" and not os.environ.get(LONG)
        words = shlex.split(self.placeholders.substitute(command.line))
        self.capsys.readouterr()
        status = exit_status(words[1:] + (shlex.split(block.value) if shortened else []))
        output, problem = self.capsys.readouterr()
        assert status == 0, f"{self.document.name}, {where}: {problem}"
        if command.output.strip() and not shortened:
            self._compare(where, command.output, output)

    def _compare(self, where: str, expected: str, actual: str) -> None:
        compare(f"{self.document.name}, {where}", expected, actual, self.placeholders)


def test_examples_print_the_documented_output(
    document: Path, example_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_service = SERVICE in document.read_text(encoding="utf-8")
    with service_in(example_folder) if with_service else contextlib.nullcontext():
        ExampleRunner(document, capsys, with_service).run()


def test_make_targets_exist(document: Path, root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"^\$ make ([a-z]+)|`make ([a-z]+)", text, re.MULTILINE))
    assert {target for pair in named for target in pair if target} <= targets


def test_quoted_files_are_identical(document: Path, root: Path) -> None:
    for block in fences(document.read_text(encoding="utf-8")):
        if block.mark == "file":
            assert block.content == (root / block.value).read_text(encoding="utf-8"), block.value


OLD, NEW = "a" + "b" * 20, "a" + "c" * 20


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
        ("a ... c", "a b c", True),
        ("a ... c", "a b d", False),
        ("a... (x)", "a... (x)", True),
        ("at 01:02:03", "at 23:59:59", True),
        ("2026-01-02 01:02:03", "2031-12-30 23:59:59", True),
        ("at 01:02:03", "at noon", False),
        (f"{OLD} and {OLD}", f"{NEW} and {NEW}", True),
        (f"{OLD} and {OLD}", f"{NEW} and {OLD}", False),
        (f"{OLD}", "short", False),
    ],
)
def test_ellipses_ids_and_times_match(expected: str, actual: str, same: bool) -> None:
    assert Placeholders().matches(expected, actual) is same


def test_ids_are_bound_to_those_of_the_service() -> None:
    ids = Placeholders()
    assert ids.matches(f"made {OLD}", f"made {NEW}")
    assert ids.substitute(f"slicewise show {OLD} {OLD}x") == f"slicewise show {NEW} {OLD}x"
    assert ids.matches(f"{OLD}", f"{NEW}")
    assert not ids.matches(f"{OLD}", f"{OLD}")


def test_without_a_service_outputs_are_compared_literally() -> None:
    for text, other in ((OLD, NEW), ("01:02:03", "01:02:04"), ("2026-01-02", "2026-01-03")):
        assert Placeholders(False).matches(text, text)
        assert not Placeholders(False).matches(text, other)


def test_blocks_are_parsed_with_their_marks() -> None:
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
    first, second = commands(block.content)
    assert (first.words, first.output) == (["slicewise", "a", "b"], "out\n")
    assert (second.words, second.output) == (["slicewise", "c"], "")
