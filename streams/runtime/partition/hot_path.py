"""The hot path: plain handlers of one partition, run back to back without an await, a slice at a time.

An event that needs more (async and blocking handlers, records that cannot be read, failures) ends the slice in front of
it, and goes through ``Execution``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from streams.core.router import SAMPLED
from streams.core.runs import Run
from streams.metrics import HandlerTimed
from streams.records import IncomingRecord
from streams.runtime.partition import plain_slice
from streams.runtime.partition.handler_kind import HandlerKind
from streams.runtime.partition.host import Host
from streams.runtime.partition.merged_inputs import MergedInputs
from streams.runtime.partition.parked_events import ParkedEvents
from streams.runtime.partition.state import Partition

SLICE: Final = 128
"""Events that are handled before the loop runs other tasks, at most. So many make the price of a switch negligible."""

LEAST_MERGED: Final = 8
"""Records of several inputs that are merged for one slice, at least."""

LONGEST_SLICE_SECONDS: Final = 0.005
"""Seconds that a slice may take, about: slices of slow handlers get shorter until they do. All other tasks, commits
included, wait meanwhile."""


def next_size(size: int, seconds: float) -> int:
    """Return how many events the next slice may have, after one of this size at most that took so long."""
    if seconds > LONGEST_SLICE_SECONDS:
        return max(1, size // 2)
    return size if size >= SLICE else 2 * size


class HotPath:
    """The hot path of one partition. On its task. ``size``: events in the next one, at most; ``merged_size``: of
    several inputs."""

    def __init__(self, partition: Partition, host: Host) -> None:
        self._partition = partition
        self._host = host
        self._queue = ParkedEvents(partition, host).in_slice
        # Small at first: how long the handlers take is not known yet.
        self.size = SLICE // 8
        self.merged_size = self.size
        self._until_sample = SAMPLED

    def run(
        self, records: list[IncomingRecord], start: int, inputs: MergedInputs | None = None, runs: Sequence[Run] = ()
    ) -> tuple[int, BaseException | None]:
        """Handle and admit some of these records. Returns the position of the first that was not handled; and if that
        one ended the slice because its handler failed, why. With ``inputs`` the records are theirs, as ``runs`` says,
        and the slice ends in front of the first one that is not plain."""
        partition, host = self._partition, self._host
        now = host.now
        began = now()
        stop = min(start + self.size, len(records))
        parked: list[int] = []
        if partition.parked:
            parked = parked_places(partition, records, start, stop)
            if inputs is not None and parked:  # ``Execution`` queues it
                stop, parked = parked[0], []
        self._until_sample -= 1
        if self._until_sample:
            position, error = plain_slice.run(partition, host, records, start, stop, inputs, runs, parked, self._queue)
        else:
            position, error = self._sample(records, start, stop, inputs, runs, parked)
        while inputs is None and error is None and position < stop:  # at a record whose handler is not plain
            parked = [place for place in parked if place >= position]
            behind, error = self._run_kind(records, position, parked[0] if parked else stop)
            if behind == position or error is not None:
                position = behind
                break
            position, error = plain_slice.run(partition, host, records, behind, stop, None, (), parked, self._queue)
        ended = now()
        self.size = next_size(self.size, ended - began)
        if position > start:
            partition.last_handled = records[position - 1], ended
        if inputs is not None:
            # Near what was plain this time: records behind one that is not plain are merged in vain.
            self.merged_size = min(self.size, max(LEAST_MERGED, 2 * position))
        return position, error

    def _sample(
        self,
        records: list[IncomingRecord],
        start: int,
        stop: int,
        inputs: MergedInputs | None,
        runs: Sequence[Run],
        parked: Sequence[int],
    ) -> tuple[int, BaseException | None]:
        """Run a plain slice in two: its first event by itself, which is timed, and the others. A clock around each
        event would cost more than many a handler. A slice of several inputs, or with parked keys, has no sample.
        Returns as ``plain_slice.run``."""
        partition, host, position = self._partition, self._host, start
        self._until_sample = SAMPLED
        is_simple = inputs is None and not parked and start < stop
        route = host.router.current(records[start].headers) if is_simple else None
        if route is not None and route.kind is None:
            began, handled = host.now(), route.handled
            position, error = plain_slice.run(partition, host, records, start, start + 1)
            if route.handled > handled:  # neither a duplicate, nor left to ``Execution``
                host.measure(HandlerTimed(route.name, host.now() - began))
            if error is not None or position == start:
                return position, error
        return plain_slice.run(partition, host, records, position, stop, inputs, runs, parked, self._queue)

    def _run_kind(self, records: list[IncomingRecord], start: int, stop: int) -> tuple[int, BaseException | None]:
        """Handle some records by a handler of another kind that needs no await. Returns ``start`` if there is none."""
        partition, host = self._partition, self._host
        route = host.router.current(records[start].headers) if start < stop else None  # the first one may not wait here
        # While failures of events are known, each event has to meet its own: ``Execution`` does that, one by one.
        if route is None or partition.failures.events:
            return start, None
        kind: HandlerKind | None = route.kind
        if kind is None:
            return start, None
        return kind.run(partition, host, route, records, start, stop)


def parked_places(partition: Partition, records: list[IncomingRecord], start: int, stop: int) -> list[int]:
    """Return the places of the records whose keys are parked."""
    parked = partition.parked
    places = [position for position in range(start, stop) if records[position].key in parked]
    return [position for position in places if partition.queue_of(records[position]) is not None]
