"""The consumers of logs on a real broker, of input and of changelogs; the rest is in ``unit/test_following.py``."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from streams.errors import OffsetError, TopicError
from streams.kafka.questions.admin import TopicAdmin
from streams.kafka.reading.consumer import LogConsumer
from streams.kafka.reading.fetch_session import FOLLOWING
from streams.kafka.reading.fetching import LogFetcher
from streams.kafka.settings import ClientSettings
from tests.broker.client_kit import Received, Writer, create, numbers, rows, truncate

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]

PARTITIONS = 4
both = pytest.mark.parametrize("role", ["input", "tail"])


@pytest.fixture
def topic(admin: TopicAdmin, topic_prefix: str) -> str:
    create(admin, topic_prefix + "log", PARTITIONS)
    return topic_prefix + "log"


@pytest.fixture
def got(settings: ClientSettings, topic: str, role: str) -> Iterator[Received]:
    is_tail = role == "tail"
    consumer = LogFetcher(settings, topic, FOLLOWING) if is_tail else LogConsumer(settings, topic, ends=False)
    yield Received(consumer)
    consumer.close()


@both
def test_committed_records_only_from_the_offset_on(got: Received, writer: Writer, role: str) -> None:
    writer.commit(*rows(0, "a", "b"))
    writer.abort(*rows(0, "no", "no", "no"))
    writer.commit(*rows(0, "c"))
    got.consumer.add(0, 1)
    got.until(lambda: got.position.get(0) == (9 if role == "tail" else 8))
    assert got.values(0) == ["b", "c"]
    first = got.records[0][0]
    assert (first.offset, first.headers) == (1, (("h", b"x"),))
    assert abs(first.timestamp_ms - time.time() * 1000) < 60_000
    if role == "tail":
        assert (got.end, got.at_end) == ({0: 9}, {0}), "markers count"
    got.poll()
    assert len(got.values(0)) == 2


@both
def test_nothing_is_left_over_of_an_earlier_life(got: Received, writer: Writer) -> None:
    """Removed in the middle of what was prefetched, and added again at other offsets."""
    for partition in range(2):
        writer.commit(*rows(partition, *numbers(0, 3000)))
    got.consumer.add(1, 0)
    for start in (2000, 0, 1500, 700, 0):
        again = Received(got.consumer)
        again.consumer.add(0, start)
        again.until(lambda: len(again.values(0)) >= 300, limit=100)  # noqa: B023
        assert again.values(0) == numbers(start, start + len(again.values(0)))
        again.consumer.remove([0])
        assert 0 not in again.consumer.poll_batch(0.05)


@both
@pytest.mark.parametrize("offset", [3, 1000])
def test_an_offset_that_is_not_in_the_log_ends_its_partition_only(
    got: Received, writer: Writer, settings: ClientSettings, topic: str, offset: int
) -> None:
    writer.commit(*rows(0, *numbers(0, 10)))
    truncate(settings, topic, 0, 5)
    got.consumer.add(0, offset)
    got.consumer.add(1, 0)
    got.until(lambda: got.failures)
    assert set(got.failures) == {0}
    assert isinstance(got.failures[0], OffsetError)
    assert f"{topic}[0]: offset {offset} " in str(got.failures[0])
    writer.commit(*rows(1, "fine"))
    got.until(lambda: got.values(1) == ["fine"])
    got.consumer.add(0, 5)  # it was removed
    got.until(lambda: got.values(0) == numbers(5, 10))


@both
def test_no_such_partition_and_a_deleted_topic(got: Received, writer: Writer, admin: TopicAdmin, topic: str) -> None:
    got.consumer.add_all({9: 0, 0: 0, 1: 0})
    got.until(lambda: got.failures)
    assert set(got.failures) == {9}
    assert f"{topic}[9]" in str(got.failures[9])
    writer.commit(*rows(0, "fine"))
    got.until(lambda: got.values(0) == ["fine"])
    admin.delete([topic])
    got.until(lambda: set(got.failures) == {0, 1, 9})
    assert all(isinstance(error, TopicError) and topic in str(error) for error in got.failures.values())
