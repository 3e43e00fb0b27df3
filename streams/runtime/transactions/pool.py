"""The transaction pool: admits completed events, and brings transactions to their end, in order.

Three kinds of transactions are unsettled at a time, oldest first: those that commit, those that are being flushed,
and the open one, which is filled. Two tasks move them on: ``_flush_stage`` seals by the batching rule, produces and
flushes; ``_commit_stage`` sends offsets and commits. The open transaction's records are handed to its producer while
it is filled, once everything older is flushed (rule R2), so at sealing time most of them are acknowledged already.

When any call fails both stages stop, and ``recovery`` ends the transactions under way, finds out which are committed
and puts the rest back to be sent again, with the same records (rule R4). Then the stages start afresh. So there is one
way forward and one way back, and nothing in between.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import msgspec

from streams.config import EventSourceConfig
from streams.core import batching
from streams.core.transaction import Transaction, TransactionState, Waiter
from streams.errors import RecordRefused, TransactionFailed
from streams.group import Snapshot
from streams.metrics import TransactionSettled
from streams.records import Change, Output, changelog_record
from streams.runtime.changelog import OFFSET_KEY, RELEASE_KEY, OffsetRecord, ReleaseMarker, TopicIds
from streams.runtime.ports import TransactionSlot
from streams.runtime.signal import Broadcast, Signal
from streams.runtime.transactions.producer_slots import Slots


class TransactionPool:
    """The transaction pool of one run. On the loop. ``admit`` never waits; check ``is_full`` before the next event."""

    def __init__(
        self,
        config: EventSourceConfig,
        slots: Slots,
        *,
        writer: str,
        now: Callable[[], float],
        snapshot: Callable[[], Snapshot],
        ids: Callable[[int], TopicIds],
        settled: Callable[[Transaction, bool], None],
    ) -> None:
        self._config = config
        self.slots = slots
        self._writer = writer
        self._now = now
        self.snapshot = snapshot
        self._ids = ids
        self._settled = settled
        self.unsettled: deque[Transaction] = deque()
        self._slot_of: dict[int, TransactionSlot] = {}
        self._open: Transaction | None = None
        self._serial = 0
        self._due = False  # whether the flush stage knows that the open one is large enough to be sealed
        self.rule = config.pool
        """The settings, with the bound in bytes that has proved to fit the time."""
        self._urgent = False
        self._work = Signal()  # something to seal or send
        self._flushed = Signal()  # something to commit
        self._progress = Broadcast()  # at each settlement: room, barriers
        self._failure: TransactionFailed | None = None
        self._scope = anyio.CancelScope()  # the stages, or the recovery, whichever is running
        self.snapshot_used: Snapshot | None = None
        self.incarnation = 0

    # -- filling -------------------------------------------------------------------------------------------------------

    def admit(
        self,
        partition: int,
        offset: int,
        outputs: list[Output],
        changes: list[Change],
        waiter: Waiter | None = None,
        events: int = 1,
    ) -> None:
        """Take in completed events of one partition: so many, in their order. ``offset`` is the watermark after them;
        outputs and changes know their origins."""
        txn = self._open
        if txn is None:
            txn = self._begin_filling()
        txn.admit(partition, offset, outputs, changes, events)
        if waiter is not None:
            txn.wait(partition, waiter)
        if txn.events == events:
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
        """Check whether the open transaction takes no more events."""
        txn = self._open
        return txn is not None and batching.is_full(self.rule, size=txn.size, size_bytes=txn.bytes)

    async def wait_room(self) -> None:
        """Wait until the open transaction takes events again."""
        while self.is_full:
            await self._progress.wait()

    def pump(self) -> None:
        """Hand the open transaction's records to its producer, as far as order and queues allow. Called per slice."""
        txn = self._open
        if txn is None or txn.one_by_one or txn.produced >= len(txn.outputs) or self._failure is not None:
            return  # while an older one is being recovered, nothing may get ahead of it
        if txn.serial not in self._slot_of:
            older_flushed = len(self.unsettled) == 1 or self.unsettled[-2].state in _FLUSHED
            if not older_flushed:
                return
        try:
            if txn.serial in self._slot_of or self._start(txn):
                self._produce(txn)
        except TransactionFailed:
            return  # the flush stage meets it again, in its turn: an older commit must not be disturbed by it

    def last_with(self, partition: int) -> Transaction | None:
        """Return the newest unsettled transaction that has a part of this partition."""
        return next((txn for txn in reversed(self.unsettled) if partition in txn.cuts), None)

    async def wait_settled(self, partition: int) -> None:
        """Run the barrier: seal at once, and wait until nothing of this partition is unsettled."""
        while self.last_with(partition) is not None:
            self._urgent = True
            self._work.notify()
            await self._progress.wait()

    # -- giving up -----------------------------------------------------------------------------------------------------

    def drop_everything(self, reason: BaseException) -> None:
        """Drop all that is admitted: the membership is lost, and nothing of it may be sent any more (rule R5)."""
        self._break(TransactionFailed("membership", "LOST", "lost", str(reason)))
        for txn in self.unsettled:
            self.release_slot(txn)
            txn.settle(reason)
            self._settled(txn, False)
        self.unsettled.clear()
        self._open = None
        self._progress.notify()

    def drop_partition(self, partition: int, reason: BaseException) -> None:
        """Take a partition's events out of everything unsettled. Only while none of it may still be committed."""
        for txn in list(self.unsettled):
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
                if txn.one_by_one:
                    self._slot_of[txn.serial] = await self.slots.take_one_by_one(
                        self._config.timeouts.recovery_timeout_seconds
                    )
                    self._slot_of[txn.serial].begin()
                while txn.serial not in self._slot_of and not self._start(txn):
                    await self.slots.wait_free(self._config.timeouts.recovery_timeout_seconds)
                while not self._produce(txn):
                    await anyio.sleep(0.001)  # the producer's queue is full: its own threads are emptying it
                await self._produce_changelog(txn)
                slot = self._slot(txn)
                await slot.flush()
                if txn.state is not TransactionState.SENDING:
                    continue  # dropped meanwhile
                if slot.refused:
                    raise TransactionFailed("flush", "REFUSED", "abortable", slot.refused[0].reason)
            except TransactionFailed:
                if txn.state is TransactionState.DROPPED:
                    self.release_slot(txn)  # it may have been given one after it was dropped
                await self._settled_before(txn)  # older ones are not disturbed by the failure of this one
                raise
            txn.to(TransactionState.FLUSHED)
            txn.flushed_at = self._now()
            self._flushed.notify()
            self.pump()

    async def _commit_stage(self) -> None:
        while True:
            while not self.unsettled or self.unsettled[0].state is not TransactionState.FLUSHED:
                await self._flushed.wait()
            txn = self.unsettled[0]
            txn.to(TransactionState.COMMITTING)
            await self._slot_of[txn.serial].commit(
                self._config.offsets_topic,
                {partition: cut.offset for partition, cut in txn.cuts.items()},
                partial(self._fence, txn),
                partial(_requested, txn),
            )
            if txn.state is TransactionState.COMMITTING:  # else dropped meanwhile
                self.committed(txn)

    async def _next_to_send(self) -> Transaction:
        while True:
            wait: float | None = None
            for txn in self.unsettled:
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
                        wait = self._config.pool.batch_delay_seconds - age
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
        self._due = False
        txn = self._open = Transaction(self._serial, self.incarnation, self._now())
        self.unsettled.append(txn)
        return txn

    def _start(self, txn: Transaction) -> bool:
        """Give a transaction a producer and begin; ``False`` if none is free."""
        slot = self.slots.take()
        if slot is None:
            return False
        self._slot_of[txn.serial] = slot
        slot.begin()
        return True

    def _produce(self, txn: Transaction) -> bool:
        """Hand over the records that are not produced yet; ``False`` if the producer's queue is full."""
        slot, outputs = self._slot(txn), txn.outputs
        while txn.produced < len(outputs):
            txn.produced = slot.produce_many(outputs, txn.produced)
            if txn.produced < len(outputs):
                if not _produce_one(slot, outputs[txn.produced]):
                    return False
                txn.produced += 1
        return True

    def _slot(self, txn: Transaction) -> TransactionSlot:
        if txn.state is TransactionState.DROPPED:  # its awaited condition was true already: not cancelled in time
            raise TransactionFailed("membership", "LOST", "lost", "dropped while it was being sent")
        return self._slot_of[txn.serial]

    async def _produce_changelog(self, txn: Transaction) -> None:
        slot, topic = self._slot(txn), self._config.changelog
        for partition, changes, own in self._changelog_of(txn):
            produced = 0
            while (produced := slot.produce_changes(topic, partition, changes, produced)) < len(changes):
                await _produce_patiently(slot, changelog_record(topic, partition, changes[produced]))
                produced += 1
            for output in own:
                await _produce_patiently(slot, output)

    def _changelog_of(self, txn: Transaction) -> list[tuple[int, list[Change], list[Output]]]:
        """Return the changes of each partition, and the toolkit's own records behind them."""
        topic, generation = self._config.changelog, self.snapshot().generation
        found = []
        for partition, cut in txn.cuts.items():
            record = OffsetRecord(cut.offset, self._writer, txn.serial, generation, *self._ids(partition))
            own = [Output(topic, msgspec.json.encode(record), OFFSET_KEY, None, partition, 0, partition, -1)]
            if cut.release is not None:  # last of all: its reader has read everything
                own.append(Output(topic, cut.release, RELEASE_KEY, None, partition, 0, partition, -1))
            found.append((partition, list(cut.changes.values()), own))
        return found

    def _fence(self, txn: Transaction) -> Snapshot:
        """Return the newest snapshot, if the transaction is still ours under it. Runs on the slot's thread."""
        snapshot = self.snapshot_used = self.snapshot()
        if snapshot.incarnation != txn.incarnation:
            raise TransactionFailed("send_offsets_to_transaction", "LOST", "lost", "the membership changed meanwhile")
        return snapshot

    def committed(self, txn: Transaction) -> None:
        """Settle a transaction that is known to be committed, and is the oldest."""
        assert self.unsettled[0] is txn
        self.unsettled.popleft()
        slot = self._slot_of.pop(txn.serial, None)
        if slot is not None:
            self.slots.give_back(slot)
        self.rule = batching.larger(self.rule, txn.bytes, self._config.pool.max_batch_bytes)
        for younger in self.unsettled:
            younger.first_failure_at = None  # it goes on: the limits are for a transaction that does not
        txn.settle(None)
        self._settled(txn, True)
        self._progress.notify()
        self._work.notify()
        self._flushed.notify()

    def taken_back(self, txn: Transaction) -> None:
        """Take back a transaction that is known not to be committed: its records wait to be sent again."""
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
        for txn in self.unsettled:  # serials are the order, also in a look-up
            self._serial += 1
            txn.serial = self._serial

    def slot_of(self, txn: Transaction) -> TransactionSlot | None:
        """Return the slot of a transaction, if any."""
        return self._slot_of.get(txn.serial)

    def release_slot(self, txn: Transaction) -> TransactionSlot | None:
        """Take a transaction's slot away, if it has one, and have the producer replaced (rule R8)."""
        slot = self._slot_of.pop(txn.serial, None)
        if slot is not None:
            self.slots.replace(slot)
        return slot

    def measure(self, txn: Transaction, committed: bool) -> TransactionSettled:
        """Measure a settled transaction."""
        now = self._now()
        return TransactionSettled(
            committed=committed,
            attempts=txn.attempts,
            events=txn.events,
            outputs=len(txn.outputs),
            changes=sum(len(cut.changes) for cut in txn.cuts.values()),
            partitions=len(txn.cuts),
            open_seconds=txn.sealed_at - txn.opened_at,
            commit_seconds=now - txn.sealed_at,
            flush_seconds=0.0 if txn.flushed_at is None else txn.flushed_at - txn.sealed_at,
        )


class Refused(TransactionFailed):
    """A record that the client itself refused."""

    def __init__(self, output: Output, reason: RecordRefused) -> None:
        super().__init__("produce", "REFUSED", "abortable", str(reason))
        self.output = output
        self.refusal = reason


_FLUSHED = (TransactionState.FLUSHED, TransactionState.COMMITTING)


def _produce_one(slot: TransactionSlot, output: Output) -> bool:
    """Hand over one record that was not taken with others; ``False``: the producer's queue is full. Raises
    ``Refused``."""
    try:
        taken = slot.produce(output)
    except RecordRefused as refusal:
        raise Refused(output, refusal) from refusal
    if not taken:
        slot.poll()
    return taken


async def _produce_patiently(slot: TransactionSlot, output: Output) -> None:
    while not _produce_one(slot, output):
        await anyio.sleep(0.001)


def _requested(txn: Transaction) -> None:
    txn.commit_requested = True
