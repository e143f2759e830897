"""GPUs drawn slice by slice."""

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from slicewise.core.errors import SlicewiseError
from slicewise.lab.figures.slicemap import Block, GpuDrawing, draw_gpus, profile_colour

EXAMPLE = GpuDrawing(
    8,
    (Block("2g.20gb", 0, 2), Block("1g.10gb", 5, 1, label="tenant b")),
    stranded=(2, 3, 4, 6, 7),
    title="GPU 0",
    verdict="3g.40gb finds no window",
)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_instances_are_labelled_blocks_as_wide_as_their_windows() -> None:
    figure = draw_gpus([EXAMPLE])
    boxes = [p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]
    slice_width = 0.78
    assert [box.get_x() for box in boxes] == [
        pytest.approx(0.2 + 0.035),
        pytest.approx(0.2 + 0.035 + 5 * slice_width),
    ]
    widths = [box.get_width() + 2 * 0.035 for box in boxes]
    assert widths == [pytest.approx(2 * slice_width), pytest.approx(slice_width)]
    assert {"2g.20gb", "tenant b", "GPU 0", "3g.40gb finds no window"} <= set(texts(figure))
    assert [text for text in texts(figure) if text.isdigit()] == list("01234567")


def test_only_stranded_slices_are_hatched() -> None:
    def hatched(gpu: GpuDrawing) -> int:
        patches = draw_gpus([gpu]).axes[0].patches
        return sum(isinstance(p, Rectangle) and bool(p.get_hatch()) for p in patches)

    assert hatched(EXAMPLE) == 5 + 1  # and the key
    assert hatched(GpuDrawing(8)) == 0


def test_a_long_verdict_is_wrapped_and_makes_room() -> None:
    short = draw_gpus([GpuDrawing(8, verdict="fits")])
    long = draw_gpus([GpuDrawing(8, verdict="does not fit " * 20)])
    assert long.get_figheight() > short.get_figheight()
    assert " ".join(texts(long)[8:]) == ("does not fit " * 20).strip()


def test_gpus_can_be_drawn_side_by_side() -> None:
    one, two = draw_gpus([EXAMPLE] * 4), draw_gpus([EXAMPLE] * 4, columns=2)
    assert two.get_figwidth() > 1.9 * one.get_figwidth()
    assert two.get_figheight() < one.get_figheight()


def test_a_profile_has_one_colour() -> None:
    known = [("7g.80gb", 8), ("4g.40gb", 4), ("3g.40gb", 4), ("2g.20gb", 2), ("1g.20gb", 2)]
    assert len({profile_colour(*each) for each in [*known, ("1g.10gb", 1)]}) == 6
    assert profile_colour("1g.10gb+me", 1) == profile_colour("1g.10gb", 1)
    assert profile_colour("thing", 1) == profile_colour("thing", 1)
    assert profile_colour("5g.60gb", 5).startswith("#")


@pytest.mark.parametrize(
    ("gpu", "problem"),
    [
        (GpuDrawing(0), "0 slices"),
        (GpuDrawing(8, (Block("7g", 4, 8),)), r"leaves slices 0\.\.7"),
        (GpuDrawing(8, (Block("7g", 0, 0),)), "leaves slices"),
        (GpuDrawing(8, (Block("2g", 0, 2), Block("1g", 1, 1))), "overlaps"),
        (GpuDrawing(8, (Block("2g", 0, 2),), stranded=(1,)), "must be a free slice"),
        (GpuDrawing(8, stranded=(8,), title="x"), "GPU 'x'"),
    ],
)
def test_impossible_gpus_are_rejected(gpu: GpuDrawing, problem: str) -> None:
    with pytest.raises(SlicewiseError, match=problem):
        draw_gpus([gpu])


def test_an_empty_drawing_is_rejected() -> None:
    with pytest.raises(SlicewiseError, match="at least one GPU"):
        draw_gpus([])
