"""Fills a machine's state file with the data of a GPU model from the catalog.

Where the catalog has no value, such as a profile's id, a plausible one is used that no real GPU
has.
"""

from __future__ import annotations

from ctypes import Array, c_uint32
from itertools import count

from slicewise.catalog.entry import CatalogEntry, Engines, ProfileFacts
from slicewise.core.errors import SlicewiseError
from slicewise.core.geometry import Geometry, Profile
from slicewise.core.states import empty_state
from slicewise.fakedriver import layout

PROFILE_NUMBERS = 0x12
"""The number of GPU instance profiles that NVML has constants for."""

_NUMBERS = {
    **{(1, ""): 0x0, (2, ""): 0x1, (3, ""): 0x2, (4, ""): 0x3, (7, ""): 0x4, (8, ""): 0x5},
    **{(6, ""): 0x6, (1, "+me"): 0x7, (2, "+me"): 0x8, (1, "+gfx"): 0xA, (2, "+gfx"): 0xB},
    **{(4, "+gfx"): 0xC, (1, "-me"): 0xD, (2, "-me"): 0xE, (1, "+me.all"): 0xF},
    **{(2, "+me.all"): 0x10, (3, "+gfx"): 0x11},
}
"""NVML's profile constant by compute slices and name suffix."""

_COMPUTE_NUMBERS = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4, 8: 5, 6: 6}
"""NVML's compute instance profile constant by compute slices; the ids are the same."""

_FIRST_INVENTED_ID = 100
_MULTIPROCESSORS = 16
"""Of a compute slice, on models of which nothing is known."""
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
"""A word in the architecture's name, NVML's constant for it, and the compute capability."""

_MEMORY_MIB = {
    **{"A30-24GB": 24576, "A100-40GB": 40960, "A100-80GB": 81920, "A800-80GB": 81920},
    **{"H100-80GB-SXM5": 81559, "H100-80GB-PCIe": 81559, "H800-80GB": 81559, "H100-94GB": 95830},
    **{"H20-96GB": 97871, "GH200-96GB": 97871, "H200-141GB": 143771, "H200-NVL-141GB": 143771},
    **{"B200-180GB": 183359, "GB200-186GB": 189471, "RTX-PRO-6000-Blackwell-96GB": 97887},
}
"""The memory of GPUs as nvidia-smi lists it, in MiB; that of the H200 was read from one.

Programs compute the gigabytes in a profile's name from it. A model that is not listed has the
gigabytes of its largest profile, which gives the same names."""

_RESERVED = {"H200-141GB": 644939776}
"""The bytes that the driver reserves, read from a real GPU."""

_RESERVED_DIVISOR = 256
"""On other models the driver reserves this fraction of the memory."""


def gpu_name(entry: CatalogEntry) -> str:
    """The GPU's name in the driver, by which the catalog finds the model."""
    return f"NVIDIA {next(iter(entry.aliases), entry.model)}"


def mode_needs_reset(entry: CatalogEntry) -> bool:
    """Whether MIG mode changes only with a reset and survives a reboot, as on Ampere."""
    return "Ampere" in entry.architecture


def fill(file: layout.File, entry: CatalogEntry) -> None:
    """Write the data of a model into a machine's state file."""
    geometry = entry.require()
    _check(geometry)
    facts = {fact.name: fact for fact in entry.facts}
    file.name = gpu_name(entry).encode()
    file.memory_mib = _memory_mib(geometry)
    file.memory_reserved = _RESERVED.get(entry.model, (file.memory_mib << 20) // _RESERVED_DIVISOR)
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
    numbers = _profile_numbers(geometry, facts)
    ids = _profile_ids(geometry, facts)
    for place, profile in enumerate(geometry.profiles):
        target = file.profiles[place]
        target.number, target.id = numbers[profile.name], ids[profile.name]
        _fill_profile(target, geometry, profile, facts)


def _check(geometry: Geometry) -> None:
    """Raise for a model that does not fit NVML's constants or the file's limits."""
    for profile in geometry.profiles:
        if profile.compute not in _COMPUTE_NUMBERS:
            raise SlicewiseError(
                f"{geometry.model}: {profile.name} has {profile.compute} compute slices, for which "
                "NVML has no compute instance profile; the fake driver does not support it"
            )
    for what, number, most in (
        ("profiles", len(geometry.profiles), PROFILE_NUMBERS),
        ("compute slices", geometry.compute, layout.MAX_SLICES),
        ("budgets", len(geometry.all_budgets), layout.MAX_BUDGETS),
    ):
        if number > most:
            raise SlicewiseError(
                f"{geometry.model}: {number} {what}, but the fake driver supports {most}"
            )


def _fill_profile(
    target: layout.GpuProfile,
    geometry: Geometry,
    profile: Profile,
    facts: dict[str, ProfileFacts],
) -> None:
    """Write one profile and its compute instance profiles."""
    fact = facts.get(profile.name)
    engines = (fact.engines if fact else None) or _NO_ENGINES
    target.name = f"MIG {profile.name}".encode()
    target.memory_mib = profile_memory_mib(geometry, profile, fact)
    target.size, target.compute = profile.size, profile.compute
    target.instances = (fact.max_instances if fact else None) or _max_instances(geometry, profile)
    target.multiprocessors = profile_multiprocessors(profile, facts)
    target.copy_engines, target.decoders = engines.copy, engines.decoder
    target.encoders, target.jpeg_engines, target.ofa_engines = (
        engines.encoder,
        engines.jpeg,
        engines.ofa,
    )
    target.capabilities = _GRAPHICS if profile.name.endswith("+gfx") else 0
    _fill_array(target.uses, geometry.needs(profile))
    target.start_count = len(profile.starts)
    _fill_array(target.starts, profile.starts)
    _fill_array(target.preferred, profile.start_order)
    for row, mirrored in enumerate((False, True)):
        _fill_array(
            target.instance_ids[row],
            tuple(instance_id(geometry, profile, start, mirrored) for start in profile.starts),
        )
    slices = [s for s in sorted(_COMPUTE_NUMBERS) if _offers_compute_size(s, profile.compute)]
    target.compute_profile_count = len(slices)
    for place, size in enumerate(slices):
        compute = target.compute_profiles[place]
        whole = size == profile.compute
        compute.name = f"MIG {profile.name if whole else f'{size}c.{profile.name}'}".encode()
        compute.number = compute.id = _COMPUTE_NUMBERS[size]
        compute.slices = size
        compute.instances = profile.compute // size
        compute.multiprocessors = target.multiprocessors * size // profile.compute
        starts = range(0, profile.compute - size + 1, size)
        compute.start_count = len(starts)
        _fill_array(compute.starts, tuple(starts))


def _offers_compute_size(size: int, compute: int) -> bool:
    """Whether a GPU instance offers compute instances of this size."""
    # As nvidia-smi lists them: 1, 2, 3, 4 and 7 in 7g, but no 3 in 4g.
    return size == compute or (size < compute and size <= 4 and (size, compute) != (3, 4))


def instance_id(geometry: Geometry, profile: Profile, start: int, mirrored: bool) -> int:
    """The id of a GPU instance: 0 is the whole GPU, followed by halves, quarters and so on.

    On mirrored dies the halves of the GPU are numbered the other way round.
    """
    half = geometry.slices // 2
    if mirrored and geometry.slices % 2 == 0 and profile.size <= half:
        start = (start + half) % geometry.slices
    sizes = sorted({p.size for p in geometry.profiles}, reverse=True)
    first = sum(-(-geometry.slices // size) for size in sizes if size > profile.size)
    return first + start // profile.size


def _profile_numbers(geometry: Geometry, facts: dict[str, ProfileFacts]) -> dict[str, int]:
    """NVML's constant for each profile."""
    known = {name: f.nvml_enum for name, f in facts.items() if f.nvml_enum is not None}
    numbers = {p.name: known[p.name] for p in geometry.profiles if p.name in known}
    for profile in geometry.profiles:
        if profile.name not in numbers:
            suffix = profile.name.removeprefix(profile.variant_of or profile.name)
            free = (n for n in range(PROFILE_NUMBERS) if n not in numbers.values())
            usual = _NUMBERS.get((profile.compute, suffix))
            numbers[profile.name] = (
                next(free) if usual is None or usual in numbers.values() else usual
            )
    return numbers


def _profile_ids(geometry: Geometry, facts: dict[str, ProfileFacts]) -> dict[str, int]:
    """The id of each profile; invented, above all real ones, if the catalog has none."""
    known = {name: fact.id for name, fact in facts.items() if fact.id is not None}
    invented = count(_FIRST_INVENTED_ID)
    return {p.name: known.get(p.name, next(invented)) for p in geometry.profiles}


def _max_instances(geometry: Geometry, profile: Profile) -> int:
    """How many instances of a profile fit on an empty GPU."""
    state, number = empty_state(geometry), 0
    while starts := state.feasible_starts(profile):
        placement = geometry.placement(profile.name, starts[0])
        assert placement is not None
        state, number = state.after(placement), number + 1
    return number


def profile_multiprocessors(profile: Profile, facts: dict[str, ProfileFacts]) -> int:
    """The multiprocessors of an instance: the catalog's, or as many as known parts of it have."""
    fact = facts.get(profile.name)
    if fact and fact.sm_count is not None:
        return fact.sm_count
    parts = (
        one.sm_count * max(profile.size // one.size, profile.compute // one.compute)
        for one in facts.values()
        if one.sm_count is not None
    )
    return max(_MULTIPROCESSORS * profile.compute, *parts, 0)


def profile_memory_mib(geometry: Geometry, profile: Profile, fact: ProfileFacts | None) -> int:
    """The memory of an instance in MiB: the catalog's, or its share of the GPU's."""
    if fact and fact.memory_mib is not None:
        return round(fact.memory_mib)
    if fact and fact.memory_gib is not None:
        return round(fact.memory_gib * 1024)
    # Never more than the share, or the name would be that of the next larger share.
    return _memory_mib(geometry) * profile.size // geometry.slices


def _memory_mib(geometry: Geometry) -> int:
    """The memory of the whole GPU."""
    largest = max(profile.memory_gb for profile in geometry.profiles)
    return _MEMORY_MIB.get(geometry.model, round(largest * 1024))


def _fill_array(array: Array[c_uint32], numbers: tuple[int, ...]) -> None:
    for place, number in enumerate(numbers):
        array[place] = number
