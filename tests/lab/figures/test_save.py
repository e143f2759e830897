"""Figures as files and as SVG in pages: the same bytes every time."""

import re
import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.save import save_figure, svg_text
from slicewise.lab.figures.slicemap import Block, GpuDrawing, draw_gpus
from slicewise.lab.figures.style import house_style, plain


def drawing(title: str = "GPU 0") -> Figure:
    return draw_gpus([GpuDrawing(8, (Block("2g.20gb", 0, 2),), (2, 3), title=title)])


def clipped() -> Figure:
    """With everything that has an id: clip paths, markers, glyphs."""
    with house_style():
        figure = Figure(figsize=(3, 2))
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], marker="o", label=plain("<a> & -- $b$"))
        axes.legend()
    return figure


def ids(svg: str) -> list[str]:
    return re.findall(r'\bid="([^"]*)"', svg)


def test_png_and_svg_are_written_in_the_size_of_the_figure(tmp_path: Path) -> None:
    png, svg = save_figure(clipped(), tmp_path / "new" / "demand-0.85")
    assert (png.name, svg.name) == ("demand-0.85.png", "demand-0.85.svg")
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (450, 300)
    assert svg.read_text(encoding="utf-8").startswith("<?xml")


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in save_figure(clipped(), tmp_path / "a" / "x")]
    again = [path.read_bytes() for path in save_figure(clipped(), tmp_path / "b" / "x")]
    assert first == again
    assert b"<dc:date>" not in first[1]
    assert not re.search(rb"20\d\d-\d\d-\d\d", first[1])


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SlicewiseError, match=r"cannot write the figure .*file/x\.png"):
        save_figure(drawing(), tmp_path / "file" / "x")


def test_svg_text_is_one_element_without_prologue() -> None:
    svg = svg_text(clipped(), "demand", "A <b>")
    assert svg.startswith("<svg ")
    assert svg.endswith("</svg>")
    root = svg.split(">", 1)[0]
    assert 'role="img" aria-label="A &lt;b&gt;"' in root
    assert "viewBox" in root
    assert not re.search(r"\s(width|height)=", root), "it fills its container"
    assert not re.search(r"<[!?]|<metadata|<style", svg)
    assert set(re.findall(r'https?://[^"\s]*', svg)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_svg_text_is_the_same_every_time() -> None:
    assert svg_text(clipped(), "demand", "A <b>") == svg_text(clipped(), "demand", "A <b>")
    figure = clipped()
    assert svg_text(figure, "demand", "A <b>") == svg_text(figure, "demand", "A <b>")


def test_figures_of_different_names_share_no_id() -> None:
    one, other = svg_text(clipped(), "one", "A <b>"), svg_text(clipped(), "the other", "A <b>")
    assert len(set(ids(one))) == len(ids(one)) > 3
    assert not set(ids(one)) & set(ids(other))
    assert all(name.startswith("the-other-") for name in ids(other))


def test_every_reference_still_finds_its_target() -> None:
    svg = svg_text(clipped(), "demand", "A <b>")
    targets = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', svg)
    assert targets
    assert {a or b for a, b in targets} <= set(ids(svg))


def test_neutral_colours_follow_the_page() -> None:
    svg = svg_text(drawing(), "gpus", "A <b>")
    assert "fill: var(--figure-paper, #ffffff)" in svg
    assert "var(--figure-ink, #1f2733)" in svg
    assert not re.search(r"(?<!, )#1f2733", svg)
