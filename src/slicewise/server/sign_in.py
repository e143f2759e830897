"""Sign-in with identities from outside: the provider's tokens, client certificates, their rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slicewise.config.logs import logger
from slicewise.config.settings import Settings
from slicewise.config.sign_in_rules import SignInRules, read_sign_in_rules
from slicewise.control.identities import Rules
from slicewise.core.errors import SlicewiseError

if TYPE_CHECKING:
    from slicewise.server.provider_keys import Fetch, ProviderKeys
    from slicewise.server.provider_tokens import ProviderTokens

RULES_SECONDS = 1.0
"""How often the file with the rules is looked at."""
_Version = tuple[int, int, int]

log = logger("slicewise.sign_in")


class SignIn:
    """The rules, read again when their file changes, and the provider if there is one."""

    def __init__(self, settings: Settings, fetch: Fetch | None = None) -> None:
        """``fetch`` replaces HTTP."""
        self._path = settings.sign_in_rules
        self._version: _Version | None = None
        self.token_rules, self.certificate_rules = Rules(), Rules()
        self.problem: str | None = None
        """Why the file with the rules could not be read again: the earlier rules hold."""
        self.on_change: Callable[[], None] = lambda: None
        """Called after the rules have changed."""
        self.exchanges = 0
        """Codes that are being exchanged."""
        self.tokens: ProviderTokens | None = None
        self.keys: ProviderKeys | None = None
        if self._path is not None:
            self._version = _version(self._path)
            self._apply(read_sign_in_rules(self._path))
        if settings.oidc_issuer is not None:
            try:
                from slicewise.server.provider_keys import ProviderKeys
                from slicewise.server.provider_tokens import ProviderTokens
            except ModuleNotFoundError as error:
                raise SlicewiseError(
                    f"oidc.issuer needs the extra packages of slicewise[oidc] ({error.name} is "
                    "missing)"
                ) from None
            self.keys = ProviderKeys(settings, fetch)
            self.tokens = ProviderTokens(settings, self.keys, self.token_rules)

    async def run(self) -> None:
        """Keep the provider's keys and the rules current."""
        async with asyncio.TaskGroup() as tasks:
            if self.keys is not None:
                tasks.create_task(self.keys.run())
            if self._path is not None:
                tasks.create_task(self._watch(self._path))

    def warnings(self) -> list[str]:
        """What an operator should check."""
        found = []
        if self.keys is not None and self.keys.problem is not None:
            found.append(f"identity provider {self.keys.issuer}: {self.keys.problem}")
        if self.problem is not None:
            # Anyone can read this, so it tells nothing of the rules.
            found.append("sign_in.rules cannot be read, see the log; the earlier rules hold")
        return found

    async def _watch(self, path: Path) -> None:
        while True:
            await asyncio.sleep(RULES_SECONDS)
            await self.reread(path)

    async def reread(self, path: Path) -> None:
        """Read the rules again if their file has changed; keep the earlier ones if it is wrong."""
        version = await asyncio.to_thread(_version, path)
        if version == self._version:
            return
        try:
            self._apply(await asyncio.to_thread(read_sign_in_rules, path))
        except SlicewiseError as error:
            self.problem = str(error)
            log.error("sign-in rules not read", problem=self.problem)
        else:
            self.problem = None
            log.info("sign-in rules changed", file=str(path))
            self.on_change()
        self._version = version

    def _apply(self, rules: SignInRules) -> None:
        self.token_rules.current = rules.token
        self.certificate_rules.current = rules.certificate


def _version(path: Path) -> _Version | None:
    """What changes with the content of a file; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
