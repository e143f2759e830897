"""The writing hand of a controller: other threads write for it, and it takes in what came of it.

Everything here is called by the controller's own thread; only the writes themselves are made by
others, which report back through the controller's queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from slicewise.core.errors import SlicewiseError
from slicewise.k8s.api import ResourceClaim
from slicewise.k8s.board import Board
from slicewise.k8s.deciding import Decider
from slicewise.k8s.rivals import Rivals
from slicewise.k8s.tally import Tally
from slicewise.k8s.wishes import Wishes
from slicewise.k8s.writing import Decision, NotWrittenError, Pen, is_refusal

WRITERS = 8

log = logging.getLogger("slicewise.k8s")


@dataclass(frozen=True, slots=True)
class Done:
    """Something was written, or was not; ``call`` takes in what came of it."""

    call: Callable[[Any, SlicewiseError | None], None]
    result: Any
    error: SlicewiseError | None


class Hand:
    """Writes allocations, confirms them and takes them back, for one controller."""

    def __init__(
        self,
        pen: Pen,
        board: Board,
        wishes: Wishes,
        decider: Decider,
        rivals: Rivals,
        tally: Tally,
        post: Callable[[Done], None],
        know: Callable[[ResourceClaim], None],
    ) -> None:
        """``post`` brings something to the controller's thread, ``know`` tells it of a claim."""
        self._pen = pen
        self._board = board
        self._wishes = wishes
        self._decider = decider
        self._rivals = rivals
        self._tally = tally
        self._post = post
        self._know = know
        self._writers = ThreadPoolExecutor(WRITERS, "writer")
        self._undoing: set[str] = set()
        """Claims whose allocation is being taken back."""
        self._judging: set[str] = set()
        """Claims that are being confirmed, or said to be in conflict."""
        self._final: set[str] = set()
        """Claims whose allocation was written for good, and has not come back yet."""
        self._gave_way: dict[str, str] = {}
        """By claim: the version upon which it was to give way."""
        self.fencing = False

    def stop(self) -> None:
        """Finish what has been begun."""
        self._writers.shutdown(cancel_futures=True)

    def _in_background(
        self, work: Callable[[], Any], then: Callable[[Any, SlicewiseError | None], None]
    ) -> None:
        def call() -> None:
            try:
                result, error = work(), None
            except SlicewiseError as problem:
                result, error = None, problem
            except BaseException as mistake:
                self._post(Done(_fail, mistake, None))
                raise
            self._post(Done(then, result, error))

        self._writers.submit(call)

    def gone(self, uid: str) -> None:
        """A claim is gone."""
        self.lost(uid)
        self._gave_way.pop(uid, None)

    def _take_in(self, claim: ResourceClaim) -> None:
        """A claim as it was written; it may be gone by now."""
        if self._known(claim) is None:
            self._board.forget(claim.metadata.uid)
        else:
            self._know(claim)

    def _known(self, claim: ResourceClaim) -> ResourceClaim | None:
        """A claim as it was last heard of; None if it is gone."""
        known = self._wishes.claims.get(claim.metadata.key)
        return known if known is not None and known.metadata.uid == claim.metadata.uid else None

    # Giving

    def write(self, decision: Decision) -> None:
        """Have a decision written."""
        for grant in decision.grants:
            meta = grant.claim.metadata
            if decision.tentative:
                self._rivals.begin(meta.uid, meta.key)
            else:
                self._final.add(meta.uid)
        self._in_background(
            lambda: self._pen.allocate(decision),
            lambda result, error: self._written(decision, result, error),
        )

    def _written(
        self, decision: Decision, claims: list[ResourceClaim] | None, error: SlicewiseError | None
    ) -> None:
        self._decider.finished(decision)
        if error is not None:
            self._not_written(decision, error)
            return
        self._tally.allocated += len(decision.grants)
        for claim in claims or ():
            self._take_in(claim)
        self._look_again(decision)

    def _not_written(self, decision: Decision, error: SlicewiseError) -> None:
        log.info("not written for pod %s: %s", decision.pod, error)
        self._tally.failed += 1
        if is_refusal(error):
            self._decider.put_off(decision, str(error))
        else:
            # Unless it is known how a claim is now, nothing is done before that is known.
            for grant in decision.grants:
                meta = grant.claim.metadata
                if self._known(grant.claim) is not None:
                    self._decider.stale[meta.uid] = meta.resource_version
        for claim in error.claims if isinstance(error, NotWrittenError) else ():
            self._take_in(claim)
        self._look_again(decision)

    def _look_again(self, decision: Decision) -> None:
        """See to what was passed over while it was written; what the API says counts."""
        for grant in decision.grants:
            known = self._known(grant.claim)
            if known is None or known.status.allocation is None:
                # It did not come about, or was taken away before all of it was written.
                self.lost(grant.claim.metadata.uid)
                self._board.forget(grant.claim.metadata.uid)
            if known is not None:
                self._know(known)

    def lost(self, uid: str) -> None:
        """A claim has no devices: nothing is confirmed, nothing comes back."""
        self._rivals.tentative.pop(uid, None)
        self._final.discard(uid)

    def came_back(self, claim: ResourceClaim) -> None:
        """An allocation of ours was seen by the watch: all claims older than it are known."""
        uid = claim.metadata.uid
        self._rivals.came_back(uid)
        if claim.status.reserved_for:
            self._rivals.reserved(uid, self._decider.clock())
        if uid in self._final:
            self._final.discard(uid)
            if self._rivals.waiting and not claim.status.reserved_for:
                # Rivals came while it was written, and nobody expected any: better once more.
                self.take_back(claim)

    # Taking back

    def is_undoing(self, uid: str) -> bool:
        """Whether an allocation is being taken back from here."""
        return uid in self._undoing

    def see_to(self, claim: ResourceClaim) -> None:
        """Do what is to be done about an allocation of ours, unless somebody is at it already."""
        uid = claim.metadata.uid
        if uid in self._decider.writing or uid in self._undoing or uid in self._judging:
            return
        if self._is_abandoned(claim):
            self.take_back(claim)
        elif _is_undecided(claim) and uid not in self._rivals.tentative:
            self._rivals.begin(uid, claim.metadata.key)

    def _is_abandoned(self, claim: ResourceClaim) -> bool:
        """Whether what was given is of no use: its pod went before it could use it.

        Claims that a pod did use are taken back by Kubernetes itself.
        """
        return not claim.status.reserved_for and not self._wishes.users(claim.metadata.key)

    def take_back(self, claim: ResourceClaim) -> None:
        """Have an allocation taken back that no pod uses."""
        uid = claim.metadata.uid
        if uid in self._undoing:
            return
        self._undoing.add(uid)
        self._tally.taken_back += 1

        def undone(result: ResourceClaim | None, error: SlicewiseError | None) -> None:
            refused = result is not None and result.status.allocation is not None
            if result is not None:
                self._take_in(result)
            self._undoing.discard(uid)
            self._done_with(result or claim, again=refused or error is not None)

        self._in_background(lambda: self._pen.deallocate(claim), undone)

    def _done_with(self, claim: ResourceClaim, again: bool) -> None:
        """See to a claim anew: ``again``, or since it has changed, which was passed over till now.

        A change that is yet to be heard of is seen to then.
        """
        if again:
            self._gave_way.pop(claim.metadata.uid, None)
        known = self._known(claim)
        if known is not None and (again or _version(known) != _version(claim)):
            self._know(known)

    # Confirming, where others compete

    def confirm(self) -> None:
        """Confirm what nobody can collide with any more."""
        for uid in self._rivals.settled(self._decider.clock()):
            if uid in self._decider.writing or self._board.excluded(uid):
                continue  # somebody else has its slices already: it is to give way
            claim = self._wishes.claims.get(self._rivals.tentative.pop(uid).claim)
            if claim is not None and claim.metadata.uid == uid:
                self._judge(claim, True, "nobody else has these slices")

    def give_way(self) -> None:
        """Give up allocations of ours where those of others exclude them."""
        for uid, clash in list(self._board.clashes.items()):
            if not self._gives_way(uid):
                for other in sorted(clash.against):
                    self._gives_way(other)

    def _gives_way(self, uid: str) -> bool:
        """Give an allocation up if it is ours to take back; returns whether it is, or is going."""
        claim = self._board.claim(uid)
        if uid in self._undoing or uid in self._judging or uid in self._decider.writing:
            return True  # first it is seen what comes of that
        if claim is None or not self._may_give_way(claim):
            return False
        self._gave_way[uid] = _version(claim)
        self._rivals.tentative.pop(uid, None)
        self._tally.conflicts += 1
        log.warning("claim %s gives way to another on the same slices", claim.metadata.key)
        if claim.status.reserved_for:
            self._judge(claim, False, "another claim was given these slices as well")
        else:
            self.take_back(claim)
        return True

    def _may_give_way(self, claim: ResourceClaim) -> bool:
        """Whether a claim is ours to take back: no pod is bound with it yet."""
        tried = self._gave_way.get(claim.metadata.uid) == _version(claim)
        if tried or not self._wishes.is_ours(claim):
            return False
        # Also where taking it back was too late because the scheduler had just reserved it.
        return not claim.status.reserved_for or _is_undecided(claim)

    def _judge(self, claim: ResourceClaim, confirmed: bool, why: str) -> None:
        uid = claim.metadata.uid
        self._judging.add(uid)

        def judged(result: ResourceClaim | None, error: SlicewiseError | None) -> None:
            self._judging.discard(uid)
            if error is not None:
                log.warning("claim %s is not decided upon yet: %s", claim.metadata.key, error)
            if result is not None:
                self._take_in(result)
            self._done_with(result or claim, again=error is not None)

        self._in_background(lambda: self._pen.confirm(claim, confirmed, why), judged)

    # Taking over

    def fence(self, identity: str, then: Callable[[bool], None]) -> None:
        """Shut out whoever led before; ``then`` is told whether that is done."""
        self.fencing = True
        self._gave_way.clear()

        def done(found: list[ResourceClaim] | None, error: SlicewiseError | None) -> None:
            self.fencing = False
            if error is not None:
                log.warning("cannot lead yet: %s", error)
            for claim in found or ():
                self._know(claim)  # also those that our watch has yet to bring
            then(error is None)

        self._in_background(lambda: self._pen.fence(identity), done)

    def resume(self) -> None:
        """Go on with what was left half done: by another leader, or while nothing was decided."""
        self._rivals.tentative.clear()  # who might collide is found anew
        for claim in list(self._wishes.claims.values()):
            if claim.status.allocation is not None and self._wishes.is_ours(claim):
                self._know(claim)


def _version(claim: ResourceClaim) -> str:
    return claim.metadata.resource_version


def _is_undecided(claim: ResourceClaim) -> bool:
    """Whether a pod is held back until an allocation is confirmed, or found to be in conflict."""
    allocation = claim.status.allocation
    return (
        allocation is not None
        and not claim.status.devices
        and any(result.binding_conditions for result in allocation.devices.results)
    )


def _fail(mistake: BaseException, error: SlicewiseError | None) -> None:
    """End the controller, as a mistake in its own thread would: another replica takes over."""
    raise mistake
