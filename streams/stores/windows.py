"""``Windows``: values per key and span of event time; each is complete when the partition's time has passed it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from streams.codecs import TupleCodec, codec_for, int_codec
from streams.errors import ConfigError, StoreError
from streams.outcomes import POLICIES, ErrorPolicy, is_policy, parks
from streams.protocols import Codec
from streams.stores.derived import DerivingEngine, Ranking, sort_key_of, start_of
from streams.stores.engines import after_prefix
from streams.stores.framed import PrefixedCodec, RowKeys
from streams.stores.named_table import milliseconds
from streams.stores.parts import PlaceSpan
from streams.stores.structured import MOST_AT_ONCE, Declared, StructuredBytes, mark_of
from streams.stores.table import Table, values_codec
from streams.stores.table_fields import OnUnreadable, mended_by

K = TypeVar("K")
V = TypeVar("V")
E = TypeVar("E")
Key = TypeVar("Key")
Value = TypeVar("Value")
Item = TypeVar("Item")

Late = Literal["drop", "fail"] | Callable[[Any, K, E, int], None]
"""The policy for items whose windows are closed: ``"drop"``; ``"fail"`` (``LateItem``, so the event's error policy
decides); or a function of (ctx, key, item, time in ms), which may forward it. All of them are counted and logged
(``metrics.OutOfTime``)."""

MOST_WINDOWS: Final = 1000
"""Number of windows that one item is in, at most: each is a read, a call of ``add`` and a write."""

END: Final = "end"
"""The index by which readers outside scan windows: the ends of their spans."""

_parts: Final = TupleCodec(bytes, int, int)


class Window(NamedTuple):
    """A span of event time, in milliseconds since the epoch: from ``start_ms`` up to and without ``end_ms``. A
    session's end is its last item's time and the gap."""

    start_ms: int
    end_ms: int


class LateItem(StoreError):
    """An item came for windows that are closed."""


class _Shape(NamedTuple):
    """``size_ms`` of a session is the gap that ends it."""

    size_ms: int
    advance_ms: int
    grace_ms: int
    keep_ms: int
    is_session: bool


class _Plan(NamedTuple):
    shape: _Shape
    keys: Codec[Any]
    values: Codec[Any]
    add: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any] | None
    on_close: Callable[[Any, Any, Window, Any], None] | None
    late: Any
    on_error: ErrorPolicy | None
    on_unreadable: OnUnreadable | None


class Windows(Generic[K, V, E]):
    """Values per key and window in a ``Stores``; declared there with ``tumbling``, ``hopping`` or ``session``.

    Time is the partition's: that of its events, which only goes forward. A window closes when it has passed the end and
    ``grace``: in front of the event that brings that time, ``on_close(ctx, key, window, value)`` runs in this event's
    transaction, in the order of the ends, ``MOST_AT_ONCE`` windows an event (a backlog goes on with the next). If it
    fails, that is the window's failure: ``on_error`` (default: ``config.error_policy``) decides about the window alone,
    and the event goes on behind it. ``keep`` longer a closed window can be read; then it is deleted. Threads and errors
    as in ``Table``.
    """

    def __init__(self, home: StructuredBytes, name: str, prefix: bytes, plan: _Plan) -> None:
        self._home = home
        self._name = name
        self._plan = plan
        self._shape = plan.shape
        self._mark = mark_of(name)
        self._keys = plan.keys
        self._codec = PrefixedCodec(_parts, prefix)
        self._order = Ranking(self._rank)
        engine = DerivingEngine(home.engine_of(prefix, ordered=True), [self._order])
        self._table: Table[tuple[bytes, int, int], V] = Table(home.partition, engine, self._codec, plan.values)
        self._table._key_in_store = self._key_in_store  # type: ignore[method-assign]
        self._table._mended = mended_by(home.partition, None if plan.on_unreadable is None else self._mend)

    def _key_in_store(self, key: Any) -> Any:
        return self._name, (self._keys.decode(key[0]), *key[1:])

    def _mend(self, row: tuple[bytes, int, int], data: bytes) -> Any:
        key, start_ms, end_ms = row
        assert self._plan.on_unreadable is not None
        return self._plan.on_unreadable((self._keys.decode(key), Window(start_ms, end_ms)), data)

    @property
    def table(self) -> Table[tuple[bytes, int, int], V]:
        """Its entries, by (key, start, end)."""
        return self._table

    # -- declarations --------------------------------------------------------------------------------------------------

    @staticmethod
    def tumbling(
        key: type[Key],
        value: type[Value],
        *,
        size: timedelta | float,
        add: Callable[[Value | None, Item], Value],
        grace: timedelta | float = 0,
        keep: timedelta | float = 0,
        on_close: Callable[[Any, Key, Window, Value], None] | None = None,
        late: Late[Key, Item] = "drop",
        on_error: ErrorPolicy | None = None,
        checked: bool = False,
        on_unreadable: Callable[[tuple[Key, Window], bytes], Value | None] | None = None,
        name: str | None = None,
    ) -> Declared[Windows[Key, Value, Item]]:
        """Declare windows of one size, one behind the other from the epoch on. ``add`` makes the new value of the old
        one (``None``: there is none) and an item. Durations are seconds, or timedeltas. Raises ``ConfigError``."""
        return Windows.hopping(
            key,
            value,
            size=size,
            advance=size,
            add=add,
            grace=grace,
            keep=keep,
            on_close=on_close,
            late=late,
            on_error=on_error,
            checked=checked,
            on_unreadable=on_unreadable,
            name=name,
        )

    @staticmethod
    def hopping(
        key: type[Key],
        value: type[Value],
        *,
        size: timedelta | float,
        advance: timedelta | float,
        add: Callable[[Value | None, Item], Value],
        grace: timedelta | float = 0,
        keep: timedelta | float = 0,
        on_close: Callable[[Any, Key, Window, Value], None] | None = None,
        late: Late[Key, Item] = "drop",
        on_error: ErrorPolicy | None = None,
        checked: bool = False,
        on_unreadable: Callable[[tuple[Key, Window], bytes], Value | None] | None = None,
        name: str | None = None,
    ) -> Declared[Windows[Key, Value, Item]]:
        """Declare windows of one size that begin every ``advance``, so that an item is in several of them."""
        size_ms, advance_ms = milliseconds(size, "size"), milliseconds(advance, "advance")
        if not advance_ms <= size_ms <= MOST_WINDOWS * advance_ms:
            raise ConfigError(f"advance is {advance!r}, size {size!r}; an item is in 1 to {MOST_WINDOWS} windows")
        shape = _shape(size_ms, advance_ms, grace, keep, is_session=False)
        values = values_codec(value, None, checked=checked, on_unreadable=on_unreadable)
        return _declared(key, values, shape, add, None, on_close, late, on_error, on_unreadable, name)

    @staticmethod
    def session(
        key: type[Key],
        value: type[Value],
        *,
        gap: timedelta | float,
        add: Callable[[Value | None, Item], Value],
        merge: Callable[[Value, Value], Value],
        grace: timedelta | float = 0,
        keep: timedelta | float = 0,
        on_close: Callable[[Any, Key, Window, Value], None] | None = None,
        late: Late[Key, Item] = "drop",
        on_error: ErrorPolicy | None = None,
        checked: bool = False,
        on_unreadable: Callable[[tuple[Key, Window], bytes], Value | None] | None = None,
        name: str | None = None,
    ) -> Declared[Windows[Key, Value, Item]]:
        """Declare sessions: items of a key, none of which comes ``gap`` or more after the one before. ``merge`` makes
        one value of two (the earlier one first) when an item falls in between."""
        gap_ms = milliseconds(gap, "gap")
        if not callable(merge):
            raise ConfigError(f"merge is {merge!r}; give a function of two values")
        return _declared(
            key,
            values_codec(value, None, checked=checked, on_unreadable=on_unreadable),
            _shape(gap_ms, gap_ms, grace, keep, is_session=True),
            add,
            merge,
            on_close,
            late,
            on_error,
            on_unreadable,
            name,
        )

    # -- in a handler --------------------------------------------------------------------------------------------------

    def add(self, key: K, item: E, *, at_ms: int | None = None) -> list[Window]:
        """Add an item to its windows. Returns those that it is in now; of closed ones none. ``at_ms``: its time, if
        that is not the event's (that of its record)."""
        at = self._home.event_ms if at_ms is None else at_ms
        if at is None:
            raise StoreError(f"an item was added to {self._name!r} without a time: the event has none, give at_ms")
        windows = self._session(key, item, at) if self._shape.is_session else self._fixed(key, item, at)
        if not windows:
            self._late(key, item, at)
        return windows

    def get(self, key: K, window: Window) -> V | None:
        """The value of a key in a window, or ``None``."""
        return self.table.get((self._keys.encode(key), window.start_ms, window.end_ms))

    def of(self, key: K) -> Iterator[tuple[Window, V]]:
        """Scan the windows of a key, in the order of their starts: open ones, and closed ones that are kept."""
        for (_, start_ms, end_ms), value in self.table.prefix((self._keys.encode(key),)):
            yield Window(start_ms, end_ms), value

    def items(self) -> Iterator[tuple[K, Window, V]]:
        """Scan all windows of all keys."""
        for (key, start_ms, end_ms), value in self.table.items():
            yield self._keys.decode(key), Window(start_ms, end_ms), value

    def is_closed(self, key: K, window: Window) -> bool:
        """Check whether nothing is added to a key's window any more."""
        return self._is_closed(self._keys.encode(key), window)

    def __len__(self) -> int:
        return len(self.table)

    def _fixed(self, key: K, item: E, at: int) -> list[Window]:
        shape, key_bytes = self._shape, self._keys.encode(key)
        last = at - at % shape.advance_ms  # the start of the latest window that has it; ``first``: of the earliest
        first = last - (shape.size_ms - 1 - at % shape.advance_ms) // shape.advance_ms * shape.advance_ms
        starts = range(first, last + 1, shape.advance_ms)
        windows = [Window(start, start + shape.size_ms) for start in starts]
        windows = [window for window in windows if not self._is_closed(key_bytes, window)]
        for window in windows:
            row = (key_bytes, window.start_ms, window.end_ms)
            self.table.put(row, self._plan.add(self.table.get(row), item))
        return windows

    def _session(self, key: K, item: E, at: int) -> list[Window]:
        merge, gap_ms, key_bytes = self._plan.merge, self._shape.size_ms, self._keys.encode(key)
        assert merge is not None
        start, end, value = at, at + gap_ms, None
        lowest = -(1 << 63)  # below all times
        near = self.table.range((key_bytes, lowest, lowest), (key_bytes, at + gap_ms, lowest), reverse=True)
        for (_, begin, until), found in near:  # their ends are in the order of their starts
            if until <= at or self._is_closed(key_bytes, Window(begin, until)):
                break
            value = found if value is None else merge(found, value)
            start, end = min(start, begin), max(end, until)
            self.table.delete((key_bytes, begin, until))
        if value is None and self._is_closed(key_bytes, Window(start, end)):
            return []  # judged behind the look for a session that it belongs to: that one may well be open
        self.table.put((key_bytes, start, end), self._plan.add(value, item))
        return [Window(start, end)]

    def _late(self, key: K, item: E, at: int) -> None:
        late, time_ms = self._plan.late, self._home.time_ms
        self._home.out_of_time("late", self._name, 1, f"of {str(key)[:80]!r} at {at} ms, the time is {time_ms} ms")
        if late == "fail":
            raise LateItem(f"{self._name!r}: the item of {str(key)[:80]!r} at {at} ms is late, its windows are closed")
        if late != "drop":
            late(self._home.context, key, item, at)

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def is_timed(self) -> bool:
        """Check for work at certain times: always."""
        return True

    def sweep(self, time_ms: int) -> None:
        """Close windows that have ended, and delete closed ones that have been kept long enough."""
        shape, home, on_close = self._shape, self._home, self._plan.on_close
        most = max(MOST_AT_ONCE, 2 * (shape.size_ms // shape.advance_ms + 1))  # a backlog must get smaller
        mark = home.own(self._mark)
        ended = start_of(int_codec.encode(time_ms - shape.grace_ms + 1))
        closed = None
        try:
            # From the first place behind the mark on: places are bytes, and the next one is a 0 longer.
            for sort_key, key_bytes in islice(self._order.scan(None if mark is None else mark + b"\0", ended), most):
                value = self.table._get(key_bytes)
                if on_close is not None and value is not None:
                    self._report(on_close, key_bytes, value)
                closed = sort_key
        finally:  # also if one fails and a handler that called ``advance`` goes on: none is reported twice
            if closed is not None:
                home.set_own(self._mark, closed)
                mark = closed
        if mark is not None:
            # Not beyond the mark: what is not reported yet is kept, however old.
            kept_until = start_of(int_codec.encode(time_ms - shape.grace_ms - shape.keep_ms + 1))
            for _, key_bytes in islice(self._order.scan(None, min(kept_until, mark + b"\0")), most):
                self.table._delete(key_bytes)

    def _report(self, on_close: Callable[[Any, Any, Window, Any], None], key_bytes: bytes, value: bytes) -> None:
        key, start_ms, end_ms = self._codec.decode(key_bytes)

        def report(ctx: Any) -> None:
            found = self._table._decoded_value(value, (key, start_ms, end_ms), None)
            if found is not None:  # else ``on_unreadable`` leaves the window out
                on_close(ctx, self._keys.decode(key), Window(start_ms, end_ms), found)

        home = self._home
        if home.timekeeper is None:
            report(home.context)
        else:
            window = type(home).__name__, self._name, key, start_ms, end_ms, value
            home.timekeeper.close(home.context, report, on_close, window, self._plan.on_error)

    def mark_back(self, mark: bytes, time_ms: int) -> bytes:
        """Return the sort key up to which windows are closed, for a time set back: later ones are open again."""
        return min(mark, start_of(int_codec.encode(time_ms - self._shape.grace_ms + 1)))

    def merged_mark(self, marks: Sequence[bytes | None], first_open: bytes | None) -> bytes | None:
        """Return the highest one below all windows that are still to be reported."""
        found = [mark for mark in marks if mark is not None and (first_open is None or mark < first_open)]
        return max(found, default=None)

    def closing_place(self, key: bytes) -> bytes | None:
        """Return the place in the order in which windows are reported; ``None``: they are not."""
        return None if self._plan.on_close is None else sort_key_of(self._rank(key, b""), key)

    def row_key(self, key: bytes) -> K:
        """Return the key of a window, without its span."""
        found: K = self._keys.decode(self._codec.decode(key)[0])
        return found

    def put_back(self, value: bytes, _: int) -> bytes:
        """Return the value: it has no time of its own."""
        return value

    def _is_closed(self, key_bytes: bytes, window: Window) -> bool:
        time_ms, mark = self._home.time_ms, self._home.own(self._mark)
        if time_ms is not None and window.end_ms + self._shape.grace_ms <= time_ms:
            return True
        if mark is None:
            return False
        # By the mark, too: with a grace that was made longer the time alone would open it again, and report it twice.
        return sort_key_of(int_codec.encode(window.end_ms), self._codec.encode((key_bytes, *window))) <= mark

    def _rank(self, key: bytes, _: bytes) -> bytes:
        return int_codec.encode(self._codec.decode(key)[2])

    # -- for tools -----------------------------------------------------------------------------------------------------

    def decode_key(self, key: bytes) -> tuple[K, int, int]:
        """Decode a key in the changelog: (key, start, end)."""
        return self.codecs[0].decode(key)

    @property
    def codecs(self) -> tuple[Codec[tuple[K, int, int]], Codec[V]]:
        """Return the codecs of (key, start, end) and of values."""
        return RowKeys(self._keys, self._codec), self._table.codecs[1]

    def places(self, index: str, low: Any, high: Any, *, include_high: bool) -> PlaceSpan:
        """Return the places of windows by their ends: the index ``"end"``. Raises ``StoreError`` and
        ``EncodeError``."""
        self._table._check_open()
        if index != END:
            raise StoreError(f"{self._name!r} are windows, which have the index {END!r} only, not {index!r}")
        begin, end = (None if each is None else start_of(int_codec.encode(each)) for each in (low, high))
        return PlaceSpan(self._order, begin, after_prefix(end) if end is not None and include_high else end)

    def is_due(self, key: bytes, _: bytes) -> bool:
        """Check for a window that is not kept any longer, and is not deleted yet."""
        time_ms, shape = self._home.time_ms, self._shape
        return time_ms is not None and self._codec.decode(key)[2] + shape.grace_ms + shape.keep_ms <= time_ms

    def upgraded(self, value: bytes) -> bytes | None:
        """Return ``None``: windows have no versions."""
        return None

    def decode_value(self, value: bytes) -> V:
        """Decode a value in the changelog."""
        return self.table.decode_value(value)


def _shape(
    size_ms: int, advance_ms: int, grace: timedelta | float, keep: timedelta | float, *, is_session: bool
) -> _Shape:
    grace_ms, keep_ms = milliseconds(grace, "grace", at_least=0), milliseconds(keep, "keep", at_least=0)
    return _Shape(size_ms, advance_ms, grace_ms, keep_ms, is_session)


def _declared(
    key: Any,
    values: Codec[Any],
    shape: _Shape,
    add: Any,
    merge: Any,
    on_close: Any,
    late: Any,
    on_error: Any,
    on_unreadable: OnUnreadable | None,
    name: str | None,
) -> Declared[Any]:
    for what, function in (("add", add), ("on_close", on_close or add)):
        if not callable(function):
            raise ConfigError(f"{what} is {function!r}; give a function")
    if late not in ("drop", "fail") and not callable(late):
        raise ConfigError(f"late is {late!r}; give 'drop', 'fail' or a function of (ctx, key, item, at_ms)")
    if on_error is not None and not is_policy(on_error):
        raise ConfigError(f"on_error is {on_error!r}; it must be an error policy: {POLICIES}")
    if parks(on_error):
        raise ConfigError(
            "on_error of a window parks a key, and a window is no event of one: use STOP, SKIP, DEAD_LETTER"
        )
    plan = _Plan(shape, codec_for(key), values, add, merge, on_close, late, on_error, on_unreadable)
    return Declared(lambda home, found, prefix: Windows(home, found, prefix, plan), name)
