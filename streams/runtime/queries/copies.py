"""Reads of warm copies, with a proof of how old they are at most.

The proof is that a copy has read up to an end of its changelog that was requested less than ``max_staleness`` ago. It
is the high watermark, not the last stable offset: the markers of a commit that was acknowledged may not be written yet.
The end counts for the topic whose id was read after it: a changelog that was deleted and made again ends elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from streams.core.parking import queue_name
from streams.errors import BrokerUnavailable
from streams.model.answers import Answer
from streams.records import TopicPartition
from streams.runtime.changelog import OffsetRecord
from streams.runtime.engine import Engine
from streams.runtime.ports import Blocking

SECONDS_BETWEEN_QUESTIONS: Final = 0.5
"""The ends are requested every so many seconds while reads want them."""
_LONGEST_QUESTION: Final = 5.0
"""One such request takes so many seconds, at most."""


class CopyReads:
    """The reads of one member's copies. On the loop."""

    def __init__(self, engine: Engine, topics: tuple[str, ...]) -> None:
        self._engine, self._topics = engine, topics
        self._ends: dict[int, tuple[float, int, str]] = {}
        """By partition: when it was requested, the end of its changelog, and the topic's id."""
        self._asking: asyncio.Task[None] | None = None
        self._thread: Blocking | None = None

    async def read(
        self,
        partition: int,
        read: Callable[[Any], Any],
        key: bytes | None,
        least: Mapping[TopicPartition, int],
        max_staleness: float,
    ) -> Answer[Any] | None:
        """Read a copy of the partition, and whether the key of records is parked there; or wait for a moment and return
        ``None``: it is not here, or not far enough."""
        replicas, environment = self._engine.replicas, self._engine.environment
        if replicas.position(partition) < 0:
            await asyncio.sleep(0.01)
            return None
        requested, end, topic_id = self._ends.get(partition, (float("-inf"), -1, ""))
        age = environment.elapsed_seconds() - requested
        if age > max_staleness:
            await self._renew(partition, min(SECONDS_BETWEEN_QUESTIONS, max_staleness / 2))
            return None
        found = replicas.read(
            partition, end, lambda copy: (read(copy.store), key is not None and queue_name(key) in copy.timers)
        )
        if found is not None:
            record, (value, is_parked) = found
            positions = self._positions(partition, record)
            # A record of an older version names no topic.
            is_same = record is None or record.changelog_id in ("", topic_id)
            if is_same and all(positions.get(where, -1) >= offset for where, offset in least.items()):
                # The clock once more, after the read: the process may have stood still before it.
                age = environment.elapsed_seconds() - requested
                if age > max_staleness:
                    return None
                as_of = environment.wall_seconds() - age
                return Answer(value, partition, positions, as_of, self._engine.config.instance_id, is_parked)
        if age > min(SECONDS_BETWEEN_QUESTIONS, max_staleness / 2):
            self._ask(partition)
        await asyncio.sleep(0.005)
        return None

    def _positions(self, partition: int, record: OffsetRecord | None) -> dict[TopicPartition, int]:
        if record is None:
            return {}
        found = {TopicPartition(self._topics[0], partition): record.offset}
        for topic in self._topics[1:]:
            at = record.position_in(topic, partition)
            if at is not None:
                found[TopicPartition(topic, partition)] = at[0]
        return found

    async def _renew(self, partition: int, pause: float) -> None:
        """Wait for a question, which begins now if the last one is long enough ago."""
        before = self._ends.get(partition)
        if before is not None and (left := before[0] + pause - self._engine.environment.elapsed_seconds()) > 0:
            await asyncio.sleep(left)
        # The question is shielded, because other reads wait for it, too.
        await asyncio.shield(self._ask(partition))

    def _ask(self, partition: int) -> asyncio.Task[None]:
        """Have the ends requested of all copies at once, unless that is under way for this one."""
        if self._asking is None or self._asking.done():
            wanted = sorted({partition, *self._engine.replicas.standing()})
            self._asking = asyncio.create_task(self._request(wanted))
        return self._asking

    async def _request(self, partitions: list[int]) -> None:
        engine = self._engine
        if self._thread is None:
            self._thread = engine.thread("kes-copies")
        # The time is taken before the request: what is committed behind the answer is younger.
        requested = engine.environment.elapsed_seconds()
        try:
            ranges, topic_id = await self._thread.call(self._look_up, partitions, engine.now() + _LONGEST_QUESTION)
        except BrokerUnavailable:
            await asyncio.sleep(SECONDS_BETWEEN_QUESTIONS)
            return
        for partition, (_, end) in ranges.items():
            self._ends[partition] = requested, end, topic_id

    def _look_up(self, partitions: list[int], deadline: float) -> tuple[Mapping[int, tuple[int, int]], str]:
        """Return the ranges of the changelog, and its id. On the thread of the questions."""
        client, changelog = self._engine.takeover_client, self._engine.config.changelog
        ranges = client.log_range(changelog, partitions, deadline)
        return ranges, client.identity(changelog, deadline).topic_id  # after them: ids do not come back
