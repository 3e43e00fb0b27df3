"""The fields of ``EventContext``: what the leaves of the hot path read for each event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from streams.core.origin import INTERJECTION, Origin
from streams.core.timers import Timer
from streams.errors import EncodeError, RecordRefused, StoreError
from streams.model.tracing import EventSpan
from streams.records import Change, IncomingRecord, Output, Record, TopicPartition, as_bytes
from streams.runtime.partition.timers import PartitionTimers

OWN_NAME: Final = "@"
"""Names of timers and jobs that the toolkit chooses begin with it; a handler cannot give such a name."""
LONGEST_NAME: Final = 500
"""Bytes of the longest name of a timer or a job, in UTF-8."""


class ContextFields(msgspec.Struct, eq=False):
    """The base of ``EventContext``, beneath the leaf that has its ``forward``."""

    store: Any
    topic_partition: TopicPartition
    input: IncomingRecord | None
    _outputs: list[Output]
    _journal: list[Change]
    _limit: int
    attempt: int = 1
    _timers: PartitionTimers | None = None
    """The partition's, from the event's turn on."""
    _first: int = 0
    """Where the event's own part of the journal begins."""
    _error: BaseException | None = None
    timer: Timer | None = None
    _timer_changes: dict[str, Timer | None] | None = None
    _host: Any = None
    """The partition's ``host.Host``; set where a handler may wait for something."""
    _closed: bool = False
    _trace: EventSpan | None = None
    """The event's span, if it is traced; ``unit.Unit`` puts it into the headers of what the event sends."""

    @property
    def offset(self) -> int:
        """The input record's offset; -1 for an interjection."""
        return -1 if self.input is None else self.input.offset

    @property
    def _records(self) -> Sequence[IncomingRecord]:
        """The input records of the event, or of a batch."""
        return () if self.input is None else (self.input,)

    @property
    def where(self) -> str:
        """``topic[partition]@offset``, as error messages name it."""
        return f"{self.topic_partition}@{self.offset}"

    @property
    def _event(self) -> str:
        """The event, in log lines."""
        if self.timer is not None:
            return f"{self.timer.title} of {self.topic_partition}"
        return self.where if self._records else f"an interjection of {self.topic_partition}"

    @property
    def _origin(self) -> Origin:
        """The origin of what the event sends and changes."""
        if self.input is not None:
            return self.input.offset
        return INTERJECTION if self.timer is None else self.timer.origin

    @property
    def _now_ms(self) -> int:
        timers = self._timers
        now_ms: int = self._host.wall_ms() if timers is None else timers.now_ms()
        return now_ms

    @property
    def _changes(self) -> dict[str, Timer | None]:
        """The timers and jobs that the event changes."""
        if self._timer_changes is None:
            self._timer_changes = {}
        return self._timer_changes

    def _collect(self, record: Record) -> None:
        value, key = record.value, record.key
        # A copy: a buffer may change before the event has ended, and its length counts items instead of bytes.
        if type(value) is not bytes:
            value = as_bytes(value)
        if type(key) is not bytes:
            key = as_bytes(key)
        try:
            size = len(value or b"") + len(key or b"")
        except TypeError:
            raise not_bytes(record) from None
        # Here the handler gets the error. The broker would refuse the record later, and the transaction with it.
        if size > self._limit:
            raise too_large(record.topic, size, self._limit)
        self._outputs.append(
            Output(
                record.topic,
                value,
                key,
                None if record.headers is None else [*record.headers],  # the client takes lists only
                -1 if record.partition is None else record.partition,
                record.timestamp_ms or 0,
                self.topic_partition.partition,
                self._origin,
            )
        )


def check_name(kind: str, name: object) -> None:
    """Check the name of a timer or a job (``kind``) that a handler has given. Raises ``StoreError``."""
    if not isinstance(name, str) or not name or name.startswith(OWN_NAME):
        raise StoreError(
            f"a {kind}'s name is {name!r}; it must be a text, not empty, that does not begin with {OWN_NAME}"
        )
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise StoreError(f"the {kind}'s name {name!r} is no valid Unicode: {error.reason}") from error
    if size > LONGEST_NAME:
        raise StoreError(f"the {kind}'s name {name[:40]!r}... has {size} bytes; at most {LONGEST_NAME} are allowed")


def outlived(method: str, ctx: ContextFields) -> StoreError:
    """Make the error of a call after the handler has ended."""
    return StoreError(
        f"{method} was called after the handler of {ctx.where} had ended; what it would do could not be exactly-once"
    )


def not_bytes(record: Record) -> EncodeError:
    """Make the error of a ready record whose key or value has no length."""
    parts: list[tuple[str, object]] = [("key", record.key), ("value", record.value)]
    name, found = next((name, found) for name, found in parts if not isinstance(found, bytes | None))
    return EncodeError(
        f"the {name} of the record for {record.topic} is {type(found).__name__}; a ready Record takes bytes or None"
    )


def too_large(topic: str, size: int, limit: int) -> RecordRefused:
    """Make the error of a record that no producer takes."""
    return RecordRefused(
        f"a record of {size} bytes for topic {topic} is larger than message.max.bytes of the producer "
        f"({limit}): raise it in "
        "client_settings (and max.message.bytes of the topic), or make the record smaller"
    )
