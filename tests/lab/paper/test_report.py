"""The report of a reproduction: one page that loads nothing."""

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from slicewise.lab.figures.bars import bars_at_demand, fragmentation_bars
from slicewise.lab.figures.curves import demand_curves
from slicewise.lab.figures.save import svg_text
from slicewise.lab.figures.style import THEME
from slicewise.lab.paper.comparison import Comparison, compare
from slicewise.lab.paper.findings import findings
from slicewise.lab.paper.report import RunMeta, caption, render_report

META = RunMeta(
    runs=1500,
    seed=7,
    gpus=100,
    model="A100-80GB",
    lifetime="capacity",
    version="0.1.0",
    command="slicewise reproduce --runs 1500 --seed 7",
)
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><path id="{}"/></svg>'
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every element that opens also closes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data + " "

    def count(self, tag: str, **attributes: str) -> int:
        return sum(
            name == tag and all(found.get(k.rstrip("_")) == v for k, v in attributes.items())
            for name, found in self.elements
        )


def render(comparison: Comparison, meta: RunMeta = META, **figures: str) -> str:
    return render_report(meta, comparison, findings(comparison), figures)


@pytest.fixture(scope="module")
def whole(make_rows: Any) -> str:
    """A report with real figures and a few differences."""
    rows = make_rows(
        {
            ("acceptance_rate", "bimodal", "BF-BI"): 0.68,
            ("fragmentation", "uniform", "MFI"): 0.0174,
        }
    )
    drawings = {
        "bars": bars_at_demand(rows.results),
        "fragmentation": fragmentation_bars(rows.fragmentation),
        "demand-uniform": demand_curves(rows.results, "uniform"),
        "demand-bimodal": demand_curves(rows.results, "bimodal"),
    }
    figures = {
        name: svg_text(drawing, name, caption(name).alt) for name, drawing in drawings.items()
    }
    comparison = rows.compared()
    return render_report(META, comparison, findings(comparison), figures)


def test_the_page_is_complete_and_has_no_script(whole: str) -> None:
    page = Page(whole)
    assert whole.startswith("<!DOCTYPE html>")
    assert page.count("script") == page.count("link") == page.count("img") == 0
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)
    assert whole.count("<!") == 1  # no second DOCTYPE, no comments
    assert "<?" not in whole


def test_the_page_loads_nothing(whole: str) -> None:
    assert set(re.findall(r"\w+://[^\"'\s<)]*", whole)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    page = Page(whole)
    references = [
        value
        for _, attributes in page.elements
        for key, value in attributes.items()
        if key in {"href", "xlink:href", "src", "srcset", "action", "data"}
    ]
    assert references
    assert all(reference and reference.startswith("#") for reference in references)
    assert "@import" not in whole
    assert set(re.findall(r"url\((.)", whole)) <= {"#"}
    assert page.count("meta", http_equiv="") == 0
    (policy,) = [a["content"] for t, a in page.elements if t == "meta" and "http-equiv" in a]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_every_id_is_unique_and_every_link_has_a_target(whole: str) -> None:
    page = Page(whole)
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert len(ids) > 100
    assert max(ids.values()) == 1
    links = {attributes["href"] for _, attributes in page.elements if attributes.get("href")}
    assert {str(link)[1:] for link in links} <= set(ids)


def test_the_page_describes_the_run(whole: str) -> None:
    page = Page(whole)
    for fact in ("1,500", "A100-80GB", "capacity", "0.1.0", META.command, "2025", "Zambianco"):
        assert fact in page.words
    assert page.count("p", role="note") == 0


def test_tables_show_both_values_and_mark_what_differs(whole: str) -> None:
    page = Page(whole)
    assert page.count("table") == 4 * 3 + 4
    assert page.count("tr", class_="out") == page.count("span", class_="flag") - 1 == 2
    assert (
        '<tr class="out"><th scope="row">BF-BI</th><td>0.740</td>'
        '<td>0.680 <span class="note">±&nbsp;0.010</span></td>'
        '<td>\N{MINUS SIGN}0.060</td><td><span class="flag">outside</span></td></tr>'
    ) in whole
    assert "<b>14 of 15</b>" in whole
    assert "<b>12 of 12</b>" in whole
    assert page.words.count("the reference") == 3


def test_unexplained_differences_are_listed(whole: str, make_rows: Any) -> None:
    assert "2 points are not explained" in whole
    assert "0.017 against 0.414" in Page(whole).words
    agreeing = render(make_rows().compared())
    assert "not explained</a>" not in agreeing
    assert "Every number that was compared lies within its margin." in agreeing
    one = render(make_rows({("acceptance_rate", "bimodal", "BF-BI"): 0.68}).compared())
    assert "One point is not explained" in one


def test_figures_have_headings_captions_and_alternative_text(whole: str) -> None:
    page = Page(whole)
    assert page.count("svg", role="img") == page.count("figcaption") == 4
    labels = [a["aria-label"] for tag, a in page.elements if tag == "svg"]
    assert all(label and len(label) > 30 for label in labels)
    assert "As demand grows: bimodal" in page.words
    assert not any("width" in a for tag, a in page.elements if tag == "svg")


def test_hostile_text_stays_text(make_rows: Any) -> None:
    evil = "</style><script>alert(1)</script>\"'&"
    meta = RunMeta(1, 1, 2, evil, evil, evil, evil, interrupted=evil)
    comparison = make_rows().compared()
    figures = {evil: SVG.format("a"), f"demand-{evil}": SVG.format("b")}
    text = render_report(meta, comparison, [evil], figures)
    page = Page(text)
    assert page.count("script") == 0
    assert text.count("</style>") == 1
    assert page.words.count(evil) > 6


def test_an_interrupted_run_and_another_setting_are_announced(make_rows: Any) -> None:
    meta = RunMeta(
        20, 1, 8, "H100-80GB", "saturation", "1", "x", interrupted="12 of 20 runs were finished."
    )
    page = Page(render(make_rows().compared(), meta))
    assert page.count("p", role="note") == 2
    assert "12 of 20 runs were finished." in page.words
    assert "The published figures are for 100 A100-80GB GPUs" in page.words
    assert "the paper's own words" in page.words


def test_a_cause_that_is_known_is_not_called_unknown(make_rows: Any) -> None:
    comparison = make_rows({("utilization_percent", "bimodal", "MFI"): 50.0}).compared()
    assert "The cause of these differences is not known." in render(comparison)
    for other in (replace(META, lifetime="saturation"), replace(META, gpus=10)):
        text = render(comparison, other)
        assert "The cause of these differences is not known." not in text
        assert "accounts for part of these differences" in text


def test_the_page_knows_the_colours_and_titles_of_the_figures(whole: str) -> None:
    for name in THEME.values():
        assert whole.count(f"--figure-{name}:") == 3  # light, dark, print
    titles = [a["id"] for _, a in Page(whole).elements if str(a.get("id")).endswith("figure-title")]
    assert titles == ["demand-uniform-figure-title", "demand-bimodal-figure-title"]
    assert '[id$="-figure-title"] { display: none; }' in whole


def test_a_report_without_comparable_figures() -> None:
    page = Page(render(Comparison(())))
    assert "Nothing that was run has a published figure" in page.words
    assert page.count("table") == page.count("figure") == 0


def test_few_results_make_a_small_report() -> None:
    row = {"distribution": "bimodal", "policy": "MFI", "demand": 0.85}
    text = render(compare([row | {"acceptance_rate": 1.0, "scheduled_ratio_to_mfi": 1.0}], []))
    assert text.count("<b>1 of 1</b>") == 1  # a ratio to itself is not judged
    assert "<td>1.000</td><td>+0.005</td>" in text  # one run gives no interval
    assert Page(text).count("table") == 2


def test_the_same_input_gives_the_same_page(make_rows: Any) -> None:
    assert render(make_rows().compared()) == render(make_rows().compared())
