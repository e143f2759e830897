"""Parses the TOML file of one GPU model; docs/geometry.md describes the fields.

Built-in models and users' files have the same fields. An unknown, missing or mistyped field is
rejected by its path; ``core.Geometry`` checks whether the figures are possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slicewise.catalog.entry import CatalogEntry, Confidence, Engines, Level, ProfileFacts
from slicewise.catalog.fields import (
    Table,
    amount,
    count,
    device_id,
    integer,
    list_of,
    shown,
    text,
)
from slicewise.core.errors import GeometryError
from slicewise.core.geometry import Budget, Geometry, Profile

NO_PLACEMENTS = (
    "where its profiles may start is not known; run `nvidia-smi mig -lgipp` on the machine and "
    "describe it in a file of your own (docs/geometry.md)"
)


@dataclass(frozen=True)
class _Written:
    """A profile as written in the file; ``starts`` is None if the file has none."""

    path: str
    facts: ProfileFacts
    starts: tuple[int, ...] | None
    preferred: tuple[int, ...]
    uses: Mapping[str, int]

    def profile(self, starts: tuple[int, ...]) -> Profile:
        facts = self.facts
        return Profile(
            facts.name,
            facts.size,
            facts.compute,
            facts.memory_gb,
            starts,
            self.preferred,
            self.uses,
            facts.variant_of,
        )


def parse_entry(data: Mapping[str, object], where: str) -> CatalogEntry:
    """Check the data of one model and return its entry; ``where`` precedes every error."""
    top = Table(data, f"{where}: ")
    model = top.take("model", text)
    aliases = top.take("aliases", list_of(text), ())
    architecture = top.take("architecture", text, "")
    memory_gb = top.take("memory_gb", amount, 0)
    slices = top.take("memory_slices", integer)
    compute = top.take("compute_slices", integer)
    device_ids = top.take("pci_device_ids", list_of(device_id), ())
    notes = top.take("notes", list_of(text), ())
    sources = top.take("sources", list_of(text), ())
    confidence = top.take("confidence", _confidence, None)
    budgets = top.take("budget", list_of(_budget), ())
    written = top.take("profile", list_of(_profile))
    top.finish()

    known = _placements_known(written, confidence, top.path)
    # Without starts, check the rest as if every profile could start at 0.
    profiles = tuple(w.profile((0,) if w.starts is None else w.starts) for w in written)
    try:
        geometry = Geometry(model, slices, compute, profiles, memory_gb, budgets)
    except GeometryError as error:
        raise GeometryError(top.path + error.field, error.problem) from None
    _check_variants(profiles, [w.path for w in written])
    return CatalogEntry(
        model=model,
        aliases=aliases,
        architecture=architecture,
        memory_gb=memory_gb,
        memory_slices=slices,
        compute_slices=compute,
        confidence=confidence,
        sources=sources,
        notes=notes,
        pci_device_ids=device_ids,
        facts=tuple(w.facts for w in written),
        geometry=geometry if known else None,
        refusal=None if known else NO_PLACEMENTS,
    )


def _profile(value: object, path: str) -> _Written:
    path = _named(value, path)
    table = Table(value, f"{path}.")
    facts = ProfileFacts(
        name=table.take("name", text),
        size=table.take("size", integer),
        compute=table.take("compute", integer),
        memory_gb=table.take("memory_gb", amount, 0),
        variant_of=table.take("variant_of", text, None),
        id=table.take("id", count, None),
        nvml_enum=table.take("nvml_enum", count, None),
        max_instances=table.take("max_instances", count, None),
        sm_count=table.take("sm_count", count, None),
        memory_mib=table.take("memory_mib", amount, None),
        memory_gib=table.take("memory_gib", amount, None),
        engines=table.take("engines", _engines, None),
    )
    starts = table.take("starts", list_of(integer), None)
    preferred = table.take("preferred", list_of(integer), ())
    uses = table.take("uses", _uses, {})
    table.finish()
    return _Written(path, facts, starts, preferred, uses)


def _named(value: object, path: str) -> str:
    """Append the profile's name to the path, which is easier to find than its number."""
    name = value.get("name") if isinstance(value, Mapping) else None
    if isinstance(name, str) and 0 < len(name) <= 40 and name.isprintable():
        return f"{path} ({name})"
    return path


def _budget(value: object, path: str) -> Budget:
    table = Table(value, f"{path}.")
    budget = Budget(table.take("name", text), table.take("total", integer))
    table.finish()
    return budget


def _uses(value: object, path: str) -> dict[str, int]:
    table = Table(value, f"{path}.")
    return {
        str(key): integer(number, f"{table.path}{shown(key)}") for key, number in table.data.items()
    }


def _engines(value: object, path: str) -> Engines:
    table = Table(value, f"{path}.")
    engines = Engines(
        copy=table.take("copy", count),
        decoder=table.take("decoder", count),
        encoder=table.take("encoder", count),
        jpeg=table.take("jpeg", count),
        ofa=table.take("ofa", count),
    )
    table.finish()
    return engines


def _confidence(value: object, path: str) -> Confidence:
    table = Table(value, f"{path}.")
    confidence = Confidence(
        profiles=table.take("profiles", _level),
        placements=table.take("placements", _level),
        engines=table.take("engines", _level),
    )
    table.finish()
    return confidence


def _level(value: object, path: str) -> Level:
    word = text(value, path)
    try:
        return Level(word)
    except ValueError:
        raise GeometryError(path, f"{shown(word)} is none of {', '.join(Level)}") from None


def _placements_known(
    written: tuple[_Written, ...], confidence: Confidence | None, path: str
) -> bool:
    """Return whether the file has starts; a file without them must declare them unknown."""
    unknown = confidence is not None and confidence.placements is Level.UNKNOWN
    for w in written:
        if not unknown and w.starts is None:
            raise GeometryError(f"{w.path}.starts", "is missing")
        if unknown and (w.starts is not None or w.preferred):
            raise GeometryError(
                f"{path}confidence.placements",
                f"is unknown, yet {w.facts.name} has starts; write inferred if they are assumed",
            )
    return not unknown


def _check_variants(profiles: tuple[Profile, ...], paths: list[str]) -> None:
    """Reject a variant with other windows than its plain profile.

    The fragmentation score counts the plain profile only, which is right if both have the same
    windows.
    """
    by_name = {profile.name: profile for profile in profiles}
    for profile, path in zip(profiles, paths, strict=True):
        if profile.variant_of is None:
            continue
        plain = by_name[profile.variant_of]
        if plain.variant_of is not None:
            raise GeometryError(f"{path}.variant_of", f"{plain.name} is a variant itself")
        if (plain.size, plain.starts) != (profile.size, profile.starts):
            raise GeometryError(f"{path}.variant_of", f"{plain.name} does not take the same slices")
