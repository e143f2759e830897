"""An invalid geometry is refused with the name of the field."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slicewise import Budget, Geometry, GeometryError, Profile, UnknownNameError

ONE = Profile("1g", 1, 1, 5, (0, 1))


def make(**changes: object) -> Geometry:
    fields: dict[str, object] = {
        "model": "tiny",
        "slices": 2,
        "compute": 2,
        "profiles": (ONE,),
        "memory_gb": 10,
        "budgets": (Budget("media", 1),),
    }
    return Geometry(**{**fields, **changes})  # type: ignore[arg-type]


def profile(**changes: object) -> tuple[Profile, ...]:
    fields: dict[str, object] = {
        "name": "2g",
        "size": 2,
        "compute": 2,
        "memory_gb": 10,
        "starts": (0,),
    }
    return (ONE, Profile(**{**fields, **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: make(model="two words"), "model"),
        (lambda: make(slices=0), "memory_slices"),
        (lambda: make(slices=17), "memory_slices"),
        (lambda: make(compute=0), "compute_slices"),
        (lambda: make(memory_gb=-1), "memory_gb"),
        (lambda: make(memory_gb=float("nan")), "memory_gb"),
        (lambda: make(profiles=()), "profile"),
        (lambda: make(profiles=(ONE, ONE)), "profile 1g"),
        (lambda: make(budgets=(Budget("", 1),)), "budget.name"),
        (lambda: make(budgets=(Budget("a", 1), Budget("a", 1))), "budget a"),
        (lambda: make(budgets=(Budget("compute", 1),)), "budget compute"),
        (lambda: make(budgets=(Budget("a", -1),)), "budget a.total"),
        (lambda: make(profiles=profile(name="")), "profile.name"),
        (lambda: make(profiles=profile(size=3)), "profile 2g.size"),
        (lambda: make(profiles=profile(size=-2)), "profile 2g.size"),
        (lambda: make(profiles=profile(compute=3)), "profile 2g.compute"),
        (lambda: make(profiles=profile(memory_gb=-3)), "profile 2g.memory_gb"),
        (lambda: make(profiles=profile(starts=())), "profile 2g.starts"),
        (lambda: make(profiles=profile(starts=(1,))), "profile 2g.starts"),
        (lambda: make(profiles=profile(starts=(-1,))), "profile 2g.starts"),
        (lambda: make(profiles=profile(size=1, starts=(1, 0))), "profile 2g.starts"),
        (lambda: make(profiles=profile(size=1, starts=(0, 0))), "profile 2g.starts"),
        (lambda: make(profiles=profile(preferred=(1,))), "profile 2g.preferred"),
        (lambda: make(profiles=profile(uses={"gas": 1})), "profile 2g.uses"),
        (lambda: make(profiles=profile(uses={"media": 2})), "profile 2g.uses.media"),
        (lambda: make(profiles=profile(variant_of="3g")), "profile 2g.variant_of"),
        (
            lambda: make(profiles=(Profile("1g", 1, 1, 5, (0,), variant_of="1g"),)),
            "profile",
        ),
    ],
)
def test_an_invalid_geometry_names_the_field(build: Callable[[], Geometry], field: str) -> None:
    with pytest.raises(GeometryError) as refusal:
        build()
    assert refusal.value.field == field
    assert str(refusal.value).startswith(f"{field}: ")


def test_placements_are_every_profile_at_every_start(a100: Geometry) -> None:
    assert [(p.profile.name, p.start) for p in a100.placements if p.profile.name == "2g.20gb"] == [
        ("2g.20gb", 0),
        ("2g.20gb", 2),
        ("2g.20gb", 4),
    ]
    for number, placement in enumerate(a100.placements):
        assert placement.number == number
        slices = [i for i in range(8) if placement.window >> i & 1]
        first = placement.start
        assert slices == list(range(first, first + placement.profile.size))


def test_an_unknown_profile_suggests_similar_names(a100: Geometry) -> None:
    with pytest.raises(UnknownNameError, match=r"'3G\.40GB'; did you mean 3g\.40gb"):
        a100.profile("3G.40GB")
    with pytest.raises(UnknownNameError, match=r"known: 1g\.10gb, "):
        a100.profile("?")


def test_masks_are_written_slice_zero_first(a100: Geometry) -> None:
    assert a100.mask("11000100") == 0b100011
    assert a100.mask_text(0b100011) == "11000100"
    for text in ("", "1100010", "1100010x", "110001000"):
        with pytest.raises(GeometryError, match="mask"):
            a100.mask(text)


def test_reprs(a100: Geometry) -> None:
    assert repr(a100) == "Geometry(A100-80GB)"
    assert repr(a100.profile("1g.10gb")) == "Profile(1g.10gb)"


def test_long_lists_of_known_names_are_omitted() -> None:
    many = [f"name-{i}" for i in range(40)]
    assert "40 are known" in str(UnknownNameError("thing", "@@@", many))
    assert "look there" in str(UnknownNameError("thing", "@@@", many, "look there"))
