"""The last transaction of a transactional id, as far as its markers may be missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from streams.kafka.wire.cluster import Cluster
from streams.kafka.wire.messages import WirePartition
from streams.kafka.wire.protocol import Pauses


class LastTransaction:
    """Remembers which partitions the last transaction wrote to, and how it ended. On the loop.

    A broker that was killed between the end of a transaction and its markers may count it as complete without them
    (Kafka 4.3.1, ``docs/internals/hanging-transactions.md``). It stays open where a marker is missing, and ends as the
    *next* transaction of the id there does: a part of a commit is taken back, or an abort becomes visible. So the slot
    ends it a second time, as it ended, by a transaction without records: right after it is opened again, and before the
    next one if a connection was lost in between. Where nothing is open its markers change nothing.
    """

    def __init__(self) -> None:
        self._partitions: set[WirePartition] = set()
        self._committed: bool | None = None  # not known, or there was none
        self._running: set[WirePartition] | None = None
        self._requested: bool | None = None  # the end of the one that runs: a commit or an abort
        self.is_shaken = False
        """Whether it may have lost its markers, as far as its end tells."""

    def begins(self) -> None:
        """Note that a transaction is about to be sent."""
        self._running = self._running or set()

    def writes(self, partitions: Iterable[WirePartition]) -> None:
        """Note where the transaction that runs writes to. It must be enlisted by then, if it enlists."""
        self._running = {*(self._running or ()), *partitions}

    def requested(self, *, commit: bool) -> None:
        """Note that its end is requested."""
        self._requested = commit

    def ended(self, commit: bool, is_lost: bool) -> None:
        """Note its end, acknowledged by the coordinator. ``is_lost``: after a request that was not answered."""
        if self._running:  # one without records lacks no markers, so the one before it is still the last
            self._partitions, self._committed = self._running, commit
        self.is_shaken, self._running, self._requested = is_lost, None, None

    def reopened(self, *, has_begun: bool) -> bool:
        """Note that the id is taken again: what ran is aborted, unless its commit was requested. Returns whether a
        transaction ran. ``has_begun``: whether its coordinator knew of it."""
        running, requested = self._running, self._requested
        self._running = self._requested = None
        # A coordinator begins no transaction before the markers of the last one are written. So one that was sent and
        # did not begin has no records, and it is the last one whose markers may be missing.
        if running and (has_begun or requested is not None):
            self._partitions, self._committed = running, None if requested else False
        return running is not None

    def settled(self, committed: bool) -> None:
        """Note what became of one that was under way when the id was taken again."""
        if self._partitions and self._committed is None:
            self._committed, self.is_shaken = committed, True

    def again(self) -> tuple[dict[str, list[int]], bool]:
        """Return what is to be ended a second time, partitions by topic, and how. None: there is nothing to end."""
        partitions = sorted(self._partitions if self._committed is not None else ())
        self.is_shaken = bool(partitions)  # until ``ended``: the second end may be interrupted, too
        return by_topic(partitions), bool(self._committed)

    def forget(self) -> None:
        """Forget it: its partitions are gone."""
        self._partitions, self.is_shaken = set(), False


def by_topic(partitions: Iterable[WirePartition]) -> dict[str, list[int]]:
    """Sort partitions by topic."""
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(partition)
    return topics


async def until_led(topics: Mapping[str, Sequence[int]], cluster: Cluster) -> None:
    """Wait until a broker leads each of these partitions. Those that are gone are not waited for."""
    # A coordinator leaves the markers for a partition without a leader out (Kafka 4.3.1), and would do so again.
    pauses = Pauses()
    while any(
        -1 in cluster.leaders.get(topic, [])[number : number + 1]
        for topic, numbers in topics.items()
        for number in numbers
    ):
        await pauses.next()
        await cluster.refresh(set(topics))
