"""Dead letters: the record as it came, with its origin and its error in further headers.

A letter always fits. Parts that make it too large are left out: first the stack trace, then the record's own headers,
then its value, then its key, each named by a header.
"""

from __future__ import annotations

from typing import Final, Literal

from streams.core.policy import text_of
from streams.core.timers import Timer
from streams.records import RECORD_OVERHEAD, Headers, IncomingRecord, Output, record_size
from streams.runtime.partition.failures import reason_of, short_trace
from streams.runtime.partition.joined_rows import ROUTE_PREFIX

PREFIX = "__kes_dlq_"
"""The names of the headers that are added to the record's own begin with it."""

LONGEST_TEXT = 2_000
"""Characters of the error's text that a dead letter carries, at most."""

LONGEST_KEY = 1_000
"""Bytes of the longest key that is kept in a letter that refers to its record."""

Part = Literal["headers", "value", "key"]
PARTS: tuple[Part, ...] = "headers", "value", "key"
"""The parts that can be left out, in this order."""

ROW: Final = "row of a joined table"
"""The ``kind`` of the letter of a row of a joined table, which is not sent again. Letters of events have no kind."""

WINDOW: Final = "window"
"""The ``kind`` of the letter of a window that could not be reported, which is not sent again either."""

_TRACE: Final = PREFIX + "trace"


class DeadLetter(Output, gc=False):
    """The output that carries a failed record. ``facts``: how many of its headers, the last ones, are ours.
    ``is_copy``: the record is in the source, too, so parts of it may be left out."""

    facts: int
    is_copy: bool

    @property
    def size(self) -> int:
        """Return the bytes, as librdkafka counts them before it takes a record."""
        return record_size(self.key, self.value, self.headers)

    def within(self, limit: int) -> DeadLetter:
        """Return the letter with as much of the record as fits into so many bytes."""
        # The trace goes first: it is ours, and the parts of the record are worth more.
        letter = self if self.size <= limit else self._without_trace()
        for part in PARTS:
            if letter.size > limit:
                letter = letter._without(part)
        return letter

    @property
    def by_reference(self) -> DeadLetter | None:
        """Return the letter without the parts that are in the source; ``None``: this is it."""
        # They are in the source, at the place that the letter names.
        letter = self._without_trace()._without("headers")._without("value")
        if len(letter.key or b"") > LONGEST_KEY:
            letter = letter._without("key")
        return letter if letter.size < self.size else None

    def _without_trace(self) -> DeadLetter:
        headers = self.headers or []
        facts = [fact for fact in headers[-self.facts :] if fact[0] != _TRACE]
        return self._with(self.value, self.key, headers[: -self.facts], facts)

    def _without(self, part: Part) -> DeadLetter:
        headers = self.headers or []
        own, facts = headers[: -self.facts], headers[-self.facts :]
        sizes = {"headers": record_size(None, None, own) - RECORD_OVERHEAD}
        sizes |= {"value": len(self.value or b""), "key": len(self.key or b"")}
        if not sizes[part] or not self.is_copy:  # a timer's event is nowhere else
            return self
        fact = PREFIX + "left_out_" + part, str(sizes[part]).encode()
        value, key = None if part == "value" else self.value, None if part == "key" else self.key
        return self._with(value, key, [] if part == "headers" else own, [*facts, fact])

    def _with(self, value: bytes | None, key: bytes | None, own: Headers, facts: Headers) -> DeadLetter:
        return DeadLetter(
            self.topic,
            value,
            key,
            [*own, *facts],
            self.partition,
            self.timestamp_ms,
            self.origin_partition,
            self.origin,
            len(facts),
            self.is_copy,
        )


def dead_letter(
    topic: str,
    record: IncomingRecord,
    error: BaseException,
    attempts: int,
    now_ms: int,
    timer: Timer | None = None,
    handler: str = "",
    instance: str = "",
) -> DeadLetter:
    """Make the record for the dead-letter topic: same key, value and headers as it was received with, same partition
    number; the type that a rule gave it is among our headers. That of a timer's
    event names the timer and its due time; its offset is -1. ``handler`` and ``instance``: the function that failed and
    the member that it ran on, if they are known."""
    cause, came = reason_of(error), record.as_received
    facts = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "timestamp_ms": str(record.timestamp_ms),
        "error": type(cause).__name__,
        "message": text_of(cause)[:LONGEST_TEXT],
        "attempts": str(attempts),
        "failed_at_ms": str(now_ms),
    }
    if timer is not None:
        facts |= timer.facts
    if record.record_type == ROUTE_PREFIX + record.topic:
        facts["kind"] = ROW
    elif record.record_type is not None and came is not record:
        facts["type"] = record.record_type
    facts |= {"handler": handler} if handler else {}
    facts |= {"instance": instance} if instance else {}
    facts |= {"trace": trace} if (trace := short_trace(cause)) else {}
    # Ours come last: their number tells them apart from the record's own, which may have any names.
    headers: Headers = list(came.headers or ())
    headers += [(PREFIX + name, text.encode(errors="replace")) for name, text in facts.items()]
    origin, at = (record.offset if timer is None else timer.origin), record.partition
    return DeadLetter(topic, came.value, record.key, headers, at, 0, at, origin, len(facts), timer is None)
