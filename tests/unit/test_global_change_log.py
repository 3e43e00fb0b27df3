"""Global change logs over a topic in memory: who gets what, how far it is, and pausing."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import random
import threading
import time
from collections.abc import Iterator

import pytest

from streams import Change, IncomingRecord, SourceState, Table, TopicPartition
from streams.codecs import RESERVED_KEY_PREFIX
from streams.errors import (
    BrokerUnavailable,
    ConfigError,
    NotCaughtUp,
    RecordError,
    RegistrationError,
    Stopped,
    StoreError,
    TopicError,
)
from streams.records import TYPE_HEADER
from streams.runtime.reading import followed_topic, log_reader
from tests.unit.global_log_kit import Changes, Heard, MemoryTopic, Partition, caught_up, log_over, memory_topic
from tests.unit.waiting import PATIENCE, until


@pytest.fixture
def topic() -> Iterator[MemoryTopic]:
    yield from memory_topic()


# -- receiving --------------------------------------------------------------------------------------------------------


async def test_every_receiver_gets_every_record_once_in_order(topic: MemoryTopic) -> None:
    for n in range(1200):  # several polls of the reading thread
        topic.put(b"%d" % n, b"x", n % 2)
    heard, store, own = Heard(), Changes(), Table.factory(key=str, value=bytes)(TopicPartition("mine", 0))
    log = log_over(topic, store, own)
    table = log.table(key=str, value=bytes)
    assert log.add_receiver(heard) is heard
    async with log:
        await caught_up(log)
        topic.put(b"late", b"y", 1)
        topic.put(b"0", None)
        topic.pass_over(0, 3)
        await caught_up(log)
        for number in range(2):
            mine = [record.offset for record in heard.records if record.partition == number]
            assert mine == list(range(601))
        assert len(store.changes) == 1202
        assert store.changes[-1].value is None or store.changes[-2].value is None
        assert len(own) == 1200
        assert (len(table), table.get("late"), table.get("0")) == (1200, b"y", None)
        assert [thread.name for thread in heard.threads] == ["kes-tail"]
        stand = log.statistics()
        assert stand.caught_up
        numbers = [(p.position, p.end, p.lag, p.records) for p in stand.partitions]
        assert numbers == [(604, 604, 0, 601), (601, 601, 0, 601)]
        assert store.ends == 0
    assert (log.state, store.ends, topic.open_consumers) == (SourceState.STOPPED, 1, 0)
    await log.stop()
    assert store.ends == 1
    with pytest.raises(StoreError, match="revoked"):
        len(own)


async def test_the_toolkits_own_records_are_left_out_and_types_come_along(topic: MemoryTopic) -> None:
    topic.put(RESERVED_KEY_PREFIX + b"offset", b"{}")
    topic.put(b"k", b"v", 0, [(TYPE_HEADER, b"Kind")])
    topic.put(RESERVED_KEY_PREFIX + b"timer:1", b"\xff")
    heard, store = Heard(), Changes()
    log = log_over(topic, heard, store)
    log.table(key=str, value=bytes)
    async with log:
        await caught_up(log)
    assert heard.keys == [b"k"]
    assert store.changes == [Change(b"k", b"v", None, "Kind")]


def test_it_may_be_made_where_no_loop_runs(topic: MemoryTopic) -> None:
    log, never = log_over(topic), log_over(topic)
    table = log.table(key=str, value=bytes)
    topic.put(b"k", b"v")

    async def use() -> None:
        async with log:
            await caught_up(log)
            assert table.get("k") == b"v"
        await never.stop()
        await never.wait_stopped()

    asyncio.run(use())


async def test_who_comes_late_or_can_not_receive_is_refused(topic: MemoryTopic) -> None:
    log = log_over(topic)
    with pytest.raises(RegistrationError, match=r"call table\(\) or add_receiver\(\)"):
        await log.start()

    async def coroutine(_record: IncomingRecord) -> None: ...

    class Later:
        async def __call__(self, _record: IncomingRecord) -> None: ...

    class LaterStore:
        async def receive_change(self, _change: Change) -> None: ...

    for wrong in (coroutine, Later(), LaterStore(), functools.partial(coroutine), 7, Changes):
        with pytest.raises(RegistrationError, match="can not receive changes"):
            log.add_receiver(wrong)
    log.add_receiver(Heard())
    async with log:
        for come in (lambda: log.add_receiver(Heard()), lambda: log.table(key=str, value=int)):
            with pytest.raises(RegistrationError, match="would miss"):
                come()
        with pytest.raises(RegistrationError, match="started before"):
            await log.start()
    with pytest.raises(RegistrationError, match="started before"):
        await log.start()


# -- caught up --------------------------------------------------------------------------------------------------------


async def test_what_comes_after_the_call_is_not_waited_for(topic: MemoryTopic) -> None:
    slow = Heard(hold=b"slow")
    topic.put(b"quick", b"")
    async with log_over(topic, slow) as log:
        await caught_up(log)
        topic.put(b"slow", b"")
        await until(slow.entered.is_set)
        behind = asyncio.create_task(log.wait_caught_up(PATIENCE))
        with pytest.raises(NotCaughtUp, match=r"rates: .* 0.05 s: \[0\] at 1 of 2"):
            await log.wait_caught_up(0.05)
        assert not behind.done()  # a record that a receiver still has is not received
        slow.go_on.set()
        assert await behind


async def test_open_transactions_get_their_time_and_no_more(
    topic: MemoryTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic.put(b"a", b"")
    topic.open_transaction(0, 2)
    heard = Heard()
    async with log_over(topic, heard) as log:
        assert not await log.wait_caught_up(PATIENCE, settle_seconds=0.05)
        assert "open transactions hold back: [0] at 1 of 3" in caplog.text
        assert heard.keys == [b"a"]
        assert not await log.wait_caught_up(0.05, settle_seconds=PATIENCE)
        with pytest.raises(NotCaughtUp, match=r"open transactions hold it back .* 0\.05 s: \[0\] at 1 of 3"):
            await log.wait_caught_up(0.05, settle_seconds=math.inf)
        waiting = asyncio.create_task(log.wait_caught_up(settle_seconds=math.inf))
        await until(lambda: log._reader._waiters == 1)
        topic.end_transaction(0)
        assert await waiting
        assert log.statistics().partitions[0].position == 3


async def test_holes_empty_partitions_and_aborted_ends(topic: MemoryTopic) -> None:
    topic.put(b"a", b"", 0, offset=50)
    topic.pass_over(0, 7)
    async with log_over(topic, Heard()) as log:
        assert await log.wait_caught_up(PATIENCE, settle_seconds=0)
        assert [p.position for p in log.statistics().partitions] == [58, 0]


async def test_a_cluster_that_does_not_answer_is_asked_until_the_deadline(
    topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_topic, "REQUEST_SECONDS", 0.01)
    async with log_over(topic, Heard()) as log:
        topic.answers = False
        with pytest.raises(BrokerUnavailable):
            await log.wait_caught_up(0.1)
        waiting = asyncio.create_task(log.wait_caught_up(PATIENCE))
        asked = topic.questions
        await until(lambda: topic.questions > asked + 2)
        topic.answers = True
        assert await waiting


async def test_stop_ends_the_waiting_and_nothing_runs_before_and_after(topic: MemoryTopic) -> None:
    topic.open_transaction(0)
    log = log_over(topic, Heard())
    with pytest.raises(Stopped, match="created"):
        await log.wait_caught_up(1)
    await log.wait_stopped()
    assert log.statistics().partitions == ()
    await log.start()
    waiting = [asyncio.create_task(log.wait_caught_up(None, settle_seconds=PATIENCE)) for _ in range(2)]
    stopped = asyncio.create_task(log.wait_stopped())
    await until(lambda: log._reader._waiters == 2)
    await log.stop()
    for task in waiting:
        with pytest.raises(Stopped):
            await task
    await stopped
    for call in (log.pause, log.resume):
        with pytest.raises(Stopped, match="stopped"):
            call()


@pytest.mark.parametrize("ends_by", [RecordError, Stopped])
async def test_who_waits_for_an_answer_hears_of_the_end_at_once(topic: MemoryTopic, ends_by: type[Exception]) -> None:
    log = log_over(topic, Heard(refuse=b"bad"))
    await log.start()
    topic.may_answer.clear()
    waiting = asyncio.create_task(log.wait_caught_up(PATIENCE))
    await until(lambda: log._reader._followed_topic and log._reader._followed_topic._requests)
    if ends_by is RecordError:
        topic.put(b"bad", b"")
    else:
        await log.stop()
    with pytest.raises(ends_by):
        await asyncio.wait_for(waiting, PATIENCE / 2)
    await log.stop()
    topic.may_answer.set()


async def test_progress_is_told(
    topic: MemoryTopic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(log_reader, "WATCH_SECONDS", 0.01)
    for key in (*range(600), "last"):
        topic.put(str(key).encode(), b"")
    slow = Heard(hold=b"last")
    async with log_over(topic, slow) as log:
        await until(lambda: "offsets to go" in caplog.text)
        slow.go_on.set()
        await caught_up(log)
    assert "rates: caught up: 601 records, 2 partitions" in caplog.text


# -- pausing ----------------------------------------------------------------------------------------------------------


async def test_paused_partitions_wait_and_go_on_where_they_were(topic: MemoryTopic) -> None:
    heard = Heard()
    topic.put(b"a", b"")
    async with log_over(topic, heard) as log:

        def paused() -> list[bool]:
            return [p.paused for p in log.statistics().partitions]

        await caught_up(log)
        log.pause([0])
        topic.put(b"b", b"", 0)
        topic.put(b"c", b"", 1)
        await until(lambda: b"c" in heard.keys)
        with pytest.raises(NotCaughtUp, match=r"\[0\] at 1 of 2 \(paused\)"):
            await log.wait_caught_up(0.05)
        assert paused() == [True, False]
        log.resume()
        await caught_up(log)
        assert heard.keys == [b"a", b"c", b"b"]
        log.pause()
        log.pause(range(2))
        assert paused() == [True, True]
        topic.put(b"d", b"")
        log.resume([0, 1])
        await caught_up(log)
        assert heard.keys == [b"a", b"c", b"b", b"d"]
        for wrong in ([2], [-1]):
            with pytest.raises(ConfigError, match="has no partition"):
                log.pause(wrong)


async def test_a_receiver_pauses_after_its_record_and_nothing_is_lost_or_twice(topic: MemoryTopic) -> None:
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
        await caught_up(log)
        assert [record.offset for record in heard.records] == list(range(100))


async def test_the_record_that_a_receiver_has_is_the_last_one_and_comes_once(topic: MemoryTopic) -> None:
    slow = Heard(hold=b"a")
    for key in (b"a", b"b", b"c"):
        topic.put(key, b"")
    async with log_over(topic, slow) as log:
        await until(slow.entered.is_set)
        log.pause([0])
        slow.go_on.set()
        await until(lambda: log.statistics().partitions[0].position == 1)
        assert slow.keys == [b"a"]
        log.resume(0)
        await caught_up(log)
        assert slow.keys == [b"a", b"b", b"c"]


async def test_a_failure_in_a_partition_that_was_paused_meanwhile_is_not_lost(topic: MemoryTopic) -> None:
    log = log_over(topic)

    @log.add_receiver
    def failing(record: IncomingRecord) -> None:
        log.pause([record.partition])
        raise KeyError("mine")

    topic.put(b"a", b"")
    with pytest.raises(RecordError, match=r"rates\[0\]@0"):
        async with log:
            await asyncio.wait_for(log.wait_stopped(), PATIENCE)


async def test_resuming_elsewhere(topic: MemoryTopic) -> None:
    heard = Heard()
    for n in range(5):
        topic.put(b"%d" % n, b"")
    async with log_over(topic, heard) as log:
        await caught_up(log)
        log.resume(0, at_offset=3)  # without a pause
        await caught_up(log)
        assert heard.keys == [b"0", b"1", b"2", b"3", b"4", b"3", b"4"]
        log.pause()
        for n in range(5, 8):
            topic.put(b"%d" % n, b"")
        log.resume(0, at_offset=7)
        await caught_up(log)
        assert heard.keys[7:] == [b"7"]
        assert [p.paused for p in log.statistics().partitions] == [False, True]
        for partitions, offset in (((0,), 1), (None, 1), (0, -1)):
            with pytest.raises(ConfigError, match="at_offset"):
                log.resume(partitions, at_offset=offset)


async def test_what_is_sent_back_while_a_receiver_has_its_record_is_not_caught_up(topic: MemoryTopic) -> None:
    entered, gates = list[int](), [threading.Event(), threading.Event()]

    def slow(record: IncomingRecord) -> None:
        if record.offset == 4 or 4 in entered:
            entered.append(record.offset)
            assert gates[min(len(entered), 2) - 1].wait(PATIENCE)

    for n in range(5):
        topic.put(b"%d" % n, b"")
    async with log_over(topic, slow) as log:
        await until(lambda: entered == [4])
        log.resume(0, at_offset=1)
        gates[0].set()
        await until(lambda: entered == [4, 1])
        with pytest.raises(NotCaughtUp, match=r"\[0\] at 1 of 5"):
            await log.wait_caught_up(0.05)
        gates[1].set()
        await caught_up(log)
        assert entered == [4, 1, 2, 3, 4]


async def test_any_order_of_pausing_and_writing_hands_over_each_record_once(topic: MemoryTopic) -> None:
    """From several threads at once, with breaks in the reading in between. ``SEED=`` repeats the choices."""
    seed = int(os.environ.get("SEED") or time.time_ns() % 1_000_000)
    print(f"SEED={seed}")
    rng = random.Random(seed)
    topic.logs.append(Partition())
    heard, written, stop = Heard(), [0, 0, 0], threading.Event()

    async with log_over(topic, heard) as log:

        def disturb(own: random.Random) -> None:
            while not stop.is_set():
                chosen = own.sample(range(3), own.randrange(1, 4))
                own.choice((log.pause, log.resume))(chosen)

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
        await caught_up(log)
        for number in range(3):
            values = [int(record.value or b"") for record in heard.records if record.partition == number]
            assert values == list(range(written[number])), f"SEED={seed}"
        assert [p.records for p in log.statistics().partitions] == written
