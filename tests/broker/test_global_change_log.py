"""Global change logs over a real broker: what caught up means, outages, topics that come and go, a view of stores."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from streams import EventSource, GlobalChangeLog, SourceState
from streams.broker import KafkaBroker
from streams.errors import BrokerUnavailable, DecodeError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.settings import ClientSettings
from streams.runtime.reading import log_reader
from tests.broker.client_kit import PATIENCE, Row, Writer, create, writing
from tests.broker.engine_kit import Lab, until
from tests.vocabulary import TOTALS, Added

pytestmark = [
    pytest.mark.broker, pytest.mark.asyncio, pytest.mark.timeout(300), pytest.mark.usefixtures("no_reader_is_left"),
]  # fmt: skip

PARTITIONS = 3
in_thread = asyncio.to_thread
"""Writers block, and the loop has to stay free."""


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    create(admin, topic_prefix + "rates", PARTITIONS, cleanup_policy="compact")
    return topic_prefix + "rates"


@pytest.fixture
def writer(settings: ClientSettings, topic: str) -> Iterator[Writer]:
    with writing(settings, topic) as writer:
        yield writer


def log_over(settings: ClientSettings, topic: str) -> GlobalChangeLog:
    return GlobalChangeLog(topic, bootstrap_servers=settings.bootstrap_servers)


def write(settings: ClientSettings, topic: str, *records: Row) -> None:
    """By a producer of its own, which knows the partitions that there are now."""
    with writing(settings, topic, "second") as writer:
        writer.commit(*records)


async def test_whatever_was_committed_is_there(settings: ClientSettings, topic: str, writer: Writer) -> None:
    """Again and again, since a commit may be answered before its markers are written."""
    log = log_over(settings, topic)
    table = log.table(key=str, value=str)
    with writing(settings, topic, "other") as other:
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


@pytest.mark.slow
async def test_it_goes_on_after_a_restart_and_stops_quickly_beside_a_frozen_broker(
    broker: KafkaBroker, topic_prefix: str
) -> None:
    topic, settings = topic_prefix + "rates", ClientSettings(broker.bootstrap_servers)
    create(TopicAdmin(settings), topic, PARTITIONS, cleanup_policy="compact")
    with writing(settings, topic) as first:
        first.commit((0, "a", "1"))
    log, heard = log_over(settings, topic), []
    table = log.table(key=str, value=str)
    log.add_receiver(lambda record: heard.append(record.where))
    await log.start()
    assert await log.wait_caught_up(PATIENCE)
    await in_thread(broker.kill)
    with pytest.raises(BrokerUnavailable):
        await log.wait_caught_up(1.0)
    assert table.get("a") == "1"  # what is known may be read
    waiting = asyncio.create_task(log.wait_caught_up(None))
    await in_thread(broker.restart)
    assert await waiting
    await in_thread(write, settings, topic, (0, "b", "2"), (2, "c", "3"))
    assert await log.wait_caught_up(PATIENCE)
    assert dict(table.items()) == {"a": "1", "b": "2", "c": "3"}
    assert len(heard) == 3
    broker.freeze()
    try:
        waiting = asyncio.create_task(log.wait_caught_up(None))
        await until(
            lambda: log._reader._followed_topic is not None and log._reader._followed_topic._requests, "it asks"
        )
        await asyncio.wait_for(log.stop(), log_reader.STOP_SECONDS / 2)
        with contextlib.suppress(Exception):
            await waiting
        assert log.state is SourceState.STOPPED
    finally:
        broker.thaw()


async def test_a_view_that_fails_stops_the_source_that_it_lives_with(
    lab: Lab, settings: ClientSettings, topic: str, writer: Writer
) -> None:
    await lab.create()
    await in_thread(writer.commit, (0, "k", "5"))

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        rates = log_over(settings, topic)
        rates.table(key=str, value=float)
        async with rates:
            await rates.wait_caught_up(PATIENCE)
            yield

    source = EventSource(lab.config(), TOTALS, lifespan=lifespan)
    source.register_event_type(Added, lambda ctx, event: None)
    task = asyncio.create_task(source.consume_events())
    await until(lambda: source.state is SourceState.RUNNING, "it runs")
    await in_thread(writer.commit, (1, "k", "no number"))
    with pytest.raises(DecodeError, match=rf"{topic}\[1\]@0"):
        await asyncio.wait_for(task, PATIENCE)
    assert source.state is SourceState.FAILED
