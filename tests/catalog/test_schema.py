"""Parsing an entry: what is accepted, and the message of every mistake."""

from collections.abc import Callable
from typing import Any

import pytest

from slicewise.catalog import Confidence, Engines, Level, parse_entry
from slicewise.core.errors import GeometryError

Data = dict[str, Any]


def minimal() -> Data:
    """The required fields."""
    return {
        "model": "MINE",
        "memory_slices": 4,
        "compute_slices": 4,
        "profile": [
            {"name": "1g", "size": 1, "compute": 1, "starts": [0, 1, 2, 3]},
            {"name": "2g", "size": 2, "compute": 2, "starts": [0, 2]},
        ],
    }


def complete() -> Data:
    """All fields."""
    data = minimal()
    data |= {
        "aliases": ["my one"],
        "architecture": "Own",
        "memory_gb": 24.5,
        "pci_device_ids": ["0x20b7"],
        "notes": ["first\n  second"],
        "sources": ["me"],
        "confidence": {"profiles": "primary", "placements": "inferred", "engines": "unknown"},
        "budget": [{"name": "video", "total": 1}],
    }
    data["profile"].append(
        {
            "name": "1g+v",
            "size": 1,
            "compute": 1,
            "memory_gb": 6,
            "starts": [0, 1, 2, 3],
            "preferred": [3, 2, 1, 0],
            "uses": {"video": 1},
            "variant_of": "1g",
            "id": 20,
            "nvml_enum": 7,
            "max_instances": 1,
            "sm_count": 14,
            "memory_mib": 5952,
            "memory_gib": 5.81,
            "engines": {"copy": 1, "decoder": 1, "encoder": 0, "jpeg": 1, "ofa": 1},
        }
    )
    return data


def without_starts() -> Data:
    data = complete()
    data["confidence"]["placements"] = "unknown"
    for profile in data["profile"]:
        profile.pop("starts")
        profile.pop("preferred", None)
    return data


def test_the_least_is_enough() -> None:
    entry = parse_entry(minimal(), "my.toml")
    assert entry.require().profile("2g").starts == (0, 2)
    assert entry.names == ("MINE",)
    assert entry.memory_gb == 0
    assert entry.confidence is None
    assert entry.facts[0].engines is None


def test_everything_is_kept() -> None:
    entry = parse_entry(complete(), "my.toml")
    assert entry.names == ("MINE", "my one")
    assert entry.architecture == "Own"
    assert entry.memory_gb == 24.5
    assert entry.pci_device_ids == ("0x20b7",)
    assert entry.notes == ("first second",)
    assert entry.sources == ("me",)
    assert entry.confidence == Confidence(Level.PRIMARY, Level.INFERRED, Level.UNKNOWN)
    facts = entry.facts[2]
    assert (facts.id, facts.nvml_enum, facts.max_instances, facts.sm_count) == (20, 7, 1, 14)
    assert (facts.memory_mib, facts.memory_gib) == (5952, 5.81)
    assert facts.engines == Engines(copy=1, decoder=1, encoder=0, jpeg=1, ofa=1)
    profile = entry.require().profile("1g+v")
    assert (profile.start_order, profile.uses) == ((3, 2, 1, 0), {"video": 1})
    assert profile.variant_of == facts.variant_of == "1g"


def test_starts_may_be_left_out_where_they_are_said_to_be_unknown() -> None:
    entry = parse_entry(without_starts(), "my.toml")
    assert entry.geometry is None
    assert entry.refusal is not None
    assert [facts.size for facts in entry.facts] == [1, 2, 1]


def put(*path: str | int, value: object) -> Callable[[Data], None]:
    """Return a change that writes ``value`` at a path."""

    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[Data], None]:
    """Return a change that removes the value at a path."""

    def change(data: Any) -> None:
        for step in path[:-1]:
            data = data[step]
        del data[path[-1]]

    return change


MISTAKES: list[tuple[Callable[[Data], None], str]] = [
    # Unknown fields.
    (put("memory_slice", value=1), "memory_slice: no such field; did you mean memory_slices?"),
    (put("zzz", value=1), "zzz: no such field; known: model, aliases, architecture, memory_gb,"),
    (put("a\nb", value=1), "'a\\nb': no such field"),
    (put("x" * 99, value=1), f"'{'x' * 36}...: no such field"),
    (
        put("profile", 2, "strats", value=[0]),
        "profile[2] (1g+v).strats: no such field; did you mean starts?",
    ),
    (put("profile", 2, "engines", "gpu", value=1), "profile[2] (1g+v).engines.gpu: no such field"),
    (put("budget", 0, "sum", value=1), "budget[0].sum: no such field; known: name, total"),
    (put("confidence", "me", value="primary"), "confidence.me: no such field"),
    # Missing fields.
    (drop("model"), "model: is missing"),
    (drop("memory_slices"), "memory_slices: is missing"),
    (drop("compute_slices"), "compute_slices: is missing"),
    (drop("profile"), "profile: is missing"),
    (drop("profile", 1, "name"), "profile[1].name: is missing"),
    (drop("profile", 1, "size"), "profile[1] (2g).size: is missing"),
    (drop("profile", 1, "compute"), "profile[1] (2g).compute: is missing"),
    (drop("profile", 1, "starts"), "profile[1] (2g).starts: is missing"),
    (drop("profile", 2, "engines", "ofa"), "profile[2] (1g+v).engines.ofa: is missing"),
    (drop("budget", 0, "total"), "budget[0].total: is missing"),
    (drop("confidence", "engines"), "confidence.engines: is missing"),
    # Wrong types.
    (put("model", value=5), "model: needs text, not a whole number"),
    (put("aliases", value="A"), "aliases: needs an array, not text"),
    (put("aliases", value=["A", 5]), "aliases[1]: needs text, not a whole number"),
    (put("memory_slices", value=True), "memory_slices: needs a whole number, not true or false"),
    (put("memory_slices", value=8.0), "memory_slices: needs a whole number, not a fraction"),
    (put("compute_slices", value="7"), "compute_slices: needs a whole number, not text"),
    (put("memory_gb", value=False), "memory_gb: needs a number, not true or false"),
    (put("memory_gb", value={}), "memory_gb: needs a number, not a table"),
    (put("notes", value={}), "notes: needs an array, not a table"),
    (put("confidence", value="high"), "confidence: needs a table, not text"),
    (put("confidence", "profiles", value="high"), "confidence.profiles: high is none of primary,"),
    (put("profile", value={}), "profile: needs an array, not a table"),
    (put("profile", 0, value=7), "profile[0]: needs a table, not a whole number"),
    (put("profile", 0, "name", value=["1g"]), "profile[0].name: needs text, not an array"),
    (put("profile", 0, "size", value=True), "profile[0] (1g).size: needs a whole number"),
    (put("profile", 0, "starts", value=0), "profile[0] (1g).starts: needs an array"),
    (put("profile", 0, "starts", value=[0, "1"]), "profile[0] (1g).starts[1]: needs a whole"),
    (put("profile", 0, "starts", value=[False]), "profile[0] (1g).starts[0]: needs a whole"),
    (put("profile", 0, "uses", value=[1]), "profile[0] (1g).uses: needs a table, not an array"),
    (put("profile", 2, "uses", "video", value=0.5), "profile[2] (1g+v).uses.video: needs a whole"),
    (put("profile", 2, "id", value=None), "profile[2] (1g+v).id: needs a whole number, not a None"),
    # Values that make no sense by themselves.
    (put("model", value=" "), "model: is empty"),
    (put("aliases", value=[""]), "aliases[0]: is empty"),
    (put("notes", value=["a\x1b[2Jb"]), "notes[0]: holds characters that cannot be printed"),
    (put("pci_device_ids", value=["20B7"]), "pci_device_ids[0]: '20B7' is not a PCI device id"),
    (put("memory_gb", value=float("nan")), "memory_gb: nan is not a finite number"),
    (put("memory_gb", value=float("inf")), "memory_gb: inf is not a finite number"),
    (put("memory_gb", value=-1), "memory_gb: -1 is negative"),
    (put("memory_slices", value=16**9999), "memory_slices: is beyond 1,000,000,000"),
    (put("memory_gb", value=1e300), "memory_gb: is beyond 1,000,000,000"),
    (put("profile", 0, "starts", value=[-(16**9999)]), "profile[0] (1g).starts[0]: is beyond"),
    (put("profile", 2, "id", value=-1), "profile[2] (1g+v).id: -1 is negative"),
    (put("profile", 2, "engines", "copy", value=-1), "profile[2] (1g+v).engines.copy: -1 is neg"),
    # Values that cannot be true of a GPU: found by the geometry itself.
    (put("model", value="MY GPU"), "model: 'MY GPU' is not a name"),
    (put("memory_slices", value=0), "memory_slices: 0 is not in 1..16"),
    (put("compute_slices", value=0), "compute_slices: 0 is not positive"),
    (put("profile", value=[]), "profile: a GPU needs at least one profile"),
    (put("profile", 1, "name", value="1g"), "profile 1g: named twice"),
    (put("profile", 1, "size", value=9), "profile 2g.size: 9 is not in 1..4"),
    (put("profile", 1, "compute", value=5), "profile 2g.compute: 5 is not in 0..4"),
    (put("profile", 1, "starts", value=[]), "profile 2g.starts: needs at least one legal start"),
    (put("profile", 1, "starts", value=[2, 0]), "profile 2g.starts: must ascend"),
    (put("profile", 1, "starts", value=[3]), "profile 2g.starts: a window of 2 at 3 leaves"),
    (put("profile", 2, "preferred", value=[0]), "profile 1g+v.preferred: must hold exactly"),
    (put("profile", 2, "uses", value={"x": 1}), "profile 1g+v.uses: no budget 'x'"),
    (put("profile", 2, "uses", "video", value=2), "profile 1g+v.uses.video: 2 is not in 0..1"),
    (put("budget", 0, "total", value=-1), "budget video.total: -1 is negative"),
    (put("budget", 0, "name", value="compute"), "budget compute: the name is taken"),
    (put("profile", 2, "variant_of", value="9g"), "profile 1g+v.variant_of: no profile '9g'"),
    # Variants with other windows than their plain profile.
    (
        put("profile", 2, "variant_of", value="2g"),
        "profile[2] (1g+v).variant_of: 2g does not take the same slices",
    ),
    (
        put("profile", 2, "variant_of", value="1g+v"),
        "profile[2] (1g+v).variant_of: 1g+v is a variant itself",
    ),
    # Placements declared unknown must not be given.
    (
        put("confidence", "placements", value="unknown"),
        "confidence.placements: is unknown, yet 1g has starts; write inferred",
    ),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_a_mistake_is_named_by_its_place(change: Callable[[Data], None], message: str) -> None:
    data = complete()
    change(data)
    with pytest.raises(GeometryError) as caught:
        parse_entry(data, "my.toml")
    assert str(caught.value).startswith(f"my.toml: {message}")
    assert caught.value.field.startswith("my.toml: ")


def test_figures_are_checked_even_where_starts_are_unknown() -> None:
    data = without_starts()
    data["profile"][0]["size"] = 5
    with pytest.raises(GeometryError, match=r"profile 1g\.size: 5 is not in 1\.\.4"):
        parse_entry(data, "my.toml")


def test_what_is_no_table_at_all_is_refused() -> None:
    data: Any = [1, 2]
    with pytest.raises(GeometryError, match=r"^my\.toml: needs a table, not an array$"):
        parse_entry(data, "my.toml")
