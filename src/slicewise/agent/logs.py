"""Log lines: one an event, in words for people or as JSON for machines, on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time


class _Words(logging.Formatter):
    """The level where it is worse than usual, and the sentence; systemd adds the time."""

    def format(self, record: logging.LogRecord) -> str:
        sentence = " ".join(record.getMessage().split())
        if record.levelno >= logging.ERROR:
            return f"error: {sentence}"
        return f"warning: {sentence}" if record.levelno >= logging.WARNING else sentence


class _Json(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return json.dumps(
            {
                "timestamp": f"{moment}.{int(record.msecs):03d}Z",
                "level": record.levelname.lower(),
                "event": " ".join(record.getMessage().split()),
                "logger": record.name,
            }
        )


def set_up_logs(as_json: bool) -> None:
    """Have the agent's lines written."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if as_json else _Words())
    logger = logging.getLogger("slicewise.agent")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
