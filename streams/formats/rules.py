"""Rules that give records their types: for topics that are written by other programs, without our headers.

A rule runs once for each record, where records come in (``InputSpec.received``). What it returns has our headers, so
that routes, policies and replays need to know nothing of it; ``as_received`` of it is the record as it came, and that
is what dead letters and the queues of parked keys keep. A rule never guesses: a record that does not say its type has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import msgspec

from streams.errors import ConfigError, DecodeError
from streams.events import EventType, event_type, event_type_of
from streams.model.reasons import reason
from streams.outcomes import POLICIES, ErrorPolicy, is_policy
from streams.records import TYPE_HEADER, VERSION_HEADER, IncomingRecord, ReceivedHeaders, TypedRecord

_MAPS: Final = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
"""First bytes of a map in msgpack: no JSON begins with one of them."""


class _Key:
    """The codec of ``Deleted``."""

    def encode(self, event: Deleted, /) -> bytes:
        return event.key

    def decode(self, data: bytes, /) -> Deleted:
        return Deleted(data)


@event_type("kes.Deleted", codec=_Key())
class Deleted(msgspec.Struct, frozen=True):
    """The event of a tombstone, a record with a key and without a value: what another program kept under this key is
    gone. Handlers get it from inputs whose rule has ``nulls=Deleted``."""

    key: bytes


_DELETED: Final = event_type_of(Deleted)
_DELETED_HEADERS: Final = tuple(_DELETED.headers)


Found = tuple[ReceivedHeaders | None, bytes | None]
"""The headers of a record's type (``None``: the rule finds no type), and the value of its event."""


class TypeRule:
    """The base of all rules. ``nulls``: the error policy of records without a value (``SKIP``, say), or ``Deleted``;
    ``missing``: that of records that do not say their type. Without them the source's ``decode_policy`` holds.

    Rules are never changed, and may be used from any thread. They travel to Spark's executors.
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        self = super().__new__(cls)
        self._arguments = arguments, named
        return self

    def __reduce__(self) -> Any:
        return made, (type(self), *self._arguments)

    def __init__(
        self, title: str, nulls: ErrorPolicy | type[Deleted] | None, missing: ErrorPolicy | None = None
    ) -> None:
        self.title = title
        if not (nulls is None or nulls is Deleted or is_policy(nulls)):
            raise ConfigError(f"nulls of {title} is {nulls!r}; it must be an error policy, {POLICIES}; or Deleted")
        if missing is not None and not is_policy(missing):
            raise ConfigError(f"missing of {title} is {missing!r}; it must be an error policy: {POLICIES}")
        self.on_null = None if isinstance(nulls, type) else nulls
        self.on_missing = missing
        self._deletes = nulls is Deleted
        self._untyped = f"{title} finds no type in the record"

    def __repr__(self) -> str:
        return self.title

    @property
    def names(self) -> tuple[str, ...]:
        """The types that it can give, as far as they are known before a record is read."""
        own = tuple(described.name for described in self._types())
        return (*own, _DELETED.name) if self._deletes else own

    def received(self, records: list[IncomingRecord]) -> list[IncomingRecord]:
        """Return records with their types."""
        return [self.typed(record) for record in records]

    def typed(self, record: IncomingRecord) -> IncomingRecord:
        """Return a record with its type."""
        why, is_refused, ending = "", False, None
        headers: ReceivedHeaders | None
        value: bytes | None
        if record.value is None and self._deletes and record.key is not None:
            headers, value = _DELETED_HEADERS, record.key
        else:
            try:
                headers, value = self._find(record)
            except DecodeError as error:
                headers, value, why, is_refused = None, record.value, str(error), True
                ending = error.__cause__ if isinstance(error.__cause__, SystemExit) else None
            if headers is None:
                headers, why = (), why or self._untyped
        if record.headers:  # without them all records of a type share one tuple, whose handler is known
            headers = (*headers, *without_type(record.headers))
        return TypedRecord(
            record.topic,
            record.partition,
            record.offset,
            record.key,
            value,
            headers,
            record.timestamp_ms,
            original=record,
            reason=why,
            is_refused=is_refused,
            ending=ending,
        )

    def _types(self) -> tuple[EventType[Any], ...]:
        return ()

    def _find(self, record: IncomingRecord) -> Found:
        """Find the type of a record. ``DecodeError``: no handler gets it, not even the default one."""
        raise NotImplementedError


class Always(TypeRule):
    """Every record is of the type with these headers."""

    def __init__(self, title: str, headers: ReceivedHeaders, nulls: ErrorPolicy | type[Deleted] | None = None) -> None:
        super().__init__(title, nulls)
        self._headers = headers

    def received(self, records: list[IncomingRecord]) -> list[IncomingRecord]:
        typed, headers = self.typed, self._headers
        return [  # written out for the records that are most: three quarters of the price of ``typed``
            typed(record)
            if record.headers or record.value is None
            else TypedRecord(
                record.topic,
                record.partition,
                record.offset,
                record.key,
                record.value,
                headers,
                record.timestamp_ms,
                original=record,
            )
            for record in records
        ]

    def _find(self, record: IncomingRecord) -> Found:
        return self._headers, record.value


class Only(Always):
    """Every record is an event of this class, whatever headers it has: ``types=Only(Click)``."""

    def __init__(self, event: type[Any], *, nulls: ErrorPolicy | type[Deleted] | None = None) -> None:
        described = event_type_of(event)
        super().__init__(f"Only({event.__name__})", tuple(described.headers), nulls)
        self._event = described

    def _types(self) -> tuple[EventType[Any], ...]:
        return (self._event,)


class ByField(TypeRule):
    """A field of the value says the type: ``types=ByField("kind", {"placed": OrderPlaced, "paid": OrderPaid})``.

    Values are JSON objects or maps of msgpack, of which only the top level is looked at. The field is a text; one that
    is missing, of another kind, or not in the table says nothing. Each class decodes the whole value.
    """

    def __init__(
        self,
        field: str,
        table: Mapping[str, type[Any]],
        *,
        missing: ErrorPolicy | None = None,
        nulls: ErrorPolicy | type[Deleted] | None = None,
    ) -> None:
        title = f"ByField({field!r})"
        super().__init__(title, nulls, missing)
        self._table = _described(title, table)
        head: Any = msgspec.defstruct("Head", [("text", str | None, None)], rename={"text": _named(title, field)})
        self._json, self._msgpack = msgspec.json.Decoder(head), msgspec.msgpack.Decoder(head)

    def _types(self) -> tuple[EventType[Any], ...]:
        return tuple(described for described, _ in self._table.values())

    def _find(self, record: IncomingRecord) -> Found:
        value = record.value
        if not value:
            return None, value
        try:
            text = (self._msgpack if value[0] in _MAPS else self._json).decode(value).text
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None, value
        known = self._table.get(text)
        return None if known is None else known[1], value


class ByHeader(TypeRule):
    """A header of the record says the type: ``types=ByHeader("event-type", {"placed": OrderPlaced})``; without a table
    by the names that the event types have, in the version that ``__grv__`` says, or 1.

    A header that is there twice, with different contents, says nothing.
    """

    def __init__(
        self,
        header: str,
        table: Mapping[str, type[Any]] | None = None,
        *,
        missing: ErrorPolicy | None = None,
        nulls: ErrorPolicy | type[Deleted] | None = None,
    ) -> None:
        title = f"ByHeader({header!r})"
        super().__init__(title, nulls, missing)
        self._header = _named(title, header)
        known = None if table is None else _described(title, table)
        self._table = None if known is None else {name.encode(): described for name, described in known.items()}

    def _types(self) -> tuple[EventType[Any], ...]:
        return () if self._table is None else tuple(described for described, _ in self._table.values())

    def _find(self, record: IncomingRecord) -> Found:
        said = {content for name, content in record.headers or () if name == self._header}
        name = said.pop() if len(said) == 1 else None
        if not name:
            return None, record.value
        if self._table is not None:
            known = self._table.get(name)
            return None if known is None else known[1], record.value
        version = record.header(VERSION_HEADER)
        of_version = () if version is None else ((VERSION_HEADER, version),)
        return ((TYPE_HEADER, name), *of_version), record.value


class ByFunction(TypeRule):
    """A function of the record says the type: ``types=ByFunction(kind_of)``. It returns an event class, or the name of
    an event type (of version 1), or ``None``: the record does not say it.

    It is called on the event loop, once for each record that comes in, before the record's turn, so it is quick and
    keeps nothing. What it raises, even a ``CancelledError``, makes the record one that cannot be read; ``SystemExit``
    ends the source at the record's turn, as that of a handler does.
    """

    def __init__(
        self,
        function: Callable[[IncomingRecord], type[Any] | str | None],
        *,
        missing: ErrorPolicy | None = None,
        nulls: ErrorPolicy | type[Deleted] | None = None,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"ByFunction takes a function of the record, not {function!r}")
        super().__init__(f"ByFunction({getattr(function, '__qualname__', repr(function))})", nulls, missing)
        self._function = function

    def _find(self, record: IncomingRecord) -> Found:
        try:
            said: object = self._function(record)
            if isinstance(said, type):
                return tuple(event_type_of(said).headers), record.value
            name = said.encode() if isinstance(said, str) else None
        except KeyboardInterrupt:
            raise
        # A cancellation, too: the loop would drop all records that came with this one. An exit ends the source at the
        # record's turn, where it can be named, as one of a handler does.
        except BaseException as error:
            raise DecodeError(f"{self.title} failed: {reason(error)}") from error
        if said is not None and name is None:
            raise DecodeError(f"{self.title} returned {said!r}; it must be an event class, the name of one, or None")
        return ((TYPE_HEADER, name),) if name else None, record.value


def without_type(headers: ReceivedHeaders) -> list[tuple[str, bytes | None]]:
    """Return headers without those of our types: the rule alone says the type."""
    return [header for header in headers if header[0] not in (TYPE_HEADER, VERSION_HEADER)]


def _described(title: str, table: Any) -> dict[str, tuple[EventType[Any], ReceivedHeaders]]:
    if not isinstance(table, Mapping) or not table or not all(isinstance(name, str) for name in table):
        raise ConfigError(f"the table of {title} is {table!r}; it has event classes by the texts that name them")
    types = {name: event_type_of(cls) for name, cls in table.items()}
    headers = {found.name: tuple(found.headers) for found in types.values()}
    return {name: (found, headers[found.name]) for name, found in types.items()}


def _named(title: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{title}: give the name as a text")
    return name


def made(rule: type[TypeRule], arguments: tuple[Any, ...], named: dict[str, Any]) -> TypeRule:
    """Make a rule again, in another process: its decoders cannot be pickled."""
    return rule(*arguments, **named)
