"""Fail unless the gated rooms have full line and branch coverage.

Usage: coverage_gate.py [coverage.json]

Reads a JSON report of coverage.py and prints the coverage of each room (each direct subpackage of
slicewise). Exits with 1 if a file of a gated room has an uncovered line or branch, or is missing
from the report. Exits with 2 if the report cannot be used.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "slicewise"
GATED = ("core", "policies", "engine")
TOP = "(top level)"


@dataclass
class Room:
    """Coverage counts of one room, and the gaps of its files."""

    files: int = 0
    lines: int = 0
    lines_hit: int = 0
    branches: int = 0
    branches_hit: int = 0
    excluded: int = 0
    gaps: list[str] = field(default_factory=list)

    def add(self, name: str, entry: dict[str, Any] | None) -> None:
        """Add the counts of one file; `entry` is its part of the report, or None."""
        self.files += 1
        if entry is None:
            self.gaps.append(f"{name}: not in the report")
            return
        summary = entry["summary"]
        self.lines += summary["num_statements"]
        self.lines_hit += summary["covered_lines"]
        self.branches += summary["num_branches"]
        self.branches_hit += summary["covered_branches"]
        self.excluded += summary["excluded_lines"]
        lacks = []
        if summary["covered_lines"] < summary["num_statements"]:
            lacks.append("lines " + ", ".join(map(str, entry["missing_lines"])))
        if summary["covered_branches"] < summary["num_branches"]:
            jumps = (
                f"{start} to {end if end > 0 else 'exit'}"
                for start, end in entry["missing_branches"]
            )
            lacks.append("branches " + ", ".join(jumps))
        if lacks:
            self.gaps.append(f"{name}: {'; '.join(lacks)}")

    @property
    def percent(self) -> float:
        """Covered share of lines and branches, rounded down to a tenth of a percent."""
        total = self.lines + self.branches
        if total == 0:
            return 100.0
        return (self.lines_hit + self.branches_hit) * 1000 // total / 10


def load(report: Path) -> dict[Path, dict[str, Any]]:
    """Return the report's entry of each file, by absolute path."""
    data = json.loads(report.read_text(encoding="utf-8"))
    if not data["meta"]["branch_coverage"]:
        raise ValueError("measured without branches")
    return {Path(name).resolve(): entry for name, entry in data["files"].items()}


def collect(entries: dict[Path, dict[str, Any]]) -> dict[str, Room]:
    """Sum the files of the package by room."""
    rooms: dict[str, Room] = {name: Room() for name in GATED}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        room = rooms.setdefault(parts[0] if len(parts) > 1 else TOP, Room())
        room.add("slicewise/" + "/".join(parts), entries.get(path))
    return rooms


def main(arguments: list[str]) -> int:
    report = Path(arguments[0] if arguments else "coverage.json")
    try:
        rooms = collect(load(report))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"coverage gate: cannot use {report}: {error!r}", file=sys.stderr)
        return 2

    print(f"{'room':<12} {'files':>5} {'lines':>11} {'branches':>11} {'excluded':>8} {'total':>7}")
    for name, room in rooms.items():
        lines = f"{room.lines_hit}/{room.lines}"
        branches = f"{room.branches_hit}/{room.branches}"
        print(
            f"{name:<12} {room.files:>5} {lines:>11} {branches:>11} {room.excluded:>8}"
            f" {room.percent:>6.1f}%{'  gated' if name in GATED else ''}"
        )

    problems = []
    for name in GATED:
        if rooms[name].files == 0:
            problems.append(f"slicewise/{name}: no files")
        problems.extend(rooms[name].gaps)
    if problems:
        print("coverage gate: FAILED; these must be covered completely:", file=sys.stderr)
        for problem in problems:
            print(f"  {problem}", file=sys.stderr)
        return 1
    print(f"coverage gate: passed; {', '.join(GATED)} are covered completely")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
