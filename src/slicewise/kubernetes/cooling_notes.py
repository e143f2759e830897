"""What cools down, as the leader notes it in its lease for the next one.

Nothing else in the API says which slices a pod had that has vanished. Replicas that watched it know
it as well; but one that was started since does not.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from slicewise.journal.entries import Seconds
from slicewise.kubernetes.allocations import DeviceId
from slicewise.kubernetes.api import Meta, ResourceClaim

_MOST_BYTES = 64_000
"""An object may have four times as much in annotations."""


class CoolingNote(msgspec.Struct, frozen=True, array_like=True):
    """The freed slices of one claim."""

    namespace: str
    name: str
    uid: str
    """Of the claim."""
    devices: tuple[DeviceId, ...]
    until: Seconds
    latest: Seconds
    """See `cool_down`; as Unix times."""

    @property
    def claim(self) -> ResourceClaim:
        """The claim, as far as it is known."""
        return ResourceClaim(Meta(name=self.name, namespace=self.namespace, uid=self.uid))


_read = msgspec.json.Decoder(list[CoolingNote]).decode


def encode(notes: Iterable[CoolingNote]) -> str:
    """The notes as a text; those of claims that end first are left out if there are too many."""
    parts: list[str] = []
    size = 1
    for note in sorted(notes, key=lambda note: -note.until):
        part = msgspec.json.encode(note).decode()
        size += len(part) + 1
        if size > _MOST_BYTES:
            break
        parts.append(part)
    return f"[{','.join(parts)}]" if parts else ""


def decode(text: str) -> list[CoolingNote]:
    """The notes of a text; none if it is of another version."""
    try:
        return _read(text or "[]")
    except msgspec.MsgspecError:
        return []
