"""Structured logs on standard error, as text or as JSON.

The service logs through the standard library. A program that embeds it configures logging itself;
the commands call `set_up_logs`.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor

_SHARED: list[Processor] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]


def logger(name: str = "slicewise") -> structlog.stdlib.BoundLogger:
    """A logger that takes key-value pairs."""
    made: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    return made


def set_up_logs(form: str, level: str) -> None:
    """Configure the root logger, and with it the logs of libraries."""
    last: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    # No values of local variables in tracebacks: they may contain tokens.
    if form == "json":
        frames = ExceptionDictTransformer(show_locals=False)
        last += [
            structlog.processors.ExceptionRenderer(frames),
            structlog.processors.JSONRenderer(),
        ]
    else:
        last.append(
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,
            )
        )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=_SHARED, processors=last)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Routine messages of these libraries do not help an operator.
    for name in ("uvicorn", "alembic", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)
