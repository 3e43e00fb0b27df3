"""The entries of a journal as records: marks, control entries, the order of terms, and what a log says of an append.

Each record has a *mark* as its key: the term that wrote it, and its number in that term, from 1. A *term* begins with
a record of its own, whose offset is the term's token; its mark names the term before it. So every reader can check that
no entry is missing, doubled, or of a term that was over; and a writer finds its entries again. (As a key, and not as a
header, since entries of one type share their headers then: that makes writing six times as fast, reading twice.)
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from streams.core.router import type_and_version
from streams.errors import DecodeError, JournalError
from streams.records import TYPE_HEADER, Headers, IncomingRecord, Output, ReceivedHeaders, shown_key

MARK: Final = b"grj:"
"""The key of each record of a journal begins with it. ``TERM:NUMBER`` follows, or ``term:PREVIOUS`` (-1: none) where a
term begins."""
TERM_TYPE: Final = "__term__"
CHECKPOINT_TYPE: Final = "__checkpoint__"
BARRIER_TYPE: Final = "__barrier__"
CONTROL_TYPES: Final = frozenset({TERM_TYPE, CHECKPOINT_TYPE, BARRIER_TYPE})
"""The event types of the journal's own entries."""


class MemberState(enum.Enum):
    """A member of a replicated service. It decides in ``LEADING`` alone."""

    LOADING = "loading"
    FOLLOWING = "following"
    CATCHING_UP = "catching up"
    LEADING = "leading"
    SETTLING = "settling"
    REBUILDING = "rebuilding"
    STOPPED = "stopped"

    def to(self, new: MemberState) -> MemberState:
        """Return ``new``. Raises ``ValueError`` for a move that is not legal: it is a bug."""
        if new not in LEGAL_MOVES[self]:
            raise ValueError(f"a member cannot go from {self.value} to {new.value}")
        return new


_S = MemberState
LEGAL_MOVES: Final[dict[MemberState, frozenset[MemberState]]] = {
    _S.LOADING: frozenset({_S.FOLLOWING, _S.STOPPED}),
    _S.FOLLOWING: frozenset({_S.CATCHING_UP, _S.STOPPED}),
    _S.CATCHING_UP: frozenset({_S.LEADING, _S.FOLLOWING, _S.STOPPED}),
    _S.LEADING: frozenset({_S.SETTLING}),
    _S.SETTLING: frozenset({_S.FOLLOWING, _S.REBUILDING, _S.STOPPED}),
    _S.REBUILDING: frozenset({_S.FOLLOWING, _S.STOPPED}),
    _S.STOPPED: frozenset(),
}


class TermState(enum.Enum):
    """A term of a leader. Entries are sent in ``COMMITTING`` alone; nothing is known to be in doubt in ``OPEN``."""

    CLAIMING = "claiming"
    OPEN = "open"
    COMMITTING = "committing"
    SETTLING = "settling"
    ENDED = "ended"

    def to(self, new: TermState) -> TermState:
        """Return ``new``. Raises ``ValueError`` for a move that is not legal: it is a bug."""
        if new not in TERM_MOVES[self]:
            raise ValueError(f"a term cannot go from {self.value} to {new.value}")
        return new


_T = TermState
TERM_MOVES: Final[dict[TermState, frozenset[TermState]]] = {
    _T.CLAIMING: frozenset({_T.OPEN, _T.ENDED}),
    _T.OPEN: frozenset({_T.COMMITTING, _T.ENDED}),
    _T.COMMITTING: frozenset({_T.OPEN, _T.SETTLING, _T.ENDED}),
    _T.SETTLING: frozenset({_T.OPEN, _T.COMMITTING, _T.ENDED}),
    _T.ENDED: frozenset(),
}


class EntryMark(NamedTuple):
    """``number`` 0: the record that begins the term; ``previous`` is the term before it then, -1 if there was none."""

    term: int
    number: int
    previous: int = -1


class TermRecord(msgspec.Struct, frozen=True):
    """The value of the record that begins a term."""

    writer: str
    began_ms: int
    address: str = ""


class CheckpointRecord(msgspec.Struct, frozen=True):
    """The value of a checkpoint."""

    covers: int
    name: str = ""


class Payload(NamedTuple):
    """An entry that is to be written: headers (its type and version) and value."""

    headers: Headers
    value: bytes


def control(kind: str, value: msgspec.Struct | None = None) -> Payload:
    """Make an entry of the journal's own."""
    return Payload([(TYPE_HEADER, kind.encode())], b"{}" if value is None else msgspec.json.encode(value))


def output_of(topic: str, payload: Payload, mark: EntryMark) -> Output:
    """Make the record of an entry."""
    content = b"%d:%d" % mark[:2] if mark.number else b"term:%d" % mark.previous
    return Output(topic, payload.value, MARK + content, payload.headers, 0, 0, 0, -1)


def outputs_of(topic: str, payloads: Iterable[Payload], term: int, first: int, origins: Iterable[int]) -> list[Output]:
    """Make the records of entries of a term, which are numbered from ``first`` on. ``origins``: given back with a
    refusal, one of each entry."""
    mark = MARK + b"%d:" % term
    return [
        Output(topic, value, mark + b"%d" % number, headers, 0, 0, 0, origin)
        for number, ((headers, value), origin) in enumerate(zip(payloads, origins, strict=True), first)
    ]


def mark_of(record: IncomingRecord) -> EntryMark:
    """Return the mark of a record. Raises ``JournalError``: it is none of a journal."""
    key = record.key
    if key is None or not key.startswith(MARK):
        raise JournalError(
            f"{record.where} is no entry of a journal: another program has written to the topic. Nothing behind it is "
            "read: find that program, and restore the topic"
        )
    first, _, second = key.removeprefix(MARK).partition(b":")
    try:
        mark = EntryMark(record.offset, 0, int(second)) if first == b"term" else EntryMark(int(first), int(second))
    except ValueError:
        mark = EntryMark(-1, -1)
    is_term = type_and_version(record.headers)[0] == TERM_TYPE.encode()
    if mark.term < 0 or mark.number < 0 or is_term != (mark.number == 0):
        raise JournalError(f"{record.where}: the key {shown_key(key)} is no mark of an entry")
    return mark


def checkpoint_of(record: IncomingRecord) -> CheckpointRecord:
    """Decode a checkpoint. Raises ``JournalError``."""
    try:
        found = msgspec.json.decode(record.value or b"", type=CheckpointRecord)
    except msgspec.MsgspecError as error:
        raise JournalError(f"{record.where}: the checkpoint cannot be read: {error}") from None
    if not 0 <= found.covers <= record.offset:
        raise JournalError(f"{record.where}: the checkpoint covers what is before {found.covers}, which is behind it")
    return found


def term_of(record: IncomingRecord) -> TermRecord:
    """Decode the record that begins a term. Raises ``JournalError``."""
    try:
        return msgspec.json.decode(record.value or b"", type=TermRecord)
    except msgspec.MsgspecError as error:
        raise JournalError(f"{record.where}: the beginning of a term cannot be read: {error}") from None


class LogOrder:
    """Checks the records of a journal, one after the other, from any place in the log on. ``is_start``: from offset 0,
    where the first term begins."""

    def __init__(self, *, is_start: bool = False) -> None:
        self.term = self.number = self.offset = -1
        self._is_start = is_start
        self._mark = b""  # how the keys of the present term begin
        self._headers: ReceivedHeaders | None = None  # of an entry of it: those of the next one are often the same list

    def see(self, record: IncomingRecord) -> EntryMark:
        """Return the mark of the next record. Raises ``JournalError`` where the order is broken."""
        number, offset = self.number + 1, record.offset
        # Almost all records: the next entry of the same term and type. The rest says what is wrong, if anything is.
        if (
            offset > self.offset
            and record.key == self._mark + b"%d" % number
            and record.headers is self._headers
            and self._headers is not None
        ):
            self.number, self.offset = number, offset
            return EntryMark(self.term, number)
        mark = self._see_any(record)
        if mark.number:
            self._mark, self._headers = MARK + b"%d:" % mark.term, record.headers
        else:
            self._mark, self._headers = b"", None
        return mark

    def _see_any(self, record: IncomingRecord) -> EntryMark:
        mark = mark_of(record)
        if record.offset <= self.offset:
            raise JournalError(f"{record.where} comes after offset {self.offset}: the topic was recreated")
        if self._is_start and self.offset < 0 and (mark.number or mark.previous >= 0):
            raise JournalError(
                f"{record.where} is the first entry, and none that begins the first term: some are missing"
            )
        if not mark.number:
            if mark.previous >= mark.term or (self.term >= 0 and mark.previous != self.term):
                raise JournalError(
                    f"{record.where} begins a term after term {mark.previous}, and the log has term {self.term} before "
                    f"it, up to offset {self.offset}: a term is missing"
                )
        elif mark.term >= record.offset or (self.term >= 0 and mark.term != self.term):
            # A term is the offset of the record that begins it, and its entries are behind that record.
            raise JournalError(f"{record.where} is of term {mark.term}, and term {self.term} has begun before it")
        elif self.term >= 0 and mark.number != self.number + 1:
            raise JournalError(
                f"{record.where} is number {mark.number} of term {mark.term}, after number {self.number} at offset "
                f"{self.offset}: entries are missing"
            )
        self.term, self.number, self.offset = mark.term, mark.number, record.offset
        return mark


class SettledAppend(NamedTuple):
    """The answer of a log about an append: the offsets of its entries (empty: it is not there), and the first younger
    term (-1: none)."""

    offsets: tuple[int, ...]
    newer: int


def settled(records: Iterable[IncomingRecord], term: int, first: int, count: int) -> SettledAppend:
    """Look for the entries ``first`` to ``first + count - 1`` of a term, in the records behind the last known one.

    Raises ``JournalError``: foreign records, or a part of a transaction.
    """
    found: dict[int, int] = {}
    newer = -1
    for record in records:
        mark = mark_of(record)
        if not mark.number:
            # A term is the offset of the record that begins it, so younger terms have larger numbers.
            newer = record.offset if newer < 0 and record.offset > term else newer
        elif mark.term == term and first <= mark.number < first + count:
            if newer >= 0:
                raise JournalError(f"{record.where} is of term {term}, and term {newer} has begun before it")
            found[mark.number] = record.offset
    # An append is one transaction: the log has all of it, or nothing.
    if found and len(found) != count:
        raise JournalError(f"of {count} entries of term {term} from number {first} on, the log has {sorted(found)}")
    return SettledAppend(tuple(found[number] for number in sorted(found)), newer)


def kept_from(covers: Sequence[int], keep: int) -> int:
    """Return the position before which a log may be deleted, so that ``keep`` checkpoints are left; -1: nothing may.
    ``covers``: of all checkpoints, in the order of the log."""
    if keep < 1 or len(covers) < keep:
        return -1
    return min(covers[-keep:])  # not that of the oldest: a later one may cover less


def plain_value(record: IncomingRecord) -> bytes:
    """Return the value. Raises ``DecodeError``: it is null."""
    if record.value is None:
        raise DecodeError(f"{record.where}: the value is null; an entry has a value")
    return record.value
