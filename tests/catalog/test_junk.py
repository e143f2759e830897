"""Random input to the loader: it raises only slicewise's own errors."""

import copy
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.catalog import CatalogEntry, load_file, parse_entry
from slicewise.core.errors import SlicewiseError

EXAMPLE = (Path(__file__).parents[2] / "examples" / "my-gpu.toml").read_text()

FIELDS = [
    *("model", "aliases", "architecture", "memory_gb", "memory_slices", "compute_slices"),
    *("pci_device_ids", "notes", "sources", "confidence", "budget", "profile", "profiles"),
    *("placements", "engines", "name", "total", "size", "compute", "starts", "preferred", "uses"),
    *("variant_of", "id", "nvml_enum", "max_instances", "sm_count", "memory_mib", "copy"),
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 17),
    st.integers(),
    st.sampled_from([10**4000, -(10**4000), 10**9 + 1]),
    st.floats(),
    st.text(),
    st.sampled_from(["A100", "1g.10gb", "primary", "unknown", "compute", "0x20B7"]),
    st.just(date(2024, 2, 29)),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text()), inner, max_size=8),
    ),
    max_leaves=30,
)
tables = st.dictionaries(st.one_of(st.sampled_from(FIELDS), st.text()), values, max_size=12)

VALID: dict[str, Any] = {
    "model": "MINE",
    "memory_gb": 24,
    "memory_slices": 4,
    "compute_slices": 4,
    "confidence": {"profiles": "primary", "placements": "primary", "engines": "unknown"},
    "budget": [{"name": "video", "total": 1}],
    "profile": [
        {"name": "1g", "size": 1, "compute": 1, "starts": [0, 1, 2, 3]},
        {
            "name": "1g+v",
            "size": 1,
            "compute": 1,
            "starts": [0, 1, 2, 3],
            "preferred": [3, 2, 1, 0],
            "uses": {"video": 1},
            "variant_of": "1g",
        },
    ],
}


def refusal(load: Callable[[], CatalogEntry]) -> str | None:
    """The error for this input, None if it is accepted; any other exception is a bug."""
    try:
        entry = load()
    except SlicewiseError as error:
        return str(error)
    assert (entry.geometry is None) == (entry.refusal is not None)
    return None


def expect_entry_or_refusal(load: Callable[[], CatalogEntry], where: str) -> None:
    message = refusal(load)
    if message is not None:
        assert message.startswith(f"{where}: ")
        assert "\n" not in message


@pytest.mark.unmeasured
@settings(deadline=None)
@given(tables)
def test_any_table_is_read_or_refused(data: dict[str, Any]) -> None:
    expect_entry_or_refusal(lambda: parse_entry(data, "junk.toml"), "junk.toml")


@settings(deadline=None)
@given(st.data())
def test_a_good_table_with_one_bad_value_is_read_or_refused(data: st.DataObject) -> None:
    table = copy.deepcopy(VALID)
    inside: Any = table
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(inside[key], dict | list) or data.draw(st.booleans()):
            break
        inside = inside[key]
    inside[key] = data.draw(values)
    expect_entry_or_refusal(lambda: parse_entry(table, "junk.toml"), "junk.toml")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("junk") / "junk.toml"


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The example file with a piece replaced by something else."""
    start = draw(st.integers(0, len(EXAMPLE)))
    end = draw(st.integers(start, min(len(EXAMPLE), start + 40)))
    return f"{EXAMPLE[:start]}{draw(st.text(max_size=20))}{EXAMPLE[end:]}".encode()


@settings(deadline=None)
@given(content=st.one_of(st.binary(), st.text().map(str.encode), damaged()))
def test_any_file_is_read_or_refused(scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)
    expect_entry_or_refusal(lambda: load_file(scratch), str(scratch))
