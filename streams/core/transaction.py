"""The states of one transaction, from the first event that is admitted to the moment its outcome is known.

Rules of this file
* A transaction is a set of *cuts*: per partition the position up to which it goes, complete (``core/position.py``), and
  the store changes on the way (by key, the last one wins). Outputs are kept in order. All of it stays until the outcome
  is known, so that the same records can be sent again (exactly-once rule R4).
* Only completed events are admitted, in the order of their partition: a transaction never waits for a handler.
* ``size`` = max(events, records) is the measure of the batching rule; ``bytes`` are keys, values and headers.
* The admitted entries are kept, so that a transaction that does not fit its time can be cut in two between any two
  events.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from streams.core.admission import size_of_changes, size_of_outputs
from streams.core.origin import Origin, in_input, is_event
from streams.core.position import Position, behind, offsets_of, position_of
from streams.core.runs import Run
from streams.records import Change, Output


class TransactionState(enum.Enum):
    """The state of a transaction. ``SENDABLE`` is sealed, but (again) not with any producer."""

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

UNSENT: Final = (_S.OPEN, _S.SENDABLE)
"""States in which no request of it is made: its offsets meet the group's fence later."""

Waiter = Callable[[BaseException | None], None]
"""Called once with the outcome: ``None`` when committed, else the reason why not."""


class Admitted(msgspec.Struct, gc=False):
    """Completed events of one partition as they were admitted, by reference. A value that a later one of the same key
    replaces is kept by this, too; ``size`` (keys, values and headers, in bytes) counts it. ``runs``: if the events are
    of several inputs."""

    partition: int
    offset: Position
    outputs: list[Output]
    changes: list[Change]
    events: int
    size: int
    runs: Sequence[Run] = ()

    def by_event(self) -> list[Admitted]:
        """Split this into one entry for each event that has effects; events without effects are counted with the last.
        Work without offsets of its own (a batch, a timer's event, an interjection) stays whole."""
        origins = sorted({effect.origin for effects in (self.outputs, self.changes) for effect in effects})
        # An effect whose origin is no offset says nothing about the position behind it: then no cut is possible.
        if not 1 < len(origins) <= self.events or not (is_event(origins[0]) and is_event(origins[-1])):
            return [self]
        positions = self._positions(origins)
        outputs: dict[int, list[Output]] = {origin: [] for origin in origins}
        changes: dict[int, list[Change]] = {origin: [] for origin in origins}
        for output in self.outputs:
            outputs[output.origin].append(output)
        for change in self.changes:
            changes[change.origin].append(change)
        apart, (last, _) = Transaction(0, 0, 0.0), positions.pop()
        for origin, position in positions:
            apart.admit(self.partition, position, outputs[origin], changes[origin])
        apart.admit(self.partition, self.offset, outputs[last], changes[last], self.events - len(positions))
        return apart.admitted

    def _positions(self, origins: list[Origin]) -> list[tuple[Origin, Position]]:
        """Return these events in the order in which they were handled, each with the position behind it."""
        if not self.runs:
            return [(origin, behind(self.offset, origin)) for origin in origins]
        offsets = [*offsets_of(self.offset)]
        for place, _, first, _ in reversed(self.runs):
            offsets[place] = first  # nothing was handled before the first of its runs
        found: list[tuple[Origin, Position]] = []
        for place, _, first, end in self.runs:
            for origin in origins[
                bisect_left(origins, in_input(place, first)) : bisect_left(origins, in_input(place, end))
            ]:
                found.append((origin, behind(position_of(offsets), origin)))
            offsets[place] = end
        return found


class Cut(msgspec.Struct, eq=False):
    """One partition's part in a transaction: everything up to ``offset`` (the next one to read), and its changes.
    ``release`` is the marker that hands the partition over with this transaction, if it is its last one here.
    ``record`` and ``end`` are the offset record that was sent last, and its offset in the changelog (-1: not known);
    they are known only if state is kept on disk."""

    offset: Position = -1
    events: int = 0
    changes: dict[bytes, Change] = {}
    release: bytes | None = None
    record: bytes = b""
    end: int = -1


class Transaction:
    """The contents and the state of one transaction. ``serial`` orders those of one process; ``incarnation`` is the
    membership it was opened under: under another one it must not be sent."""

    __slots__ = (
        "admitted",
        "attempts",
        "bytes",
        "commit_requested",
        "cuts",
        "events",
        "first_failure_at",
        "flushed_at",
        "incarnation",
        "opened_at",
        "outputs",
        "records",
        "sealed_at",
        "serial",
        "sizes",
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
        self.sizes: Mapping[str, int] = {}  # of the records that were sent, by topic
        self.outputs: list[Output] = []
        self.cuts: dict[int, Cut] = {}
        self.admitted: list[Admitted] = []
        self.waiters: list[tuple[int, int, Waiter]] = []  # with its partition, and that one's events before it
        self.commit_requested = False
        self.attempts = 0
        self.first_failure_at: float | None = None

    def to(self, new: TransactionState) -> None:
        """Move on. Raises ``ValueError`` for a move that is not legal: it is a bug of the engine."""
        if new not in LEGAL_MOVES[self.state]:
            raise ValueError(f"a transaction cannot go from {self.state.value} to {new.value}")
        self.state = new

    @property
    def size(self) -> int:
        """The measure of the batching rule: events or records, whichever is more."""
        return self.events if self.events > self.records else self.records

    def admit(
        self,
        partition: int,
        offset: Position,
        outputs: list[Output],
        changes: list[Change],
        events: int = 1,
        runs: Sequence[Run] = (),
    ) -> None:
        """Take in completed events of one partition: so many, in their order. ``offset`` is the position after them;
        outputs and changes know their origins; ``runs``: if the events are of several inputs. The lists are kept, and
        must not change any more."""
        cut = self.cuts.get(partition)
        if cut is None:
            cut = self.cuts[partition] = Cut()
        cut.offset = offset
        cut.events += events
        size = 0
        if changes:
            size += size_of_changes(changes, cut.changes)
            self.records += len(changes)
        if outputs:
            self.outputs += outputs
            self.records += len(outputs)
            size += size_of_outputs(outputs)
        self.events += events
        self.bytes += size
        self.admitted.append(Admitted(partition, offset, outputs, changes, events, size, runs))

    def seal(self, now: float) -> None:
        """Admit nothing any more."""
        self.to(TransactionState.SENDABLE)
        self.sealed_at = now

    def taken_back(self, now: float) -> None:
        """Return to the state before the first attempt, to be sent again: it is known not to be committed."""
        if self.state not in UNSENT:
            self.to(TransactionState.SENDABLE)
        self.flushed_at = None
        self.commit_requested = False  # that request is settled: the next attempt makes its own
        if self.first_failure_at is None:  # over all attempts: the limit of time is for the work, not for one of them
            self.first_failure_at = now

    def wait(self, partition: int, waiter: Waiter) -> None:
        """Call ``waiter`` with the outcome of all that was admitted of this partition so far."""
        self.waiters.append((partition, self.cuts[partition].events, waiter))

    def without(self, partition: int) -> list[Waiter]:
        """Take one partition's events out again (only while nothing of it can be committed any more). Returns their
        waiters."""
        self.cuts.pop(partition, None)
        self.admitted = [entry for entry in self.admitted if entry.partition != partition]
        # Made anew: outputs of all partitions are in one list, in the order in which they were admitted.
        self.outputs = [output for entry in self.admitted for output in entry.outputs]
        self.events = sum(entry.events for entry in self.admitted)
        self.records = len(self.outputs) + sum(len(entry.changes) for entry in self.admitted)
        self.bytes = sum(entry.size for entry in self.admitted)
        gone = [waiter for number, _, waiter in self.waiters if number == partition]
        self.waiters = [entry for entry in self.waiters if entry[0] != partition]
        return gone

    def cut(self, most_bytes: int) -> list[Transaction]:
        """Split this into several transactions, in order, each of at most so many bytes or of one event; itself, if
        that is one. Only while it is known not to be committed, and no producer has it. Their serials are the
        caller's."""
        parts = [self._part()]
        for entry in self.admitted:
            for one in entry.by_event() if entry.size > most_bytes else (entry,):
                # A part has one entry at least: a single event may be larger than the bound, and goes alone.
                if parts[-1].admitted and parts[-1].bytes + one.size > most_bytes:
                    parts.append(self._part())
                parts[-1].admit(one.partition, one.offset, one.outputs, one.changes, one.events, one.runs)
        if len(parts) == 1:
            return [self]
        for partition, cut in self.cuts.items():
            with_it = [part for part in parts if partition in part.cuts]
            with_it[-1].cuts[partition].release = cut.release  # the marker is the last record of the partition here
            # Each waiter goes to the part that has its last event: the outcome of that is its own.
            waiting = deque(entry for entry in self.waiters if entry[0] == partition)
            events = 0
            for part in with_it:
                before, events = events, events + part.cuts[partition].events
                while waiting and waiting[0][1] <= events:
                    _, number, waiter = waiting.popleft()
                    part.waiters.append((partition, number - before, waiter))
        return parts

    def _part(self) -> Transaction:
        part = Transaction(self.serial, self.incarnation, self.opened_at)
        part.state, part.sealed_at, part.first_failure_at = self.state, self.sealed_at, self.first_failure_at
        return part

    def replace(self, output: Output, other: Output) -> None:
        """Send another record in this one's place (only while nothing of it can be committed any more)."""
        # By identity: another event may have sent an equal record.
        for entry in self.admitted:
            entry.outputs[:] = [other if known is output else known for known in entry.outputs]
        self.outputs = [known for entry in self.admitted for known in entry.outputs]

    def settle(self, error: BaseException | None) -> None:
        """Settle with the known outcome: committed (``None``), or given up for a reason. Calls the waiters, once."""
        self.to(TransactionState.DROPPED if error is not None else TransactionState.COMMITTED)
        waiters, self.waiters = self.waiters, []
        for _, _, waiter in waiters:
            waiter(error)
