"""Questions to a member and its answers, as they travel: JSON, keys and values as the bytes of the table's codecs."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from streams.errors import ConfigError, StoreError
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
    ``record_key``: of the records that lead to the key, where it is another one."""

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

    @property
    def keyed_by(self) -> bytes | None:
        """The key of the records, which may be parked."""
        return self.key if self.record_key is None else self.record_key


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``value``: of a ``get``, ``None``: no such key. ``count``: of a ``len``. ``rows``: of a range, ``more`` may come
    behind the last. ``age_seconds``: everything is in it that was committed so long before the question came.
    ``parked``: of a ``get``."""

    partition: int
    positions: tuple[NamedOffset, ...]
    age_seconds: float
    served_by: str
    value: bytes | None = None
    count: int = 0
    rows: tuple[tuple[bytes, bytes], ...] = ()
    more: bool = False
    parked: bool = False


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is none: the error by its name, and the reason."""

    error: str
    message: str


class TurnRows(msgspec.Struct, frozen=True):
    """Rows of one turn; ``more`` may come behind the last."""

    rows: list[tuple[bytes, bytes]]
    more: bool


def read_of(question: Question, store: Any) -> Any:
    """Answer a question from a store: the bytes of a value, a count, or ``TurnRows``. Raises ``StoreError``."""
    if not isinstance(store, Table):
        raise StoreError(
            f"the store of {question.group} is {type(store).__name__}, and only a Table is read from other processes; "
            "use EventSource.query in its own"
        )
    match question.kind:
        case "get":
            # The bytes go out as they are stored: the caller has the codecs.
            return store._get(question.key or b"")
        case "len":
            return len(store)
        case _:
            return _rows(question, store)


def _rows(question: Question, store: Table[Any, Any]) -> TurnRows:
    if not store.is_ordered:
        raise StoreError("this table has no order; make it with Table.factory(..., ordered=True)")
    # A page goes on behind the last key that the caller has: rows that were written meanwhile shift nothing.
    low, inclusive = (question.low, True) if question.after is None else (question.after, False)
    # A turn reads less than a page: as long as it takes, the events of the partition wait.
    limit, size = min(question.limit, ROWS_IN_A_TURN), 0
    rows: list[tuple[bytes, bytes]] = []
    for key, value in store._ordered().range(low, question.high, reverse=False, inclusive=(inclusive, False)):
        # There is one row at least, however large: else the caller would never get past it.
        if len(rows) == limit or (rows and size + len(key) + len(value) > _PAGE_BYTES):
            return TurnRows(rows, True)
        rows.append((key, value))
        size += len(key) + len(value)
    return TurnRows(rows, False)


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
    if not 1 <= question.limit <= PAGE:
        raise ConfigError(f"limit is {question.limit}; it must be 1 to {PAGE}")
    if not 0 < question.timeout_seconds <= 3600:
        raise ConfigError(f"timeout_seconds is {question.timeout_seconds}; it must be more than 0, and 3600 at most")
    if question.max_staleness is not None and not question.max_staleness > 0:
        raise ConfigError(f"max_staleness is {question.max_staleness}; it must be more than 0 seconds")
    if question.confirm and question.max_staleness is not None:
        raise ConfigError("confirm and max_staleness exclude each other: a copy cannot confirm")
    return question
