"""Snapshots and changes of a view over a topic in memory, against plain dicts."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import pytest

from streams import IncomingRecord, ViewChange
from streams.errors import StoreError
from streams.views.shared import Frozen, SharedHashEngine
from tests.broker.view_history import Read, wrong_reads
from tests.unit.global_log_kit import MemoryTopic
from tests.unit.view_kit import changed, number, view_of, viewed_topic
from tests.unit.waiting import PATIENCE


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryTopic]:
    yield from viewed_topic(monkeypatch)


# -- snapshots --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_snapshot_stays_as_it_was(topic: MemoryTopic, ordered: bool) -> None:
    """Against plain dicts: several are open at a time, beside puts and deletes in the middle of their scans."""
    chance, model = random.Random(7), dict[str, int]()
    async with view_of(topic, ordered) as view:

        async def write(count: int) -> None:
            for _ in range(count):
                name = f"key-{chance.randrange(900)}"
                value = None if chance.random() < 0.3 else chance.randrange(1000)
                topic.put(name.encode(), None if value is None else number(value), int(name[4:]) % 2)
                model.pop(name, None) if value is None else model.update({name: value})
            await view.wait_for({n: log.end for n, log in enumerate(topic.logs)}, PATIENCE)

        await view.ready(PATIENCE)
        with view.snapshot() as empty:
            assert (list(empty.items()), len(empty), empty.is_ordered) == ([], 0, ordered)
        await write(1500)
        opened = []
        for _ in range(4):
            frozen = view.snapshot()
            assert frozen.positions == view.positions
            opened.append((frozen, dict(model), frozen.items()))
            next(opened[-1][2])
            await write(1200)
        for frozen, then, scan in opened:
            assert then != model
            assert len(frozen) == len(then)
            assert dict(frozen.items()) == then
            assert {key: frozen.get(key) for key in (f"key-{n}" for n in range(900)) if key in frozen} == then
            rest = list(scan)
            assert len(dict(rest)) == len(rest) == len(then) - 1
            assert dict(rest).items() <= then.items()
            if ordered:
                assert list(frozen.items()) == sorted(then.items())
                assert list(frozen.range("key-3", "key-6", reverse=True)) == sorted(
                    (item for item in then.items() if "key-3" <= item[0] < "key-6"), reverse=True
                )
                assert frozen.first() == min(then.items())
        assert dict(view.items()) == model
        first, second, *_ = (frozen for frozen, _, _ in opened)
        with first:
            pass
        first.close()
        with pytest.raises(StoreError, match="this snapshot of rates was closed"):
            first.get("key-1")
        half_way = second.items()
        next(half_way)
    for read in (lambda: second.get("key-1"), lambda: len(second), lambda: list(half_way)):
        with pytest.raises(StoreError, match="stopped"):
            read()


async def test_a_view_without_writes_forgets_snapshots_that_were_closed_or_let_go(topic: MemoryTopic) -> None:
    async with view_of(topic) as view:
        await view.ready(PATIENCE)
        closed = []
        for _ in range(20):
            with view.snapshot() as frozen:
                closed.append(frozen)
            view.snapshot()  # let go
        with view.snapshot() as first, view.snapshot() as second:
            observers = [reference() for reference in view._table._observers]
            assert first in observers
            assert second in observers
            assert len(observers) <= 3


async def test_snapshots_are_of_one_moment_also_beside_the_writer(topic: MemoryTopic) -> None:
    """A total is moved between accounts, record by record: a snapshot is off by the one record that is half way."""
    accounts, stop = 20, threading.Event()
    for n in range(accounts):
        topic.put(b"%d" % n, number(100))

    def write() -> None:
        for _ in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            one, other = random.sample(range(accounts), 2)
            with topic.lock:
                held[one] -= 1
            topic.put(b"%d" % one, number(held[one]))
            held[other] += 1
            topic.put(b"%d" % other, number(held[other]))

    held = [100] * accounts
    async with view_of(topic) as view:
        await view.ready(PATIENCE)
        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(150):
                with view.snapshot() as frozen:
                    first = dict(frozen.items())
                    assert sum(first.values()) in (100 * accounts, 100 * accounts - 1)
                    await view.wait_for(frozen.positions)
                    assert {key: frozen.get(key) for key in first} == first
        finally:
            stop.set()
            writer.join()


@pytest.mark.parametrize("written", [b"new", None])
def test_a_write_between_the_two_looks_of_a_snapshot_is_not_seen(written: bytes | None) -> None:
    live = SharedHashEngine()
    live.put(b"k", b"old")
    frozen = Frozen(live)

    def get(key: bytes) -> bytes | None:
        frozen.note(key, b"old")
        live.delete(key) if written is None else live.put(key, written)
        return written

    live.get = get
    assert frozen.get(b"k") == b"old"


async def test_values_are_kept_for_open_snapshots_only(topic: MemoryTopic) -> None:
    async with view_of(topic) as view:
        await view.ready(PATIENCE)
        table = view._current()
        frozen, _changes = view.snapshot(), view.changes()
        assert len(table._observers) == 2
        del frozen, _changes
        await view.wait_for({0: topic.put(b"a", number(1)) + 1}, PATIENCE)
        assert table._observers == ()


# -- changes ----------------------------------------------------------------------------------------------------------


async def test_changes_are_merged_per_key_and_the_last_word_is_not_lost(topic: MemoryTopic) -> None:
    topic.put(b"a", number(1))
    async with view_of(topic) as view:
        await view.ready(PATIENCE)
        changes, every = view.changes(), view.changes(initial=True)
        for key, value, partition in [("a", 2, 0), ("b", 3, 1), ("a", 4, 0), ("b", None, 1), ("c", 5, 0), ("a", 6, 0)]:
            topic.put(key.encode(), None if value is None else number(value), partition)
        await view.wait_for({0: 5, 1: 2}, PATIENCE)
        assert [await anext(changes) for _ in range(2)] == [changed("a", 1, 6), changed("c", None, 5)]
        assert [await anext(every) for _ in range(3)] == [
            changed("a", None, 1),
            changed("a", 1, 6),
            changed("c", None, 5),
        ]
        topic.put(b"a", number(6))  # is there already
        topic.put(b"a", None)
        topic.put(b"d", number(7), 1)
        await view.wait_for({0: 7, 1: 3}, PATIENCE)
        assert {(await anext(changes)).key for _ in range(2)} == {"a", "d"}
        waiting = asyncio.create_task(_all(changes))
        topic.put(b"a", number(8))
        await view.wait_for({0: 8}, PATIENCE)
    assert await waiting == [changed("a", None, 8)]


async def _all(changes: AsyncIterator[ViewChange[str, int]]) -> list[ViewChange[str, int]]:
    return [change async for change in changes]


async def test_a_slow_reader_comes_to_the_present_state(topic: MemoryTopic) -> None:
    """Applied to a dict, whatever was merged meanwhile; each old value is the new one before."""
    chance, built = random.Random(3), dict[str, int]()
    async with view_of(topic) as view:
        await view.ready(PATIENCE)
        async with aclosing(view.changes()) as changes:
            for n in range(3000):
                key = f"{chance.randrange(50)}"
                topic.put(key.encode(), None if chance.random() < 0.2 else number(n), int(key) % 2)
            topic.put(b"end", number(0))
            async for change in changes:
                assert built.get(change.key) == change.old
                built.pop(change.key, None) if change.new is None else built.update({change.key: change.new})
                if change.key == "end":
                    await view.wait_for({n: log.end for n, log in enumerate(topic.logs)}, PATIENCE)
                    topic.put(b"really", number(1))
                elif change.key == "really":
                    break
                if chance.random() < 0.05:
                    await view.wait_for(view.positions)
            assert built == dict(view.items())


@pytest.mark.parametrize(
    ("reads", "wrong"),
    [
        ([("a", None, 0), ("a", b"1", 0), ("a", b"1", 1), ("a", b"2", 9)], []),
        ([("a", b"3", 0)], ["dirty"]),
        ([("a", b"2", 0), ("a", b"1", 0)], ["backwards"]),
        ([("a", b"1", 0), ("a", None, 0)], ["backwards"]),
        ([("a", None, 1)], ["stale"]),
        ([("a", b"1", 3), ("b", b"x", 3)], ["stale"]),
    ],
)
def test_the_judge_of_histories_finds_each_kind(reads: list[tuple[str, bytes | None, int]], wrong: list[str]) -> None:
    written = [(b"a", b"1"), (b"b", b"x"), (b"a", b"2")]
    committed = [IncomingRecord("t", 0, offset, key, value, None) for offset, (key, value) in enumerate(written)]
    found = wrong_reads([Read("reader", key, value, {0: floor}) for key, value, floor in reads], committed)
    assert [text.split()[0].strip(",:") for text in found] == wrong
