"""Questions to a member and its answers, as they travel: JSON, keys and values as the bytes of the table's codecs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec

from streams.errors import ConfigError, DecodeError, EncodeError, StoreError
from streams.stores.parts import StorePart
from streams.stores.structured import StructuredBytes
from streams.stores.table import Table

PATH: Final = "/api/v1/query"
"""Members answer questions at this path."""
LONGEST_SECONDS: Final = 5.0
"""One request takes so many seconds, at most, its body included."""
PAGE: Final = 1_000
"""A page has so many rows, at most."""
ROWS_IN_A_TURN: Final = 128
"""A turn reads so many rows, at most. A page takes several turns, and events have theirs in between."""
BUSY_SECONDS: Final = 1
"""A reader tries a busy member again after so many seconds."""
MOST_BYTES_IN: Final = 64 * 1024
"""A request has so many bytes, at most."""
MOST_BYTES_OUT: Final = 1024 * 1024
"""An answer has so many bytes, at most, unless a single value is larger."""
MOST_BYTES_READ: Final = 2 * MOST_BYTES_OUT
"""A reader takes an answer of less than so many bytes: a large value makes one longer than ``MOST_BYTES_OUT``."""
_PAGE_BYTES: Final = MOST_BYTES_OUT // 2
"""The keys and values of a page have so many bytes, at most: in base64, with the rest of the answer, they stay below
the limit."""

NamedOffset = tuple[str, int, int]
"""Topic, partition, offset."""


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """``kind``: ``get``, ``len`` or ``range``, of one partition. ``key``: of a ``get``. ``low`` and ``high``: the
    bounds of a range, the latter not in it; ``after``: the last key that the caller has. ``limit``: rows, at most.
    ``record_key``: of the records that lead to the key, where it is another one.

    ``table``: the structure of a ``Stores``, whose keys are those of the changelog, name included. ``index``: a range
    is in the order of this one, between ``bounds`` (``bounds_of``), and ``after`` is a place. ``reverse``: from the
    high end. Members of a release before these fields refuse a question that has one."""

    path: ClassVar[str] = PATH

    group: str
    kind: str
    partition: int
    key: bytes | None = None
    low: bytes | None = None
    high: bytes | None = None
    after: bytes | None = None
    limit: int = PAGE
    at_least: tuple[NamedOffset, ...] = ()
    confirm: bool = False
    max_staleness: float | None = None
    timeout_seconds: float = 5.0
    record_key: bytes | None = None
    table: str = ""
    index: str = ""
    bounds: bytes | None = None
    reverse: bool = False

    @property
    def keyed_by(self) -> bytes | None:
        """The key of the records, which may be parked."""
        return self.key if self.record_key is None else self.record_key


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``value``: of a ``get``, ``None``: no such key. ``count``: of a ``len``. ``rows``: of a range, ``more`` may come
    behind the last; ``places``: theirs in an index; ``due_rows``: the numbers of those that are due. ``age_seconds``:
    everything is in it that was committed so long before the question came. ``parked`` and ``due``: of a ``get``."""

    partition: int
    positions: tuple[NamedOffset, ...]
    age_seconds: float
    served_by: str
    value: bytes | None = None
    count: int = 0
    rows: tuple[tuple[bytes, bytes], ...] = ()
    more: bool = False
    parked: bool = False
    places: tuple[bytes, ...] = ()
    due: bool = False
    due_rows: frozenset[int] = frozenset()


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is none: the error by its name, and the reason."""

    error: str
    message: str


class TurnRows(msgspec.Struct, frozen=True):
    """Rows of one turn, and their places in an index; ``more`` may come behind the last. ``due``: numbers of rows."""

    rows: list[tuple[bytes, bytes]]
    more: bool
    places: Sequence[bytes] = ()
    due: Sequence[int] = ()


def read_of(question: Question, store: Any) -> dict[str, Any] | TurnRows:
    """Answer a question from a store: the fields of a reply that a value or a count makes, or ``TurnRows``. Raises
    ``StoreError``."""
    table: Any = store  # of a structure that of its entries, with the same reading methods
    part: StorePart | None = None
    name = ""
    if isinstance(store, StructuredBytes):
        name, part = store.part_named(question.table)
        table = part.table
    elif not isinstance(store, Table):
        raise StoreError(
            f"the store of {question.group} is {type(store).__name__}, and only a Table and a Stores are read from "
            "other processes; use EventSource.query in its own"
        )
    elif question.table:
        raise StoreError(f"the store of {question.group} is one Table, without a structure {question.table!r}")
    match question.kind:
        case "get":
            key = question.key or b""
            # A key of another structure would be found all the same: they are in one changelog.
            if isinstance(store, StructuredBytes) and not store.is_of(key, name):
                raise StoreError(f"the key is none of the structure {name!r}: name it (StateReader.of(..., table=))")
            # The bytes go out as they are stored: the caller has the codecs.
            value = table._get(key)
            return {"value": value, "due": True} if _is_due(part, key, value) else {"value": value}
        case "len":
            return {"count": len(table)}
        case _:
            return _rows(question, table, part)


def _rows(question: Question, table: Table[Any, Any], part: StorePart | None) -> TurnRows:
    # A turn reads less than a page: as long as it takes, the events of the partition wait.
    limit, size = min(question.limit, ROWS_IN_A_TURN), 0
    rows: list[tuple[bytes, bytes]] = []
    places: list[bytes] = []
    due: list[int] = []
    for place, key, value in _scan(question, table, part):
        # There is one row at least, however large: else the caller would never get past it.
        if len(rows) == limit or (rows and size + len(place) + len(key) + len(value) > _PAGE_BYTES):
            return TurnRows(rows, True, places, due)
        if _is_due(part, key, value):
            due.append(len(rows))
        rows.append((key, value))
        size += len(key) + len(value)
        if question.index:
            places.append(place)
            size += len(place)
    return TurnRows(rows, False, places, due)


def _is_due(part: StorePart | None, key: bytes, value: bytes | None) -> bool:
    try:
        return part is not None and value is not None and part.is_due(key, value)
    except DecodeError:  # the caller is to see which key it is
        return False


def _scan(question: Question, table: Table[Any, Any], part: StorePart | None) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Scan place, key and value of what the caller does not have yet."""
    # A page goes on behind the last row that the caller has: rows that were written meanwhile shift nothing.
    low, high, after, reverse = question.low, question.high, question.after, question.reverse
    if not question.index:
        if not table.is_ordered:
            raise StoreError("this table has no order; make it with Table.factory(..., ordered=True)")
        inclusive = (after is None or reverse, False)
        if after is not None:
            low, high = (low, after) if reverse else (after, high)
        for key, value in table._ordered().range(low, high, reverse=reverse, inclusive=inclusive):
            yield key, key, value
        return
    if part is None:
        raise StoreError(f"a Table has no index {question.index!r}; those of a Stores do")
    try:
        low, high, include_high = bounds_of(question)
        ranking, low, high = part.places(question.index, low, high, include_high=include_high)
    except EncodeError as error:
        raise StoreError(str(error)) from error
    if after is not None:
        low, high = (low, after) if reverse else (after + b"\0", high)
    for place, key in ranking.scan(low, high, reverse=reverse):
        if (found := table._get(key)) is not None:
            yield place, key, found


def encode_bounds(low: Any, high: Any, include_high: bool) -> bytes:
    """Encode the bounds of an index as it has them (``None``: no end there): their type is the member's to check.
    Raises ``ConfigError``."""
    try:
        return msgspec.msgpack.encode((low, high, include_high))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"an index has no bounds like {low!r:.80} and {high!r:.80}: {error}") from None


def bounds_of(question: Question) -> tuple[Any, Any, bool]:
    """Return low end, high end, and whether the latter is in it. Raises ``ConfigError``."""
    try:
        low, high, include_high = msgspec.msgpack.decode(question.bounds or b"", type=tuple[Any, Any, bool])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"the bounds of the index {question.index!r} cannot be read: {error}") from None
    low, high = (tuple(each) if isinstance(each, list) else each for each in (low, high))
    return low, high, include_high


def checked(question: Question, group: str, partitions: int) -> Question:
    """Check a question from outside. Raises ``ConfigError``."""
    if question.group != group:
        raise ConfigError(f"the question is for the group {question.group!r}, and this is {group!r}")
    if question.kind not in ("get", "len", "range"):
        raise ConfigError(f"the kind of question is {question.kind!r}; there are get, len and range")
    if not 0 <= question.partition < partitions:
        raise ConfigError(f"partition {question.partition}: there are 0 to {partitions - 1}")
    if question.kind == "get" and question.key is None:
        raise ConfigError("a get needs a key")
    if question.index:
        if question.kind != "range" or question.low is not None or question.high is not None:
            raise ConfigError("an index is read by ranges of what it has: bounds, without low and high")
        bounds_of(question)
    if not 1 <= question.limit <= PAGE:
        raise ConfigError(f"limit is {question.limit}; it must be 1 to {PAGE}")
    if not 0 < question.timeout_seconds <= 3600:
        raise ConfigError(f"timeout_seconds is {question.timeout_seconds}; it must be more than 0, and 3600 at most")
    if question.max_staleness is not None and not question.max_staleness > 0:
        raise ConfigError(f"max_staleness is {question.max_staleness}; it must be more than 0 seconds")
    if question.confirm and question.max_staleness is not None:
        raise ConfigError("confirm and max_staleness exclude each other: a copy cannot confirm")
    return question
