"""``NamedTable``: a table in a ``Stores``, with indexes, expiry and versions of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

from streams.codecs import codec_for, int_codec
from streams.errors import ConfigError, DecodeError, StoreError
from streams.protocols import Codec
from streams.sak.numbers import is_number
from streams.stores import table_access
from streams.stores.derived import Derived, DerivingEngine, Ranking, start_of
from streams.stores.framed import FramedCodec, PrefixedCodec, Upcast, check_versions, put_back, unframe
from streams.stores.indexes import Index, TableIndex, shown
from streams.stores.parts import PlaceSpan
from streams.stores.structured import MOST_AT_ONCE, Declared, StructuredBytes, mark_of
from streams.stores.table import Table, values_codec
from streams.stores.table_fields import ABSENT, OnUnreadable, mended_by

K = TypeVar("K")
V = TypeVar("V")
Key = TypeVar("Key")  # of `of`, which is called on the bare class
Value = TypeVar("Value")

_UNKNOWN_TIME: Final = int_codec.encode(-1)  # in front of all times
_EARLIEST: Final = start_of(int_codec.encode(0))


class Plan(NamedTuple):
    """The settings of a table, checked."""

    keys: Codec[Any]
    values: Codec[Any]
    ordered: bool
    indexes: dict[str, Index[Any]]
    expires_ms: int | None
    version: int
    upcast: dict[int, Upcast]
    on_unreadable: OnUnreadable | None


class NamedTable(Table[K, V], Generic[K, V]):
    """A ``Table`` under a name of a ``Stores`` class; declared there with ``of``.

    ``by`` and ``by_range`` scan an index; entries come with the value that they have when they are reached, and may be
    written meanwhile, as in other scans. An index over values some of which cannot be read refuses its reads, and a
    unique one all puts but those that mend them (``StoreError``).
    """

    def __init__(self, home: StructuredBytes, name: str, prefix: bytes, plan: Plan) -> None:
        self._home = home
        self._name = name
        self._expiry = None if plan.expires_ms is None else _Expiry(self, home, mark_of(name), plan.expires_ms)
        time_ms = None if plan.expires_ms is None else lambda: home.time_ms
        keys = PrefixedCodec(plan.keys, prefix)
        self._values = values = FramedCodec[V](plan.values, plan.version, plan.upcast, time_ms)
        where, show = f"of {name!r} ({home.partition})", shown(keys.decode)
        self._indexes: dict[str, TableIndex[V]] = {
            each: TableIndex(index, f"the index {each!r} {where}", self._of_index, show)
            for each, index in plan.indexes.items()
        }
        derived: list[Derived] = [*self._indexes.values(), *([] if self._expiry is None else [self._expiry.order])]
        engine = home.engine_of(prefix, ordered=plan.ordered)
        super().__init__(home.partition, DerivingEngine(engine, derived) if derived else engine, keys, values)
        self._mended = mended_by(home.partition, plan.on_unreadable)

    @staticmethod
    def of(
        key: type[Key],
        value: type[Value],
        *,
        ordered: bool = False,
        index: Mapping[str, Index[Value]] | None = None,
        expires: timedelta | float | None = None,
        version: int = 1,
        upcast: Mapping[int, Upcast] | None = None,
        key_codec: Codec[Key] | None = None,
        value_codec: Codec[Value] | None = None,
        checked: bool = False,
        on_unreadable: Callable[[Key, bytes], Value | None] | None = None,
        name: str | None = None,
        bare: bool = False,
    ) -> Declared[NamedTable[Key, Value]]:
        """Declare a table in the body of a ``Stores`` class.

        ``expires``: an entry is deleted when that time (seconds) has passed since it was put, by the partition's time.
        ``version``: of the values that are written; ``upcast`` has the step to the next one for each older version.
        ``name``: in the changelog, if it is not that of the attribute. ``bare``: its keys have no name in front; so the
        table of a source that had it as its only store goes on. The rest as in ``Table.factory``. Raises
        ``ConfigError``.
        """
        plan = plan_of(
            key,
            value,
            ordered,
            index,
            expires,
            version,
            upcast,
            key_codec,
            value_codec,
            checked=checked,
            on_unreadable=on_unreadable,
        )
        return Declared(lambda home, found, prefix: NamedTable(home, found, prefix, plan), name, bare=bare)

    # -- writes --------------------------------------------------------------------------------------------------------

    def put(self, key: K, value: V) -> None:
        """Set the value of ``key``, as ``Table.put``. Raises ``StoreError`` if a unique index has what the value brings
        under another key; then nothing is changed."""
        if not self._indexes or value is None or self._journal is None:
            table_access.put(self, key, value)
            return
        if key is None:
            self._refuse_null_key()
        key_bytes = self._encode_key(key)
        try:
            # All of them before the write: one that refuses the value leaves the table and the others as they were.
            for index in self._indexes.values():
                index.prepare(value, key_bytes)
            table_access.put(self, key, value)
        finally:
            for index in self._indexes.values():
                index.done()

    # -- reads by an index ---------------------------------------------------------------------------------------------

    def by(self, index: str, value: Any, *, reverse: bool = False) -> Iterator[tuple[K, V]]:
        """Scan the entries for which this index has ``value``, in the order of their keys."""
        found = self._index(index)
        return self._in_order(found, found.keys(value, reverse=reverse))

    def by_range(
        self, index: str, low: Any = None, high: Any = None, *, reverse: bool = False, include_high: bool = False
    ) -> Iterator[tuple[K, V]]:
        """Scan the entries in the order of what this index has, from ``low`` up to and without ``high`` (``None``: no
        end there)."""
        found = self._index(index)
        return self._in_order(found, found.range(low, high, reverse=reverse, include_high=include_high))

    def _index(self, name: str) -> TableIndex[V]:
        self._check_open()
        try:
            found = self._indexes[name]
        except KeyError:
            known = ", ".join(self._indexes) or "none"
            raise StoreError(f"{self._name!r} has no index {name!r}; it has {known}") from None
        found.check()
        return found

    def _in_order(self, index: TableIndex[V], sort_keys: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[K, V]]:
        for sort_key, key_bytes in self._scan(sort_keys):
            value = self._get(key_bytes)
            if value is not None and index.order.has_sort_key(key_bytes, sort_key):
                key = self._decode_key(key_bytes)
                found = self._decoded_value(value, key)
                if found is not ABSENT:
                    yield key, found

    # -- a part of a ``Stores`` ----------------------------------------------------------------------------------------

    @property
    def table(self) -> NamedTable[K, V]:
        """Its entries: itself."""
        return self

    @property
    def is_timed(self) -> bool:
        """Check whether its entries expire."""
        return self._expiry is not None

    def sweep(self, time_ms: int) -> None:
        """Delete entries whose time has passed, the oldest first."""
        if self._expiry is not None:
            self._expiry.sweep(time_ms)

    def places(self, index: str, low: Any, high: Any, *, include_high: bool) -> PlaceSpan:
        """Return the places of entries in an index. Raises ``StoreError`` and ``EncodeError``."""
        return self._index(index).places(low, high, include_high=include_high)

    def is_due(self, _: bytes, value: bytes) -> bool:
        """Check for an entry that has expired, and is not deleted yet."""
        return self._expiry is not None and self._expiry.is_due(value)

    def upgraded(self, value: bytes) -> bytes | None:
        """Return a value in the present version; ``None``: it has that already. Raises ``DecodeError``."""
        return self._values.upgraded(value)

    def mark_back(self, mark: bytes, time_ms: int) -> bytes:
        """Return the time at which expiry was switched on, for a time that is set back."""
        return int_codec.encode(min(int_codec.decode(mark), time_ms))

    def merged_mark(self, marks: Sequence[bytes | None], _: bytes | None) -> bytes | None:
        """Return the latest beginning of expiry; ``None``: some entries have not met any yet."""
        found = [int_codec.decode(mark) for mark in marks if mark is not None]
        return int_codec.encode(max(found)) if len(found) == len(marks) else None

    def closing_place(self, _: bytes) -> bytes | None:
        """Return ``None``: nothing of it is reported."""
        return None

    def row_key(self, key: bytes) -> K:
        """Return the key of an entry in the changelog."""
        return self.decode_key(key)

    def put_back(self, value: bytes, time_ms: int) -> bytes:
        """Return a value as if it was put then, if it was put later: it would live too long."""
        return put_back(value, time_ms)

    def _key_in_store(self, key: Any) -> Any:
        return self._name, key

    def _of_index(self, key: bytes, data: bytes) -> V | None:
        """Decode a value for an index, or return what stands in its place; ``None``: nothing does."""
        try:
            return self._values.decode(data)
        except DecodeError:
            if self._mended is None:
                raise
            return cast("V | None", self._mended.function(self._decode_key(key), data))

    def _expire(self, key: bytes) -> None:
        self._delete(key)


class _Expiry:
    """The expiry of a table's entries. Their order is that of the times at which they were put; those of unknown time
    (they were there before there was any expiry) are as old as the store's mark of its beginning."""

    def __init__(self, table: NamedTable[Any, Any], home: StructuredBytes, mark: bytes, expires_ms: int) -> None:
        self._table = table
        self._home = home
        self._mark = mark
        self._expires_ms = expires_ms
        self.order = Ranking(_put_at)

    def is_due(self, value: bytes) -> bool:
        """Check for a value whose time has passed. Raises ``DecodeError``."""
        put_ms, now = unframe(value).time_ms, self._home.time_ms
        if put_ms is None:
            put_ms = self._home.own_number(self._mark)
        return now is not None and put_ms is not None and put_ms + self._expires_ms <= now

    def sweep(self, time_ms: int) -> None:
        """Delete what is due, within an event."""
        began = self._home.own_number(self._mark)
        if began is None:  # what was there before expiry was declared has no time, and lives from here on
            self._home.set_own(self._mark, int_codec.encode(time_ms))
            began = time_ms
        low = None if began + self._expires_ms <= time_ms else _EARLIEST  # those of unknown time are at the low end
        high = start_of(int_codec.encode(max(0, time_ms - self._expires_ms + 1)))
        found = list(islice(self.order.scan(low, high), MOST_AT_ONCE))
        if found and (keeper := self._home.timekeeper) is not None and time_ms > (now := keeper.now_ms()):
            not_due = start_of(int_codec.encode(max(0, now - self._expires_ms + 1)))
            early = [key for sort_key, key in found if sort_key >= not_due]
            if early:
                self._home.expired_early(self._table._name, len(early), f"{self._table._decode_key(early[-1])!r:.80}")
        for _, key in found:
            self._table._expire(key)


def _put_at(_: bytes, value: bytes) -> bytes:
    try:
        time_ms = unframe(value).time_ms
    except DecodeError:  # a read will say so
        time_ms = None
    return _UNKNOWN_TIME if time_ms is None else int_codec.encode(max(0, time_ms))


def plan_of(
    key: type[Any],
    value: type[Any],
    ordered: bool,
    index: Mapping[str, Index[Any]] | None,
    expires: timedelta | float | None,
    version: int,
    upcast: Mapping[int, Upcast] | None,
    key_codec: Codec[Any] | None,
    value_codec: Codec[Any] | None,
    *,
    checked: bool = False,
    on_unreadable: OnUnreadable | None = None,
) -> Plan:
    """Check the settings of a table. Raises ``ConfigError``."""
    keys: Codec[Any] = codec_for(key) if key_codec is None else key_codec
    values = values_codec(value, value_codec, checked=checked, on_unreadable=on_unreadable)
    if ordered and not getattr(keys, "order_preserving", False):
        raise ConfigError(f"an ordered table: {type(keys).__name__} of {key!r} does not keep keys in order")
    for name, each in (index or {}).items():
        if not isinstance(each, Index):
            raise ConfigError(f"the index {name!r} is {each!r}; give an Index(type, function)")
    steps = dict(upcast or {})
    check_versions(values, version, steps)
    return Plan(
        keys,
        values,
        ordered,
        dict(index or {}),
        None if expires is None else milliseconds(expires, "expires"),
        version,
        steps,
        on_unreadable,
    )


def milliseconds(duration: timedelta | float, what: str, *, at_least: int = 1) -> int:
    """Return a duration (seconds, or a timedelta) in milliseconds. Raises ``ConfigError`` below ``at_least``."""
    given: Any = duration  # whatever it is
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if not is_number(seconds) or not at_least <= seconds * 1000 < 1 << 53:
        raise ConfigError(f"{what} is {duration!r}; give a timedelta, or seconds, of {at_least} ms at least")
    return round(seconds * 1000)
