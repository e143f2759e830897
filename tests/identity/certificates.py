"""Certificate authorities of the tests."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
LONG = timedelta(hours=1)


class Authority:
    """An authority that signs certificates into a folder."""

    def __init__(self, folder: Path, name: str = "tests") -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.file = folder / "ca.pem"
        made = _builder(self._name, self._name, self._key, LONG).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        signed = made.sign(self._key, hashes.SHA256())
        self.file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        common: str,
        *,
        valid: timedelta = LONG,
        usage: x509.ObjectIdentifier = CLIENT,
        uri: str | None = None,
    ) -> Path:
        """A certificate and its key, in one file."""
        key = ec.generate_private_key(ec.SECP256R1())
        other: list[x509.GeneralName] = [x509.IPAddress(IPv4Address("127.0.0.1"))]
        if uri is not None:
            other.append(x509.UniformResourceIdentifier(uri))
        made = (
            _builder(_name(common), self._name, key, valid)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.SubjectAlternativeName(other), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        file = self._folder / f"{made.serial_number:x}.pem"
        pem = serialization.Encoding.PEM
        file.write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            + made.public_bytes(pem)
        )
        return file

    def context(self, certificate: Path | None = None) -> ssl.SSLContext:
        """A client's context that trusts this authority, with a certificate if it has one."""
        made = ssl.create_default_context(cafile=self.file)
        if certificate is not None:
            made.load_cert_chain(certificate)
        return made


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LONG - abs(valid))
        .not_valid_after(now + valid)
    )
