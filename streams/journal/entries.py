"""The contents of a journal, as programs see them: entries with events, checkpoints, and the beginnings of terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from streams.core.journal import (
    BARRIER_TYPE,
    CHECKPOINT_TYPE,
    CONTROL_TYPES,
    TERM_TYPE,
    EntryMark,
    Payload,
    checkpoint_of,
    plain_value,
    term_of,
)
from streams.core.router import type_and_version
from streams.errors import ConfigError, DecodeError, EncodeError, RegistrationError
from streams.events import EventType, event_type_of, parse_version
from streams.records import TYPE_HEADER, Headers, IncomingRecord, ReceivedHeaders

BYTES_TYPE: Final = "bytes"
"""The type of entries that are plain ``bytes``."""
_BYTES_HEADERS: Final[Headers] = [(TYPE_HEADER, BYTES_TYPE.encode())]


class JournalEntry(msgspec.Struct, frozen=True):
    """An entry: its offset, the token of the term that has appended it, its event, and its time."""

    offset: int
    term: int
    event: Any
    at_ms: int

    @property
    def position(self) -> int:
        """Behind it."""
        return self.offset + 1


class TermBegan(msgspec.Struct, frozen=True):
    """A term begins; ``term`` is its token. All entries that follow are of this term, until the next one begins."""

    offset: int
    term: int
    previous: int
    writer: str
    address: str
    at_ms: int

    @property
    def position(self) -> int:
        """Behind it."""
        return self.offset + 1


class JournalCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint: a state of everything before ``covers`` is kept."""

    offset: int
    term: int
    covers: int
    name: str
    at_ms: int

    @property
    def position(self) -> int:
        """Behind it: where a reader goes on that has met it."""
        return self.offset + 1


JournalItem = JournalEntry | TermBegan | JournalCheckpoint
"""An item that a reader yields."""


class EntryTypes:
    """The classes of a journal's events, by their names. ``bytes`` may be one of them. Any thread.

    Raises ``RegistrationError``: no event class, or two of one name.
    """

    def __init__(self, events: Iterable[type]) -> None:
        self._has_bytes = False
        self._by_name: dict[str, EventType[Any]] = {}
        self._by_class: dict[type, EventType[Any]] = {}
        self._usual: tuple[ReceivedHeaders | None, Callable[[bytes], Any]] = (None, bytes)
        """Headers of an entry of the present version, and how its value is decoded: the next one often has the same."""
        for cls in events:
            if cls is bytes:
                self._has_bytes = True
                continue
            kind: EventType[Any] = event_type_of(cls)
            if kind.name in self._by_name or kind.name in (*CONTROL_TYPES, BYTES_TYPE):
                raise RegistrationError(f"a journal has two types with the name {kind.name!r}")
            self._by_name[kind.name] = self._by_class[cls] = kind

    def payload(self, event: object) -> Payload:
        """Encode an event. Raises ``EncodeError``, ``ConfigError`` (its class is none of the journal's)."""
        if type(event) is bytes and self._has_bytes:
            return Payload(_BYTES_HEADERS, event)
        kind = self._by_class.get(type(event))
        if kind is None:
            raise ConfigError(f"{type(event).__name__} is none of the events of this journal: Journal(events=[...])")
        try:
            return Payload(kind.headers, kind.encode(event))
        except EncodeError:
            raise
        except Exception as error:
            raise EncodeError(f"{kind.name} cannot be encoded: {error!r}") from error

    def event_of(self, payload: Payload) -> Any:
        """Decode an event as readers will see it. Raises ``DecodeError``."""
        record = IncomingRecord("an entry", 0, -1, None, payload.value, payload.headers)
        name, version = type_and_version(payload.headers)
        return self._event(record, (name or b"").decode(), version)

    def item(self, record: IncomingRecord, mark: EntryMark) -> JournalItem | None:
        """Decode a record; ``None``: a barrier. Raises ``DecodeError``, ``JournalError``."""
        headers, decode = self._usual
        if record.headers is headers and headers is not None and record.value is not None:
            try:
                return JournalEntry(record.offset, mark.term, decode(record.value), record.timestamp_ms)
            except Exception:
                pass  # said below
        name, version = type_and_version(record.headers)
        kind = (name or b"").decode(errors="replace")
        if kind == TERM_TYPE:
            about, at_ms = term_of(record), record.timestamp_ms
            return TermBegan(record.offset, mark.term, mark.previous, about.writer, about.address, at_ms)
        if kind == CHECKPOINT_TYPE:
            found = checkpoint_of(record)
            return JournalCheckpoint(record.offset, mark.term, found.covers, found.name, record.timestamp_ms)
        if kind == BARRIER_TYPE:
            return None
        return JournalEntry(record.offset, mark.term, self._event(record, kind, version), record.timestamp_ms)

    def _event(self, record: IncomingRecord, kind: str, version: bytes | None) -> Any:
        value = plain_value(record)
        if kind == BYTES_TYPE and self._has_bytes:
            self._usual = (record.headers, bytes)
            return value
        known = self._by_name.get(kind)
        if known is None:
            raise DecodeError(
                f"{record.where}: the type {kind!r} is none of the events of this journal: Journal(events=[...]). "
                "Update this program before the writers"
            )
        try:
            number = 1 if version is None else parse_version(version)
            event = known.decode(value, number)
        except DecodeError as error:
            raise DecodeError(f"{record.where}: {error}") from error
        if number == known.version:
            self._usual = (record.headers, known.bare_decode)
        return event
