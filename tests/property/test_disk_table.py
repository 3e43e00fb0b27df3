"""A table on disk against a dictionary, in any order of events, failures, checkpoints and scans; and its safeguards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.codecs import codec_for
from streams.protocols import PAGE_BYTES, DiskDatabase, DiskStore, JournalledStore, StateStore
from streams.records import Change, TopicPartition
from streams.stores import layered
from streams.stores.layered import LayeredEngine
from streams.stores.table import DiskTable

ALL = [b"a", b"b", b"c", b"d", b"e"]
KEYS = st.sampled_from(ALL)
VALUES = st.none() | st.sampled_from([b"", b"1", b"twice the same object"])
WRITES = st.lists(st.tuples(KEYS, VALUES), max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("event"), WRITES, st.booleans()),
        st.tuples(st.just("receive"), KEYS, VALUES),
        st.tuples(st.just("write"), st.integers(1, 3)),
        st.tuples(st.just("announce")),
        st.tuples(st.just("relieve")),
        st.tuples(st.just("scan"), st.booleans()),
        st.tuples(st.just("next"), st.integers(1, 3)),
    ),
    max_size=40,
)


class MemoryDatabase:
    """A ``DiskDatabase`` that is a dictionary."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.reads = 0

    def get(self, key: bytes, /) -> bytes | None:
        self.reads += 1
        return self.rows.get(key)

    def scan(
        self, low: bytes | None, high: bytes | None, /, *, reverse: bool, limit: int, size: int = PAGE_BYTES
    ) -> list[tuple[bytes, bytes]]:
        self.reads += 1
        found = [(k, v) for k, v in self.rows.items() if (low is None or k >= low) and (high is None or k < high)]
        page: list[tuple[bytes, bytes]] = []
        for key, value in sorted(found, reverse=reverse)[:limit]:
            page.append((key, value))
            size -= len(key) + len(value)
            if size <= 0:
                break
        return page

    def mark(self) -> bytes | None:
        return None

    def write(self, changes: Sequence[tuple[bytes, bytes | None]], mark: bytes | None, /) -> None:
        for key, value in changes:
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value

    def count(self) -> int:
        return len(self.rows)

    def close(self) -> None: ...


class Bench:
    """A table, what it must hold, and what waits to be written and to be announced."""

    def __init__(self) -> None:
        self.disk = MemoryDatabase()
        nowhere: Any = None
        self.table = DiskTable(TopicPartition("in", 0), nowhere, codec_for(bytes), codec_for(bytes))
        self.table.attach(self.disk, lambda why: None)
        self.wanted: dict[bytes, bytes] = {}
        self.committed: deque[list[Change]] = deque()
        self.on_disk: deque[list[Change]] = deque()
        self.scan: Iterator[tuple[bytes, bytes]] | None = None
        self.is_reverse = False
        self.seen: list[bytes] = []
        self.steady: set[bytes] = set()

    def set(self, key: bytes, value: bytes | None) -> None:
        self.steady.discard(key)
        if value is None:
            self.wanted.pop(key, None)
        else:
            self.wanted[key] = value

    def event(self, writes: list[tuple[bytes, bytes | None]], fails: bool) -> None:
        journal: list[Change] = []
        before = dict(self.wanted)
        self.table.begin(journal)
        for key, value in writes:
            if value is None:
                assert self.table.delete(key) is (key in self.wanted)
            else:
                self.table.put(key, value)
            self.set(key, value)
            assert self.table.get(key) == value
        self.table.end()
        if fails:
            self.table.undo(journal)
            self.wanted = before
        elif journal:
            self.committed.append(journal)

    def receive(self, key: bytes, value: bytes | None) -> None:
        change = Change(key, value)
        self.table.receive_change(change)
        self.set(key, value)
        self.committed.append([change])

    def write(self, number: int) -> None:
        changes: dict[bytes, Change] = {}
        for _ in range(min(number, len(self.committed))):
            changes |= {change.key: change for change in self.committed.popleft()}
        self.disk.write([(change.key, change.value) for change in changes.values()], None)
        self.on_disk.append(list(changes.values()))

    def announce(self) -> None:
        if self.on_disk:
            self.table.written(self.on_disk.popleft())

    def relieve(self) -> None:
        self.table.relieve()

    def begin_scan(self, is_reverse: bool) -> None:
        self.scan, self.is_reverse, self.seen = self.table.range(reverse=is_reverse), is_reverse, []
        self.steady = set(self.wanted)

    def next(self, number: int) -> None:
        for _ in range(number if self.scan is not None else 0):
            assert self.scan is not None
            found = next(self.scan, None)
            if found is None:
                assert self.steady <= set(self.seen), "a key that was there all the time was not seen"
                self.scan = None
                return
            assert self.wanted.get(found[0]) == found[1], "not the value that it has when it is reached"
            self.seen.append(found[0])
        assert self.seen == sorted(set(self.seen), reverse=self.is_reverse), "in order, each once"

    def run(self, steps: list[Any]) -> None:
        for step, *rest in steps:
            {"scan": self.begin_scan}.get(step, getattr(self, step))(*rest)
            assert dict(self.table.items()) == self.wanted
            assert {key: value for key in ALL if (value := self.table.get(key)) is not None} == self.wanted
        while self.committed:
            self.write(1)
        while self.on_disk:
            self.announce()
        self.table.begin([])
        self.table.end()
        self.table.relieve()
        assert dict(self.table.items()) == self.wanted == self.disk.rows
        assert not self.table._layers._overlay, "what is on disk is not kept in memory"
        reads = self.disk.reads
        assert [self.table.get(key) for key in self.wanted] == list(self.wanted.values())
        assert self.disk.reads <= reads + len(self.wanted)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scans turn pages, and little is let go at a time."""
    monkeypatch.setattr(layered, "FIRST_PAGE", 2)
    monkeypatch.setattr(layered, "LARGEST_PAGE", 2)
    monkeypatch.setattr(layered, "LET_GO", 1_000)
    monkeypatch.setattr(layered, "CACHE_BYTES", 900)


@settings(max_examples=300)
@given(STEPS)
def test_a_table_on_disk_is_a_dictionary(steps: list[Any]) -> None:
    Bench().run(steps)


@pytest.mark.parametrize("reverse", [False, True])
def test_large_rows_come_in_small_pages(monkeypatch: pytest.MonkeyPatch, reverse: bool) -> None:
    """And what is newer than the disk, behind the last row of such a page, is not taken for the next."""
    monkeypatch.setattr(layered, "LARGEST_PAGE", 512)
    monkeypatch.setattr(layered, "FIRST_PAGE", 100)
    bench = Bench()
    large = bytes(PAGE_BYTES // 3)
    bench.disk.rows = {b"%02d" % number: large for number in range(0, 40, 2)}
    bench.event([(b"%02d" % number, b"") for number in range(1, 40, 4)], False)
    found = list(bench.table.range(reverse=reverse))
    assert [key for key, _ in found] == sorted(bench.disk.rows.keys() | bench.wanted, reverse=reverse)
    assert bench.disk.reads > 6, "three or so of them are a page"


def test_what_the_engine_of_the_source_needs() -> None:
    table = Bench().table
    disk: DiskDatabase = MemoryDatabase()  # for mypy
    assert all(isinstance(table, protocol) for protocol in (DiskStore, JournalledStore, StateStore))
    assert disk.count() == 0


def test_a_blind_write_does_not_read() -> None:
    bench = Bench()
    bench.disk.rows[b"a"] = b"1"
    bench.event([(b"a", b"2")], True)
    assert not bench.disk.reads


# -- safeguards: each is out, and a scenario finds it ------------------------------------------------------------------


def let_go_by_value(self: LayeredEngine) -> None:
    """An entry goes when an equal value was written."""
    self._times += 1
    while self._written:
        for change in self._written.popleft():
            entry = self._overlay.get(change.key)
            if entry is not None and entry.value == change.value:
                self._drop(change.key)


def let_go_without_cache(self: LayeredEngine) -> None:
    """What is cached stays as it was."""
    self._times += 1
    while self._written:
        for change in self._written.popleft():
            if self._overlay.get(change.key) is change:
                self._drop(change.key)


def let_go_unseen(self: LayeredEngine) -> None:
    times = self._times
    LET_GO_OF(self)
    self._times = times


def put_back_nothing(self: LayeredEngine, change: Change) -> None:
    if self._overlay.get(change.key) is change:
        self._drop(change.key)


LET_GO_OF = LayeredEngine.let_go
EQUAL: list[Any] = [
    ("event", [(b"a", b"1")], False), ("write", 1), ("event", [(b"a", b"2")], False),
    ("event", [(b"a", b"1")], False), ("announce",), ("relieve",), ("write", 1),
]  # fmt: skip
CACHED: list[Any] = [
    ("event", [(b"a", b"1")], False), ("write", 1), ("announce",), ("relieve",), ("event", [], False),
    ("event", [(b"a", b"2")], False), ("write", 1), ("announce",), ("relieve",),
]  # fmt: skip
SCANNED: list[Any] = [
    *[("event", [(key, b"1")], False) for key in (b"a", b"b")], ("write", 2), ("scan", False), ("next", 1),
    ("event", [(b"b", b"2")], False), ("write", 1), ("announce",), ("announce",), ("relieve",), ("next", 3),
]  # fmt: skip
UNDONE: list[Any] = [("event", [(b"a", b"1")], False), ("event", [(b"a", b"2")], True)]

SAFEGUARDS: dict[str, tuple[str, Callable[..., Any], list[Any]]] = {
    "by identity, not by value": ("let_go", let_go_by_value, EQUAL),
    "the cache learns what is written": ("let_go", let_go_without_cache, CACHED),
    "a scan looks again": ("let_go", let_go_unseen, SCANNED),
    "the undo puts back what was displaced": ("take_back", put_back_nothing, UNDONE),
}


@pytest.mark.parametrize("name", SAFEGUARDS)
def test_each_safeguard_is_missed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, instead, steps = SAFEGUARDS[name]
    Bench().run(steps)
    monkeypatch.setattr(LayeredEngine, attribute, instead)
    with pytest.raises(AssertionError):
        Bench().run(steps)
