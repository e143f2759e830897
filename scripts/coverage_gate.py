"""Fail unless `core`, `policies` and `engine` have full line and branch coverage.

Usage: coverage_gate.py [coverage.json]

Reads a JSON report of coverage.py and prints the coverage of each package. Exits with 1 if a file
has an uncovered line or branch, or is missing from the report. Exits with 2 if the report cannot be
used.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "slicewise"
GATED = ("core", "policies", "engine")


@dataclass
class PackageCoverage:
    """Coverage counts of one package, and the gaps of its files."""

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


def collect(entries: dict[Path, dict[str, Any]]) -> dict[str, PackageCoverage]:
    """Sum the files of each gated package."""
    packages: dict[str, PackageCoverage] = {name: PackageCoverage() for name in GATED}
    for name, package in packages.items():
        for path in sorted((PACKAGE / name).rglob("*.py")):
            package.add(path.relative_to(PACKAGE.parent).as_posix(), entries.get(path))
    return packages


def main(arguments: list[str]) -> int:
    report = Path(arguments[0] if arguments else "coverage.json")
    try:
        packages = collect(load(report))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"coverage gate: cannot use {report}: {error!r}", file=sys.stderr)
        return 2

    print(
        f"{'package':<12} {'files':>5} {'lines':>11} {'branches':>11} {'excluded':>8} {'total':>7}"
    )
    for name, package in packages.items():
        lines = f"{package.lines_hit}/{package.lines}"
        branches = f"{package.branches_hit}/{package.branches}"
        print(
            f"{name:<12} {package.files:>5} {lines:>11} {branches:>11} {package.excluded:>8}"
            f" {package.percent:>6.1f}%"
        )

    problems = []
    for name in GATED:
        if packages[name].files == 0:
            problems.append(f"slicewise/{name}: no files")
        problems.extend(packages[name].gaps)
    if problems:
        print("coverage gate: FAILED; these must be covered completely:", file=sys.stderr)
        for problem in problems:
            print(f"  {problem}", file=sys.stderr)
        return 1
    print(f"coverage gate: passed; {', '.join(GATED)} are covered completely")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
