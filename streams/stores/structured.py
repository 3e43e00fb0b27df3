"""Several tables and other structures of one partition, in one changelog: what ``Stores`` is in memory and on disk.

Each has a name, which stands in front of its keys (``fe NAME 00``). Entries of a name that a release does not have are
carried: they stay as they are, for a release that has it. The keys that begin with ``fe 00`` are the store's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar, overload

from streams.codecs import RESERVED_KEY_PREFIX, int_codec
from streams.errors import ConfigError, DecodeError, StoreError, TimeJump
from streams.records import Change, TopicPartition
from streams.stores.engines import KeyValueEngine
from streams.stores.framed import OWN, prefix_of
from streams.stores.journalled import JournalledBytes
from streams.stores.memory import HashEngine
from streams.stores.ordered import OrderedEngine
from streams.stores.parts import HostTime, MergedOwn, Reported, StorePart

_log = logging.getLogger(__name__)

TIME_KEY: Final = OWN + b"\x00time"
"""Key of the partition's time, among the own entries of the store: milliseconds, by ``int_codec``."""
MOST_AT_ONCE: Final = 64
"""Number of entries that expire, or windows that close, of one structure in front of one event, at most: they are in
its transaction, which has bounds. The others have their turn in front of the next events."""


StorePartT = TypeVar("StorePartT", bound=StorePart)


class Declared(Generic[StorePartT]):
    """A structure in the body of a ``Stores`` class. An instance has the structure itself under the name."""

    def __init__(
        self, make: Callable[[StructuredBytes, str, bytes], StorePartT], name: str | None, *, bare: bool = False
    ) -> None:
        """``make`` gets the store, the structure's name, and the prefix of its keys; ``name``: if it is not that of the
        attribute."""
        self._make = make
        self.name = name or ""
        self.bare = bare
        if name is not None and not _is_name(name):
            raise ConfigError(f"a structure is called {name!r}; a name has letters, digits, and some of _ - . only")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    @overload
    def __get__(self, store: None, owner: type, /) -> Declared[StorePartT]: ...

    @overload
    def __get__(self, store: StructuredBytes, owner: type, /) -> StorePartT: ...

    def __get__(self, store: StructuredBytes | None, owner: type, /) -> Declared[StorePartT] | StorePartT:
        """Return the declaration, of the class. (An instance has its part in its ``__dict__``.)"""
        if store is None:
            return self
        raise AttributeError(f"{self.name} of {owner.__name__} is not there before the store is made")

    def make(self, store: StructuredBytes) -> StorePartT:
        """Make the structure of one partition."""
        return self._make(store, self.name, b"" if self.bare else prefix_of(self.name))


class StructuredBytes(JournalledBytes):
    """A ``JournalledStore`` of several structures, in bytes. Base of ``Stores``; not for use by itself."""

    declared: ClassVar[dict[str, Declared[Any]]] = {}
    """The structures of the class by their attributes."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        found = {name: each for name, each in vars(cls).items() if isinstance(each, Declared)}
        cls.declared = {**cls.declared, **found}

    def __init__(self, partition: TopicPartition) -> None:
        self._ctx: Any = None
        self._event_ms: int | None = None
        self._early: list[tuple[str, int, str]] = []  # expired early, in this event
        self.timekeeper: HostTime | None = None
        """The host's; ``None``: it has none, so nothing is bounded or counted."""
        self._unknown: set[bytes] = set()
        self._parts: dict[str, StorePart] = {}
        self._at: dict[bytes, StorePart] = {}  # by the prefixes of their keys
        self._bare: StorePart | None = None
        super().__init__(partition, self.engine_of(None, ordered=False))
        for attribute, declared in self.declared.items():
            part = self.__dict__[attribute] = self._parts[declared.name] = declared.make(self)
            if declared.bare:
                self._bare = part
            else:
                self._at[prefix_of(declared.name)] = part
        self._tables = [part.table for part in self._parts.values()]
        self._timed = [part for part in self._parts.values() if part.is_timed]
        self._useless_marks = [mark_of(name) for name, part in self._parts.items() if not part.is_timed]

    def engine_of(self, prefix: bytes | None, *, ordered: bool) -> KeyValueEngine:
        """Make the engine of the structure whose keys have this prefix; ``None``: of the store's own entries, and those
        of no structure."""
        return OrderedEngine() if ordered else HashEngine()

    @property
    def layout(self) -> str:
        """Name its layout: the same whatever structures it has, as it carries all that it does not know."""
        return "Stores"

    # -- a journalled store --------------------------------------------------------------------------------------------

    def begin(self, journal: list[Change], /) -> None:
        """Start journalling into this list; see ``JournalledStore``."""
        super().begin(journal)
        try:
            for table in self._tables:
                table.begin(journal)
        except StoreError:  # no structure may be left in an event
            self.end()
            raise

    def end(self) -> None:
        """Stop journalling; see ``JournalledStore``."""
        super().end()
        self._ctx = self._event_ms = None
        for table in self._tables:
            table.end()

    def revoked(self) -> None:
        """Free everything. A caller that kept a structure gets ``StoreError`` from now on."""
        super().revoked()
        for table in self._tables:
            table.revoked()

    def dump(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key and value as bytes, those of no structure included."""
        yield from super().dump()
        for table in self._tables:
            yield from table.dump()

    def __len__(self) -> int:
        return super().__len__() + sum(len(table) for table in self._tables)

    def _apply(self, key: bytes, value: bytes | None) -> None:
        part = self._part_of(key)
        if part is not None:
            part.table._apply(key, value)
            return
        super()._apply(key, value)
        if not key.startswith(OWN + b"\x00"):
            self._note_unknown(key)

    def _part_of(self, key: bytes) -> StorePart | None:
        return self._at.get(key[: key.find(0) + 1]) if key.startswith(OWN) else self._bare

    # -- entries of no structure ---------------------------------------------------------------------------------------

    def carried(self) -> Iterator[tuple[bytes, bytes]]:
        """Scan the entries that no structure here has a name for. They stay as they are."""
        return ((key, value) for key, value in super().dump() if not key.startswith(OWN + b"\x00"))

    def is_carried(self, key: bytes) -> bool:
        """Check that a key is of no structure here: its entry is kept as it is."""
        return self._part_of(key) is None

    def _note_unknown(self, key: bytes) -> None:
        name = key[: key.find(0) + 1] if key.startswith(OWN) else b""
        if name not in self._unknown:
            self._unknown.add(name)
            what = f"of a structure {name[1:-1].decode(errors='replace')!r}" if name else "without a name"
            _log.warning(
                "the state of %s has entries %s, which %s does not have; they are carried as they are",
                self.partition,
                what,
                type(self).__name__,
            )

    # -- time ----------------------------------------------------------------------------------------------------------

    def time_of(self, ctx: Any) -> int | None:
        """Return the time of the event that is about to be handled, in milliseconds since the epoch: that of its
        record, of a batch the earliest. ``None``: it has none (interjections, timers). A subclass may take it from
        elsewhere."""
        records = (ctx.input,) if ctx.input is not None else getattr(ctx, "records", ())
        times = [record.timestamp_ms for record in records if record.offset >= 0 and record.timestamp_ms >= 0]
        return min(times, default=None)

    def moves_time(self, ctx: Any) -> bool:
        """Check whether an event with a time moves that of the partition: one of the source's own topic or of a further
        input does; a row of a joined table and an event of the loop do not. A subclass may decide otherwise."""
        return getattr(ctx, "_moves_time", True)

    @property
    def time_ms(self) -> int | None:
        """The partition's time, in milliseconds since the epoch: the latest of the events that move it. ``None``: there
        was none."""
        return self.own_number(TIME_KEY)

    @property
    def event_ms(self) -> int | None:
        """The time of the event that is handled, if it has one."""
        return self._event_ms

    @property
    def context(self) -> Any:
        """The context of the event that is handled; ``None`` outside of one."""
        return self._ctx

    @property
    def before_event(self) -> Callable[[Any], None] | None:
        """A function that gets the context of each event before its handler does; see ``protocols.ObservingStore``."""
        # ``None`` where there is nothing to do: it costs a call an event.
        return self._before_event if self._timed or any(map(self._get, self._useless_marks)) else None

    def _before_event(self, ctx: Any) -> None:
        self._ctx = ctx
        self._event_ms = time_ms = self.time_of(ctx)
        self._early.clear()
        if time_ms is not None and self.moves_time(ctx):
            self._move(time_ms, is_bounded=True)

    def advance(self, time_ms: int) -> None:
        """Move the partition's time on, if that is later, and do what is due: entries expire, windows close. For
        interjections, where no events come; events do it by themselves. At most ``MOST_AT_ONCE`` of each structure.
        ``max_time_jump_seconds`` does not bound it."""
        self._move(time_ms, is_bounded=False)

    def _move(self, time_ms: int, *, is_bounded: bool) -> None:
        before = self.time_ms
        if before is None or time_ms > before:
            if is_bounded and self.timekeeper is not None:
                self._check_jump(self.timekeeper, time_ms, before or 0)
            self.set_own(TIME_KEY, int_codec.encode(time_ms))
        for key in self._useless_marks:  # a structure that has a use for its mark again must not find an old one
            self.set_own(key, None)
        for part in self._timed:  # also for an event from before that time: a backlog goes on with each event
            part.sweep(max(time_ms, before or 0))
        while self._early:  # now that all of it is done
            self.out_of_time("expired_early", *self._early.pop())

    def _check_jump(self, timekeeper: HostTime, time_ms: int, before: int) -> None:
        """Raise ``TimeJump`` for an event that is too far ahead of the partition's time and of the clock: only when it
        is both is there no doubt. Partitions at rest, and histories, have large steps."""
        jump = timekeeper.max_jump_ms
        if not jump or time_ms - before <= jump or time_ms - (now := timekeeper.now_ms()) <= jump:
            return
        self.out_of_time("time_jump", "", 1, "")
        raise TimeJump(
            f"its time ({time_ms} ms) is {(time_ms - now) / 86_400_000:,.1f} days ahead of this machine's clock "
            f"({now} ms), and would move the time of {self.partition} there for good (from {before} ms): entries would "
            "expire, and all that follows would be late. Are these microseconds? If it is right, raise "
            f"max_time_jump_seconds ({jump / 1000:g}; 0: no bound)"
        )

    def out_of_time(self, kind: str, part: str, items: int, last: str) -> None:
        """Tell the host of items that did not fit the time."""
        if self.timekeeper is not None:
            self.timekeeper.out_of_time(self._ctx, kind, type(self).__name__, part, items, last)

    def expired_early(self, part: str, items: int, last: str) -> None:
        """Note entries that expire early in the event that is handled."""
        self._early.append((part, items, last))

    # -- own entries ---------------------------------------------------------------------------------------------------

    def own_number(self, key: bytes) -> int | None:
        """Return a number among its own entries."""
        data = self._get(key)
        return None if data is None else int_codec.decode(data)

    def own(self, key: bytes) -> bytes | None:
        """Return one of its own entries."""
        return self._get(key)

    def set_own(self, key: bytes, value: bytes | None) -> None:
        """Set one of its own entries, or delete it. Raises ``StoreError`` outside of events."""
        if value is None:
            self._delete(key)
            return
        journal = self._journal
        if journal is None:
            self._refuse_write()
        journal.append(Change(key, value, self._get(key)))  # first: an engine on disk takes the journal's last change
        self._put(key, value)

    # -- for tools -----------------------------------------------------------------------------------------------------

    def upgraded(self, key: bytes, value: bytes) -> bytes | None:
        """Return the value of a key in the changelog in the present version of its table; ``None``: it has that
        already, or the table has none. Raises ``DecodeError``."""
        part = self._part_of(key)
        return None if part is None else part.upgraded(value)

    def set_back(self, entries: Mapping[bytes, bytes], time_ms: int) -> dict[bytes, bytes | None]:
        """Return the changes to these entries of a changelog that set the partition's time back, that of the time the
        last; none if it is not later.

        Entries that were put later count as put then. Windows that end later are open again: what was reported too
        early is reported once more when it ends. Raises ``DecodeError``."""
        found = entries.get(TIME_KEY)
        if found is None or int_codec.decode(found) <= time_ms:
            return {}
        wanted: dict[bytes, bytes | None] = {}
        marks = {mark_of(name): part for name, part in self._parts.items() if part.is_timed}
        for key, value in entries.items():
            if (marked := marks.get(key)) is not None:
                wanted[key] = marked.mark_back(value, time_ms)
            elif not key.startswith(RESERVED_KEY_PREFIX) and (part := self._part_of(key)) is not None:
                wanted[key] = part.put_back(value, time_ms)
        changes = {key: value for key, value in wanted.items() if entries[key] != value}
        return changes | {TIME_KEY: int_codec.encode(time_ms)}  # killed before it, the next run does the rest

    def part_named(self, name: str) -> tuple[str, StorePart]:
        """Return a structure by its name, which may be left out (``""``) where there is only one. Raises
        ``StoreError``."""
        if not name and len(self._parts) == 1:
            name = next(iter(self._parts))
        if (found := self._parts.get(name)) is None:
            lacks = f"no structure {name!r}" if name else "several structures, so one is to be named"
            raise StoreError(f"{type(self).__name__} has {lacks}; it has {', '.join(self._parts)}")
        return name, found

    def is_of(self, key: bytes, name: str) -> bool:
        """Check that a key in the changelog is of this structure."""
        return self._part_of(key) is self._parts[name]

    def is_own(self, key: bytes) -> bool:
        """Check for an entry of the store itself, which belongs to the partition and to none of its keys."""
        return key.startswith(OWN + b"\x00")

    def row_key(self, key: bytes) -> tuple[str, Any]:
        """Return the structure of an entry, and its key without the span of a window. Raises ``DecodeError``."""
        name, part = self._named_part(key)
        return name, part.row_key(key)

    def closing_place(self, key: bytes) -> bytes | None:
        """Return the place of an entry among those that are reported one after the other, up to the mark of their
        structure; ``None``: it is none of them. Raises ``DecodeError``."""
        return self._named_part(key)[1].closing_place(key)

    def mark_in(self, own: Mapping[bytes, bytes], name: str) -> bytes | None:
        """Return the mark of a structure in these own entries."""
        return own.get(mark_of(name))

    def merged_own(
        self,
        home: Mapping[bytes, bytes],
        origins: Sequence[tuple[Mapping[bytes, bytes], Collection[str]]],
        reported: Mapping[str, Reported],
    ) -> MergedOwn:
        """Return the own entries of a partition to which rows of others have come.

        Its time is the latest of theirs, as if all their events had come to one partition. What is not reported yet in
        one of them is not reported in it. ``home``: its own entries before; ``origins``: those of each partition that
        its rows come from, itself included, and of which structures they are; ``reported``: by structure."""
        times = [int_codec.decode(own[TIME_KEY]) for own, _ in origins if TIME_KEY in own]
        entries = dict(home) | ({TIME_KEY: int_codec.encode(max(times))} if times else {})
        marks: dict[str, bytes | None] = {}
        for name, part in self._parts.items():
            key, (closed, first_open) = mark_of(name), reported.get(name, Reported())
            found = [own.get(key) for own, names in origins if name in names]
            if not part.is_timed or not found:
                continue
            marks[name] = mark = part.merged_mark([*found, *([] if closed is None else [closed])], first_open)
            entries.pop(key, None)
            if mark is not None:
                entries[key] = mark
        return MergedOwn(entries, marks)

    def decode_key(self, key: bytes) -> Any:
        """Decode a key in the changelog, for tools: (name, key). Raises ``DecodeError``."""
        name, part = self._named_part(key)
        return name, part.decode_key(key)

    def _named_part(self, key: bytes) -> tuple[str, StorePart]:
        part = self._part_of(key)
        if part is None:
            raise DecodeError(f"the key is of no structure of {type(self).__name__}")
        return next(name for name, each in self._parts.items() if each is part), part

    def decode_entry(self, key: bytes, value: bytes) -> Any:
        """Decode the value of a key in the changelog, for tools. Raises ``DecodeError``."""
        part = self._part_of(key)
        if part is None:
            raise DecodeError(f"the key is of no structure of {type(self).__name__}")
        return part.decode_value(value)


def mark_of(name: str) -> bytes:
    """Return the key of a structure's mark, among the own entries of the store."""
    return OWN + b"\x00mark\x00" + name.encode()


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and all(sign.isalnum() or sign in "_-." for sign in name)
