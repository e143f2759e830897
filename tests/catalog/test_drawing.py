"""Showing models: the list, the slice map and their JSON forms."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from slicewise.catalog import Catalog, CatalogEntry, load_file, parse_entry
from slicewise.cli.geometry_drawing import (
    draw_model,
    lanes,
    list_models,
    model_as_json,
    models_as_json,
)
from slicewise.core.geometry import Profile

EXAMPLE = Path(__file__).parents[2] / "examples" / "my-gpu.toml"
CATALOG = Catalog.builtin()


def drawn(entry: CatalogEntry, width: int = 80, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    draw_model(entry, Console(file=file, width=width))
    file.flush()
    return raw.getvalue().decode(encoding)


def listed(catalog: Catalog, width: int = 80) -> str:
    file = io.StringIO()
    list_models(catalog, Console(file=file, width=width))
    return file.getvalue()


def line_of(text: str, start: str) -> str:
    return next(line.rstrip() for line in text.splitlines() if line.startswith(start))


@pytest.mark.parametrize("entry", CATALOG.entries(), ids=repr)
def test_every_model_fits_80_columns_without_colour(entry: CatalogEntry) -> None:
    text = drawn(entry)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text
    assert "…" not in text
    for name in (entry.model, *(facts.name for facts in entry.facts)):
        assert name in text


def test_the_map_shows_the_placements_of_each_profile() -> None:
    lines = [line.rstrip() for line in drawn(CATALOG.find("A100")).splitlines()]
    start = lines.index("slice        0   1   2   3   4   5   6   7")
    assert lines[start + 1 : start + 8] == [
        "1g.10gb     ███ ███ ███ ███ ███ ███ ███",
        "1g.10gb+me  ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒ ▒▒▒",
        "1g.20gb     ███████ ███████ ███████ ███████",
        "2g.20gb     ███████ ███████ ███████",
        "3g.40gb     ███████████████ ███████████████",
        "4g.40gb     ███████████████",
        "7g.80gb     ███████████████████████████████",
    ]


def test_figures_follow_the_map() -> None:
    text = drawn(CATALOG.find("A100"))
    assert "1g.10gb+me     1        1   10 GB    1  0 1 2 3 4 5 6  6 4 5 0 1 2 3  1g.10gb" in text
    assert "1g.10gb+me  20     7   14    9.5 GiB     1        1        0     1    1" in text
    assert "- media-extension, 1 in all: 1g.10gb+me takes 1, so there is at most one" in text
    assert "- profiles primary, placements primary, engines primary" in text


def test_budgets_are_explained_in_words() -> None:
    words = " ".join(drawn(CATALOG.find("RTX PRO 6000")).split())
    assert (
        "- media, 4 in all: 1g.24gb, 1g.24gb+me and 1g.24gb+gfx each take 1; 2g.48gb and "
        "2g.48gb+gfx each take 2; 1g.24gb+me.all, 2g.48gb+me.all, 4g.96gb and 4g.96gb+gfx "
        "each take 4." in words
    )


def test_a_model_that_cannot_be_scheduled_shows_the_reason() -> None:
    text = drawn(CATALOG.find("DGX Station"))
    assert "Cannot be scheduled: where its profiles may start is not known" in text
    assert line_of(text, "3g.126gb").endswith("126 GB       not known")
    assert "slice " not in text
    refusal = "GB300-DGX-Station-252GB cannot be scheduled: where its profiles may start"
    assert refusal in listed(CATALOG)


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    text = drawn(CATALOG.find("A30"), encoding="ascii")
    assert "1g.6gb      ### ### ### ###" in text
    assert "2g.12gb+me  ======= =======" in text


def test_a_narrow_terminal_gets_a_narrow_map() -> None:
    assert "1g.10gb     ██ ██ ██ ██ ██ ██ ██\n" in drawn(CATALOG.find("A100"), width=40)


def test_overlapping_windows_are_drawn_in_separate_rows() -> None:
    assert lanes(Profile("2g", 2, 2, 0, (0, 1, 2, 3))) == [[0, 2], [1, 3]]
    data: dict[str, object] = {
        "model": "OWN",
        "memory_slices": 3,
        "compute_slices": 1,
        "aliases": ["[bold]x[/bold]"],
        "budget": [{"name": "idle", "total": 1}],
        "profile": [{"name": "1g", "size": 2, "compute": 1, "starts": [0, 1]}],
    }
    text = drawn(parse_entry(data, "own.toml"))
    assert "slice   0   1   2\n1g     ███████\n           ███████\n" in text
    assert "3 memory slices, 1 compute slice\n" in text
    assert "Also called: [bold]x[/bold]" in text
    assert "idle, 1 in all: no profile takes any." in text
    assert "The file does not state how well its figures are known." in text
    del data["aliases"]
    assert "Also called" not in drawn(parse_entry(data, "own.toml"))


def test_the_list_has_a_line_for_every_model() -> None:
    for width in (80, 120):
        text = listed(CATALOG, width)
        assert max(len(line) for line in text.splitlines()) <= width
        for entry in CATALOG.entries():
            assert line_of(text, f"{entry.model} ").endswith("yes" if entry.geometry else "no")
    assert line_of(listed(CATALOG), "H100-80GB-PCIe").split()[1:] == [
        *("8", "7", "7", "primary", "secondary", "yes")
    ]


def test_a_model_from_a_file_is_listed_without_confidence(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    text = EXAMPLE.read_text()
    start, end = text.index("[confidence]"), text.index("[[budget]]")
    path.write_text(text[:start] + text[end:])
    line = line_of(listed(CATALOG.with_file(path)), "MY-GPU-48GB")
    assert line.split()[1:] == ["6", "5", "5", "unstated", "unstated", "yes"]


def test_models_as_json_can_be_written_and_read() -> None:
    models = json.loads(json.dumps(models_as_json(CATALOG)))
    assert len(models) == 28
    by_name = {model["model"]: model for model in models}
    assert by_name["A30-24GB"]["confidence"]["placements"] == "primary"
    assert by_name["A30-24GB"]["schedulable"] is True
    station = by_name["GB300-DGX-Station-252GB"]
    assert station["schedulable"] is False
    assert station["refusal"].startswith("where its profiles may start is not known")


def test_a_model_as_json_holds_everything_drawn() -> None:
    model = json.loads(json.dumps(model_as_json(CATALOG.find("H200"))))
    assert model["budgets"] == [{"name": "media-extension", "total": 1}]
    assert model["profiles"][1] == {
        "name": "1g.18gb+me",
        "size": 1,
        "compute": 1,
        "memory_gb": 18,
        "variant_of": "1g.18gb",
        "id": 20,
        "nvml_enum": 7,
        "max_instances": 1,
        "sm_count": 16,
        "memory_mib": 16384,
        "memory_gib": None,
        "engines": {"copy": 1, "decoder": 1, "encoder": 0, "jpeg": 1, "ofa": 1},
        "starts": [0, 1, 2, 3, 4, 5, 6],
        "preferred": [6, 4, 5, 0, 1, 2, 3],
        "uses": {"media-extension": 1},
    }
    station = model_as_json(CATALOG.find("DGX Station"))
    assert json.loads(json.dumps(station))["profiles"][0]["starts"] is None
    assert model_as_json(load_file(EXAMPLE))["notes"] == ["This GPU does not exist."]
