"""The drawings and the report of a sweep."""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from tests.lab.html_page import Page

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.sweep import MAX_PANELS, sweep_curves, sweep_groups
from slicewise.lab.figures.sweep_report import (
    MAX_ROWS,
    SweepMeta,
    TableCell,
    all_figures_table,
    count_wins,
    rejected_tables,
    render_sweep,
)
from slicewise.policies.registry import policy_names

Row = dict[str, Any]
SHARES = {"mfi": 0.02, "first-fit": 0.01, "oracle": 0.005}
META = SweepMeta(
    title="Fuller & larger",
    file="sweep.toml",
    text='policies = ["<mfi>"]\n',
    summary="3 policies",
    facts={"Runs": "4"},
)


def steady(**changes: Any) -> Row:
    row: Row = {
        "model": "A100-80GB",
        "gpus": 10,
        "load": 0.8,
        "seed": 1,
        "distribution": "uniform",
        "policy": "mfi",
        "runs": 4,
        "compared_with": "mfi",
        "oracle_missing": None,
        **changes,
    }
    for figure in (
        "rejected_share",
        "rejected_slices_share",
        "utilization_percent",
        "active_gpus_percent",
        "fragmentation",
        "rejected_share_difference",
    ):
        share = row.setdefault(figure, SHARES.get(row["policy"], 0.03))
        row.setdefault(f"{figure}_ci95", None if share is None else [share * 0.9, share * 1.1])
    return row


def grid(**spans: list[Any]) -> list[Row]:
    """Rows for all combinations, in the order of a sweep's."""
    rows: list[Row] = [{}]
    for name, values in {"policy": list(SHARES), **spans}.items():
        rows = [{**row, name: value} for value in values for row in rows]
    return [steady(**row) for row in rows]


def published(policy: str, demand: float, rate: float | None) -> Row:
    return {
        "model": "A100-80GB",
        "gpus": 10,
        "seed": 1,
        "distribution": "uniform",
        "policy": policy,
        "runs": 4,
        "demand": demand,
        "acceptance_rate": rate,
        "acceptance_rate_ci95": None if rate is None else [rate - 0.1, rate + 0.1],
        "scheduled_ratio_to_mfi": None,
        "utilization_percent": 50.0,
        "active_gpus_percent": 60.0,
        "fragmentation": 1.5,
    }


def drawn(axes: Axes) -> dict[str, list[list[float]]]:
    """The lines by policy, each as its places and heights."""
    found: dict[str, list[list[float]]] = {}
    for line in axes.lines:
        if not str(line.get_label()).startswith("_"):
            ends = (line.get_xdata(), line.get_ydata())
            lines = [np.asarray(numbers, float).tolist() for numbers in ends]
            found.setdefault(str(line.get_label()), []).extend(lines)
    return found


def heights(collection: Collection) -> list[float]:
    """How high the corners of a band or of whiskers are."""
    paths = collection.get_paths()
    return [y for path in paths for y in np.asarray(path.vertices, float)[:, 1].tolist()]


# Drawings.


def test_lines_go_through_the_values() -> None:
    rows = [
        steady(load=load, policy=policy, rejected_share=share)
        for load, policy, share in ((1.0, "a$b", 0.3), (0.5, "a$b", 0.1), (0.5, "mfi", 0.2))
    ]
    (axes,) = sweep_curves(rows, "load", "rejected_share").axes
    assert drawn(axes) == {r"a\$b": [[50, 100], [0.1, 0.3]], "mfi": [[50], [0.2]]}
    assert axes.get_ylim()[0] == 0
    assert axes.get_yscale() == "linear"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["50", "100"]


def test_every_seed_has_its_own_line() -> None:
    rows = [
        steady(load=load, seed=seed, rejected_share=load + seed / 10)
        for load in (0.1, 0.2)
        for seed in (1, 2)
    ]
    (axes,) = sweep_curves(rows, "load", "rejected_share").axes
    (lines,) = drawn(axes).values()
    assert [*lines[0], *lines[2]] == [10, 20, 10, 20]
    assert [*lines[1], *lines[3]] == pytest.approx([0.2, 0.3, 0.3, 0.4])


def test_small_shares_are_visible_and_zero_is_on_the_scale() -> None:
    shares = {0.5: 0.0, 0.6: 0.00002, 0.8: 0.003, 1.0: 0.2}
    rows = [steady(load=load, rejected_share=share) for load, share in shares.items()]
    rows[0]["rejected_share_ci95"] = [-0.001, 0.001]
    (axes,) = sweep_curves(rows, "load", "rejected_share").axes
    assert axes.get_yscale() == "symlog"
    assert axes.get_ylim()[0] == 0
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["0%", "0.1%", "1%", "10%", "100%"], "three decades, and zero"
    ends = [height for whiskers in axes.collections for height in heights(whiskers)]
    assert min(ends) == 0, "an interval ends at zero, and not below"


def test_panels_of_a_group_share_a_scale() -> None:
    low, high = steady(rejected_share=0.01), steady(rejected_share=0.5, distribution="bimodal")
    alone = sweep_curves([low], "load", "rejected_share").axes[0]
    together = sweep_curves([low], "load", "rejected_share", [low, high]).axes[0]
    assert alone.get_ylim()[1] < 0.02
    assert together.get_ylim()[1] > 0.5


def test_many_points_have_a_band_and_sizes_a_logarithm() -> None:
    rows = [published("mfi", round(b / 20, 2), 1 - b / 40) for b in range(20)]
    (axes,) = sweep_curves(rows, "demand", "acceptance_rate").axes
    (band,) = axes.collections
    assert max(heights(band)) == 1, "no interval reaches above all requests"
    assert axes.get_ylim()[1] <= 1.08
    sizes = [steady(gpus=gpus) for gpus in (10, 100, 1000)]
    assert sweep_curves(sizes, "gpus", "rejected_share").axes[0].get_xscale() == "log"
    assert sweep_curves(sizes[:1], "gpus", "rejected_share").axes[0].get_xscale() == "linear"


def test_nothing_measured_and_nothing_to_draw() -> None:
    empty = sweep_curves([published("mfi", 0.5, None)], "demand", "acceptance_rate")
    assert "not measured" in [text.get_text() for text in empty.axes[0].texts]
    for along, figure, problem in (
        ("lode", "rejected_share", "unknown axis 'lode'; did you mean load"),
        ("load", "rejected", "unknown figure 'rejected'; did you mean rejected_share"),
    ):
        with pytest.raises(SlicewiseError, match=problem):
            sweep_curves([steady()], along, figure)
    with pytest.raises(SlicewiseError, match="no results"):
        sweep_curves([], "load", "rejected_share")


def titles(rows: list[Row]) -> list[tuple[str, list[str]]]:
    groups, left_out = sweep_groups(rows)
    assert left_out == 0
    return [(group.title, [panel.title for panel in group.panels]) for group in groups]


def test_a_sweep_is_drawn_over_the_columns_that_vary() -> None:
    mixes = ["uniform", "bimodal"]
    assert titles(grid(distribution=mixes, load=[0.8, 1.0])) == [("10 A100-80GB, by load", mixes)]
    assert titles(grid(distribution=mixes, gpus=[10, 2000])) == [
        ("A100-80GB at load 80%, by size", mixes)
    ]
    both = titles(grid(gpus=[10, 20], load=[0.8, 1.0]))
    assert [title for title, _ in both] == [
        "10 A100-80GB, by load",
        "20 A100-80GB, by load",
        "A100-80GB at load 80%, by size",
        "A100-80GB at load 100%, by size",
    ]
    assert titles(grid(distribution=mixes)) == [("10 A100-80GB", [""])]
    assert [title for title, _ in titles(grid(seed=[1, 2]))] == [
        "10 A100-80GB, seed 1",
        "10 A100-80GB, seed 2",
    ]
    rows = [published("mfi", demand, 0.9) for demand in (0.8, 0.85)]
    assert titles(rows) == [("10 A100-80GB", ["uniform"])]


def test_the_number_of_panels_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicewise.lab.figures.sweep.MAX_PANELS", 3)
    groups, left_out = sweep_groups(grid(gpus=[1, 2, 3, 4, 5], load=[0.5, 1.0]))
    assert (len(groups), left_out) == (3, 4)
    assert MAX_PANELS == 48


# Tables.


def test_wins_are_counted_by_setting() -> None:
    rows = grid(load=[0.6, 0.8, 1.0])
    for row in rows:
        if row["load"] == 0.6:
            row["rejected_share"] = 0.0
        if row["load"] == 1.0 and row["policy"] == "mfi":
            row["rejected_share"] = 0.001
    assert count_wins(rows) == [
        ("mfi", 1, 3, True),
        ("first-fit", 1, 3, True),
        ("several alike", 1, 3, False),
    ]
    assert count_wins(grid(policy=["mfi", "oracle"])) == []


def test_the_lowest_share_of_a_column_is_marked_but_not_that_of_the_limit() -> None:
    ((title, (table,)),) = rejected_tables(grid(load=[0.8, 1.0]))
    assert title == "10 A100-80GB"
    best = [cell.sort_by for _, cells in table.rows for cell in cells if cell.best]
    assert best == ["1.0", "1.0"]
    by_size = rejected_tables(grid(gpus=[8, 16], seed=[1, 2]))
    assert "A100-80GB at load 80%, seed 2" in [title for title, _ in by_size]
    assert rejected_tables(grid()) == []


def test_a_point_that_is_not_finished_leaves_a_gap() -> None:
    rows = [
        row
        for row in grid(load=[0.8, 1.0], distribution=["uniform", "bimodal"])
        if (row["load"], row["distribution"]) != (1.0, "bimodal")
        and (row["load"], row["policy"]) != (1.0, "oracle")
    ]
    cells = [
        cell
        for _, tables in rejected_tables(rows)
        for table in tables
        for _, cells in table.rows
        for cell in cells
    ]
    assert cells.count(TableCell("\N{EN DASH}", "")) == 1


def test_the_table_of_all_figures_has_the_columns_that_vary() -> None:
    rows = grid(load=[0.8, 1.0], distribution=["uniform", "a<b"])
    rows[2]["fragmentation"] = None
    rows[0]["rejected_share_difference"] = -0.01
    table = all_figures_table(rows)
    headings = [heading for heading, _ in table.headings]
    assert headings[:4] == ["policy", "distribution", "load %", "rejected %"]
    assert "rejected % more than mfi" in headings
    assert len(table.rows) == len(rows)
    cells = [cell for _, cells in table.rows for cell in cells]
    assert TableCell("a<b") in cells
    assert TableCell("\N{MINUS SIGN}1.00", "-1.0", "±0.20") in cells
    assert [cell.sort_by for cell in cells].count("") == 1
    text = render_sweep(META, rows)
    assert '<td class="words">a&lt;b</td>' in text
    assert '<td data-value="-1.0">\N{MINUS SIGN}1.00 <span class="note">' in text
    assert '<td data-value="">\N{EN DASH}</td>' in text
    assert '<td class="best" data-value="1.0">' in text
    assert '<tr class="limit"><th scope="row" class="words">oracle</th>' in text


def test_a_very_long_table_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicewise.lab.figures.sweep_report.MAX_ROWS", 2)
    assert len(all_figures_table(grid()).rows) == 2
    assert "The first 2 of 3 rows." in page(grid()).words
    assert MAX_ROWS == 5000


# The page.


def page(rows: list[Row], **changes: Any) -> Page:
    return Page(render_sweep(replace(META, **changes), rows))


@pytest.fixture(scope="module")
def whole() -> Page:
    return page(grid(load=[0.8, 1.0], gpus=[10, 20], distribution=["uniform", "bimodal"]))


def test_the_page_runs_its_own_script_and_nothing_else(whole: Page) -> None:
    (policy,) = [m["content"] for m in whole.all("meta") if m.get("http-equiv")]
    digest = b64encode(sha256(whole.script.encode()).digest()).decode()
    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; " + f"script-src 'sha256-{digest}'"
    )
    assert whole.all("script") == [{}]
    for tag in ("link", "img", "iframe", "object", "base", "form"):
        assert whole.all(tag) == []
    for _, attributes in whole.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "innerHTML" not in whole.script


def test_ids_are_unique_and_labels_have_targets(whole: Page) -> None:
    ids = [str(a["id"]) for _, a in whole.elements if "id" in a]
    assert len(ids) == len(set(ids))
    assert [label["for"] for label in whole.all("label")] == ["filter"]
    (box,) = [a for _, a in whole.elements if a.get("class") == "filter"]
    assert box["data-table"] in ids
    assert "hidden" in box, "without the script there is nothing to filter"


def test_tables_can_be_sorted_and_reached_by_keyboard(whole: Page) -> None:
    tables = whole.all("table")
    assert len(tables) == 2 * 2 + 1
    assert {table["class"] for table in tables} == {"sortable"}
    regions = [a for _, a in whole.elements if a.get("role") == "region"]
    assert len(regions) == len(tables)
    assert all(region["tabindex"] == "0" and region["aria-label"] for region in regions)
    # The script turns headings into buttons, and marks the one by which a table is sorted.
    assert 'createElement("button")' in whole.script
    assert 'setAttribute("aria-sort"' in whole.script


def test_the_page_contains_the_experiment_file(whole: Page) -> None:
    assert 'policies = ["<mfi>"]' in whole.words
    assert "Fuller & larger" in whole.words
    assert "Not complete" not in whole.words
    assert "oracle is not a policy but the limit" in whole.words


def test_missing_results_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slicewise.lab.figures.sweep.MAX_PANELS", 1)
    rows = grid(seed=[1, 2], policy=["mfi", "oracle"])
    for row in rows:
        if row["policy"] == "oracle":
            row["rejected_share"], row["oracle_missing"] = None, "a reason"
    shown = page(rows, incomplete="3 runs are left.")
    skipped = "1 groups of drawings are left out"
    for words in ("Not complete.", "3 runs are left.", skipped, "No oracle: a reason."):
        assert words in shown.words
    assert "Each seed has its own line" in shown.words
    assert [a for _, a in shown.elements if a.get("class") == "legend"] == []


def test_the_page_of_the_published_experiment() -> None:
    rows = [published(p, d, 0.9) for p in ("mfi", "first-fit") for d in (0.8, 0.85)]
    shown = page(rows)
    assert "Accepted requests" in shown.words
    assert "At 85% demand" in shown.words
    assert len(shown.all("table")) == 1
    assert len(shown.all("tr")) == 1 + 2
    assert "At a glance" not in shown.words


def test_colours_are_readable_on_a_dark_background() -> None:
    rows = grid(load=[0.8, 1.0], policy=["oracle", "my-own", *policy_names()])
    styles = " ".join(str(a["style"]) for _, a in page(rows).elements if "style" in a)
    fixed = set(re.findall(r"(?<!, )#[0-9a-f]{6}", styles))
    assert len(fixed) > 6
    assert "#332288" not in fixed, "it has a lighter one for a dark ground"
    for colour in fixed:
        assert (luminance(colour) + 0.05) / (luminance("#1b2027") + 0.05) >= 3, colour


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
