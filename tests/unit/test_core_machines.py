"""The tables of the deciding code, row by row: legal moves, the batching rule, the recovery table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from streams.core import batching, journal, partition, transaction
from streams.core.batching import Seal, decide, is_full
from streams.core.journal import MemberState, TermState
from streams.core.partition import PartitionState
from streams.core.recovery import Patience, Remedy, remedy
from streams.core.transaction import Transaction, TransactionState
from streams.settings.groups import PoolConfig

P, T, M, L = PartitionState, TransactionState, MemberState, TermState


def test_moves_along_the_tables_only() -> None:
    tables: list[dict[Any, Any]] = [partition.LEGAL_MOVES, journal.LEGAL_MOVES, journal.TERM_MOVES]
    for table, old, new in ((each, *move) for each in tables for move in itertools.product(each, each)):
        if new in table[old]:
            assert old.to(new) is new
        else:
            with pytest.raises(ValueError, match=f"from {old.value} to {new.value}"):
                old.to(new)
    for before, after in itertools.product(T, T):
        txn = Transaction(1, 0, 0.0)
        txn.state = before
        if after in transaction.LEGAL_MOVES[before]:
            txn.to(after)
            assert txn.state is after
        else:
            with pytest.raises(ValueError, match=f"from {before.value} to {after.value}"):
                txn.to(after)
            assert txn.state is before


def test_partition_ends_are_ends_and_void_is_always_near() -> None:
    for state in P:
        ended = state in (P.RELEASED, P.VOID)
        assert (P.VOID in partition.LEGAL_MOVES[state]) is not ended, "a loss may come at any time"
        assert bool(partition.LEGAL_MOVES[state]) is not ended
    assert P.ACTIVE not in partition.LEGAL_MOVES[P.RESTARTING], "a state that is in doubt is restored, never used on"
    assert P.ACTIVE not in partition.LEGAL_MOVES[P.DRAINING], "what is being given up is not taken back"


def test_a_member_that_has_led_follows_only_what_is_settled() -> None:
    assert journal.LEGAL_MOVES[M.LEADING] == {M.SETTLING}
    assert [state for state in M if M.LEADING in journal.LEGAL_MOVES[state]] == [M.CATCHING_UP]
    assert not journal.LEGAL_MOVES[M.STOPPED]


def test_a_term_is_settled_before_anything_else_and_sends_nothing_when_it_has_ended() -> None:
    assert [state for state in L if L.COMMITTING in journal.TERM_MOVES[state]] == [L.OPEN, L.SETTLING]
    assert L.SETTLING not in journal.TERM_MOVES[L.OPEN]
    assert [state for state in L if not journal.TERM_MOVES[state]] == [L.ENDED]
    assert all(L.ENDED in journal.TERM_MOVES[state] for state in L if state is not L.ENDED)


def test_events_enter_transactions_on_good_states_only_and_only_requested_commits_become_committed() -> None:
    assert [state for state in P if state.admits] == [P.ACTIVE, P.RELEASING, P.DRAINING]
    assert [state for state in T if T.COMMITTED in transaction.LEGAL_MOVES[state]] == [T.COMMITTING]


def test_what_is_sent_again_has_not_been_flushed_yet() -> None:
    txn = Transaction(1, 0, 0.0)
    txn.seal(1.0)
    txn.to(T.SENDING)
    txn.to(T.FLUSHED)
    txn.flushed_at = 2.0
    txn.taken_back(3.0)
    assert (txn.state, txn.flushed_at, txn.sealed_at) == (T.SENDABLE, None, 1.0)


POOL = PoolConfig(
    pool_size=4, pending_transactions=2, target_batch_size=10, max_batch_size=20, batch_delay_seconds=0.01
)

AT_ONCE = PoolConfig(target_batch_size=1)
"""One pending transaction: nothing is sealed behind it."""
NAGLE = PoolConfig(batch_delay_seconds=0)
MUCH = POOL.max_batch_bytes
BATCHING = [
    # size, age, in flight, verdict, and another configuration or bytes
    (1, 0.0, 0, Seal.LATER, POOL, 0),
    (9, 0.0099, 0, Seal.LATER, POOL, 0),
    (1, 0.01, 0, Seal.NOW, POOL, 0),
    (10, 0.0, 0, Seal.NOW, POOL, 0),
    (20, 0.0, 0, Seal.NOW, POOL, 0),
    (1, 99.0, 1, Seal.WHEN_FREE, POOL, 0),
    (9, 99.0, 1, Seal.WHEN_FREE, POOL, 0),
    (10, 0.0, 1, Seal.NOW, POOL, 0),
    (10, 0.0, 2, Seal.WHEN_FREE, POOL, 0),
    (20, 99.0, 2, Seal.WHEN_FREE, POOL, 0),
    (20, 99.0, 3, Seal.WHEN_FREE, POOL, 0),
    (10_000, 60.0, 1, Seal.WHEN_FREE, AT_ONCE, 0),
    (1, 0.0, 0, Seal.NOW, AT_ONCE, 0),
    (1, 0.0, 0, Seal.NOW, NAGLE, 0),
    (1, 0.0, 1, Seal.WHEN_FREE, NAGLE, 0),
    (1, 0.0, 0, Seal.NOW, POOL, MUCH),  # bytes count like events
    (1, 0.0, POOL.pending_transactions, Seal.WHEN_FREE, POOL, MUCH),
]


@pytest.mark.parametrize(("size", "age", "in_flight", "verdict", "config", "size_bytes"), BATCHING)
def test_batching_rule(
    size: int, age: float, in_flight: int, verdict: Seal, config: PoolConfig, size_bytes: int
) -> None:
    assert decide(config, size=size, size_bytes=size_bytes, age_seconds=age, in_flight=in_flight) is verdict


def test_the_delay_follows_the_commits_unless_it_is_set() -> None:
    rule = batching.first(PoolConfig())
    assert rule.batch_delay_seconds == batching.LONGEST_DELAY_SECONDS
    delays = []
    for commit_seconds in (0.002, 0.002, 0.002, 0.002, 0.5, 0.5):
        rule = batching.paced(rule, PoolConfig(), commit_seconds)
        delays.append(rule.batch_delay_seconds or 0)
    assert delays[:4] == sorted(delays[:4], reverse=True)
    assert 0.002 < delays[3] < 0.006
    assert delays[4:] == [batching.LONGEST_DELAY_SECONDS] * 2
    assert batching.first(NAGLE) is NAGLE
    assert batching.paced(POOL, POOL, 9.0) is POOL


def test_intake_stops_at_the_maximum_only() -> None:
    assert not is_full(POOL, size=19, size_bytes=0)
    assert is_full(POOL, size=20, size_bytes=0)
    assert is_full(POOL, size=21, size_bytes=0)
    assert is_full(POOL, size=1, size_bytes=POOL.max_batch_bytes)


KINDS = ("abortable", "stale", "lost", "fenced", "unknown")
PATIENCE = Patience(seconds=10.0, attempts=3)
CASES = list(itertools.product(KINDS, (True, False), (True, False), (1, 2, 3, 4), (0.0, 10.0, 10.1)))


@pytest.mark.parametrize(("kind", "ours", "requested", "attempts", "seconds"), CASES)
def test_recovery_table(kind: str, ours: bool, requested: bool, attempts: int, seconds: float) -> None:
    """The table of the protocol, written a second time, in another order. An outage is no refusal: time-outs are tried
    again for as long as patience has seconds, however often."""
    step = remedy(kind, ours=ours, commit_requested=requested, attempts=attempts, seconds=seconds, patience=PATIENCE)
    unclear = requested and kind in ("unknown", "fenced")
    tired = seconds > 10.0 or (attempts >= 3 and kind in ("abortable", "fenced"))
    expected = {
        Remedy.DROP: not ours or kind == "lost",
        Remedy.LOOK_UP: ours and unclear and seconds <= 10.0,
        Remedy.STOP: ours and kind != "lost" and (seconds > 10.0 or (not unclear and tired)),
        Remedy.RESEND_AFTER_NEWS: ours and kind == "stale" and not tired,
        Remedy.RESEND: ours and kind in ("abortable", "fenced", "unknown") and not unclear and not tired,
    }
    assert [name for name, holds in expected.items() if holds] == [step]
