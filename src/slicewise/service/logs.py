"""Log lines: one structure, as text for people or as JSON for machines, on standard error.

The service logs by way of the standard library. So a program that embeds it decides for itself
what becomes of the lines, and only the command sets up what is here.
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
    """A logger that takes facts as well as words."""
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
    """Have everything logged in one way, whoever logs it."""
    last: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    # Tracebacks without the values of variables: tokens are among those.
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
    # What these say about themselves is of no use to an operator unless something is wrong.
    for name in ("uvicorn", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
