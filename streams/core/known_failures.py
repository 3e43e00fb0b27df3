"""The failures of one partition that outlive a restart.

A restart restores the partition's state from its changelog and handles the events behind it again. An event that has
failed before is not attempted again: it meets its error policy with the attempts that were made. A batch that failed
has no policy; its events are handled one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from streams.core.origin import Origin, batch_end, batch_origin, is_batch, is_event, is_timer
from streams.core.policy import Failure

ALWAYS: Final = 1 << 62
"""A ``single_until`` above all offsets: no batch is made."""


class KnownFailures:
    """The known failures of one worker's partition, by origin.

    ``events``: offsets that are still to come; while there are any, events are handled one by one. ``single_until``:
    batch handlers get the events below this offset one by one.
    """

    def __init__(self, known: Mapping[Origin, Failure] | None = None) -> None:
        known = known or {}
        self.events = {origin: failure for origin, failure in known.items() if is_event(origin)}
        self._timers = {origin: failure for origin, failure in known.items() if is_timer(origin)}
        self._batch = {origin: failure for origin, failure in known.items() if is_batch(origin)}
        self._kept: dict[Origin, Failure] = {}
        self.single_until = max((batch_end(origin) + 1 for origin in self._batch), default=0)

    def expect(self, offset: int, timers: Iterable[Origin]) -> None:
        """Begin at this offset: forget the events before it, and the timers that are not set any more."""
        self.events = {origin: failure for origin, failure in self.events.items() if origin >= offset}
        if self._timers:  # else spare the origins of all timers
            there = set(timers)
            self._timers = {origin: failure for origin, failure in self._timers.items() if origin in there}

    def meet(self, origin: Origin) -> Failure | None:
        """Return the known failure of an event or a timer, whose turn it is now; the next worker knows it, too."""
        failure = self.events.pop(origin, None) or self._timers.pop(origin, None)
        if failure is not None:
            self._kept[origin] = failure
        return failure

    def add(self, origin: Origin, failure: Failure) -> None:
        """Keep the failure of an event or a timer for the next worker."""
        self._kept[origin] = failure

    def split_batch(self, last: int, error: BaseException) -> None:
        """Have the events up to this offset handled one by one: it ends a batch that failed."""
        self.single_until = max(self.single_until, last + 1)
        self._batch = {batch_origin(self.single_until - 1): Failure(0, error)}

    def carried_over(self) -> dict[Origin, Failure]:
        return self.events | self._timers | self._batch | self._kept
