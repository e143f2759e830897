"""Client certificates: what a trusted one says about its holder."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slicewise.control.actors import UnauthenticatedError
from slicewise.control.identities import Claims, Identity, Rules
from slicewise.journal.entries import Seconds

_SUBJECT = {
    "commonName": "common_name",
    "organizationName": "organization",
    "organizationalUnitName": "organizational_unit",
}
_ALTERNATIVE = {"DNS": "dns", "URI": "uri", "email": "email"}
MAX_SUBJECT = 255


@dataclass(slots=True, eq=False)
class Certificate:
    """A certificate of a connection, which its handshake has verified."""

    claims: Claims
    """For the rules: names as lists, and the serial number."""
    expires: Seconds
    identity: Identity | None = None
    """Its holder, once a request has needed it."""

    @property
    def common_name(self) -> str | None:
        """The last common name."""
        names = self.claims.get("common_name")
        return str(names[-1]) if isinstance(names, list) else None


def read_certificate(found: Mapping[str, Any] | None) -> Certificate | None:
    """Read a certificate in the format of Python's ssl module; None without one."""
    if not found:
        return None
    names: dict[str, list[str]] = {}
    parts = [pair for part in found.get("subject", ()) for pair in part]
    for known, pairs in ((_SUBJECT, parts), (_ALTERNATIVE, found.get("subjectAltName", ()))):
        for kind, value in pairs:
            if kind in known:
                names.setdefault(known[kind], []).append(str(value))
    claims = {**names, "serial": str(found.get("serialNumber", "")).lower()}
    return Certificate(claims, float(ssl.cert_time_to_seconds(found["notAfter"])))


def identity_of(certificate: Certificate, rules: Rules) -> Identity:
    """The holder of a certificate; the same for all requests of a connection."""
    if certificate.identity is None:
        claims = certificate.claims
        names = [claims.get(kind) for kind in ("common_name", "uri", "dns")]
        subject = next((str(found[-1]) for found in names if isinstance(found, list)), "")
        if not (0 < len(subject) <= MAX_SUBJECT and subject.isprintable()):
            raise UnauthenticatedError("untrusted", "the client certificate has no name")
        note = f"serial {claims['serial']}"
        certificate.identity = Identity("cert", subject, claims, rules, certificate.expires, note)
    return certificate.identity
