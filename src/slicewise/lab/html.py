"""HTML reports by Jinja2: each page is one file that loads nothing from elsewhere."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_page(template: str, *, style: str, script: str | None = None, **values: object) -> str:
    """Render a template of ``templates/`` with its style sheet and script inlined.

    The page's security policy lets a browser run this script and load nothing. Values are
    escaped unless the template marks them as safe.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    code = None if script is None else _source(script)
    if code is not None:
        digest = b64encode(sha256(code.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
    return (
        _environment()
        .get_template(template)
        .render(
            security_policy=policy,
            style=_source("base.css") + _source(style),
            script=code,
            **values,
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _source(name: str) -> str:
    """Return a style sheet or script as it is, not parsed as a template."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]
