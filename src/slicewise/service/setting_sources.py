"""Settings from a file, the environment and flags, checked at start.

A flag goes before the environment, and the environment before the file. Whatever is wrong is said
in one line with the key and where its value came from.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from slicewise.core.errors import SlicewiseError, UnknownNameError
from slicewise.service.setting_values import ENVIRONMENT, Key
from slicewise.service.settings import FIELDS, KEYS, Settings

_CLIENTS = frozenset({"SLICEWISE_SERVER", "SLICEWISE_TOKEN", "SLICEWISE_TOKEN_FILE"})
"""What those who talk to a service set, perhaps in the same shell."""
_RESEMBLES = 0.8
"""How alike a variable must be to a key to count as misspelt: others may begin the same."""


def read_settings(
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> Settings:
    """The settings that these sources give; ``flags`` by key, None where one was not given."""
    values: dict[str, object] = {}
    for key, value, where in (
        *_from_file(file),
        *_from_environment(environment),
        *((_known(name, "flag"), v, "flag") for name, v in flags.items() if v is not None),
    ):
        try:
            values[FIELDS[key.name]] = key.parse(value)
        except (ValueError, SlicewiseError) as error:
            given = "" if key.secret else f", not {value!r}"
            problem = str(error) + (given if isinstance(error, ValueError) else "")
            raise SlicewiseError(f"{key.name} ({where}): {problem}") from None
    return Settings(**values)  # type: ignore[arg-type]  # each was parsed as its key says


def assignments(given: list[str]) -> dict[str, object]:
    """Settings written as KEY=VALUE."""
    values: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise SlicewiseError(f"--set {text!r} must be KEY=VALUE, such as queue.backfill=16")
        values[_known(name, "flag").name] = value
    return values


def _known(name: str, where: str) -> Key:
    if name not in KEYS:
        raise UnknownNameError(f"setting ({where})", name, KEYS, f"known: {', '.join(KEYS)}")
    return KEYS[name]


def _from_file(path: Path | None) -> Iterator[tuple[Key, object, str]]:
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


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[Key, object, str]]:
    variables = {key.variable: key for key in KEYS.values()}
    for name, value in environment.items():
        if name in variables:
            yield variables[name], value, name
        elif name.startswith(ENVIRONMENT) and name not in _CLIENTS:
            near = difflib.get_close_matches(name, variables, 1, _RESEMBLES)
            if near:
                raise SlicewiseError(
                    f"unknown setting {name!r} (environment); did you mean {near[0]}?"
                )
