"""Recover from a failed transaction: rules R3, R4 and R5 of the protocol, as one function.

The failed transaction is always the oldest unsettled one: the flush stage lets older ones settle first. Nothing is
begun again before its outcome is known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio

from streams.core.origin import describe, input_of, is_interjection
from streams.core.recovery import Patience, Remedy, remedy
from streams.core.transaction import Transaction, TransactionState
from streams.errors import ConfigError, MembershipLost, RecordRefused, RecordsRefused, StreamsError, TransactionFailed
from streams.records import Output, RefusedRecord, TopicPartition
from streams.runtime.changelog import OFFSET_KEY, RELEASE_KEY
from streams.runtime.partition.dead_letters import DeadLetter
from streams.runtime.partition.failures import TakenBack
from streams.runtime.transactions.pool import TransactionPool
from streams.settings.config import EventSourceConfig
from streams.settings.groups import DELIVERY_SHARE

_log = logging.getLogger(__name__)

NEWS_SECONDS = 3.0
"""The wait for the metadata that replaces a refused one. It comes with our JoinGroup response (0.4 of a heartbeat on
average, 60 ms at most measured); should it not come, the same transaction is simply refused again."""

WRONG_CLOCK: Final = "INVALID_TIMESTAMP"
"""The broker's code for a record whose time it refuses. Our records carry the time of sending, so a clock is wrong."""

OWN_KEYS: Final = (OFFSET_KEY, RELEASE_KEY)
"""Keys of the toolkit's own records in the changelog. If one is refused, no event is to blame."""


class Recovery:
    """The recovery of one pool. ``topics``: the inputs, by their places. ``look_up(transaction)``: whether it is
    committed, by the changelog.
    ``refused(partition, origin, error)``: this event's records are refused for good; its partition starts again from
    its changelog. ``dropped()``: all admitted events are dropped, so the stores are ahead of their changelogs."""

    def __init__(
        self,
        pool: TransactionPool,
        config: EventSourceConfig,
        topics: Sequence[str],
        now: Callable[[], float],
        look_up: Callable[[Transaction], Awaitable[bool]],
        refused: Callable[[int, int, RecordRefused], None],
        dropped: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._config = config
        self._topics = topics
        self._patience = Patience(seconds=config.timeouts.recovery_timeout_seconds)
        self._now = now
        self._look_up = look_up
        self._refused = refused
        self._dropped = dropped

    async def __call__(self, failure: TransactionFailed) -> None:
        """Bring everything unsettled to a known state. Raises the failure if it is time to stop."""
        pool = self._pool
        if not pool.unsettled:
            return
        head = pool.unsettled[0]
        reported = failure.refused if isinstance(failure, RecordsRefused) else ()
        for_a_letter = self._is_of_letters(head, reported)
        refused = [(record.output, _error(failure, record)) for record in reported if record.is_own and record.output]
        waits = for_a_letter or failure.kind == "blocked"
        # No limit of time or attempts: if this member stops, the next one meets the same letter, and stops, too.
        if for_a_letter:
            head.first_failure_at = None
        step = remedy(
            failure.kind,
            ours=pool.group_metadata().incarnation == head.incarnation,
            commit_requested=head.commit_requested,
            attempts=0 if for_a_letter else head.attempts,
            seconds=0.0 if head.first_failure_at is None else self._now() - head.first_failure_at,
            patience=self._patience,
        )
        # One that waits for an operator is a warning at the attempts 1, 2, 4, 8 and so on, not at each.
        is_news = step is not Remedy.RESEND_AFTER_NEWS and not (waits and head.attempts & (head.attempts - 1))
        level = logging.WARNING if is_news else logging.INFO
        _log.log(level, "transaction %d (attempt %d) failed: %s; %s", head.serial, head.attempts, failure, step.value)
        if step is Remedy.STOP:
            raise self._final(head, failure)
        # No answer while it was sent: it may be too large for its time. If no broker was there, a cut does no harm.
        too_slow = (
            step is Remedy.RESEND
            and failure.kind == "unknown"
            and failure.call == "flush"
            and failure.code != "_TRANSPORT"  # a connection that broke says nothing about the size
        )
        if step is Remedy.DROP:
            pool.drop_everything(MembershipLost("the membership was lost while a transaction was under way"))
            self._dropped()
            return
        # Before the oldest is settled: their open records in the changelog would hold up the look-up of its outcome.
        for younger in reversed(list(pool.unsettled)[1:]):
            await self._end(younger)
        committed = await self._settle(head, step, failure)
        if head.state is TransactionState.DROPPED:
            return  # the membership was lost meanwhile
        if committed:
            pool.committed(head)
            return
        self._part_with(head, refused)
        if too_slow and not refused:
            self._pool.cut(head)
        if step is Remedy.RESEND_AFTER_NEWS:
            await self._news()
        elif head.attempts > 1:
            await anyio.sleep(min(0.05 * 2 ** min(head.attempts, 5), 1.0))

    async def _settle(self, head: Transaction, step: Remedy, failure: TransactionFailed) -> bool:
        if step is not Remedy.LOOK_UP:
            await self._end(head)
            return False
        # The new epoch settles the transaction. Looked up before that, it could still be committed by the late request.
        slot = self._pool.replace_slot(head)
        if slot is not None:
            await self._pool.slots.wait_replaced(slot, self._patience.seconds)
        # Never a guess: a wrong "committed" loses these events, a wrong "aborted" sends them twice (R3).
        committed = await self._look_up(head)
        if slot is not None:
            slot.settled(committed)
        _log.warning("transaction %d is %s", head.serial, "committed" if committed else "not committed: sent again")
        if not committed:
            self._pool.taken_back(head)
        return committed

    async def _end(self, txn: Transaction) -> None:
        """End a transaction whose commit was not requested; it is known to be aborted afterwards."""
        slot = self._pool.slot_of(txn)
        if slot is not None:
            try:
                await slot.abort()
                self._pool.give_back_slot(txn)
            except TransactionFailed as failure:
                _log.info("transaction %d: %s; a new producer settles it", txn.serial, failure)
                self._pool.replace_slot(txn)
                await self._pool.slots.wait_replaced(slot, self._patience.seconds)
        self._pool.taken_back(txn)

    def _is_of_letters(self, head: Transaction, refused: Sequence[RefusedRecord]) -> bool:
        """Check for a failure by a dead letter that no member could write now: if one stops for it, the next member
        meets it, and stops, too. (Not so if this machine's clock is wrong.)"""
        topics = {output.topic for output in head.outputs if isinstance(output, DeadLetter)}
        return any(
            record.topic in topics and record.code != WRONG_CLOCK
            if not record.is_own
            else isinstance(record.output, DeadLetter) and record.output.by_reference is None
            for record in refused
        )

    def _part_with(self, head: Transaction, refused: Sequence[tuple[Output, RecordRefused]]) -> None:
        """Send refused records no more: a dead letter goes by reference, an event gets its policy."""
        events: dict[tuple[int, int], RecordRefused] = {}
        for output, error in refused:
            if isinstance(output, DeadLetter):
                if output.by_reference is not None:
                    _log.warning("%s; it is sent by reference", error)
                    _refer(head, output)
            elif output.key not in OWN_KEYS:
                events.setdefault((output.origin_partition, output.blamed), error)
        for (partition, origin), error in events.items():
            self._pool.drop_partition(partition, error if is_interjection(origin) else _taken_back(error))
            self._refused(partition, origin, error)
            head.attempts = 0  # the rest is another transaction; each time it is smaller

    def _final(self, head: Transaction, failure: TransactionFailed) -> StreamsError:
        """Make the error that stops the source. An event that was alone in the end may be too large for its time: then
        the error names it. A restart on this machine does not help against its clock."""
        if failure.code == WRONG_CLOCK and failure.kind == "blocked":
            return ConfigError(f"{failure}; tried for {self._patience.seconds:g} seconds (recovery_timeout_seconds)")
        origins = {(output.origin_partition, output.origin) for output in head.outputs}
        origins |= {(number, change.origin) for number, cut in head.cuts.items() for change in cut.changes.values()}
        if failure.kind != "unknown" or head.commit_requested or len(origins) != 1:
            return failure
        ((partition, origin),) = origins
        where = describe(origin, TopicPartition(self._topics[input_of(origin)], partition))
        config = self._config
        seconds = min(
            config.timeouts.call_timeout_seconds, config.timeouts.transaction_timeout_seconds * DELIVERY_SHARE
        )
        return TransactionFailed(
            failure.call,
            failure.code,
            failure.kind,
            f"{where} sends and changes {head.bytes} bytes, which were not acknowledged within {seconds:g} seconds, "
            f"tried for {self._patience.seconds:g} seconds (recovery_timeout_seconds). If the broker was there all the "
            f"time: it fits at {math.ceil(head.bytes / seconds)} bytes/s and more. Use a faster line or larger quota, "
            "give it more time (transaction_timeout_seconds, call_timeout_seconds), or let the event send less; "
            f"{failure}",
        )

    async def _news(self) -> None:
        used = self._pool.metadata_used
        with anyio.move_on_after(NEWS_SECONDS):
            # By identity: generation numbers begin again after a coordinator has lost its memory, so they may be equal.
            while self._pool.group_metadata() is used:
                await anyio.sleep(0.002)


def _refer(head: Transaction, refused: DeadLetter) -> None:
    """Refer to the source in a letter that is too large, and in those that are no smaller: each would cost an
    attempt."""
    for letter in [output for output in head.outputs if isinstance(output, DeadLetter) and output.size >= refused.size]:
        if (reference := letter.by_reference) is not None:
            head.replace(letter, reference)
    head.attempts, head.first_failure_at = 0, None  # it is another transaction now; each time it is smaller


def _error(failure: TransactionFailed, record: RefusedRecord) -> RecordRefused:
    by_broker = "" if failure.call == "produce" else "the broker refuses a record for "
    error = RecordRefused(f"{by_broker}{record.reason}")
    error.key = None if record.output is None else record.output.key
    return error


def _taken_back(error: RecordRefused) -> TakenBack:
    """Make the error for waiters whose effects are undone with those of a refused event."""
    reason = TakenBack()
    reason.__cause__ = error
    return reason
