"""``GlobalTable``: the contents of a topic, kept by a global change log and read like a ``Table``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from streams.codecs import codec_for
from streams.errors import ConfigError, DecodeError, RegistrationError, StoreError
from streams.events import EventType, event_type_of, parse_version
from streams.protocols import Codec
from streams.records import TYPE_HEADER, VERSION_HEADER, IncomingRecord, TopicPartition
from streams.runtime.reading.view_follower import Receiver
from streams.sak.forks import MadeHere
from streams.stores.engines import KeyValueEngine
from streams.stores.read_table import ReadTable
from streams.views.shared import AllPartitions, AllPartitionsInOrder, SharedHashEngine, SharedOrderedEngine

K = TypeVar("K")
V = TypeVar("V")


class GlobalTable(ReadTable[K, V], Generic[K, V]):
    """A ``ReadTable`` of all partitions of a topic. Made by ``GlobalChangeLog.table``, filled by that log.

    The methods are those of ``ReadTable``: ``get``, ``in``, ``len``, ``items``, ``keys``, ``values``; with
    ``ordered=True`` also ``range``, ``prefix``, ``first``, ``last``. They may be called from any thread at any time,
    also while changes come in; ``get`` takes no lock. A scan is no snapshot: see ``ReadTable``.

    A key of two partitions has no single value: ``get`` and ``in`` raise a ``StoreError`` that names the partitions,
    and scans give the key once for each. The state of an event source may have such keys, and so may a topic whose
    number of partitions was changed. ``of_partition(n)`` reads one partition alone.

    Before ``wait_caught_up`` has returned the table is not complete. After the log was stopped, or has failed, every
    reading raises ``StoreError``: old data does not pass for the truth.
    """

    def __init__(
        self, topic: str, ordered: bool, key_codec: Codec[K], value_codec: Codec[V], event: EventType[V] | None
    ) -> None:
        self._all = AllPartitionsInOrder(topic) if ordered else AllPartitions(topic)
        super().__init__(WholeTopic(topic, -1), self._all, key_codec, value_codec)
        self._topic = topic
        self._codecs = key_codec, value_codec
        self._event = event
        self._make_engine: Callable[[int], KeyValueEngine] = lambda _: (
            SharedOrderedEngine() if ordered else SharedHashEngine()
        )
        self._views: dict[int, tuple[ReadTable[K, V], KeyValueEngine]] = {}
        self._views_lock = threading.Lock()
        self._closed = ""
        self.takes: Callable[[bytes], bool] | None = None
        """Checks that a key of the topic is of this table; ``None``: all are."""
        self._made_here = MadeHere(f"the table of {topic}", StoreError, self._leave_to_parent)

    def of_partition(self, number: int) -> ReadTable[K, V]:
        """Return the table of one partition alone; empty if there is nothing in it (or no such partition). Any
        thread may use it."""
        return self._view(number)[0]

    def receiver(self) -> Receiver:
        """Return what its reader fills it by. A failure closes it."""
        return Receiver(f"the table of {self._topic}", self.receive, self.revoked, self.close)

    def receive(self, record: IncomingRecord) -> None:
        """Take a record of the topic. For the log, on its thread. Raises ``DecodeError`` for a key or a value that
        cannot be read, and keeps the key's old value."""
        key = cast(bytes, record.key)
        if self.takes is not None and not self.takes(key):
            return
        self._decode_key(key)
        value = record.value
        self._keep(record, key, None if value is None else self._checked(record, value))

    def revoked(self) -> None:
        """Refuse every reading from now on: the log was stopped."""
        self.close(f"the table of {self._topic} is closed: its global change log was stopped")

    def close(self, why: str) -> None:
        """Free everything, and raise ``StoreError(why)`` from now on. For the log. Repeating changes nothing."""
        with self._views_lock:
            if self._closed:
                return
            self._closed = why
            views, self._views = self._views, {}  # no view is made from here on, so all of them are closed below
        self._close(why)
        for view, _ in views.values():
            view._close(why)
        self._all = type(self._all)(self._topic)

    def _leave_to_parent(self) -> None:
        self._views_lock = threading.Lock()  # a thread that is not in this process may have it
        GlobalTable.close(self, self._made_here.why)  # in memory only: what is on disk is the parent's

    def _keep(self, record: IncomingRecord, key: bytes, value: bytes | None) -> None:
        """Take the checked value of a record."""
        engine = self._view(record.partition)[1]
        if value is None:
            engine.delete(key)
        else:
            engine.put(key, value)

    def _view(self, number: int) -> tuple[ReadTable[K, V], KeyValueEngine]:
        found = self._views.get(number)
        if found is not None:
            return found
        with self._views_lock:
            if self._closed:
                raise StoreError(self._closed)
            found = self._views.get(number)  # again: another thread may have made it while this one waited
            if found is None:
                engine = self._make_engine(number)
                found = ReadTable(TopicPartition(self._topic, number), engine, *self._codecs), engine
                self._all.add(number, engine)
                self._views[number] = found  # last: what is found without the lock is complete
            return found

    def _checked(self, record: IncomingRecord, value: bytes) -> bytes:
        """Return the value's bytes as they are kept. They are decoded once, so that the log meets a bad value and not a
        handler; events of an older version are brought up to the present one."""
        name = record.header(TYPE_HEADER) if record.headers else None
        event = self._event
        if name is None or event is None:
            self._decode_value(value)
            return value
        if name not in [known.encode() for known in event.names]:
            raise DecodeError(f"a {name.decode(errors='replace')[:80]!r} in a table of {event.name!r}")
        version = 1
        if any(header == VERSION_HEADER for header, _ in record.headers or ()):
            version = parse_version(record.header(VERSION_HEADER))
        decoded = event.decode(value, version)
        return value if version == event.version else event.encode(decoded)


def make_table(
    topic: str,
    key: type[K],
    value: type[V],
    ordered: bool,
    key_codec: Codec[K] | None,
    value_codec: Codec[V] | None,
    kind: type[GlobalTable[Any, Any]] = GlobalTable,
) -> GlobalTable[K, V]:
    """Make an empty table; the arguments are those of ``Table.factory``, ``kind`` is its class. Raises
    ``ConfigError``."""
    keys: Codec[K] = codec_for(key) if key_codec is None else key_codec
    if ordered and not getattr(keys, "order_preserving", False):
        raise ConfigError(f"table(ordered=True): {type(keys).__name__} of {key!r} does not keep keys in order")
    event: EventType[V] | None = None
    if value_codec is None:
        try:
            event = event_type_of(value)
        except RegistrationError:  # int, str and the like: plain values
            event = None
        values: Codec[V] = codec_for(value) if event is None else _PresentVersion(event)
    else:
        values = value_codec
    return kind(topic, ordered, keys, values, event)


class _PresentVersion(Generic[V]):
    """An event class as codec: as it is written today, by its own codec if it has one."""

    def __init__(self, event: EventType[V]) -> None:
        self._event = event
        self.encode = event.encode

    def decode(self, data: bytes, /) -> V:
        return self._event.decode(data, self._event.version)


class WholeTopic(TopicPartition):
    """A whole topic in the place of one partition, for messages."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.topic
