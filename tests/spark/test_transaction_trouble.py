"""A sink's transaction where something beside it is in the way: a slow store, nine others, an older broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import KafkaError

from streams.errors import BrokerUnavailable, ConfigError
from streams.kafka.wire import messages
from streams.kafka.writing import session
from streams.kafka.writing.made_batch import MadeBatch
from streams.spark.writing.sink_transaction import write_once
from tests.spark.conftest import MakeTopic
from tests.spark.log_kit import Log
from tests.spark.test_transaction import Topic, of_sink, values

pytestmark = [pytest.mark.spark, pytest.mark.broker, pytest.mark.timeout(120)]


@pytest.fixture
def topic(log: Log, make_topic: MakeTopic) -> Topic:
    return Topic(log, make_topic(partitions=2))


@pytest.mark.parametrize(
    ("seconds", "limit"), [(3.0, "2000"), pytest.param(10.0, None, marks=pytest.mark.nightly, id="10")]
)
def test_a_store_that_is_slow_to_read(topic: Topic, seconds: float, limit: str | None) -> None:
    """In the open transaction, which the first batch begins when there is a second one. It may take as long as that
    lasts."""
    parts = [topic.made({"value": [value], "partition": [0]})[0][0] for value in (b"a", b"b", b"c")]

    def slowly() -> Iterator[MadeBatch]:
        yield from parts[:2]
        time.sleep(seconds)
        yield parts[2]

    if limit is None:
        assert write_once(topic.target, topic.ask(0, 3), slowly, size=0)[1]
    else:
        topic.target.kafka["transaction.timeout.ms"] = limit
        with pytest.raises(BrokerUnavailable, match=r"its time was over before.*stagingDir slow.*timeout\.ms"):
            write_once(topic.target, topic.ask(0, 3), slowly, size=0)
        assert topic.write(0, {"value": [b"a", b"b", b"c"], "partition": [0, 0, 0]})
    assert values(topic.records()) == [b"a", b"b", b"c"]


def test_ten_sinks_at_once_into_one_topic(log: Log, make_topic: MakeTopic) -> None:
    name = make_topic(partitions=3)
    sinks = [of_sink(Topic(log, name), f"sink-{number}") for number in range(10)]

    def run(sink: Topic) -> list[bool]:
        own = sink.target.identity.encode()
        return [sink.write(batch, {"value": [b"%s %d" % (own, batch)] * 2}) for batch in (0, 1, 1, 2)]

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(run, sinks)) == [[True, True, False, True]] * 10
    due = [b"%s %d" % (sink.target.identity.encode(), batch) for sink in sinks for batch in range(3)]
    assert values(sinks[0].records()) == sorted(due * 2)


def test_a_compression_that_the_broker_refuses(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a broker before 2.1 refuses zstd, and some that are no Kafka refuse all but gzip."""
    code = KafkaError.UNSUPPORTED_COMPRESSION_TYPE
    asked = []

    def refused(
        frame: bytes, places: list[messages.WirePartition], bases: dict[messages.WirePartition, int]
    ) -> dict[messages.WirePartition, messages.PartitionError]:
        asked.append(places)
        return {place: messages.PartitionError(code, "", ()) for place in places}

    with monkeypatch.context() as patch:
        patch.setattr(session.messages, "refused", refused)
        with pytest.raises(ConfigError, match=r"refuses batches of this compression .*kafka\.compression\.type"):
            topic.write(0, {"value": [b"a"]})
    assert len(asked) == 1, "it is not tried again"
    topic.target.kafka["compression.type"] = "gzip"
    assert topic.write(0, {"value": [b"a"]})
    assert values(topic.records()) == [b"a"]
