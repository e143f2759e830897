"""The queue options of `simulate`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from slicewise.core.errors import SlicewiseError
from slicewise.engine.queue import Discipline

BACKFILL = 16
"""Default number of requests behind a blocked head to consider."""

PATIENCE = 1.0


class QueueName(StrEnum):
    """The disciplines by name."""

    FIFO = "fifo"
    BACKFILL = "backfill"


QueueOption = Annotated[
    QueueName | None,
    typer.Option(
        "--queue",
        help="Steady: queue requests that do not fit, strictly in order or with backfill.",
    ),
]
BackfillOption = Annotated[
    int | None,
    typer.Option(
        "--backfill",
        metavar="N",
        help=f"Queue: requests behind a blocked head to consider (default {BACKFILL}).",
    ),
]
OvertakesOption = Annotated[
    int | None,
    typer.Option(
        "--overtakes",
        metavar="N",
        help=f"Queue: how often a request may be overtaken (default {Discipline().overtakes}).",
    ),
]
PatienceOption = Annotated[
    float | None,
    typer.Option(
        "--patience",
        metavar="X",
        help="Queue: mean lifetimes until a request gives up; inf is never "
        f"(default {PATIENCE:g}).",
    ),
]
PriorityShareOption = Annotated[
    float | None,
    typer.Option(
        "--priority-share",
        metavar="X",
        help="Queue: share of requests with priority (default 0).",
    ),
]


@dataclass(frozen=True)
class QueueOptions:
    """The queue options as given; None where not given."""

    queue: QueueName | None = None
    backfill: int | None = None
    overtakes: int | None = None
    patience: float | None = None
    priority_share: float | None = None

    def check(self, steady: bool) -> None:
        """Reject options that would have no effect."""
        given = {
            "--backfill": self.backfill,
            "--overtakes": self.overtakes,
            "--patience": self.patience,
            "--priority-share": self.priority_share,
        }
        for name, value in given.items():
            if value is None:
                continue
            if self.queue is None:
                raise SlicewiseError(f"{name} needs a queue: add --queue fifo or --queue backfill")
            if self.queue is QueueName.FIFO and name in ("--backfill", "--overtakes"):
                raise SlicewiseError(f"{name}: fifo has no backfill; use --queue backfill")
        if self.queue is not None and not steady:
            raise SlicewiseError("a queue needs the steady experiment: add --experiment steady")

    @property
    def discipline(self) -> Discipline:
        """The queue discipline that the options describe."""
        if self.queue is QueueName.FIFO:
            return Discipline()
        backfill = BACKFILL if self.backfill is None else self.backfill
        return (
            Discipline(backfill) if self.overtakes is None else Discipline(backfill, self.overtakes)
        )
