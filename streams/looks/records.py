"""Records for people and for programs: decoded where a source is named, and always harmless to a terminal."""

from __future__ import annotations

import base64
import re
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from streams.core.router import Router
from streams.records import TYPE_HEADER, IncomingRecord
from streams.runtime.partition.decoding import read_event
from streams.sak.harmless import harmless
from streams.source.event_source import EventSource

_PARTITION_OFFSET: Final = re.compile(r"([0-9]{1,10})@([0-9]{1,19})")


class PartitionOffset(NamedTuple):
    """A record's place in a topic, as it is typed: ``PARTITION@OFFSET``."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}@{self.offset}"


def partition_offset_of(text: str) -> PartitionOffset | None:
    """Parse ``PARTITION@OFFSET``; ``None`` for anything else."""
    found = _PARTITION_OFFSET.fullmatch(text)
    return None if found is None else PartitionOffset(int(found[1]), int(found[2]))


class Content(NamedTuple):
    """The value of a record: its event type, the value as plain data (see ``plain``), and why it cannot be read as an
    event (``""``: it can, or no source is named)."""

    type: str
    value: Any
    problem: str = ""


class Decoder:
    """Decodes records as the handlers of a source would have them; without a source, as far as that goes."""

    def __init__(self, source: EventSource[Any] | None) -> None:
        program = None if source is None else source.program()
        self.source = source
        self._is_typed = program is not None
        router = Router()
        for route in () if program is None else program.routes:
            router.add(route)
        self._routes = router.routes
        self._default = None if program is None else program.default

    def has_rule(self, topic: str) -> bool:
        """Check whether a rule gives the records of a topic their types."""
        return self.source is not None and topic in self.source._declared.inputs.specs

    def content(self, record: IncomingRecord) -> Content:
        """Decode one record, of the type that it has, or that the source's rule gives it. Raises nothing."""
        if self.source is not None and record.as_received is record:
            [record] = self.source.received(record.topic, [record])
        name = harmless(record.header(TYPE_HEADER) or b"")
        if not self._is_typed:
            return Content(name, plain_bytes(record.value))
        route, event, error = read_event(self._routes, self._default, record)
        if error is not None or route is None or route.event_type is None:
            return Content(name, plain_bytes(record.value), "" if error is None else str(error))
        return Content(name, plain(event))


def plain(value: Any) -> Any:
    """Return a decoded value as what JSON has a form for. Bytes become base64."""

    def other(found: Any) -> Any:
        dump = getattr(found, "model_dump", None)  # a pydantic model
        return dump(mode="json") if callable(dump) else str(found)

    try:
        return msgspec.to_builtins(value, str_keys=True, enc_hook=other)
    except Exception as error:  # a class of the user's
        return f"({type(value).__name__}, which has no plain form: {type(error).__name__})"


def plain_bytes(data: bytes | None) -> Any:
    """Return bytes as JSON if they are that, else as text, else as ``{"base64": ...}``."""
    if data is None:
        return None
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return plain_text(data)


def plain_text(data: bytes | None) -> Any:
    """Return bytes as text, or as ``{"base64": ...}`` where they are none."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def one_line(value: Any) -> str:
    """Return plain data as one harmless line: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return harmless(value)
    return harmless(msgspec.json.encode(value, enc_hook=str))


def shortened(text: str, longest: int) -> str:
    """Cut a text that is too long for a table."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


def shown_time(milliseconds: int) -> str:
    """Local time to the millisecond; ``-``: none."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000).isoformat(" ", "milliseconds") if milliseconds >= 0 else "-"
    except (OverflowError, ValueError, OSError):
        return str(milliseconds)


def facts_of(record: IncomingRecord, content: Content) -> dict[str, Any]:
    """Return a record as data for ``--json``."""
    return {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": plain_text(record.key),
        "type": content.type,
        "value": content.value,
        "problem": content.problem,
        "headers": [[name, plain_text(value)] for name, value in record.headers or ()],
    }
