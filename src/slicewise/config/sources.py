"""Settings from a file, the environment and flags.

A flag overrides the environment, and the environment overrides the file. An error is one line with
the key and the source of its value.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from slicewise.config.settings import KEYS, VARIABLE_PREFIX, SettingKey, Settings
from slicewise.config.values import reader
from slicewise.core.errors import SlicewiseError, UnknownNameError

_CLIENTS = frozenset(
    {
        "SLICEWISE_SERVER",
        "SLICEWISE_TOKEN",
        "SLICEWISE_TOKEN_FILE",
        "SLICEWISE_CLIENT_CERT",
        "SLICEWISE_CLIENT_KEY",
    }
)
"""Variables of the clients, which may be set in the same shell."""
_SIMILARITY = 0.8
"""How similar an unknown variable must be to a key's to count as misspelt; other software may use
the same prefix."""


def read_settings(
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> Settings:
    """Read the settings from all sources; ``flags`` by key, None if not given."""
    values: dict[str, object] = {}
    for key, value, where in (
        *_from_file(file),
        *_from_environment(environment),
        *((_known(name, "flag"), v, "flag") for name, v in flags.items() if v is not None),
    ):
        try:
            values[key.field] = reader(key.kind)(value)
        except (ValueError, SlicewiseError) as error:
            given = "" if key.secret else f", not {value!r}"
            problem = str(error) + (given if isinstance(error, ValueError) else "")
            raise SlicewiseError(f"{key.name} ({where}): {problem}") from None
    return Settings(**values)  # type: ignore[arg-type]  # each value was read as its field's type


def assignments(given: list[str]) -> dict[str, object]:
    """Parse settings of the form KEY=VALUE."""
    values: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise SlicewiseError(
                f"--set {text!r} must be KEY=VALUE, such as queue.reserve_after=60"
            )
        values[_known(name, "flag").name] = value
    return values


def _known(name: str, where: str) -> SettingKey:
    if name not in KEYS:
        raise UnknownNameError(f"setting ({where})", name, KEYS, f"known: {', '.join(KEYS)}")
    return KEYS[name]


def _from_file(path: Path | None) -> Iterator[tuple[SettingKey, object, str]]:
    if path is None:
        return
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise SlicewiseError(f"{path}: not TOML: {error}") from None
    for name, value in document.items():
        if isinstance(value, dict):
            for inner, part in value.items():
                yield _known(f"{name}.{inner}", str(path)), part, str(path)
        else:
            yield _known(name, str(path)), value, str(path)


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[SettingKey, object, str]]:
    variables = {key.variable: key for key in KEYS.values()}
    for name, value in environment.items():
        if name in variables:
            yield variables[name], value, name
        elif name.startswith(VARIABLE_PREFIX) and name not in _CLIENTS:
            near = difflib.get_close_matches(name, variables, 1, _SIMILARITY)
            if near:
                raise SlicewiseError(
                    f"unknown setting {name!r} (environment); did you mean {near[0]}?"
                )
