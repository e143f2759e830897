"""Bodies of requests, checked before they are sent: what is wrong is said in a sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

from slicewise.control.wire import encode
from slicewise.core.errors import SlicewiseError

_WHERE = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "nothing",
    "object": "a table",
    "str": "text",
}
_RULES = (
    (r"Expected `\w+` <= (\S+)$", "must be at most {}"),
    (r"Expected `\w+` >= (\S+)$", "must be at least {}"),
    (r"Expected `\w+` > (\S+)$", "must be more than {}"),
    (r"Expected `\w+` < (\S+)$", "must be less than {}"),
    (r"Expected `str` of length <= (\d+)$", "must have at most {} characters"),
    (r"Expected `\w+` of length <= (\d+)$", "must have at most {} items"),
    (r"Expected `\w+` of length >= 1$", "must not be empty"),
    (
        r"Expected `str` matching regex",
        "must be 1 to 63 letters, digits and marks such as '.' and '-', a letter or digit first",
    ),
    (r"Invalid enum value", "is not one of those known"),
)
_SHOWN = 40
"""Characters shown of what was given."""
_OF_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`$")


def checked(body: msgspec.Struct) -> bytes:
    """The body as JSON, held against the same limits that the service holds it against."""
    try:
        for path, number in _endless(msgspec.to_builtins(body)):
            raise SlicewiseError(f"{path} must be a number, not {number}")
        data = encode(body)
        msgspec.json.decode(data, type=type(body))
    except msgspec.ValidationError as error:
        raise SlicewiseError(_sentence(body, str(error))) from None
    except (TypeError, ValueError) as error:  # something that JSON does not have
        raise SlicewiseError(f"this cannot be sent: {error}") from None
    return data


def _endless(found: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Where there are numbers that JSON does not have: they would arrive as none at all."""
    if isinstance(found, float) and not math.isfinite(found):
        yield path, found
    elif isinstance(found, dict):
        for name, value in found.items():
            yield from _endless(value, f"{path}.{name}" if path else name)
    elif isinstance(found, list | tuple):
        for index, value in enumerate(found):
            yield from _endless(value, f"{path}[{index}]")


def _sentence(body: msgspec.Struct, problem: str) -> str:
    where = _WHERE.search(problem)
    path = "" if where is None else where["path"]
    text = problem if where is None else problem[: where.start()]
    name = path.replace("[...]", "") or "this"
    return f"{name} {_rule(text)}{_given(body, path)}"


def _rule(text: str) -> str:
    for pattern, words in _RULES:
        if match := re.match(pattern, text):
            return words.format(*(number.removesuffix(".0") for number in match.groups()))
    if kinds := _OF_TYPE.match(text):
        expected = " or ".join(_WORDS.get(kind, kind) for kind in kinds[1].split(" | "))
        return f"must be {expected}"
    return f"is not as it should be: {text}"


def _given(body: msgspec.Struct, path: str) -> str:
    """What was given there, where it can be shown."""
    found: object = body
    for part in re.findall(r"[^.\[\]]+", path):
        if part.isdigit() and isinstance(found, tuple | list):
            found = found[int(part)]
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return ""
    if isinstance(found, str) and len(found) > _SHOWN:
        return f", not {found[:_SHOWN] + '...'!r}"
    return f", not {found!r}" if isinstance(found, str | int | float) else ""
