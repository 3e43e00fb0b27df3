"""What a dead letter looks like: the record as it came, and in its headers where it came from and why it failed."""

from __future__ import annotations

from streams.core.timers import Timer
from streams.records import Headers, IncomingRecord, Output
from streams.runtime.failures import reason_of, text_of

PREFIX = "__kes_dlq_"
"""Headers of this kind are added to the record's own, which stay as they are."""

LONGEST_TEXT = 2_000
"""Characters of the error's text that travel with a dead letter."""


def dead_letter(
    topic: str,
    record: IncomingRecord,
    error: BaseException,
    attempts: int,
    now_ms: int,
    timer: Timer | None = None,
) -> Output:
    """The record for the dead-letter topic: same key, value and headers, same partition number. That of a timer's event
    tells the timer's name and when it was due; its offset is -1."""
    cause = reason_of(error)
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
        facts |= {"timer": timer.name, "due_ms": str(timer.due_ms)}
    headers: Headers = list(record.headers or ())
    headers += [(PREFIX + name, text.encode(errors="replace")) for name, text in facts.items()]
    origin = record.offset if timer is None else timer.origin
    return Output(topic, record.value, record.key, headers, record.partition, 0, record.partition, origin)
