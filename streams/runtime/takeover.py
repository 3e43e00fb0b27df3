"""Taking over partitions: fence, barrier, state and offset, start (protocol, section 7), and the look-up of rule R3.

The order is the protocol. Reading the changelog before the barrier would miss a transaction that was still pending;
starting at the group's offset would count twice after a coordinator lost its memory; so neither can be asked for
here.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import anyio
import msgspec

from streams.codecs import RESERVED_KEY_PREFIX
from streams.core.partition import PartitionState
from streams.errors import BrokerUnavailable, OffsetError, Stopped, TransactionFailed
from streams.metrics import OffsetMismatch, TakeOverDone
from streams.records import TYPE_HEADER, Change, IncomingRecord
from streams.runtime.partition_worker import PartitionWorker
from streams.runtime.transaction_pool import OFFSET_KEY, OffsetRecord

if TYPE_CHECKING:
    from streams.runtime.lifecycle import Engine

_log = logging.getLogger(__name__)

STEP_SECONDS = 20.0
"""For one question to the broker; a pending transaction of somebody else ends within its timeout plus the broker's
sweep."""

Range = tuple[int, int]
Receive = Callable[[int, list[IncomingRecord]], None]
Cancelled = Callable[[], bool]


class TakeOvers:
    """Take-overs and look-ups of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._config = engine.config

    async def take_over(self, workers: Collection[PartitionWorker]) -> None:
        """Bring these partitions to work; keeps trying while the broker does not answer. Partitions that are taken away
        meanwhile are left out. Raises ``OffsetError`` and ``TopicError`` when state and log do not fit together."""
        pause = 0.1
        try:
            while waiting := [worker for worker in workers if worker.state is PartitionState.RESTORING]:
                try:
                    await self._once(waiting)
                except (BrokerUnavailable, TransactionFailed) as error:
                    _log.warning("take-over of %s waits for the broker: %s", _names(waiting), error)
                    await anyio.sleep(pause)
                    pause = min(pause * 2, 1.0)
        finally:
            for worker in workers:
                if worker.state not in (PartitionState.ACTIVE, PartitionState.RESTORING):
                    worker.drop_store()

    async def _once(self, workers: list[PartitionWorker]) -> None:
        engine, config, now = self._engine, self._config, self._engine.now
        ask = engine.control.call
        numbers = [worker.partition for worker in workers]
        began = now()
        await engine.slots.wait_all_replaced(config.recovery_timeout_seconds)  # what we left open ourselves is settled
        fenced = await ask(engine.takeover_client.fence_departed, engine.members, now() + STEP_SECONDS)
        if fenced:
            _log.info("ended the open transactions of members that are gone: %s", ", ".join(fenced))
        fenced_at = now()
        group_offsets = await ask(engine.takeover_client.stable_offsets, numbers, now() + STEP_SECONDS)
        changelog = await ask(engine.takeover_client.log_range, config.changelog, numbers, now() + STEP_SECONDS)
        source = await ask(engine.takeover_client.log_range, config.topic, numbers, now() + STEP_SECONDS)
        source_id = await ask(engine.takeover_client.topic_id, config.topic, now() + STEP_SECONDS)
        engine.pool.source_id = source_id
        barrier_at = now()
        restored = await self._restore(workers, changelog)
        for worker in workers:
            if worker.state is not PartitionState.RESTORING:
                continue
            number = worker.partition
            offset = self._start_offset(worker, group_offsets.get(number), source[number], source_id)
            engine.activate(worker, offset)
            if worker.offset_record is None and config.auto_offset_reset == "latest":
                engine.pool.admit(number, offset, -1, [], [])  # the next start must not skip what comes from now on
            engine.measure(
                TakeOverDone(
                    number, offset, restored[number], fenced_at - began, barrier_at - fenced_at, now() - barrier_at
                )
            )

    async def _restore(self, workers: list[PartitionWorker], changelog: Mapping[int, Range]) -> dict[int, int]:
        """Fill the stores up to the high watermarks; returns the number of records read per partition."""
        by_number = {worker.partition: worker for worker in workers}
        counts = dict.fromkeys(by_number, 0)
        ranges: dict[int, Range] = {}
        for number, worker in by_number.items():
            start, end = changelog[number]
            if worker.restored_to is not None:
                start = worker.restored_to  # an attempt before this one came so far
            if start < end:
                ranges[number] = (start, end)
        if not ranges:
            return counts

        def receive(number: int, records: list[IncomingRecord]) -> None:
            worker = by_number[number]
            if worker.state is PartitionState.RESTORING:
                counts[number] += len(records)
                apply(worker, records)

        def cancelled() -> bool:
            return all(worker.state is not PartitionState.RESTORING for worker in workers)

        with contextlib.suppress(Stopped):  # all of them were taken away: the caller sees it by their states
            await self._read(ranges, receive, cancelled)
        return counts

    async def _read(self, ranges: Mapping[int, Range], receive: Receive, cancelled: Cancelled) -> None:
        worker = self._engine.connections.worker("kes-restore")
        connections, topic = self._engine.connections, self._config.changelog

        def read() -> None:
            reader = connections.reader()
            try:
                reader.read(topic, ranges, receive, stalled_after_seconds=STEP_SECONDS, cancelled=cancelled)
            finally:
                reader.close()

        try:
            await worker.call(read)
        finally:
            worker.abandon()

    def _start_offset(self, worker: PartitionWorker, group_offset: int | None, source: Range, source_id: str) -> int:
        """Where the partition goes on: at the changelog's offset; a new one by ``auto_offset_reset``."""
        config, tp, record = self._config, worker.topic_partition, worker.offset_record
        low, high = source
        if record is None:
            if group_offset is not None:
                raise OffsetError(
                    f"{tp}: the group {config.group_id} has committed offset {group_offset}, but the changelog "
                    f"{config.changelog}[{worker.partition}] holds no offset: the changelog was deleted, or "
                    "another program "
                    "uses the group. Restore the changelog, or delete the group's offsets to begin anew"
                )
            if config.auto_offset_reset == "error":
                raise OffsetError(f"{tp}: no offset is committed, and auto_offset_reset is 'error'")
            if worker.started_at is None:
                worker.started_at = low if config.auto_offset_reset == "earliest" else high
            return worker.started_at
        if record.source_id and source_id and record.source_id != source_id:
            raise OffsetError(
                f"{tp}: the topic was deleted and created again since offset {record.offset} was committed (id "
                f"{record.source_id}, now {source_id}). Delete the changelog {config.changelog} and the "
                "group's offsets to "
                "begin anew with the new topic"
            )
        if not low <= record.offset <= high:
            lost = f"records {record.offset} to {low - 1} are gone" if record.offset < low else f"it ends at {high}"
            raise OffsetError(
                f"{tp}: the state in {config.changelog}[{worker.partition}] goes on at offset "
                f"{record.offset}, but {lost} "
                f"(log start {low}, end {high}). Restore the topic, or delete the changelog and the group's "
                "offsets to begin "
                "anew"
            )
        if group_offset != record.offset:
            self._engine.measure(
                OffsetMismatch(worker.partition, -1 if group_offset is None else group_offset, record.offset)
            )
            _log.warning(
                "%s: the group's committed offset is %s, the changelog's %d; the changelog is right (a "
                "coordinator that lost "
                "its memory, expired offsets, or an offset reset by hand, which has no effect on a source with state)",
                tp,
                "missing" if group_offset is None else group_offset,
                record.offset,
            )
        return record.offset

    async def look_up(self, partition: int, serial: int) -> bool:
        """Whether the changelog says that this transaction of ours is committed (rule R3). Keeps trying while the
        broker does not answer, up to ``recovery_timeout_seconds``."""
        engine, config = self._engine, self._config
        deadline = engine.now() + config.recovery_timeout_seconds
        while True:
            try:
                return await self._look_up_once(partition, serial)
            except BrokerUnavailable as error:
                if engine.now() > deadline:
                    raise
                _log.warning("the look-up of transaction %d waits for the broker: %s", serial, error)
                await anyio.sleep(0.2)

    async def _look_up_once(self, partition: int, serial: int) -> bool:
        engine = self._engine
        answer = await engine.control.call(
            engine.takeover_client.log_range, self._config.changelog, [partition], engine.now() + STEP_SECONDS
        )
        low, high = answer[partition]
        window = 2 * self._config.pool.max_batch_size + 1_000
        while True:
            start = max(low, high - window)
            last = await self._last_offset_record(partition, start, high, serial)
            if last is not None:
                return self._is_ours(last, serial)
            if start == low:
                return False
            window *= 8

    def _is_ours(self, record: OffsetRecord, serial: int) -> bool:
        return record.writer == self._engine.writer and record.serial >= serial

    async def _last_offset_record(self, partition: int, start: int, end: int, serial: int) -> OffsetRecord | None:
        """The last one in this range, or the first that answers the question: what comes after it may belong to an open
        transaction of the next owner, who may be waiting for us."""
        found: list[OffsetRecord] = []

        def receive(_: int, records: list[IncomingRecord]) -> None:
            found.extend(decode_offset(record) for record in records if record.key == OFFSET_KEY and record.value)

        if start < end:
            with contextlib.suppress(Stopped):
                await self._read(
                    {partition: (start, end)}, receive, lambda: any(self._is_ours(record, serial) for record in found)
                )
        ours = next((record for record in found if self._is_ours(record, serial)), None)
        return ours or (found[-1] if found else None)


def apply(worker: PartitionWorker, records: list[IncomingRecord]) -> None:
    """Put changelog records into a store that is being restored. On the restoring thread, which owns the store until
    then."""
    receive = worker.store.receive_change
    for record in records:
        key = record.key
        if key is None:
            _log.warning("%s: a record without key does not belong into a changelog; it is ignored", record.where)
        elif not key.startswith(RESERVED_KEY_PREFIX):
            kind = record.header(TYPE_HEADER) if record.headers else None
            receive(Change(key, record.value, None, kind.decode() if kind else ""))
        elif key == OFFSET_KEY and record.value is not None:
            worker.offset_record = decode_offset(record)
    worker.restored_to = records[-1].offset + 1


def decode_offset(record: IncomingRecord) -> OffsetRecord:
    """The offset record in this changelog record. Raises ``OffsetError`` if it is not one."""
    try:
        return msgspec.json.decode(record.value or b"", type=OffsetRecord)
    except msgspec.DecodeError as error:
        raise OffsetError(
            f"{record.where}: the offset record cannot be read ({error}): something else writes to the "
            "changelog, or a newer "
            "version of this package does"
        ) from error


def _names(workers: Collection[PartitionWorker]) -> str:
    return ", ".join(str(worker.topic_partition) for worker in workers)
