"""One transaction's life, from the first event that is admitted to the moment its outcome is known.

Rules of this file
* A transaction is a set of *cuts*: per partition the offset up to which it goes, and the store changes on the way (by
  key, the last one wins). Outputs are kept in order. All of it stays until the outcome is known, so that the same
  records can be sent again (exactly-once rule R4).
* Only completed events are admitted, in the order of their partition: a transaction never waits for a handler.
* ``size`` = max(events, records) is what the batching rule looks at.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final

from streams.records import Change, Output


class TransactionState(enum.Enum):
    """Where a transaction is. ``SENDABLE`` is sealed, but (again) not with any producer."""

    OPEN = "open"
    SENDABLE = "sendable"
    SENDING = "sending"
    FLUSHED = "flushed"
    COMMITTING = "committing"
    COMMITTED = "committed"
    DROPPED = "dropped"


_S = TransactionState
LEGAL_MOVES: Final[dict[TransactionState, frozenset[TransactionState]]] = {
    _S.OPEN: frozenset({_S.SENDABLE, _S.DROPPED}),
    _S.SENDABLE: frozenset({_S.SENDING, _S.DROPPED}),
    _S.SENDING: frozenset({_S.FLUSHED, _S.SENDABLE, _S.DROPPED}),
    _S.FLUSHED: frozenset({_S.COMMITTING, _S.SENDABLE, _S.DROPPED}),
    _S.COMMITTING: frozenset({_S.COMMITTED, _S.SENDABLE, _S.DROPPED}),
    _S.COMMITTED: frozenset(),
    _S.DROPPED: frozenset(),
}

Waiter = Callable[[BaseException | None], None]
"""Told once how it ended: ``None`` when committed, else the reason why not."""


class Cut:
    """One partition's part in a transaction: everything up to ``offset`` (the next one to read), and its changes.
    ``release`` is the marker that hands the partition over with this transaction, if it is its last one here."""

    __slots__ = ("changes", "events", "offset", "release")

    def __init__(self) -> None:
        self.offset = -1
        self.events = 0
        self.changes: dict[bytes, Change] = {}
        self.release: bytes | None = None


class Transaction:
    """The contents and the state of one transaction. ``serial`` orders those of one process; ``incarnation`` is the
    membership it was opened under: under another one it must not be sent."""

    __slots__ = (
        "attempts",
        "bytes",
        "commit_requested",
        "cuts",
        "events",
        "first_failure_at",
        "flushed_at",
        "incarnation",
        "one_by_one",
        "opened_at",
        "outputs",
        "produced",
        "records",
        "sealed_at",
        "serial",
        "state",
        "waiters",
    )

    def __init__(self, serial: int, incarnation: int, now: float) -> None:
        self.serial = serial
        self.incarnation = incarnation
        self.opened_at = now
        self.sealed_at = now
        self.flushed_at: float | None = None
        self.state = TransactionState.OPEN
        self.events = 0
        self.records = 0
        self.bytes = 0
        self.outputs: list[Output] = []
        self.cuts: dict[int, Cut] = {}
        self.waiters: list[tuple[int, Waiter]] = []
        self.produced = 0
        self.commit_requested = False
        self.one_by_one = False  # to be sent so that a refusal names its record and no other
        self.attempts = 0
        self.first_failure_at: float | None = None

    def to(self, new: TransactionState) -> None:
        """Move on. Raises ``ValueError`` for a move that is not legal: it is a bug of the engine."""
        if new not in LEGAL_MOVES[self.state]:
            raise ValueError(f"a transaction cannot go from {self.state.value} to {new.value}")
        self.state = new

    @property
    def size(self) -> int:
        """What the batching rule counts: events or records, whichever is more."""
        return self.events if self.events > self.records else self.records

    def admit(self, partition: int, offset: int, outputs: list[Output], changes: list[Change], events: int = 1) -> None:
        """Take in completed events of one partition: so many, in their order. ``offset`` is the watermark after them;
        outputs and changes know their origins."""
        cut = self.cuts.get(partition)
        if cut is None:
            cut = self.cuts[partition] = Cut()
        cut.offset = offset
        cut.events += events
        size = 0
        if changes:
            latest = cut.changes
            for change in changes:
                latest[change.key] = change
                size += len(change.value or b"")
            self.records += len(changes)
        if outputs:
            self.outputs += outputs
            self.records += len(outputs)
            for output in outputs:
                size += len(output.value or b"")
        self.events += events
        self.bytes += size

    def seal(self, now: float) -> None:
        """Nothing is admitted any more."""
        self.to(TransactionState.SENDABLE)
        self.sealed_at = now

    def taken_back(self, now: float) -> None:
        """It is known not to be committed: everything is as before the first attempt, to be sent again."""
        if self.state not in (TransactionState.OPEN, TransactionState.SENDABLE):  # else it was not sent at all
            self.to(TransactionState.SENDABLE)
        self.produced = 0
        self.flushed_at = None
        self.commit_requested = False
        if self.first_failure_at is None:
            self.first_failure_at = now

    def without(self, partition: int) -> list[Waiter]:
        """Take one partition's events out again (only while nothing of it can be committed any more). Returns those
        who wait."""
        cut = self.cuts.pop(partition, None)
        self.events -= 0 if cut is None else cut.events
        self.outputs = [output for output in self.outputs if output.origin_partition != partition]
        self.records = len(self.outputs) + sum(len(cut.changes) for cut in self.cuts.values())
        self.bytes = sum(len(output.value or b"") for output in self.outputs) + sum(
            len(change.value or b"") for cut in self.cuts.values() for change in cut.changes.values()
        )
        gone = [waiter for number, waiter in self.waiters if number == partition]
        self.waiters = [entry for entry in self.waiters if entry[0] != partition]
        return gone

    def settle(self, error: BaseException | None) -> None:
        """The outcome is known: committed (``None``), or given up for a reason. Tells those who wait, once."""
        self.to(TransactionState.DROPPED if error is not None else TransactionState.COMMITTED)
        waiters, self.waiters = self.waiters, []
        for _, waiter in waiters:
            waiter(error)
