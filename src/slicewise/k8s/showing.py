"""Showing which claims wait, and why, to those who look; what is decided does not depend on it."""

from __future__ import annotations

from slicewise.k8s.board import Board
from slicewise.k8s.telling import CONDITION, Told
from slicewise.k8s.wishes import Wish


class Window:
    """The pods that are shown as waiting."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._shown: dict[str, tuple[str, tuple[str, ...]]] = {}
        """By pod: the reason that is shown, and the claims."""

    def show(self, key: str, wish: Wish, told: Told) -> None:
        """A pod waits, for this reason."""
        shown = told.reason, tuple(claim.metadata.uid for claim, _ in wish.claims)
        if told.placed or wish.problem or self._shown.get(key) == shown:
            return
        self.hide(key)
        pod = wish.pod
        for claim, ask in wish.claims:
            self._board.wait(
                claim,
                [asked.want for asked in ask.devices],
                pod.spec.priority,
                {"pod": pod.metadata.name},
                told.reason.lower(),
                told.text,
            )
        self._shown[key] = shown

    def show_as_told(self, key: str, wish: Wish) -> None:
        """A pod waits for the reason that the replica that decides has told it."""
        for condition in wish.pod.status.conditions:
            if condition.type == CONDITION and condition.status == "False":
                self.show(key, wish, Told(False, condition.reason, condition.message))

    def hide(self, key: str) -> None:
        """A pod waits no longer; what it has been given meanwhile stays on the board."""
        for uid in self._shown.pop(key, ("", ()))[1]:
            self._board.stop_waiting(uid)
