"""The nouns of the toolkit: where a record is, what was received, what is to be sent, what changed in a store.

These are made per event, so they are ``msgspec.Struct`` (0.08 us to build; a frozen dataclass costs ten times that).
Treat all of them as values: none is changed after it was handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

TYPE_HEADER: Final = "__grt__"
"""Header that carries an event's name on the wire (the ancestor's name, so that both can read each other)."""
VERSION_HEADER: Final = "__grv__"
"""Header that carries an event's version as decimal digits. Absent means version 1."""

ID_HEADER: Final = "kes-id"
"""Header that carries a record's id, for sources that handle each id once (``Once(header("kes-id"), ...)``)."""

Headers = list[tuple[str, bytes | None]]
"""Record headers as Kafka has them: ordered, names may repeat, values may be null."""

ReceivedHeaders = Sequence[tuple[str, bytes | None]]
"""Headers of a record that was received: they are never changed. Clients give tuples, and records that have nothing
but the same type share one. That is a tenth of the price of an event: lists of its own, for each record that waits,
keep the garbage collector busy."""


RECORD_OVERHEAD: Final = 36
"""Bytes that librdkafka adds to a record's key, value and headers when it compares its size with ``message.max.bytes``,
and ``HEADER_OVERHEAD`` for each header (the largest that these lengths can become on the wire)."""
HEADER_OVERHEAD: Final = 10


DEFAULT_MESSAGE_LIMIT: Final = 1_000_000
"""librdkafka's default for ``message.max.bytes``."""


def as_bytes(content: Any) -> Any:
    """Return text or a buffer as bytes of its own, which stay when the buffer is filled again; other things as they
    are."""
    if isinstance(content, str):
        return content.encode()
    return bytes(content) if isinstance(content, bytes | bytearray | memoryview) else content


def record_size(key: bytes | None, value: bytes | None, headers: ReceivedHeaders | None) -> int:
    """Count the bytes of a record as librdkafka does before it takes one."""
    size = RECORD_OVERHEAD + len(key or b"") + len(value or b"")
    for name, content in headers or ():
        size += HEADER_OVERHEAD + len(name.encode()) + len(content or b"")
    return size


def shown_key(key: bytes | None) -> str:
    """Show a key in a message: its first 40 bytes, and its length if it has more."""
    if key is None:
        return "null"
    return repr(key) if len(key) <= 40 else f"{key[:40]!r}... ({len(key)} bytes)"


class TopicPartition(NamedTuple):
    """One partition of one topic. Sorts by topic, then number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


class PartitionChange(NamedTuple):
    """A partition that comes to this member, or goes. ``epoch`` counts what the member takes up, each time anew: what
    comes and what goes belong together by it. ``reason``: ``assigned`` (restored from its changelog), ``moved`` (warm,
    from or to another member), ``restarted`` (its state was dropped and restored); ``revoked`` (by the group),
    ``stopped`` (the source stops), ``lost`` (with the membership, or fenced: nothing can be committed any more)."""

    partition: int
    epoch: int
    reason: str


class IncomingRecord(msgspec.Struct, gc=False):
    """A record as it was received. ``timestamp_ms`` is the record's own (producer's or broker's), -1 if it has none."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: ReceivedHeaders | None
    timestamp_ms: int = -1

    @property
    def record_type(self) -> str | None:
        """The event's name on the wire, or ``None`` when the header is missing, null or not UTF-8."""
        for name, value in self.headers or ():
            if name == TYPE_HEADER:
                try:
                    return value.decode() if value is not None else None
                except UnicodeDecodeError:
                    return None
        return None

    def header(self, name: str) -> bytes | None:
        """The value of the first header called ``name``, or ``None``."""
        for found, value in self.headers or ():
            if found == name:
                return value
        return None

    @property
    def where(self) -> str:
        """``topic[partition]@offset``, as error messages name it."""
        return f"{self.topic}[{self.partition}]@{self.offset}"

    @property
    def as_received(self) -> IncomingRecord:
        """The record as it is in its topic: another one where a rule has given it its type (``formats.TypeRule``)."""
        return self


class TypedRecord(IncomingRecord, gc=False, kw_only=True):
    """A record with the type that a rule has given it, in our headers. ``value`` is that of the event, which may be a
    part of the original's. ``reason``: why it has no type; ``is_refused``: it is to be read by no handler at all.
    ``ending``: what the rule has raised to end the process, which is for the record's turn."""

    original: IncomingRecord
    reason: str = ""
    is_refused: bool = False
    ending: SystemExit | None = None

    @property
    def as_received(self) -> IncomingRecord:
        """The record as it is in its topic: it is what letters and queues keep."""
        return self.original


class Record(msgspec.Struct, gc=False):
    """A record to be sent.

    ``value=None`` is a tombstone; ``b""`` is an empty value: they are different things. ``partition=None`` lets the key
    decide (murmur2, as Java does; records without key are spread). ``timestamp_ms=None``, or 0: the time of sending.
    """

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes | None]] | None = None
    partition: int | None = None
    timestamp_ms: int | None = None


class Delivery(msgspec.Struct):
    """Result of a record that was sent outside of transactions: ``partition`` and ``offset`` (-1: not known), or
    the ``error``. In a replay, which sends nothing, both are -1."""

    record: Record
    partition: int = -1
    offset: int = -1
    error: Exception | None = None


class Acknowledgement(NamedTuple):
    """A producer's report of one record; ``token`` came with the record."""

    token: Any
    partition: int
    offset: int
    error: Exception | None


UNREAD: Final = b"".join((b"not", b" read"))
"""``Change.previous`` of a write that did not read what it replaces, as the writes of a table on disk. By identity."""


class Change(msgspec.Struct, gc=False):
    """One write to a store: ``key`` now has ``value`` (``None``: deleted); before it had ``previous`` (``None``:
    nothing; ``UNREAD``: not known).

    ``previous`` is what an undo puts back. While a store is restored from its changelog ``previous`` is ``None``.
    ``type`` is the name of the entry's type for own stores that keep several kinds of entries; it travels as header.
    ``origin`` is the offset of the event that made the change, filled in by the engine (-1: an interjection).
    """

    key: bytes
    value: bytes | None
    previous: bytes | None = None
    type: str = ""
    origin: int = -1


class Output(msgspec.Struct, gc=False):
    """A record that an event sends, with the event it comes from (``origin`` -1: an interjection of the partition).

    ``partition`` -1 lets the key decide; ``timestamp_ms`` 0 is the time of sending.
    """

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers | None
    partition: int
    timestamp_ms: int
    origin_partition: int
    origin: int

    @property
    def blamed(self) -> int:
        """Return the origin of the work that fails if this is refused."""
        return self.origin


class WindowOutput(Output, gc=False):
    """A record that ``on_close`` of a window sends, in the transaction of the event in front of which the window
    closes. ``window``: the window's own origin."""

    window: int

    @classmethod
    def of(cls, sent: Output, window: int) -> WindowOutput:
        """Make it of what the function has sent."""
        return cls(
            sent.topic,
            sent.value,
            sent.key,
            sent.headers,
            sent.partition,
            sent.timestamp_ms,
            sent.origin_partition,
            sent.origin,
            window,
        )

    @property
    def blamed(self) -> int:
        """Return the origin of the window."""
        return self.window


class OwnSample(Output, gc=False, kw_only=True):
    """A value of a metric of the source's own. It is no record: it goes with the outputs of its event as far as the
    transaction, and is counted when that is committed (``source.metric``)."""

    name: str
    amount: float
    labels: tuple[str, ...]


class RefusedRecord(NamedTuple):
    """A record that the client or the broker refuses. ``is_own``: the record itself is at fault, and not its topic, a
    right or a clock. ``output``: ``None`` where a whole batch is refused and no record of it is named."""

    topic: str
    code: str
    reason: str
    is_own: bool
    output: Output | None

    @property
    def is_batch_only(self) -> bool:
        """Check for a batch that is too large, while none of its records is: those of the next attempt are smaller."""
        return self.output is None and self.code in ("MESSAGE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")


def changelog_record(topic: str, partition: int, change: Change) -> Output:
    """Make the record of a change in the changelog."""
    headers: Headers | None = [(TYPE_HEADER, change.type.encode())] if change.type else None
    return Output(topic, change.value, change.key, headers, partition, 0, partition, change.origin)


class PolledPartition(NamedTuple):
    """News of one partition: ``records`` (committed ones, in order, maybe none); all below ``position`` was read;
    ``end`` is the high watermark as far as it is known (-1: not yet). ``at_end``: nothing that is committed is left to
    read (an open transaction may keep ``position`` below ``end``)."""

    records: list[IncomingRecord]
    position: int
    end: int
    at_end: bool
