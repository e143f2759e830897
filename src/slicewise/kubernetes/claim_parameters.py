"""The devices that a claim requests from slicewise, from the parameters of claim and class.

Classes with a name that ends in ``.slicewise.dev`` are ours. The DeviceClass object need not exist:
kube-scheduler does not allocate claims of a missing class. If it exists, to hold parameters for all
its claims, it must be *sealed*: with the selector ``false``, kube-scheduler never finds a device.
Either way such claims wait until slicewise allocates them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slicewise.core.request import Need, Request
from slicewise.kubernetes.api import (
    Configuration,
    DeviceClass,
    DeviceRequest,
    DeviceToleration,
    ResourceClaim,
)

SUFFIX = ".slicewise.dev"
DRIVER = "slicewise.dev"
"""The driver name of our parameters; no such driver publishes devices."""
API_VERSION, KIND = "slicewise.dev/v1", "Slices"
_FIELDS = ("apiVersion", "kind", "profile", "compute", "memoryGB", "models")
MOST_DEVICES = 32
"""The limit of the API."""


class ClaimParametersError(ValueError):
    """Raised when the parameters of a claim are invalid or unsupported."""


@dataclass(frozen=True, slots=True)
class RequestedDevices:
    """A requested device, with the name of its request in the claim."""

    request: str
    want: Request
    tolerations: tuple[DeviceToleration, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimParameters:
    """The requested devices of a claim, or why the claim is invalid."""

    devices: tuple[RequestedDevices, ...]
    problem: str = ""


def is_ours(name: str, classes: Mapping[str, DeviceClass]) -> bool:
    """Whether slicewise allocates claims of a class."""
    return name.endswith(SUFFIX) and (name not in classes or is_sealed(classes[name]))


def is_sealed(device_class: DeviceClass) -> bool:
    """Whether no device ever matches a class, so kube-scheduler never allocates it."""
    return any(
        selector.cel is not None and selector.cel.expression.strip() == "false"
        for selector in device_class.spec.selectors
    )


def read_parameters(
    claim: ResourceClaim, classes: Mapping[str, DeviceClass]
) -> ClaimParameters | None:
    """The parameters of a claim; None if slicewise does not allocate it."""
    requests = claim.spec.devices.requests
    named = [request.exactly.device_class_name if request.exactly else "" for request in requests]
    ours = [is_ours(name, classes) for name in named]
    if not any(ours):
        return None
    try:
        if not all(ours):
            other = named[ours.index(False)] or "another class"
            raise ClaimParametersError(
                f"a claim is given its devices all at once, so one of class "
                f"{named[ours.index(True)]} cannot also ask for {other}: use two claims"
            )
        if claim.spec.devices.constraints:
            raise ClaimParametersError("constraints are not supported: leave them out")
        devices = [
            asked for request in requests for asked in _read_request(request, claim, classes)
        ]
        if len(devices) > MOST_DEVICES:
            raise ClaimParametersError(
                f"{len(devices)} devices are more than the {MOST_DEVICES} of a claim"
            )
    except ClaimParametersError as error:
        return ClaimParameters((), str(error))
    return ClaimParameters(tuple(devices))


def _read_request(
    request: DeviceRequest, claim: ResourceClaim, classes: Mapping[str, DeviceClass]
) -> list[RequestedDevices]:
    exactly = request.exactly
    assert exactly is not None  # it has a class
    where = f"request {request.name!r}"
    if exactly.allocation_mode != "ExactCount":
        raise ClaimParametersError(
            f"{where}: allocationMode {exactly.allocation_mode} is not supported"
        )
    if exactly.selectors:
        raise ClaimParametersError(
            f"{where}: selectors are not supported; name a profile, or a need, in the parameters"
        )
    if exactly.admin_access:
        raise ClaimParametersError(f"{where}: adminAccess is for classes of the driver itself")
    if exactly.capacity is not None:
        raise ClaimParametersError(
            f"{where}: capacity is not supported; say memoryGB in the parameters"
        )
    if exactly.count > MOST_DEVICES:  # before a list of that length is made
        raise ClaimParametersError(
            f"{where}: {exactly.count} devices are more than the {MOST_DEVICES} of a claim"
        )
    device_class = classes.get(exactly.device_class_name)
    parameters: dict[str, Any] = {}
    for source, configurations in (
        (
            f"class {exactly.device_class_name}",
            () if device_class is None else device_class.spec.config,
        ),
        (f"claim {claim.metadata.name}", claim.spec.devices.config),
    ):
        # The parameters of the claim replace those of the class; they are not merged.
        own = _parameters(source, request.name, configurations)
        if own:
            parameters = own
    want = _want(where, parameters)
    return [RequestedDevices(request.name, want, exactly.tolerations)] * max(1, exactly.count)


def _parameters(
    source: str, request: str, configurations: Iterable[Configuration]
) -> dict[str, Any]:
    """The parameters for a request in configurations for slicewise."""
    found: dict[str, Any] = {}
    for configuration in configurations:
        if not _for_us(configuration) or (
            configuration.requests and request not in configuration.requests
        ):
            continue
        assert configuration.opaque is not None
        said = configuration.opaque.parameters
        if not isinstance(said, dict):
            raise ClaimParametersError(f"{source}: the parameters for {DRIVER} must be an object")
        if said.get("apiVersion") != API_VERSION or said.get("kind") != KIND:
            raise ClaimParametersError(
                f"{source}: the parameters for {DRIVER} must be of apiVersion {API_VERSION} and "
                f"kind {KIND}"
            )
        unknown = sorted(set(said) - set(_FIELDS))
        if unknown:
            raise ClaimParametersError(
                f"{source}: unknown parameter {unknown[0]!r} (known: {', '.join(_FIELDS[2:])})"
            )
        found |= {key: value for key, value in said.items() if key in _FIELDS[2:]}
    return found


def _want(where: str, parameters: Mapping[str, Any]) -> Request:
    profile, compute, memory = (parameters.get(key) for key in ("profile", "compute", "memoryGB"))
    models = parameters.get("models", [])
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise ClaimParametersError(f"{where}: models must be a list of names")
    if profile is not None:
        if compute is not None or memory is not None:
            raise ClaimParametersError(
                f"{where}: name a profile, or compute and memoryGB, not both"
            )
        if not isinstance(profile, str) or not profile:
            raise ClaimParametersError(f"{where}: the profile must be a name, such as 3g.40gb")
        return Request(profile, tuple(models))
    if compute is None and memory is None:
        raise ClaimParametersError(
            f"{where} does not say what it wants: name a profile (profile: 3g.40gb), or a need "
            "(compute: 2, memoryGB: 20)"
        )
    compute, memory = compute or 0, memory or 0
    if isinstance(compute, bool) or not isinstance(compute, int) or not 0 <= compute <= 1000:
        raise ClaimParametersError(f"{where}: compute must be a number of slices")
    if (
        isinstance(memory, bool)
        or not isinstance(memory, int | float)
        or not 0 <= memory <= 1_000_000
    ):
        raise ClaimParametersError(f"{where}: memoryGB must be a number")
    return Request(Need(compute, float(memory)), tuple(models))


def _for_us(configuration: Configuration) -> bool:
    return configuration.opaque is not None and configuration.opaque.driver == DRIVER
