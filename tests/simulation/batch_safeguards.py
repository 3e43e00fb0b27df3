"""The safeguards of batch handlers, each with a way to take it out, as in ``safeguards.py``."""

from __future__ import annotations

from typing import Any

from streams.core.known_failures import KnownFailures
from streams.core.origin import batch_end, is_batch
from streams.core.policy import Failure
from streams.runtime.partition.batch_handlers import BatchContext

from .safeguards import Patch, Safeguard, _nothing, failed_events_are_not_undone

PROFILE = ("batches",)


def lists_that_failed_are_not_undone(patch: Patch) -> None:
    failed_events_are_not_undone(patch)


def refused_lists_are_their_last_events_fault(patch: Patch) -> None:
    def of_the_last(self: BatchContext[Any]) -> int:
        return batch_end(self._batch) if is_batch(self._batch) else self._batch

    patch.setattr(BatchContext, "_origin", property(of_the_last))


def refused_lists_are_tried_again_as_they_are(patch: Patch) -> None:
    patch.setattr(KnownFailures, "split_batch", _nothing)


def what_came_apart_is_forgotten_by_a_restart(patch: Patch) -> None:
    """Of a store that cannot undo, or after a refused record."""
    carried_over = KnownFailures.carried_over

    def less(self: KnownFailures) -> dict[int, Failure]:
        return {origin: failure for origin, failure in carried_over(self).items() if not is_batch(origin)}

    patch.setattr(KnownFailures, "carried_over", less)


BATCH_SAFEGUARDS: dict[str, Safeguard] = {
    made.__name__.replace("_", " "): Safeguard("batch handlers", made, PROFILE, seed)
    for made, seed in (
        (lists_that_failed_are_not_undone, 0),
        (refused_lists_are_their_last_events_fault, 0),
        (refused_lists_are_tried_again_as_they_are, 4),
        (what_came_apart_is_forgotten_by_a_restart, 4),
    )
}
