"""What a handler holds while it works on one event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import EncodeError, RecordRefused, StoreError
from streams.events import event_type_of
from streams.outcomes import ExecutionState
from streams.records import Change, Headers, IncomingRecord, Output, Record, TopicPartition

if TYPE_CHECKING:
    from streams.runtime.host import Host

StoreT = TypeVar("StoreT")


class EventContext(Generic[StoreT]):
    """One event, its partition's store, and what the event sends. Valid while its handler runs, not longer.

    Nothing is sent by ``forward`` itself: outputs are collected, and go into the transaction when the event completes.
    Use it from the handler only (for ``blocking=True`` that is the handler's thread).
    """

    __slots__ = (
        "_closed",
        "_journal",
        "_limit",
        "_outputs",
        "attempt",
        "error",
        "host",
        "input",
        "store",
        "topic_partition",
    )

    host: Host
    """For the toolkit itself; set where a handler may wait for something."""

    def __init__(
        self,
        store: StoreT,
        topic_partition: TopicPartition,
        record: IncomingRecord | None,
        outputs: list[Output],
        journal: list[Change],
        limit: int,
        attempt: int = 1,
    ) -> None:
        self.store = store
        self.topic_partition = topic_partition
        self.input = record
        self.attempt = attempt
        self.error: BaseException | None = None
        self._outputs = outputs
        self._journal = journal
        self._limit = limit
        self._closed = False

    @property
    def offset(self) -> int:
        """The input record's offset; -1 for an interjection."""
        return -1 if self.input is None else self.input.offset

    @property
    def is_interjection(self) -> bool:
        """Whether this is scheduled or ad-hoc work without an input record."""
        return self.input is None

    @overload
    def forward(self, topic: Record, /) -> None: ...

    @overload
    def forward(
        self,
        topic: str,
        event: object,
        /,
        *,
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int = -1,
        timestamp_ms: int = 0,
    ) -> None: ...

    def forward(
        self,
        topic: str | Record,
        event: object = None,
        /,
        *,
        key: str | bytes | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
        partition: int = -1,
        timestamp_ms: int = 0,
    ) -> None:
        """Send an event object (its type header is set by itself), or a ready ``Record``, in this event's
        transaction.

        ``partition`` -1: the key decides (murmur2, as Java does). ``timestamp_ms`` 0: the time of sending. Raises
        ``EncodeError``, ``RecordRefused`` (larger than a producer takes), ``RegistrationError`` (not an event class).
        """
        if self._closed:
            raise _outlived("forward", self)
        if not isinstance(topic, str):
            self._collect(topic)
            return
        event_type = event_type_of(type(event))
        value = event_type.encode(event)
        if type(key) is str:
            key = key.encode()
        elif key is not None and type(key) is not bytes:
            raise EncodeError(
                f"the key for {topic} is a {type(key).__name__}; use str, bytes or None, or encode it yourself"
            )
        if len(value) > self._limit:
            raise _too_large(topic, len(value), self._limit)
        shared: Headers = event_type.headers
        if headers:
            shared = shared + list(headers)
        tp, record = self.topic_partition, self.input
        self._outputs.append(
            Output(topic, value, key, shared, partition, timestamp_ms, tp[1], -1 if record is None else record.offset)
        )

    def _collect(self, record: Record) -> None:
        size = len(record.value or b"") + len(record.key or b"")
        if size > self._limit:
            raise _too_large(record.topic, size, self._limit)
        self._outputs.append(
            Output(
                record.topic,
                record.value,
                record.key,
                record.headers,
                -1 if record.partition is None else record.partition,
                record.timestamp_ms or 0,
                self.topic_partition.partition,
                self.offset,
            )
        )

    def record_change(self, *changes: Change) -> None:
        """Write changes of an own ``StateStore`` to the changelog, in this event's transaction (the last per key
        wins).

        Stores that journal by themselves (``Table``, ``SimpleStore``) need no call; calling it all the same is
        harmless: a change that is in the journal already is not written again, or it could hide a later one of the
        same key.
        """
        if self._closed:
            raise _outlived("record_change", self)
        for change in changes:
            if change.key.startswith(RESERVED_KEY_PREFIX):
                raise StoreError(
                    f"the key {change.key!r} begins with a prefix that is reserved for the changelog itself"
                )
        for change in changes:
            if not any(change is known for known in self._journal):
                self._journal.append(change)

    async def turn(self) -> None:
        """Wait until everything before this event in its partition is complete: from then on it may use the store.

        For handlers registered with ``concurrency=...``, which run ahead of their turn; whatever they await after it
        holds up the partition. In any other handler it is the event's turn already, and this returns at once.
        """

    def fail(self, error: BaseException) -> ExecutionState:
        """Fail the event for this reason: ``return ctx.fail(error)``."""
        self.error = error
        return ExecutionState.FAIL

    def close(self) -> None:
        """The handler is done: what it still tries to do with this context is refused."""
        self._closed = True


def _outlived(method: str, ctx: EventContext[Any]) -> StoreError:
    where = f"{ctx.topic_partition}@{ctx.offset}"
    return StoreError(
        f"{method} was called after the handler of {where} had ended; what it would do could not be exactly-once"
    )


def _too_large(topic: str, size: int, limit: int) -> RecordRefused:
    return RecordRefused(
        f"a record of {size} bytes for topic {topic} is larger than message.max.bytes of the producer "
        f"({limit}): raise it in "
        "client_settings (and max.message.bytes of the topic), or make the record smaller"
    )
