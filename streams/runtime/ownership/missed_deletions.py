"""Rows of joined tables that were deleted while no member read, and whose tombstones are gone.

A topic keeps a tombstone for ``delete.retention.ms``. A partition that reads on later than that (all members were
stopped, or the join was taken away) may never see it, and would keep the row for good. So where a table's log goes on
with records that old, all of it is read before the partition works, and rows that it has no more are deleted.

That is not at any offset of the table, so no update handler is called. Where there is one the rows are kept, with a
warning: what it has stored and sent would be of rows that are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Final, TypeVar

from streams.core.checkpoints import MARGIN_MS
from streams.core.partition import PartitionState
from streams.errors import BrokerUnavailable, DiskDamaged, OffsetError, Stopped
from streams.records import Change, IncomingRecord, TopicPartition, shown_key
from streams.runtime.changelog import OffsetRecord
from streams.runtime.keeping.folders.shelf import tombstones_ms_of
from streams.runtime.member import Member
from streams.runtime.ownership.range_reader import Range, Read
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.partition.joined_rows import ROUTE_PREFIX, row_key
from streams.runtime.partition.joining import JoinKind
from streams.runtime.partition.worker import PartitionWorker

_log = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 20.0
"""One request to the broker takes so many seconds, at most."""
SHOWN_KEYS: Final = 5
"""So many of the deleted keys are named in the log."""
KEYS_A_LINE: Final = 50
"""So many of the keys that need a tombstone are named in one line of the log."""

T = TypeVar("T")
Missed = dict[str, set[bytes]]
"""Topics of joined tables, and the keys of their rows that are to be deleted."""


class MissedDeletions:
    """Finds and deletes such rows. On the loop."""

    def __init__(self, member: Member, replicas: Replicas, read: Read) -> None:
        self._member = member
        self._replicas = replicas
        self._read = read
        self._lives_ms: dict[str, int] = {}
        self._complete: dict[TopicPartition, tuple[str, int, int]] = {}
        """Where no row was missed: the topic's id, the position, and up to where tombstones may be gone."""

    async def find(self, worker: PartitionWorker, goal: int, stands: Mapping[str, tuple[str, Range]]) -> Missed:
        """Find the missed deletions of a partition whose copy is complete up to ``goal``. They are void if the
        partition is taken away meanwhile. ``stands``: the id of each input, and its log's start and end. Raises
        ``BrokerUnavailable``."""
        tables = [spec.topic for spec, _ in self._member.further_inputs if spec.table is not None]
        missed: Missed = {}
        for topic in tables:
            where, (topic_id, log) = TopicPartition(topic, worker.partition), stands[topic]
            record, _ = self._read_copy(where, goal, lambda copy: None)
            known = None if record is None else record.position_in(topic, worker.partition)
            if known is None or known[0] >= log[1] - 1:  # the last one is never compacted: its segment is active
                continue
            try:
                missed[topic] = await self._find(worker, where, known[0], goal, log[0], topic_id)
            except OffsetError as error:  # records were deleted meanwhile
                raise BrokerUnavailable(f"{error}; asking again") from error
            except Stopped:
                if is_restoring(worker):
                    raise
                return {}
            if missed[topic] and await self._topic_id(topic) != topic_id:
                raise BrokerUnavailable(f"topic {topic} was created again meanwhile; asking again")
        return missed

    def delete(self, worker: PartitionWorker, missed: Missed) -> list[Change]:
        """Delete these rows in a partition that is about to work. Returns the changes that are to be committed."""
        changes: list[Change] = []
        for topic, keys in missed.items():
            table = worker.joined.tables[topic]
            for key in sorted(keys):
                changes.append(Change(row_key(topic, key), None))
                table.set_row(key, changes[-1])
        return changes

    async def _find(
        self, worker: PartitionWorker, where: TopicPartition, position: int, goal: int, low: int, topic_id: str
    ) -> set[bytes]:
        member, (topic, number) = self._member, where
        call, client = member.control.call, member.takeover_client
        end = await call(client.stable_end, topic, number, self._deadline())
        if topic not in self._lives_ms:
            self._lives_ms[topic] = await call(self._ask_life_ms, topic)
        life_ms = self._lives_ms[topic]
        since = member.wall_ms() - (life_ms - min(MARGIN_MS, life_ms // 2))
        if life_ms <= 0 or since <= 0:  # no reader can be sure, or without end
            return set()
        young = await call(client.offset_of_time, topic, number, since, self._deadline())
        old = min(end, end if young is None else young)  # tombstones from here on live still
        if position >= old or self._complete.get(where) == (topic_id, position, old):
            return set()
        _, rows = self._read_copy(where, goal, lambda copy: copy.joined.tables[topic].row_keys())
        if not rows:
            return rows
        if low > 0:  # so keys may be missing that were not deleted
            _log.warning(
                "%s: the log goes on at offset %d with records that are older than its tombstones live "
                "(delete.retention.ms %d), and starts at %d, not at 0: rows that were deleted meanwhile look like "
                "those whose records were deleted, and are kept",
                where, position, life_ms, low,
            )  # fmt: skip
            return set()
        _log.info("%s: reads all keys, because tombstones behind offset %d may be gone", where, position)
        last: dict[bytes, bool] = {}  # of the keys of rows that the table has: whether nothing is missed

        def receive(_: int, records: list[IncomingRecord]) -> None:
            last.update(
                (record.key, record.value is not None or record.offset >= old)
                for record in records
                if record.key in rows
            )

        # A key may have moved behind the end before the place where it was had its turn: so the rest is read, too.
        await self._read(topic, {number: (low, end)}, receive, lambda: not is_restoring(worker))
        rest = end, await call(client.stable_end, topic, number, self._deadline())
        await self._read(topic, {number: rest}, receive, lambda: not is_restoring(worker))
        missed = rows - {key for key, is_right in last.items() if is_right}
        if not missed:
            self._complete[where] = topic_id, position, old
            return missed
        return self._to_be_deleted(where, missed, life_ms)

    def _to_be_deleted(self, where: TopicPartition, missed: set[bytes], life_ms: int) -> set[bytes]:
        """Warn of rows that are deleted, or would be but for the update handler: of these each key is named."""
        kind = self._member.router.routes[f"{ROUTE_PREFIX}{where.topic}".encode()].kind
        keys = [shown_key(key) for key in sorted(missed)]
        text = (
            "%s: %d rows were deleted while no member read, and their tombstones are gone, or may be before they are "
            "read (delete.retention.ms %d). "
        )
        if not (isinstance(kind, JoinKind) and kind.has_handler):
            shown = ", ".join(keys[:SHOWN_KEYS]) + (" and more" if len(keys) > SHOWN_KEYS else "")
            _log.warning(text + "They are deleted now: %s", where, len(keys), life_ms, shown)
            return missed
        _log.warning(
            text + "They are kept, since the update handler of the table could not be called: send the tombstones of "
            "these keys again", where, len(keys), life_ms,
        )  # fmt: skip
        for start in range(0, len(keys), KEYS_A_LINE):
            _log.warning("%s: send a tombstone for %s", where, ", ".join(keys[start : start + KEYS_A_LINE]))
        return set()

    def _read_copy(
        self, where: TopicPartition, goal: int, read: Callable[[Replica], T]
    ) -> tuple[OffsetRecord | None, T]:
        try:
            found = self._replicas.read(where.partition, goal, read)
        except (DiskDamaged, OSError) as error:  # its folder is set aside, and the copy begins anew
            raise BrokerUnavailable(f"the rows of {where} cannot be read ({error}); reading them again") from error
        if found is None:
            raise BrokerUnavailable(f"the state with the rows of {where} is being read on; asking again")
        return found

    async def _topic_id(self, topic: str) -> str:
        member = self._member
        return (await member.control.call(member.takeover_client.identity, topic, self._deadline())).topic_id

    def _ask_life_ms(self, topic: str) -> int:
        with closing(self._member.connections.topics()) as topics:
            return tombstones_ms_of(topics, topic, REQUEST_SECONDS)

    def _deadline(self) -> float:
        return self._member.now() + REQUEST_SECONDS


def is_restoring(worker: PartitionWorker) -> bool:
    """Check that it is still being taken over: anything may have happened during an await."""
    return worker.state is PartitionState.RESTORING
