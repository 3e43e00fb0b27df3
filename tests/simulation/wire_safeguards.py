"""Safeguards of the producer."""

from __future__ import annotations

from typing import Any

from streams.core.transaction import Transaction, TransactionState
from streams.kafka.wire import answers
from streams.kafka.wire.answers import Meaning
from streams.kafka.writing.session import TransactionSession
from streams.kafka.writing.slot import WireSlot
from streams.runtime.transactions.pool import TransactionPool

from .safeguards import Patch, instead, left_out, missed, nothing

LOST = ("lost_replies", "late", "storm")


@instead(WireSlot, "commit", "R3", "late", seed=0)
async def a_commit_counts_when_it_is_answered(original: Any, self: WireSlot, requested: Any) -> None:
    await original(self, nothing)
    requested()


@missed("answers", *LOST, seed=34)
def what_is_in_the_log_is_taken_for_refused(patch: Patch) -> None:
    patch.setitem(answers.PRODUCE, 46, Meaning.REFUSED)  # type: ignore[arg-type]


@instead(TransactionSession, "_round", "sequences", *LOST, seed=1)
async def what_may_be_in_the_log_gets_other_sequences(
    original: Any, self: TransactionSession, parts: Any, pieces: Any, offsets: Any, bases: Any
) -> Any:
    """When it is sent again."""
    failed, codes = await original(self, parts, pieces, offsets, bases)
    for part in parts:
        if (part.topic, part.partition) in failed:
            sequence = part.sequence + part.batch.records
            pieces[part] = part.batch.encode(self.who.producer_id, self.who.epoch, sequence, None)
    return failed, codes


@instead(WireSlot, "flush", "sequences", *LOST, seed=3)
async def sequences_begin_again_within_an_epoch(original: Any, self: WireSlot, *of: Any) -> None:
    """As under v2, also under v1: the broker takes the second transaction for a repetition of the first."""
    self._sequences.clear()
    await original(self, *of)


class _Lasting(dict[Any, Any]):
    def clear(self) -> None:
        """Keep everything."""


@instead(WireSlot, "flush", "sequences", *LOST)
async def sequences_go_on_in_the_next_epoch(original: Any, self: WireSlot, *of: Any) -> None:
    self._sequences = _Lasting(self._sequences)
    await original(self, *of)


left_out(
    "connections_are_kept_when_a_call_is_given_up",
    WireSlot,
    "_abandon_after",
    nothing,
    "calls",
    "late",
    "lost_replies",
    "storm",
    seed=1,
)


@instead(WireSlot, "_bounded", "calls", "lost_replies", "outages")
def calls_have_no_deadline(original: Any, self: WireSlot, call: str, seconds: float) -> Any:
    return original(self, call, 1e6)


@instead(TransactionSession, "initialize", "sequences", *LOST, seed=1)
async def an_id_is_used_again_as_it_was(original: Any, self: TransactionSession) -> None:
    """What the failed transaction has sent is not aborted, and what is under way is not fenced."""
    if self.who.producer_id < 0:
        await original(self)


@instead(WireSlot, "abort", "sequences", "refused_under_way", "late", "unclear_moves", seed=3)
async def a_slot_goes_on_after_an_abort_whatever_the_protocol(original: Any, self: WireSlot) -> None:
    """Under v1 some of its sequences have reached the log, and others have not."""
    await original(self)
    self.is_open = True


@instead(TransactionPool, "_next_to_send", "R2", *LOST)
async def younger_is_sent_before_older(original: Any, self: TransactionPool) -> Transaction:
    sendable = [txn for txn in self.unsettled if txn.state is TransactionState.SENDABLE]
    return sendable[-1] if sendable else await original(self)
