"""The transaction pool: admits completed events, and brings transactions to their end, in order.

Three kinds of transactions are unsettled at a time, oldest first: those that commit, those that are being flushed,
and the open one, which is filled: its records are encoded meanwhile. Two tasks move them on: ``_flush_stage`` seals
by the batching rule, and sends records and offsets, of one transaction after the other (rule R2); ``_commit_stage``
commits.

When any call fails both stages stop, and ``recovery`` ends the transactions under way, finds out which are committed
and puts the rest back to be sent again, with the same records (rule R4). Then the stages start afresh. So there is one
way forward and one way back, and nothing in between.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import anyio
import msgspec

from streams.core import batching
from streams.core.position import Position, offsets_of
from streams.core.runs import Run, name_input
from streams.core.transaction import Transaction, TransactionState, Waiter
from streams.errors import TransactionFailed
from streams.kafka.writing.encoded_transaction import EncodedTransaction
from streams.model.group import GroupMetadata
from streams.records import Change, Output
from streams.runtime.changelog import OFFSET_KEY, RELEASE_KEY, OffsetRecord, ReleaseMarker
from streams.runtime.ports import TransactionSlot
from streams.runtime.signal import Broadcast, Signal
from streams.runtime.transactions.producer_slots import Slots
from streams.settings.config import EventSourceConfig

ENCODED_TOGETHER: Final = 64
"""Outputs that are encoded together while a transaction is filled: 30 us. The rest is encoded when it is sealed."""


class TransactionPool:
    """The transaction pool of one run. On the loop. ``admit`` never waits; check ``is_full`` before the next event."""

    def __init__(
        self,
        config: EventSourceConfig,
        slots: Slots,
        encoder: Callable[[], EncodedTransaction],
        *,
        writer: str,
        now: Callable[[], float],
        group_metadata: Callable[[], GroupMetadata],
        further_fields: Callable[[int, Position], tuple[str, str, msgspec.Raw | msgspec.UnsetType]],
        settled: Callable[[Transaction, bool], None],
        further_inputs: Sequence[str] = (),
        moved_to: Callable[[int, int], tuple[int, tuple[int, ...]]] | None = None,
    ) -> None:
        """``further_inputs``, ``moved_to``: of ``MergingPool``."""
        self._config = config
        self.slots = slots
        self._writer = writer
        self._now = now
        self.group_metadata = group_metadata
        self._further_fields = further_fields
        self._settled = settled
        self._further_inputs = further_inputs
        self._moved_to = moved_to
        self.unsettled: deque[Transaction] = deque()
        self._slot_of: dict[int, TransactionSlot] = {}
        self._encoder = encoder
        self._encoded: dict[int, EncodedTransaction] = {}  # of the next attempt to send each
        self._open: Transaction | None = None
        self._serial = 0
        self._encode_at = 0  # the number of the open one's outputs at which they are encoded, as far as they are there
        self._due = False  # whether the flush stage knows that the open one is large enough to be sealed
        self.rule = batching.first(config.pool)
        """The settings, with the bound in bytes that has proved to fit the time, and a delay that fits the commits."""
        self._urgent = False
        self._work = Signal()  # something to seal or send
        self._flushed = Signal()  # something to commit
        self._is_held = False
        self._progress = Broadcast()  # at each settlement: room, barriers
        self._failure: TransactionFailed | None = None
        self._scope = anyio.CancelScope()  # the stages, or the recovery, whichever is running
        self.metadata_used: GroupMetadata | None = None
        self.incarnation = 0

    def muted_records(self) -> dict[str, int]:
        """Return how many records are not sent, because the source is muted, by topic."""
        return {}

    # -- filling -------------------------------------------------------------------------------------------------------

    def admit(
        self,
        partition: int,
        offset: Position,
        outputs: list[Output],
        changes: list[Change],
        waiter: Waiter | None = None,
        events: int = 1,
        runs: Sequence[Run] = (),
    ) -> None:
        """Take in completed events of one partition: so many, in their order. ``offset`` is the position after them;
        outputs and changes know their origins; ``runs``: if the events are of several inputs."""
        txn = self._open
        if txn is None:
            txn = self._begin_filling()
        txn.admit(partition, offset, outputs, changes, events, runs)
        if len(txn.outputs) >= self._encode_at:  # many at a time: a call for each event costs more than its record
            self._encoded_of(txn).fill(txn.outputs)
            self._encode_at = len(txn.outputs) + ENCODED_TOGETHER
        if waiter is not None:
            txn.wait(partition, waiter)
        if txn.events == events:  # the first ones: the delay of the batching rule begins
            self._work.notify()
        elif not self._due and (txn.size >= self.rule.target_batch_size or txn.bytes >= self.rule.max_batch_bytes):
            self._due = True  # once only: when one settles, the flush stage looks again by itself
            self._work.notify()

    def admit_release(self, partition: int, offset: int, marker: ReleaseMarker) -> None:
        """Admit the release marker: the last record of a partition before another member works on it."""
        self.admit(partition, offset, [], [])
        assert self._open is not None
        self._open.cuts[partition].release = msgspec.json.encode(marker)

    @property
    def is_full(self) -> bool:
        """Check whether the open transaction takes no more events, or the intake is held."""
        txn = self._open
        return self._is_held or (txn is not None and batching.is_full(self.rule, size=txn.size, size_bytes=txn.bytes))

    def hold(self, is_held: bool) -> None:
        """Take no further events, or take them again: what is committed waits for a disk."""
        if self._is_held is not is_held:
            self._is_held = is_held
            self._progress.notify()

    async def wait_room(self) -> None:
        """Wait until the open transaction takes events again."""
        while self.is_full:
            await self._progress.wait()

    def last_with(self, partition: int) -> Transaction | None:
        """Return the newest unsettled transaction that has a part of this partition."""
        return next((txn for txn in reversed(self.unsettled) if partition in txn.cuts), None)

    async def wait_settled(self, partition: int) -> None:
        """Run the barrier: seal at once, and wait until nothing of this partition is unsettled."""
        while self.last_with(partition) is not None:
            # At each settlement again: a seal resets it, and the next transaction may have events of it, too.
            self._urgent = True
            self._work.notify()
            await self._progress.wait()

    # -- giving up -----------------------------------------------------------------------------------------------------

    def drop_everything(self, reason: BaseException) -> None:
        """Drop all that is admitted: the membership is lost, and nothing of it may be sent any more (rule R5)."""
        # First: no stage goes on with what is dropped here. One that runs on once meets the state DROPPED.
        self._break(TransactionFailed("membership", "LOST", "lost", str(reason)))
        for txn in self.unsettled:
            self.replace_slot(txn)
            txn.settle(reason)
            self._settled(txn, False)
        self.unsettled.clear()
        self._encoded.clear()
        self._open = None
        self._progress.notify()

    def drop_partition(self, partition: int, reason: BaseException) -> None:
        """Take a partition's events out of everything unsettled. Only while none of it may still be committed."""
        for txn in list(self.unsettled):
            self._encoded.pop(txn.serial, None)
            for waiter in txn.without(partition):
                waiter(reason)
            if not txn.cuts:  # nothing is left of it, and a transaction without offsets has no fence (rule R1)
                self.unsettled.remove(txn)
                txn.settle(reason)
                self._open = None if txn is self._open else self._open
        self._progress.notify()

    # -- running -------------------------------------------------------------------------------------------------------

    async def run(self, recover: Callable[[TransactionFailed], Awaitable[None]]) -> None:
        """Move transactions on until cancelled. ``recover`` is awaited after each failure; an error that it raises ends
        the pool."""
        while True:
            with anyio.CancelScope() as self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._guard, self._flush_stage)
                    tasks.start_soon(self._guard, self._commit_stage)
            if self._failure is not None:
                with anyio.CancelScope() as self._scope:
                    await recover(self._failure)
                self._failure = None
                self._progress.notify()

    async def _guard(self, stage: Callable[[], Awaitable[None]]) -> None:
        try:
            await stage()
        except TransactionFailed as failure:
            self._break(failure)

    def _break(self, failure: TransactionFailed) -> None:
        if self._failure is None:
            self._failure = failure
        self._scope.cancel()

    async def _flush_stage(self) -> None:
        while True:
            txn = await self._next_to_send()
            txn.to(TransactionState.SENDING)
            txn.attempts += 1
            try:
                while txn.serial not in self._slot_of and not self._take_slot(txn):
                    await self.slots.wait_free(self._config.timeouts.recovery_timeout_seconds)
                await self._send(txn)
                if txn.state is not TransactionState.SENDING:
                    continue  # dropped meanwhile
            except TransactionFailed:
                if txn.state is TransactionState.DROPPED:
                    self.replace_slot(txn)  # it may have been given one after it was dropped
                await self._settled_before(txn)  # older ones are not disturbed by the failure of this one
                raise
            txn.to(TransactionState.FLUSHED)
            txn.flushed_at = self._now()
            self._flushed.notify()

    async def _commit_stage(self) -> None:
        while True:
            while not self.unsettled or self.unsettled[0].state is not TransactionState.FLUSHED:
                await self._flushed.wait()
            # The oldest only (R2): if a younger one were committed and this one aborted, the offsets would be behind
            # events whose effects are not there.
            txn = self.unsettled[0]
            txn.to(TransactionState.COMMITTING)
            await self._slot_of[txn.serial].commit(partial(self._request_commit, txn))
            if txn.state is TransactionState.COMMITTING:  # else dropped meanwhile
                self.committed(txn)

    async def _next_to_send(self) -> Transaction:
        while True:
            wait: float | None = None
            for txn in self.unsettled:
                # The oldest first: producers have no order among each other but the one of their acknowledgements (R2).
                if txn.state is TransactionState.SENDABLE:
                    return txn
                if txn is self._open:
                    age = math.inf if self._urgent else self._now() - txn.opened_at
                    verdict = batching.decide(
                        self.rule,
                        size=txn.size,
                        size_bytes=txn.bytes,
                        age_seconds=age,
                        in_flight=len(self.unsettled) - 1,
                    )
                    if verdict is batching.Seal.NOW:
                        self._seal(txn)
                        return txn
                    if verdict is batching.Seal.LATER:
                        wait = (self.rule.batch_delay_seconds or 0) - age
            await self._work.wait(wait)

    def _seal(self, txn: Transaction) -> None:
        txn.seal(self._now())
        self._open = None
        self._urgent = False
        self._progress.notify()  # there is room again

    async def _settled_before(self, txn: Transaction) -> None:
        while self.unsettled and self.unsettled[0] is not txn:
            await self._progress.wait()

    # -- one transaction -----------------------------------------------------------------------------------------------

    def _begin_filling(self) -> Transaction:
        self._serial += 1
        self._due, self._encode_at = False, ENCODED_TOGETHER
        txn = self._open = Transaction(self._serial, self.incarnation, self._now())
        self.unsettled.append(txn)
        return txn

    def _take_slot(self, txn: Transaction) -> bool:
        """Give a transaction a producer; ``False`` if none is free."""
        slot = self.slots.take()
        if slot is not None:
            self._slot_of[txn.serial] = slot
        return slot is not None

    def _encoded_of(self, txn: Transaction) -> EncodedTransaction:
        records = self._encoded.get(txn.serial)
        if records is None:
            records = self._encoded[txn.serial] = self._encoder()
        return records

    async def _send(self, txn: Transaction) -> None:
        """Encode the rest, and send all records and the offsets."""
        records, topic = self._encoded_of(txn), self._config.changelog
        await records.complete(txn.outputs)
        for partition, changes in self._changelog_of(txn):
            await records.add_changes(topic, partition, changes)
        if txn.state is TransactionState.DROPPED:  # its awaited condition was true already: not cancelled in time
            raise TransactionFailed("membership", "LOST", "lost", "dropped while it was being sent")
        await self._slot_of[txn.serial].flush(records, self._offsets_of(txn), partial(self._fence, txn))
        if self._config.metrics_handler is not None:
            txn.sizes = records.sizes()
        if self._config.state.folder:
            ends = records.ends()
            for partition, cut in txn.cuts.items():
                behind = ends.get((topic, partition), -1)
                cut.end = behind - 1 - (cut.release is not None) if behind > 0 else -1

    def _offsets_of(self, txn: Transaction) -> dict[str, dict[int, int]]:
        """Return what the group's offsets become: by topic, and by partition."""
        found: dict[str, dict[int, int]] = {topic: {} for topic in (self._config.offsets_topic, *self._further_inputs)}
        for partition, cut in txn.cuts.items():
            for positions, offset in zip(found.values(), offsets_of(cut.offset), strict=True):
                positions[partition] = offset
        return found

    def _changelog_of(self, txn: Transaction) -> list[tuple[int, list[Change]]]:
        """Return the changes of each partition, with the toolkit's own records behind them."""
        generation = self.group_metadata().generation
        found = []
        for partition, cut in txn.cuts.items():
            fields = self._further_fields(partition, cut.offset)
            record = OffsetRecord(offsets_of(cut.offset)[0], self._writer, txn.serial, generation, *fields)
            cut.record = msgspec.json.encode(record)
            changes = [*cut.changes.values(), Change(OFFSET_KEY, cut.record)]
            if cut.release is not None:  # the last record here: its reader starts with all that is before it
                changes.append(Change(RELEASE_KEY, cut.release))
            found.append((partition, changes))
        return found

    def _fence(self, txn: Transaction) -> GroupMetadata:
        """Return the newest metadata, if the transaction is still ours under it."""
        metadata = self.metadata_used = self.group_metadata()
        # The broker takes new metadata also for partitions that were lost meanwhile: ownership is our duty.
        if metadata.incarnation != txn.incarnation:
            raise TransactionFailed("send_offsets_to_transaction", "LOST", "lost", "the membership changed meanwhile")
        return metadata

    def _request_commit(self, txn: Transaction) -> None:
        """Look again, right before the commit: the membership may have been lost since the offsets were sent."""
        self._fence(txn)
        # Before the request: a commit that is never answered may have happened, and is looked up (R3).
        txn.commit_requested = True

    def committed(self, txn: Transaction) -> None:
        """Settle a transaction that is known to be committed, and is the oldest."""
        assert self.unsettled[0] is txn
        self.unsettled.popleft()
        self._encoded.pop(txn.serial, None)
        self.give_back_slot(txn)
        config = self._config.pool
        self.rule = batching.larger(self.rule, txn.bytes, config.max_batch_bytes)
        self.rule = batching.paced(self.rule, config, self._now() - txn.sealed_at)
        for younger in self.unsettled:
            younger.first_failure_at = None  # it goes on: the limits are for a transaction that does not
        txn.settle(None)
        self._settled(txn, True)
        self._progress.notify()
        self._work.notify()
        self._flushed.notify()

    def taken_back(self, txn: Transaction) -> None:
        """Take back a transaction that is known not to be committed: its records are encoded and sent again."""
        self._encoded.pop(txn.serial, None)
        if txn.state is not TransactionState.DROPPED:  # else the membership was lost meanwhile
            txn.taken_back(self._now())

    def cut(self, head: Transaction) -> None:
        """Cut the oldest transaction, which did not fit its time; like all others it is with no producer. It, and those
        that are sealed behind it, go in parts from now on, and new ones are smaller."""
        if head.bytes > batching.LEAST_BYTES:  # so few bytes are not too many: the broker is away
            self.rule = batching.smaller(self.rule, head.bytes)
        whole, most = list(self.unsettled), self.rule.max_batch_bytes
        self.unsettled.clear()
        for txn in whole:
            if txn.state is TransactionState.SENDABLE:
                self.unsettled += txn.cut(min(head.bytes // 2, most) if txn is head else most)
            else:
                self.unsettled.append(txn)
        self._encoded.clear()
        for txn in self.unsettled:  # serials are the order, also in a look-up
            self._serial += 1
            txn.serial = self._serial

    def slot_of(self, txn: Transaction) -> TransactionSlot | None:
        """Return the slot of a transaction, if any."""
        return self._slot_of.get(txn.serial)

    def give_back_slot(self, txn: Transaction) -> None:
        """Give back the slot of a transaction that has ended, if it has one."""
        slot = self._slot_of.pop(txn.serial, None)
        if slot is not None:
            self.slots.give_back(slot)

    def replace_slot(self, txn: Transaction) -> TransactionSlot | None:
        """Take the slot of a transaction away, if it has one, and have it opened again: that settles the
        transaction."""
        slot = self._slot_of.pop(txn.serial, None)
        if slot is not None:
            self.slots.replace(slot)
        return slot


class MergingPool(TransactionPool):
    """The pool of a source with several inputs. What is admitted is of the input that has its turn in the partition:
    origins name that, and the position is that of all inputs. ``moved_to(partition, offset)``: see ``MergedInputs``."""

    def admit(
        self,
        partition: int,
        offset: Position,
        outputs: list[Output],
        changes: list[Change],
        waiter: Waiter | None = None,
        events: int = 1,
        runs: Sequence[Run] = (),
    ) -> None:
        """See ``TransactionPool.admit``; without ``runs`` the events, and ``offset``, are of the input that has its
        turn."""
        if runs:
            super().admit(partition, offset, outputs, changes, waiter, events, runs)
            return
        assert self._moved_to is not None
        input_number, position = self._moved_to(partition, offsets_of(offset)[0])
        name_input(input_number, outputs, 0, len(outputs), changes, 0, len(changes))
        super().admit(partition, position, outputs, changes, waiter, events)
