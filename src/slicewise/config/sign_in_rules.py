"""The file with sign-in rules: which claims give which rights."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

import msgspec

from slicewise.control.identities import ANY, Rule, Value
from slicewise.core.errors import SlicewiseError
from slicewise.journal.entries import Role

REFUSED = "none"
"""In place of a role: claims that meet the conditions are refused."""
_ROLES = (*Role, REFUSED)
_MAX_BYTES = 1 << 20


class SignInRules(NamedTuple):
    """The rules for tokens of the provider, and those for client certificates."""

    token: tuple[Rule, ...]
    certificate: tuple[Rule, ...]


class _RuleTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    where: dict[str, Value]
    role: str
    tenant: str | None = None
    node: str | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: tuple[_RuleTable, ...] = ()
    certificate: tuple[_RuleTable, ...] = ()


def read_sign_in_rules(path: Path) -> SignInRules:
    """Read the rules of a file; SlicewiseError names the file, the rule and the mistake."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise SlicewiseError(f"{path}: larger than {_MAX_BYTES} bytes")
        given = msgspec.convert(tomllib.loads(content.decode("utf-8-sig")), _File)
    except OSError as error:
        raise SlicewiseError(f"{path}: cannot be read: {error.strerror or error}") from None
    except msgspec.ValidationError as error:
        raise SlicewiseError(f"{path}: {error}") from None
    except ValueError as error:
        raise SlicewiseError(f"{path}: not TOML: {error}") from None
    return SignInRules(
        tuple(_rule(path, f"token rule {n}", one) for n, one in enumerate(given.token, 1)),
        tuple(
            _rule(path, f"certificate rule {n}", one) for n, one in enumerate(given.certificate, 1)
        ),
    )


def _rule(path: Path, name: str, given: _RuleTable) -> Rule:
    problem = _problem(given)
    if problem:
        raise SlicewiseError(f"{path}: {name}: {problem}")
    role = None if given.role == REFUSED else Role(given.role)
    return Rule(tuple(given.where.items()), role, given.tenant, given.node)


def _problem(given: _RuleTable) -> str | None:
    """What is wrong with a rule."""
    role, tenant, node = given.role, given.tenant, given.node
    if role not in _ROLES:
        return f"role must be one of {', '.join(_ROLES)}, not {role!r}"
    if not given.where:
        return "where is empty, so every caller would match: name a claim"
    patterns = [value for value in given.where.values() if isinstance(value, str)]
    if not all(given.where) or "" in patterns or any(one.count(ANY) > 1 for one in patterns):
        return f"names and values must not be empty, and a value may contain one {ANY}"
    wild = sum(ANY in one for one in patterns)
    if wild > 1:
        return f"only one value may contain {ANY}"
    if ANY in f"{tenant}{node}" and not wild:
        return f"the tenant or node contains {ANY}, but no value in where does"
    if role == Role.TENANT and not tenant:
        return "the role tenant needs the name of the tenant"
    if tenant is not None and role not in (Role.TENANT, Role.READ_ONLY):
        return f"the role {role} belongs to no tenant"
    if role == Role.AGENT and not node:
        return "the role agent needs the name of the node"
    if node is not None and role != Role.AGENT:
        return f"the role {role} belongs to no node"
    return None
