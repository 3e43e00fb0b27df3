"""Global change logs over a real broker: what caught up means, outages, topics that come and go, a view of stores."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from confluent_kafka.admin import NewPartitions

from streams import SKIP, EventContext, EventSource, GlobalChangeLog, IncomingRecord, SourceState, Table
from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.errors import BrokerUnavailable, ConfigError, DecodeError, OffsetError, StoreError, TopicError
from streams.runtime.reading import log_reader
from streams.testing.fixtures import BrokerAddress, OwnBroker
from tests.broker.engine_kit import Lab, Running, until
from tests.broker.global_log_kit import PARTITIONS, PATIENCE, Writer, create, in_thread, log_over, threads_end
from tests.vocabulary import TOTALS, Added, Totals

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(300)]


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    create(admin, topic_prefix + "rates")
    return topic_prefix + "rates"


@pytest.fixture
def writer(settings: ClientSettings, topic: str) -> Iterator[Writer]:
    writer = Writer(settings, topic)
    yield writer
    writer.producer.close()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    threads_end()


class TestCaughtUp:
    async def test_whatever_was_committed_is_there(self, settings: ClientSettings, topic: str, writer: Writer) -> None:
        """Again and again, since a commit may be answered before its markers are written."""
        log, other = log_over(settings, topic), Writer(settings, topic, "other")
        table = log.table(key=str, value=str)
        await in_thread(writer.commit, (0, "first", "0"))
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            assert table.get("first") == "0"
            for n in range(40):
                await in_thread(other.abort, (n % 3, "aborted", "x"))
                await in_thread(writer.commit, *((partition, f"key-{partition}", str(n)) for partition in range(2)))
                assert await log.wait_caught_up(PATIENCE)
                assert [table.get(f"key-{partition}") for partition in range(2)] == [str(n)] * 2
            assert "aborted" not in table
            await in_thread(writer.commit, (0, "key-0", None))
            assert await log.wait_caught_up(PATIENCE)
            assert sorted(table.keys()) == ["first", "key-1"]
            assert [p.lag for p in log.statistics().partitions] == [0, 0, 0]
        other.producer.close()

    async def test_an_open_transaction_holds_back_what_stands_behind_it(
        self, settings: ClientSettings, topic: str, writer: Writer
    ) -> None:
        log, other = log_over(settings, topic), Writer(settings, topic, "other")
        table = log.table(key=str, value=str)
        await in_thread(writer.commit, (0, "a", "1"))
        async with log:
            await until(lambda: "a" in table, "it is there")  # a commit may be answered before its marker is written
            await in_thread(other.begin, (0, "b", "open"))
            assert not await log.wait_caught_up(PATIENCE, settle_seconds=0.2)
            assert dict(table.items()) == {"a": "1"}
            await in_thread(writer.commit, (0, "c", "behind"), (1, "d", "elsewhere"))
            assert not await log.wait_caught_up(PATIENCE, settle_seconds=0.2)
            await until(lambda: "d" in table, "another partition goes on")
            assert "c" not in table
            waiting = asyncio.create_task(log.wait_caught_up(PATIENCE, settle_seconds=PATIENCE))
            await in_thread(other.commit)
            assert await waiting
            assert dict(table.items()) == {"a": "1", "b": "open", "c": "behind", "d": "elsewhere"}
        other.producer.close()

    async def test_a_start_behind_cuts_holes_and_an_open_transaction(
        self, settings: ClientSettings, admin: TopicAdmin, topic_prefix: str, kafka_broker: BrokerAddress
    ) -> None:
        """The log begins above 0, ends with aborted records, and one partition is empty because all was deleted."""
        topic = topic_prefix + "cut"
        await in_thread(lambda: create(admin, topic, cleanup_policy="compact,delete"))  # or nothing can be deleted
        writer = await in_thread(Writer, settings, topic)
        lab, log = Lab(kafka_broker.bootstrap_servers, topic), log_over(settings, topic)
        table = log.table(key=str, value=str)
        await in_thread(writer.commit, *((partition, f"k{n}", str(n)) for n in range(20) for partition in range(2)))
        await in_thread(writer.abort, *((0, "no", "no") for _ in range(5)))
        ends = await lab.watermarks(topic)
        while any(mark.stable < mark.end for mark in ends.values()):  # markers may come late
            ends = await lab.watermarks(topic)
        await lab.delete_records(topic, {0: 15, 1: ends[1].end})
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            assert sorted(table.keys()) == [f"k{n}" for n in range(15, 20)]
            assert [p.position for p in log.statistics().partitions] == [ends[n].end for n in range(3)]
        writer.producer.close()

    @pytest.mark.nightly
    async def test_a_compacted_log_has_its_last_values(self, own_broker: OwnBroker, topic_prefix: str) -> None:
        broker = own_broker(properties={"log.cleaner.backoff.ms": "100"}, start_timeout=150.0)
        settings = ClientSettings(broker.bootstrap_servers)
        admin, topic = TopicAdmin(settings), topic_prefix + "log"
        await in_thread(
            lambda: create(admin, topic, 1, min_cleanable_dirty_ratio="0.0", segment_ms="100", delete_retention_ms="0")
        )
        writer = Writer(settings, topic)

        def fill() -> None:
            for n in range(300):
                writer.commit((0, f"k{n % 5}", str(n)), (0, "gone", str(n) if n < 200 else None))

        await in_thread(fill)
        heard: list[IncomingRecord] = []
        deadline = time.monotonic() + PATIENCE
        while True:  # until compaction was seen: it needs rolled segments, so something has to come in
            await in_thread(writer.commit, (0, "tick", str(time.monotonic())))
            log = log_over(settings, topic)
            table = log.table(key=str, value=str)
            heard.clear()
            log.add_receiver(heard.append)
            async with log:
                assert await log.wait_caught_up(PATIENCE)
                found = {key: value for key, value in table.items() if key != "tick"}
                assert found == {f"k{n % 5}": str(n) for n in range(295, 300)}
            if len(heard) < 300:
                break
            assert time.monotonic() < deadline, f"{len(heard)} records: it was never compacted"
        offsets = [record.offset for record in heard]
        assert offsets == sorted(set(offsets))
        writer.producer.close()


class TestReceivers:
    async def test_pausing_and_going_back(self, settings: ClientSettings, topic: str, writer: Writer) -> None:
        log, heard = log_over(settings, topic), list[IncomingRecord]()
        log.add_receiver(heard.append)
        await in_thread(writer.commit, *((0, f"k{n}", str(n)) for n in range(5)))
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            log.pause([0])
            await in_thread(writer.commit, (0, "late", "x"), (1, "other", "x"))
            await until(lambda: len(heard) == 6, "the other partition goes on")
            log.resume()
            assert await log.wait_caught_up(PATIENCE)
            assert [record.key for record in heard[5:]] == [b"other", b"late"]
            log.resume(0, at_offset=3)
            assert await log.wait_caught_up(PATIENCE)
            assert [record.key for record in heard[7:]] == [b"k3", b"k4", b"late"]

    async def test_many_records_and_the_loop_stays_free(
        self, settings: ClientSettings, topic: str, writer: Writer, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)

        def fill() -> None:
            for _ in range(10):
                writer.commit(*((n % 3, f"k{n}", str(n)) for n in range(3000)))

        await in_thread(fill)
        log = log_over(settings, topic)
        tables = [log.table(key=str, value=str, ordered=ordered) for ordered in (True, False)]
        async with log:
            waiting, turns = asyncio.create_task(log.wait_caught_up(PATIENCE)), 0
            while not waiting.done():
                turns += 1
                await asyncio.sleep(0)
            assert await waiting
            assert [len(table) for table in tables] == [3000, 3000]
            assert [key for key, _ in tables[0].range("k10", "k101")] == [
                "k10",
                "k100",
                "k1000",
                *(f"k100{n}" for n in range(1, 10)),
            ]
        assert turns > 100
        assert f"{topic}: caught up: 30000 records, 3 partitions" in caplog.text


class TestOutages:
    @pytest.mark.nightly
    async def test_it_goes_on_after_a_restart_and_says_so_while_nobody_answers(
        self, own_broker: OwnBroker, topic_prefix: str
    ) -> None:
        broker, topic = own_broker(start_timeout=150.0), topic_prefix + "rates"
        settings = ClientSettings(broker.bootstrap_servers)
        create(TopicAdmin(settings), topic)
        writer = Writer(settings, topic)
        writer.commit((0, "a", "1"))
        writer.producer.close()
        log, heard = log_over(settings, topic), []
        table = log.table(key=str, value=str)
        log.add_receiver(lambda record: heard.append(record.where))
        async with log:
            assert await log.wait_caught_up(PATIENCE)
            await in_thread(broker.kill)
            with pytest.raises(BrokerUnavailable):
                await log.wait_caught_up(1.0)
            assert table.get("a") == "1"  # what is known may be read
            waiting = asyncio.create_task(log.wait_caught_up(None))
            await in_thread(broker.restart)
            assert await waiting
            second = await in_thread(Writer, settings, topic, "second")
            await in_thread(second.commit, (0, "b", "2"), (2, "c", "3"))
            assert await log.wait_caught_up(PATIENCE)
            assert dict(table.items()) == {"a": "1", "b": "2", "c": "3"}
            assert len(heard) == 3
            second.producer.close()

    async def test_stop_is_quick_also_while_the_broker_is_frozen(
        self, own_broker: OwnBroker, topic_prefix: str
    ) -> None:
        broker, topic = own_broker(start_timeout=150.0), topic_prefix + "rates"
        settings = ClientSettings(broker.bootstrap_servers)
        create(TopicAdmin(settings), topic)
        log = log_over(settings, topic)
        log.table(key=str, value=str)
        await log.start()
        assert await log.wait_caught_up(PATIENCE)
        broker.freeze()
        try:
            waiting = asyncio.create_task(log.wait_caught_up(None))
            await until(lambda: log._reader._questions is not None and log._reader._questions._asking, "it asks")
            await asyncio.wait_for(log.stop(), log_reader.STOP_SECONDS / 2)
            with contextlib.suppress(Exception):
                await waiting
            assert log.state is SourceState.STOPPED
        finally:
            broker.thaw()


class TestTopics:
    async def test_one_that_comes_later(self, settings: ClientSettings, admin: TopicAdmin, topic_prefix: str) -> None:
        name = topic_prefix + "later"
        impatient = log_over(settings, name, topic_timeout_seconds=0.5)
        impatient.table(key=str, value=str)
        with pytest.raises(TopicError, match=r"later does not exist at .*waited 0\.5 s"):
            await impatient.start()
        log = log_over(settings, name, topic_timeout_seconds=PATIENCE)
        log.table(key=str, value=str)
        starting = asyncio.create_task(log.start())
        await until(lambda: log.state is SourceState.STARTING, "it starts")
        await in_thread(create, admin, name)
        await starting
        assert await log.wait_caught_up(PATIENCE)
        await log.stop()

    @pytest.mark.parametrize("again", [False, True])
    async def test_one_that_is_deleted(
        self, settings: ClientSettings, admin: TopicAdmin, topic: str, writer: Writer, again: bool
    ) -> None:
        """By itself, sooner or later; and at once if somebody asks. One that is made again may have more records than
        the first one: nobody must read on in the middle of it."""
        await in_thread(writer.commit, (0, "a", "1"))
        log = log_over(settings, topic)
        table = log.table(key=str, value=str)

        async def body() -> None:
            async with log:
                assert await log.wait_caught_up(PATIENCE)
                await in_thread(admin.delete, [topic])
                if again:
                    await in_thread(create, admin, topic)
                    second = await in_thread(Writer, settings, topic, "second")
                    await in_thread(second.commit, *((0, f"k{n}", "new") for n in range(10)))
                    second.producer.close()
                await asyncio.wait_for(log.wait_stopped(), PATIENCE)

        with pytest.raises((TopicError, OffsetError) if again else TopicError, match=r"any more|was deleted"):
            await body()
        with pytest.raises(StoreError, match="not kept up to date"):
            table.get("a")

    async def test_new_partitions(
        self, settings: ClientSettings, admin: TopicAdmin, topic: str, writer: Writer
    ) -> None:
        log = log_over(settings, topic)
        table = log.table(key=str, value=str)
        await in_thread(writer.commit, (0, "a", "old"))
        async with log:
            assert await log.wait_caught_up(PATIENCE)

            def grow() -> None:
                for future in admin._client.create_partitions([NewPartitions(topic, PARTITIONS + 2)]).values():
                    future.result(PATIENCE)
                deadline = time.monotonic() + PATIENCE
                while (admin.identity(topic) or ("", 0))[1] < PARTITIONS + 2:
                    assert time.monotonic() < deadline
                second = Writer(settings, topic, "second")
                second.commit((PARTITIONS + 1, "b", "new"), (PARTITIONS, "a", "moved"))
                second.producer.close()

            await in_thread(grow)
            assert await log.wait_caught_up(PATIENCE)
            assert table.get("b") == "new"
            with pytest.raises(StoreError, match="'a' is in partitions 0, 3"):
                table.get("a")

    async def test_a_place_that_retention_took(
        self, settings: ClientSettings, admin: TopicAdmin, topic_prefix: str, kafka_broker: BrokerAddress
    ) -> None:
        topic = topic_prefix + "cut"
        await in_thread(lambda: create(admin, topic, cleanup_policy="compact,delete"))  # or nothing can be deleted
        writer = await in_thread(Writer, settings, topic)
        lab, log = Lab(kafka_broker.bootstrap_servers, topic), log_over(settings, topic)
        log.table(key=str, value=str)
        await in_thread(writer.commit, (0, "a", "1"))

        async def body() -> None:
            async with log:
                assert await log.wait_caught_up(PATIENCE)
                log.pause()
                await in_thread(writer.commit, *((0, f"k{n}", "x") for n in range(10)))
                await lab.delete_records(topic, {0: 8})
                log.resume()
                await asyncio.wait_for(log.wait_stopped(), PATIENCE)

        with pytest.raises(OffsetError, match=rf"{topic}\[0\]: offset 2 is not in the log"):
            await body()
        writer.producer.close()

    async def test_settings_that_librdkafka_refuses(self, settings: ClientSettings, topic: str) -> None:
        secret = "hunter" + "2"
        log = log_over(settings, topic, client_settings={"sasl.password": secret, "no.such.setting": "1"})
        log.table(key=str, value=str)
        with pytest.raises(ConfigError, match=r"no\.such\.setting") as caught:
            await log.start()
        assert secret not in str(caught.value) + repr(log)


class TestStores:
    async def test_it_is_a_live_view_of_an_event_sources_stores(
        self, kafka_broker: BrokerAddress, topic_prefix: str
    ) -> None:
        """Through its changelog, with the toolkit's own records in it; a failed event leaves no trace here either."""
        lab = Lab(kafka_broker.bootstrap_servers, topic_prefix, partitions=2)
        await lab.create()
        source = EventSource(lab.config(), TOTALS)

        @source.register_event_type(Added, on_error=SKIP)
        def handle(ctx: EventContext[Totals], event: Added) -> None:
            ctx.store.put(event.name, ctx.store.get(event.name, 0) + event.amount)
            if event.deed == "raise":
                raise ValueError("after the write")
            if event.deed == "delete":
                ctx.store.delete(event.name)

        def view() -> tuple[GlobalChangeLog, Any, list[bytes | None]]:
            log, keys = GlobalChangeLog.of(source.config), list[bytes | None]()
            log.add_receiver(lambda record: keys.append(record.key))
            return log, log.table(key=str, value=int, ordered=True), keys

        async with Running(source) as run:
            await lab.add("a", "b", partition=0)
            await lab.add("a", "c", partition=1)
            log, table, keys = view()
            async with log:
                await run.until_handled(2, 2)
                assert await log.wait_caught_up(PATIENCE)
                assert dict(table.of_partition(0).items()) == {"a": 1, "b": 1}
                assert dict(table.of_partition(1).items()) == {"a": 1, "c": 1}
                assert table.get("c") == 1
                with pytest.raises(StoreError, match="'a' is in partitions 0, 1"):
                    table.get("a")
                await lab.add("b", amount=9, partition=0)
                await lab.add("b", deed="raise", amount=1000, partition=0)
                await lab.add("c", deed="delete", partition=1)
                await run.until_handled(4, 3)
                assert await log.wait_caught_up(PATIENCE)
                for number in range(2):
                    assert dict(table.of_partition(number).items()) == await lab.counts(number)
                assert (table.get("b"), table.get("c")) == (10, None)
                reserved = [r.key for r in await lab.records(lab.changelog) if (r.key or b"").startswith(b"\xff\xff")]
                assert reserved
                assert all(key is not None and key.isalpha() for key in keys)
        await run.task
        again, table, keys = view()
        async with again:  # with the release of the stopped member at the end
            assert await again.wait_caught_up(PATIENCE)
            for number in range(2):
                assert dict(table.of_partition(number).items()) == await lab.counts(number)

    async def test_a_handler_reads_it(self, kafka_broker: BrokerAddress, topic_prefix: str) -> None:
        """On the event loop, with a plain handler and on the thread of a blocking one."""
        lab = Lab(kafka_broker.bootstrap_servers, topic_prefix)
        await lab.create()
        admin, rates_topic = TopicAdmin(lab.settings), topic_prefix + "rates"
        await in_thread(create, admin, rates_topic)
        writer = await in_thread(Writer, lab.settings, rates_topic)
        await in_thread(writer.commit, (0, "k", "5"))
        rates = log_over(lab.settings, rates_topic)
        table = rates.table(key=str, value=str)
        source: EventSource[Table[str, int]] = EventSource(lab.config(), TOTALS)

        @source.register_event_type(Added, blocking=True)
        def handle(ctx: EventContext[Totals], event: Added) -> None:
            ctx.store.put(event.name, event.amount * int(table.get("k") or 0))

        async with rates:
            await rates.wait_caught_up(PATIENCE)
            async with Running(source) as run:
                await lab.add("a", amount=2)
                await run.until_handled(1)
                await in_thread(writer.commit, (0, "k", "7"))
                assert await rates.wait_caught_up(PATIENCE)
                await lab.add("b", amount=2)
                await run.until_handled(2)
        assert await lab.counts() == {"a": 10, "b": 14}
        writer.producer.close()

    async def test_a_view_that_fails_stops_the_source_that_it_lives_with(
        self, kafka_broker: BrokerAddress, topic_prefix: str
    ) -> None:
        lab, rates_topic = Lab(kafka_broker.bootstrap_servers, topic_prefix), topic_prefix + "rates"
        await lab.create()
        await in_thread(create, TopicAdmin(lab.settings), rates_topic)
        writer = await in_thread(Writer, lab.settings, rates_topic)
        await in_thread(writer.commit, (0, "k", "5"))

        @asynccontextmanager
        async def lifespan() -> AsyncIterator[None]:
            rates = log_over(lab.settings, rates_topic)
            rates.table(key=str, value=float)
            async with rates:
                await rates.wait_caught_up(PATIENCE)
                yield

        source = EventSource(lab.config(), TOTALS, lifespan=lifespan)
        source.register_event_type(Added, lambda ctx, event: None)
        task = asyncio.create_task(source.consume_events())
        await until(lambda: source.state is SourceState.RUNNING, "it runs")
        await in_thread(writer.commit, (1, "k", "no number"))
        with pytest.raises(DecodeError, match=rf"{rates_topic}\[1\]@0"):
            await asyncio.wait_for(task, PATIENCE)
        assert source.state is SourceState.FAILED
        writer.producer.close()
