"""The keys of the OpenID Connect provider: fetched in the background, and kept if that fails."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import httpx
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from slicewise.config.logs import logger
from slicewise.config.settings import Settings
from slicewise.config.values import as_provider_url
from slicewise.control.answers import RefusedError
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Seconds

FETCH_SECONDS = 10.0
"""Time for a refresh."""
RETRY_SECONDS = 10.0
"""Between two attempts while the provider does not answer."""
UNKNOWN_KEY_SECONDS = 10.0
"""Least time between two refreshes on account of unknown key ids, which any stranger can send."""
MAX_BYTES = 1 << 20
MAX_KEYS = 100
MIN_RSA_BITS = 2048
_CURVES = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA"}
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")


class Fetch(Protocol):
    """Fetches a document of the provider."""

    async def __call__(self, url: str, form: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Get a URL, or post a form to it; ProviderError if there is no answer."""


log = logger("slicewise.sign_in")


class ProviderError(SlicewiseError):
    """Raised if the provider does not answer as it should."""


class Key(NamedTuple):
    """A public key, and the algorithms that it may verify."""

    key: Any
    """In the form that PyJWT takes."""
    algorithms: tuple[str, ...]


class ProviderKeys:
    """The provider's keys by id, and its endpoints."""

    def __init__(
        self,
        settings: Settings,
        fetch: Fetch | None = None,
        timer: Callable[[], Seconds] | None = None,
    ) -> None:
        """``fetch`` and ``timer`` replace HTTP and the clock of the event loop."""
        assert settings.oidc_issuer is not None
        self._settings = settings
        self.issuer = settings.oidc_issuer
        self._fetch = fetch or HttpFetch(settings)
        self._timer = timer
        self.keys: dict[str, Key] = {}
        self.endpoints: Mapping[str, str] = {}
        """The URLs in the discovery document, by their names there."""
        self.problem: str | None = "its keys have not been fetched yet"
        """Why the last refresh failed."""
        self.refreshes = {"ok": 0, "failed": 0}
        self._fetched: Seconds | None = None
        self._begun = float("-inf")
        self._running: asyncio.Task[None] | None = None

    @property
    def age(self) -> Seconds | None:
        """Time since the keys were fetched; None if they never were."""
        return None if self._fetched is None else self._now() - self._fetched

    async def run(self) -> None:
        """Refresh the keys for ever."""
        while True:
            await self.refresh()
            failed = self.problem is not None
            await asyncio.sleep(RETRY_SECONDS if failed else self._settings.oidc_refresh_seconds)

    async def find(self, identity: str) -> Key | None:
        """The key of this id. An unknown one causes a refresh, unless the last was just now."""
        key = self.keys.get(identity)
        if key is None and (
            self._running is not None or self._now() >= self._begun + UNKNOWN_KEY_SECONDS
        ):
            await self.refresh()
            key = self.keys.get(identity)
        return key

    async def refresh(self) -> None:
        """Fetch the keys, or wait until a fetch that runs already has ended."""
        if self._running is None:
            self._begun = self._now()
            self._running = asyncio.create_task(self._refresh())
            self._running.add_done_callback(self._ended)
        await asyncio.shield(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None

    async def _refresh(self) -> None:
        before = self.problem
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                endpoints = await self._discover()
                keys = await self._read_keys(endpoints["jwks_uri"])
        except TimeoutError:
            self.problem = f"no answer within {FETCH_SECONDS:g} seconds"
        except ProviderError as error:
            self.problem = str(error)
        except Exception:  # of a provider that no test has thought of
            log.exception("keys not fetched", issuer=self.issuer)
            self.problem = before = "internal error; see the log"
        else:
            if keys.keys() != self.keys.keys():
                log.info("keys of the provider", issuer=self.issuer, keys=sorted(keys))
            self.keys, self.endpoints, self.problem = keys, endpoints, None
            self._fetched = self._now()
        self.refreshes["ok" if self.problem is None else "failed"] += 1
        if self.problem is not None and self.problem != before:
            log.warning(
                "keys not fetched", issuer=self.issuer, problem=self.problem, known=len(self.keys)
            )

    async def _discover(self) -> Mapping[str, str]:
        url = f"{self.issuer.rstrip('/')}/.well-known/openid-configuration"
        given = self._settings.oidc_jwks
        try:
            document = await self._get(url)
        except ProviderError:
            if given is None:
                raise
            return {**self.endpoints, "jwks_uri": given}  # some publish their keys only
        if document.get("issuer") != self.issuer:
            raise ProviderError(
                f"{url} is of issuer {document.get('issuer')!r}, not of {self.issuer!r}: set "
                "oidc.issuer exactly as the provider writes it"
            )
        found = {name: one for name, one in document.items() if isinstance(one, str)}
        if given is not None:
            found["jwks_uri"] = given
        for name in [name for name in found if name.endswith(("_uri", "_endpoint"))]:
            try:
                as_provider_url(found[name])
            except ValueError:
                if name == "jwks_uri":
                    raise ProviderError(f"{url}: jwks_uri must be an https URL") from None
                del found[name]
        if "jwks_uri" not in found:
            raise ProviderError(f"{url} names no jwks_uri")
        return found

    async def _read_keys(self, url: str) -> dict[str, Key]:
        listed = (await self._get(url)).get("keys")
        if not isinstance(listed, list) or len(listed) > MAX_KEYS:
            raise ProviderError(f"{url} holds no list of at most {MAX_KEYS} keys")
        found: dict[str, Key] = {}
        for one in listed:
            key = _key(one, self._settings.oidc_algorithms)
            if key is not None:
                found.setdefault(one["kid"], key)
        return found

    async def _get(self, url: str) -> dict[str, Any]:
        status, content = await self._fetch(url)
        if status != 200:
            raise ProviderError(f"{url} answers {status}")
        return _object(content, url)

    async def exchange(self, url: str, form: Mapping[str, str]) -> str:
        """Exchange an authorization code for an identity token."""
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                status, content = await self._fetch(url, form)
            answer = _object(content, url)
        except (TimeoutError, ProviderError) as error:
            log.warning("code not exchanged", problem=str(error))
            raise RefusedError(
                503, "the identity provider does not answer: try again", retry_after=5
            ) from None
        token = answer.get("id_token")
        if status == 200 and isinstance(token, str) and token.isascii():
            return token
        why = str(answer.get("error_description") or answer.get("error") or f"status {status}")
        shown = "".join(one for one in why[:200] if one.isprintable())
        raise RefusedError(400, f"the identity provider refused the code: {shown}", field="code")

    def _now(self) -> Seconds:
        return asyncio.get_running_loop().time() if self._timer is None else self._timer()


def _object(content: bytes, url: str) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise ProviderError(f"{url} is not JSON") from None
    if not isinstance(document, dict):
        raise ProviderError(f"{url} is not a JSON object")
    return document


def _key(given: object, algorithms: tuple[str, ...]) -> Key | None:
    """A public signature key with an id, for the configured algorithms; None for any other."""
    if not isinstance(given, dict) or not isinstance(given.get("kid"), str) or not given["kid"]:
        return None
    if given.get("use", "sig") != "sig" or "verify" not in given.get("key_ops", ["verify"]):
        return None
    own = _RSA if given.get("kty") == "RSA" else (_CURVES.get(str(given.get("crv")), ""),)
    usable = tuple(name for name in own if name in algorithms and given.get("alg") in (None, name))
    if given.get("kty") not in ("RSA", "EC", "OKP") or not usable:
        return None
    public = {name: given[name] for name in ("kty", "crv", "n", "e", "x", "y") if name in given}
    try:
        key = PyJWK(public, usable[0]).key
    except (PyJWTError, ValueError, TypeError, OverflowError):
        return None
    if given["kty"] == "RSA" and key.key_size < MIN_RSA_BITS:
        return None
    return Key(key, usable)


class HttpFetch:
    """Fetches small documents of the provider over HTTP."""

    def __init__(self, settings: Settings) -> None:
        self._ca = None if settings.oidc_ca is None else str(settings.oidc_ca)
        self._context: ssl.SSLContext | None = None

    async def __call__(self, url: str, form: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """The status and the content of the answer."""
        context = self._context
        if context is None:
            # In a thread: this reads all authorities of the system.
            context = self._context = await asyncio.to_thread(trusting, self._ca)
        try:
            async with (
                httpx.AsyncClient(verify=context, timeout=FETCH_SECONDS) as client,
                client.stream(
                    "GET" if form is None else "POST",
                    url,
                    data=form,
                    headers={"accept": "application/json"},
                ) as response,
            ):
                content = b""
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > MAX_BYTES:
                        raise ProviderError(f"{url} is larger than {MAX_BYTES} bytes")
                return response.status_code, content
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise ProviderError(f"{url} cannot be fetched: {why}") from None


def trusting(ca: str | None) -> ssl.SSLContext:
    """A TLS context that trusts this CA, or those that Python trusts."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ProviderError(f"oidc.ca: cannot be used: {error}") from None
