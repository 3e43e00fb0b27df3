"""Take over partitions: fence, barrier, state and offset, start (protocol, section 7); and the look-up of rule R3.

The order is the protocol. Reading the changelog before the barrier would miss a transaction that was still pending;
starting at the group's offset would count twice after a coordinator lost its memory; so neither is possible here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import anyio
import msgspec

from streams.core.position import Position, offsets_of, position_of
from streams.core.transaction import Cut, Transaction
from streams.errors import BrokerUnavailable, OffsetError, Stopped, TopicError, TransactionFailed
from streams.metrics import OffsetMismatch, TakeOverDone
from streams.model.group import TakeOver
from streams.records import IncomingRecord, TopicPartition
from streams.runtime.changelog import OFFSET_KEY, OffsetRecord, ReleaseMarker, TopicIds, decode_offset
from streams.runtime.member import Member
from streams.runtime.ownership.blocked import BlockedEvents
from streams.runtime.ownership.missed_deletions import Missed, MissedDeletions, Range, Receive, is_restoring
from streams.runtime.ownership.partitions import Partitions
from streams.runtime.ownership.replica import Replica
from streams.runtime.ownership.replicas import Replicas
from streams.runtime.ownership.stalls import Stalls
from streams.runtime.ownership.topic_watch import TopicWatch, refuse_replaced, refuse_replaced_input
from streams.runtime.partition.worker import PartitionWorker
from streams.runtime.ports import SourceLog
from streams.runtime.reading.log_follower import FROM_START

_log = logging.getLogger(__name__)

STEP_SECONDS = 20.0
"""For one request to the broker; a pending transaction of another member ends within its timeout plus the broker's
sweep."""

STALLED_SECONDS = 5.0
"""Without any progress of barrier or restore for so long all requests are made again, the fence included."""

CHANGES_TOGETHER = 1_000
"""Changes of a start that are admitted as one, which no transaction cuts."""

Cancelled = Callable[[], bool]


class InputStand(NamedTuple):
    """The broker's answers about one input of a partition."""

    topic: str
    topic_id: str
    group_offset: int | None
    range: Range


class TakeOvers:
    """Take-overs and look-ups of one member. On the loop."""

    def __init__(self, member: Member, partitions: Partitions, replicas: Replicas, topic_watch: TopicWatch) -> None:
        self._member = member
        self._partitions = partitions
        self._replicas = replicas
        self._topic_watch = topic_watch
        self._config = member.config
        self._source = member.thread("kes-source")
        self._stalls = Stalls(member)
        self.blocked = BlockedEvents(member)
        self._missed = MissedDeletions(member, replicas, self._read)

    async def take_over(self, workers: Collection[PartitionWorker]) -> None:
        """Bring these partitions to work; keeps trying while the broker does not answer. Partitions that are taken away
        meanwhile are left out. Raises ``OffsetError`` and ``TopicError`` when state and log do not fit together."""
        pause = 0.1
        held = [worker.partition for worker in workers]
        try:
            while waiting := [worker for worker in workers if is_restoring(worker)]:
                for worker in waiting:
                    self._replicas.hold(worker.partition)  # read during the requests; the end is known after them
                try:
                    await self._once(waiting)
                except (BrokerUnavailable, TransactionFailed) as error:
                    names = ", ".join(str(worker.topic_partition) for worker in waiting)
                    _log.warning("take-over of %s waits for the broker: %s", names, error)
                    await anyio.sleep(pause)
                    pause = min(pause * 2, 1.0)
        except (OffsetError, TopicError):
            # If the topic was replaced, that is the error: nothing of the other partitions is drained into it then.
            await self._topic_watch.look()
            raise
        finally:
            for partition in held:
                if self._member.workers.get(partition) is None:
                    self._replicas.unhold(partition)

    async def _once(self, workers: list[PartitionWorker]) -> None:
        member, config, now = self._member, self._config, self._member.now
        call = member.control.call
        numbers = [worker.partition for worker in workers]
        began = now()
        # Our own open transactions are settled first.
        await member.slots.wait_all_replaced(config.timeouts.recovery_timeout_seconds)
        fenced = await call(member.takeover_client.fence_departed, member.members, now() + STEP_SECONDS)
        if fenced:
            _log.info("ended the open transactions of members that are gone: %s", ", ".join(fenced))
        fenced_at = now()
        await member.lookups.wait_stable()  # behind the fence: members that are gone cannot look into more
        topics = [config.topic, *self._partitions.further_topics]
        group_offsets = [await self._group_offsets(numbers, topic) for topic in ("", *topics[1:])]
        changelog, changelog_id = await self._changelog_range(numbers)
        logs = [await self._source_range(numbers, topic) for topic in topics]
        ids = TopicIds(logs[0][1], changelog_id)
        barrier_at = now()
        waiting = {worker.partition: worker for worker in workers}
        missed: dict[int, Missed] = {}
        last, moved_at = None, barrier_at
        while True:
            failure: BrokerUnavailable | None = None
            for number, worker in list(waiting.items()):
                high = changelog[number][1]
                if not is_restoring(worker):
                    del waiting[number]  # taken away meanwhile
                elif self._replicas.reaches(number, _goal(changelog[number])):
                    found = [
                        InputStand(topic, topic_id, offsets.get(number), log[number])
                        for topic, offsets, (log, topic_id) in zip(topics, group_offsets, logs, strict=True)
                    ]
                    alone = True
                    if self._looks_lost(number, found):
                        # A member that worked on while we stood still may be why.
                        again = await call(
                            member.takeover_client.log_range, config.changelog, [number], now() + STEP_SECONDS
                        )
                        alone = again[number][1] == high
                        if not is_restoring(worker):
                            del waiting[number]
                            continue
                    if not await self._lookups_reach(worker, _goal(changelog[number])):
                        del waiting[number]
                        continue
                    if number not in missed:
                        stands = {one.topic: (one.topic_id, one.range) for one in found}
                        try:
                            missed[number] = await self._missed.find(worker, _goal(changelog[number]), stands)
                        except BrokerUnavailable as error:  # the others do not wait for that
                            failure = error
                            continue
                        if not is_restoring(worker):
                            del waiting[number]
                            continue
                    if not alone or not member.is_current:
                        raise BrokerUnavailable(f"another member works on {worker.topic_partition}; asking again")
                    copy = self._start(worker, found, changelog[number], ids, missed[number])
                    if copy is None:
                        continue
                    del waiting[number]
                    times = fenced_at - began, barrier_at - fenced_at, now() - barrier_at
                    self._partitions.restored[number] = copy.records, now() - began
                    member.measure(TakeOverDone(number, worker.watermark, copy.records, *times, copy.warm))
            if failure is not None:
                raise failure
            if not waiting:
                return
            stand = [self._replicas.position(number) for number in waiting]
            if stand != last:
                last, moved_at = stand, now()
            elif now() - moved_at > STALLED_SECONDS:
                # A member that is gone may have begun a transaction after the fence.
                await self._stalls.look(dict(zip(waiting, stand, strict=True)), moved_at)
                raise BrokerUnavailable(f"restoring makes no progress: {self._stand(waiting, changelog)}")
            await self._replicas.changed.wait(STALLED_SECONDS)

    # In this order. A member that was frozen may make these requests while another one works in its place: what is
    # looked up later has only gone further, and does not look lost. Two things look lost all the same (`_looks_lost`):
    # an offset record that compaction has taken for a newer one, and records of the loop, or of an input with a
    # retention, that are deleted up to a newer position.

    async def _group_offsets(self, numbers: list[int], topic: str) -> dict[int, int | None]:
        client, named = self._member.takeover_client, (topic,) if topic else ()
        # A pending commit that does not end may be one whose fence was missed: no longer than a restore may stall.
        deadline = self._member.now() + STALLED_SECONDS
        ask = client.stable_offsets if named else self.blocked.behind(client.stable_offsets)
        return await self._member.control.call(ask, numbers, deadline, *named)

    async def _changelog_range(self, numbers: list[int]) -> tuple[dict[int, Range], str]:
        member, changelog = self._member, self._config.changelog
        deadline = member.now() + STEP_SECONDS
        return await member.control.call(_identified_range, member.takeover_client, changelog, numbers, deadline)

    async def _source_range(self, numbers: list[int], topic: str) -> tuple[dict[int, Range], str]:
        member = self._member
        deadline = member.now() + STEP_SECONDS
        return await self._source.call(_identified_range, member.source_log, topic, numbers, deadline)

    def _looks_lost(self, number: int, found: Sequence[InputStand]) -> bool:
        """Check whether the state that was read has no offset, or one whose records are deleted."""
        record = self._replicas.offset_record(number)
        if record is None:
            return found[0].group_offset is not None
        further = [record.position_in(one.topic, number) for one in found[1:]]
        offsets = record.offset, *[None if at is None else at[0] for at in further]
        return any(at is not None and at < one.range[0] for at, one in zip(offsets, found, strict=True))

    async def _lookups_reach(self, worker: PartitionWorker, goal: int) -> bool:
        """Wait for lookups that are not as far as the handlers of a restored partition have looked. ``False``: the
        partition was taken away meanwhile."""
        lookups, found = self._member.lookups, self._replicas.look(worker.partition, goal, lambda copy: None)
        if found is None or lookups.reach(found[0]):
            return True
        await lookups.wait_for(found[0], worker.topic_partition)
        return is_restoring(worker)

    def _start(
        self, worker: PartitionWorker, found: Sequence[InputStand], changelog: Range, ids: TopicIds, missed: Missed
    ) -> Replica | None:
        """Take a complete copy to work on; ``found`` of its inputs, the source's own topic first; ``missed`` by its
        joined tables. ``None``: it began anew, or the tail is putting records into it."""
        member, number = self._member, worker.partition
        lookups = member.lookups
        copy = self._replicas.take(number, lambda copy: _fits(copy, changelog) and lookups.reach(copy.offset_record))
        if copy is None:
            if self._replicas.written_at(number) >= changelog[1]:
                raise BrokerUnavailable(f"another member works on {worker.topic_partition}; asking again")
            if self._replicas.failure(number) is not None:
                raise BrokerUnavailable(f"the state of {worker.topic_partition} cannot be read on; asking again")
            return None
        self._report_trimmed(copy, changelog)
        worker.adopt(copy)
        position = self._start_position(worker, found, ids)
        worker.ids, worker.input_ids = ids, tuple(one.topic_id for one in found[1:])
        self.blocked.meet(worker)
        self._partitions.activate(worker, position)
        record, begun = worker.offset_record, worker.joined.begun() + self._missed.delete(worker, missed)
        if begun or (
            self._config.auto_offset_reset == "latest"
            if record is None
            else None in [record.position_in(one.topic, number) for one in found[1:]]
        ):
            # The next start must not skip records from now on.
            for start in range(0, len(begun) or 1, CHANGES_TOGETHER):
                member.pool.admit(number, worker.watermark, [], begun[start : start + CHANGES_TOGETHER])
        return copy

    def _report_trimmed(self, copy: Replica, changelog: Range) -> None:
        """Warn of a copy that was read from the log's start, if that is not 0. Compaction alone leaves it at 0: records
        were deleted. No error, since the state may be complete, and no command could accept it."""
        low, high = changelog
        if low > 0 and copy.start == FROM_START:
            _log.warning(
                "%s[%d]: the log starts at %d (end %d): records below it were deleted (DeleteRecords, or a "
                "cleanup.policy with delete), and keys that were written only there may be missing from the "
                "state. Restore the topic from a backup, or delete the changelog and the group's offsets to start over",
                self._config.changelog,
                copy.partition,
                low,
                high,
            )

    def _start_position(self, worker: PartitionWorker, found: Sequence[InputStand], ids: TopicIds) -> Position:
        """Return where the partition goes on, in all its inputs."""
        record, number = worker.offset_record, worker.partition
        if record is None:
            return position_of([self._start_offset(worker, one, None) for one in found])
        refuse_replaced(self._config, number, record.ids, ids)
        offsets = [self._start_offset(worker, found[0], record.offset)]
        for one in found[1:]:
            known = record.position_in(one.topic, number)
            if known is not None:
                refuse_replaced_input(self._config, one.topic, number, known[1], one.topic_id)
            offsets.append(self._start_offset(worker, one, None if known is None else known[0]))
        return position_of(offsets)

    def _stand(self, waiting: Collection[int], changelog: Mapping[int, Range]) -> str:
        copies = self._replicas
        stands = [f"[{number}] at {copies.position(number)} of {changelog[number][1]}" for number in sorted(waiting)]
        return ", ".join(stands[:5]) + (f" and {len(stands) - 5} more" if len(stands) > 5 else "")

    async def _read(self, topic: str, ranges: Mapping[int, Range], receive: Receive, cancelled: Cancelled) -> None:
        worker = self._member.connections.worker("kes-look-up")
        connections = self._member.connections
        unwanted = False  # no take-over waits for it any more

        def read() -> None:
            reader = connections.reader()
            try:
                reader.read(
                    topic,
                    ranges,
                    receive,
                    stalled_after_seconds=STEP_SECONDS,
                    cancelled=lambda: unwanted or cancelled(),
                )
            finally:
                reader.close()

        try:
            await worker.call(read)
        except asyncio.CancelledError:
            unwanted = True
            self._member.hung_calls.abandon(worker, f"look-up in {topic}")
            raise
        except BaseException:
            worker.abandon()
            raise
        worker.abandon()

    def _start_offset(self, worker: PartitionWorker, found: InputStand, known: int | None) -> int:
        """Return the offset where the partition goes on in an input: ``known`` from the changelog; for a new one by
        ``auto_offset_reset``."""
        config, tp = self._config, TopicPartition(found.topic, worker.partition)
        group_offset, (low, high) = found.group_offset, found.range
        if known is None:
            if group_offset is not None:
                lost, then = "the changelog was deleted, or another program uses the group", ""
                if worker.offset_record is not None:
                    lost = "a release that knows one input only was at work, or another program uses the group"
                    then = f" with it, by auto_offset_reset={config.auto_offset_reset!r}: the state stays as it is"
                raise OffsetError(
                    f"{tp}: the group {config.group_id} has committed offset {group_offset}, but the changelog "
                    f"{config.changelog}[{worker.partition}] holds no offset of {found.topic}: {lost}. Restore the "
                    f"changelog, or delete the group's offsets of {found.topic} to start over{then}"
                )
            is_own = found.topic in config.own_inputs  # others may have sent to it already
            if is_own or worker.joined.begin(found.topic, low, high):
                return low
            if config.auto_offset_reset == "error":
                raise OffsetError(f"{tp}: no offset is committed, and auto_offset_reset is 'error'")
            return worker.started_at.setdefault(found.topic, low if config.auto_offset_reset == "earliest" else high)
        if not low <= known <= high:
            lost = f"records {known} to {low - 1} are gone" if known < low else f"it ends at {high}"
            raise OffsetError(
                f"{tp}: the state in {config.changelog}[{worker.partition}] goes on at offset {known}, but "
                f"{lost} (log start {low}, end {high}). Restore the topic, or delete the changelog and the group's "
                "offsets to start over"
            )
        if group_offset is not None and group_offset > known:
            accept = f"run `kes offsets accept MODULE:SOURCE --partition {worker.partition}`"
            raise OffsetError(
                f"{tp}: the group {config.group_id} has committed offset {group_offset}, but the state in "
                f"{config.changelog}[{worker.partition}] goes on at offset {known}: the changelog lost "
                "records, or the group's offset was set by hand. Restore the changelog; or, to have records "
                f"{known} to {group_offset - 1} handled again (their outputs appear a second time), stop all "
                f"members and {accept}"
            )
        if group_offset != known:
            self._member.measure(OffsetMismatch(worker.partition, -1 if group_offset is None else group_offset, known))
            _log.warning(
                "%s: the group's committed offset is %s, the changelog's %d; the changelog is right (a coordinator "
                "lost its memory, offsets expired, or an offset was set back by hand, which has no effect on a source "
                "with state)",
                tp,
                "missing" if group_offset is None else group_offset,
                known,
            )
        return known

    async def look_up(self, txn: Transaction) -> bool:
        """Look up in the changelog whether this transaction of ours is committed (rule R3). Keeps trying while the
        broker does not answer, up to ``recovery_timeout_seconds``."""
        member, config = self._member, self._config
        deadline = member.now() + config.timeouts.recovery_timeout_seconds
        # One that was not handed over, if there is any: only this member writes to its changelog.
        partition = min(txn.cuts, key=lambda number: txn.cuts[number].release is not None)
        while True:
            try:
                return await self._look_up_once(partition, txn.cuts[partition], txn.serial)
            except BrokerUnavailable as error:
                if member.now() > deadline:
                    raise
                _log.warning("the look-up of transaction %d waits for the broker: %s", txn.serial, error)
                await self._stalls.look({partition: -1}, member.now())
                await anyio.sleep(0.2)

    async def _look_up_once(self, partition: int, cut: Cut, serial: int) -> bool:
        member = self._member
        answer = await member.control.call(
            member.takeover_client.log_range, self._config.changelog, [partition], member.now() + STEP_SECONDS
        )
        low, high = answer[partition]
        window = 2 * self._config.pool.max_batch_size + member.environment.look_up_records
        while True:
            start = max(low, high - window)
            found = await self._offset_records(partition, start, high, serial)
            if any(self._is_ours(record, serial) for record in found):
                return True
            mine = any(record.writer == member.writer for record in found)
            if mine or (found and cut.release is None):
                return False
            if start == low:
                if not found or cut.release is None:
                    return False
                return _follows(found[-1], cut, cut.release, self._partitions.further_topics, partition)
            window *= 8

    def _is_ours(self, record: OffsetRecord, serial: int) -> bool:
        return record.writer == self._member.writer and record.serial >= serial

    async def _offset_records(self, partition: int, start: int, end: int, serial: int) -> list[OffsetRecord]:
        """Read the offset records in this range, up to the first that decides the look-up: later ones may belong to an
        open transaction of the next owner, which may be waiting for us."""
        found: list[OffsetRecord] = []

        def receive(_: int, records: list[IncomingRecord]) -> None:
            found.extend(decode_offset(record) for record in records if record.key == OFFSET_KEY and record.value)

        if start < end:
            with contextlib.suppress(Stopped):
                await self._read(
                    self._config.changelog,
                    {partition: (start, end)},
                    receive,
                    lambda: any(self._is_ours(record, serial) for record in found),
                )
        return found


def _identified_range(
    questions: TakeOver | SourceLog, topic: str, partitions: Collection[int], deadline: float
) -> tuple[dict[int, Range], str]:
    """Return the ranges of these partitions, and the id of the topic that they belong to. Blocks."""
    before = questions.identity(topic, deadline)
    ranges = questions.log_range(topic, partitions, deadline)
    # Requested before and after: the offsets of a new topic must not pass for those of the old one, nor the reverse.
    after = questions.identity(topic, deadline)
    if before.topic_id != after.topic_id:
        raise BrokerUnavailable(f"topic {topic} was created again between two requests; asking again")
    return ranges, after.topic_id


def _goal(changelog: Range) -> int:
    """Return the position that a copy must have reached."""
    low, high = changelog
    return high if low < high else FROM_START


def _fits(copy: Replica, changelog: Range) -> bool:
    """Check for a copy that has all of the changelog, and nothing that was written after its end was looked up: by a
    member that works in our place."""
    return copy.position >= _goal(changelog) and copy.last < changelog[1]


def _follows(record: OffsetRecord, cut: Cut, release: bytes, further: Sequence[str], partition: int) -> bool:
    """Check whether another member works on from our marker, which compaction took away: then it was committed."""
    marker = msgspec.json.decode(release, type=ReleaseMarker)
    return record.generation >= marker.generation and record.reaches(offsets_of(cut.offset), further, partition)
