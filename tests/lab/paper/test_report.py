"""The report of a reproduction: one page that loads nothing."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.lab.html_page import Page

from slicewise.lab.figures.bars import bars_at_demand, fragmentation_bars
from slicewise.lab.figures.curves import demand_curves
from slicewise.lab.figures.save import svg_text
from slicewise.lab.figures.style import THEME
from slicewise.lab.paper.comparison import Comparison, compare
from slicewise.lab.paper.readings import DIFFERENCES, ReadingName
from slicewise.lab.paper.report import RunMeta, caption, render_report

META = RunMeta(
    reading=ReadingName.DATA,
    runs=1500,
    seed=7,
    model="A100-80GB",
    lifetime="capacity",
    version="0.1.0",
    command="slicewise reproduce --runs 1500 --seed 7",
)
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><path id="{}"/></svg>'


def render(data: Comparison, text: Comparison | None = None, meta: RunMeta = META) -> str:
    return render_report(meta, {"data": data, "text": data if text is None else text}, {})


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
    text = make_rows({("acceptance_rate", "bimodal", "BF-BI"): 0.687})
    return render_report(META, {"data": rows.compared(), "text": text.compared()}, figures)


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


def test_tables_show_both_readings_and_mark_what_differs(whole: str) -> None:
    page = Page(whole)
    assert page.count("table") == 4 * 3 + 4 + 3  # and the counts, the arithmetic, the readings
    assert page.count("td", class_="out") == 2 * (2 + 1)
    assert page.count("span", class_="flag") == 3 + 1
    assert (
        '<tr><th scope="row">BF-BI</th><td>0.740</td>'
        '<td class="out">0.680 <span class="note">±&nbsp;0.010</span></td>'
        '<td class="out">\N{MINUS SIGN}0.060 <span class="flag">outside</span></td>'
        '<td class="out">0.687 <span class="note">±&nbsp;0.010</span></td>'
        '<td class="out">\N{MINUS SIGN}0.053 <span class="flag">outside</span></td></tr>'
    ) in whole
    assert "<b>78 of 80</b>" in whole
    assert "<b>79 of 80</b>" in whole
    assert "<td>14 of 15</td><td>14 of 15</td>" in whole
    assert "<td>19 of 20</td><td>20 of 20</td>" in whole
    assert page.words.count("the reference") == 2 * 3


def test_the_arithmetic_is_shown(whole: str) -> None:
    words = " ".join(Page(whole).words.split())
    assert "a multiple of 0.002%" in words
    assert "5 of the 15 published shares" in words
    assert "skew-small BF-BI 65.205 32602.5" in words
    assert "whole only for 40, 80, 120, 160, 200" in words
    assert "need 500, 1000, 1500, 2000 runs" in words


def test_the_readings_are_explained_with_their_confidence(whole: str) -> None:
    words = " ".join(Page(whole).words.split())
    for point in DIFFERENCES:
        for said in (point.title, point.data, point.text, point.confidence):
            assert said in words


def test_what_lies_outside_is_listed(whole: str, make_rows: Any) -> None:
    assert "MFI uniform 0.017 against 0.414" in Page(whole).words
    agreeing = render(make_rows().compared())
    assert agreeing.count("<p>Nothing that was compared.</p>") == 2
    assert "outside</span></td>" not in agreeing


def test_a_reading_without_a_number_says_so(make_rows: Any) -> None:
    rows = make_rows()
    few = compare(rows.results, [])
    page = Page(render(rows.compared(), few))
    assert page.words.count("not run") == 20


def test_figures_have_headings_captions_and_alternative_text(whole: str) -> None:
    page = Page(whole)
    assert page.count("svg", role="img") == page.count("figcaption") == 4
    labels = [a["aria-label"] for tag, a in page.elements if tag == "svg"]
    assert all(label and len(label) > 30 for label in labels)
    assert "As demand grows: bimodal" in page.words
    assert not any("width" in a for tag, a in page.elements if tag == "svg")


def test_hostile_text_stays_text(make_rows: Any) -> None:
    evil = "</style><script>alert(1)</script>\"'&"
    meta = RunMeta(ReadingName.DATA, 1, 1, evil, evil, evil, evil, interrupted=evil)
    comparison = make_rows().compared()
    figures = {evil: SVG.format("a"), f"demand-{evil}": SVG.format("b")}
    text = render_report(meta, {"data": comparison}, figures)
    page = Page(text)
    assert page.count("script") == 0
    assert text.count("</style>") == 1
    assert page.words.count(evil) > 6


def test_an_interrupted_run_and_another_setting_are_announced(make_rows: Any) -> None:
    meta = replace(META, lifetime="saturation", interrupted="12 of 20 runs were finished.")
    page = Page(render(make_rows().compared(), meta=meta))
    assert page.count("p", role="note") == 2
    assert "12 of 20 runs were finished." in page.words
    assert "Lifetimes follow the rule \u201csaturation\u201d" in page.words
    assert "the paper's own words" in page.words


def test_the_page_knows_the_colours_and_titles_of_the_figures(whole: str) -> None:
    for name in THEME.values():
        assert whole.count(f"--figure-{name}:") == 3  # light, dark, print
    titles = [a["id"] for _, a in Page(whole).elements if str(a.get("id")).endswith("figure-title")]
    assert titles == ["demand-uniform-figure-title", "demand-bimodal-figure-title"]
    assert '[id$="-figure-title"] { display: none; }' in whole


def test_a_report_without_comparable_figures() -> None:
    page = Page(render(Comparison(())))
    assert "Nothing that was run has a published figure" in page.words
    assert page.count("figure") == 0
    assert page.count("table") == 2  # the arithmetic and the readings


def test_few_results_make_a_small_report() -> None:
    row = {"distribution": "bimodal", "policy": "MFI", "demand": 0.85}
    text = render(compare([row | {"acceptance_rate": 1.0, "scheduled_ratio_to_mfi": 1.0}], []))
    assert "<td>1 of 1</td><td>1 of 1</td>" in text
    assert "<td>0 of 0</td><td>0 of 0</td>" in text  # a ratio to itself is not judged
    assert "<td>1.000</td><td>+0.005</td>" in text  # one run gives no interval
    assert Page(text).count("table") == 3 + 2


def test_the_same_input_gives_the_same_page(make_rows: Any) -> None:
    assert render(make_rows().compared()) == render(make_rows().compared())
