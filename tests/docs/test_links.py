"""Documents link to existing documents, headings, files and pictures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
_SUFFIXES = (".py", ".toml", ".json", ".md", ".css", ".lock", ".png")
_OUTPUT_FILES = {"demo-report/report.html", "results.json", "results.csv"}
_LARGEST_PICTURE = 200_000
_LARGEST_RECORDING = 1_000_000


def prose(document: Path) -> str:
    """Return a document without its fenced blocks."""
    return _FENCED.sub("", document.read_text(encoding="utf-8"))


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings."""
    found: set[str] = set()
    for heading in _HEADING.findall(prose(document)):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower())
        found.add(re.sub(r"\s", "-", words.strip()))
    return found


def test_link_targets_exist(document: Path) -> None:
    for link in _LINK.finditer(prose(document)):
        target, _, anchor = link["target"].partition("#")
        if re.match(r"https?:", target):
            continue
        path = (document.parent / target).resolve() if target else document
        assert path.exists(), f"{link['target']} does not exist"
        if anchor:
            assert anchor in anchors(path), f"{path.name} has no heading #{anchor}"


def test_pictures_have_alternative_text(document: Path) -> None:
    for link in _LINK.finditer(prose(document)):
        if link["picture"]:
            assert len(link["text"]) > 20, f"{link['target']}: the alternative text is too short"


def test_files_named_in_the_text_exist(document: Path, root: Path) -> None:
    places = (document.parent, root, root / "src" / "slicewise")
    for name in _CODE.findall(prose(document)):
        looks_like_a_file = _PATH.fullmatch(name) and (
            name.endswith(_SUFFIXES) or (name.endswith("/") and len(name) > 1)
        )
        if looks_like_a_file and name not in _OUTPUT_FILES:
            assert any((place / name).exists() for place in places), f"{name} does not exist"


def test_every_picture_is_shown_and_small(root: Path) -> None:
    documents = [*root.glob("*.md"), *(root / "docs").glob("*.md")]
    shown = {
        (document.parent / link["target"]).resolve()
        for document in documents
        for link in _LINK.finditer(prose(document))
        if link["picture"]
    }
    drawn = set((root / "docs" / "pictures").iterdir())
    taken = set((root / "docs" / "screens").iterdir())
    assert shown == drawn | taken
    for picture in shown:
        content = picture.read_bytes()
        if picture in drawn:
            assert content.startswith(b"\x89PNG\r\n\x1a\n"), f"{picture.name} is not a PNG"
        else:
            assert content[8:12] == b"WEBP", f"{picture.name} is not a WebP"
        moving = b"ANIM" in content[:64]
        largest = _LARGEST_RECORDING if moving else _LARGEST_PICTURE
        assert len(content) <= largest, f"{picture.name} is too large"


def test_every_document_is_in_the_index(root: Path) -> None:
    index = prose(root / "docs" / "README.md")
    for document in (root / "docs").glob("*.md"):
        if document.name != "README.md":
            assert f"]({document.name})" in index, f"docs/README.md does not list {document.name}"


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [("The score by hand", "the-score-by-hand"), ("MFI and `mfi-overlap`!", "mfi-and-mfi-overlap")],
)
def test_anchors_of_headings(heading: str, anchor: str, tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text(f"# {heading}\n\n```sh\n# no heading\n```\n", encoding="utf-8")
    assert anchors(document) == {anchor}
