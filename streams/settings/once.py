"""Settings of deduplication: which id an event has, how long it is remembered, and how many are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from streams.errors import ConfigError, EncodeError, RegistrationError
from streams.protocols import DiskEngine
from streams.records import ID_HEADER, IncomingRecord
from streams.sak.numbers import is_number, is_whole

MOST_IDS: Final = 1_000_000
"""Ids that one partition remembers, if no ``Once`` says how many."""
LONGEST_SECONDS: Final = 100 * 365 * 86_400
"""Ids are remembered for so long, at most: their time is four bytes of seconds."""

WhenFull: TypeAlias = Literal["stop", "forget"]
EventId: TypeAlias = str | bytes | int | None
"""The id of an event; ``None``: it has none, and is handled whatever was handled before."""


class HeaderId(NamedTuple):
    """The content of a header, as an id."""

    name: str


def header(name: str) -> HeaderId:
    """Take the content of the record's first header of this name for its id: ``Once(header("kes-id"), ...)``. A record
    without it, or with a null one, has no id. Raises ``ConfigError``."""
    given: object = name  # whatever it is
    if not isinstance(given, str) or not given:
        raise ConfigError(f"the header of an id is {given!r}; it must be the name of a header")
    return HeaderId(given)


class Once(msgspec.Struct, frozen=True):
    """Handle events of one id once, within a time: ``source.on(once=Once("payment_id", within=timedelta(days=7)))``.

    * ``id`` names a field of the event (``"payment.id"``: of the event's ``payment``), or is ``header("kes-id")``, or a
      function of (record, event). An id is a text, bytes or a whole number; with ``None`` an event is handled in any
      case. Another one, an empty one, or an error of the function is the event's failure.
    * ``within``: how long an id is remembered after its event was handled (timedelta, or seconds), at least.
    * ``scope``: ids are compared within it. Default: the event type's name. Types of one scope share their ids.
    * ``max_ids``: how many ids one partition remembers, 1,000,000 by default; in memory each takes about 120 bytes.
    * ``engine`` (``SQLite()``, ``RocksDB()``) keeps ids on disk, in the database of the store, which has the same one.
    * ``when_full``: at ``max_ids`` the source stops (``"stop"``, the default), or the oldest ids go early
      (``"forget"``; not with an ``engine``).

    A source has one table of ids a partition: what one ``Once`` says of ``max_ids``, ``engine`` and ``when_full`` holds
    for all of them. Raises ``ConfigError``.
    """

    id: str | HeaderId | Callable[[IncomingRecord, Any], EventId]
    within: timedelta | float = msgspec.field(default=0)
    scope: str | None = None
    max_ids: int | None = None
    engine: DiskEngine | None = None
    when_full: WhenFull | None = None

    def __post_init__(self) -> None:
        id, within, scope = _given(self.id), _given(self.within), _given(self.scope)
        if not (isinstance(id, HeaderId) or callable(id) or (isinstance(id, str) and _is_path(id))):
            raise ConfigError(
                f"Once.id is {id!r}; name a field of the event, or give header(...), or a function of (record, event)"
            )
        seconds = within.total_seconds() if isinstance(within, timedelta) else within
        if not is_number(seconds) or not 0 < seconds <= LONGEST_SECONDS:
            raise ConfigError(f"Once.within is {within!r}; give a timedelta, or seconds, above 0, up to 100 years")
        if scope is not None and (not isinstance(scope, str) or not scope or "\0" in scope or not _is_unicode(scope)):
            raise ConfigError(f"Once.scope is {scope!r}; it must be a text, not empty, without zero bytes")
        most, when_full, engine = _given(self.max_ids), _given(self.when_full), _given(self.engine)
        if most is not None and not (is_whole(most) and most >= 1):
            raise ConfigError(f"Once.max_ids is {most!r}; it must be a whole number of at least 1")
        if when_full not in (None, "stop", "forget"):
            raise ConfigError(f"Once.when_full is {when_full!r}; use 'stop' or 'forget'")
        if engine is not None and not hasattr(engine, "open"):
            raise ConfigError(f"Once.engine is {engine!r}; give an engine such as SQLite() or RocksDB()")
        if engine is not None and when_full == "forget":
            raise ConfigError(_NOT_BOTH)

    @property
    def within_s(self) -> int:
        """Return how long an id is remembered, in whole seconds, rounded up."""
        return math.ceil(self.within.total_seconds() if isinstance(self.within, timedelta) else self.within)


_NOT_BOTH: Final = (
    "Once has an engine and when_full='forget': which ids on disk are the oldest is not known without reading all of "
    "them; give more max_ids, or a shorter within"
)


class OnceBounds(NamedTuple):
    """Bounds of the ids of one partition. ``shortest_s``: the shortest time that some of them are remembered."""

    shortest_s: int
    max_ids: int = MOST_IDS
    when_full: WhenFull = "stop"
    engine: DiskEngine | None = None

    @classmethod
    def of(cls, all_of_them: Iterable[Once]) -> OnceBounds | None:
        """Join what each ``Once`` of a source says; ``None``: there is none. Raises ``RegistrationError`` for two that
        say different things."""
        found = list(all_of_them)
        if not found:
            return None
        said: dict[str, Any] = {}
        for name in ("max_ids", "when_full", "engine"):
            values: list[Any] = [getattr(once, name) for once in found if getattr(once, name) is not None]
            names = sorted({repr(getattr(value, "name", value)) for value in values})
            if len(names) > 1:
                raise RegistrationError(
                    f"the ids of a source (once=) are in one table a partition, and {name} is said to be "
                    f"{' and '.join(names)}: say it in one Once, or the same in all"
                )
            if values:
                said[name] = values[0]
        if "engine" in said and said.get("when_full") == "forget":
            raise RegistrationError(_NOT_BOTH)
        return cls(min(once.within_s for once in found), **said)


def with_id(
    headers: Iterable[tuple[str, bytes | None]], id: str | bytes | int | None
) -> Iterable[tuple[str, bytes | None]]:
    """Return headers with that of a record's id behind them; ``None``: it has none. Raises ``EncodeError``."""
    if id is None:
        return headers
    given: object = id  # whatever it is
    if isinstance(given, str):
        data = given.encode(errors="replace")
    elif isinstance(given, bytes):
        data = given
    elif isinstance(given, int) and not isinstance(given, bool):
        data = b"%d" % given
    else:
        raise EncodeError(f"the id of a record is a {type(given).__name__}; it must be a text, bytes or a whole number")
    if not data:
        raise EncodeError("the id of a record is empty")
    return [*headers, (ID_HEADER, data)]


def _given(value: object) -> object:
    return value  # whatever it is


def _is_path(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
