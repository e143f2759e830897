"""An identity provider under the control of a test: it signs whatever the test wants signed.

Dex, in `dex.py`, is a real one. This one forges what Dex would never issue.
"""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm, get_default_algorithms

AUDIENCE = "slicewise"
DISCOVERY = "/.well-known/openid-configuration"
JWKS = "/keys"

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def new_key(algorithm: str = "ES256", bits: int = 2048) -> PrivateKey:
    """A new private key for an algorithm."""
    if algorithm.startswith("ES"):
        curve = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1()}[algorithm]
        return ec.generate_private_key(curve)
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(65537, bits)


def public(key: PrivateKey, **more: Any) -> dict[str, Any]:
    """The public key as a JWK."""
    if isinstance(key, ec.EllipticCurvePrivateKey):
        found = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
    elif isinstance(key, ed25519.Ed25519PrivateKey):
        found = OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
    else:
        found = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
    return {**found, "use": "sig", **more}


class Provider:
    """A provider on loopback, with one key at first."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        """Requests by path."""
        self.delay = 0.0
        self.signing = new_key()
        self.kid = "first"
        self.jwks: list[dict[str, Any]] = [public(self.signing, kid="first")]
        self.documents: dict[str, Any] = {}
        """Answers that replace the ordinary ones, by path: bytes as they are, others as JSON.

        A tuple is a status and an answer."""
        self._port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    @property
    def issuer(self) -> str:
        """The issuer in its tokens."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Answer requests, on the same port as before."""
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked[self.path] += 1
                time.sleep(provider.delay)
                document = provider.answer(self.path)
                if document is None:
                    self.send_error(404)
                    return
                status, document = document if isinstance(document, tuple) else (200, document)
                content = document if isinstance(document, bytes) else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.do_GET()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, path: str) -> object:
        """The document at a path."""
        if path in self.documents:
            return self.documents[path]
        if path == DISCOVERY:
            return {
                "issuer": self.issuer,
                "jwks_uri": self.issuer + JWKS,
                "authorization_endpoint": f"{self.issuer}/auth",
                "token_endpoint": f"{self.issuer}/token",
            }
        return {"keys": self.jwks} if path == JWKS else None

    def rotate(self, kid: str, *, keep: bool = False) -> None:
        """Sign with a new key; the old one is published for longer if it is kept."""
        self.signing, self.kid = new_key(), kid
        self.jwks = [*(self.jwks if keep else []), public(self.signing, kid=kid)]

    def token(
        self,
        now: float | None = None,
        *,
        key: Any = None,
        algorithm: str = "ES256",
        head: dict[str, Any] | None = None,
        without: tuple[str, ...] = (),
        **claims: Any,
    ) -> str:
        """A token of an hour; ``claims`` replace those that it would have."""
        moment = time.time() if now is None else now
        payload = {
            "iss": self.issuer,
            "aud": AUDIENCE,
            "sub": "u-1",
            "iat": int(moment),
            "exp": int(moment) + 3600,
            **claims,
        }
        payload = {name: value for name, value in payload.items() if name not in without}
        headers = {"kid": self.kid, **(head or {})}
        headers = {name: value for name, value in headers.items() if value is not None}
        return signed(headers, payload, self.signing if key is None else key, algorithm)


def signed(head: dict[str, Any], claims: dict[str, Any], key: Any, algorithm: str) -> str:
    """A token with exactly this content; PyJWT refuses to make some of the forged ones."""
    parts = ({"alg": algorithm, **head}, claims)
    text = b".".join(encoded(json.dumps(part).encode()) for part in parts)
    if isinstance(key, bytes):
        proof = hmac.digest(key, text, "sha256")
    else:
        proof = get_default_algorithms()[algorithm].sign(text, key)
    return (text + b"." + encoded(proof)).decode()


def encoded(content: bytes) -> bytes:
    """Base64 as tokens use it."""
    return base64.urlsafe_b64encode(content).rstrip(b"=")
