"""Safeguards of the wire producer, and those of the engine that are missed with it, too."""

from __future__ import annotations

from typing import Any

from streams.clients.producing import answers
from streams.clients.producing.answers import Meaning
from streams.clients.producing.transactions import WireSlot
from streams.core.transaction import Transaction, TransactionState
from streams.runtime.transactions.pool import TransactionPool

from .safeguards import SAFEGUARDS, Patch, instead, left_out, missed, nothing


def also_on_the_wire(safeguard: str, *profiles: str, seed: int = 0) -> None:
    """Miss a safeguard of the engine in worlds with the wire producer."""
    known = SAFEGUARDS[safeguard]
    SAFEGUARDS[f"{safeguard}_on_the_wire"] = known._replace(profiles=profiles or known.profiles, seed=seed, wire=True)


also_on_the_wire("incarnation_is_not_looked_at", "forgets", seed=51)
also_on_the_wire("lost_is_taken_for_nothing")
also_on_the_wire("dropped_work_does_not_cost_the_store", "late", seed=5)
also_on_the_wire("unclear_is_taken_for_committed")
also_on_the_wire("unclear_is_taken_for_aborted", "late", seed=1)
also_on_the_wire("only_the_failed_one_is_sent_again", "late", seed=9)
also_on_the_wire("older_one_is_disturbed_by_a_younger_failure", seed=4)
also_on_the_wire("aborted_work_is_not_sent_again")

LOST = ("lost_replies", "late", "storm")


@instead(WireSlot, "commit", "R3", "late", seed=1, wire=True)
async def a_commit_counts_when_it_is_answered(
    original: Any, self: WireSlot, topic: str, offsets: Any, fence: Any, requested: Any
) -> None:
    await original(self, topic, offsets, fence, nothing)
    requested()


@missed("answers", *LOST, seed=7, wire=True)
def what_is_in_the_log_is_taken_for_refused(patch: Patch) -> None:
    patch.setitem(answers.PRODUCE, 46, Meaning.REFUSED)  # type: ignore[arg-type]


@instead(WireSlot, "_produce_round", "sequences", *LOST, seed=7, wire=True)
async def what_may_be_in_the_log_gets_other_sequences(original: Any, self: WireSlot, parts: Any, pieces: Any) -> Any:
    """When it is sent again."""
    failed = await original(self, parts, pieces)
    for part in parts:
        if (part.topic, part.partition) in failed:
            sequence = self._sequences[part.topic, part.partition]
            pieces[part] = part.batch.encode(self._who.producer_id, self._who.epoch, sequence, None)
    return failed


@instead(WireSlot, "begin", "sequences", *LOST, seed=3, wire=True)
def sequences_begin_again_within_an_epoch(original: Any, self: WireSlot) -> None:
    """As under v2, also under v1: the broker takes the second transaction for a repetition of the first."""
    original(self)
    self._sequences.clear()


class _Lasting(dict[Any, Any]):
    def clear(self) -> None:
        """Keep everything."""


@instead(WireSlot, "begin", "sequences", *LOST, wire=True)
def sequences_go_on_in_the_next_epoch(original: Any, self: WireSlot) -> None:
    original(self)
    self._sequences = _Lasting(self._sequences)


left_out("connections_are_kept_when_a_call_is_given_up", WireSlot, "_abandon_after", nothing, "calls", *LOST, wire=True)


@instead(WireSlot, "_initialize", "R8", *LOST, wire=True)
async def an_id_is_used_again_as_it_was(original: Any, self: WireSlot) -> None:
    """What the failed transaction has sent is not aborted, and what is under way is not fenced."""
    if self._who.producer_id < 0:
        await original(self)


@instead(TransactionPool, "_next_to_send", "R2", *LOST, wire=True)
async def younger_is_sent_before_older(original: Any, self: TransactionPool) -> Transaction:
    sendable = [txn for txn in self.unsettled if txn.state is TransactionState.SENDABLE]
    return sendable[-1] if sendable else await original(self)
