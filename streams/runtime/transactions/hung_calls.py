"""Count the blocking calls that never came back, and bound them.

librdkafka has calls that never return around an outage. A hung call keeps its thread, its client, and the client's
threads and sockets. Nothing can end it from outside, so it is counted until it comes back, and at some number the
process is better started again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from streams.errors import StreamsError
from streams.metrics import CallAbandoned, Measurement
from streams.runtime.ports import Blocking

MOST: Final = 32
"""Calls that may hang at a time. Each keeps a thread of ours, and the threads and sockets of its librdkafka client."""


class HungCalls:
    """The hung calls of one run; ``len`` is their number now. On the loop."""

    def __init__(self, measure: Callable[[Measurement], None], fail: Callable[[StreamsError], None]) -> None:
        self._measure = measure
        self._fail = fail
        self._left: dict[int, str] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._left)

    def abandon(self, worker: Blocking, call: str) -> None:
        """Leave a worker to itself in the middle of this call; it is counted until it comes back."""
        self._number += 1
        self._left[self._number] = call
        # The worker's own thread runs it when the call has come back. A pop is one step, so there is no lock.
        worker.post(self._left.pop, self._number, None)
        worker.abandon()
        # A copy: a call that comes back meanwhile takes its entry out on another thread.
        calls = Counter(list(self._left.values()))
        self._measure(CallAbandoned(call, calls.total()))
        if calls.total() > MOST:
            named = ", ".join(f"{count} of {name}" for name, count in calls.most_common())
            self._fail(
                StreamsError(
                    f"{calls.total()} calls to the broker hang and keep their threads and connections ({named}): at "
                    f"most {MOST} may, so the source stops. Start it again; the log says since when the broker "
                    "has not answered"
                )
            )
