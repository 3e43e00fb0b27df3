"""Rows of joined tables that were deleted while no member read, and whose tombstones are gone.

A topic keeps a tombstone for ``delete.retention.ms``. A partition that reads on later than that (all members were
stopped, or the join was taken away) may never see it, and would keep the row for good. So where a table's log goes on
with records that old, its keys are read, and rows whose keys it has no more are deleted by tombstones of our own.

Compaction leaves a hole where a tombstone was, and that is behind the position of the rows: there is a hole for each of
them, and they take the first ones. To the engine they are records that were read there. So the position moves with
them, and what a crash leaves is found again at the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from typing import Final

from streams.core.checkpoints import MARGIN_MS
from streams.core.partition import PartitionState
from streams.errors import Stopped
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.keeping.shelf import tombstones_ms_of
from streams.runtime.member import Member
from streams.runtime.partition.worker import PartitionWorker
from streams.topics import InputSpec

_log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 20.0

Range = tuple[int, int]
Receive = Callable[[int, list[IncomingRecord]], None]
Read = Callable[[str, Mapping[int, Range], Receive, Callable[[], bool]], Awaitable[None]]


class MissedDeletions:
    """Finds them. On the loop; ``read`` reads ranges of a topic on a thread, and raises as ``ports.Reader.read``."""

    def __init__(self, member: Member, read: Read) -> None:
        self._member = member
        self._read = read
        self._lives_ms: dict[str, int] = {}

    async def look(self, worker: PartitionWorker, positions: Sequence[int], logs: Sequence[Range]) -> None:
        """Have the rows of a partition that does not work yet deleted before any event. ``positions`` and ``logs``
        (start and end) of its further inputs. Raises ``BrokerUnavailable``, also while an open transaction holds the
        end of a table's log back."""
        member = self._member
        for place, ((spec, _), position, log) in enumerate(zip(member.further_inputs, positions, logs, strict=True), 1):
            if spec.table is not None and position < log[1]:

                def keys(topic: str = spec.topic) -> set[bytes]:
                    is_here = worker.state is PartitionState.RESTORING  # else its rows are revoked
                    return worker.joined.tables[topic].row_keys() if is_here else set()

                if missed := await self._find(spec, worker.partition, position, log, keys):
                    worker.miss(place, missed, log[1])

    async def _find(
        self, spec: InputSpec, partition: int, position: int, log: Range, keys: Callable[[], set[bytes]]
    ) -> list[IncomingRecord]:
        """Return tombstones for those rows that the table has no more, each at an offset without a record."""
        member, topic, (low, high) = self._member, spec.topic, log
        call, client = member.control.call, member.takeover_client
        where, life_ms = TopicPartition(topic, partition), await self._life_ms(topic)
        since = member.wall_ms() - (life_ms - MARGIN_MS)
        if life_ms <= MARGIN_MS:  # no reader can be sure to see a tombstone
            return []
        young = await call(client.offset_of_time, topic, partition, since, self._deadline())
        if position >= (high if young is None else young) or not (left := keys()):
            return []
        if low > 0:  # so keys may be missing that were not deleted
            _log.warning(
                "%s: the log goes on at offset %d with records that are older than its tombstones live "
                "(delete.retention.ms %d), and starts at %d, not at 0: rows that were deleted meanwhile look like "
                "those whose records were deleted, and are kept",
                where, position, life_ms, low,
            )  # fmt: skip
            return []
        _log.info("%s: reads all keys, because tombstones behind offset %d may be gone", where, position)
        present = set[int]()

        def receive(_: int, records: list[IncomingRecord]) -> None:
            for record in records:
                left.discard(record.key or b"")
                if record.offset >= position:
                    present.add(record.offset)

        # A key may have moved behind `high` before the place where it was had its turn: so the rest is read, too.
        for start, end in ((low, high), (high, None)):
            if end is None:
                end = (await call(client.log_range, topic, [partition], self._deadline()))[partition][1]
            try:
                await self._read(topic, {partition: (start, end)}, receive, lambda: not left)
            except Stopped:
                if left:
                    raise
        holes = (offset for offset in range(position, high) if offset not in present)
        found = [
            IncomingRecord(topic, partition, offset, key, None, None, since)
            for key, offset in zip(sorted(left), holes, strict=False)
        ]
        if left:
            _log.warning(
                "%s: %d rows were deleted while no member read, and their tombstones are gone (delete.retention.ms "
                "%d): they are deleted now", where, len(found), life_ms,
            )  # fmt: skip
        return spec.received(found)

    async def _life_ms(self, topic: str) -> int:
        if topic not in self._lives_ms:

            def ask() -> int:
                with closing(self._member.connections.topics()) as topics:
                    return tombstones_ms_of(topics, topic, REQUEST_SECONDS)

            self._lives_ms[topic] = await self._member.control.call(ask)
        return self._lives_ms[topic]

    def _deadline(self) -> float:
        return self._member.now() + REQUEST_SECONDS
