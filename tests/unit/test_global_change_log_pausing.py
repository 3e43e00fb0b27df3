"""Global change logs over a topic in memory: pausing, going on elsewhere, stopping."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Iterator

import anyio
import pytest

from streams import (
    IncomingRecord,
    SourceState,
)
from streams.errors import (
    ConfigError,
    NotCaughtUp,
    RecordError,
    TopicError,
)
from streams.runtime.reading import log_reader
from tests.unit.global_log_kit import PATIENCE, Changes, Heard, MemoryTopic, log_over, threads_end, until

pytestmark = pytest.mark.asyncio


@pytest.fixture
def topic() -> MemoryTopic:
    return MemoryTopic()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield from threads_end()


class TestPausing:
    async def test_paused_partitions_wait_and_go_on_where_they_were(self, topic: MemoryTopic) -> None:
        log, heard = log_over(topic), Heard()
        log.add_receiver(heard)
        topic.put(b"a", b"")
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            log.pause([0])
            topic.put(b"b", b"", 0)
            topic.put(b"c", b"", 1)
            await until(lambda: b"c" in heard.keys)
            with pytest.raises(NotCaughtUp, match=r"\[0\] at 1 of 2 \(paused\)"):
                await log.wait_caught_up(0.05)
            assert [p.paused for p in log.statistics().partitions] == [True, False]
            log.resume()
            assert await log.wait_caught_up(PATIENCE)
            assert heard.keys == [b"a", b"c", b"b"]
            log.pause()
            log.pause(range(2))
            assert all(p.paused for p in log.statistics().partitions)
            topic.put(b"d", b"")
            log.resume([0, 1])
            assert await log.wait_caught_up(PATIENCE)
            assert heard.keys == [b"a", b"c", b"b", b"d"]
            for wrong in ([2], [-1]):
                with pytest.raises(ConfigError, match="has no partition"):
                    log.pause(wrong)

    async def test_a_receiver_pauses_after_its_record_and_nothing_is_lost_or_twice(self, topic: MemoryTopic) -> None:
        log, heard = log_over(topic), Heard()

        @log.add_receiver
        def pausing(record: IncomingRecord) -> None:
            heard(record)
            if record.offset % 3 == 0:
                log.pause([record.partition])
                if record.offset % 2:
                    log.resume(record.partition)

        for n in range(100):
            topic.put(b"%d" % n, b"")
        async with log:
            while len(heard.records) < 100:
                await until(lambda: log.statistics().partitions[0].paused or len(heard.records) == 100)
                assert not log.statistics().partitions[0].paused or heard.records[-1].offset % 6 == 0
                log.resume()
            assert await log.wait_caught_up(PATIENCE)
            assert [record.offset for record in heard.records] == list(range(100))

    async def test_the_record_that_a_receiver_has_is_the_last_one_and_comes_once(self, topic: MemoryTopic) -> None:
        log, heard, entered, go_on = log_over(topic), Heard(), threading.Event(), threading.Event()

        @log.add_receiver
        def slow(record: IncomingRecord) -> None:
            entered.set()
            assert go_on.wait(PATIENCE)
            heard(record)

        for key in (b"a", b"b", b"c"):
            topic.put(key, b"")
        async with log:
            await until(entered.is_set)
            log.pause([0])
            go_on.set()
            await until(lambda: log.statistics().partitions[0].position == 1)
            assert heard.keys == [b"a"]
            log.resume(0)
            assert await log.wait_caught_up(PATIENCE)
            assert heard.keys == [b"a", b"b", b"c"]

    async def test_a_failure_in_a_partition_that_was_paused_meanwhile_is_not_lost(self, topic: MemoryTopic) -> None:
        log = log_over(topic)

        @log.add_receiver
        def failing(record: IncomingRecord) -> None:
            log.pause([record.partition])
            raise KeyError("mine")

        topic.put(b"a", b"")
        with pytest.raises(RecordError, match=r"rates\[0\]@0"):
            async with log:
                await asyncio.wait_for(log.wait_stopped(), PATIENCE)

    async def test_resuming_elsewhere(self, topic: MemoryTopic) -> None:
        log, heard = log_over(topic), Heard()
        log.add_receiver(heard)
        for n in range(5):
            topic.put(b"%d" % n, b"")
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            log.resume(0, at_offset=3)  # without a pause
            assert await log.wait_caught_up(PATIENCE)
            assert heard.keys == [b"0", b"1", b"2", b"3", b"4", b"3", b"4"]
            log.pause()
            for n in range(5, 8):
                topic.put(b"%d" % n, b"")
            log.resume(0, at_offset=7)
            assert await log.wait_caught_up(PATIENCE)
            assert heard.keys[7:] == [b"7"]
            assert [p.paused for p in log.statistics().partitions] == [False, True]
            for partitions, offset in (((0,), 1), (None, 1), (0, -1)):
                with pytest.raises(ConfigError, match="at_offset"):
                    log.resume(partitions, at_offset=offset)

    async def test_what_is_sent_back_while_a_receiver_has_its_record_is_not_caught_up(self, topic: MemoryTopic) -> None:
        log, entered, gates = log_over(topic), list[int](), [threading.Event(), threading.Event()]

        @log.add_receiver
        def slow(record: IncomingRecord) -> None:
            if record.offset == 4 or 4 in entered:
                entered.append(record.offset)
                assert gates[min(len(entered), 2) - 1].wait(PATIENCE)

        for n in range(5):
            topic.put(b"%d" % n, b"")
        async with log:
            await until(lambda: entered == [4])
            log.resume(0, at_offset=1)
            gates[0].set()
            await until(lambda: entered == [4, 1])
            with pytest.raises(NotCaughtUp, match=r"\[0\] at 1 of 5"):
                await log.wait_caught_up(0.05)
            gates[1].set()
            assert await log.wait_caught_up(PATIENCE)
            assert entered == [4, 1, 2, 3, 4]

    async def test_any_order_of_pausing_and_writing_hands_over_each_record_once(self) -> None:
        """From several threads at once, with breaks in the reading in between. ``SEED=`` repeats the choices."""
        seed = int(os.environ.get("SEED") or time.time_ns() % 1_000_000)
        print(f"SEED={seed}")
        rng = random.Random(seed)
        topic = MemoryTopic(partitions=3)
        log, heard, written, stop = log_over(topic), Heard(), [0, 0, 0], threading.Event()
        log.add_receiver(heard)

        def disturb(own: random.Random) -> None:
            while not stop.is_set():
                chosen = own.sample(range(3), own.randrange(1, 4))
                own.choice((log.pause, log.resume))(chosen)

        async with log:
            threads = [threading.Thread(target=disturb, args=(random.Random(rng.random()),)) for _ in range(2)]
            for thread in threads:
                thread.start()
            rounds = rng.randrange(200, 400)
            while rounds:
                rounds -= 1
                number = rng.randrange(3)
                for _ in range(rng.randrange(1, 8)):
                    topic.put(b"k", b"%d" % written[number], number)
                    written[number] += 1
                if rng.random() < 0.3:
                    topic.pass_over(number, rng.randrange(1, 5))
                if rng.random() < 0.05:
                    topic.failures[number] = [TopicError("not known yet")]
                await asyncio.sleep(0)
            stop.set()
            for thread in threads:
                thread.join(PATIENCE)
            log.resume()
            assert await log.wait_caught_up(PATIENCE), f"SEED={seed}"
            for number in range(3):
                values = [int(record.value or b"") for record in heard.records if record.partition == number]
                assert values == list(range(written[number])), f"SEED={seed}"
            assert [p.records for p in log.statistics().partitions] == written


class TestStopping:
    async def test_a_receiver_that_does_not_come_back_is_left_and_not_ended(
        self, topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(log_reader, "STOP_SECONDS", 0.05)
        log, store, entered, go_on = log_over(topic), Changes(), threading.Event(), threading.Event()
        log.add_receiver(store)

        @log.add_receiver
        def slow(_record: IncomingRecord) -> None:
            entered.set()
            assert go_on.wait(PATIENCE)

        topic.put(b"k", b"")
        await log.start()
        await until(entered.is_set)
        await log.stop()
        assert "left to itself" in caplog.text
        assert store.ends == 0  # never while a receiver may be called
        go_on.set()

    async def test_nothing_is_handed_over_after_stop(self, topic: MemoryTopic) -> None:
        log, heard, entered, go_on = log_over(topic), Heard(), threading.Event(), threading.Event()

        @log.add_receiver
        def slow(record: IncomingRecord) -> None:
            entered.set()
            assert go_on.wait(PATIENCE)
            heard(record)

        for n in range(100):
            topic.put(b"%d" % n, b"")
        await log.start()
        await until(entered.is_set)
        stopping = asyncio.create_task(log.stop())
        await until(lambda: log.state is SourceState.STOPPING)
        go_on.set()
        await stopping
        assert heard.keys == [b"0"]

    async def test_cancelled_in_the_body_it_still_ends_properly(self, topic: MemoryTopic) -> None:
        log, store = log_over(topic), Changes()
        log.add_receiver(store)

        async def body() -> None:
            async with log:
                await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await until(lambda: log.state is SourceState.RUNNING)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (log.state, store.ends, topic.open_consumers) == (SourceState.STOPPED, 1, 0)

    async def test_in_a_scope_that_is_cancelled_it_ends_properly_too(
        self, topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(log_reader, "WATCH_SECONDS", 3600)
        log, store = log_over(topic), Changes()
        log.add_receiver(store)
        with anyio.CancelScope() as scope:
            async with log:
                scope.cancel()
                await anyio.sleep_forever()
        assert (log.state, store.ends, topic.open_consumers) == (SourceState.STOPPED, 1, 0)
        await until(lambda: len(asyncio.all_tasks()) == 1, "its tasks are over, too")

    async def test_an_end_of_a_receiver_that_raises_is_logged(
        self, topic: MemoryTopic, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(Changes):
            def revoked(self) -> None:
                raise KeyError("mine")

        log, store = log_over(topic), Changes()
        log.add_receiver(Broken())
        log.add_receiver(store)
        async with log:
            pass
        assert store.ends == 1
        assert "the end of Broken failed" in caplog.text
