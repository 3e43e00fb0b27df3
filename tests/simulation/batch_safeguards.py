"""The safeguards of batch handlers, each with a way to take it out, as in ``safeguards.py``."""

from __future__ import annotations

from typing import Any

from streams.runtime.attempts import Attempts
from streams.runtime.batch_handlers import TOGETHER, BatchContext

from .safeguards import Patch, Safeguard, _nothing, failed_events_are_not_undone

PROFILE = ("batches",)


def lists_that_failed_are_not_undone(patch: Patch) -> None:
    failed_events_are_not_undone(patch)


def refused_lists_are_their_last_events_fault(patch: Patch) -> None:
    patch.setattr(BatchContext, "origin", property(lambda self: self._origin % TOGETHER))


def refused_lists_are_tried_again_as_they_are(patch: Patch) -> None:
    patch.setattr(Attempts, "apart", _nothing)


def what_came_apart_is_forgotten_by_a_restart(patch: Patch) -> None:
    """Of a store that cannot undo, or after a refused record."""
    known = Attempts.known

    def less(self: Attempts) -> dict[int, Any]:
        return {origin: failure for origin, failure in known(self).items() if origin < TOGETHER}

    patch.setattr(Attempts, "known", less)


BATCH_SAFEGUARDS: dict[str, Safeguard] = {
    made.__name__.replace("_", " "): Safeguard("batch handlers", made, PROFILE, seed)
    for made, seed in (
        (lists_that_failed_are_not_undone, 0),
        (refused_lists_are_their_last_events_fault, 0),
        (refused_lists_are_tried_again_as_they_are, 4),
        (what_came_apart_is_forgotten_by_a_restart, 4),
    )
}
