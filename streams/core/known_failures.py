"""The failures of one partition that outlive a restart.

A restart restores the partition's state from its changelog and handles the events behind it again. An event that has
failed before is not attempted again: it meets its error policy with the attempts that were made. A batch that failed
has no policy; its events are handled one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from streams.core.origin import (
    Origin,
    batch_end,
    batch_origin,
    in_input,
    input_and_offset,
    is_batch,
    is_event,
    is_timer,
    is_visit,
)
from streams.core.policy import Failure
from streams.core.position import Position, offsets_of

ALWAYS: Final = 1 << 62
"""A ``single_until`` above all offsets: all events are handled one by one."""


class KnownFailures:
    """The known failures of one worker's partition, by origin.

    ``events``: origins that are still to come; while there are any, events are handled one by one. ``single_until``:
    batch handlers get the events below this offset one by one. ``place``: of the input whose event has its turn; the
    methods and ``single_until`` are about offsets in this one.
    """

    def __init__(self, known: Mapping[Origin, Failure] | None = None) -> None:
        known = known or {}
        self.events = {origin: failure for origin, failure in known.items() if is_event(origin)}
        self._timers = {origin: failure for origin, failure in known.items() if is_timer(origin)}
        self._batch = {origin: failure for origin, failure in known.items() if is_batch(origin)}
        self._kept: dict[Origin, Failure] = {}
        self._single_until: dict[int, int] = {}
        for origin in self._batch:
            input_number, last = input_and_offset(batch_end(origin))
            self._single_until[input_number] = max(last + 1, self._single_until.get(input_number, 0))
        self.input_number = 0

    @property
    def single_until(self) -> int:
        return self._single_until.get(self.input_number, 0)

    @single_until.setter
    def single_until(self, offset: int) -> None:
        self._single_until[self.input_number] = offset

    def expect(self, position: Position, timers: Iterable[Origin]) -> None:
        """Begin at this position: forget the events before it, and the timers that are not set any more."""
        offsets = offsets_of(position)

        def is_to_come(origin: Origin) -> bool:
            input_number, offset = input_and_offset(origin)
            return input_number < len(offsets) and offset >= offsets[input_number]

        self.events = {origin: failure for origin, failure in self.events.items() if is_to_come(origin)}
        # The failures of visited keys stay: their events are not there yet, and no other event has their origins.
        if self._timers:  # otherwise no origin of a timer need be computed
            there = set(timers)
            self._timers = {
                origin: failure for origin, failure in self._timers.items() if origin in there or is_visit(origin)
            }

    def of_event(self, offset: int) -> Failure | None:
        """Return the known failure of the event at this offset, which need not have its turn yet."""
        return self.events.get(in_input(self.input_number, offset)) if self.events else None

    def meet(self, origin: Origin) -> Failure | None:
        """Return the known failure of an event or a timer, whose turn it is now; the next worker knows it, too."""
        origin = in_input(self.input_number, origin)
        failure = self.events.pop(origin, None) or self._timers.pop(origin, None)
        if failure is not None:
            self._kept[origin] = failure  # until it is committed: a restart before that meets the event again
        return failure

    def expect_again(self, offset: int, failure: Failure) -> None:
        """Have the event at this offset, which has its turn, meet this failure in its next attempt."""
        self.events[in_input(self.input_number, offset)] = failure

    def add(self, origin: Origin, failure: Failure) -> None:
        """Keep the failure of an event (by its origin among all inputs) or a timer for the next worker."""
        self._kept[origin] = failure

    def split_batch(self, last: int, error: BaseException) -> None:
        """Have the events up to this offset handled one by one: it ends a batch that failed."""
        self.single_until = max(self.single_until, last + 1)
        first = batch_origin(in_input(self.input_number, 0))
        others = {
            known: failure
            for known, failure in self._batch.items()
            if input_and_offset(batch_end(known))[0] != self.input_number
        }
        self._batch = others | {first + self.single_until - 1: Failure(0, error)}

    def carried_over(self) -> dict[Origin, Failure]:
        return self.events | self._timers | self._batch | self._kept
