"""Structures against simple models: events that succeed or fail, time, restores and standbys, in any order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from streams.disk import SQLite
from streams.errors import StoreError
from streams.protocols import DiskStore
from streams.records import Change, IncomingRecord
from streams.stores import Heap, Index, LateItem, NamedTable, Stores, Window, Windows
from tests.property.journalled_machine import HERE, JournalledMachine
from tests.property.test_disk_table import MemoryDatabase

KEYS = st.sampled_from(["", "a", "ab", "b", "\x00", "a\x00", "ü"])
FEW = st.sampled_from(["a", "b"])
RANKS = st.integers(-2, 3)
SECOND = 1000
LIFE, SIZE, HOP, GAP, GRACE, KEEP = 7, 6, 4, 3, 2, 5


class Item(msgspec.Struct, frozen=True):
    rank: int
    owner: str | None = None


def add(old: list[int] | None, item: int) -> list[int]:
    return [*(old or []), item]


def merge(left: list[int], right: list[int]) -> list[int]:
    return left + right


def closed(ctx: Any, key: str, window: Window, value: list[int]) -> None:
    ctx.closed.append((key, *window, value))


def late(ctx: Any, key: str, item: int, at_ms: int) -> None:
    ctx.late.append((key, item, at_ms))


class Everything(Stores):
    items = NamedTable.of(
        str,
        Item,
        ordered=True,
        index={"owner": Index(str, lambda item: item.owner), "rank": Index(int, lambda item: item.rank)},
    )
    unique = NamedTable.of(str, Item, index={"rank": Index(int, lambda item: item.rank, unique=True)})
    carts = NamedTable.of(str, int, expires=LIFE)
    heap = Heap.of(str, Item, priority=Index(int, lambda item: item.rank))
    hops = Windows.hopping(
        str, list[int], size=SIZE, advance=HOP, add=add, grace=GRACE, keep=KEEP, on_close=closed, late=late
    )
    visits = Windows.session(str, list[int], gap=GAP, add=add, merge=merge, grace=GRACE, on_close=closed, late="fail")


class Model:
    """What a simple program would keep. Windows are (key, start, end) with the items in them."""

    def __init__(self) -> None:
        self.time = -1
        self.items: dict[str, Item] = {}
        self.unique: dict[str, Item] = {}
        self.heap: dict[str, Item] = {}
        self.carts: dict[str, tuple[int, int]] = {}
        self.hops: dict[tuple[str, int, int], list[int]] = {}
        self.visits: dict[tuple[str, int, int], list[int]] = {}
        self.closed: list[tuple[Any, ...]] = []
        self.late: list[tuple[str, int, int]] = []

    def advance(self, time: int) -> None:
        before, self.time = self.time, max(self.time, time)
        time = self.time
        self.carts = {key: (value, at) for key, (value, at) in self.carts.items() if at + LIFE * SECOND > time}
        for windows in (self.hops, self.visits):
            ended = [(end, key.encode(), start) for key, start, end in windows]
            for end, key, start in sorted(ended):
                if before < end + GRACE * SECOND <= time:
                    self.closed.append((key.decode(), start, end, windows[key.decode(), start, end]))
        keep = (GRACE + KEEP) * SECOND
        self.hops = {window: value for window, value in self.hops.items() if window[2] + keep > time}
        self.visits = {window: value for window, value in self.visits.items() if self.is_open(window[2])}

    def is_open(self, end: int) -> bool:
        return end + GRACE * SECOND > self.time

    def hop(self, key: str, item: int, at: int) -> None:
        size, hop = SIZE * SECOND, HOP * SECOND
        starts = [start for start in range(-hop, at + 1, hop) if start <= at < start + size]
        is_open = [start for start in starts if self.is_open(start + size)]
        for start in is_open:
            window = (key, start, start + size)
            self.hops[window] = [*self.hops.get(window, []), item]
        if not is_open:
            self.late.append((key, item, at))

    def visit(self, key: str, item: int, at: int) -> bool:
        gap = GAP * SECOND
        start, end, value = at, at + gap, list[int]()
        near = sorted(
            window
            for window in self.visits
            if window[0] == key and window[1] < at + gap and window[2] > at and self.is_open(window[2])
        )
        if not near and not self.is_open(at + gap):
            return False  # of its own; one that an open session takes in is none of its own
        for window in near:
            start, end = min(start, window[1]), max(end, window[2])
            value += self.visits.pop(window)
        self.visits[key, start, end] = [*value, item]
        return True


class StructuresMachine(JournalledMachine):
    def make(self) -> Everything:
        return Everything.factory()(HERE)

    def empty(self) -> Model:
        return Model()

    @precondition(lambda self: self.journal is None)
    @rule(seconds=st.integers(0, 4), back=st.integers(0, 12), millis=st.sampled_from([0, 1, 999]))
    def begin(self, seconds: int, back: int, millis: int) -> None:
        time = max(0, self.model.time + seconds * SECOND + millis - (back * SECOND if back > 8 else 0))
        self.begun()
        record = IncomingRecord("t", 0, 0, None, None, None, time)
        self.ctx = SimpleNamespace(input=record, closed=[], late=[])
        observe = self.store.before_event
        assert observe is not None
        observe(self.ctx)
        self.model.closed.clear()
        self.model.late.clear()
        self.model.advance(time)
        assert self.ctx.closed == self.model.closed


class TablesMachine(StructuresMachine):
    @precondition(lambda self: self.journal is not None)
    @rule(key=KEYS, rank=RANKS, owner=st.none() | KEYS)
    def put_item(self, key: str, rank: int, owner: str | None) -> None:
        self.store.items.put(key, Item(rank, owner))
        self.model.items[key] = Item(rank, owner)

    @precondition(lambda self: self.journal is not None)
    @rule(key=KEYS, rank=RANKS)
    def put_unique(self, key: str, rank: int) -> None:
        clash = any(other != key and item.rank == rank for other, item in self.model.unique.items())
        changes = len(self.journal or ())
        try:
            self.store.unique.put(key, Item(rank))
        except StoreError:
            assert clash
            assert len(self.journal or ()) == changes
        else:
            assert not clash
            self.model.unique[key] = Item(rank)

    @precondition(lambda self: self.journal is not None)
    @rule(key=KEYS, what=st.sampled_from(["items", "unique", "heap"]))
    def delete(self, key: str, what: str) -> None:
        assert getattr(self.store, what).delete(key) == (getattr(self.model, what).pop(key, None) is not None)

    @precondition(lambda self: self.journal is not None)
    @rule(key=KEYS, rank=RANKS)
    def push(self, key: str, rank: int) -> None:
        self.store.heap.put(key, Item(rank))
        self.model.heap[key] = Item(rank)

    @precondition(lambda self: self.journal is not None)
    @rule(low=st.booleans())
    def pop(self, low: bool) -> None:
        found = self.store.heap.pop_min() if low else self.store.heap.pop_max()
        in_order = self.in_heap()
        wanted = in_order[0 if low else -1] if in_order else None
        assert found == wanted
        if wanted is not None:
            del self.model.heap[wanted[0]]

    def in_heap(self) -> list[tuple[str, Item]]:
        return sorted(self.model.heap.items(), key=lambda each: (each[1].rank, each[0].encode()))

    @invariant()
    def shows_what_the_model_shows(self) -> None:
        if not hasattr(self, "store"):
            return
        store, model = self.store, self.model
        in_order = sorted(model.items.items())
        assert list(store.items.items()) == in_order
        for owner in ("", "a", "\x00", "a\x00"):
            assert list(store.items.by("owner", owner)) == [each for each in in_order if each[1].owner == owner]
        ranked = sorted(in_order, key=lambda each: each[1].rank)
        assert list(store.items.by_range("rank")) == ranked
        assert list(store.items.by_range("rank", -1, 2)) == [each for each in ranked if -1 <= each[1].rank < 2]
        found = store.items.by_range("rank", None, 1, reverse=True, include_high=True)
        assert list(found) == [each for each in reversed(ranked) if each[1].rank <= 1]
        assert dict(store.unique.items()) == model.unique
        assert list(store.heap.ascending()) == self.in_heap()
        assert list(store.heap.descending()) == self.in_heap()[::-1]


class TimeMachine(StructuresMachine):
    @precondition(lambda self: self.journal is not None)
    @rule(key=FEW, value=RANKS)
    def put_cart(self, key: str, value: int) -> None:
        self.store.carts.put(key, value)
        self.model.carts[key] = value, self.model.time

    @precondition(lambda self: self.journal is not None)
    @rule(key=FEW)
    def delete_cart(self, key: str) -> None:
        assert self.store.carts.delete(key) == (self.model.carts.pop(key, None) is not None)

    @precondition(lambda self: self.journal is not None)
    @rule(key=FEW, item=RANKS, back=st.integers(0, 14), millis=st.sampled_from([0, 1, 500]))
    def hop(self, key: str, item: int, back: int, millis: int) -> None:
        at = max(0, self.ctx.input.timestamp_ms - back * SECOND + millis)
        self.store.hops.add(key, item, at_ms=at)
        self.model.hop(key, item, at)
        assert self.ctx.late == self.model.late

    @precondition(lambda self: self.journal is not None)
    @rule(visits=st.lists(st.tuples(FEW, RANKS, st.integers(0, 14)), min_size=1, max_size=5))
    def visit(self, visits: list[tuple[str, int, int]]) -> None:
        for key, item, back in visits:
            at = max(0, self.ctx.input.timestamp_ms - back * SECOND // 2)
            try:
                self.store.visits.add(key, item, at_ms=at)
            except LateItem:
                assert not self.model.visit(key, item, at)
            else:
                assert self.model.visit(key, item, at)

    @invariant()
    def shows_what_the_model_shows(self) -> None:
        if not hasattr(self, "store"):
            return
        store, model = self.store, self.model
        assert dict(store.carts.items()) == {key: value for key, (value, _) in model.carts.items()}
        assert {(key, *window): value for key, window, value in store.hops.items()} == model.hops
        assert {(key, *window): value for key, window, value in store.visits.items()} == model.visits


class OnDisk(StructuresMachine):
    """The same structures in a database: what is committed is written, let go, and read from there again."""

    def make(self) -> Everything:
        return self.opened(MemoryDatabase())

    def opened(self, database: MemoryDatabase) -> Everything:
        store: Any = Everything.factory(engine=SQLite())(HERE)
        assert isinstance(store, DiskStore)
        store.attach(database, lambda why: None)
        self.__dict__.setdefault("disks", {})[store] = database, []
        return store

    def committed(self, store: Everything, changes: list[Change]) -> None:
        self.disks[store][1].append(list({change.key: change for change in changes}.values()))

    @precondition(lambda self: self.journal is None)
    @rule(standby=st.booleans(), number=st.integers(1, 9), is_let_go=st.booleans())
    def write(self, standby: bool, number: int, is_let_go: bool) -> None:
        store: Any = self.standby if standby else self.store
        database, waiting = self.disks[store]
        for _ in range(min(number, len(waiting))):
            changes = waiting.pop(0)
            database.write([(change.key, change.value) for change in changes], None)
            store.written(changes)
        if is_let_go:
            store.relieve()

    @precondition(lambda self: self.journal is None)
    @rule()
    def reopen(self) -> None:
        self.write(False, len(self.disks[self.store][1]), False)
        wanted = sorted(self.store.dump())
        database, _ = self.disks.pop(self.store)
        self.store.revoked()
        self.store = self.opened(database)
        assert sorted(self.store.dump()) == wanted == sorted(database.rows.items())


class TablesOnDisk(OnDisk, TablesMachine): ...


class TimeOnDisk(OnDisk, TimeMachine): ...


TestTables = TablesMachine.TestCase
TestTables.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTime = TimeMachine.TestCase
TestTime.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestTablesOnDisk = TablesOnDisk.TestCase
TestTablesOnDisk.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestTimeOnDisk = TimeOnDisk.TestCase
TestTimeOnDisk.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
