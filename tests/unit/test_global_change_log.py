"""Global change logs over a topic in memory: who gets what, and how far it is."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
from collections.abc import Iterator

import pytest

from streams import (
    Change,
    IncomingRecord,
    SourceState,
    Table,
    TopicPartition,
)
from streams.codecs import RESERVED_KEY_PREFIX, int_codec
from streams.errors import (
    BrokerUnavailable,
    NotCaughtUp,
    RecordError,
    RegistrationError,
    Stopped,
    StoreError,
)
from streams.records import TYPE_HEADER
from streams.runtime.reading import followed_topic, log_reader
from tests.unit.global_log_kit import PATIENCE, Changes, Heard, MemoryTopic, log_over, threads_end, until


@pytest.fixture
def topic() -> MemoryTopic:
    return MemoryTopic()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield from threads_end()


class TestReceiving:
    @pytest.mark.asyncio
    async def test_every_receiver_gets_every_record_once_in_order(self, topic: MemoryTopic) -> None:
        for n in range(1200):  # several polls of the reading thread
            topic.put(b"%d" % n, b"x", n % 2)
        log, heard, store = log_over(topic), Heard(), Changes()
        table = log.table(key=str, value=bytes)
        assert log.add_receiver(heard) is heard
        log.add_receiver(store)
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            topic.put(b"late", b"y", 1)
            topic.put(b"0", None)
            topic.pass_over(0, 3)
            assert await log.wait_caught_up(PATIENCE)
            for number in range(2):
                mine = [record.offset for record in heard.records if record.partition == number]
                assert mine == list(range(601))
            assert len(store.changes) == 1202
            assert store.changes[-1].value is None or store.changes[-2].value is None
            assert (len(table), table.get("late"), table.get("0")) == (1200, b"y", None)
            assert [thread.name for thread in heard.threads] == ["kes-tail"]
            stand = log.statistics()
            assert stand.caught_up
            assert [(p.position, p.end, p.lag, p.records) for p in stand.partitions] == [
                (604, 604, 0, 601),
                (601, 601, 0, 601),
            ]
            assert store.ends == 0
        assert (log.state, store.ends, topic.open_consumers) == (SourceState.STOPPED, 1, 0)
        await log.stop()
        assert store.ends == 1

    @pytest.mark.asyncio
    async def test_the_toolkits_own_records_are_left_out_and_types_come_along(self, topic: MemoryTopic) -> None:
        topic.put(RESERVED_KEY_PREFIX + b"offset", b"{}")
        topic.put(b"k", b"v", 0, [(TYPE_HEADER, b"Kind")])
        topic.put(RESERVED_KEY_PREFIX + b"timer:1", b"\xff")
        log, heard, store = log_over(topic), Heard(), Changes()
        log.add_receiver(heard)
        log.add_receiver(store)
        log.table(key=str, value=bytes)
        async with log:
            assert await log.wait_caught_up(PATIENCE)
        assert heard.keys == [b"k"]
        assert store.changes == [Change(b"k", b"v", None, "Kind")]

    @pytest.mark.asyncio
    async def test_a_table_of_the_users_own_is_a_receiver(self, topic: MemoryTopic) -> None:
        topic.put(b"k", int_codec.encode(7))
        own = Table.factory(key=str, value=int)(TopicPartition("mine", 0))
        log = log_over(topic)
        log.add_receiver(own)
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            assert len(own) == 1
        with pytest.raises(StoreError, match="revoked"):
            len(own)

    def test_it_may_be_made_where_no_loop_runs(self, topic: MemoryTopic) -> None:
        log, never = log_over(topic), log_over(topic)
        table = log.table(key=str, value=bytes)
        topic.put(b"k", b"v")

        async def use() -> None:
            async with log:
                assert await log.wait_caught_up(PATIENCE)
                assert table.get("k") == b"v"
            await never.stop()
            await never.wait_stopped()

        asyncio.run(use())

    @pytest.mark.asyncio
    async def test_who_comes_late_or_can_not_receive_is_refused(self, topic: MemoryTopic) -> None:
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
            with pytest.raises(RegistrationError, match="would miss"):
                log.add_receiver(Heard())
            with pytest.raises(RegistrationError, match="would miss"):
                log.table(key=str, value=int)
            with pytest.raises(RegistrationError, match="started before"):
                await log.start()
        with pytest.raises(RegistrationError, match="started before"):
            await log.start()


class TestCaughtUp:
    @pytest.mark.asyncio
    async def test_what_comes_after_the_call_is_not_waited_for(self, topic: MemoryTopic) -> None:
        log, entered, go_on = log_over(topic), threading.Event(), threading.Event()

        @log.add_receiver
        def slow(record: IncomingRecord) -> None:
            if record.key == b"slow":
                entered.set()
                assert go_on.wait(PATIENCE)

        topic.put(b"quick", b"")
        async with log:
            waiting = asyncio.create_task(log.wait_caught_up(PATIENCE))
            assert await waiting
            topic.put(b"slow", b"")
            await until(entered.is_set)
            behind = asyncio.create_task(log.wait_caught_up(PATIENCE))
            with pytest.raises(NotCaughtUp, match=r"rates: .* 0.05 s: \[0\] at 1 of 2"):
                await log.wait_caught_up(0.05)
            assert not behind.done()  # a record that a receiver still has is not received
            go_on.set()
            assert await behind

    @pytest.mark.asyncio
    async def test_open_transactions_get_their_time_and_no_more(
        self, topic: MemoryTopic, caplog: pytest.LogCaptureFixture
    ) -> None:
        topic.put(b"a", b"")
        topic.open_transaction(0, 2)
        log, heard = log_over(topic), Heard()
        log.add_receiver(heard)
        async with log:
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

    @pytest.mark.asyncio
    async def test_holes_empty_partitions_and_aborted_ends(self, topic: MemoryTopic) -> None:
        topic.put(b"a", b"", 0, offset=50)
        topic.pass_over(0, 7)
        log = log_over(topic)
        log.add_receiver(Heard())
        async with log:
            assert await log.wait_caught_up(PATIENCE, settle_seconds=0)
            assert [p.position for p in log.statistics().partitions] == [58, 0]

    @pytest.mark.asyncio
    async def test_a_cluster_that_does_not_answer_is_asked_until_the_deadline(
        self, topic: MemoryTopic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(followed_topic, "QUESTION_SECONDS", 0.01)
        log = log_over(topic)
        log.add_receiver(Heard())
        async with log:
            topic.answers = False
            with pytest.raises(BrokerUnavailable):
                await log.wait_caught_up(0.1)
            waiting = asyncio.create_task(log.wait_caught_up(PATIENCE))
            await asyncio.to_thread(threading.Event().wait, 0.05)
            topic.answers = True
            assert await waiting

    @pytest.mark.asyncio
    async def test_stop_ends_the_waiting_and_nothing_runs_before_and_after(self, topic: MemoryTopic) -> None:
        topic.open_transaction(0)
        log = log_over(topic)
        log.add_receiver(Heard())
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

    @pytest.mark.asyncio
    async def test_who_waits_for_an_answer_hears_of_the_end_at_once(self, topic: MemoryTopic) -> None:
        for fails in (True, False):
            topic.may_answer.set()
            log = log_over(topic)
            log.add_receiver(Heard(refuse=b"bad"))
            await log.start()
            topic.may_answer.clear()
            waiting = asyncio.create_task(log.wait_caught_up(PATIENCE))
            await until(lambda: log._reader._questions and log._reader._questions._asking)  # noqa: B023
            if fails:
                topic.put(b"bad", b"")
            else:
                await log.stop()
            with pytest.raises(RecordError if fails else Stopped):
                await asyncio.wait_for(waiting, PATIENCE / 2)
            topic.logs[0].records.clear()
            await log.stop()
        topic.may_answer.set()

    @pytest.mark.asyncio
    async def test_progress_is_told(
        self, topic: MemoryTopic, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr(log_reader, "WATCH_SECONDS", 0.01)
        log, go_on = log_over(topic), threading.Event()
        log.add_receiver(lambda record: record.key != b"last" or go_on.wait(PATIENCE))
        for n in range(600):
            topic.put(b"%d" % n, b"")
        topic.put(b"last", b"")
        async with log:
            await until(lambda: "offsets to go" in caplog.text)
            go_on.set()
            assert await log.wait_caught_up(PATIENCE)
        assert "rates: caught up: 601 records, 2 partitions" in caplog.text
