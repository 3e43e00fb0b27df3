"""Global change logs over a real broker: outages, and topics that come, go and change."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import NewPartitions

from streams import GlobalChangeLog, SourceState
from streams.clients.admin import TopicAdmin
from streams.clients.settings import ClientSettings
from streams.errors import BrokerUnavailable, ConfigError, OffsetError, StoreError, TopicError
from streams.runtime import log_reader
from streams.testing.fixtures import BrokerAddress, OwnBroker
from tests.broker.engine_kit import Lab, until
from tests.broker.global_log_kit import PARTITIONS, PATIENCE, Writer, create, in_thread, log_over, threads_end

pytestmark = [pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(300)]


@pytest.fixture
def settings(kafka_broker: BrokerAddress) -> ClientSettings:
    return ClientSettings(kafka_broker.bootstrap_servers)


@pytest.fixture
def admin(settings: ClientSettings) -> TopicAdmin:
    return TopicAdmin(settings)


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


class TestOutages:
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

    async def test_nobody_at_the_address(self) -> None:
        log = GlobalChangeLog("rates", bootstrap_servers="127.0.0.1:1", topic_timeout_seconds=1.0)
        log.table(key=str, value=str)
        with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"):
            await log.start()


class TestTopics:
    async def test_one_that_is_missing(self, settings: ClientSettings, topic_prefix: str) -> None:
        log = log_over(settings, topic_prefix + "none", topic_timeout_seconds=0.5)
        log.table(key=str, value=str)
        with pytest.raises(TopicError, match=r"none does not exist at .*waited 0\.5 s"):
            await log.start()

    async def test_one_that_comes_later(self, settings: ClientSettings, admin: TopicAdmin, topic_prefix: str) -> None:
        log = log_over(settings, topic_prefix + "later", topic_timeout_seconds=PATIENCE)
        log.table(key=str, value=str)
        starting = asyncio.create_task(log.start())
        await until(lambda: log.state is SourceState.STARTING, "it starts")
        await in_thread(create, admin, topic_prefix + "later")
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

    async def test_one_that_was_made_again_is_seen_by_who_waits(
        self, settings: ClientSettings, admin: TopicAdmin, topic: str, writer: Writer
    ) -> None:
        await in_thread(writer.commit, (0, "a", "1"))
        log = log_over(settings, topic)
        log.table(key=str, value=str)

        async def body() -> None:
            async with log:
                assert await log.wait_caught_up(PATIENCE)
                await in_thread(admin.delete, [topic])
                await in_thread(create, admin, topic)
                await log.wait_caught_up(PATIENCE)

        with pytest.raises((OffsetError, TopicError), match=r"made again|does not exist any more"):
            await body()

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
