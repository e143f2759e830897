"""From a model of the catalog to what a driver of that GPU would know.

Where the catalog is silent (a profile's id, say), something plausible is filled in, which differs
from everything known.
"""

from __future__ import annotations

from ctypes import Array, c_uint32
from itertools import count

from slicewise.catalog.entry import Engines, Entry, ProfileFacts
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry, Profile
from slicewise.core.states import empty_state
from slicewise.fakedriver import layout

PROFILE_NUMBERS = 0x12
"""So many GPU instance profiles NVML has constants for."""

_NUMBERS = {
    **{(1, ""): 0x0, (2, ""): 0x1, (3, ""): 0x2, (4, ""): 0x3, (7, ""): 0x4, (8, ""): 0x5},
    **{(6, ""): 0x6, (1, "+me"): 0x7, (2, "+me"): 0x8, (1, "+gfx"): 0xA, (2, "+gfx"): 0xB},
    **{(4, "+gfx"): 0xC, (1, "-me"): 0xD, (2, "-me"): 0xE, (1, "+me.all"): 0xF},
    **{(2, "+me.all"): 0x10, (3, "+gfx"): 0x11},
}
"""NVML's constant by compute slices and the end of the name."""

_COMPUTE_NUMBERS = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}
"""NVML's compute instance profile by compute slices; the ids are the same."""

_FIRST_MADE_UP_ID = 100
_GRAPHICS = 2
_NO_ENGINES = Engines(0, 0, 0, 0, 0)

_ARCHITECTURES = (
    ("Ampere", 7, (8, 0)),
    ("Hopper", 9, (9, 0)),
    ("GB10B", 10, (11, 0)),
    ("GB202", 10, (12, 0)),
    ("GB203", 10, (12, 0)),
    ("Blackwell Ultra", 10, (10, 3)),
    ("Blackwell", 10, (10, 0)),
)
"""A word of the architecture, NVML's number for it, the compute capability."""


_MEMORY_READ = {"H200-141GB": (143771, 644939776)}
"""Where a real GPU was read: its memory in MiB, and the bytes of it the driver keeps for itself."""

_RESERVED = 256
"""Elsewhere the driver keeps one part in so many."""


def gpu_name(entry: Entry) -> str:
    """What the driver calls the GPU; the catalog finds the model by it."""
    return f"NVIDIA {next(iter(entry.aliases), entry.model)}"


def mode_needs_reset(entry: Entry) -> bool:
    """Whether MIG mode is switched by a reset, and kept through a reboot: Ampere."""
    return "Ampere" in entry.architecture


def fill(file: layout.File, entry: Entry) -> None:
    """Write what a model is into a machine's file."""
    geometry = entry.require()
    _check(geometry)
    facts = {fact.name: fact for fact in entry.facts}
    file.name = gpu_name(entry).encode()
    derived = _memory_mib(facts, entry)
    file.memory_mib, file.memory_reserved = _MEMORY_READ.get(
        entry.model, (derived, (derived << 20) // _RESERVED)
    )
    for word, number, (major, minor) in _ARCHITECTURES:
        if word in entry.architecture:
            file.architecture, file.capability_major, file.capability_minor = number, major, minor
            break
    file.mode_needs_reset = mode_needs_reset(entry)
    file.mig_devices = geometry.compute
    file.budget_count = len(geometry.all_budgets)
    for place, budget in enumerate(geometry.all_budgets):
        file.budgets[place] = budget.total
    file.profile_count = len(geometry.profiles)
    numbers = _numbers(geometry, facts)
    ids = _ids(geometry, facts)
    for place, profile in enumerate(geometry.profiles):
        told = file.profiles[place]
        told.number, told.id = numbers[profile.name], ids[profile.name]
        _fill_profile(told, geometry, profile, facts.get(profile.name))


def _check(geometry: Geometry) -> None:
    """Refuse what NVML has no numbers or the file no room for."""
    for profile in geometry.profiles:
        if profile.compute not in _COMPUTE_NUMBERS:
            raise SlicewiseError(
                f"{geometry.model}: {profile.name} has {profile.compute} compute slices, for which "
                "NVML has no compute instance; the fake driver cannot play this model"
            )
    for what, number, most in (
        ("profiles", len(geometry.profiles), PROFILE_NUMBERS),
        ("compute slices", geometry.compute, layout.MAX_SLICES),
        ("budgets", len(geometry.all_budgets), layout.MAX_BUDGETS),
    ):
        if number > most:
            raise SlicewiseError(
                f"{geometry.model}: {number} {what}, and the fake driver has room for {most}"
            )


def _fill_profile(
    told: layout.GpuProfile, geometry: Geometry, profile: Profile, fact: ProfileFacts | None
) -> None:
    """Write one profile, with the compute instances that can be made in it."""
    engines = (fact.engines if fact else None) or _NO_ENGINES
    told.name = f"MIG {profile.name}".encode()
    told.memory_mib = _profile_memory(profile, fact)
    told.size, told.compute = profile.size, profile.compute
    told.instances = (fact.max_instances if fact else None) or _most(geometry, profile)
    told.multiprocessors = (fact.sm_count if fact else None) or 16 * profile.compute
    told.copy_engines, told.decoders = engines.copy, engines.decoder
    told.encoders, told.jpeg_engines, told.ofa_engines = engines.encoder, engines.jpeg, engines.ofa
    told.capabilities = _GRAPHICS if profile.name.endswith("+gfx") else 0
    _put(told.uses, geometry.needs(profile))
    told.start_count = len(profile.starts)
    _put(told.starts, profile.starts)
    _put(told.preferred, profile.start_order)
    for row, mirrored in enumerate((False, True)):
        _put(
            told.instance_ids[row],
            tuple(instance_id(geometry, profile, start, mirrored) for start in profile.starts),
        )
    slices = [s for s in sorted(_COMPUTE_NUMBERS) if _divides(s, profile.compute)]
    told.compute_profile_count = len(slices)
    for place, size in enumerate(slices):
        compute = told.compute_profiles[place]
        whole = size == profile.compute
        compute.name = f"MIG {profile.name if whole else f'{size}c.{profile.name}'}".encode()
        compute.number = compute.id = _COMPUTE_NUMBERS[size]
        compute.slices = size
        compute.instances = profile.compute // size
        compute.multiprocessors = told.multiprocessors * size // profile.compute
        starts = range(0, profile.compute - size + 1, size)
        compute.start_count = len(starts)
        _put(compute.starts, tuple(starts))


def _divides(size: int, compute: int) -> bool:
    """Whether a GPU instance can be cut into compute instances of this size."""
    # NVIDIA's listings offer 1, 2, 3, 4 and 7 in 7g, but no 3 in 4g.
    return size == compute or (size < compute and size <= 4 and (size, compute) != (3, 4))


def instance_id(geometry: Geometry, profile: Profile, start: int, mirrored: bool) -> int:
    """The id of a GPU instance there: 0 is the whole GPU, then halves, quarters and so on.

    On some dies the halves of the GPU are numbered the other way round.
    """
    half = geometry.slices // 2
    if mirrored and geometry.slices % 2 == 0 and profile.size <= half:
        start = (start + half) % geometry.slices
    sizes = sorted({p.size for p in geometry.profiles}, reverse=True)
    first = sum(-(-geometry.slices // size) for size in sizes if size > profile.size)
    return first + start // profile.size


def _numbers(geometry: Geometry, facts: dict[str, ProfileFacts]) -> dict[str, int]:
    """NVML's constant for each profile."""
    known = {name: f.nvml_enum for name, f in facts.items() if f.nvml_enum is not None}
    numbers = {p.name: known[p.name] for p in geometry.profiles if p.name in known}
    for profile in geometry.profiles:
        if profile.name not in numbers:
            ending = profile.name.removeprefix(profile.variant_of or profile.name)
            free = (n for n in range(PROFILE_NUMBERS) if n not in numbers.values())
            likely = _NUMBERS.get((profile.compute, ending))
            numbers[profile.name] = (
                next(free) if likely is None or likely in numbers.values() else likely
            )
    return numbers


def _ids(geometry: Geometry, facts: dict[str, ProfileFacts]) -> dict[str, int]:
    """The id of each profile; made up, beyond all known ones, where the catalog has none."""
    known = {name: fact.id for name, fact in facts.items() if fact.id is not None}
    made_up = count(_FIRST_MADE_UP_ID)
    return {p.name: known.get(p.name, next(made_up)) for p in geometry.profiles}


def _most(geometry: Geometry, profile: Profile) -> int:
    """How many instances of a profile an empty GPU takes."""
    state, number = empty_state(geometry), 0
    while starts := state.feasible_starts(profile):
        placement = geometry.placement(profile.name, starts[0])
        assert placement is not None
        state, number = state.after(placement), number + 1
    return number


def _profile_memory(profile: Profile, fact: ProfileFacts | None) -> int:
    """The memory of an instance in MiB, as exactly as it is known."""
    if fact and fact.memory_mib is not None:
        return round(fact.memory_mib)
    if fact and fact.memory_gib is not None:
        return round(fact.memory_gib * 1024)
    return round(profile.memory_gb * 1024)


def _memory_mib(facts: dict[str, ProfileFacts], entry: Entry) -> int:
    """The memory of the whole GPU: at least what its largest instance has."""
    geometry = entry.require()
    largest = (_profile_memory(p, facts.get(p.name)) for p in geometry.profiles)
    return max(round(entry.memory_gb * 1e9 / (1 << 20)), *largest)


def _put(array: Array[c_uint32], numbers: tuple[int, ...]) -> None:
    for place, number in enumerate(numbers):
        array[place] = number
