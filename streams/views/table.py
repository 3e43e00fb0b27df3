"""The table of a view: it can be frozen at a moment, and watched."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

import msgspec

from streams.codecs import TupleCodec
from streams.errors import ConfigError, StoreError, StreamsError
from streams.protocols import Codec
from streams.records import IncomingRecord, TopicPartition
from streams.stores.read_table import ReadTable
from streams.views.global_table import GlobalTable, WholeTopic
from streams.views.on_disk import SharedDiskEngine, ViewFolders
from streams.views.shared import AllPartitions, Frozen, FrozenInOrder, SharedHashEngine, SharedOrderedEngine

if TYPE_CHECKING:  # most views need no index
    from streams.stores.indexes import Index, TableIndex

K = TypeVar("K")
V = TypeVar("V")

_placed: Final = TupleCodec(bytes, int)
"""Key and partition of an entry, in the order of the keys."""


class ViewChange(msgspec.Struct, Generic[K, V], frozen=True):
    """A change of a key's value, from ``old`` to ``new`` (``None``: there was, or is, none)."""

    key: K
    old: V | None
    new: V | None
    partition: int


class _Observer(Protocol):
    """Sees every write before it is made, under the table's lock, until it has ``ended``."""

    ended: bool

    def note(self, partition: int, key: bytes, old: bytes | None, new: bytes | None) -> None: ...
    def finish(self, why: str) -> None: ...


class ViewTable(GlobalTable[K, V], Generic[K, V]):
    """A ``GlobalTable`` with snapshots and watches. The thread that reads writes to it; all threads may use it."""

    _lock: threading.RLock
    _observers: tuple[weakref.ref[_Observer], ...]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = threading.RLock()  # held for one record
        self._observers = ()
        self._positions: dict[int, int] = {}
        self._over = ""
        self._indexes: dict[str, TableIndex[V]] = {}
        self.structure = ""
        self._on_disk: dict[int, SharedDiskEngine] = {}
        self.as_of_ms = 0
        """Milliseconds since the epoch: everything is here that was committed by then. 0: it was not complete yet."""
        self.on_failure: Callable[[StreamsError], object] = lambda error: None
        """Called when the disk refuses, on the thread that reads."""

    @property
    def layout(self) -> str:
        """Name codecs and version of what is kept on disk, and its structure of a ``Stores``."""
        version = "" if self._event is None else f" {self._event.name} {self._event.version}"
        return f"{super().layout}{version}" + (f" of {self.structure}" if self.structure else "")

    def index_by(self, indexes: Mapping[str, Index[V]]) -> None:
        """Keep these indexes, in memory; before the first record."""
        from streams.stores.indexes import Index, TableIndex, shown

        show = shown(lambda place: self._decode_key(_placed.decode(place)[0]))
        for name, index in indexes.items():
            if not isinstance(index, Index):
                raise ConfigError(f"{self._topic}: index {name!r} is {index!r}; it must be an Index")
            whose = f"the index {name!r} of {self._topic}"
            self._indexes[name] = TableIndex(index, whose, lambda _, data: self._decode_value(data), show)

    def by_range(self, index: str, low: Any, high: Any, *, reverse: bool, include_high: bool) -> Iterator[tuple[K, V]]:
        """See ``ViewReads.by_range``."""
        with self._lock:
            self._check_going()
            found = self._indexes.get(index)
            if found is None:
                raise StoreError(f"the view of {self._topic} has no index {index!r}; it has {[*self._indexes]}")
            found.check()
            places = list(found.range(low, high, reverse=reverse, include_high=include_high))
        return self._in_order(found, places)

    def _in_order(self, index: TableIndex[V], places: list[tuple[bytes, bytes]]) -> Iterator[tuple[K, V]]:
        for sort_key, place in places:
            key, number = _placed.decode(place)
            value = self._view(number)[1].get(key)
            # As in a table: with the value of now, if it is still where the scan found it.
            if value is not None and index.order.has_sort_key(place, sort_key):
                yield self._decode_key(key), self._decode_value(value)

    def keep_on_disk(self, folders: ViewFolders, engines: Mapping[int, SharedDiskEngine]) -> None:
        """Keep the partitions in these folders; before the first record. Later partitions get theirs."""

        def make(number: int) -> SharedDiskEngine:
            self._check_going()  # its folder would stay open
            engine = self._on_disk[number] = engines[number] if number in engines else folders.open(number)
            return engine

        self._make_engine = make
        for number, engine in engines.items():
            self._view(number)
            if self._indexes:
                for key, value in engine.items():
                    self._enter(number, key, value)

    def of_partition(self, number: int) -> ReadTable[K, V]:
        """See ``GlobalTable``. On disk a partition that does not exist yet has no folder: its table stays empty."""
        if self._on_disk and number not in self._on_disk:
            return ReadTable(TopicPartition(self._topic, number), SharedOrderedEngine(), *self._codecs)
        return super().of_partition(number)

    def checkpoint(self, positions: Mapping[int, int]) -> None:
        """Write everything to disk that is here; the view has come to these positions. Blocks; any thread. Raises
        ``OSError``, ``DiskDamaged``."""
        with self._lock:
            for number, engine in list(self._on_disk.items()):
                engine.passed(positions.get(number, -1), self.as_of_ms)
                engine.flush(self.as_of_ms)

    def estimated_len(self) -> int:
        """Count the keys; of a view on disk about so many, at once."""
        if not self._on_disk:
            return len(self)
        return sum(engine.estimated_len() for engine in list(self._on_disk.values()))

    def freeze(self, passed: Callable[[], Mapping[int, int]]) -> ViewSnapshot[K, V]:
        """Return everything as it is now, at once. ``passed`` is called within: the positions below which everything
        was handed over, as far as holes and markers have moved them on. Raises ``StoreError`` for a closed table."""
        with self._lock:
            self._check_going()
            # Under the lock: no record comes in between the positions and the snapshot that they describe.
            positions = {number: max(position, self._positions.get(number, 0)) for number, position in passed().items()}
            snapshot = ViewSnapshot[K, V](self._topic, self._all, positions, *self._codecs)
            self._observe(snapshot)
            return snapshot

    def watch(self, wake: Callable[[], object], initial: bool) -> ViewWatch[K, V]:
        """Return a watch of all writes from now on. ``wake`` is called when it has news, by the writing thread. With
        ``initial`` it begins with everything that is there."""
        with self._lock:
            # Under one lock: what is not in the snapshot is in the watch.
            watch = ViewWatch(self, self._lock, wake, self.freeze(dict) if initial else None)
            self._check_going()
            self._observe(watch)
            return watch

    def close(self, why: str) -> None:
        """Free everything, snapshots and watches included. See ``GlobalTable``."""
        with self._lock:
            observers, self._observers = self._observers, ()
            self._over = self._over or why
            for reference in observers:
                if (observer := reference()) is not None:
                    observer.finish(why)
            on_disk, self._on_disk, self._indexes = self._on_disk, {}, {}
            for engine in on_disk.values():
                engine.close(self.as_of_ms)
        super().close(why)

    def _observe(self, observer: _Observer) -> None:
        """Add one, and forget those that are gone: a write would do so, too, but a quiet view has none."""
        going = (one for one in self._observers if (known := one()) is not None and not known.ended)
        self._observers = (*going, weakref.ref(observer))  # weak: one that its reader has let go costs nothing more

    def _check_going(self) -> None:
        if self._over:
            raise StoreError(self._over)

    def _keep(self, record: IncomingRecord, key: bytes, value: bytes | None) -> None:
        with self._lock:
            try:
                if self._observers:
                    self._announce(record.partition, key, value)
                super()._keep(record, key, value)
                self._enter(record.partition, key, value)
                self._positions[record.partition] = record.offset + 1
                if self._on_disk:
                    self._on_disk[record.partition].passed(record.offset + 1, self.as_of_ms)
            except (OSError, StreamsError) as error:  # the record was checked before, so this is no error of it
                # Whatever the policy of the view says about records: with this one missing, it is not read any more.
                if not self._over:
                    why = f"the view of {self._topic} cannot be kept on disk: {error}"
                    self.close(why)
                    self.on_failure(StreamsError(why))
                raise

    def _enter(self, number: int, key: bytes, value: bytes | None) -> None:
        for index in self._indexes.values():
            place = _placed.encode((key, number))
            if value is None:
                index.left(place)
            else:
                index.entered(place, value)

    def _announce(self, number: int, key: bytes, value: bytes | None) -> None:
        """Hand a write to the observers, before it is made."""
        # Before: a snapshot looks at what was replaced after it has looked into the table.
        old = self._view(number)[1].get(key)
        alive = []
        for reference in self._observers:
            observer = reference()
            if observer is not None:
                observer.note(number, key, old, value)
                alive.append(reference)
        self._observers = tuple(alive)


class ViewSnapshot(ReadTable[K, V], Generic[K, V]):
    """A view as it was at one moment: a ``ReadTable`` that does not change, for any thread. Opening one costs
    nothing. While it is open, values that are replaced in the view are kept: close it (``with``), or let it go.

    ``positions``: everything below these offsets is in it, and nothing else. ``StoreError`` after it was closed, and
    after the view was stopped or has failed.
    """

    def __init__(
        self,
        topic: str,
        live: AllPartitions,
        positions: Mapping[int, int],
        key_codec: Codec[K],
        value_codec: Codec[V],
    ) -> None:
        self.positions = positions
        self.ended = False
        self._frozen: dict[int, Frozen] = {
            number: Frozen(engine) if isinstance(engine, SharedHashEngine) else FrozenInOrder(engine)
            for number, engine in live.engines
        }
        # On disk a count reads everything: only when it is needed.
        on_disk = any(isinstance(engine, SharedDiskEngine) for _, engine in live.engines)
        self._count = None if on_disk else len(live)
        super().__init__(WholeTopic(topic, -1), type(live)(topic, self._frozen.items()), key_codec, value_codec)

    def __len__(self) -> int:
        self._check_open()
        return sum(map(len, self._frozen.values())) if self._count is None else self._count

    def rows(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Return partition, key and value of everything, as bytes. Raises ``StoreError`` if it ends meanwhile."""
        for number, frozen in self._frozen.items():
            for key, value in frozen.items():
                yield number, key, value
        self._check_open()

    def close(self) -> None:
        """Let go what it keeps. Repeating changes nothing."""
        self.finish(f"this snapshot of {self.partition} was closed")

    def finish(self, why: str) -> None:
        """Close it; reads raise ``StoreError(why)``. For the table."""
        if not self.ended:
            self.ended, self._frozen = True, {}
            self._close(why)

    def note(self, partition: int, key: bytes, old: bytes | None, new: bytes | None) -> None:
        """Keep a value that is about to be replaced. For the table, which calls it before the write."""
        frozen = self._frozen.get(partition)
        if frozen is not None:
            frozen.note(key, old)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ViewWatch(Generic[K, V]):
    """The changes of a view that a reader has not taken yet, merged per key: so they are never more than the keys that
    changed, and the last value of each is never lost."""

    def __init__(
        self,
        table: ViewTable[K, V],
        lock: threading.RLock,
        wake: Callable[[], object],
        initial: ViewSnapshot[K, V] | None,
    ) -> None:
        self.ended = False
        self._decode_key, self._decode_value = table.decode_key, table.decode_value
        self._lock = lock
        self._wake = wake
        self._initial = initial
        self._pending: dict[tuple[int, bytes], tuple[bytes | None, bytes | None]] = {}

    def take(self) -> Iterator[ViewChange[K, V]]:
        """Return what has changed since the last call, by the first change of each key."""
        initial, self._initial = self._initial, None
        if initial is not None:
            with initial:
                for number, key, value in initial.rows():
                    yield ViewChange(self._decode_key(key), None, self._decode_value(value), number)
        with self._lock:
            taken, self._pending = self._pending, {}
        for (number, key), (old, new) in taken.items():
            yield ViewChange(self._decode_key(key), self._decoded(old), self._decoded(new), number)

    def note(self, partition: int, key: bytes, old: bytes | None, new: bytes | None) -> None:
        """Merge a write with what was not taken. For the table."""
        place, pending = (partition, key), self._pending
        is_first = not pending
        old = pending.get(place, (old, None))[0]
        if old != new:  # a value that is back where it was is no change for a reader that has not seen the one between
            pending[place] = old, new
            if is_first:
                self._wake()
        else:
            pending.pop(place, None)

    def finish(self, why: str) -> None:
        """Have the reader end, when it has taken the rest. For the table."""
        self.ended = True
        self._wake()

    def _decoded(self, value: bytes | None) -> V | None:
        return None if value is None else self._decode_value(value)
