"""Copies whose store takes its time: the loop goes on, and nobody touches a store that is being written to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from streams.errors import BrokerUnavailable, OffsetError
from streams.protocols import StateStore
from streams.records import Change, IncomingRecord
from streams.runtime.ownership.replicas import Replicas
from tests.unit.waiting import until

SECONDS = 20.0

pytestmark = pytest.mark.timeout(60)


class SlowStore:
    """Takes a change for as long as the test wants. ``log``: what was done with it."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.log: list[str] = []
        self.failure: Exception | None = None

    def receive_change(self, change: Change, /) -> None:
        self.entered.set()
        assert self.go_on.wait(SECONDS)
        if self.failure is not None:
            raise self.failure
        self.log.append("changed")

    def revoked(self) -> None:
        self.log.append("revoked")


class Bench:
    """One copy of partition 0, and the thread of a tail that gives it a record."""

    def __init__(self) -> None:
        self.stores: list[SlowStore] = []
        tail: Any = SimpleNamespace(start=lambda *_: None, close=lambda: None, remove=lambda _: None)
        tail.add = lambda partition, position, epoch: setattr(self, "epoch", epoch)
        self.epoch = 0
        self.wall, self.now, self.requests = 1_000_000_000_000, 0.0, 0
        member: Any = SimpleNamespace(
            connections=SimpleNamespace(tail=lambda: tail),
            keeper=None,
            config=SimpleNamespace(topic="t", changelog="c"),
            router=SimpleNamespace(once_bounds=None),
            now=lambda: self.now,
            wall_ms=lambda: self.wall,
            revoke_store=lambda store, _: store.revoked(),
            workers={},
            further_inputs=(),
        )
        self.member = member
        self.heard: list[int] = []
        self.copies = Replicas(member, self._make, self.heard.append)
        self.copies.start()
        self.copies.hold(0)
        self._thread = ThreadPoolExecutor(1)

    def topics(self, found: int | Exception) -> None:
        """For so many milliseconds the changelog keeps tombstones; or that is not known."""

        def describe(names: list[str], _: float) -> Any:
            self.requests += 1
            if isinstance(found, Exception):
                raise found
            return dict.fromkeys(names, SimpleNamespace(configs={"delete.retention.ms": str(found)}))

        topics: Any = SimpleNamespace(describe=describe, close=lambda: None)
        self.member.connections.topics = lambda: topics

    def _make(self, _: Any) -> StateStore:
        self.stores.append(SlowStore())
        return self.stores[-1]

    async def receive(self) -> Future[None]:
        """A record at offset 0 is on its way into the store."""
        record = IncomingRecord("c", 0, 0, b"key", b"value", None)
        given = self._thread.submit(self.copies._received, 0, self.epoch, [record], 1, 1)
        await until(self.stores[-1].entered.is_set)
        return given

    def end(self) -> None:
        for store in self.stores:
            store.go_on.set()
        self._thread.shutdown()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    made.end()


async def done(given: Future[None]) -> None:
    await asyncio.wait_for(asyncio.wrap_future(given), SECONDS)


async def test_the_loop_asks_and_takes_without_waiting_for_a_slow_store(bench: Bench) -> None:
    """Each of these waited for the store when a lock was held over its call (this test had never ended)."""
    given = await bench.receive()
    [store] = bench.stores
    assert not bench.copies.reaches(0, -1)
    assert bench.copies.take(0) is None, "taken from under the tail"
    assert bench.heard == []
    store.go_on.set()
    await done(given)
    await until(lambda: bench.heard == [0])  # who asked is told, although nothing was waited for
    assert bench.copies.reaches(0, 1)
    copy = bench.copies.take(0)
    assert copy is not None
    assert (copy.position, copy.records, store.log) == (1, 1, ["changed"])


@pytest.mark.parametrize("failure", [None, ValueError("full")])
async def test_a_store_that_is_let_go_while_it_is_written_to_is_revoked_afterwards(
    bench: Bench, failure: Exception | None
) -> None:
    given = await bench.receive()
    [store] = bench.stores
    store.failure = failure
    bench.copies.unhold(0)
    assert store.log == [], "revoked while it was written to"
    bench.copies.hold(0)  # anew, in a store of its own
    store.go_on.set()
    await asyncio.wait([asyncio.wrap_future(given)])
    await until(lambda: "revoked" in store.log)
    assert store.log == ["changed"] * (failure is None) + ["revoked"]
    assert bench.stores[1].log == []
    assert bench.copies.position(0) == -1, "the new copy has nothing of the old one's"


async def test_the_end_waits_for_a_store_that_is_being_written_to(bench: Bench) -> None:
    given = await bench.receive()
    [store] = bench.stores
    threading.Timer(0.05, store.go_on.set).start()
    bench.copies.close()
    assert store.log == ["changed", "revoked"]
    await done(given)


async def test_a_store_that_hangs_does_not_hold_up_the_end_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streams.runtime.ownership.replicas.CLOSE_SECONDS", 0.01)
    await bench.receive()
    bench.copies.close()
    assert "c[0]: the store still takes a change" in caplog.text
    assert bench.stores[0].log == []


# -- a copy that was not read on for long ------------------------------------------------------------------------------


HOUR_MS = 3_600_000


@pytest.mark.parametrize(
    ("away_ms", "tombstones_ms", "offset", "age_ms", "good"),
    [
        (22 * HOUR_MS, 24 * HOUR_MS, 7, 0, True),
        (23 * HOUR_MS + 1, 24 * HOUR_MS, 7, 0, False),
        (23 * HOUR_MS + 1, 24 * HOUR_MS, None, 0, False),  # all that was behind is compacted away
        (30 * HOUR_MS, HOUR_MS, 7, 0, True),  # so short a life says nothing of how long is too long
        (30 * HOUR_MS, 24 * HOUR_MS, 2, 0, True),  # idle: right behind the marker of the last transaction
        (30 * HOUR_MS, 24 * HOUR_MS, 3, 0, False),
        (30 * HOUR_MS, 24 * HOUR_MS, 2, 24 * HOUR_MS, False),  # the tombstone behind it may be gone
    ],
)
@pytest.mark.parametrize("has_folder", [True, False], ids=["folder", "memory"])
async def test_a_copy_that_was_frozen_for_longer_than_tombstones_live_begins_anew(
    bench: Bench, away_ms: int, tombstones_ms: int, offset: int | None, age_ms: int, good: bool, has_folder: bool
) -> None:
    """K4 while it is open: the tombstone of a key that it has may be gone, and with it all that was behind. It would
    mark its folder as new with that key in it."""
    kept: Any = SimpleNamespace(receive=lambda *_: None, close=lambda: None, distrusted="", is_ready=True)
    [copy], [store] = bench.copies._copies.values(), bench.stores
    bench.topics(tombstones_ms)
    if has_folder:
        bench.member.keeper = SimpleNamespace(known_changelog=lambda: (None, tombstones_ms))
        copy.kept = kept
    store.go_on.set()
    bench.wall += 1
    bench.copies._received(0, bench.epoch, [IncomingRecord("c", 0, 0, b"key", b"v", None, bench.wall)], 1, 1)
    bench.wall += away_ms
    later = [] if offset is None else [IncomingRecord("c", 0, offset, b"other", b"v", None, bench.wall - age_ms)]
    if good:
        bench.copies._received(0, bench.epoch, later, 8, 8)
        assert not copy.is_outlived
        assert copy.position == 8
        return
    with pytest.raises(OffsetError, match=r"not read on for \d\d.0 h; the changelog keeps tombstones for 24 h"):
        bench.copies._received(0, bench.epoch, later, 8, 8)
    assert copy.begins_anew
    assert bench.copies.failure(0) is None, "a plan that comes now would stop the source"
    assert store.log == ["changed"], "nothing more is put into it"
    bench.member.keeper = None
    bench.copies.hold(0)
    assert ("was not read on" in kept.distrusted) == has_folder


def record_at(offset: int, timestamp_ms: int) -> list[IncomingRecord]:
    return [IncomingRecord("c", 0, offset, b"key", b"v", None, timestamp_ms)]


async def test_how_long_tombstones_live_is_requested_once_and_after_a_pause(bench: Bench) -> None:
    """A copy that is read on all the time costs no request; a broker that does not answer costs one a minute."""
    bench.stores[0].go_on.set()
    bench.topics(BrokerUnavailable("no answer"))
    receive = bench.copies._received
    for offset in range(3):
        bench.wall += 60_000
        receive(0, bench.epoch, record_at(offset, bench.wall), offset + 1, offset + 1)
    assert bench.requests == 0
    for offset in range(3, 6):  # after a pause; a day is assumed
        bench.wall += 23 * HOUR_MS
        receive(0, bench.epoch, record_at(offset, bench.wall), offset + 1, offset + 1)
    assert bench.requests == 1
    bench.now += 60.0
    bench.topics(7 * 24 * HOUR_MS)
    for offset in range(10, 40, 10):
        bench.wall += 7 * 23 * HOUR_MS
        receive(0, bench.epoch, record_at(offset, bench.wall), offset + 1, offset + 1)
    assert bench.requests == 2
    bench.wall += 7 * 24 * HOUR_MS
    with pytest.raises(OffsetError, match="keeps tombstones for 168 h"):
        receive(0, bench.epoch, record_at(50, bench.wall), 51, 51)


@pytest.mark.parametrize(("seconds", "good"), [(7_200, True), (7_204, False)])
async def test_a_restore_may_take_as_long_as_tombstones_live(bench: Bench, seconds: int, good: bool) -> None:
    """Its beginning is known by the same clock as its end. If it began anew after less, it might never end."""
    bench.stores[0].go_on.set()
    bench.topics(2 * HOUR_MS)
    old = bench.wall - 10 * HOUR_MS
    for offset in range(4):
        bench.wall += seconds * 250
        if offset < 3 or good:
            bench.copies._received(0, bench.epoch, record_at(offset, old), offset + 1, 100)
    if not good:
        with pytest.raises(OffsetError, match=r"not read on for 2\.0 h"):
            bench.copies._received(0, bench.epoch, record_at(3, old), 4, 100)


async def test_a_clock_that_was_ahead_hides_no_pause(bench: Bench) -> None:
    """It was a day ahead when the copy was begun, and is set back."""
    bench.stores[0].go_on.set()
    bench.topics(24 * HOUR_MS)
    bench.wall += 24 * HOUR_MS
    bench.copies.unhold(0)
    bench.copies.hold(0)
    bench.stores[1].go_on.set()
    bench.wall -= 24 * HOUR_MS
    bench.copies._received(0, bench.epoch, record_at(0, bench.wall), 1, 1)
    bench.wall += 30 * HOUR_MS
    with pytest.raises(OffsetError, match=r"not read on for 30\.0 h"):
        bench.copies._received(0, bench.epoch, record_at(9, bench.wall), 10, 10)


async def test_a_store_that_was_handed_over_is_as_old_as_its_position(bench: Bench) -> None:
    """The process stood still between the last transaction and the copy of it."""
    bench.topics(24 * HOUR_MS)
    bench.wall += 30 * HOUR_MS
    store = SlowStore()
    store.go_on.set()
    bench.copies.adopt(0, store, None, {}, 5, bench.wall - 30 * HOUR_MS)
    with pytest.raises(OffsetError, match=r"not read on for 30\.0 h"):
        bench.copies._received(0, bench.epoch, record_at(9, bench.wall), 10, 10)
